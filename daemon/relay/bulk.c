/* See bulk.h. */
#include "daemon/relay/bulk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "daemon/relay/bulk_head.h"
#include "daemon/relay/bulk_path.h"
#include "daemon/relay/bulk_ucx.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/listen.h"

#define SMALL_BYTES    8192u /* of a payload that shares a record with its head */
#define PING_NS        (2 * NS_PER_S)
#define FRAMES_A_TURN  64u
#define TURN_NS        NS_PER_S /* far below what makes a peer that only receives look dead */
#define POLL_MS        200
#define USER_TIMEOUT_S 10
#define PIECE_BYTES    (1u << 20) /* of one call to OpenSSL, whose sizes are ints */

struct bulk_keys {
    SSL_CTX *tls;                /* owned */
    char *path;                  /* owned: of the cluster file */
    const struct bulk_path *way; /* of payloads: the cluster file's as it was when they were made */
    char address[CLUSTER_ADDRESS_BYTES];
    uint8_t own[CLUSTER_KEY_BYTES];
};

struct bulk {
    int fd;   /* owned */
    SSL *tls; /* owned */
    const struct bulk_keys *keys;
    const struct bulk_path *path; /* of payloads that do not go with their head */
    void *end;                    /* of the path, owned; NULL: it is within TLS, or has failed */
    int poll_fd;                  /* owned: of both, fd and the end's; -1: there is fd alone */
    uint32_t watched;             /* events of fd that poll_fd shows */
    struct cluster cluster;       /* owned: as it was when the connection was made */
    const char *wanted;           /* borrowed, while dialing: nobody but this host. NULL: any */
    char peer[CLUSTER_NAME_BYTES];
    struct bulk_hooks hooks;
    uint8_t head_in[BULK_HEAD_BYTES];
    struct bulk_head head;
    uint64_t head_got, got; /* bytes of the head, of the payload */
    uint8_t *to;            /* borrowed from the hook */
    uint64_t heard_ns, sent_ns, bytes;
    struct bulk_count *count; /* borrowed; NULL: none */
    struct shd_err failed;    /* code not 0: what ended it */
};

/* -- The path within TLS ----------------------------------------------------------------------- */

static int tls_failed(int code, struct shd_err *e, const char *what)
{
    const unsigned long why = ERR_peek_error();
    const char *text = why != 0 ? ERR_reason_error_string(why) : NULL;
    return err_set(e, code, "%s: %s", what, text != NULL ? text : "no reason given");
}

/* What OpenSSL's answer n means: SHD_PENDING it wants to wait. */
static int explain(const struct bulk *bulk, int n, struct shd_err *e)
{
    const int saved = errno;
    const int why = SSL_get_error(bulk->tls, n);
    if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE)
        return SHD_PENDING;
    if (why == SSL_ERROR_ZERO_RETURN || (why == SSL_ERROR_SYSCALL && saved == 0) ||
        ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING)
        return err_set(e, SHD_EGONE, "host %s hung up", bulk->peer);
    if (why == SSL_ERROR_SYSCALL)
        return err_set(e, saved == ETIMEDOUT ? SHD_ETIMEDOUT : SHD_EGONE, "host %s: %s", bulk->peer,
                       strerror(saved));
    return tls_failed(SHD_EGONE, e, "TLS");
}

static int tls_receive(void *end, uint8_t *to, uint64_t bytes, uint64_t *ret_done,
                       struct shd_err *e)
{
    struct bulk *bulk = end;
    ERR_clear_error();
    errno = 0;
    const int n = SSL_read(bulk->tls, to, bytes < PIECE_BYTES ? (int)bytes : (int)PIECE_BYTES);
    if (n <= 0)
        return explain(bulk, n, e);
    *ret_done = (uint64_t)n;
    return SHD_OK;
}

static int tls_send(void *end, const uint8_t *data, uint64_t bytes, uint64_t *ret_done,
                    struct shd_err *e)
{
    struct bulk *bulk = end;
    ERR_clear_error();
    errno = 0;
    const int n = SSL_write(bulk->tls, data, bytes < PIECE_BYTES ? (int)bytes : (int)PIECE_BYTES);
    if (n <= 0)
        return explain(bulk, n, e);
    *ret_done = (uint64_t)n;
    return SHD_OK;
}

