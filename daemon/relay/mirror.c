/* See mirror.h. */
#include "daemon/relay/mirror.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/routes.h"
#include "daemon/relay/thread.h"
#include "daemon/relay/traffic.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

#define DIAL_NS           (5 * NS_PER_S)
#define POLL_MS           500
#define PUBLISH_BYTES_MAX (UINT64_C(1) << 50)

struct mirror {
    struct relay *relay; /* borrowed */
    struct mirror *next; /* of those that live; relay's lock */
    uint32_t refs;       /* relay's lock; its thread has one */
    struct frame_open open;
    uint32_t owner, owners;
    uint64_t instance;
    struct traffic *traffic; /* borrowed; NULL: not counted */
    _Atomic int state;       /* enum mirror_state */
    struct shd_err why;      /* of a dead one; written before the state is */
    struct segment publish, board_segment;
    struct board *board; /* of board_segment; NULL: MODEL has not come */
    uint32_t units;
    uint32_t unversioned; /* units that have no version yet */
};

/* Attempts are numbered over a model's life, and sessions hear of them as the mirror's thread does:
 * none takes back what another one has said. */
void mirror_attempt(struct mirror *m, uint64_t attempt, uint64_t tried)
{
    pthread_mutex_lock(&m->relay->lock);
    if (attempt > atomic_load_explicit(&m->board->attempt, memory_order_relaxed))
        board_set_attempt(m->board, tried, attempt);
    pthread_mutex_unlock(&m->relay->lock);
}

/* -- Frames ------------------------------------------------------------------------------------ */

static int make_segments(struct mirror *m, const struct bulk_head *head, struct shd_err *e)
{
    if (m->board != NULL || head->index == 0 || head->index > SHD_UNITS_MAX || head->at == 0 ||
        head->at > PUBLISH_BYTES_MAX || head->at % SHD_PAGE_BYTES != 0)
        return err_set(e, SHD_EPROTO, "a model of %" PRIu32 " units and %" PRIu64 " bytes",
                       head->index, head->at);
    if (head->id != m->instance)
        return err_set(e, SHD_ENOENT, "the model is another one by now");
    int r = segment_new("shardd-mirror", SEGMENT_PUBLISH, head->at, &m->publish, e);
    if (r == SHD_OK)
        r = segment_new("shardd-board", SEGMENT_BOARD, board_bytes(head->index), &m->board_segment,
                        e);
    if (r != SHD_OK)
        return r;
    m->board = m->board_segment.base;
    m->units = m->unversioned = head->index;
    board_init(m->board, m->units);
    return SHD_OK;
}

static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct mirror *m = ctx;
    if (head->type == FRAME_REFUSED && head->bytes < sizeof m->why.text) {
        *ret_to = m->why.text;
        return SHD_OK;
    }
    if (head->type == FRAME_UNIT && m->board != NULL && head->index < m->units &&
        head->at <= m->publish.bytes && head->bytes <= m->publish.bytes - head->at) {
        *ret_to = (uint8_t *)m->publish.base + head->at;
        return SHD_OK;
    }
    if (head->bytes == 0 && (head->type == FRAME_MODEL || m->board != NULL))
        return SHD_OK;
    return err_set(e, SHD_EPROTO,
                   "a frame of type %" PRIu32 ", %" PRIu32 ", at %" PRIu64 " of %" PRIu64 " bytes",
                   head->type, head->index, head->at, head->bytes);
}

static int set_version(struct mirror *m, const struct bulk_head *head, struct shd_err *e)
{
    if (head->index >= m->units || head->id == UINT64_MAX)
        return err_set(e, SHD_EPROTO, "unit %" PRIu32 " of %" PRIu32, head->index, m->units);
    m->unversioned -= board_version(m->board, head->index) == UINT64_MAX;
    board_publish(m->board, head->index, head->id);
    return SHD_OK;
}

