/* A dead process's trail: any records and chunk words. kern_trail_repair() either refuses and
 * changes nothing, or leaves no record, and an operation given again stays inside its arrays.
 * Input: slice size, ISA and operation, then edits of records and chunk words. */
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/trail.h"
#include "kernels/kern.h"
#include "proto/spec/layout.h"

#define BLOCKS_MAX 4u
#define CHUNKS_MAX 4u
#define OP         5u /* of the operation that is given again */
#define ARRAYS     4u /* param, m, v, acc in one segment */

struct state {
    struct kern_trail_area *area; /* owned, once */
    float *base;                  /* owned, exactly as large as it says */
    uint64_t elems, bytes;
    _Atomic uint64_t *chunks; /* owned */
    uint64_t chunk_count;
};

static void state_new(struct state *s, struct kern_trail_area *area, struct fuzz_in *in)
{
    s->area = area;
    s->elems = (uint64_t)(fuzz_below(in, BLOCKS_MAX) + 1) * SHD_BLOCK_ELEMS;
    s->bytes = ARRAYS * s->elems * sizeof(float);
    s->base = aligned_alloc(128, s->bytes);
    s->chunk_count = fuzz_below(in, CHUNKS_MAX) + 1;
    s->chunks = calloc(s->chunk_count, sizeof *s->chunks);
    CHECK(s->base != NULL && s->chunks != NULL);
    for (uint64_t i = 0; i < s->bytes / sizeof(float); i++)
        s->base[i] = 1;
}

static void state_free(struct state *s)
{
    free(s->base);
    free(s->chunks);
}

static uint64_t edit_value(const struct state *s, struct fuzz_in *in)
{
    const uint8_t how = fuzz_u8(in);
    if (how < 128)
        return how;
    if (how < 192)
        return s->bytes + how - 160;
    return fuzz_u64(in);
}

static void edit(struct state *s, struct fuzz_in *in)
{
    const uint8_t what = fuzz_u8(in);
    struct trail_record *r = &s->area->records[what / 16 % 4 * (CPU_THREADS_MAX / 4)];
    const uint64_t value = edit_value(s, in);
    switch (what % 8) {
    case 0:
        atomic_store(&r->op, value);
        break;
    case 1:
        atomic_store(&r->pos, value);
        break;
    case 2: /* a likely one */
        atomic_store(&r->pos, value << 8 | what >> 4);
        break;
    case 3:
        r->chunk = value;
        break;
    case 4:
        r->first_elem = value;
        break;
    case 5:
        r->array_count = value;
        break;
    case 6:
        r->offset_bytes[what / 16 % TRAIL_ARRAYS_MAX] = value;
        break;
    default:
        atomic_store(&s->chunks[what / 16 % s->chunk_count],
                     (what & 8) != 0 ? value : (uint64_t)OP << TRAIL_COUNT_BITS | value);
        break;
    }
}

/* A record as a killed process leaves it, in the middle of a group. */
static void record_usual(struct state *s)
{
    struct trail_record *r = &s->area->records[0];
    r->chunk = 0;
    r->first_elem = 0;
    r->array_count = TRAIL_ARRAYS_MAX;
    for (uint32_t i = 0; i < TRAIL_ARRAYS_MAX; i++)
        r->offset_bytes[i] = i * s->elems * sizeof(float);
    atomic_store(&r->pos, UINT64_C(32) << 8 | 16);
    atomic_store(&r->op, OP);
}

static void area_clear(struct kern_trail_area *area)
{
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i += CPU_THREADS_MAX / 4)
        memset((void *)&area->records[i], 0, sizeof area->records[i]);
}

static void repair(struct state *s, bool *ret_repaired)
{
    struct shd_err e = { 0 };
    const int r = kern_trail_repair(s->area, s->base, s->bytes, s->chunks, s->chunk_count, &e);
    *ret_repaired = r == SHD_OK;
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        for (uint64_t i = 0; i < s->bytes / sizeof(float); i++)
            CHECK(s->base[i] == 1);
        return;
    }
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i++)
        CHECK(atomic_load(&s->area->records[i].op) == 0);
    CHECK(kern_trail_repair(s->area, s->base, s->bytes, s->chunks, s->chunk_count, &e) == SHD_OK);
}

