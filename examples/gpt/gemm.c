/* gemm.c: see gemm.h.
 *
 * Kinds of 16 bits: both factors are rounded into buffers of the calling thread. The emulated kinds
 * then multiply these with the fp32 routine. The native kind calls an oneDNN matmul primitive;
 * making one costs far more than running it, so each thread keeps those it has used, by sizes and
 * strides.
 *
 * Failure: there is nobody to tell inside a compute task, so running out of memory ends the process
 * with a message.
 */
#include "examples/gpt/gemm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/vec.h"
#include "proto/base/status.h"

#ifdef GPT_F64

int gemm_init(enum gemm_kind kind, struct shd_err *e)
{
    return kind == GEMM_FULL ? SHD_OK : err_set(e, SHD_ENOTSUP, "fp64 has no 16-bit products");
}

const char *gemm_describe(enum gemm_kind kind)
{
    (void)kind;
    return "fp64 loops";
}

static real gemm_at(struct gemm_in x, uint64_t i, uint64_t j)
{
    return x.transposed ? x.data[j * x.stride + i] : x.data[i * x.stride + j];
}

void gemm_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
              real beta, real *c, uint64_t c_stride)
{
    (void)kind; /* gemm_init() refused the others */
    for (uint64_t i = 0; i < size.m; i++) {
        for (uint64_t j = 0; j < size.n; j++) {
            real sum = 0;
            for (uint64_t k = 0; k < size.k; k++)
                sum += gemm_at(a, i, k) * gemm_at(b, k, j);
            real *out = &c[i * c_stride + j];
            *out = beta == 0 ? sum : *out + sum;
        }
    }
}

#else

#include <oneapi/dnnl/dnnl.h>

#define HALF_PRIMITIVES 64 /* a model of one shape needs about 30 */
#define HALF_ALIGN      64
#define HALF_PAD_ELEMS  32 /* rows of the buffers start at cache lines */

/* The product that a primitive is made for. All fields of one size: no padding, so memcmp()
 * compares. */
struct half_key {
    uint64_t m, n, k, a_transposed, b_transposed, beta, c_stride;
};

struct half_primitive {
    struct half_key key;
    dnnl_primitive_t primitive; /* owned; NULL: a free entry */
    dnnl_memory_t a, b, c;      /* owned; their handles are set for each run */
};

struct half_buffer {
    void *data; /* owned */
    uint64_t bytes;
};

/* The state of one thread; freed when the thread ends. */
struct half_thread {
    struct half_buffer a, b;
    dnnl_stream_t stream; /* owned; NULL until the first native product */
    uint32_t count, victim;
    struct half_primitive primitives[HALF_PRIMITIVES];
};

static pthread_once_t half_once = PTHREAD_ONCE_INIT;
static pthread_key_t half_key;
static dnnl_engine_t half_engine; /* lives as long as the process */
static bool half_ready;

static void gemm_die(const char *what, int status)
{
    fprintf(stderr, "shd-gpt: product: %s failed with status %d\n", what, status);
    abort();
}

static void half_must(dnnl_status_t status, const char *what)
{
    if (status != dnnl_success)
        gemm_die(what, (int)status);
}

static void half_primitive_deinit(struct half_primitive *p)
{
    if (p->primitive == NULL)
        return;
    dnnl_memory_destroy(p->a);
    dnnl_memory_destroy(p->b);
    dnnl_memory_destroy(p->c);
    dnnl_primitive_destroy(p->primitive);
    p->primitive = NULL;
}

static void half_thread_free(void *arg)
{
    struct half_thread *t = arg;
    for (uint32_t i = 0; i < t->count; i++)
        half_primitive_deinit(&t->primitives[i]);
    if (t->stream != NULL)
        dnnl_stream_destroy(t->stream);
    free(t->a.data);
    free(t->b.data);
    free(t);
}

static void half_start(void)
{
    half_ready = pthread_key_create(&half_key, half_thread_free) == 0 &&
                 dnnl_engine_create(&half_engine, dnnl_cpu, 0) == dnnl_success;
}

static struct half_thread *half_thread(void)
{
    pthread_once(&half_once, half_start);
    struct half_thread *t = half_ready ? pthread_getspecific(half_key) : NULL;
    if (t != NULL)
        return t;
    t = calloc(1, sizeof *t);
    if (!half_ready || t == NULL || pthread_setspecific(half_key, t) != 0)
        gemm_die("start", SHD_ENOMEM);
    return t;
}

