/* The view: what a daemon shows of itself, for any thread to read.
 *
 * The loop thread copies what it has into a snapshot (take.h) when somebody has asked, at most
 * ten times a second; nobody asks, nothing is done. A snapshot never changes and is counted; all
 * the rest, sentences and JSON, is made of it on the HTTP thread, which so can answer while the
 * loop is stuck: with the last one, whose age it tells.
 *
 *   view_request() ──uv_async──▶ loop: take, publish ──eventfd──▶ HTTP thread: view_get(), render
 *
 * Failure: no memory for a snapshot: the last one stays.
 */
#ifndef SHD_VIEW_H
#define SHD_VIEW_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "proto/base/status.h"

struct daemon;
struct tensor_view;
struct view_snapshot;

#define VIEW_INTERVAL_NS UINT64_C(100000000) /* between two snapshots, at least */

struct view {
    struct daemon *daemon;
    uv_async_t async;     /* somebody asks */
    uv_timer_t heartbeat; /* says that the loop turns; later: takes what was asked for too soon */
    uv_timer_t later;
    bool handles_ready;
    struct tensor_view *tensor; /* owned */
    _Atomic uint64_t beat_ns;
    _Atomic bool wanted, wanted_spans;
    int event_fd;          /* owned: written after each publication */
    pthread_mutex_t mutex; /* guards the next two */
    struct view_snapshot *last, *last_spans;
};

int view_init(struct daemon *d, struct shd_err *e);
void view_deinit(struct daemon *d); /* no reader is left; handles are closed by the loop's end */

/* Any thread: a new snapshot, please; event_fd tells when it is there. */
void view_request(struct view *v, bool with_spans);

/* Any thread: a reference to the last one, or NULL. *ret_fresh: it was taken since then. */
struct view_snapshot *view_get(struct view *v, bool with_spans, uint64_t since_ns, bool *ret_fresh);

/* Any thread: nobody needs the last one with spans any more; it is large. */
void view_forget_spans(struct view *v);

/* Any thread: since when the loop has not turned. */
uint64_t view_beat_age_ns(const struct view *v);

/* The first reason why what a daemon holds is not well (/healthz), a line: a model was refused, or
 * has failed. False: there is none. Any thread; s may be NULL. */
bool view_trouble(const struct daemon *d, const struct view_snapshot *s, char *text, size_t bytes);

#endif
