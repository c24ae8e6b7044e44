/* See turn.h. */
#include "client/paths/turn.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "client/paths/cause.h"
#include "client/paths/watch.h"
#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "proto/spec/settings.h"

enum turn_naming { /* PREPARING: it is decided, and asked what it came from, */
                   NAMING_NOT,
                   NAMING_UNITS,
                   NAMING_GROUPS /* of the unit that is found */
};

struct turn_owner {
    bool asked; /* what the state asks for, and it is not answered */
    bool in;    /* it is answered */
    bool lost;  /* a replica */
};

struct turn {
    uint32_t owners;
    uint32_t members; /* owners, then their replicas; or none */
    uint32_t missing; /* answers, in this state */
    uint32_t anew;    /* so often all were asked once more */
    uint64_t step;
    struct turn_update update;
    enum turn_state state;
    struct settings settings;  /* owner 0's */
    struct guard_limits guard; /* likewise */
    struct decided decided;
    enum turn_naming naming;
    bool lost;                      /* somebody, since it began */
    bool has_decided;               /* it was COMMITTING */
    bool counted;                   /* owner 0 has committed: decided.decision is what counts */
    struct turn_owner *owner;       /* [members], behind the turn */
    struct wire_prepared *prepared; /* [members], behind that */
    struct cause *cause;            /* behind that; while naming */
    struct watch watch;
    double squares;       /* of the unit that is found */
    bool measured;        /* update.norms is of all units */
    bool told;            /* likewise, as owner 0, or its replica, has them on record */
    uint32_t limit_count; /* of the page that is asked for: owner 0's */
    double limits[WIRE_UNIT_SUMS_MAX * GUARD_RULES_MAX];
};

static uint64_t aligned(uint64_t bytes)
{
    const uint64_t align = _Alignof(max_align_t);
    return (bytes + align - 1) / align * align;
}

uint64_t turn_bytes(uint32_t members)
{
    return aligned(sizeof(struct turn)) + aligned(members * sizeof(struct turn_owner)) +
           aligned(members * sizeof(struct wire_prepared)) + sizeof(struct cause);
}

struct turn *turn_init(void *memory, uint32_t owners, uint32_t members)
{
    CHECK(owners > 0 && (members == owners || members == 2 * owners));
    struct turn *t = memory;
    uint8_t *behind = (uint8_t *)memory + aligned(sizeof *t);
    memset(memory, 0, turn_bytes(members));
    t->owners = owners;
    t->members = members;
    t->state = TURN_OVER; /* nothing has begun */
    t->owner = (void *)behind;
    behind += aligned(members * sizeof *t->owner);
    t->prepared = (void *)behind;
    t->cause = (void *)(behind + aligned(members * sizeof *t->prepared));
    return t;
}

/* Of those that the state asks: what a step came from is asked of owners alone. */
static uint32_t count_asked(const struct turn *t)
{
    return t->naming != NAMING_NOT && t->state == TURN_PREPARING ? t->owners : t->members;
}

static void enter(struct turn *t, enum turn_state state)
{
    t->state = state;
    t->has_decided = t->has_decided || state == TURN_COMMITTING;
    t->missing = 0;
    for (uint32_t i = 0; i < t->members; i++) {
        t->owner[i].asked = t->owner[i].in = false;
        t->missing += i < count_asked(t) && !t->owner[i].lost;
    }
}

static void prepare_all(struct turn *t)
{
    t->settings.count = t->guard.count = 0;
    t->counted = t->told = false;
    t->naming = NAMING_NOT;
    enter(t, TURN_PREPARING);
}

void turn_begin(struct turn *t, uint64_t step, const struct turn_update *update)
{
    t->step = step;
    t->update = *update;
    t->update.args.prepared = t->prepared;
    t->update.args.owners = t->owners;
    t->update.args.settings = &t->settings;
    t->update.args.guard = &t->guard;
    t->decided = (struct decided){ 0 };
    t->lost = t->has_decided = t->measured = false;
    prepare_all(t);
}

static enum turn_kind kind_now(const struct turn *t)
{
    return t->state == TURN_PREPARING ? TURN_PREPARE : TURN_COMMIT;
}

static bool asking(const struct turn *t)
{
    return t->state == TURN_PREPARING || t->state == TURN_COMMITTING;
}

