/* See bulk_head.h. */
#include "daemon/relay/bulk_head.h"

#include <inttypes.h>

#define MAGIC UINT32_C(0x42444853) /* "SHDB" */

static void put_le(uint8_t *at, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *at, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = bytes; i-- > 0;)
        value = value << 8 | at[i];
    return value;
}

/* magic ^ type, index, id, at, bytes: 4 + 4 + 8 + 8 + 8. A type has 16 bits. */
void bulk_head_pack(const struct bulk_head *head, uint8_t out[BULK_HEAD_BYTES])
{
    put_le(out, MAGIC ^ head->type, 4);
    put_le(out + 4, head->index, 4);
    put_le(out + 8, head->id, 8);
    put_le(out + 16, head->at, 8);
    put_le(out + 24, head->bytes, 8);
}

int bulk_head_unpack(const uint8_t in[BULK_HEAD_BYTES], struct bulk_head *ret_head,
                     struct shd_err *e)
{
    *ret_head = (struct bulk_head){ .type = (uint32_t)get_le(in, 4) ^ MAGIC,
                                    .index = (uint32_t)get_le(in + 4, 4),
                                    .id = get_le(in + 8, 8),
                                    .at = get_le(in + 16, 8),
                                    .bytes = get_le(in + 24, 8) };
    if (ret_head->type > UINT16_MAX)
        return err_set(e, SHD_EPROTO, "a frame begins with 0x%08" PRIx64, get_le(in, 4));
    if (ret_head->bytes > BULK_PAYLOAD_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "a frame of %" PRIu64 " bytes, at most %" PRIu64,
                       ret_head->bytes, BULK_PAYLOAD_BYTES_MAX);
    if (ret_head->type == BULK_PING && ret_head->bytes != 0)
        return err_set(e, SHD_EPROTO, "a ping of %" PRIu64 " bytes", ret_head->bytes);
    return SHD_OK;
}
