/* status, dtype and the fault seam. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/base/sys.h"
#include "tests/lib/test.h"

TEST(every_code_has_a_name_and_a_meaning)
{
    for (int code = 0; code >= -16; code--) {
        EXPECT(status_known(code));
        EXPECT(strncmp(status_name(code), "SHD_", 4) == 0);
        EXPECT(strcmp(status_name(code), "SHD_UNKNOWN") != 0);
        EXPECT(strlen(status_meaning(code)) > 3);
    }
    EXPECT_STR(status_name(SHD_ESTEP), "SHD_ESTEP");
}

TEST(other_codes_are_unknown)
{
    const int codes[] = { SHD_PENDING, -17, 2, INT32_MAX, INT32_MIN };
    for (size_t i = 0; i < ARRAY_SIZE(codes); i++) {
        EXPECT(!status_known(codes[i]));
        EXPECT_STR(status_name(codes[i]), "SHD_UNKNOWN");
    }
}

TEST(set_returns_the_code_and_formats)
{
    struct shd_err e;
    EXPECT_STATUS(err_set(&e, SHD_ERANGE, "got %d of '%s'", 3, "x"), SHD_ERANGE);
    EXPECT_EQ(e.code, SHD_ERANGE);
    EXPECT_STR(e.text, "got 3 of 'x'");
    EXPECT_STATUS(err_set(NULL, SHD_EIO, "nobody asks"), SHD_EIO);
}

TEST(long_text_is_cut_and_terminated)
{
    struct {
        struct shd_err e;
        char guard;
    } s = { .guard = 'g' };
    char text[1000];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = 0;
    err_set(&s.e, SHD_EIO, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    errno = EPIPE;
    err_sys(&s.e, SHD_EIO, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    err_prefix(&s.e, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    EXPECT_EQ(s.guard, 'g');
}

TEST(sys_appends_errno_and_knows_shortages)
{
    struct shd_err e;
    errno = ENOENT;
    EXPECT_STATUS(err_sys(&e, SHD_EIO, "open %s", "a"), SHD_EIO);
    EXPECT_STR(e.text, "open a: No such file or directory");
    const int shortages[] = { ENOMEM, EMFILE, ENFILE };
    for (size_t i = 0; i < ARRAY_SIZE(shortages); i++) {
        errno = shortages[i];
        EXPECT_STATUS(err_sys(&e, SHD_EIO, "open"), SHD_ENOMEM);
        EXPECT_EQ(e.code, SHD_ENOMEM);
    }
    errno = ENOMEM;
    EXPECT_STATUS(err_sys(NULL, SHD_EIO, "open"), SHD_ENOMEM);
}

TEST(prefix_keeps_the_code)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "step is 4");
    EXPECT_STATUS(err_prefix(&e, "owner %d", 2), SHD_ESTEP);
    EXPECT_STR(e.text, "owner 2: step is 4");
    EXPECT_STATUS(err_prefix(NULL, "owner"), SHD_EINTERNAL);
}

TEST(text_may_be_built_from_itself)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "inner");
    err_set(&e, SHD_EIO, "outer(%s)", e.text);
    EXPECT_STR(e.text, "outer(inner)");
    err_prefix(&e, "again(%s)", e.text);
    EXPECT_STR(e.text, "again(outer(inner)): outer(inner)");
}

TEST(dtypes_have_sizes_and_names)
{
    EXPECT_EQ(dtype_bytes(SHD_F32), 4);
    EXPECT_EQ(dtype_bytes(SHD_BF16), 2);
    EXPECT_EQ(dtype_bytes(SHD_F16), 2);
    for (int d = SHD_F32; d <= SHD_F16; d++) {
        EXPECT(dtype_valid((uint64_t)d));
        EXPECT_EQ(dtype_parse(dtype_name((enum shd_dtype)d)), d);
    }
    EXPECT(!dtype_valid(0) && !dtype_valid(4) && !dtype_valid(UINT64_MAX));
    EXPECT(!dtype_valid(UINT64_C(0x100000001))); /* not cut to 32 bits */
    EXPECT_EQ(dtype_parse("f64"), 0);
    EXPECT_EQ(dtype_parse(""), 0);
}

static enum sys_kind fault_kind;

static int fault_of_kind(enum sys_kind kind)
{
    return kind == fault_kind ? EMFILE : 0;
}

static void expect_faults(enum sys_kind kind)
{
    struct msghdr h = { 0 };
    fault_kind = kind;
    sys_fault = fault_of_kind;
    void *const made[] = { sys_malloc(8), sys_calloc(1, 8), sys_realloc(NULL, 8), sys_strdup("a") };
    void *map = sys_mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int memfd = sys_memfd("test", 0);
    errno = 0;
    const ssize_t sent = sys_sendmsg(-1, &h, 0);
    const int send_errno = errno;
    sys_fault = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(made); i++) {
        EXPECT((made[i] == NULL) == (kind == SYS_ALLOC));
        free(made[i]);
    }
    EXPECT((map == MAP_FAILED) == (kind == SYS_MAP));
    if (map != MAP_FAILED)
        munmap(map, 4096);
    EXPECT((memfd < 0) == (kind == SYS_OPEN));
    if (memfd >= 0)
        close(memfd);
    EXPECT_EQ(sent, -1);
    EXPECT_EQ(send_errno, kind == SYS_SEND ? EMFILE : EBADF);
}

TEST(faults_hit_their_kind_only)
{
    expect_faults(SYS_ALLOC);
    expect_faults(SYS_MAP);
    expect_faults(SYS_SEND);
    expect_faults(SYS_OPEN);
}

TEST(calloc_refuses_overflow)
{
    volatile size_t huge = SIZE_MAX / 2;
    void *p = sys_calloc(huge, 4);
    EXPECT(p == NULL);
    free(p);
}

TEST_MAIN()
