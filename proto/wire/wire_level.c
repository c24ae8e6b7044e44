/* See wire_level.h. Of proto3's fields those that have their default are not in the frame. */
#include "proto/wire/wire_level.h"

#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"

/* Give a field its default; whether it had another value. */
static bool clear(const ProtobufCFieldDescriptor *d, ProtobufCMessage *m)
{
    static const uint8_t zeros[8];
    uint8_t *at = (uint8_t *)m + d->offset;
    size_t *count = (size_t *)(void *)((uint8_t *)m + d->quantifier_offset);
    if (d->label == PROTOBUF_C_LABEL_REPEATED) {
        const bool set = *count > 0;
        *count = 0;
        return set;
    }
    if (d->type == PROTOBUF_C_TYPE_STRING) {
        char **text = (char **)(void *)at;
        const bool set = *text != NULL && **text != '\0';
        *text = (char *)protobuf_c_empty_string;
        return set;
    }
    if (d->type == PROTOBUF_C_TYPE_BYTES) {
        ProtobufCBinaryData *bytes = (void *)at;
        const bool set = bytes->len > 0;
        *bytes = (ProtobufCBinaryData){ 0 };
        return set;
    }
    const bool wide = d->type == PROTOBUF_C_TYPE_UINT64 || d->type == PROTOBUF_C_TYPE_DOUBLE ||
                      d->type == PROTOBUF_C_TYPE_MESSAGE;
    const bool flag = d->type == PROTOBUF_C_TYPE_BOOL;
    const size_t bytes = wide ? 8 : flag ? sizeof(protobuf_c_boolean) : 4;
    const bool set = memcmp(at, zeros, bytes) != 0;
    memset(at, 0, bytes);
    return set;
}

static int fit_inner(const struct wire_message *t, uint32_t i, ProtobufCMessage *m, uint32_t level,
                     struct shd_err *e)
{
    const ProtobufCFieldDescriptor *d = &t->descriptor->fields[i];
    uint8_t *at = (uint8_t *)m + d->offset;
    const bool repeated = d->label == PROTOBUF_C_LABEL_REPEATED;
    ProtobufCMessage **list = repeated ? *(ProtobufCMessage ***)(void *)at
                                       : (ProtobufCMessage **)(void *)at;
    const size_t count = repeated ? *(size_t *)(void *)((uint8_t *)m + d->quantifier_offset)
                                  : *list != NULL;
    int r = SHD_OK;
    for (size_t k = 0; r == SHD_OK && k < count; k++)
        r = level_fit(t->fields[i].of, list[k], level, e);
    return r;
}

int level_fit(const struct wire_message *t, ProtobufCMessage *m, uint32_t level, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < t->field_count; i++) {
        const struct wire_field *row = &t->fields[i];
        if (row->level <= level && row->of != NULL)
            r = fit_inner(t, i, m, level, e);
        else if (row->level > level && clear(&t->descriptor->fields[i], m) && row->needed)
            r = err_set(e, SHD_ENOTSUP,
                        "%s.%s is of feature level %u, the other side's build has %" PRIu32
                        ": it is of an older version",
                        t->name, row->name, (unsigned)row->level, level);
    }
    return r;
}