/* Behind it come all units anew. */
static void set_rewound(struct mirror *m, const struct bulk_head *head)
{
    board_unpublish(m->board);
    m->unversioned = m->units;
    if (head->id > 0)
        board_set_rewound(m->board, head->at, head->id);
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct mirror *m = ctx;
    (void)payload;
    switch ((enum frame_type)head->type) {
    case FRAME_REFUSED:
        for (uint64_t i = 0; i < head->bytes; i++)
            m->why.text[i] = m->why.text[i] >= ' ' && m->why.text[i] <= '~' ? m->why.text[i] : '?';
        return err_set(e, SHD_EGONE, "refused: %.*s", (int)head->bytes, m->why.text);
    case FRAME_MODEL:
        return make_segments(m, head, e);
    case FRAME_UNIT:
        traffic_add(m->traffic, TRAFFIC_PARAMETERS_IN, head->bytes);
        return SHD_OK;
    case FRAME_VERSION:
        return set_version(m, head, e);
    case FRAME_STATE:
        board_set_step(m->board, head->id, head->index);
        return SHD_OK;
    case FRAME_ATTEMPT:
        mirror_attempt(m, head->id, head->at);
        return SHD_OK;
    case FRAME_REWOUND:
        set_rewound(m, head);
        return SHD_OK;
    case FRAME_FILLED:
        if (m->unversioned > 0)
            return err_set(e, SHD_EPROTO, "%" PRIu32 " units are missing", m->unversioned);
        atomic_store(&m->state, MIRROR_FILLED);
        return SHD_OK;
    default:
        return err_set(e, SHD_EPROTO, "a frame of type %" PRIu32, head->type);
    }
}

/* -- Its thread -------------------------------------------------------------------------------- */

static bool is_wanted(struct mirror *m)
{
    pthread_mutex_lock(&m->relay->lock);
    const bool wanted = m->refs > 1;
    pthread_mutex_unlock(&m->relay->lock);
    return wanted;
}

static int fill(struct mirror *m, struct bulk *bulk, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = m };
    const struct bulk_head open = { .type = FRAME_OPEN,
                                    .index = FRAME_OPEN_MODEL,
                                    .id = (uint64_t)m->owner << 32 | m->owners,
                                    .bytes = sizeof m->open };
    bulk_set_hooks(bulk, &hooks);
    int r = bulk_send(bulk, &open, &m->open, e);
    while (r >= SHD_OK && is_wanted(m)) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        if (r == SHD_OK)
            poll(&p, 1, POLL_MS);
        r = bulk_receive(bulk, e);
        const int ticked = r >= SHD_OK ? bulk_tick(bulk, e) : r;
        r = ticked == SHD_OK ? r : ticked;
    }
    return r < SHD_OK ? r : err_set(e, SHD_ECANCELED, "nobody wants it any more");
}

/* Dead, and found by nobody any more. */
static void end(struct mirror *m, const struct shd_err *why)
{
    pthread_mutex_lock(&m->relay->lock);
    for (struct mirror **at = &m->relay->mirrors; *at != NULL; at = &(*at)->next) {
        if (*at != m)
            continue;
        *at = m->next;
        break;
    }
    m->why = *why;
    atomic_store(&m->state, MIRROR_DEAD);
    pthread_mutex_unlock(&m->relay->lock);
}

