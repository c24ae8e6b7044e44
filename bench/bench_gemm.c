/* bench_gemm [CORETYPE]: the matrix products of shd-gpt on one thread, by oneDNN and by OpenBLAS;
 * then its layers' forward and backward, with weights as they lie and copied
 * (examples/gpt/linear.h).
 *
 * examples/gpt uses oneDNN because of these figures (docs/numerics.md). OpenBLAS is loaded at run
 * time, if it is there; CORETYPE becomes its OPENBLAS_CORETYPE (try SkylakeX, Haswell, Zen). Rounds
 * alternate the two; printed are medians in GFLOP/s, with the spread of the rounds.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench/bench.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/linear.h"

#define ROUNDS       11
#define ROUND_FLOPS  4e8
#define CBLAS_ROWS   101
#define CBLAS_PLAIN  111
#define CBLAS_TRANSP 112

typedef void cblas_sgemm_fn(int order, int ta, int tb, int m, int n, int k, float alpha,
                            const float *a, int lda, const float *b, int ldb, float beta, float *c,
                            int ldc);

struct shape {
    const char *what;
    int a_transposed, b_transposed;
    int m, n, k;
};

static const struct shape shapes[] = {
    { "fc forward, a tile, dim 128", 0, 0, 128, 256, 128 },
    { "fc forward, a tile, dim 256", 0, 0, 128, 256, 256 },
    { "fc forward, dim 256", 0, 0, 512, 1024, 256 },
    { "fc input gradient, dim 256", 0, 1, 512, 256, 1024 },
    { "fc weight gradient, dim 256", 1, 0, 256, 1024, 512 },
    { "fc weight gradient, a tile", 1, 0, 128, 256, 1024 },
    { "attention q k^T, head 32", 0, 1, 64, 128, 32 },
    { "attention p v, head 32", 0, 0, 64, 32, 128 },
    { "attention q k^T, head 64", 0, 1, 64, 256, 64 },
    { "fc forward, dim 768", 0, 0, 1024, 3072, 768 },
    { "fc input gradient, dim 768", 0, 1, 1024, 768, 3072 },
    { "fc weight gradient, dim 768", 1, 0, 768, 3072, 1024 },
};

struct operands {
    float *a, *b, *c;
};

/* Of this thread's CPU: a neighbour that takes the core for a while does not count. */
static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void call_onednn(const struct shape *s, const struct operands *o)
{
    const struct gemm_in a = { o->a, (uint64_t)(s->a_transposed ? s->m : s->k), s->a_transposed };
    const struct gemm_in b = { o->b, (uint64_t)(s->b_transposed ? s->k : s->n), s->b_transposed };
    gemm_run(GEMM_FULL, (struct gemm_size){ (uint64_t)s->m, (uint64_t)s->n, (uint64_t)s->k }, a, b,
             0, o->c, (uint64_t)s->n);
}

static void call_cblas(cblas_sgemm_fn *sgemm, const struct shape *s, const struct operands *o)
{
    sgemm(CBLAS_ROWS, s->a_transposed ? CBLAS_TRANSP : CBLAS_PLAIN,
          s->b_transposed ? CBLAS_TRANSP : CBLAS_PLAIN, s->m, s->n, s->k, 1, o->a,
          s->a_transposed ? s->m : s->k, o->b, s->b_transposed ? s->k : s->n, 0, o->c, s->n);
}

/* GFLOP/s of one round; sgemm NULL: oneDNN. */
static double round_run(cblas_sgemm_fn *sgemm, const struct shape *s, const struct operands *o)
{
    const double flops = 2.0 * s->m * s->n * s->k;
    const int repeat = (int)(ROUND_FLOPS / flops) + 1;
    const double start = cpu_s();
    for (int i = 0; i < repeat; i++) {
        if (sgemm != NULL)
            call_cblas(sgemm, s, o);
        else
            call_onednn(s, o);
    }
    return flops * repeat / (cpu_s() - start) * 1e-9;
}

static void print_rounds(const char *name, const struct stat_series *rates)
{
    const struct stat_summary s = stat_summarize(rates);
    printf("  %s %6.1f (%.1f..%.1f)", name, s.median, s.min, s.max);
}

