/* Trails of emulated kernels: launches ended anywhere, with stores lost that nothing had made sure
 * of, are put in order by cuda_trail_plan_repair() and finished by launches with other grids, to
 * the bits of an undisturbed run. And each fence and barrier of the protocol is needed: without
 * one, the same test fails. */
#include "kernels/cuda/trail.h"
#include "tests/cuda/emulate_util.h"

#define TILES      37u /* two chunks, the second short */
#define ELEMS      (TILES * CUDA_TILE_ELEMS)
#define CHUNKS     2u
#define SCRIPT_OPS 20u /* the last one is an update in 8 bits */

/* One allocation, as a segment: acc, p, m, v, moments in 8 bits; then the area. */
#define ARRAY_BYTES (4 * (uint64_t)ELEMS)
#define QUANT_BYTES ((uint64_t)TILES * QUANT_TILE_BYTES)
#define AREA_AT     (4 * ARRAY_BYTES + 2 * QUANT_BYTES)

struct world {
    uint8_t *base; /* owned; of exactly so many bytes */
    uint64_t bytes;
    struct cuda_trail_record *records;
    struct cuda_chunk *chunks; /* of acc, of the parameters */
    float *acc, *p, *m, *v;    /* [ELEMS] */
    struct kern_array q[2];    /* moments in 8 bits */
    uint64_t done;             /* the script's last finished operation */
};

struct inputs {
    float *grad[3]; /* of each dtype */
    const struct kern_run *runs;
    uint32_t run_count;
    uint8_t *publish;
    double *sums; /* [TILES] */
};

static const struct kern_hyper hypers[] = {
    { 1e-3f, 0.1f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.001f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } },
    { 3e-2f, 0, 0.8f, 0.95f, 1e-6f, 0.7f, 0.4f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } },
};

static struct world world_new(void)
{
    struct world w = { .bytes = AREA_AT + cuda_trail_bytes(NULL, 2 * CHUNKS) };
    w.base = aligned_alloc(128, w.bytes);
    EXPECT(w.base != NULL);
    w.acc = (float *)(void *)w.base;
    w.p = w.acc + ELEMS;
    w.m = w.p + ELEMS;
    w.v = w.m + ELEMS;
    w.q[0] = (struct kern_array){ w.v + ELEMS, QUANT_SIGNED };
    w.q[1] = (struct kern_array){ (uint8_t *)w.q[0].base + QUANT_BYTES, QUANT_UNSIGNED };
    w.records = (void *)(w.base + AREA_AT);
    w.chunks = (void *)(w.base + AREA_AT + CUDA_TRAIL_CHUNKS_AT);
    memset(w.base, 0, w.bytes);
    return w;
}

/* The script's start. Old values in records may be anything: they are not cleared. */
static void world_reset(struct world *w)
{
    fill_awkward(w->acc, 4 * (uint64_t)ELEMS, false, 40);
    for (uint64_t i = 0; i < ELEMS; i++) /* a second moment is not negative */
        w->v[i] = fabsf(w->v[i]);
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 2; i++)
        EXPECT_RUNS(quantize, k,
                    (&(struct kern_quantize){ w->q[i], 0, i == 0 ? w->m : w->v, ELEMS }));
    k->ops->free(k);
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++)
        memset(&w->records[i].head, 0, sizeof w->records[i].head);
    memset(w->chunks, 0, 2 * CHUNKS * sizeof *w->chunks);
    w->done = 0;
}

static struct inputs inputs_new(void)
{
    static const struct kern_run runs[] = { { 3, 30001, 0 },
                                            { 30004, 29, 1 },
                                            { 30100, 35000, 1 },
                                            { 65136, 1000, 0 },
                                            { 67001, ELEMS - 67001 - 5, 0 } };
    struct inputs in = { .runs = runs,
                         .run_count = ARRAY_SIZE(runs),
                         .publish = malloc(ARRAY_BYTES),
                         .sums = malloc(TILES * sizeof *in.sums) };
    for (uint32_t d = 0; d < 3; d++)
        in.grad[d] = malloc(ARRAY_BYTES / (d == 0 ? 1 : 2));
    EXPECT(in.publish != NULL && in.sums != NULL && in.grad[2] != NULL);
    fill_awkward(in.grad[0], ELEMS, false, 44);
    emulate_configure(NULL);
    for (uint32_t d = SHD_BF16; d <= SHD_F16; d++)
        LAUNCH("shd_cast", (&(struct cuda_cast){ in.grad[d - SHD_F32], in.grad[0], ELEMS, d }), 2);
    return in;
}

