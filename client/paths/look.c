/* Looking at daemons: blob, history, digest leaves, status. See look.h. */
#include "client/paths/look.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/map.h"
#include "client/paths/path.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/board.h"

/* -- Blob -------------------------------------------------------------------------------------- */

struct blob_sink {
    void *buf; /* borrowed, [capacity] */
    size_t capacity;
    size_t bytes;
    const struct shd_model *m;
};

static void make_blob(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct blob_sink *sink = round->ctx;
    ret_request->get_blob.model = sink->m->map->owners[link->index].layout.handle;
}

static int take_blob(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    (void)link;
    struct blob_sink *sink = round->ctx;
    const struct wire_bytes *blob = &reply->blob.blob;
    if (blob->bytes > sink->capacity)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, the buffer %zu", blob->bytes,
                       sink->capacity);
    if (blob->bytes > 0)
        memcpy(sink->buf, blob->data, blob->bytes);
    sink->bytes = blob->bytes;
    return SHD_OK;
}

int look_blob(struct shd_model *m, uint32_t owner, void *buf, size_t capacity, size_t *ret_bytes,
              struct shd_err *e)
{
    struct blob_sink sink = { buf, capacity, 0, m };
    struct round round = { .what = "GetBlob",
                           .asks = WIRE_GET_BLOB,
                           .type = WIRE_BLOB,
                           .make = make_blob,
                           .take = take_blob,
                           .ctx = &sink };
    const int r = round_one(&round, &m->session->hub->links[owner], 0, e);
    if (r == SHD_OK)
        *ret_bytes = sink.bytes;
    return r;
}

/* -- History ----------------------------------------------------------------------------------- */

struct row_sink {
    const struct shd_model *m;
    struct path_history *history;
    uint64_t next;
};

static void make_history(const struct round *round, const struct link *link,
                         struct wire_request *ret_request)
{
    const struct row_sink *sink = round->ctx;
    ret_request->history = (struct wire_history){
        .model = sink->m->map->owners[link->index].layout.handle,
        .from = sink->history->from,
        .count = sink->history->room,
    };
}

static int take_rows(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    struct row_sink *sink = round->ctx;
    struct path_history *h = sink->history;
    const struct wire_bytes *rows = &reply->rows.rows, *audits = &reply->rows.audits;
    if (rows->bytes > h->room * sizeof *h->rows)
        return link_err(link, SHD_EPROTO, e,
                        "sent %zu rows of its history, asked for were %" PRIu32,
                        rows->bytes / sizeof *h->rows, h->room);
    if (rows->bytes > 0)
        memcpy(h->rows, rows->data, rows->bytes);
    if (audits->bytes > 0) /* no more than there are slots: wire_tables.c */
        memcpy(h->audits, audits->data, audits->bytes);
    h->count = (uint32_t)(rows->bytes / sizeof *h->rows);
    h->audit_count = (uint32_t)(audits->bytes / sizeof *h->audits);
    sink->next = reply->rows.next;
    return SHD_OK;
}

int look_history(struct shd_model *m, struct path_history *history, struct shd_err *e)
{
    struct row_sink sink = { .m = m, .history = history };
    struct round round = { .what = "History",
                           .asks = WIRE_HISTORY,
                           .type = WIRE_ROWS,
                           .make = make_history,
                           .take = take_rows,
                           .ctx = &sink };
    const int r = round_one(&round, &m->session->hub->links[0], 0, e);
    if (r == SHD_OK)
        history->from = sink.next;
    return r;
}

/* -- Digest ------------------------------------------------------------------------------------ */

struct leaf_sink {
    const struct digest_part *part;
    const struct spec_tensor *tensor;
    const struct map_model *map;
    uint8_t (*leaves)[32]; /* [part->leaves] */
    struct digest_stamp *stamp;
};

/* An owner's leaves of a tensor, as indices among all of the tensor's. */
struct leaf_range {
    uint64_t first, count;
};

