/* Every message, as data: protobuf-c's descriptor says the type of each field and where the
 * generated struct has it; a struct wire_field beside it, where the plain struct has it and what it
 * may be. */
#ifndef SHD_WIRE_TABLES_H
#define SHD_WIRE_TABLES_H

#include <protobuf-c/protobuf-c.h>

#include "proto/wire/wire.h"
#include "shd.pb-c.h"

/* The limits of a field. */
enum wire_form {
    WIRE_AMOUNT, /* a number, a size of bytes, a count: min to max, and a multiple */
    WIRE_ANY,
    WIRE_UP_TO,    /* a uint32 of at most max */
    WIRE_INDEX,    /* a uint32 below that of the field after it */
    WIRE_REAL,     /* finite, not negative */
    WIRE_NAME,     /* at most max bytes of printable ASCII, for people and logs */
    WIRE_PATH,     /* absolute, at most max bytes, no control characters */
    WIRE_EXACT,    /* max bytes, in an array */
    WIRE_DTYPE,    /* min to max; 0 as well, where the bool after it is true */
    WIRE_OPTIONAL, /* at most max bytes; none, where the bool before it is false */
    WIRE_KIND,     /* of a segment that workers are given */
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
    uint16_t level;                /* enum wire_level: of the builds that know it */
    bool needed;                   /* not to be left out for others, where it says something */
    const struct wire_message *of; /* of a field that is a message */
};

struct wire_message {
    const char *name; /* in errors */
    const ProtobufCMessageDescriptor *descriptor;
    const struct wire_field *fields; /* those of the descriptor, in the same order */
    uint32_t field_count;
    size_t bytes; /* of the plain struct */
};

/* The parts of a message to be packed, which also points into the plain struct. */
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

/* Both in the order of the body's tags in shd.proto. */
extern const struct wire_message wire_requests[WIRE_REQUEST_TYPES];
extern const struct wire_message wire_replies[WIRE_REPLY_TYPES]; /* none of WIRE_REPLY_NONE */

#endif
