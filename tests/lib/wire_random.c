#include "tests/lib/wire_random.h"

#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

/* Often an extreme, else anything in between. */
static uint64_t random_u64(uint64_t *seed, uint64_t min, uint64_t max)
{
    const uint64_t how = test_random(seed) % 4;
    if (how == 0)
        return min;
    if (how == 1)
        return max;
    const uint64_t span = max - min;
    return span == UINT64_MAX ? test_random(seed) : min + test_random(seed) % (span + 1);
}

static uint32_t random_u32(uint64_t *seed, uint32_t min, uint32_t max)
{
    return (uint32_t)random_u64(seed, min, max);
}

static const char *random_name(uint64_t *seed, char text[WIRE_NAME_BYTES_MAX])
{
    const uint32_t bytes = random_u32(seed, 0, WIRE_NAME_BYTES_MAX - 1);
    for (uint32_t i = 0; i < bytes; i++)
        text[i] = (char)(0x20 + test_random(seed) % 95);
    text[bytes] = 0;
    return text;
}

static const char *random_path(uint64_t *seed)
{
    static char path[WIRE_PATH_BYTES_MAX];
    const uint32_t bytes = random_u32(seed, 1, WIRE_PATH_BYTES_MAX - 1);
    path[0] = '/';
    for (uint32_t i = 1; i < bytes; i++)
        path[i] = (char)(0x80 * (test_random(seed) % 2) + 0x20 + test_random(seed) % 95);
    path[bytes] = 0;
    return path;
}

/* Up to max bytes out of a static pool, mostly few. */
static struct wire_bytes random_bytes(uint64_t *seed, size_t max, size_t multiple)
{
    static uint8_t pool[WIRE_FRAME_BYTES_MAX];
    if (pool[1] == 0)
        for (size_t i = 0; i < sizeof pool; i++)
            pool[i] = (uint8_t)(i * 7 + i / 251);
    const size_t small = max < 100 ? max : 100;
    const size_t bytes = (size_t)random_u64(seed, 0, test_random(seed) % 64 == 0 ? max : small);
    return (struct wire_bytes){ .data = pool, .bytes = bytes / multiple * multiple };
}

static uint32_t random_metrics(uint64_t *seed, double metrics[WIRE_METRICS_MAX])
{
    static const double special[] = { 0, -0.0, INFINITY, -INFINITY, 0x1p-1074, 1.5, -0x1.8p1023 };
    const uint32_t count = random_u32(seed, 0, WIRE_METRICS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t raw = test_random(seed); /* NaNs with payload too */
        memcpy(&metrics[i], &raw, sizeof raw);
        if (test_random(seed) % 2 == 0)
            metrics[i] = special[test_random(seed) % 7];
    }
    return count;
}

static struct decision random_decision(uint64_t *seed)
{
    static const double special[] = { 0, 0x1p-149, 1, 0x1.fffffep127 };
    return (struct decision){ .skip = test_random(seed) % 2 != 0,
                              .scale = (float)special[test_random(seed) % 4],
                              .lr = special[test_random(seed) % 4] * 0x1p-900,
                              .loss_scale = special[test_random(seed) % 4],
                              .good_steps = (uint32_t)test_random(seed) };
}

static void random_return(uint64_t *seed, struct wire_return *t)
{
    *t = (struct wire_return){ .model = random_u32(seed, 0, UINT32_MAX),
                               .step = random_u64(seed, 0, UINT64_MAX),
                               .micro = random_u32(seed, 0, SHD_MICROS_MAX - 1),
                               .unit = random_u32(seed, 0, SHD_UNITS_MAX - 1),
                               .slot = random_u32(seed, 0, SHD_SLOTS_MAX - 1),
                               .dtype = (enum shd_dtype)random_u32(seed, SHD_F32, SHD_F16),
                               .none = test_random(seed) % 2 != 0,
                               .turn = random_u64(seed, 0, UINT64_MAX) };
    t->metric_count = random_metrics(seed, t->metrics);
}

static void random_hello(uint64_t *seed, struct wire_hello *h, char name[WIRE_NAME_BYTES_MAX])
{
    h->protocol = random_u32(seed, 0, UINT32_MAX);
    h->role = (enum wire_role)random_u32(seed, WIRE_TRAINER, WIRE_ADMIN);
    for (unsigned i = 0; i < WIRE_TOKEN_BYTES; i++)
        h->token[i] = (uint8_t)test_random(seed);
    h->name = random_name(seed, name);
}

static void random_restore(uint64_t *seed, struct wire_restore *r)
{
    *r = (struct wire_restore){ .path = random_path(seed),
                                .spec = random_bytes(seed, SPEC_JSON_BYTES_MAX, 1),
                                .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                                .weights = test_random(seed) % 2 != 0 };
    r->open = random_u32(seed, 0, 1) != 0;
    r->spec.bytes += r->spec.bytes == 0;
    r->owner = random_u32(seed, 0, r->owners - 1);
}

