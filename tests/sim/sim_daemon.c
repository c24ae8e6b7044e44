/* A daemon of the simulator: the real core, ledger, lease and replies in a model of their shell;
 * see sim.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/step_guard.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

static uint64_t clock_of(const struct sim *s, const struct sim_daemon *d)
{
    return s->now_ns + 1000 * S + (uint64_t)d->clock_ns; /* jumps do not make it negative */
}

void sim_daemon_after(struct sim *s, const struct sim_daemon *d, uint64_t delay_ns,
                      enum sim_event_kind kind, uint64_t arg)
{
    sim_at(s, delay_ns,
           (struct sim_event){
               .kind = kind, .who = sim_daemon_index(s, d), .gen = d->gen, .arg = arg });
}

/* -- Replies ------------------------------------------------------------------------------------
 */

static void send(struct sim *s, const struct sim_daemon *d, const struct sim_session *ses,
                 uint64_t seq, const struct sim_reply *reply)
{
    const struct sim_msg msg = { .daemon = sim_daemon_index(s, d),
                                 .worker = ses->worker,
                                 .daemon_gen = d->gen,
                                 .worker_gen = ses->worker_gen,
                                 .session = ses->id,
                                 .seq = seq,
                                 .reply = *reply };
    sim_send(s, &msg);
}

/* Bytes of a reply before the rates that no decision of the simulator has. */
static size_t reply_head(const struct sim_reply *r)
{
    const struct decision *d = r->kind == SIM_PREPARE  ? &r->prepared.decision
                               : r->kind == SIM_COMMIT ? &r->committed.decision
                                                       : &r->layout.decision;
    return (size_t)((const uint8_t *)&d->rates[SIM_RATES] - (const uint8_t *)r);
}

static void keep(struct replies *replies, uint64_t seq, const struct sim_reply *r)
{
    uint8_t frame[REPLIES_BYTES_MAX];
    const size_t head = reply_head(r), tail = SIM_KEPT_BYTES - head;
    if (r->kind == SIM_PREPARE && r->prepared.settings.bytes + r->prepared.guard.bytes +
                                          r->prepared.unit_sums.bytes +
                                          r->prepared.unit_norms.bytes >
                                      0) {
        replies_keep(replies, seq, NULL, sizeof frame + 1); /* it will be served again */
        return;
    }
    memcpy(frame, r, head);
    memcpy(frame + head, (const uint8_t *)r + head + SIM_NO_RATES, tail);
    replies_keep(replies, seq, frame, head + tail);
}

static struct sim_reply kept(const uint8_t *frame, size_t bytes)
{
    struct sim_reply r = { 0 };
    CHECK(bytes == SIM_KEPT_BYTES);
    memcpy(&r.kind, frame, sizeof r.kind);
    const size_t head = reply_head(&r);
    memcpy(&r, frame, head);
    memcpy((uint8_t *)&r + head + SIM_NO_RATES, frame + head, bytes - head);
    return r;
}

static void answer(struct sim *s, const struct sim_daemon *d, struct sim_session *ses, uint64_t seq,
                   const struct sim_reply *reply)
{
    if (!ses->open)
        return;
    FAIL_POINT("sim:reply:before");
    keep(ses->replies, seq, reply);
    send(s, d, ses, seq, reply);
    FAIL_POINT("sim:reply:after");
}

static struct sim_layout layout_of(const struct sim *s, const struct sim_daemon *d,
                                   const struct sim_session *ses)
{
    struct sim_layout layout = { .session = ses->id,
                                 .instance = d->instance,
                                 .step = step_collecting(d->core),
                                 .attempt = step_attempt(d->core),
                                 .seat = (uint32_t)(ses - d->sessions) };
    struct decision last;
    for (uint32_t m = 0; m < sim_micros(s, sim_line_of(s, d), layout.step); m++)
        layout.in |= (uint32_t)step_micro_in(d->core, m) << m;
    layout.has_decision = step_last_decision(d->core, &last);
    if (layout.has_decision)
        layout.decision = last;
    return layout;
}

/* -- Sessions -----------------------------------------------------------------------------------
 */

static void session_free_if_unused(struct sim_session *ses)
{
    if (ses->id == 0 || ses->open || ses->refs > 0)
        return;
    sim_session_clear(ses);
}

