/* See whole.h. */
#include "client/paths/whole.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/kern_run.h"
#include "client/session/link.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

/* -- Deciding ---------------------------------------------------------------------------------- */

bool whole_decide(const struct shd_model *m)
{
    bool whole = m->session->on_gpu;
    for (uint32_t i = 0; i < m->map->owner_count; i++)
        whole = whole || m->map->owners[i].layout.on_gpu;
    return whole;
}

bool whole_is_far(const struct shd_model *m, const struct map_owner *owner)
{
    return m->session->on_gpu && owner->layout.on_gpu &&
           memcmp(owner->layout.uuid, m->session->kern->ops->uuid, sizeof owner->layout.uuid) != 0;
}

static int err_apart(const struct shd_model *m, uint32_t owner, struct shd_err *e)
{
    const struct map_layout *layout = &m->map->owners[owner].layout;
    char theirs[GPU_NAME_BYTES + 16] = "host memory", ours[GPU_NAME_BYTES + 16] = "host memory";
    if (layout->on_gpu)
        gpu_name(layout->uuid, theirs);
    if (m->session->on_gpu)
        gpu_name(m->session->kern->ops->uuid, ours);
    return err_set(e, SHD_ENOTSUP,
                   "path map: daemon %s has model '%s' in %s, this worker's arrays are in %s: take "
                   "auto or copy",
                   m->session->hub->links[owner].device, m->spec->name, theirs, ours);
}

int whole_check_map(const struct shd_model *m, struct shd_err *e)
{
    const struct map_model *map = m->map;
    if (m->spec->codec != CODEC_NONE)
        return err_set(e, SHD_ENOTSUP,
                       "path map: model '%s' is published in codes (codec: %s), which are to be "
                       "decoded: take auto or copy",
                       m->spec->name, codec_name(m->spec->codec));
    if (!map->whole)
        return SHD_OK;
    for (uint32_t i = 0; i < map->owner_count; i++) {
        const struct map_layout *layout = &map->owners[i].layout;
        if (!m->session->on_gpu && !layout->on_gpu)
            continue;
        if (!m->session->on_gpu || !layout->on_gpu || whole_is_far(m, &map->owners[i]))
            return err_apart(m, i, e);
    }
    if (map->owner_count == 1)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "path map: model '%s' has %" PRIu32
                   " owners, a GPU maps the memory of one only: "
                   "take auto or copy",
                   m->spec->name, map->owner_count);
}

/* owner->whole.gpu, where there is to be one. */
static int find_gpu(struct shd_model *m, struct map_owner *owner, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    struct shd_err why = { 0 };
    char name[GPU_NAME_BYTES];
    if (!owner->layout.on_gpu)
        w->gpu = session_gpu(m->session);
    if (!owner->layout.on_gpu || w->gpu != NULL)
        return SHD_OK;
    const int r = gpu_for(m->session, owner->layout.uuid, &w->gpu, &why);
    if (r == SHD_OK)
        return SHD_OK;
    gpu_name(owner->layout.uuid, name);
    return err_set(e, r, "it is in the memory of %s: %s", name, why.text);
}

/* -- Mapping ----------------------------------------------------------------------------------- */

static void pin(struct shd_model *m, const struct map_whole *w, struct whole_segment *s,
                enum segment_kind kind)
{
    if (w->gpu == NULL || s->segment.place != SEGMENT_HOST)
        return;
    s->pinned = w->gpu->ops->pin(w->gpu, s->segment.base, s->segment.bytes,
                                 segment_kind_readonly(kind), /* e= */ NULL) == SHD_OK;
    if (!s->pinned)
        m->session->bytes_unpinned += s->segment.bytes;
}

static void unpin(const struct map_whole *w, struct whole_segment *s)
{
    if (s->pinned)
        w->gpu->ops->unpin(w->gpu, s->segment.base);
    s->pinned = false;
}

static void close_segment(const struct map_whole *w, struct whole_segment *s)
{
    unpin(w, s);
    if (s->segment.place == SEGMENT_CUDA && s->segment.base != NULL)
        w->gpu->ops->segment_close(w->gpu, &s->segment);
    else
        segment_close(&s->segment); /* a GPU's that was never mapped is a descriptor */
}

/* at: NULL, or what this one replaces. */
static int map_host(int fd, enum segment_kind kind, uint64_t bytes, struct segment *at,
                    struct segment *ret_segment, struct shd_err *e)
{
    if (at == NULL)
        return segment_map(fd, kind, bytes, ret_segment, e);
    const int r = segment_place(at->base, fd, 0, bytes, !segment_kind_readonly(kind), e);
    if (r != SHD_OK)
        return r;
    close(at->fd);
    *ret_segment = *at;
    ret_segment->fd = fd;
    return SHD_OK;
}

