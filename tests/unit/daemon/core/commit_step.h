/* One step of a tiny model on the real core and the real kernels: a shell as small as can be, in
 * memory that outlives its process, and a worker that sends again what was not credited. */
#ifndef SHD_TESTS_COMMIT_STEP_H
#define SHD_TESTS_COMMIT_STEP_H

#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"
#include "kernels/cpu/trail.h"
#include "tests/lib/kern_util.h"

#define UNITS      3u
#define FROZEN     1u /* this unit; it has no elements here, the others have UNIT_ELEMS each */
#define MICROS     2u
#define UNIT_ELEMS BLOCK
#define ELEMS      (2 * UNIT_ELEMS)
#define CELLS      4u /* gradients of a step */
#define STEP       1u /* the step that is taken and died in; step 0 goes before, undisturbed */
#define BLOB_BYTES 40u
#define SPILL_UNIT 0u /* the one place of the spill segment */

enum { PARAM, MOMENT1, MOMENT2, ACC, ARRAYS };

/* How a step's gradients come. */
struct plan {
    const char *name;
    struct {
        uint32_t unit, micro;
        bool none, spill; /* took no part; spilled where it waits */
    } sends[CELLS];
};

/* What workers remember. */
struct marks {
    _Atomic uint64_t credited[UNITS][MICROS]; /* of STEP */
    _Atomic uint64_t answered;                /* the commit of STEP was */
};

struct world { /* one mapping */
    uint8_t *base;
    uint64_t bytes;
    uint64_t ledger_bytes; /* the ledger is what comes first */
    struct ledger ledger;
    struct marks *marks;
    float *array[ARRAYS]; /* [ELEMS] */
    uint8_t *spill;       /* a gradient of SPILL_UNIT */
};

/* The same in every process. */
struct inputs {
    uint8_t grad[2][2][MICROS][UNIT_ELEMS * sizeof(float)]; /* [step][slice][micro] */
    struct decision decision[2]; /* 0: of step 0 and of the process that is killed; 1: of its
                                  * successors */
    uint8_t blob[3][BLOB_BYTES]; /* of those two for STEP, and of step 0 */
};

static const enum shd_dtype micro_dtype[MICROS] = { SHD_F32, SHD_BF16 };

static uint32_t slice_of(uint32_t unit)
{
    return unit / 2;
}

static struct ledger_shape model_shape(void)
{
    return (struct ledger_shape){ .name = "tiny",
                                  .spec = "{}",
                                  .spec_bytes = 2,
                                  .owners = 1,
                                  .units = UNITS,
                                  .micros = MICROS,
                                  .state_bytes = ARRAYS * ELEMS * sizeof(float),
                                  .chunk_count = 2 };
}

