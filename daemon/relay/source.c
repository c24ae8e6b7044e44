/* See source.h. */
#include "daemon/relay/source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/relay/attach.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/share/spec_segment.h"
#include "proto/spec/spec_json.h"

#define ANSWER_NS (60 * NS_PER_S)

struct source {
    struct attach daemon;
    struct segment publish, board_segment;
    struct shardmap *map; /* owned */
    uint64_t instance;
};

static int spec_of(struct source *source, const struct wire_layout *layout, struct spec **ret_spec,
                   struct shd_err *e)
{
    if (layout->spec_bytes == 0)
        return spec_parse((const char *)layout->spec.data, layout->spec.bytes, ret_spec, e);
    const struct wire_segment *at = NULL;
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (layout->segments[i].kind == SEGMENT_SPEC)
            at = &layout->segments[i];
    int fd = -1;
    int r = at == NULL ? err_set(e, SHD_EPROTO, "no spec in the layout")
                       : attach_claim(&source->daemon, at, &fd, e);
    if (r != SHD_OK)
        return r;
    char *json = sys_malloc(layout->spec_bytes);
    r = json == NULL ? err_set(e, SHD_ENOMEM, "no memory for a spec")
                     : spec_segment_check(fd, layout->spec_bytes, e);
    if (r == SHD_OK)
        r = spec_segment_read(fd, layout->spec_bytes, json, e);
    if (r == SHD_OK)
        r = spec_parse(json, layout->spec_bytes, ret_spec, e);
    free(json);
    close(fd);
    return r;
}

static int map_segment(struct source *source, const struct wire_layout *layout,
                       enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                       struct shd_err *e)
{
    for (uint32_t i = 0; i < layout->segment_count; i++) {
        const struct wire_segment *s = &layout->segments[i];
        int fd;
        if (s->kind != kind)
            continue;
        if (s->bytes < bytes)
            return err_set(e, SHD_ESEGMENT, "its %s segment has %" PRIu64 " bytes, needs %" PRIu64,
                           segment_kind_name(kind), s->bytes, bytes);
        int r = attach_claim(&source->daemon, s, &fd, e);
        if (r != SHD_OK)
            return r;
        r = segment_map(fd, kind, s->bytes, ret_segment, e);
        if (r != SHD_OK)
            close(fd);
        return r;
    }
    return err_set(e, SHD_EPROTO, "no %s segment in the layout", segment_kind_name(kind));
}

static int take_layout(struct source *source, const struct wire_layout *layout, struct shd_err *e)
{
    struct spec *spec = NULL;
    int r = spec_of(source, layout, &spec, e);
    if (r == SHD_OK)
        r = shardmap_new(spec, layout->owner, layout->owners, &source->map, e);
    spec_free(spec);
    if (r == SHD_OK)
        r = map_segment(source, layout, SEGMENT_PUBLISH, shardmap_publish_bytes(source->map),
                        &source->publish, e);
    if (r == SHD_OK)
        r = map_segment(source, layout, SEGMENT_BOARD, board_bytes(source->map->units),
                        &source->board_segment, e);
    if (r != SHD_OK)
        return r;
    source->instance = layout->instance;
    return board_check(source->board_segment.base, source->board_segment.bytes, source->map->units,
                       e);
}

static int open_model(struct source *source, const struct source_key *key, struct wire_arena *arena,
                      struct shd_err *e)
{
    struct wire_reply reply;
    struct wire_request request = { .seq = 1, .type = WIRE_HELLO };
    request.hello = (struct wire_hello){
        .protocol = SHD_PROTOCOL, .role = WIRE_READER, .name = "relay", .level = WIRE_LEVEL
    };
    memcpy(request.hello.token, source->daemon.welcome.token, WIRE_TOKEN_BYTES);
    int r = attach_ask(&source->daemon, &request, ANSWER_NS, arena, &reply, e);
    if (r == SHD_OK && reply.type != WIRE_WELCOME)
        r = err_set(e, SHD_EPROTO, "Hello was answered by a reply of type %d", (int)reply.type);
    if (r != SHD_OK)
        return r;
    request = (struct wire_request){ .seq = 2,
                                     .session = reply.welcome.session,
                                     .type = WIRE_OPEN_MODEL };
    request.open_model = (struct wire_open_model){
        .name = key->model, .owner = key->owner, .owners = key->owners, .spec_apart = true
    };
    arena->used = 0;
    r = attach_ask(&source->daemon, &request, ANSWER_NS, arena, &reply, e);
    if (r == SHD_OK && reply.type != WIRE_LAYOUT)
        r = err_set(e, SHD_EPROTO, "OpenModel was answered by a reply of type %d", (int)reply.type);
    return r == SHD_OK ? take_layout(source, &reply.layout, e) : r;
}

int source_open(const struct source_key *key, struct source **ret_source, struct shd_err *e)
{
    struct wire_arena arena = { .base = sys_malloc(WIRE_ARENA_BYTES), .bytes = WIRE_ARENA_BYTES };
    struct source *source = sys_calloc(1, sizeof *source);
    int r = SHD_OK;
    if (source == NULL || arena.base == NULL) {
        free(source);
        free(arena.base);
        return err_set(e, SHD_ENOMEM, "no memory for replies");
    }
    source->daemon = ATTACH_CLOSED;
    source->publish = source->board_segment = SEGMENT_CLOSED;
    r = attach_open(key->dir, key->device, &source->daemon, e);
    if (r == SHD_OK)
        r = open_model(source, key, &arena, e);
    free(arena.base);
    if (r == SHD_OK)
        *ret_source = source;
    else
        source_close(source);
    return r;
}

void source_close(struct source *source)
{
    if (source == NULL)
        return;
    attach_close(&source->daemon);
    segment_close(&source->publish);
    segment_close(&source->board_segment);
    shardmap_free(source->map);
    free(source);
}

const struct board *source_board(const struct source *source, uint32_t *ret_units)
{
    *ret_units = source->map->units;
    return source->board_segment.base;
}

uint64_t source_instance(const struct source *source)
{
    return source->instance;
}

uint64_t source_publish_bytes(const struct source *source)
{
    return source->publish.bytes;
}

const void *source_slice(const struct source *source, uint32_t unit, uint64_t *ret_at,
                         uint64_t *ret_bytes)
{
    *ret_at = shardmap_publish_offset_bytes(source->map, unit);
    *ret_bytes = shardmap_publish_sent_bytes(source->map, unit);
    return (const uint8_t *)source->publish.base + *ret_at;
}

int source_fd(const struct source *source)
{
    return source->daemon.side_fd;
}
