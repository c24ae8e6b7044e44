/* Control plane: requests per second and latency of one real shardd with 1, 8 and 64 sessions, and
 * what a return costs.
 *
 * The request is GetBlob of a model without a blob: the cheapest one that does real work (frame
 * check, session check, model look-up, reply). Each session is a side channel, a token and a
 * DEALER of its own; one thread drives them all by zmq_poll(). Throughput keeps `depth` requests
 * of each session in flight, latency one. All sessions are busy at once, so latency at 64 is
 * mostly the queue of the other 63.
 *
 * A return: a worker of libshd trains a model of many small units beside that daemon, and computes
 * nothing. A step's processor time, the worker's and the daemon's, over its returns: with each go
 * what a schedule does around it (ZeRO-3: two acquires and releases) and its share of the commit.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <zmq.h>

#include "bench/bench.h"
#include "client/ctl/base/child.h"
#include "client/ctl/base/rundir.h"
#include "client/session/where.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/fdpass.h"
#include "proto/wire/wire.h"

#define SESSIONS_MAX   64u
#define DEPTH_MAX      64u
#define ROUNDS_MAX     101u
#define SAMPLES_MAX    2000000u
#define READY_MS       10000
#define REPLY_MS       5000
#define REQUEST_BYTES  4096u
#define ENDPOINT_BYTES (RUNDIR_PATH_BYTES + 32u)
#define RETURN_UNITS   256u
#define RETURN_MICROS  4u
#define RETURN_ELEMS   64u

static const char spec_json[] =
    "{\"name\":\"bench\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},"
    "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"t\",\"shape\":[2048]}]}]}";

struct peer {
    int side_fd;
    void *dealer;
    uint64_t session;
    uint64_t seq;
    uint64_t sent_ns; /* of the one in flight, latency mode */
};

struct bench {
    struct rundir dir;
    pid_t daemon;
    void *zmq;
    struct peer peers[SESSIONS_MAX];
    unsigned peer_count;
    uint32_t model;
    uint8_t *arena_memory; /* owned, WIRE_ARENA_BYTES */
    double *samples;       /* owned, [SAMPLES_MAX]: latencies in us */
    uint32_t rounds, depth;
    double seconds;
    bool as_json;
};

/* The q-quantile of sorted[n], n > 0: nearest rank. */
static double quantile(const double *sorted, size_t n, double q)
{
    const size_t rank = (size_t)(q * (double)n);
    return sorted[rank < n ? rank : n - 1];
}

/* -- The daemon ------------------------------------------------------------------------------ */

/* Wait until the daemon listens. */
static int wait_ready(const struct bench *b, struct shd_err *e)
{
    const uint64_t deadline = clock_now_ns() + (uint64_t)READY_MS * 1000000u;
    char path[ENDPOINT_BYTES];
    snprintf(path, sizeof(path), "%s/cpu0.sock", b->dir.path);
    while (clock_now_ns() < deadline) {
        int fd;
        if (side_connect(path, &fd, e) == SHD_OK) {
            close(fd);
            return SHD_OK;
        }
        if (waitpid(b->daemon, NULL, WNOHANG) == b->daemon)
            return err_set(e, SHD_EGONE, "shardd ended before it was ready");
        poll(NULL, 0, 10);
    }
    return err_set(e, SHD_ETIMEDOUT, "shardd was not ready after %d ms", READY_MS);
}

static int start_daemon(struct bench *b, struct shd_err *e)
{
    char path[PATH_MAX];
    int r = child_find_shardd(path, sizeof(path), e);
    if (r != SHD_OK)
        return r;
    unsetenv("NOTIFY_SOCKET"); /* nobody here would keep what it stores */
    char *argv[] = { path,
                     (char[]){ "--device" },
                     (char[]){ "cpu0" },
                     (char[]){ "--runtime-dir" },
                     b->dir.path,
                     (char[]){ "--threads" },
                     (char[]){ "1" },
                     (char[]){ "--log-level" },
                     (char[]){ "warn" },
                     NULL };
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    const struct child_spawn spawn = {
        .argv = argv, .envp = environ, .in = null, .out = STDERR_FILENO, .err = STDERR_FILENO
    };
    r = child_spawn(&spawn, &b->daemon, e);
    close(null);
    if (r == SHD_OK)
        r = wait_ready(b, e);
    return r;
}

