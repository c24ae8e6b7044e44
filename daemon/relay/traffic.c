/* See traffic.h. */
#include "daemon/relay/traffic.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/relay.h"
#include "proto/base/sys.h"
#include "proto/wire/wire.h"

#define COUNTED_MAX 4096u /* hosts and models of theirs */

struct traffic {
    struct traffic *next;
    char host[CLUSTER_NAME_BYTES], model[WIRE_NAME_BYTES_MAX];
    _Atomic uint32_t live[TRAFFIC_LIVE];
    _Atomic uint64_t bytes[TRAFFIC_BYTES];
    struct bulk_count frames;
};

struct traffic *traffic_of(struct relay *relay, const char *host, const char *model)
{
    uint32_t count = 0;
    pthread_mutex_lock(&relay->lock);
    struct traffic *t = relay->traffic;
    for (; t != NULL && (strcmp(t->host, host) != 0 || strcmp(t->model, model) != 0); t = t->next)
        count++;
    if (t == NULL && count < COUNTED_MAX && (t = sys_calloc(1, sizeof *t)) != NULL) {
        snprintf(t->host, sizeof t->host, "%s", host);
        snprintf(t->model, sizeof t->model, "%s", model);
        t->next = relay->traffic;
        relay->traffic = t;
    }
    pthread_mutex_unlock(&relay->lock);
    return t;
}

void traffic_count(struct traffic *t, enum traffic_live what, int by)
{
    if (t != NULL)
        atomic_fetch_add(&t->live[what], (uint32_t)by);
}

void traffic_add(struct traffic *t, enum traffic_bytes what, uint64_t bytes)
{
    if (t != NULL)
        atomic_fetch_add(&t->bytes[what], bytes);
}

struct bulk_count *traffic_frames(struct traffic *t)
{
    return t != NULL ? &t->frames : NULL;
}

struct traffic *traffic_next(const struct relay *relay, const struct traffic *t,
                             struct traffic_view *ret_view)
{
    struct traffic *next = t != NULL ? t->next : relay->traffic;
    if (next == NULL)
        return NULL;
    *ret_view = (struct traffic_view){ .host = next->host,
                                       .model = next->model,
                                       .in = atomic_load(&next->frames.in),
                                       .out = atomic_load(&next->frames.out) };
    for (uint32_t i = 0; i < TRAFFIC_LIVE; i++)
        ret_view->live[i] = atomic_load(&next->live[i]);
    for (uint32_t i = 0; i < TRAFFIC_BYTES; i++)
        ret_view->bytes[i] = atomic_load(&next->bytes[i]);
    return next;
}
