#include "tests/lib/proto_same.h"

#include <string.h>

static bool same_bytes(struct wire_bytes a, struct wire_bytes b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

/* Bit by bit: a NaN among a guard's values is the same NaN behind another round. */
static bool same_decision(struct decision a, struct decision b)
{
    return decision_equal(&a, &b) && a.updates == b.updates && a.cause.unit == b.cause.unit &&
           a.cause.group == b.cause.group &&
           memcmp(&a.cause.norm, &b.cause.norm, sizeof a.cause.norm) == 0 &&
           memcmp(&a.cause.share, &b.cause.share, sizeof a.cause.share) == 0;
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

static bool same_hello(const struct wire_hello *a, const struct wire_hello *b)
{
    return a->protocol == b->protocol && a->role == b->role &&
           memcmp(a->token, b->token, WIRE_TOKEN_BYTES) == 0 && strcmp(a->name, b->name) == 0 &&
           a->rank == b->rank && a->level == b->level && a->view == b->view;
}

static bool same_open_model(const struct wire_open_model *a, const struct wire_open_model *b)
{
    return same_bytes(a->spec, b->spec) && strcmp(a->name, b->name) == 0 && a->owner == b->owner &&
           a->owners == b->owners && a->slots == b->slots && a->origin == b->origin &&
           a->settled == b->settled && a->spec_apart == b->spec_apart &&
           a->one_count == b->one_count && a->first == b->first && a->twin == b->twin &&
           same_spec_at(&a->spec_at, &b->spec_at);
}

static bool same_commit(const struct wire_commit *a, const struct wire_commit *b)
{
    return a->model == b->model && a->step == b->step && same_decision(a->decision, b->decision) &&
           a->has_blob == b->has_blob && same_bytes(a->blob, b->blob) &&
           memcmp(&a->norm, &b->norm, sizeof a->norm) == 0 && a->attempt == b->attempt &&
           same_bytes(a->unit_norms, b->unit_norms) && a->recorded == b->recorded;
}

static bool same_create(const struct wire_create *a, const struct wire_create *b)
{
    return a->what == b->what && a->origin == b->origin && strcmp(a->name, b->name) == 0 &&
           same_bytes(a->spec, b->spec) && a->owner == b->owner && a->owners == b->owners &&
           a->consent == b->consent && a->attempt == b->attempt && a->one_count == b->one_count &&
           a->twin == b->twin && same_spec_at(&a->spec_at, &b->spec_at) &&
           same_bytes(a->unit_updates, b->unit_updates);
}

static bool same_restore(const struct wire_restore *a, const struct wire_restore *b)
{
    return strcmp(a->path, b->path) == 0 && same_bytes(a->spec, b->spec) && a->owner == b->owner &&
           a->owners == b->owners && a->weights == b->weights && a->open == b->open &&
           a->replace == b->replace && a->force == b->force && a->restore_id == b->restore_id &&
           a->one_count == b->one_count && a->beside == b->beside &&
           same_spec_at(&a->spec_at, &b->spec_at);
}

bool same_request(const struct wire_request *a, const struct wire_request *b)
{
    if (a->seq != b->seq || a->session != b->session || a->type != b->type)
        return false;
    switch (a->type) {
    case WIRE_HELLO:
        return same_hello(&a->hello, &b->hello);
    case WIRE_OPEN_MODEL:
        return same_open_model(&a->open_model, &b->open_model);
    case WIRE_RETURN:
        return same_return(&a->return_grad, &b->return_grad);
    case WIRE_PREPARE:
        return a->prepare.model == b->prepare.model && a->prepare.step == b->prepare.step &&
               a->prepare.attempt == b->prepare.attempt &&
               a->prepare.unit_sums == b->prepare.unit_sums &&
               a->prepare.part_sums == b->prepare.part_sums;
    case WIRE_COMMIT:
        return same_commit(&a->commit, &b->commit);
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
               a->history.count == b->history.count &&
               a->history.units_from == b->history.units_from;
    case WIRE_CREATE:
        return same_create(&a->create, &b->create);
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
               same_bytes(a->set.more, b->set.more) && a->set.id == b->set.id &&
               a->set.from == b->set.from && a->set.look == b->set.look &&
               a->set.go_on == b->set.go_on;
    case WIRE_DROP:
        return a->drop.what == b->drop.what && strcmp(a->drop.name, b->drop.name) == 0 &&
               a->drop.first == b->drop.first && a->drop.owner == b->drop.owner &&
               a->drop.owners == b->drop.owners && a->drop.force == b->drop.force &&
               a->drop.twin == b->drop.twin;
    case WIRE_FORK:
        return a->fork.origin == b->fork.origin && a->fork.model == b->fork.model &&
               a->fork.step == b->fork.step && same_bytes(a->fork.settings, b->fork.settings) &&
               same_bytes(a->fork.settings_more, b->fork.settings_more);
    case WIRE_SNAPSHOT:
        return a->snapshot.model == b->snapshot.model && a->snapshot.what == b->snapshot.what &&
               a->snapshot.step == b->snapshot.step && a->snapshot.every == b->snapshot.every &&
               a->snapshot.keep == b->snapshot.keep;
    case WIRE_REWIND:
        return a->rewind.model == b->rewind.model && a->rewind.step == b->rewind.step &&
               a->rewind.what == b->rewind.what && a->rewind.attempt == b->rewind.attempt &&
               a->rewind.consent == b->rewind.consent &&
               a->rewind.keep_settings == b->rewind.keep_settings;
    case WIRE_MOVE:
        return a->move.what == b->move.what && strcmp(a->move.name, b->move.name) == 0 &&
               strcmp(a->move.to, b->move.to) == 0 && strcmp(a->move.path, b->move.path) == 0 &&
               a->move.step == b->move.step && a->move.id == b->move.id;
    case WIRE_PIN:
        return a->pin.model == b->pin.model && a->pin.step == b->pin.step &&
               a->pin.ema == b->pin.ema;
    case WIRE_UNPIN:
        return a->unpin.model == b->unpin.model;
    case WIRE_RESTORE:
        return same_restore(&a->restore, &b->restore);
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
        a->spec_bytes != b->spec_bytes || a->instance != b->instance || a->room != b->room ||
        a->one_count != b->one_count || a->first != b->first || !same_bytes(a->in, b->in) ||
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
           same_bytes(a->settings, b->settings) && same_bytes(a->settings_more, b->settings_more) &&
           same_bytes(a->guard, b->guard) && same_bytes(a->unit_sums, b->unit_sums) &&
           same_bytes(a->unit_limits, b->unit_limits) && same_bytes(a->unit_norms, b->unit_norms) &&
           a->unit_sums_from == b->unit_sums_from && a->part_sums_from == b->part_sums_from &&
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
        return a->rows.next == b->rows.next && same_bytes(a->rows.rows, b->rows.rows) &&
               same_bytes(a->rows.units, b->rows.units) &&
               a->rows.units_step == b->rows.units_step &&
               memcmp(&a->rows.units_divisor, &b->rows.units_divisor, sizeof(double)) == 0 &&
               a->rows.units_skipped == b->rows.units_skipped &&
               same_bytes(a->rows.audits, b->rows.audits);
    case WIRE_RESET_ANSWER:
        return a->reset_answer.step == b->reset_answer.step &&
               a->reset_answer.attempt == b->reset_answer.attempt &&
               a->reset_answer.what == b->reset_answer.what;
    case WIRE_GOT:
        return a->got.step == b->got.step && a->got.updates == b->got.updates &&
               a->got.ticket == b->got.ticket && a->got.bytes == b->got.bytes;
    case WIRE_RING:
        return a->ring.requests == b->ring.requests && a->ring.replies == b->ring.replies &&
               a->ring.bytes == b->ring.bytes;
    case WIRE_SET_ANSWER:
        return a->set_answer.from == b->set_answer.from &&
               same_bytes(a->set_answer.json, b->set_answer.json);
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
               a->dropped.step == b->dropped.step &&
               strcmp(a->dropped.near, b->dropped.near) == 0 &&
               a->dropped.first == b->dropped.first;
    case WIRE_SNAPSHOTS:
        return a->snapshots.step == b->snapshots.step && a->snapshots.every == b->snapshots.every &&
               a->snapshots.keep == b->snapshots.keep &&
               same_bytes(a->snapshots.rows, b->snapshots.rows);
    case WIRE_REWOUND:
        return a->rewound.step == b->rewound.step && a->rewound.attempt == b->rewound.attempt &&
               a->rewound.consent == b->rewound.consent;
    case WIRE_MOVED:
        return a->moved.what == b->moved.what && a->moved.instance == b->moved.instance &&
               a->moved.step == b->moved.step && a->moved.id == b->moved.id &&
               strcmp(a->moved.to, b->moved.to) == 0 && strcmp(a->moved.path, b->moved.path) == 0 &&
               strcmp(a->moved.name, b->moved.name) == 0 && a->moved.there == b->moved.there;
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
