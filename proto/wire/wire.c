/* See wire.h. Between frames, protobuf-c's generated structs and the plain structs of wire.h:
 *
 *     unpack   frame -> frame_decode() -> message_check() -> message_take() -> plain struct
 *     pack     plain struct -> message_put() -> message_check() -> level_fit() -> frame_encode()
 *              -> frame
 *
 * One check serves both directions, so that a sender learns of a bad value by its name before its
 * peer does. Nothing is taken from a message before all of it was checked. Messages inside messages
 * hold no further ones: what calls itself does so once.
 */
#include "proto/wire/wire.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/wire/wire_level.h"
#include "proto/wire/wire_tables.h"

#define ARENA_ALIGN 16u

/* A field of one message, in both its forms. */
struct field {
    const struct wire_field *row;
    const ProtobufCFieldDescriptor *d;
    const char *message; /* for errors */
    void *at;            /* in the generated struct */
    size_t *count;       /* there, when repeated */
};

static struct field field_of(const struct wire_message *t, uint32_t i, const ProtobufCMessage *m)
{
    const ProtobufCFieldDescriptor *d = &t->descriptor->fields[i];
    uint8_t *base = (uint8_t *)m; /* protobuf-c has no const */
    return (struct field){ .row = &t->fields[i],
                           .d = d,
                           .message = t->name,
                           .at = base + d->offset,
                           .count = (void *)(base + d->quantifier_offset) };
}

/* The messages inside a message at one field: none, one or several. */
static size_t inner_of(const struct field *f, ProtobufCMessage ***ret_list)
{
    const bool repeated = f->d->label == PROTOBUF_C_LABEL_REPEATED;
    *ret_list = repeated ? *(ProtobufCMessage ***)f->at : (ProtobufCMessage **)f->at;
    return repeated ? *f->count : **ret_list != NULL;
}

/* -- Limits ---------------------------------------------------------------------------------- */

static int range_check(const struct field *f, const char *what, uint64_t value, uint64_t min,
                       uint64_t max, struct shd_err *e)
{
    if (value >= min && value <= max)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%s.%s%s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64,
                   f->message, f->row->name, what, value, min, max);
}

/* A field this build does not know: versions match exactly, so that is a damaged frame or a peer
 * that lies about its version. */
static int unknown_check(const char *name, const ProtobufCMessage *m, struct shd_err *e)
{
    if (m->n_unknown_fields == 0)
        return SHD_OK;
    return err_set(e, SHD_EPROTO, "%s has field number %" PRIu32 ", unknown to this build", name,
                   m->unknown_fields[0].tag);
}

/* what: "" of a number, "'s size", "' count". */
static int amount_check(const struct field *f, const char *what, uint64_t value, struct shd_err *e)
{
    const struct wire_field *row = f->row;
    const int r = range_check(f, what, value, row->min, row->max, e);
    if (r == SHD_OK && row->multiple > 0 && value % row->multiple != 0)
        return err_set(e, SHD_ERANGE, "%s.%s%s is %" PRIu64 ", must be a multiple of %" PRIu32,
                       f->message, row->name, what, value, row->multiple);
    return r;
}

/* of: "bytes", "limbs", "numbers". */
static int count_check(const struct field *f, size_t count, const char *of, struct shd_err *e)
{
    const uint64_t min = f->row->min, max = f->row->max;
    if (count >= min && count <= max)
        return SHD_OK;
    if (min == max)
        return err_set(e, SHD_ERANGE, "%s.%s has %zu %s, must be %" PRIu64, f->message,
                       f->row->name, count, of, max);
    return err_set(e, SHD_ERANGE, "%s.%s has %zu %s, must be %" PRIu64 " to %" PRIu64, f->message,
                   f->row->name, count, of, min, max);
}

static int real_check(const struct field *f, double value, struct shd_err *e)
{
    if (isfinite(value) && value >= 0)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%s.%s is %g, must be finite and not negative", f->message,
                   f->row->name, value);
}

