/* Replies: see wire.h. One check (reply_check) serves both directions. */
#include "proto/wire/wire.h"

#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire_common.h"

#define BYTES_MAX  (UINT64_C(1) << 62)
#define LEAF_BYTES 32u

/* -- Limits ------------------------------------------------------------------------------ */

static int page_multiple_check(const char *field, uint64_t bytes, struct shd_err *e)
{
    if (bytes % SHD_PAGE_BYTES == 0)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%s is %" PRIu64 ", must be a multiple of %u", field, bytes,
                   SHD_PAGE_BYTES);
}

static int wire_segment_check(const struct wire_segment *s, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "layout.segments.bytes", s->bytes, 1, BYTES_MAX },
        { "layout.segments.place", s->place, SEGMENT_HOST, SEGMENT_CUDA },
    };
    if (!segment_kind_shared((uint32_t)s->kind))
        return err_set(e, SHD_ERANGE, "layout.segments.kind is %u, must be " SEGMENT_KINDS_SHARED,
                       (unsigned)s->kind);
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    return r == SHD_OK ? page_multiple_check("layout.segments.bytes", s->bytes, e) : r;
}

static int layout_check(const struct wire_layout *l, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "layout.spec's size", l->spec.bytes, 0, SPEC_JSON_BYTES_MAX },
        { "layout.owners", l->owners, 1, SHD_OWNERS_MAX },
        { "layout.owner", l->owner, 0, (uint64_t)l->owners - 1 },
        { "layout.slots", l->slots, 0, SHD_SLOTS_MAX },
        { "layout.slot_bytes", l->slot_bytes, 0,
          BYTES_MAX / SHD_SLOTS_MAX }, /* all fit in 64 bits */
        { "layout.segments' count", l->segment_count, 0, WIRE_SEGMENTS_MAX },
    };
    int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    if (r == SHD_OK)
        r = page_multiple_check("layout.slot_bytes", l->slot_bytes, e);
    if (r == SHD_OK && l->has_decision)
        r = wire_decision_check(&l->decision, e);
    if (r == SHD_OK && l->in.bytes > SHD_MICROS_MAX / 8)
        r = err_set(e, SHD_ERANGE, "layout.in has %zu bytes, must be 0 to %u", l->in.bytes,
                    SHD_MICROS_MAX / 8);
    if (r == SHD_OK && l->device.bytes != 0 && l->device.bytes != WIRE_DEVICE_BYTES)
        r = err_set(e, SHD_ERANGE, "layout.device has %zu bytes, must be 0 or %u", l->device.bytes,
                    WIRE_DEVICE_BYTES);
    for (uint32_t i = 0; r == SHD_OK && i < l->segment_count; i++)
        r = wire_segment_check(&l->segments[i], e);
    return r;
}

static int prepared_check(const struct wire_prepared *p, struct shd_err *e)
{
    /* Block sums of squares of fp32 values of the largest model stay below 2^304, and any sum of
     * SHD_OWNERS_MAX replies with an empty top limb cannot overflow what fixsum_carry() checks. */
    const struct wire_limit limits[] = {
        { "prepared.metrics' count", p->metric_count, 0, WIRE_METRICS_MAX },
        { "prepared.sum's top limb", p->sum.limb[FIXSUM_LIMBS - 1], 0, 0 },
    };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    if (r != SHD_OK)
        return r;
    if (!fixsum_is_carried(&p->sum))
        return err_set(e, SHD_ERANGE, "prepared.sum has a limb of 2^32 or more");
    return p->has_decision ? wire_decision_check(&p->decision, e) : SHD_OK;
}

static int leaves_check(const struct wire_leaves *l, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "leaves.leaves' size", l->leaves.bytes, 0, (uint64_t)WIRE_LEAVES_MAX * LEAF_BYTES },
    };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    if (r == SHD_OK && l->leaves.bytes % LEAF_BYTES != 0)
        return err_set(e, SHD_ERANGE, "leaves.leaves' size is %zu, must be a multiple of %u",
                       l->leaves.bytes, LEAF_BYTES);
    return r;
}

