#include "tests/lib/proto_util.h"

#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/tally.h"
#include "proto/share/unit_row.h"
#include "proto/spec/guard.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"
#include "proto/spec/spec.h"

struct spec *parse(const char *json)
{
    struct shd_err e;
    struct spec *spec = NULL;
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

char *quoted(const char *fmt, ...)
{
    static char text[20000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *p = text; *p != 0; p++)
        if (*p == '\'')
            *p = '"';
    return text;
}

int fds_open(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

struct side_msg msg_of(uint32_t type)
{
    return (struct side_msg){
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = type, .ticket = 42
    };
}

void pair_new(int ret_fds[2])
{
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ret_fds) == 0);
}

void pair_free(const int fds[2])
{
    close(fds[0]);
    close(fds[1]);
}

int child_status(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

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
    return (struct decision){
        .skip = test_random(seed) % 2 != 0,
        .scale = (float)special[test_random(seed) % 4],
        .lr = special[test_random(seed) % 4] * 0x1p-900,
        .loss_scale = special[test_random(seed) % 4],
        .good_steps = (uint32_t)test_random(seed),
        .divisor = special[test_random(seed) % 4],
        .rate_count = 8,
        .rates = { 1e-3, NAN, 0.9, NAN, 0, 0.1, special[1], NAN },
        .guard = { .what = random_u32(seed, 0, GUARD_WHAT_END - 1),
                   .stop = test_random(seed) % 2 != 0,
                   .rewind = test_random(seed) % 2 != 0,
                   .value = test_random(seed) % 4 == 0 ? NAN : special[test_random(seed) % 4],
                   .bound = 0.0 - special[test_random(seed) % 4] },
        .cause = { .unit = random_u32(seed, 0, SHD_UNITS_MAX),
                   .norm = test_random(seed) % 4 == 0 ? INFINITY : special[test_random(seed) % 4],
                   .group = random_u32(seed, 0, SHD_MICROS_MAX),
                   .share = (float)special[test_random(seed) % 4] },
        .micro_batches = random_u32(seed, 0, SHD_MICROS_MAX),
        .eps_count = random_u32(seed, 0, 2),
        .eps = { NAN, 1e-6 }
    };
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
                               .turn = random_u64(seed, 0, UINT64_MAX),
                               .attempt = random_u64(seed, 0, UINT64_MAX),
                               .metric_names = test_random(seed) % 2 != 0 ? "loss, a" : "" };
    t->metric_count = random_metrics(seed, t->metrics);
}

static void random_hello(uint64_t *seed, struct wire_hello *h, char name[WIRE_NAME_BYTES_MAX])
{
    h->protocol = random_u32(seed, 0, UINT32_MAX);
    h->role = (enum wire_role)random_u32(seed, WIRE_TRAINER, WIRE_ADMIN);
    for (unsigned i = 0; i < WIRE_TOKEN_BYTES; i++)
        h->token[i] = (uint8_t)test_random(seed);
    h->name = random_name(seed, name);
    h->rank = random_u32(seed, 0, UINT32_MAX);
    h->level = random_u32(seed, 0, UINT32_MAX);
    h->view = random_u64(seed, 0, UINT64_MAX);
}

static struct wire_spec_at random_spec_at(uint64_t *seed)
{
    struct wire_spec_at at = { 0 };
    if (test_random(seed) % 2 == 0)
        return at;
    at.ticket = random_u64(seed, 0, UINT64_MAX);
    at.bytes = random_u64(seed, 0, SPEC_JSON_BYTES_MAX);
    if (test_random(seed) % 2 == 0)
        at.sum = (struct wire_bytes){ (const uint8_t *)"SHA-256 of JSON, of 32 bytes all", 32 };
    return at;
}

static void random_restore(uint64_t *seed, struct wire_restore *r)
{
    *r = (struct wire_restore){ .path = random_path(seed),
                                .spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1),
                                .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                                .weights = test_random(seed) % 2 != 0 };
    r->open = random_u32(seed, 0, 1) != 0;
    r->replace = random_u32(seed, 0, 1) != 0;
    r->force = random_u32(seed, 0, 1) != 0;
    r->beside = random_u64(seed, 0, UINT64_MAX);
    r->restore_id = random_u64(seed, 0, UINT64_MAX);
    r->spec_at = random_spec_at(seed);
    r->one_count = random_u32(seed, 0, 1) != 0;
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
    c->attempt = random_u64(seed, 0, UINT64_MAX);
    c->unit_norms = random_bytes(seed, GUARD_COLUMNS_MAX * sizeof(double), sizeof(double));
    c->recorded = test_random(seed) % 2 != 0;
    c->norm = random_u32(seed, 0, 3) > 0 ? (double)random_u32(seed, 0, UINT32_MAX) : NAN;
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

