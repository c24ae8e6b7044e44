/* See zmtp.h. */
#include "daemon/net/zmtp.h"

#include <inttypes.h>
#include <string.h>

#define FLAG_MORE    1u
#define FLAG_LONG    2u
#define FLAG_COMMAND 4u
#define MARK_FIRST   0xffu /* of a greeting */
#define MARK_LAST    0x7fu
#define MARK_LAST_AT 9u
#define VERSION_AT   10u
#define MECHANISM_AT 12u
#define LENGTH_BYTES 4u /* of a property's value */

static const uint8_t mechanism[20] = "NULL";
static const uint8_t ready[6] = { 5, 'R', 'E', 'A', 'D', 'Y' };
static const uint8_t socket_type[12] = {
    11, 'S', 'o', 'c', 'k', 'e', 't', '-', 'T', 'y', 'p', 'e'
};
static const uint8_t router[10] = { 0, 0, 0, 6, 'R', 'O', 'U', 'T', 'E', 'R' };

static uint8_t *put(uint8_t *at, const uint8_t *bytes, size_t count)
{
    memcpy(at, bytes, count);
    return at + count;
}

void zmtp_opening(uint8_t bytes[ZMTP_OPENING_BYTES])
{
    const uint8_t header[2] = { FLAG_COMMAND, sizeof ready + sizeof socket_type + sizeof router };
    _Static_assert(ZMTP_OPENING_BYTES == ZMTP_GREETING_BYTES + sizeof header + sizeof ready +
                                             sizeof socket_type + sizeof router,
                   "the greeting and READY");
    memset(bytes, 0, ZMTP_GREETING_BYTES);
    bytes[0] = MARK_FIRST;
    bytes[MARK_LAST_AT] = MARK_LAST;
    bytes[VERSION_AT] = 3;
    put(bytes + MECHANISM_AT, mechanism, sizeof mechanism);
    uint8_t *at = put(bytes + ZMTP_GREETING_BYTES, header, sizeof header);
    at = put(at, ready, sizeof ready);
    at = put(at, socket_type, sizeof socket_type);
    put(at, router, sizeof router);
}

int zmtp_greeting_check(const uint8_t greeting[ZMTP_GREETING_BYTES], struct shd_err *e)
{
    if (greeting[0] != MARK_FIRST || greeting[MARK_LAST_AT] != MARK_LAST)
        return err_set(e, SHD_EPROTO, "it does not speak ZeroMQ");
    if (greeting[VERSION_AT] < 3)
        return err_set(e, SHD_EPROTO, "it speaks ZMTP %u, this daemon 3 (ZeroMQ 4)",
                       greeting[VERSION_AT]);
    if (memcmp(greeting + MECHANISM_AT, mechanism, sizeof mechanism) != 0)
        return err_set(e, SHD_EPROTO, "it wants a ZeroMQ security mechanism, there is NULL");
    return SHD_OK;
}

static uint64_t big_endian(const uint8_t *at, size_t count)
{
    uint64_t value = 0;
    for (size_t i = 0; i < count; i++)
        value = value << 8 | at[i];
    return value;
}

/* The value of the property Socket-Type; NULL: there is none, or the list is broken. */
static const uint8_t *find_type(const uint8_t *at, size_t left, uint64_t *ret_bytes)
{
    while (left > 0) {
        const size_t name_bytes = (size_t)at[0] + 1;
        if (left < name_bytes + LENGTH_BYTES)
            return NULL;
        const uint64_t bytes = big_endian(at + name_bytes, LENGTH_BYTES);
        const uint8_t *value = at + name_bytes + LENGTH_BYTES;
        if (left - name_bytes - LENGTH_BYTES < bytes)
            return NULL;
        *ret_bytes = bytes;
        if (name_bytes == sizeof socket_type && memcmp(at, socket_type, name_bytes) == 0)
            return value;
        left -= name_bytes + LENGTH_BYTES + (size_t)bytes;
        at = value + bytes;
    }
    return NULL;
}

int zmtp_ready_check(const uint8_t *body, size_t bytes, struct shd_err *e)
{
    if (bytes < sizeof ready || memcmp(body, ready, sizeof ready) != 0)
        return err_set(e, SHD_EPROTO, "its first ZeroMQ command is not READY");
    uint64_t type_bytes = 0;
    const uint8_t *type = find_type(body + sizeof ready, bytes - sizeof ready, &type_bytes);
    if (type == NULL || type_bytes != strlen("DEALER") || memcmp(type, "DEALER", type_bytes) != 0)
        return err_set(e, SHD_EPROTO, "its ZeroMQ socket is not a DEALER");
    return SHD_OK;
}

int zmtp_header(const uint8_t *data, size_t bytes, struct zmtp_frame *ret_frame, struct shd_err *e)
{
    if (bytes == 0)
        return SHD_PENDING;
    const uint8_t flags = data[0];
    if ((flags & ~(FLAG_MORE | FLAG_LONG | FLAG_COMMAND)) != 0 ||
        (flags & (FLAG_MORE | FLAG_COMMAND)) == (FLAG_MORE | FLAG_COMMAND))
        return err_set(e, SHD_EPROTO, "a ZeroMQ frame with flags 0x%02x", flags);
    const size_t length_bytes = (flags & FLAG_LONG) != 0 ? 8 : 1;
    if (bytes < 1 + length_bytes)
        return SHD_PENDING;
    *ret_frame = (struct zmtp_frame){ .more = (flags & FLAG_MORE) != 0,
                                      .command = (flags & FLAG_COMMAND) != 0,
                                      .header_bytes = 1 + length_bytes,
                                      .bytes = big_endian(data + 1, length_bytes) };
    return SHD_OK;
}

size_t zmtp_header_write(uint8_t header[ZMTP_HEADER_BYTES_MAX], size_t body_bytes)
{
    if (body_bytes <= UINT8_MAX) {
        header[0] = 0;
        header[1] = (uint8_t)body_bytes;
        return 2;
    }
    header[0] = FLAG_LONG;
    for (unsigned i = 0; i < 8; i++)
        header[1 + i] = (uint8_t)((uint64_t)body_bytes >> (56 - 8 * i));
    return ZMTP_HEADER_BYTES_MAX;
}