static void world_free(struct world *w, struct inputs *in)
{
    for (uint32_t d = 0; d < 3; d++)
        free(in->grad[d]);
    free(in->publish);
    free(in->sums);
    free(w->base);
}

/* -- The script --------------------------------------------------------------------------------
 * As that of the host's trails: a first accumulate, one without and one with a sum, an update or an
 * average, here of m; the optimizers and the dtypes take turns. */

static void launch_accumulate(const struct world *w, struct inputs *in, uint64_t op,
                              const struct cuda_trail *trail, unsigned blocks)
{
    const uint32_t dtype = (uint32_t)(SHD_F32 + (op + op / 4) % 3);
    LAUNCH("shd_accumulate",
           (&(struct cuda_accumulate){ .acc = w->acc,
                                       .grad = in->grad[dtype - SHD_F32],
                                       .elems = ELEMS,
                                       .grad_dtype = dtype,
                                       .first = op % 4 == 1,
                                       .block_sums = op % 4 == 2 ? NULL : in->sums,
                                       .trail = *trail }),
           blocks);
}

static void launch_update(const struct world *w, struct inputs *in, uint64_t op,
                          const struct cuda_trail *trail, unsigned blocks)
{
    static const enum spec_optimizer kinds[] = { SPEC_ADAMW, SPEC_MEAN, SPEC_LION };
    static const struct kern_run block_runs[] = { { 0, 30001, 0 },
                                                  { 30016, 29, 1 },
                                                  { 30080, 35000, 1 },
                                                  { 65088, 1000, 0 },
                                                  { 67008, ELEMS - 67008 - 5, 0 } };
    const enum spec_optimizer o = op == SCRIPT_OPS ? SPEC_ADAMW : kinds[op / 4 % 4 % 3];
    if (op / 4 % 4 == 3) {
        LAUNCH("shd_ema", (&(struct cuda_ema){ w->m, w->p, ELEMS, 0.125f, *trail }), blocks);
        return;
    }
    struct cuda_update a = {
        .param = w->p,
        .m = o == SPEC_MEAN ? NULL : w->m,
        .v = o == SPEC_ADAMW ? w->v : NULL,
        .grad = w->acc,
        .publish = in->publish,
        .elems = ELEMS,
        .runs = in->runs,
        .run_count = in->run_count,
        .publish_dtype = (uint32_t)(SHD_F32 + op / 4 % 3),
        .trail = *trail,
    };
    const bool int8 = op == SCRIPT_OPS;
    if (int8) {
        a.m = w->q[0].base;
        a.v = w->q[1].base;
        a.runs = block_runs;
        a.run_count = ARRAY_SIZE(block_runs);
    }
    for (uint32_t i = 0; i < ARRAY_SIZE(hypers); i++)
        a.rates[i] = kern_rates_of(o, &hypers[i], o == SPEC_MEAN ? 3 : 0.37f);
    LAUNCH(int8 ? "shd_adamw_int8" : optimizer_kernel(o), &a, blocks);
}

static void launch_begin(const struct world *w, uint64_t op)
{
    const uint64_t first = op % 4 == 0 ? CHUNKS : 0;
    LAUNCH("shd_trail_begin",
           (&(struct cuda_trail_begin){ w->records, w->chunks + first, CHUNKS, op }), 1);
}

