/* The part of bench_scale in which relays run: two of them, and a daemon, as programs, between
 * workers that one thread of this process plays: sessions as a worker's library attaches them
 * (daemon/relay/attach.h does the same), its requests, a turn of each. What it computes is not
 * measured; gradients are zeros, and cross by TLS. */
#include "bench/scale.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/paths/turn.h"
#include "daemon/relay/attach.h"
#include "daemon/relay/report.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/cluster.h"
#include "proto/share/listen.h"
#include "proto/spec/layout.h"

#define PATH_BYTES 200u
#define SLOTS      2u
#define READY_NS   (60 * NS_PER_S)
#define ANSWER_NS  (60 * NS_PER_S)

struct worker {
    struct attach at; /* owned */
    uint64_t session, seq;
    uint32_t model, left; /* units that are to be returned */
    bool taken[SLOTS];    /* by gradients that are not credited yet */
    bool prepares, done;
    struct turn *turn; /* owned */
};

struct box {
    char base[PATH_BYTES], cluster[PATH_BYTES], near[PATH_BYTES], far[PATH_BYTES];
    pid_t relay_near, relay_far, daemon;
    uint32_t count, units;
    struct worker *workers; /* owned, [count] */
    struct pollfd *polls;   /* owned, [count] */
    struct wire_arena arena;
    uint64_t step, requests;
};

/* -- Processes --------------------------------------------------------------------------------- */

static int add_host(const struct box *b, struct cluster *cluster, const char *name, bool serves,
                    struct shd_err *e)
{
    struct cluster_host host = { .name = "" };
    char path[PATH_BYTES], address[LISTEN_NAME_BYTES];
    bool remote;
    int fd;
    int r = listen_tcp("127.0.0.1:0", 0, &fd, &remote, e); /* a port that nobody has now */
    if (r != SHD_OK)
        return r;
    r = listen_name(fd, address, e);
    close(fd);
    if (r == SHD_OK)
        r = cluster_key_path(b->cluster, name, path, sizeof path, e);
    if (r == SHD_OK)
        r = cluster_key_new(path, host.key, e);
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.address, sizeof host.address, "%.*s", (int)sizeof host.address - 1, address);
    snprintf(host.devices, sizeof host.devices, "%s", serves ? "cpu0" : "");
    return r == SHD_OK ? cluster_add(cluster, &host, e) : r;
}

