/* See stream.h. */
#include "kernels/cuda/stream.h"

#include "kernels/cuda/device.h"

static int make_mark(struct cuda_kern *k, struct CUevent_st **mark, struct shd_err *e)
{
    if (*mark != NULL)
        return SHD_OK;
    return cuda_call(k,
                     k->cuda->cuEventCreate(mark, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC),
                     e, "make an event on %s", k->name);
}

int cuda_mark_set(struct kern *kern, void *stream, struct CUevent_st **mark, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    int r = cuda_enter(k, e);
    if (r == SHD_OK)
        r = make_mark(k, mark, e);
    if (r == SHD_OK)
        r = cuda_call(k, k->cuda->cuEventRecord(*mark, stream), e,
                      "record an event on stream %p of %s", stream, k->name);
    return r;
}

int cuda_mark_look(struct kern *kern, struct CUevent_st *mark, bool *ret_reached, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    int r = cuda_enter(k, e);
    if (r != SHD_OK)
        return r;
    const CUresult result = k->cuda->cuEventQuery(mark);
    if (result == CUDA_ERROR_NOT_READY) {
        *ret_reached = false;
        return SHD_OK;
    }
    r = cuda_call(k, result, e, "work of the program's on %s", k->name);
    if (r == SHD_OK)
        *ret_reached = true;
    return r;
}

int cuda_mark_wait(struct kern *kern, struct CUevent_st *mark, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    const int r = cuda_enter(k, e);
    if (r != SHD_OK)
        return r;
    return cuda_call(k, k->cuda->cuEventSynchronize(mark), e, "work of the program's on %s",
                     k->name);
}

void cuda_mark_free(struct kern *kern, struct CUevent_st *mark)
{
    const struct cuda_kern *k = cuda_kern_of(kern);
    if (mark == NULL)
        return;
    cuda_enter(k, /* e= */ NULL); /* after a sticky error it fails, as all does */
    k->cuda->cuEventDestroy(mark);
}

/* Whoever waits goes on to unmap what the stream works on: an error is not taken for its end. */
int cuda_stream_drain(struct kern *kern, void *stream, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    cuda_enter(k, /* e= */ NULL);
    return cuda_wait(k, stream, e);
}