static void session_close(struct sim *s, struct sim_daemon *d, struct sim_session *ses)
{
    if (!ses->open)
        return;
    sim_note(s, "session closed", sim_daemon_index(s, d), ses->worker, 0, 0, 0);
    ses->open = false;
    ses->wait_count = 0;
    replies_free(ses->replies);
    ses->replies = NULL;
    lease_forget(d->lease, ses->id);
    session_free_if_unused(ses);
}

static struct sim_session *session_new(struct sim *s, struct sim_daemon *d,
                                       const struct sim_msg *msg)
{
    for (uint32_t i = 0; i < SIM_SESSIONS; i++) {
        struct sim_session *ses = &d->sessions[i];
        if (ses->id != 0)
            continue;
        struct shd_err e;
        sim_session_clear(ses);
        ses->id = ++s->last_session;
        ses->open = true;
        ses->worker = msg->worker;
        ses->worker_gen = msg->worker_gen;
        ses->attempt = msg->seq;
        ses->view = msg->request.view;
        CHECK(replies_new(&ses->replies, &e) == SHD_OK);
        return ses;
    }
    return NULL;
}

static void hang_up(struct sim *s, struct sim_daemon *d, struct sim_session *ses)
{
    const struct sim_msg msg = { .daemon = sim_daemon_index(s, d),
                                 .worker = ses->worker,
                                 .daemon_gen = d->gen,
                                 .worker_gen = ses->worker_gen,
                                 .session = ses->id,
                                 .reply = { .kind = SIM_HANGUP } };
    session_close(s, d, ses);
    sim_send(s, &msg);
}

/* Whoever has an older view than the newest it was told is to read that first. */
static bool take_view(struct sim *s, struct sim_daemon *d, uint64_t view)
{
    if (view < d->view && !SIM_BUG(91))
        return false;
    for (uint32_t i = 0; view > d->view && !SIM_BUG(92) && i < SIM_SESSIONS; i++)
        if (d->sessions[i].open && d->sessions[i].view < view)
            hang_up(s, d, &d->sessions[i]);
    d->view = view;
    return true;
}

static void on_attach(struct sim *s, struct sim_daemon *d, const struct sim_msg *msg)
{
    const struct sim_worker *w = &s->worker[msg->worker];
    if (!w->alive || w->gen != msg->worker_gen)
        return; /* its socket hung up already */
    for (uint32_t i = 0; i < SIM_SESSIONS; i++) {
        struct sim_session *ses = &d->sessions[i];
        if (!ses->open || ses->worker != msg->worker)
            continue;
        if (ses->worker_gen == msg->worker_gen && ses->attempt >= msg->seq)
            return; /* it gave this attempt up */
        session_close(s, d, ses);
    }
    if (!take_view(s, d, msg->request.view))
        return;
    struct sim_session *ses = session_new(s, d, msg);
    if (ses == NULL)
        return; /* it will try again */
    const struct sim_reply reply = { .kind = SIM_ATTACH, .layout = layout_of(s, d, ses) };
    send(s, d, ses, msg->seq, &reply);
}

static void on_hangup(struct sim *s, struct sim_daemon *d, const struct sim_msg *msg)
{
    for (uint32_t i = 0; i < SIM_SESSIONS; i++) {
        struct sim_session *ses = &d->sessions[i];
        if (ses->open && ses->worker == msg->worker && ses->worker_gen == msg->worker_gen &&
            (msg->session == 0 || msg->session == ses->id))
            session_close(s, d, ses);
    }
}

/* -- Actions ------------------------------------------------------------------------------------
 */

static void do_credit(struct sim *s, struct sim_daemon *d, const struct step_action *a)
{
    struct sim_op *op = &d->ops[a->ref];
    CHECK(op->used);
    const struct sim_op was = *op;
    struct sim_session *ses = &d->sessions[was.seat];
    const struct sim_reply reply = { .kind = SIM_RETURN, .step = was.step, .stale = a->stale };
    op->used = false;
    CHECK(ses->id == was.session && ses->refs > 0);
    ses->refs--;
    sim_note(s, a->stale ? "credit, stale" : "credit", sim_daemon_index(s, d), ses->worker,
             was.step, was.unit, was.micro);
    if (!a->stale) {
        const uint64_t round = sim_round(was.step, step_attempt(d->core));
        if (d->credited_round != round) {
            d->credited_round = round;
            memset(d->credited, 0, sizeof d->credited);
        }
        d->credited[was.unit] |= 1u << was.micro;
    }
    answer(s, d, ses, was.seq, &reply);
    session_free_if_unused(ses);
}