static void *half_reserve(struct half_buffer *b, uint64_t bytes)
{
    if (b->bytes >= bytes)
        return b->data;
    free(b->data);
    b->bytes = (bytes + HALF_ALIGN - 1) / HALF_ALIGN * HALF_ALIGN;
    b->data = aligned_alloc(HALF_ALIGN, b->bytes);
    if (b->data == NULL)
        gemm_die("buffer", SHD_ENOMEM);
    return b->data;
}

/* -- Rounding -------------------------------------------------------------------------------- */

/* A factor as it lies in memory, whichever way it is used. */
struct half_extent {
    uint64_t rows, cols, stride; /* stride of the rounded copy */
};

static struct half_extent half_extent(uint64_t rows, uint64_t cols, int transposed)
{
    struct half_extent x = { .rows = rows, .cols = cols };
    if (transposed)
        x = (struct half_extent){ .rows = cols, .cols = rows };
    x.stride = (x.cols + HALF_PAD_ELEMS - 1) / HALF_PAD_ELEMS * HALF_PAD_ELEMS;
    return x;
}

static struct gemm_in half_round(enum gemm_kind kind, struct gemm_in in, struct half_extent x,
                                 struct half_buffer *buffer)
{
    const struct vec_ops *vec = vec_pick();
    float *out = half_reserve(buffer, x.rows * x.stride * sizeof(float));
    for (uint64_t i = 0; i < x.rows; i++) {
        if (kind == GEMM_F16_EMULATED)
            vec->round_f16(out + i * x.stride, in.data + i * in.stride, x.cols);
        else
            vec->round_bf16(out + i * x.stride, in.data + i * in.stride, x.cols);
    }
    return (struct gemm_in){ .data = out, .stride = x.stride, .transposed = in.transposed };
}

static void *half_pack(struct gemm_in in, struct half_extent x, struct half_buffer *buffer)
{
    const struct vec_ops *vec = vec_pick();
    uint16_t *out = half_reserve(buffer, x.rows * x.stride * sizeof(uint16_t));
    for (uint64_t i = 0; i < x.rows; i++)
        vec->pack_bf16(out + i * x.stride, in.data + i * in.stride, x.cols);
    return out;
}

/* -- oneDNN's bf16 product --------------------------------------------------------------------- */

/* oneDNN 3 has what it describes memory by behind a handle, and makes a product's in one step. */
#if DNNL_VERSION_MAJOR < 3

static dnnl_status_t desc_new(dnnl_memory_desc_t *ret_desc, const dnnl_dims_t dims,
                              dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_init_by_strides(ret_desc, 2, dims, type, strides);
}

static void desc_free(dnnl_memory_desc_t *desc)
{
    (void)desc;
}

static dnnl_status_t memory_new(dnnl_memory_t *ret_memory, const dnnl_memory_desc_t *desc)
{
    return dnnl_memory_create(ret_memory, desc, half_engine, DNNL_MEMORY_NONE);
}

static dnnl_status_t append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1);
}

static dnnl_status_t matmul_new(dnnl_primitive_desc_t *ret_pd, const dnnl_memory_desc_t *a,
                                const dnnl_memory_desc_t *b, const dnnl_memory_desc_t *c,
                                dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t matmul;
    const dnnl_status_t r = dnnl_matmul_desc_init(&matmul, a, b, NULL, c);
    return r == dnnl_success ? dnnl_primitive_desc_create(ret_pd, &matmul, attr, half_engine, NULL)
                             : r;
}

#else

static dnnl_status_t desc_new(dnnl_memory_desc_t *ret_desc, const dnnl_dims_t dims,
                              dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_create_with_strides(ret_desc, 2, dims, type, strides);
}

static void desc_free(dnnl_memory_desc_t *desc)
{
    dnnl_memory_desc_destroy(*desc);
}

static dnnl_status_t memory_new(dnnl_memory_t *ret_memory, const dnnl_memory_desc_t *desc)
{
    return dnnl_memory_create(ret_memory, *desc, half_engine, DNNL_MEMORY_NONE);
}

static dnnl_status_t append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1, /* zero_point= */ 0, dnnl_data_type_undef);
}

static dnnl_status_t matmul_new(dnnl_primitive_desc_t *ret_pd, const dnnl_memory_desc_t *a,
                                const dnnl_memory_desc_t *b, const dnnl_memory_desc_t *c,
                                dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(ret_pd, half_engine, *a, *b, NULL, *c, attr);
}

#endif