/* The end of this path is the bulk itself. */
static const struct bulk_path tls_path = {
    .name = "tcp", .said = CLUSTER_TCP_SAID, .send = tls_send, .receive = tls_receive
};

/* -- Keys -------------------------------------------------------------------------------------- */

/* Whose certificate is it? Only its key is looked at: the handshake proves that the peer has the
 * private half. */
static int verify(X509_STORE_CTX *store, void *unused)
{
    const SSL *tls = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct bulk *bulk = SSL_get_app_data(tls);
    X509 *certificate = X509_STORE_CTX_get0_cert(store);
    uint8_t key[CLUSTER_KEY_BYTES];
    (void)unused;
    const EVP_PKEY *public = certificate != NULL ? X509_get0_pubkey(certificate) : NULL;
    if (public == NULL || cluster_key_public(public, key, &bulk->failed) != SHD_OK) {
        err_set(&bulk->failed, SHD_EAUTH, "its certificate has no Ed25519 key");
        return 0;
    }
    const struct cluster_host *host = cluster_by_key(&bulk->cluster, key);
    if (host == NULL)
        err_set(&bulk->failed, SHD_EAUTH, "its key is no host's of this cluster");
    else if (bulk->wanted != NULL && strcmp(host->name, bulk->wanted) != 0)
        err_set(&bulk->failed, SHD_EAUTH, "it has the key of host '%s', not of '%s'", host->name,
                bulk->wanted);
    else
        snprintf(bulk->peer, sizeof bulk->peer, "%s", host->name);
    return bulk->failed.code == SHD_OK;
}

#define WAY_BYTES 32u

/* A name of TLS's application protocols, with its length in front; for hosts to see that both have
 * the same way. Relays of before it was told say none, and have "tcp". */
static unsigned wire_way(const struct bulk_path *way, uint8_t wire[WAY_BYTES])
{
    const int n = snprintf((char *)wire + 1, WAY_BYTES - 1, "shardd-%s", way->name);
    wire[0] = (uint8_t)n;
    return (unsigned)n + 1;
}

static int other_way(const struct bulk_path *way, struct shd_err *e)
{
    return err_set(
        e, SHD_EPROTO,
        "its cluster file has another bulk than this host's, \"%s\": write the same into "
        "the files of all hosts, and start their relays again",
        way->name);
}

static int choose_way(SSL *tls, const uint8_t **ret_name, uint8_t *ret_bytes,
                      const uint8_t *offered, unsigned bytes, void *arg)
{
    const struct bulk_keys *keys = arg;
    struct bulk *bulk = SSL_get_app_data(tls);
    uint8_t own[WAY_BYTES];
    const unsigned own_bytes = wire_way(keys->way, own);
    if (bytes == own_bytes && memcmp(offered, own, own_bytes) == 0) {
        *ret_name = offered + 1;
        *ret_bytes = offered[0];
        return SSL_TLSEXT_ERR_OK;
    }
    other_way(keys->way, &bulk->failed);
    return SSL_TLSEXT_ERR_ALERT_FATAL;
}

static X509 *wrap_key(EVP_PKEY *key, const char *name)
{
    X509 *x = X509_new();
    X509_NAME *subject = x != NULL ? X509_get_subject_name(x) : NULL;
    if (subject != NULL && X509_set_version(x, X509_VERSION_3) == 1 &&
        ASN1_INTEGER_set(X509_get_serialNumber(x), 1) == 1 &&
        X509_gmtime_adj(X509_getm_notBefore(x), -86400) != NULL &&
        X509_gmtime_adj(X509_getm_notAfter(x), 86400L * 36500) != NULL &&
        X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, (const unsigned char *)name, -1, -1,
                                   0) == 1 &&
        X509_set_issuer_name(x, subject) == 1 && X509_set_pubkey(x, key) == 1 &&
        X509_sign(x, key, NULL) > 0)
        return x;
    X509_free(x);
    return NULL;
}

