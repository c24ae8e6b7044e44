/* See removals.h. */
#include "daemon/base/removals.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/manager.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"

struct removal {
    struct removal *next;
    char name[REMOVALS_NAME_BYTES];
};

struct removals {
    uv_loop_t *loop;  /* borrowed */
    uv_async_t async; /* some is left */
    uv_work_t work;
    bool working; /* the loop's: the pool is at it */
    uint64_t wait_us;
    _Atomic bool stopped;
    pthread_mutex_t sending; /* who has it takes out of the list */
    pthread_mutex_t mutex;   /* guards the rest */
    struct removal *first, **last;
};

/* -- The list -----------------------------------------------------------------------------------
 */

void removals_add(struct removals *r, const char *name)
{
    if (r == NULL)
        return;
    struct removal *new = sys_calloc(1, sizeof *new);
    if (new == NULL) {
        log_warn("op=keeper name=%s why=\"no memory to have it taken out\" do=\"nothing: its "
                 "memory is given back after the next start\"",
                 name);
        return;
    }
    snprintf(new->name, sizeof new->name, "%s", name);
    pthread_mutex_lock(&r->mutex);
    *r->last = new;
    r->last = &new->next;
    pthread_mutex_unlock(&r->mutex);
}

static struct removal *first_of(struct removals *r)
{
    pthread_mutex_lock(&r->mutex);
    struct removal *first = r->first;
    pthread_mutex_unlock(&r->mutex);
    return first;
}

static void take_out(struct removals *r, struct removal *first)
{
    pthread_mutex_lock(&r->mutex);
    CHECK(r->first == first);
    r->first = first->next;
    if (r->first == NULL)
        r->last = &r->first;
    pthread_mutex_unlock(&r->mutex);
    free(first);
}

/* -- Telling ------------------------------------------------------------------------------------
 */

/* Under `sending`. */
static bool send_all(struct removals *r, uint64_t wait_us)
{
    char text[REMOVALS_NAME_BYTES + 32];
    struct removal *first;
    while ((first = first_of(r)) != NULL) {
        snprintf(text, sizeof text, "FDSTOREREMOVE=1\nFDNAME=%s", first->name);
        FAIL_POINT("keeper:remove:before");
        const int why = manager_tell(text, /* fd= */ -1, wait_us);
        if (why == EAGAIN)
            return false;
        if (why != 0)
            log_warn("op=keeper name=%s why=\"tell the service manager: %s\" do=\"look after it\"",
                     first->name, strerror(why));
        FAIL_POINT("keeper:remove:after");
        take_out(r, first);
    }
    return true;
}

bool removals_send(struct removals *r, uint64_t wait_us)
{
    bool sent = false;
    if (r == NULL)
        return true;
    if (wait_us > 0)
        pthread_mutex_lock(&r->sending);
    if (wait_us > 0 || pthread_mutex_trylock(&r->sending) == 0) {
        sent = send_all(r, wait_us);
        pthread_mutex_unlock(&r->sending);
    }
    if (!sent && !removals_stopped(r))
        uv_async_send(&r->async);
    return sent;
}

/* On the pool. */
static void wait_and_send(uv_work_t *work)
{
    struct removals *r = work->data;
    pthread_mutex_lock(&r->sending);
    send_all(r, r->wait_us);
    pthread_mutex_unlock(&r->sending);
}

static void begin(struct removals *r);

static void waited(uv_work_t *work, int cancelled)
{
    struct removals *r = work->data;
    (void)cancelled; /* nobody cancels */
    r->working = false;
    begin(r);
}

static void begin(struct removals *r)
{
    if (r->working || removals_stopped(r) || first_of(r) == NULL)
        return;
    r->working = uv_queue_work(r->loop, &r->work, wait_and_send, waited) == 0;
}

static void some_is_left(uv_async_t *async)
{
    begin(async->data);
}

/* -----------------------------------------------------------------------------------------------
 */

int removals_new(uv_loop_t *loop, uint64_t wait_us, struct removals **ret_removals,
                 struct shd_err *e)
{
    struct removals *r = sys_calloc(1, sizeof *r);
    if (r == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for what the keeper is to give up");
    const int status = uv_async_init(loop, &r->async, some_is_left);
    if (status < 0) {
        free(r);
        return err_set(e, SHD_EIO, "start telling the keeper: %s", uv_strerror(status));
    }
    r->loop = loop;
    r->wait_us = wait_us;
    r->async.data = r->work.data = r;
    r->last = &r->first;
    CHECK(pthread_mutex_init(&r->sending, NULL) == 0 && pthread_mutex_init(&r->mutex, NULL) == 0);
    *ret_removals = r;
    return SHD_OK;
}

void removals_stop(struct removals *r)
{
    if (r == NULL)
        return;
    atomic_store(&r->stopped, true);
    uv_close((uv_handle_t *)&r->async, NULL);
}

bool removals_stopped(const struct removals *r)
{
    return r == NULL || atomic_load(&r->stopped);
}

void removals_free(struct removals *r)
{
    if (r == NULL)
        return;
    for (struct removal *next; r->first != NULL; r->first = next) {
        next = r->first->next;
        free(r->first);
    }
    pthread_mutex_destroy(&r->sending);
    pthread_mutex_destroy(&r->mutex);
    free(r);
}