static void do_publish(struct sim *s, struct sim_daemon *d, const struct step_action *a)
{
    const uint32_t i = sim_daemon_index(s, d);
    if (d->board[a->unit] + 1 != a->step)
        sim_broken(s, "P5", i, SIM_NOBODY, "unit %u goes from version %llu to %llu", a->unit,
                   (unsigned long long)d->board[a->unit], (unsigned long long)a->step);
    FAIL_POINT("sim:publish:before");
    d->board[a->unit] = a->step;
    FAIL_POINT("sim:publish:after");
    for (uint32_t w = 0; w < s->config.workers; w++)
        if (s->worker[w].alive && s->worker[w].work == WORK_BOARD)
            sim_at(s, US + sim_below(s, 20 * US),
                   (struct sim_event){ .kind = EV_WAKE, .who = w, .gen = s->worker[w].gen });
}

static struct sim_reply prepared_reply(const struct step_prepared *p)
{
    struct sim_reply r = { .kind = SIM_PREPARE, .step = p->step };
    r.prepared = (struct wire_prepared){ .step = p->step,
                                         .over = p->over,
                                         .finite = p->finite,
                                         .sum = p->sum,
                                         .metric_count = p->metric_count,
                                         .reported = p->reported,
                                         .has_decision = p->has_decision };
    memcpy(r.prepared.metrics, p->metrics, sizeof p->metrics);
    r.prepared.decision = p->decision;
    if (p->settings != NULL) {
        CHECK(p->settings->count == SIM_SETTINGS);
        r.prepared.settings.bytes = sizeof r.settings;
        memcpy(r.settings, p->settings->numbers, sizeof r.settings);
    }
    r.prepared.guard.bytes = p->limit_count * sizeof *p->limits;
    CHECK(r.prepared.guard.bytes <= sizeof r.limits);
    if (p->limit_count > 0)
        memcpy(r.limits, p->limits, r.prepared.guard.bytes);
    return r;
}

/* As skipped.c and op_step.c have it: all units are in one page. */
static void tell_units(const struct sim *s, const struct sim_daemon *d, const struct sim_wait *wait,
                       struct sim_reply *r)
{
    struct fixsum zero;
    fixsum_init(&zero);
    if (wait->unit_sums == 0 || r->prepared.over || r->prepared.has_decision)
        return;
    CHECK(wait->unit_sums == 1 && s->config.units <= WIRE_UNIT_SUMS_MAX);
    for (uint32_t u = 0; u < s->config.units; u++) {
        const bool in = !s->frozen[u] && d->summed[u].round == ledger_round(&d->ledger) + 1;
        fixsum_pack(in && !d->summed[u].finite ? NULL
                    : in && !s->means[u]       ? &d->summed[u].sum
                                               : &zero,
                    r->unit_sums + (size_t)u * FIXSUM_BYTES);
    }
    r->prepared.unit_sums.bytes = (size_t)s->config.units * FIXSUM_BYTES;
    r->prepared.unit_sums_from = 1;
    double limits[SIM_UNITS * GUARD_RULES_MAX];
    const uint32_t told = sim_owner_index(s, d) == 0
                              ? step_unit_limits(d->core, 0, s->config.units, limits)
                              : 0;
    CHECK(told <= ARRAY_SIZE(r->unit_limits));
    memcpy(r->unit_limits, limits, told * sizeof *limits);
    r->prepared.unit_limits.bytes = told * sizeof *limits;
}

static void tell_norms(const struct sim *s, const struct sim_daemon *d, struct sim_reply *r)
{
    if (s->config.replicas && r->prepared.has_decision && !SIM_BUG(95))
        r->prepared.unit_norms.bytes = sizeof *r->unit_norms *
                                       step_prepare_norms(d->core, r->prepared.step, r->unit_norms);
}

static void ask_again(struct sim *s, struct sim_daemon *d, uint32_t kinds);

