/* The ledger and the step core on it: a small shell runs any order of events, dies anywhere, and a
 * successor adopts what is left, after any edits. Untouched it must be adopted; whatever is adopted
 * must not fail a CHECK, nor read or write outside. Input: units, micro-batches, frozen units,
 * then operations (enum op) with their arguments. */
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

#define UNITS_MAX  5u
#define MICROS_MAX 6u
#define REFS_MAX   1024u
#define EVENTS_MAX 2000u

enum op { /* of the input; low bits of a byte */
          OP_RETURN,
          OP_NONE,
          OP_DONE, /* of something that runs */
          OP_PREPARE,
          OP_COMMIT,
          OP_SPILL,
          OP_DIE,
          OP_EDIT, /* the ledger, then die */
          OPS
};

/* What the shell of the core has in memory: gone when it dies. */
struct shell {
    struct ledger ledger;
    struct step *step; /* owned */
    struct running {
        struct step_action action;
        struct step_word word;
    } running[2 * UNITS_MAX + STEP_APPLY_AHEAD];
    uint32_t running_count;
    bool open[REFS_MAX]; /* refs that were not credited yet */
    struct {
        uint32_t unit, micro;
    } place[REFS_MAX]; /* of each ref */
    uint32_t refs;     /* given out, from 1 */
};

struct world { /* what outlives it */
    uint8_t *memory;
    uint64_t bytes;
    bool frozen[UNITS_MAX];
    bool edited;
};

static const char spec_text[] = "{}";

/* Whole pages with one behind them that nobody may touch. */
static uint8_t *pages_new(uint64_t bytes)
{
    uint8_t *p = mmap(NULL, bytes + SHD_PAGE_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED && mprotect(p + bytes, SHD_PAGE_BYTES, PROT_NONE) == 0);
    return p;
}

static void world_init(struct world *w, struct fuzz_in *in)
{
    const struct ledger_shape shape = { .name = "m",
                                        .spec = spec_text,
                                        .spec_bytes = sizeof spec_text - 1,
                                        .owners = 1,
                                        .units = fuzz_below(in, UNITS_MAX) + 1,
                                        .micros = fuzz_below(in, MICROS_MAX) + 1,
                                        .instance = 7,
                                        .state_bytes = SHD_PAGE_BYTES,
                                        .chunk_count = 3 };
    struct shd_err e = { 0 };
    struct ledger ledger;
    *w = (struct world){ 0 };
    CHECK(ledger_bytes(&shape, &w->bytes, &e) == SHD_OK);
    w->memory = pages_new(w->bytes);
    ledger_init(&ledger, w->memory, &shape);
    atomic_store(&ledger.head->ready, 1);
    const uint8_t frozen = fuzz_u8(in);
    for (uint32_t u = 1; u < UNITS_MAX; u++) /* one must be trainable */
        w->frozen[u] = (frozen >> u & 1) != 0;
}

/* -- The shell ------------------------------------------------------------------------------- */

static void start(struct shell *sh, const struct step_action *a)
{
    CHECK(sh->running_count < ARRAY_SIZE(sh->running));
    struct running *r = &sh->running[sh->running_count++];
    *r = (struct running){ .action = *a };
    CHECK(a->unit < sh->ledger.head->units);
    if (a->kind == STEP_DO_SUM || a->kind == STEP_DO_ZERO)
        return;
    r->word = a->done;
    const uint64_t op = r->word.op;
    CHECK(op >= 1 && op <= KERN_OP_MAX);
    if (a->kind == STEP_DO_ACCUMULATE) {
        CHECK(a->micro < sh->ledger.head->micros);
        CHECK(a->ref != 0 ? a->ref <= sh->refs && sh->open[a->ref] : dtype_valid(a->dtype));
    }
}

static void credit(struct shell *sh, step_ref ref)
{
    CHECK(ref > 0 && ref <= sh->refs && sh->open[ref]);
    sh->open[ref] = false;
}

static void carry_out(struct shell *sh, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        switch (a->kind) {
        case STEP_DO_ACCUMULATE:
        case STEP_DO_SUM:
        case STEP_DO_ZERO:
        case STEP_DO_APPLY:
            start(sh, a);
            break;
        case STEP_DO_CREDIT:
            credit(sh, a->ref);
            break;
        case STEP_DO_PUBLISH:
            CHECK(a->unit < sh->ledger.head->units);
            break;
        case STEP_DO_SEALED:
        case STEP_DO_OPENED:
        case STEP_DO_DROPPED:
            break;
        }
    }
}

