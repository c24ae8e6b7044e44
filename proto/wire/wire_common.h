/* Internal to wire_*.c: what requests and replies share. */
#ifndef SHD_WIRE_COMMON_H
#define SHD_WIRE_COMMON_H

#include <protobuf-c/protobuf-c.h>

#include "proto/wire/wire.h"
#include "shd.pb-c.h"

/* A number and the range it must be in; the name goes into the error. */
struct wire_limit {
    const char *field;
    uint64_t value, min, max;
};

/* SHD_ERANGE naming the first field that is outside its range. */
int wire_limits(const struct wire_limit *limits, size_t count, struct shd_err *e);

/* Text for people and logs: shorter than WIRE_NAME_BYTES_MAX, printable ASCII. */
int wire_name_check(const char *field, const char *name, struct shd_err *e);

/* An absolute path: shorter than WIRE_PATH_BYTES_MAX, no control characters. */
int wire_path_check(const char *field, const char *path, struct shd_err *e);

int wire_decision_check(const struct decision *d, struct shd_err *e);
void wire_decision_pack(const struct decision *d, Shd__Decision *ret_m);
/* m may be NULL (absent): SHD_EPROTO. */
int wire_decision_unpack(const Shd__Decision *m, struct decision *ret_decision, struct shd_err *e);

/* At most WIRE_METRICS_MAX numbers, copied out. */
int wire_metrics_unpack(const char *field, const double *metrics, size_t count,
                        double ret_metrics[WIRE_METRICS_MAX], uint32_t *ret_count,
                        struct shd_err *e);

/* SHD_EPROTO when m has a field this build does not know: versions match exactly, so that is a
 * damaged frame or a peer that lies about its version. */
int wire_unknown_check(const char *field, const ProtobufCMessage *m, struct shd_err *e);

/* Decode a frame into the arena. Errors: SHD_ERANGE too long or does not fit the arena, SHD_EPROTO
 * malformed; the arena is as before then. */
int wire_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame, size_t bytes,
                struct wire_arena *arena, ProtobufCMessage **ret_m, struct shd_err *e);

/* SHD_ERANGE when m would exceed capacity or WIRE_FRAME_BYTES_MAX. */
int wire_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
                struct shd_err *e);

static inline struct wire_bytes wire_bytes_of(ProtobufCBinaryData b)
{
    return (struct wire_bytes){ .data = b.data, .bytes = b.len };
}

/* protobuf-c has no const; packing only reads. */
static inline ProtobufCBinaryData wire_binary_of(struct wire_bytes b)
{
    return (ProtobufCBinaryData){ .data = (uint8_t *)b.data, .len = b.bytes };
}

#endif