void sim_daemon_wake(struct sim *s)
{
    for (uint32_t w = 0; w < s->config.workers; w++)
        if (s->worker[w].alive)
            sim_at(s, US + sim_below(s, 20 * US),
                   (struct sim_event){ .kind = EV_WAKE, .who = w, .gen = s->worker[w].gen });
}

/* As reset.c has it. */
static int give_up(struct sim *s, struct sim_daemon *d, const struct sim_request *q,
                   enum step_reset_answer *ret_answer)
{
    struct shd_err e = { 0 };
    struct step_actions actions;
    const uint64_t before = step_attempt(d->core);
    const int r = step_reset(d->core, q->step, q->attempt, q->agreed, ret_answer, &e);
    if (r != SHD_OK || step_attempt(d->core) == before)
        return r;
    sim_note(s, "begins again", sim_daemon_index(s, d), SIM_NOBODY, q->step, 0, 0);
    d->board_attempt = step_attempt(d->core);
    while (step_reset_more(d->core, &actions))
        sim_daemon_take(s, d, &actions);
    lease_begin_again(d->lease);
    sim_back_round(s, d);
    ask_again(s, d, 1u << SIM_PREPARE | 1u << SIM_COMMIT);
    sim_daemon_wake(s);
    return r;
}

static enum step_when follow(struct sim *s, struct sim_daemon *d, uint64_t step, uint64_t attempt)
{
    const struct sim_request agreed = { .step = step, .attempt = attempt, .agreed = true };
    enum step_reset_answer answer;
    const enum step_when when = step_when(d->core, step, attempt);
    if (when != STEP_WHEN_AHEAD)
        return when;
    if (give_up(s, d, &agreed, &answer) != SHD_OK)
        sim_broken(s, "P2", sim_daemon_index(s, d), SIM_NOBODY,
                   "does not follow to attempt %llu of step %llu, it is at %llu",
                   (unsigned long long)attempt, (unsigned long long)step,
                   (unsigned long long)step_attempt(d->core));
    return STEP_WHEN_NOW;
}

static void on_reset(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                     const struct sim_msg *msg)
{
    enum step_reset_answer answer_is = STEP_RESET_DONE;
    struct sim_reply reply = { .kind = SIM_RESET_STEP, .step = msg->request.step };
    reply.status = give_up(s, d, &msg->request, &answer_is);
    reply.reset.attempt = step_attempt(d->core);
    reply.reset.answer = answer_is;
    answer(s, d, ses, msg->seq, &reply);
}

/* Can it be answered now? Then it is. */
static bool try_prepare(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                        const struct sim_wait *wait)
{
    struct step_prepared p;
    struct shd_err e = { 0 };
    const bool past = follow(s, d, wait->step, wait->attempt) == STEP_WHEN_PAST;
    const int r = past ? SHD_ERESET : step_prepare(d->core, wait->step, &p, &e);
    if (r == SHD_PENDING)
        return false;
    if (r == SHD_OK && d->verify != NULL)
        verify_close(d->verify, d->core, wait->step);
    struct sim_reply reply = { .kind = SIM_PREPARE, .status = r };
    if (r == SHD_OK) {
        reply = prepared_reply(&p);
        tell_units(s, d, wait, &reply);
        tell_norms(s, d, &reply);
    }
    answer(s, d, ses, wait->seq, &reply);
    return true;
}

static bool try_lease(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                      const struct sim_wait *wait)
{
    uint32_t group = 0;
    if (follow(s, d, wait->step, wait->attempt) == STEP_WHEN_PAST) {
        const struct sim_reply past = { .kind = SIM_LEASE, .status = SHD_ERESET };
        answer(s, d, ses, wait->seq, &past);
        return true;
    }
    const enum lease_answer a = lease_ask(d->lease, d->core, wait->step, ses->id, clock_of(s, d),
                                          &group);
    if (a == LEASE_WAIT)
        return false;
    const struct sim_reply reply = {
        .kind = SIM_LEASE, .step = wait->step, .lease = a, .group = group
    };
    if (a == LEASE_GROUP)
        sim_note(s, "leased", sim_daemon_index(s, d), ses->worker, wait->step, 0, group);
    answer(s, d, ses, wait->seq, &reply);
    return true;
}

