/* See replicas.h. */
#include "proto/files/replicas.h"

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

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"

#define SCHEMA       1
#define FILE_NEW     ".replicas.json.new"
#define FILE_MODE    0640
#define HASH_BYTES   8u /* of SHA-256: clusters of one place are few */
#define SHA256_BYTES 32u

void replicas_free(struct replicas *r)
{
    free(r->arbiter);
    free(r->hosts);
    *r = (struct replicas){ 0 };
}

const struct replicas_host *replicas_by_name(const struct replicas *r, const char *name)
{
    for (uint32_t i = 0; i < r->host_count; i++)
        if (strcmp(r->hosts[i].name, name) == 0)
            return &r->hosts[i];
    return NULL;
}

const struct replicas_host *replicas_host_of(const struct replicas *r, const char *device)
{
    for (uint32_t i = 0; i < r->host_count; i++)
        if (cluster_has_device(r->hosts[i].devices, device))
            return &r->hosts[i];
    return NULL;
}

static int no_memory(struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM, "no memory for the hosts with replicas");
}

/* Of a host that is there: its devices count. */
static int count_devices(const struct replicas_host *host, struct replicas *r, struct shd_err *e)
{
    char device[CLUSTER_DEVICE_BYTES];
    for (const char *at = host->devices; cluster_next_device(&at, device);)
        r->device_count++;
    return r->device_count <= REPLICAS_DEVICES_MAX
               ? SHD_OK
               : err_set(e, SHD_ERANGE, "more than %u devices", REPLICAS_DEVICES_MAX);
}

/* -- Of a cluster file ------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    const struct replicas_host *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* Names with their NULs and keys, in the order of the names: the same however a file has them. */
static int hash(const struct cluster *cluster, struct replicas *r, struct shd_err *e)
{
    unsigned char digest[SHA256_BYTES];
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    bool well = ctx != NULL && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1;
    for (uint32_t i = 0; well && i < r->host_count; i++) {
        const struct cluster_host *host = cluster_by_name(cluster, r->hosts[i].name);
        CHECK(host != NULL);
        well = EVP_DigestUpdate(ctx, host->name, strlen(host->name) + 1) == 1 &&
               EVP_DigestUpdate(ctx, host->key, sizeof host->key) == 1;
    }
    well = well && EVP_DigestFinal_ex(ctx, digest, NULL) == 1;
    EVP_MD_CTX_free(ctx);
    if (!well)
        return err_set(e, SHD_EINTERNAL, "libcrypto could not make a SHA-256");
    for (uint32_t i = 0; i < HASH_BYTES; i++)
        snprintf(r->cluster + 2 * (size_t)i, 3, "%02x", digest[i]);
    return SHD_OK;
}

static int take_cluster(const struct cluster *cluster, struct replicas *r, struct shd_err *e)
{
    int code = SHD_OK;
    r->hosts = sys_calloc(cluster->count + 1, sizeof *r->hosts);
    if (r->hosts == NULL)
        return no_memory(e);
    for (uint32_t i = 0; code == SHD_OK && i < cluster->count; i++) {
        struct replicas_host *host = &r->hosts[r->host_count];
        if (cluster->hosts[i].devices[0] == '\0')
            continue;
        snprintf(host->name, sizeof host->name, "%s", cluster->hosts[i].name);
        snprintf(host->devices, sizeof host->devices, "%s", cluster->hosts[i].devices);
        code = count_devices(host, r, e);
        r->host_count++;
    }
    if (code != SHD_OK)
        return code;
    if (r->host_count == 0)
        return err_set(e, SHD_EINVAL,
                       "the cluster file names no devices: replicas are on those of several hosts");
    qsort(r->hosts, r->host_count, sizeof *r->hosts, compare_names);
    return hash(cluster, r, e);
}

int replicas_of(const struct cluster *cluster, const char *arbiter, struct replicas *ret_replicas,
                struct shd_err *e)
{
    struct replicas r = { 0 };
    if (strlen(arbiter) > REPLICAS_ARBITER_MAX)
        return err_set(e, SHD_ERANGE, "arbiter '%.60s...' has %zu bytes, at most %u", arbiter,
                       strlen(arbiter), REPLICAS_ARBITER_MAX);
    r.arbiter = sys_strdup(arbiter);
    const int code = r.arbiter != NULL ? take_cluster(cluster, &r, e) : no_memory(e);
    if (code == SHD_OK)
        *ret_replicas = r;
    else
        replicas_free(&r);
    return code;
}

