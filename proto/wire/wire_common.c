/* See wire_common.h. */
#include "proto/wire/wire_common.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "proto/base/check.h"

#define ARENA_ALIGN 16u

int wire_limits(const struct wire_limit *limits, size_t count, struct shd_err *e)
{
    for (size_t i = 0; i < count; i++) {
        const struct wire_limit *l = &limits[i];
        if (l->value < l->min || l->value > l->max)
            return err_set(e, SHD_ERANGE, "%s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64,
                           l->field, l->value, l->min, l->max);
    }
    return SHD_OK;
}

int wire_name_check(const char *field, const char *name, struct shd_err *e)
{
    const size_t bytes = strlen(name);
    if (bytes >= WIRE_NAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%s has %zu bytes, must be 0 to %u", field, bytes,
                       WIRE_NAME_BYTES_MAX - 1);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c > 0x7e)
            return err_set(e, SHD_EINVAL, "%s has byte %#x at %zu, must be printable ASCII", field,
                           c, i);
    }
    return SHD_OK;
}

int wire_path_check(const char *field, const char *path, struct shd_err *e)
{
    const size_t bytes = strlen(path);
    if (bytes >= WIRE_PATH_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%s has %zu bytes, must be below %u", field, bytes,
                       WIRE_PATH_BYTES_MAX);
    if (path[0] != '/')
        return err_set(e, SHD_EINVAL, "%s is '%.80s', not an absolute path", field, path);
    for (const char *c = path; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return err_set(e, SHD_EINVAL, "%s has the control character %#x", field,
                           (unsigned)(unsigned char)*c);
    return SHD_OK;
}

int wire_decision_check(const struct decision *d, struct shd_err *e)
{
    if (!isfinite(d->scale) || d->scale < 0)
        return err_set(e, SHD_ERANGE, "decision.scale is %g, must be finite and not negative",
                       (double)d->scale);
    if (!isfinite(d->lr) || d->lr < 0)
        return err_set(e, SHD_ERANGE, "decision.lr is %g, must be finite and not negative", d->lr);
    if (!isfinite(d->loss_scale) || d->loss_scale < 0)
        return err_set(e, SHD_ERANGE, "decision.loss_scale is %g, must be finite and not negative",
                       d->loss_scale);
    return SHD_OK;
}

void wire_decision_pack(const struct decision *d, Shd__Decision *ret_m)
{
    shd__decision__init(ret_m);
    ret_m->skip = d->skip;
    ret_m->scale = d->scale;
    ret_m->lr = d->lr;
    ret_m->loss_scale = d->loss_scale;
    ret_m->good_steps = d->good_steps;
}

int wire_decision_unpack(const Shd__Decision *m, struct decision *ret_decision, struct shd_err *e)
{
    if (m == NULL)
        return err_set(e, SHD_EPROTO, "decision is missing");
    *ret_decision = (struct decision){ .skip = m->skip != 0,
                                       .scale = m->scale,
                                       .lr = m->lr,
                                       .loss_scale = m->loss_scale,
                                       .good_steps = m->good_steps };
    return wire_unknown_check("decision", &m->base, e);
}

int wire_metrics_unpack(const char *field, const double *metrics, size_t count,
                        double ret_metrics[WIRE_METRICS_MAX], uint32_t *ret_count,
                        struct shd_err *e)
{
    if (count > WIRE_METRICS_MAX)
        return err_set(e, SHD_ERANGE, "%s has %zu numbers, must be 0 to %u", field, count,
                       WIRE_METRICS_MAX);
    for (size_t i = 0; i < count; i++)
        ret_metrics[i] = metrics[i];
    *ret_count = (uint32_t)count;
    return SHD_OK;
}

int wire_unknown_check(const char *field, const ProtobufCMessage *m, struct shd_err *e)
{
    if (m->n_unknown_fields == 0)
        return SHD_OK;
    return err_set(e, SHD_EPROTO, "%s has field number %" PRIu32 ", unknown to this build", field,
                   m->unknown_fields[0].tag);
}

/* What one decoding takes from the arena. */
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

int wire_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame, size_t bytes,
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
    ProtobufCMessage *m = protobuf_c_message_unpack(descriptor, &allocator, bytes, frame);
    if (m != NULL) {
        *ret_m = m;
        return SHD_OK;
    }
    arena->used = used;
    if (d.exhausted)
        return err_set(e, SHD_ERANGE, "%s of %zu bytes does not fit the arena's %zu",
                       descriptor->short_name, bytes, arena->bytes - used);
    return err_set(e, SHD_EPROTO, "%zu bytes are not a %s", bytes, descriptor->short_name);
}

int wire_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
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
