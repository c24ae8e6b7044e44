/* What a control plane of many hosts costs: a step of H hosts with G daemons and G workers each, as
 * one daemon, one worker and one host's relay have it (scale.h says what of them is real), beside
 * what `shardctl plan --hosts H --gpus G` says of the same. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "bench/bench.h"
#include "bench/scale.h"
#include "client/ctl/base/child.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

#define HOSTS_EACH    8u /* up to so many each host's relay is run, else the first and the last */
#define PATH_BYTES    4096u
#define COMMAND_BYTES (2 * PATH_BYTES + 200u)
#define SLOTS         2u /* of an inbox: the least */

struct planned {
    uint64_t in, out; /* messages of the busiest host */
    uint64_t connections;
};

struct bench {
    uint32_t hosts, gpus, micros, units, rounds;
    uint32_t sessions, steps; /* of those that run */
    uint64_t elems, seed;
    bool as_json;
};

struct figures {
    struct scale_daemon daemon;
    struct scale_worker worker;
    struct scale_relay relay; /* the busiest host's, each number by itself */
    struct planned planned;
    uint64_t inbox_bytes;      /* a worker's, at the first daemon */
    double relay_s, relay_mib; /* by what running ones take; without: 0 */
};

/* -- What is planned --------------------------------------------------------------------------- */

static int write_spec(const char *json, char path[PATH_BYTES], struct shd_err *e)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(path, PATH_BYTES, "%s/shd-scale.XXXXXX", tmp != NULL ? tmp : "/tmp");
    const int fd = mkstemp(path);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make '%.100s'", path);
    const size_t bytes = strlen(json);
    const bool ok = write(fd, json, bytes) == (ssize_t)bytes;
    close(fd);
    return ok ? SHD_OK : err_sys(e, SHD_EIO, "write '%.100s'", path);
}

static int read_plan(FILE *from, struct planned *ret, struct shd_err *e)
{
    json_int_t in, out, connections;
    json_t *root = json_loadf(from, 0, NULL);
    const int failed = json_unpack(root, "{s:{s:{s:I, s:I}, s:I}}", "scale", "relays",
                                   "messages_in", &in, "messages_out", &out, "relay_connections",
                                   &connections);
    json_decref(root);
    if (failed != 0)
        return err_set(e, SHD_EPROTO, "`shardctl plan` says nothing of --hosts");
    *ret = (struct planned){ (uint64_t)in, (uint64_t)out, (uint64_t)connections };
    return SHD_OK;
}

/* By the program beside this one. */
static int ask_plan(const struct scale *s, const char *spec_json, struct planned *ret,
                    struct shd_err *e)
{
    char self[PATH_BYTES], spec[PATH_BYTES], command[COMMAND_BYTES];
    int r = child_find_self(self, sizeof self, e);
    if (r == SHD_OK)
        r = write_spec(spec_json, spec, e);
    if (r != SHD_OK)
        return r;
    *strrchr(self, '/') = '\0';
    snprintf(command, sizeof command,
             "'%s/shardctl' plan --json --spec '%s' --hosts %" PRIu32 " --gpus %" PRIu32
             " --micro-batches-per-worker %" PRIu32,
             self, spec, s->hosts, s->gpus, s->micros);
    FILE *from = popen(command, "r");
    r = from != NULL ? read_plan(from, ret, e) : err_sys(e, SHD_EIO, "run shardctl");
    if (from != NULL)
        pclose(from);
    unlink(spec);
    return r;
}

/* -- One arrangement --------------------------------------------------------------------------- */

static void keep_most(struct scale_relay *most, const struct scale_relay *r)
{
    most->in = r->in > most->in ? r->in : most->in;
    most->out = r->out > most->out ? r->out : most->out;
    most->replies = r->replies > most->replies ? r->replies : most->replies;
    most->frames = r->frames > most->frames ? r->frames : most->frames;
    most->cpu_ns = r->cpu_ns > most->cpu_ns ? r->cpu_ns : most->cpu_ns;
    most->sessions = r->sessions;
    most->mirrors = r->mirrors;
}

