/* Element types of parameters, gradients and published copies. client/shd.h repeats the enum. */
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

#endif
