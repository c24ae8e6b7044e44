/* Bytes between two relays (daemon/relay/bulk.h) over loopback: rate, and processor time of both
 * ends for each GB, in turn with what the same bytes cost without TLS and with iperf3.
 *
 *   tls     frames by bulk.h as relays send them, from a ring of memory to another one
 *   plain   the same frames and rings by send() and recv() alone: what TLS, and waiting by poll(),
 *           are beside. Relays have no such way
 *   iperf3  its own loop, which sends and receives one buffer that stays in the cache; left out
 *           where there is none
 *
 * Time runs from the first frame's head to the last frame's end at the receiver, so handshakes and
 * starts are not in it; of iperf3 the rate is its own and the processor time that of both processes
 * as a whole.
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
#include "daemon/relay/bulk.h"
#include "daemon/relay/bulk_head.h"
#include "daemon/relay/frames.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/listen.h"

#define MEET_NS    (20 * NS_PER_S)
#define PATH_BYTES 256u
#define ANSWER_MAX ((size_t)1 << 20)

struct way {
    const char *name;
    struct stat_series rate, cpu; /* GB/s; s/GB */
};

struct bench {
    struct way tls, plain, iperf;
    uint32_t rounds, mib, frame_kib, ring_mib;
    uint64_t bytes, frame_bytes, ring_bytes;
    uint8_t *from, *to; /* rings, mapped */
    struct shared {     /* with the child that sends */
        double cpu_s;
    } * shared;
    char dir[PATH_BYTES], file[PATH_BYTES + 16];
    int listener;
    struct bulk_keys *a, *b; /* a listens */
    char port[8];            /* of iperf3 */
    bool has_iperf, as_json;
};

struct received { /* by this process */
    struct bench *b;
    uint64_t placed, done, begin_ns, end_ns;
    double begin_cpu_s, cpu_s;
};

static double cpu_s(const struct rusage *u)
{
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1e-6;
}

static double own_cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return cpu_s(&u);
}

/* -- Both ends --------------------------------------------------------------------------------- */

static uint64_t ring_at(const struct bench *b, uint64_t position)
{
    return position % b->ring_bytes;
}

static void begin_receiving(struct received *got)
{
    if (got->placed > 0)
        return;
    got->begin_ns = clock_now_ns();
    got->begin_cpu_s = own_cpu_s();
}

static void end_receiving(struct received *got)
{
    if (got->done < got->b->bytes)
        return;
    got->end_ns = clock_now_ns();
    got->cpu_s = own_cpu_s() - got->begin_cpu_s;
}

static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct received *got = ctx;
    if (head->bytes != got->b->frame_bytes)
        return err_set(e, SHD_EPROTO, "a frame of %" PRIu64 " bytes", head->bytes);
    begin_receiving(got);
    *ret_to = got->b->to + ring_at(got->b, got->placed);
    got->placed += head->bytes;
    return SHD_OK;
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct received *got = ctx;
    (void)payload;
    (void)e;
    got->done += head->bytes;
    end_receiving(got);
    return SHD_OK;
}

static struct bulk_head head_at(const struct bench *b, uint64_t position)
{
    return (struct bulk_head){
        .type = FRAME_BYTES, .id = 1, .at = ring_at(b, position), .bytes = b->frame_bytes
    };
}

static int send_tls(const struct bench *b, struct shd_err *e)
{
    struct bulk *bulk;
    int r = bulk_dial(b->b, "a", MEET_NS, &bulk, e);
    if (r != SHD_OK)
        return r;
    const double before = own_cpu_s();
    for (uint64_t sent = 0; r == SHD_OK && sent < b->bytes; sent += b->frame_bytes) {
        const struct bulk_head head = head_at(b, sent);
        r = bulk_send(bulk, &head, b->from + head.at, e);
    }
    b->shared->cpu_s = own_cpu_s() - before;
    bulk_close(bulk);
    return r;
}