static int make_tls(struct bulk_keys *keys, EVP_PKEY *key, const char *name, struct shd_err *e)
{
    uint8_t way[WAY_BYTES];
    X509 *certificate = wrap_key(key, name);
    SSL_CTX *tls = keys->tls = SSL_CTX_new(TLS_method());
    const bool made = certificate != NULL && tls != NULL &&
                      SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) == 1 &&
                      SSL_CTX_set_ciphersuites(tls, "TLS_AES_128_GCM_SHA256") == 1 &&
                      SSL_CTX_set_num_tickets(tls, 0) == 1 &&
                      SSL_CTX_set_alpn_protos(tls, way, wire_way(keys->way, way)) == 0 &&
                      SSL_CTX_use_certificate(tls, certificate) == 1 &&
                      SSL_CTX_use_PrivateKey(tls, key) == 1;
    X509_free(certificate);
    if (!made)
        return tls_failed(SHD_EINTERNAL, e, "TLS 1.3 cannot be set up");
    SSL_CTX_set_verify(tls, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_cert_verify_callback(tls, verify, NULL);
    SSL_CTX_set_alpn_select_cb(tls, choose_way, keys);
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(tls, SSL_SESS_CACHE_OFF);
    return SHD_OK;
}

static int check_own(struct bulk_keys *keys, const EVP_PKEY *key, const char *name,
                     struct shd_err *e)
{
    struct cluster cluster;
    int r = cluster_load(keys->path, &cluster, e);
    if (r != SHD_OK)
        return r;
    const struct cluster_host *own = cluster_by_name(&cluster, name);
    if (own == NULL)
        r = err_set(e, SHD_ENOENT, "'%.100s' has no host '%.64s'", keys->path, name);
    else
        r = cluster_key_public(key, keys->own, e);
    if (r == SHD_OK && own != NULL && memcmp(own->key, keys->own, sizeof keys->own) != 0)
        r = err_set(e, SHD_EAUTH, "'%.100s' has another key for host '%.64s' than its key file",
                    keys->path, name);
    if (r == SHD_OK && own != NULL)
        memcpy(keys->address, own->address, sizeof keys->address);
    keys->way = cluster.bulk == CLUSTER_UCX ? &ucx_path : &tls_path;
    cluster_free(&cluster);
    return r;
}

int bulk_keys_new(const char *path, const char *name, struct bulk_keys **ret_keys,
                  struct shd_err *e)
{
    char key_path[4096];
    EVP_PKEY *key = NULL;
    struct bulk_keys *keys = sys_calloc(1, sizeof *keys);
    if (keys == NULL || (keys->path = sys_strdup(path)) == NULL) {
        free(keys);
        return err_set(e, SHD_ENOMEM, "no memory for keys");
    }
    int r = cluster_key_path(path, name, key_path, sizeof key_path, e);
    if (r == SHD_OK)
        r = cluster_key_load(key_path, &key, e);
    if (r == SHD_OK)
        r = check_own(keys, key, name, e);
    if (r == SHD_OK && keys->way->load != NULL)
        r = keys->way->load(e);
    if (r == SHD_OK)
        r = make_tls(keys, key, name, e);
    EVP_PKEY_free(key);
    if (r == SHD_OK)
        *ret_keys = keys;
    else
        bulk_keys_free(keys);
    return r;
}

void bulk_keys_free(struct bulk_keys *keys)
{
    if (keys == NULL)
        return;
    SSL_CTX_free(keys->tls);
    free(keys->path);
    free(keys);
}

const char *bulk_keys_address(const struct bulk_keys *keys)
{
    return keys->address;
}

const char *bulk_keys_way(const struct bulk_keys *keys)
{
    return keys->way->said;
}

/* -- Connecting -------------------------------------------------------------------------------- */

static void close_end(struct bulk *bulk, bool gently)
{
    if (bulk->end != NULL)
        bulk->path->close(bulk->end, gently);
    bulk->end = NULL;
}

void bulk_end(struct bulk *bulk)
{
    if (bulk != NULL)
        close_end(bulk, /* gently= */ bulk->failed.code == SHD_OK);
}

