/* Verified steps in the simulator: what is in a slot stands for its hash. One worker may be wrong:
 * what it returns is right, for the run's result is to be that of all others, but its hashes are
 * not. Whoever is named must be that one, whatever dies, is late, or is sent twice. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

static struct verify_shape shape_of(const struct sim *s, const struct sim_daemon *d, bool fresh)
{
    struct verify_shape shape = { .every = s->config.verify,
                                  .units = s->config.units,
                                  .first = sim_owner_index(s, d) == 0,
                                  .blind = !fresh };
    for (uint32_t u = 0; u < s->config.units; u++)
        shape.trained += !s->frozen[u];
    return shape;
}

void sim_verify_start(struct sim *s, struct sim_daemon *d, bool fresh)
{
    const struct verify_shape shape = shape_of(s, d, fresh);
    d->verify = NULL;
    if (s->config.verify == 0 || !s->config.lease)
        return;
    if (d->verify_memory == NULL)
        d->verify_memory = aligned_alloc(16, (verify_bytes(&shape) + 15) / 16 * 16);
    CHECK(d->verify_memory != NULL);
    d->verify = verify_init(d->verify_memory, &shape, d->core);
    lease_set_verify(d->lease, d->verify);
}

static bool is_wrong(const struct sim *s, const struct verify_worker *w)
{
    return s->config.wrong > 0 && (uint32_t)w->pid == s->config.wrong;
}

static void check_found(struct sim *s, const struct sim_daemon *d,
                        const struct verify_difference *found)
{
    const struct verify_worker *a = &found->worker[0], *b = &found->worker[1];
    const uint32_t owner = sim_daemon_index(s, d);
    if (sim_is_out(s, owner))
        return; /* nobody has told it which steps are over */
    s->result.named++;
    if (is_wrong(s, a) == is_wrong(s, b))
        sim_broken(s, "named", owner, (uint32_t)b->pid - 1,
                   "workers %d and %d are said to differ in unit %u of step %llu", (int)a->pid - 1,
                   (int)b->pid - 1, found->unit, (unsigned long long)found->step);
    if (found->verdict != VERIFY_UNKNOWN &&
        !is_wrong(s, &found->worker[found->verdict == VERIFY_SECOND]))
        sim_broken(s, "named", owner, SIM_NOBODY, "a worker that is right is said to be wrong");
}

void sim_verify_return(struct sim *s, struct sim_daemon *d, const struct sim_session *ses,
                       const struct sim_request *q)
{
    uint8_t hash[VERIFY_HASH_BYTES] = { 0 };
    struct verify_difference found;
    if (d->verify == NULL || !verify_wants(d->verify, d->core, q->step, q->micro))
        return;
    const struct verify_worker w = { .session = ses->id,
                                     .pid = (int64_t)ses->worker + 1,
                                     .start_time = ses->worker_gen,
                                     .rank = ses->worker + 1 };
    const uint64_t bits = ses->slot[q->slot] ^ is_wrong(s, &w);
    memcpy(hash, &bits, sizeof bits);
    if (verify_take(d->verify, d->core, &w, q->unit, q->none ? NULL : hash, q->none, &found))
        check_found(s, d, &found);
}

void sim_verify_check_end(struct sim *s)
{
    for (uint32_t i = 0; i < sim_members(s); i++) {
        if (s->daemon[i].verify == NULL || sim_is_out(s, i))
            continue;
        const struct verify_state *v = verify_look(s->daemon[i].verify);
        s->result.compared += v->compared;
        for (uint32_t k = 0; k < v->worker_count; k++) {
            const struct verify_count *c = &v->workers[k];
            s->result.compared_wrong += is_wrong(s, &c->worker) ? c->compared : 0;
            if (!is_wrong(s, &c->worker) && c->suspect)
                sim_broken(s, "named", i, (uint32_t)c->worker.pid - 1,
                           "a worker that is right is a suspect");
        }
    }
}