static int text_check(const struct field *f, const char *given, struct shd_err *e)
{
    const bool path = f->row->form == WIRE_PATH;
    const char *text = given != NULL ? given : "";
    const size_t bytes = strlen(text);
    const int r = count_check(f, bytes, "bytes", e);
    if (r != SHD_OK)
        return r;
    if (path && text[0] != '/')
        return err_set(e, SHD_EINVAL, "%s.%s is '%.80s', not an absolute path", f->message,
                       f->row->name, text);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7f || (c > 0x7f && !path))
            return err_set(e, SHD_EINVAL, "%s.%s has byte %#x at %zu, must be printable%s",
                           f->message, f->row->name, c, i, path ? "" : " ASCII");
    }
    return SHD_OK;
}

/* The value of the field that is `by` rows further on in the message's descriptor. */
static const void *neighbour(const struct field *f, int by)
{
    return (const uint8_t *)f->at - f->d->offset + f->d[by].offset;
}

static int number_check(const struct field *f, uint64_t value, struct shd_err *e)
{
    const struct wire_field *row = f->row;
    if (row->form == WIRE_INDEX)
        return range_check(f, "", value, 0, (uint64_t) * (const uint32_t *)neighbour(f, 1) - 1, e);
    if (row->form == WIRE_DTYPE && value == 0 && *(const protobuf_c_boolean *)neighbour(f, 1))
        return SHD_OK;
    if (row->form != WIRE_KIND)
        return amount_check(f, "", value, e);
    if (segment_kind_shared((uint32_t)value))
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%s.%s is %" PRIu64 ", must be " SEGMENT_KINDS_SHARED, f->message,
                   row->name, value);
}

static int bytes_check(const struct field *f, struct shd_err *e)
{
    const size_t len = ((const ProtobufCBinaryData *)f->at)->len;
    if (f->row->form == WIRE_EXACT)
        return count_check(f, len, "bytes", e);
    if (f->row->form == WIRE_OPTIONAL && !*(const protobuf_c_boolean *)neighbour(f, -1))
        return range_check(f, "'s size", len, 0, 0, e);
    return amount_check(f, "'s size", len, e);
}

/* Doubles, or a sum. Block sums of squares of fp32 values of the largest model stay below 2^304,
 * and any sum of SHD_OWNERS_MAX replies with an empty top limb cannot overflow what fixsum_carry()
 * checks. */
static int repeated_check(const struct field *f, struct shd_err *e)
{
    const bool sum = f->d->type == PROTOBUF_C_TYPE_FIXED32;
    const int r = count_check(f, *f->count, sum ? "limbs" : "numbers", e);
    if (r != SHD_OK || !sum)
        return r;
    return range_check(f, "'s top limb", (*(uint32_t *const *)f->at)[FIXSUM_LIMBS - 1], 0, 0, e);
}

static int field_check(const struct field *f, struct shd_err *e)
{
    if (f->d->label == PROTOBUF_C_LABEL_REPEATED)
        return repeated_check(f, e);
    switch (f->d->type) {
    case PROTOBUF_C_TYPE_UINT32:
        return number_check(f, *(const uint32_t *)f->at, e);
    case PROTOBUF_C_TYPE_UINT64:
        return number_check(f, *(const uint64_t *)f->at, e);
    case PROTOBUF_C_TYPE_FLOAT:
        return real_check(f, *(const float *)f->at, e);
    case PROTOBUF_C_TYPE_DOUBLE:
        return real_check(f, *(const double *)f->at, e);
    case PROTOBUF_C_TYPE_STRING:
        return text_check(f, *(char *const *)f->at, e);
    case PROTOBUF_C_TYPE_BYTES:
        return bytes_check(f, e);
    default: /* a bool is WIRE_ANY */
        return SHD_OK;
    }
}

static int message_check(const struct wire_message *t, const ProtobufCMessage *m,
                         struct shd_err *e);

static int inner_check(const struct field *f, struct shd_err *e)
{
    const struct wire_message *of = f->row->of;
    ProtobufCMessage **list;
    const size_t count = inner_of(f, &list);
    if (count == 0 && f->row->more_at == 0)
        return err_set(e, SHD_EPROTO, "%s is missing", of->name);
    int r = amount_check(f, "' count", count, e);
    for (size_t k = 0; r == SHD_OK && k < count; k++) {
        r = unknown_check(of->name, list[k], e);
        if (r == SHD_OK)
            r = message_check(of, list[k], e);
    }
    return r;
}

