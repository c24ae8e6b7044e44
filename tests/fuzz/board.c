/* A board mapped from a daemon that is not trusted: what board_check() takes can be read for every
 * unit. Input: units, bytes (each 2), then the page. */
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

#include "proto/share/board.h"
#include "proto/spec/layout.h"

static void read_all(const struct board *b, uint32_t units, uint64_t version)
{
    for (uint32_t u = 0; u < units; u++) {
        const int there = board_reached(b, u, version);
        CHECK(there == (board_version(b, u) != UINT64_MAX && board_version(b, u) >= version));
        CHECK(board_wait(b, u, version, /* timeout_ns= */ 0) == (there ? SHD_OK : SHD_ETIMEDOUT));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    uint32_t units = (uint32_t)fuzz_bytes(&in, 2);
    const uint64_t bytes = fuzz_bytes(&in, 2);
    if (units == UINT16_MAX)
        units = UINT32_MAX;
    if (bytes < sizeof(struct board)) /* no segment is below a page */
        return 0;
    uint8_t *page = aligned_alloc(64, (bytes + 63) / 64 * 64); /* what is behind it is poisoned */
    CHECK(page != NULL);
    memset(page, 0, bytes);
    memcpy(page, in.at, in.left < bytes ? in.left : bytes);
    const struct board *b = (const void *)page;
    const int r = board_check(b, bytes, units, &e);
    if (r == SHD_OK) {
        CHECK(b->units == units && units <= SHD_UNITS_MAX && bytes >= board_bytes(units));
        read_all(b, units, size);
    } else {
        fuzz_check_refusal(r, &e);
    }
    free(page);
    return 0;
}

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const uint32_t units[] = { 0, 1, 5, 40 };
    if (index >= ARRAY_SIZE(units))
        return 0;
    const uint64_t bytes = board_bytes(units[index]);
    struct board *b = aligned_alloc(64, bytes);
    CHECK(b != NULL && bytes + 4 <= bytes_max && bytes <= UINT16_MAX);
    memset((void *)b, 0, bytes);
    board_init(b, units[index]);
    board_set_step(b, 3, 1);
    for (uint32_t u = 0; u < units[index] / 2; u++)
        board_publish(b, u, u * UINT64_C(100));
    buf[0] = (uint8_t)units[index];
    buf[1] = 0;
    buf[2] = (uint8_t)bytes;
    buf[3] = (uint8_t)(bytes >> 8);
    memcpy(buf + 4, b, bytes);
    free(b);
    return bytes + 4;
}