static int run_relays(const struct scale *s, struct figures *f, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t host = 0; r == SHD_OK && host < s->hosts; host++) {
        struct scale_relay one;
        if (s->hosts > HOSTS_EACH && host > 0 && host + 1 < s->hosts)
            continue;
        r = scale_relay(s, host, &f->daemon, &one, e);
        if (r == SHD_OK)
            keep_most(&f->relay, &one);
    }
    return r;
}

static int run(const struct bench *b, uint32_t hosts, uint32_t gpus, struct figures *f,
               struct shd_err *e)
{
    struct scale s = { .hosts = hosts, .gpus = gpus, .micros = b->micros, .seed = b->seed };
    *f = (struct figures){ .inbox_bytes = 0 };
    if ((uint64_t)hosts * gpus > SHD_OWNERS_MAX)
        return err_set(e, SHD_ERANGE,
                       "--hosts %" PRIu32 " --gpus %" PRIu32 ": a model has at most %u daemons",
                       hosts, gpus, SHD_OWNERS_MAX);
    char *json = scale_spec(b->units, b->elems, scale_owners(&s) * b->micros);
    CHECK(json != NULL);
    int r = scale_init(&s, json, e);
    if (r == SHD_OK)
        r = scale_daemon(&s, b->rounds, &f->daemon, e);
    if (r == SHD_OK)
        r = scale_worker(&s, &f->daemon, b->rounds, &f->worker, e);
    if (r == SHD_OK)
        r = run_relays(&s, f, e);
    if (r == SHD_OK)
        r = ask_plan(&s, json, &f->planned, e);
    if (r == SHD_OK)
        f->inbox_bytes = shardmap_inbox_bytes(s.maps[0], SLOTS);
    scale_deinit(&s);
    free(json);
    return r;
}

/* -- Showing ----------------------------------------------------------------------------------- */

/* Requests of workers here are passed on as by the relay beside workers, those of workers there as
 * by the one beside the daemon: half of all each. */
static void add_real(struct figures *f, const struct scale_real *real)
{
    f->relay_s = (double)f->relay.replies / 2 * (real->near.us + real->far.us) * 1e-6;
    f->relay_mib = (double)f->relay.sessions / 2 * (real->near.kib + real->far.kib) / 1024;
}

static void figure(const char *what, uint32_t hosts, uint32_t gpus, double value, const char *unit)
{
    printf("{\"name\":\"scale.%" PRIu32 "x%" PRIu32 ".%s\",\"value\":%.6g,\"unit\":\"%s\","
           "\"min\":%.6g,\"max\":%.6g,\"n\":1}\n",
           hosts, gpus, what, value, unit, value, value);
}

static void print_json(uint32_t hosts, uint32_t gpus, const struct figures *f)
{
    const struct scale_relay *r = &f->relay;
    const struct {
        const char *what, *unit;
        double value;
    } all[] = {
        { "daemon.requests", "", (double)f->daemon.requests },
        { "daemon.replies", "", (double)f->daemon.replies },
        { "daemon.sessions", "", hosts * gpus },
        { "daemon.returns_ms", "ms", (double)f->daemon.returns_ns / NS_PER_MS },
        { "daemon.commit_ms", "ms", (double)f->daemon.commit_ns / NS_PER_MS },
        { "daemon.lease_ms", "ms", (double)f->daemon.lease_ns / NS_PER_MS },
        { "daemon.session_bytes", "B", (double)f->daemon.session_bytes },
        { "daemon.core_bytes", "B", (double)(f->daemon.core_bytes + f->daemon.ledger_bytes) },
        { "daemon.inbox_bytes", "B", (double)f->inbox_bytes },
        { "worker.requests", "", (double)f->worker.requests },
        { "worker.returns_ms", "ms", (double)f->worker.returns_ns / NS_PER_MS },
        { "worker.commit_ms", "ms", (double)f->worker.commit_ns / NS_PER_MS },
        { "worker.turn_bytes", "B", (double)f->worker.turn_bytes },
        { "relay.in", "", (double)r->in },
        { "relay.out", "", (double)r->out },
        { "relay.replies", "", (double)r->replies },
        { "relay.frames", "", (double)r->frames },
        { "relay.cpu_ms", "ms", (double)r->cpu_ns / NS_PER_MS },
        { "relay.connections", "", (double)(r->sessions + r->mirrors) },
        { "relay.runs_s", "s", f->relay_s },
        { "relay.memory_mib", "MiB", f->relay_mib },
        { "planned.in", "", (double)f->planned.in },
        { "planned.out", "", (double)f->planned.out },
        { "planned.connections", "", (double)f->planned.connections },
    };
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        figure(all[i].what, hosts, gpus, all[i].value, all[i].unit);
}