static int limits_check(const struct wire_message *t, uint32_t i, const ProtobufCMessage *m,
                        struct shd_err *e)
{
    const struct field f = field_of(t, i, m);
    return f.row->of != NULL ? inner_check(&f, e) : field_check(&f, e);
}

/* Every field of m, a message of t, inside its limits. Errors: SHD_ERANGE, SHD_EINVAL, and
 * SHD_EPROTO for what is missing or unknown in a message inside m; they name the field. */
static int message_check(const struct wire_message *t, const ProtobufCMessage *m, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < t->field_count; i++) {
        const struct wire_field *row = &t->fields[i];
        const void *at = (const uint8_t *)m + t->descriptor->fields[i].offset;
        if (row->form == WIRE_ANY || (row->form == WIRE_UP_TO && *(const uint32_t *)at <= row->max))
            continue; /* most of a hot message: not worth a struct field */
        r = limits_check(t, i, m, e);
    }
    return r;
}

/* -- Generated and plain: with parts to the generated struct, without from it ------------------ */

static void bytes_copy(const struct field *f, void *plain, bool put)
{
    ProtobufCBinaryData *b = f->at;
    struct wire_bytes *w = plain;
    if (f->row->form == WIRE_EXACT && put)
        *b = (ProtobufCBinaryData){ .len = f->row->max, .data = plain };
    else if (f->row->form == WIRE_EXACT)
        memcpy(plain, b->data, b->len);
    else if (put)
        *b = (ProtobufCBinaryData){ .len = w->bytes, .data = (uint8_t *)w->data };
    else
        *w = (struct wire_bytes){ .bytes = b->len, .data = b->data };
}

/* A sum that is not carried has no limbs in a message: message_check() refuses it. */
static void sum_copy(const struct field *f, struct fixsum *sum, struct wire_parts *parts)
{
    if (parts == NULL) {
        for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
            sum->limb[i] = (*(uint32_t **)f->at)[i];
        return;
    }
    *f->count = fixsum_is_carried(sum) ? FIXSUM_LIMBS : 0;
    *(uint32_t **)f->at = parts->limbs;
    for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
        parts->limbs[i] = (uint32_t)sum->limb[i];
}

static void doubles_copy(const struct field *f, double *numbers, uint32_t *count, bool put)
{
    if (put) {
        *f->count = *count;
        *(double **)f->at = numbers;
        return;
    }
    *count = (uint32_t)*f->count;
    for (uint32_t i = 0; i < *count; i++)
        numbers[i] = (*(double **)f->at)[i];
}

static void bool_copy(void *plain, void *generated, bool put)
{
    bool *b = plain;
    protobuf_c_boolean *g = generated;
    if (put)
        *g = *b;
    else
        *b = *g != 0;
}

static void message_copy(const struct wire_message *t, ProtobufCMessage *m, uint8_t *base,
                         struct wire_parts *parts);

/* Point a field to the messages that are to be filled. message_check() refuses a count that exceeds
 * the list. */
static void inner_put(const struct field *f, const uint8_t *base, struct wire_parts *parts)
{
    const void *more = base + f->row->more_at;
    if (f->d->label == PROTOBUF_C_LABEL_REPEATED) {
        for (uint32_t k = 0; k < WIRE_SEGMENTS_MAX; k++)
            parts->segment_list[k] = &parts->segments[k].base;
        *f->count = *(const uint32_t *)more;
        *(ProtobufCMessage ***)f->at = parts->segment_list;
    } else if (f->row->more_at == 0 || *(const bool *)more) {
        *(ProtobufCMessage **)f->at = &parts->decision.base;
    }
}

