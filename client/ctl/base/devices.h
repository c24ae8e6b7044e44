/* The devices for which `shardctl run` and `shardctl up` start a daemon: cpu0, cpu1, ... by number,
 * or those of a list. The list's order is the order of the owners. */
#ifndef SHD_CTL_DEVICES_H
#define SHD_CTL_DEVICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define DEVICES_MAX       1024u
#define DEVICE_NAME_BYTES 16u /* with NUL */

struct devices {
    char names[DEVICES_MAX][DEVICE_NAME_BYTES];
    uint32_t count;
    bool listed; /* else the first of the host's */
};

/* list: "gpu0,cpu0", or NULL: count (0: 1) devices of the host. Errors: SHD_EINVAL both were given,
 * or no name of a device, or one that is there twice. */
int devices_parse(const char *list, uint32_t count, struct devices *ret_devices, struct shd_err *e);

/* The address of them at path: "DIR?gpu0,cpu0". */
#define DEVICES_ADDRESS_BYTES(path_bytes) ((path_bytes) + DEVICES_MAX * DEVICE_NAME_BYTES + 8u)
void devices_address(const struct devices *devices, const char *path, char *buf, size_t bytes);

#endif
