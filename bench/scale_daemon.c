/* A daemon of bench_scale: the real core, ledger, replies and leases, and what the shell around
 * them does for a request: unpack, look whether it came before, serve, pack the reply and keep it.
 * Kernels are over as soon as they are begun. */
#include "bench/scale.h"

#include <inttypes.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/decide.h"
#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/replies.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

struct peer { /* a worker's session */
    struct replies *replies;
    uint64_t seq;
    uint32_t prepare; /* 1 + the request that waits; 0: none */
};

struct sent {    /* a request of a step */
    uint64_t at; /* in frames */
    uint32_t bytes, peer;
};

struct waiting { /* a Return whose credit is to come */
    uint32_t peer;
    uint64_t seq;
};

struct shell {
    const struct scale *s;
    uint32_t workers, units, micros; /* micros: of all workers */
    struct step *core;
    struct ledger ledger;
    void *core_memory, *ledger_memory, *lease_memory;
    struct lease *lease;
    struct peer *peers;          /* [workers] */
    struct sent *requests;       /* [workers * micros * units + workers]: of a step */
    uint8_t *frames;             /* of these */
    struct waiting *refs;        /* [requests] */
    struct step_action *kernels; /* [cells + units]: begun, in order */
    uint32_t *order;             /* [micros] */
    uint64_t kernel_first, kernel_last;
    uint32_t ref_last, request_count;
    bool sealed;
    uint64_t random;
    struct wire_arena arena;
    struct scale_frame reply;
    struct scale_daemon figures; /* of the step at hand */
};

/* xorshift64*, see https://en.wikipedia.org/wiki/Xorshift */
static uint32_t below(struct shell *sh, uint32_t n)
{
    sh->random ^= sh->random >> 12;
    sh->random ^= sh->random << 25;
    sh->random ^= sh->random >> 27;
    return (uint32_t)((sh->random * UINT64_C(0x2545f4914f6cdd1d)) >> 33) % n;
}

/* -- Answering --------------------------------------------------------------------------------- */

static void answer(struct shell *sh, uint32_t peer, uint64_t seq, struct wire_reply *reply,
                   struct scale_frame *ret_kept)
{
    struct shd_err e;
    reply->seq = seq;
    reply->text = "";
    CHECK(wire_reply_pack(reply, ret_kept->bytes, sizeof ret_kept->bytes, &ret_kept->used, &e) ==
          SHD_OK);
    replies_keep(sh->peers[peer].replies, seq, ret_kept->bytes, ret_kept->used);
    sh->figures.replies++;
}

static void credit(struct shell *sh, const struct step_action *a)
{
    const struct waiting *w = &sh->refs[a->ref - 1];
    struct wire_reply reply = { .type = WIRE_CREDIT };
    CHECK(!a->stale);
    answer(sh, w->peer, w->seq, &reply, &sh->figures.credit);
}

static void take(struct shell *sh, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        if (a->kind == STEP_DO_CREDIT)
            credit(sh, a);
        else if (a->kind == STEP_DO_SEALED)
            sh->sealed = true;
        else if (a->kind == STEP_DO_ACCUMULATE || a->kind == STEP_DO_APPLY)
            sh->kernels[sh->kernel_last++] = *a;
        else
            CHECK(a->kind == STEP_DO_PUBLISH || a->kind == STEP_DO_OPENED);
    }
}

/* What was begun is over: the word that the kernel would have stored, and on. */
static void run_kernels(struct shell *sh)
{
    while (sh->kernel_first < sh->kernel_last) {
        const struct step_action a = sh->kernels[sh->kernel_first++];
        struct step_actions next;
        struct fixsum sum;
        atomic_store(a.done.word, a.done.value);
        if (a.kind == STEP_DO_APPLY) {
            step_applied(sh->core, a.unit, &next);
        } else {
            fixsum_init(&sum);
            fixsum_add(&sum, 1.0 + a.unit);
            step_accumulated(sh->core, a.unit, a.last ? &sum : NULL, /* finite= */ true, &next);
        }
        take(sh, &next);
    }
}

/* -- Serving ----------------------------------------------------------------------------------- */