__attribute__((unused)) static struct world world_new(void)
{
    const struct ledger_shape shape = model_shape();
    struct world w;
    struct shd_err e = { 0 };
    EXPECT_OK(ledger_bytes(&shape, &w.ledger_bytes, &e), &e);
    w.bytes = w.ledger_bytes + 4096 + (ARRAYS * ELEMS + UNIT_ELEMS) * sizeof(float);
    void *base = mmap(NULL, w.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(base != MAP_FAILED);
    w.base = base;
    w.marks = (void *)(w.base + w.ledger_bytes);
    for (uint32_t i = 0; i < ARRAYS; i++)
        w.array[i] = (float *)(void *)(w.base + w.ledger_bytes + 4096) + (size_t)i * ELEMS;
    w.spill = (void *)(w.array[0] + (size_t)ARRAYS * ELEMS);
    ledger_init(&w.ledger, w.base, &shape);
    atomic_store(&w.ledger.head->ready, 1);
    for (uint32_t i = 0; i < ACC; i++)
        fill_awkward(w.array[i], ELEMS, false, 40 + i);
    for (uint32_t i = 0; i < ELEMS; i++) /* a second moment is not negative */
        w.array[MOMENT2][i] = fabsf(w.array[MOMENT2][i]);
    return w;
}

__attribute__((unused)) static void world_free(struct world *w)
{
    munmap(w->base, w->bytes);
}

__attribute__((unused)) static void inputs_fill(struct inputs *in)
{
    float wide[UNIT_ELEMS];
    for (uint32_t i = 0; i < 2 * 2 * MICROS; i++) {
        uint8_t *grad = in->grad[i / 4][i / 2 % 2][i % 2];
        fill_awkward(wide, UNIT_ELEMS, false, 60 + i);
        for (uint32_t j = 0; j < UNIT_ELEMS && i % 2 == 1; j++) /* bf16: the upper half */
            memcpy(grad + (size_t)2 * j, (uint8_t *)&wide[j] + 2, 2);
        if (i % 2 == 0)
            memcpy(grad, wide, sizeof wide);
    }
    in->decision[0] = (struct decision){ .scale = 0.37f, .lr = 1e-3, .loss_scale = 1 };
    in->decision[1] = (struct decision){ .scale = 0.41f, .lr = 3e-3, .loss_scale = 2 };
    for (uint32_t i = 0; i < 3; i++)
        memset(in->blob[i], (int)(0x11 * (i + 1)), BLOB_BYTES);
}

/* -- The shell --------------------------------------------------------------------------------- */

struct work { /* of a unit */
    struct kern_done done;
    struct rig *rig;
    struct step_action action;
    struct kern_sum sum;
    int status;
    _Atomic bool ended;
};

struct rig {
    const struct world *w;
    const struct inputs *in;
    const struct plan *plan;
    struct kern *k;
    uint64_t step;    /* to take */
    uint32_t decider; /* index of the decision and blob, should it be the first */
    struct step *core;
    uint32_t running;
    sem_t ended; /* works, ever */
    struct work work[UNITS];
    float publish[UNIT_ELEMS];
    struct shd_err e;
    const char *wrong; /* NULL: nothing was */
    _Alignas(16) uint8_t core_memory[16384];
};

static void work_done(struct kern_done *done, int status)
{
    struct work *work = (struct work *)(void *)((char *)done - offsetof(struct work, done));
    struct rig *rig = work->rig;
    work->status = status;
    atomic_store(&work->ended, true);
    sem_post(&rig->ended);
}

static struct kern_trail rig_trail(const struct rig *rig, const struct step_action *a)
{
    const struct step_word done = a->done;
    return (struct kern_trail){ .area = rig->w->ledger.trail,
                                .base = rig->w->array[0],
                                .chunks = rig->w->ledger.chunks,
                                .first_chunk = slice_of(a->unit),
                                .op = done.op,
                                .done = done.word,
                                .done_value = done.value };
}

static float *rig_array(const struct rig *rig, uint32_t array, uint32_t unit)
{
    return rig->w->array[array] + (size_t)slice_of(unit) * UNIT_ELEMS;
}

static int queue_accumulate(struct rig *rig, struct work *work)
{
    const struct step_action *a = &work->action;
    const struct kern_accumulate args = {
        .acc = rig_array(rig, ACC, a->unit),
        .grad = a->ref == 0 ? rig->w->spill : rig->in->grad[rig->step][slice_of(a->unit)][a->micro],
        .grad_dtype = a->ref == 0 ? a->dtype : micro_dtype[a->micro],
        .elems = UNIT_ELEMS,
        .first = a->first,
        .sum = a->last ? &work->sum : NULL,
        .trail = rig_trail(rig, a),
    };
    return kern_accumulate(rig->k, &args, &work->done, &rig->e);
}

static int queue_sum(struct rig *rig, struct work *work)
{
    const struct kern_sumsq args = { rig_array(rig, ACC, work->action.unit), UNIT_ELEMS,
                                     &work->sum };
    return kern_sumsq(rig->k, &args, &work->done, &rig->e);
}

static int queue_zero(struct rig *rig, struct work *work)
{
    const struct kern_fill args = { .out = rig_array(rig, ACC, work->action.unit),
                                    .elems = UNIT_ELEMS,
                                    .kind = KERN_FILL_CONST };
    return kern_fill(rig->k, &args, &work->done, &rig->e);
}

static int queue_apply(struct rig *rig, struct work *work)
{
    static const struct kern_run runs[] = { { 3, 700, 0 }, { 768, 333, 1 } };
    const uint32_t unit = work->action.unit;
    const struct decision *d = &step_record(rig->core)->decision;
    const double t = (double)step_updates(rig->core);
    const struct kern_hyper hypers[] = {
        { (float)d->lr,
          0.1f,
          0.9f,
          0.999f,
          1e-8f,
          (float)(1 - pow(0.9, t)),
          (float)(1 - pow(0.999, t)),
          { .scale = 0 },
          { .lr = 0 },
          { .rho = 0 } },
        { (float)d->lr,
          0,
          0.8f,
          0.95f,
          1e-6f,
          (float)(1 - pow(0.8, t)),
          (float)(1 - pow(0.95, t)),
          { .scale = 0 },
          { .lr = 0 },
          { .rho = 0 } },
    };
    struct kern_update args = {
        .kind = SPEC_ADAMW,
        .param = rig_array(rig, PARAM, unit),
        .m = rig_array(rig, MOMENT1, unit),
        .v = rig_array(rig, MOMENT2, unit),
        .grad = rig_array(rig, ACC, unit),
        .grad_scale = d->scale,
        .publish = rig->publish,
        .publish_dtype = SHD_BF16,
        .elems = UNIT_ELEMS,
        .runs = runs,
        .run_count = ARRAY_SIZE(runs),
        .hypers = hypers,
        .hyper_count = ARRAY_SIZE(hypers),
        .trail = rig_trail(rig, &work->action),
    };
    static struct kern_hyper kept[UNITS][ARRAY_SIZE(hypers)]; /* borrowed until it is done */
    memcpy(kept[unit], hypers, sizeof hypers);
    args.hypers = kept[unit];
    return kern_update(rig->k, &args, &work->done, &rig->e);
}

/* As apply.c does where there is nothing to compute. */
static int done_without_kernel(struct work *work)
{
    const struct step_word done = work->action.done;
    atomic_store_explicit(done.word, done.value, memory_order_release);
    work_done(&work->done, SHD_OK);
    return SHD_OK;
}

static void rig_start(struct rig *rig, const struct step_action *a)
{
    struct work *work = &rig->work[a->unit];
    *work = (struct work){ .done = { work_done }, .rig = rig, .action = *a };
    work->sum.finite = true;
    fixsum_init(&work->sum.sum);
    rig->running++;
    int r;
    if (a->kind == STEP_DO_APPLY)
        r = a->skip ? done_without_kernel(work) : queue_apply(rig, work);
    else if (a->kind == STEP_DO_ACCUMULATE)
        r = queue_accumulate(rig, work);
    else
        r = a->kind == STEP_DO_SUM ? queue_sum(rig, work) : queue_zero(rig, work);
    if (r != SHD_OK)
        rig->wrong = "a kernel refused its work";
}

static void rig_take(struct rig *rig, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        const uint32_t cell = a->ref - 1;
        switch (a->kind) {
        case STEP_DO_CREDIT:
            atomic_store(&rig->w->marks->credited[cell / MICROS][cell % MICROS], 1);
            break;
        case STEP_DO_PUBLISH:
        case STEP_DO_SEALED:
        case STEP_DO_OPENED:
        case STEP_DO_DROPPED:
            break;
        case STEP_DO_ACCUMULATE:
        case STEP_DO_SUM:
        case STEP_DO_ZERO:
        case STEP_DO_APPLY:
            rig_start(rig, a);
            break;
        }
    }
}

