/* client/shd.h repeats part of proto/base/status.h and proto/base/dtype.h so that it stands alone.
 * One source file is compiled against it, this one against the originals; here they are compared.
 */
#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/wire/wire.h"
#include "tests/lib/test.h"
#include "tests/unit/client/public_header_alone.h"

static const struct public_constant *find(const struct public_constant *rows, size_t count,
                                          const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    return NULL;
}

static void expect_number(const char *name, size_t value)
{
    const struct public_constant *row = find(public_numbers, public_number_count, name);
    EXPECT(row != NULL);
    if (row->value != (long long)value)
        FAIL("%s: shd.h has %lld, proto/ has %zu", name, row->value, value);
}

TEST(status_codes_agree)
{
    size_t count = 0;
#define EXPECT_CODE(name, number, meaning)                                                  \
    do {                                                                                    \
        const struct public_constant *row = find(public_codes, public_code_count, #name);   \
        if (row == NULL || row->value != (number))                                          \
            FAIL("%s: %s", #name, row == NULL ? "not in shd.h" : "another value in shd.h"); \
        EXPECT_STR(status_name(number), #name);                                             \
        count++;                                                                            \
    } while (0);
    SHD_STATUS_MAP(EXPECT_CODE)
#undef EXPECT_CODE
    EXPECT_EQ(count, public_code_count);
}

TEST(dtypes_agree)
{
    size_t count = 0;
    for (uint64_t d = 0; d < 256; d++) {
        if (!dtype_valid(d))
            continue;
        const char *name = dtype_name((enum shd_dtype)d);
        const struct public_constant *row = find(public_dtypes, public_dtype_count, name);
        if (row == NULL || row->value != (long long)d)
            FAIL("dtype %s differs in shd.h", name);
        count++;
    }
    EXPECT_EQ(count, public_dtype_count);
}

TEST(layout_and_limits_agree)
{
    expect_number("sizeof err", sizeof(struct shd_err));
    expect_number("sizeof err.code", sizeof(((struct shd_err *)NULL)->code));
    expect_number("sizeof err.text", SHD_ERR_TEXT_BYTES);
    expect_number("offsetof err.code", offsetof(struct shd_err, code));
    expect_number("offsetof err.text", offsetof(struct shd_err, text));
    expect_number("sizeof status", sizeof(enum shd_status));
    expect_number("sizeof dtype", sizeof(enum shd_dtype));
    expect_number("metrics", WIRE_METRICS_MAX);
    expect_number("blob bytes", WIRE_BLOB_BYTES_MAX);
}

TEST_MAIN()