/* As op_create.c and put.c have it: the attempt may be another one when it is committed. */
static void on_put(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                   const struct sim_msg *msg)
{
    const struct sim_request *q = &msg->request;
    struct sim_reply reply = { .kind = SIM_PUT, .step = q->step };
    struct shd_err e = { 0 };
    if (q->attempt < step_rewound(d->core) && !SIM_BUG(76)) {
        reply.status = SHD_ERESET;
        answer(s, d, ses, msg->seq, &reply);
        return;
    }
    follow(s, d, q->step, q->attempt);
    reply.committed.over = q->step < step_collecting(d->core);
    if (!reply.committed.over)
        reply.status = step_put_check(d->core, q->step, &e);
    if (!reply.committed.over && reply.status == SHD_OK) {
        d->put = q->decision.put;
        d->put_line = q->put_line;
        if (d->verify != NULL)
            verify_close_put(d->verify, d->core, q->step);
    }
    answer(s, d, ses, msg->seq, &reply);
}

/* A put at owner 0 comes first or not at all; the others make room for it. */
static int make_room(struct sim *s, struct sim_daemon *d, const struct sim_wait *wait,
                     struct shd_err *e)
{
    struct step_actions actions;
    int r;
    if (wait->decision.put == 0 || wait->step < step_collecting(d->core))
        return SHD_OK;
    if (d->put != wait->decision.put || d->put_line != wait->put_line)
        return err_set(e, SHD_ENOENT, "its values are gone");
    if (sim_owner_index(s, d) == 0 && (!wait->recorded || SIM_BUG(96))) {
        r = step_put_check(d->core, wait->step, e);
        return r == SHD_OK && !step_put_idle(d->core) ? SHD_PENDING : r;
    }
    while ((r = step_put_clear(d->core, wait->step, &actions)) == SHD_PENDING && actions.count > 0)
        sim_daemon_take(s, d, &actions);
    return r;
}

static size_t told_bytes(const struct sim *s, const struct sim_wait *wait)
{
    return wait->has_norms ? sim_guard(s)->columns * sizeof *wait->unit_norms : 0;
}

static bool try_commit(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                       const struct sim_wait *wait)
{
    struct decision counts = { 0 };
    enum step_committed how;
    struct step_actions actions;
    struct shd_err e = { 0 };
    const uint64_t step = wait->step, seq = wait->seq;
    uint64_t updates[SIM_UNITS];
    if (step_when(d->core, step, wait->attempt) == STEP_WHEN_PAST) {
        const struct sim_reply past = { .kind = SIM_COMMIT, .step = step, .status = SHD_ERESET };
        answer(s, d, ses, seq, &past);
        return true;
    }
    int r = make_room(s, d, wait, &e);
    step_put_updates(d->core, sim_put_updates(wait->decision.put, updates) ? updates : NULL);
    step_seen(d->core, wait->norm, s->now_ns);
    step_recorded(d->core, wait->recorded);
    CHECK(step_seen_units(d->core, (const uint8_t *)wait->unit_norms, told_bytes(s, wait), &e) ==
          SHD_OK);
    if (r == SHD_OK)
        r = step_commit(d->core, step, &wait->decision,
                        (struct step_blob){ &wait->blob, sizeof wait->blob }, &counts, &how,
                        &actions, &e);
    if (r == SHD_PENDING)
        return false;
    struct sim_reply reply = { .kind = SIM_COMMIT, .step = step, .status = r };
    if (r != SHD_OK) {
        answer(s, d, ses, seq, &reply);
        return true;
    }
    if (how == STEP_COMMITTED_FIRST) {
        sim_note(s, "committed", sim_daemon_index(s, d), ses->worker, step, 0, 0);
        sim_check_decision(s, d, step, &counts);
        sim_back_round(s, d);
    }
    reply.committed = (struct wire_committed){
        .step = step,
        .over = how == STEP_COMMITTED_OVER,
        .decision = counts,
    };
    answer(s, d, ses, seq, &reply);
    sim_daemon_take(s, d, &actions);
    return true;
}