static void random_commit(uint64_t *seed, struct wire_commit *c)
{
    c->model = random_u32(seed, 0, UINT32_MAX);
    c->step = random_u64(seed, 0, UINT64_MAX);
    c->decision = random_decision(seed);
    c->has_blob = test_random(seed) % 2 != 0;
    if (c->has_blob)
        c->blob = random_bytes(seed, WIRE_BLOB_BYTES_MAX, 1);
}

static void random_join(uint64_t *seed, struct wire_join *j)
{
    j->model = random_u32(seed, 0, UINT32_MAX);
    j->timeout_ms = random_u64(seed, 0, UINT64_MAX);
    for (unsigned i = 0; i < WIRE_LINK_ID_BYTES; i++) {
        j->down[i] = (uint8_t)test_random(seed);
        j->up[i] = (uint8_t)test_random(seed);
    }
}

struct wire_request random_request(uint64_t *seed, enum wire_request_type type,
                                   char name[WIRE_NAME_BYTES_MAX])
{
    struct wire_request q = { .seq = random_u64(seed, 0, UINT64_MAX),
                              .session = random_u64(seed, 0, UINT64_MAX),
                              .type = type };
    switch (type) {
    case WIRE_HELLO:
        random_hello(seed, &q.hello, name);
        break;
    case WIRE_OPEN_MODEL:
        q.open_model.spec = random_bytes(seed, SPEC_JSON_BYTES_MAX, 1);
        q.open_model.name = random_name(seed, name);
        q.open_model.owners = random_u32(seed, 1, SHD_OWNERS_MAX);
        q.open_model.owner = random_u32(seed, 0, q.open_model.owners - 1);
        q.open_model.slots = random_u32(seed, 0, SHD_SLOTS_MAX);
        break;
    case WIRE_RETURN:
        random_return(seed, &q.return_grad);
        break;
    case WIRE_PREPARE:
        q.prepare.model = random_u32(seed, 0, UINT32_MAX);
        q.prepare.step = random_u64(seed, 0, UINT64_MAX);
        break;
    case WIRE_COMMIT:
        random_commit(seed, &q.commit);
        break;
    case WIRE_GET_BLOB:
        q.get_blob.model = random_u32(seed, 0, UINT32_MAX);
        break;
    case WIRE_DIGEST:
        q.digest.model = random_u32(seed, 0, UINT32_MAX);
        q.digest.tensor = random_u32(seed, 0, SHD_TENSORS_MAX - 1);
        q.digest.array = random_u32(seed, 0, 2);
        q.digest.first_leaf = random_u64(seed, 0, UINT64_MAX);
        break;
    case WIRE_LEASE:
        q.lease = (struct wire_lease){ random_u32(seed, 0, UINT32_MAX),
                                       random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_CHECKPOINT:
        q.checkpoint = (struct wire_checkpoint){ random_u32(seed, 0, UINT32_MAX),
                                                 random_u64(seed, 0, UINT64_MAX),
                                                 random_path(seed) };
        break;
    case WIRE_RESTORE:
        random_restore(seed, &q.restore);
        break;
    case WIRE_DRAIN:
        q.drain.off = random_u32(seed, 0, 1) != 0;
        break;
    case WIRE_JOIN:
        random_join(seed, &q.join);
        break;
    case WIRE_FETCH:
        q.fetch = (struct wire_fetch){ .model = random_u32(seed, 0, UINT32_MAX),
                                       .unit = random_u32(seed, 0, SHD_UNITS_MAX - 1),
                                       .step = random_u64(seed, 0, UINT64_MAX),
                                       .turn = random_u64(seed, 1, UINT64_MAX) };
        break;
    case WIRE_STATUS:
    case WIRE_DETACH:
    case WIRE_REQUEST_TYPES:
        break;
    }
    return q;
}

static void random_layout(uint64_t *seed, struct wire_layout *l)
{
    *l = (struct wire_layout){ .model = random_u32(seed, 0, UINT32_MAX),
                               .step = random_u64(seed, 0, UINT64_MAX),
                               .spec = random_bytes(seed, SPEC_JSON_BYTES_MAX, 1),
                               .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                               .slots = random_u32(seed, 0, SHD_SLOTS_MAX),
                               .slot_bytes = random_u64(seed, 0, UINT64_C(1) << 44) * 4096,
                               .segment_count = random_u32(seed, 0, WIRE_SEGMENTS_MAX),
                               .has_decision = test_random(seed) % 2 != 0,
                               .in = random_bytes(seed, SHD_MICROS_MAX / 8, 1) };
    if (test_random(seed) % 2 != 0)
        l->device = (struct wire_bytes){ (const uint8_t *)"UUID of a device", WIRE_DEVICE_BYTES };
    if (l->has_decision)
        l->decision = random_decision(seed);
    l->owner = random_u32(seed, 0, l->owners - 1);
    for (uint32_t i = 0; i < l->segment_count; i++)
        l->segments[i] = (struct wire_segment){
            .kind = (enum segment_kind)random_u32(seed, SEGMENT_STATE, SEGMENT_BOARD),
            .ticket = random_u64(seed, 0, UINT64_MAX),
            .bytes = random_u64(seed, 1, UINT64_C(1) << 50) * 4096,
            .place = (enum segment_place)random_u32(seed, SEGMENT_HOST, SEGMENT_CUDA),
        };
}

static void random_prepared(uint64_t *seed, struct wire_prepared *p)
{
    *p = (struct wire_prepared){ .step = random_u64(seed, 0, UINT64_MAX),
                                 .finite = test_random(seed) % 2 != 0,
                                 .over = test_random(seed) % 2 != 0,
                                 .has_decision = test_random(seed) % 2 != 0 };
    for (int i = 0; i < FIXSUM_LIMBS - 1; i++)
        p->sum.limb[i] = random_u64(seed, 0, UINT32_MAX);
    p->metric_count = random_metrics(seed, p->metrics);
    if (p->has_decision)
        p->decision = random_decision(seed);
}

struct wire_reply random_reply(uint64_t *seed, enum wire_reply_type type,
                               char name[WIRE_NAME_BYTES_MAX])
{
    struct wire_reply p = { .seq = random_u64(seed, 0, UINT64_MAX), .text = "", .type = type };
    if (test_random(seed) % 2 == 0) {
        p.status = -(int)random_u32(seed, 1, 16);
        p.text = "owner 3: step is 4, the open step is 5";
    }
    switch (type) {
    case WIRE_WELCOME:
        p.welcome = (struct wire_welcome){ random_u64(seed, 0, UINT64_MAX),
                                           random_name(seed, name) };
        break;
    case WIRE_LAYOUT:
        random_layout(seed, &p.layout);
        break;
    case WIRE_PREPARED:
        random_prepared(seed, &p.prepared);
        break;
    case WIRE_COMMITTED:
        p.committed = (struct wire_committed){ .step = random_u64(seed, 0, UINT64_MAX),
                                               .over = test_random(seed) % 2 != 0,
                                               .decision = random_decision(seed) };
        break;
    case WIRE_BLOB:
        p.blob = (struct wire_blob){ random_u64(seed, 0, UINT64_MAX),
                                     random_bytes(seed, WIRE_BLOB_BYTES_MAX, 1) };
        break;
    case WIRE_LEAVES:
        p.leaves = (struct wire_leaves){ .step = random_u64(seed, 0, UINT64_MAX),
                                         .updates = random_u64(seed, 0, UINT64_MAX),
                                         .total = random_u64(seed, 0, UINT64_MAX),
                                         .leaves = random_bytes(seed, WIRE_LEAVES_MAX * 32, 32) };
        break;
    case WIRE_STATUS_TEXT:
        p.status_text.json = random_bytes(seed, WIRE_FRAME_BYTES_MAX - 1000, 1);
        break;
    case WIRE_CREDIT:
        p.credit = (struct wire_credit){ random_u32(seed, 0, SHD_SLOTS_MAX - 1),
                                         test_random(seed) % 2 != 0 };
        break;
    case WIRE_LEASED:
        p.leased = (struct wire_leased){ .step = random_u64(seed, 0, UINT64_MAX),
                                         .what = (enum wire_leased_what)random_u32(seed, 1, 3),
                                         .group = random_u32(seed, 0, SHD_MICROS_MAX - 1) };
        break;
    case WIRE_CHECKPOINTED:
        p.checkpointed = (struct wire_checkpointed){ .step = random_u64(seed, 0, UINT64_MAX),
                                                     .updates = random_u64(seed, 0, UINT64_MAX),
                                                     .bytes = random_u64(seed, 0, UINT64_MAX),
                                                     .has_decision = test_random(seed) % 2 != 0 };
        p.checkpointed.blob = random_bytes(seed, WIRE_BLOB_BYTES_MAX, 1);
        if (p.checkpointed.has_decision)
            p.checkpointed.decision = random_decision(seed);
        break;
    case WIRE_RESTORED:
        p.restored = (struct wire_restored){ random_u64(seed, 0, UINT64_MAX),
                                             random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_FETCHED:
        p.fetched = (struct wire_fetched){ random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_REPLY_NONE:
        break;
    }
    return p;
}

struct wire_arena arena_new(size_t bytes)
{
    struct wire_arena a = { .base = NULL, .bytes = bytes };
    if (posix_memalign((void **)&a.base, 16, bytes > 0 ? bytes : 16) != 0)
        abort();
    return a;
}