static void stop_daemon(struct bench *b)
{
    if (b->daemon <= 0)
        return;
    child_signal(b->daemon, SIGTERM);
    waitpid(b->daemon, NULL, 0);
    b->daemon = 0;
}

/* -- Sessions -------------------------------------------------------------------------------- */

static int peer_send(struct peer *p, struct wire_request *request, struct shd_err *e)
{
    uint8_t frame[REQUEST_BYTES];
    size_t bytes;
    request->seq = ++p->seq;
    request->session = p->session;
    const int r = wire_request_pack(request, frame, sizeof(frame), &bytes, e);
    if (r != SHD_OK)
        return r;
    if (zmq_send(p->dealer, frame, bytes, 0) < 0)
        return err_set(e, SHD_EIO, "send: %s", zmq_strerror(zmq_errno()));
    return SHD_OK;
}

/* Take one reply if one is there. *ret_got says so. A refusal is an error. */
static int peer_take(struct bench *b, struct peer *p, bool *ret_got, struct wire_reply *ret_reply,
                     struct shd_err *e)
{
    zmq_msg_t msg;
    zmq_msg_init(&msg);
    *ret_got = false;
    int r = SHD_OK;
    if (zmq_msg_recv(&msg, p->dealer, ZMQ_DONTWAIT) < 0) {
        if (zmq_errno() != EAGAIN)
            r = err_set(e, SHD_EIO, "receive: %s", zmq_strerror(zmq_errno()));
        zmq_msg_close(&msg);
        return r;
    }
    struct wire_arena arena = { .base = b->arena_memory, .bytes = WIRE_ARENA_BYTES };
    r = wire_reply_unpack(zmq_msg_data(&msg), zmq_msg_size(&msg), &arena, ret_reply, e);
    zmq_msg_close(&msg);
    if (r == SHD_OK && ret_reply->status != SHD_OK)
        r = err_set(e, ret_reply->status, "shardd refused: %s", ret_reply->text);
    *ret_got = r == SHD_OK;
    return r;
}

/* One request and its reply; ret_reply points into the arena until the next one. */
static int peer_ask(struct bench *b, struct peer *p, struct wire_request *request,
                    struct wire_reply *ret_reply, struct shd_err *e)
{
    int r = peer_send(p, request, e);
    bool got = false;
    while (r == SHD_OK && !got) {
        zmq_pollitem_t item = { .socket = p->dealer, .events = ZMQ_POLLIN };
        if (zmq_poll(&item, 1, REPLY_MS) <= 0)
            return err_set(e, SHD_ETIMEDOUT, "no reply within %d ms", REPLY_MS);
        r = peer_take(b, p, &got, ret_reply, e);
    }
    return r;
}

static int peer_hello(struct bench *b, struct peer *p, struct shd_err *e)
{
    char path[ENDPOINT_BYTES];
    snprintf(path, sizeof(path), "%s/cpu0.sock", b->dir.path);
    struct side_msg welcome;
    int r = side_connect(path, &p->side_fd, e);
    if (r == SHD_OK)
        r = side_recv(p->side_fd, REPLY_MS, &welcome, /* ret_fd= */ NULL, e);
    if (r != SHD_OK)
        return r;
    p->dealer = zmq_socket(b->zmq, ZMQ_DEALER);
    snprintf(path, sizeof(path), "ipc://%s/cpu0.zmq", b->dir.path);
    const int linger = 0;
    if (p->dealer == NULL || zmq_setsockopt(p->dealer, ZMQ_LINGER, &linger, sizeof(linger)) < 0 ||
        zmq_connect(p->dealer, path) < 0)
        return err_set(e, SHD_EIO, "connect to '%s': %s", path, zmq_strerror(zmq_errno()));
    struct wire_request hello = { .type = WIRE_HELLO };
    hello.hello = (struct wire_hello){ .protocol = SHD_PROTOCOL,
                                       .role = WIRE_TRAINER,
                                       .name = "bench_control" };
    memcpy(hello.hello.token, welcome.token, SHD_TOKEN_BYTES);
    struct wire_reply reply = { 0 };
    r = peer_ask(b, p, &hello, &reply, e);
    if (r == SHD_OK)
        p->session = reply.welcome.session;
    return r;
}

