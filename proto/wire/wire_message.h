/* Between frames, protobuf-c's generated structs and the plain structs of wire.h, for any message:
 *
 *     unpack   frame -> wire_decode() -> wire_check() -> wire_take() -> plain struct
 *     pack     plain struct -> wire_put() -> wire_check() -> wire_encode() -> frame
 *
 * What a message is made of is data: protobuf-c's descriptor says the type of each field and where
 * the generated struct has it; a struct wire_field beside it, where the plain struct has it and
 * what it may be. Nothing is taken from a message before all of it was checked. Messages inside
 * messages hold no further ones, so nothing here recurses.
 */
#ifndef SHD_WIRE_MESSAGE_H
#define SHD_WIRE_MESSAGE_H

#include <protobuf-c/protobuf-c.h>

#include "proto/wire/wire.h"
#include "shd.pb-c.h"

/* What a field may be. */
enum wire_form {
    WIRE_AMOUNT, /* a number, a size of bytes, a count: min to max, and a multiple */
    WIRE_ANY,
    WIRE_UP_TO, /* a uint32 of at most max */
    WIRE_INDEX, /* a uint32 below that of the field after it */
    WIRE_REAL,  /* finite, not negative */
    WIRE_NAME,  /* at most max bytes of printable ASCII, for people and logs */
    WIRE_PATH,  /* absolute, at most max bytes, no control characters */
    WIRE_EXACT, /* max bytes, in an array */
};

/* A field of a message. By its type the plain struct has at `at`:
 *
 *     uint32, uint64, bool, float, double, string   the same (of a uint32, an enum, too)
 *     bytes             struct wire_bytes; WIRE_EXACT: uint8_t[max]
 *     repeated double   double[max], and at more_at a uint32_t, how many
 *     repeated fixed32  struct fixsum, carried
 *     message           its plain struct; if optional, at more_at a bool, whether it is there
 *     repeated message  plain structs [max], and at more_at a uint32_t, how many */
struct wire_field {
    const char *name; /* in shd.proto */
    uint16_t at, more_at;
    uint16_t width; /* of a number, a pointer, a bool; 0: an array or a struct */
    uint16_t form;  /* enum wire_form */
    uint64_t min, max;
    uint32_t multiple;             /* 0: any */
    const struct wire_message *of; /* of a field that is a message */
};

struct wire_message {
    const char *name; /* in errors */
    const ProtobufCMessageDescriptor *descriptor;
    const struct wire_field *fields; /* those of the descriptor, in the same order */
    uint32_t field_count;
    size_t bytes; /* of the plain struct */
    /* What limits of single fields cannot say; it finds those kept. NULL: nothing. */
    int (*check)(const ProtobufCMessage *m, struct shd_err *e);
    bool nests; /* a field is a message */
};

/* What a message to be packed is made of; it points into the plain struct, too. */
struct wire_parts {
    union {
        ProtobufCMessage base;
        Shd__Layout layout; /* the longest one; wire_put() checks that */
    } body;
    Shd__Decision decision;
    Shd__Segment segments[WIRE_SEGMENTS_MAX];
    ProtobufCMessage *segment_list[WIRE_SEGMENTS_MAX];
    uint32_t limbs[FIXSUM_LIMBS];
};

/* SHD_ERANGE, naming message and field, unless min <= value <= max. */
int wire_range(const char *message, const char *field, uint64_t value, uint64_t min, uint64_t max,
               struct shd_err *e);

/* SHD_EPROTO when m has a field this build does not know: versions match exactly, so that is a
 * damaged frame or a peer that lies about its version. */
int wire_unknown_check(const char *name, const ProtobufCMessage *m, struct shd_err *e);

/* Every field of m, a message of t, inside its limits. Errors: SHD_ERANGE, SHD_EINVAL, and
 * SHD_EPROTO for what is missing or unknown in a message inside m; they name the field. */
int wire_check(const struct wire_message *t, const ProtobufCMessage *m, struct shd_err *e);

/* Fill a plain struct from a checked message; strings and bytes point into the message. */
void wire_take(const struct wire_message *t, const ProtobufCMessage *m, void *ret_plain);

/* Fill parts->body from a plain struct; to be checked. */
void wire_put(const struct wire_message *t, const void *plain, struct wire_parts *parts);

/* Decode a frame into the arena. Errors: SHD_ERANGE too long or does not fit the arena, SHD_EPROTO
 * malformed; the arena is as before then. */
int wire_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame, size_t bytes,
                struct wire_arena *arena, ProtobufCMessage **ret_m, struct shd_err *e);

/* SHD_ERANGE when m would exceed capacity or WIRE_FRAME_BYTES_MAX. */
int wire_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
                struct shd_err *e);

#endif