static void random_open_model(uint64_t *seed, struct wire_open_model *o,
                              char name[WIRE_NAME_BYTES_MAX])
{
    o->spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1);
    o->name = random_name(seed, name);
    o->origin = random_u64(seed, 0, UINT64_MAX);
    o->settled = random_u32(seed, 0, 1) == 1;
    o->owners = random_u32(seed, 1, SHD_OWNERS_MAX);
    o->owner = random_u32(seed, 0, o->owners - 1);
    o->slots = random_u32(seed, 0, SHD_SLOTS_MAX);
    o->spec_at = random_spec_at(seed);
    o->spec_apart = random_u32(seed, 0, 1) == 1;
    o->one_count = random_u32(seed, 0, 1) == 1;
    o->first = random_u64(seed, 0, UINT64_MAX);
    o->twin = random_u32(seed, 0, 1) == 1;
}

static void random_create(uint64_t *seed, struct wire_create *c, char name[WIRE_NAME_BYTES_MAX])
{
    *c = (struct wire_create){ .what = (enum wire_create_what)random_u32(seed, 1, 4),
                               .origin = random_u64(seed, 1, UINT64_MAX),
                               .name = random_name(seed, name),
                               .spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1) };
    c->owners = random_u32(seed, 1, SHD_OWNERS_MAX);
    c->consent = random_u64(seed, 0, UINT64_MAX);
    c->attempt = random_u64(seed, 0, UINT64_MAX);
    c->spec_at = random_spec_at(seed);
    c->unit_updates = random_bytes(seed, 8 * SHD_UNITS_MAX / 4, 8); /* beside it */
    c->one_count = random_u32(seed, 0, 1) == 1;
    c->twin = random_u32(seed, 0, 1) == 1;
    c->owner = random_u32(seed, 0, c->owners - 1);
}

static void random_digest(uint64_t *seed, struct wire_digest *d)
{
    d->model = random_u32(seed, 0, UINT32_MAX);
    d->tensor = random_u32(seed, 0, SHD_TENSORS_MAX - 1);
    d->array = random_u32(seed, 0, 2);
    d->first_leaf = random_u64(seed, 0, UINT64_MAX);
    d->tensors = random_u32(seed, 0, SHD_TENSORS_MAX);
}

static struct wire_lease random_lease(uint64_t *seed)
{
    return (struct wire_lease){ random_u32(seed, 0, UINT32_MAX),
                                random_u64(seed, 0, UINT64_MAX),
                                random_u32(seed, 0, 1) != 0,
                                random_u32(seed, 0, 1) != 0,
                                random_u32(seed, 0, SHD_MICROS_MAX - 1),
                                random_u64(seed, 0, UINT64_MAX),
                                random_u32(seed, 0, SHD_MICROS_MAX) };
}

static struct wire_fetch random_fetch(uint64_t *seed)
{
    return (struct wire_fetch){ .model = random_u32(seed, 0, UINT32_MAX),
                                .unit = random_u32(seed, 0, SHD_UNITS_MAX - 1),
                                .step = random_u64(seed, 0, UINT64_MAX),
                                .turn = random_u64(seed, 1, UINT64_MAX) };
}

static struct wire_reset random_reset(uint64_t *seed)
{
    return (struct wire_reset){ random_u32(seed, 0, UINT32_MAX), random_u64(seed, 0, UINT64_MAX),
                                random_u64(seed, 2, UINT64_MAX), random_u32(seed, 0, 1) != 0 };
}

static struct wire_history random_history(uint64_t *seed)
{
    return (struct wire_history){ random_u32(seed, 0, UINT32_MAX), random_u64(seed, 0, UINT64_MAX),
                                  random_u32(seed, 1, WIRE_ROWS_MAX),
                                  random_u32(seed, 0, SHD_UNITS_MAX) };
}

static struct wire_get random_get(uint64_t *seed)
{
    return (struct wire_get){ random_u32(seed, 0, UINT32_MAX),
                              random_u32(seed, 0, SHD_UNITS_MAX - 1), random_u32(seed, 0, 2) };
}

