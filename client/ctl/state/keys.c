/* See keys.h. */
#include "client/ctl/state/keys.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "proto/share/cluster.h"

#define PATH_BYTES 4096u

static const char keys_about[] =
    "Make and change the cluster file, by which relays (shardd --relay) of several hosts know "
    "each\n"
    "other: a name, an address and a public key of each. Its private half is in NAME.key beside\n"
    "it: take that to its host, and leave it nowhere else; the cluster file goes to all.";

static const char keys_more[] =
    "words:\n"
    "  new FILE HOST...      a new cluster file, and a key for each host\n"
    "  add FILE HOST...      further hosts\n"
    "  move FILE HOST...     hosts whose relays are at another address; keys and devices stay\n"
    "  remove FILE NAME...   a host makes no connection any more; its key file goes\n"
    "  bulk FILE tcp|ucx     how parameters and gradients cross: within TLS, as all else does, or "
    "by UCX,\n"
    "                        which --not-encrypted has to be said for\n"
    "  list FILE\n"
    "\n"
    "HOST is NAME=ADDRESS:PORT, of its relay; with /cpu0,cpu1 behind it the daemons that it has, "
    "as\n"
    "`shardctl host` starts them. Their names differ in a cluster: their order is that of the "
    "owners.\n"
    "\n"
    "Relays read the file anew for each connection. Connections that are there stay: start the\n"
    "relays again where a host that was removed has to be out at once.\n"
    "\n"
    "examples:\n"
    "  shardctl keys new keys/cluster.json a=10.77.0.1:7100/cpu0,cpu1 b=10.77.0.2:7100/cpu2\n"
    "  scp keys/cluster.json keys/b.key b:keys/ && rm keys/b.key\n"
    "  shardctl keys bulk keys/cluster.json ucx --not-encrypted\n"
    "  shardctl keys move keys/cluster.json b=10.77.0.3:7100    # a spare machine in b's place\n"
    "\nexit code 1: nothing was changed; the reason is on stderr\n";

/* NAME=ADDRESS:PORT, NAME=ADDRESS:PORT/cpu0,cpu1 */
static int parse_host(const char *word, struct cluster_host *ret_host, struct shd_err *e)
{
    const char *equals = strchr(word, '=');
    const size_t bytes = equals != NULL ? (size_t)(equals - word) : 0;
    const size_t address_bytes = equals != NULL ? strcspn(equals + 1, "/") : 0;
    const char *slash = equals != NULL ? equals + 1 + address_bytes : "";
    if (bytes == 0 || bytes >= sizeof ret_host->name || address_bytes >= sizeof ret_host->address ||
        strlen(slash) > sizeof ret_host->devices || strcmp(slash, "/") == 0)
        return err_set(e, SHD_EINVAL,
                       "'%.100s' is not NAME=ADDRESS:PORT, or NAME=ADDRESS:PORT/cpu0,cpu1", word);
    memcpy(ret_host->name, word, bytes);
    ret_host->name[bytes] = '\0';
    memcpy(ret_host->address, equals + 1, address_bytes);
    ret_host->address[address_bytes] = '\0';
    snprintf(ret_host->devices, sizeof ret_host->devices, "%s", slash + (*slash == '/'));
    return SHD_OK;
}

static void forget_key(const char *file, const char *name)
{
    char path[PATH_BYTES];
    struct shd_err ignored;
    if (cluster_key_path(file, name, path, sizeof path, &ignored) == SHD_OK)
        unlink(path);
}

/* Names are looked at before a key is made: none is left where one of them cannot be. */
static int add_host(const char *file, const char *word, struct cluster *cluster, struct shd_err *e)
{
    struct cluster_host host = { .name = "" };
    char path[PATH_BYTES];
    int r = parse_host(word, &host, e);
    if (r == SHD_OK && cluster_by_name(cluster, host.name) != NULL)
        r = err_set(e, SHD_EEXIST, "host '%s' is there already", host.name);
    if (r == SHD_OK && strchr(host.name, '/') != NULL)
        r = err_set(e, SHD_EINVAL, "host name '%s' has a '/'", host.name);
    if (r == SHD_OK)
        r = cluster_key_path(file, host.name, path, sizeof path, e);
    if (r == SHD_OK)
        r = cluster_key_new(path, host.key, e);
    if (r != SHD_OK)
        return r;
    r = cluster_add(cluster, &host, e);
    if (r != SHD_OK)
        unlink(path);
    return r;
}

static int add_hosts(const char *file, char **words, int count, struct cluster *cluster,
                     struct shd_err *e)
{
    const uint32_t before = cluster->count;
    int r = count > 0 ? SHD_OK : err_set(e, SHD_EINVAL, "no host: NAME=ADDRESS:PORT");
    for (int i = 0; r == SHD_OK && i < count; i++)
        r = add_host(file, words[i], cluster, e);
    if (r == SHD_OK)
        r = cluster_save(file, cluster, e);
    for (uint32_t i = before; r != SHD_OK && i < cluster->count; i++)
        forget_key(file, cluster->hosts[i].name);
    return r;
}