static void do_return(struct shell *sh, struct fuzz_in *in, const struct world *w, bool none)
{
    const uint32_t unit = fuzz_below(in, sh->ledger.head->units);
    const uint32_t micro = fuzz_below(in, sh->ledger.head->micros);
    const uint8_t how = fuzz_u8(in);
    const double metrics[STEP_METRICS_MAX] = { 1, 2, 3, how };
    if (w->frozen[unit] || sh->refs + 1 >= REFS_MAX)
        return;
    struct step_actions actions;
    struct shd_err e = { 0 };
    const step_ref ref = ++sh->refs;
    const uint64_t step = step_collecting(sh->step) + (how >> 6 == 1) - (how >> 6 == 2);
    sh->open[ref] = true;
    sh->place[ref].unit = unit;
    sh->place[ref].micro = micro;
    const int r = step_return(sh->step, ref, step, unit, micro, none, metrics,
                              how % (STEP_METRICS_MAX + 1), &actions, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        sh->open[ref] = false;
        return;
    }
    carry_out(sh, &actions);
}

/* One of the running operations ends: its word first, as a kernel does it. */
static void do_done(struct shell *sh, struct fuzz_in *in)
{
    const uint8_t which = fuzz_u8(in);
    if (sh->running_count == 0)
        return;
    struct running *at = &sh->running[which % sh->running_count];
    const struct running r = *at;
    sh->running_count--;
    *at = sh->running[sh->running_count];
    struct step_actions actions;
    struct fixsum sum;
    fixsum_init(&sum);
    const struct step_action *a = &r.action;
    const bool summed = a->kind == STEP_DO_SUM || (a->kind == STEP_DO_ACCUMULATE && a->last);
    if (r.word.word != NULL)
        atomic_store(r.word.word, r.word.value);
    if (a->kind == STEP_DO_APPLY)
        step_applied(sh->step, a->unit, &actions);
    else
        step_accumulated(sh->step, a->unit, summed ? &sum : NULL, which < 250, &actions);
    carry_out(sh, &actions);
}

static void do_prepare(struct shell *sh, struct fuzz_in *in)
{
    struct step_prepared p;
    struct shd_err e = { 0 };
    const uint64_t step = step_now(sh->step) + fuzz_below(in, 4) - 1;
    const int r = step_prepare(sh->step, step, &p, &e);
    if (r < 0)
        fuzz_check_refusal(r, &e);
    else
        CHECK(r == SHD_PENDING || (p.step == step && p.metric_count <= STEP_METRICS_MAX &&
                                   (p.over || fixsum_is_carried(&p.sum))));
}

static void do_commit(struct shell *sh, struct fuzz_in *in)
{
    static const uint8_t blob[16] = { 1 };
    const uint8_t how = fuzz_u8(in);
    const struct decision decision = { .skip = (how & 1) != 0, .scale = 1, .lr = 0.1 };
    struct decision counts;
    enum step_committed what;
    struct step_actions actions;
    struct shd_err e = { 0 };
    const int r = step_commit(sh->step, step_now(sh->step) + (how >> 6) - 1, &decision,
                              (struct step_blob){ (how & 2) != 0 ? blob : NULL, how & 0xf },
                              &counts, &what, &actions, &e);
    if (r == SHD_PENDING) /* after adoption, until the sums are formed anew */
        return;
    if (r != SHD_OK)
        fuzz_check_refusal(r, &e);
    else
        carry_out(sh, &actions);
}

static void do_spill(struct shell *sh, struct fuzz_in *in)
{
    const uint32_t ref = fuzz_below(in, REFS_MAX) % (sh->refs + 1);
    struct step_actions actions;
    if (ref == 0 || !sh->open[ref] ||
        !step_waits(sh->step, sh->place[ref].unit, sh->place[ref].micro, ref))
        return;
    step_spilled(sh->step, sh->place[ref].unit, sh->place[ref].micro, ref, SHD_BF16, &actions);
    carry_out(sh, &actions);
}

