#include "tests/lib/kern_trail_util.h"

#include <stdatomic.h>
#include <sys/mman.h>

#include "kernels/cpu/trail.h"

static const struct kern_hyper trail_hypers[] = {
    { 1e-3f, 0.1f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.001f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } },
    { 3e-2f, 0, 0.8f, 0.95f, 1e-6f, 0.7f, 0.4f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } },
};

#define ARRAYS_BYTES (5 * ELEMS * sizeof(float) + 2 * quant_bytes(ELEMS))

struct world world_new(void)
{
    EXPECT_EQ(kern_trail_chunks(ELEMS), CHUNKS);
    const uint64_t area_bytes = (KERN_TRAIL_BYTES + 4095) / 4096 * 4096, marks_bytes = 4096;
    struct world w = { .bytes = area_bytes + marks_bytes + ARRAYS_BYTES };
    void *base = mmap(NULL, w.bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    EXPECT(base != MAP_FAILED);
    w.base = base;
    w.area = base;
    w.marks = (void *)(w.base + area_bytes);
    w.acc = (void *)(w.base + area_bytes + marks_bytes);
    w.p = w.acc + ELEMS;
    w.m = w.p + ELEMS;
    w.v = w.m + ELEMS;
    w.e = w.v + ELEMS;
    w.q[0] = (struct kern_array){ w.e + ELEMS, QUANT_SIGNED };
    w.q[1] = (struct kern_array){ (uint8_t *)w.q[0].base + quant_bytes(ELEMS), QUANT_UNSIGNED };
    return w;
}

void world_free(struct world *w)
{
    munmap(w->base, w->bytes);
}

void world_reset(const struct world *w)
{
    memset(w->base, 0, w->bytes);
    fill_awkward(w->acc, ELEMS, false, 40);
    fill_awkward(w->p, ELEMS, false, 41);
    fill_awkward(w->m, ELEMS, false, 42);
    fill_awkward(w->v, ELEMS, false, 43);
    fill_awkward(w->e, ELEMS, false, 45);
    for (uint64_t i = 0; i < ELEMS; i++) /* a second moment is not negative */
        w->v[i] = fabsf(w->v[i]);
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 2; i++)
        EXPECT_RUNS(quantize, k,
                    (&(struct kern_quantize){ w->q[i], 0, i == 0 ? w->m : w->v, ELEMS }));
    k->ops->free(k);
}

/* The runs from the blocks on that they begin in, or else in which the one before ends. */
static uint32_t runs_of_blocks(const struct inputs *in, struct kern_run runs[INPUT_RUNS_MAX])
{
    uint64_t end = 0;
    uint32_t count = 0;
    EXPECT(in->run_count <= INPUT_RUNS_MAX);
    for (uint32_t i = 0; i < in->run_count; i++) {
        const struct kern_run *run = &in->runs[i];
        uint64_t first = run->first_elem / QUANT_BLOCK_ELEMS * QUANT_BLOCK_ELEMS;
        if (first < end)
            first = layout_align(end, QUANT_BLOCK_ELEMS);
        if (first >= run->first_elem + run->elems)
            continue;
        end = run->first_elem + run->elems;
        runs[count++] = (struct kern_run){ first, end - first, run->hyper };
    }
    return count;
}

struct inputs *inputs_new(void)
{
    static const struct kern_run runs[] = { { 3, 70001, 0 },
                                            { 70004, 29, 1 },
                                            { 70100, 65000, 1 },
                                            { 135168, 1000, 0 },
                                            { 140001, ELEMS - 140001 - 5, 0 } };
    struct inputs *in = malloc(sizeof *in);
    EXPECT(in != NULL);
    in->acc_elems = in->update_elems = ELEMS;
    in->here = false;
    in->averages = true;
    in->change = NULL;
    in->runs = runs;
    in->run_count = ARRAY_SIZE(runs);
    fill_awkward(in->grad[0], ELEMS, false, 44);
    struct kern *k = device_new(NULL, 1);
    for (enum shd_dtype d = SHD_BF16; d <= SHD_F16; d++)
        EXPECT_RUNS(cast, k, (&(struct kern_cast){ in->grad[d - SHD_F32], d, in->grad[0], ELEMS }));
    k->ops->free(k);
    return in;
}

struct kern_trail trail_of(const struct world *w, uint64_t op, uint64_t first_chunk)
{
    return (struct kern_trail){
        .area = w->area,
        .base = w->base,
        .chunks = w->marks->chunks,
        .first_chunk = first_chunk,
        .op = op,
        .done = &w->marks->done,
        .done_value = op,
    };
}