/* One work that ended. */
static void rig_finish(struct rig *rig)
{
    struct step_actions actions;
    uint32_t unit = 0;
    while (unit < UNITS && !atomic_load(&rig->work[unit].ended))
        unit++;
    CHECK(unit < UNITS);
    struct work *work = &rig->work[unit];
    const struct step_action a = work->action;
    atomic_store(&work->ended, false);
    rig->running--;
    if (work->status != SHD_OK) {
        rig->wrong = "a kernel failed";
        return;
    }
    const bool summed = a.kind == STEP_DO_SUM || (a.kind == STEP_DO_ACCUMULATE && a.last);
    const struct kern_sum sum = work->sum;
    if (a.kind == STEP_DO_APPLY)
        step_applied(rig->core, unit, &actions);
    else
        step_accumulated(rig->core, unit, summed ? &sum.sum : NULL, sum.finite, &actions);
    rig_take(rig, &actions);
}

static void rig_send(struct rig *rig, uint32_t index)
{
    const uint32_t unit = rig->plan->sends[index].unit, micro = rig->plan->sends[index].micro;
    const double metrics[] = { 1.5 * (double)rig->step + micro,
                               0.1 * (double)(rig->step + micro + 1) };
    const step_ref ref = unit * MICROS + micro + 1;
    struct step_actions actions;
    if (step_collecting(rig->core) != rig->step || rig->w->marks->credited[unit][micro] != 0)
        return;
    if (step_return(rig->core, ref, rig->step, unit, micro, rig->plan->sends[index].none, metrics,
                    ARRAY_SIZE(metrics), &actions, &rig->e) != SHD_OK)
        rig->wrong = "a gradient was refused";
    rig_take(rig, &actions);
    if (!rig->plan->sends[index].spill || !step_waits(rig->core, unit, micro, ref))
        return;
    CHECK(unit == SPILL_UNIT);
    memcpy(rig->w->spill, rig->in->grad[rig->step][slice_of(unit)][micro],
           UNIT_ELEMS * dtype_bytes(micro_dtype[micro]));
    step_spilled(rig->core, unit, micro, ref, micro_dtype[micro], &actions);
    rig_take(rig, &actions);
}

