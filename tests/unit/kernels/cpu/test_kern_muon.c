/* Updates of whole tensors (Muon, LAMB): the same bits on every instruction set and for any number
 * of threads, those of the formula within what rounding can do, and finished after any death. */
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/trail.h"
#include "proto/base/clock.h"
#include "proto/spec/muon.h"
#include "tests/lib/kern_util.h"

#define ELEMS      (80 * BLOCK) /* chunks with a short last one */
#define CHUNKS     3u           /* kern_trail_chunks(ELEMS) */
#define ALL_CHUNKS (5 * CHUNKS) /* of the update, of its average, and three of whole tensors */
#define MATRICES   8u
#define ADAMW      0u /* groups */
#define MUON       1u
#define MUON_FLAT  2u
#define LAMB       3u
#define UNIT_FP32  0x1p-24

/* Of the slice, in order, some in one chunk and one in several; more and fewer rows than columns,
 * sides below and above tiles (96), panels and their depth (256), and such as are none. */
static const struct kern_matrix matrices[MATRICES] = {
    { SPEC_MUON, 7, 40, 1, 0 },    { SPEC_MUON, 270, 98, 1.5, 0 },  { SPEC_MUON, 1, 33, 1, 0 },
    { SPEC_MUON, 50, 1, 7, 0 },    { SPEC_MUON, 97, 130, 0.25, 0 }, { SPEC_MUON, 96, 192, 1, 0 },
    { SPEC_LAMB, 1, 13001, 1, 0 }, { SPEC_LAMB, 1, 700, 1, 0 },
};
static const struct kern_run matrix_runs[MATRICES] = {
    { 64, 280, MUON },       { 352, 26460, MUON_FLAT }, { 39360, 33, MUON },
    { 50016, 50, MUON },     { 60000, 12610, MUON },    { 100000, 18432, MUON_FLAT },
    { 125000, 13001, LAMB }, { 138500, 700, LAMB },
};
static const struct kern_run others[] = {
    { 0, 61, ADAMW }, { 39400, 10000, ADAMW }, { 90000, 9999, ADAMW }, { 140000, 20000, ADAMW }
};

static struct kern_hyper hyper_of(uint32_t group, uint32_t steps)
{
    struct kern_hyper h = update_hypers[0];
    const bool flat = group == MUON_FLAT;
    const float momentum = flat ? 0.375f : 0.95f;
    h.torch.rest1 = 1 - momentum;
    h.torch.flags = KERN_MOMENTUM;
    h.muon = (struct kern_muon){ .lr = flat ? 0.5 : 0.02,
                                 .keep = flat ? 1 : 0.998f,
                                 .eps = 1e-7f,
                                 .momentum = momentum,
                                 .coefficients = { 3.4445f, -4.7750f, 2.0315f },
                                 .steps = steps,
                                 .nesterov = !flat };
    if (group == LAMB)
        return update_hypers[2];
    return group == ADAMW ? update_hypers[0] : h;
}

/* -- One update, in memory that outlives a process ----------------------------------------------
 */

struct marks {
    _Atomic uint64_t done;
    _Atomic uint64_t started;
    _Atomic uint64_t chunks[ALL_CHUNKS];
};

struct world {
    uint8_t *base;
    uint64_t bytes;
    struct kern_trail_area *area;
    struct marks *marks;
    float *p, *m, *v, *e, *grad; /* [ELEMS]: what a segment has, with */
    float *scratch;
    float *publish; /* this process's */
    struct kern_hyper hypers[4];
    struct kern_change *change;
};

static uint64_t scratch_elems(void)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < MATRICES; i++) {
        const struct muon_room room = muon_room(matrices[i].rows, matrices[i].cols);
        if (muon_room_elems(&room) > most)
            most = muon_room_elems(&room);
    }
    return whole_head_elems(MATRICES) + ELEMS + most;
}

static void world_reset(const struct world *w)
{
    memset(w->base, 0, w->bytes);
    fill_awkward(w->p, ELEMS, false, 11);
    fill_awkward(w->m, ELEMS, false, 12);
    fill_awkward(w->v, ELEMS, false, 13);
    fill_awkward(w->e, ELEMS, false, 14);
    fill_awkward(w->grad, ELEMS, false, 15);
    for (uint64_t i = 0; i < ELEMS; i++) /* a second moment is not negative */
        w->v[i] = fabsf(w->v[i]);
    memset(w->publish, 0x5a, ELEMS * sizeof *w->publish);
    memset(w->scratch, 0xff, scratch_elems() * sizeof(float)); /* NaN: nothing of it may count */
}

