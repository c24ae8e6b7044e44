/* Requests: see wire.h. One check (request_check) serves both directions, so that a sender learns
 * of a bad value by its name before the daemon does. */
#include "proto/wire/wire.h"

#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire_common.h"

static const char *const request_names[] = {
#define REQUEST_NAME(NAME, name) [WIRE_##NAME] = #NAME,
    WIRE_REQUEST_MAP(REQUEST_NAME)
#undef REQUEST_NAME
};

const char *wire_request_name(enum wire_request_type type)
{
    CHECK((unsigned)type < WIRE_REQUEST_TYPES);
    return request_names[type];
}

/* -- Limits ------------------------------------------------------------------------------ */

static int hello_check(const struct wire_hello *h, struct shd_err *e)
{
    const struct wire_limit limits[] = { { "hello.role", h->role, WIRE_TRAINER, WIRE_ADMIN } };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    return r == SHD_OK ? wire_name_check("hello.name", h->name, e) : r;
}

static int open_model_check(const struct wire_open_model *o, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "open_model.spec's size", o->spec.bytes, 0, SPEC_JSON_BYTES_MAX },
        { "open_model.owners", o->owners, 1, SHD_OWNERS_MAX },
        { "open_model.owner", o->owner, 0, (uint64_t)o->owners - 1 },
        { "open_model.slots", o->slots, 0, SHD_SLOTS_MAX },
    };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    return r == SHD_OK ? wire_name_check("open_model.name", o->name, e) : r;
}

static int return_check(const struct wire_return *t, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "return.micro", t->micro, 0, SHD_MICROS_MAX - 1 },
        { "return.unit", t->unit, 0, SHD_UNITS_MAX - 1 },
        { "return.slot", t->slot, 0, SHD_SLOTS_MAX - 1 },
        { "return.dtype", t->dtype, t->none ? 0 : SHD_F32, SHD_F16 },
        { "return.metrics' count", t->metric_count, 0, WIRE_METRICS_MAX },
    };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int commit_check(const struct wire_commit *c, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "commit.blob's size", c->blob.bytes, 0, c->has_blob ? WIRE_BLOB_BYTES_MAX : 0 },
    };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    return r == SHD_OK ? wire_decision_check(&c->decision, e) : r;
}

static int digest_check(const struct wire_digest *d, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "digest.tensor", d->tensor, 0, SHD_TENSORS_MAX - 1 },
        { "digest.array", d->array, 0, 2 },
    };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int checkpoint_check(const struct wire_checkpoint *c, struct shd_err *e)
{
    return wire_path_check("checkpoint.path", c->path, e);
}

static int restore_check(const struct wire_restore *r, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "restore.spec's size", r->spec.bytes, 1, SPEC_JSON_BYTES_MAX },
        { "restore.owners", r->owners, 1, SHD_OWNERS_MAX },
        { "restore.owner", r->owner, 0, (uint64_t)r->owners - 1 },
    };
    const int rc = wire_limits(limits, ARRAY_SIZE(limits), e);
    return rc == SHD_OK ? wire_path_check("restore.path", r->path, e) : rc;
}

static int fetch_check(const struct wire_fetch *f, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "fetch.unit", f->unit, 0, SHD_UNITS_MAX - 1 },
        { "fetch.turn", f->turn, 1, UINT64_MAX },
    };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int request_check(const struct wire_request *q, struct shd_err *e)
{
    switch (q->type) {
    case WIRE_HELLO:
        return hello_check(&q->hello, e);
    case WIRE_OPEN_MODEL:
        return open_model_check(&q->open_model, e);
    case WIRE_RETURN:
        return return_check(&q->return_grad, e);
    case WIRE_COMMIT:
        return commit_check(&q->commit, e);
    case WIRE_DIGEST:
        return digest_check(&q->digest, e);
    case WIRE_CHECKPOINT:
        return checkpoint_check(&q->checkpoint, e);
    case WIRE_RESTORE:
        return restore_check(&q->restore, e);
    case WIRE_FETCH:
        return fetch_check(&q->fetch, e);
    case WIRE_JOIN:
    case WIRE_PREPARE:
    case WIRE_GET_BLOB:
    case WIRE_STATUS:
    case WIRE_DETACH:
    case WIRE_LEASE:
    case WIRE_DRAIN:
    case WIRE_REQUEST_TYPES:
        break;
    }
    return SHD_OK;
}

/* -- Unpacking --------------------------------------------------------------------------- */

