/* See devices.h. */
#include "client/ctl/base/devices.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"

/* As shardd --device has it; there it is said whether there is such a device. */
static bool is_device(const char *name, size_t bytes)
{
    static const char digits[] = "0123456789";
    const size_t kind = strlen("cpu");
    if (bytes <= kind || bytes >= DEVICE_NAME_BYTES ||
        (strncmp(name, "cpu", kind) != 0 && strncmp(name, "gpu", kind) != 0))
        return false;
    return strspn(name + kind, digits) >= bytes - kind;
}

static int add_device(struct devices *d, const char *name, size_t bytes, struct shd_err *e)
{
    if (!is_device(name, bytes))
        return err_set(e, SHD_EINVAL,
                       "--devices: '%.*s' is no device: they are cpu0, cpu1, ..., gpu0, gpu1, ...",
                       (int)(bytes < 60 ? bytes : 60), name);
    for (uint32_t i = 0; i < d->count; i++)
        if (strlen(d->names[i]) == bytes && memcmp(d->names[i], name, bytes) == 0)
            return err_set(e, SHD_EINVAL, "--devices: %s is there twice", d->names[i]);
    if (d->count == DEVICES_MAX)
        return err_set(e, SHD_EINVAL, "--devices: more than %u", DEVICES_MAX);
    memcpy(d->names[d->count], name, bytes);
    d->names[d->count++][bytes] = '\0';
    return SHD_OK;
}

int devices_parse(const char *list, uint32_t count, struct devices *ret_devices, struct shd_err *e)
{
    int r = SHD_OK;
    CHECK(count <= DEVICES_MAX);
    if (list != NULL && count > 0)
        return err_set(e, SHD_EINVAL, "--devices %.60s says how many daemons: leave --daemons out",
                       list);
    ret_devices->listed = list != NULL;
    ret_devices->count = 0;
    for (uint32_t i = 0; list == NULL && i < (count > 0 ? count : 1); i++)
        snprintf(ret_devices->names[ret_devices->count++], DEVICE_NAME_BYTES, "cpu%" PRIu32, i);
    while (r == SHD_OK && list != NULL) {
        const size_t bytes = strcspn(list, ",");
        r = add_device(ret_devices, list, bytes, e);
        list = list[bytes] == ',' ? list + bytes + 1 : NULL;
    }
    return r;
}

void devices_address(const struct devices *devices, const char *path, char *buf, size_t bytes)
{
    size_t used = (size_t)snprintf(buf, bytes, "%s", path);
    for (uint32_t i = 0; i < devices->count; i++) {
        CHECK(used < bytes);
        used += (size_t)snprintf(buf + used, bytes - used, "%c%s", i == 0 ? '?' : ',',
                                 devices->names[i]);
    }
    CHECK(used < bytes);
}
