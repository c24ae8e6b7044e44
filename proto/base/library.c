/* See library.h. */
#include "proto/base/library.h"

#include <dlfcn.h>
#include <string.h>

#include "proto/base/check.h"

static int find_functions(const struct library *l, void *handle, struct shd_err *e)
{
    for (size_t i = 0; i < l->function_count; i++) {
        const struct library_function *f = &l->functions[i];
        void *symbol = dlsym(handle, f->symbol);
        if (symbol == NULL)
            return err_set(e, SHD_ENOTSUP, "%s has no %s: %s", l->called, f->symbol, l->remedy);
        memcpy((char *)l->table + f->offset, &symbol, sizeof symbol);
    }
    return SHD_OK;
}

/* The caller holds l->lock. */
static int load(struct library *l, struct shd_err *e)
{
    void *handle = NULL;
    for (size_t i = 0; handle == NULL && l->names[i] != NULL; i++)
        handle = dlopen(l->names[i], RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return err_set(e, SHD_ENOTSUP, "%s (%s)", l->absent, dlerror());
    const int r = find_functions(l, handle, e);
    if (r != SHD_OK) {
        dlclose(handle);
        return r;
    }
    /* A library that has been called stays loaded, also after a failure: it may have threads, or
     * handlers for this process's end. Another try finds the same one. */
    return l->start != NULL ? l->start(e) : SHD_OK;
}

int library_load(struct library *l, struct shd_err *e)
{
    CHECK(l->names[ARRAY_SIZE(l->names) - 1] == NULL);
    pthread_mutex_lock(&l->lock);
    const int r = l->loaded ? SHD_OK : load(l, e);
    l->loaded = r == SHD_OK;
    pthread_mutex_unlock(&l->lock);
    return r;
}