void bulk_close(struct bulk *bulk)
{
    if (bulk == NULL)
        return;
    bulk_end(bulk);
    if (bulk->tls != NULL && bulk->failed.code == SHD_OK)
        SSL_shutdown(bulk->tls); /* what it says, if there is room at once */
    SSL_free(bulk->tls);
    if (bulk->poll_fd >= 0)
        close(bulk->poll_fd);
    close(bulk->fd);
    cluster_free(&bulk->cluster);
    free(bulk);
}

static void set_options(int fd)
{
    const int on = 1, idle_s = 5, every_s = 2, count = 3;
    const unsigned timeout_ms = USER_TIMEOUT_S * 1000;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

/* Wait until fd is ready; false: the time is over. */
static bool wait_fd(int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = { .fd = fd, .events = events };
        if (poll(&p, 1, POLL_MS) > 0)
            return true;
        if (clock_now_ns() >= deadline_ns)
            return false;
    }
}

static int handshake(struct bulk *bulk, bool accepts, uint64_t deadline_ns, struct shd_err *e)
{
    for (;;) {
        ERR_clear_error();
        const int n = accepts ? SSL_accept(bulk->tls) : SSL_connect(bulk->tls);
        if (n == 1)
            return SHD_OK;
        const int why = SSL_get_error(bulk->tls, n);
        if (bulk->failed.code != SHD_OK)
            return err_copy(&bulk->failed, e);
        if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) {
            const bool hung_up = why == SSL_ERROR_SYSCALL || why == SSL_ERROR_ZERO_RETURN;
            err_set(&bulk->failed, SHD_EGONE, "hung up");
            if (ERR_GET_REASON(ERR_peek_error()) ==
                SSL_AD_REASON_OFFSET + SSL_AD_NO_APPLICATION_PROTOCOL)
                return other_way(bulk->path, e);
            return hung_up ? err_set(e, SHD_EGONE, "it hung up before it was known")
                           : tls_failed(SHD_EPROTO, e, "TLS");
        }
        if (!wait_fd(bulk->fd, why == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline_ns)) {
            err_set(&bulk->failed, SHD_ETIMEDOUT, "slow");
            return err_set(e, SHD_ETIMEDOUT, "no TLS handshake in its time");
        }
    }
}

/* Who says none is of before there was a choice. */
static int check_way(const struct bulk *bulk, struct shd_err *e)
{
    const uint8_t *name;
    unsigned bytes;
    SSL_get0_alpn_selected(bulk->tls, &name, &bytes);
    return bytes > 0 || bulk->path == &tls_path ? SHD_OK : other_way(bulk->path, e);
}

/* All of it, within TLS, as long as nothing else is sent or received. */
static int cross(struct bulk *bulk, bool sends, uint8_t *data, size_t bytes, uint64_t deadline_ns,
                 struct shd_err *e)
{
    for (uint64_t done = 0, n = 0; done < bytes; done += n, n = 0) {
        const int r = sends ? tls_send(bulk, data + done, bytes - done, &n, e)
                            : tls_receive(bulk, data + done, bytes - done, &n, e);
        if (r == SHD_PENDING && !wait_fd(bulk->fd, sends ? POLLOUT : POLLIN, deadline_ns))
            return err_set(e, SHD_ETIMEDOUT, "it says nothing of its bulk");
        if (r < SHD_OK)
            return r;
    }
    return SHD_OK;
}

static int exchange_hellos(struct bulk *bulk, const struct bulk_hello *own,
                           struct bulk_hello *ret_peer, uint64_t deadline_ns, struct shd_err *e)
{
    uint8_t size[2] = { (uint8_t)own->bytes, (uint8_t)(own->bytes >> 8) };
    struct bulk_hello said = *own;
    int r = cross(bulk, /* sends= */ true, size, sizeof size, deadline_ns, e);
    if (r == SHD_OK)
        r = cross(bulk, /* sends= */ true, said.data, said.bytes, deadline_ns, e);
    if (r == SHD_OK)
        r = cross(bulk, /* sends= */ false, size, sizeof size, deadline_ns, e);
    if (r != SHD_OK)
        return r;
    ret_peer->bytes = (size_t)(size[0] | size[1] << 8);
    if (ret_peer->bytes > sizeof ret_peer->data)
        return err_set(e, SHD_ERANGE, "it says %zu bytes of its bulk, at most %zu", ret_peer->bytes,
                       sizeof ret_peer->data);
    return cross(bulk, /* sends= */ false, ret_peer->data, ret_peer->bytes, deadline_ns, e);
}

