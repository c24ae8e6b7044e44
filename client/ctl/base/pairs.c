/* See pairs.h. */
#include "client/ctl/base/pairs.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/session/address.h"
#include "proto/base/check.h"
#include "proto/base/status.h"

#define HOSTS_MIN 2u

_Static_assert(REPLICAS_DEVICES_MAX <= DEVICES_MAX, "an address has room for all");
_Static_assert(CLUSTER_DEVICE_BYTES <= DEVICE_NAME_BYTES, "an address has room for all");

struct device {
    char name[CLUSTER_DEVICE_BYTES];
    const char *host_name; /* borrowed */
    uint32_t host;         /* in hosts of the replicas */
    uint32_t place;        /* within its host */
    bool taken;
};

struct pairing {
    struct device *devices; /* borrowed, [device_count], in the order of the text above */
    uint32_t device_count;
    uint32_t host_count;
    uint32_t left[CLUSTER_HOSTS_MAX]; /* devices of each host that are in no pair yet */
    uint32_t left_count;              /* of all */
    bool directed[PAIRS_MAX];
};

void pairs_free(struct pairs *p)
{
    free(p->pairs);
    *p = (struct pairs){ 0 };
}

/* -- Devices in order -------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    const struct device *x = a, *y = b;
    return address_compare(x->name, y->name);
}

static int compare_devices(const void *a, const void *b)
{
    const struct device *x = a, *y = b;
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    return address_compare(x->host_name, y->host_name);
}

static void list_devices(const struct replicas *r, struct pairing *p)
{
    for (uint32_t i = 0; i < r->host_count; i++) {
        struct device *first = p->devices + p->device_count;
        for (const char *at = r->hosts[i].devices; cluster_next_device(&at, first[p->left[i]].name);
             p->left[i]++)
            CHECK(p->device_count + p->left[i] < r->device_count);
        qsort(first, p->left[i], sizeof *first, compare_names);
        for (uint32_t k = 0; k < p->left[i]; k++) {
            first[k].host_name = r->hosts[i].name;
            first[k].host = i;
            first[k].place = k;
        }
        p->device_count += p->left[i];
    }
    qsort(p->devices, p->device_count, sizeof *p->devices, compare_devices);
    p->left_count = p->device_count;
    p->host_count = r->host_count;
}

/* -- Pairs ------------------------------------------------------------------------------------- */

/* The host that has half of the devices that are left, and is none's own `but`; host_count: none.
 */
static uint32_t half_of_left(const struct pairing *p, uint32_t but)
{
    uint32_t host = 0;
    while (host < p->host_count && (host == but || 2 * p->left[host] < p->left_count))
        host++;
    return host;
}

static struct device *find_partner(struct pairing *p, const struct device *first)
{
    const uint32_t host = half_of_left(p, first->host);
    struct device *d = p->devices;
    while (d->taken || d->host == first->host || (host < p->host_count && d->host != host)) {
        d++;
        CHECK(d < p->devices + p->device_count); /* no host has more than half of what is left */
    }
    return d;
}

static void take(struct pairing *p, struct device *d)
{
    d->taken = true;
    p->left[d->host]--;
    p->left_count--;
}

static void match(struct pairing *p, struct pairs *pairs)
{
    for (struct device *d = p->devices; d < p->devices + p->device_count; d++) {
        if (d->taken)
            continue;
        struct device *partner = find_partner(p, d);
        struct pair *pair = &pairs->pairs[pairs->count++];
        memcpy(pair->primary, d->name, sizeof pair->primary);
        memcpy(pair->secondary, partner->name, sizeof pair->secondary);
        pair->primary_host = d->host;
        pair->secondary_host = partner->host;
        take(p, d);
        take(p, partner);
    }
}

/* -- Directions -------------------------------------------------------------------------------- */

static void turn_round(struct pair *pair)
{
    const struct pair was = *pair;
    memcpy(pair->primary, was.secondary, sizeof pair->primary);
    memcpy(pair->secondary, was.primary, sizeof pair->secondary);
    pair->primary_host = was.secondary_host;
    pair->secondary_host = was.primary_host;
}