static void random_prepare(uint64_t *seed, struct wire_prepare *p)
{
    p->model = random_u32(seed, 0, UINT32_MAX);
    p->unit_sums = random_u32(seed, 0, SHD_UNITS_MAX);
    p->part_sums = random_u32(seed, 0, SHD_MICROS_MAX);
    p->step = random_u64(seed, 0, UINT64_MAX);
    p->attempt = random_u64(seed, 0, UINT64_MAX);
}

static struct wire_show random_show(uint64_t *seed)
{
    return (struct wire_show){ .model = random_u32(seed, 0, UINT32_MAX),
                               .tensor = random_u32(seed, 0, SHD_TENSORS_MAX - 1),
                               .array = (enum wire_show_array)random_u32(seed, WIRE_SHOW_PARAM,
                                                                         WIRE_SHOW_UPDATE),
                               .first = random_u64(seed, 0, UINT64_MAX),
                               .elems = random_u64(seed, 1, SHD_MODEL_ELEMS_MAX),
                               .values = random_u32(seed, 0, 1) == 1 };
}

#define MORE_MAX (SETTINGS_MAX - SETTINGS_OLD_MAX)
static struct wire_set random_set(uint64_t *seed)
{
    return (struct wire_set){ .model = random_u32(seed, 0, UINT32_MAX),
                              .change = random_bytes(seed, SETTINGS_OLD_MAX * sizeof(double),
                                                     sizeof(double)),
                              .more = random_bytes(seed, MORE_MAX * sizeof(double), sizeof(double)),
                              .from = random_u64(seed, 0, UINT64_MAX),
                              .id = random_u64(seed, 0, UINT64_MAX),
                              .look = random_u32(seed, 0, 1) != 0,
                              .go_on = random_u32(seed, 0, 1) != 0 };
}

static void random_drop(uint64_t *seed, struct wire_drop *d, char name[WIRE_NAME_BYTES_MAX])
{
    *d = (struct wire_drop){ .what = (enum wire_drop_what)random_u32(seed, 1, 4),
                             .name = random_name(seed, name),
                             .first = random_u64(seed, 0, UINT64_MAX),
                             .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                             .force = random_u32(seed, 0, 1) == 1,
                             .twin = random_u32(seed, 0, 1) == 1 };
    d->owner = random_u32(seed, 0, d->owners - 1);
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
        random_open_model(seed, &q.open_model, name);
        break;
    case WIRE_RETURN:
        random_return(seed, &q.return_grad);
        break;
    case WIRE_PREPARE:
        random_prepare(seed, &q.prepare);
        break;
    case WIRE_COMMIT:
        random_commit(seed, &q.commit);
        break;
    case WIRE_GET_BLOB:
        q.get_blob.model = random_u32(seed, 0, UINT32_MAX);
        break;
    case WIRE_DIGEST:
        random_digest(seed, &q.digest);
        break;
    case WIRE_LEASE:
        q.lease = random_lease(seed);
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
        q.fetch = random_fetch(seed);
        break;
    case WIRE_HISTORY:
        q.history = random_history(seed);
        break;
    case WIRE_CREATE:
        random_create(seed, &q.create, name);
        break;
    case WIRE_PUT:
        q.put = (struct wire_put){ random_u64(seed, 1, UINT64_MAX),
                                   random_u32(seed, 0, SHD_UNITS_MAX - 1) };
        break;
    case WIRE_GET:
        q.get = random_get(seed);
        break;
    case WIRE_RESET:
        q.reset = random_reset(seed);
        break;
    case WIRE_PIN:
        q.pin = (struct wire_pin){ random_u32(seed, 0, UINT32_MAX), random_u64(seed, 0, UINT64_MAX),
                                   random_u32(seed, 0, 1) == 1 };
        break;
    case WIRE_UNPIN:
        q.unpin.model = random_u32(seed, 0, UINT32_MAX);
        break;
    case WIRE_SHOW:
        q.show = random_show(seed);
        break;
    case WIRE_DROP:
        random_drop(seed, &q.drop, name);
        break;
    case WIRE_FORK:
        q.fork = (struct wire_fork){ .origin = random_u64(seed, 1, UINT64_MAX),
                                     .model = random_u32(seed, 0, UINT32_MAX),
                                     .step = random_u64(seed, 0, UINT64_MAX),
                                     .settings = random_set(seed).change,
                                     .settings_more = random_set(seed).more };
        break;
    case WIRE_SET:
        q.set = random_set(seed);
        break;
    case WIRE_SNAPSHOT:
        q.snapshot = (struct wire_snapshot){ random_u32(seed, 0, UINT32_MAX),
                                             (enum wire_snapshot_what)random_u32(seed, 1, 3),
                                             random_u64(seed, 0, UINT64_MAX),
                                             random_u64(seed, 0, UINT64_MAX),
                                             random_u32(seed, 0, WIRE_SNAPSHOTS_MAX - 1) };
        break;
    case WIRE_REWIND:
        q.rewind = (struct wire_rewind){ random_u32(seed, 0, UINT32_MAX),
                                         random_u64(seed, 0, UINT64_MAX),
                                         (enum wire_rewind_what)random_u32(seed, 1, 3),
                                         random_u64(seed, 0, UINT64_MAX),
                                         random_u64(seed, 0, UINT64_MAX),
                                         test_random(seed) % 2 != 0 };
        break;
    case WIRE_MOVE:
        q.move = (struct wire_move){ .what = (enum wire_move_what)random_u32(seed, 1, 3),
                                     .name = random_name(seed, name),
                                     .to = "cpu0,cpu1",
                                     .step = random_u64(seed, 0, UINT64_MAX),
                                     .id = random_u64(seed, 0, UINT64_MAX),
                                     .path = "/somewhere" };
        break;
    case WIRE_STATUS:
    case WIRE_DETACH:
    case WIRE_OPEN_RING:
    case WIRE_REQUEST_TYPES:
        break;
    }
    return q;
}