static int blob_check(const struct wire_blob *b, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "blob.blob's size", b->blob.bytes, 0, WIRE_BLOB_BYTES_MAX },
    };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int credit_check(const struct wire_credit *c, struct shd_err *e)
{
    const struct wire_limit limits[] = { { "credit.slot", c->slot, 0, SHD_SLOTS_MAX - 1 } };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int leased_check(const struct wire_leased *l, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "leased.what", l->what, WIRE_LEASED_GROUP, WIRE_LEASED_OVER },
        { "leased.group", l->group, 0, SHD_MICROS_MAX - 1 },
    };
    return wire_limits(limits, ARRAY_SIZE(limits), e);
}

static int checkpointed_check(const struct wire_checkpointed *c, struct shd_err *e)
{
    const struct wire_limit limits[] = {
        { "checkpointed.blob's size", c->blob.bytes, 0, WIRE_BLOB_BYTES_MAX },
    };
    const int r = wire_limits(limits, ARRAY_SIZE(limits), e);
    return r == SHD_OK && c->has_decision ? wire_decision_check(&c->decision, e) : r;
}

static int reply_check(const struct wire_reply *p, struct shd_err *e)
{
    if (!status_known(p->status))
        return err_set(e, SHD_ERANGE, "reply.status is %d, an unknown code", p->status);
    switch (p->type) {
    case WIRE_WELCOME:
        return wire_name_check("welcome.device", p->welcome.device, e);
    case WIRE_LAYOUT:
        return layout_check(&p->layout, e);
    case WIRE_PREPARED:
        return prepared_check(&p->prepared, e);
    case WIRE_COMMITTED:
        return wire_decision_check(&p->committed.decision, e);
    case WIRE_BLOB:
        return blob_check(&p->blob, e);
    case WIRE_LEAVES:
        return leaves_check(&p->leaves, e);
    case WIRE_CREDIT:
        return credit_check(&p->credit, e);
    case WIRE_LEASED:
        return leased_check(&p->leased, e);
    case WIRE_CHECKPOINTED:
        return checkpointed_check(&p->checkpointed, e);
    case WIRE_FETCHED:
    case WIRE_RESTORED:
    case WIRE_STATUS_TEXT:
    case WIRE_REPLY_NONE:
        break;
    }
    return SHD_OK;
}

/* -- Unpacking --------------------------------------------------------------------------- */

static int layout_unpack(const Shd__Layout *m, struct wire_layout *l, struct shd_err *e)
{
    if (m->n_segments > WIRE_SEGMENTS_MAX)
        return err_set(e, SHD_ERANGE, "layout.segments' count is %zu, must be 0 to %u",
                       m->n_segments, WIRE_SEGMENTS_MAX);
    *l = (struct wire_layout){ .model = m->model,
                               .step = m->step,
                               .spec = wire_bytes_of(m->spec),
                               .owner = m->owner,
                               .owners = m->owners,
                               .slots = m->slots,
                               .slot_bytes = m->slot_bytes,
                               .segment_count = (uint32_t)m->n_segments,
                               .in = wire_bytes_of(m->in),
                               .device = wire_bytes_of(m->device) };
    for (uint32_t i = 0; i < l->segment_count; i++) {
        const Shd__Segment *s = m->segments[i];
        const int r = wire_unknown_check("layout.segments", &s->base, e);
        if (r != SHD_OK)
            return r;
        l->segments[i] = (struct wire_segment){ .kind = (enum segment_kind)s->kind,
                                                .ticket = s->ticket,
                                                .bytes = s->bytes,
                                                .place = (enum segment_place)s->place };
    }
    l->has_decision = m->decided != NULL;
    return l->has_decision ? wire_decision_unpack(m->decided, &l->decision, e) : SHD_OK;
}

static int prepared_unpack(const Shd__Prepared *m, struct wire_prepared *p, struct shd_err *e)
{
    *p = (struct wire_prepared){ .step = m->step, .over = m->over != 0, .finite = m->finite != 0 };
    if (m->n_sum != FIXSUM_LIMBS)
        return err_set(e, SHD_ERANGE, "prepared.sum has %zu limbs, must be %d", m->n_sum,
                       FIXSUM_LIMBS);
    for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
        p->sum.limb[i] = m->sum[i];
    const int r = wire_metrics_unpack("prepared.metrics", m->metrics, m->n_metrics, p->metrics,
                                      &p->metric_count, e);
    if (r != SHD_OK || m->decided == NULL)
        return r;
    p->has_decision = true;
    return wire_decision_unpack(m->decided, &p->decision, e);
}

