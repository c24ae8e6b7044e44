/* See cluster.h. */
#include "proto/share/cluster.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include "proto/base/sys.h"
#include "proto/share/listen.h"

#define NAME_CHARS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
#define HEX_BYTES  (2 * CLUSTER_KEY_BYTES)

#define DEVICE_CHARS "abcdefghijklmnopqrstuvwxyz0123456789"

void cluster_free(struct cluster *cluster)
{
    free(cluster->hosts);
    *cluster = (struct cluster){ 0 };
}

const struct cluster_host *cluster_by_name(const struct cluster *cluster, const char *name)
{
    for (uint32_t i = 0; i < cluster->count; i++)
        if (strcmp(cluster->hosts[i].name, name) == 0)
            return &cluster->hosts[i];
    return NULL;
}

const struct cluster_host *cluster_by_key(const struct cluster *cluster,
                                          const uint8_t key[CLUSTER_KEY_BYTES])
{
    for (uint32_t i = 0; i < cluster->count; i++)
        if (memcmp(cluster->hosts[i].key, key, CLUSTER_KEY_BYTES) == 0)
            return &cluster->hosts[i];
    return NULL;
}

/* -- Devices ----------------------------------------------------------------------------------- */

bool cluster_next_device(const char **list, char ret_device[CLUSTER_DEVICE_BYTES])
{
    const size_t bytes = strcspn(*list, ",");
    if (**list == '\0')
        return false;
    snprintf(ret_device, CLUSTER_DEVICE_BYTES, "%.*s", (int)bytes, *list);
    *list += bytes + ((*list)[bytes] == ',');
    return true;
}

bool cluster_has_device(const char *list, const char *device)
{
    const size_t bytes = strlen(device);
    for (const char *at = list; bytes > 0 && (at = strstr(at, device)) != NULL; at += bytes)
        if ((at == list || at[-1] == ',') && (at[bytes] == ',' || at[bytes] == '\0'))
            return true;
    return false;
}

int cluster_check_devices(const char *list, struct shd_err *e)
{
    const char *at = list;
    if (list[0] == '\0')
        return SHD_OK;
    for (;;) {
        char device[CLUSTER_DEVICE_BYTES];
        const size_t bytes = strcspn(at, ",");
        if (bytes == 0 || bytes >= sizeof device || strspn(at, DEVICE_CHARS) != bytes)
            return err_set(e, SHD_EINVAL,
                           "'%.*s' in '%.60s' is no device's name: small letters and digits make "
                           "one, at most %zu",
                           (int)(bytes < 40 ? bytes : 40), at, list, sizeof device - 1);
        snprintf(device, sizeof device, "%.*s", (int)bytes, at);
        at += bytes;
        if (*at == ',' && cluster_has_device(at + 1, device))
            return err_set(e, SHD_EINVAL, "device '%s' is in '%.60s' twice", device, list);
        if (*at == '\0')
            return SHD_OK;
        at++;
    }
}

const struct cluster_host *cluster_by_device(const struct cluster *cluster, const char *device)
{
    for (uint32_t i = 0; i < cluster->count; i++)
        if (cluster_has_device(cluster->hosts[i].devices, device))
            return &cluster->hosts[i];
    return NULL;
}

static int check_no_others(const struct cluster *cluster, const struct cluster_host *host,
                           struct shd_err *e)
{
    char device[CLUSTER_DEVICE_BYTES];
    for (const char *at = host->devices; cluster_next_device(&at, device);) {
        const struct cluster_host *other = cluster_by_device(cluster, device);
        if (other != NULL)
            return err_set(e, SHD_EEXIST,
                           "hosts '%s' and '%s' both have a device '%s': names have to differ in a "
                           "cluster",
                           other->name, host->name, device);
    }
    return SHD_OK;
}

/* -- Changing ---------------------------------------------------------------------------------- */