static int hello_unpack(const Shd__Hello *m, struct wire_hello *h, struct shd_err *e)
{
    if (m->token.len != SHD_TOKEN_BYTES)
        return err_set(e, SHD_ERANGE, "hello.token has %zu bytes, must be %u", m->token.len,
                       SHD_TOKEN_BYTES);
    *h = (struct wire_hello){ .protocol = m->protocol,
                              .role = (enum wire_role)m->role,
                              .name = m->name };
    memcpy(h->token, m->token.data, SHD_TOKEN_BYTES);
    return SHD_OK;
}

static int open_model_unpack(const Shd__OpenModel *m, struct wire_open_model *o)
{
    *o = (struct wire_open_model){ .spec = wire_bytes_of(m->spec),
                                   .name = m->name,
                                   .owner = m->owner,
                                   .owners = m->owners,
                                   .slots = m->slots };
    return SHD_OK;
}

static int return_unpack(const Shd__Return *m, struct wire_return *t, struct shd_err *e)
{
    *t = (struct wire_return){ .model = m->model,
                               .step = m->step,
                               .micro = m->micro,
                               .unit = m->unit,
                               .slot = m->slot,
                               .dtype = (enum shd_dtype)m->dtype,
                               .none = m->none != 0,
                               .turn = m->turn };
    if (t->none && m->dtype == 0) /* of no gradient; what is handed on is always valid */
        t->dtype = SHD_F32;
    return wire_metrics_unpack("return.metrics", m->metrics, m->n_metrics, t->metrics,
                               &t->metric_count, e);
}

static int commit_unpack(const Shd__Commit *m, struct wire_commit *c, struct shd_err *e)
{
    *c = (struct wire_commit){ .model = m->model,
                               .step = m->step,
                               .has_blob = m->has_blob != 0,
                               .blob = wire_bytes_of(m->blob) };
    return wire_decision_unpack(m->decision, &c->decision, e);
}

static int digest_unpack(const Shd__Digest *m, struct wire_digest *d)
{
    *d = (struct wire_digest){
        .model = m->model, .tensor = m->tensor, .array = m->array, .first_leaf = m->first_leaf
    };
    return SHD_OK;
}

static int restore_unpack(const Shd__Restore *m, struct wire_restore *r)
{
    *r = (struct wire_restore){ .path = m->path,
                                .spec = wire_bytes_of(m->spec),
                                .owner = m->owner,
                                .owners = m->owners,
                                .weights = m->weights != 0,
                                .open = m->open != 0 };
    return SHD_OK;
}

static int join_unpack(const Shd__Join *m, struct wire_join *j, struct shd_err *e)
{
    if (m->down.len != WIRE_LINK_ID_BYTES || m->up.len != WIRE_LINK_ID_BYTES)
        return err_set(e, SHD_ERANGE, "join.down and up have %zu and %zu bytes, must be %u",
                       m->down.len, m->up.len, WIRE_LINK_ID_BYTES);
    j->model = m->model;
    memcpy(j->down, m->down.data, WIRE_LINK_ID_BYTES);
    memcpy(j->up, m->up.data, WIRE_LINK_ID_BYTES);
    j->timeout_ms = m->timeout_ms;
    return SHD_OK;
}