static int checkpointed_unpack(const Shd__Checkpointed *m, struct wire_checkpointed *c,
                               struct shd_err *e)
{
    *c = (struct wire_checkpointed){ .step = m->step,
                                     .updates = m->updates,
                                     .bytes = m->bytes,
                                     .has_decision = m->decided != NULL,
                                     .blob = wire_bytes_of(m->blob) };
    return c->has_decision ? wire_decision_unpack(m->decided, &c->decision, e) : SHD_OK;
}

/* Fill the body of p from m; p->type follows from m. */
static int body_unpack(const Shd__Reply *m, struct wire_reply *p, struct shd_err *e)
{
    switch (m->body_case) {
    case SHD__REPLY__BODY_WELCOME:
        p->type = WIRE_WELCOME;
        p->welcome = (struct wire_welcome){ m->welcome->session, m->welcome->device };
        return SHD_OK;
    case SHD__REPLY__BODY_LAYOUT_INFO:
        p->type = WIRE_LAYOUT;
        return layout_unpack(m->layout_info, &p->layout, e);
    case SHD__REPLY__BODY_PREPARED:
        p->type = WIRE_PREPARED;
        return prepared_unpack(m->prepared, &p->prepared, e);
    case SHD__REPLY__BODY_COMMITTED:
        p->type = WIRE_COMMITTED;
        p->committed.step = m->committed->step;
        p->committed.over = m->committed->over != 0;
        return wire_decision_unpack(m->committed->decision, &p->committed.decision, e);
    case SHD__REPLY__BODY_BLOB:
        p->type = WIRE_BLOB;
        p->blob = (struct wire_blob){ m->blob->step, wire_bytes_of(m->blob->blob) };
        return SHD_OK;
    case SHD__REPLY__BODY_LEAVES:
        p->type = WIRE_LEAVES;
        p->leaves = (struct wire_leaves){ .step = m->leaves->step,
                                          .updates = m->leaves->updates,
                                          .total = m->leaves->total,
                                          .leaves = wire_bytes_of(m->leaves->leaves) };
        return SHD_OK;
    case SHD__REPLY__BODY_STATUS_TEXT:
        p->type = WIRE_STATUS_TEXT;
        p->status_text = (struct wire_status_text){ wire_bytes_of(m->status_text->json) };
        return SHD_OK;
    case SHD__REPLY__BODY_CREDIT:
        p->type = WIRE_CREDIT;
        p->credit = (struct wire_credit){ m->credit->slot, m->credit->stale != 0 };
        return SHD_OK;
    case SHD__REPLY__BODY_LEASED:
        p->type = WIRE_LEASED;
        p->leased = (struct wire_leased){ .step = m->leased->step,
                                          .what = (enum wire_leased_what)m->leased->what,
                                          .group = m->leased->group };
        return SHD_OK;
    case SHD__REPLY__BODY_CHECKPOINTED:
        p->type = WIRE_CHECKPOINTED;
        return checkpointed_unpack(m->checkpointed, &p->checkpointed, e);
    case SHD__REPLY__BODY_RESTORED:
        p->type = WIRE_RESTORED;
        p->restored = (struct wire_restored){ m->restored->step, m->restored->bytes };
        return SHD_OK;
    case SHD__REPLY__BODY_FETCHED:
        p->type = WIRE_FETCHED;
        p->fetched = (struct wire_fetched){ m->fetched->step };
        return SHD_OK;
    default:
        p->type = WIRE_REPLY_NONE;
        return SHD_OK;
    }
}

/* Text of an error, which ends up on terminals: cut to what a struct shd_err holds, control
 * characters replaced. An error is not refused for how it is spelt. */
static void text_clean(char *text)
{
    size_t i = 0;
    for (; text[i] != 0 && i < SHD_ERR_TEXT_BYTES - 1; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            text[i] = '?';
    if (text[i] != 0)
        text[i] = 0;
}

static int head_check(const Shd__Reply *m, struct shd_err *e)
{
    if (m->layout != 0)
        return err_set(e, SHD_ERANGE, "reply.layout is %" PRIu64 ", this build knows 0", m->layout);
    if (m->status == SHD_OK && m->text[0] != 0)
        return err_set(e, SHD_EPROTO, "reply has status SHD_OK and the text '%.40s'", m->text);
    return wire_unknown_check("reply", &m->base, e);
}

int wire_reply_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                      struct wire_reply *ret_reply, struct shd_err *e)
{
    const size_t used = arena->used;
    ProtobufCMessage *decoded;
    int r = wire_decode(&shd__reply__descriptor, frame, bytes, arena, &decoded, e);
    if (r != SHD_OK)
        return r;
    const Shd__Reply *m = (const Shd__Reply *)decoded;
    if (m->text[0] != 0) /* then it is in the arena, not protobuf-c's constant "" */
        text_clean(m->text);
    struct wire_reply p = { .seq = m->seq, .status = m->status, .text = m->text };
    r = head_check(m, e);
    if (r == SHD_OK)
        r = body_unpack(m, &p, e);
    if (r == SHD_OK && p.type != WIRE_REPLY_NONE) /* every member of the union is a message */
        r = wire_unknown_check(m->welcome->base.descriptor->name, &m->welcome->base, e);
    if (r == SHD_OK)
        r = reply_check(&p, e);
    if (r == SHD_OK)
        *ret_reply = p;
    else
        arena->used = used;
    return r;
}