/* Whoever waits asks again; `kinds`: bits of sim_kind. */
static void ask_again(struct sim *s, struct sim_daemon *d, uint32_t kinds)
{
    if (sim_back_busy(&d->back))
        return;
    for (uint32_t i = 0; i < SIM_SESSIONS; i++) {
        struct sim_session *ses = &d->sessions[i];
        for (uint32_t w = 0; ses->open && w < ses->wait_count;) {
            const struct sim_wait wait = ses->waits[w];
            bool done = false;
            if ((kinds >> wait.kind & 1) != 0) {
                ses->waits[w] = ses->waits[--ses->wait_count];
                if (wait.kind == SIM_PREPARE)
                    done = try_prepare(s, d, ses, &wait);
                else if (wait.kind == SIM_COMMIT)
                    done = try_commit(s, d, ses, &wait);
                else
                    done = try_lease(s, d, ses, &wait);
                if (!done) {
                    ses->waits[ses->wait_count++] = ses->waits[w];
                    ses->waits[w] = wait;
                }
            }
            w += !done;
        }
    }
}

void sim_daemon_take(struct sim *s, struct sim_daemon *d, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        switch (a->kind) {
        case STEP_DO_CREDIT:
            do_credit(s, d, a);
            break;
        case STEP_DO_PUBLISH:
            do_publish(s, d, a);
            break;
        case STEP_DO_SEALED:
            sim_note(s, "sealed", sim_daemon_index(s, d), SIM_NOBODY, step_now(d->core), 0, 0);
            sim_check_prepared(s, d, step_record(d->core));
            ask_again(s, d, 1u << SIM_PREPARE | 1u << SIM_COMMIT);
            break;
        case STEP_DO_OPENED:
            sim_note(s, "opened", sim_daemon_index(s, d), SIM_NOBODY, a->step, 0, 0);
            ask_again(s, d, 1u << SIM_PREPARE | 1u << SIM_COMMIT);
            sim_host_moved(s, d);
            sim_back_moved(s, d);
            break;
        case STEP_DO_DROPPED:
            ask_again(s, d, 1u << SIM_COMMIT);
            break;
        case STEP_DO_ACCUMULATE:
        case STEP_DO_SUM:
        case STEP_DO_ZERO:
        case STEP_DO_APPLY:
            sim_kernel_queue(s, d, a);
            break;
        }
    }
}

void sim_daemon_moved(struct sim *s, struct sim_daemon *d)
{
    ask_again(s, d, 1u << SIM_PREPARE | 1u << SIM_COMMIT | 1u << SIM_LEASE);
    sim_host_moved(s, d);
    sim_back_moved(s, d);
}

static void leases_again(struct sim *s, struct sim_daemon *d)
{
    uint32_t waiting = 0;
    for (uint32_t i = 0; i < SIM_SESSIONS; i++)
        for (uint32_t w = 0; d->sessions[i].open && w < d->sessions[i].wait_count; w++)
            waiting += d->sessions[i].waits[w].kind == SIM_LEASE;
    if (waiting == 0 || sim_back_busy(&d->back))
        return;
    ask_again(s, d, 1u << SIM_LEASE);
    const uint64_t now = clock_of(s, d), next = lease_next_ns(d->lease, d->core, now);
    if (next != UINT64_MAX)
        sim_daemon_after(s, d, next - now, EV_LEASE_TIMER, ++d->lease_timer);
}

/* -- Requests -----------------------------------------------------------------------------------
 */

static uint32_t op_new(struct sim_daemon *d)
{
    for (uint32_t ref = 1; ref < SIM_OPS; ref++)
        if (!d->ops[ref].used)
            return ref;
    CHECK(false); /* more gradients than all sessions have slots */
    return 0;
}

static void on_return(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                      const struct sim_msg *msg)
{
    const struct sim_request *q = &msg->request;
    if (follow(s, d, q->step, q->attempt) == STEP_WHEN_PAST) {
        const struct sim_reply reply = { .kind = SIM_RETURN, .step = q->step, .stale = true };
        answer(s, d, ses, msg->seq, &reply);
        return;
    }
    const uint32_t ref = op_new(d);
    struct step_actions actions;
    struct shd_err e = { 0 };
    const double metric = sim_metric(s, sim_batch_of(s, sim_line_of(s, d), q->step), q->micro);
    d->ops[ref] = (struct sim_op){
        true, (uint32_t)(ses - d->sessions), ses->id, msg->seq, q->step, q->unit, q->micro, q->slot
    };
    ses->refs++;
    sim_note(s, q->none ? "return, none" : "return", sim_daemon_index(s, d), msg->worker, q->step,
             q->unit, q->micro);
    sim_verify_return(s, d, ses, q);
    const int r = step_return(d->core, ref, q->step, q->unit, q->micro, q->none, &metric, 1,
                              &actions, &e);
    if (r != SHD_OK) {
        const struct sim_reply reply = { .kind = SIM_RETURN, .status = r };
        d->ops[ref].used = false;
        ses->refs--;
        answer(s, d, ses, msg->seq, &reply);
        return;
    }
    sim_daemon_take(s, d, &actions);
    if (d->ops[ref].used && step_waits(d->core, q->unit, q->micro, ref))
        sim_daemon_after(s, d, MS + sim_below(s, 50 * MS), EV_SPILL, ref);
}

