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
    return t->state == TURN_COMMITTING && !t->counted ? 1]] [[
    return t->state == TURN_COMMITTING && !t->counted && !SIM_BUG(5) ? 1]])

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
plant(daemon/core/step_set.c [[
    set->kept[(given + 1) & 1] = after;]] [[
    if (SIM_BUG(16)) {
        atomic_store(&set->given, given + 1);
        FAIL_POINT("step:set:bug");
    }
    set->kept[(given + 1) & 1] = after;]])
plant(daemon/core/step_set.c [[(word == s->round + 1);]] [[(word == s->round + 1 && !SIM_BUG(17));]])

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
    if (h->owner == 0)
        return; /* its word is `ready` */]] [[
    if (h->owner == 0 || SIM_BUG(32))
        return;]])
plant(daemon/core/presence.c [[
    if (h->owner == 0 || first == 0)]] [[
    if (h->owner == 0 || first == 0 || SIM_BUG(34))]])
plant(daemon/core/presence.c [[
    if (h->owner > 0)
        atomic_store_explicit(&h->origin, 0,]] [[
    if (h->owner > 0 || SIM_BUG(36))
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

# What is verified is compared with another group's (19), or with what comes when parameters may have moved (20).
plant(daemon/core/verify.c [[v->step == step && now == group;]] [[v->step == step && (now == group || SIM_BUG(19));]])
plant(daemon/core/verify.c [[
    v->closed = v->closed || v->step == step;]] [[
    v->closed = v->closed || (v->step == step && !SIM_BUG(20));]])

if(copy STREQUAL original)
  message(FATAL_ERROR "${SOURCE}: no bug is planted there")
endif()
file(WRITE ${COPY} "#include \"tests/sim/sim_bug.h\"\n${copy}")