static int check_host(const struct cluster_host *host, struct shd_err *e)
{
    char name[LISTEN_HOST_BYTES];
    const char *port;
    if (host->name[0] == '\0' || host->name[0] == '.' ||
        host->name[strspn(host->name, NAME_CHARS)] != '\0')
        return err_set(e, SHD_EINVAL,
                       "host name '%s': letters, digits, '-', '_' and '.' make one, and no '.' "
                       "in front",
                       host->name);
    if (!listen_split(host->address, name, &port))
        return err_set(e, SHD_EINVAL, "host '%s': address '%s' is not HOST:PORT", host->name,
                       host->address);
    const int r = cluster_check_devices(host->devices, e);
    return r == SHD_OK ? r : err_prefix(e, "host '%s'", host->name);
}

int cluster_add(struct cluster *cluster, const struct cluster_host *host, struct shd_err *e)
{
    int r = check_host(host, e);
    if (r == SHD_OK)
        r = check_no_others(cluster, host, e);
    if (r != SHD_OK)
        return r;
    if (cluster_by_name(cluster, host->name) != NULL)
        return err_set(e, SHD_EEXIST, "host '%s' is there already", host->name);
    const struct cluster_host *same = cluster_by_key(cluster, host->key);
    if (same != NULL)
        return err_set(e, SHD_EEXIST, "hosts '%s' and '%s' have the same key", same->name,
                       host->name);
    if (cluster->count == CLUSTER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "more than %u hosts", CLUSTER_HOSTS_MAX);
    struct cluster_host *grown = sys_realloc(cluster->hosts, (cluster->count + 1) * sizeof *grown);
    if (grown == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " hosts", cluster->count + 1);
    cluster->hosts = grown;
    grown[cluster->count++] = *host;
    return SHD_OK;
}

int cluster_move(struct cluster *cluster, const char *name, const char *address, struct shd_err *e)
{
    for (uint32_t i = 0; i < cluster->count; i++) {
        if (strcmp(cluster->hosts[i].name, name) != 0)
            continue;
        struct cluster_host moved = cluster->hosts[i];
        snprintf(moved.address, sizeof moved.address, "%s", address);
        const int r = check_host(&moved, e);
        if (r == SHD_OK)
            cluster->hosts[i] = moved;
        return r;
    }
    return err_set(e, SHD_ENOENT, "there is no host '%.64s'", name);
}

int cluster_remove(struct cluster *cluster, const char *name, struct shd_err *e)
{
    for (uint32_t i = 0; i < cluster->count; i++) {
        if (strcmp(cluster->hosts[i].name, name) != 0)
            continue;
        memmove(&cluster->hosts[i], &cluster->hosts[i + 1],
                (cluster->count - i - 1) * sizeof *cluster->hosts);
        cluster->count--;
        return SHD_OK;
    }
    return err_set(e, SHD_ENOENT, "there is no host '%.64s'", name);
}

/* -- The file ---------------------------------------------------------------------------------- */