static void serve_return(struct shell *sh, const struct wire_request *q, uint32_t peer)
{
    const struct wire_return *req = &q->return_grad;
    struct step_actions actions;
    struct shd_err e;
    sh->refs[sh->ref_last++] = (struct waiting){ peer, q->seq };
    CHECK(step_when(sh->core, req->step, req->attempt) == STEP_WHEN_NOW);
    CHECK(step_return(sh->core, sh->ref_last, req->step, req->unit, req->micro, req->none,
                      req->metrics, req->metric_count, &actions, &e) == SHD_OK);
    sh->figures.waited += actions.count == 0;
    take(sh, &actions);
    run_kernels(sh);
}

static void serve_prepare(struct shell *sh, const struct wire_request *q, uint32_t peer,
                          uint32_t request)
{
    struct step_prepared p;
    struct shd_err e;
    const int r = step_prepare(sh->core, q->prepare.step, &p, &e);
    if (r == SHD_PENDING) {
        sh->peers[peer].prepare = request + 1;
        sh->figures.served_again++;
        return;
    }
    CHECK(r == SHD_OK && p.finite);
    struct wire_reply reply = { .type = WIRE_PREPARED };
    reply.prepared = (struct wire_prepared){ .step = p.step,
                                             .over = p.over,
                                             .finite = p.finite,
                                             .sum = p.sum,
                                             .metric_count = p.metric_count,
                                             .reported = p.reported,
                                             .has_decision = p.has_decision,
                                             .decision = p.decision };
    memcpy(reply.prepared.metrics, p.metrics, sizeof p.metrics);
    answer(sh, peer, q->seq, &reply, &sh->figures.prepared);
}

static void serve_commit(struct shell *sh, const struct wire_request *q, uint32_t peer)
{
    struct wire_reply reply = { .type = WIRE_COMMITTED };
    struct step_actions actions;
    enum step_committed how;
    struct shd_err e;
    CHECK(step_commit(sh->core, q->commit.step, &q->commit.decision, (struct step_blob){ NULL, 0 },
                      &reply.committed.decision, &how, &actions, &e) == SHD_OK);
    reply.committed.step = q->commit.step;
    answer(sh, peer, q->seq, &reply, &sh->figures.committed);
    if (how != STEP_COMMITTED_FIRST)
        return;
    take(sh, &actions);
    run_kernels(sh);
}

/* As the daemon's loop and its table do; a Prepare that waited is served by `again`. */
static void serve(struct shell *sh, uint32_t request, bool again)
{
    const struct sent *at = &sh->requests[request];
    struct wire_request q;
    const void *kept;
    size_t bytes;
    struct shd_err e;
    sh->arena.used = 0;
    CHECK(wire_request_unpack(sh->frames + at->at, at->bytes, &sh->arena, &q, &e) == SHD_OK);
    if (!again) {
        CHECK(replies_take(sh->peers[at->peer].replies, q.seq, &kept, &bytes) == REPLIES_NEW);
        sh->figures.requests++;
    }
    if (q.type == WIRE_RETURN)
        serve_return(sh, &q, at->peer);
    else if (q.type == WIRE_PREPARE)
        serve_prepare(sh, &q, at->peer, request);
    else
        serve_commit(sh, &q, at->peer);
}

/* -- A step ------------------------------------------------------------------------------------ */

static void add_request(struct shell *sh, uint32_t peer, struct wire_request *q, uint64_t *at)
{
    struct scale_frame frame;
    q->session = peer + 1;
    q->seq = ++sh->peers[peer].seq;
    scale_pack(q, &frame);
    memcpy(sh->frames + *at, frame.bytes, frame.used);
    sh->requests[sh->request_count++] = (struct sent){ *at, (uint32_t)frame.used, peer };
    *at += frame.used;
}

static void shuffle(struct shell *sh)
{
    for (uint32_t i = 0; i < sh->micros; i++)
        sh->order[i] = i;
    for (uint32_t i = sh->micros; i-- > 1;) {
        const uint32_t j = below(sh, i + 1), t = sh->order[i];
        sh->order[i] = sh->order[j];
        sh->order[j] = t;
    }
}

/* All workers are at the same unit, backward, and come in any order; a worker with several
 * micro-batches computes one after the other. Prepare follows a worker's last gradient. */
