/* See dtype.h. */
#include "proto/base/dtype.h"

#include <string.h>

#include "proto/base/check.h"

const uint8_t dtype_sizes[] = { [SHD_F32] = 4, [SHD_BF16] = 2, [SHD_F16] = 2 };
static const char *const dtype_names[] = { NULL, "f32", "bf16", "f16" };

bool dtype_valid(uint64_t dtype)
{
    return dtype >= SHD_F32 && dtype <= SHD_F16;
}

uint64_t dtype_bytes(enum shd_dtype dtype)
{
    CHECK(dtype_valid(dtype));
    return dtype_sizes[dtype];
}

const char *dtype_name(enum shd_dtype dtype)
{
    CHECK(dtype_valid(dtype));
    return dtype_names[dtype];
}

enum shd_dtype dtype_parse(const char *name)
{
    static const struct {
        const char *name;
        enum shd_dtype dtype;
    } others[] = { { "fp32", SHD_F32 }, { "float32", SHD_F32 }, { "bfloat16", SHD_BF16 },
                   { "fp16", SHD_F16 }, { "float16", SHD_F16 }, { "half", SHD_F16 } };
    for (int d = SHD_F32; d <= SHD_F16; d++)
        if (strcmp(name, dtype_names[d]) == 0)
            return (enum shd_dtype)d;
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        if (strcmp(name, others[i].name) == 0)
            return others[i].dtype;
    return (enum shd_dtype)0;
}

static const char *const codec_names[CODECS + 1] = { "none", "int8", "fp8", "int4" };

const char *codec_name(enum codec codec)
{
    CHECK((unsigned)codec <= CODECS);
    return codec_names[codec];
}

int codec_parse(const char *name)
{
    for (unsigned i = 0; i <= CODECS; i++)
        if (strcmp(name, codec_names[i]) == 0)
            return (int)i;
    return -1;
}