static void look(const struct shell *sh)
{
    const struct step *s = sh->step;
    struct decision d;
    CHECK(step_cells_in(s) + step_cells_waiting(s) <= step_cells(s));
    const struct step_blob blob = step_last_blob(s);
    CHECK(blob.bytes <= LEDGER_BLOB_BYTES);
    if (blob.data != NULL && blob.bytes > 0) {
        volatile uint8_t byte = ((const uint8_t *)blob.data)[blob.bytes - 1];
        (void)byte;
    }
    if (step_last_decision(s, &d))
        CHECK(d.scale >= 0 && d.lr >= 0 && d.loss_scale >= 0);
    for (uint32_t u = 0; u < sh->ledger.head->units; u++)
        CHECK(step_unit_next(s, u) <= sh->ledger.head->micros);
    for (uint32_t m = 0; m < sh->ledger.head->micros; m++)
        (void)step_micro_in(s, m);
}

/* -- Death and succession -------------------------------------------------------------------- */

/* Some of what runs may have reached its end, unseen by the process that died. */
static void die(struct shell *sh, uint8_t ended)
{
    for (uint32_t i = 0; i < sh->running_count; i++)
        if ((ended >> i % 8 & 1) != 0 && sh->running[i].word.word != NULL)
            atomic_store(sh->running[i].word.word, sh->running[i].word.value);
    free(sh->step);
    *sh = (struct shell){ 0 };
}

static bool succeed(struct shell *sh, struct world *w)
{
    struct shd_err e = { 0 };
    struct ledger found;
    const int r = ledger_adopt(&found, w->memory, w->bytes, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        CHECK(w->edited);
        return false;
    }
    const struct ledger_head *h = found.head;
    uint64_t to;
    if (h->units > UNITS_MAX || atomic_load(&h->ready) == 0 || ledger_rewinding(&found, &to))
        return false; /* the shell asks its spec, and begins anew, or copies a snapshot first */
    sh->ledger = found;
    const size_t bytes = step_bytes(h->units, h->micros);
    void *memory = aligned_alloc(16, (bytes + 15) / 16 * 16);
    CHECK(memory != NULL);
    sh->step = step_init(memory, &found, w->frozen);
    for (uint32_t u = 0; u < h->units; u++) {
        struct step_actions actions;
        step_resume(sh->step, u, &actions);
        carry_out(sh, &actions);
    }
    return true;
}

static uint64_t edit_value(const struct ledger_head *h, struct fuzz_in *in)
{
    const uint8_t how = fuzz_u8(in);
    if (how < 64)
        return how;
    if (how < 128)
        return atomic_load(&h->commits) + how - 96;
    return fuzz_u64(in);
}

/* Change one thing. Counts and places are those of `was`: the head may have been edited already. */
static void edit(struct world *w, struct fuzz_in *in, const struct ledger *l,
                 const struct ledger_head *was)
{
    const uint8_t what = fuzz_u8(in), index = fuzz_u8(in);
    const uint64_t value = edit_value(was, in), cells = (uint64_t)was->units * was->micros;
    const uint64_t far = index | (uint64_t)(what & 0x80) << 1;
    uint64_t at;
    switch (what % 8) {
    case 0:
        atomic_store(&l->unit[index % was->units].version, value);
        return;
    case 1:
        atomic_store(&l->unit[index % was->units].progress,
                     ledger_progress(value, (what & 8) != 0, what >> 4));
        return;
    case 2:
        atomic_store(&l->cell[index % cells], ledger_cell(value, what >> 3 & 3, what >> 5));
        return;
    case 3:
        atomic_store(&l->metrics[index % was->micros].tag, value << 3 | what >> 5);
        return;
    case 4:
        atomic_store(&l->head->commits, value);
        return;
    case 5: /* a byte of the records, or more */
        at = offsetof(struct ledger_head, record) + far % sizeof was->record;
        break;
    case 6: /* of the head */
        at = far % sizeof *was;
        break;
    default: /* anywhere before the blobs */
        at = fuzz_u32(in) % (was->blobs_at - 8);
        break;
    }
    memcpy(w->memory + at, &value, (size_t)1 << (what >> 3 & 3));
}

static void edit_some(struct world *w, struct fuzz_in *in, const struct ledger *ledger)
{
    static struct ledger_head was;
    memcpy((void *)&was, (const void *)ledger->head, sizeof was);
    for (unsigned n = fuzz_u8(in) % 4 + 1; n > 0; n--)
        edit(w, in, ledger, &was);
    w->edited = true;
}

