/* A sweep takes each byte once, and before the first update of its unit, in whatever order these
 * come.
 */
#include "daemon/core/sweep.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

#define UNITS_MAX 12u
#define ROUNDS    400u

static uint64_t below(uint64_t *seed, uint64_t limit)
{
    return test_random(seed) % limit;
}

static struct spec *random_spec(uint64_t *seed, uint32_t units)
{
    static const char *const publishes[] = { "f32", "bf16" };
    char json[4096];
    struct spec *spec = NULL;
    struct shd_err e = { 0 };
    int at = snprintf(json, sizeof json,
                      "{\"name\":\"m\",\"micro_batches\":1,\"publish\":\"%s\","
                      "\"optimizer\":{\"kind\":\"sgd\"},\"units\":[",
                      publishes[below(seed, 2)]);
    for (uint32_t u = 0; u < units; u++)
        at += snprintf(json + at, sizeof json - (size_t)at,
                       "%s{\"name\":\"u%" PRIu32 "\",\"tensors\":[{\"name\":\"t%" PRIu32
                       "\",\"shape\":[%" PRIu64 "]}]}",
                       u > 0 ? "," : "", u, u, 1 + below(seed, 20000));
    snprintf(json + at, sizeof json - (size_t)at, "]}");
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

struct taking {
    const struct shardmap *map;
    struct sweep sweep;
    uint8_t *taken;          /* [bytes of publish] how often */
    bool updated[UNITS_MAX]; /* from then on nothing of the unit may be taken */
};

static void take(struct taking *t, struct sweep_range range)
{
    EXPECT(range.bytes > 0 && range.at_bytes + range.bytes <= shardmap_publish_bytes(t->map));
    for (uint64_t i = 0; i < range.bytes; i++)
        t->taken[range.at_bytes + i]++;
    for (uint32_t u = 0; u < t->map->units; u++) {
        const uint64_t begin = shardmap_publish_offset_bytes(t->map, u);
        const uint64_t end = begin + shardmap_publish_slice_bytes(t->map, u);
        const bool is_in = range.at_bytes < end && begin < range.at_bytes + range.bytes;
        if (t->updated[u] && begin < end && is_in)
            FAIL("unit %" PRIu32 " is taken after its update", u);
    }
}

static void update(struct taking *t, uint32_t unit)
{
    const struct sweep_range rest = sweep_rest(&t->sweep, unit);
    if (rest.bytes > 0) {
        take(t, rest);
        sweep_took_rest(&t->sweep, unit);
    }
    EXPECT_EQ(sweep_rest(&t->sweep, unit).bytes, 0);
    const uint64_t begin = shardmap_publish_offset_bytes(t->map, unit);
    for (uint64_t i = 0; i < shardmap_publish_slice_bytes(t->map, unit); i++)
        EXPECT_EQ(t->taken[begin + i], 1);
    t->updated[unit] = true;
}

static void take_all(uint64_t *seed, struct taking *t)
{
    struct sweep_range range;
    sweep_begin(&t->sweep);
    memset(t->updated, 0, sizeof t->updated);
    memset(t->taken, 0, shardmap_publish_bytes(t->map));
    for (bool more = true; more;) {
        if (below(seed, 4) == 0)
            update(t, (uint32_t)below(seed, t->map->units));
        more = sweep_next(&t->sweep, 1 + below(seed, 30000), &range);
        if (more && below(seed, 5) > 0) { /* else there was no room for it */
            take(t, range);
            sweep_took(&t->sweep, range.bytes);
        }
    }
    for (uint32_t u = 0; u < t->map->units; u++)
        update(t, u);
}

TEST(each_byte_is_taken_once_before_its_update)
{
    uint64_t seed = 7;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct shd_err e = { 0 };
        const uint32_t owners = 1 + (uint32_t)below(&seed, 4);
        struct spec *spec = random_spec(&seed, 1 + (uint32_t)below(&seed, UNITS_MAX));
        struct shardmap *map;
        EXPECT_OK(shardmap_new(spec, (uint32_t)below(&seed, owners), owners, &map, &e), &e);
        struct taking t = { .map = map, .taken = malloc(shardmap_publish_bytes(map)) };
        EXPECT_OK(sweep_init(&t.sweep, map, &e), &e);
        take_all(&seed, &t);
        take_all(&seed, &t); /* again, by the same */
        sweep_deinit(&t.sweep);
        sweep_deinit(&t.sweep);
        free(t.taken);
        shardmap_free(map);
        spec_free(spec);
    }
}

TEST_MAIN()