static void random_layout(uint64_t *seed, struct wire_layout *l)
{
    *l = (struct wire_layout){ .model = random_u32(seed, 0, UINT32_MAX),
                               .step = random_u64(seed, 0, UINT64_MAX),
                               .origin = random_u64(seed, 0, UINT64_MAX),
                               .spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1),
                               .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                               .slots = random_u32(seed, 0, SHD_SLOTS_MAX),
                               .slot_bytes = random_u64(seed, 0, UINT64_C(1) << 44) * 4096,
                               .segment_count = random_u32(seed, 0, WIRE_SEGMENTS_MAX),
                               .has_decision = test_random(seed) % 2 != 0,
                               .in = random_bytes(seed, SHD_MICROS_MAX / 8, 1),
                               .restore_id = random_u64(seed, 0, UINT64_MAX),
                               .twin_pid = random_u32(seed, 0, UINT32_MAX),
                               .spec_bytes = random_u64(seed, 0, SPEC_JSON_BYTES_MAX),
                               .one_count = random_u32(seed, 0, 1) == 1,
                               .instance = random_u64(seed, 0, UINT64_MAX),
                               .room = random_u32(seed, 0, SHD_MICROS_MAX),
                               .first = random_u64(seed, 0, UINT64_MAX) };
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
                                 .has_decision = test_random(seed) % 2 != 0,
                                 .reported = random_u32(seed, 0, SHD_MICROS_MAX) };
    for (int i = 0; i < FIXSUM_LIMBS - 1; i++)
        p->sum.limb[i] = random_u64(seed, 0, UINT32_MAX);
    p->metric_count = random_metrics(seed, p->metrics);
    p->settings = random_bytes(seed, SETTINGS_OLD_MAX * sizeof(double), sizeof(double));
    p->settings_more = random_bytes(seed, MORE_MAX * sizeof(double), sizeof(double));
    p->guard = random_bytes(seed, sizeof(((struct guard_limits *)0)->numbers),
                            GUARD_LIMIT_NUMBERS * sizeof(double));
    p->unit_sums = random_bytes(seed, WIRE_UNIT_SUMS_MAX * FIXSUM_BYTES, FIXSUM_BYTES);
    p->unit_sums_from = random_u32(seed, 0, SHD_UNITS_MAX);
    p->part_sums_from = random_u32(seed, 0, SHD_MICROS_MAX);
    p->unit_limits = random_bytes(seed, WIRE_UNIT_SUMS_MAX * GUARD_RULES_MAX * sizeof(double),
                                  sizeof(double));
    p->unit_norms = random_bytes(seed, GUARD_COLUMNS_MAX * sizeof(double), sizeof(double));
    if (p->has_decision)
        p->decision = random_decision(seed);
}