/* A further session; the first one opens the model. */
static int peer_add(struct bench *b, struct shd_err *e)
{
    struct peer *p = &b->peers[b->peer_count];
    *p = (struct peer){ .side_fd = -1 };
    b->peer_count++;
    int r = peer_hello(b, p, e);
    if (r != SHD_OK || b->model != 0)
        return r;
    struct wire_request open = { .type = WIRE_OPEN_MODEL };
    open.open_model = (struct wire_open_model){ .spec = { (const uint8_t *)spec_json,
                                                          strlen(spec_json) },
                                                .name = "",
                                                .owner = 0,
                                                .owners = 1 };
    struct wire_reply reply = { 0 };
    r = peer_ask(b, p, &open, &reply, e);
    if (r == SHD_OK)
        b->model = reply.layout.model;
    return r;
}

static void peers_free(struct bench *b)
{
    for (unsigned i = 0; i < b->peer_count; i++) {
        if (b->peers[i].dealer != NULL)
            zmq_close(b->peers[i].dealer);
        if (b->peers[i].side_fd >= 0)
            close(b->peers[i].side_fd);
    }
    b->peer_count = 0;
}

/* -- Measuring ------------------------------------------------------------------------------- */

struct round {
    unsigned depth;              /* requests of each session in flight */
    uint64_t begun_ns, until_ns; /* until there is a reply, where none has come by then */
    uint64_t replies;            /* counted */
    size_t samples;              /* latencies taken, depth 1 only */
};

static int ask_blob(const struct bench *b, struct peer *p, struct shd_err *e)
{
    struct wire_request request = { .type = WIRE_GET_BLOB };
    request.get_blob.model = b->model;
    p->sent_ns = clock_now_ns();
    return peer_send(p, &request, e);
}

/* Take what p has; each reply makes room for the next request, until the round is over. */
static int serve(struct bench *b, struct peer *p, struct round *round, uint64_t *in_flight,
                 struct shd_err *e)
{
    for (;;) {
        struct wire_reply reply = { 0 };
        bool got;
        int r = peer_take(b, p, &got, &reply, e);
        if (r != SHD_OK || !got)
            return r;
        const uint64_t now = clock_now_ns();
        (*in_flight)--;
        if (now >= round->until_ns && round->replies > 0)
            continue;
        round->replies++;
        if (now > round->until_ns)
            round->until_ns = now;
        if (round->depth == 1 && round->samples < SAMPLES_MAX)
            b->samples[round->samples++] = (double)(now - p->sent_ns) * 1e-3;
        r = ask_blob(b, p, e);
        if (r != SHD_OK)
            return r;
        (*in_flight)++;
    }
}

/* Keep all sessions busy for b->seconds; ends with nothing in flight. */
static int run_round(struct bench *b, struct round *round, struct shd_err *e)
{
    zmq_pollitem_t items[SESSIONS_MAX] = { 0 };
    uint64_t in_flight = 0;
    int r = SHD_OK;
    round->begun_ns = clock_now_ns();
    round->until_ns = round->begun_ns + (uint64_t)(b->seconds * 1e9);
    for (unsigned i = 0; i < b->peer_count; i++)
        items[i] = (zmq_pollitem_t){ .socket = b->peers[i].dealer, .events = ZMQ_POLLIN };
    for (unsigned i = 0; i < b->peer_count * round->depth && r == SHD_OK; i++, in_flight++)
        r = ask_blob(b, &b->peers[i % b->peer_count], e);
    while (r == SHD_OK && in_flight > 0) {
        if (zmq_poll(items, (int)b->peer_count, REPLY_MS) <= 0)
            return err_set(e, SHD_ETIMEDOUT, "no reply within %d ms", REPLY_MS);
        for (unsigned i = 0; i < b->peer_count && r == SHD_OK; i++)
            if ((items[i].revents & ZMQ_POLLIN) != 0)
                r = serve(b, &b->peers[i], round, &in_flight, e);
    }
    return r;
}

static void report(const struct bench *b, const char *what, const char *unit,
                   const struct stat_series *series)
{
    char name[64];
    snprintf(name, sizeof(name), "control.s%u.%s", b->peer_count, what);
    stat_print(b->as_json, name, unit, series);
    fflush(stdout);
}

