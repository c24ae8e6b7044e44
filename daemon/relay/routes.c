/* See routes.h. */
#include "daemon/relay/routes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/relay/relay.h"

const char *routes_host(const struct routes *routes, const char *device)
{
    for (uint32_t i = 0; i < routes->count; i++)
        if (strcmp(routes->items[i].device, device) == 0)
            return routes->items[i].host;
    return NULL;
}

int routes_admit(const struct routes *routes, const char *device, struct shd_err *e)
{
    const char *host = routes_host(routes, device);
    if (host != NULL)
        return err_set(e, SHD_ENOENT, "device '%.64s' is host '%s''s: ask there", device, host);
    if (!routes->serves)
        return err_set(e, SHD_ENOENT, "this host has no daemon for others, and none of '%.64s'",
                       device);
    if (routes->own[0] != '\0' && !cluster_has_device(routes->own, device))
        return err_set(e, SHD_ENOENT, "this host has no device '%.64s': it has %.100s", device,
                       routes->own);
    return SHD_OK;
}

/* -- Making ------------------------------------------------------------------------------------ */

static int add(struct routes *routes, const char *host, const char *device, struct shd_err *e)
{
    const char *other = routes_host(routes, device);
    if (other != NULL && strcmp(other, host) == 0)
        return err_set(e, SHD_EEXIST, "device '%s' of host '%s' is named twice", device, host);
    if (other != NULL)
        return err_set(e, SHD_EEXIST,
                       "hosts '%s' and '%s' both have a device '%s': names have to differ in a "
                       "cluster",
                       other, host, device);
    if (cluster_has_device(routes->own, device))
        return err_set(e, SHD_EEXIST,
                       "this host and '%s' both have a device '%s': names have to differ in a "
                       "cluster",
                       host, device);
    if (routes->count == RELAY_DEVICES_MAX)
        return err_set(e, SHD_ERANGE, "more than %u devices of other hosts", RELAY_DEVICES_MAX);
    struct route *route = &routes->items[routes->count++];
    snprintf(route->device, sizeof route->device, "%s", device);
    snprintf(route->host, sizeof route->host, "%s", host);
    return SHD_OK;
}

/* Where the file says what a host has, nothing else is believed. */
static int check_known(const struct cluster_host *host, const char *devices, struct shd_err *e)
{
    char device[CLUSTER_DEVICE_BYTES];
    int r = cluster_check_devices(devices, e);
    while (r == SHD_OK && cluster_next_device(&devices, device))
        if (host->devices[0] != '\0' && !cluster_has_device(host->devices, device))
            r = err_set(e, SHD_ENOENT,
                        "host '%s' has no device '%s' in the cluster file: it has %.100s",
                        host->name, device, host->devices);
    return r;
}

static int add_host(struct routes *routes, const struct cluster_host *host, const char *devices,
                    struct shd_err *e)
{
    char device[CLUSTER_DEVICE_BYTES];
    int r = check_known(host, devices, e);
    while (r == SHD_OK && cluster_next_device(&devices, device))
        r = add(routes, host->name, device, e);
    return r;
}

/* HOST, or HOST:DEVICE,... */
static int add_from(const struct cluster *cluster, const struct relay_config *config,
                    const char *word, struct routes *routes, struct shd_err *e)
{
    char name[CLUSTER_NAME_BYTES];
    const size_t bytes = strcspn(word, ":");
    snprintf(name, sizeof name, "%.*s", (int)(bytes < sizeof name ? bytes : sizeof name - 1), word);
    const struct cluster_host *host = cluster_by_name(cluster, name);
    if (host == NULL)
        return err_set(e, SHD_ENOENT, "--from '%.100s': the cluster file has no host '%s'", word,
                       name);
    if (strcmp(name, config->host) == 0)
        return err_set(e, SHD_EINVAL,
                       "--from '%.100s': that is this host; its own daemons are --device", word);
    const char *devices = word[bytes] == ':' ? word + bytes + 1 : host->devices;
    if (devices[0] == '\0')
        return err_set(e, SHD_EINVAL,
                       "--from '%.100s': which devices has it? The cluster file does not say: "
                       "--from %s:cpu0,cpu1",
                       word, name);
    return add_host(routes, host, devices, e);
}

static int take_own(const struct cluster_host *host, const struct relay_config *config,
                    struct routes *routes, struct shd_err *e)
{
    const char *own = config->devices != NULL ? config->devices : host->devices;
    const int r = check_known(host, own, e);
    if (r != SHD_OK)
        return err_prefix(e, "--device");
    if (strlen(own) >= sizeof routes->own)
        return err_set(e, SHD_ERANGE, "--device: names of more than %zu bytes",
                       sizeof routes->own - 1);
    snprintf(routes->own, sizeof routes->own, "%s", own);
    return SHD_OK;
}

int routes_make(const struct cluster *cluster, const struct relay_config *config,
                struct routes *ret_routes, struct shd_err *e)
{
    struct routes *routes = ret_routes;
    const struct cluster_host *self = cluster_by_name(cluster, config->host);
    *routes = (struct routes){ .count = 0 };
    if (self == NULL)
        return err_set(e, SHD_ENOENT, "the cluster file has no host '%.64s'", config->host);
    int r = take_own(self, config, routes, e);
    for (uint32_t i = 0; r == SHD_OK && i < config->from_count; i++)
        r = add_from(cluster, config, config->from[i], routes, e);
    for (uint32_t i = 0; r == SHD_OK && config->from_count == 0 && i < cluster->count; i++)
        if (&cluster->hosts[i] != self)
            r = add_host(routes, &cluster->hosts[i], cluster->hosts[i].devices, e);
    routes->serves = routes->own[0] != '\0' || routes->count == 0;
    return r;
}