static int receive_tls(struct received *got, int fd, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = got };
    struct bulk *bulk;
    int r = bulk_accept(got->b->a, fd, MEET_NS, &bulk, e);
    if (r != SHD_OK)
        return r;
    bulk_set_hooks(bulk, &hooks);
    while (r >= SHD_OK && got->done < got->b->bytes) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        if (r == SHD_OK)
            poll(&p, 1, 1000);
        r = bulk_receive(bulk, e);
    }
    bulk_close(bulk);
    return got->done == got->b->bytes ? SHD_OK : r;
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
    const double before = own_cpu_s();
    for (uint64_t sent = 0; r == SHD_OK && sent < b->bytes; sent += b->frame_bytes) {
        const struct bulk_head head = head_at(b, sent);
        uint8_t wire[BULK_HEAD_BYTES];
        bulk_head_pack(&head, wire);
        r = send_all(fd, wire, sizeof wire, MSG_MORE, e);
        if (r == SHD_OK)
            r = send_all(fd, b->from + head.at, head.bytes, 0, e);
    }
    b->shared->cpu_s = own_cpu_s() - before;
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

static int receive_plain(struct received *got, int fd, struct shd_err *e)
{
    int r = fcntl(fd, F_SETFL, 0) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "fcntl");
    while (r == SHD_OK && got->done < got->b->bytes) {
        uint8_t wire[BULK_HEAD_BYTES];
        struct bulk_head head;
        void *to;
        r = receive_all(fd, wire, sizeof wire, e);
        if (r == SHD_OK)
            r = bulk_head_unpack(wire, &head, e);
        if (r == SHD_OK)
            r = place(got, &head, &to, e);
        if (r == SHD_OK)
            r = receive_all(fd, to, head.bytes, e);
        if (r == SHD_OK)
            r = done(got, &head, to, e);
    }
    close(fd);
    return r;
}