/* fd (taken on SHD_OK) into *s, over what that has mapped. */
static int map_segment(struct shd_model *m, const struct map_whole *w,
                       const struct wire_segment *from, int fd, struct whole_segment *s,
                       struct shd_err *e)
{
    struct segment got;
    struct segment *at = s->segment.base != NULL ? &s->segment : NULL;
    int r;
    if (at != NULL && at->bytes != from->bytes)
        return err_set(e, SHD_ESEGMENT, "it has %" PRIu64 " bytes, its predecessor's had %" PRIu64,
                       from->bytes, at->bytes);
    unpin(w, s);
    if (from->place == SEGMENT_CUDA)
        r = w->gpu->ops->segment_map(w->gpu, fd, from->kind, from->bytes, at, &got, e);
    else
        r = map_host(fd, from->kind, from->bytes, at, &got, e);
    if (r != SHD_OK)
        return r;
    s->segment = got;
    m->session->bytes_mapped += from->bytes;
    pin(m, w, s, from->kind);
    return SHD_OK;
}

/* -- Publish ----------------------------------------------------------------------------------- */

static void keep_unmapped(struct segment *s, const struct wire_segment *segment, int *fd)
{
    segment_close(s);
    *s = (struct segment){ .fd = *fd, .bytes = segment->bytes, .place = segment->place };
    *fd = -1;
}

static int take_publish(struct shd_model *m, struct map_owner *owner,
                        const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    const bool again = w->publish.segment.base != NULL;
    if (segment->place == SEGMENT_CUDA && !again &&
        (!m->session->on_gpu || whole_is_far(m, owner))) {
        keep_unmapped(&w->publish.segment, segment, fd);
        return SHD_OK;
    }
    int r = find_gpu(m, owner, e);
    if (r != SHD_OK)
        return r;
    r = map_segment(m, w, segment, *fd, &w->publish, e);
    if (r == SHD_OK)
        *fd = -1; /* the segment's now */
    return r;
}

static const uint8_t *whole_published(const struct shd_model *m, const struct map_owner *owner,
                                      uint32_t unit)
{
    (void)m;
    const uint8_t *base = owner->whole.publish.segment.base;
    CHECK(base != NULL);
    return base + shardmap_publish_offset_bytes(owner->shards, unit);
}

/* -- Inbox ------------------------------------------------------------------------------------- */

static uint8_t *slot_today(const struct map_owner *owner, uint32_t slot)
{
    uint8_t *base = owner->whole.inbox->memory.segment.base;
    return base + shardmap_slot_offset_bytes(owner->shards, slot);
}

/* Addresses are compared and never read: they may be a GPU's. */
static bool lies_in(const uint8_t *at, const struct segment *segment)
{
    const uintptr_t base = (uintptr_t)segment->base;
    return (uintptr_t)at >= base && (uintptr_t)at - base < segment->bytes;
}

/* Let go of predecessors' inboxes in which no slot lies any more. */
static void drop_old(const struct shd_model *m, struct map_whole *w)
{
    struct whole_inbox **link = &w->inbox->older;
    while (*link != NULL) {
        struct whole_inbox *inbox = *link;
        bool used = false;
        for (uint32_t i = 0; i < m->map->view_slots; i++)
            used = used || lies_in(w->slots[i], &inbox->memory.segment);
        if (used) {
            link = &inbox->older;
            continue;
        }
        *link = inbox->older;
        close_segment(w, &inbox->memory);
        free(inbox);
    }
}

static int take_slots(struct shd_model *m, struct map_owner *owner, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    if (w->slots != NULL)
        return SHD_OK;
    w->slots = sys_calloc(m->map->view_slots, sizeof *w->slots);
    if (w->slots == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " slots", m->map->view_slots);
    return SHD_OK;
}

