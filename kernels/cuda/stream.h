/* Work that the program itself has on a CUDA device, on streams of its own.
 *
 * A *mark* is an event of the driver's: reached when all is done that its stream had been given
 * when it was set. kern is a device of kern_cuda_new(); a stream is a CUstream or cudaStream_t of
 * the same GPU (NULL: the default one). Any thread; marks, one at a time.
 *
 * Failure: an error of the program's own work comes to light here, too; SHD_EIO.
 */
#ifndef SHD_KERNELS_CUDA_STREAM_H
#define SHD_KERNELS_CUDA_STREAM_H

#include <stdbool.h>

struct CUevent_st;
struct kern;
struct shd_err;

/* *mark: one to be set again, or NULL: a new one. */
int cuda_mark_set(struct kern *kern, void *stream, struct CUevent_st **mark, struct shd_err *e);
int cuda_mark_look(struct kern *kern, struct CUevent_st *mark, bool *ret_reached,
                   struct shd_err *e);
int cuda_mark_wait(struct kern *kern, struct CUevent_st *mark, struct shd_err *e);
void cuda_mark_free(struct kern *kern, struct CUevent_st *mark); /* NULL is a no-op */

/* Wait for all that the stream has been given. */
int cuda_stream_drain(struct kern *kern, void *stream, struct shd_err *e);

#endif
