/* See feed.h.
 *
 * Happy path: a unit's word on the board rises; its slice is sent from the daemon's own pages, then
 * its word is looked at again, as in a seqlock: unchanged, the version is sent behind it. The
 * mirror's board says APPLYING from before the first slice of a step until the last one is there.
 *
 * A model that goes back has nothing published while it does, and then an earlier step: the mirror
 * hears of either before it gets what is read of the pages then.
 */
#include "daemon/relay/feed.h"

#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/source.h"
#include "daemon/relay/traffic.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"

#define LOOK_NS (5 * NS_PER_MS) /* at words that nobody is woken for */
#define NEVER   UINT64_MAX

struct feed {
    struct bulk *bulk;     /* borrowed */
    struct source *source; /* owned */
    const struct board *board;
    struct traffic *traffic; /* borrowed; NULL: not counted */
    uint32_t units;
    uint64_t *sent; /* owned, [units]: version that the mirror has; NEVER: none */
    uint64_t step, phase, attempt, tried;
    uint64_t rewound;     /* the last rewind that the mirror knows of */
    bool filled, nothing; /* nothing: is published, as it knows */
};

/* -- Feeding ----------------------------------------------------------------------------------- */

static int tell(struct feed *feed, enum frame_type type, uint64_t index, uint64_t id, uint64_t at,
                struct shd_err *e)
{
    const struct bulk_head head = { .type = type, .index = (uint32_t)index, .id = id, .at = at };
    return bulk_send(feed->bulk, &head, NULL, e);
}

static int tell_state(struct feed *feed, uint64_t step, uint64_t phase, struct shd_err *e)
{
    if (feed->step == step && feed->phase == phase)
        return SHD_OK;
    feed->step = step;
    feed->phase = phase;
    return tell(feed, FRAME_STATE, phase, step, 0, e);
}

/* Until it is whole nobody may take the mirror's slice for what it was. */
static int feed_unit(struct feed *feed, uint32_t unit, uint64_t version, struct shd_err *e)
{
    struct bulk_head head = { .type = FRAME_UNIT, .index = unit };
    const void *slice = source_slice(feed->source, unit, &head.at, &head.bytes);
    int r = tell_state(feed, version > 0 ? version - 1 : 0, STEP_APPLYING, e);
    if (r == SHD_OK && head.bytes > 0)
        r = bulk_send(feed->bulk, &head, slice, e);
    if (r == SHD_OK)
        traffic_add(feed->traffic, TRAFFIC_PARAMETERS_OUT, head.bytes);
    if (r != SHD_OK || board_stable_version(feed->board, unit) != version)
        return r;
    feed->sent[unit] = version;
    return tell(feed, FRAME_VERSION, unit, version, 0, e);
}

/* What the mirror has of units is of no use any more. */
static int tell_rewound(struct feed *feed, uint64_t attempt, uint64_t step, struct shd_err *e)
{
    for (uint32_t u = 0; u < feed->units; u++)
        feed->sent[u] = NEVER;
    return tell(feed, FRAME_REWOUND, 0, attempt, step, e);
}

/* Before what was read of the board is told: the daemon says this first. */
static int look_back(struct feed *feed, struct shd_err *e)
{
    uint64_t step;
    const uint64_t rewound = board_rewound(feed->board, &step);
    if (rewound == feed->rewound)
        return SHD_OK;
    feed->rewound = rewound;
    feed->nothing = false;
    return tell_rewound(feed, rewound, step, e);
}

/* *ret_next: the unit that is to change next; *ret_whole: the mirror has what the board says. */
static int feed_units(struct feed *feed, uint32_t *ret_next, bool *ret_whole, struct shd_err *e)
{
    uint64_t least = NEVER;
    *ret_whole = true;
    for (uint32_t u = 0; u < feed->units; u++) {
        const uint64_t version = board_version(feed->board, u);
        int r = look_back(feed, e);
        if (r == SHD_OK && version == NEVER && feed->sent[u] != NEVER && !feed->nothing) {
            feed->nothing = true;
            r = tell_rewound(feed, 0, 0, e);
        }
        if (r != SHD_OK)
            return r;
        if (version != NEVER && version != feed->sent[u] &&
            board_stable_version(feed->board, u) == version) {
            r = feed_unit(feed, u, version, e);
            if (r != SHD_OK)
                return r;
        }
        *ret_whole = *ret_whole && feed->sent[u] != NEVER &&
                     feed->sent[u] == board_version(feed->board, u);
        if (feed->sent[u] + 1 < least) { /* NEVER + 1 is 0 */
            least = feed->sent[u] + 1;
            *ret_next = u;
        }
    }
    return SHD_OK;
}