static struct wire_leaves random_leaves(uint64_t *seed)
{
    return (struct wire_leaves){ .step = random_u64(seed, 0, UINT64_MAX),
                                 .updates = random_u64(seed, 0, UINT64_MAX),
                                 .total = random_u64(seed, 0, UINT64_MAX),
                                 .leaves = random_bytes(seed, WIRE_LEAVES_MAX * 32, 32) };
}

static void random_checkpointed(uint64_t *seed, struct wire_checkpointed *c)
{
    *c = (struct wire_checkpointed){ .step = random_u64(seed, 0, UINT64_MAX),
                                     .updates = random_u64(seed, 0, UINT64_MAX),
                                     .bytes = random_u64(seed, 0, UINT64_MAX),
                                     .has_decision = test_random(seed) % 2 != 0 };
    c->blob = random_bytes(seed, WIRE_BLOB_BYTES_MAX, 1);
    c->unit_updates = random_bytes(seed, 8 * SHD_UNITS_MAX / 4, 8); /* beside it */
    c->settings = random_bytes(seed, 4096, 1);
    if (c->has_decision)
        c->decision = random_decision(seed);
}

static struct wire_created random_created(uint64_t *seed, char name[WIRE_NAME_BYTES_MAX])
{
    return (struct wire_created){ (enum wire_created_what)random_u32(seed, 1, 5),
                                  random_u64(seed, 0, UINT64_MAX),
                                  random_u64(seed, 0, 1000) * SHD_PAGE_BYTES,
                                  random_name(seed, name), random_u64(seed, 0, UINT64_MAX) };
}

static struct wire_got random_got(uint64_t *seed)
{
    return (struct wire_got){ random_u64(seed, 0, UINT64_MAX), random_u64(seed, 0, UINT64_MAX),
                              random_u64(seed, 0, UINT64_MAX),
                              random_u64(seed, 1, 1000) * SHD_PAGE_BYTES };
}

static struct wire_committed random_committed(uint64_t *seed)
{
    return (struct wire_committed){ .step = random_u64(seed, 0, UINT64_MAX),
                                    .over = test_random(seed) % 2 != 0,
                                    .decision = random_decision(seed) };
}

static struct wire_leased random_leased(uint64_t *seed)
{
    return (struct wire_leased){ .step = random_u64(seed, 0, UINT64_MAX),
                                 .what = (enum wire_leased_what)random_u32(seed, 1, 3),
                                 .group = random_u32(seed, 0, SHD_MICROS_MAX - 1) };
}

static struct wire_ring random_ring(uint64_t *seed)
{
    return (struct wire_ring){ random_u64(seed, 0, UINT64_MAX), random_u64(seed, 0, UINT64_MAX),
                               random_u64(seed, 1, 1000) * SHD_PAGE_BYTES };
}

static struct wire_reset_answer random_reset_answer(uint64_t *seed)
{
    return (struct wire_reset_answer){ random_u64(seed, 0, UINT64_MAX),
                                       random_u64(seed, 0, UINT64_MAX),
                                       (enum wire_reset_what)random_u32(seed, 1, 3) };
}