static bool parse_hex(const char *hex, uint8_t ret_key[CLUSTER_KEY_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    if (strlen(hex) != HEX_BYTES || hex[strspn(hex, digits)] != '\0')
        return false;
    for (uint32_t i = 0; i < CLUSTER_KEY_BYTES; i++)
        ret_key[i] = (uint8_t)((strchr(digits, hex[2 * i]) - digits) << 4 |
                               (strchr(digits, hex[2 * i + 1]) - digits));
    return true;
}

/* text[bytes] gets the member's string. */
static int take_text(const json_t *item, size_t index, const char *member, char *text, size_t bytes,
                     struct shd_err *e)
{
    const json_t *value = json_object_get(item, member);
    if (!json_is_string(value))
        return err_set(e, SHD_EINVAL, "hosts[%zu].%s is no string", index, member);
    if (json_string_length(value) >= bytes)
        return err_set(e, SHD_ERANGE, "hosts[%zu].%s has %zu bytes, at most %zu", index, member,
                       json_string_length(value), bytes - 1);
    memcpy(text, json_string_value(value), json_string_length(value) + 1);
    return SHD_OK;
}

/* An array of names to "cpu0,cpu1"; whether they are names cluster_add() says. */
static int take_devices(const json_t *item, size_t index, char list[CLUSTER_DEVICES_BYTES],
                        struct shd_err *e)
{
    const json_t *array = json_object_get(item, "devices");
    size_t used = 0;
    if (!json_is_array(array))
        return err_set(e, SHD_EINVAL, "hosts[%zu].devices is no array", index);
    for (size_t i = 0; i < json_array_size(array); i++) {
        const char *name = json_string_value(json_array_get(array, i));
        if (name == NULL || name[0] == '\0' || strchr(name, ',') != NULL)
            return err_set(e, SHD_EINVAL, "hosts[%zu].devices[%zu] is no device's name", index, i);
        const int n = snprintf(list + used, CLUSTER_DEVICES_BYTES - used, "%s%s",
                               used > 0 ? "," : "", name);
        used += (size_t)n;
        if (used >= CLUSTER_DEVICES_BYTES)
            return err_set(e, SHD_ERANGE, "hosts[%zu].devices has names of more than %u bytes",
                           index, CLUSTER_DEVICES_BYTES - 1);
    }
    return SHD_OK;
}

static int take_host(struct cluster *cluster, const json_t *item, size_t index, struct shd_err *e)
{
    struct cluster_host host = { 0 };
    char hex[HEX_BYTES + 1] = { 0 };
    const bool has_devices = json_object_get(item, "devices") != NULL;
    if (!json_is_object(item) || json_object_size(item) != (has_devices ? 4 : 3))
        return err_set(e, SHD_EINVAL,
                       "hosts[%zu] is no object of name, address and key, perhaps devices", index);
    int r = take_text(item, index, "name", host.name, sizeof host.name, e);
    if (r == SHD_OK)
        r = take_text(item, index, "address", host.address, sizeof host.address, e);
    if (r == SHD_OK)
        r = take_text(item, index, "key", hex, sizeof hex, e);
    if (r == SHD_OK && !parse_hex(hex, host.key))
        r = err_set(e, SHD_EINVAL, "hosts[%zu].key is not %u digits 0-9a-f", index, HEX_BYTES);
    if (r == SHD_OK && has_devices)
        r = take_devices(item, index, host.devices, e);
    return r == SHD_OK ? cluster_add(cluster, &host, e) : r;
}

/* Not encrypted is only what says so itself. */
static int take_bulk(const json_t *root, enum cluster_bulk *ret_bulk, struct shd_err *e)
{
    const json_t *bulk = json_object_get(root, "bulk");
    const json_t *encrypted = json_object_get(root, "encrypted");
    const char *name = bulk != NULL ? json_string_value(bulk) : "tcp";
    if (name == NULL || (strcmp(name, "tcp") != 0 && strcmp(name, "ucx") != 0))
        return err_set(e, SHD_EINVAL, "bulk is '%.20s': \"tcp\" or \"ucx\"",
                       name != NULL ? name : "no string");
    if (encrypted != NULL && !json_is_boolean(encrypted))
        return err_set(e, SHD_EINVAL, "encrypted is neither true nor false");
    const bool bare = strcmp(name, "ucx") == 0;
    if (bare && !json_is_false(encrypted))
        return err_set(e, SHD_EINVAL,
                       "bulk is \"ucx\", which does not encrypt parameters and gradients: write "
                       "\"encrypted\": false beside it, or \"bulk\": \"tcp\", which does");
    if (!bare && json_is_false(encrypted))
        return err_set(e, SHD_EINVAL,
                       "encrypted is false, and bulk is \"tcp\", which always is: leave it out, or "
                       "write \"bulk\": \"ucx\"");
    *ret_bulk = bare ? CLUSTER_UCX : CLUSTER_TCP;
    return SHD_OK;
}

static bool knows_members(const json_t *root)
{
    size_t known = 1; /* hosts */
    known += json_object_get(root, "bulk") != NULL;
    known += json_object_get(root, "encrypted") != NULL;
    return json_is_array(json_object_get(root, "hosts")) && json_object_size(root) == known;
}

static int parse(const char *path, const json_t *root, struct cluster *cluster, struct shd_err *e)
{
    const json_t *hosts = json_object_get(root, "hosts");
    int r = SHD_OK;
    if (!knows_members(root))
        r = err_set(e, SHD_EINVAL,
                    "it is no object of an array, hosts, perhaps bulk and encrypted");
    if (r == SHD_OK)
        r = take_bulk(root, &cluster->bulk, e);
    for (size_t i = 0; r == SHD_OK && i < json_array_size(hosts); i++)
        r = take_host(cluster, json_array_get(hosts, i), i, e);
    return r == SHD_OK ? r : err_prefix(e, "'%.100s'", path);
}

int cluster_load(const char *path, struct cluster *ret_cluster, struct shd_err *e)
{
    struct cluster cluster = { 0 };
    struct stat st;
    json_error_t why;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%.100s'", path);
    int r = SHD_OK;
    json_t *root = NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        r = err_set(e, SHD_EINVAL, "'%.100s' is no file", path);
    else if ((uint64_t)st.st_size > CLUSTER_FILE_MAX)
        r = err_set(e, SHD_ERANGE, "'%.100s' has %jd bytes, at most %" PRIu64, path,
                    (intmax_t)st.st_size, CLUSTER_FILE_MAX);
    else if ((root = json_loadfd(fd, JSON_REJECT_DUPLICATES, &why)) == NULL)
        r = err_set(e, SHD_EINVAL, "'%.100s', line %d: %s", path, why.line, why.text);
    if (r == SHD_OK)
        r = parse(path, root, &cluster, e);
    json_decref(root);
    close(fd);
    if (r == SHD_OK)
        *ret_cluster = cluster;
    else
        cluster_free(&cluster);
    return r;
}

static json_t *host_json(const struct cluster_host *host)
{
    char hex[HEX_BYTES + 1], device[CLUSTER_DEVICE_BYTES];
    for (uint32_t k = 0; k < CLUSTER_KEY_BYTES; k++)
        snprintf(hex + 2 * k, 3, "%02x", host->key[k]);
    json_t *item = json_pack("{s:s, s:s, s:s}", "name", host->name, "address", host->address, "key",
                             hex);
    if (host->devices[0] == '\0')
        return item;
    json_t *devices = json_array();
    for (const char *at = host->devices; cluster_next_device(&at, device);)
        json_array_append_new(devices, json_string(device));
    json_object_set_new(item, "devices", devices);
    return item;
}

static json_t *to_json(const struct cluster *cluster)
{
    json_t *hosts = json_array();
    for (uint32_t i = 0; hosts != NULL && i < cluster->count; i++)
        json_array_append_new(hosts, host_json(&cluster->hosts[i]));
    return cluster->bulk == CLUSTER_UCX
               ? json_pack("{s:o, s:s, s:b}", "hosts", hosts, "bulk", "ucx", "encrypted", 0)
               : json_pack("{s:o}", "hosts", hosts);
}

/* Written whole to a file of its own, which then takes the other's place. */
static int write_file(const char *path, int flags, mode_t mode, const char *text, struct shd_err *e)
{
    const size_t bytes = strlen(text);
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, mode);
    if (fd < 0)
        return err_sys(e, errno == EEXIST ? SHD_EEXIST : SHD_EIO, "make '%.100s'", path);
    int r = SHD_OK;
    for (size_t done = 0; r == SHD_OK && done < bytes;) {
        const ssize_t n = write(fd, text + done, bytes - done);
        if (n < 0 && errno != EINTR)
            r = err_sys(e, SHD_EIO, "write '%.100s'", path);
        done += n > 0 ? (size_t)n : 0;
    }
    if (r == SHD_OK && fsync(fd) < 0)
        r = err_sys(e, SHD_EIO, "write '%.100s'", path);
    close(fd);
    if (r != SHD_OK)
        unlink(path);
    return r;
}

