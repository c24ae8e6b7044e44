/* Element types of parameters, gradients and published copies, and codes that these travel as.
 * client/shd.h repeats the first enum. */
#ifndef SHD_DTYPE_H
#define SHD_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

#ifndef SHD_PUBLIC_DTYPE /* else client/shd.h came first */
#define SHD_PUBLIC_DTYPE
enum shd_dtype {
    SHD_F32 = 1,  /* IEEE binary32 */
    SHD_BF16 = 2, /* upper half of binary32, rounded to nearest even */
    SHD_F16 = 3,  /* IEEE binary16 */
};
#endif

/* Bytes of one element: 4, 2, 2. dtype must be valid. */
extern const uint8_t dtype_sizes[SHD_F16 + 1];
uint64_t dtype_bytes(enum shd_dtype dtype);

/* True for a value of the enum: numbers from messages must pass this before use. */
bool dtype_valid(uint64_t dtype);

/* "f32", "bf16", "f16". dtype must be valid. */
const char *dtype_name(enum shd_dtype dtype);

/* The dtype called name ("f16", or as other tools have it: "fp16", "float16", "half"), or 0 when
 * there is none. */
enum shd_dtype dtype_parse(const char *name);

/* -- Codecs --------------------------------------------------------------------------------------
 *
 * How published parameters travel, where a spec asks for fewer bytes than their dtype has.
 *
 * A block is 64 elements, counted from the start of the unit; its values are codes times one scale
 * in bf16 (kernels/codec.h has the formulas). Tensors of such a model begin at multiples of a
 * block, so that none shares one; slices are whole tiles, so that every block has one owner and
 * bits do not depend on how many there are.
 *
 * A slice is a sequence of tiles, each the codes of 2,048 elements, then their 32 scales: whole
 * cache lines. In a segment it has whole pages, which are never more than the slice has in any
 * dtype. */
enum codec {
    CODEC_NONE = 0, /* as they are, in the spec's dtype */
    CODEC_INT8 = 1, /* -127 ... 127 */
    CODEC_FP8 = 2,  /* e4m3, of the Open Compute Project's OFP8: up to 448, no infinities */
    CODEC_INT4 = 3, /* -7 ... 7, two in a byte */
};

#define CODECS 3u

#define CODEC_BLOCK_ELEMS 64u
#define CODEC_TILE_ELEMS  2048u /* SHD_BLOCK_ELEMS */
#define CODEC_TILE_SCALES (CODEC_TILE_ELEMS / CODEC_BLOCK_ELEMS)

/* "none", "int8", "fp8", "int4". */
const char *codec_name(enum codec codec);

/* The codec called name; -1: there is none. */
int codec_parse(const char *name);

/* Bytes of a block's codes; of a tile; of elems elements, whole tiles. codec: not none. */
static inline uint64_t codec_block_bytes(enum codec codec)
{
    return codec == CODEC_INT4 ? CODEC_BLOCK_ELEMS / 2 : CODEC_BLOCK_ELEMS;
}

static inline uint64_t codec_tile_bytes(enum codec codec)
{
    return CODEC_TILE_SCALES * (codec_block_bytes(codec) + sizeof(uint16_t));
}

static inline uint64_t codec_bytes(enum codec codec, uint64_t elems)
{
    return elems / CODEC_TILE_ELEMS * codec_tile_bytes(codec);
}

#endif