/* desc_free() it. */
static dnnl_memory_desc_t half_desc(uint64_t rows, uint64_t cols, uint64_t stride, bool transposed,
                                    dnnl_data_type_t type)
{
    const dnnl_dims_t dims = { (dnnl_dim_t)rows, (dnnl_dim_t)cols };
    const dnnl_dims_t strides = { transposed ? 1 : (dnnl_dim_t)stride,
                                  transposed ? (dnnl_dim_t)stride : 1 };
    dnnl_memory_desc_t desc;
    half_must(desc_new(&desc, dims, type, strides), "memory descriptor");
    return desc;
}

struct half_descs {
    dnnl_memory_desc_t a, b, c;
};

static struct half_descs half_descs(const struct half_key *k)
{
    const struct half_extent a = half_extent(k->m, k->k, (int)k->a_transposed);
    const struct half_extent b = half_extent(k->k, k->n, (int)k->b_transposed);
    return (struct half_descs){
        .a = half_desc(k->m, k->k, a.stride, k->a_transposed != 0, dnnl_bf16),
        .b = half_desc(k->k, k->n, b.stride, k->b_transposed != 0, dnnl_bf16),
        .c = half_desc(k->m, k->n, k->c_stride, false, dnnl_f32),
    };
}

static void half_descs_free(struct half_descs *d)
{
    desc_free(&d->a);
    desc_free(&d->b);
    desc_free(&d->c);
}

/* With beta 1 the product is added to c by a sum post-op. The caller destroys the result. */
static dnnl_status_t half_primitive_desc(const struct half_key *k, const struct half_descs *d,
                                         dnnl_primitive_desc_t *ret_pd)
{
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t r = dnnl_primitive_attr_create(&attr);
    if (r == dnnl_success)
        r = dnnl_post_ops_create(&ops);
    if (r == dnnl_success && k->beta != 0)
        r = append_sum(ops);
    if (r == dnnl_success)
        r = dnnl_primitive_attr_set_post_ops(attr, ops);
    if (r == dnnl_success)
        r = matmul_new(ret_pd, &d->a, &d->b, &d->c, attr);
    dnnl_post_ops_destroy(ops);
    dnnl_primitive_attr_destroy(attr);
    return r;
}

static void half_primitive_init(struct half_primitive *p, const struct half_key *k)
{
    struct half_descs d = half_descs(k);
    dnnl_primitive_desc_t pd = NULL;
    half_must(half_primitive_desc(k, &d, &pd), "matmul descriptor");
    *p = (struct half_primitive){ .key = *k };
    half_must(dnnl_primitive_create(&p->primitive, pd), "matmul primitive");
    half_must(dnnl_primitive_desc_destroy(pd), "matmul descriptor");
    half_must(memory_new(&p->a, &d.a), "memory");
    half_must(memory_new(&p->b, &d.b), "memory");
    half_must(memory_new(&p->c, &d.c), "memory");
    half_descs_free(&d);
}

static struct half_primitive *half_find(struct half_thread *t, const struct half_key *k)
{
    for (uint32_t i = 0; i < t->count; i++)
        if (memcmp(&t->primitives[i].key, k, sizeof *k) == 0)
            return &t->primitives[i];
    struct half_primitive *p = &t->primitives[t->victim];
    if (t->count < HALF_PRIMITIVES)
        p = &t->primitives[t->count++];
    else
        t->victim = (t->victim + 1) % HALF_PRIMITIVES;
    half_primitive_deinit(p);
    half_primitive_init(p, k);
    return p;
}

static void half_multiply(struct gemm_size size, struct gemm_in a, struct gemm_in b, float beta,
                          float *c, uint64_t c_stride)
{
    struct half_thread *t = half_thread();
    const struct half_key key = { .m = size.m,
                                  .n = size.n,
                                  .k = size.k,
                                  .a_transposed = a.transposed != 0,
                                  .b_transposed = b.transposed != 0,
                                  .beta = beta != 0,
                                  .c_stride = c_stride };
    struct half_primitive *p = half_find(t, &key);
    void *left = half_pack(a, half_extent(size.m, size.k, a.transposed), &t->a);
    void *right = half_pack(b, half_extent(size.k, size.n, b.transposed), &t->b);
    if (t->stream == NULL)
        half_must(dnnl_stream_create(&t->stream, half_engine, dnnl_stream_default_flags), "stream");
    half_must(dnnl_memory_set_data_handle(p->a, left), "memory");
    half_must(dnnl_memory_set_data_handle(p->b, right), "memory");
    half_must(dnnl_memory_set_data_handle(p->c, c), "memory");
    const dnnl_exec_arg_t args[] = { { DNNL_ARG_SRC, p->a },
                                     { DNNL_ARG_WEIGHTS, p->b },
                                     { DNNL_ARG_DST, p->c } };
    half_must(dnnl_primitive_execute(p->primitive, t->stream, 3, args), "matmul");
    half_must(dnnl_stream_wait(t->stream), "matmul");
}