/* -- Reading ----------------------------------------------------------------------------------- */

/* An array of names to "cpu0,cpu1". */
static int take_devices(const json_t *array, size_t index, struct replicas_host *host,
                        struct shd_err *e)
{
    size_t used = 0;
    if (!json_is_array(array) || json_array_size(array) == 0)
        return err_set(e, SHD_EINVAL, "hosts[%zu].devices is no array of names", index);
    for (size_t i = 0; i < json_array_size(array); i++) {
        const char *name = json_string_value(json_array_get(array, i));
        if (name == NULL || name[0] == '\0' || strchr(name, ',') != NULL)
            return err_set(e, SHD_EINVAL, "hosts[%zu].devices[%zu] is no device's name", index, i);
        used += (size_t)snprintf(host->devices + used, sizeof host->devices - used, "%s%s",
                                 used > 0 ? "," : "", name);
        if (used >= sizeof host->devices)
            return err_set(e, SHD_ERANGE, "hosts[%zu].devices has names of more than %zu bytes",
                           index, sizeof host->devices - 1);
    }
    const int r = cluster_check_devices(host->devices, e);
    return r == SHD_OK ? r : err_prefix(e, "hosts[%zu]", index);
}

/* Of hosts[index], beside those before it. */
static int take_host(const json_t *item, size_t index, struct replicas *r, struct shd_err *e)
{
    struct replicas_host *host = &r->hosts[index];
    const char *name = json_string_value(json_object_get(item, "name"));
    if (json_object_size(item) != 2 || name == NULL)
        return err_set(e, SHD_EINVAL, "hosts[%zu] is no object of name and devices", index);
    if (!arbiter_name_is_one(name))
        return err_set(e, SHD_EINVAL, "hosts[%zu].name is '%.80s', which is no host's name", index,
                       name);
    int code = take_devices(json_object_get(item, "devices"), index, host, e);
    if (code == SHD_OK)
        code = count_devices(host, r, e);
    if (code != SHD_OK)
        return code;
    if (index > 0 && strcmp(r->hosts[index - 1].name, name) >= 0)
        return err_set(e, SHD_EINVAL, "hosts[%zu] is '%s' behind '%s': they ascend", index, name,
                       r->hosts[index - 1].name);
    char device[CLUSTER_DEVICE_BYTES];
    for (const char *at = host->devices; cluster_next_device(&at, device);) {
        const struct replicas_host *other = replicas_host_of(r, device); /* of those before it */
        if (other != NULL)
            return err_set(e, SHD_EINVAL, "hosts '%s' and '%s' both have a device '%s'",
                           other->name, name, device);
    }
    memcpy(host->name, name, strlen(name) + 1);
    r->host_count++;
    return SHD_OK;
}

static int take_hosts(const json_t *hosts, struct replicas *r, struct shd_err *e)
{
    const size_t count = json_array_size(hosts); /* 0: of what is no array */
    if (count == 0 || count > CLUSTER_HOSTS_MAX)
        return err_set(e, count == 0 ? SHD_EINVAL : SHD_ERANGE,
                       "its 'hosts' is no array of 1 to %u hosts", CLUSTER_HOSTS_MAX);
    r->hosts = sys_calloc(count, sizeof *r->hosts);
    if (r->hosts == NULL)
        return no_memory(e);
    int code = SHD_OK;
    for (size_t i = 0; code == SHD_OK && i < count; i++)
        code = take_host(json_array_get(hosts, i), i, r, e);
    return code;
}

