#include "tests/lib/proto_util.h"

#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "proto/share/history.h"
#include "proto/share/tally.h"
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
    return (struct decision){ .skip = test_random(seed) % 2 != 0,
                              .scale = (float)special[test_random(seed) % 4],
                              .lr = special[test_random(seed) % 4] * 0x1p-900,
                              .loss_scale = special[test_random(seed) % 4],
                              .good_steps = (uint32_t)test_random(seed),
                              .divisor = special[test_random(seed) % 4],
                              .rate_count = 8,
                              .rates = { 1e-3, NAN, 0.9, NAN, 0, 0.1, special[1], NAN } };
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
        q.open_model.spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1);
        q.open_model.name = random_name(seed, name);
        q.open_model.origin = random_u64(seed, 0, UINT64_MAX);
        q.open_model.settled = random_u32(seed, 0, 1) == 1;
        q.open_model.owners = random_u32(seed, 1, SHD_OWNERS_MAX);
        q.open_model.owner = random_u32(seed, 0, q.open_model.owners - 1);
        q.open_model.slots = random_u32(seed, 0, SHD_SLOTS_MAX);
        q.open_model.spec_at = random_spec_at(seed);
        q.open_model.spec_apart = random_u32(seed, 0, 1) == 1;
        q.open_model.one_count = random_u32(seed, 0, 1) == 1;
        q.open_model.first = random_u64(seed, 0, UINT64_MAX);
        break;
    case WIRE_RETURN:
        random_return(seed, &q.return_grad);
        break;
    case WIRE_PREPARE:
        q.prepare.model = random_u32(seed, 0, UINT32_MAX);
        q.prepare.step = random_u64(seed, 0, UINT64_MAX);
        q.prepare.attempt = random_u64(seed, 0, UINT64_MAX);
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
        q.digest.tensors = random_u32(seed, 0, SHD_TENSORS_MAX);
        break;
    case WIRE_LEASE:
        q.lease = (struct wire_lease){ random_u32(seed, 0, UINT32_MAX),
                                       random_u64(seed, 0, UINT64_MAX),
                                       random_u32(seed, 0, 1) != 0,
                                       random_u32(seed, 0, 1) != 0,
                                       random_u32(seed, 0, SHD_MICROS_MAX - 1),
                                       random_u64(seed, 0, UINT64_MAX),
                                       random_u32(seed, 0, SHD_MICROS_MAX) };
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
    case WIRE_HISTORY:
        q.history = (struct wire_history){ random_u32(seed, 0, UINT32_MAX),
                                           random_u64(seed, 0, UINT64_MAX),
                                           random_u32(seed, 1, WIRE_ROWS_MAX) };
        break;
    case WIRE_CREATE:
        q.create = (struct wire_create){ .what = (enum wire_create_what)random_u32(seed, 1, 4),
                                         .origin = random_u64(seed, 1, UINT64_MAX),
                                         .name = random_name(seed, name),
                                         .spec = random_bytes(seed, SPEC_MESSAGE_BYTES_MAX, 1) };
        q.create.owners = random_u32(seed, 1, SHD_OWNERS_MAX);
        q.create.consent = random_u64(seed, 0, UINT64_MAX);
        q.create.attempt = random_u64(seed, 0, UINT64_MAX);
        q.create.spec_at = random_spec_at(seed);
        q.create.unit_updates = random_bytes(seed, 8 * SHD_UNITS_MAX / 4, 8); /* beside it */
        q.create.one_count = random_u32(seed, 0, 1) == 1;
        q.create.owner = random_u32(seed, 0, q.create.owners - 1);
        break;
    case WIRE_PUT:
        q.put = (struct wire_put){ random_u64(seed, 1, UINT64_MAX),
                                   random_u32(seed, 0, SHD_UNITS_MAX - 1) };
        break;
    case WIRE_GET:
        q.get = (struct wire_get){ random_u32(seed, 0, UINT32_MAX),
                                   random_u32(seed, 0, SHD_UNITS_MAX - 1), random_u32(seed, 0, 2) };
        break;
    case WIRE_RESET:
        q.reset = (struct wire_reset){ random_u32(seed, 0, UINT32_MAX),
                                       random_u64(seed, 0, UINT64_MAX),
                                       random_u64(seed, 2, UINT64_MAX),
                                       random_u32(seed, 0, 1) != 0 };
        break;
    case WIRE_SHOW:
        q.show = (struct wire_show){ .model = random_u32(seed, 0, UINT32_MAX),
                                     .tensor = random_u32(seed, 0, SHD_TENSORS_MAX - 1),
                                     .array = (enum wire_show_array)random_u32(
                                         seed, WIRE_SHOW_PARAM, WIRE_SHOW_UPDATE),
                                     .first = random_u64(seed, 0, UINT64_MAX),
                                     .elems = random_u64(seed, 1, SHD_MODEL_ELEMS_MAX),
                                     .values = random_u32(seed, 0, 1) == 1 };
        break;
    case WIRE_SET:
        q.set = (struct wire_set){ random_u32(seed, 0, UINT32_MAX),
                                   random_bytes(seed, SETTINGS_MAX * sizeof(double),
                                                sizeof(double)),
                                   random_u64(seed, 0, UINT64_MAX), random_u32(seed, 0, 1) != 0 };
        break;
    case WIRE_PIN:
        q.pin = (struct wire_pin){ random_u32(seed, 0, UINT32_MAX),
                                   random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_UNPIN:
        q.unpin.model = random_u32(seed, 0, UINT32_MAX);
        break;
    case WIRE_DROP:
        q.drop = (struct wire_drop){ .what = (enum wire_drop_what)random_u32(seed, 1, 4),
                                     .name = random_name(seed, name),
                                     .first = random_u64(seed, 0, UINT64_MAX),
                                     .owners = random_u32(seed, 1, SHD_OWNERS_MAX),
                                     .force = random_u32(seed, 0, 1) == 1 };
        q.drop.owner = random_u32(seed, 0, q.drop.owners - 1);
        break;
    case WIRE_FORK:
        q.fork = (struct wire_fork){ random_u64(seed, 1, UINT64_MAX),
                                     random_u32(seed, 0, UINT32_MAX),
                                     random_u64(seed, 0, UINT64_MAX) };
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
                               .instance = random_u64(seed, 0, UINT64_MAX) };
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
    p->settings = random_bytes(seed, SETTINGS_MAX * sizeof(double), sizeof(double));
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
        p.checkpointed.unit_updates = random_bytes(seed, 8 * SHD_UNITS_MAX / 4, 8); /* beside it */
        p.checkpointed.settings = random_bytes(seed, 4096, 1);
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
    case WIRE_ROWS:
        p.rows.next = random_u64(seed, 0, UINT64_MAX);
        p.rows.rows = random_bytes(seed, WIRE_ROWS_MAX * HISTORY_ROW_BYTES, HISTORY_ROW_BYTES);
        break;
    case WIRE_RESET_ANSWER:
        p.reset_answer = (struct wire_reset_answer){ random_u64(seed, 0, UINT64_MAX),
                                                     random_u64(seed, 0, UINT64_MAX),
                                                     (enum wire_reset_what)random_u32(seed, 1, 3) };
        break;
    case WIRE_GOT:
        p.got = (struct wire_got){ random_u64(seed, 0, UINT64_MAX), random_u64(seed, 0, UINT64_MAX),
                                   random_u64(seed, 0, UINT64_MAX),
                                   random_u64(seed, 1, 1000) * SHD_PAGE_BYTES };
        break;
    case WIRE_CREATED:
        p.created = (struct wire_created){ (enum wire_created_what)random_u32(seed, 1, 5),
                                           random_u64(seed, 0, UINT64_MAX),
                                           random_u64(seed, 0, 1000) * SHD_PAGE_BYTES,
                                           random_name(seed, name),
                                           random_u64(seed, 0, UINT64_MAX) };
        break;
    case WIRE_RING:
        p.ring = (struct wire_ring){ random_u64(seed, 0, UINT64_MAX),
                                     random_u64(seed, 0, UINT64_MAX),
                                     random_u64(seed, 1, 1000) * SHD_PAGE_BYTES };
        break;
    case WIRE_SHOWN:
        p.shown = (struct wire_shown){ .step = random_u64(seed, 0, UINT64_MAX),
                                       .updates = random_u64(seed, 0, UINT64_MAX),
                                       .of_step = random_u64(seed, 0, UINT64_MAX),
                                       .groups = random_u32(seed, 0, SHD_MICROS_MAX),
                                       .tally = random_bytes(seed, TALLY_BYTES, TALLY_BYTES),
                                       .values = random_bytes(seed, WIRE_VALUES_MAX * sizeof(float),
                                                              4) };
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
                                           random_u64(seed, 0, UINT64_MAX),
                                           random_name(seed, name) };
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

