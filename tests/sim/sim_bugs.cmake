# Bugs planted on purpose in copies of the cores, for the test of the simulator (test_sim_bugs.c):
#
#   cmake -DSOURCE=daemon/core/step.c -DCOPY=FILE -P tests/sim/sim_bugs.cmake    in the project's folder
#
# writes FILE: SOURCE with every bug below that is its own, each behind SIM_BUG(n) of tests/sim/sim_bug.h,
# which has the list of all numbers. A text that is not found exactly once fails the build: then the
# source has changed, and the bug has to be planted anew.
cmake_minimum_required(VERSION 3.24)

function(plant source text in_its_place)
  if(NOT source STREQUAL SOURCE)
    return()
  endif()
  string(LENGTH "${text}" length)
  string(FIND "${copy}" "${text}" first)
  string(FIND "${copy}" "${text}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${source}: not found exactly once, so that no bug can be planted there:\n${text}")
  endif()
  string(REPLACE "${text}" "${in_its_place}" planted "${copy}")
  set(copy "${planted}" PARENT_SCOPE)
endfunction()

file(READ ${SOURCE} copy)
set(original "${copy}")

# The commits word is stored before the record it vouches for.
plant(daemon/core/step_commit.c [[
    *r = (struct ledger_record){ .step = s->now,]] [[
    if (SIM_BUG(2)) {
        atomic_store_explicit(&h->commits, commits, memory_order_release);
        FAIL_POINT("step:commit:bug");
    }
    *r = (struct ledger_record){ .step = s->now,]])

# The updates of units are counted when the commit is there already (14), or of those that were idle (15).
plant(daemon/core/step_commit.c [[
    count_updates(s, decision);
    write_record(s, blob);]] [[
    if (!SIM_BUG(14))
        count_updates(s, decision);
    write_record(s, blob);
    if (SIM_BUG(14))
        count_late(s, decision);]])
plant(daemon/core/step_commit.c [[
static void begin_applying(]] [[
static void count_late(struct step *s, const struct decision *decision)
{
    const uint64_t commits = s->now + 1;
    for (uint32_t u = 0; u < s->units; u++) {
        atomic_store(&s->ledger.head->commits, commits - 1);
        const uint64_t updates = updates_of(s, u, decision);
        atomic_store(&s->ledger.head->commits, commits);
        FAIL_POINT("step:count:bug");
        s->ledger.unit[u].updates[commits & 1] = updates;
    }
    s->put_updates = NULL;
}

static void begin_applying(]])
plant(daemon/core/step_commit.c [[
(u->started || !u->skips_idle)]] [[
(u->started || !u->skips_idle || SIM_BUG(15))]])

# Credit is given while the gradient only waits in its slot.
plant(daemon/core/step.c [[
        *c = ref;
    }
    unit_advance(]] [[
        *c = ref;
        if (SIM_BUG(3))
            credit(ret_actions, ref, false);
    }
    unit_advance(]])
plant(daemon/core/step.c [[
    if (is_ref(*c)) {
        credit(actions, *c,]] [[
    if (is_ref(*c)) {
        if (!SIM_BUG(3))
            credit(actions, *c,]])

# Recovery forgets gradients that wait for their turn and have no sender any more.
plant(daemon/core/step_init.c [[ || kind == LEDGER_CELL_EMPTY)]] [[ || kind == LEDGER_CELL_EMPTY || SIM_BUG(4))]])

# Owners may get the decisions of two workers.
plant(client/paths/turn.c [[
    if (t->state != TURN_COMMITTING || member == 0)]] [[
    if (t->state != TURN_COMMITTING || member == 0 || SIM_BUG(5))]])

# Replicas: owner 0's is asked to commit with all others, and nobody anew where it has its place (80); what a lost
# owner 0 has recorded alone counts (79), what was said beside a lost one still does (89), who had a decision on
# record must have it still (90), and a commit that is sent anew finds no norm in a turn that prepares again (93).
plant(client/paths/turn.c [[
    return t->counted && (!replicated ||]] [[
    return t->counted && (!replicated || SIM_BUG(80) ||]])
plant(client/paths/turn.c [[
    if (owner == 0 && !t->owner[replica].in)]] [[
    if (owner == 0 && !t->owner[replica].in && !SIM_BUG(79))]])
plant(client/paths/turn.c [[
    if (undecided)
        prepare_all(t);]] [[
    if (SIM_BUG(89) && undecided && t->state == TURN_PREPARING) {
        if (missed && --t->missing == 0)
            derive(t, &(struct shd_err){ 0 });
    } else if (undecided && !(SIM_BUG(80) && t->state == TURN_COMMITTING))
        prepare_all(t);]])
plant(client/paths/turn.c [[!any_record(t) && t->lost)]] [[!any_record(t) && t->lost && !SIM_BUG(90))]])
plant(client/paths/turn.c [[
double turn_norm(const struct turn *t)
{]] [[
double turn_norm(const struct turn *t)
{
    CHECK(!SIM_BUG(93) || t->state != TURN_PREPARING);]])

# Recovery takes the last gradient once more, under another number of operation (6); an operation's
# number differs from one process to the next (8).
plant(daemon/core/step_init.c [[
        u->started = ledger_progress_started(progress);
]] [[
        u->started = ledger_progress_started(progress);
        if (SIM_BUG(6) && u->started && u->next > 1)
            u->next--;
]])
plant(daemon/core/step.c [[
static struct step_word done_word(const struct step *s, const struct step_action *a)
{
]] [[
static struct step_word true_word(const struct step *s, const struct step_action *a);

static struct step_word done_word(const struct step *s, const struct step_action *a)
{
    static uint64_t count;
    struct step_word word = true_word(s, a);
    if (SIM_BUG(6) || SIM_BUG(8))
        word.op = ++count;
    return word;
}

static struct step_word true_word(const struct step *s, const struct step_action *a)
{
]])

# An owner that has promised gives a step up all the same (11); a promise is not kept (12).
plant(daemon/core/step_reset.c [[
    if (!agreed && next && promised(s))]] [[
    if (!agreed && next && promised(s) && !SIM_BUG(11))]])
plant(daemon/core/step_commit.c [[
    if (atomic_load_explicit(&h->promised, memory_order_relaxed) == word)]] [[
    if (SIM_BUG(12) || atomic_load_explicit(&h->promised, memory_order_relaxed) == word)]])

# The window of replies takes an old number for a new one.
plant(daemon/core/replies.c [[
    if (seq > r->highest)
        r->highest = seq;
]] [[
    if (SIM_BUG(7) && seq + 8 < r->highest)
        return REPLIES_SERVE;
    if (seq > r->highest)
        r->highest = seq;
]])

# Owner 0 takes a put into a step that has begun.
plant(daemon/core/step_put.c [[
    if (s->cells_in > 0]] [[
    if (SIM_BUG(13))
        return SHD_OK;
    if (s->cells_in > 0]])

# Settings count before they are written (16), or are said to be of a step that is decided without (17).
plant(daemon/core/ledger_set.c [[
        l->settings->kept[next & 1] = *kept;]] [[
        if (SIM_BUG(16)) {
            atomic_store(word, next);
            FAIL_POINT("step:set:bug");
        }
        l->settings->kept[next & 1] = *kept;]])
plant(daemon/core/step_set.c [[(word == s->round + 1);]] [[(word == s->round + 1 && !SIM_BUG(17));]])

# Owner 0 says the number of micro-batches of the step behind the next one (40), the others say one of their
# own (41), a successor has the most there can be (42).
plant(daemon/core/step_commit.c [[step_settings_micros(s, s->now + 1);]] [[step_settings_micros(s, s->now + 1 + SIM_BUG(40));]])
plant(daemon/core/step_commit.c [[
    if (s->ledger.head->owner == 0 && !s->next.recorded)
        decision->micro_batches =]] [[
    if ((s->ledger.head->owner == 0 && !s->next.recorded) || SIM_BUG(41))
        decision->micro_batches =]])
plant(daemon/core/step_init.c [[
    step_ramp_next(s);
    for (]] [[
    step_ramp_next(s);
    if (SIM_BUG(42))
        s->returns.now = s->returns.most;
    for (]])

# A copy begins in the middle of an update (30), or is not finished before one (31).
plant(daemon/core/sweep.c [[
    return step == step_now(core)]] [[
    if (SIM_BUG(30) && step == step_collecting(core))
        return SWEEP_NOW;
    return step == step_now(core)]])
plant(daemon/core/sweep.c [[
    if (step < step_collecting(core))]] [[
    if (SIM_BUG(30) && step == step_now(core))
        return SWEEP_NOW;
    if (step < step_collecting(core))]])
plant(daemon/core/sweep.c [[
                                 s->apart[unit] == 0 ? all - done : 0 };]] [[
                                 s->apart[unit] == 0 && !(SIM_BUG(31) && done > 0) ? all - done : 0 };]])

# What the words of a model's presence lack.
plant(daemon/core/presence.c [[
    if (!ledger_follows(h))
        return; /* its word is `ready` */]] [[
    if (!ledger_follows(h) || SIM_BUG(32))
        return;]])
plant(daemon/core/presence.c [[
    if ((h->owner == 0 && !replica) || first == 0)]] [[
    if ((h->owner == 0 && !replica) || first == 0 || SIM_BUG(34))]])
plant(daemon/core/presence.c [[
    if (ledger_follows(h))
        atomic_store_explicit(&h->origin, 0,]] [[
    if (ledger_follows(h) || SIM_BUG(36))
        atomic_store_explicit(&h->origin, 0,]])

# The history's row of a step is written when the commit is there already: a guard's window lacks it.
plant(daemon/core/step_commit.c [[
    write_row(s);
    FAIL_POINT("step:commit:before");]] [[
    if (!SIM_BUG(18))
        write_row(s);
    FAIL_POINT("step:commit:before");]])
plant(daemon/core/step_commit.c [[
    FAIL_POINT("step:commit:after");
    s->round]] [[
    FAIL_POINT("step:commit:after");
    if (SIM_BUG(18))
        write_row(s);
    s->round]])

# What is verified is compared with another group's (19), or with what comes when parameters may have moved: a
# Prepare was answered (20), or a put has begun, in an attempt before (21).
plant(daemon/core/verify.c [[v->step == step && now == group;]] [[v->step == step && (now == group || SIM_BUG(19));]])
plant(daemon/core/verify.c [[
    v->closed = v->closed || v->step == step;]] [[
    v->closed = v->closed || (v->step == step && !SIM_BUG(20));]])

plant(daemon/core/verify.c [[
    v->put = v->put && v->step == step;]] [[
    v->put = v->put && v->step == step && !SIM_BUG(21);]])

# Guards: that training goes on is kept as of the step before (50); a stop is forgotten with the next commit,
# a put's (51); the limits lack the last step (52).
plant(daemon/core/step_set.c [[atomic_store_explicit(&g->go_on, stopped.step + 1,]] [[atomic_store_explicit(&g->go_on, stopped.step + !SIM_BUG(50),]])
plant(daemon/core/ledger.c [[g->stop ? last : l->guard->record[1 - slot].stopped;]] [[g->stop ? last
                                       : SIM_BUG(51)
                                           ? (struct ledger_veto){ 0 }
                                           : l->guard->record[1 - slot].stopped;]])
plant(daemon/core/step_guard.c [[l->head->history_slots, s->now, ret_limits);]] [[l->head->history_slots,
                        s->now - (SIM_BUG(52) && s->now > 0), ret_limits);]])

# Windows of units: what they have of later steps does not go back (53); a step's norms are written when the
# commit is there already (57).
plant(daemon/core/step_rewind.c [[
    if (bytes > 0)
        memcpy(l->window]] [[
    if (bytes > 0 && !SIM_BUG(53))
        memcpy(l->window]])
plant(daemon/core/step_commit.c [[
    write_window(s);]] [[
    if (!SIM_BUG(57))
        write_window(s);]])
plant(daemon/core/step_commit.c [[
    s->round = ledger_round(&s->ledger);]] [[
    if (SIM_BUG(57))
        write_window(s);
    s->round = ledger_round(&s->ledger);]])

# Ramps: a step has as many micro-batches as the one before (54); a mean is over the cells of steps with more
# (55); cells lie elsewhere in the ledger in steps with fewer (56).
plant(daemon/core/step_ramp.c [[
    s->returns.now = returns_at(s, step);]] [[
    s->returns.now = returns_at(s, SIM_BUG(54) && step > 0 ? step - 1 : step);]])
plant(daemon/core/step_commit.c [[micro < s->returns.now; micro++) {
            const uint64_t word]] [[micro < (SIM_BUG(55) ? s->returns.most : s->returns.now); micro++) {
            const uint64_t word]])
plant(daemon/core/step.c [[return &s->ledger.cell[(size_t)unit * s->returns.most + micro];]] [[
    return &s->ledger.cell[(size_t)unit * (SIM_BUG(56) ? s->returns.now : s->returns.most) + micro];]])

# Rewinds: rounds come again (60); what was let go on later stays so (61); nothing is under way any more before
# the words of the step are there (62); settings stay as they were later (69), or do not where they are to (98).
plant(daemon/core/step_rewind.c [[resets = r->attempt - 1;]] [[resets = SIM_BUG(60) ? ledger_resets(l) : r->attempt - 1;]])
plant(daemon/core/step_rewind.c [[go_on < step ? go_on : step]] [[go_on < step || SIM_BUG(61) ? go_on : step]])
plant(daemon/core/step_rewind.c [[
    for (uint32_t u = 0; u < h->units; u++) {
        struct ledger_unit *unit]] [[
    if (SIM_BUG(62))
        atomic_store(&r->under_way, 0);
    for (uint32_t u = 0; u < h->units; u++) {
        struct ledger_unit *unit]])
plant(daemon/core/step_rewind.c [[
    else if (settings != NULL)
        settings->kept[atomic_load_explicit(]] [[
    else if (settings != NULL && !SIM_BUG(69))
        settings->kept[atomic_load_explicit(]])
plant(daemon/core/step_rewind.c [[
    l->kept[(given + 1) & 1] = kept;]] [[
    l->kept[(given + 1) & 1] = SIM_BUG(98) ? more->kept : kept;]])

# A snapshot that is held goes (63), later ones stay behind a rewind (64).
plant(daemon/core/snapshot_set.c [[|| item->step + 1 == held)]] [[|| (item->step + 1 == held && !SIM_BUG(63)))]])
plant(daemon/core/snapshot_set.c [[s->items[i].step > step)]] [[s->items[i].step > step && !SIM_BUG(64))]])

# Owner 0 goes before the others hold the snapshot (66); answers of different runs are taken together (68).
plant(client/paths/rewind_turn.c [[if (t->end < t->owners)]] [[if (t->end < t->owners && !SIM_BUG(66))]])
plant(client/paths/rewind_turn.c [[return asked->apart || answered]] [[return !SIM_BUG(68) && (asked->apart || answered]])
plant(client/paths/rewind_turn.c [[->attempt != asked->attempt;]] [[->attempt != asked->attempt);]])

# What was asked before a rewind is answered from what is on record since.
plant(daemon/core/step.c [[if (attempt < step_rewound(s))]] [[if (attempt < step_rewound(s) && !SIM_BUG(67))]])

if(copy STREQUAL original)
  message(FATAL_ERROR "${SOURCE}: no bug is planted there")
endif()
file(WRITE ${COPY} "#include \"tests/sim/sim_bug.h\"\n${copy}")
