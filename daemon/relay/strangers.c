/* See strangers.h. */
#include "daemon/relay/strangers.h"

#include <netinet/in.h>
#include <string.h>

#include "proto/base/check.h"

#define NETWORK_BYTES 8u /* of an IPv6 address: what a provider gives to one customer, at least */

void strangers_init(struct strangers *s)
{
    s->heard = s->waiting = 0;
    CHECK(pthread_mutex_init(&s->lock, NULL) == 0);
}

struct stranger_source stranger_source(const struct sockaddr *address)
{
    static const uint8_t mapped[] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff };
    struct stranger_source source = { { 0 } };
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)address;
        memcpy(source.bytes, mapped, sizeof mapped);
        memcpy(source.bytes + sizeof mapped, &in->sin_addr, sizeof in->sin_addr);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const void *)address;
        const bool is_mapped = memcmp(&in->sin6_addr, mapped, sizeof mapped) == 0;
        memcpy(source.bytes, &in->sin6_addr, is_mapped ? sizeof source.bytes : NETWORK_BYTES);
    }
    return source;
}

static bool is_same(const struct stranger_source *a, const struct stranger_source *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

static bool may_be_heard(const struct strangers *s, const struct stranger_source *source)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->heard; i++)
        count += is_same(&s->sources[i], source);
    return s->heard < STRANGERS_HEARD && count < STRANGERS_OF_ONE;
}

/* Where the queue is full, who will be heard at once. */
static bool may_wait(const struct strangers *s, const struct stranger_source *source)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->waiting; i++)
        count += is_same(&s->queue[i].source, source);
    if (s->waiting == STRANGERS_WAITING)
        return count == 0 && may_be_heard(s, source);
    return s->waiting < STRANGERS_WAITING && count < STRANGERS_WAITING_OF_ONE;
}

bool strangers_come(struct strangers *s, const struct stranger *who)
{
    pthread_mutex_lock(&s->lock);
    const bool room = may_wait(s, &who->source);
    if (room)
        s->queue[s->waiting++] = *who;
    pthread_mutex_unlock(&s->lock);
    return room;
}

bool strangers_next(struct strangers *s, struct stranger *ret_who)
{
    uint32_t i = 0;
    pthread_mutex_lock(&s->lock);
    while (i < s->waiting && !may_be_heard(s, &s->queue[i].source))
        i++;
    const bool found = i < s->waiting;
    if (found) {
        *ret_who = s->queue[i];
        s->sources[s->heard++] = ret_who->source;
        s->waiting--;
        memmove(&s->queue[i], &s->queue[i + 1], (s->waiting - i) * sizeof *s->queue);
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

void strangers_gone(struct strangers *s, struct stranger_source source)
{
    uint32_t i = 0;
    pthread_mutex_lock(&s->lock);
    while (i < s->heard && !is_same(&s->sources[i], &source))
        i++;
    CHECK(i < s->heard);
    s->sources[i] = s->sources[--s->heard];
    pthread_mutex_unlock(&s->lock);
}

bool strangers_are_crowded(struct strangers *s)
{
    pthread_mutex_lock(&s->lock);
    const bool crowded = s->heard == STRANGERS_HEARD && s->waiting >= STRANGERS_WAITING;
    pthread_mutex_unlock(&s->lock);
    return crowded;
}

bool strangers_wait(struct strangers *s)
{
    pthread_mutex_lock(&s->lock);
    const bool waits = s->waiting > 0;
    pthread_mutex_unlock(&s->lock);
    return waits;
}