/* -- Interface --------------------------------------------------------------------------------- */

/* Distributions build oneDNN on OpenMP, which would start a team of its own under each of our
 * threads. The wanted team size is a per-thread setting; found by dlsym, because it must be set
 * in the runtime that oneDNN itself is linked to. A oneDNN without OpenMP needs nothing. */
static void use_one_thread(void)
{
    static _Thread_local bool done;
    if (done)
        return;
    done = true;
    void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (symbol == NULL)
        return;
    void (*set_threads)(int);
    *(void **)&set_threads = symbol; /* POSIX's way around ISO C's function pointers */
    set_threads(1);
}

static dnnl_status_t gemm_call(struct gemm_size size, struct gemm_in a, struct gemm_in b,
                               float beta, float *c, uint64_t c_stride)
{
    return dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', (dnnl_dim_t)size.m,
                      (dnnl_dim_t)size.n, (dnnl_dim_t)size.k, 1.0f, a.data, (dnnl_dim_t)a.stride,
                      b.data, (dnnl_dim_t)b.stride, beta, c, (dnnl_dim_t)c_stride);
}

/* True: the CPU has bf16 products, and this oneDNN uses them. Below that instruction set oneDNN
 * multiplies bf16 too, by an emulation of its own: that is not what "native" promises. */
static bool half_bf16_is_native(void)
{
    const dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
    return (isa & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
}

static int half_init(struct shd_err *e)
{
    if (!half_bf16_is_native())
        return err_set(e, SHD_ENOTSUP,
                       "this CPU, or this oneDNN, has no bf16 instructions (AVX-512-BF16 or AMX)");
    pthread_once(&half_once, half_start);
    if (!half_ready)
        return err_set(e, SHD_ENOTSUP, "oneDNN has no CPU engine here");
    const struct half_key key = { .m = 128, .n = 256, .k = 128, .c_stride = 256 };
    struct half_descs descs = half_descs(&key);
    dnnl_primitive_desc_t pd = NULL;
    const dnnl_status_t r = half_primitive_desc(&key, &descs, &pd);
    half_descs_free(&descs);
    if (r != dnnl_success)
        return err_set(e, SHD_ENOTSUP, "oneDNN has no bf16 matmul here (status %d)", (int)r);
    dnnl_primitive_desc_destroy(pd);
    return SHD_OK;
}

int gemm_init(enum gemm_kind kind, struct shd_err *e)
{
    const float one[1] = { 1 };
    float c[1];
    use_one_thread();
    const struct gemm_in a = { .data = one, .stride = 1 };
    const dnnl_status_t r = gemm_call((struct gemm_size){ 1, 1, 1 }, a, a, 0, c, 1);
    if (r != dnnl_success || c[0] != 1)
        return err_set(e, SHD_ENOTSUP, "oneDNN's sgemm does not work here (status %d)", (int)r);
    return kind == GEMM_BF16_NATIVE ? half_init(e) : SHD_OK;
}

const char *gemm_describe(enum gemm_kind kind)
{
    if (kind == GEMM_FULL)
        return "fp32 (oneDNN)";
    if (kind == GEMM_BF16_EMULATED)
        return "emulated: inputs rounded to bf16, fp32 GEMM (oneDNN)";
    if (kind == GEMM_F16_EMULATED)
        return "emulated: inputs rounded to fp16, fp32 GEMM (oneDNN)";
    const dnnl_cpu_isa_t amx = dnnl_cpu_isa_avx512_core_amx;
    return (dnnl_get_effective_cpu_isa() & amx) == amx ? "AMX (oneDNN)" : "AVX-512-BF16 (oneDNN)";
}

void gemm_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
              real beta, real *c, uint64_t c_stride)
{
    use_one_thread();
    if (kind == GEMM_BF16_NATIVE) {
        half_multiply(size, a, b, beta, c, c_stride);
        return;
    }
    if (kind != GEMM_FULL) {
        struct half_thread *t = half_thread();
        a = half_round(kind, a, half_extent(size.m, size.k, a.transposed), &t->a);
        b = half_round(kind, b, half_extent(size.k, size.n, b.transposed), &t->b);
    }
    const dnnl_status_t r = gemm_call(size, a, b, beta, c, c_stride);
    if (r != dnnl_success) /* bad sizes are our bug; out of memory is the other reason */
        gemm_die("oneDNN sgemm", (int)r);
}

#endif
