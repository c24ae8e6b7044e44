/* Bytes between two hosts' relays: own frames on TCP under TLS 1.3, straight from and into memory
 * that others have mapped. Large payloads may go beside it (bulk_path.h), as the cluster file says.
 *
 * Happy path: one side dials, the other accepts; each proves that it has the private key that
 * stands beside a name in the cluster file (no authority signs: the certificate is a wrapping that
 * TLS wants, and its key is all that counts). Then frames go both ways. A frame is a head of 32
 * bytes and its payload, which is received to where the receiver's hook says once it has seen the
 * head: a gradient goes into the daemon's inbox and nowhere before.
 *
 * Failure: whatever the matter is, the connection ends, and with it all that it stood for; nothing
 * is repeated here. A transfer of which no byte moves for BULK_STALL_NS has failed, and so has a
 * peer of whom nothing was heard for as long (bulk_tick() sends a frame now and then): a process
 * that is stopped answers by its kernel. TCP_USER_TIMEOUT ends what a dead path holds.
 *
 * A bulk belongs to one thread. While bulk_send() waits for room it receives, so that two that
 * send to each other never wait for each other: hooks must not send. */
#ifndef SHD_RELAY_BULK_H
#define SHD_RELAY_BULK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/clock.h"
#include "proto/share/cluster.h"

#define BULK_STALL_NS          (15 * NS_PER_S)
#define BULK_HEAD_BYTES        32u
#define BULK_PAYLOAD_BYTES_MAX (UINT64_C(1) << 40)

/* Little-endian on the wire; the place of each member is in bulk_head.c. */
struct bulk_head {
    uint32_t type;  /* the owner's (relay.h), > 0 */
    uint32_t index; /* the owner's */
    uint64_t id;    /* the owner's: of a segment, a version */
    uint64_t at;    /* the owner's: bytes into it */
    uint64_t bytes; /* of the payload */
};

struct bulk_count { /* bytes */
    _Atomic uint64_t in, out;
};

struct bulk_hooks {
    /* A head came: where does its payload go? Called also where there is none. Untrusted but for
     * bytes <= BULK_PAYLOAD_BYTES_MAX. An error ends the connection. */
    int (*place)(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e);
    /* The payload is there. */
    int (*done)(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e);
    void *ctx; /* borrowed */
};

struct bulk_keys; /* a host's own key, and where the others' are: read anew for each connection, so
                   * that who was taken out of the file makes none any more. Any thread */

/* path: of the cluster file; name: of this host, whose key file is beside it. Errors as of
 * cluster.h, SHD_EAUTH the private key is not the one of that name, SHD_EINTERNAL. */
int bulk_keys_new(const char *path, const char *name, struct bulk_keys **ret_keys,
                  struct shd_err *e);
void bulk_keys_free(struct bulk_keys *keys); /* NULL is a no-op */

/* The address that the cluster file has beside this host's own name. */
const char *bulk_keys_address(const struct bulk_keys *keys);

/* How payloads cross, for people: "tcp, by TLS 1.3", "ucx, not encrypted". */
const char *bulk_keys_way(const struct bulk_keys *keys);

struct bulk;

/* Connect to host `name` and to nobody else, within timeout_ns. Errors: SHD_ENOENT no such host,
 * SHD_EGONE nobody there, SHD_ETIMEDOUT, SHD_EAUTH it has another key, or ours is none of its
 * cluster; SHD_EIO, SHD_ENOMEM. */
int bulk_dial(const struct bulk_keys *keys, const char *name, uint64_t timeout_ns,
              struct bulk **ret_bulk, struct shd_err *e);

/* Take over an accepted TCP socket (closed on an error as well), within timeout_ns. Errors:
 * SHD_EAUTH it has no key of the cluster; SHD_EPROTO it speaks something else; as above. */
int bulk_accept(const struct bulk_keys *keys, int fd, uint64_t timeout_ns, struct bulk **ret_bulk,
                struct shd_err *e);
/* Payloads come to an end: no memory that a hook has given is read or written any more. Before that
 * memory goes; NULL is a no-op. Frames are neither sent nor received behind it. */
void bulk_end(struct bulk *bulk);
void bulk_close(struct bulk *bulk); /* ends it, too; NULL is a no-op */

/* The name of the host at the other end: proven. */
const char *bulk_peer(const struct bulk *bulk);

/* Whom to tell of frames, from now on. */
void bulk_set_hooks(struct bulk *bulk, const struct bulk_hooks *hooks);

/* Add to it (borrowed; NULL: nowhere) what frames come to from now on, their heads included,
 * without what TLS adds. */
void bulk_set_count(struct bulk *bulk, struct bulk_count *count);

/* Send a frame, whose payload (borrowed until the return) may change meanwhile. Errors: SHD_EGONE,
 * SHD_ETIMEDOUT, SHD_EIO, or what a hook has said. */
int bulk_send(struct bulk *bulk, const struct bulk_head *head, const void *payload,
              struct shd_err *e);

/* Receive what is there, at most some frames, and for a second: where it comes as quickly as it is
 * received, the caller has to come to bulk_tick(). Never waits. SHD_PENDING: there may be more at
 * once, perhaps of a frame, which poll() would not show. */
int bulk_receive(struct bulk *bulk, struct shd_err *e);

/* For poll(). */
int bulk_fd(const struct bulk *bulk);

/* To be called every second or so: show the peer that we are there, and look whether it is. Errors
 * as of bulk_send(), SHD_ETIMEDOUT. */
int bulk_tick(struct bulk *bulk, struct shd_err *e);

/* Bytes of payload that were sent and received. */
uint64_t bulk_bytes(const struct bulk *bulk);

#endif