static float *random_floats(size_t count)
{
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; x != NULL && i < count; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

static int shape_run(cblas_sgemm_fn *sgemm, const struct shape *s)
{
    struct stat_series onednn = { 0 }, openblas = { 0 };
    const struct operands o = { random_floats((size_t)s->m * (size_t)s->k),
                                random_floats((size_t)s->k * (size_t)s->n),
                                random_floats((size_t)s->m * (size_t)s->n) };
    const int ok = o.a != NULL && o.b != NULL && o.c != NULL;
    for (int r = -1; ok && r < ROUNDS; r++) { /* round -1 warms up */
        const double ours = round_run(NULL, s, &o);
        const double theirs = sgemm != NULL ? round_run(sgemm, s, &o) : 0;
        if (r < 0)
            continue;
        stat_add(&onednn, ours);
        stat_add(&openblas, theirs);
    }
    if (ok) {
        printf("%-28s %c%c %4d x %4d x %4d", s->what, s->a_transposed ? 'T' : 'N',
               s->b_transposed ? 'T' : 'N', s->m, s->n, s->k);
        print_rounds("oneDNN", &onednn);
        if (sgemm != NULL)
            print_rounds("OpenBLAS", &openblas);
        putchar('\n');
    }
    free(o.a);
    free(o.b);
    free(o.c);
    return ok;
}

/* -- Layers ------------------------------------------------------------------------------------ */

struct layer {
    const char *what;
    uint64_t in, out; /* times dim */
};

static const struct layer layers[] = {
    { "qkv", 1, 3 }, { "proj", 1, 1 }, { "fc", 1, 4 }, { "mlp", 4, 1 }
};
static const uint64_t layer_dims[][2] = {
    { 128, 1024 }, { 256, 1024 }, { 384, 512 }, { 512, 512 }, { 768, 256 }
};

enum pass { PASS_FORWARD, PASS_INPUT, PASS_WEIGHT, PASSES };

struct layer_arrays {
    float *x, *y, *dx, *dy, *weight, *dweight, *scratch;
};

/* GFLOP/s of one round. */
static double pass_run(struct pool *pool, const struct linear *lin, const struct layer_arrays *a,
                       enum pass pass)
{
    const double flops = 2.0 * (double)lin->rows * (double)lin->in * (double)lin->out;
    const int repeat = (int)(ROUND_FLOPS / flops) + 1;
    const struct linear_grads grads = { .x = a->x,
                                        .dy = a->dy,
                                        .dx = pass == PASS_INPUT ? a->dx : NULL,
                                        .dweight = pass == PASS_WEIGHT ? a->dweight : NULL };
    const double start = cpu_s();
    for (int i = 0; i < repeat; i++) {
        if (pass == PASS_FORWARD)
            linear_forward(pool, lin, a->x, a->y, LINEAR_PLAIN, NULL);
        else
            linear_backward(pool, lin, &grads);
    }
    return flops * repeat / (cpu_s() - start) * 1e-9;
}

static void layer_rounds(struct pool *pool, const struct linear *lin, const struct layer_arrays *a)
{
    static const char *const names[PASSES] = { "forward", "dx", "dw" };
    for (int pass = 0; pass < PASSES; pass++) {
        struct stat_series lies = { 0 }, copied = { 0 };
        struct linear with = *lin;
        with.scratch = a->scratch;
        for (int r = -1; r < ROUNDS; r++) { /* round -1 warms up */
            const double plain = pass_run(pool, lin, a, (enum pass)pass);
            const double copy = pass_run(pool, &with, a, (enum pass)pass);
            if (r < 0)
                continue;
            stat_add(&lies, plain);
            stat_add(&copied, copy);
        }
        printf("  %-8s", names[pass]);
        print_rounds("as it lies", &lies);
        print_rounds("copied", &copied);
        putchar('\n');
    }
}

static int layer_run(struct pool *pool, const struct layer *layer, uint64_t dim, uint64_t rows)
{
    const struct linear lin = { .rows = rows, .in = layer->in * dim, .out = layer->out * dim };
    struct layer_arrays a = { random_floats(rows * lin.in),
                              random_floats(rows * lin.out),
                              random_floats(rows * lin.in),
                              random_floats(rows * lin.out),
                              random_floats(lin.in * lin.out),
                              random_floats(lin.in * lin.out),
                              random_floats(linear_scratch(lin.in, lin.out)) };
    float *const all[] = { a.x, a.y, a.dx, a.dy, a.weight, a.dweight, a.scratch };
    int ok = 1;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        ok = ok && all[i] != NULL;
    if (ok) {
        struct linear with = lin;
        with.weight = a.weight;
        printf("%s, dim %d, %d rows\n", layer->what, (int)dim, (int)rows);
        layer_rounds(pool, &with, &a);
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    return ok;
}

static int layers_run(void)
{
    struct shd_err e;
    struct pool *pool;
    int ok = 1;
    bench_check(pool_new(1, &pool, &e), &e);
    for (size_t d = 0; d < sizeof layer_dims / sizeof layer_dims[0]; d++)
        for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++)
            ok = ok && layer_run(pool, &layers[i], layer_dims[d][0], layer_dims[d][1]);
    pool_free(pool);
    return ok;
}

/* NULL when there is no OpenBLAS. It reads its environment while it is loaded. */
static cblas_sgemm_fn *openblas_load(const char *core_type)
{
    cblas_sgemm_fn *sgemm;
    char *(*core_name)(void);
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    if (core_type != NULL)
        setenv("OPENBLAS_CORETYPE", core_type, 1);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return NULL;
    *(void **)&sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&core_name = dlsym(library, "openblas_get_corename");
    printf("OpenBLAS core type: %s\n", core_name != NULL ? core_name() : "unknown");
    return sgemm;
}

int main(int argc, char **argv)
{
    struct shd_err e;
    if (argc > 2 || (argc == 2 && argv[1][0] == '-')) {
        fprintf(stderr, "usage: bench_gemm [CORETYPE]\n");
        return 2;
    }
    bench_check(gemm_init(GEMM_FULL, &e), &e);
    cblas_sgemm_fn *sgemm = openblas_load(argc == 2 ? argv[1] : NULL);
    printf("GFLOP/s on one thread, median (min..max) of %d rounds\n", ROUNDS);
    int ok = 1;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        ok = ok && shape_run(sgemm, &shapes[i]);
    if (!ok || !layers_run()) {
        fprintf(stderr, "bench_gemm: no memory\n");
        return 1;
    }
    return 0;
}