static struct wire_shown random_shown(uint64_t *seed)
{
    return (struct wire_shown){ .step = random_u64(seed, 0, UINT64_MAX),
                                .updates = random_u64(seed, 0, UINT64_MAX),
                                .of_step = random_u64(seed, 0, UINT64_MAX),
                                .groups = random_u32(seed, 0, SHD_MICROS_MAX),
                                .tally = random_bytes(seed, TALLY_BYTES, TALLY_BYTES),
                                .values = random_bytes(seed, WIRE_VALUES_MAX * sizeof(float), 4) };
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
        p.welcome = (struct wire_welcome){ random_u64(seed, 0, UINT64_MAX), random_name(seed, name),
                                           random_u64(seed, 0, 1) == 1,
                                           random_u32(seed, 0, UINT32_MAX) };
        break;
    case WIRE_LAYOUT:
        random_layout(seed, &p.layout);
        break;
    case WIRE_PREPARED:
        random_prepared(seed, &p.prepared);
        break;
    case WIRE_COMMITTED:
        p.committed = random_committed(seed);
        break;
    case WIRE_BLOB:
        p.blob = (struct wire_blob){ random_u64(seed, 0, UINT64_MAX),
                                     random_bytes(seed, WIRE_BLOB_BYTES_MAX, 1) };
        break;
    case WIRE_LEAVES:
        p.leaves = random_leaves(seed);
        break;
    case WIRE_STATUS_TEXT:
        p.status_text.json = random_bytes(seed, WIRE_FRAME_BYTES_MAX - 1000, 1);
        break;
    case WIRE_CREDIT:
        p.credit = (struct wire_credit){ random_u32(seed, 0, SHD_SLOTS_MAX - 1),
                                         test_random(seed) % 2 != 0 };
        break;
    case WIRE_LEASED:
        p.leased = random_leased(seed);
        break;
    case WIRE_CHECKPOINTED:
        random_checkpointed(seed, &p.checkpointed);
        break;
    case WIRE_RESTORED:
        p.restored = (struct wire_restored){ random_u64(seed, 0, UINT64_MAX),
                                             random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_FETCHED:
        p.fetched = (struct wire_fetched){ random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_ROWS:
        p.rows.next = random_u64(seed, 0, UINT64_MAX);
        p.rows.rows = random_bytes(seed, WIRE_ROWS_MAX * HISTORY_ROW_BYTES, HISTORY_ROW_BYTES);
        p.rows.units = random_bytes(seed, WIRE_UNITS_MAX * UNIT_ROW_BYTES, UNIT_ROW_BYTES);
        p.rows.units_step = random_u64(seed, 0, UINT64_MAX);
        p.rows.units_divisor = (double)random_u32(seed, 0, UINT32_MAX);
        p.rows.units_skipped = random_u32(seed, 0, UINT32_MAX);
        p.rows.audits = random_bytes(seed, AUDIT_SLOTS * AUDIT_ROW_BYTES, AUDIT_ROW_BYTES);
        break;
    case WIRE_RESET_ANSWER:
        p.reset_answer = random_reset_answer(seed);
        break;
    case WIRE_GOT:
        p.got = random_got(seed);
        break;
    case WIRE_CREATED:
        p.created = random_created(seed, name);
        break;
    case WIRE_RING:
        p.ring = random_ring(seed);
        break;
    case WIRE_SHOWN:
        p.shown = random_shown(seed);
        break;
    case WIRE_SET_ANSWER:
        p.set_answer = (struct wire_set_answer){ random_u64(seed, 0, UINT64_MAX),
                                                 random_bytes(seed, WIRE_SET_JSON_MAX, 1) };
        break;
    case WIRE_PINNED:
        p.pinned = (struct wire_pinned){ .step = random_u64(seed, 0, UINT64_MAX),
                                         .ticket = random_u64(seed, 0, UINT64_MAX),
                                         .segment = random_u64(seed, 1, UINT64_MAX),
                                         .bytes = random_u64(seed, 1, 1000) * SHD_PAGE_BYTES };
        break;
    case WIRE_DROPPED:
        p.dropped = (struct wire_dropped){ (enum wire_dropped_what)random_u32(seed, 1, 4),
                                           random_u64(seed, 0, UINT64_MAX),
                                           random_u64(seed, 0, UINT64_MAX), random_name(seed, name),
                                           random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_SNAPSHOTS:
        p.snapshots = (struct wire_snapshots){
            random_u64(seed, 0, UINT64_MAX), random_u64(seed, 0, UINT64_MAX),
            random_u32(seed, 0, WIRE_SNAPSHOTS_MAX - 1),
            random_bytes(seed, WIRE_SNAPSHOTS_MAX * WIRE_SNAPSHOT_BYTES, WIRE_SNAPSHOT_BYTES)
        };
        break;
    case WIRE_REWOUND:
        p.rewound = (struct wire_rewound){ random_u64(seed, 0, UINT64_MAX),
                                           random_u64(seed, 0, UINT64_MAX),
                                           random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_MOVED:
        p.moved = (struct wire_moved){ .what = (enum wire_moved_what)random_u32(seed, 1, 3),
                                       .instance = random_u64(seed, 0, UINT64_MAX),
                                       .step = random_u64(seed, 0, UINT64_MAX),
                                       .id = random_u64(seed, 0, UINT64_MAX),
                                       .to = "cpu1,cpu0",
                                       .path = "/elsewhere",
                                       .there = random_u32(seed, 0, 1) == 1,
                                       .name = random_name(seed, name) };
        break;
    case WIRE_FORKED:
        p.forked = (struct wire_forked){ random_u64(seed, 0, UINT64_MAX),
                                         random_u64(seed, 0, UINT64_MAX) };
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
