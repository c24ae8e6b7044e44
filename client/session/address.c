/* See address.h. */
#include "client/session/address.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/plan/wrap.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/replicas.h"
#include "proto/spec/layout.h"

#define SOCKET_SUFFIX ".sock"

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

int address_compare(const char *a, const char *b)
{
    const int order = wrap_compare_names(a, strlen(a), b, strlen(b));
    return order != 0 ? order : strcmp(a, b); /* "cpu01" and "cpu1": any fixed order */
}

static int compare_devices(const void *a, const void *b)
{
    return address_compare(*(char *const *)a, *(char *const *)b);
}

static bool device_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_' ||
           c == '-' || c == '.';
}

static int check_device(const struct address *address, const char *name, size_t bytes,
                        struct shd_err *e)
{
    if (bytes == 0)
        return err_set(e, SHD_EINVAL, "empty device name in the address: write \"DIR?cpu0,cpu1\"");
    for (size_t i = 0; i < bytes; i++)
        if (!device_char(name[i]))
            return err_set(e, SHD_EINVAL,
                           "device name '%.*s' in the address: only letters, "
                           "digits, '.', '_' and '-'",
                           (int)(bytes < 64 ? bytes : 64), name);
    for (uint32_t i = 0; i < address->count; i++)
        if (strlen(address->devices[i]) == bytes && memcmp(address->devices[i], name, bytes) == 0)
            return err_set(e, SHD_EINVAL, "device '%s' is in the address twice",
                           address->devices[i]);
    return SHD_OK;
}

static int add_device(struct address *address, const char *name, size_t bytes, struct shd_err *e)
{
    const size_t path_bytes = strlen(address->dir) + 1 + bytes + sizeof SOCKET_SUFFIX;
    const size_t path_bytes_max = sizeof((struct sockaddr_un *)NULL)->sun_path;
    if (path_bytes > path_bytes_max)
        return err_set(e, SHD_ERANGE, "socket path in '%.100s' has %zu bytes, at most %zu",
                       address->dir, path_bytes - 1, path_bytes_max - 1);
    if (address->count == SHD_OWNERS_MAX)
        return err_set(e, SHD_ERANGE, "more than %u daemons at '%s'", SHD_OWNERS_MAX, address->dir);
    char **grown = sys_realloc(address->devices, (address->count + 1) * sizeof *grown);
    if (grown == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " device names", address->count + 1);
    address->devices = grown;
    char *copy = sys_malloc(bytes + 1);
    if (copy == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a device name");
    memcpy(copy, name, bytes);
    copy[bytes] = '\0';
    address->devices[address->count++] = copy;
    return SHD_OK;
}

/* One of each pair, or all where there are none. */
static int parse_side(struct address *address, const char *list, bool second, struct shd_err *e)
{
    for (;;) {
        const size_t bytes = strcspn(list, ","), first_bytes = strcspn(list, ",+");
        const char *name = second ? list + first_bytes + 1 : list;
        const size_t name_bytes = second ? bytes - first_bytes - 1 : first_bytes;
        if (second && first_bytes == bytes)
            return err_set(e, SHD_EINVAL,
                           "device '%.*s' in the address has no replica, and others have: write "
                           "\"DIR?cpu0+cpu2,cpu1+cpu3\"",
                           (int)(bytes < 64 ? bytes : 64), list);
        int r = check_device(address, name, name_bytes, e);
        if (r == SHD_OK)
            r = add_device(address, name, name_bytes, e);
        if (r != SHD_OK)
            return r;
        list += bytes;
        if (*list == '\0')
            return SHD_OK;
        list++;
    }
}

static int parse_devices(struct address *address, const char *list, struct shd_err *e)
{
    int r = parse_side(address, list, /* second= */ false, e);
    address->owners = address->count;
    if (r == SHD_OK && strchr(list, '+') != NULL)
        r = parse_side(address, list, /* second= */ true, e);
    return r;
}

static int open_failed(const char *dir, struct shd_err *e)
{
    if (errno == ENOENT || errno == ENOTDIR)
        return err_set(e, SHD_ENOENT,
                       "no runtime directory '%.100s': start shardd, or set " WHERE_ENV
                       " to the directory of its sockets",
                       dir);
    if (errno == EACCES || errno == EPERM)
        return err_sys(e, SHD_EAUTH, "open runtime directory '%.100s'", dir);
    return err_sys(e, SHD_EIO, "open runtime directory '%.100s'", dir);
}

static int list_devices(struct address *address, struct shd_err *e)
{
    DIR *dir = opendir(address->dir);
    if (dir == NULL)
        return open_failed(address->dir, e);
    int r = SHD_OK;
    const struct dirent *entry;
    while (r == SHD_OK && (entry = readdir(dir)) != NULL) {
        const size_t bytes = strlen(entry->d_name), suffix_bytes = strlen(SOCKET_SUFFIX);
        if (bytes <= suffix_bytes || entry->d_name[0] == '.' ||
            strcmp(entry->d_name + bytes - suffix_bytes, SOCKET_SUFFIX) != 0)
            continue;
        r = add_device(address, entry->d_name, bytes - suffix_bytes, e);
    }
    closedir(dir);
    if (r != SHD_OK)
        return r;
    if (address->count == 0)
        return err_set(e, SHD_ENOENT,
                       "no daemon in '%.80s' (no *%s there): start one with "
                       "shardd --device cpu0 --runtime-dir '%.80s'",
                       address->dir, SOCKET_SUFFIX, address->dir);
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" REPLICAS_FILE, address->dir) < (int)sizeof path &&
        access(path, F_OK) == 0)
        return err_set(
            e, SHD_EINVAL,
            "the daemons of '%.80s' are pairs (" REPLICAS_FILE "), and a bare directory "
            "would take each for an owner: take the address that `shardctl host` prints, "
            "as '%.80s?cpu0+cpu2,cpu3+cpu1'",
            address->dir, address->dir);
    qsort(address->devices, address->count, sizeof *address->devices, compare_devices);
    address->owners = address->count;
    return SHD_OK;
}

