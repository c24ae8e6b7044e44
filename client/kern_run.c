/* See kern_run.h. */
#include "client/kern_run.h"

#include "kernels/runs.h"

static int finish(struct kern_waiter *w, const char *what, struct shd_err *e)
{
    const int r = kern_wait(w);
    return r == SHD_OK ? SHD_OK : err_set(e, r, "%s failed: %s", what, status_meaning(r));
}

int kern_run_fill(struct kern *k, const struct kern_fill *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->fill(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "fill", e) : r;
}

int kern_run_cast(struct kern *k, const struct kern_cast *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->cast(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "cast", e) : r;
}

int kern_run_hash(struct kern *k, const struct kern_hash *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->hash(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "hash", e) : r;
}

int kern_run_accumulate(struct kern *k, const struct kern_accumulate *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->accumulate(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "accumulate", e) : r;
}

int kern_run_sumsq(struct kern *k, const struct kern_sumsq *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->sumsq(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "sumsq", e) : r;
}

int kern_run_update(struct kern *k, const struct spec *spec, const struct kern_update *a,
                    struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = runs_update(k, spec, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "update", e) : r;
}
