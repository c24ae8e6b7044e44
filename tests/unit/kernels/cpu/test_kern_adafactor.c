/* Adafactor's updates: the same bits on every instruction set, for any number of threads and with a
 * trail, those of the formula within what rounding can do, and finished after a death. */
#include <float.h>
#include <math.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/trail.h"
#include "proto/spec/muon.h"
#include "tests/lib/kern_util.h"

#define ELEMS      (40 * BLOCK) /* two chunks */
#define CHUNKS     2u
#define ALL_CHUNKS (4 * CHUNKS) /* of the update, and three of whole tensors */
#define TENSORS    4u
#define STATISTICS (38 * BLOCK) /* where they begin */
#define UNIT_FP32  0x1p-24

/* Two matrices, a vector, one that is of one chunk and one that is of both. */
static const struct kern_matrix shapes[TENSORS] = {
    { SPEC_ADAFACTOR, 37, 70, 0, 2 },
    { SPEC_ADAFACTOR, 0, 3001, 0, 1 },
    { SPEC_ADAFACTOR, 300, 95, 0, 1 },
    { SPEC_ADAFACTOR, 260, 150, 0, 1 },
};
static const struct kern_run tensors[TENSORS] = {
    { 0, 5180, 0 }, { 5184, 3001, 1 }, { 8192, 28500, 0 }, { 36704, 39000, 1 }
};
static const struct kern_run statistics[TENSORS] = {
    { STATISTICS, 214, 0 },
    { STATISTICS + 224, 3001, 1 },
    { STATISTICS + 3232, 395, 0 },
    { STATISTICS + 3648, 410, 1 },
};
/* The second one clips, has no decay, and sizes that are below its eps2. */
static const struct kern_hyper hypers[] = {
    { .torch = { .rest1 = 0.25f, .flags = KERN_MOMENTUM },
      .adafactor = { 0.01, 1e-3, 1, 0.998f, 0x1p-23f, 0x1p-46f } },
    { .torch = { .rest1 = 0.75f, .flags = KERN_MOMENTUM },
      .adafactor = { 0.1, 100, 1.25, 1, 1e-3f, 1e-6f } },
};

struct marks {
    _Atomic uint64_t done;
    _Atomic uint64_t chunks[ALL_CHUNKS];
};

struct world {
    uint8_t *base;
    uint64_t bytes, scratch_bytes;
    struct kern_trail_area *area;
    struct marks *marks;
    float *p, *grad, *scratch, *publish;
    struct kern_change *change;
};

static void world_reset(const struct world *w)
{
    memset(w->base, 0, w->bytes);
    fill_awkward(w->p, ELEMS, false, 11);
    fill_awkward(w->grad, ELEMS, false, 15);
    for (uint64_t i = STATISTICS; i < ELEMS; i++) /* means of squares, and gaps */
        w->p[i] = fabsf(w->p[i]);
    memset(w->publish, 0x5a, ELEMS * sizeof *w->publish);
    memset(w->scratch, 0xff, w->scratch_bytes); /* NaN: nothing of it may count */
}

