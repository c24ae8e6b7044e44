/* See plan_sim.h. */
#include "client/plan/plan_sim.h"

#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"

struct sim_actor *sim_copier(struct sim *s, uint32_t w)
{
    return &s->actors[s->shape->workers + w];
}

static struct sim_actor *actor_of_loop(struct sim *s, uint32_t o)
{
    return &s->actors[2 * s->shape->workers + o];
}

static struct sim_actor *actor_of_kernels(struct sim *s, uint32_t o)
{
    return &s->actors[2 * s->shape->workers + s->shape->daemons + o];
}

uint32_t sim_actors(const struct sim *s)
{
    return 2 * (s->shape->workers + s->shape->daemons);
}

double sim_rate_ns(const struct sim *s, struct plan_rate r)
{
    return r.near_ns + s->far * (r.far_ns - r.near_ns);
}

void sim_start(struct sim_actor *a, double sleep_ns, double run_ns)
{
    CHECK(!a->busy);
    *a = (struct sim_actor){ .sleep_ns = sleep_ns, .run_ns = run_ns, .threads = 1, .busy = true };
}

/* -- Owners ------------------------------------------------------------------------------------ */

static void ring_push(struct sim_ring *ring, struct sim_job job)
{
    CHECK(ring->last - ring->first < ring->room);
    ring->jobs[ring->last++ % ring->room] = job;
}

static struct sim_job *ring_first(struct sim_ring *ring)
{
    return ring->first != ring->last ? &ring->jobs[ring->first % ring->room] : NULL;
}

/* Begin the next sum or update, unless one is under way. */
static void kernels_go(struct sim *s, uint32_t index, double wake_ns)
{
    struct sim_owner *o = &s->owners[index];
    struct sim_actor *a = actor_of_kernels(s, index);
    const struct sim_job *job = ring_first(&o->jobs);
    if (a->busy || job == NULL)
        return;
    const struct plan_rates *r = s->rates;
    const uint64_t elems = o->map->slice[job->unit].elems;
    const uint64_t chunks = (elems + KERN_CHUNK_ELEMS - 1) / KERN_CHUNK_ELEMS;
    const uint32_t grad = plan_dtype_index(s->grad_dtype);
    const struct plan_rate rate =
        job->group == UINT32_MAX
            ? r->update[s->spec->optimizer - 1][plan_dtype_index(s->spec->publish)]
        : job->group == 0 ? r->first[grad]
                          : r->next[grad];
    sim_start(a, wake_ns, 0);
    a->threads = chunks < s->shape->threads ? (uint32_t)(chunks > 0 ? chunks : 1)
                                            : s->shape->threads;
    a->run_ns = r->kernel_ns + (double)elems * sim_rate_ns(s, rate) / a->threads;
    a->kernel = true;
}

/* A gradient has come: its turn may be now. */
void sim_loop_done(struct sim *s, uint32_t index)
{
    struct sim_owner *o = &s->owners[index];
    const struct sim_job job = *ring_first(&o->requests);
    o->requests.first++;
    o->arrived[(size_t)job.unit * s->groups + job.group] = true;
    if (o->next[job.unit] == job.group)
        ring_push(&o->jobs, job);
    kernels_go(s, index, s->rates->wake_ns);
    if (ring_first(&o->requests) != NULL)
        sim_start(actor_of_loop(s, index), 0, s->rates->return_ns);
}

void sim_take(struct sim *s, uint32_t index, struct sim_job job)
{
    struct sim_actor *loop = actor_of_loop(s, index);
    ring_push(&s->owners[index].requests, job);
    if (!loop->busy)
        sim_start(loop, s->rates->wake_ns, s->rates->return_ns);
}

static void owner_begin(struct sim *s, struct sim_owner *o)
{
    o->summed = 0;
    for (uint32_t u = 0; u < s->spec->unit_count; u++) {
        o->next[u] = 0;
        for (uint32_t g = 0; g < s->groups; g++)
            o->arrived[(size_t)u * s->groups + g] = false;
    }
}

/* The first commit of a step updates all units in forward order. */
void sim_commit(struct sim *s, uint32_t index, uint64_t step)
{
    struct sim_owner *o = &s->owners[index];
    if (o->step != step)
        return;
    o->step++;
    owner_begin(s, o);
    for (uint32_t u = 0; u < s->spec->unit_count; u++) {
        if (s->spec->units[u].frozen || o->map->slice[u].elems == 0)
            o->version[u] = o->step;
        else
            ring_push(&o->jobs, (struct sim_job){ u, UINT32_MAX });
    }
    kernels_go(s, index, s->rates->wake_ns);
}