static int take(const json_t *root, struct replicas *r, struct shd_err *e)
{
    const json_t *schema = json_object_get(root, "schema");
    const char *arbiter = json_string_value(json_object_get(root, "arbiter"));
    const char *cluster = json_string_value(json_object_get(root, "cluster"));
    if (!json_is_integer(schema) || json_integer_value(schema) != SCHEMA)
        return err_set(e, SHD_EINVAL, "its 'schema' is not %d: it is of another build", SCHEMA);
    if (json_object_size(root) != 4 || arbiter == NULL || cluster == NULL)
        return err_set(e, SHD_EINVAL, "it is no object of schema, arbiter, cluster and hosts");
    if (strlen(arbiter) > REPLICAS_ARBITER_MAX)
        return err_set(e, SHD_ERANGE, "its 'arbiter' has %zu bytes, at most %u", strlen(arbiter),
                       REPLICAS_ARBITER_MAX);
    if (!arbiter_name_is_one(cluster))
        return err_set(e, SHD_EINVAL, "its 'cluster' is '%.80s', which is no name", cluster);
    memcpy(r->cluster, cluster, strlen(cluster) + 1);
    r->arbiter = sys_strdup(arbiter);
    return r->arbiter != NULL ? take_hosts(json_object_get(root, "hosts"), r, e) : no_memory(e);
}

int replicas_parse(const char *text, size_t bytes, struct replicas *ret_replicas, struct shd_err *e)
{
    struct replicas r = { 0 };
    json_error_t why;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    const int code = root != NULL ? take(root, &r, e)
                                  : err_set(e, SHD_EINVAL, "line %d: %s", why.line, why.text);
    json_decref(root);
    if (code == SHD_OK)
        *ret_replicas = r;
    else
        replicas_free(&r);
    return code;
}

int replicas_read(const char *dir, struct replicas *ret_replicas, struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    const int fd = sys_open_at(AT_FDCWD, dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open directory '%.120s'", dir);
    int code = ckpt_read_text(fd, REPLICAS_FILE, /* links= */ false, REPLICAS_FILE_MAX, &text,
                              &bytes, e);
    close(fd);
    if (code != SHD_OK)
        return err_prefix(e, "in '%.120s'", dir);
    code = replicas_parse(text, bytes, ret_replicas, e);
    free(text);
    return code == SHD_OK ? code : err_prefix(e, "'%.100s/" REPLICAS_FILE "'", dir);
}

/* -- Writing ----------------------------------------------------------------------------------- */

static json_t *host_json(const struct replicas_host *host)
{
    char device[CLUSTER_DEVICE_BYTES];
    json_t *devices = json_array();
    for (const char *at = host->devices; cluster_next_device(&at, device);)
        json_array_append_new(devices, json_string(device));
    return json_pack("{s:s, s:o}", "name", host->name, "devices", devices);
}

static char *to_text(const struct replicas *r)
{
    json_t *hosts = json_array();
    for (uint32_t i = 0; i < r->host_count; i++)
        json_array_append_new(hosts, host_json(&r->hosts[i]));
    json_t *root = json_pack("{s:i, s:s, s:s, s:o}", "schema", SCHEMA, "arbiter", r->arbiter,
                             "cluster", r->cluster, "hosts", hosts);
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    return text;
}

/* The group's whatever the umask is: who may enter the directory may read it, as its sockets. */
static int write_new(int dir_fd, const char *text, struct shd_err *e)
{
    unlinkat(dir_fd, FILE_NEW, 0); /* of a keeper that was killed */
    const int fd = sys_open_at(dir_fd, FILE_NEW,
                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make '" FILE_NEW "'");
    int code = ckpt_pwrite(fd, text, strlen(text), 0, FILE_NEW, e);
    if (code == SHD_OK && fchmod(fd, FILE_MODE) < 0)
        code = err_sys(e, SHD_EIO, "chmod '" FILE_NEW "'");
    close(fd);
    if (code == SHD_OK && sys_renameat2(dir_fd, FILE_NEW, dir_fd, REPLICAS_FILE, 0) < 0)
        code = err_sys(e, SHD_EIO, "rename '" FILE_NEW "'");
    if (code != SHD_OK)
        unlinkat(dir_fd, FILE_NEW, 0);
    return code;
}

int replicas_write(const char *dir, const struct replicas *r, struct shd_err *e)
{
    const int fd = sys_open_at(AT_FDCWD, dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open directory '%.120s'", dir);
    char *text = to_text(r);
    const int code = text != NULL ? write_new(fd, text, e) : no_memory(e);
    free(text);
    close(fd);
    return code == SHD_OK ? code : err_prefix(e, "in '%.120s'", dir);
}
