/* A safetensors file from anywhere, as shardctl plan reads it: a spec or an error. Input: how it is
 * asked for (1 byte), how much longer than the input the file is (4 bytes), then the file. */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/ctl/plan/plan_source.h"
#include "tests/fuzz/mutate_json.h"

#define HEAD_BYTES 5u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int file = -1;
    static char path[64];
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    struct spec *spec;
    if (file < 0) {
        file = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    const uint8_t how = fuzz_u8(&in);
    const uint64_t more_bytes = fuzz_u32(&in);
    CHECK(ftruncate(file, 0) == 0);
    CHECK(pwrite(file, in.at, in.left, 0) == (ssize_t)in.left);
    CHECK(ftruncate(file, (off_t)(in.left + more_bytes)) == 0);
    const struct plan_ask ask = { .safetensors = path,
                                  .tie = (how & 1) != 0 ? "head.weight=wte.weight" : NULL,
                                  .frozen = (how & 2) != 0 ? "^h\\.0\\." : NULL,
                                  .wrap = (how & 4) != 0 ? "h\\.[0-9]+" : NULL,
                                  .unit_elems_min = (how & 8) != 0 ? 1000 : 0,
                                  .accumulate = (how & 16) != 0 ? 2 : 0,
                                  .workers = 1 };
    const int r = plan_safetensors(&ask, &spec, &e);
    if (r == SHD_OK) {
        CHECK(spec->tensor_count > 0 && spec->elems <= SHD_MODEL_ELEMS_MAX);
        spec_free(spec);
    } else {
        fuzz_check_refusal(r, &e);
    }
    return 0;
}

static size_t put_file(uint8_t *buf, size_t max, const char *json, uint8_t how, uint32_t more_bytes)
{
    const size_t bytes = strlen(json);
    if (HEAD_BYTES + 8 + bytes > max)
        return 0;
    buf[0] = how;
    memcpy(buf + 1, &more_bytes, 4);
    const uint64_t header_bytes = bytes;
    memcpy(buf + HEAD_BYTES, &header_bytes, 8);
    for (size_t i = 0; i < bytes; i++) /* without its NUL */
        buf[HEAD_BYTES + 8 + i] = (uint8_t)json[i];
    return HEAD_BYTES + 8 + bytes;
}

static const char *const seeds[] = {
    "{\"__metadata__\":{\"format\":\"pt\"},\"wte.weight\":{\"dtype\":\"F32\",\"shape\":[16,8],"
    "\"data_offsets\":[0,512]},\"h.0.w\":{\"dtype\":\"F32\",\"shape\":[64],"
    "\"data_offsets\":[512,768]},\"h.1.w\":{\"dtype\":\"F32\",\"shape\":[2,4,8],"
    "\"data_offsets\":[768,1024]},\"ids\":{\"dtype\":\"I64\",\"shape\":[],"
    "\"data_offsets\":[1024,1032]}}",
    "{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]}}",
    "{\"a\":{\"dtype\":\"F16\",\"shape\":[0],\"data_offsets\":[0,0]}}",
};

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    if (index >= 2 * ARRAY_SIZE(seeds))
        return 0;
    return put_file(buf, bytes_max, seeds[index / 2], index % 2 != 0 ? 0x1f : 0, 1032);
}

#ifdef SHD_FUZZ
/* The header's size follows its text, mostly. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    if (seed % 16 == 0 || size < HEAD_BYTES + 8 || max < HEAD_BYTES + 16)
        return LLVMFuzzerMutate(data, size, max);
    if (seed % 8 == 1)
        data[seed / 8 % HEAD_BYTES] = (uint8_t)(seed >> 8);
    uint64_t bytes;
    memcpy(&bytes, data + HEAD_BYTES, 8);
    if (bytes > size - HEAD_BYTES - 8)
        bytes = size - HEAD_BYTES - 8;
    bytes = mutate_json(data + HEAD_BYTES + 8, bytes, max - HEAD_BYTES - 8, seed / 16);
    memcpy(data + HEAD_BYTES, &bytes, 8);
    return HEAD_BYTES + 8 + bytes;
}
#endif
