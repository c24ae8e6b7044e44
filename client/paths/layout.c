/* Asking for a model's layout; see layout.h.
 *
 * Each answer is checked against our own arithmetic, and its spec against ours. */
#include "client/paths/layout.h"

#include <inttypes.h>
#include <string.h>

#include "client/session/hub.h"
#include "client/session/link.h"
#include "proto/base/check.h"
#include "proto/spec/spec_json.h"

static_assert(WIRE_DEVICE_BYTES == GPU_UUID_BYTES, "gpu.h and the messages agree");

/* The daemon's spec becomes ours (attach), or must be ours. */
static int take_spec(struct shd_model *m, const struct link *link, const struct wire_layout *layout,
                     struct shd_err *e)
{
    struct spec *spec;
    int r = spec_parse((const char *)layout->spec.data, layout->spec.bytes, &spec, e);
    if (r == SHD_OK && m->spec == NULL) {
        r = model_set_spec(m, spec, e);
        if (r == SHD_OK)
            return SHD_OK;
        spec_free(spec);
    } else if (r == SHD_OK) {
        r = spec_compare(spec, m->spec, e);
        spec_free(spec);
    }
    if (r != SHD_OK) {
        const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
        link_err(link, r, e, "has another model: %s", why.text);
    }
    return r;
}

static int take_layout(const struct layout_opening *o, const struct link *link,
                       const struct wire_reply *reply, struct map_layout *ret_layout,
                       struct shd_err *e)
{
    const struct wire_layout *layout = &reply->layout;
    const uint32_t owners = o->m->map->owner_count;
    if (reply->type != WIRE_LAYOUT)
        return link_err(link, SHD_EPROTO, e, "answered OpenModel with a reply of type %d",
                        (int)reply->type);
    if (layout->owner != link->index || layout->owners != owners)
        return link_err(link, SHD_EPROTO, e,
                        "is owner %" PRIu32 " of %" PRIu32 ", not %" PRIu32 " of %" PRIu32,
                        layout->owner, layout->owners, link->index, owners);
    if (layout->slots != o->slots)
        return link_err(link, SHD_EPROTO, e, "made %" PRIu32 " gradient slots, not %" PRIu32,
                        layout->slots, o->slots);
    const int r = take_spec(o->m, link, layout, e);
    if (r != SHD_OK)
        return r;
    struct map_layout got = { .epoch = link->epoch,
                              .handle = layout->model,
                              .step = layout->step,
                              .slots = layout->slots,
                              .slot_bytes = layout->slot_bytes,
                              .decided = layout->has_decision,
                              .decision = layout->decision,
                              .segment_count = layout->segment_count };
    memcpy(got.segments, layout->segments, sizeof got.segments);
    got.on_gpu = layout->device.bytes > 0;
    CHECK(!got.on_gpu || layout->device.bytes == sizeof got.uuid);
    if (got.on_gpu)
        memcpy(got.uuid, layout->device.data, sizeof got.uuid);
    CHECK(layout->in.bytes <= sizeof got.in);
    if (layout->in.bytes > 0)
        memcpy(got.in, layout->in.data, layout->in.bytes);
    *ret_layout = got;
    return SHD_OK;
}

static void fill_open(const struct layout_opening *o, const struct link *link,
                      struct wire_request *ret_request)
{
    *ret_request = (struct wire_request){
        .type = WIRE_OPEN_MODEL,
        .open_model = { .spec = { (const uint8_t *)o->json, strlen(o->json) },
                        .name = o->name,
                        .owner = link->index,
                        .owners = link->hub->link_count,
                        .slots = o->slots },
    };
}

/* -- By rounds --------------------------------------------------------------------------------- */

static int make_open(struct round *round, struct link *link, uint64_t arg,
                     struct wire_request *ret_request, struct shd_err *e)
{
    (void)arg;
    (void)e;
    fill_open(round->ctx, link, ret_request);
    return SHD_OK;
}

static int take_open(struct round *round, struct link *link, uint64_t arg,
                     const struct wire_reply *reply, struct shd_err *e)
{
    const struct layout_opening *o = round->ctx;
    (void)arg;
    return take_layout(o, link, reply, &o->m->map->owners[link->index].layout, e);
}

static struct round open_round(struct layout_opening *o)
{
    return (struct round){
        .what = "OpenModel", .type = WIRE_LAYOUT, .make = make_open, .take = take_open, .ctx = o
    };
}

int layout_ask(struct layout_opening *o, struct link *link, struct shd_err *e)
{
    struct round round = open_round(o);
    const int r = round_ask(&round, link, 0, e);
    return round_finish(&round, link->hub, r, e);
}

int layout_ask_all(struct layout_opening *o, struct shd_err *e)
{
    struct hub *hub = o->m->session->hub;
    struct round round = open_round(o);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = round_ask(&round, &hub->links[i], 0, e);
    return round_finish(&round, hub, r, e);
}

/* -- On a link that comes up ------------------------------------------------------------------- */

struct exchange {
    const struct layout_opening *o;
    struct map_layout *ret_layout;
};

static int take_exchange(void *ctx, struct link *link, const struct wire_reply *reply,
                         struct shd_err *e)
{
    const struct exchange *x = ctx;
    return take_layout(x->o, link, reply, x->ret_layout, e);
}

int layout_exchange(struct shd_model *m, struct link *link, uint32_t slots,
                    struct map_layout *ret_layout, struct shd_err *e)
{
    const struct layout_opening o = { m, "", m->spec->name, slots };
    struct exchange x = { &o, ret_layout };
    struct wire_request request;
    fill_open(&o, link, &request);
    const struct link_ask ask = { take_exchange, /* look= */ NULL, &x };
    return link_exchange(link, &request, &ask, e);
}
