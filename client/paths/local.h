/* The in-process path ("local:"): the owner is this process itself.
 *
 * An implementation of its own, simple on purpose: whole units, one operation at a time, no
 * daemon, no messages. It gives the same bits because it runs the same kernels (kernels/kern.h)
 * on the same runs (kernels/runs.h) in the same order, so the two check each other. All arrays are
 * in the memory of the worker's device, the host or a GPU.
 *
 * Happy path: a returned gradient is added as soon as those of lower micro-batches are in; commit
 * sums the squares, decides as any worker would, updates unit by unit. Nothing ever waits: what
 * is missing can only come from the caller, so it is an error at once. A kernel that fails leaves
 * the state half changed: that is the model's fault from then on. */
#ifndef SHD_LOCAL_H
#define SHD_LOCAL_H

#include "client/paths/path.h"

extern const struct control_ops control_local;
extern const struct reader_ops reader_local;

#endif