static int make_base(struct box *b, struct shd_err *e)
{
    const char *tmp = getenv("TMPDIR");
    struct cluster cluster = { 0 };
    snprintf(b->base, sizeof b->base, "%.100s/shd-scale.XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(b->base) == NULL)
        return err_sys(e, SHD_EIO, "make '%.150s'", b->base);
    snprintf(b->cluster, sizeof b->cluster, "%.150s/c.json", b->base);
    snprintf(b->near, sizeof b->near, "%.150s/a", b->base);
    snprintf(b->far, sizeof b->far, "%.150s/b", b->base);
    if (mkdir(b->near, 0700) < 0 || mkdir(b->far, 0700) < 0)
        return err_sys(e, SHD_EIO, "make directories in '%.150s'", b->base);
    int r = add_host(b, &cluster, "a", /* serves= */ false, e);
    if (r == SHD_OK)
        r = add_host(b, &cluster, "b", /* serves= */ true, e);
    if (r == SHD_OK)
        r = cluster_save(b->cluster, &cluster, e);
    cluster_free(&cluster);
    return r;
}

static void remove_base(const struct box *b)
{
    static const char *const names[] = {
        "c.json", "a.key", "b.key", "b/cpu0.lock", "a/" REPORT_FILE, "b/" REPORT_FILE, "a", "b", ""
    };
    for (size_t i = 0; b->base[0] != 0 && i < ARRAY_SIZE(names); i++) {
        char path[2 * PATH_BYTES];
        snprintf(path, sizeof path, "%s/%s", b->base, names[i]);
        (void)remove(path);
    }
}

static int start(char *const *argv, pid_t *ret_pid, struct shd_err *e)
{
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    const struct child_spawn spawn = {
        .argv = argv, .envp = environ, .in = null, .out = STDERR_FILENO, .err = STDERR_FILENO
    };
    const int r = child_spawn(&spawn, ret_pid, e);
    close(null);
    return r;
}

static int start_relay(struct box *b, const char *host, char *dir, pid_t *ret_pid,
                       struct shd_err *e)
{
    char shardd[4096], name[2] = { host[0] };
    char *argv[] = { shardd,
                     (char[]){ "--relay" },
                     (char[]){ "--cluster" },
                     b->cluster,
                     (char[]){ "--host" },
                     name,
                     (char[]){ "--runtime-dir" },
                     dir,
                     (char[]){ "--log-level" },
                     (char[]){ "error" },
                     NULL };
    const int r = child_find_shardd(shardd, sizeof shardd, e);
    return r == SHD_OK ? start(argv, ret_pid, e) : r;
}

static int start_daemon(struct box *b, struct shd_err *e)
{
    char shardd[4096];
    char *argv[] = { shardd,
                     (char[]){ "--device" },
                     (char[]){ "cpu0" },
                     (char[]){ "--runtime-dir" },
                     b->far,
                     (char[]){ "--threads" },
                     (char[]){ "1" },
                     (char[]){ "--log-level" },
                     (char[]){ "error" },
                     NULL };
    unsetenv("NOTIFY_SOCKET"); /* nobody here would keep what it stores */
    const int r = child_find_shardd(shardd, sizeof shardd, e);
    return r == SHD_OK ? start(argv, &b->daemon, e) : r;
}

static void stop(pid_t pid)
{
    if (pid <= 0)
        return;
    child_signal(pid, SIGTERM);
    waitpid(pid, NULL, 0);
}

static int wait_ready(const char *dir, struct shd_err *e)
{
    const uint64_t end_ns = clock_now_ns() + READY_NS;
    struct attach at;
    int r;
    while ((r = attach_open(dir, "cpu0", &at, e)) != SHD_OK && clock_now_ns() < end_ns)
        poll(NULL, 0, 10);
    if (r == SHD_OK)
        attach_close(&at);
    return r;
}

static int start_all(struct box *b, struct shd_err *e)
{
    int r = make_base(b, e);
    if (r == SHD_OK)
        r = start_daemon(b, e);
    if (r == SHD_OK)
        r = wait_ready(b->far, e);
    if (r == SHD_OK)
        r = start_relay(b, "b", b->far, &b->relay_far, e);
    if (r == SHD_OK)
        r = start_relay(b, "a", b->near, &b->relay_near, e);
    return r == SHD_OK ? wait_ready(b->near, e) : r;
}

/* -- Workers ----------------------------------------------------------------------------------- */

static int say(struct box *b, struct worker *w, struct wire_request *q, struct shd_err *e)
{
    struct scale_frame frame;
    q->session = w->session;
    q->seq = ++w->seq;
    scale_pack(q, &frame);
    b->requests++;
    return zconn_write(&w->at.z, frame.bytes, frame.used, e);
}

static int ask(struct box *b, struct worker *w, struct wire_request *q, struct wire_reply *reply,
               struct shd_err *e)
{
    q->session = w->session;
    q->seq = ++w->seq;
    b->arena.used = 0;
    return attach_ask(&w->at, q, ANSWER_NS, &b->arena, reply, e);
}

static int attach(struct box *b, struct worker *w, const char *spec, struct shd_err *e)
{
    struct wire_request hello = { .type = WIRE_HELLO };
    struct wire_request opening = { .type = WIRE_OPEN_MODEL };
    struct wire_reply reply;
    hello.hello = (struct wire_hello){
        .protocol = SHD_PROTOCOL, .role = WIRE_TRAINER, .name = "bench_scale", .level = WIRE_LEVEL
    };
    opening.open_model = (struct wire_open_model){
        .spec = { (const uint8_t *)spec, strlen(spec) }, .name = "", .owners = 1, .slots = SLOTS
    };
    void *memory = sys_malloc(turn_bytes(1));
    if (memory == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a worker");
    w->turn = turn_init(memory, 1, 1);
    int r = attach_open(b->near, "cpu0", &w->at, e);
    if (r != SHD_OK)
        return r;
    memcpy(hello.hello.token, w->at.welcome.token, SHD_TOKEN_BYTES);
    r = ask(b, w, &hello, &reply, e);
    if (r == SHD_OK) {
        w->session = reply.welcome.session;
        r = ask(b, w, &opening, &reply, e);
    }
    if (r == SHD_OK)
        w->model = reply.layout.model;
    return r;
}

static uint32_t rank_of(const struct box *b, const struct worker *w)
{
    return (uint32_t)(w - b->workers);
}

static uint32_t free_slot(const struct worker *w)
{
    uint32_t slot = 0;
    while (slot < SLOTS && w->taken[slot])
        slot++;
    return slot;
}

/* Gradients while there is a slot, then Prepare. */
static int go_on(struct box *b, struct worker *w, struct shd_err *e)
{
    int r = SHD_OK;
    while (r == SHD_OK && w->left > 0 && free_slot(w) < SLOTS) {
        struct wire_request q = scale_return(b->step, rank_of(b, w), --w->left);
        q.return_grad.model = w->model;
        q.return_grad.attempt = 0;
        q.return_grad.slot = free_slot(w);
        w->taken[q.return_grad.slot] = true;
        r = say(b, w, &q, e);
    }
    if (r != SHD_OK || w->left > 0 || w->prepares)
        return r;
    struct wire_request q = scale_prepare(b->step);
    q.prepare.model = w->model;
    q.prepare.attempt = 0;
    w->prepares = true;
    return say(b, w, &q, e);
}

static int go_on_with_turn(struct box *b, struct worker *w, struct shd_err *e)
{
    enum turn_kind kind;
    uint32_t owner;
    if (turn_state(w->turn) == TURN_DONE) {
        w->done = true;
        return SHD_OK;
    }
    if (!turn_next(w->turn, &owner, &kind) || kind != TURN_COMMIT)
        return err_set(e, SHD_EINTERNAL, "a turn that asks nothing");
    struct wire_request q = scale_commit(b->step, turn_decision(w->turn));
    q.commit.model = w->model;
    q.commit.attempt = 0;
    turn_asked(w->turn, owner, kind);
    return say(b, w, &q, e);
}

static int hear(struct box *b, struct worker *w, const struct wire_reply *reply, struct shd_err *e)
{
    int r = SHD_OK;
    if (reply->status != SHD_OK)
        return err_set(e, reply->status, "refused: %s", reply->text);
    if (reply->type == WIRE_CREDIT) {
        if (reply->credit.slot >= SLOTS)
            return err_set(e, SHD_EPROTO, "a credit for slot %" PRIu32, reply->credit.slot);
        w->taken[reply->credit.slot] = false;
        return go_on(b, w, e);
    }
    if (reply->type == WIRE_PREPARED)
        r = turn_prepared(w->turn, 0, &reply->prepared, e);
    else if (reply->type == WIRE_COMMITTED)
        r = turn_committed(w->turn, 0, &reply->committed, e);
    else
        r = err_set(e, SHD_EPROTO, "a reply of type %d", (int)reply->type);
    return r == SHD_OK ? go_on_with_turn(b, w, e) : r;
}

static int hear_all(struct box *b, struct worker *w, struct shd_err *e)
{
    int r = zconn_read(&w->at.z, e);
    while (r == SHD_OK) {
        const uint8_t *body;
        struct wire_reply reply;
        size_t bytes;
        r = zconn_next(&w->at.z, &body, &bytes, e);
        b->arena.used = 0;
        if (r == SHD_OK)
            r = wire_reply_unpack(body, bytes, &b->arena, &reply, e);
        if (r == SHD_OK)
            r = hear(b, w, &reply, e);
    }
    return r == SHD_PENDING ? SHD_OK : r;
}

static int begin_step(struct box *b, struct worker *w, struct shd_err *e)
{
    const struct turn_update update = { .args = { .micro_batches = b->count, .lr = 1e-3 } };
    enum turn_kind kind;
    uint32_t owner;
    turn_begin(w->turn, b->step, &update);
    CHECK(turn_next(w->turn, &owner, &kind) && kind == TURN_PREPARE);
    turn_asked(w->turn, owner, kind);
    w->left = b->units;
    w->prepares = w->done = false;
    return go_on(b, w, e);
}

static int run_step(struct box *b, struct shd_err *e)
{
    uint32_t left = b->count;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < b->count; i++)
        r = begin_step(b, &b->workers[i], e);
    while (r == SHD_OK && left > 0) {
        for (uint32_t i = 0; i < b->count; i++)
            b->polls[i] = (struct pollfd){ .fd = b->workers[i].at.z.fd, .events = POLLIN };
        if (poll(b->polls, b->count, (int)(ANSWER_NS / NS_PER_MS)) <= 0)
            return err_set(e, SHD_ETIMEDOUT, "nobody is answered any more, at step %" PRIu64,
                           b->step);
        left = 0;
        for (uint32_t i = 0; r == SHD_OK && i < b->count; i++) {
            if (b->polls[i].revents != 0)
                r = hear_all(b, &b->workers[i], e);
            left += !b->workers[i].done;
        }
    }
    b->step++;
    return r;
}

/* -- Measuring --------------------------------------------------------------------------------- */

static double cpu_us(pid_t pid)
{
    struct timespec t = { 0 };
    clockid_t clock;
    CHECK(clock_getcpuclockid(pid, &clock) == 0 && clock_gettime(clock, &t) == 0);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* RssAnon: without what is shared, as segments are. */
static double memory_kib(pid_t pid)
{
    char path[64], line[200];
    double kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *from = fopen(path, "r");
    while (from != NULL && fgets(line, sizeof line, from) != NULL)
        (void)sscanf(line, "RssAnon: %lf", &kib);
    if (from != NULL)
        fclose(from);
    return kib;
}

static void look(const struct box *b, struct scale_real *at)
{
    at->near = (struct scale_process){ cpu_us(b->relay_near), memory_kib(b->relay_near) };
    at->far = (struct scale_process){ cpu_us(b->relay_far), memory_kib(b->relay_far) };
    at->daemon = (struct scale_process){ cpu_us(b->daemon), memory_kib(b->daemon) };
    at->requests = b->requests;
}

static struct scale_process spent(const struct box *b, const struct scale_process *none,
                                  const struct scale_process *begun,
                                  const struct scale_process *done, uint64_t requests)
{
    return (struct scale_process){ (done->us - begun->us) / (double)requests,
                                   (done->kib - none->kib) / b->count };
}

static int measure(struct box *b, const char *spec, uint32_t steps, struct scale_real *ret,
                   struct shd_err *e)
{
    struct scale_real none, begun, done;
    int r = SHD_OK;
    look(b, &none);
    for (uint32_t i = 0; r == SHD_OK && i < b->count; i++)
        r = attach(b, &b->workers[i], spec, e);
    if (r == SHD_OK)
        r = run_step(b, e); /* what is made at the first request is made */
    look(b, &begun);
    for (uint32_t i = 0; r == SHD_OK && i < steps; i++)
        r = run_step(b, e);
    look(b, &done);
    const uint64_t requests = done.requests - begun.requests;
    if (r != SHD_OK)
        return r;
    *ret = (struct scale_real){
        requests,
        spent(b, &none.near, &begun.near, &done.near, requests),
        spent(b, &none.far, &begun.far, &done.far, requests),
        spent(b, &none.daemon, &begun.daemon, &done.daemon, requests),
    };
    return SHD_OK;
}

static int make_workers(struct box *b, struct shd_err *e)
{
    b->workers = sys_calloc(b->count, sizeof *b->workers);
    b->polls = sys_calloc(b->count, sizeof *b->polls);
    b->arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                    .bytes = WIRE_ARENA_BYTES };
    if (b->workers == NULL || b->polls == NULL || b->arena.base == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " workers", b->count);
    for (uint32_t i = 0; i < b->count; i++)
        b->workers[i].at = ATTACH_CLOSED;
    return SHD_OK;
}

static void end(struct box *b)
{
    for (uint32_t i = 0; b->workers != NULL && i < b->count; i++) {
        attach_close(&b->workers[i].at);
        free(b->workers[i].turn);
    }
    stop(b->relay_near);
    stop(b->relay_far);
    stop(b->daemon);
    remove_base(b);
    free(b->workers);
    free(b->polls);
    free(b->arena.base);
}

int scale_real(uint32_t sessions, uint32_t units, uint32_t steps, struct scale_real *ret,
               struct shd_err *e)
{
    struct box b = { .count = sessions, .units = units };
    char *spec = scale_spec(units, SHD_BLOCK_ELEMS, sessions);
    if (spec == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a spec");
    int r = make_workers(&b, e);
    if (r == SHD_OK)
        r = start_all(&b, e);
    if (r == SHD_OK)
        r = measure(&b, spec, steps, ret, e);
    end(&b);
    free(spec);
    return r;
}