static void print_head(const struct bench *b)
{
    printf("\nA step of %" PRIu32 " units and %" PRIu32 " micro-batches a worker, seed %" PRIu64
           ", the quickest of %" PRIu32 ".\n"
           "Real: messages packed and unpacked, the daemon's core, ledger, replies and leases, the "
           "worker's\nturn over all owners, the relay's look at each message and its frames' "
           "heads. Simulated: all other\nprocesses, sockets, TLS, threads, gradients and kernels. "
           "ms: processor time of a step. As run: by\nwhat relays take that run, for as many "
           "requests and sessions.\n\n",
           b->units, b->micros, b->seed, b->rounds);
    printf("%-8s | %-8s %7s %7s %7s | %-8s %7s %7s | %-7s %7s %7s %7s %7s | %-8s %7s\n", "",
           "daemon", "returns", "commit", "leases", "worker", "returns", "commit", "relay", "", "",
           "", "connec-", "as run", "");
    printf("%-8s | %8s %7s %7s %7s | %8s %7s %7s | %7s %7s %7s %7s %7s | %8s %7s\n", "H x G",
           "requests", "ms", "ms", "ms", "requests", "ms", "ms", "in", "out", "planned", "ms",
           "tions", "s", "MiB");
}

static void print_row(uint32_t hosts, uint32_t gpus, const struct figures *f)
{
    char name[32];
    const double ms = 1.0 / NS_PER_MS;
    snprintf(name, sizeof name, "%" PRIu32 " x %" PRIu32, hosts, gpus);
    printf("%-8s | %8" PRIu64 " %7.2f %7.2f %7.2f | %8" PRIu64 " %7.2f %7.2f | %7" PRIu64
           " %7" PRIu64 " %7" PRIu64 " %7.2f %7" PRIu64 " | %8.2f %7.0f\n",
           name, f->daemon.requests, (double)f->daemon.returns_ns * ms,
           (double)f->daemon.commit_ns * ms, (double)f->daemon.lease_ns * ms, f->worker.requests,
           (double)f->worker.returns_ns * ms, (double)f->worker.commit_ns * ms, f->relay.in,
           f->relay.out, f->planned.in > f->planned.out ? f->planned.in : f->planned.out,
           (double)f->relay.cpu_ns * ms, f->relay.sessions + f->relay.mirrors, f->relay_s,
           f->relay_mib);
    fflush(stdout);
}

static int show(const struct bench *b, const struct scale_real *real, uint32_t hosts, uint32_t gpus,
                struct shd_err *e)
{
    struct figures f;
    const int r = run(b, hosts, gpus, &f, e);
    if (r != SHD_OK)
        return r;
    add_real(&f, real);
    if (b->as_json)
        print_json(hosts, gpus, &f);
    else
        print_row(hosts, gpus, &f);
    return SHD_OK;
}

static void print_process(const struct bench *b, const char *what, const char *name,
                          const struct scale_process *p)
{
    if (!b->as_json) {
        printf("  %-32s %7.1f us a request and its reply, %7.1f KiB a session\n", what, p->us,
               p->kib);
        return;
    }
    printf("{\"name\":\"scale.real.%s_us\",\"value\":%.6g,\"unit\":\"us\",\"min\":%.6g,"
           "\"max\":%.6g,\"n\":1}\n"
           "{\"name\":\"scale.real.%s_kib\",\"value\":%.6g,\"unit\":\"KiB\",\"min\":%.6g,"
           "\"max\":%.6g,\"n\":1}\n",
           name, p->us, p->us, p->us, name, p->kib, p->kib, p->kib);
}

