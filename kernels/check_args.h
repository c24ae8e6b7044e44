/* Checks of operations' arguments, the same on every device. All pure; errors name the operation,
 * the argument and its value: SHD_EINVAL what is NULL, misaligned or unknown, SHD_ERANGE what is
 * outside its limits. */
#ifndef SHD_KERNELS_CHECK_ARGS_H
#define SHD_KERNELS_CHECK_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kern.h"

/* The rules that differ between devices. */
struct check_rules {
    size_t slice_align;  /* of the arrays of accumulate, sumsq and updates; 0: their dtype's */
    bool chunk_words;    /* a trail's chunk words are the caller's */
    uint32_t hypers_max; /* 0: any number */
};

int check_fill(const struct kern_fill *a, struct shd_err *e);
int check_cast(const struct kern_cast *a, struct shd_err *e);
int check_accumulate(const struct kern_accumulate *a, const struct check_rules *rules,
                     struct shd_err *e);
int check_sumsq(const struct kern_sumsq *a, const struct check_rules *rules, struct shd_err *e);
int check_hash(const struct kern_hash *a, struct shd_err *e);
int check_copy(const struct kern_copy *a, struct shd_err *e);
int check_update(const struct kern_update *a, const struct check_rules *rules, struct shd_err *e);

#endif