int cluster_save(const char *path, const struct cluster *cluster, struct shd_err *e)
{
    char aside[4096];
    if (snprintf(aside, sizeof aside, "%s.new", path) >= (int)sizeof aside)
        return err_set(e, SHD_ERANGE, "path '%.60s...' is too long", path);
    json_t *root = to_json(cluster);
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " hosts", cluster->count);
    int r = write_file(aside, O_TRUNC, 0644, text, e);
    if (r == SHD_OK && rename(aside, path) < 0) {
        r = err_sys(e, SHD_EIO, "rename '%.100s'", aside);
        unlink(aside);
    }
    free(text);
    return r;
}

/* -- Keys -------------------------------------------------------------------------------------- */

int cluster_key_path(const char *cluster_path, const char *name, char *ret_path, uint64_t bytes,
                     struct shd_err *e)
{
    const char *slash = strrchr(cluster_path, '/');
    const int dir_bytes = slash != NULL ? (int)(slash + 1 - cluster_path) : 0;
    const int n = snprintf(ret_path, bytes, "%.*s%s.key", dir_bytes, cluster_path, name);
    if (n < 0 || (uint64_t)n >= bytes)
        return err_set(e, SHD_ERANGE, "path '%.60s...' is too long", cluster_path);
    return SHD_OK;
}

