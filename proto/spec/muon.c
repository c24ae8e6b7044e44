/* See muon.h. */
#include "proto/spec/muon.h"

#include <math.h>

#include "proto/spec/layout.h"

#define STRIDE_ALIGN UINT64_C(32)  /* two of the widest vectors */
#define STRIDE_BAD   UINT64_C(256) /* floats: of multiples of so many rows share few sets */

const char *const muon_adjust_names[MUON_ADJUSTS + 1] = {
    [MUON_ORIGINAL] = "original",
    [MUON_MATCH_RMS_ADAMW] = "match_rms_adamw",
    [MUON_SPECTRAL_UNCLAMPED] = "spectral_unclamped",
};

const struct muon_rule muon_default = {
    .momentum = 0.95,
    .eps = 1e-7,
    .coefficients = { 3.4445, -4.7750, 2.0315 },
    .steps = 5,
    .nesterov = true,
    .adjust = MUON_ORIGINAL,
};

double muon_ratio(enum muon_adjust adjust, uint64_t rows, uint64_t cols)
{
    const double a = (double)rows, b = (double)cols;
    switch (adjust) {
    case MUON_ORIGINAL:
        break;
    case MUON_MATCH_RMS_ADAMW:
        return 0.2 * sqrt(a > b ? a : b);
    case MUON_SPECTRAL_UNCLAMPED:
        return sqrt(a / b);
    }
    return sqrt(a > b ? a / b : 1);
}

static uint64_t stride_of(uint64_t cols)
{
    const uint64_t stride = layout_align(cols, STRIDE_ALIGN);
    return stride % STRIDE_BAD == 0 ? stride + STRIDE_ALIGN : stride;
}

struct muon_room muon_room(uint64_t rows, uint64_t cols)
{
    struct muon_room room = { .across = rows > cols };
    room.rows = room.across ? cols : rows;
    room.cols = room.across ? rows : cols;
    room.stride = stride_of(room.cols);
    room.elems = layout_align(room.rows * room.stride, SHD_BLOCK_ELEMS);
    room.gram_stride = stride_of(room.rows);
    room.gram_elems = layout_align(room.rows * room.gram_stride, SHD_BLOCK_ELEMS);
    return room;
}

uint64_t muon_room_elems(const struct muon_room *room)
{
    return 2 * (room->elems + room->gram_elems);
}

uint64_t whole_head_elems(uint32_t tensors)
{
    const uint64_t bytes = WHOLE_HEAD_BYTES + (uint64_t)tensors * WHOLE_RATES_BYTES;
    return layout_align(bytes / sizeof(float), SHD_BLOCK_ELEMS);
}
