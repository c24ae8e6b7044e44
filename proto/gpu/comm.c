/* See comm.h. What callers ask for is left under the lock and taken over by the thread at its next
 * round; NCCL and the driver are called without it. */
#include "proto/gpu/comm.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/gpu/comm_link.h"

#define BUSY_NS  UINT64_C(30000)  /* between two rounds: NCCL or the device is at work */
#define GATED_NS UINT64_C(200000) /* a board is waited for */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm *table; /* one per device */

static void drop_context(struct comm *c)
{
    if (c->cuda != NULL)
        c->cuda->cuDevicePrimaryCtxRelease(c->device);
}

/* -- The thread -------------------------------------------------------------------------------- */

static void insert_by_turn(struct comm_link *l, struct comm_job *job)
{
    struct comm_job **at = &l->queue;
    while (*at != NULL && (*at)->turn < job->turn)
        at = &(*at)->next;
    job->next = *at;
    *at = job;
}

/* Under the lock: take over what was asked for. */
static void take_over(struct comm *c)
{
    while (c->fresh != NULL) {
        struct comm_link *l = c->fresh;
        c->fresh = l->next;
        l->next = c->links;
        c->links = l;
    }
    for (struct comm_link *l = c->links; l != NULL; l = l->next) {
        l->end_seen = l->ending || c->leaving;
        while (l->incoming != NULL) {
            struct comm_job *job = l->incoming;
            l->incoming = job->next;
            insert_by_turn(l, job);
        }
    }
}

/* Time until there may be something to do again; UINT64_MAX: until somebody asks. */
static uint64_t pause_ns(const struct comm *c)
{
    uint64_t pause = UINT64_MAX;
    for (const struct comm_link *l = c->links; l != NULL; l = l->next) {
        if (comm_link_busy(l))
            return BUSY_NS;
        if (comm_link_gated(l))
            pause = GATED_NS;
    }
    return pause;
}

static void step_links(struct comm *c)
{
    struct comm_link **at = &c->links;
    while (*at != NULL) {
        struct comm_link *l = *at;
        comm_link_step(l);
        if (l->state != LINK_BROKEN || !l->end_seen) {
            at = &l->next;
            continue;
        }
        *at = l->next;
        comm_link_free(l);
    }
}

static void make_ids(struct comm *c, struct id_request *q)
{
    int r = comm_take_libraries(c, &q->why);
    for (uint32_t i = 0; r == SHD_OK && i < q->count; i++)
        r = nccl_result(c->nccl, c->nccl->get_unique_id(&q->ids[i]), &q->why, "ncclGetUniqueId");
    q->status = r;
    pthread_mutex_lock(&c->lock);
    c->wanted = NULL;
    q->done = true;
    pthread_cond_broadcast(&c->made);
    pthread_mutex_unlock(&c->lock);
}

/* Under the lock. */
static bool asked(const struct comm *c)
{
    bool any = c->fresh != NULL || c->wanted != NULL || (c->leaving && c->links == NULL);
    for (const struct comm_link *l = c->links; l != NULL; l = l->next)
        any = any || l->incoming != NULL || (l->ending || c->leaving) != l->end_seen;
    return any;
}

static void rest(struct comm *c, uint64_t pause)
{
    if (asked(c))
        return;
    if (pause == UINT64_MAX) {
        pthread_cond_wait(&c->work, &c->lock);
        return;
    }
    const struct timespec at = clock_timespec(clock_now_ns() + pause);
    pthread_cond_timedwait(&c->work, &c->lock, &at);
}

static void *comm_main(void *ctx)
{
    struct comm *c = ctx;
    pthread_mutex_lock(&c->lock);
    for (;;) {
        take_over(c);
        struct id_request *wanted = c->wanted;
        if (c->leaving && c->links == NULL)
            break;
        pthread_mutex_unlock(&c->lock);
        if (wanted != NULL)
            make_ids(c, wanted);
        step_links(c);
        const uint64_t pause = pause_ns(c);
        pthread_mutex_lock(&c->lock);
        rest(c, pause);
    }
    pthread_mutex_unlock(&c->lock);
    drop_context(c);
    return NULL;
}

