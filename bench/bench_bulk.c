/* Bytes between two relays (daemon/relay/bulk.h) over loopback: rate, and processor time of both
 * ends for each GB, in turn with what the same bytes cost without TLS and by others.
 *
 *   tls     frames by bulk.h as relays send them, from a ring of memory to another one
 *   relay_ucx  the same with bulk "ucx" (daemon/relay/bulk_ucx.h), by UCX's TCP transport
 *   plain   the same frames and rings by send() and recv() alone: what TLS, and waiting by poll(),
 *           are beside. Relays have no such way
 *   zmq     the same rings by ZeroMQ's PUSH and PULL, a message a frame, which is copied to its
 *           place as it comes; curve: likewise under CURVE
 *   ucx     ucx_perftest's tagged messages of a frame, over TCP
 *   iperf3  its own loop, which sends and receives one buffer that stays in the cache
 *
 * What needs UCX or iperf3 is left out where they are not installed. Time runs from the first
 * frame's head to the last frame's end at the receiver, so handshakes and starts are not in it; of
 * ucx and iperf3 the rate is their own and the processor time that of both processes as a whole.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "bench/bench.h"
#include "bench/bulk_others.h"
#include "bench/bulk_way.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/bulk_head.h"
#include "daemon/relay/bulk_ucx.h"
#include "daemon/relay/frames.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/listen.h"

#define PATH_BYTES 256u

enum { TLS, RELAY_UCX, PLAIN, ZMQ, CURVE, UCX, IPERF, WAYS };

struct bench {
    struct bulk_way ways[WAYS];
    bool out[WAYS]; /* not there: left out */
    uint32_t rounds, mib, frame_kib, ring_mib;
    struct bulk_rings rings;
    char dir[PATH_BYTES], file[PATH_BYTES + 16], ucx_file[PATH_BYTES + 16];
    int listener;
    struct bulk_keys *a, *b; /* a listens */
    char port[8];            /* of others */
    bool as_json;
};

struct receiving { /* ctx of the hooks */
    struct bench *b;
    struct bulk_received got;
};

/* -- Both ends --------------------------------------------------------------------------------- */

static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct bulk_received *got = &((struct receiving *)ctx)->got;
    if (head->bytes != got->rings->frame_bytes)
        return err_set(e, SHD_EPROTO, "a frame of %" PRIu64 " bytes", head->bytes);
    bulk_begin(got);
    *ret_to = got->rings->to + bulk_ring_at(got->rings, got->placed);
    got->placed += head->bytes;
    return SHD_OK;
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct receiving *receiving = ctx;
    (void)payload;
    (void)e;
    bulk_took(&receiving->got, head->bytes);
    return SHD_OK;
}

static struct bulk_head head_at(const struct bench *b, uint64_t position)
{
    return (struct bulk_head){ .type = FRAME_BYTES,
                               .id = 1,
                               .at = bulk_ring_at(&b->rings, position),
                               .bytes = b->rings.frame_bytes };
}

/* UCX is begun by whoever uses it: no fork may have one of before. */
static int keys_of(const struct bench *b, uint32_t way, const char *name,
                   struct bulk_keys **ret_keys, struct shd_err *e)
{
    *ret_keys = strcmp(name, "a") == 0 ? b->a : b->b;
    return way == TLS ? SHD_OK : bulk_keys_new(b->ucx_file, name, ret_keys, e);
}

static int send_frames(const struct bench *b, uint32_t way, struct shd_err *e)
{
    struct bulk *bulk;
    struct bulk_keys *keys;
    int r = keys_of(b, way, "b", &keys, e);
    if (r == SHD_OK)
        r = bulk_dial(keys, "a", BULK_MEET_NS, &bulk, e);
    if (r != SHD_OK)
        return r;
    const double before = bulk_own_cpu_s();
    for (uint64_t sent = 0; r == SHD_OK && sent < b->rings.bytes; sent += b->rings.frame_bytes) {
        const struct bulk_head head = head_at(b, sent);
        r = bulk_send(bulk, &head, b->rings.from + head.at, e);
    }
    b->rings.shared->cpu_s = bulk_own_cpu_s() - before;
    bulk_close(bulk);
    return r;
}

static int receive_frames(struct receiving *to, uint32_t way, int fd, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = to };
    struct bulk *bulk;
    struct bulk_keys *keys;
    int r = keys_of(to->b, way, "a", &keys, e);
    if (r == SHD_OK)
        r = bulk_accept(keys, fd, BULK_MEET_NS, &bulk, e);
    if (r != SHD_OK)
        return r;
    bulk_set_hooks(bulk, &hooks);
    while (r >= SHD_OK && to->got.done < to->b->rings.bytes) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        if (r == SHD_OK)
            poll(&p, 1, 1000);
        r = bulk_receive(bulk, e);
    }
    bulk_close(bulk);
    return to->got.done == to->b->rings.bytes ? SHD_OK : r;
}

