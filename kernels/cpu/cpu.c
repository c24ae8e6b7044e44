/* A host device: made, and taken apart. */
#include "kernels/cpu/cpu.h"

#include <inttypes.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

static void cpu_free(struct kern *kern)
{
    if (kern == NULL)
        return;
    struct cpu_kern *k = (struct cpu_kern *)kern;
    queue_stop(k);
    for (uint32_t i = 0; i < k->thread_count; i++)
        EVP_MD_CTX_free(k->threads[i].digest);
    EVP_MD_free(k->sha256);
    pthread_mutex_destroy(&k->push_lock);
    free(k->memory);
}

/* SHA-256 looked up once, and one context per thread, so that hashing allocates nothing. */
static int digests_new(struct cpu_kern *k, struct shd_err *e)
{
    k->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (k->sha256 == NULL)
        return err_set(e, SHD_ENOTSUP, "libcrypto has no SHA-256 here");
    for (uint32_t i = 0; i < k->thread_count; i++) {
        k->threads[i].digest = EVP_MD_CTX_new();
        if (k->threads[i].digest == NULL ||
            EVP_DigestInit_ex2(k->threads[i].digest, k->sha256, NULL) != 1)
            return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " digest contexts",
                           k->thread_count);
    }
    return SHD_OK;
}

int kern_cpu_new(const struct kern_config *config, struct kern **ret_kern, struct shd_err *e)
{
    if (config->threads < 1 || config->threads > CPU_THREADS_MAX)
        return err_set(e, SHD_EINVAL, "%" PRIu32 " compute threads: it is 1 to %u", config->threads,
                       CPU_THREADS_MAX);
    const struct cpu_isa *isa;
    int r = cpu_isa_find(config->isa, &isa, e);
    if (r != SHD_OK)
        return r;

    /* Room to begin at the struct's own alignment, which keeps busy words on lines of their own. */
    const size_t align = _Alignof(struct cpu_kern);
    const size_t bytes = sizeof(struct cpu_kern) + config->threads * sizeof(struct cpu_thread) +
                         align;
    void *memory = sys_calloc(1, bytes);
    if (memory == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a queue of %zu bytes", bytes);
    struct cpu_kern *k = (void *)(((uintptr_t)memory + align - 1) / align * align);
    k->memory = memory;
    k->ops = cpu_ops;
    k->ops.name = isa->ops_name;
    k->ops.free = cpu_free;
    k->base.ops = &k->ops;
    k->isa = isa;
    k->thread_count = config->threads;
    for (uint32_t i = 0; i < k->thread_count; i++) {
        k->threads[i].kern = k;
        k->threads[i].index = i;
    }
    CHECK(pthread_mutex_init(&k->push_lock, NULL) == 0);
    r = digests_new(k, e);
    if (r == SHD_OK)
        r = queue_start(k, config->pin, e);
    if (r != SHD_OK) {
        cpu_free(&k->base);
        return r;
    }
    *ret_kern = &k->base;
    return SHD_OK;
}