/* From host on, by pairs that have no direction yet, as far as there are any. */
static void walk(struct pairing *p, struct pairs *pairs, uint32_t host)
{
    for (uint32_t i = 0; i < pairs->count;) {
        struct pair *pair = &pairs->pairs[i];
        if (p->directed[i] || (pair->primary_host != host && pair->secondary_host != host)) {
            i++;
            continue;
        }
        if (pair->primary_host != host)
            turn_round(pair);
        p->directed[i] = true;
        host = pair->secondary_host;
        i = 0;
    }
}

/* Primaries less secondaries that a host has so far. */
static int32_t balance(const struct pairing *p, const struct pairs *pairs, uint32_t host)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < pairs->count; i++)
        if (p->directed[i])
            sum += (pairs->pairs[i].primary_host == host) -
                   (pairs->pairs[i].secondary_host == host);
    return sum;
}

/* A walk ends where it began, or, from a host with an odd number of devices, at another such one:
 * these come first. Devices that are first on their host name the hosts in natural order. */
static void direct(struct pairing *p, struct pairs *pairs, const uint32_t *device_counts)
{
    for (uint32_t i = 0; i < p->device_count && p->devices[i].place == 0; i++) {
        const uint32_t host = p->devices[i].host;
        if (device_counts[host] % 2 == 1 && balance(p, pairs, host) == 0)
            walk(p, pairs, host);
    }
    for (uint32_t i = 0; i < p->device_count && p->devices[i].place == 0; i++)
        walk(p, pairs, p->devices[i].host);
}

/* -- All of it --------------------------------------------------------------------------------- */

static int check(const struct replicas *r, const uint32_t *device_counts, struct shd_err *e)
{
    if (r->host_count < HOSTS_MIN)
        return err_set(e, SHD_EINVAL,
                       "replicas are on different hosts, and '%s' alone has devices in the cluster "
                       "file: name some of another host",
                       r->hosts[0].name);
    for (uint32_t i = 0; i < r->host_count; i++)
        if (2 * device_counts[i] > r->device_count)
            return err_set(e, SHD_EINVAL,
                           "host '%s' has %" PRIu32 " of %" PRIu32 " devices, and replicas are on "
                           "different hosts: at most half can be one host's",
                           r->hosts[i].name, device_counts[i], r->device_count);
    if (r->device_count % 2 != 0)
        return err_set(e, SHD_EINVAL,
                       "%" PRIu32 " devices make no pairs: name an even number in the cluster file",
                       r->device_count);
    return SHD_OK;
}

static int pair_all(const struct replicas *r, struct pairing *p, struct pairs *pairs,
                    struct shd_err *e)
{
    uint32_t device_counts[CLUSTER_HOSTS_MAX];
    list_devices(r, p);
    memcpy(device_counts, p->left, sizeof device_counts);
    const int code = check(r, device_counts, e);
    if (code != SHD_OK)
        return code;
    match(p, pairs);
    direct(p, pairs, device_counts);
    return SHD_OK;
}

int pairs_make(const struct replicas *r, struct pairs *ret_pairs, struct shd_err *e)
{
    struct pairs pairs = { .pairs = calloc(r->device_count / 2 + 1, sizeof *pairs.pairs) };
    struct pairing *p = calloc(1, sizeof *p);
    struct device *devices = calloc(r->device_count + 1, sizeof *devices); /* one ends the names */
    int code;
    if (pairs.pairs == NULL || p == NULL || devices == NULL) {
        code = err_set(e, SHD_ENOMEM, "no memory for pairs of %" PRIu32 " devices",
                       r->device_count);
    } else {
        p->devices = devices;
        code = pair_all(r, p, &pairs, e);
    }
    free(devices);
    free(p);
    if (code == SHD_OK)
        *ret_pairs = pairs;
    else
        pairs_free(&pairs);
    return code;
}

void pairs_address(const struct pairs *p, const char *path, char *buf, size_t bytes)
{
    size_t used = (size_t)snprintf(buf, bytes, "%s", path);
    for (uint32_t i = 0; i < p->count; i++) {
        CHECK(used < bytes);
        used += (size_t)snprintf(buf + used, bytes - used, "%c%s+%s", i == 0 ? '?' : ',',
                                 p->pairs[i].primary, p->pairs[i].secondary);
    }
    CHECK(used < bytes);
}