/* -- Packing ----------------------------------------------------------------------------- */

struct reply_parts { /* what the protobuf message points to while it is packed */
    union {
        Shd__Welcome welcome;
        Shd__Layout layout;
        Shd__Prepared prepared;
        Shd__Committed committed;
        Shd__Blob blob;
        Shd__Leaves leaves;
        Shd__StatusText status_text;
        Shd__Credit credit;
        Shd__Leased leased;
        Shd__Checkpointed checkpointed;
        Shd__Restored restored;
        Shd__Fetched fetched;
    };
    Shd__Decision decision;
    Shd__Segment segments[WIRE_SEGMENTS_MAX];
    Shd__Segment *segment_pointers[WIRE_SEGMENTS_MAX];
    uint32_t limbs[FIXSUM_LIMBS];
};

static void layout_pack(const struct wire_layout *l, struct reply_parts *p)
{
    Shd__Layout *m = &p->layout;
    shd__layout__init(m);
    m->model = l->model;
    m->step = l->step;
    m->spec = wire_binary_of(l->spec);
    m->owner = l->owner;
    m->owners = l->owners;
    m->slots = l->slots;
    m->slot_bytes = l->slot_bytes;
    m->in = wire_binary_of(l->in);
    m->device = wire_binary_of(l->device);
    m->n_segments = l->segment_count;
    m->segments = p->segment_pointers;
    for (uint32_t i = 0; i < l->segment_count; i++) {
        shd__segment__init(&p->segments[i]);
        p->segments[i].kind = l->segments[i].kind;
        p->segments[i].ticket = l->segments[i].ticket;
        p->segments[i].bytes = l->segments[i].bytes;
        p->segments[i].place = l->segments[i].place;
        p->segment_pointers[i] = &p->segments[i];
    }
    if (l->has_decision) {
        wire_decision_pack(&l->decision, &p->decision);
        m->decided = &p->decision;
    }
}

static void prepared_pack(const struct wire_prepared *v, struct reply_parts *p)
{
    Shd__Prepared *m = &p->prepared;
    shd__prepared__init(m);
    m->step = v->step;
    m->over = v->over;
    m->finite = v->finite;
    for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
        p->limbs[i] = (uint32_t)v->sum.limb[i];
    m->n_sum = FIXSUM_LIMBS;
    m->sum = p->limbs;
    m->n_metrics = v->metric_count;
    m->metrics = (double *)v->metrics;
    if (v->has_decision) {
        wire_decision_pack(&v->decision, &p->decision);
        m->decided = &p->decision;
    }
}

static void committed_pack(const struct wire_committed *c, struct reply_parts *p)
{
    shd__committed__init(&p->committed);
    p->committed.step = c->step;
    p->committed.over = c->over;
    wire_decision_pack(&c->decision, &p->decision);
    p->committed.decision = &p->decision;
}

static void leaves_pack(const struct wire_leaves *l, Shd__Leaves *m)
{
    shd__leaves__init(m);
    m->step = l->step;
    m->updates = l->updates;
    m->total = l->total;
    m->leaves = wire_binary_of(l->leaves);
}

static void credit_pack(const struct wire_credit *c, Shd__Credit *m)
{
    shd__credit__init(m);
    m->slot = c->slot;
    m->stale = c->stale;
}

static void leased_pack(const struct wire_leased *l, Shd__Leased *m)
{
    shd__leased__init(m);
    m->step = l->step;
    m->what = l->what;
    m->group = l->group;
}