static void launch_op(const struct world *w, struct inputs *in, uint64_t op, bool kept,
                      unsigned blocks)
{
    struct cuda_trail trail = { 0 };
    if (kept)
        trail = (struct cuda_trail){ .records = w->records,
                                     .chunks = w->chunks + (op % 4 == 0 ? CHUNKS : 0),
                                     .first_chunk = op % 4 == 0 ? CHUNKS : 0,
                                     .base = (uintptr_t)w->base,
                                     .op = op };
    memset(in->sums, 0x5a, TILES * sizeof *in->sums);
    if (op % 4 == 0)
        launch_update(w, in, op, &trail, blocks);
    else
        launch_accumulate(w, in, op, &trail, blocks);
}

static uint64_t digest_add(uint64_t digest, const void *bytes, uint64_t count)
{
    const uint8_t *at = bytes;
    for (uint64_t i = 0; i < count; i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, at + i, sizeof word);
        digest = (digest ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        digest ^= digest >> 29;
    }
    return digest;
}

/* Of acc, p, m, v, and of the sums where the operation has made some. */
static uint64_t world_digest(const struct world *w, const struct inputs *in, uint64_t op)
{
    const uint64_t digest = digest_add(1, w->base, AREA_AT);
    if (op % 4 == 0 || op % 4 == 2)
        return digest;
    return digest_add(digest, in->sums, TILES * sizeof *in->sums);
}

/* What the script does undisturbed and without a trail. */
static void script_record(struct world *w, struct inputs *in, uint64_t *ret_digest)
{
    emulate_configure(NULL);
    world_reset(w);
    for (uint64_t op = 1; op <= SCRIPT_OPS; op++) {
        launch_op(w, in, op, false, 3);
        ret_digest[op] = world_digest(w, in, op);
    }
}

/* No tile of the operation is without its bit, and no record speaks. */
static bool trail_idle(const struct world *w, uint64_t op)
{
    static struct cuda_trail_head heads[CUDA_RECORDS_MAX];
    static struct cuda_trail_copy copies[CUDA_TRAIL_COPIES_MAX];
    const struct cuda_chunk *chunks = w->chunks + (op % 4 == 0 ? CHUNKS : 0);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        const uint32_t left = TILES - c * CUDA_CHUNK_TILES;
        const uint64_t want = left < CUDA_CHUNK_TILES ? (UINT64_C(1) << left) - 1 : 0xffffffff;
        if (chunks[c].op != op || chunks[c].mask != want)
            return false;
    }
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++)
        heads[i] = w->records[i].head;
    struct shd_err e = { 0 };
    uint32_t count = 1;
    return cuda_trail_plan_repair(heads, w->chunks, 2 * CHUNKS, AREA_AT, copies, &count, &e) ==
               SHD_OK &&
           count == 0;
}

TEST(a_trail_changes_no_bit)
{
    struct world w = world_new();
    struct inputs in = inputs_new();
    uint64_t want[SCRIPT_OPS + 1];
    script_record(&w, &in, want);
    static const unsigned grids[] = { 1, 5, 37, 64 };
    for (size_t g = 0; g < ARRAY_SIZE(grids); g++) {
        world_reset(&w);
        emulate_configure(g % 2 == 0 ? NULL
                                     : &(struct emulate_options){ .seed = 3 + g, .resident = 4 });
        for (uint64_t op = 1; op <= SCRIPT_OPS; op++) {
            launch_begin(&w, op);
            launch_op(&w, &in, op, true, grids[g]);
            EXPECT(world_digest(&w, &in, op) == want[op]);
            EXPECT(trail_idle(&w, op));
            launch_begin(&w, op); /* once more: all is passed over, sums are made again */
            launch_op(&w, &in, op, true, grids[g]);
            EXPECT(world_digest(&w, &in, op) == want[op]);
        }
    }
    world_free(&w, &in);
}

/* -- Kills ------------------------------------------------------------------------------------- */

struct deaths {
    uint32_t kills, begun, restored, both, lost;
};

/* The repair, which may itself be cut short: then once more. False: it is refused, as where a
 * record speaks before what it says is there. */
