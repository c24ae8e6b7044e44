/* What a ZeroMQ peer may say: frames of both lengths, its greeting, its READY. */
#include <stdlib.h>
#include <string.h>

#include "daemon/net/zmtp.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

static void peer_opening(uint8_t bytes[ZMTP_OPENING_BYTES])
{
    zmtp_opening(bytes);
    static const uint8_t dealer[6] = { 'D', 'E', 'A', 'L', 'E', 'R' };
    memcpy(bytes + ZMTP_OPENING_BYTES - sizeof dealer, dealer, sizeof dealer);
}

TEST(opening_is_a_greeting_and_a_command_that_fills_it)
{
    uint8_t bytes[ZMTP_OPENING_BYTES];
    struct zmtp_frame frame;
    struct shd_err e;
    peer_opening(bytes);
    EXPECT_OK(zmtp_greeting_check(bytes, &e), &e);
    EXPECT_OK(zmtp_header(bytes + ZMTP_GREETING_BYTES, 2, &frame, &e), &e);
    EXPECT(frame.command && !frame.more);
    EXPECT_EQ(ZMTP_GREETING_BYTES + frame.header_bytes + frame.bytes, ZMTP_OPENING_BYTES);
    EXPECT_OK(zmtp_ready_check(bytes + ZMTP_GREETING_BYTES + 2, (size_t)frame.bytes, &e), &e);
}

TEST(greeting_of_another_kind_is_refused_by_name)
{
    uint8_t bytes[ZMTP_OPENING_BYTES];
    struct shd_err e;
    peer_opening(bytes);
    bytes[10] = 2;
    EXPECT_STATUS(zmtp_greeting_check(bytes, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "ZMTP 2");
    bytes[10] = 3;
    static const uint8_t curve[5] = { 'C', 'U', 'R', 'V', 'E' };
    memcpy(bytes + 12, curve, sizeof curve);
    EXPECT_STATUS(zmtp_greeting_check(bytes, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "security");
    memcpy(bytes, "GET / HTTP/1.1", sizeof "GET / HTTP/1.1");
    EXPECT_STATUS(zmtp_greeting_check(bytes, &e), SHD_EPROTO);
}

/* Each prefix of READY, and each byte of it changed: a verdict, and no byte beyond it is read (the
 * sanitizers' part). Properties before the one that counts are passed over. */
TEST(ready_is_read_within_its_bytes)
{
    uint8_t bytes[ZMTP_OPENING_BYTES];
    struct shd_err e;
    peer_opening(bytes);
    const uint8_t *body = bytes + ZMTP_GREETING_BYTES + 2;
    const size_t size = ZMTP_OPENING_BYTES - ZMTP_GREETING_BYTES - 2;
    for (size_t n = 0; n < size; n++) {
        uint8_t *copy = malloc(n + 1);
        memcpy(copy, body, n);
        EXPECT_STATUS(zmtp_ready_check(copy, n, &e), SHD_EPROTO);
        free(copy);
    }
    for (size_t n = 0; n < size; n++)
        for (unsigned bit = 0; bit < 8; bit++) {
            uint8_t *copy = malloc(size);
            memcpy(copy, body, size);
            copy[n] ^= (uint8_t)(1u << bit);
            EXPECT_STATUS(zmtp_ready_check(copy, size, &e), SHD_EPROTO);
            free(copy);
        }
    uint8_t more[64] = "\5READY\x08Identity\0\0\0\3abc";
    memcpy(more + 22, body + 6, size - 6);
    EXPECT_OK(zmtp_ready_check(more, 22 + size - 6, &e), &e);
}

TEST(header_says_its_length_or_that_it_is_not_complete)
{
    uint8_t header[ZMTP_HEADER_BYTES_MAX];
    struct zmtp_frame frame;
    struct shd_err e;
    static const size_t sizes[] = { 0, 1, 255, 256, 1024 * 1024 };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        const size_t bytes = zmtp_header_write(header, sizes[i]);
        for (size_t n = 0; n < bytes; n++)
            EXPECT_EQ(zmtp_header(header, n, &frame, &e), SHD_PENDING);
        EXPECT_OK(zmtp_header(header, bytes, &frame, &e), &e);
        EXPECT_EQ(frame.header_bytes, bytes);
        EXPECT_EQ(frame.bytes, sizes[i]);
        EXPECT(!frame.more && !frame.command);
    }
    static const uint8_t bad[] = { 5, 8, 0x7f, 0xff };
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        header[0] = bad[i];
        EXPECT_STATUS(zmtp_header(header, sizeof header, &frame, &e), SHD_EPROTO);
    }
}

TEST_MAIN()