/* Less memory than the ledger says it has. */
static void adopt_cut(const struct world *w, uint32_t bytes)
{
    struct shd_err e = { 0 };
    struct ledger found;
    uint8_t *cut = aligned_alloc(128, ((uint64_t)bytes + 128) / 128 * 128);
    CHECK(cut != NULL && bytes < w->bytes);
    memcpy(cut, w->memory, bytes);
    const int r = ledger_adopt(&found, cut, bytes, &e);
    CHECK(r != SHD_OK);
    fuzz_check_refusal(r, &e);
    free(cut);
}

/* False: there is no successor. */
static bool one_event(struct shell *sh, struct world *w, struct fuzz_in *in)
{
    switch (fuzz_u8(in) % OPS) {
    case OP_RETURN:
        do_return(sh, in, w, /* none= */ false);
        return true;
    case OP_NONE:
        do_return(sh, in, w, /* none= */ true);
        return true;
    case OP_DONE:
        do_done(sh, in);
        return true;
    case OP_PREPARE:
        do_prepare(sh, in);
        return true;
    case OP_COMMIT:
        do_commit(sh, in);
        return true;
    case OP_SPILL:
        do_spill(sh, in);
        return true;
    case OP_EDIT: {
        const struct ledger ledger = sh->ledger;
        die(sh, fuzz_u8(in));
        edit_some(w, in, &ledger);
        adopt_cut(w, fuzz_below(in, 8192));
        return succeed(sh, w);
    }
    default:
        die(sh, fuzz_u8(in));
        return succeed(sh, w);
    }
}

static int ledger_input(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    static struct shell sh;
    struct world w;
    world_init(&w, &in);
    sh = (struct shell){ 0 };
    bool alive = succeed(&sh, &w);
    for (unsigned i = 0; alive && in.left > 0 && i < EVENTS_MAX; i++) {
        alive = one_event(&sh, &w, &in);
        if (alive)
            look(&sh);
    }
    die(&sh, 0);
    munmap(w.memory, w.bytes + SHD_PAGE_BYTES);
    return 0;
}

/* -- Seeds ----------------------------------------------------------------------------------- */

struct out {
    uint8_t *at;
    size_t left;
};

static void put(struct out *o, uint8_t a, uint8_t b, uint8_t c, uint8_t d)
{
    const uint8_t bytes[4] = { a, b, c, d };
    const size_t n = a == OP_RETURN || a == OP_NONE ? 4 : 2;
    if (o->left < n)
        return;
    memcpy(o->at, bytes, n);
    o->at += n;
    o->left -= n;
}

/* One step of one unit after the other; every third micro-batch took no part, the last ones come
 * first. */
static void put_step(struct out *o, uint32_t units, uint32_t micros)
{
    for (uint32_t u = 0; u < units; u++)
        for (uint32_t m = micros; m-- > 0;)
            put(o, m % 3 == 2 ? OP_NONE : OP_RETURN, (uint8_t)u, (uint8_t)m, 3);
    for (uint32_t i = 0; i < units * (micros + 1); i++)
        put(o, OP_DONE, 0, 0, 0);
    put(o, OP_PREPARE, 1, 0, 0);
    put(o, OP_COMMIT, 0x42, 0, 0);
}

static size_t ledger_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    const uint32_t units = index % UNITS_MAX + 1, micros = index % MICROS_MAX + 1;
    struct out o = { buf, bytes_max };
    if (index >= 36)
        return 0;
    put(&o, (uint8_t)(units - 1), (uint8_t)(micros - 1), 0, 0);
    *o.at++ = index % 4 == 3 ? 2 : 0;
    o.left--;
    for (unsigned s = 0; s < index / 12; s++) {
        put_step(&o, units, micros);
        for (unsigned i = 0; i < units - index % 2; i++)
            put(&o, OP_DONE, 0, 0, 0);
    }
    put(&o, OP_RETURN, 0, 0, 4);
    put(&o, index % 3 == 0 ? OP_NONE : OP_RETURN, 0, (uint8_t)(micros - 1), 4);
    put(&o, OP_SPILL, 2, 0, 0);
    put(&o, index % 2 == 0 ? OP_DIE : OP_EDIT, (uint8_t)index, 0, 0);
    put(&o, (uint8_t)(index % 3 == 0), (uint8_t)(index % 8), 1, 0);
    put_step(&o, units, micros);
    return (size_t)(o.at - buf);
}

const struct fuzz_target fuzz_ledger = { "ledger", ledger_input, ledger_seed, NULL };