/* Fill the body of q from m; q->type follows from m. */
static int body_unpack(const Shd__Request *m, struct wire_request *q, struct shd_err *e)
{
    switch (m->body_case) {
    case SHD__REQUEST__BODY_HELLO:
        q->type = WIRE_HELLO;
        return hello_unpack(m->hello, &q->hello, e);
    case SHD__REQUEST__BODY_OPEN_MODEL:
        q->type = WIRE_OPEN_MODEL;
        return open_model_unpack(m->open_model, &q->open_model);
    case SHD__REQUEST__BODY_RETURN_GRAD:
        q->type = WIRE_RETURN;
        return return_unpack(m->return_grad, &q->return_grad, e);
    case SHD__REQUEST__BODY_PREPARE:
        q->type = WIRE_PREPARE;
        q->prepare = (struct wire_prepare){ m->prepare->model, m->prepare->step };
        return SHD_OK;
    case SHD__REQUEST__BODY_COMMIT:
        q->type = WIRE_COMMIT;
        return commit_unpack(m->commit, &q->commit, e);
    case SHD__REQUEST__BODY_GET_BLOB:
        q->type = WIRE_GET_BLOB;
        q->get_blob = (struct wire_get_blob){ m->get_blob->model };
        return SHD_OK;
    case SHD__REQUEST__BODY_DIGEST:
        q->type = WIRE_DIGEST;
        return digest_unpack(m->digest, &q->digest);
    case SHD__REQUEST__BODY_STATUS:
        q->type = WIRE_STATUS;
        return SHD_OK;
    case SHD__REQUEST__BODY_DETACH:
        q->type = WIRE_DETACH;
        return SHD_OK;
    case SHD__REQUEST__BODY_LEASE:
        q->type = WIRE_LEASE;
        q->lease = (struct wire_lease){ m->lease->model, m->lease->step };
        return SHD_OK;
    case SHD__REQUEST__BODY_CHECKPOINT:
        q->type = WIRE_CHECKPOINT;
        q->checkpoint = (struct wire_checkpoint){ .model = m->checkpoint->model,
                                                  .step = m->checkpoint->step,
                                                  .path = m->checkpoint->path };
        return SHD_OK;
    case SHD__REQUEST__BODY_RESTORE:
        q->type = WIRE_RESTORE;
        return restore_unpack(m->restore, &q->restore);
    case SHD__REQUEST__BODY_DRAIN:
        q->type = WIRE_DRAIN;
        q->drain = (struct wire_drain){ m->drain->off != 0 };
        return SHD_OK;
    case SHD__REQUEST__BODY_JOIN:
        q->type = WIRE_JOIN;
        return join_unpack(m->join, &q->join, e);
    case SHD__REQUEST__BODY_FETCH:
        q->type = WIRE_FETCH;
        q->fetch = (struct wire_fetch){ .model = m->fetch->model,
                                        .unit = m->fetch->unit,
                                        .step = m->fetch->step,
                                        .turn = m->fetch->turn };
        return SHD_OK;
    default:
        return err_set(e, SHD_EPROTO, "request %" PRIu64 " has no body", m->seq);
    }
}

int wire_request_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded;
    int r = wire_decode(&shd__request__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    const Shd__Request *m = (const Shd__Request *)decoded;
    struct wire_request q = { .seq = m->seq, .session = m->session };
    r = wire_unknown_check("request", &m->base, e);
    if (r == SHD_OK)
        r = body_unpack(m, &q, e);
    if (r == SHD_OK) /* every member of the union is a message */
        r = wire_unknown_check(request_names[q.type], &m->hello->base, e);
    if (r == SHD_OK)
        r = request_check(&q, e);
    if (r == SHD_OK)
        *ret_request = q;
    else
        arena->used = used;
    return r;
}

/* -- Packing ----------------------------------------------------------------------------- */

struct request_parts { /* what the protobuf message points to while it is packed */
    union {
        Shd__Hello hello;
        Shd__OpenModel open_model;
        Shd__Return return_grad;
        Shd__Prepare prepare;
        Shd__Commit commit;
        Shd__GetBlob get_blob;
        Shd__Digest digest;
        Shd__Status status;
        Shd__Detach detach;
        Shd__Lease lease;
        Shd__Checkpoint checkpoint;
        Shd__Restore restore;
        Shd__Drain drain;
        Shd__Join join;
        Shd__Fetch fetch;
    };
    Shd__Decision decision;
};

static void hello_pack(const struct wire_hello *h, Shd__Hello *m)
{
    shd__hello__init(m);
    m->protocol = h->protocol;
    m->role = h->role;
    m->token = (ProtobufCBinaryData){ .data = (uint8_t *)h->token, .len = SHD_TOKEN_BYTES };
    m->name = (char *)h->name;
}

static void open_model_pack(const struct wire_open_model *o, Shd__OpenModel *m)
{
    shd__open_model__init(m);
    m->spec = wire_binary_of(o->spec);
    m->name = (char *)o->name;
    m->owner = o->owner;
    m->owners = o->owners;
    m->slots = o->slots;
}

static void return_pack(const struct wire_return *t, Shd__Return *m)
{
    shd__return__init(m);
    m->model = t->model;
    m->step = t->step;
    m->micro = t->micro;
    m->unit = t->unit;
    m->slot = t->slot;
    m->dtype = t->dtype;
    m->none = t->none;
    m->n_metrics = t->metric_count;
    m->metrics = (double *)t->metrics;
    m->turn = t->turn;
}

static void commit_pack(const struct wire_commit *c, struct request_parts *p)
{
    shd__commit__init(&p->commit);
    p->commit.model = c->model;
    p->commit.step = c->step;
    p->commit.has_blob = c->has_blob;
    p->commit.blob = wire_binary_of(c->blob);
    wire_decision_pack(&c->decision, &p->decision);
    p->commit.decision = &p->decision;
}