static int connect_plain(const struct bench *b, int *ret_fd, struct shd_err *e)
{
    struct sockaddr_storage a;
    socklen_t bytes = sizeof a;
    const int on = 1;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || getsockname(b->listener, (struct sockaddr *)&a, &bytes) < 0 ||
        connect(fd, (const struct sockaddr *)&a, bytes) < 0)
        return err_sys(e, SHD_EIO, "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *ret_fd = fd;
    return SHD_OK;
}

static int send_all(int fd, const uint8_t *data, uint64_t bytes, int flags, struct shd_err *e)
{
    for (uint64_t sent = 0; sent < bytes;) {
        const ssize_t n = send(fd, data + sent, bytes - sent, MSG_NOSIGNAL | flags);
        if (n < 0)
            return err_sys(e, SHD_EIO, "send");
        sent += (uint64_t)n;
    }
    return SHD_OK;
}

static int send_plain(const struct bench *b, struct shd_err *e)
{
    int fd = -1;
    int r = connect_plain(b, &fd, e);
    const double before = bulk_own_cpu_s();
    for (uint64_t sent = 0; r == SHD_OK && sent < b->rings.bytes; sent += b->rings.frame_bytes) {
        const struct bulk_head head = head_at(b, sent);
        uint8_t wire[BULK_HEAD_BYTES];
        bulk_head_pack(&head, wire);
        r = send_all(fd, wire, sizeof wire, MSG_MORE, e);
        if (r == SHD_OK)
            r = send_all(fd, b->rings.from + head.at, head.bytes, 0, e);
    }
    b->rings.shared->cpu_s = bulk_own_cpu_s() - before;
    return r;
}

static int receive_all(int fd, uint8_t *to, uint64_t bytes, struct shd_err *e)
{
    for (uint64_t got = 0; got < bytes;) {
        const ssize_t n = recv(fd, to + got, bytes - got, 0);
        if (n <= 0)
            return err_set(e, SHD_EGONE, "receive: %s", n == 0 ? "hung up" : strerror(errno));
        got += (uint64_t)n;
    }
    return SHD_OK;
}

static int receive_plain(struct receiving *to, int fd, struct shd_err *e)
{
    int r = fcntl(fd, F_SETFL, 0) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "fcntl");
    while (r == SHD_OK && to->got.done < to->b->rings.bytes) {
        uint8_t wire[BULK_HEAD_BYTES];
        struct bulk_head head;
        void *at = NULL;
        r = receive_all(fd, wire, sizeof wire, e);
        if (r == SHD_OK)
            r = bulk_head_unpack(wire, &head, e);
        if (r == SHD_OK)
            r = place(to, &head, &at, e);
        if (r == SHD_OK)
            r = receive_all(fd, at, head.bytes, e);
        if (r == SHD_OK)
            r = done(to, &head, at, e);
    }
    close(fd);
    return r;
}

