/* shardmap: all owners' maps together hold each element of each unit once, on whole pages. */
#include <errno.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/activity.h"
#include "proto/share/deal.h"
#include "proto/share/shardmap.h"
#include "proto/spec/muon.h"
#include "proto/spec/spec.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define UNITS 4u

/* Units of less than a block, one block, several, and many. */
static struct spec *four_units(const char *optimizer, const char *publish)
{
    return parse(quoted("{'name':'m','micro_batches':1,'publish':'%s','optimizer':{'kind':'%s'},"
                        "'units':[{'name':'a','tensors':[{'name':'1','shape':[5]}]},"
                        "{'name':'b','tensors':[{'name':'2','shape':[2048]}]},"
                        "{'name':'c','tensors':[{'name':'3','shape':[3,2048]}]},"
                        "{'name':'d','tensors':[{'name':'4','shape':[1000,1001]}]}]}",
                        publish, optimizer));
}

static struct shardmap *map_of(const struct spec *spec, uint32_t owner, uint32_t owners)
{
    struct shd_err e;
    struct shardmap *map = NULL;
    EXPECT_OK(shardmap_new(spec, owner, owners, &map, &e), &e);
    return map;
}

/* One owner's map is in itself consistent. */
static void expect_consistent(const struct shardmap *map)
{
    uint64_t next = 0;
    for (uint32_t u = 0; u < UNITS; u++) {
        EXPECT_EQ(map->base_elem[u], next);
        next += map->slice[u].elems;
        const uint64_t offset = shardmap_publish_offset_bytes(map, u);
        const uint64_t bytes = shardmap_publish_slice_bytes(map, u);
        EXPECT_EQ(offset % SHD_PAGE_BYTES, 0);
        EXPECT_EQ(bytes % SHD_PAGE_BYTES, 0);
        EXPECT(offset + bytes <= shardmap_publish_bytes(map));
        EXPECT(map->slice[u].elems * sizeof(float) <= map->slot_bytes);
    }
    EXPECT_EQ(map->elems, next);
    EXPECT(map->slot_bytes >= SHD_PAGE_BYTES && map->slot_bytes % SHD_PAGE_BYTES == 0);
    EXPECT(shardmap_state_bytes(map) >= SHD_PAGE_BYTES);
    EXPECT(shardmap_state_bytes(map) % SHD_PAGE_BYTES == 0);
    EXPECT_EQ(shardmap_inbox_bytes(map, 3), 3 * map->slot_bytes + ACTIVITY_BYTES);
    EXPECT_EQ(shardmap_activity_offset_bytes(map, 3), 3 * map->slot_bytes);
    EXPECT_EQ(shardmap_slot_offset_bytes(map, 2), 2 * map->slot_bytes);
    const uint64_t acc = shardmap_array_elem(map, SHARDMAP_ACC, 0);
    EXPECT_EQ(acc, (1 + map->moments) * map->elems);
    EXPECT((acc + map->elems) * sizeof(float) <= shardmap_state_bytes(map));
}

TEST(owners_together_hold_every_unit_once)
{
    static const char *const publish[] = { "f32", "bf16", "f16" };
    for (size_t p = 0; p < ARRAY_SIZE(publish); p++) {
        struct spec *spec = four_units("adamw", publish[p]);
        for (uint32_t owners = 1; owners <= 12; owners++) {
            uint64_t covered[UNITS] = { 0 };
            for (uint32_t o = 0; o < owners; o++) {
                struct shardmap *map = map_of(spec, o, owners);
                expect_consistent(map);
                for (uint32_t u = 0; u < UNITS; u++) {
                    EXPECT_EQ(map->slice[u].first_elem, covered[u]);
                    covered[u] += map->slice[u].elems;
                }
                shardmap_free(map);
            }
            for (uint32_t u = 0; u < UNITS; u++)
                EXPECT_EQ(covered[u], spec->units[u].elems);
        }
        spec_free(spec);
    }
}

TEST(arrays_follow_each_other_as_the_optimizer_needs_them)
{
    struct spec *spec = four_units("adamw", "bf16");
    struct shardmap *map = map_of(spec, 0, 1);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_PARAM, 0), 0);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_M, 0), map->elems);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_V, 0), 2 * map->elems);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, 0), 3 * map->elems);
    EXPECT_EQ(shardmap_state_bytes(map), 16 * map->elems);
    EXPECT_EQ(shardmap_publish_bytes(map), 2 * map->elems);
    shardmap_free(map);
    spec_free(spec);
    spec = four_units("sgd", "f32");
    map = map_of(spec, 0, 1);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, 0), 2 * map->elems);
    EXPECT_EQ(shardmap_state_bytes(map), 12 * map->elems);
    shardmap_free(map);
    spec_free(spec);
}

