/* See arbiter.h: which kind, and the thread by which no call takes longer than it may. Where the
 * views are is arbiter_file.c's and arbiter_etcd.c's. */
#include "proto/files/arbiter.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter_etcd.h"
#include "proto/files/arbiter_file.h"
#include "proto/files/arbiter_place.h"

#define FILE_PREFIX "file:"
#define ETCD_PREFIX "etcd:"

struct arbiter {
    struct arbiter_place at;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started;  /* the thread is to be joined */
    bool busy;     /* under lock: it has a call */
    bool given_up; /* under lock: nobody waits for that call */
    bool closed;   /* under lock: the thread frees all when it has ended */

    /* Of the call. The thread's while busy. */
    bool claims;
    struct arbiter_view next; /* of a claim; owned */
    struct arbiter_view view; /* of a read; owned */
    struct shd_err err;
    int result;
};

/* -- The thread -------------------------------------------------------------------------------- */

static void dispose(struct arbiter *a)
{
    a->at.ops->close(a->at.place);
    arbiter_view_free(&a->next);
    arbiter_view_free(&a->view);
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

static void *work(void *arg)
{
    struct arbiter *a = arg;
    a->result = a->claims ? a->at.ops->claim(a->at.place, &a->next, &a->err)
                          : a->at.ops->read(a->at.place, &a->view, &a->err);
    pthread_mutex_lock(&a->lock);
    if (a->given_up)
        arbiter_view_free(&a->view);
    a->busy = false;
    const bool closed = a->closed;
    pthread_cond_signal(&a->changed);
    pthread_mutex_unlock(&a->lock);
    if (closed)
        dispose(a);
    return NULL;
}

/* Until the thread has no call. */
static int wait_idle(struct arbiter *a, uint64_t until_ns, struct shd_err *e)
{
    const struct timespec until = clock_timespec(until_ns);
    int r = SHD_OK;
    pthread_mutex_lock(&a->lock);
    while (a->busy && r == SHD_OK)
        if (pthread_cond_timedwait(&a->changed, &a->lock, &until) == ETIMEDOUT && a->busy)
            r = err_set(e, SHD_ETIMEDOUT, "the arbiter has not answered for %.1f s",
                        (double)ARBITER_WAIT_MS / 1000);
    a->given_up = a->busy;
    pthread_mutex_unlock(&a->lock);
    if (r == SHD_OK && a->started) {
        pthread_join(a->thread, NULL);
        a->started = false;
    }
    return r;
}

/* next: of a claim, else NULL. */
static int call(struct arbiter *a, const struct arbiter_view *next, struct shd_err *e)
{
    const uint64_t until_ns = clock_now_ns() + ARBITER_WAIT_MS * NS_PER_MS;
    int r = wait_idle(a, until_ns, e); /* for what was given up before */
    if (r != SHD_OK)
        return r;
    arbiter_view_free(&a->next);
    a->claims = next != NULL;
    if (next != NULL && (r = arbiter_view_copy(next, &a->next, e)) != SHD_OK)
        return r;
    a->err = (struct shd_err){ 0 };
    a->busy = true;
    const int error = sys_thread(&a->thread, NULL, work, a);
    if (error != 0) {
        a->busy = false;
        return err_set(e, SHD_ENOMEM, "no thread to ask the arbiter: %s", strerror(error));
    }
    a->started = true;
    r = wait_idle(a, until_ns, e);
    if (r != SHD_OK)
        return r;
    return a->result == SHD_OK ? SHD_OK : err_copy(&a->err, e);
}

/* -- Calls ------------------------------------------------------------------------------------- */

static int open_place(const char *text, const char *cluster, struct arbiter_place *ret_place,
                      struct shd_err *e)
{
    if (strncmp(text, FILE_PREFIX, strlen(FILE_PREFIX)) == 0)
        return arbiter_file_open(text + strlen(FILE_PREFIX), cluster, ret_place, e);
    if (strncmp(text, ETCD_PREFIX, strlen(ETCD_PREFIX)) == 0)
        return arbiter_etcd_open(text + strlen(ETCD_PREFIX), cluster, ret_place, e);
    return err_set(e, SHD_EINVAL,
                   "arbiter '%.120s' is neither file:DIR nor etcd:http://HOST:PORT/PREFIX", text);
}

int arbiter_open(const char *text, const char *cluster, struct arbiter **ret_arbiter,
                 struct shd_err *e)
{
    if (!arbiter_name_is_one(cluster))
        return err_set(e, SHD_EINVAL,
                       "'%.80s' is no name of a cluster: letters, digits, '-', '_' and '.' make "
                       "one, at most %u, and no '.' in front",
                       cluster, ARBITER_NAME_BYTES - 1);
    struct arbiter *a = sys_calloc(1, sizeof *a);
    if (a == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an arbiter");
    const int r = open_place(text, cluster, &a->at, e);
    if (r != SHD_OK) {
        free(a);
        return r;
    }
    CHECK(pthread_mutex_init(&a->lock, NULL) == 0);
    sys_condition(&a->changed);
    *ret_arbiter = a;
    return SHD_OK;
}

void arbiter_close(struct arbiter *a)
{
    if (a == NULL)
        return;
    pthread_mutex_lock(&a->lock);
    const bool busy = a->busy;
    if (busy) {
        a->closed = true;
        pthread_detach(a->thread);
    }
    pthread_mutex_unlock(&a->lock);
    if (busy)
        return;
    if (a->started)
        pthread_join(a->thread, NULL);
    dispose(a);
}

int arbiter_read(struct arbiter *a, struct arbiter_view *ret_view, struct shd_err *e)
{
    const int r = call(a, NULL, e);
    if (r != SHD_OK)
        return r;
    *ret_view = a->view;
    a->view = (struct arbiter_view){ 0 };
    return SHD_OK;
}

int arbiter_claim(struct arbiter *a, const struct arbiter_view *next, struct shd_err *e)
{
    if (next->number < 1)
        return err_set(e, SHD_EINVAL, "view 0 is the one that nobody claims: the first is 1");
    return call(a, next, e);
}