static struct world world_new(uint32_t steps)
{
    EXPECT_EQ(kern_trail_chunks(ELEMS), CHUNKS);
    const uint64_t area_bytes = (KERN_TRAIL_BYTES + 4095) / 4096 * 4096, marks_bytes = 4096;
    struct world w = { .bytes = area_bytes + marks_bytes +
                                (5 * ELEMS + scratch_elems()) * sizeof(float) };
    void *base = mmap(NULL, w.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(base != MAP_FAILED);
    w.base = base;
    w.area = base;
    w.marks = (void *)(w.base + area_bytes);
    w.p = (void *)(w.base + area_bytes + marks_bytes);
    w.m = w.p + ELEMS;
    w.v = w.m + ELEMS;
    w.e = w.v + ELEMS;
    w.grad = w.e + ELEMS;
    w.scratch = w.grad + ELEMS;
    w.publish = aligned_alloc(64, ELEMS * sizeof(float));
    EXPECT(w.publish != NULL);
    for (uint32_t g = 0; g < ARRAY_SIZE(w.hypers); g++)
        w.hypers[g] = hyper_of(g, steps);
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
        .kind = SPEC_ADAMW,
        .param = w->p,
        .m = w->m,
        .v = w->v,
        .grad = w->grad,
        .grad_scale = 0.37f,
        .publish = w->publish,
        .publish_dtype = SHD_F32,
        .elems = ELEMS,
        .runs = others,
        .run_count = ARRAY_SIZE(others),
        .hypers = w->hypers,
        .hyper_count = ARRAY_SIZE(w->hypers),
        .whole = { .runs = matrix_runs,
                   .matrices = matrices,
                   .count = MATRICES,
                   .scratch = w->scratch,
                   .first_chunk = 2 * CHUNKS },
        .ema = { w->e, 0.125f, CHUNKS },
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

static void expect_same_world(const struct world *got, const struct world *want, const char *label)
{
    EXPECT_SAME_FLOATS(got->p, want->p, ELEMS, label);
    EXPECT_SAME_FLOATS(got->m, want->m, ELEMS, label);
    EXPECT_SAME_FLOATS(got->v, want->v, ELEMS, label);
    EXPECT_SAME_FLOATS(got->e, want->e, ELEMS, label);
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
        expect_same_world(&c->with, &c->want, label);
        EXPECT_SAME_FLOATS(c->with.publish, c->want.publish, ELEMS, label);
        EXPECT_EQ(c->with.marks->done, trail ? 7 : 0);
    }
}

TEST(neither_instruction_set_nor_threads_nor_a_trail_show_in_matrices)
{
    struct pair c = { .with = world_new(2), .want = world_new(2) };
    devices_each(check_bits, &c);
    world_free(&c.with);
    world_free(&c.want);
}

static bool is_in(const struct kern_run *runs, size_t count, uint64_t at)
{
    for (size_t i = 0; i < count; i++)
        if (at >= runs[i].first_elem && at < runs[i].first_elem + runs[i].elems)
            return true;
    return false;
}

static bool is_lamb(uint64_t at)
{
    for (uint32_t i = 0; i < MATRICES; i++)
        if (matrices[i].kind == SPEC_LAMB && is_in(&matrix_runs[i], 1, at))
            return true;
    return false;
}

/* The others are AdamW's, as without matrices; second moments of matrices and all gaps stay. */
TEST(what_is_no_matrix_is_updated_as_ever)
{
    struct world w = world_new(5), plain = world_new(5);
    struct kern *k = device_new(NULL, 2);
    struct kern_update u = update_of(&plain, false);
    u.whole.count = 0;
    EXPECT_RUNS(update, k, &u);
    update(k, &w, false);
    struct world start = world_new(5);
    for (uint64_t i = 0; i < ELEMS; i++) {
        const bool matrix = is_in(matrix_runs, MATRICES, i);
        EXPECT(w.v[i] == plain.v[i] || is_lamb(i));
        if (!matrix)
            EXPECT(w.p[i] == plain.p[i] && w.m[i] == plain.m[i] && w.e[i] == plain.e[i]);
        else
            EXPECT((w.v[i] == start.v[i] || is_lamb(i)) && w.publish[i] == w.p[i]);
        if (!matrix && !is_in(others, ARRAY_SIZE(others), i))
            EXPECT(w.p[i] == start.p[i] && bits_of(w.publish[i]) == 0x5a5a5a5a);
    }
    k->ops->free(k);
    world_free(&w);
    world_free(&plain);
    world_free(&start);
}

/* -- Against fp64 -------------------------------------------------------------------------------
 *
 * Every value has beside it a bound of how far rounding to fp32 can have taken it, as the formulas
 * of op_muon.h are gone through: a line adds u |result|, u = 2^-24; a sum of n products adds
 * n u sum |a b|, and each factor's own bound times the other's size. Terms of u^2 are below one in
 * 10^5 of what is there: a hundredth is added for them. */

#define SLACK 1.01

struct exact { /* [rows, cols] */
    uint64_t rows, cols;
    double *x, *err;
};

static struct exact exact_new(uint64_t rows, uint64_t cols)
{
    struct exact a = { rows, cols, calloc(rows * cols, sizeof(double)),
                       calloc(rows * cols, sizeof(double)) };
    EXPECT(a.x != NULL && a.err != NULL);
    return a;
}

static void exact_free(struct exact *a)
{
    free(a->x);
    free(a->err);
}

/* c = scale (a b) + add_scale add; b given as its transpose where it says so. */
static struct exact product(const struct exact *a, const struct exact *b, bool transposed,
                            double scale, double add_scale, const struct exact *add)
{
    struct exact c = exact_new(a->rows, transposed ? b->rows : b->cols);
    for (uint64_t i = 0; i < c.rows; i++)
        for (uint64_t j = 0; j < c.cols; j++) {
            double sum = 0, size = 0, err = 0;
            for (uint64_t k = 0; k < a->cols; k++) {
                const uint64_t at = i * a->cols + k,
                               of = transposed ? j * b->cols + k : k * b->cols + j;
                sum += a->x[at] * b->x[of];
                size += fabs(a->x[at] * b->x[of]);
                err += fabs(a->x[at]) * b->err[of] + a->err[at] * fabs(b->x[of]);
            }
            const uint64_t here = i * c.cols + j;
            err += (double)a->cols * UNIT_FP32 * size;
            const double more = add != NULL ? add_scale * add->x[here] : 0;
            c.x[here] = scale * sum + more;
            c.err[here] = fabs(scale) * err;
            if (add != NULL)
                c.err[here] += fabs(add_scale) * add->err[here] +
                               UNIT_FP32 * (fabs(more) + fabs(c.x[here]));
        }
    return c;
}

/* The matrix's mixture over its norm. */
static struct exact start_of(const struct world *w, uint32_t matrix, const struct kern_muon *h)
{
    const struct kern_run *run = &matrix_runs[matrix];
    struct exact a = exact_new(matrices[matrix].rows, matrices[matrix].cols);
    const double mu = (double)h->momentum, rest = 1 - mu, u = UNIT_FP32;
    double squares = 0;
    for (uint64_t i = 0; i < run->elems; i++) {
        const double g = (double)w->grad[run->first_elem + i] * (double)0.37f;
        const double m = (double)w->m[run->first_elem + i];
        const double next = m + rest * (g - m); /* three roundings, of at most |g| + |m| */
        const double next_err = 3 * u * (fabs(g) + fabs(m));
        a.x[i] = h->nesterov ? g + mu * (next - g) : next;
        a.err[i] = next_err + (h->nesterov ? 4 * u * (fabs(g) + fabs(next)) : 0);
        squares += a.x[i] * a.x[i];
    }
    double norm_err = 0; /* |norm(x + err) - norm(x)| <= norm(err) */
    for (uint64_t i = 0; i < run->elems; i++)
        norm_err += a.err[i] * a.err[i];
    const double norm = sqrt(squares), relative = sqrt(norm_err) / norm + 2 * u;
    for (uint64_t i = 0; i < run->elems; i++) {
        a.x[i] /= norm;
        a.err[i] = a.err[i] / norm + fabs(a.x[i]) * relative;
    }
    return a;
}

static void transpose(struct exact *a)
{
    struct exact t = exact_new(a->cols, a->rows);
    for (uint64_t i = 0; i < a->rows; i++)
        for (uint64_t j = 0; j < a->cols; j++) {
            t.x[j * a->rows + i] = a->x[i * a->cols + j];
            t.err[j * a->rows + i] = a->err[i * a->cols + j];
        }
    exact_free(a);
    *a = t;
}

static struct exact orthogonalized(const struct world *w, uint32_t matrix)
{
    const struct kern_muon *h = &w->hypers[matrix_runs[matrix].hyper].muon;
    struct exact x = start_of(w, matrix, h);
    const bool across = x.rows > x.cols;
    if (across)
        transpose(&x);
    for (uint32_t i = 0; i < h->steps; i++) {
        struct exact s = product(&x, &x, true, 1, 0, NULL);
        struct exact q = product(&s, &s, false, (double)h->coefficients[2],
                                 (double)h->coefficients[1], &s);
        struct exact y = product(&q, &x, false, 1, (double)h->coefficients[0], &x);
        exact_free(&s);
        exact_free(&q);
        exact_free(&x);
        x = y;
    }
    if (across)
        transpose(&x);
    return x;
}

static void expect_near(const struct world *start, const struct world *got, uint32_t matrix)
{
    const struct kern_run *run = &matrix_runs[matrix];
    const struct kern_muon *h = &start->hypers[run->hyper].muon;
    struct exact o = orthogonalized(start, matrix);
    const double rate = h->lr * matrices[matrix].ratio;
    double worst = 0, most = 0;
    for (uint64_t i = 0; i < run->elems; i++) {
        const double p = (double)start->p[run->first_elem + i] * (double)h->keep;
        const double want = p - rate * o.x[i];
        const double bound = SLACK * rate * o.err[i] +
                             UNIT_FP32 * (fabs(p) + fabs(want) + 2 * rate * fabs(o.x[i]));
        const double off = fabs((double)got->p[run->first_elem + i] - want);
        if (off > bound)
            FAIL("matrix %" PRIu32 ", element %" PRIu64 ": %.9g, expected %.9g +- %.3g", matrix, i,
                 (double)got->p[run->first_elem + i], want, bound);
        worst = off / bound > worst ? off / bound : worst;
        most = bound > most ? bound : most;
    }
    printf("matrix %" PRIu32 ", %" PRIu32 " steps: off by at most %.2g of a bound of up to %.2g\n",
           matrix, h->steps, worst, most);
    exact_free(&o);
}

/* More than one step makes the bound loose, and runs the same code. */
TEST(the_iteration_is_that_of_the_formula_within_its_rounding)
{
    for (uint32_t steps = 1; steps <= 2; steps++) {
        struct world start = world_new(steps), w = world_new(steps);
        struct kern *k = device_new(NULL, 2);
        memset(start.p, 0, ELEMS * sizeof *start.p); /* so that they round away nothing */
        memset(w.p, 0, ELEMS * sizeof *w.p);
        update(k, &w, false);
        for (uint32_t i = 0; i < MATRICES; i++)
            if (matrices[i].kind == SPEC_MUON)
                expect_near(&start, &w, i);
        k->ops->free(k);
        world_free(&start);
        world_free(&w);
    }
}

/* LAMB likewise, element by element. What the tensor's norms are off by is at most the norm of what
 * their elements are off by. */
static void expect_lamb(const struct world *start, const struct world *got, uint32_t tensor)
{
    const struct kern_run *run = &matrix_runs[tensor];
    const struct kern_hyper *h = &start->hypers[LAMB];
    const double u = UNIT_FP32, lr = (double)h->lr, decay = (double)h->weight_decay;
    double *x = calloc(run->elems, sizeof *x), *err = calloc(run->elems, sizeof *err);
    double norm = 0, weight = 0, off = 0;
    EXPECT(x != NULL && err != NULL);
    for (uint64_t i = 0; i < run->elems; i++) {
        const uint64_t at = run->first_elem + i;
        const double g = (double)start->grad[at] * (double)0.37f, p = (double)start->p[at];
        const double m0 = (double)start->m[at], v0 = (double)start->v[at];
        const double m = m0 + (1 - (double)h->beta1) * (g - m0);
        const double v = (double)h->beta2 * v0 + (1 - (double)h->beta2) * g * g;
        const double s = sqrt(v / (double)h->bias2) + (double)h->eps;
        const double a = m / (double)h->bias1, q = a / s;
        EXPECT_NEAR((double)got->m[at], m, u * (4 * fabs(g) + 3 * fabs(m0)));
        EXPECT_NEAR((double)got->v[at], v, 6 * u * v);
        x[i] = q + decay * p;
        /* v is of 6 roundings, its root of half of them and one, s of two more; q of three. */
        err[i] = fabs(q) * 9 * u + u * (4 * fabs(g) + 3 * fabs(m0)) / (double)h->bias1 / s +
                 u * (fabs(x[i]) + fabs(decay * p));
        norm += x[i] * x[i];
        weight += p * p;
        off += err[i] * err[i];
    }
    const double trust = sqrt(weight) / sqrt(norm), relative = sqrt(off / norm) + 3 * u;
    for (uint64_t i = 0; i < run->elems; i++) {
        const double p = (double)start->p[run->first_elem + i], want = p - lr * trust * x[i];
        EXPECT_NEAR((double)got->p[run->first_elem + i], want,
                    SLACK * (lr * trust * (err[i] + fabs(x[i]) * relative) + u * fabs(want)));
    }
    free(x);
    free(err);
}

TEST(lambs_rate_is_that_of_the_tensors_norms)
{
    struct world start = world_new(1), w = world_new(1);
    struct kern *k = device_new(NULL, 2);
    update(k, &w, false);
    for (uint32_t i = 0; i < MATRICES; i++)
        if (matrices[i].kind == SPEC_LAMB)
            expect_lamb(&start, &w, i);
    k->ops->free(k);
    world_free(&start);
    world_free(&w);
}

/* A tensor of zeros has no norm to go by: the rate is the learning rate's. */
TEST(lamb_of_a_tensor_of_zeros_has_the_plain_rate)
{
    struct world w = world_new(1);
    struct kern *k = device_new(NULL, 1);
    memset(w.p, 0, ELEMS * sizeof *w.p);
    update(k, &w, false);
    const struct kern_hyper *h = &w.hypers[LAMB];
    for (uint64_t i = 138500; i < 139200; i++) {
        const double s = sqrt((double)w.v[i] / (double)h->bias2) + (double)h->eps;
        const double want = -(double)h->lr * ((double)w.m[i] / (double)h->bias1 / s);
        EXPECT_NEAR((double)w.p[i], want, 8 * UNIT_FP32 * fabs(want));
    }
    k->ops->free(k);
    world_free(&w);
}

/* After five steps the singular values of what began with any are near 1: those of a 7 x 40 matrix
 * lie where the polynomial leads to ("S' ~ Uniform(0.5, 1.5)", torch/optim/_muon.py), so that
 * trace(o o^T) of 7 of them is within 7 * [0.25, 2.25]. */
TEST(five_steps_orthogonalize)
{
    struct world start = world_new(5), w = world_new(5);
    struct kern *k = device_new(NULL, 1);
    update(k, &w, false);
    const struct kern_muon *h = &w.hypers[MUON].muon;
    double trace = 0;
    for (uint64_t i = 64; i < 64 + 280; i++) {
        const double o = ((double)h->keep * (double)start.p[i] - (double)w.p[i]) / h->lr;
        trace += o * o;
    }
    EXPECT(trace > 7 * 0.25 && trace < 7 * 2.25);
    k->ops->free(k);
    world_free(&start);
    world_free(&w);
}

/* -- What it comes to ---------------------------------------------------------------------------
 */

static struct kern_change no_change(void)
{
    return (struct kern_change){ .update.finite = true, .weight.finite = true, .whole = true };
}

/* Sums of squares in other blocks than those of one pass: off by what rounding in fp64 does. */
TEST(an_update_of_matrices_is_measured)
{
    struct world start = world_new(5), w = world_new(5);
    struct kern_change change = no_change(), again = no_change();
    struct kern *k = device_new(NULL, 2);
    w.change = &change;
    update(k, &w, true);
    double update_sum = 0, weight_sum = 0;
    for (uint64_t i = 0; i < ELEMS; i++) {
        const float d = daz(w.p[i] - start.p[i]), p = daz(w.p[i]);
        update_sum += (double)d * (double)d;
        weight_sum += (double)p * (double)p;
    }
    EXPECT(change.whole && change.update.finite && change.weight.finite);
    EXPECT_NEAR(fixsum_value(&change.update.sum) / update_sum, 1, 1e-9);
    EXPECT_NEAR(fixsum_value(&change.weight.sum) / weight_sum, 1, 1e-9);
    w.change = &again;
    update(k, &w, true); /* nothing of it is left to be done */
    EXPECT(!again.whole);
    k->ops->free(k);
    world_free(&start);
    world_free(&w);
}

/* -- Deaths -------------------------------------------------------------------------------------
 */

static void finish(const struct world *w, const char *isa, uint32_t threads)
{
    struct shd_err e = { 0 };
    EXPECT_OK(kern_trail_repair(w->area, w->base, w->bytes, w->marks->chunks, ALL_CHUNKS, &e), &e);
    struct kern *k = device_new(isa, threads);
    update(k, w, true);
    k->ops->free(k);
    EXPECT_EQ(w->marks->done, 7);
}

static void child_main(const struct world *w, uint32_t threads)
{
    struct kern *k = device_new(NULL, threads);
    struct kern_waiter waiter;
    struct shd_err e = { 0 };
    const struct kern_update u = update_of(w, true);
    kern_waiter_init(&waiter);
    w->marks->started = 1;
    if (kern_update(k, &u, &waiter.done, &e) != SHD_OK || kern_wait(&waiter) != SHD_OK)
        _exit(2);
    _exit(0);
}

/* What of the update a kill fell into. */
struct deaths {
    uint32_t kills, inside, before_params, in_params;
};

/* A chunk of that pass is done. */
static bool has_begun(const struct world *w, uint32_t pass)
{
    bool begun = false;
    for (uint32_t c = 0; c < CHUNKS; c++)
        begun = begun || w->marks->chunks[pass * CHUNKS + c] != 0;
    return begun;
}

static void count_death(const struct world *w, struct deaths *d)
{
    const bool momentum = has_begun(w, 2), params = has_begun(w, 4);
    const bool inside = w->marks->done != 7;
    d->kills++;
    d->inside += inside;
    d->before_params += inside && momentum && !params;
    d->in_params += inside && params;
}

TEST(killed_updates_of_matrices_are_finished_by_their_successors)
{
    if (SANITIZE_THREAD)
        SKIP("threads are looked at where they live; what a kill leaves is seen in other builds");
    uint64_t state = test_seed(20261127);
    struct world w = world_new(5), want = world_new(5);
    struct deaths d = { 0 };
    struct kern *k = device_new(NULL, 2);
    update(k, &want, false);
    const uint64_t from = clock_now_ns();
    world_reset(&want);
    update(k, &want, false);
    const uint64_t update_us = (clock_now_ns() - from) / 1000;
    k->ops->free(k);
    /* Where a kill falls is the scheduler's choice as well: go on until enough fell inside. */
    while (d.kills < 1000 && (d.kills < 40 || d.before_params < 8 || d.in_params < 1)) {
        world_reset(&w);
        const pid_t pid = fork();
        EXPECT(pid >= 0);
        if (pid == 0)
            child_main(&w, 1 + (uint32_t)(test_random(&state) >> 33) % 3);
        while (w.marks->started == 0)
            usleep(20);
        if (d.kills % 4 == 3) /* the parameters take a small part of the time: in their midst */
            for (int i = 0; i < 1000000 && !has_begun(&w, 4) && w.marks->done != 7; i++)
                usleep(10);
        else
            usleep((useconds_t)(test_random(&state) % (update_us + update_us / 4 + 1)));
        kill(pid, SIGKILL);
        int status;
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        count_death(&w, &d);
        finish(&w, d.kills % 8 == 0 ? "scalar" : NULL, 1 + d.kills % 3);
        expect_same_world(&w, &want, "after a kill");
    }
    printf("%" PRIu32 " kills, %" PRIu32 " inside an update, %" PRIu32
           " between momentum and parameters, %" PRIu32 " in the parameters\n",
           d.kills, d.inside, d.before_params, d.in_params);
    EXPECT(d.before_params >= 8 && d.in_params >= 1);
    world_free(&w);
    world_free(&want);
}

/* A half-done pass of parameters, made by hand: two chunks are done, and with them the half of a
 * tensor whose norm LAMB went by. */
TEST(parameters_half_done_are_finished_where_they_stand)
{
    struct world w = world_new(5), want = world_new(5), start = world_new(5);
    struct kern *k = device_new(NULL, 1);
    update(k, &want, true);
    memcpy(w.base, want.base, w.bytes);
    for (uint64_t i = 2 * KERN_CHUNK_ELEMS; i < ELEMS; i++) {
        w.e[i] = start.e[i];
        if (is_in(matrix_runs, MATRICES, i))
            w.p[i] = start.p[i];
    }
    w.marks->chunks[4 * CHUNKS + 2] = w.marks->chunks[CHUNKS + 2] = 0;
    w.marks->done = 0;
    finish(&w, NULL, 2);
    expect_same_world(&w, &want, "finished");
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

TEST(wrong_matrices_are_refused_by_name)
{
    struct world w = world_new(5);
    struct kern *k = device_new(NULL, 1);
    const struct kern_update good = update_of(&w, false);
    struct kern_matrix shapes[MATRICES];
    struct kern_run runs[MATRICES];
    struct kern_update u = good;
    u.whole.scratch = NULL;
    EXPECT_REFUSED(u, SHD_EINVAL, "scratch");
    u = good, u.whole.scratch++;
    EXPECT_REFUSED(u, SHD_EINVAL, "not aligned to 64");
    u = good, u.m = NULL;
    EXPECT_REFUSED(u, SHD_EINVAL, "m is NULL");
    u = good, u.kind = SPEC_MUON;
    EXPECT_REFUSED(u, SHD_EINVAL, "unknown optimizer");
    u = good, u.int8 = true, u.run_count = 0;
    EXPECT_REFUSED(u, SHD_EINVAL, "matrices, with moments in 8 bits: theirs are fp32");
    u = good, u.kind = SPEC_SGD, u.v = NULL;
    EXPECT_REFUSED(u, SHD_EINVAL, "lamb: v is NULL, and tensor 6 needs it");
    memcpy(shapes, matrices, sizeof shapes);
    memcpy(runs, matrix_runs, sizeof runs);
    u = good, u.whole.matrices = shapes, u.whole.runs = runs;
    shapes[1].rows = 269;
    EXPECT_REFUSED(u, SHD_ERANGE, "matrix 1 has 26460 elements, and is 269 x 98");
    shapes[1].rows = 270, runs[2].hyper = 4;
    EXPECT_REFUSED(u, SHD_ERANGE, "matrix 2 has group 4 of 4");
    runs[2].hyper = MUON, runs[4].first_elem = 40;
    EXPECT_REFUSED(u, SHD_ERANGE, "matrix 4 is 40+12610");
    k->ops->free(k);
    world_free(&w);
}

/* It takes passes, however small: the caller's thread does none of it. */
TEST(matrices_are_never_done_on_the_callers_thread)
{
    static const struct kern_matrix one = { SPEC_MUON, 4, 8, 1, 0 };
    static const struct kern_run run = { 0, 32, MUON };
    struct world w = world_new(1);
    struct kern *k = device_new(NULL, 1);
    struct kern_op op = { .kind = KERN_UPDATE, .update = update_of(&w, false) };
    struct shd_err e = { 0 };
    int status;
    op.update.elems = BLOCK;
    op.update.run_count = 0;
    op.update.whole.runs = &run;
    op.update.whole.matrices = &one;
    op.update.whole.count = 1;
    EXPECT_STATUS(k->ops->run_here(k, &op, &status, &e), SHD_PENDING);
    EXPECT_RUNS(update, k, &op.update);
    EXPECT(w.publish[0] == w.p[0]);
    k->ops->free(k);
    world_free(&w);
}

TEST_MAIN()