/* All figures with the sessions there are. */
static int measure(struct bench *b, struct shd_err *e)
{
    struct stat_series rate = { .count = 0 }, p50 = { .count = 0 }, p99 = { .count = 0 };
    struct round warm = { .depth = b->depth };
    int r = run_round(b, &warm, e);
    for (unsigned i = 0; i < b->rounds && r == SHD_OK; i++) {
        struct round deep = { .depth = b->depth }, single = { .depth = 1 };
        r = run_round(b, &deep, e);
        if (r == SHD_OK)
            r = run_round(b, &single, e);
        if (r != SHD_OK)
            return r;
        qsort(b->samples, single.samples, sizeof(*b->samples), stat_ascending);
        stat_add(&rate, (double)deep.replies * 1e9 / (double)(deep.until_ns - deep.begun_ns));
        stat_add(&p50, quantile(b->samples, single.samples, 0.50));
        stat_add(&p99, quantile(b->samples, single.samples, 0.99));
    }
    if (r != SHD_OK)
        return r;
    report(b, "requests_per_s", "1/s", &rate);
    report(b, "p50_us", "us", &p50);
    report(b, "p99_us", "us", &p99);
    return SHD_OK;
}

/* -- Returns --------------------------------------------------------------------------------- */

/* A worker of libshd, without arithmetic. */
struct returns {
    shd_session *session; /* owned */
    shd_model *model;     /* of session */
    struct stat_series worker, daemon, both;
};

static char *returns_spec(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL)
        return NULL;
    fprintf(f,
            "{\"name\":\"returns\",\"micro_batches\":%u,\"optimizer\":{\"kind\":\"adamw\"},"
            "\"units\":[",
            RETURN_MICROS);
    for (unsigned u = 0; u < RETURN_UNITS; u++)
        fprintf(f, "%s{\"name\":\"u%u\",\"tensors\":[{\"name\":\"t%u\",\"shape\":[%u]}]}",
                u > 0 ? "," : "", u, u, RETURN_ELEMS);
    fprintf(f, "]}");
    fclose(f);
    return text;
}

static int returns_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    return 0;
}

static int returns_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params,
                            float *grad)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    memset(grad, 0, RETURN_ELEMS * sizeof *grad);
    return 0;
}

static int returns_open(struct returns *t, const struct bench *b, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options, .address = b->dir.path };
    char *spec = returns_spec();
    if (spec == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a spec");
    int r = shd_connect(&options, &t->session, e);
    if (r == SHD_OK)
        r = shd_model_open(t->session, spec, &t->model, e);
    free(spec);
    return r;
}

/* Processor time that this process and the daemon have had, in us. */
static int returns_used(const struct bench *b, double *ret_worker, double *ret_daemon,
                        struct shd_err *e)
{
    struct rusage own;
    clockid_t clock; /* getrusage() has no other process that lives */
    struct timespec at;
    if (getrusage(RUSAGE_SELF, &own) != 0 || clock_getcpuclockid(b->daemon, &clock) != 0 ||
        clock_gettime(clock, &at) != 0)
        return err_set(e, SHD_EIO, "the processor time of shardd or of this process is not known");
    *ret_worker = (double)(own.ru_utime.tv_sec + own.ru_stime.tv_sec) * 1e6 +
                  (double)(own.ru_utime.tv_usec + own.ru_stime.tv_usec);
    *ret_daemon = (double)at.tv_sec * 1e6 + (double)at.tv_nsec * 1e-3;
    return SHD_OK;
}

/* Steps for b->seconds, one at least. */
static int returns_round(struct returns *t, const struct bench *b, struct shd_err *e)
{
    static const uint32_t micros[RETURN_MICROS] = { 0, 1, 2, 3 };
    const struct shd_compute compute = { .size = sizeof compute,
                                         .forward = returns_forward,
                                         .backward = returns_backward };
    const struct shd_update update = { .size = sizeof update, .lr = 1e-3 };
    const uint64_t until_ns = clock_now_ns() + (uint64_t)(b->seconds * 1e9);
    double worker = 0, daemon = 0, worker_end = 0, daemon_end = 0;
    uint64_t steps = 0;
    int r = returns_used(b, &worker, &daemon, e);
    for (; r == SHD_OK && (steps == 0 || clock_now_ns() < until_ns); steps++) {
        struct shd_result result = { .size = sizeof result };
        r = shd_run_step(t->model, micros, RETURN_MICROS, &compute, &update, &result, e);
    }
    if (r == SHD_OK)
        r = returns_used(b, &worker_end, &daemon_end, e);
    if (r != SHD_OK)
        return r;
    const double returns = (double)steps * RETURN_UNITS * RETURN_MICROS;
    stat_add(&t->worker, (worker_end - worker) / returns);
    stat_add(&t->daemon, (daemon_end - daemon) / returns);
    stat_add(&t->both, (worker_end - worker + daemon_end - daemon) / returns);
    return SHD_OK;
}