static int parse(const char *text, struct address *ret_address, struct shd_err *e)
{
    struct address address = { 0 };
    if (strncmp(text, "local:", 6) == 0) {
        if (text[6] != '\0')
            return err_set(e, SHD_EINVAL, "address '%.100s': nothing may follow \"local:\"", text);
        address.local = true;
        *ret_address = address;
        return SHD_OK;
    }
    const char *query = strchr(text, '?');
    const size_t dir_bytes = query != NULL ? (size_t)(query - text) : strlen(text);
    if (dir_bytes == 0)
        return err_set(e, SHD_EINVAL,
                       "address '%.100s' names no directory: write DIR, "
                       "DIR?cpu0,cpu1 or local:",
                       text);
    address.dir = sys_strdup(text);
    if (address.dir == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the address");
    address.dir[dir_bytes] = '\0';
    const int r = query != NULL ? parse_devices(&address, query + 1, e) : list_devices(&address, e);
    if (r != SHD_OK)
        address_free(&address);
    else
        *ret_address = address;
    return r;
}

int address_parse(const char *text, struct address *ret_address, struct shd_err *e)
{
    struct where where;
    int r = where_find(text, &where, e);
    if (r == SHD_OK)
        r = parse(where.address, ret_address, e);
    if (r == SHD_ENOENT && e != NULL)
        snprintf(e->text + strlen(e->text), sizeof e->text - strlen(e->text), "%s",
                 where_said(where.by));
    return r;
}
void address_free(struct address *address)
{
    for (uint32_t i = 0; i < address->count; i++)
        free(address->devices[i]);
    free(address->devices);
    free(address->dir);
    *address = (struct address){ 0 };
}
