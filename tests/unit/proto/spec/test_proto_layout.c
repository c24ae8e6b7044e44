/* layout: slices partition every unit, whatever the numbers. */
#include "proto/spec/layout.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

/* All owners' slices follow each other, cover the padded unit, and differ by a block at most. */
static void expect_partition(uint64_t elems, uint32_t owners)
{
    uint64_t next = 0, least = UINT64_MAX, most = 0;
    for (uint32_t o = 0; o < owners; o++) {
        const struct slice s = layout_slice(elems, o, owners);
        EXPECT_EQ(s.first_elem, next);
        EXPECT_EQ(s.first_elem % SHD_BLOCK_ELEMS, 0);
        EXPECT_EQ(s.elems % SHD_BLOCK_ELEMS, 0);
        next += s.elems;
        least = s.elems < least ? s.elems : least;
        most = s.elems > most ? s.elems : most;
    }
    EXPECT_EQ(next, layout_align(elems, SHD_BLOCK_ELEMS));
    EXPECT(most - least <= SHD_BLOCK_ELEMS);
}

TEST(slices_partition_units_of_special_sizes)
{
    static const uint64_t sizes[] = { 0,
                                      1,
                                      2047,
                                      2048,
                                      2049,
                                      4096,
                                      6143,
                                      6144,
                                      6145,
                                      65536,
                                      1000000,
                                      SHD_MODEL_ELEMS_MAX - 1,
                                      SHD_MODEL_ELEMS_MAX };
    static const uint32_t owners[] = { 1, 2, 3, 4, 5, 7, 8, 63, 64, 1000, 1023, SHD_OWNERS_MAX };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        for (size_t k = 0; k < ARRAY_SIZE(owners); k++)
            expect_partition(sizes[i], owners[k]);
}

TEST(slices_partition_random_units)
{
    uint64_t seed = 0x1a40;
    printf("seed %#" PRIx64 "\n", seed);
    for (int i = 0; i < 3000; i++) {
        const uint64_t elems = test_random(&seed) >> (16 + test_random(&seed) % 48);
        expect_partition(elems, (uint32_t)(test_random(&seed) % SHD_OWNERS_MAX) + 1);
    }
}

TEST(padded_and_unpadded_sizes_give_the_same_slices)
{
    for (uint64_t elems = 1; elems < 20000; elems += 97) {
        const struct slice a = layout_slice(elems, 1, 3);
        const struct slice b = layout_slice(layout_align(elems, SHD_BLOCK_ELEMS), 1, 3);
        EXPECT(a.first_elem == b.first_elem && a.elems == b.elems);
    }
}

TEST(align_rounds_up)
{
    EXPECT_EQ(layout_align(0, 32), 0);
    EXPECT_EQ(layout_align(1, 32), 32);
    EXPECT_EQ(layout_align(32, 32), 32);
    EXPECT_EQ(layout_align(33, 32), 64);
    EXPECT(layout_align(UINT64_MAX - 4096, 4096) == UINT64_MAX - 4095);
    EXPECT_EQ(layout_blocks(0), 0);
    EXPECT_EQ(layout_blocks(1), 1);
    EXPECT_EQ(layout_blocks(2048), 1);
    EXPECT_EQ(layout_blocks(2049), 2);
}

TEST(intersect_agrees_with_counting_elements)
{
    uint64_t seed = 0x1a41;
    printf("seed %#" PRIx64 "\n", seed);
    for (int i = 0; i < 20000; i++) {
        const struct slice s = { test_random(&seed) % 64, test_random(&seed) % 64 };
        const uint64_t first = test_random(&seed) % 64, elems = test_random(&seed) % 64;
        uint64_t count = 0, begin = 0;
        for (uint64_t x = first; x < first + elems; x++)
            if (x >= s.first_elem && x < s.first_elem + s.elems && count++ == 0)
                begin = x;
        uint64_t got = 999;
        EXPECT_EQ(layout_intersect(s, first, elems, &got), count);
        EXPECT_EQ(got, count > 0 ? begin : 999); /* untouched when empty */
    }
}

TEST(every_element_of_a_tensor_has_one_owner)
{
    for (uint32_t owners = 1; owners <= 9; owners++) {
        uint64_t sum = 0, next = 5000;
        for (uint32_t o = 0; o < owners; o++) {
            uint64_t first;
            const uint64_t n = layout_intersect(layout_slice(50000, o, owners), 5000, 33333,
                                                &first);
            if (n > 0)
                EXPECT_EQ(first, next);
            next += n;
            sum += n;
        }
        EXPECT_EQ(sum, 33333);
    }
}

TEST_MAIN()