static int accept_one(const struct bench *b, int *ret_fd, struct shd_err *e)
{
    struct pollfd p = { .fd = b->listener, .events = POLLIN };
    if (poll(&p, 1, (int)(BULK_MEET_NS / NS_PER_MS)) != 1)
        return err_set(e, SHD_ETIMEDOUT, "nobody connects");
    *ret_fd = accept4(b->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    return *ret_fd >= 0 ? SHD_OK : err_sys(e, SHD_EIO, "accept");
}

/* A child sends, this process receives. */
static int transfer(struct bench *b, uint32_t way, struct receiving *to, struct shd_err *e)
{
    int fd = -1, status;
    const pid_t child = fork();
    if (child < 0)
        return err_sys(e, SHD_EIO, "fork");
    if (child == 0) {
        bench_check(way == PLAIN ? send_plain(b, e) : send_frames(b, way, e), e);
        _exit(0);
    }
    int r = accept_one(b, &fd, e);
    if (r == SHD_OK)
        r = way == PLAIN ? receive_plain(to, fd, e) : receive_frames(to, way, fd, e);
    if (r != SHD_OK)
        kill(child, SIGKILL);
    if (waitpid(child, &status, 0) != child || (r == SHD_OK && status != 0))
        return err_set(e, SHD_EGONE, "the sender ended with status %d", status);
    return r;
}

/* By UCX another child receives. */
static int transfer_apart(struct bench *b, struct receiving *to, struct shd_err *e)
{
    int status;
    const pid_t child = fork();
    if (child < 0)
        return err_sys(e, SHD_EIO, "fork");
    if (child == 0) {
        setenv("UCX_TLS", "tcp", 1);
        setenv("UCX_NET_DEVICES", "lo", 1);
        bench_check(transfer(b, RELAY_UCX, to, e), e);
        b->rings.shared->got = to->got;
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || status != 0)
        return err_set(e, SHD_EGONE, "the receiver ended with status %d", status);
    to->got = b->rings.shared->got;
    return SHD_OK;
}

static int measure(struct bench *b, uint32_t way, bool counts, struct shd_err *e)
{
    struct receiving to = { .b = b, .got.rings = &b->rings };
    const int r = way == RELAY_UCX ? transfer_apart(b, &to, e) : transfer(b, way, &to, e);
    if (r == SHD_OK && counts)
        bulk_count_transfer(&b->ways[way], &to.got);
    return r;
}

static int measure_way(struct bench *b, uint32_t way, bool counts, struct shd_err *e)
{
    struct bulk_way uncounted = { .name = "" };
    struct bulk_way *to = counts ? &b->ways[way] : &uncounted;
    switch (way) {
    case ZMQ:
    case CURVE:
        return bulk_zmq(&b->rings, way == CURVE, to, e);
    case UCX:
        return bulk_ucx(&b->rings, b->port, to, e);
    case IPERF:
        return bulk_iperf(&b->rings, b->port, to, e);
    default:
        return measure(b, way, counts, e);
    }
}

/* -- Setting up -------------------------------------------------------------------------------- */

/* One that nobody has now. */
static int find_port(struct bench *b, struct shd_err *e)
{
    char name[LISTEN_NAME_BYTES];
    bool remote;
    int fd;
    int r = listen_tcp("127.0.0.1:0", 0, &fd, &remote, e);
    if (r != SHD_OK)
        return r;
    r = listen_name(fd, name, e);
    close(fd);
    if (r == SHD_OK)
        snprintf(b->port, sizeof b->port, "%s", strrchr(name, ':') + 1);
    return r;
}

static int add_host(struct bench *b, struct cluster *cluster, const char *name, const char *address,
                    struct shd_err *e)
{
    struct cluster_host host = { .name = "" };
    char path[PATH_BYTES + 32];
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.address, sizeof host.address, "%s", address);
    int r = cluster_key_path(b->file, name, path, sizeof path, e);
    if (r == SHD_OK)
        r = cluster_key_new(path, host.key, e);
    return r == SHD_OK ? cluster_add(cluster, &host, e) : r;
}

static int make_hosts(struct bench *b, struct shd_err *e)
{
    const char *tmp = getenv("TMPDIR");
    struct cluster cluster = { 0 };
    char name[LISTEN_NAME_BYTES];
    bool remote;
    snprintf(b->dir, sizeof b->dir, "%s/shd-bulk.XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(b->dir) == NULL)
        return err_sys(e, SHD_EIO, "a directory for keys");
    snprintf(b->file, sizeof b->file, "%s/c.json", b->dir);
    int r = listen_tcp("127.0.0.1:0", 0, &b->listener, &remote, e);
    if (r == SHD_OK)
        r = listen_name(b->listener, name, e);
    if (r == SHD_OK)
        r = add_host(b, &cluster, "a", name, e);
    if (r == SHD_OK)
        r = add_host(b, &cluster, "b", "127.0.0.1:1", e);
    if (r == SHD_OK)
        r = cluster_save(b->file, &cluster, e);
    snprintf(b->ucx_file, sizeof b->ucx_file, "%s/u.json", b->dir);
    cluster.bulk = CLUSTER_UCX;
    if (r == SHD_OK)
        r = cluster_save(b->ucx_file, &cluster, e);
    cluster_free(&cluster);
    if (r == SHD_OK)
        r = bulk_keys_new(b->file, "a", &b->a, e);
    return r == SHD_OK ? bulk_keys_new(b->file, "b", &b->b, e) : r;
}

static void remove_hosts(struct bench *b)
{
    static const char *const names[] = { "c.json", "u.json", "a.key", "b.key" };
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char path[PATH_BYTES + 16];
        snprintf(path, sizeof path, "%s/%s", b->dir, names[i]);
        unlink(path);
    }
    rmdir(b->dir);
    bulk_keys_free(b->a);
    bulk_keys_free(b->b);
}

/* Pages are there before the clock runs. */
static void *map_ring(uint64_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    memset(at, 0x5a, bytes);
    return at;
}

static int map_rings(struct bench *b, struct shd_err *e)
{
    b->rings.frame_bytes = (uint64_t)b->frame_kib << 10;
    b->rings.ring_bytes = (uint64_t)b->ring_mib << 20;
    if (b->rings.ring_bytes % b->rings.frame_bytes != 0)
        return err_set(e, SHD_EINVAL, "a ring of %" PRIu32 " MiB is no multiple of %" PRIu32 " KiB",
                       b->ring_mib, b->frame_kib);
    b->rings.bytes = ((uint64_t)b->mib << 20) / b->rings.frame_bytes * b->rings.frame_bytes;
    if (b->rings.bytes == 0)
        return err_set(e, SHD_EINVAL, "%" PRIu32 " MiB are no frame", b->mib);
    b->rings.from = map_ring(b->rings.ring_bytes);
    b->rings.to = map_ring(b->rings.ring_bytes);
    b->rings.shared = map_ring(4096);
    return b->rings.from != NULL && b->rings.to != NULL && b->rings.shared != NULL
               ? SHD_OK
               : err_set(e, SHD_ENOMEM, "no memory for two rings of %" PRIu32 " MiB", b->ring_mib);
}

