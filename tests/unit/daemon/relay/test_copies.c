/* What a relay in a daemon's stead takes of the other: segments of a session. */
#include <string.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/copies.h"
#include "daemon/relay/frames.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

static int announce(struct copies *c, uint64_t number, uint32_t kind, uint64_t bytes)
{
    const struct bulk_head head = {
        .type = FRAME_SEGMENT, .index = kind, .id = 77, .at = bytes, .bytes = sizeof number
    };
    struct shd_err e = { 0 };
    void *to;
    const int r = copies_place(c, &head, &to, &e);
    if (r != SHD_OK)
        return r;
    memcpy(to, &number, sizeof number);
    return copies_announce(c, &head, &e);
}

static int put_bytes(struct copies *c, uint64_t number, uint64_t at, uint64_t bytes)
{
    const struct bulk_head head = { .type = FRAME_BYTES, .id = number, .at = at, .bytes = bytes };
    struct shd_err e = { 0 };
    void *to;
    return copies_place(c, &head, &to, &e);
}

TEST(segments_of_a_relay_that_lies_are_refused)
{
    struct copies c;
    copies_init(&c);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_STATE, SHD_PAGE_BYTES), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_PUBLISH, SHD_PAGE_BYTES), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, 99, SHD_PAGE_BYTES), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_INBOX, 0), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_INBOX, SHD_PAGE_BYTES + 1), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_INBOX, UINT64_MAX - 4095), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 0, SEGMENT_STAGE, SHD_PAGE_BYTES), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_STAGE, UINT64_C(1) << 47), SHD_ENOMEM);
    EXPECT_STATUS(announce(&c, 2, SEGMENT_STAGE, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(announce(&c, 2, SEGMENT_STAGE, 2 * SHD_PAGE_BYTES), SHD_EPROTO);
    EXPECT_STATUS(announce(&c, 2, SEGMENT_STAGE, SHD_PAGE_BYTES), SHD_OK); /* another ticket */
    EXPECT_STATUS(announce(&c, 3, SEGMENT_INBOX, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(put_bytes(&c, 3, 0, 1), SHD_EPROTO); /* the worker's alone */
    EXPECT_STATUS(put_bytes(&c, 4, 0, 1), SHD_EPROTO);
    EXPECT_STATUS(put_bytes(&c, 2, 0, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(put_bytes(&c, 2, 1, SHD_PAGE_BYTES), SHD_ERANGE);
    EXPECT_STATUS(put_bytes(&c, 2, SHD_PAGE_BYTES + 1, 0), SHD_ERANGE);
    EXPECT_STATUS(put_bytes(&c, 2, UINT64_MAX, 2), SHD_ERANGE); /* the sum wraps */
    copies_free(&c);
}

/* As many stages as there may ever be: the oldest goes, and an inbox never does. */
TEST(stages_without_end_take_no_more_places)
{
    struct copies c;
    copies_init(&c);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_INBOX, SHD_PAGE_BYTES), SHD_OK);
    for (uint64_t number = 2; number < 200; number++)
        EXPECT_STATUS(announce(&c, number, SEGMENT_STAGE, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(announce(&c, 1, SEGMENT_INBOX, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(put_bytes(&c, 2, 0, 1), SHD_EPROTO);
    EXPECT_STATUS(put_bytes(&c, 199, 0, 1), SHD_OK);
    for (uint64_t number = 200; number < 215; number++)
        EXPECT_STATUS(announce(&c, number, SEGMENT_INBOX, SHD_PAGE_BYTES), SHD_OK);
    EXPECT_STATUS(announce(&c, 215, SEGMENT_INBOX, SHD_PAGE_BYTES), SHD_EBUSY);
    copies_free(&c);
}

TEST_MAIN()