static void make_returns(struct shell *sh, uint64_t step)
{
    uint64_t at = 0;
    sh->request_count = 0;
    for (uint32_t i = 0; i < sh->s->micros; i++)
        for (uint32_t u = sh->units; u-- > 0;) {
            shuffle(sh);
            for (uint32_t m = 0; m < sh->micros; m++) {
                const uint32_t micro = sh->order[m], worker = micro % sh->workers;
                if (micro / sh->workers != i)
                    continue;
                struct wire_request q = scale_return(step, micro, u);
                add_request(sh, worker, &q, &at);
                if (u > 0 || i + 1 < sh->s->micros)
                    continue;
                q = scale_prepare(step);
                add_request(sh, worker, &q, &at);
            }
        }
}

static void make_commits(struct shell *sh, uint64_t step)
{
    struct wire_reply reply;
    struct decided decided;
    struct shd_err e;
    uint64_t at = 0;
    sh->arena.used = 0;
    CHECK(wire_reply_unpack(sh->figures.prepared.bytes, sh->figures.prepared.used, &sh->arena,
                            &reply, &e) == SHD_OK);
    const struct decide_args args = {
        .prepared = &reply.prepared, .owners = 1, .micro_batches = sh->micros, .lr = 1e-3
    };
    CHECK(decide(&args, &decided, &e) == SHD_OK);
    sh->request_count = 0;
    for (uint32_t w = 0; w < sh->workers; w++) {
        struct wire_request q = scale_commit(step, &decided.decision);
        add_request(sh, w, &q, &at);
    }
}

static void serve_all(struct shell *sh)
{
    for (uint32_t i = 0; i < sh->request_count; i++)
        serve(sh, i, /* again= */ false);
}

static void serve_waiting(struct shell *sh)
{
    CHECK(sh->sealed);
    for (uint32_t w = 0; w < sh->workers; w++)
        if (sh->peers[w].prepare != 0)
            serve(sh, sh->peers[w].prepare - 1, /* again= */ true);
}

static void run_step(struct shell *sh, uint64_t step)
{
    sh->figures.requests = sh->figures.replies = sh->figures.served_again = 0;
    sh->figures.waited = 0;
    sh->ref_last = 0;
    sh->kernel_first = sh->kernel_last = 0;
    sh->sealed = false;
    for (uint32_t w = 0; w < sh->workers; w++)
        sh->peers[w].prepare = 0;
    make_returns(sh, step);
    uint64_t begun_ns = scale_cpu_ns();
    serve_all(sh);
    serve_waiting(sh);
    sh->figures.returns_ns = scale_cpu_ns() - begun_ns;
    make_commits(sh, step);
    sh->kernel_first = sh->kernel_last = 0;
    begun_ns = scale_cpu_ns();
    serve_all(sh);
    sh->figures.commit_ns = scale_cpu_ns() - begun_ns;
    CHECK(step_now(sh->core) == step + 1);
}

/* The same step by elastic workers: each asks for a group until nothing is left. Nothing is
 * returned, so that it is the leases' time alone. */
static void lease_step(struct shell *sh, uint64_t step)
{
    const uint64_t begun_ns = scale_cpu_ns();
    uint64_t now_ns = 1;
    uint32_t group = 0;
    sh->figures.leases = 0;
    lease_begin_again(sh->lease);
    for (uint32_t i = 0; i <= sh->s->micros; i++)
        for (uint32_t w = 0; w < sh->workers; w++, now_ns += 1000) {
            const enum lease_answer a = lease_ask(sh->lease, sh->core, step, w + 1, now_ns, &group);
            CHECK(a == LEASE_GROUP || a == LEASE_WAIT);
            sh->figures.leases++;
        }
    sh->figures.lease_ns = scale_cpu_ns() - begun_ns;
}

/* -- Making ------------------------------------------------------------------------------------ */

static uint64_t heap_bytes(void)
{
    const struct mallinfo2 now = mallinfo2();
    return now.uordblks + now.hblkhd;
}

