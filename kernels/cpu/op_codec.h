/* Blocks of codes (kernels/codec.h): slices of parameters encoded, and decoded to a model's dtype.
 * Included once per instruction set, after vec.h, behind op_quant.h, whose blocks these are. */
#ifndef SHD_KERNELS_CPU_OP_CODEC_H
#define SHD_KERNELS_CPU_OP_CODEC_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/op_cast.h"
#include "kernels/cpu/op_quant.h"
#include "kernels/fill.h"

_Static_assert(CODEC_BLOCK_ELEMS == QUANT_BLOCK_ELEMS, "one kind of block");

/* Where block `block` of a slice of tiles has its codes, and its scale. */
struct codec_block {
    uint8_t *codes;
    uint16_t *scale;
};

KERN_FN struct codec_block codec_block_at(uint8_t *tiles, enum codec codec, uint64_t block)
{
    uint8_t *tile = tiles + block / CODEC_TILE_SCALES * codec_tile_bytes(codec);
    const uint64_t at = block % CODEC_TILE_SCALES;
    uint8_t *scales = tile + CODEC_TILE_SCALES * codec_block_bytes(codec);
    return (struct codec_block){ tile + at * codec_block_bytes(codec),
                                 (uint16_t *)(void *)scales + at };
}

KERN_FN void codes_of_values(uint8_t *to, const struct quant_values *v, vec r, enum codec codec)
{
    const vec_u32 middle = bits_set1(8);
    for (unsigned j = 0; codec != CODEC_INT4 && j < QUANT_VECS; j++) {
        const vec y = vec_mul(v->x[j], r);
        vec_u32 code = vec_to_int(y);
        if (codec == CODEC_FP8)
            code = bits_or(fp8_encode(vec_abs(y)),
                           bits_and(bits_right(vec_bits(y), 24), bits_set1(0x80)));
        bytes_store(to + (size_t)j * VEC_LANES, code);
    }
    /* The block's first half is in the low four bits. */
    for (unsigned j = 0; codec == CODEC_INT4 && j < QUANT_VECS / 2; j++) {
        const vec_u32 low = vec_to_int(vec_mul(v->x[j], r));
        const vec_u32 high = vec_to_int(vec_mul(v->x[j + QUANT_VECS / 2], r));
        bytes_store(to + (size_t)j * VEC_LANES,
                    bits_or(bits_add(low, middle), bits_left(bits_add(high, middle), 4)));
    }
}

KERN_FN vec value_of_code(vec_u32 code, vec scale, enum codec codec)
{
    vec x;
    if (codec == CODEC_FP8) {
        x = fp8_decode(bits_and(code, bits_set1(0x7f)));
        x = vec_with_sign(x, vec_of_bits(bits_left(code, 24)));
    } else if (codec == CODEC_INT8) {
        x = vec_sub(vec_of_int(bits_xor(code, bits_set1(0x80))), vec_set1(128));
    } else {
        x = vec_sub(vec_of_int(code), vec_set1(8));
    }
    return vec_mul(x, scale);
}

KERN_FN struct quant_values values_of_codes(const uint8_t *from, vec scale, enum codec codec)
{
    struct quant_values v;
    for (unsigned j = 0; codec != CODEC_INT4 && j < QUANT_VECS; j++)
        v.x[j] = value_of_code(bytes_load(from + (size_t)j * VEC_LANES), scale, codec);
    for (unsigned j = 0; codec == CODEC_INT4 && j < QUANT_VECS / 2; j++) {
        const vec_u32 pair = bytes_load(from + (size_t)j * VEC_LANES);
        v.x[j] = value_of_code(bits_and(pair, bits_set1(15)), scale, codec);
        v.x[j + QUANT_VECS / 2] = value_of_code(bits_right(pair, 4), scale, codec);
    }
    return v;
}

#define NOISE_BLOCKS (CODEC_BLOCK_ELEMS / 8) /* Philox's, of 128 bits */

/* [CODEC_BLOCK_ELEMS] of element `index` on. As philox_words(), of all of Philox's blocks side by
 * side, which the compiler makes vectors of. */
