/* See nccl.h. */
#include "proto/gpu/nccl.h"

#include <stdarg.h>
#include <stdio.h>

#include "proto/base/check.h"
#include "proto/base/library.h"

static const struct library_function functions[] = {
#define NCCL_SYMBOL(member, symbol, result, arguments) { symbol, offsetof(struct nccl, member) },
    NCCL_FUNCTIONS(NCCL_SYMBOL)
#undef NCCL_SYMBOL
};

static struct nccl table;

static int check_version(struct shd_err *e)
{
    int version = 0;
    const int r = nccl_result(&table, table.get_version(&version), e, "ncclGetVersion");
    if (r != SHD_OK)
        return r;
    if ((unsigned)version < NCCL_VERSION_MIN)
        return err_set(e, SHD_ENOTSUP, "libnccl.so.2 is of version %d: install NCCL 2.18 or newer",
                       version);
    return SHD_OK;
}

static struct library library = {
    .names = { "libnccl.so.2" },
    .absent = "NCCL cannot be loaded",
    .called = "libnccl.so.2",
    .remedy = "install NCCL 2.18 or newer",
    .functions = functions,
    .function_count = ARRAY_SIZE(functions),
    .table = &table,
    .start = check_version,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

int nccl_load(const struct nccl **ret_nccl, struct shd_err *e)
{
    const int r = library_load(&library, e);
    if (r == SHD_OK)
        *ret_nccl = &table;
    return r;
}

int nccl_result(const struct nccl *nccl, int result, struct shd_err *e, const char *fmt, ...)
{
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
        return SHD_OK;
    char what[SHD_ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    const bool remote = result == NCCL_REMOTE_ERROR || result == NCCL_SYSTEM_ERROR;
    const char *text = nccl->error_string(result);
    const char *last = nccl->last_error(NULL);
    return err_set(e, remote ? SHD_EGONE : SHD_EIO, "%s: NCCL error %d, %s%s%.100s", what, result,
                   text != NULL ? text : "unknown", last != NULL && *last != '\0' ? ": " : "",
                   last != NULL ? last : "");
}