static bool same_bytes(struct wire_bytes a, struct wire_bytes b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

static bool same_decision(struct decision a, struct decision b)
{
    return a.skip == b.skip && a.scale == b.scale && a.lr == b.lr && a.loss_scale == b.loss_scale &&
           a.good_steps == b.good_steps && a.divisor == b.divisor && a.rate_count == b.rate_count &&
           memcmp(a.rates, b.rates, a.rate_count * sizeof *a.rates) == 0;
}

static bool same_metrics(const double *a, uint32_t a_count, const double *b, uint32_t b_count)
{
    return a_count == b_count && memcmp(a, b, a_count * sizeof *a) == 0;
}

static bool same_return(const struct wire_return *a, const struct wire_return *b)
{
    return a->model == b->model && a->step == b->step && a->micro == b->micro &&
           a->unit == b->unit && a->slot == b->slot && a->dtype == b->dtype && a->none == b->none &&
           a->turn == b->turn && a->attempt == b->attempt &&
           strcmp(a->metric_names, b->metric_names) == 0 &&
           same_metrics(a->metrics, a->metric_count, b->metrics, b->metric_count);
}

static bool same_spec_at(const struct wire_spec_at *a, const struct wire_spec_at *b)
{
    return a->ticket == b->ticket && a->bytes == b->bytes && same_bytes(a->sum, b->sum);
}

bool same_request(const struct wire_request *a, const struct wire_request *b)
{
    if (a->seq != b->seq || a->session != b->session || a->type != b->type)
        return false;
    switch (a->type) {
    case WIRE_HELLO:
        return a->hello.protocol == b->hello.protocol && a->hello.role == b->hello.role &&
               memcmp(a->hello.token, b->hello.token, WIRE_TOKEN_BYTES) == 0 &&
               strcmp(a->hello.name, b->hello.name) == 0 && a->hello.rank == b->hello.rank &&
               a->hello.level == b->hello.level;
    case WIRE_OPEN_MODEL:
        return same_bytes(a->open_model.spec, b->open_model.spec) &&
               strcmp(a->open_model.name, b->open_model.name) == 0 &&
               a->open_model.owner == b->open_model.owner &&
               a->open_model.owners == b->open_model.owners &&
               a->open_model.slots == b->open_model.slots &&
               a->open_model.origin == b->open_model.origin &&
               a->open_model.settled == b->open_model.settled &&
               a->open_model.spec_apart == b->open_model.spec_apart &&
               a->open_model.one_count == b->open_model.one_count &&
               a->open_model.first == b->open_model.first &&
               same_spec_at(&a->open_model.spec_at, &b->open_model.spec_at);
    case WIRE_RETURN:
        return same_return(&a->return_grad, &b->return_grad);
    case WIRE_PREPARE:
        return a->prepare.model == b->prepare.model && a->prepare.step == b->prepare.step &&
               a->prepare.attempt == b->prepare.attempt;
    case WIRE_COMMIT:
        return a->commit.model == b->commit.model && a->commit.step == b->commit.step &&
               same_decision(a->commit.decision, b->commit.decision) &&
               a->commit.has_blob == b->commit.has_blob &&
               same_bytes(a->commit.blob, b->commit.blob) &&
               memcmp(&a->commit.norm, &b->commit.norm, sizeof a->commit.norm) == 0;
    case WIRE_GET_BLOB:
        return a->get_blob.model == b->get_blob.model;
    case WIRE_DIGEST:
        return a->digest.model == b->digest.model && a->digest.tensor == b->digest.tensor &&
               a->digest.array == b->digest.array && a->digest.first_leaf == b->digest.first_leaf &&
               a->digest.tensors == b->digest.tensors;
    case WIRE_LEASE:
        return a->lease.model == b->lease.model && a->lease.step == b->lease.step &&
               a->lease.attempt == b->lease.attempt && a->lease.meet == b->lease.meet;
    case WIRE_CHECKPOINT:
        return a->checkpoint.model == b->checkpoint.model &&
               a->checkpoint.step == b->checkpoint.step &&
               strcmp(a->checkpoint.path, b->checkpoint.path) == 0;
    case WIRE_DRAIN:
        return a->drain.off == b->drain.off;
    case WIRE_JOIN:
        return a->join.model == b->join.model && a->join.timeout_ms == b->join.timeout_ms &&
               memcmp(a->join.down, b->join.down, sizeof a->join.down) == 0 &&
               memcmp(a->join.up, b->join.up, sizeof a->join.up) == 0;
    case WIRE_FETCH:
        return a->fetch.model == b->fetch.model && a->fetch.unit == b->fetch.unit &&
               a->fetch.step == b->fetch.step && a->fetch.turn == b->fetch.turn;
    case WIRE_HISTORY:
        return a->history.model == b->history.model && a->history.from == b->history.from &&
               a->history.count == b->history.count;
    case WIRE_CREATE:
        return a->create.what == b->create.what && a->create.origin == b->create.origin &&
               strcmp(a->create.name, b->create.name) == 0 &&
               same_bytes(a->create.spec, b->create.spec) && a->create.owner == b->create.owner &&
               a->create.owners == b->create.owners && a->create.consent == b->create.consent &&
               a->create.attempt == b->create.attempt &&
               a->create.one_count == b->create.one_count &&
               same_spec_at(&a->create.spec_at, &b->create.spec_at) &&
               same_bytes(a->create.unit_updates, b->create.unit_updates);
    case WIRE_PUT:
        return a->put.origin == b->put.origin && a->put.unit == b->put.unit;
    case WIRE_GET:
        return a->get.model == b->get.model && a->get.unit == b->get.unit &&
               a->get.array == b->get.array;
    case WIRE_RESET:
        return a->reset.model == b->reset.model && a->reset.step == b->reset.step &&
               a->reset.attempt == b->reset.attempt && a->reset.agreed == b->reset.agreed;
    case WIRE_SHOW:
        return a->show.model == b->show.model && a->show.tensor == b->show.tensor &&
               a->show.array == b->show.array && a->show.first == b->show.first &&
               a->show.elems == b->show.elems && a->show.values == b->show.values;
    case WIRE_SET:
        return a->set.model == b->set.model && same_bytes(a->set.change, b->set.change) &&
               a->set.from == b->set.from && a->set.look == b->set.look;
    case WIRE_RESTORE:
        return strcmp(a->restore.path, b->restore.path) == 0 &&
               same_bytes(a->restore.spec, b->restore.spec) &&
               a->restore.owner == b->restore.owner && a->restore.owners == b->restore.owners &&
               a->restore.weights == b->restore.weights && a->restore.open == b->restore.open &&
               a->restore.replace == b->restore.replace &&
               a->restore.restore_id == b->restore.restore_id &&
               a->restore.one_count == b->restore.one_count &&
               same_spec_at(&a->restore.spec_at, &b->restore.spec_at);
    case WIRE_DROP:
        return a->drop.what == b->drop.what && strcmp(a->drop.name, b->drop.name) == 0 &&
               a->drop.first == b->drop.first && a->drop.owner == b->drop.owner &&
               a->drop.owners == b->drop.owners && a->drop.force == b->drop.force;
    case WIRE_FORK:
        return a->fork.origin == b->fork.origin && a->fork.model == b->fork.model &&
               a->fork.step == b->fork.step;
    default:
        return true;
    }
}

static bool same_layout(const struct wire_layout *a, const struct wire_layout *b)
{
    if (a->model != b->model || a->step != b->step || !same_bytes(a->spec, b->spec) ||
        a->owner != b->owner || a->owners != b->owners || a->slots != b->slots ||
        a->slot_bytes != b->slot_bytes || a->segment_count != b->segment_count ||
        a->origin != b->origin || a->restore_id != b->restore_id || a->twin_pid != b->twin_pid ||
        a->spec_bytes != b->spec_bytes || a->one_count != b->one_count ||
        a->instance != b->instance || !same_bytes(a->in, b->in) ||
        !same_bytes(a->device, b->device))
        return false;
    for (uint32_t i = 0; i < a->segment_count; i++)
        if (a->segments[i].kind != b->segments[i].kind ||
            a->segments[i].ticket != b->segments[i].ticket ||
            a->segments[i].bytes != b->segments[i].bytes ||
            a->segments[i].place != b->segments[i].place)
            return false;
    return a->has_decision == b->has_decision &&
           (!a->has_decision || same_decision(a->decision, b->decision));
}

static bool same_prepared(const struct wire_prepared *a, const struct wire_prepared *b)
{
    return a->step == b->step && a->over == b->over && a->finite == b->finite &&
           memcmp(a->sum.limb, b->sum.limb, sizeof a->sum.limb) == 0 && b->sum.adds == 0 &&
           same_metrics(a->metrics, a->metric_count, b->metrics, b->metric_count) &&
           a->has_decision == b->has_decision && a->reported == b->reported &&
           same_bytes(a->settings, b->settings) &&
           (!a->has_decision || same_decision(a->decision, b->decision));
}

bool same_reply(const struct wire_reply *a, const struct wire_reply *b)
{
    if (a->seq != b->seq || a->status != b->status || a->type != b->type ||
        strcmp(a->text, b->text) != 0 || a->retry_ms != b->retry_ms)
        return false;
    switch (a->type) {
    case WIRE_WELCOME:
        return a->welcome.session == b->welcome.session &&
               strcmp(a->welcome.device, b->welcome.device) == 0 &&
               a->welcome.kept == b->welcome.kept && a->welcome.requests == b->welcome.requests;
    case WIRE_LAYOUT:
        return same_layout(&a->layout, &b->layout);
    case WIRE_PREPARED:
        return same_prepared(&a->prepared, &b->prepared);
    case WIRE_COMMITTED:
        return a->committed.step == b->committed.step && a->committed.over == b->committed.over &&
               same_decision(a->committed.decision, b->committed.decision);
    case WIRE_BLOB:
        return a->blob.step == b->blob.step && same_bytes(a->blob.blob, b->blob.blob);
    case WIRE_LEAVES:
        return a->leaves.step == b->leaves.step && a->leaves.updates == b->leaves.updates &&
               a->leaves.total == b->leaves.total && same_bytes(a->leaves.leaves, b->leaves.leaves);
    case WIRE_STATUS_TEXT:
        return same_bytes(a->status_text.json, b->status_text.json);
    case WIRE_CREDIT:
        return a->credit.slot == b->credit.slot && a->credit.stale == b->credit.stale;
    case WIRE_LEASED:
        return a->leased.step == b->leased.step && a->leased.what == b->leased.what &&
               a->leased.group == b->leased.group;
    case WIRE_CHECKPOINTED:
        return a->checkpointed.step == b->checkpointed.step &&
               a->checkpointed.updates == b->checkpointed.updates &&
               a->checkpointed.bytes == b->checkpointed.bytes &&
               same_bytes(a->checkpointed.blob, b->checkpointed.blob) &&
               same_bytes(a->checkpointed.unit_updates, b->checkpointed.unit_updates) &&
               same_bytes(a->checkpointed.settings, b->checkpointed.settings) &&
               a->checkpointed.has_decision == b->checkpointed.has_decision &&
               (!a->checkpointed.has_decision ||
                same_decision(a->checkpointed.decision, b->checkpointed.decision));
    case WIRE_RESTORED:
        return a->restored.step == b->restored.step && a->restored.bytes == b->restored.bytes;
    case WIRE_FETCHED:
        return a->fetched.step == b->fetched.step;
    case WIRE_ROWS:
        return a->rows.next == b->rows.next && same_bytes(a->rows.rows, b->rows.rows);
    case WIRE_RESET_ANSWER:
        return a->reset_answer.step == b->reset_answer.step &&
               a->reset_answer.attempt == b->reset_answer.attempt &&
               a->reset_answer.what == b->reset_answer.what;
    case WIRE_GOT:
        return a->got.step == b->got.step && a->got.updates == b->got.updates &&
               a->got.ticket == b->got.ticket && a->got.bytes == b->got.bytes;
    case WIRE_SET_ANSWER:
        return a->set_answer.from == b->set_answer.from &&
               same_bytes(a->set_answer.json, b->set_answer.json);
    case WIRE_RING:
        return a->ring.requests == b->ring.requests && a->ring.replies == b->ring.replies &&
               a->ring.bytes == b->ring.bytes;
    case WIRE_SHOWN:
        return a->shown.step == b->shown.step && a->shown.updates == b->shown.updates &&
               a->shown.of_step == b->shown.of_step && a->shown.groups == b->shown.groups &&
               same_bytes(a->shown.tally, b->shown.tally) &&
               same_bytes(a->shown.values, b->shown.values);
    case WIRE_PINNED:
        return a->pinned.step == b->pinned.step && a->pinned.ticket == b->pinned.ticket &&
               a->pinned.segment == b->pinned.segment && a->pinned.bytes == b->pinned.bytes;
    case WIRE_DROPPED:
        return a->dropped.what == b->dropped.what && a->dropped.instance == b->dropped.instance &&
               a->dropped.step == b->dropped.step && strcmp(a->dropped.near, b->dropped.near) == 0;
    case WIRE_FORKED:
        return a->forked.step == b->forked.step && a->forked.updates == b->forked.updates;
    case WIRE_CREATED:
        return a->created.what == b->created.what && a->created.ticket == b->created.ticket &&
               a->created.bytes == b->created.bytes && strcmp(a->created.by, b->created.by) == 0 &&
               a->created.consent == b->created.consent;
    default:
        return true;
    }
}
