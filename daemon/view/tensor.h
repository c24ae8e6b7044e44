/* What this owner's part of one tensor comes to, for the status socket: counts and sums, no
 * element. One at a time.
 *
 *   tensor_ask() ──view's uv_async──▶ loop: tensor_serve(), show.h ──eventfd──▶ tensor_answer()
 *
 * Where a step is being applied, or the model went on meanwhile, the loop tries again a little
 * later, for TENSOR_WAIT_MS at most. The HTTP thread calls the first and the last, the loop thread
 * the others. */
#ifndef SHD_VIEW_TENSOR_H
#define SHD_VIEW_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct daemon;
struct tensor_view;

#define TENSOR_WAIT_MS    8000
#define TENSOR_NAME_BYTES 128u

struct tensor_question {
    char model[TENSOR_NAME_BYTES]; /* "": the only one */
    char tensor[TENSOR_NAME_BYTES];
    uint32_t array; /* enum shardmap_array, or SHOW_UPDATE */
};

int tensor_view_new(struct daemon *d, struct tensor_view **ret_view, struct shd_err *e);
void tensor_view_free(struct tensor_view *t); /* NULL is a no-op; its handle is closed by then */

/* Its number; 0: another one is being answered. */
uint64_t tensor_ask(struct tensor_view *t, const struct tensor_question *question);

/* Is question `number` answered? Then *ret_status, with JSON [*ret_bytes], the caller's to free, or
 * *ret_why. SHD_EBUSY: another one has taken its place. */
bool tensor_answer(struct tensor_view *t, uint64_t number, char **ret_json, size_t *ret_bytes,
                   int *ret_status, struct shd_err *ret_why);

void tensor_serve(struct tensor_view *t);

#endif