/* May the member be asked? A commit is owner 0's alone until it has said which decision counts, and
 * then its replica's: so whichever of these two is lost, nobody else has another one. */
static bool may_ask(const struct turn *t, uint32_t member)
{
    const bool replicated = t->members > t->owners && !t->owner[t->owners].lost;
    if (!asking(t) || member >= count_asked(t))
        return false;
    if (t->state != TURN_COMMITTING || member == 0)
        return true;
    return t->counted && (!replicated || member == t->owners || t->owner[t->owners].in);
}

bool turn_next(const struct turn *t, uint32_t *ret_owner, enum turn_kind *ret_kind)
{
    for (uint32_t i = 0; i < t->members; i++) {
        if (t->owner[i].in || t->owner[i].asked || t->owner[i].lost || !may_ask(t, i))
            continue;
        *ret_owner = i;
        *ret_kind = kind_now(t);
        return true;
    }
    return false;
}

void turn_asked(struct turn *t, uint32_t owner, enum turn_kind kind)
{
    CHECK(owner < t->members);
    CHECK(asking(t) && kind == kind_now(t));
    CHECK(!t->owner[owner].in);
    t->owner[owner].asked = true;
}

static int check_step(const struct turn *t, uint32_t owner, uint64_t step, const char *what,
                      struct shd_err *e)
{
    if (step == t->step)
        return SHD_OK;
    return err_set(e, SHD_EPROTO,
                   "owner %" PRIu32 " %s step %" PRIu64 ", asked for was step %" PRIu64, owner,
                   what, step, t->step);
}

static void take_in(struct turn *t, uint32_t owner)
{
    t->owner[owner].in = true;
    t->owner[owner].asked = false;
    CHECK(t->missing > 0);
    t->missing--;
}

/* -- Preparing --------------------------------------------------------------------------------- */

static bool any_record(const struct turn *t)
{
    for (uint32_t i = 0; i < t->owners; i++)
        if (t->prepared[i].has_decision)
            return true;
    return false;
}

/* The same gradients make the same sum; and what any member has recorded counts. */
static int check_replicas(struct turn *t, struct shd_err *e)
{
    for (uint32_t i = t->owners; i < t->members; i++) {
        const struct wire_prepared *replica = &t->prepared[i];
        struct wire_prepared *owner = &t->prepared[i - t->owners];
        if (t->owner[i].lost)
            continue;
        if (replica->finite != owner->finite ||
            (owner->finite && fixsum_compare(&replica->sum, &owner->sum) != 0))
            return err_set(e, SHD_EINTERNAL,
                           "owner %" PRIu32 " and its replica were returned other gradients of "
                           "step %" PRIu64 ": their sums of squares are %g and %g",
                           i - t->owners, t->step, fixsum_value(&owner->sum),
                           fixsum_value(&replica->sum));
        if (replica->has_decision && owner->has_decision &&
            !decision_equal(&replica->decision, &owner->decision))
            return err_set(e, SHD_EINTERNAL,
                           "owner %" PRIu32 " and its replica recorded other decisions of step "
                           "%" PRIu64,
                           i - t->owners, t->step);
        if (replica->has_decision) {
            owner->has_decision = true;
            owner->decision = replica->decision;
        }
    }
    return SHD_OK;
}

static bool is_infinite(const struct turn *t)
{
    return t->decided.cause == DECIDE_CAUSE_INFINITE;
}

/* All owners' replies are in. */
static int derive(struct turn *t, struct shd_err *e)
{
    const int same = check_replicas(t, e);
    if (same != SHD_OK)
        return same;
    if (t->update.recorded_only && !any_record(t) && t->lost) {
        t->state = TURN_OVER; /* who had it is lost, perhaps: nobody is past the step any more */
        return SHD_OK;
    }
    if (t->update.recorded_only && !any_record(t))
        return err_set(
            e, SHD_EINTERNAL,
            "no owner has the decision of step %" PRIu64 " on record, and one is past it", t->step);
    t->measured = t->told;
    const int r = decide(&t->update.args, &t->decided, e);
    if (r != SHD_OK)
        return r;
    const bool watches = t->update.watched != NULL && !any_record(t);
    const bool named = t->update.units > 0 && (watches || t->decided.cause != DECIDE_CAUSE_NONE);
    watch_begin(&t->watch, watches && !is_infinite(t) ? t->update.watched : NULL);
    t->naming = named ? NAMING_UNITS : NAMING_NOT;
    if (named)
        cause_begin(t->cause, t->update.units, /* groups= */ false, is_infinite(t));
    enter(t, named ? TURN_PREPARING : TURN_COMMITTING);
    return SHD_OK;
}

