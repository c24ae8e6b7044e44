/* See nccl.h. The library stays open: it has threads of its own, and cannot be unloaded. */
#include "proto/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/check.h"

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define NCCL_SYMBOL(member, symbol, result, arguments) { symbol, offsetof(struct nccl, member) },
    NCCL_FUNCTIONS(NCCL_SYMBOL)
#undef NCCL_SYMBOL
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct nccl table;
static bool loaded; /* under load_lock */

static int find_functions(void *library, struct nccl *ret, struct shd_err *e)
{
    for (size_t i = 0; i < ARRAY_SIZE(functions); i++) {
        void *symbol = dlsym(library, functions[i].symbol);
        if (symbol == NULL) {
            err_set(e, SHD_ENOTSUP, "libnccl.so.2 has no %s: install NCCL 2.18 or newer",
                    functions[i].symbol);
            return SHD_ENOTSUP; /* err_set()'s result, which the analyzer does not know */
        }
        memcpy((char *)ret + functions[i].offset, &symbol, sizeof symbol);
    }
    return SHD_OK;
}

static int check_version(const struct nccl *n, struct shd_err *e)
{
    int version = 0;
    const int r = nccl_result(n, n->get_version(&version), e, "ncclGetVersion");
    if (r != SHD_OK)
        return r;
    if ((unsigned)version < NCCL_VERSION_MIN)
        return err_set(e, SHD_ENOTSUP, "libnccl.so.2 is of version %d: install NCCL 2.18 or newer",
                       version);
    return SHD_OK;
}

/* Under load_lock. */
static int load(struct shd_err *e)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return err_set(e, SHD_ENOTSUP, "NCCL cannot be loaded (%s)", dlerror());
    struct nccl found;
    int r = find_functions(library, &found, e);
    if (r == SHD_OK)
        r = check_version(&found, e);
    if (r != SHD_OK) {
        dlclose(library);
        return r;
    }
    table = found;
    loaded = true;
    return SHD_OK;
}

int nccl_load(const struct nccl **ret_nccl, struct shd_err *e)
{
    pthread_mutex_lock(&load_lock);
    const int r = loaded ? SHD_OK : load(e);
    pthread_mutex_unlock(&load_lock);
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