static void inner_copy(const struct field *f, uint8_t *base, struct wire_parts *parts)
{
    const struct wire_message *of = f->row->of;
    void *more = base + f->row->more_at;
    ProtobufCMessage **list;
    if (parts != NULL)
        inner_put(f, base, parts);
    const size_t count = inner_of(f, &list);
    for (size_t k = 0; k < count && k < f->row->max; k++)
        message_copy(of, list[k], base + f->row->at + k * of->bytes, parts);
    if (parts == NULL && f->d->label == PROTOBUF_C_LABEL_REPEATED)
        *(uint32_t *)more = (uint32_t)count;
    else if (parts == NULL && f->row->more_at != 0)
        *(bool *)more = count > 0;
}

/* An array, a struct, a message. */
static void field_convert(const struct field *f, uint8_t *base, struct wire_parts *parts)
{
    void *plain = base + f->row->at;
    if (f->row->of != NULL)
        inner_copy(f, base, parts);
    else if (f->d->type == PROTOBUF_C_TYPE_BYTES)
        bytes_copy(f, plain, parts != NULL);
    else if (f->d->type == PROTOBUF_C_TYPE_FIXED32)
        sum_copy(f, plain, parts);
    else
        doubles_copy(f, plain, (void *)(base + f->row->more_at), parts != NULL);
}

/* Minus zero is zero: packed again nothing would be left of its sign, and decisions are compared by
 * their bits. */
static void real_take(ProtobufCType type, void *plain)
{
    const bool zero = type == PROTOBUF_C_TYPE_DOUBLE ? *(const double *)plain == 0
                                                     : *(const float *)plain == 0;
    if (zero)
        memset(plain, 0, type == PROTOBUF_C_TYPE_DOUBLE ? sizeof(double) : sizeof(float));
}

static bool is_real(ProtobufCType type)
{
    return type == PROTOBUF_C_TYPE_DOUBLE || type == PROTOBUF_C_TYPE_FLOAT;
}

static void message_copy(const struct wire_message *t, ProtobufCMessage *m, uint8_t *base,
                         struct wire_parts *parts)
{
    const ProtobufCFieldDescriptor *d = t->descriptor->fields;
    const uint32_t count = t->field_count;
    if (parts != NULL)
        t->descriptor->message_init(m);
    for (uint32_t i = 0; i < count; i++) {
        const struct wire_field *row = &t->fields[i];
        uint8_t *plain = base + row->at, *generated = (uint8_t *)m + d[i].offset;
        uint8_t *to = parts != NULL ? generated : plain, *from = parts != NULL ? plain : generated;
        if (row->width == 4) {
            memcpy(to, from, 4);
        } else if (row->width == 8) {
            memcpy(to, from, 8);
        } else if (row->width == 1) {
            bool_copy(plain, generated, parts != NULL);
        } else {
            const struct field f = field_of(t, i, m);
            field_convert(&f, base, parts);
            continue;
        }
        if (parts == NULL && is_real(d[i].type))
            real_take(d[i].type, plain);
    }
}

/* Fill a plain struct from a checked message; strings and bytes point into the message. */
static void message_take(const struct wire_message *t, const ProtobufCMessage *m, void *ret_plain)
{
    memset(ret_plain, 0, t->bytes);
    message_copy(t, (ProtobufCMessage *)m, ret_plain, NULL);
}

/* Fill parts->body from a plain struct; to be checked. */
static void message_put(const struct wire_message *t, const void *plain, struct wire_parts *parts)
{
    CHECK(parts != NULL && t->descriptor->sizeof_message <= sizeof parts->body);
    message_copy(t, &parts->body.base, (uint8_t *)plain, parts);
}

/* -- Frames: between them and the generated structs ------------------------------------------ */

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

/* Decode a frame into the arena. Errors: SHD_ERANGE too long or does not fit the arena, SHD_EPROTO
 * malformed; the arena is as before then. */
static int frame_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame,
                        size_t bytes, struct wire_arena *arena, ProtobufCMessage **ret_m,
                        struct shd_err *e)
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

/* SHD_ERANGE when m would exceed capacity or WIRE_FRAME_BYTES_MAX. */
static int frame_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
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

/* -- Names ---------------------------------------------------------------------------------- */

