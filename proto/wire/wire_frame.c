/* See wire_frame.h. */
#include "proto/wire/wire_frame.h"

#include "proto/base/check.h"

#define ARENA_ALIGN 16u

/* The memory that one decoding takes from the arena. */
struct decoder {
    struct wire_arena *arena; /* borrowed */
    bool exhausted;
};

static void *arena_alloc(void *ctx, size_t bytes)
{
    struct decoder *d = ctx;
    struct wire_arena *a = d->arena;
    const size_t start = (a->used + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    if (start > a->bytes || bytes > a->bytes - start) {
        d->exhausted = true;
        return NULL;
    }
    a->used = start + bytes;
    return a->base + start;
}

static void arena_free(void *ctx, void *p)
{
    (void)ctx;
    (void)p; /* the owner resets the whole */
}

int frame_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame, size_t bytes,
                 struct wire_arena *arena, ProtobufCMessage **ret_m, struct shd_err *e)
{
    CHECK((uintptr_t)arena->base % ARENA_ALIGN == 0 && arena->used <= arena->bytes);
    if (bytes > WIRE_FRAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "frame has %zu bytes, the limit is %zu", bytes,
                       WIRE_FRAME_BYTES_MAX);
    const size_t used = arena->used;
    struct decoder d = { .arena = arena };
    ProtobufCAllocator allocator = { .alloc = arena_alloc,
                                     .free = arena_free,
                                     .allocator_data = &d };
    *ret_m = protobuf_c_message_unpack(descriptor, &allocator, bytes, frame);
    if (*ret_m != NULL)
        return SHD_OK;
    arena->used = used;
    if (d.exhausted)
        return err_set(e, SHD_ERANGE, "%s of %zu bytes does not fit the arena's %zu",
                       descriptor->short_name, bytes, arena->bytes - used);
    return err_set(e, SHD_EPROTO, "%zu bytes are not a %s", bytes, descriptor->short_name);
}

int frame_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
                 struct shd_err *e)
{
    const size_t bytes = protobuf_c_message_get_packed_size(m);
    const size_t max = capacity < WIRE_FRAME_BYTES_MAX ? capacity : WIRE_FRAME_BYTES_MAX;
    if (bytes > max)
        return err_set(e, SHD_ERANGE, "%s packs to %zu bytes, the limit is %zu",
                       m->descriptor->short_name, bytes, max);
    const size_t written = protobuf_c_message_pack(m, buf);
    CHECK(written == bytes);
    *ret_bytes = bytes;
    return SHD_OK;
}
