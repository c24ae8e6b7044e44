/* The side channel: AF_UNIX SEQPACKET, for what ZeroMQ cannot do: pass file descriptors, prove
 * who the peer is, and show its death at once (the socket hangs up).
 *
 * Fixed little structs, no protobuf: at most one descriptor per message. The first message is the
 * daemon's: SIDE_WELCOME with the session token that admits the ZeroMQ session. After that the
 * client sends SIDE_CLAIM{ticket} and gets SIDE_SEGMENT{ticket, kind, bytes} + fd, or SIDE_ERROR. A
 * SIDE_SEGMENT of its own, of a spec, has no answer: the request that names its ticket has.
 *
 * SIDE_WAKE, from either side, where both have a pair of rings (ring.h): it has something for who
 * sleeps. The socket of an eventfd's use: whoever has the other end of an eventfd can have a write
 * to it wait, of this one nobody can.
 */
#ifndef SHD_FDPASS_H
#define SHD_FDPASS_H

#include <stdint.h>
#include <sys/types.h>

#include "proto/base/status.h"

#define SHD_PROTOCOL    2u /* version of side channel and messages; must match exactly */
#define SHD_TOKEN_BYTES 16u

enum side_type {
    SIDE_WELCOME = 1,
    SIDE_CLAIM = 2,
    SIDE_SEGMENT = 3,
    SIDE_ERROR = 4,
    SIDE_WAKE = 5
};

struct side_msg {
    uint32_t magic;    /* SIDE_MAGIC */
    uint32_t protocol; /* SHD_PROTOCOL */
    uint32_t type;     /* enum side_type */
    int32_t status;    /* SIDE_ERROR: enum shd_status */
    uint64_t ticket; /* SIDE_WELCOME: the daemon's feature level (proto/wire/wire.h); 0: not said */
    uint64_t bytes;  /* SIDE_SEGMENT: size of the segment; SIDE_WELCOME: of pages */
    uint32_t kind;   /* enum segment_kind: SIDE_SEGMENT: its own; SIDE_WELCOME: what a
                      * client may pass; 0: nothing, the daemon is older */
    uint32_t reserved;              /* 0 */
    uint8_t token[SHD_TOKEN_BYTES]; /* SIDE_WELCOME */
    char text[128];                 /* SIDE_ERROR, SIDE_WELCOME (version): terminated */
};
#define SIDE_MAGIC UINT32_C(0x53444853) /* "SHDS" */

/* The daemon's first message: its version and feature level, and the sizes of what both sides map
 * as structs of their own build (the board, the activity page). */
struct side_msg side_welcome(const uint8_t token[SHD_TOKEN_BYTES], uint32_t level);

/* Client: check that both builds have the same structs. SHD_EPROTO names sizes and versions. A
 * daemon that does not say (0) passes: sizes are checked again when segments are mapped. */
int side_welcome_check(const struct side_msg *msg, struct shd_err *e);

/* Listen at path (DIR/NAME.SUFFIX): refuses a live one (SHD_EEXIST), replaces a stale one (nobody
 * answers) in one step, mode 0660. Non-blocking. At most one caller at a time for one path. Errors:
 * SHD_EINVAL path too long (names the limit) or without a suffix, SHD_EIO. */
int side_listen(const char *path, int *ret_fd, struct shd_err *e);

/* Connect, without waiting; the socket does not block. SHD_ENOENT: no such socket, SHD_EGONE:
 * nobody listens, SHD_EAUTH; SHD_ETIMEDOUT: the listener accepts nothing (its backlog is full). */
int side_connect(const char *path, int *ret_fd, struct shd_err *e);

struct side_peer {
    pid_t pid;
    uid_t uid;
    gid_t gid;
};

/* The process at the other end (SO_PEERCRED). */
int side_peer(int fd, struct side_peer *ret_peer, struct shd_err *e);

/* A descriptor that becomes readable when the process at the other end ends, whoever else has its
 * side of the socket; -1: the kernel has none to give. */
int side_pidfd(int fd, pid_t pid);

/* Refuse a peer that is neither of our uid nor root: SHD_EAUTH naming both. `what` says which
 * side the peer is ("client", "daemon"). The rule of either side, proto/share/admit.h, is wider. */
int side_peer_allowed(const struct side_peer *peer, const char *what, struct shd_err *e);

/* Send one message, with fd if >= 0 (not taken); fills in magic and protocol. Never blocks longer
 * than the socket's own buffer: SHD_EBUSY when it is full, or too many
 * descriptors of this user are on their way; SHD_EGONE when the peer left. */
int side_send(int fd, const struct side_msg *msg, int pass_fd, struct shd_err *e);

/* Receive one message within timeout_ms (-1: as the socket blocks; 0: only look) and the fd that
 * came with it (-1: none; else the caller's, CLOEXEC). Surplus descriptors are closed, all of them
 * on an error or when ret_fd is NULL; a SIDE_SEGMENT without one is an error. Checks
 * size, magic, protocol (SHD_EPROTO naming both versions), type and text termination.
 * SHD_EGONE: hung up; SHD_ETIMEDOUT. */
int side_recv(int fd, int timeout_ms, struct side_msg *ret_msg, int *ret_fd, struct shd_err *e);

#endif
