/* See get.h. */
#include "client/paths/get.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"

#define PAUSE_NS (2 * NS_PER_MS)

struct getting {
    struct shd_model *m;
    const struct path_get *get;
    struct wire_got *got; /* owned, [owners] */
};

static void make_get(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    const struct getting *g = round->ctx;
    ret_request->get = (struct wire_get){ .model = g->m->map->owners[link->index].layout.handle,
                                          .unit = g->get->unit,
                                          .array = (uint32_t)g->get->array };
}

static int take_got(const struct round *round, const struct link *link,
                    const struct wire_reply *reply, struct shd_err *e)
{
    struct getting *g = round->ctx;
    const struct map_owner *owner = &g->m->map->owners[link->index];
    const uint64_t bytes = owner->shards->slice[g->get->unit].elems * sizeof(float);
    if (reply->got.bytes < bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "offers a stage of %" PRIu64 " bytes for a slice of %" PRIu64,
                        reply->got.bytes, bytes);
    g->got[link->index] = reply->got;
    return SHD_OK;
}

static int copy_slice(const struct getting *g, struct link *link, struct shd_err *e)
{
    const struct wire_got *got = &g->got[link->index];
    const struct map_owner *owner = &g->m->map->owners[link->index];
    const struct slice slice = owner->shards->slice[g->get->unit];
    const struct wire_segment offered = { .kind = SEGMENT_STAGE,
                                          .ticket = got->ticket,
                                          .bytes = got->bytes };
    struct segment stage;
    int fd = -1;
    int r = link_claim(link, &offered, &fd, e);
    if (r == SHD_OK)
        r = segment_map(fd, SEGMENT_STAGE, got->bytes, &stage, e);
    if (r != SHD_OK) {
        if (fd >= 0)
            close(fd);
        return r;
    }
    memcpy(g->get->values + slice.first_elem, stage.base, slice.elems * sizeof(float));
    segment_close(&stage);
    return SHD_OK;
}

/* Connections that were lost, ever. */
static uint64_t losses(const struct hub *hub)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < hub->owner_count; i++)
        count += hub->links[i].epoch;
    return count;
}

/* *ret_again: owners were at different steps, or one died in between: its successor knows nothing
 * of what was asked of it. */
static int get_once(struct getting *g, bool *ret_again, struct shd_err *e)
{
    struct hub *hub = g->m->session->hub;
    struct round round = { .what = "Get",
                           .hint = "an update is running",
                           .asks = WIRE_GET,
                           .type = WIRE_GOT,
                           .make = make_get,
                           .take = take_got,
                           .ctx = g };
    const uint64_t losses_before = losses(hub);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++) /* of replicas it is the same */
        r = round_ask(&round, &hub->links[i], 0, e);
    r = round_finish(&round, hub, r, e);
    FAIL_POINT("get:answered");
    *ret_again = false;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++) {
        r = copy_slice(g, &hub->links[i], e);
        *ret_again = *ret_again || g->got[i].step != g->got[0].step;
    }
    const bool lost = r == SHD_EGONE || (r == SHD_ENOENT && losses(hub) != losses_before);
    *ret_again = *ret_again || (lost && hub_check(hub, NULL) == SHD_OK);
    return r;
}

int get_unit(struct shd_model *m, const struct path_get *get, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct getting g = { m, get, sys_calloc(hub->owner_count, sizeof *g.got) };
    const uint64_t start_ns = clock_now_ns();
    bool again = true;
    int r = SHD_OK;
    if (g.got == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " answers", hub->owner_count);
    while ((r = get_once(&g, &again, e)), again) {
        const uint64_t left_ns = hub_left_ns(hub, start_ns, PAUSE_NS);
        if (left_ns == 0)
            r = err_set(e, SHD_ETIMEDOUT, "the owners of unit %" PRIu32 " were never at one step",
                        get->unit);
        if (left_ns == 0 || (r = hub_poll(hub, left_ns, e)) != SHD_OK)
            break;
    }
    if (r == SHD_OK) {
        *get->ret_step = g.got[0].step;
        *get->ret_updates = g.got[0].updates;
    }
    free(g.got);
    return r;
}