static void end_naming(struct turn *t)
{
    t->naming = NAMING_NOT;
    enter(t, TURN_COMMITTING);
}

static double norm_of(const struct turn *t, double squares)
{
    const struct decision *d = &t->decided.decision;
    const double count = d->divisor > 0 ? d->divisor : t->update.args.micro_batches;
    return sqrt(squares) / count / d->loss_scale;
}

static bool watches_page(const struct turn *t)
{
    return t->naming == NAMING_UNITS && t->watch.watched != NULL;
}

/* Owner 0 tells the page's units their own limits. */
static int take_limits(struct turn *t, const struct wire_bytes *limits, struct shd_err *e)
{
    const struct cause *c = t->cause;
    t->limit_count = 0;
    for (uint32_t i = 0; i < WIRE_UNIT_SUMS_MAX && c->first + i < c->count; i++)
        t->limit_count += watch_own(&t->guard, t->watch.watched[c->first + i]);
    if (limits->bytes != t->limit_count * sizeof *t->limits)
        return err_set(e, SHD_EPROTO,
                       "%zu bytes are not the %" PRIu32 " limits of units from %" PRIu32,
                       limits->bytes, t->limit_count, c->first);
    if (limits->bytes > 0)
        memcpy(t->limits, limits->data, limits->bytes);
    return SHD_OK;
}

/* All owners have told the page. */
static void watch_page(struct turn *t)
{
    const struct turn_update *u = &t->update;
    const struct cause *c = t->cause;
    const double *own = t->limits;
    for (uint32_t i = 0; i < WIRE_UNIT_SUMS_MAX && c->first + i < c->count; i++) {
        const uint32_t unit = c->first + i;
        const double squares = fixsum_value(&c->sums[i]), norm = norm_of(t, squares);
        watch_unit(&t->watch, &t->guard, &(struct watch_unit){ unit, norm, squares, own });
        own += watch_own(&t->guard, t->watch.watched[unit]);
        if (u->columns > 0 && u->column[unit] > 0)
            u->norms[u->column[unit] - 1] = norm;
    }
}

/* The unit is known, and whether the step is skipped for one. */
static void take_unit(struct turn *t)
{
    struct decision *d = &t->decided.decision;
    const bool by_unit = t->watch.watched != NULL && watch_end(&t->watch, &t->guard, d);
    struct decision_cause *cause = &d->cause;
    t->measured = t->watch.watched != NULL;
    t->squares = by_unit ? t->watch.squares : fixsum_value(&t->cause->largest);
    if (by_unit)
        cause->unit = t->watch.unit + 1;
    else if (t->decided.cause != DECIDE_CAUSE_NONE)
        cause->unit = t->cause->found;
    if (cause->unit > 0)
        cause->norm = is_infinite(t) ? (double)INFINITY : norm_of(t, t->squares);
    if (cause->unit == 0 || t->update.groups == 0) {
        end_naming(t);
        return;
    }
    t->naming = NAMING_GROUPS;
    cause_begin(t->cause, t->update.groups, /* groups= */ true, is_infinite(t));
    enter(t, TURN_PREPARING);
}

static void take_group(struct turn *t)
{
    struct decision_cause *cause = &t->decided.decision.cause;
    cause->group = t->cause->found;
    if (cause->group > 0)
        cause->share = is_infinite(t) ? 1 : (float)(fixsum_value(&t->cause->largest) / t->squares);
    end_naming(t);
}

