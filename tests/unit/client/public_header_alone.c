/* Compiled against client/shd.h and nothing else of ours: it must stand alone. */
#include "client/shd.h"

#include "tests/unit/client/public_header_alone.h"

#if defined(SHD_STATUS_MAP) || defined(SHD_LAYOUT_H)
#error "client/shd.h must not include internal headers"
#endif

#define ROW(name)   \
    {               \
#name, name \
    }
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

const struct public_constant public_codes[] = {
    ROW(SHD_OK),      ROW(SHD_EINVAL),    ROW(SHD_ERANGE),    ROW(SHD_EPROTO),    ROW(SHD_EAUTH),
    ROW(SHD_ENOENT),  ROW(SHD_EEXIST),    ROW(SHD_ESPEC),     ROW(SHD_ESTEP),     ROW(SHD_EBUSY),
    ROW(SHD_ENOMEM),  ROW(SHD_EIO),       ROW(SHD_EGONE),     ROW(SHD_ETIMEDOUT), ROW(SHD_ESEGMENT),
    ROW(SHD_ENOTSUP), ROW(SHD_EINTERNAL), ROW(SHD_ECANCELED), ROW(SHD_ERESET),    ROW(SHD_ESTOPPED),
    ROW(SHD_EMOVED),
};
const size_t public_code_count = COUNT(public_codes);

const struct public_constant public_dtypes[] = {
    { "f32", SHD_F32 },
    { "bf16", SHD_BF16 },
    { "f16", SHD_F16 },
};
const size_t public_dtype_count = COUNT(public_dtypes);

const struct public_constant public_numbers[] = {
    { "sizeof err", sizeof(struct shd_err) },
    { "sizeof err.code", sizeof(((struct shd_err *)NULL)->code) },
    { "sizeof err.text", sizeof(((struct shd_err *)NULL)->text) },
    { "offsetof err.code", offsetof(struct shd_err, code) },
    { "offsetof err.text", offsetof(struct shd_err, text) },
    { "sizeof status", sizeof(enum shd_status) },
    { "sizeof dtype", sizeof(enum shd_dtype) },
    { "metrics", SHD_METRICS_MAX },
    { "blob bytes", (long long)SHD_BLOB_BYTES_MAX },
};
const size_t public_number_count = COUNT(public_numbers);