static int move_hosts(const char *file, char **words, int count, struct cluster *cluster,
                      struct shd_err *e)
{
    int r = count > 0 ? SHD_OK : err_set(e, SHD_EINVAL, "no host: NAME=ADDRESS:PORT");
    for (int i = 0; r == SHD_OK && i < count; i++) {
        struct cluster_host host = { .name = "" };
        r = parse_host(words[i], &host, e);
        if (r == SHD_OK && host.devices[0] != '\0')
            r = err_set(e, SHD_EINVAL,
                        "'%.100s': a host that moves keeps its devices; wanted is "
                        "NAME=ADDRESS:PORT",
                        words[i]);
        if (r == SHD_OK)
            r = cluster_move(cluster, host.name, host.address, e);
    }
    return r == SHD_OK ? cluster_save(file, cluster, e) : r;
}

static int remove_hosts(const char *file, char **words, int count, struct cluster *cluster,
                        struct shd_err *e)
{
    int r = count > 0 ? SHD_OK : err_set(e, SHD_EINVAL, "no host: NAME");
    for (int i = 0; r == SHD_OK && i < count; i++)
        r = cluster_remove(cluster, words[i], e);
    if (r == SHD_OK)
        r = cluster_save(file, cluster, e);
    for (int i = 0; r == SHD_OK && i < count; i++)
        forget_key(file, words[i]);
    return r;
}

/* Whoever has it not encrypted says so. */
static int set_bulk(const char *file, char **words, int count, bool bare, struct cluster *cluster,
                    struct shd_err *e)
{
    const char *word = count == 1 ? words[0] : "";
    const bool ucx = strcmp(word, "ucx") == 0;
    if (!ucx && strcmp(word, "tcp") != 0)
        return err_set(e, SHD_EINVAL, "bulk '%.20s': tcp or ucx", word);
    if (ucx && !bare)
        return err_set(
            e, SHD_EINVAL,
            "ucx does not encrypt parameters and gradients: say --not-encrypted as well, "
            "where the network between the hosts is theirs alone");
    if (!ucx && bare)
        return err_set(e, SHD_EINVAL,
                       "--not-encrypted: bulk tcp is always encrypted; leave it out, or say ucx");
    cluster->bulk = ucx ? CLUSTER_UCX : CLUSTER_TCP;
    return cluster_save(file, cluster, e);
}

static void list_hosts(const char *file, const struct cluster *cluster)
{
    if (cluster->bulk == CLUSTER_UCX)
        puts("bulk " CLUSTER_UCX_SAID);
    for (uint32_t i = 0; i < cluster->count; i++) {
        const struct cluster_host *host = &cluster->hosts[i];
        char path[PATH_BYTES];
        struct shd_err ignored;
        const bool has_key = cluster_key_path(file, host->name, path, sizeof path, &ignored) ==
                                 SHD_OK &&
                             access(path, F_OK) == 0;
        printf("%-16s %-24s ", host->name, host->address);
        for (uint32_t k = 0; k < 8; k++)
            printf("%02x", host->key[k]);
        printf("...  %s%s\n", host->devices[0] != '\0' ? host->devices : "-",
               has_key ? "  its private key is here" : "");
    }
}

static int change(const char *what, const char *file, char **words, int count, bool bare,
                  struct shd_err *e)
{
    struct cluster cluster = { 0 };
    int r = SHD_OK;
    const bool makes = strcmp(what, "new") == 0;
    const bool bulk = strcmp(what, "bulk") == 0;
    if (bare && !bulk)
        r = err_set(e, SHD_EINVAL, "--not-encrypted is of `keys bulk FILE ucx`");
    else if (makes && access(file, F_OK) == 0)
        r = err_set(e, SHD_EEXIST, "'%.100s' is there already", file);
    else if (!makes)
        r = cluster_load(file, &cluster, e);
    if (r == SHD_OK && strcmp(what, "list") == 0)
        list_hosts(file, &cluster);
    else if (r == SHD_OK && bulk)
        r = set_bulk(file, words, count, bare, &cluster, e);
    else if (r == SHD_OK && strcmp(what, "move") == 0)
        r = move_hosts(file, words, count, &cluster, e);
    else if (r == SHD_OK && strcmp(what, "remove") == 0)
        r = remove_hosts(file, words, count, &cluster, e);
    else if (r == SHD_OK)
        r = add_hosts(file, words, count, &cluster, e);
    cluster_free(&cluster);
    return r;
}

int verb_keys(int argc, char **argv)
{
    static const char *const known[] = { "new", "add", "move", "remove", "bulk", "list" };
    bool bare = false;
    const struct flag table[] = {
        { "not-encrypted", 0, FLAG_BOOL, NULL,
          "bulk ucx: parameters and gradients cross as they are", &bare, 0, 0 },
    };
    const struct flags flags = {
        .usage = "shardctl keys new|add|move|remove|bulk|list FILE [HOST...|tcp|ucx]",
        .about = keys_about,
        .more = keys_more,
        .table = table,
        .count = ARRAY_SIZE(table)
    };
    struct shd_err e = { 0 };
    int count;
    const int code = verb_start_words(&flags, argc, argv, &count);
    if (code >= 0)
        return code;
    bool is_known = false;
    for (size_t i = 0; count > 0 && i < ARRAY_SIZE(known); i++)
        is_known = is_known || strcmp(argv[1], known[i]) == 0;
    if (!is_known || count < 2)
        return ctl_usage("usage: %s", flags.usage);
    return change(argv[1], argv[2], argv + 3, count - 2, bare, &e) == SHD_OK
               ? CTL_OK
               : ctl_fail("%s", e.text);
}