static int accept_one(const struct bench *b, int *ret_fd, struct shd_err *e)
{
    struct pollfd p = { .fd = b->listener, .events = POLLIN };
    if (poll(&p, 1, (int)(MEET_NS / NS_PER_MS)) != 1)
        return err_set(e, SHD_ETIMEDOUT, "nobody connects");
    *ret_fd = accept4(b->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    return *ret_fd >= 0 ? SHD_OK : err_sys(e, SHD_EIO, "accept");
}

/* A child sends, this process receives. */
static int measure(struct bench *b, struct way *way, bool counts, struct shd_err *e)
{
    struct received got = { .b = b };
    const bool tls = way == &b->tls;
    int fd = -1, status;
    const pid_t child = fork();
    if (child < 0)
        return err_sys(e, SHD_EIO, "fork");
    if (child == 0) {
        bench_check(tls ? send_tls(b, e) : send_plain(b, e), e);
        _exit(0);
    }
    int r = accept_one(b, &fd, e);
    if (r == SHD_OK)
        r = tls ? receive_tls(&got, fd, e) : receive_plain(&got, fd, e);
    if (r != SHD_OK)
        kill(child, SIGKILL);
    if (waitpid(child, &status, 0) != child || (r == SHD_OK && status != 0))
        return err_set(e, SHD_EGONE, "the sender ended with status %d", status);
    if (r != SHD_OK || !counts)
        return r;
    stat_add(&way->rate, (double)b->bytes / (double)(got.end_ns - got.begin_ns));
    stat_add(&way->cpu, (got.cpu_s + b->shared->cpu_s) / ((double)b->bytes * 1e-9));
    return SHD_OK;
}

/* -- iperf3 ------------------------------------------------------------------------------------ */

static pid_t start(char *const argv[], int out)
{
    const pid_t child = fork();
    if (child != 0)
        return child;
    dup2(out, STDOUT_FILENO);
    execvp(argv[0], argv);
    _exit(127);
}

/* What it says until it closes its end. */
static size_t hear(int fd, char *text, size_t bytes_max)
{
    size_t bytes = 0;
    ssize_t n;
    while (bytes < bytes_max && (n = read(fd, text + bytes, bytes_max - bytes)) > 0)
        bytes += (size_t)n;
    return bytes;
}

static bool wait_listening(int out)
{
    char text[256];
    const ssize_t n = read(out, text, sizeof text); /* "Server listening on ..." */
    return n > 0;
}

static bool is_there(void)
{
    char *argv[] = { (char[]){ "iperf3" }, (char[]){ "--version" }, NULL };
    int status;
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    const pid_t child = start(argv, null);
    close(null);
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static int rate_of(const char *text, size_t bytes, double *ret_rate, struct shd_err *e)
{
    json_t *root = json_loadb(text, bytes, 0, NULL);
    const json_t *end = json_object_get(root, "end");
    const double bits = json_number_value(
        json_object_get(json_object_get(end, "sum_received"), "bits_per_second"));
    json_decref(root);
    if (!(bits > 0))
        return err_set(e, SHD_EPROTO, "iperf3 says nothing of its rate: %.100s", text);
    *ret_rate = bits / 8e9;
    return SHD_OK;
}

static int run_client(struct bench *b, double *ret_rate, double *ret_cpu_s, struct shd_err *e)
{
    static char answer[ANSWER_MAX];
    char bytes_text[32];
    char *argv[] = { (char[]){ "iperf3" }, (char[]){ "-c" }, (char[]){ "127.0.0.1" },
                     (char[]){ "-p" },     b->port,          (char[]){ "-J" },
                     (char[]){ "-n" },     bytes_text,       NULL };
    int out[2], status;
    struct rusage usage = { 0 };
    snprintf(bytes_text, sizeof bytes_text, "%" PRIu64, b->bytes);
    if (pipe2(out, O_CLOEXEC) < 0)
        return err_sys(e, SHD_EIO, "pipe");
    const pid_t child = start(argv, out[1]);
    close(out[1]);
    const size_t bytes = hear(out[0], answer, sizeof answer - 1);
    answer[bytes] = 0;
    close(out[0]);
    if (child < 0 || wait4(child, &status, 0, &usage) != child || status != 0)
        return err_set(e, SHD_EGONE, "iperf3 failed: %.200s", answer);
    *ret_cpu_s = cpu_s(&usage);
    return rate_of(answer, bytes, ret_rate, e);
}

static int measure_iperf(struct bench *b, bool counts, struct shd_err *e)
{
    char *argv[] = { (char[]){ "iperf3" },
                     (char[]){ "-s" },
                     (char[]){ "-1" },
                     (char[]){ "-B" },
                     (char[]){ "127.0.0.1" },
                     (char[]){ "-p" },
                     b->port,
                     (char[]){ "--forceflush" },
                     NULL };
    double rate = 0, client_s = 0;
    struct rusage usage = { 0 };
    int out[2], status;
    if (pipe2(out, O_CLOEXEC) < 0)
        return err_sys(e, SHD_EIO, "pipe");
    const pid_t server = start(argv, out[1]);
    close(out[1]);
    int r = server > 0 && wait_listening(out[0]) ? SHD_OK
                                                 : err_set(e, SHD_EGONE, "iperf3 -s says nothing");
    if (r == SHD_OK)
        r = run_client(b, &rate, &client_s, e);
    if (r != SHD_OK && server > 0)
        kill(server, SIGKILL);
    while (r == SHD_OK && hear(out[0], (char[4096]){ 0 }, 4096) > 0) {
    }
    close(out[0]);
    if (server > 0 && wait4(server, &status, 0, &usage) != server)
        return err_sys(e, SHD_EIO, "wait for iperf3");
    if (r != SHD_OK || !counts)
        return r;
    stat_add(&b->iperf.rate, rate);
    stat_add(&b->iperf.cpu, (client_s + cpu_s(&usage)) / ((double)b->bytes * 1e-9));
    return SHD_OK;
}

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

/* -- Setting up -------------------------------------------------------------------------------- */

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
    cluster_free(&cluster);
    if (r == SHD_OK)
        r = bulk_keys_new(b->file, "a", &b->a, e);
    return r == SHD_OK ? bulk_keys_new(b->file, "b", &b->b, e) : r;
}

static void remove_hosts(struct bench *b)
{
    static const char *const names[] = { "c.json", "a.key", "b.key" };
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
    b->frame_bytes = (uint64_t)b->frame_kib << 10;
    b->ring_bytes = (uint64_t)b->ring_mib << 20;
    if (b->ring_bytes % b->frame_bytes != 0)
        return err_set(e, SHD_EINVAL, "a ring of %" PRIu32 " MiB is no multiple of %" PRIu32 " KiB",
                       b->ring_mib, b->frame_kib);
    b->bytes = ((uint64_t)b->mib << 20) / b->frame_bytes * b->frame_bytes;
    if (b->bytes == 0)
        return err_set(e, SHD_EINVAL, "%" PRIu32 " MiB are no frame", b->mib);
    b->from = map_ring(b->ring_bytes);
    b->to = map_ring(b->ring_bytes);
    b->shared = map_ring(4096);
    return b->from != NULL && b->to != NULL && b->shared != NULL
               ? SHD_OK
               : err_set(e, SHD_ENOMEM, "no memory for two rings of %" PRIu32 " MiB", b->ring_mib);
}

/* -- Reporting --------------------------------------------------------------------------------- */

static void report_way(const struct bench *b, const struct way *way)
{
    char name[64];
    snprintf(name, sizeof name, "bulk.%s.rate", way->name);
    stat_print(b->as_json, name, "GB/s", &way->rate);
    snprintf(name, sizeof name, "bulk.%s.cpu", way->name);
    stat_print(b->as_json, name, "s/GB", &way->cpu);
}

static void report_ratio(const struct bench *b, const char *what, const struct stat_series *a,
                         const struct stat_series *other)
{
    const struct stat_series ratio = stat_ratio(a, other);
    stat_print(b->as_json, what, "", &ratio);
}

static void report(const struct bench *b)
{
    stat_print_head(b->as_json);
    report_way(b, &b->tls);
    report_way(b, &b->plain);
    report_ratio(b, "bulk.tls_over_plain.rate", &b->tls.rate, &b->plain.rate);
    report_ratio(b, "bulk.tls_over_plain.cpu", &b->tls.cpu, &b->plain.cpu);
    if (!b->has_iperf)
        return;
    report_way(b, &b->iperf);
    report_ratio(b, "bulk.tls_over_iperf3.rate", &b->tls.rate, &b->iperf.rate);
    report_ratio(b, "bulk.tls_over_iperf3.cpu", &b->tls.cpu, &b->iperf.cpu);
}

static int run(struct bench *b, struct shd_err *e)
{
    int r = map_rings(b, e);
    if (r == SHD_OK)
        r = make_hosts(b, e);
    if (r == SHD_OK)
        r = find_port(b, e);
    for (uint32_t i = 0; r == SHD_OK && i <= b->rounds; i++) { /* the first one warms up */
        r = measure(b, &b->tls, i > 0, e);
        if (r == SHD_OK)
            r = measure(b, &b->plain, i > 0, e);
        if (r == SHD_OK && b->has_iperf)
            r = measure_iperf(b, i > 0, e);
    }
    if (r == SHD_OK)
        report(b);
    remove_hosts(b);
    return r;
}

int main(int argc, char **argv)
{
    static struct bench b = { .tls.name = "tls",
                              .plain.name = "plain",
                              .iperf.name = "iperf3",
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
                 "loopback: by TLS as\nthey send them, without it, and by iperf3, one transfer of "
                 "each in turn.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    struct shd_err e = { 0 };
    bench_flags(&flags, argc, argv, NULL);
    signal(SIGPIPE, SIG_IGN);
    b.has_iperf = is_there();
    if (!b.has_iperf)
        fprintf(stderr, "bench_bulk: there is no iperf3, which is left out\n");
    bench_check(run(&b, &e), &e);
    return 0;
}