/* Behind the moments, however many there are; without frozen units and means. */
TEST(an_average_follows_the_moments)
{
    static const char *const optimizers[] = { "sgd", "adamw" };
    for (uint32_t moments = 1; moments <= 2; moments++) {
        struct spec *spec = four_units(optimizers[moments - 1], "f32");
        spec->ema = 0.9;
        spec->units[0].frozen = spec->units[1].mean = true;
        struct shardmap *map = map_of(spec, 0, 1);
        const uint64_t elems = map->moment_elems, ema = spec_ema_array(spec);
        EXPECT(shardmap_has_ema(map) && ema == 1 + moments);
        EXPECT_EQ(elems, map->slice[2].elems + map->slice[3].elems);
        EXPECT_EQ(shardmap_array_elem(map, (uint32_t)ema, 3),
                  map->elems + moments * elems + map->slice[2].elems);
        EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, 2), map->elems + ema * elems);
        EXPECT_EQ(shardmap_kept_bytes(map), (map->elems + ema * elems) * sizeof(float));
        EXPECT_EQ(shardmap_state_bytes(map), 4 * (map->elems + ema * elems + map->train_elems));
        EXPECT(!spec_unit_ema(spec, 0) && !spec_unit_ema(spec, 1) && spec_unit_ema(spec, 2));
        EXPECT(spec_unit_arrays(spec, 0) == 1 && spec_unit_arrays(spec, 2) == 2 + moments);
        shardmap_free(map);
        spec_free(spec);
    }
}

TEST(frozen_units_have_parameters_only)
{
    struct shd_err e;
    struct spec *spec = four_units("adamw", "bf16");
    for (uint32_t u = 0; u < UNITS; u += 2)
        spec->units[u].frozen = true;
    for (uint32_t owners = 1; owners < 5; owners++) {
        struct shardmap *map;
        EXPECT_OK(shardmap_new(spec, owners - 1, owners, &map, &e), &e);
        uint64_t next = 0;
        for (uint32_t u = 1; u < UNITS; u += 2) {
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_PARAM, u), map->base_elem[u]);
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_M, u), map->elems + next);
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_V, u),
                      map->elems + map->train_elems + next);
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, u),
                      map->elems + 2 * map->train_elems + next);
            EXPECT(map->slice[u].elems * sizeof(float) <= map->slot_bytes);
            next += map->slice[u].elems;
        }
        EXPECT_EQ(map->train_elems, next);
        EXPECT_EQ(shardmap_publish_bytes(map), 2 * map->elems);
        EXPECT_EQ(shardmap_state_bytes(map), 4 * map->elems + 12 * map->train_elems);
        shardmap_free(map);
    }
    spec_free(spec);
}

/* Their sums are behind the others': all else lies as without them. */
TEST(means_have_parameters_and_sums)
{
    struct shd_err e;
    struct spec *spec = four_units("adamw", "bf16");
    spec->units[0].mean = spec->units[2].mean = true;
    spec->units[1].frozen = true;
    for (uint32_t owners = 1; owners < 5; owners++) {
        struct shardmap *map;
        EXPECT_OK(shardmap_new(spec, owners - 1, owners, &map, &e), &e);
        uint64_t next = 0;
        for (uint32_t u = 3; u < UNITS; u++, next += map->slice[u - 1].elems) {
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_M, u), map->elems + next);
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_V, u),
                      map->elems + map->moment_elems + next);
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, u),
                      map->elems + 2 * map->moment_elems + next);
        }
        EXPECT_EQ(map->moment_elems, next);
        for (uint32_t u = 0; u < 4; u += 2, next += map->slice[u - 2].elems)
            EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_ACC, u),
                      map->elems + 2 * map->moment_elems + next);
        EXPECT_EQ(map->train_elems, next);
        EXPECT_EQ(shardmap_state_bytes(map), 4 * (map->elems + 2 * map->moment_elems + next));
        shardmap_free(map);
    }
    spec_free(spec);
}