static void rig_commit(struct rig *rig)
{
    struct step_actions actions;
    struct decision counts;
    struct step_prepared prepared;
    enum step_committed how;
    const struct step_blob blob = { rig->in->blob[rig->step == STEP ? rig->decider : 2],
                                    BLOB_BYTES };
    if (step_prepare(rig->core, rig->step, &prepared, &rig->e) != SHD_OK || !prepared.finite ||
        step_commit(rig->core, rig->step, &rig->in->decision[rig->decider], blob, &counts, &how,
                    &actions, &rig->e) != SHD_OK) {
        rig->wrong = "the sealed step was not committed";
        return;
    }
    atomic_store(&rig->w->marks->answered, 1);
    rig_take(rig, &actions);
}

/* Whoever decides after that learns what was decided. */
static void rig_commit_late(struct rig *rig)
{
    struct step_actions actions;
    struct decision counts;
    enum step_committed how;
    const struct decision mine = { .skip = true };
    const struct step_blob none = { NULL, 0 };
    if (step_commit(rig->core, rig->step, &mine, none, &counts, &how, &actions, &rig->e) !=
            SHD_OK ||
        how != STEP_COMMITTED_AGAIN || counts.lr != step_record(rig->core)->decision.lr)
        rig->wrong = "a late decision was not answered with the first one";
}

/* Take the step from where the ledger says it is. */
static void rig_run(struct rig *rig)
{
    struct step_actions actions;
    rig->core = step_init(rig->core_memory, &rig->w->ledger, (const bool[]){ false, true, false });
    for (uint32_t u = 0; u < UNITS && rig->wrong == NULL; u++) {
        step_resume(rig->core, u, &actions);
        rig_take(rig, &actions);
    }
    for (uint32_t i = 0; i < CELLS && rig->wrong == NULL; i++) {
        rig_send(rig, i);
        while (rig->running > 0 && sem_trywait(&rig->ended) == 0)
            rig_finish(rig);
    }
    while (step_now(rig->core) <= rig->step && rig->wrong == NULL) {
        if (step_phase(rig->core) == STEP_SEALED) {
            rig_commit(rig);
        } else if (rig->running == 0) {
            rig->wrong = "nothing runs, and the step is not over";
        } else {
            while (sem_wait(&rig->ended) != 0)
                ;
            rig_finish(rig);
        }
    }
    if (rig->wrong == NULL)
        rig_commit_late(rig);
}