const char *wire_request_name(enum wire_request_type type)
{
    static const char *const names[] = {
#define REQUEST_NAME(NAME, name) [WIRE_##NAME] = #NAME,
        WIRE_REQUEST_MAP(REQUEST_NAME)
#undef REQUEST_NAME
    };
    CHECK((unsigned)type < WIRE_REQUEST_TYPES);
    return names[type];
}

/* -- Requests -------------------------------------------------------------------------------- */

/* Bodies are the last fields of a Request and of a Reply. A type is the place of its tag among
 * them, whatever numbers are left out. */
static const ProtobufCFieldDescriptor *bodies_of(const ProtobufCMessageDescriptor *d,
                                                 uint32_t types)
{
    CHECK(d->n_fields > types);
    return &d->fields[d->n_fields - types];
}

static uint32_t place_of(const ProtobufCFieldDescriptor *bodies, uint32_t types, uint32_t tag)
{
    const uint32_t guess = tag - bodies[0].id; /* right where none is left out before */
    uint32_t place = guess < types ? guess : types - 1;
    while (bodies[place].id > tag)
        place--;
    CHECK(bodies[place].id == tag);
    return place;
}

#define REQUEST_BODIES   bodies_of(&shd__request__descriptor, WIRE_REQUEST_TYPES)
#define REPLY_BODIES     bodies_of(&shd__reply__descriptor, REPLY_BODY_TYPES)
#define REPLY_BODY_TYPES ((uint32_t)WIRE_REPLY_TYPES - WIRE_WELCOME)

static enum wire_request_type request_type(const Shd__Request *m)
{
    return (enum wire_request_type)place_of(REQUEST_BODIES, WIRE_REQUEST_TYPES, m->body_case);
}

static int request_check(const Shd__Request *m, struct shd_err *e)
{
    int r = unknown_check("request", &m->base, e);
    if (r == SHD_OK && m->body_case == SHD__REQUEST__BODY__NOT_SET)
        r = err_set(e, SHD_EPROTO, "request %" PRIu64 " has no body", m->seq);
    if (r == SHD_OK) /* every member of the union is a message */
        r = unknown_check(wire_request_name(request_type(m)), &m->hello->base, e);
    return r == SHD_OK ? message_check(&wire_requests[request_type(m)], &m->hello->base, e) : r;
}

int wire_request_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded = NULL;
    int r = frame_decode(&shd__request__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    CHECK(decoded != NULL);
    const Shd__Request *m = (const Shd__Request *)decoded;
    r = request_check(m, e);
    if (r != SHD_OK) {
        arena->used = used;
        return r;
    }
    struct wire_request *q = ret_request;
    q->seq = m->seq;
    q->session = m->session;
    q->type = request_type(m);
    message_take(&wire_requests[q->type], &m->hello->base, &q->hello);
    if (q->type == WIRE_RETURN && q->return_grad.dtype == 0)
        q->return_grad.dtype = SHD_F32; /* of no gradient; what is handed on is always valid */
    return SHD_OK;
}

int wire_request_pack_for(const struct wire_request *request, uint32_t level, void *buf,
                          size_t capacity, size_t *ret_bytes, struct shd_err *e)
{
    CHECK((unsigned)request->type < WIRE_REQUEST_TYPES);
    const struct wire_message *t = &wire_requests[request->type];
    struct wire_parts parts;
    Shd__Request m = SHD__REQUEST__INIT;
    message_put(t, &request->hello, &parts);
    m.seq = request->seq;
    m.session = request->session;
    m.body_case = REQUEST_BODIES[request->type].id;
    m.hello = (Shd__Hello *)&parts.body;
    int r = message_check(t, &parts.body.base, e);
    if (r == SHD_OK && level < WIRE_LEVEL)
        r = level_fit(t, &parts.body.base, level, e);
    return r == SHD_OK ? frame_encode(&m.base, buf, capacity, ret_bytes, e) : r;
}

int wire_request_pack(const struct wire_request *request, void *buf, size_t capacity,
                      size_t *ret_bytes, struct shd_err *e)
{
    return wire_request_pack_for(request, WIRE_LEVEL, buf, capacity, ret_bytes, e);
}

/* -- Replies --------------------------------------------------------------------------------- */