static int watch(struct bulk *bulk, int op, int fd, uint32_t events, struct shd_err *e)
{
    struct epoll_event event = { .events = events };
    return epoll_ctl(bulk->poll_fd, op, fd, &event) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "epoll");
}

/* The way beside TLS, if it is not within. */
static int open_end(struct bulk *bulk, uint64_t deadline_ns, struct shd_err *e)
{
    struct bulk_hello own, peer;
    int r = check_way(bulk, e);
    if (r != SHD_OK || bulk->path == &tls_path)
        return r;
    r = bulk->path->open(&bulk->end, &own, e);
    if (r == SHD_OK)
        r = exchange_hellos(bulk, &own, &peer, deadline_ns, e);
    if (r == SHD_OK)
        r = bulk->path->join(bulk->end, &peer, e);
    if (r == SHD_OK && (bulk->poll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0)
        r = err_sys(e, SHD_EIO, "epoll");
    if (r == SHD_OK)
        r = watch(bulk, EPOLL_CTL_ADD, bulk->path->fd(bulk->end), EPOLLIN, e);
    bulk->watched = EPOLLIN;
    return r == SHD_OK ? watch(bulk, EPOLL_CTL_ADD, bulk->fd, bulk->watched, e) : r;
}

/* Takes over fd and the cluster. */
static int bulk_new(const struct bulk_keys *keys, struct cluster *cluster, int fd,
                    const char *wanted, uint64_t deadline_ns, struct bulk **ret_bulk,
                    struct shd_err *e)
{
    struct bulk *bulk = sys_calloc(1, sizeof *bulk);
    if (bulk == NULL) {
        close(fd);
        cluster_free(cluster);
        return err_set(e, SHD_ENOMEM, "no memory for a connection");
    }
    bulk->fd = fd;
    bulk->keys = keys;
    bulk->path = keys->way;
    bulk->poll_fd = -1;
    bulk->cluster = *cluster;
    bulk->wanted = wanted;
    bulk->tls = SSL_new(keys->tls);
    set_options(fd);
    int r = SHD_OK;
    if (bulk->tls == NULL || SSL_set_fd(bulk->tls, fd) != 1)
        r = err_set(e, SHD_ENOMEM, "no memory for a connection");
    else
        SSL_set_app_data(bulk->tls, bulk);
    if (r == SHD_OK)
        r = handshake(bulk, wanted == NULL, deadline_ns, e);
    if (r == SHD_OK && (r = open_end(bulk, deadline_ns, e)) != SHD_OK)
        bulk->failed = *e;
    bulk->heard_ns = bulk->sent_ns = clock_now_ns();
    if (r == SHD_OK)
        *ret_bulk = bulk;
    else
        bulk_close(bulk);
    return r;
}

static int tcp_connect(const struct addrinfo *a, uint64_t deadline_ns, int *ret_fd,
                       struct shd_err *e)
{
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int why = 0;
    socklen_t bytes = sizeof why;
    if (fd < 0)
        return err_sys(e, SHD_EIO, "socket");
    const bool begun = connect(fd, a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS;
    if (begun && !wait_fd(fd, POLLOUT, deadline_ns))
        why = ETIMEDOUT;
    else if (!begun || getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &bytes) < 0)
        why = errno;
    if (why == 0) {
        *ret_fd = fd;
        return SHD_OK;
    }
    close(fd);
    return err_set(e, why == ETIMEDOUT ? SHD_ETIMEDOUT : SHD_EGONE, "connect: %s", strerror(why));
}

static int tcp_dial(const char *address, uint64_t deadline_ns, int *ret_fd, struct shd_err *e)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM };
    char host[LISTEN_HOST_BYTES];
    const char *port;
    struct addrinfo *found;
    if (!listen_split(address, host, &port))
        return err_set(e, SHD_EINVAL, "'%s' is not HOST:PORT", address);
    const int bad = getaddrinfo(host, port, &hints, &found);
    if (bad != 0)
        return err_set(e, SHD_EGONE, "look up '%s': %s", host, gai_strerror(bad));
    int r = SHD_EGONE;
    for (const struct addrinfo *a = found; r != SHD_OK && a != NULL; a = a->ai_next)
        r = tcp_connect(a, deadline_ns, ret_fd, e);
    freeaddrinfo(found);
    return r;
}

