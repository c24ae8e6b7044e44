/* See host_replicas.h. */
#include "client/ctl/run/host_replicas.h"

#include <inttypes.h>

#include "client/ctl/base/say.h"
#include "proto/base/status.h"
#include "proto/files/arbiter.h"

void host_replicas_free(struct host_replicas *h)
{
    replicas_free(&h->told);
    pairs_free(&h->pairs);
}

int host_replicas_plan(const struct cluster *cluster, const char *arbiter,
                       struct host_replicas *ret_replicas, struct shd_err *e)
{
    struct host_replicas h = { .pairs.count = 0 };
    struct arbiter *at = NULL;
    int r = replicas_of(cluster, arbiter, &h.told, e);
    if (r == SHD_OK)
        r = pairs_make(&h.told, &h.pairs, e);
    if (r == SHD_OK)
        r = arbiter_open(arbiter, h.told.cluster, &at, e);
    arbiter_close(at);
    if (r == SHD_OK)
        *ret_replicas = h;
    else
        host_replicas_free(&h);
    return r;
}

/* May be well by itself later. */
static bool is_away(int code)
{
    return code == SHD_EIO || code == SHD_EGONE || code == SHD_ETIMEDOUT;
}

int host_replicas_begin(const struct host_replicas *h, const char *dir, const char *name,
                        struct shd_err *e)
{
    struct arbiter_view view = { 0 };
    struct arbiter *at;
    int r = arbiter_open(h->told.arbiter, h->told.cluster, &at, e);
    if (r != SHD_OK)
        return r;
    r = arbiter_read(at, &view, e);
    arbiter_close(at);
    if (is_away(r)) {
        ctl_say("the arbiter cannot be reached, and is asked again when a host is lost: %s",
                e->text);
        r = SHD_OK;
    }
    if (r == SHD_OK && arbiter_view_has(&view, name))
        ctl_say("this host, '%s', is out in view %" PRIu64
                " of the arbiter: workers go on by the other copies",
                name, view.number);
    else if (r == SHD_OK && view.number > 0 && replicas_by_name(&h->told, name) != NULL)
        ctl_say("this host, '%s', is in by view %" PRIu64
                " of the arbiter, and its daemons begin empty: if they had slices before, put it "
                "out (`shardctl hosts --out %s`, on any host), so that it is filled",
                name, view.number, name);
    arbiter_view_free(&view);
    return r == SHD_OK ? replicas_write(dir, &h->told, e) : r;
}