/* -- Reporting --------------------------------------------------------------------------------- */

static void report_way(const struct bench *b, const struct bulk_way *way)
{
    const struct bulk_way *tls = &b->ways[TLS];
    char name[64];
    snprintf(name, sizeof name, "bulk.%s.rate", way->name);
    stat_print(b->as_json, name, "GB/s", &way->rate);
    snprintf(name, sizeof name, "bulk.%s.cpu", way->name);
    stat_print(b->as_json, name, "s/GB", &way->cpu);
    if (way == tls)
        return;
    const struct stat_series rate = stat_ratio(&tls->rate, &way->rate);
    const struct stat_series cpu = stat_ratio(&tls->cpu, &way->cpu);
    snprintf(name, sizeof name, "bulk.tls_over_%s.rate", way->name);
    stat_print(b->as_json, name, "", &rate);
    snprintf(name, sizeof name, "bulk.tls_over_%s.cpu", way->name);
    stat_print(b->as_json, name, "", &cpu);
}

static void report(const struct bench *b)
{
    stat_print_head(b->as_json);
    for (uint32_t way = 0; way < WAYS; way++)
        if (!b->out[way])
            report_way(b, &b->ways[way]);
}

static int run(struct bench *b, struct shd_err *e)
{
    int r = map_rings(b, e);
    if (r == SHD_OK)
        r = make_hosts(b, e);
    if (r == SHD_OK)
        r = find_port(b, e);
    for (uint32_t i = 0; r == SHD_OK && i <= b->rounds; i++) /* the first one warms up */
        for (uint32_t way = 0; r == SHD_OK && way < WAYS; way++)
            if (!b->out[way])
                r = measure_way(b, way, i > 0, e);
    if (r == SHD_OK)
        report(b);
    remove_hosts(b);
    return r;
}

static void leave_out(struct bench *b, uint32_t way, bool there, const char *what)
{
    b->out[way] = !there;
    if (!there)
        fprintf(stderr, "bulk.%s: left out, there is no %s\n", b->ways[way].name, what);
}

static bool has_ucx(void)
{
    struct shd_err e;
    int status;
    const pid_t child = fork();
    if (child == 0)
        _exit(ucx_path.load(&e) != SHD_OK);
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

int main(int argc, char **argv)
{
    static struct bench b = { .ways = { { .name = "tls" },
                                        { .name = "relay_ucx" },
                                        { .name = "plain" },
                                        { .name = "zmq" },
                                        { .name = "curve" },
                                        { .name = "ucx" },
                                        { .name = "iperf3" } },
                              .rounds = 7,
                              .mib = 1024,
                              .frame_kib = 16384,
                              .ring_mib = 256 };
    static const struct flag table[] = {
        { "rounds", 0, FLAG_U32, "N", "transfers of each way (7)", &b.rounds, 1,
          STAT_ROUNDS_MAX - 1 },
        { "mib", 0, FLAG_U32, "N", "MiB of a transfer (1024)", &b.mib, 1, 1u << 20 },
        { "frame-kib", 0, FLAG_U32, "N", "KiB of a frame (16384)", &b.frame_kib, 1, 1u << 20 },
        { "ring-mib", 0, FLAG_U32, "N", "MiB of memory that either end goes round (256)",
          &b.ring_mib, 1, 1u << 16 },
        BENCH_JSON(&b.as_json),
    };
    const struct flags flags = {
        .usage = "bench_bulk [flags]",
        .about = "Rate and processor time of both ends, for bytes between two relays over "
                 "loopback: by TLS as\nthey send them, by UCX as they may, without either, by "
                 "ZeroMQ, UCX's own test and "
                 "iperf3, one transfer of each in turn.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    struct shd_err e = { 0 };
    bench_flags(&flags, argc, argv, NULL);
    signal(SIGPIPE, SIG_IGN);
    leave_out(&b, CURVE, bulk_has_curve(), "CURVE in this libzmq");
    leave_out(&b, RELAY_UCX, has_ucx(), "libucp.so.0");
    leave_out(&b, UCX, bulk_has("ucx_perftest", "-h"), "ucx_perftest");
    leave_out(&b, IPERF, bulk_has("iperf3", "--version"), "iperf3");
    bench_check(run(&b, &e), &e);
    return 0;
}