/* A process begins on w: adopt, repair, take the step. Returns what went wrong, or NULL. */
static const char *shell_run(struct world *w, const struct inputs *in, const struct plan *plan,
                             struct kern *k, uint64_t step, uint32_t decider)
{
    static struct rig rig; /* kernels of one that went wrong may still run: it ends the test */
    static char text[320];
    rig = (struct rig){ .in = in, .plan = plan, .k = k, .step = step, .decider = decider };
    CHECK(step_bytes(UNITS, MICROS) <= sizeof rig.core_memory && sem_init(&rig.ended, 0, 0) == 0);
    rig.w = w;
    if (ledger_adopt(&w->ledger, w->base, w->ledger_bytes, &rig.e) != SHD_OK)
        rig.wrong = "ledger";
    else if (kern_trail_repair(w->ledger.trail, w->array[0], ARRAYS * ELEMS * sizeof(float),
                               w->ledger.chunks, w->ledger.head->chunk_count, &rig.e) != SHD_OK)
        rig.wrong = "trail";
    else
        rig_run(&rig);
    sem_destroy(&rig.ended);
    if (rig.wrong == NULL)
        return NULL;
    snprintf(text, sizeof text, "%s (%s)", rig.wrong, rig.e.text);
    return text;
}

/* -- Results ----------------------------------------------------------------------------------- */

static bool same_record(const struct ledger_record *a, const struct ledger_record *b)
{
    return a->step == b->step && a->updates == b->updates && a->finite == b->finite &&
           a->decision.skip == b->decision.skip && a->decision.scale == b->decision.scale &&
           a->decision.lr == b->decision.lr && a->decision.loss_scale == b->decision.loss_scale &&
           a->decision.good_steps == b->decision.good_steps &&
           memcmp(a->sum.limb, b->sum.limb, sizeof a->sum.limb) == 0 &&
           a->metric_count == b->metric_count && a->reported == b->reported &&
           memcmp(a->metrics, b->metrics, sizeof a->metrics) == 0;
}

/* In what the last commit differs from what it should be; NULL: in nothing. */
static const char *commit_differs(const struct world *got, const struct world *want)
{
    const uint64_t commits = atomic_load(&got->ledger.head->commits);
    if (commits != atomic_load(&want->ledger.head->commits))
        return "commits";
    const struct ledger_record *g = &got->ledger.head->record[commits & 1];
    const struct ledger_record *w = &want->ledger.head->record[commits & 1];
    if (!same_record(g, w))
        return "record";
    if (g->blob_at != w->blob_at || g->blob_bytes != w->blob_bytes ||
        memcmp(got->ledger.blob[g->blob_at], want->ledger.blob[w->blob_at], w->blob_bytes) != 0)
        return "blob";
    return NULL;
}

/* The same of a whole step. */
__attribute__((unused)) static const char *world_differs(const struct world *got,
                                                         const struct world *want)
{
    static const char *const names[] = { "parameters", "first moments", "second moments", "sums" };
    for (uint32_t i = 0; i < ARRAYS; i++)
        if (memcmp(got->array[i], want->array[i], ELEMS * sizeof(float)) != 0)
            return names[i];
    for (uint32_t u = 0; u < UNITS; u++) {
        const struct ledger_unit *is = &got->ledger.unit[u], *must = &want->ledger.unit[u];
        if (atomic_load(&is->version) != atomic_load(&must->version))
            return "versions";
        if (atomic_load(&is->progress) != atomic_load(&must->progress))
            return "progress";
    }
    return commit_differs(got, want);
}

#endif