static bool repair(struct world *w, uint64_t *state, struct deaths *d)
{
    static struct cuda_trail_head heads[CUDA_RECORDS_MAX];
    static struct cuda_trail_copy copies[CUDA_TRAIL_COPIES_MAX];
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++)
        heads[i] = w->records[i].head;
    struct shd_err e = { 0 };
    uint32_t count;
    if (cuda_trail_plan_repair(heads, w->chunks, 2 * CHUNKS, AREA_AT, copies, &count, &e) != SHD_OK)
        return false;
    const uint32_t rounds = 1 + test_random(state) % 2;
    for (uint32_t round = 1; round <= rounds; round++)
        for (uint32_t i = 0; i < count && (round == rounds || i < count / 2); i++)
            memcpy(w->base + copies[i].to_bytes, w->base + AREA_AT + copies[i].from_bytes,
                   copies[i].bytes);
    d->restored += count > 0;
    d->both += count > 6;            /* more than one block */
    if (test_random(state) % 2 == 0) /* or left to shd_trail_begin */
        for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++)
            w->records[i].head.busy = 0;
    return true;
}

/* Where a process ends: at this event of this launch of its, or of a later one if that has fewer.
 */
struct end {
    unsigned launch;
    uint64_t event;
};

/* How many events launches have. */
struct lengths {
    uint64_t begin, op;
};

/* One life: operations one after the other, up to the script's end or the kill. Returns false when
 * a finished operation left other bits. */
static bool live(struct world *w, struct inputs *in, const uint64_t *want, struct end end,
                 const struct emulate_options *options, unsigned blocks, struct deaths *d)
{
    struct emulate_options now = *options;
    for (unsigned launches = 0; w->done < SCRIPT_OPS; launches++) {
        const uint64_t op = w->done + 1;
        const bool begin = launches % 2 == 0;
        now.stop_at = launches < end.launch ? UINT64_MAX : end.event;
        now.seed++;
        emulate_configure(&now);
        if (begin)
            launch_begin(w, op);
        else
            launch_op(w, in, op, true, blocks);
        const struct emulate_report report = emulate_last();
        if (report.stopped) {
            d->kills++;
            d->begun += !begin;
            d->lost += report.stores_lost > 0;
            return true;
        }
        if (begin)
            continue;
        if (world_digest(w, in, op) != want[op])
            return false;
        w->done = op;
    }
    return true;
}

/* Every other process ends while it gives chunks to an operation. */
static struct end end_at_random(struct lengths lengths, uint64_t *state)
{
    const unsigned launch = (unsigned)(test_random(state) >> 20) % 4;
    const uint64_t max = launch % 2 == 0 ? lengths.begin : lengths.op;
    return (struct end){ launch, 1 + (test_random(state) >> 20) % max };
}

/* The script, by as many processes as it takes. */
static bool script_killed(struct world *w, struct inputs *in, const uint64_t *want,
                          struct lengths lengths, unsigned skip_site, uint64_t *state,
                          struct deaths *d)
{
    static const unsigned grids[] = { 1, 2, 3, 8, 37, 64 };
    world_reset(w);
    while (w->done < SCRIPT_OPS) {
        if (!repair(w, state, d))
            return false;
        const struct emulate_options options = {
            .seed = test_random(state) | 1,
            .resident = 1 + (unsigned)(test_random(state) % 6),
            .keep_stores = skip_site == 0 && test_random(state) % 8 == 0,
            .skip_site = skip_site,
        };
        const unsigned blocks = grids[(test_random(state) >> 20) % ARRAY_SIZE(grids)];
        if (!live(w, in, want, end_at_random(lengths, state), &options, blocks, d))
            return false;
    }
    return true;
}

static struct lengths lengths_measure(struct world *w, struct inputs *in)
{
    world_reset(w);
    emulate_configure(NULL);
    struct lengths lengths;
    launch_begin(w, 4);
    lengths.begin = emulate_last().events;
    launch_op(w, in, 4, true, 3);
    lengths.op = emulate_last().events;
    return lengths;
}