void sim_kernels_done(struct sim *s, uint32_t index)
{
    struct sim_owner *o = &s->owners[index];
    const struct sim_job job = *ring_first(&o->jobs);
    o->jobs.first++;
    if (job.group == UINT32_MAX) {
        o->version[job.unit] = o->step;
    } else {
        struct sim_worker *w = &s->workers[job.group % s->shape->workers];
        const uint32_t next = ++o->next[job.unit];
        o->summed++;
        if (--w->left[(size_t)job.unit * s->groups + job.group] == 0)
            w->sent--;
        if (next < s->groups && o->arrived[(size_t)job.unit * s->groups + next])
            ring_push(&o->jobs, (struct sim_job){ job.unit, next });
    }
    kernels_go(s, index, /* wake_ns= */ 0);
}

/* -- Beginning and end --------------------------------------------------------------------------
 */

static bool worker_new(const struct sim *s, struct sim_worker *w)
{
    const size_t units = s->spec->unit_count;
    w->fetched = sys_calloc(units, sizeof *w->fetched);
    w->open = sys_calloc(units, sizeof *w->open);
    w->returned = sys_calloc(units, sizeof *w->returned);
    w->left = sys_calloc(units * s->groups, sizeof *w->left);
    w->queue = sys_calloc(units + 1, sizeof *w->queue);
    return w->fetched != NULL && w->open != NULL && w->returned != NULL && w->left != NULL &&
           w->queue != NULL;
}

static int owner_new(const struct sim *s, uint32_t index, struct sim_owner *o, struct shd_err *e)
{
    const size_t units = s->spec->unit_count;
    const int r = shardmap_new(s->spec, index, s->shape->daemons, &o->map, e);
    if (r != SHD_OK)
        return r;
    o->requests.room = o->jobs.room = (uint32_t)units * (s->groups + 1);
    o->version = sys_calloc(units, sizeof *o->version);
    o->next = sys_calloc(units, sizeof *o->next);
    o->arrived = sys_calloc(units * s->groups, sizeof *o->arrived);
    o->requests.jobs = sys_calloc(o->requests.room, sizeof *o->requests.jobs);
    o->jobs.jobs = sys_calloc(o->jobs.room, sizeof *o->jobs.jobs);
    if (o->version == NULL || o->next == NULL || o->arrived == NULL || o->requests.jobs == NULL ||
        o->jobs.jobs == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to simulate a step");
    for (uint32_t u = 0; u < units; u++)
        if (!s->spec->units[u].frozen && o->map->slice[u].elems > 0)
            o->expected += s->groups;
    return SHD_OK;
}

int sim_new(struct sim *s, struct shd_err *e)
{
    s->actors = sys_calloc(sim_actors(s), sizeof *s->actors);
    s->workers = sys_calloc(s->shape->workers, sizeof *s->workers);
    s->owners = sys_calloc(s->shape->daemons, sizeof *s->owners);
    bool made = s->actors != NULL && s->workers != NULL && s->owners != NULL;
    for (uint32_t w = 0; made && w < s->shape->workers; w++)
        made = worker_new(s, &s->workers[w]);
    if (!made)
        return err_set(e, SHD_ENOMEM, "no memory to simulate a step");
    int r = SHD_OK;
    for (uint32_t o = 0; r == SHD_OK && o < s->shape->daemons; o++)
        r = owner_new(s, o, &s->owners[o], e);
    return r;
}

void sim_free(struct sim *s)
{
    for (uint32_t w = 0; s->workers != NULL && w < s->shape->workers; w++) {
        free(s->workers[w].fetched);
        free(s->workers[w].open);
        free(s->workers[w].returned);
        free(s->workers[w].left);
        free(s->workers[w].queue);
    }
    for (uint32_t o = 0; s->owners != NULL && o < s->shape->daemons; o++) {
        shardmap_free(s->owners[o].map);
        free(s->owners[o].version);
        free(s->owners[o].next);
        free(s->owners[o].arrived);
        free(s->owners[o].requests.jobs);
        free(s->owners[o].jobs.jobs);
    }
    free(s->actors);
    free(s->workers);
    free(s->owners);
}