int bulk_dial(const struct bulk_keys *keys, const char *name, uint64_t timeout_ns,
              struct bulk **ret_bulk, struct shd_err *e)
{
    const uint64_t deadline_ns = clock_now_ns() + timeout_ns;
    struct cluster cluster;
    int fd = -1;
    int r = cluster_load(keys->path, &cluster, e);
    if (r != SHD_OK)
        return r;
    const struct cluster_host *host = cluster_by_name(&cluster, name);
    if (host == NULL)
        r = err_set(e, SHD_ENOENT, "'%.100s' has no host '%.64s'", keys->path, name);
    else
        r = tcp_dial(host->address, deadline_ns, &fd, e);
    if (r == SHD_OK)
        r = bulk_new(keys, &cluster, fd, name, deadline_ns, ret_bulk, e);
    else
        cluster_free(&cluster);
    return r == SHD_OK ? r : err_prefix(e, "host %.64s", name);
}

int bulk_accept(const struct bulk_keys *keys, int fd, uint64_t timeout_ns, struct bulk **ret_bulk,
                struct shd_err *e)
{
    struct cluster cluster;
    const int r = cluster_load(keys->path, &cluster, e);
    if (r != SHD_OK) {
        close(fd);
        return r;
    }
    return bulk_new(keys, &cluster, fd, /* wanted= */ NULL, clock_now_ns() + timeout_ns, ret_bulk,
                    e);
}

const char *bulk_peer(const struct bulk *bulk)
{
    return bulk->peer;
}

int bulk_fd(const struct bulk *bulk)
{
    return bulk->poll_fd >= 0 ? bulk->poll_fd : bulk->fd;
}

uint64_t bulk_bytes(const struct bulk *bulk)
{
    return bulk->bytes;
}

void bulk_set_hooks(struct bulk *bulk, const struct bulk_hooks *hooks)
{
    bulk->hooks = *hooks;
}

void bulk_set_count(struct bulk *bulk, struct bulk_count *count)
{
    bulk->count = count;
}

/* -- Frames ------------------------------------------------------------------------------------ */

static int fail(struct bulk *bulk, const struct shd_err *why, struct shd_err *e)
{
    if (bulk->failed.code == SHD_OK)
        bulk->failed = *why;
    close_end(bulk, /* gently= */ false); /* nobody's memory is read or written from here on */
    return err_copy(&bulk->failed, e);
}

static void *end_of(struct bulk *bulk, const struct bulk_path *path)
{
    return path == &tls_path ? bulk : bulk->end;
}

static int path_failed(struct bulk *bulk, const struct bulk_path *path, struct shd_err *why,
                       struct shd_err *e)
{
    if (path != &tls_path)
        err_prefix(why, "host %s", bulk->peer);
    return fail(bulk, why, e);
}

/* Up to bytes of what comes by a path; *ret_got > 0, or SHD_PENDING. */
static int read_some(struct bulk *bulk, const struct bulk_path *path, uint8_t *to, uint64_t bytes,
                     uint64_t *ret_got, struct shd_err *e)
{
    struct shd_err why = { 0 };
    const int r = path->receive(end_of(bulk, path), to, bytes, ret_got, &why);
    if (r == SHD_OK)
        bulk->heard_ns = clock_now_ns();
    return r < SHD_OK ? path_failed(bulk, path, &why, e) : r;
}