/* -- For callers ------------------------------------------------------------------------------- */

static void destroy(struct comm *c)
{
    pthread_cond_destroy(&c->work);
    pthread_cond_destroy(&c->made);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static int start(uint32_t ordinal, struct comm **ret_comm, struct shd_err *e)
{
    struct comm *c = sys_calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a communicator thread");
    c->ordinal = ordinal;
    sys_condition(&c->work);
    sys_condition(&c->made);
    pthread_mutex_init(&c->lock, NULL);
    const int failed = sys_thread(&c->thread, NULL, comm_main, c);
    if (failed != 0) {
        destroy(c);
        return err_set(e, SHD_ENOMEM, "start a communicator thread: %s", strerror(failed));
    }
    *ret_comm = c;
    return SHD_OK;
}

int comm_new(uint32_t ordinal, struct comm **ret_comm, struct shd_err *e)
{
    pthread_mutex_lock(&table_lock);
    struct comm *c = table;
    while (c != NULL && c->ordinal != ordinal)
        c = c->next;
    int r = SHD_OK;
    if (c == NULL) {
        r = start(ordinal, &c, e);
        if (r == SHD_OK && c != NULL) {
            c->next = table;
            table = c;
        }
    }
    if (r == SHD_OK && c != NULL) {
        c->refs++;
        *ret_comm = c;
    }
    pthread_mutex_unlock(&table_lock);
    return r;
}

static void stop(struct comm *c)
{
    struct comm **at = &table;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    pthread_mutex_lock(&c->lock);
    c->leaving = true;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    destroy(c);
}

/* The lock is held to the end: the device's next thread begins after this one. */
void comm_free(struct comm *c)
{
    if (c == NULL)
        return;
    pthread_mutex_lock(&table_lock);
    CHECK(c->refs > 0);
    if (--c->refs == 0)
        stop(c);
    pthread_mutex_unlock(&table_lock);
}

int comm_make_ids(struct comm *c, struct nccl_id *ids, uint32_t count, struct shd_err *e)
{
    struct id_request q = { .ids = ids, .count = count };
    pthread_mutex_lock(&c->lock);
    while (c->wanted != NULL)
        pthread_cond_wait(&c->made, &c->lock);
    c->wanted = &q;
    pthread_cond_signal(&c->work);
    while (!q.done)
        pthread_cond_wait(&c->made, &c->lock);
    pthread_mutex_unlock(&c->lock);
    if (q.status != SHD_OK && e != NULL)
        *e = q.why;
    return q.status;
}

int comm_link_new(struct comm *c, const struct nccl_id *id, uint32_t rank, struct comm_job *opened,
                  struct comm_link **ret_link, struct shd_err *e)
{
    CHECK(rank < 2 && opened->done != NULL);
    struct comm_link *l = sys_calloc(1, sizeof *l);
    if (l == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a link");
    l->comm = c;
    l->id = *id;
    l->rank = (int)rank;
    l->opened = opened;
    l->turn = 1;
    pthread_mutex_lock(&c->lock);
    CHECK(!c->leaving);
    l->next = c->fresh;
    c->fresh = l;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
    *ret_link = l;
    return SHD_OK;
}

void comm_queue(struct comm_link *l, struct comm_job *job)
{
    struct comm *c = l->comm;
    CHECK(job->done != NULL && job->bytes > 0 && job->turn > 0);
    pthread_mutex_lock(&c->lock);
    CHECK(!l->ending);
    job->next = l->incoming;
    l->incoming = job;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
}

void comm_link_end(struct comm_link *l)
{
    if (l == NULL)
        return;
    struct comm *c = l->comm;
    pthread_mutex_lock(&c->lock);
    CHECK(!l->ending);
    l->ending = true;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
}
