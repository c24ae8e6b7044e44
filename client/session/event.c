/* See event.h. */
#include "client/session/event.h"

#include <stdio.h>

#include "client/session/link.h"
#include "proto/base/clock.h"

/* After the others: it repeats parts of them. */
#include "client/shd.h"

void event_say(const struct event_sink *sink, const struct shd_event *event)
{
    struct shd_event said = *event;
    said.size = sizeof said;
    if (sink->fn != NULL)
        sink->fn(sink->ctx, &said);
}

void event_gone(struct link *link, const struct shd_err *why)
{
    char text[SHD_ERR_TEXT_BYTES + 64];
    if (why->code == SHD_ECANCELED || link->hub->leaving)
        return;
    snprintf(text, sizeof text, "daemon %s is gone: %s", link->device, why->text);
    link->missed = true;
    event_say(&link->hub->events,
              &(struct shd_event){ .kind = SHD_EVENT_GONE, .daemon = link->device, .text = text });
}

void event_back(struct link *link)
{
    char text[128];
    const double seconds = (double)(clock_now_ns() - link->since_ns) * S_PER_NS;
    if (!link->missed)
        return;
    snprintf(text, sizeof text, "daemon %.64s came back after %.1f s", link->device, seconds);
    link->missed = false;
    event_say(&link->hub->events, &(struct shd_event){ .kind = SHD_EVENT_BACK,
                                                       .daemon = link->device,
                                                       .text = text,
                                                       .seconds = seconds });
}
