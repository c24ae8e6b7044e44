/* What may be worth a line in a program's log: shd_options.event. */
#ifndef SHD_EVENT_H
#define SHD_EVENT_H

struct link;
struct shd_err;
struct shd_event;

struct event_sink {
    void (*fn)(void *ctx, const struct shd_event *event); /* NULL: nobody listens */
    void *ctx;
};

/* Hand it over; its size is filled in. */
void event_say(const struct event_sink *sink, const struct shd_event *event);

/* A link that was up goes down, and is up again. One that is only greeted anew (SHD_ECANCELED) was
 * not gone. */
void event_gone(struct link *link, const struct shd_err *why);
void event_back(struct link *link);

#endif