static int queue_op(struct kern *k, const struct inputs *in, const struct kern_op *op,
                    struct kern_done *done)
{
    struct shd_err e = { 0 };
    int status = SHD_OK;
    if (!in->here)
        return k->ops->submit(k, op, done, &e);
    const int r = k->ops->run_here(k, op, &status, &e);
    if (r == SHD_OK)
        done->fn(done, status);
    return r == SHD_PENDING ? SHD_EBUSY : r;
}

static int queue_accumulate(struct kern *k, const struct world *w, const struct inputs *in,
                            uint64_t op, bool trail, struct kern_sum *sum, struct kern_done *done)
{
    const enum shd_dtype dtype = SHD_F32 + (op + op / 4) % 3;
    struct kern_op queued = { .kind = KERN_ACCUMULATE };
    queued.accumulate = (struct kern_accumulate){
        .acc = w->acc,
        .grad = in->grad[dtype - SHD_F32],
        .grad_dtype = dtype,
        .elems = in->acc_elems,
        .first = op % 4 == 1,
        .sum = op % 4 == 2 ? NULL : sum,
    };
    if (trail)
        queued.accumulate.trail = trail_of(w, op, 0);
    return queue_op(k, in, &queued, done);
}

static int queue_update(struct kern *k, const struct world *w, struct inputs *in, uint64_t op,
                        bool trail, struct kern_done *done)
{
    static const enum spec_optimizer kinds[SCRIPT_UPDATES] = { SPEC_SGD, SPEC_ADAMW, SPEC_LION,
                                                               SPEC_MEAN, SPEC_ADAMW };
    const enum spec_optimizer kind = kinds[op / 4 % SCRIPT_UPDATES];
    struct kern_op queued = { .kind = KERN_UPDATE };
    queued.update = (struct kern_update){
        .kind = kind,
        .param = w->p,
        .m = kind == SPEC_MEAN ? NULL : w->m,
        .v = kind == SPEC_ADAMW ? w->v : NULL,
        .grad = w->acc,
        .grad_scale = kind == SPEC_MEAN ? 3 : 0.37f,
        .publish = in->publish,
        .publish_dtype = SHD_F32 + op / 12 % 3,
        .elems = in->update_elems,
        .runs = in->runs,
        .run_count = in->run_count,
        .hypers = trail_hypers,
        .hyper_count = ARRAY_SIZE(trail_hypers),
        .change = in->change,
    };
    if (kind != SPEC_MEAN && in->averages)
        queued.update.ema = (struct kern_ema){ w->e, 0.125f, 2 * CHUNKS };
    if (op / 4 % SCRIPT_UPDATES == OP_INT8 / 4) {
        queued.update.int8 = true;
        queued.update.m = w->q[0].base;
        queued.update.v = w->q[1].base;
        queued.update.runs = in->blocks;
        queued.update.run_count = runs_of_blocks(in, in->blocks);
    }
    if (trail)
        queued.update.trail = trail_of(w, op, CHUNKS);
    return queue_op(k, in, &queued, done);
}

int script_run(struct kern *k, const struct world *w, struct inputs *in, uint64_t op, bool trail,
               struct kern_sum *ret_sum)
{
    *ret_sum = (struct kern_sum){ .finite = true };
    fixsum_init(&ret_sum->sum);
    struct kern_waiter waiter;
    kern_waiter_init(&waiter);
    const int r = op % 4 == 0 ? queue_update(k, w, in, op, trail, &waiter.done)
                              : queue_accumulate(k, w, in, op, trail, ret_sum, &waiter.done);
    return r == SHD_OK ? kern_wait(&waiter) : r;
}

uint64_t world_digest(const struct world *w)
{
    const uint8_t *at = (const uint8_t *)w->acc;
    uint64_t digest = 1;
    for (uint64_t i = 0; i < ARRAYS_BYTES; i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, at + i, sizeof word);
        digest = (digest ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        digest ^= digest >> 29;
    }
    return digest;
}

void script_record(const struct world *w, struct inputs *in, struct script *ret)
{
    struct kern *k = device_new(NULL, 2);
    world_reset(w);
    for (uint64_t op = 1; op <= SCRIPT_OPS; op++) {
        EXPECT_STATUS(script_run(k, w, in, op, false, &ret->sum[op]), SHD_OK);
        ret->digest[op] = world_digest(w);
    }
    k->ops->free(k);
}

bool same_sum(const struct kern_sum *a, const struct kern_sum *b)
{
    /* Which carries are left to do depends on who took part. */
    struct fixsum x = a->sum, y = b->sum;
    fixsum_carry(&x);
    fixsum_carry(&y);
    return a->finite == b->finite && memcmp(x.limb, y.limb, sizeof x.limb) == 0;
}