static int head_came(struct bulk *bulk, struct shd_err *e)
{
    struct shd_err why = { 0 };
    void *to = NULL;
    int r = bulk_head_unpack(bulk->head_in, &bulk->head, &why);
    if (r == SHD_OK && bulk->head.type != BULK_PING)
        r = bulk->hooks.place(bulk->hooks.ctx, &bulk->head, &to, &why);
    if (r != SHD_OK)
        return fail(bulk, &why, e);
    CHECK(to != NULL || bulk->head.bytes == 0);
    bulk->to = to;
    bulk->got = 0;
    return SHD_OK;
}

static int frame_came(struct bulk *bulk, struct shd_err *e)
{
    struct shd_err why = { 0 };
    bulk->head_got = 0;
    bulk->bytes += bulk->head.bytes;
    if (bulk->count != NULL)
        atomic_fetch_add(&bulk->count->in, BULK_HEAD_BYTES + bulk->head.bytes);
    if (bulk->head.type == BULK_PING)
        return SHD_OK;
    const int r = bulk->hooks.done(bulk->hooks.ctx, &bulk->head, bulk->to, &why);
    return r == SHD_OK ? r : fail(bulk, &why, e);
}

/* By which a payload goes: a small one shares a record with its head. */
static const struct bulk_path *path_of(const struct bulk *bulk, uint64_t bytes)
{
    return bytes <= SMALL_BYTES ? &tls_path : bulk->path;
}

static bool comes_beside(const struct bulk *bulk)
{
    return bulk->head_got == BULK_HEAD_BYTES && path_of(bulk, bulk->head.bytes) != &tls_path;
}

/* Nothing is read of the connection while a payload comes beside it, so that what fd shows then is
 * its end alone. */
static int wait_beside(struct bulk *bulk, bool waits, struct shd_err *e)
{
    const uint32_t events = waits ? EPOLLRDHUP : EPOLLIN;
    struct shd_err why = { 0 };
    uint8_t next;
    int r = SHD_OK;
    if (bulk->end != NULL && bulk->watched != events)
        r = watch(bulk, EPOLL_CTL_MOD, bulk->fd, bulk->watched = events, &why);
    if (r == SHD_OK && bulk->end != NULL && waits) {
        ERR_clear_error();
        errno = 0;
        const int n = SSL_peek(bulk->tls, &next, 1);
        r = n > 0 ? SHD_OK : explain(bulk, n, &why);
    }
    return r < SHD_OK ? fail(bulk, &why, e) : SHD_OK;
}

/* One frame, or what there is of it until end_ns: SHD_PENDING. */
static int receive_frame(struct bulk *bulk, uint64_t end_ns, struct shd_err *e)
{
    uint64_t got = 0;
    while (bulk->head_got < BULK_HEAD_BYTES) {
        int r = read_some(bulk, &tls_path, bulk->head_in + bulk->head_got,
                          BULK_HEAD_BYTES - bulk->head_got, &got, e);
        if (r != SHD_OK)
            return r;
        bulk->head_got += got;
        if (bulk->head_got == BULK_HEAD_BYTES && (r = head_came(bulk, e)) != SHD_OK)
            return r;
    }
    while (bulk->got < bulk->head.bytes) {
        if (clock_now_ns() >= end_ns)
            return SHD_PENDING;
        const int r = read_some(bulk, path_of(bulk, bulk->head.bytes), bulk->to + bulk->got,
                                bulk->head.bytes - bulk->got, &got, e);
        if (r == SHD_PENDING && comes_beside(bulk) &&
            wait_beside(bulk, /* waits= */ true, e) < SHD_OK)
            return bulk->failed.code;
        if (r != SHD_OK)
            return r;
        bulk->got += got;
    }
    const int r = wait_beside(bulk, /* waits= */ false, e);
    return r == SHD_OK ? frame_came(bulk, e) : r;
}

int bulk_receive(struct bulk *bulk, struct shd_err *e)
{
    const uint64_t end_ns = clock_now_ns() + TURN_NS;
    if (bulk->failed.code != SHD_OK)
        return err_copy(&bulk->failed, e);
    for (uint32_t i = 0; i < FRAMES_A_TURN; i++) {
        const int r = receive_frame(bulk, end_ns, e);
        if (r < SHD_OK)
            return r;
        if (clock_now_ns() >= end_ns)
            break;
        if (r == SHD_PENDING)
            return bulk->end != NULL ? bulk->path->turn(bulk->end) : SHD_OK;
    }
    return SHD_PENDING;
}