TEST(killed_launches_are_finished_by_others)
{
    uint64_t state = test_seed(20240917);
    struct world w = world_new();
    struct inputs in = inputs_new();
    uint64_t want[SCRIPT_OPS + 1];
    script_record(&w, &in, want);
    const struct lengths lengths = lengths_measure(&w, &in);
    struct deaths d = { 0 };
    for (uint32_t scripts = 0; scripts < 24; scripts++)
        if (!script_killed(&w, &in, want, lengths, 0, &state, &d))
            FAIL("script %u: operation %d left other bits", scripts, (int)w.done + 1);
    printf(
        "%u kills: %u in an operation, %u to be restored (%u in several blocks), %u lost stores\n",
        d.kills, d.begun, d.restored, d.both, d.lost);
    EXPECT(d.kills > 200 && d.begun > 100 && d.restored > 80 && d.both > 30 && d.lost > 100);
    world_free(&w, &in);
}

/* -- What a repair refuses ----------------------------------------------------------------------
 */

struct found {
    struct cuda_trail_head heads[CUDA_RECORDS_MAX];
    struct cuda_chunk chunks[2 * CHUNKS];
};

/* Record 5 speaks for the last tile of the parameters, whose arrays are p and m. */
static void found_reset(struct found *f)
{
    memset(f, 0, sizeof *f);
    f->chunks[CHUNKS + 1] = (struct cuda_chunk){ 8, 0xf };
    f->heads[5] = (struct cuda_trail_head){
        .busy = 1 + CHUNKS * CUDA_CHUNK_TILES + TILES - 1,
        .op = 8,
        .first_chunk = CHUNKS,
        .array_count = 2,
        .offset_bytes = { 1 * ARRAY_BYTES, 2 * ARRAY_BYTES },
    };
}

static int plan(const struct found *f, struct cuda_trail_copy *copies, uint32_t *ret_count,
                struct shd_err *e)
{
    *e = (struct shd_err){ 0 };
    *ret_count = 77;
    return cuda_trail_plan_repair(f->heads, f->chunks, 2 * CHUNKS, AREA_AT, copies, ret_count, e);
}

TEST(a_record_that_speaks_is_copied_back)
{
    static struct cuda_trail_copy copies[CUDA_TRAIL_COPIES_MAX];
    static struct found f;
    struct shd_err e;
    uint32_t count;
    found_reset(&f);
    EXPECT_OK(plan(&f, copies, &count, &e), &e);
    EXPECT_EQ(count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        EXPECT_EQ(copies[i].to_bytes, (2 + i) * ARRAY_BYTES - 4 * CUDA_TILE_ELEMS);
        EXPECT_EQ(copies[i].from_bytes, 5 * sizeof(struct cuda_trail_record) +
                                            offsetof(struct cuda_trail_record, old) +
                                            (uint64_t)i * 4 * CUDA_TILE_ELEMS);
        EXPECT_EQ(copies[i].bytes, 4 * CUDA_TILE_ELEMS);
    }
    f.chunks[CHUNKS + 1].mask = 0x10; /* its bit */
    EXPECT_OK(plan(&f, copies, &count, &e), &e);
    EXPECT_EQ(count, 0);
    f.chunks[CHUNKS + 1] = (struct cuda_chunk){ 12, 0 }; /* a later operation's */
    f.heads[5].array_count = 99;                         /* whatever it says */
    EXPECT_OK(plan(&f, copies, &count, &e), &e);
    EXPECT_EQ(count, 0);
    f.heads[5].busy = 0;
    EXPECT_OK(plan(&f, copies, &count, &e), &e);
    EXPECT_EQ(count, 0);
}