/* Sums from an owner, which has no decision on record. */
static int name(struct turn *t, uint32_t owner, const struct wire_prepared *prepared,
                struct shd_err *e)
{
    if (prepared->unit_sums_from == 0 && t->watch.watched != NULL && t->naming == NAMING_UNITS)
        return err_set(e, SHD_ENOTSUP,
                       "owner %" PRIu32 " does not tell the norms of its units, which the guard "
                       "has rules of: it is of an older version",
                       owner);
    if (prepared->unit_sums_from == 0) { /* it does not know */
        end_naming(t);
        return SHD_OK;
    }
    if (prepared->unit_sums_from != turn_unit_sums(t) ||
        prepared->part_sums_from != turn_part_sums(t))
        return SHD_OK; /* a repeat */
    int r = cause_take(t->cause, &prepared->unit_sums, e);
    if (r == SHD_OK && owner == 0 && watches_page(t))
        r = take_limits(t, &prepared->unit_limits, e);
    if (r != SHD_OK)
        return r;
    take_in(t, owner);
    if (t->missing > 0)
        return SHD_OK;
    if (watches_page(t))
        watch_page(t);
    if (cause_next(t->cause))
        enter(t, TURN_PREPARING);
    else if (t->naming == NAMING_UNITS)
        take_unit(t);
    else
        take_group(t);
    return SHD_OK;
}

/* What owner 0 says of a step. */
static int take_said(struct turn *t, uint32_t owner, const struct wire_prepared *prepared,
                     struct shd_err *e)
{
    const struct settings_bytes set = { prepared->settings.data, prepared->settings_more.data,
                                        prepared->settings.bytes, prepared->settings_more.bytes };
    if (owner != 0)
        return SHD_OK;
    const int r = settings_unpack(&set, /* change= */ false, &t->settings, e);
    return r != SHD_OK
               ? r
               : guard_limits_unpack(prepared->guard.data, prepared->guard.bytes, &t->guard, e);
}

/* With a decision on record, what owner 0 keeps of units in that step. */
static int take_norms(struct turn *t, uint32_t owner, const struct wire_prepared *prepared,
                      struct shd_err *e)
{
    const struct wire_bytes *norms = &prepared->unit_norms;
    if (owner % t->owners != 0 || !prepared->has_decision || norms->bytes == 0 ||
        t->update.columns == 0)
        return SHD_OK;
    if (norms->bytes != t->update.columns * sizeof *t->update.norms)
        return err_set(e, SHD_EPROTO,
                       "%zu bytes are not the norms of the %" PRIu32
                       " units that the guard has rules of",
                       norms->bytes, t->update.columns);
    memcpy(t->update.norms, norms->data, norms->bytes);
    t->told = true;
    return SHD_OK;
}

int turn_prepared(struct turn *t, uint32_t owner, const struct wire_prepared *prepared,
                  struct shd_err *e)
{
    CHECK(owner < t->members);
    if (t->state != TURN_PREPARING || t->owner[owner].in || t->owner[owner].lost ||
        owner >= count_asked(t))
        return SHD_OK; /* a repeat */
    int r = check_step(t, owner, prepared->step, "prepared", e);
    if (r == SHD_OK)
        r = take_said(t, owner, prepared, e);
    if (r != SHD_OK)
        return r;
    if (prepared->over) {
        t->state = TURN_OVER;
        return SHD_OK;
    }
    if (prepared->has_decision && prepared->decision.put != 0) {
        t->decided.decision = prepared->decision;
        enter(t, TURN_COMMITTING);
        return SHD_OK;
    }
    if (t->naming != NAMING_NOT && !prepared->has_decision)
        return name(t, owner, prepared, e);
    r = take_norms(t, owner, prepared, e);
    if (r != SHD_OK)
        return r;
    t->prepared[owner] = *prepared;
    t->prepared[owner].settings = (struct wire_bytes){ 0 }; /* theirs go with the message */
    t->prepared[owner].settings_more = (struct wire_bytes){ 0 };
    t->prepared[owner].guard = (struct wire_bytes){ 0 };
    t->prepared[owner].unit_sums = (struct wire_bytes){ 0 };
    t->prepared[owner].unit_limits = (struct wire_bytes){ 0 };
    t->prepared[owner].unit_norms = (struct wire_bytes){ 0 };
    take_in(t, owner);
    return t->missing == 0 || t->naming != NAMING_NOT ? derive(t, e) : SHD_OK;
}

/* -- Committing -------------------------------------------------------------------------------- */

