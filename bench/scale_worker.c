/* A worker of bench_scale: what it packs and unpacks for all owners in a step, and its turn. */
#include "bench/scale.h"

#include <stdlib.h>

#include "client/paths/turn.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

struct worker {
    const struct scale *s;
    const struct scale_daemon *daemon;
    struct turn *turn;
    struct wire_arena arena;
    struct scale_frame frame;
    struct scale_worker figures;
};

static void ask(struct worker *w, struct wire_request *q)
{
    q->session = 1;
    q->seq = ++w->figures.requests;
    scale_pack(q, &w->frame);
}

static void hear(struct worker *w, const struct scale_frame *frame, struct wire_reply *ret_reply)
{
    struct shd_err e;
    w->arena.used = 0;
    CHECK(wire_reply_unpack(frame->bytes, frame->used, &w->arena, ret_reply, &e) == SHD_OK);
    w->figures.replies++;
}

/* client/paths/slots.c: every owner is told, also one that has no part of the unit. */
static void give_all(struct worker *w, uint64_t step)
{
    struct wire_reply credit;
    for (uint32_t i = 0; i < w->s->micros; i++)
        for (uint32_t u = w->s->spec->unit_count; u-- > 0;)
            for (uint32_t owner = 0; owner < scale_owners(w->s); owner++) {
                struct wire_request q = scale_return(step, i * scale_owners(w->s), u);
                ask(w, &q);
                hear(w, &w->daemon->credit, &credit);
            }
}

/* client/paths/commit.c, with an answer to each question at once. */
static void commit(struct worker *w, uint64_t step)
{
    const struct turn_update update = {
        .args = { .micro_batches = scale_owners(w->s) * w->s->micros, .lr = 1e-3 }
    };
    enum turn_kind kind;
    uint32_t owner;
    struct shd_err e;
    turn_begin(w->turn, step, &update);
    while (turn_next(w->turn, &owner, &kind)) {
        struct wire_reply reply;
        struct wire_request q = kind == TURN_PREPARE ? scale_prepare(step)
                                                     : scale_commit(step, turn_decision(w->turn));
        ask(w, &q);
        turn_asked(w->turn, owner, kind);
        hear(w, kind == TURN_PREPARE ? &w->daemon->prepared : &w->daemon->committed, &reply);
        CHECK(kind == TURN_PREPARE
                  ? turn_prepared(w->turn, owner, &reply.prepared, &e) == SHD_OK
                  : turn_committed(w->turn, owner, &reply.committed, &e) == SHD_OK);
    }
    CHECK(turn_state(w->turn) == TURN_DONE);
}

/* What a daemon has answered is of its last step. */
static uint64_t answered_step(struct worker *w)
{
    struct wire_reply reply;
    hear(w, &w->daemon->prepared, &reply);
    return reply.prepared.step;
}

static void run(struct worker *w, uint32_t rounds, struct scale_worker *ret)
{
    const uint64_t step = answered_step(w);
    uint64_t returns_ns = UINT64_MAX, commit_ns = UINT64_MAX;
    for (uint32_t i = 0; i < rounds; i++) {
        w->figures.requests = w->figures.replies = 0;
        const uint64_t begun_ns = scale_cpu_ns();
        give_all(w, step);
        const uint64_t given_ns = scale_cpu_ns();
        commit(w, step);
        const uint64_t done_ns = scale_cpu_ns();
        returns_ns = given_ns - begun_ns < returns_ns ? given_ns - begun_ns : returns_ns;
        commit_ns = done_ns - given_ns < commit_ns ? done_ns - given_ns : commit_ns;
    }
    *ret = w->figures;
    ret->returns_ns = returns_ns;
    ret->commit_ns = commit_ns;
}

int scale_worker(const struct scale *s, const struct scale_daemon *daemon, uint32_t rounds,
                 struct scale_worker *ret, struct shd_err *e)
{
    struct worker w = { .s = s, .daemon = daemon };
    w.figures.turn_bytes = turn_bytes(scale_owners(s));
    void *memory = sys_malloc(w.figures.turn_bytes);
    w.arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                   .bytes = WIRE_ARENA_BYTES };
    const int r = memory != NULL && w.arena.base != NULL
                      ? SHD_OK
                      : err_set(e, SHD_ENOMEM, "no memory for a turn over %u owners",
                                scale_owners(s));
    if (r == SHD_OK) {
        w.turn = turn_init(memory, scale_owners(s), scale_owners(s));
        run(&w, rounds, ret);
    }
    free(memory);
    free(w.arena.base);
    return r;
}
