/* A daemon was succeeded: open on the successor what this session has open; see reopen.h.
 *
 * Happy path: OpenModel by name, the same checks as at first, the new segments over the old ones.
 * Returns that were not credited are asked again by the hub, which makes them anew
 * (slots.c): their gradients are brought along then.
 *
 * Failure: a daemon that goes again is tried again. One that comes back without the model, with
 * another one, or at an earlier step has lost its state: no more waiting helps. */
#include "client/paths/reopen.h"

#include <inttypes.h>
#include <string.h>

#include "client/paths/copy.h"
#include "client/paths/layout.h"
#include "client/paths/map.h"
#include "client/paths/nccl_join.h"
#include "client/paths/segments.h"
#include "proto/base/check.h"

static int check_step(const struct shd_model *m, const struct link *link,
                      const struct map_layout *layout, struct shd_err *e)
{
    if (layout->step >= m->step)
        return SHD_OK;
    return link_err(link, SHD_ESTEP, e,
                    "came back with model '%s' at step %" PRIu64 ", this worker is at step %" PRIu64
                    ": committed state is lost; restore a checkpoint",
                    m->spec->name, layout->step, m->step);
}

/* What is mapped of it is mapped by one device. */
static int check_device(const struct map_layout *before, const struct link *link,
                        const struct map_layout *layout, struct shd_err *e)
{
    if (layout->on_gpu == before->on_gpu &&
        memcmp(layout->uuid, before->uuid, sizeof layout->uuid) == 0)
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e, "came back on another device");
}

static int reopen_failed(const struct shd_model *m, const struct link *link, int code,
                         struct shd_err *e)
{
    const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
    if (code == SHD_ENOENT)
        return link_err(link, code, e,
                        "came back without model '%s': its state is lost; restore a checkpoint",
                        m->spec->name);
    return link_err(link, code, e, "came back, but model '%s' cannot be opened: %s", m->spec->name,
                    why.text);
}

static int reopen_model(struct shd_model *m, struct link *link, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    struct map_layout layout;
    unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD;
    if (!owner->mapped)
        return SHD_OK; /* whoever is opening it will ask again */
    if (owner->has_inbox)
        wanted |= 1u << SEGMENT_INBOX;
    int r = layout_exchange(m, link, owner->has_inbox ? m->map->view_slots : 0, &layout, e);
    if (r != SHD_OK)
        return reopen_failed(m, link, r, e);
    r = check_step(m, link, &layout, e);
    if (r == SHD_OK)
        r = check_device(&owner->layout, link, &layout, e);
    if (r != SHD_OK)
        return r;
    copy_hold(m);
    r = segments_take(m, link, &layout, wanted, e);
    copy_go(m);
    if (r != SHD_OK)
        return r;
    owner->layout = layout;
    return nccl_reopen(m, link, e);
}

void reopen_look(void *ctx)
{
    const struct shd_session *s = ctx;
    if (s->opening != NULL)
        nccl_look(s->opening);
    for (struct shd_model *m = s->models; m != NULL; m = m->next)
        nccl_look(m);
}

int reopen_models(void *ctx, struct link *link, struct shd_err *e)
{
    struct shd_session *s = ctx;
    int r = SHD_OK;
    if (s->opening != NULL && s->opening->map != NULL)
        r = reopen_model(s->opening, link, e);
    for (struct shd_model *m = s->models; r == SHD_OK && m != NULL; m = m->next)
        r = reopen_model(m, link, e);
    return r;
}
