/* The simulator's randomness, events and network; see sim.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

/* splitmix64: any seed is a good one. */
uint64_t sim_random(struct sim *s)
{
    uint64_t z = s->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t sim_below(struct sim *s, uint64_t n)
{
    CHECK(n > 0);
    return (sim_random(s) >> 11) % n;
}

bool sim_chance(struct sim *s, uint32_t per_mille)
{
    return sim_below(s, 1000) < per_mille;
}

/* -- Events: a binary heap by time, then by order of making --------------------------------------
 */

static bool before(const struct sim_event *a, const struct sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void push(struct sim *s, const struct sim_event *event)
{
    if (s->heap_count == s->heap_room) {
        s->heap_room = s->heap_room == 0 ? 1024 : 2 * s->heap_room;
        s->heap = realloc(s->heap, s->heap_room * sizeof *s->heap);
        CHECK(s->heap != NULL);
    }
    uint32_t i = s->heap_count++;
    for (; i > 0 && before(event, &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = *event;
}

void sim_at(struct sim *s, uint64_t delay_ns, struct sim_event event)
{
    event.at_ns = s->now_ns + delay_ns;
    event.order = s->order++;
    push(s, &event);
}

/* Later, but still before what was made after it. */
void sim_requeue(struct sim *s, const struct sim_event *event, uint64_t at_ns)
{
    struct sim_event again = *event;
    again.at_ns = at_ns;
    push(s, &again);
}

bool sim_pop(struct sim *s, struct sim_event *ret_event)
{
    if (s->heap_count == 0)
        return false;
    *ret_event = s->heap[0];
    const struct sim_event last = s->heap[--s->heap_count];
    uint32_t i = 0;
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= s->heap_count)
            break;
        if (child + 1 < s->heap_count && before(&s->heap[child + 1], &s->heap[child]))
            child++;
        if (!before(&s->heap[child], &last))
            break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = last;
    return true;
}

/* -- Network ------------------------------------------------------------------------------------
 */

static uint32_t msg_new(struct sim *s)
{
    if (s->msg_free_count == 0) {
        const uint32_t old = s->msg_room;
        s->msg_room = old == 0 ? 256 : 2 * old;
        s->msg = realloc(s->msg, s->msg_room * sizeof *s->msg);
        s->msg_free = realloc(s->msg_free, s->msg_room * sizeof *s->msg_free);
        CHECK(s->msg != NULL && s->msg_free != NULL);
        for (uint32_t i = old; i < s->msg_room; i++)
            s->msg_free[s->msg_free_count++] = i;
    }
    return s->msg_free[--s->msg_free_count];
}

void sim_msg_done(struct sim *s, uint64_t index)
{
    s->msg_free[s->msg_free_count++] = (uint32_t)index;
}

static enum sim_kind kind_of(const struct sim_msg *msg)
{
    return msg->to_daemon ? msg->request.kind : msg->reply.kind;
}

static uint64_t delay_ns(struct sim *s)
{
    uint64_t delay = 10 * US + sim_below(s, 100 * US);
    if ((s->config.faults & SIM_REORDER) != 0 && sim_chance(s, 150))
        delay += sim_below(s, 20 * MS);
    return delay;
}

void sim_deliver(struct sim *s, const struct sim_msg *msg, uint64_t delay)
{
    const struct sim_msg copy = *msg; /* it may lie where it is to be put */
    const uint32_t at = msg_new(s);
    s->msg[at] = copy;
    sim_at(s, delay,
           (struct sim_event){ .kind = EV_MSG,
                               .who = msg->to_daemon ? msg->daemon : msg->worker,
                               .gen = msg->to_daemon,
                               .arg = at });
}

/* Attaching and hanging up go over the side channel, which loses nothing. A hang-up is seen after
 * everything that was sent before it; messages of the session behind it mean nothing. */
void sim_send(struct sim *s, const struct sim_msg *msg)
{
    const enum sim_kind kind = kind_of(msg);
    const bool side = kind == SIM_ATTACH || kind == SIM_HANGUP;
    uint64_t delay = delay_ns(s), later;
    if (sim_hosts_lose(s, msg, side, &later))
        return;
    if (side) {
        sim_deliver(s, msg, delay + later);
        return;
    }
    if (s->now_ns < s->cut_until_ns[msg->daemon][msg->worker] ||
        ((s->config.faults & SIM_LOSS) != 0 && sim_chance(s, 20)))
        return;
    sim_deliver(s, msg, delay);
    if ((s->config.faults & SIM_DOUBLE) != 0 && sim_chance(s, 50))
        sim_deliver(s, msg, delay_ns(s) + (sim_chance(s, 200) ? sim_below(s, 500 * MS) : 0));
}

/* -- Trace --------------------------------------------------------------------------------------
 */

void sim_print_trace(FILE *out, const struct sim_trace *t)
{
    fprintf(out, "%12.6f", (double)t->at_ns / 1e9);
    fprintf(out, t->daemon == SIM_NOBODY ? "    " : " d%-2u", t->daemon);
    fprintf(out, t->worker == SIM_NOBODY ? "    " : " w%-2u", t->worker);
    fprintf(out, " step %-4llu unit %-2u micro %-2u %s\n", (unsigned long long)t->step, t->unit,
            t->micro, t->what);
}

void sim_note(struct sim *s, const char *what, uint32_t daemon, uint32_t worker, uint64_t step,
              uint32_t unit, uint32_t micro)
{
    const struct sim_trace t = { s->now_ns, what, daemon, worker, step, unit, micro };
    s->trace[s->trace_count++ % SIM_TRACE] = t;
    if (s->print)
        sim_print_trace(stdout, &t);
}

void sim_deinit(struct sim *s)
{
    sim_guests_free(s);
    for (uint32_t i = 0; i < SIM_MEMBERS; i++)
        sim_daemon_deinit(&s->daemon[i]);
    free(s->heap);
    free(s->msg);
    free(s->msg_free);
}