static struct leaf_range owner_leaves(const struct map_model *map, uint32_t owner,
                                      const struct spec_tensor *t)
{
    uint64_t first;
    const uint64_t elems = layout_intersect(map->owners[owner].shards->slice[t->unit],
                                            t->offset_elems, t->elems, &first);
    if (elems == 0)
        return (struct leaf_range){ 0, 0 };
    const uint64_t first_block = first / SHD_BLOCK_ELEMS;
    const uint64_t last_block = (first + elems - 1) / SHD_BLOCK_ELEMS;
    return (struct leaf_range){ first_block - t->offset_elems / SHD_BLOCK_ELEMS,
                                last_block - first_block + 1 };
}

/* A reply may hold more than was wanted: it goes on to the end of the owner's leaves. */
static int take_leaves(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    const struct leaf_sink *sink = round->ctx;
    const uint64_t first_leaf = round->arg;
    const struct wire_leaves *got = &reply->leaves;
    const struct leaf_range own = owner_leaves(sink->map, link->index, sink->tensor);
    const uint64_t part_end = sink->part->first_leaf + sink->part->leaves;
    const uint64_t own_end = own.first + own.count;
    const uint64_t left = own_end - first_leaf;
    const uint64_t expected = left < WIRE_LEAVES_MAX ? left : WIRE_LEAVES_MAX;
    if (got->total != own.count || got->leaves.bytes != expected * DIGEST_LEAF_BYTES)
        return link_err(link, SHD_EPROTO, e,
                        "sent %zu bytes of %" PRIu64 " leaves of '%s', "
                        "expected %" PRIu64 " of %" PRIu64,
                        got->leaves.bytes, got->total, sink->tensor->name,
                        expected * DIGEST_LEAF_BYTES, own.count);
    const uint64_t wanted = part_end - first_leaf;
    memcpy(sink->leaves[first_leaf - sink->part->first_leaf], got->leaves.data,
           (wanted < expected ? wanted : expected) * DIGEST_LEAF_BYTES);
    return digest_stamp_take(sink->stamp, got->step, got->updates, e);
}

static void make_digest(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct leaf_sink *sink = round->ctx;
    const struct leaf_range own = owner_leaves(sink->map, link->index, sink->tensor);
    ret_request->digest = (struct wire_digest){
        .model = sink->map->owners[link->index].layout.handle,
        .tensor = sink->part->tensor,
        .array = sink->part->array,
        .first_leaf = round->arg - own.first,
    };
}