static struct world world_new(void)
{
    EXPECT_EQ(kern_trail_chunks(ELEMS), CHUNKS);
    const uint64_t area_bytes = (KERN_TRAIL_BYTES + 4095) / 4096 * 4096, marks_bytes = 4096;
    struct world w = { .scratch_bytes = (whole_head_elems(TENSORS) + ELEMS) * sizeof(float) };
    w.bytes = area_bytes + marks_bytes + 2 * ELEMS * sizeof(float) + w.scratch_bytes;
    void *base = mmap(NULL, w.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(base != MAP_FAILED);
    w.base = base;
    w.area = base;
    w.marks = (void *)(w.base + area_bytes);
    w.p = (void *)(w.base + area_bytes + marks_bytes);
    w.grad = w.p + ELEMS;
    w.scratch = w.grad + ELEMS;
    w.publish = aligned_alloc(64, ELEMS * sizeof(float));
    EXPECT(w.publish != NULL);
    world_reset(&w);
    return w;
}

static void world_free(struct world *w)
{
    munmap(w->base, w->bytes);
    free(w->publish);
}

static struct kern_update update_of(const struct world *w, bool trail)
{
    struct kern_update u = {
        .kind = SPEC_ADAFACTOR,
        .param = w->p,
        .grad = w->grad,
        .grad_scale = 0.37f,
        .publish = w->publish,
        .publish_dtype = SHD_F32,
        .elems = ELEMS,
        .hypers = hypers,
        .hyper_count = ARRAY_SIZE(hypers),
        .whole = { .runs = tensors,
                   .matrices = shapes,
                   .count = TENSORS,
                   .statistics = statistics,
                   .scratch = w->scratch,
                   .first_chunk = CHUNKS },
        .change = w->change,
    };
    if (trail)
        u.trail = (struct kern_trail){ .area = w->area,
                                       .base = w->base,
                                       .chunks = w->marks->chunks,
                                       .op = 7,
                                       .done = &w->marks->done,
                                       .done_value = 7 };
    return u;
}

static void update(struct kern *k, const struct world *w, bool trail)
{
    const struct kern_update u = update_of(w, trail);
    EXPECT_RUNS(update, k, &u);
}

/* -- Bits ---------------------------------------------------------------------------------------
 */

struct pair {
    struct world with, want;
    bool any;
};

static void check_bits(struct kern *k, const char *label, void *arg)
{
    struct pair *c = arg;
    if (!c->any)
        update(k, &c->want, /* trail= */ false); /* scalar, one thread */
    c->any = true;
    for (int trail = 0; trail < 2; trail++) {
        world_reset(&c->with);
        update(k, &c->with, trail);
        EXPECT_SAME_FLOATS(c->with.p, c->want.p, ELEMS, label);
        EXPECT_SAME_FLOATS(c->with.publish, c->want.publish, ELEMS, label);
        EXPECT_EQ(c->with.marks->done, trail ? 7 : 0);
    }
}

TEST(neither_instruction_set_nor_threads_nor_a_trail_show_in_an_update)
{
    struct pair c = { .with = world_new(), .want = world_new() };
    devices_each(check_bits, &c);
    world_free(&c.with);
    world_free(&c.want);
}

/* -- Against fp64 -------------------------------------------------------------------------------
 */

static double grad_at(const struct world *w, uint64_t i)
{
    return (double)w->grad[i] * (double)0.37f;
}

/* The mean of squares that element `at` of a tensor's statistics goes by. */
static double mean_at(const struct world *w, uint32_t tensor, uint64_t at)
{
    const struct kern_matrix *s = &shapes[tensor];
    const uint64_t rows = s->batch * s->rows, first = tensors[tensor].first_elem;
    const bool row = at < rows;
    const uint64_t count = rows == 0 ? 1 : row ? s->cols : s->rows;
    const uint64_t col = at - rows, step = row ? 1 : s->cols;
    const uint64_t from = rows == 0 ? at
                          : row     ? at * s->cols
                                    : col / s->cols * s->rows * s->cols + col % s->cols;
    double sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        const double g = grad_at(w, first + from + i * step);
        sum += g * g;
    }
    return sum / (double)count;
}

/* Of u = 2^-24: a mean's gradients are rounded, and it is; mean - s is, and what is added to s.
 * What comes of statistics is compared with what comes of those that are there: it is off by five
 * roundings of its mean of squares, of which it has the root, and four more; norms likewise, and
 * each of the rate's factors, and parameters, once. */
static void expect_near(const struct world *start, const struct world *got, uint32_t tensor)
{
    const struct kern_matrix *s = &shapes[tensor];
    const struct kern_run *run = &tensors[tensor], *kept = &statistics[tensor];
    const struct kern_adafactor *h = &hypers[run->hyper].adafactor;
    const double u = UNIT_FP32, w = (double)hypers[run->hyper].torch.rest1;
    const float *stat = got->p + kept->first_elem;
    const uint64_t rows = s->batch * s->rows;
    for (uint64_t i = 0; i < kept->elems; i++) {
        const double was = (double)start->p[kept->first_elem + i], mean = mean_at(start, tensor, i);
        const double want = was + w * (mean - was);
        EXPECT_NEAR((double)stat[i], want, u * (5 * w * mean + w * fabs(mean - was) + 2 * want));
    }
    double *x = calloc(run->elems, sizeof *x), norm = 0, weight = 0;
    EXPECT(x != NULL);
    for (uint64_t i = 0; i < run->elems; i++) {
        double v = (double)stat[i < kept->elems ? i : 0];
        if (rows > 0) {
            const uint64_t row = i / s->cols, matrix = row / s->rows;
            double sum = 0;
            for (uint64_t r = matrix * s->rows; r < (matrix + 1) * s->rows; r++)
                sum += (double)stat[r];
            v = (double)stat[row] * (double)stat[rows + matrix * s->cols + i % s->cols] /
                fmax(sum / (double)s->rows, (double)h->eps1);
        }
        x[i] = grad_at(start, run->first_elem + i) / sqrt(fmax(v, (double)h->eps1_square));
        norm += x[i] * x[i];
        const double p = (double)start->p[run->first_elem + i];
        weight += p * p;
    }
    const double root = sqrt((double)run->elems);
    const double rate = fmax(h->eps2, sqrt(weight) / root) * h->rho /
                        fmax(1, sqrt(norm) / (root * h->d));
    for (uint64_t i = 0; i < run->elems; i++) {
        const uint64_t at = run->first_elem + i;
        const double p = (double)h->keep * (double)start->p[at], want = p - rate * x[i];
        EXPECT_NEAR((double)got->p[at], want,
                    u * (rate * fabs(x[i]) * 16 + fabs(p) + fabs(want)) + (double)FLT_MIN);
    }
    printf("tensor %" PRIu32 ": update of size %.3g, parameters of %.3g\n", tensor,
           sqrt(norm) / root, sqrt(weight) / root);
    free(x);
}