static void digest_pack(const struct wire_digest *d, Shd__Digest *m)
{
    shd__digest__init(m);
    m->model = d->model;
    m->tensor = d->tensor;
    m->array = d->array;
    m->first_leaf = d->first_leaf;
}

static void checkpoint_pack(const struct wire_checkpoint *c, Shd__Checkpoint *m)
{
    shd__checkpoint__init(m);
    m->model = c->model;
    m->step = c->step;
    m->path = (char *)c->path;
}

static void restore_pack(const struct wire_restore *r, Shd__Restore *m)
{
    shd__restore__init(m);
    m->path = (char *)r->path;
    m->spec = wire_binary_of(r->spec);
    m->owner = r->owner;
    m->owners = r->owners;
    m->weights = r->weights;
    m->open = r->open;
}

static void join_pack(const struct wire_join *j, Shd__Join *m)
{
    shd__join__init(m);
    m->model = j->model;
    m->down = wire_binary_of((struct wire_bytes){ j->down, sizeof j->down });
    m->up = wire_binary_of((struct wire_bytes){ j->up, sizeof j->up });
    m->timeout_ms = j->timeout_ms;
}

static void fetch_pack(const struct wire_fetch *f, Shd__Fetch *m)
{
    shd__fetch__init(m);
    m->model = f->model;
    m->unit = f->unit;
    m->step = f->step;
    m->turn = f->turn;
}

/* Fill parts from q; m's body then points to them. */
static void body_pack(const struct wire_request *q, struct request_parts *p, Shd__Request *m)
{
    static const Shd__Request__BodyCase cases[] = {
#define REQUEST_CASE(NAME, name)  [WIRE_##NAME] = SHD__REQUEST__BODY_##NAME,
#define SHD__REQUEST__BODY_RETURN SHD__REQUEST__BODY_RETURN_GRAD
        WIRE_REQUEST_MAP(REQUEST_CASE)
#undef SHD__REQUEST__BODY_RETURN
#undef REQUEST_CASE
    };
    m->body_case = cases[q->type];
    m->hello = &p->hello; /* the union's members share their address */
    switch (q->type) {
    case WIRE_HELLO:
        hello_pack(&q->hello, &p->hello);
        break;
    case WIRE_OPEN_MODEL:
        open_model_pack(&q->open_model, &p->open_model);
        break;
    case WIRE_RETURN:
        return_pack(&q->return_grad, &p->return_grad);
        break;
    case WIRE_PREPARE:
        shd__prepare__init(&p->prepare);
        p->prepare.model = q->prepare.model;
        p->prepare.step = q->prepare.step;
        break;
    case WIRE_COMMIT:
        commit_pack(&q->commit, p);
        break;
    case WIRE_GET_BLOB:
        shd__get_blob__init(&p->get_blob);
        p->get_blob.model = q->get_blob.model;
        break;
    case WIRE_DIGEST:
        digest_pack(&q->digest, &p->digest);
        break;
    case WIRE_STATUS:
        shd__status__init(&p->status);
        break;
    case WIRE_DETACH:
        shd__detach__init(&p->detach);
        break;
    case WIRE_LEASE:
        shd__lease__init(&p->lease);
        p->lease.model = q->lease.model;
        p->lease.step = q->lease.step;
        break;
    case WIRE_CHECKPOINT:
        checkpoint_pack(&q->checkpoint, &p->checkpoint);
        break;
    case WIRE_RESTORE:
        restore_pack(&q->restore, &p->restore);
        break;
    case WIRE_DRAIN:
        shd__drain__init(&p->drain);
        p->drain.off = q->drain.off;
        break;
    case WIRE_JOIN:
        join_pack(&q->join, &p->join);
        break;
    case WIRE_FETCH:
        fetch_pack(&q->fetch, &p->fetch);
        break;
    case WIRE_REQUEST_TYPES:
        break;
    }
}

int wire_request_pack(const struct wire_request *request, void *buf, size_t capacity,
                      size_t *ret_bytes, struct shd_err *e)
{
    CHECK((unsigned)request->type < WIRE_REQUEST_TYPES);
    const int r = request_check(request, e);
    if (r != SHD_OK)
        return r;
    Shd__Request m;
    shd__request__init(&m);
    m.seq = request->seq;
    m.session = request->session;
    struct request_parts parts;
    body_pack(request, &parts, &m);
    return wire_encode(&m.base, buf, capacity, ret_bytes, e);
}