/* Text of an error, which ends up on terminals: cut to what a struct shd_err holds, control
 * characters replaced. An error is not refused for how it is spelt. */
static void text_clean(char *text)
{
    size_t i = 0;
    for (; text[i] != 0 && i < SHD_ERR_TEXT_BYTES - 1; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            text[i] = '?';
    text[i] = 0;
}

static enum wire_reply_type reply_type(const Shd__Reply *m)
{
    if (m->body_case == SHD__REPLY__BODY__NOT_SET)
        return WIRE_REPLY_NONE;
    return WIRE_WELCOME +
           (enum wire_reply_type)place_of(REPLY_BODIES, REPLY_BODY_TYPES, m->body_case);
}

static int reply_check(const Shd__Reply *m, struct shd_err *e)
{
    const struct wire_message *t = &wire_replies[reply_type(m)];
    if (m->layout != 0)
        return err_set(e, SHD_ERANGE, "reply.layout is %" PRIu64 ", this build knows 0", m->layout);
    if (m->status == SHD_OK && m->text[0] != 0)
        return err_set(e, SHD_EPROTO, "reply has status SHD_OK and the text '%.40s'", m->text);
    if (m->status != SHD_OK && !status_known(m->status))
        return err_set(e, SHD_ERANGE, "reply.status is %d, an unknown code", m->status);
    int r = unknown_check("reply", &m->base, e);
    if (r != SHD_OK || reply_type(m) == WIRE_REPLY_NONE)
        return r;
    r = unknown_check(t->name, &m->welcome->base, e);
    return r == SHD_OK ? message_check(t, &m->welcome->base, e) : r;
}

int wire_reply_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                      struct wire_reply *ret_reply, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded = NULL;
    int r = frame_decode(&shd__reply__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    CHECK(decoded != NULL);
    const Shd__Reply *m = (const Shd__Reply *)decoded;
    if (m->text[0] != 0) /* then it is in the arena, not protobuf-c's constant "" */
        text_clean(m->text);
    r = reply_check(m, e);
    if (r != SHD_OK) {
        arena->used = used;
        return r;
    }
    ret_reply->seq = m->seq;
    ret_reply->status = m->status;
    ret_reply->text = m->text;
    ret_reply->retry_ms = m->retry_ms;
    ret_reply->type = reply_type(m);
    if (ret_reply->type != WIRE_REPLY_NONE)
        message_take(&wire_replies[ret_reply->type], &m->welcome->base, &ret_reply->welcome);
    return SHD_OK;
}

int wire_reply_pack_for(const struct wire_reply *reply, uint32_t level, void *buf, size_t capacity,
                        size_t *ret_bytes, struct shd_err *e)
{
    CHECK((unsigned)reply->type < WIRE_REPLY_TYPES);
    char text[SHD_ERR_TEXT_BYTES];
    text[0] = 0;
    if (reply->status != SHD_OK && reply->text != NULL) {
        memccpy(text, reply->text, 0, sizeof text);
        text_clean(text);
    }
    struct wire_parts parts;
    Shd__Reply m = SHD__REPLY__INIT;
    m.seq = reply->seq;
    m.status = reply->status;
    m.text = text;
    m.retry_ms = reply->retry_ms;
    if (reply->type != WIRE_REPLY_NONE) {
        message_put(&wire_replies[reply->type], &reply->welcome, &parts);
        m.body_case = REPLY_BODIES[reply->type - WIRE_WELCOME].id;
        m.welcome = (Shd__Welcome *)&parts.body;
    }
    int r = reply_check(&m, e);
    if (r == SHD_OK && reply->type != WIRE_REPLY_NONE && level < WIRE_LEVEL)
        r = level_fit(&wire_replies[reply->type], &parts.body.base, level, e);
    return r == SHD_OK ? frame_encode(&m.base, buf, capacity, ret_bytes, e) : r;
}

int wire_reply_pack(const struct wire_reply *reply, void *buf, size_t capacity, size_t *ret_bytes,
                    struct shd_err *e)
{
    return wire_reply_pack_for(reply, WIRE_LEVEL, buf, capacity, ret_bytes, e);
}