/* There was no room, or OpenSSL wants to read first. What the peer sends meanwhile is received. */
static int wait_for_room(struct bulk *bulk, const struct bulk_path *path, uint64_t since_ns,
                         struct shd_err *e)
{
    struct pollfd p[] = { { .fd = bulk->fd, .events = comes_beside(bulk) ? POLLRDHUP : POLLIN },
                          { .fd = -1, .events = POLLIN } };
    struct shd_err why = { 0 };
    int n = 1;
    p[0].events |= path == &tls_path ? POLLOUT : 0;
    if (bulk->end != NULL)
        p[1].fd = bulk->path->fd(bulk->end);
    if (bulk->end == NULL || bulk->path->turn(bulk->end) == SHD_OK)
        n = poll(p, ARRAY_SIZE(p), POLL_MS);
    if (n > 0 && ((p[0].revents & ~POLLOUT) != 0 || bulk->end != NULL)) {
        const int r = bulk_receive(bulk, e);
        if (r < SHD_OK)
            return r;
    }
    if (clock_now_ns() - since_ns < BULK_STALL_NS)
        return SHD_OK;
    err_set(&why, SHD_ETIMEDOUT, "host %s has taken nothing for %" PRIu64 " s", bulk->peer,
            BULK_STALL_NS / NS_PER_S);
    return fail(bulk, &why, e);
}

static int write_all(struct bulk *bulk, const struct bulk_path *path, const uint8_t *data,
                     uint64_t bytes, struct shd_err *e)
{
    uint64_t since_ns = clock_now_ns();
    for (uint64_t done = 0; done < bytes;) {
        struct shd_err why = { 0 };
        uint64_t sent = 0;
        int r = path->send(end_of(bulk, path), data + done, bytes - done, &sent, &why);
        if (r == SHD_PENDING)
            r = wait_for_room(bulk, path, since_ns, e);
        else if (r != SHD_OK)
            r = path_failed(bulk, path, &why, e);
        if (r != SHD_OK)
            return r;
        done += sent;
        if (sent > 0)
            since_ns = clock_now_ns();
    }
    return SHD_OK;
}

int bulk_send(struct bulk *bulk, const struct bulk_head *head, const void *payload,
              struct shd_err *e)
{
    uint8_t small[BULK_HEAD_BYTES + SMALL_BYTES];
    CHECK(head->type <= UINT16_MAX && head->bytes <= BULK_PAYLOAD_BYTES_MAX);
    if (bulk->failed.code != SHD_OK)
        return err_copy(&bulk->failed, e);
    const bool one = head->bytes > 0 && head->bytes <= SMALL_BYTES;
    bulk_head_pack(head, small);
    if (one)
        memcpy(small + BULK_HEAD_BYTES, payload, head->bytes);
    int r = write_all(bulk, &tls_path, small, BULK_HEAD_BYTES + (one ? head->bytes : 0), e);
    if (r == SHD_OK && !one)
        r = write_all(bulk, path_of(bulk, head->bytes), payload, head->bytes, e);
    bulk->sent_ns = clock_now_ns();
    bulk->bytes += head->bytes;
    if (bulk->count != NULL && r == SHD_OK)
        atomic_fetch_add(&bulk->count->out, BULK_HEAD_BYTES + head->bytes);
    return r;
}

int bulk_tick(struct bulk *bulk, struct shd_err *e)
{
    const struct bulk_head ping = { .type = BULK_PING };
    const uint64_t now_ns = clock_now_ns();
    struct shd_err why = { 0 };
    if (bulk->failed.code != SHD_OK)
        return err_copy(&bulk->failed, e);
    if (now_ns - bulk->heard_ns >= BULK_STALL_NS) {
        err_set(&why, SHD_ETIMEDOUT, "host %s has said nothing for %" PRIu64 " s", bulk->peer,
                BULK_STALL_NS / NS_PER_S);
        return fail(bulk, &why, e);
    }
    return now_ns - bulk->sent_ns >= PING_NS ? bulk_send(bulk, &ping, NULL, e) : SHD_OK;
}