static void on_spill(struct sim *s, struct sim_daemon *d, uint32_t ref, bool copied)
{
    const struct sim_op op = d->ops[ref];
    struct step_actions actions;
    if (!op.used || !step_waits(d->core, op.unit, op.micro, ref))
        return;
    if (!copied && !SIM_BUG(9)) {
        sim_daemon_after(s, d, 50 * US + sim_below(s, MS), EV_SPILLED, ref);
        return;
    }
    sim_note(s, "spilled", sim_daemon_index(s, d), d->sessions[op.seat].worker, op.step, op.unit,
             op.micro);
    FAIL_POINT("sim:spill:before");
    if (!SIM_BUG(9))
        d->spill[op.unit][op.micro] = d->sessions[op.seat].slot[op.slot];
    FAIL_POINT("sim:spill:after");
    step_spilled(d->core, op.unit, op.micro, ref, SHD_F32, &actions);
    sim_daemon_take(s, d, &actions);
}

static void wait_or_answer(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                           const struct sim_msg *msg)
{
    struct sim_wait wait = { .seq = msg->seq,
                             .kind = msg->request.kind,
                             .step = msg->request.step,
                             .attempt = msg->request.attempt,
                             .unit_sums = msg->request.unit_sums,
                             .blob = msg->request.blob,
                             .norm = msg->request.norm,
                             .has_norms = msg->request.has_norms,
                             .decision = msg->request.decision,
                             .recorded = msg->request.recorded,
                             .put_line = msg->request.put_line };
    memcpy(wait.unit_norms, msg->request.unit_norms, sizeof wait.unit_norms);
    bool done = true;
    if (wait.kind == SIM_PREPARE)
        done = try_prepare(s, d, ses, &wait);
    else if (wait.kind == SIM_COMMIT)
        done = try_commit(s, d, ses, &wait);
    else
        done = try_lease(s, d, ses, &wait);
    if (done)
        return;
    CHECK(ses->wait_count < ARRAY_SIZE(ses->waits));
    ses->waits[ses->wait_count++] = wait;
}

static void serve(struct sim *s, struct sim_daemon *d, struct sim_session *ses,
                  const struct sim_msg *msg)
{
    switch (msg->request.kind) {
    case SIM_RETURN:
        on_return(s, d, ses, msg);
        return;
    case SIM_PREPARE:
    case SIM_COMMIT:
    case SIM_LEASE:
        wait_or_answer(s, d, ses, msg);
        return;
    case SIM_LAYOUT: {
        const struct sim_reply reply = { .kind = SIM_LAYOUT, .layout = layout_of(s, d, ses) };
        answer(s, d, ses, msg->seq, &reply);
        return;
    }
    case SIM_RESET_STEP:
        on_reset(s, d, ses, msg);
        return;
    case SIM_REWIND: {
        struct sim_reply reply = { .kind = SIM_REWIND };
        reply.status = sim_back_ask(s, d, &msg->request.rewind, &reply.rewound);
        answer(s, d, ses, msg->seq, &reply);
        return;
    }
    case SIM_PUT:
        on_put(s, d, ses, msg);
        return;
    case SIM_DETACH:
        session_close(s, d, ses);
        return;
    case SIM_ATTACH:
    case SIM_HANGUP:
        break;
    }
    CHECK(false); /* not a request of a session */
}

static struct sim_session *session_find(struct sim_daemon *d, uint64_t id)
{
    for (uint32_t i = 0; i < SIM_SESSIONS; i++)
        if (d->sessions[i].open && d->sessions[i].id == id)
            return &d->sessions[i];
    return NULL;
}