TEST(owner_of_nothing_has_segments_of_one_page)
{
    struct spec *spec = four_units("adamw", "f32");
    struct shardmap *map = map_of(spec, 0, SHD_OWNERS_MAX); /* 494 blocks for 1,024 owners */
    EXPECT_EQ(map->elems, 0);
    EXPECT_EQ(map->slot_bytes, SHD_PAGE_BYTES);
    EXPECT_EQ(shardmap_publish_bytes(map), SHD_PAGE_BYTES);
    EXPECT_EQ(shardmap_state_bytes(map), SHD_PAGE_BYTES);
    shardmap_free(map);
    spec_free(spec);
}

TEST(owners_outside_their_limits_are_errors)
{
    struct shd_err e;
    struct shardmap *map = NULL;
    struct spec *spec = four_units("lion", "f32");
    EXPECT_STATUS(shardmap_new(spec, 0, 0, &map, &e), SHD_ERANGE);
    EXPECT_STATUS(shardmap_new(spec, 2, 2, &map, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "owner 2 of 2");
    EXPECT_STATUS(shardmap_new(spec, 0, SHD_OWNERS_MAX + 1, &map, &e), SHD_ERANGE);
    EXPECT(map == NULL);
    shardmap_free(NULL);
    spec_free(spec);
}

static int allocs_left;

static int fault_alloc(enum sys_kind kind)
{
    return kind == SYS_ALLOC && allocs_left-- == 0 ? ENOMEM : 0;
}

TEST(failed_allocations_are_errors_without_leak)
{
    struct spec *spec = four_units("lion", "f32");
    for (int nth = 0; nth < 4; nth++) {
        struct shd_err e;
        struct shardmap *map = NULL;
        allocs_left = nth;
        sys_fault = fault_alloc;
        const int r = shardmap_new(spec, 0, 1, &map, &e);
        sys_fault = NULL;
        EXPECT_STATUS(r, SHD_ENOMEM);
        EXPECT(map == NULL);
    }
    spec_free(spec);
}

/* Units of one owner each: in descending size, each to who has least so far. */
TEST(whole_units_are_dealt_by_size)
{
    struct spec *spec = parse(
        quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},'units':["
               "{'name':'a','place':'whole','tensors':[{'name':'1','shape':[3,2048]}]},"
               "{'name':'b','tensors':[{'name':'2','shape':[5,2048]}]},"
               "{'name':'c','place':'whole','tensors':[{'name':'3','shape':[10,2048]}]},"
               "{'name':'d','place':'whole','tensors':[{'name':'4','shape':[3,2048]}]},"
               "{'name':'e','place':'whole','tensors':[{'name':'5','shape':[4,2048]}]},"
               "{'name':'f','place':'whole','tensors':[{'name':'6','shape':[3,2048]}]}]}"));
    static const uint32_t want[4][6] = {
        { 0, DEAL_SPREAD, 0, 0, 0, 0 },
        { 1, DEAL_SPREAD, 0, 1, 1, 0 }, /* 10, 4, 3, 3 of 1 are 10; the last finds both at 10 */
        { 2, DEAL_SPREAD, 0, 2, 1, 1 },
        { 2, DEAL_SPREAD, 0, 3, 1, 2 },
    };
    for (uint32_t owners = 1; owners <= 4; owners++) {
        uint32_t *owner_of = NULL;
        struct shd_err e;
        EXPECT_OK(deal_units(spec, owners, &owner_of, &e), &e);
        for (uint32_t u = 0; u < spec->unit_count; u++)
            EXPECT_EQ(owner_of[u], want[owners - 1][u]);
        for (uint32_t o = 0; o < owners; o++) {
            struct shardmap *map = map_of(spec, o, owners);
            for (uint32_t u = 0; u < spec->unit_count; u++) {
                const struct slice all = { 0, owner_of[u] == o ? spec->units[u].elems : 0 };
                if (owner_of[u] != DEAL_SPREAD)
                    EXPECT(map->slice[u].first_elem == all.first_elem &&
                           map->slice[u].elems == all.elems);
            }
            EXPECT_EQ(map->scratch_elems, 0);
            shardmap_free(map);
        }
        free(owner_of);
    }
    spec_free(spec);
}