static int make_core(struct shell *sh, struct shd_err *e)
{
    const struct ledger_shape shape = { .name = sh->s->spec->name,
                                        .spec = "{}",
                                        .spec_bytes = 2,
                                        .owners = scale_owners(sh->s),
                                        .units = sh->units,
                                        .micros = sh->micros };
    const int r = ledger_bytes(&shape, &sh->figures.ledger_bytes, e);
    if (r != SHD_OK)
        return r;
    sh->figures.core_bytes = step_bytes(sh->units, sh->micros);
    sh->core_memory = sys_malloc(sh->figures.core_bytes);
    sh->ledger_memory = aligned_alloc(128, sh->figures.ledger_bytes);
    sh->lease_memory = sys_malloc(lease_bytes(sh->micros));
    if (sh->core_memory == NULL || sh->ledger_memory == NULL || sh->lease_memory == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a core of %" PRIu32 " x %" PRIu32 " gradients",
                       sh->units, sh->micros);
    memset(sh->ledger_memory, 0, sh->figures.ledger_bytes);
    ledger_init(&sh->ledger, sh->ledger_memory, &shape);
    sh->core = step_init(sh->core_memory, &sh->ledger, /* frozen= */ NULL);
    sh->lease = lease_init(sh->lease_memory, sh->micros, /* cautious= */ false);
    for (uint32_t u = 0; u < sh->units; u++) {
        struct step_actions actions;
        step_resume(sh->core, u, &actions);
        CHECK(actions.count == 0);
    }
    return SHD_OK;
}

static int make_peers(struct shell *sh, struct shd_err *e)
{
    const uint64_t before = heap_bytes();
    int r = SHD_OK;
    CHECK(sh->workers > 0);
    for (uint32_t w = 0; r == SHD_OK && w < sh->workers; w++)
        r = replies_new(&sh->peers[w].replies, e);
    sh->figures.session_bytes = (heap_bytes() - before) / sh->workers + sizeof(struct session);
    return r;
}

static int make(struct shell *sh, struct shd_err *e)
{
    const uint64_t cells = (uint64_t)sh->units * sh->micros, most = cells + sh->workers;
    sh->peers = sys_calloc(sh->workers, sizeof *sh->peers);
    sh->requests = sys_calloc(most, sizeof *sh->requests);
    sh->refs = sys_calloc(cells, sizeof *sh->refs);
    sh->kernels = sys_calloc(cells + sh->units, sizeof *sh->kernels);
    sh->order = sys_calloc(sh->micros, sizeof *sh->order);
    sh->frames = sys_malloc(most * 128);
    sh->arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                     .bytes = WIRE_ARENA_BYTES };
    if (sh->peers == NULL || sh->requests == NULL || sh->refs == NULL || sh->kernels == NULL ||
        sh->order == NULL || sh->frames == NULL || sh->arena.base == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " requests of a step", most);
    const int r = make_core(sh, e);
    return r == SHD_OK ? make_peers(sh, e) : r;
}

static void unmake(struct shell *sh)
{
    for (uint32_t w = 0; sh->peers != NULL && w < sh->workers; w++)
        replies_free(sh->peers[w].replies);
    free(sh->peers);
    free(sh->requests);
    free(sh->refs);
    free(sh->kernels);
    free(sh->order);
    free(sh->frames);
    free(sh->arena.base);
    free(sh->core_memory);
    free(sh->ledger_memory);
    free(sh->lease_memory);
}

static void keep_least(uint64_t *least, uint64_t ns)
{
    *least = ns < *least ? ns : *least;
}

int scale_daemon(const struct scale *s, uint32_t rounds, struct scale_daemon *ret,
                 struct shd_err *e)
{
    struct shell sh = { .s = s,
                        .workers = scale_owners(s),
                        .units = s->spec->unit_count,
                        .micros = scale_owners(s) * s->micros,
                        .random = s->seed * 2 + 1 };
    uint64_t returns_ns = UINT64_MAX, commit_ns = UINT64_MAX, lease_ns = UINT64_MAX;
    const int r = make(&sh, e);
    for (uint32_t i = 0; r == SHD_OK && i < rounds; i++) {
        lease_step(&sh, i);
        run_step(&sh, i);
        keep_least(&returns_ns, sh.figures.returns_ns);
        keep_least(&commit_ns, sh.figures.commit_ns);
        keep_least(&lease_ns, sh.figures.lease_ns);
    }
    *ret = sh.figures;
    ret->returns_ns = returns_ns;
    ret->commit_ns = commit_ns;
    ret->lease_ns = lease_ns;
    unmake(&sh);
    return r;
}