/* While the model goes back requests are to be asked again. */
static bool comes_again(const struct sim_daemon *d, const struct sim_msg *msg)
{
    return sim_back_busy(&d->back) && msg->request.kind != SIM_HANGUP &&
           msg->request.kind != SIM_DETACH && msg->request.kind != SIM_REWIND;
}

static void on_message(struct sim *s, struct sim_daemon *d, const struct sim_msg *msg)
{
    if (comes_again(d, msg)) {
        sim_deliver(s, msg, MS);
        return;
    }
    if (msg->request.kind == SIM_ATTACH) {
        on_attach(s, d, msg);
        return;
    }
    if (msg->request.kind == SIM_HANGUP) {
        on_hangup(s, d, msg);
        return;
    }
    struct sim_session *ses = session_find(d, msg->session);
    if (ses == NULL)
        return; /* a session that is over */
    const void *frame;
    size_t bytes;
    switch (replies_take(ses->replies, msg->seq, &frame, &bytes)) {
    case REPLIES_NEW:
    case REPLIES_SERVE:
        serve(s, d, ses, msg);
        break;
    case REPLIES_AGAIN: {
        const struct sim_reply reply = kept(frame, bytes);
        send(s, d, ses, msg->seq, &reply);
        break;
    }
    case REPLIES_PENDING:
    case REPLIES_OLD:
        break;
    }
}

static void on_kernel_done(struct sim *s, struct sim_daemon *d, uint64_t index)
{
    const struct sim_kernel k = d->kernels[index % SIM_KERNELS];
    struct step_actions actions;
    CHECK(index == d->kernel_done);
    d->kernel_done++;
    if (k.copy_to != NULL) {
        if (k.copy.what == SIM_COPY_FORK)
            sim_fork_copied(s, d);
        else if (k.copy.what == SIM_COPY_PIN)
            sim_pin_copied(s, d, k.copy.pin);
        else
            sim_back_copied(s, d, k.copy.what == SIM_COPY_BACK);
        return;
    }
    if (k.action.kind == STEP_DO_APPLY) {
        step_applied(d->core, k.action.unit, &actions);
    } else {
        struct fixsum sum;
        bool finite = true;
        fixsum_init(&sum);
        const uint32_t owner = sim_owner_index(s, d), u = k.action.unit;
        for (uint32_t b = sim_first_block(s, owner, u);
             k.summing && b < sim_first_block(s, owner + 1, u); b++)
            sim_square(s, k.step, d->acc[u][b], &sum, &finite);
        if (k.summing) {
            d->summed[u].round = k.round + 1;
            d->summed[u].sum = sum;
            fixsum_carry(&d->summed[u].sum);
            d->summed[u].finite = finite;
        }
        step_accumulated(d->core, u, k.summing ? &sum : NULL, finite, &actions);
    }
    sim_daemon_take(s, d, &actions);
}

/* Kernels and the loop are one process; the queue's events come in the order they are due. */
void sim_daemon_event(struct sim *s, struct sim_daemon *d, const struct sim_event *event)
{
    if (event->kind == EV_START_DAEMON) {
        sim_daemon_start(s, d);
        return;
    }
    if (event->kind == EV_MSG)
        on_message(s, d, &s->msg[event->arg]);
    else if (event->kind == EV_SET)
        sim_daemon_set(s, d);
    else if (event->kind == EV_GO_ON)
        sim_daemon_go_on(s, d);
    else if (event->kind == EV_BACK)
        sim_back_event(s, d, event->arg == 1);
    else if (event->kind == EV_ASK)
        sim_host_serve(s, d, event->arg);
    else if (event->kind == EV_GUEST_GONE)
        sim_host_gone(s, d, (uint32_t)event->arg);
    else if (event->kind == EV_KERNEL)
        sim_kernel_event(s, d);
    else if (event->kind == EV_KERNEL_DONE)
        on_kernel_done(s, d, d->kernel_done);
    else if (event->kind == EV_SPILL || event->kind == EV_SPILLED)
        on_spill(s, d, (uint32_t)event->arg, event->kind == EV_SPILLED);
    else if (event->kind == EV_LEASE_TIMER && event->arg != d->lease_timer)
        return;
    leases_again(s, d);
}
