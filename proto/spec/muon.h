/* Muon: what a group of matrices that it updates has, and the room it takes to do so.
 *
 * K. Jordan, "Muon: An optimizer for hidden layers in neural networks"
 * (https://kellerjordan.github.io/posts/muon/), with the names, the defaults and the order of
 * torch.optim.Muon. kernels/cpu/op_muon.h has the arithmetic. Pure. */
#ifndef SHD_SPEC_MUON_H
#define SHD_SPEC_MUON_H

#include <stdbool.h>
#include <stdint.h>

/* What the learning rate of a matrix of A rows and B columns is multiplied by. */
enum muon_adjust {
    MUON_ORIGINAL = 1,       /* sqrt(max(1, A / B)) */
    MUON_MATCH_RMS_ADAMW,    /* 0.2 sqrt(max(A, B)): arXiv 2502.16982 */
    MUON_SPECTRAL_UNCLAMPED, /* sqrt(A / B) */
};

#define MUON_ADJUSTS   3u
#define MUON_STEPS_MAX 99u

extern const char *const muon_adjust_names[MUON_ADJUSTS + 1];

struct muon_rule {
    double momentum, eps;
    double coefficients[3]; /* of the Newton-Schulz iteration's polynomial */
    uint32_t steps;         /* of it */
    bool nesterov;
    enum muon_adjust adjust;
};

extern const struct muon_rule muon_default;

double muon_ratio(enum muon_adjust adjust, uint64_t rows, uint64_t cols);

/* Room to orthogonalize a matrix, in floats: twice the matrix, lying so that it has no more rows
 * than columns (across: it is transposed), and twice its Gram matrix. Rows are whole vectors of
 * every instruction set, and no multiple of 1 KiB apart, which caches mind. */
struct muon_room {
    bool across;
    uint64_t rows, cols; /* rows <= cols */
    uint64_t stride;     /* of the matrix's rows */
    uint64_t elems;      /* of one matrix: whole blocks (layout.h) */
    uint64_t gram_stride, gram_elems;
};

struct muon_room muon_room(uint64_t rows, uint64_t cols);
uint64_t muon_room_elems(const struct muon_room *room); /* of all four */

/* Of a unit with so many tensors that are updated whole, before the room for what that comes to: a
 * mark, and of each what the last pass goes by (kernels/kern.h: struct kern_whole_head). */
#define WHOLE_HEAD_BYTES  64u
#define WHOLE_RATES_BYTES 64u
uint64_t whole_head_elems(uint32_t tensors);

#endif