int cluster_key_public(const EVP_PKEY *key, uint8_t ret_key[CLUSTER_KEY_BYTES], struct shd_err *e)
{
    size_t bytes = CLUSTER_KEY_BYTES;
    if (EVP_PKEY_get_base_id(key) != EVP_PKEY_ED25519 ||
        EVP_PKEY_get_raw_public_key(key, ret_key, &bytes) != 1 || bytes != CLUSTER_KEY_BYTES)
        return err_set(e, SHD_EINVAL, "it is no Ed25519 key");
    return SHD_OK;
}

int cluster_key_new(const char *path, uint8_t ret_key[CLUSTER_KEY_BYTES], struct shd_err *e)
{
    char *text = NULL;
    EVP_PKEY *key = EVP_PKEY_Q_keygen(NULL, NULL, "ED25519");
    BIO *memory = BIO_new(BIO_s_mem());
    int r = SHD_EINTERNAL;
    if (key != NULL && memory != NULL &&
        PEM_write_bio_PKCS8PrivateKey(memory, key, NULL, NULL, 0, NULL, NULL) == 1 &&
        BIO_write(memory, "", 1) == 1 && BIO_get_mem_data(memory, &text) > 0)
        r = write_file(path, O_EXCL, 0600, text, e);
    else
        err_set(e, r, "libcrypto could not make an Ed25519 key");
    if (r == SHD_OK)
        r = cluster_key_public(key, ret_key, e);
    BIO_free(memory);
    EVP_PKEY_free(key);
    return r;
}

int cluster_key_load(const char *path, EVP_PKEY **ret_key, struct shd_err *e)
{
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%.100s'", path);
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > 65536) {
        close(fd);
        return err_set(e, SHD_EINVAL, "'%.100s' is no file of a key", path);
    }
    if ((st.st_mode & 077) != 0 || (st.st_uid != geteuid() && st.st_uid != 0)) {
        close(fd);
        return err_set(e, SHD_EAUTH,
                       "key '%.100s' has mode %04o and is uid %u's: it has to be 0600 and uid %u's",
                       path, (unsigned)st.st_mode & 07777, (unsigned)st.st_uid,
                       (unsigned)geteuid());
    }
    FILE *file = fdopen(fd, "r");
    EVP_PKEY *key = file != NULL ? PEM_read_PrivateKey(file, NULL, NULL, NULL) : NULL;
    if (file != NULL)
        fclose(file);
    else
        close(fd);
    uint8_t ignored[CLUSTER_KEY_BYTES];
    int r = key == NULL ? err_set(e, SHD_EINVAL, "it is no private key in PEM")
                        : cluster_key_public(key, ignored, e);
    if (r == SHD_OK) {
        *ret_key = key;
        return r;
    }
    EVP_PKEY_free(key);
    return err_prefix(e, "'%.100s'", path);
}