static int show_real(const struct bench *b, struct scale_real *ret_real, struct shd_err *e)
{
    const int r = scale_real(b->sessions, b->units, b->steps, ret_real, e);
    if (r != SHD_OK)
        return r;
    if (b->as_json)
        printf("{\"name\":\"scale.real.requests\",\"value\":%" PRIu64 ",\"unit\":\"\","
               "\"min\":%" PRIu64 ",\"max\":%" PRIu64 ",\"n\":1}\n",
               ret_real->requests, ret_real->requests, ret_real->requests);
    else
        printf("Two relays and a daemon that run, %" PRIu32 " workers' sessions, %" PRIu64
               " requests; gradients of 4 KiB by TLS.\nProcessor time and memory of their own:\n",
               b->sessions, ret_real->requests);
    print_process(b, "relay beside the workers", "near", &ret_real->near);
    print_process(b, "relay beside the daemon", "far", &ret_real->far);
    print_process(b, "daemon", "daemon", &ret_real->daemon);
    return SHD_OK;
}

int main(int argc, char **argv)
{
    static const uint32_t table_of[][2] = { { 2, 1 },   { 2, 8 },   { 8, 1 },   { 8, 8 },
                                            { 128, 1 }, { 128, 8 }, { 1024, 1 } };
    static struct bench b = { .micros = 1,
                              .units = 34,
                              .rounds = 3,
                              .elems = UINT64_C(198230016),
                              .seed = 1,
                              .sessions = 64,
                              .steps = 10 };
    static const struct flag table[] = {
        { "hosts", 0, FLAG_U32, "H", "these hosts alone, with --gpus (2, 8, 128 and 1024)",
          &b.hosts, 1, SHD_OWNERS_MAX },
        { "gpus", 0, FLAG_U32, "G", "daemons, and workers, of a host (1 and 8)", &b.gpus, 1,
          SHD_OWNERS_MAX },
        { "micro-batches-per-worker", 0, FLAG_U32, "N", "each returned by itself (1)", &b.micros, 1,
          SHD_MICROS_MAX },
        { "units", 0, FLAG_U32, "N", "of the model (34)", &b.units, 1, SHD_UNITS_MAX },
        { "elems", 0, FLAG_U64, "N", "of a unit (198230016: 6.74e9 in 34)", &b.elems, 1,
          UINT64_C(1) << 40 },
        { "rounds", 0, FLAG_U32, "N", "steps, of which the quickest counts (3)", &b.rounds, 1,
          1000 },
        { "seed", 0, FLAG_U64, "N", "of the order in which gradients come (1)", &b.seed, 0,
          UINT64_C(1) << 53 },
        { "sessions", 0, FLAG_U32, "N", "workers at relays that run (64); 0: none run", &b.sessions,
          0, 1024 },
        { "steps", 0, FLAG_U32, "N", "of these (10)", &b.steps, 1, 100000 },
        BENCH_JSON(&b.as_json),
    };
    const struct flags flags = {
        .usage = "bench_scale [flags]",
        .about = "Messages, sessions, processor time and memory of a step of many hosts, as one "
                 "daemon, one worker\nand one relay have it, beside `shardctl plan --hosts H "
                 "--gpus G`.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    struct scale_real real = { .requests = 0 };
    struct shd_err e = { 0 };
    bench_flags(&flags, argc, argv, NULL);
    if ((b.hosts == 0) != (b.gpus == 0))
        bench_check(err_set(&e, SHD_EINVAL, "--hosts and --gpus: both, or neither"), &e);
    if (b.sessions > 0)
        bench_check(show_real(&b, &real, &e), &e);
    if (!b.as_json)
        print_head(&b);
    if (b.hosts > 0)
        bench_check(show(&b, &real, b.hosts, b.gpus, &e), &e);
    for (size_t i = 0; b.hosts == 0 && i < ARRAY_SIZE(table_of); i++)
        bench_check(show(&b, &real, table_of[i][0], table_of[i][1], &e), &e);
    return 0;
}