static void checkpointed_pack(const struct wire_checkpointed *c, struct reply_parts *p)
{
    Shd__Checkpointed *m = &p->checkpointed;
    shd__checkpointed__init(m);
    m->step = c->step;
    m->updates = c->updates;
    m->bytes = c->bytes;
    m->blob = wire_binary_of(c->blob);
    if (c->has_decision) {
        wire_decision_pack(&c->decision, &p->decision);
        m->decided = &p->decision;
    }
}

/* Fill parts from r; m's body then points to them. */
static void body_pack(const struct wire_reply *r, struct reply_parts *p, Shd__Reply *m)
{
    static const Shd__Reply__BodyCase cases[] = {
        [WIRE_REPLY_NONE] = SHD__REPLY__BODY__NOT_SET,
        [WIRE_WELCOME] = SHD__REPLY__BODY_WELCOME,
        [WIRE_LAYOUT] = SHD__REPLY__BODY_LAYOUT_INFO,
        [WIRE_PREPARED] = SHD__REPLY__BODY_PREPARED,
        [WIRE_COMMITTED] = SHD__REPLY__BODY_COMMITTED,
        [WIRE_BLOB] = SHD__REPLY__BODY_BLOB,
        [WIRE_LEAVES] = SHD__REPLY__BODY_LEAVES,
        [WIRE_STATUS_TEXT] = SHD__REPLY__BODY_STATUS_TEXT,
        [WIRE_CREDIT] = SHD__REPLY__BODY_CREDIT,
        [WIRE_LEASED] = SHD__REPLY__BODY_LEASED,
        [WIRE_CHECKPOINTED] = SHD__REPLY__BODY_CHECKPOINTED,
        [WIRE_RESTORED] = SHD__REPLY__BODY_RESTORED,
        [WIRE_FETCHED] = SHD__REPLY__BODY_FETCHED,
    };
    m->body_case = cases[r->type];
    m->welcome = &p->welcome; /* the union's members share their address */
    switch (r->type) {
    case WIRE_WELCOME:
        shd__welcome__init(&p->welcome);
        p->welcome.session = r->welcome.session;
        p->welcome.device = (char *)r->welcome.device;
        break;
    case WIRE_LAYOUT:
        layout_pack(&r->layout, p);
        break;
    case WIRE_PREPARED:
        prepared_pack(&r->prepared, p);
        break;
    case WIRE_COMMITTED:
        committed_pack(&r->committed, p);
        break;
    case WIRE_BLOB:
        shd__blob__init(&p->blob);
        p->blob.step = r->blob.step;
        p->blob.blob = wire_binary_of(r->blob.blob);
        break;
    case WIRE_LEAVES:
        leaves_pack(&r->leaves, &p->leaves);
        break;
    case WIRE_STATUS_TEXT:
        shd__status_text__init(&p->status_text);
        p->status_text.json = wire_binary_of(r->status_text.json);
        break;
    case WIRE_CREDIT:
        credit_pack(&r->credit, &p->credit);
        break;
    case WIRE_LEASED:
        leased_pack(&r->leased, &p->leased);
        break;
    case WIRE_FETCHED:
        shd__fetched__init(&p->fetched);
        p->fetched.step = r->fetched.step;
        break;
    case WIRE_CHECKPOINTED:
        checkpointed_pack(&r->checkpointed, p);
        break;
    case WIRE_RESTORED:
        shd__restored__init(&p->restored);
        p->restored.step = r->restored.step;
        p->restored.bytes = r->restored.bytes;
        break;
    case WIRE_REPLY_NONE:
        m->welcome = NULL;
        break;
    }
}

int wire_reply_pack(const struct wire_reply *reply, void *buf, size_t capacity, size_t *ret_bytes,
                    struct shd_err *e)
{
    CHECK((unsigned)reply->type <= WIRE_FETCHED);
    const int r = reply_check(reply, e);
    if (r != SHD_OK)
        return r;
    char text[SHD_ERR_TEXT_BYTES] = "";
    if (reply->status != SHD_OK && reply->text != NULL)
        memcpy(text, reply->text, strnlen(reply->text, sizeof text - 1));
    text_clean(text);
    Shd__Reply m;
    shd__reply__init(&m);
    m.seq = reply->seq;
    m.status = reply->status;
    m.text = text;
    struct reply_parts parts;
    body_pack(reply, &parts, &m);
    return wire_encode(&m.base, buf, capacity, ret_bytes, e);
}