TEST(an_update_is_that_of_the_formula_within_its_rounding)
{
    struct world start = world_new(), w = world_new();
    struct kern *k = device_new(NULL, 2);
    update(k, &w, false);
    for (uint32_t i = 0; i < TENSORS; i++)
        expect_near(&start, &w, i);
    for (uint64_t i = tensors[3].first_elem + tensors[3].elems; i < STATISTICS; i++)
        EXPECT_EQ(bits_of(w.p[i]), bits_of(start.p[i]));
    k->ops->free(k);
    world_free(&start);
    world_free(&w);
}

/* Statistics are no parameters, and not measured with them. */
TEST(what_an_update_comes_to_is_of_parameters)
{
    struct world start = world_new(), w = world_new();
    struct kern_change change = { .update.finite = true, .weight.finite = true, .whole = true };
    struct kern *k = device_new(NULL, 2);
    w.change = &change;
    update(k, &w, true);
    double update_sum = 0, weight_sum = 0;
    for (uint64_t i = 0; i < STATISTICS; i++) {
        const float d = daz(w.p[i] - start.p[i]), p = daz(w.p[i]);
        update_sum += (double)d * (double)d;
        weight_sum += (double)p * (double)p;
    }
    EXPECT(change.whole && change.update.finite && change.weight.finite);
    EXPECT_NEAR(fixsum_value(&change.update.sum) / update_sum, 1, 1e-9);
    EXPECT_NEAR(fixsum_value(&change.weight.sum) / weight_sum, 1, 1e-9);
    k->ops->free(k);
    world_free(&start);
    world_free(&w);
}

/* -- Deaths -------------------------------------------------------------------------------------
 */

static void finish(const struct world *w, const char *isa)
{
    struct shd_err e = { 0 };
    EXPECT_OK(kern_trail_repair(w->area, w->base, w->bytes, w->marks->chunks, ALL_CHUNKS, &e), &e);
    struct kern *k = device_new(isa, 2);
    update(k, w, true);
    k->ops->free(k);
    EXPECT_EQ(w->marks->done, 7);
}

/* As a killed process leaves it, made by hand: statistics are there, and parameters are not, of
 * which nothing is known (scratch is lost as well); or of which the first chunk is there. */
TEST(a_half_done_update_is_finished_where_it_stands)
{
    struct world w = world_new(), want = world_new(), start = world_new();
    struct kern *k = device_new(NULL, 1);
    update(k, &want, true);
    for (int half = 0; half < 2; half++) {
        memcpy(w.base, want.base, w.bytes);
        const uint64_t from = half ? KERN_CHUNK_ELEMS : 0;
        memcpy(w.p + from, start.p + from, (STATISTICS - from) * sizeof *w.p);
        for (uint32_t c = half ? 1 : 0; c < CHUNKS; c++)
            w.marks->chunks[3 * CHUNKS + c] = 0;
        if (!half)
            memset(w.scratch, 0xff, w.scratch_bytes);
        w.marks->done = 0;
        finish(&w, half ? "scalar" : NULL);
        EXPECT_SAME_FLOATS(w.p, want.p, ELEMS, half ? "half of the parameters" : "statistics");
    }
    k->ops->free(k);
    world_free(&w);
    world_free(&want);
    world_free(&start);
}

/* -- Refusals -----------------------------------------------------------------------------------
 */

#define EXPECT_REFUSED(u, status, words)                                   \
    do {                                                                   \
        struct shd_err refused_err = { 0 };                                \
        EXPECT_STATUS(kern_update(k, &(u), NULL, &refused_err), (status)); \
        EXPECT(strstr(refused_err.text, (words)) != NULL);                 \
    } while (0)

TEST(what_is_wrong_is_refused_by_name)
{
    struct world w = world_new();
    struct kern *k = device_new(NULL, 1);
    const struct kern_update good = update_of(&w, false);
    const struct kern_run others = { 76000, 10, 0 };
    struct kern_run moved[TENSORS];
    struct kern_matrix of[TENSORS];
    struct kern_update u = good;
    u.whole.count = 0;
    EXPECT_REFUSED(u, SHD_EINVAL, "unknown optimizer");
    u = good, u.runs = &others, u.run_count = 1;
    EXPECT_REFUSED(u, SHD_EINVAL, "adafactor: with 1 runs of others");
    u = good, u.whole.statistics = NULL;
    EXPECT_REFUSED(u, SHD_EINVAL, "no statistics");
    memcpy(of, shapes, sizeof of);
    u = good, u.whole.matrices = of, of[2].cols = 96;
    EXPECT_REFUSED(u, SHD_ERANGE, "tensor 2 has 28500 elements and 395 statistics");
    memcpy(moved, statistics, sizeof moved);
    u = good, u.whole.statistics = moved, moved[1].first_elem = STATISTICS;
    EXPECT_REFUSED(u, SHD_ERANGE, "what is before them ends at 78038");
    memcpy(of, shapes, sizeof of);
    u = good, u.whole.matrices = of, of[1].kind = SPEC_LAMB, u.v = w.p;
    EXPECT_REFUSED(u, SHD_EINVAL, "whole tensor 1 is of lamb, and the slice of adafactor");
    k->ops->free(k);
    world_free(&w);
}

TEST_MAIN()