/* However many there are and of whatever size, no owner has more than another by more than one. */
TEST(no_owner_is_ahead_by_more_than_a_unit)
{
    uint64_t state = test_seed(77);
    struct spec *spec = four_units("adamw", "f32");
    for (int round = 0; round < 200; round++) {
        const uint32_t owners = 1 + (uint32_t)(test_random(&state) % 9);
        uint64_t load[9] = { 0 }, most = 0, least = UINT64_MAX, largest = 0;
        uint32_t *owner_of = NULL;
        struct shd_err e;
        for (uint32_t u = 0; u < UNITS; u++) {
            spec->units[u].whole = true;
            spec->units[u].elems = (1 + test_random(&state) % 50) * SHD_BLOCK_ELEMS;
            largest = spec->units[u].elems > largest ? spec->units[u].elems : largest;
        }
        EXPECT_OK(deal_units(spec, owners, &owner_of, &e), &e);
        for (uint32_t u = 0; u < UNITS; u++)
            load[owner_of[u]] += spec->units[u].elems;
        for (uint32_t o = 0; o < owners; o++) {
            most = load[o] > most ? load[o] : most;
            least = load[o] < least ? load[o] : least;
        }
        EXPECT(most - least <= largest);
        free(owner_of);
    }
    spec_free(spec);
}

/* Whoever has matrices has room behind its arrays to update the unit that needs most. */
TEST(owners_of_matrices_have_room_to_update_them)
{
    struct spec *spec = parse(
        quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},'groups':["
               "{'name':'w'},{'name':'x','optimizer':{'kind':'muon'}}],'units':["
               "{'name':'a','tensors':[{'name':'1','shape':[100,90],'group':'x'},"
               "{'name':'2','shape':[40,300],'group':'x'},{'name':'3','shape':[7],'group':'w'}]},"
               "{'name':'b','tensors':[{'name':'4','shape':[5000],'group':'w'}]}]}"));
    struct shardmap *one = map_of(spec, 0, 2), *none = map_of(spec, 1, 2);
    const struct muon_room first = muon_room(100, 90), second = muon_room(40, 300);
    EXPECT(first.across && first.rows == 90 && first.cols == 100 && first.stride == 128);
    EXPECT(!second.across && second.stride == 320 && second.gram_stride == 64);
    EXPECT(muon_room_elems(&first) > muon_room_elems(&second));
    EXPECT_EQ(muon_room(8, 256).stride, 288); /* not 1 KiB apart */
    EXPECT_EQ(one->scratch_elems,
              whole_head_elems(2) + spec->units[0].elems + muon_room_elems(&first));
    EXPECT_EQ(shardmap_scratch_elem(one),
              shardmap_kept_bytes(one) / sizeof(float) + one->train_elems);
    EXPECT(shardmap_state_bytes(one) >=
           (shardmap_scratch_elem(one) + one->scratch_elems) * sizeof(float));
    EXPECT(none->scratch_elems == 0 && one->trails == 4 && none->trails == 4);
    shardmap_free(one);
    shardmap_free(none);
    spec_free(spec);
}

/* A matrix of 512 x 256 has no moments, and its statistics have 768 elements in a block. */
TEST(adafactors_units_have_no_moments)
{
    static const char *const frame =
        "{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},'groups':["
        "{'name':'w'},{'name':'x'%s}],'units':["
        "{'name':'a','tensors':[{'name':'1','shape':[512,256],'group':'x'}]},"
        "{'name':'b','tensors':[{'name':'2','shape':[5000],'group':'w'}]}]}";
    struct spec *spec = parse(quoted(frame, ",'optimizer':{'kind':'adafactor'}"));
    struct spec *plain = parse(quoted(frame, ""));
    struct shardmap *map = map_of(spec, 0, 1), *all = map_of(plain, 0, 1);
    const uint64_t elems = 512 * 256, b = 3 * SHD_BLOCK_ELEMS;
    EXPECT_EQ(shardmap_kept_bytes(all), 12 * (elems + b));
    EXPECT_EQ(shardmap_kept_bytes(map), 4 * (elems + SHD_BLOCK_ELEMS) + 12 * b);
    EXPECT_EQ(shardmap_array_elem(map, SHARDMAP_M, 1), elems + SHD_BLOCK_ELEMS + b);
    EXPECT(map->train_base[1] == 0 && map->train_base[0] == b && map->moment_elems == b);
    EXPECT_EQ(map->scratch_elems, whole_head_elems(1) + spec->units[0].elems);
    shardmap_free(map);
    shardmap_free(all);
    spec_free(spec);
    spec_free(plain);
}

TEST_MAIN()