static int take_inbox(struct shd_model *m, struct map_owner *owner,
                      const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    const bool first = w->inbox == NULL;
    if (whole_is_far(m, owner) && w->publish.segment.base == NULL) {
        keep_unmapped(&w->held, segment, fd);
        return SHD_OK;
    }
    int r = find_gpu(m, owner, e);
    if (r == SHD_OK)
        r = take_slots(m, owner, e);
    if (r != SHD_OK)
        return r;
    struct whole_inbox *inbox = sys_calloc(1, sizeof *inbox);
    if (inbox == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an inbox");
    inbox->memory.segment = SEGMENT_CLOSED;
    r = map_segment(m, w, segment, *fd, &inbox->memory, e);
    if (r != SHD_OK) {
        free(inbox);
        return r;
    }
    *fd = -1; /* the segment's now */
    inbox->older = w->inbox;
    w->inbox = inbox;
    for (uint32_t i = 0; first && i < m->map->view_slots; i++)
        w->slots[i] = slot_today(owner, i);
    drop_old(m, w);
    return SHD_OK;
}

static int whole_ready(struct shd_model *m, struct map_owner *owner, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    const struct segment held = w->publish.segment;
    const struct wire_segment as = { .kind = SEGMENT_PUBLISH,
                                     .bytes = held.bytes,
                                     .place = held.place };
    const struct wire_segment inbox = { .kind = SEGMENT_INBOX,
                                        .bytes = w->held.bytes,
                                        .place = w->held.place };
    struct shd_err why = { 0 };
    int r = held.base == NULL ? find_gpu(m, owner, &why) : SHD_OK;
    if (r == SHD_OK && held.base == NULL)
        r = map_segment(m, w, &as, held.fd, &w->publish, &why);
    if (r == SHD_OK && w->held.fd >= 0)
        r = take_inbox(m, owner, &inbox, &w->held.fd, &why);
    if (r == SHD_OK)
        return SHD_OK;
    return link_err(&m->session->hub->links[owner - m->map->owners], r, e,
                    "has a publish segment that cannot be mapped here: %s", why.text);
}

static int whole_ready_slot(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                            struct shd_err *e)
{
    (void)e;
    owner->whole.slots[slot] = slot_today(owner, slot);
    drop_old(m, &owner->whole);
    return SHD_OK;
}

static int whole_slice_at(struct shd_model *m, const struct map_owner *owner, uint32_t slot,
                          uint32_t unit, enum shd_dtype dtype, void **ret_at, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)dtype;
    (void)e;
    *ret_at = owner->whole.slots[slot];
    return SHD_OK;
}

float *whole_slot_array(const struct shd_model *m, uint32_t slot)
{
    CHECK(m->map->owner_count == 1);
    return (float *)(void *)m->map->owners[0].whole.slots[slot];
}

/* -- Both -------------------------------------------------------------------------------------- */

int whole_take(struct shd_model *m, struct map_owner *owner, const struct wire_segment *segment,
               int *fd, struct shd_err *e)
{
    if (segment->kind == SEGMENT_PUBLISH)
        return take_publish(m, owner, segment, fd, e);
    CHECK(segment->kind == SEGMENT_INBOX);
    return take_inbox(m, owner, segment, fd, e);
}

void whole_close(struct map_owner *owner)
{
    struct map_whole *w = &owner->whole;
    close_segment(w, &w->publish);
    segment_close(&w->held);
    while (w->inbox != NULL) {
        struct whole_inbox *inbox = w->inbox;
        w->inbox = inbox->older;
        close_segment(w, &inbox->memory);
        free(inbox);
    }
    free(w->slots);
    w->slots = NULL;
}

/* -- Gradients --------------------------------------------------------------------------------- */

static int whole_bring(struct shd_model *m, struct map_owner *owner, uint32_t slot, bool first,
                       uint64_t *ret_turn, struct shd_err *e)
{
    struct map_whole *w = &owner->whole;
    const struct grad_slot *s = &m->slots[slot];
    const uint64_t elems = owner->shards->slice[s->unit].elems;
    const struct kern_copy copy = { slot_today(owner, slot), w->slots[slot],
                                    shardmap_grad_bytes(owner->shards, s->unit, s->dtype) };
    struct kern_batch batch;
    *ret_turn = 0;
    if (!first || copy.to == copy.from || elems == 0)
        return SHD_OK;
    if (w->gpu == NULL) {
        memcpy(copy.to, copy.from, copy.bytes);
        return SHD_OK;
    }
    const struct kern_op op = { KERN_COPY, { .copy = copy } };
    kern_batch_init(&batch);
    const int r = kern_batch_add(&batch, w->gpu, &op, e);
    const int waited = kern_batch_wait(&batch, r == SHD_OK ? e : NULL);
    return r == SHD_OK ? waited : r;
}

const struct mover_ops mover_whole = {
    .take = whole_take,
    .ready = whole_ready,
    .published = whole_published,
    .ready_slot = whole_ready_slot,
    .slice_at = whole_slice_at,
    .bring = whole_bring,
};
