#include "tests/lib/wire_same.h"

#include <string.h>

static bool same_bytes(struct wire_bytes a, struct wire_bytes b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

static bool same_decision(struct decision a, struct decision b)
{
    return a.skip == b.skip && a.scale == b.scale && a.lr == b.lr && a.loss_scale == b.loss_scale &&
           a.good_steps == b.good_steps;
}

static bool same_metrics(const double *a, uint32_t a_count, const double *b, uint32_t b_count)
{
    return a_count == b_count && memcmp(a, b, a_count * sizeof *a) == 0;
}

static bool same_return(const struct wire_return *a, const struct wire_return *b)
{
    return a->model == b->model && a->step == b->step && a->micro == b->micro &&
           a->unit == b->unit && a->slot == b->slot && a->dtype == b->dtype && a->none == b->none &&
           a->turn == b->turn &&
           same_metrics(a->metrics, a->metric_count, b->metrics, b->metric_count);
}

bool same_request(const struct wire_request *a, const struct wire_request *b)
{
    if (a->seq != b->seq || a->session != b->session || a->type != b->type)
        return false;
    switch (a->type) {
    case WIRE_HELLO:
        return a->hello.protocol == b->hello.protocol && a->hello.role == b->hello.role &&
               memcmp(a->hello.token, b->hello.token, WIRE_TOKEN_BYTES) == 0 &&
               strcmp(a->hello.name, b->hello.name) == 0;
    case WIRE_OPEN_MODEL:
        return same_bytes(a->open_model.spec, b->open_model.spec) &&
               strcmp(a->open_model.name, b->open_model.name) == 0 &&
               a->open_model.owner == b->open_model.owner &&
               a->open_model.owners == b->open_model.owners &&
               a->open_model.slots == b->open_model.slots;
    case WIRE_RETURN:
        return same_return(&a->return_grad, &b->return_grad);
    case WIRE_PREPARE:
        return a->prepare.model == b->prepare.model && a->prepare.step == b->prepare.step;
    case WIRE_COMMIT:
        return a->commit.model == b->commit.model && a->commit.step == b->commit.step &&
               same_decision(a->commit.decision, b->commit.decision) &&
               a->commit.has_blob == b->commit.has_blob &&
               same_bytes(a->commit.blob, b->commit.blob);
    case WIRE_GET_BLOB:
        return a->get_blob.model == b->get_blob.model;
    case WIRE_DIGEST:
        return a->digest.model == b->digest.model && a->digest.tensor == b->digest.tensor &&
               a->digest.array == b->digest.array && a->digest.first_leaf == b->digest.first_leaf;
    case WIRE_LEASE:
        return a->lease.model == b->lease.model && a->lease.step == b->lease.step;
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
    case WIRE_RESTORE:
        return strcmp(a->restore.path, b->restore.path) == 0 &&
               same_bytes(a->restore.spec, b->restore.spec) &&
               a->restore.owner == b->restore.owner && a->restore.owners == b->restore.owners &&
               a->restore.weights == b->restore.weights;
    default:
        return true;
    }
}

static bool same_layout(const struct wire_layout *a, const struct wire_layout *b)
{
    if (a->model != b->model || a->step != b->step || !same_bytes(a->spec, b->spec) ||
        a->owner != b->owner || a->owners != b->owners || a->slots != b->slots ||
        a->slot_bytes != b->slot_bytes || a->segment_count != b->segment_count ||
        !same_bytes(a->in, b->in) || !same_bytes(a->device, b->device))
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
           a->has_decision == b->has_decision &&
           (!a->has_decision || same_decision(a->decision, b->decision));
}

bool same_reply(const struct wire_reply *a, const struct wire_reply *b)
{
    if (a->seq != b->seq || a->status != b->status || a->type != b->type ||
        strcmp(a->text, b->text) != 0)
        return false;
    switch (a->type) {
    case WIRE_WELCOME:
        return a->welcome.session == b->welcome.session &&
               strcmp(a->welcome.device, b->welcome.device) == 0;
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
               a->checkpointed.has_decision == b->checkpointed.has_decision &&
               (!a->checkpointed.has_decision ||
                same_decision(a->checkpointed.decision, b->checkpointed.decision));
    case WIRE_RESTORED:
        return a->restored.step == b->restored.step && a->restored.bytes == b->restored.bytes;
    case WIRE_FETCHED:
        return a->fetched.step == b->fetched.step;
    default:
        return true;
    }
}