KERN_CALL void codec_noise(const struct kern_noise *noise, uint64_t index, float *to)
{
    uint32_t c[4][NOISE_BLOCKS] = { { 0 } };
    uint32_t k0 = (uint32_t)noise->key, k1 = (uint32_t)(noise->key >> 32);
    for (unsigned j = 0; j < NOISE_BLOCKS; j++) {
        c[0][j] = (uint32_t)(index / 8 + j);
        c[1][j] = (uint32_t)((index / 8 + j) >> 32);
    }
    for (unsigned round = 0; round < PHILOX_ROUNDS; round++) {
        for (unsigned j = 0; j < NOISE_BLOCKS; j++) {
            const uint64_t p0 = PHILOX_M0 * c[0][j], p1 = PHILOX_M1 * c[2][j];
            c[0][j] = (uint32_t)(p1 >> 32) ^ c[1][j] ^ k0;
            c[1][j] = (uint32_t)p1;
            c[2][j] = (uint32_t)(p0 >> 32) ^ c[3][j] ^ k1;
            c[3][j] = (uint32_t)p0;
        }
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    for (unsigned i = 0; i < 8; i++)
        for (unsigned j = 0; j < NOISE_BLOCKS; j++) {
            const uint32_t k = c[i / 2][j] >> (i % 2 * 16) & 0xffff;
            to[i * NOISE_BLOCKS + j] = ((float)(int32_t)k + 0.5f) * 0x1p-16f - 0.5f; /* exact */
        }
}

/* As a block of int8 to nearest, but at random. */
KERN_CALL void codec_encode_noisy(struct codec_block b, const float *x,
                                  const struct kern_noise *noise, uint64_t index)
{
    const struct quant_values v = values_load(x);
    vec_u32 most = vec_bits(vec_set1(0));
    float by[CODEC_BLOCK_ELEMS], r;
    for (unsigned j = 0; j < QUANT_VECS; j++)
        most = bits_max(most, vec_bits(vec_abs(v.x[j])));
    *b.scale = codec_scale(bits_most(most), CODEC_INT8, &r);
    if (r == 0) {
        memset(b.codes, 0, CODEC_BLOCK_ELEMS);
        return;
    }
    codec_noise(noise, index, by);
    for (unsigned j = 0; j < QUANT_VECS; j++) {
        const vec y = vec_mul(v.x[j], vec_set1(r));
        const vec at = vec_add(y, vec_load(by + (size_t)j * VEC_LANES));
        const vec most_y = vec_set1(127), least_y = vec_set1(-127);
        bytes_store(b.codes + (size_t)j * VEC_LANES,
                    vec_to_int(vec_max(vec_min(at, most_y), least_y)));
    }
}

QUANT_FN void codec_encode_block(struct codec_block b, const float *x, enum codec codec)
{
    const struct quant_values v = values_load(x);
    vec_u32 most = vec_bits(vec_set1(0));
    float r;
    for (unsigned j = 0; j < QUANT_VECS; j++)
        most = bits_max(most, vec_bits(vec_abs(v.x[j])));
    *b.scale = codec_scale(bits_most(most), codec, &r);
    if (r == 0)
        memset(b.codes, codec == CODEC_INT4 ? 0x88 : 0, codec_block_bytes(codec));
    else
        codes_of_values(b.codes, &v, vec_set1(r), codec);
}

QUANT_FN void codec_decode_block(struct codec_block b, void *out, uint64_t i, enum shd_dtype dtype,
                                 enum codec codec)
{
    const vec scale = vec_set1(f32_of_bits((uint32_t)*b.scale << 16));
    const struct quant_values v = values_of_codes(b.codes, scale, codec);
    if (dtype == SHD_F32) {
        values_store((float *)out + i, &v);
        return;
    }
    for (unsigned j = 0; j < QUANT_VECS; j++)
        half_store((uint16_t *)out + i + (size_t)j * VEC_LANES,
                   dtype == SHD_BF16 ? vec_to_bf16(v.x[j]) : vec_to_f16(v.x[j]));
}

/* -- Ranges ------------------------------------------------------------------------------------ */

KERN_FN void encode_by(const struct kern_encode *a, struct cpu_range r, enum codec codec)
{
    const uint64_t first = a->first_elem + r.first, end = first + r.count;
    uint32_t s = encode_slice(a, first);
    for (uint64_t i = first; i < end; i += CODEC_BLOCK_ELEMS) {
        while (s + 1 < a->slices && a->first_of[s + 1] <= i)
            s++;
        uint8_t *tiles = (uint8_t *)a->out + a->bytes_of[s];
        const uint64_t block = (i - a->first_of[s]) / CODEC_BLOCK_ELEMS;
        const struct codec_block to = codec_block_at(tiles, codec, block);
        if (a->noise != NULL)
            codec_encode_noisy(to, a->in + i, a->noise, a->noise->first_index + i);
        else
            codec_encode_block(to, a->in + i, codec);
    }
}

static void encode_range(const struct kern_encode *a, struct cpu_range r)
{
    if (a->codec == CODEC_INT8)
        encode_by(a, r, CODEC_INT8);
    else if (a->codec == CODEC_FP8)
        encode_by(a, r, CODEC_FP8);
    else
        encode_by(a, r, CODEC_INT4);
}

KERN_FN void decode_by(const struct kern_decode *a, enum codec codec)
{
    for (uint64_t i = 0; i < a->elems; i += CODEC_BLOCK_ELEMS) {
        /* Only read. */
        const struct codec_block b = codec_block_at((uint8_t *)(uintptr_t)a->in, codec,
                                                    i / CODEC_BLOCK_ELEMS);
        codec_decode_block(b, a->out, i, a->out_dtype, codec);
    }
}

static void decode_all(const struct kern_decode *a)
{
    if (a->codec == CODEC_INT8)
        decode_by(a, CODEC_INT8);
    else if (a->codec == CODEC_FP8)
        decode_by(a, CODEC_FP8);
    else
        decode_by(a, CODEC_INT4);
}

#endif