/* Ask an owner for its leaves inside the part, in as many requests as they need. */
static int ask_leaves(struct round *round, struct link *link, struct shd_err *e)
{
    const struct leaf_sink *sink = round->ctx;
    const struct digest_part *part = sink->part;
    const struct leaf_range own = owner_leaves(sink->map, link->index, sink->tensor);
    uint64_t leaf = own.first > part->first_leaf ? own.first : part->first_leaf;
    uint64_t end = own.first + own.count;
    if (end > part->first_leaf + part->leaves)
        end = part->first_leaf + part->leaves;
    for (; leaf < end; leaf += WIRE_LEAVES_MAX) {
        const int r = round_ask(round, link, leaf, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

/* -- Digest of several tensors: one request to each owner that has any of them -------------------
 */

uint32_t look_range_units(const struct shd_model *m)
{
    const struct hub *hub = m->session->hub;
    if (hub_has_older(hub, WIRE_LEVEL_RANGES))
        return 0;
    return hub_has_older(hub, WIRE_LEVEL_STATES) ? 1 : WIRE_RANGE_UNITS_MAX;
}

struct range_sink {
    const struct digest_part *part;
    const struct shd_model *m;
    uint8_t (*leaves)[32]; /* [part->leaves] */
    struct digest_stamp *stamp;
};

static uint32_t arrays_of(const struct shd_model *m, const struct spec_tensor *t)
{
    return spec_unit_arrays(m->spec, t->unit);
}

static uint64_t owner_range(const struct range_sink *sink, uint32_t owner)
{
    uint64_t leaves = 0;
    for (uint32_t i = 0; i < sink->part->tensors; i++) {
        const struct spec_tensor *t = &sink->m->spec->tensors[sink->part->tensor + i];
        leaves += arrays_of(sink->m, t) * owner_leaves(sink->m->map, owner, t).count;
    }
    return leaves;
}

static void make_range(const struct round *round, const struct link *link,
                       struct wire_request *ret_request)
{
    const struct range_sink *sink = round->ctx;
    ret_request->digest = (struct wire_digest){
        .model = sink->m->map->owners[link->index].layout.handle,
        .tensor = sink->part->tensor,
        .tensors = sink->part->tensors,
    };
}

static int take_range(const struct round *round, const struct link *link,
                      const struct wire_reply *reply, struct shd_err *e)
{
    const struct range_sink *sink = round->ctx;
    const struct digest_part *part = sink->part;
    const struct wire_leaves *got = &reply->leaves;
    const uint64_t expected = owner_range(sink, link->index);
    if (got->total != expected || got->leaves.bytes != expected * DIGEST_LEAF_BYTES)
        return link_err(link, SHD_EPROTO, e,
                        "sent %zu bytes of %" PRIu64 " leaves of %" PRIu32
                        " tensors, expected %" PRIu64 " leaves",
                        got->leaves.bytes, got->total, part->tensors, expected);
    const uint8_t *from = got->leaves.data;
    uint8_t(*to)[32] = sink->leaves;
    for (uint32_t i = 0; i < part->tensors; i++) {
        const struct spec_tensor *t = &sink->m->spec->tensors[part->tensor + i];
        const struct leaf_range own = owner_leaves(sink->m->map, link->index, t);
        for (uint32_t a = 0; a < arrays_of(sink->m, t); a++) {
            memcpy(to + own.first, from, own.count * DIGEST_LEAF_BYTES);
            from += own.count * DIGEST_LEAF_BYTES;
            to += ckpt_leaf_count(t);
        }
    }
    return digest_stamp_take(sink->stamp, got->step, got->updates, e);
}

static int look_range(struct shd_model *m, const struct digest_part *part, uint8_t (*leaves)[32],
                      struct digest_stamp *stamp, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct range_sink sink = { part, m, leaves, stamp };
    struct round round = { .what = "Digest",
                           .asks = WIRE_DIGEST,
                           .type = WIRE_LEAVES,
                           .make = make_range,
                           .take = take_range,
                           .ctx = &sink };
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        if (owner_range(&sink, i) > 0)
            r = round_ask(&round, &hub->links[i], 0, e);
    return round_finish(&round, hub, r, e);
}

int look_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                struct digest_stamp *stamp, struct shd_err *e)
{
    struct shd_model *m = ctx;
    struct hub *hub = m->session->hub;
    if (part->tensors > 0)
        return look_range(m, part, ret_leaves, stamp, e);
    struct leaf_sink sink = { part, &m->spec->tensors[part->tensor], m->map, ret_leaves, stamp };
    struct round round = { .what = "Digest",
                           .asks = WIRE_DIGEST,
                           .type = WIRE_LEAVES,
                           .make = make_digest,
                           .take = take_leaves,
                           .ctx = &sink };
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        r = ask_leaves(&round, &hub->links[i], e);
    return round_finish(&round, hub, r, e);
}

/* -- Status ------------------------------------------------------------------------------------ */

static int take_status(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    (void)link;
    char **json = round->ctx;
    const struct wire_bytes *text = &reply->status_text.json;
    *json = sys_malloc(text->bytes + 1);
    if (*json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a status of %zu bytes", text->bytes);
    memcpy(*json, text->data, text->bytes);
    (*json)[text->bytes] = '\0';
    return SHD_OK;
}

int look_status(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e)
{
    char *json = NULL;
    struct round round = { .what = "Status",
                           .asks = WIRE_STATUS,
                           .type = WIRE_STATUS_TEXT,
                           .take = take_status,
                           .ctx = &json };
    const int r = round_one(&round, &s->hub->links[owner], 0, e);
    if (r == SHD_OK)
        *ret_json = json;
    else
        free(json);
    return r;
}

uint64_t look_step(const struct shd_model *m, uint32_t owner)
{
    return board_collecting(m->map->owners[owner].board.base);
}

uint64_t look_furthest(const struct shd_model *m)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const uint64_t step = look_step(m, i);
        most = step > most ? step : most;
    }
    return most;
}
