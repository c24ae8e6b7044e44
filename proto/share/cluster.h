/* Which hosts may talk to each other, and by which keys: CLUSTER.json, which every host has and
 * which is no secret, and HOST.key beside it, which that host alone has.
 *
 *   {"hosts": [{"name": "a", "address": "10.77.0.1:7100", "key": "<64 hex digits>",
 *               "devices": ["cpu0", "cpu1"]}, ...],
 *    "bulk": "ucx", "encrypted": false}
 *
 * devices are those of the daemons that the host has, each no other host's; it may be left out.
 * bulk is how payloads cross (daemon/relay/bulk.h): "tcp", also where it is left out, or "ucx",
 * which is taken only together with "encrypted": false.
 * A key is Ed25519; the private half is PEM (PKCS#8) in a file of mode 0600. Nobody signs anything:
 * a host is who has the private half of the key that stands beside its name (daemon/relay/bulk.h).
 * Not for an event loop: files are read in turn. Any thread. */
#ifndef SHD_CLUSTER_H
#define SHD_CLUSTER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#define CLUSTER_HOSTS_MAX     1024u
#define CLUSTER_NAME_BYTES    64u
#define CLUSTER_ADDRESS_BYTES 128u
#define CLUSTER_KEY_BYTES     32u
#define CLUSTER_DEVICE_BYTES  16u  /* of a name, with NUL */
#define CLUSTER_DEVICES_BYTES 512u /* of a host's, "cpu0,cpu1" */
#define CLUSTER_FILE_MAX      (UINT64_C(1) << 20)
/* What a relay takes: `shardctl plan --hosts` says where that is not enough. */
#define CLUSTER_RELAY_DEVICES_MAX     1024u /* in other hosts' stead: as many owners as a model has */
#define CLUSTER_RELAY_CONNECTIONS_MAX 4096u /* a thread each */

struct cluster_host {
    char name[CLUSTER_NAME_BYTES];       /* letters, digits, '-', '_', '.'; no '.' in front */
    char address[CLUSTER_ADDRESS_BYTES]; /* HOST:PORT of its relay */
    uint8_t key[CLUSTER_KEY_BYTES];      /* the public half */
    char devices[CLUSTER_DEVICES_BYTES]; /* "cpu0,cpu1"; "": none is named */
};

enum cluster_bulk { CLUSTER_TCP, CLUSTER_UCX };
/* How a relay's /status says it. */
#define CLUSTER_TCP_SAID "tcp, by TLS 1.3"
#define CLUSTER_UCX_SAID "ucx, not encrypted"

struct cluster {
    struct cluster_host *hosts; /* owned, [count], names, keys and devices unique */
    uint32_t count;
    enum cluster_bulk bulk;
};

/* An empty one is { 0 }; free leaves it so. */
void cluster_free(struct cluster *cluster);

/* Errors: SHD_ENOENT no file, SHD_EINVAL and SHD_ERANGE with the member, SHD_ENOMEM, SHD_EIO. */
int cluster_load(const char *path, struct cluster *ret_cluster, struct shd_err *e);

/* Replace the file whole. Errors: SHD_ENOMEM, SHD_EIO. */
int cluster_save(const char *path, const struct cluster *cluster, struct shd_err *e);

/* NULL: there is none. */
const struct cluster_host *cluster_by_name(const struct cluster *cluster, const char *name);
const struct cluster_host *cluster_by_key(const struct cluster *cluster,
                                          const uint8_t key[CLUSTER_KEY_BYTES]);

/* The next name in a list of devices, from *list on, which is moved behind it; false: there is
 * none. One that is too long for a device's name is cut off. */
bool cluster_next_device(const char **list, char ret_device[CLUSTER_DEVICE_BYTES]);

/* A list has this device. */
bool cluster_has_device(const char *list, const char *device);

/* Whether a list is one: names of small letters and digits, none twice. SHD_EINVAL names it. */
int cluster_check_devices(const char *list, struct shd_err *e);

/* The host that has it; NULL: none. */
const struct cluster_host *cluster_by_device(const struct cluster *cluster, const char *device);

/* Add a host, whose name, key and devices must be no other's. Errors: SHD_EINVAL, SHD_EEXIST,
 * SHD_ERANGE, SHD_ENOMEM. */
int cluster_add(struct cluster *cluster, const struct cluster_host *host, struct shd_err *e);

/* A host is at another address; its key and devices stay. Errors: SHD_ENOENT, SHD_EINVAL. */
int cluster_move(struct cluster *cluster, const char *name, const char *address, struct shd_err *e);

/* Errors: SHD_ENOENT. */
int cluster_remove(struct cluster *cluster, const char *name, struct shd_err *e);

/* Make a key pair; the private half goes to a new file at path, of mode 0600. Errors: SHD_EEXIST it
 * is there already, SHD_EIO, SHD_EINTERNAL. */
int cluster_key_new(const char *path, uint8_t ret_key[CLUSTER_KEY_BYTES], struct shd_err *e);

/* The private half, as OpenSSL's EVP_PKEY: the caller's to EVP_PKEY_free(). Errors: SHD_ENOENT,
 * SHD_EAUTH others than its owner may read it or it is another user's, SHD_EINVAL, SHD_EIO. */
struct evp_pkey_st;
int cluster_key_load(const char *path, struct evp_pkey_st **ret_key, struct shd_err *e);

/* Its public half. Errors: SHD_EINVAL it is no Ed25519 key. */
int cluster_key_public(const struct evp_pkey_st *key, uint8_t ret_key[CLUSTER_KEY_BYTES],
                       struct shd_err *e);

/* "DIR/NAME.key" for the cluster file DIR/X.json. Errors: SHD_ERANGE too long. */
int cluster_key_path(const char *cluster_path, const char *name, char *ret_path, uint64_t bytes,
                     struct shd_err *e);

#endif
