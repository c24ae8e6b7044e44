/* See wire_tables.h. A row is a field of shd.proto, in the order of its tags. Limits here are those
 * of any model; a model's own are its daemon's to check. */
#include "proto/wire/wire_tables.h"

#include "proto/base/check.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/tally.h"
#include "proto/share/unit_row.h"
#include "proto/spec/guard.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"
#include "proto/spec/spec.h"

#define MEMORY_BYTES_MAX (UINT64_C(1) << 62)
#define LEAF_BYTES       32u

/* T: the plain struct's name behind "wire_", which is the generated one's behind "shd__", too. */
#define ROW(T, member, ...)    ROW_OF(struct wire_##T, member, __VA_ARGS__)
#define ROW_OF(S, member, ...) ROW_AS(S, #member, member, __VA_ARGS__)
#define ROW_AS(S, text, member, ...)                                                             \
    {                                                                                            \
        .name = (text), .at = offsetof(S, member), .width = WIDTH(((S *)0)->member), __VA_ARGS__ \
    }
#define WIDTH(member)                                                               \
    _Generic((member), bool : 1, uint32_t : 4, float : 4, uint64_t : 8, double : 8, \
             const char * : 8, default : 0)
#define LIMITS(low, high)           .min = (low), .max = (high)
#define SINCE(name)                 .level = WIRE_LEVEL_##name
#define NEEDED_SINCE(name)          SINCE(name), .needed = true
#define MORE(T, member)             .more_at = offsetof(struct wire_##T, member)
#define ANY(T, member)              ROW(T, member, .form = WIRE_ANY)
#define RANGE(T, member, low, high) ROW(T, member, LIMITS(low, high))
#define REAL(T, member)             ROW(T, member, .form = WIRE_REAL)
#define UP_TO(T, member, high)      ROW(T, member, .form = WIRE_UP_TO, .max = (high))
#define INDEX(T, member)            ROW(T, member, .form = WIRE_INDEX)
#define NAME(T, member)             ROW(T, member, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1)
#define PATH(T, member)             ROW(T, member, .form = WIRE_PATH, .max = WIRE_PATH_BYTES_MAX - 1)
#define EXACT(T, member, size)      ROW(T, member, .form = WIRE_EXACT, LIMITS(size, size))
#define SPEC_AT(T)                                                                                 \
    ROW_AS(struct wire_##T, "spec_ticket", spec_at.ticket, .form = WIRE_ANY, NEEDED_SINCE(SPECS)), \
        ROW_AS(struct wire_##T, "spec_bytes", spec_at.bytes, .max = SPEC_JSON_BYTES_MAX,           \
               NEEDED_SINCE(SPECS)),                                                               \
        ROW_AS(struct wire_##T, "spec_sum", spec_at.sum, .max = WIRE_SUM_BYTES,                    \
               .multiple = WIRE_SUM_BYTES, NEEDED_SINCE(SPECS))
#define METRICS(T) ROW(T, metrics, .max = WIRE_METRICS_MAX, MORE(T, metric_count))
#define UNIT_UPDATES(T)                                                                         \
    ROW(T, unit_updates, .max = SHD_UNITS_MAX * sizeof(uint64_t), .multiple = sizeof(uint64_t), \
        NEEDED_SINCE(COUNTS))
#define SETTINGS_SINCE(T, member, name)                                                  \
    ROW(T, member, .max = SETTINGS_OLD_MAX * sizeof(double), .multiple = sizeof(double), \
        NEEDED_SINCE(name))
#define SETTINGS(T, member) SETTINGS_SINCE(T, member, STATES)
#define SETTINGS_MORE(T, member)                                              \
    ROW(T, member, .max = (SETTINGS_MAX - SETTINGS_OLD_MAX) * sizeof(double), \
        .multiple = sizeof(double), NEEDED_SINCE(AUDITS))
#define SETTINGS_JSON(T, member) ROW(T, member, .max = WIRE_SET_JSON_MAX, NEEDED_SINCE(STATES))

#define DECISION(T) ROW(T, decision, .max = 1, .of = &decision)
#define DECIDED(T)  ROW(T, decision, .max = 1, .of = &decision, MORE(T, has_decision))

#define MESSAGE(text, T, ...) MESSAGE_OF(struct wire_##T, text, T, __VA_ARGS__)
#define MESSAGE_OF(S, text, T, ...)                                                  \
    {                                                                                \
        .name = (text), .descriptor = &shd__##T##__descriptor, .fields = T##_fields, \
        .field_count = ARRAY_SIZE(T##_fields), .bytes = sizeof(S), __VA_ARGS__       \
    }

/* -- Inside others --------------------------------------------------------------------------- */

#define DECIDED_AS(member, as) ROW_OF(struct decision, member, .form = (as))
static const struct wire_field decision_fields[] = {
    DECIDED_AS(skip, WIRE_ANY),
    DECIDED_AS(scale, WIRE_REAL),
    DECIDED_AS(lr, WIRE_REAL),
    DECIDED_AS(loss_scale, WIRE_REAL),
    DECIDED_AS(good_steps, WIRE_ANY),
    DECIDED_AS(divisor, WIRE_REAL), /* the values of rates are the model's to check */
    ROW_OF(struct decision, rates, .max = DECISION_GROUPS_MAX * DECISION_RATES,
           .more_at = offsetof(struct decision, rate_count)),
    DECIDED_AS(put, WIRE_ANY),
    DECIDED_AS(updates, WIRE_ANY),
    DECIDED_AS(puts, WIRE_ANY),
    ROW_AS(struct decision, "guard", guard.what, .form = WIRE_UP_TO, .max = GUARD_WHAT_END - 1,
           NEEDED_SINCE(RULES)),
    ROW_AS(struct decision, "guard_stop", guard.stop, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW_AS(struct decision, "guard_value", guard.value, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW_AS(struct decision, "guard_bound", guard.bound, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW_AS(struct decision, "cause_unit", cause.unit, .form = WIRE_UP_TO, .max = SHD_UNITS_MAX,
           SINCE(AUDITS)),
    ROW_AS(struct decision, "cause_norm", cause.norm, .form = WIRE_ANY, SINCE(AUDITS)),
    ROW_AS(struct decision, "cause_group", cause.group, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX,
           SINCE(AUDITS)),
    ROW_AS(struct decision, "cause_share", cause.share, .form = WIRE_ANY, SINCE(AUDITS)),
    ROW_AS(struct decision, "guard_rewind", guard.rewind, .form = WIRE_ANY, NEEDED_SINCE(AUDITS)),
    ROW_OF(struct decision, micro_batches, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX,
           NEEDED_SINCE(AUDITS)),
    ROW_OF(struct decision, eps, .max = DECISION_GROUPS_MAX,
           .more_at = offsetof(struct decision, eps_count), NEEDED_SINCE(AUDITS)),
};
static const struct wire_message decision = MESSAGE_OF(struct decision, "decision", decision);

static const struct wire_field segment_fields[] = {
    ROW(segment, kind, .form = WIRE_KIND),
    ANY(segment, ticket),
    ROW(segment, bytes, LIMITS(1, MEMORY_BYTES_MAX), .multiple = SHD_PAGE_BYTES),
    UP_TO(segment, place, SEGMENT_CUDA),
};
static const struct wire_message segment = MESSAGE("layout.segments", segment);

/* -- Requests -------------------------------------------------------------------------------- */

static const struct wire_field hello_fields[] = {
    ANY(hello, protocol),
    RANGE(hello, role, WIRE_TRAINER, WIRE_ADMIN),
    EXACT(hello, token, WIRE_TOKEN_BYTES),
    NAME(hello, name),
    ANY(hello, rank),
    ROW(hello, level, .form = WIRE_ANY, SINCE(TOLD)),
    ROW(hello, view, .form = WIRE_ANY, SINCE(VIEWS)),
};
static const struct wire_field open_model_fields[] = {
    RANGE(open_model, spec, 0, SPEC_MESSAGE_BYTES_MAX),
    NAME(open_model, name),
    INDEX(open_model, owner),
    RANGE(open_model, owners, 1, SHD_OWNERS_MAX),
    UP_TO(open_model, slots, SHD_SLOTS_MAX),
    ANY(open_model, origin),
    ANY(open_model, settled),
    SPEC_AT(open_model),
    ROW(open_model, spec_apart, .form = WIRE_ANY, SINCE(SPECS)),
    ROW(open_model, one_count, .form = WIRE_ANY, SINCE(COUNTS)),
    ROW(open_model, first, .form = WIRE_ANY, SINCE(STATES)),
    ROW(open_model, twin, .form = WIRE_ANY, SINCE(PAIRS)),
};
static const struct wire_field return_fields[] = {
    ANY(return, model),
    ANY(return, step),
    UP_TO(return, micro, SHD_MICROS_MAX - 1),
    UP_TO(return, unit, SHD_UNITS_MAX - 1),
    UP_TO(return, slot, SHD_SLOTS_MAX - 1),
    ROW(return, dtype, .form = WIRE_DTYPE, LIMITS(SHD_F32, SHD_F16)),
    ANY(return, none),
    METRICS(return ),
    ANY(return, turn),
    ANY(return, attempt),
    ROW(return, metric_names, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1, SINCE(SPECS)),
};
static const struct wire_field prepare_fields[] = {
    ANY(prepare, model),
    ANY(prepare, step),
    ANY(prepare, attempt),
    ROW(prepare, unit_sums, .form = WIRE_UP_TO, .max = SHD_UNITS_MAX, SINCE(AUDITS)),
    ROW(prepare, part_sums, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, SINCE(AUDITS)),
};
static const struct wire_field commit_fields[] = {
    ANY(commit, model),
    ANY(commit, step),
    DECISION(commit),
    ANY(commit, has_blob),
    ROW(commit, blob, .form = WIRE_OPTIONAL, .max = WIRE_BLOB_BYTES_MAX),
    ANY(commit, norm),
    ROW(commit, attempt, .form = WIRE_ANY, SINCE(RULES)),
    ROW(commit, unit_norms, .max = GUARD_COLUMNS_MAX * sizeof(double), .multiple = sizeof(double),
        NEEDED_SINCE(AUDITS)),
    ROW(commit, recorded, .form = WIRE_ANY, SINCE(TWINS)),
};
static const struct wire_field get_blob_fields[] = { ANY(get_blob, model) };
static const struct wire_field digest_fields[] = {
    ANY(digest, model),
    UP_TO(digest, tensor, SHD_TENSORS_MAX - 1),
    UP_TO(digest, array, 3),
    ANY(digest, first_leaf),
    ROW(digest, tensors, .form = WIRE_UP_TO, .max = SHD_TENSORS_MAX, NEEDED_SINCE(RANGES)),
};
static const struct wire_field lease_fields[] = {
    ANY(lease, model),
    ANY(lease, step),
    ANY(lease, now),
    ANY(lease, back),
    UP_TO(lease, group, SHD_MICROS_MAX - 1),
    ANY(lease, attempt),
    ROW(lease, meet, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, NEEDED_SINCE(MEETS)),
};
static const struct wire_field checkpoint_fields[] = { ANY(checkpoint, model),
                                                       ANY(checkpoint, step),
                                                       PATH(checkpoint, path) };
static const struct wire_field restore_fields[] = {
    PATH(restore, path),
    RANGE(restore, spec, 0, SPEC_MESSAGE_BYTES_MAX),
    INDEX(restore, owner),
    RANGE(restore, owners, 1, SHD_OWNERS_MAX),
    ANY(restore, weights),
    ANY(restore, open),
    ANY(restore, replace),
    ANY(restore, restore_id),
    SPEC_AT(restore),
    ROW(restore, one_count, .form = WIRE_ANY, SINCE(COUNTS)),
    ROW(restore, force, .form = WIRE_ANY, NEEDED_SINCE(FORCES)),
    ROW(restore, beside, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
};
static const struct wire_field drain_fields[] = { ANY(drain, off) };
static const struct wire_field join_fields[] = { ANY(join, model),
                                                 EXACT(join, down, WIRE_LINK_ID_BYTES),
                                                 EXACT(join, up, WIRE_LINK_ID_BYTES),
                                                 ANY(join, timeout_ms) };
static const struct wire_field fetch_fields[] = {
    ANY(fetch, model),
    UP_TO(fetch, unit, SHD_UNITS_MAX - 1),
    ANY(fetch, step),
    RANGE(fetch, turn, 1, UINT64_MAX),
};
static const struct wire_field history_fields[] = {
    ANY(history, model), ANY(history, from), RANGE(history, count, 1, WIRE_ROWS_MAX),
    ROW(history, units_from, .form = WIRE_UP_TO, .max = SHD_UNITS_MAX, NEEDED_SINCE(AUDITS))
};
static const struct wire_field create_fields[] = {
    RANGE(create, what, WIRE_CREATE_BEGIN, WIRE_CREATE_PUT_DROP),
    RANGE(create, origin, 1, UINT64_MAX),
    NAME(create, name),
    RANGE(create, spec, 0, SPEC_MESSAGE_BYTES_MAX),
    INDEX(create, owner),
    RANGE(create, owners, 1, SHD_OWNERS_MAX),
    ANY(create, model),
    ANY(create, step),
    RANGE(create, arrays, 0, SHD_UNITS_MAX),
    ANY(create, consent),
    ROW(create, attempt, .form = WIRE_ANY, SINCE(SPECS)),
    SPEC_AT(create),
    UNIT_UPDATES(create),
    ROW(create, one_count, .form = WIRE_ANY, SINCE(COUNTS)),
    ROW(create, twin, .form = WIRE_ANY, SINCE(PAIRS)),
};
static const struct wire_field put_fields[] = { RANGE(put, origin, 1, UINT64_MAX),
                                                UP_TO(put, unit, SHD_UNITS_MAX - 1) };
static const struct wire_field get_fields[] = { ANY(get, model),
                                                UP_TO(get, unit, SHD_UNITS_MAX - 1),
                                                UP_TO(get, array, 3) };
static const struct wire_field reset_fields[] = { ANY(reset, model), ANY(reset, step),
                                                  RANGE(reset, attempt, 2, UINT64_MAX),
                                                  ANY(reset, agreed) };
static const struct wire_field show_fields[] = {
    ROW(show, model, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(show, tensor, .form = WIRE_UP_TO, .max = SHD_TENSORS_MAX - 1, NEEDED_SINCE(STATES)),
    ROW(show, array, LIMITS(WIRE_SHOW_PARAM, WIRE_SHOW_EMA), NEEDED_SINCE(STATES)),
    ROW(show, first, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(show, elems, LIMITS(1, SHD_MODEL_ELEMS_MAX), NEEDED_SINCE(STATES)),
    ROW(show, values, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
};
static const struct wire_field set_fields[] = {
    ROW(set, model, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    SETTINGS(set, change),
    ROW(set, from, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(set, look, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(set, go_on, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    SETTINGS_MORE(set, more),
    ROW(set, id, .form = WIRE_ANY, SINCE(AUDITS)),
};
static const struct wire_field snapshot_fields[] = {
    ROW(snapshot, model, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(snapshot, what, LIMITS(WIRE_SNAPSHOT_TAKE, WIRE_SNAPSHOT_EVERY), NEEDED_SINCE(RULES)),
    ROW(snapshot, step, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(snapshot, every, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(snapshot, keep, .form = WIRE_UP_TO, .max = WIRE_SNAPSHOTS_MAX - 1, NEEDED_SINCE(RULES)),
};
static const struct wire_field rewind_fields[] = {
    ROW(rewind, model, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewind, step, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewind, what, LIMITS(WIRE_REWIND_HOLD, WIRE_REWIND_FOLLOW), NEEDED_SINCE(RULES)),
    ROW(rewind, attempt, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewind, consent, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewind, keep_settings, .form = WIRE_ANY, SINCE(STAYS)),
};
static const struct wire_field pin_fields[] = {
    ROW(pin, model, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(pin, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(pin, ema, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
};
static const struct wire_field unpin_fields[] = {
    ROW(unpin, model, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
};
static const struct wire_field drop_fields[] = {
    ROW(drop, what, LIMITS(WIRE_DROP_HOLD, WIRE_DROP_WAIT), NEEDED_SINCE(STATES)),
    ROW(drop, name, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1, NEEDED_SINCE(STATES)),
    ROW(drop, first, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(drop, owner, .form = WIRE_INDEX, NEEDED_SINCE(STATES)),
    ROW(drop, owners, LIMITS(1, SHD_OWNERS_MAX), NEEDED_SINCE(STATES)),
    ROW(drop, force, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(drop, twin, .form = WIRE_ANY, SINCE(PAIRS)),
};
static const struct wire_field move_fields[] = {
    ROW(move, what, LIMITS(WIRE_MOVE_TELL, WIRE_MOVE_THERE), NEEDED_SINCE(MOVES)),
    ROW(move, name, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
    ROW(move, to, .form = WIRE_NAME, .max = WIRE_TO_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
    ROW(move, step, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
    ROW(move, id, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
    ROW(move, path, .form = WIRE_NAME, .max = WIRE_PATH_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
};
static const struct wire_field fork_fields[] = {
    ROW(fork, origin, LIMITS(1, UINT64_MAX), NEEDED_SINCE(STATES)),
    ROW(fork, model, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(fork, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    SETTINGS_SINCE(fork, settings, AUDITS),
    SETTINGS_MORE(fork, settings_more),
};

const struct wire_message wire_requests[] = {
    [WIRE_HELLO] = MESSAGE("hello", hello),
    [WIRE_OPEN_MODEL] = MESSAGE("open_model", open_model),
    [WIRE_RETURN] = MESSAGE("return", return ),
    [WIRE_PREPARE] = MESSAGE("prepare", prepare),
    [WIRE_COMMIT] = MESSAGE("commit", commit),
    [WIRE_GET_BLOB] = MESSAGE("get_blob", get_blob),
    [WIRE_DIGEST] = MESSAGE("digest", digest),
    [WIRE_STATUS] = { .name = "status", .descriptor = &shd__status__descriptor },
    [WIRE_DETACH] = { .name = "detach", .descriptor = &shd__detach__descriptor },
    [WIRE_LEASE] = MESSAGE("lease", lease),
    [WIRE_CHECKPOINT] = MESSAGE("checkpoint", checkpoint),
    [WIRE_RESTORE] = MESSAGE("restore", restore),
    [WIRE_DRAIN] = MESSAGE("drain", drain),
    [WIRE_JOIN] = MESSAGE("join", join),
    [WIRE_FETCH] = MESSAGE("fetch", fetch),
    [WIRE_HISTORY] = MESSAGE("history", history),
    [WIRE_CREATE] = MESSAGE("create", create),
    [WIRE_PUT] = MESSAGE("put", put),
    [WIRE_GET] = MESSAGE("get", get),
    [WIRE_RESET] = MESSAGE("reset", reset),
    [WIRE_SET] = MESSAGE("set", set),
    [WIRE_OPEN_RING] = { .name = "open_ring", .descriptor = &shd__open_ring__descriptor },
    [WIRE_PIN] = MESSAGE("pin", pin),
    [WIRE_UNPIN] = MESSAGE("unpin", unpin),
    [WIRE_SHOW] = MESSAGE("show", show),
    [WIRE_DROP] = MESSAGE("drop", drop),
    [WIRE_FORK] = MESSAGE("fork", fork),
    [WIRE_SNAPSHOT] = MESSAGE("snapshot", snapshot),
    [WIRE_REWIND] = MESSAGE("rewind", rewind),
    [WIRE_MOVE] = MESSAGE("move", move),
};

/* -- Replies --------------------------------------------------------------------------------- */

static const struct wire_field welcome_fields[] = { ANY(welcome, session), NAME(welcome, device),
                                                    ANY(welcome, kept), ANY(welcome, requests) };
static const struct wire_field layout_fields[] = {
    ANY(layout, model),
    ANY(layout, step),
    RANGE(layout, spec, 0, SPEC_MESSAGE_BYTES_MAX),
    INDEX(layout, owner),
    RANGE(layout, owners, 1, SHD_OWNERS_MAX),
    UP_TO(layout, slots, SHD_SLOTS_MAX),
    ROW(layout, slot_bytes, .max = MEMORY_BYTES_MAX / SHD_SLOTS_MAX, .multiple = SHD_PAGE_BYTES),
    ROW(layout, segments, .max = WIRE_SEGMENTS_MAX, .of = &segment, MORE(layout, segment_count)),
    DECIDED(layout),
    RANGE(layout, in, 0, SHD_MICROS_MAX / 8),
    ROW(layout, device, .max = WIRE_DEVICE_BYTES, .multiple = WIRE_DEVICE_BYTES),
    ANY(layout, origin),
    ANY(layout, restore_id),
    ANY(layout, twin_pid),
    ANY(layout, attempt),
    ROW(layout, spec_bytes, LIMITS(0, SPEC_JSON_BYTES_MAX), NEEDED_SINCE(SPECS)),
    ROW(layout, one_count, .form = WIRE_ANY, SINCE(SAID)),
    ROW(layout, instance, .form = WIRE_ANY, SINCE(STATES)),
    ROW(layout, guard_back, .form = WIRE_ANY, SINCE(AUDITS)),
    ROW(layout, room, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, SINCE(AUDITS)),
    ROW(layout, first, .form = WIRE_ANY, SINCE(PAIRS)),
};
static const struct wire_field prepared_fields[] = {
    ANY(prepared, step),
    ANY(prepared, finite),
    ROW(prepared, sum, LIMITS(FIXSUM_LIMBS, FIXSUM_LIMBS)),
    METRICS(prepared),
    DECIDED(prepared),
    ANY(prepared, over),
    ROW(prepared, reported, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, SINCE(SPECS)),
    SETTINGS(prepared, settings),
    ROW(prepared, guard, .max = sizeof(((struct guard_limits *)0)->numbers),
        .multiple = GUARD_LIMIT_NUMBERS * sizeof(double), NEEDED_SINCE(RULES)),
    SETTINGS_MORE(prepared, settings_more),
    ROW(prepared, unit_sums, .max = (uint64_t)WIRE_UNIT_SUMS_MAX * FIXSUM_BYTES,
        .multiple = FIXSUM_BYTES, SINCE(AUDITS)),
    ROW(prepared, unit_sums_from, .form = WIRE_UP_TO, .max = SHD_UNITS_MAX, SINCE(AUDITS)),
    ROW(prepared, part_sums_from, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, SINCE(AUDITS)),
    ROW(prepared, unit_limits, .max = sizeof(double) * WIRE_UNIT_SUMS_MAX * GUARD_RULES_MAX,
        .multiple = sizeof(double), NEEDED_SINCE(AUDITS)),
    ROW(prepared, unit_norms, .max = GUARD_COLUMNS_MAX * sizeof(double), .multiple = sizeof(double),
        SINCE(TWINS)),
};
static const struct wire_field committed_fields[] = { ANY(committed, step), DECISION(committed),
                                                      ANY(committed, over) };
static const struct wire_field blob_fields[] = { ANY(blob, step),
                                                 RANGE(blob, blob, 0, WIRE_BLOB_BYTES_MAX) };
static const struct wire_field leaves_fields[] = {
    ANY(leaves, step),
    ANY(leaves, updates),
    ANY(leaves, total),
    ROW(leaves, leaves, .max = (uint64_t)WIRE_LEAVES_MAX * LEAF_BYTES, .multiple = LEAF_BYTES),
};
static const struct wire_field status_text_fields[] = { ANY(status_text, json) };
static const struct wire_field credit_fields[] = { UP_TO(credit, slot, SHD_SLOTS_MAX - 1),
                                                   ANY(credit, stale) };
static const struct wire_field leased_fields[] = {
    ANY(leased, step),
    RANGE(leased, what, WIRE_LEASED_GROUP, WIRE_LEASED_NOTHING),
    UP_TO(leased, group, SHD_MICROS_MAX - 1),
};
static const struct wire_field checkpointed_fields[] = {
    ANY(checkpointed, step),
    ANY(checkpointed, updates),
    ANY(checkpointed, bytes),
    DECIDED(checkpointed),
    RANGE(checkpointed, blob, 0, WIRE_BLOB_BYTES_MAX),
    UNIT_UPDATES(checkpointed),
    SETTINGS_JSON(checkpointed, settings),
};
static const struct wire_field restored_fields[] = { ANY(restored, step), ANY(restored, bytes) };
static const struct wire_field fetched_fields[] = { ANY(fetched, step) };
static const struct wire_field rows_fields[] = {
    ANY(rows, next),
    ROW(rows, rows, .max = (uint64_t)WIRE_ROWS_MAX * HISTORY_ROW_BYTES,
        .multiple = HISTORY_ROW_BYTES),
    ROW(rows, audits, .max = AUDIT_SLOTS * AUDIT_ROW_BYTES, .multiple = AUDIT_ROW_BYTES,
        SINCE(AUDITS)),
    ROW(rows, units, .max = (uint64_t)WIRE_UNITS_MAX * UNIT_ROW_BYTES, .multiple = UNIT_ROW_BYTES,
        SINCE(AUDITS)),
    ROW(rows, units_step, .form = WIRE_ANY, SINCE(AUDITS)),
    ROW(rows, units_divisor, .form = WIRE_ANY, SINCE(AUDITS)),
    ROW(rows, units_skipped, .form = WIRE_ANY, SINCE(AUDITS)),
};
static const struct wire_field created_fields[] = {
    RANGE(created, what, WIRE_CREATED_YOURS, WIRE_CREATED_OVER),
    ANY(created, ticket),
    ROW(created, bytes, .max = MEMORY_BYTES_MAX, .multiple = SHD_PAGE_BYTES),
    NAME(created, by),
    ANY(created, consent),
};
static const struct wire_field got_fields[] = {
    ANY(got, step),
    ANY(got, updates),
    ANY(got, ticket),
    ROW(got, bytes, LIMITS(1, MEMORY_BYTES_MAX), .multiple = SHD_PAGE_BYTES),
};
static const struct wire_field reset_answer_fields[] = {
    ANY(reset_answer, step),
    ANY(reset_answer, attempt),
    RANGE(reset_answer, what, WIRE_RESET_DONE, WIRE_RESET_OVER),
};
static const struct wire_field ring_fields[] = {
    ROW(ring, requests, .form = WIRE_ANY, NEEDED_SINCE(RINGS)),
    ROW(ring, replies, .form = WIRE_ANY, NEEDED_SINCE(RINGS)),
    ROW(ring, bytes, LIMITS(1, MEMORY_BYTES_MAX), .multiple = SHD_PAGE_BYTES, NEEDED_SINCE(RINGS)),
};
static const struct wire_field shown_fields[] = {
    ROW(shown, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(shown, updates, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(shown, of_step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(shown, groups, .form = WIRE_UP_TO, .max = SHD_MICROS_MAX, NEEDED_SINCE(STATES)),
    ROW(shown, tally, .max = TALLY_BYTES, .multiple = TALLY_BYTES, NEEDED_SINCE(STATES)),
    ROW(shown, values, .max = (uint64_t)WIRE_VALUES_MAX * sizeof(float), .multiple = sizeof(float),
        NEEDED_SINCE(STATES)),
};
static const struct wire_field set_answer_fields[] = {
    ROW(set_answer, from, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    SETTINGS_JSON(set_answer, json),
};
static const struct wire_field pinned_fields[] = {
    ROW(pinned, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(pinned, ticket, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(pinned, segment, LIMITS(1, UINT64_MAX), NEEDED_SINCE(STATES)),
    ROW(pinned, bytes, LIMITS(1, MEMORY_BYTES_MAX), .multiple = SHD_PAGE_BYTES,
        NEEDED_SINCE(STATES)),
};
static const struct wire_field dropped_fields[] = {
    ROW(dropped, what, LIMITS(WIRE_DROPPED_HELD, WIRE_DROPPED_KEPT), NEEDED_SINCE(STATES)),
    ROW(dropped, instance, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(dropped, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(dropped, near, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1, NEEDED_SINCE(STATES)),
    ROW(dropped, first, .form = WIRE_ANY, SINCE(PAIRS)),
};
static const struct wire_field forked_fields[] = {
    ROW(forked, step, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
    ROW(forked, updates, .form = WIRE_ANY, NEEDED_SINCE(STATES)),
};
static const struct wire_field snapshots_fields[] = {
    ROW(snapshots, step, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(snapshots, every, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(snapshots, keep, .form = WIRE_UP_TO, .max = WIRE_SNAPSHOTS_MAX - 1, NEEDED_SINCE(RULES)),
    ROW(snapshots, rows, .max = (uint64_t)WIRE_SNAPSHOTS_MAX * WIRE_SNAPSHOT_BYTES,
        .multiple = WIRE_SNAPSHOT_BYTES, NEEDED_SINCE(RULES)),
};
static const struct wire_field rewound_fields[] = {
    ROW(rewound, step, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewound, attempt, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
    ROW(rewound, consent, .form = WIRE_ANY, NEEDED_SINCE(RULES)),
};
static const struct wire_field moved_fields[] = {
    ROW(moved, what, LIMITS(WIRE_MOVED_TOLD, WIRE_MOVED_NOT), NEEDED_SINCE(MOVES)),
    ROW(moved, instance, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
    ROW(moved, step, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
    ROW(moved, id, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
    ROW(moved, to, .form = WIRE_NAME, .max = WIRE_TO_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
    ROW(moved, path, .form = WIRE_NAME, .max = WIRE_PATH_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
    ROW(moved, name, .form = WIRE_NAME, .max = WIRE_NAME_BYTES_MAX - 1, NEEDED_SINCE(MOVES)),
    ROW(moved, there, .form = WIRE_ANY, NEEDED_SINCE(MOVES)),
};

const struct wire_message wire_replies[] = {
    [WIRE_WELCOME] = MESSAGE("welcome", welcome),
    [WIRE_LAYOUT] = MESSAGE("layout", layout),
    [WIRE_PREPARED] = MESSAGE("prepared", prepared),
    [WIRE_COMMITTED] = MESSAGE("committed", committed),
    [WIRE_BLOB] = MESSAGE("blob", blob),
    [WIRE_LEAVES] = MESSAGE("leaves", leaves),
    [WIRE_STATUS_TEXT] = MESSAGE("status_text", status_text),
    [WIRE_CREDIT] = MESSAGE("credit", credit),
    [WIRE_LEASED] = MESSAGE("leased", leased),
    [WIRE_CHECKPOINTED] = MESSAGE("checkpointed", checkpointed),
    [WIRE_RESTORED] = MESSAGE("restored", restored),
    [WIRE_FETCHED] = MESSAGE("fetched", fetched),
    [WIRE_ROWS] = MESSAGE("rows", rows),
    [WIRE_CREATED] = MESSAGE("created", created),
    [WIRE_GOT] = MESSAGE("got", got),
    [WIRE_RESET_ANSWER] = MESSAGE("reset_answer", reset_answer),
    [WIRE_RING] = MESSAGE("ring", ring),
    [WIRE_PINNED] = MESSAGE("pinned", pinned),
    [WIRE_SHOWN] = MESSAGE("shown", shown),
    [WIRE_DROPPED] = MESSAGE("dropped", dropped),
    [WIRE_FORKED] = MESSAGE("forked", forked),
    [WIRE_SET_ANSWER] = MESSAGE("set_answer", set_answer),
    [WIRE_SNAPSHOTS] = MESSAGE("snapshots", snapshots),
    [WIRE_REWOUND] = MESSAGE("rewound", rewound),
    [WIRE_MOVED] = MESSAGE("moved", moved),
};