TEST(records_that_point_outside_are_refused)
{
    static const struct {
        size_t at; /* of a u64 in the head */
        uint64_t value;
        const char *text;
    } cases[] = {
        { offsetof(struct cuda_trail_head, busy), 2 * CHUNKS * CUDA_CHUNK_TILES + 1, "tile 128" },
        { offsetof(struct cuda_trail_head, busy), UINT64_MAX, "tile 18446744073709551614" },
        { offsetof(struct cuda_trail_head, first_chunk), CHUNKS + 2, "from 4" },
        { offsetof(struct cuda_trail_head, first_chunk), UINT64_MAX, "from 1844" },
        { offsetof(struct cuda_trail_head, first_chunk), 0, "array 1" }, /* ends beyond */
        { offsetof(struct cuda_trail_head, array_count), 0, "0 arrays" },
        { offsetof(struct cuda_trail_head, array_count), 4, "4 arrays" },
        { offsetof(struct cuda_trail_head, offset_bytes[1]), AREA_AT - ARRAY_BYTES + 4, "array 1" },
        { offsetof(struct cuda_trail_head, offset_bytes[1]), (AREA_AT - QUANT_BYTES + 4) | 1,
          "array 1" },
        { offsetof(struct cuda_trail_head, offset_bytes[1]), 2 * ARRAY_BYTES + 2, "array 1" },
        { offsetof(struct cuda_trail_head, offset_bytes[0]), UINT64_MAX - 3, "array 0" },
        { offsetof(struct cuda_trail_head, offset_bytes[0]), AREA_AT + 4, "array 0" },
    };
    static struct cuda_trail_copy copies[CUDA_TRAIL_COPIES_MAX];
    static struct found f;
    struct shd_err e;
    uint32_t count;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        found_reset(&f);
        if (strcmp(cases[i].text, "array 1") == 0 && cases[i].value == 0)
            f.heads[5].offset_bytes[1] = 3 * ARRAY_BYTES;
        memcpy((uint8_t *)&f.heads[5] + cases[i].at, &cases[i].value, sizeof cases[i].value);
        EXPECT_STATUS(plan(&f, copies, &count, &e), SHD_ESEGMENT);
        EXPECT_HAS(e.text, "record 5");
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT_EQ(count, 77);
    }
    found_reset(&f);
    f.chunks[CHUNKS + 1].op = f.heads[5].op = KERN_OP_MAX + 1;
    EXPECT_STATUS(plan(&f, copies, &count, &e), SHD_ESEGMENT);
    f.chunks[CHUNKS + 1].op = f.heads[5].op = 0;
    EXPECT_STATUS(plan(&f, copies, &count, &e), SHD_ESEGMENT);
}

/* -- Every fence and barrier is needed --------------------------------------------------------- */

static bool site_matters(struct world *w, struct inputs *in, const uint64_t *want,
                         struct lengths lengths, unsigned site)
{
    uint64_t state = test_seed(77 + site);
    struct deaths d = { 0 };
    for (uint32_t scripts = 0; scripts < 60; scripts++)
        if (!script_killed(w, in, want, lengths, 1 + site, &state, &d))
            return true;
    return false;
}

TEST(without_any_one_fence_or_barrier_bits_differ)
{
#ifdef __SANITIZE_ADDRESS__
    SKIP("of the kernels' order, which is the same in any build; a minute here");
#endif
    struct world w = world_new();
    struct inputs in = inputs_new();
    uint64_t want[SCRIPT_OPS + 1];
    script_record(&w, &in, want);
    const struct lengths lengths = lengths_measure(&w, &in);
    emulate_configure(NULL);
    for (uint64_t op = 1; op <= SCRIPT_OPS; op++) { /* passes all sites */
        launch_begin(&w, op);
        launch_op(&w, &in, op, true, 3);
    }
    struct emulate_site sites[64];
    const unsigned count = emulate_sites(sites, ARRAY_SIZE(sites));
    EXPECT(count >= 10 && count < ARRAY_SIZE(sites));
    bool all = true;
    for (unsigned i = 0; i < count; i++) {
        const char *slash = strrchr(sites[i].file, '/');
        const bool matters = site_matters(&w, &in, want, lengths, i);
        all = all && matters;
        printf("%-10s %s:%d: %s\n", sites[i].is_fence ? "fence" : "barrier",
               slash != NULL ? slash + 1 : sites[i].file, sites[i].line,
               matters ? "missed" : "NOT MISSED");
    }
    EXPECT(all);
    world_free(&w, &in);
}

TEST_MAIN()