/* The operation again, on whatever the chunk words say. */
static void resume(struct kern *k, struct state *s, uint8_t what)
{
    const struct kern_trail trail = { .area = s->area,
                                      .base = s->base,
                                      .chunks = s->chunks,
                                      .first_chunk = what / 8 % s->chunk_count,
                                      .op = OP };
    float *grad = calloc(s->elems, sizeof *grad);
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    struct kern_accumulate acc = { .acc = s->base + 3 * s->elems,
                                   .grad = grad,
                                   .grad_dtype = SHD_F32,
                                   .elems = s->elems,
                                   .first = (what & 2) != 0,
                                   .sum = (what & 4) != 0 ? &sum : NULL,
                                   .trail = trail };
    const struct kern_hyper hyper = {
        .lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .bias1 = 0.1f, .bias2 = 0.1f
    };
    const struct kern_run runs[2] = { { .first_elem = 5, .elems = 100 },
                                      { .first_elem = 130, .elems = s->elems - 131 } };
    const struct kern_update update = { .kind = SPEC_ADAMW,
                                        .param = s->base,
                                        .m = s->base + s->elems,
                                        .v = s->base + 2 * s->elems,
                                        .grad = s->base + 3 * s->elems,
                                        .grad_scale = 1,
                                        .publish = grad,
                                        .publish_dtype = (what & 2) != 0 ? SHD_F32 : SHD_BF16,
                                        .elems = s->elems,
                                        .runs = runs,
                                        .run_count = 2,
                                        .hypers = &hyper,
                                        .hyper_count = 1,
                                        .trail = trail };
    struct kern_waiter waiter;
    struct shd_err e = { 0 };
    CHECK(grad != NULL);
    kern_waiter_init(&waiter);
    const int r = (what & 1) != 0 ? kern_update(k, &update, &waiter.done, &e)
                                  : kern_accumulate(k, &acc, &waiter.done, &e);
    CHECK(r == SHD_OK);
    const int done = kern_wait(&waiter);
    CHECK(done == SHD_OK || done == SHD_ESEGMENT);
    free(grad);
}

static int trail_input(const uint8_t *data, size_t size)
{
    static struct kern *kerns[8];
    static struct kern_trail_area *area;
    static unsigned kern_count;
    struct shd_err e = { 0 };
    if (area == NULL) {
        area = aligned_alloc(128, KERN_TRAIL_BYTES);
        CHECK(area != NULL);
        memset((void *)area, 0, KERN_TRAIL_BYTES);
        for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++) {
            const struct kern_config config = { .threads = 1, .isa = *isa };
            CHECK(kern_cpu_new(&config, &kerns[kern_count++], &e) == SHD_OK);
        }
    }
    CHECK(kern_count > 0);
    struct fuzz_in in = { data, size };
    struct state s;
    bool repaired;
    area_clear(area);
    state_new(&s, area, &in);
    const uint8_t isa = fuzz_u8(&in), what = fuzz_u8(&in);
    if ((what & 0x80) == 0)
        record_usual(&s);
    while (in.left > 0)
        edit(&s, &in);
    repair(&s, &repaired);
    if (repaired)
        resume(kerns[isa % kern_count], &s, what);
    state_free(&s);
    return 0;
}

static size_t trail_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    const uint8_t bytes[] = { (uint8_t)index, (uint8_t)(index / 3), (uint8_t)(index / 8),
                              (uint8_t)(index % 8),
                              /* an edit or two */
                              (uint8_t)(index % 16), (uint8_t)(index * 5), 0x17,
                              (uint8_t)(index * 3) };
    if (index >= 32 || bytes_max < sizeof bytes)
        return 0;
    memcpy(buf, bytes, sizeof bytes);
    return index % 4 == 0 ? 4 : sizeof bytes;
}

const struct fuzz_target fuzz_trail = { "trail", trail_input, trail_seed, NULL };
