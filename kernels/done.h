/* What whoever queues work on a device (kernels/kern.h) has in the struct that waits for it. */
#ifndef SHD_KERN_DONE_H
#define SHD_KERN_DONE_H

#include <stdbool.h>

#include "proto/base/fixsum.h"

/* fn is called when the work is done, once, on any thread. */
struct kern_done {
    void (*fn)(struct kern_done *done, int status);
};

/* A sum of squares: each block of 2,048 elements (counted from x[0]) in fp64 in one fixed order,
 * block sums added exactly. Written when done fires. */
struct kern_sum {
    struct fixsum sum; /* += : start from fixsum_init() */
    bool finite;       /* &= : false when a block sum was inf or NaN (sum then lacks it) */
};

#endif