static int measure_returns(const struct bench *b, struct shd_err *e)
{
    static struct returns t;
    struct stat_series *const all[] = { &t.worker, &t.daemon, &t.both };
    int r = returns_open(&t, b, e);
    if (r == SHD_OK)
        r = returns_round(&t, b, e);
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        all[i]->count = 0; /* that one warmed up */
    for (unsigned i = 0; i < b->rounds && r == SHD_OK; i++)
        r = returns_round(&t, b, e);
    shd_close(t.session);
    if (r != SHD_OK)
        return r;
    stat_print(b->as_json, "control.return.cpu_us", "us", &t.both);
    stat_print(b->as_json, "control.return.worker_us", "us", &t.worker);
    stat_print(b->as_json, "control.return.daemon_us", "us", &t.daemon);
    return SHD_OK;
}

static int measure_all(struct bench *b, struct shd_err *e)
{
    static const unsigned sessions[] = { 1, 8, SESSIONS_MAX };
    int r = start_daemon(b, e);
    for (size_t i = 0; i < ARRAY_SIZE(sessions) && r == SHD_OK; i++) {
        while (b->peer_count < sessions[i] && r == SHD_OK)
            r = peer_add(b, e);
        if (r == SHD_OK)
            r = measure(b, e);
    }
    peers_free(b);
    if (r == SHD_OK)
        r = measure_returns(b, e);
    stop_daemon(b);
    return r;
}

/* -- The program ----------------------------------------------------------------------------- */

static int run(struct bench *b, struct shd_err *e)
{
    b->arena_memory = aligned_alloc(16, WIRE_ARENA_BYTES);
    b->samples = calloc(SAMPLES_MAX, sizeof(*b->samples));
    b->zmq = zmq_ctx_new();
    if (b->arena_memory == NULL || b->samples == NULL || b->zmq == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory");
    int r = rundir_new(WHERE_RUN_PREFIX, &b->dir, e);
    if (r != SHD_OK)
        return r;
    r = measure_all(b, e);
    struct shd_err left;
    if (rundir_remove(&b->dir, &left) != SHD_OK)
        fprintf(stderr, "bench_control: %s\n", left.text);
    return r;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a closed stdout must not keep us from cleaning up */
    static struct bench b = { .rounds = 5, .depth = 4, .seconds = 0.5 };
    static const struct flag table[] = {
        { "rounds", 0, FLAG_U32, "N", "rounds per figure (5)", &b.rounds, 1, ROUNDS_MAX },
        { "seconds", 0, FLAG_REAL, "X", "length of a round (0.5)", &b.seconds, 0.01, 60 },
        { "depth", 0, FLAG_U32, "N",
          "requests of a session in flight for requests_per_s (4); 1 for p50, p99", &b.depth, 1,
          DEPTH_MAX },
        BENCH_JSON(&b.as_json),
    };
    const struct flags flags = {
        .usage = "bench_control [flags]",
        .about = "Requests per second and latency of one shardd with 1, 8 and 64 sessions. The "
                 "request is\nGetBlob without a blob; one thread drives all sessions. Then the "
                 "processor time of a return:\na step of 256 units of 64 elements and 4 "
                 "micro-batches, of worker and daemon, over its returns.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    bench_flags(&flags, argc, argv, NULL);
    if (!b.as_json)
        printf("control: GetBlob, %u rounds of %g s, depth %u for requests_per_s, 1 for p50 and "
               "p99; daemon with 1 compute thread; 1 driving thread\n",
               b.rounds, b.seconds, b.depth);
    stat_print_head(b.as_json);
    struct shd_err e = { 0 };
    const int r = run(&b, &e);
    if (r != SHD_OK)
        fprintf(stderr, "bench_control: %s\n", e.text);
    if (b.zmq != NULL)
        zmq_ctx_term(b.zmq);
    free(b.samples);
    free(b.arena_memory);
    return r == SHD_OK ? 0 : 1;
}
