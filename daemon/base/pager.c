/* See pager.h. */
#include "daemon/base/pager.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/done.h"
#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

#define LANE_JOBS_MAX 8192u

struct job {
    struct segment segment; /* borrowed; `closes`: owned */
    uint64_t at, bytes;
    struct kern_done *done; /* or NULL */
    bool closes;
    bool stays; /* it is begun to be written, and no more */
};

/* A queue and its thread. */
struct lane {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a job more, room for one, or it stops */
    pthread_t thread;
    bool begun;
    _Atomic bool stops;
    uint32_t first, count;
    struct job jobs[LANE_JOBS_MAX];
    void *(*main)(void *lane);
};

struct pager {
    struct lane ahead, behind;
};

/* -- A lane -------------------------------------------------------------------------------------
 */

/* Under the lock. */
static bool lane_runs(struct lane *l)
{
    if (!l->begun && !l->stops)
        l->begun = sys_thread(&l->thread, NULL, l->main, l) == 0;
    return l->begun && !l->stops;
}

/* False: it is not queued. waits: for room. */
static bool lane_push(struct lane *l, const struct job *job, bool waits)
{
    pthread_mutex_lock(&l->lock);
    bool runs = lane_runs(l);
    while (waits && runs && l->count == LANE_JOBS_MAX) {
        pthread_cond_wait(&l->changed, &l->lock);
        runs = !l->stops;
    }
    const bool taken = runs && l->count < LANE_JOBS_MAX;
    if (taken)
        l->jobs[(l->first + l->count++) % LANE_JOBS_MAX] = *job;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return taken;
}

/* waits: for one. False: there is none, or it stops and all are done. */
static bool lane_pop(struct lane *l, struct job *ret_job, bool waits)
{
    pthread_mutex_lock(&l->lock);
    while (waits && l->count == 0 && !l->stops)
        pthread_cond_wait(&l->changed, &l->lock);
    const bool found = l->count > 0;
    if (found) {
        *ret_job = l->jobs[l->first];
        l->first = (l->first + 1) % LANE_JOBS_MAX;
        l->count--;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return found;
}

static void lane_stop(struct lane *l)
{
    pthread_mutex_lock(&l->lock);
    l->stops = true;
    const bool begun = l->begun;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    if (begun)
        pthread_join(l->thread, NULL);
    l->begun = false;
}

static void lane_init(struct lane *l, void *(*main)(void *lane))
{
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    l->main = main;
}

static void lane_deinit(struct lane *l)
{
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
}

/* -- Reading ------------------------------------------------------------------------------------
 */

/* By its descriptor, which may be another file's by now: that is read for nothing then. */
static void *run_ahead(void *lane)
{
    struct job job;
    while (lane_pop(lane, &job, /* waits= */ true))
        posix_fadvise(job.segment.fd, (off_t)job.at, (off_t)job.bytes, POSIX_FADV_WILLNEED);
    return NULL;
}

void pager_ahead(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes)
{
    const struct job job = { .segment = *s, .at = at, .bytes = bytes };
    if (s->file && bytes > 0)
        lane_push(&p->ahead, &job, /* waits= */ false);
}

/* -- Writing ------------------------------------------------------------------------------------
 */

/* What is mapped nobody gives up, and that it was changed is said by the page table alone. */
static void begin_writing(const struct lane *l, const struct job *job)
{
    if (l->stops)
        return; /* pages go with the process, or are its successor's */
    madvise((uint8_t *)job->segment.base + job->at, job->bytes, MADV_DONTNEED);
    sync_file_range(job->segment.fd, (off_t)job->at, (off_t)job->bytes, SYNC_FILE_RANGE_WRITE);
}

static void end_writing(const struct lane *l, const struct job *job)
{
    if (!l->stops && !job->stays) {
        sync_file_range(job->segment.fd, (off_t)job->at, (off_t)job->bytes,
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                            SYNC_FILE_RANGE_WAIT_AFTER);
        posix_fadvise(job->segment.fd, (off_t)job->at, (off_t)job->bytes, POSIX_FADV_DONTNEED);
    }
    if (job->done != NULL)
        job->done->fn(job->done, SHD_OK);
}

/* One range is being written while the one before is waited for. */
static void *run_behind(void *lane)
{
    struct job job, before = { .bytes = 0 };
    bool writing = false;
    for (;;) {
        const bool found = lane_pop(lane, &job, /* waits= */ !writing);
        if (!found && !writing)
            return NULL;
        if (found && !job.closes)
            begin_writing(lane, &job);
        if (writing)
            end_writing(lane, &before);
        writing = found && !job.closes;
        if (writing)
            before = job;
        else if (found)
            segment_close(&job.segment);
    }
}

void pager_behind(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes,
                  struct kern_done *done)
{
    CHECK(at % SHD_PAGE_BYTES == 0 && at <= s->bytes && bytes <= s->bytes - at);
    const struct job job = { .segment = *s, .at = at, .bytes = bytes, .done = done };
    const bool queued = s->file && bytes > 0 && lane_push(&p->behind, &job, /* waits= */ false);
    if (!queued && done != NULL)
        done->fn(done, SHD_OK);
}

void pager_write(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes)
{
    CHECK(at <= s->bytes && bytes <= s->bytes - at);
    const struct job job = { .segment = *s, .at = at, .bytes = bytes, .stays = true };
    if (s->file && bytes > 0)
        lane_push(&p->behind, &job, /* waits= */ false);
}

void pager_close(struct pager *p, struct segment *s)
{
    const struct job job = { .segment = *s, .closes = true };
    if (p != NULL && s->file && lane_push(&p->behind, &job, /* waits= */ true))
        *s = SEGMENT_CLOSED;
    else
        segment_close(s);
}

/* ------------------------------------------------------------------------------------------------
 */

int pager_new(struct pager **ret_pager, struct shd_err *e)
{
    struct pager *p = sys_calloc(1, sizeof *p);
    if (p == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the pages of files");
    lane_init(&p->ahead, run_ahead);
    lane_init(&p->behind, run_behind);
    *ret_pager = p;
    return SHD_OK;
}

void pager_stop(struct pager *p)
{
    if (p == NULL)
        return;
    lane_stop(&p->ahead);
    lane_stop(&p->behind);
}

void pager_free(struct pager *p)
{
    if (p == NULL)
        return;
    lane_deinit(&p->ahead);
    lane_deinit(&p->behind);
    free(p);
}