static void mirror_main(struct relay *relay, void *arg)
{
    struct mirror *m = arg;
    struct bulk *bulk = NULL;
    struct shd_err e = { 0 };
    const char *host = routes_host(relay->routes, m->open.device);
    struct traffic *peer = traffic_of(relay, host, "");
    m->traffic = traffic_of(relay, host, m->open.model);
    traffic_count(peer, TRAFFIC_MIRRORS, 1);
    traffic_count(m->traffic, TRAFFIC_MIRRORS, 1);
    int r = bulk_dial(relay->keys, host, DIAL_NS, &bulk, &e);
    if (r == SHD_OK)
        bulk_set_count(bulk, traffic_frames(peer));
    if (r == SHD_OK)
        r = fill(m, bulk, &e);
    traffic_count(peer, TRAFFIC_MIRRORS, -1);
    traffic_count(m->traffic, TRAFFIC_MIRRORS, -1);
    if (r == SHD_ENOMEM) /* workers have the last one until this one is whole */
        log_warn("op=mirror device=%s host=%s model=%s status=%s why=\"%s\" do=\"leave room "
                 "for two mirrors\"",
                 m->open.device, host, m->open.model, status_name(r), e.text);
    log_info("op=mirror device=%s host=%s model=%s status=%s bytes=%" PRIu64 " why=\"%s\"",
             m->open.device, host, m->open.model, status_name(r),
             bulk != NULL ? bulk_bytes(bulk) : 0, e.text);
    bulk_close(bulk);
    end(m, &e);
    mirror_put(m);
}

/* -- For sessions ------------------------------------------------------------------------------ */

static bool is_of(const struct mirror *m, const struct mirror_key *key)
{
    return strcmp(m->open.device, key->device) == 0 && strcmp(m->open.model, key->model) == 0 &&
           m->owner == key->owner && m->owners == key->owners && m->instance == key->instance;
}

static int mirror_new(struct relay *relay, const struct mirror_key *key, struct mirror **ret_mirror,
                      struct shd_err *e)
{
    struct mirror *m = sys_calloc(1, sizeof *m);
    if (m == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a mirror");
    *m = (struct mirror){ .relay = relay,
                          .refs = 2,
                          .owner = key->owner,
                          .owners = key->owners,
                          .instance = key->instance,
                          .publish = SEGMENT_CLOSED,
                          .board_segment = SEGMENT_CLOSED };
    snprintf(m->open.device, sizeof m->open.device, "%s", key->device);
    snprintf(m->open.model, sizeof m->open.model, "%s", key->model);
    const int r = relay_thread(relay, mirror_main, m, e);
    if (r == SHD_OK)
        *ret_mirror = m;
    else
        free(m);
    return r;
}

int mirror_get(struct relay *relay, const struct mirror_key *key, struct mirror **ret_mirror,
               struct shd_err *e)
{
    int r = SHD_OK;
    pthread_mutex_lock(&relay->lock);
    struct mirror *m = relay->mirrors;
    while (m != NULL && !is_of(m, key))
        m = m->next;
    if (m != NULL) {
        m->refs++;
    } else if ((r = mirror_new(relay, key, &m, e)) == SHD_OK && m != NULL) {
        m->next = relay->mirrors;
        relay->mirrors = m;
    }
    pthread_mutex_unlock(&relay->lock);
    if (r == SHD_OK)
        *ret_mirror = m;
    return r;
}

void mirror_put(struct mirror *m)
{
    if (m == NULL)
        return;
    pthread_mutex_lock(&m->relay->lock);
    const bool last = --m->refs == 0;
    pthread_mutex_unlock(&m->relay->lock);
    if (!last)
        return;
    segment_close(&m->publish);
    segment_close(&m->board_segment);
    free(m);
}

enum mirror_state mirror_state(struct mirror *m, struct shd_err *e)
{
    const enum mirror_state state = (enum mirror_state)atomic_load(&m->state);
    if (state == MIRROR_DEAD)
        err_set(e, SHD_EGONE, "mirror of model '%s': %.150s", m->open.model, m->why.text);
    return state;
}

const struct segment *mirror_publish(const struct mirror *m)
{
    return &m->publish;
}

const struct segment *mirror_board(const struct mirror *m)
{
    return &m->board_segment;
}

struct traffic *mirror_traffic(const struct mirror *m)
{
    return m->traffic;
}

uint32_t mirror_units(const struct mirror *m)
{
    return m->units;
}
