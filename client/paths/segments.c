/* See segments.h. Who offers them is not trusted: places, sizes and kinds are checked. */
#include "client/paths/segments.h"

#include <inttypes.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "proto/base/check.h"

/* Checked where it does no harm, then placed over its predecessor: whoever reads that (a transfer
 * thread, say) goes on with this one. */
static int map_board(struct shd_model *m, struct map_owner *owner, int *fd, uint64_t bytes,
                     struct shd_err *e)
{
    struct segment board;
    int r = segment_map(*fd, SEGMENT_BOARD, bytes, &board, e);
    if (r != SHD_OK)
        return r;
    *fd = -1; /* the segment's now */
    r = board_check(board.base, board.bytes, m->spec->unit_count, e);
    if (r == SHD_OK && owner->board.base == NULL) {
        owner->board = board;
        return SHD_OK;
    }
    if (r == SHD_OK)
        r = segment_place(owner->board.base, board.fd, 0, bytes, /* writable= */ false, e);
    if (r == SHD_OK) {
        close(owner->board.fd);
        owner->board.fd = board.fd;
        board.fd = -1;
    }
    segment_close(&board);
    return r;
}

static uint64_t expected_bytes(const struct shd_model *m, const struct map_owner *owner,
                               uint32_t slots, enum segment_kind kind)
{
    switch (kind) {
    case SEGMENT_PUBLISH:
        return shardmap_publish_bytes(owner->shards);
    case SEGMENT_INBOX:
        return slots > 0 ? shardmap_inbox_bytes(owner->shards, slots) : 0;
    case SEGMENT_BOARD:
        return layout_align(board_bytes(m->spec->unit_count), SHD_PAGE_BYTES);
    case SEGMENT_ACTIVITY:
        return slots > 0 ? ACTIVITY_BYTES : 0;
    case SEGMENT_STATE:
    case SEGMENT_LEDGER:
    case SEGMENT_SPILL:
        break;
    }
    return 0; /* nothing we would map */
}

/* What this worker does it shows to owner 0: at the end of its inbox, or, where that is a GPU's
 * memory, in a segment for it. */
static void show_activity(struct shd_model *m, const struct map_owner *owner, int fd,
                          uint64_t segment_bytes)
{
    if (owner == &m->map->owners[0])
        activity_attach(&m->activity, fd, segment_bytes - ACTIVITY_BYTES, m->reader->shown);
}

/* *fd: taken where it is set to -1. */
static int map_segment(struct shd_model *m, struct map_owner *owner,
                       const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    if (segment->kind == SEGMENT_BOARD)
        return map_board(m, owner, fd, segment->bytes, e);
    const bool inbox = segment->kind == SEGMENT_INBOX && segment->place == SEGMENT_HOST;
    if (inbox || segment->kind == SEGMENT_ACTIVITY)
        show_activity(m, owner, *fd, segment->bytes);
    if (segment->kind == SEGMENT_ACTIVITY)
        return SHD_OK;
    return owner->mover->take(m, owner, segment, fd, e);
}

/* Boards, and what workers show, are the host's in any case. */
static int check_place(const struct link *link, const struct map_layout *layout,
                       const struct wire_segment *segment, struct shd_err *e)
{
    const bool gpu = layout->on_gpu && segment->kind != SEGMENT_BOARD &&
                     segment->kind != SEGMENT_ACTIVITY;
    if (segment->place == (gpu ? SEGMENT_CUDA : SEGMENT_HOST))
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e,
                    "offers a %s segment in %s memory, and says that it is %s",
                    segment_kind_name(segment->kind), gpu ? "host" : "a GPU's",
                    layout->on_gpu ? "on a GPU" : "on the host");
}

/* A GPU's is made of larger pages. */
static int check_bytes(const struct shd_model *m, const struct link *link,
                       const struct map_layout *layout, const struct wire_segment *segment,
                       struct shd_err *e)
{
    const struct map_owner *owner = &m->map->owners[link->index];
    const uint64_t bytes = expected_bytes(m, owner, layout->slots, segment->kind);
    const bool larger = segment->place == SEGMENT_CUDA && bytes > 0 && segment->bytes > bytes;
    if (segment->bytes == bytes || larger)
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e,
                    "offers a %s segment of %" PRIu64 " bytes, the spec "
                    "makes it %" PRIu64,
                    segment_kind_name(segment->kind), segment->bytes, bytes);
}

static int take_segment(struct shd_model *m, struct link *link, const struct map_layout *layout,
                        const struct wire_segment *segment, unsigned wanted, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    int fd;
    int checked = check_place(link, layout, segment, e);
    if (checked == SHD_OK)
        checked = check_bytes(m, link, layout, segment, e);
    if (checked != SHD_OK)
        return checked;
    int r = link_claim(link, segment, &fd, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { 0 };
    const enum segment_kind with = segment->kind == SEGMENT_ACTIVITY ? SEGMENT_INBOX
                                                                     : segment->kind;
    if ((wanted & 1u << with) != 0) /* else mapped earlier: only let go of the ticket */
        r = map_segment(m, owner, segment, &fd, &why);
    if (fd >= 0)
        close(fd); /* mappings keep the memory */
    if (r != SHD_OK)
        link_err(link, r, e, "has a %s segment that cannot be mapped here: %s",
                 segment_kind_name(segment->kind), why.text);
    return r;
}

int segments_take(struct shd_model *m, struct link *link, const struct map_layout *layout,
                  unsigned wanted, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    if (layout->epoch != link->epoch)
        return link_err(link, SHD_EGONE, e, "has been succeeded meanwhile");
    if (layout->slots > 0 && layout->slot_bytes != owner->shards->slot_bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "has slots of %" PRIu64 " bytes, the spec makes "
                        "them %" PRIu64,
                        layout->slot_bytes, owner->shards->slot_bytes);
    unsigned seen = 0;
    for (uint32_t i = 0; i < layout->segment_count; i++) {
        const struct wire_segment *segment = &layout->segments[i];
        if (seen & 1u << segment->kind)
            return link_err(link, SHD_EPROTO, e, "offers two %s segments",
                            segment_kind_name(segment->kind));
        seen |= 1u << segment->kind;
        const int r = take_segment(m, link, layout, segment, wanted, e);
        if (r != SHD_OK)
            return r;
    }
    if ((seen & wanted) != wanted)
        return link_err(link, SHD_EPROTO, e, "offers segments %#x, needed are %#x", seen, wanted);
    owner->mapped = owner->mapped || (wanted & 1u << SEGMENT_BOARD) != 0;
    owner->has_inbox = owner->has_inbox || (wanted & 1u << SEGMENT_INBOX) != 0;
    return SHD_OK;
}
