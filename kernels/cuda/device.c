/* See device.h. */
#include "kernels/cuda/device.h"

#include <stdarg.h>
#include <stdio.h>

int cuda_enter(const struct cuda_kern *k, struct shd_err *e)
{
    return cuda_result(k->cuda, k->cuda->cuCtxSetCurrent(k->ctx), e, "use the context of %s",
                       k->name);
}

void cuda_break(struct cuda_kern *k, const struct shd_err *why)
{
    pthread_mutex_lock(&k->lock);
    if (k->failure.code == SHD_OK)
        k->failure = *why;
    pthread_mutex_unlock(&k->lock);
    atomic_store(&k->broken, true);
}

int cuda_call(struct cuda_kern *k, CUresult result, struct shd_err *e, const char *fmt, ...)
{
    if (result == CUDA_SUCCESS)
        return SHD_OK;
    char what[SHD_ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    struct shd_err own = { 0 };
    const int r = cuda_result(k->cuda, result, &own, "%s", what);
    pthread_mutex_lock(&k->lock);
    k->last = own;
    pthread_mutex_unlock(&k->lock);
    if (cuda_sticky(result))
        cuda_break(k, &own);
    if (e != NULL)
        *e = own;
    return r;
}

int cuda_wait(struct cuda_kern *k, CUstream stream, struct shd_err *e)
{
    const int r = cuda_call(k, k->cuda->cuStreamSynchronize(stream), e, "wait for %s", k->name);
    if (r == SHD_OK)
        return SHD_OK;
    struct shd_err again = { 0 };
    if (cuda_call(k, k->cuda->cuStreamSynchronize(stream), &again, "wait for %s", k->name) !=
        SHD_OK)
        cuda_break(k, &again);
    return r;
}

int cuda_health(struct kern *kern, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    pthread_mutex_lock(&k->lock);
    const struct shd_err failure = k->failure;
    pthread_mutex_unlock(&k->lock);
    return failure.code == SHD_OK ? SHD_OK : err_set(e, SHD_EIO, "%s", failure.text);
}

bool cuda_failed(struct kern *kern, struct shd_err *ret_why)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    pthread_mutex_lock(&k->lock);
    const struct shd_err why = k->failure.code != SHD_OK ? k->failure : k->last;
    pthread_mutex_unlock(&k->lock);
    if (why.code == SHD_OK)
        return false;
    *ret_why = why;
    return true;
}