/* Owner 0's decision counts, and it must be the same one everywhere. */
static int check_counts(const struct turn *t, uint32_t owner, const struct decision *decision,
                        struct shd_err *e)
{
    const struct decision *first = &t->decided.decision;
    if (!t->counted || decision_equal(decision, first))
        return SHD_OK;
    return err_set(e, SHD_EINTERNAL,
                   "owner %" PRIu32 " applies step %" PRIu64
                   " with scale %g and rate %g, owner 0 with %g and %g",
                   owner, t->step, (double)decision->scale, decision->lr, (double)first->scale,
                   first->lr);
}

int turn_committed(struct turn *t, uint32_t owner, const struct wire_committed *committed,
                   struct shd_err *e)
{
    CHECK(owner < t->members);
    if (t->state != TURN_COMMITTING || t->owner[owner].in || t->owner[owner].lost)
        return SHD_OK; /* a repeat */
    int r = check_step(t, owner, committed->step, "committed", e);
    if (r == SHD_OK && committed->over) {
        t->state = TURN_OVER;
        return SHD_OK;
    }
    if (r == SHD_OK)
        r = check_counts(t, owner, &committed->decision, e);
    if (r != SHD_OK)
        return r;
    t->counted = true;
    t->decided.decision = committed->decision;
    take_in(t, owner);
    if (t->missing == 0)
        t->state = TURN_DONE;
    return SHD_OK;
}

/* -- Members that are lost --------------------------------------------------------------------- */

/* Whoever answered Prepare keeps the step from being begun again for as long as its session lasts,
 * and a new view ends that: all are asked anew, unless the decision is on record where it counts.
 */
void turn_lose(struct turn *t, uint32_t member)
{
    struct turn_owner *o = &t->owner[member];
    CHECK(member >= t->owners && member < t->members && !o->lost);
    const bool missed = asking(t) && !o->in;
    const bool undecided = asking(t) && !t->counted;
    t->lost = true;
    *o = (struct turn_owner){ .lost = true };
    t->anew += undecided;
    if (undecided)
        prepare_all(t);
    else if (missed && --t->missing == 0)
        t->state = TURN_DONE;
}

void turn_succeed(struct turn *t, uint32_t owner)
{
    const uint32_t replica = t->owners + owner;
    CHECK(owner < t->owners && replica < t->members && !t->owner[replica].lost);
    const struct turn_owner was = t->owner[owner];
    if (owner == 0 && !t->owner[replica].in)
        t->counted = false; /* of what the lost one has recorded nobody else knows */
    t->owner[owner] = t->owner[replica];
    t->owner[replica] = was;
    turn_lose(t, replica);
}

void turn_join(struct turn *t, uint32_t member)
{
    CHECK(member >= t->owners && member < t->members && t->owner[member].lost);
    t->owner[member] = (struct turn_owner){ 0 };
    t->state = TURN_OVER; /* `missing` is without it */
}

/* -- Looking ----------------------------------------------------------------------------------- */

enum turn_state turn_state(const struct turn *t)
{
    return t->state;
}

bool turn_has_lost(const struct turn *t, uint32_t member)
{
    CHECK(member < t->members);
    return t->owner[member].lost;
}

uint64_t turn_step(const struct turn *t)
{
    return t->step;
}

uint32_t turn_anew(const struct turn *t)
{
    return t->anew;
}

const struct decision *turn_decision(const struct turn *t)
{
    CHECK(t->has_decided);
    return &t->decided.decision;
}

uint32_t turn_unit_sums(const struct turn *t)
{
    if (t->state != TURN_PREPARING || t->naming == NAMING_NOT)
        return 0;
    return t->naming == NAMING_UNITS ? 1 + t->cause->first : t->decided.decision.cause.unit;
}

uint32_t turn_part_sums(const struct turn *t)
{
    return t->state == TURN_PREPARING && t->naming == NAMING_GROUPS ? 1 + t->cause->first : 0;
}

double turn_norm(const struct turn *t)
{
    CHECK(t->has_decided);
    return t->decided.grad_norm;
}

const double *turn_unit_norms(const struct turn *t)
{
    const struct decision *d = turn_decision(t);
    return t->measured && t->update.columns > 0 && !d->skip ? t->update.norms : NULL;
}

struct decided turn_decided(const struct turn *t)
{
    CHECK(t->state == TURN_DONE || t->state == TURN_OVER);
    const bool over = t->state == TURN_OVER || t->decided.decision.put != 0;
    return over ? (struct decided){ .over = true } : t->decided;
}