static int feed_words(struct feed *feed, bool whole, struct shd_err *e)
{
    /* In the order in which they are to be read: proto/share/board.c. */
    const struct board *b = feed->board;
    const uint64_t phase = atomic_load_explicit(&b->phase.value, memory_order_acquire);
    const uint64_t step = atomic_load_explicit(&b->step.value, memory_order_acquire);
    const uint64_t attempt = atomic_load_explicit(&b->attempt, memory_order_acquire);
    const uint64_t tried = atomic_load_explicit(&b->tried, memory_order_acquire);
    int r = look_back(feed, e);
    whole = whole && feed->sent[0] != NEVER; /* it went back meanwhile */
    if (r == SHD_OK && (attempt != feed->attempt || tried != feed->tried)) {
        feed->attempt = attempt;
        feed->tried = tried;
        r = tell(feed, FRAME_ATTEMPT, 0, attempt, tried, e);
    }
    if (r == SHD_OK && whole && phase != STEP_APPLYING)
        r = tell_state(feed, step, phase, e);
    if (r == SHD_OK && whole && !feed->filled) {
        feed->filled = true;
        r = tell(feed, FRAME_FILLED, 0, 0, 0, e);
    }
    return r;
}

/* The mirror says nothing, the daemon only that it goes. */
static int look(struct feed *feed, struct shd_err *e)
{
    struct pollfd p[] = { { .fd = bulk_fd(feed->bulk), .events = POLLIN },
                          { .fd = source_fd(feed->source), .events = POLLIN } };
    poll(p, ARRAY_SIZE(p), 0);
    int r = p[0].revents != 0 ? bulk_receive(feed->bulk, e) : SHD_OK;
    if (r >= SHD_OK && p[1].revents != 0)
        return err_set(e, SHD_EGONE, "the daemon ended the session");
    return r >= SHD_OK ? bulk_tick(feed->bulk, e) : r;
}

static int feed_forever(struct feed *feed, struct shd_err *e)
{
    const struct bulk_head head = { .type = FRAME_MODEL,
                                    .index = feed->units,
                                    .id = source_instance(feed->source),
                                    .at = source_publish_bytes(feed->source) };
    int r = bulk_send(feed->bulk, &head, NULL, e);
    feed->step = feed->phase = feed->attempt = NEVER;
    while (r == SHD_OK) {
        uint32_t next = 0;
        bool whole;
        r = feed_units(feed, &next, &whole, e);
        if (r == SHD_OK)
            r = feed_words(feed, whole, e);
        if (r == SHD_OK)
            r = look(feed, e);
        if (r == SHD_OK)
            board_wait(feed->board, next, feed->sent[next] + 1, LOOK_NS);
    }
    return r;
}

static int feed_counted(struct feed *feed, struct traffic *peer, struct shd_err *e)
{
    traffic_count(peer, TRAFFIC_FED, 1);
    traffic_count(feed->traffic, TRAFFIC_FED, 1);
    const int r = feed_forever(feed, e);
    traffic_count(peer, TRAFFIC_FED, -1);
    traffic_count(feed->traffic, TRAFFIC_FED, -1);
    return r;
}

static int refuse_frame(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    (void)ctx;
    (void)ret_to;
    return err_set(e, SHD_EPROTO, "a frame of type %" PRIu32 " of who mirrors a model", head->type);
}

static int begin(struct feed *feed, struct shd_err *e)
{
    feed->board = source_board(feed->source, &feed->units);
    feed->sent = sys_malloc(feed->units * sizeof *feed->sent);
    if (feed->sent == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", feed->units);
    for (uint32_t u = 0; u < feed->units; u++)
        feed->sent[u] = NEVER;
    return SHD_OK;
}

int feed_run(struct relay *relay, struct bulk *bulk, const struct frame_open *open,
             uint64_t owner_of, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = refuse_frame };
    const struct source_key key = { .dir = relay->config->runtime_dir,
                                    .device = open->device,
                                    .model = open->model,
                                    .owner = (uint32_t)(owner_of >> 32),
                                    .owners = (uint32_t)owner_of };
    struct traffic *peer = traffic_of(relay, bulk_peer(bulk), "");
    struct feed feed = { .bulk = bulk };
    bulk_set_hooks(bulk, &hooks);
    int r = source_open(&key, &feed.source, e);
    if (r == SHD_OK)
        r = begin(&feed, e);
    if (r == SHD_OK) /* the model is there: its name is no invention of the peer's */
        feed.traffic = traffic_of(relay, bulk_peer(bulk), open->model);
    if (r != SHD_OK)
        frame_refuse(bulk, e);
    else
        r = feed_counted(&feed, peer, e);
    source_close(feed.source);
    free(feed.sent);
    return r;
}
