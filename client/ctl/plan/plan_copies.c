/* See plan_copies.h. */
#include "client/ctl/plan/plan_copies.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/ctl/base/pairs.h"
#include "proto/base/sys.h"

void plan_copies_free(struct plan_copies *c)
{
    free(c->items);
    *c = (struct plan_copies){ 0 };
}

/* Each host's are called 0, 1, ...: pairs are by places and hosts. */
static int name_devices(struct replicas_host *host, const struct plan_host *from, struct shd_err *e)
{
    size_t at = 0;
    for (uint32_t i = 0; i < from->daemons; i++) {
        const int bytes = snprintf(host->devices + at, sizeof host->devices - at, "%s%" PRIu32,
                                   i > 0 ? "," : "", i);
        if (bytes < 0 || (size_t)bytes >= sizeof host->devices - at)
            return err_set(e, SHD_ERANGE,
                           "--replicas: host %.60s has %" PRIu32
                           " daemons, more than a cluster file has room for",
                           from->name, from->daemons);
        at += (size_t)bytes;
    }
    snprintf(host->name, sizeof host->name, "%s", from->name);
    return SHD_OK;
}

static int list_pairs(const struct plan_host *hosts, uint32_t count, struct replicas *r,
                      uint32_t *places, struct shd_err *e)
{
    for (uint32_t i = 0; i < count; i++) {
        if (hosts[i].daemons == 0)
            continue; /* nothing is lost with it */
        const int named = name_devices(&r->hosts[r->host_count], &hosts[i], e);
        if (named != SHD_OK)
            return named;
        places[r->host_count++] = i;
        r->device_count += hosts[i].daemons;
    }
    if (r->device_count > REPLICAS_DEVICES_MAX)
        return err_set(e, SHD_ERANGE, "--replicas: %" PRIu32 " daemons, at most %u",
                       r->device_count, REPLICAS_DEVICES_MAX);
    return SHD_OK;
}

static int add_pairs(const struct plan_host *hosts, uint32_t count, struct plan_copies *c,
                     struct shd_err *e)
{
    struct replicas r = { .hosts = sys_calloc(count, sizeof *r.hosts) };
    struct pairs pairs = { 0 };
    uint32_t *places = sys_calloc(count, sizeof *places);
    int code;
    if (r.hosts == NULL || places == NULL) {
        code = err_set(e, SHD_ENOMEM, "no memory for pairs");
        goto out;
    }
    code = list_pairs(hosts, count, &r, places, e);
    if (code == SHD_OK)
        code = pairs_make(&r, &pairs, e);
    for (uint32_t i = 0; i < pairs.count; i++) {
        const struct pair *p = &pairs.pairs[i];
        c->items[c->count++] = (struct plan_copy){ places[p->primary_host], i, true };
        c->items[c->count++] = (struct plan_copy){ places[p->secondary_host], i, false };
    }
out:
    pairs_free(&pairs);
    replicas_free(&r);
    free(places);
    return code;
}

int plan_copies_new(const struct plan_host *hosts, uint32_t count, uint32_t replicas,
                    struct plan_copies *ret_copies, struct shd_err *e)
{
    struct plan_copies c = { 0 };
    uint64_t daemons = 0;
    int r = SHD_OK;
    for (uint32_t i = 0; i < count; i++)
        daemons += hosts[i].daemons;
    c.items = sys_calloc(daemons + 1, sizeof *c.items);
    if (c.items == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " daemons", daemons);
    if (replicas > 1)
        r = add_pairs(hosts, count, &c, e);
    for (uint32_t i = 0; replicas == 1 && i < count; i++)
        for (uint32_t k = 0; k < hosts[i].daemons; k++, c.count++)
            c.items[c.count] = (struct plan_copy){ i, c.count, true };
    if (r == SHD_OK)
        *ret_copies = c;
    else
        plan_copies_free(&c);
    return r;
}
