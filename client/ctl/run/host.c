/* See host.h. What it starts and keeps is supervise.c's, as of `shardctl up --foreground`; here is
 * which host this is, and what it has. */
#include "client/ctl/run/host.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/run/host_refill.h"
#include "client/ctl/run/host_replicas.h"
#include "client/ctl/run/run_flags.h"
#include "client/ctl/run/supervise.h"
#include "client/session/address.h"
#include "proto/share/cluster.h"

static const char host_about[] =
    "Be this host's part of a cluster, in the foreground: start the daemons that the cluster file\n"
    "names for it and the relay by which workers of other hosts reach them, and workers here "
    "those\n"
    "of other hosts; keep their memory, and start again what dies. As `shardctl up --foreground`,\n"
    "with a relay. A host that has no daemons has the relay alone.\n"
    "\n"
    "On stdout comes the line by which workers here find all daemons of the cluster. Then it says\n"
    "READY=1 (sd_notify), and stays until SIGTERM: the relay ends first, then the daemons, and "
    "their\n"
    "state with them. A batch system that kills a host's processes kills its state: let it not\n"
    "(docs/hosts.md has Slurm's flags).";

static const char host_more[] =
    "NAME: --name, else $SLURMD_NODENAME, else the host name, whole or up to its first dot.\n"
    "\n"
    "--files: daemons write and read checkpoints for workers and tools of any host of the cluster, "
    "as\n"
    "they do for those here: say it on all, where all have the directory at the same path.\n"
    "\n"
    "--resume DIR, said on all hosts: the host of the first daemon (the lowest name in FILE) saves "
    "in\n"
    "DIR, which all have at the same path. When a host was lost with its daemons' state, and is "
    "back,\n"
    "all daemons go back to DIR's latest checkpoint, as they do where all begin anew: as "
    "`shardctl\n"
    "checkpoint DIR --every STEPS --resume` does it. Workers end then, and are to be started "
    "again.\n"
    "\n"
    "--replicas 2, said on all hosts: each slice of a model is held by two daemons, on different "
    "hosts.\n"
    "The pairs follow from FILE, and stand in the address: PRIMARY+SECONDARY. --arbiter is where "
    "the\n"
    "hosts agree who is out, by compare-and-swap: file:DIR, a directory that all have (NFS, "
    "Lustre),\n"
    "or etcd:http://HOST:PORT/PREFIX (with several members http://A:PORT,http://B:PORT/PREFIX).\n"
    "Workers here read of it in replicas.json of the runtime directory; `shardctl hosts` shows "
    "it.\n"
    "--refill DIR, said on all hosts: when this one was lost, and is back with empty daemons, they "
    "are\n"
    "filled by a checkpoint in DIR, which all have at the same path, while training goes on: as "
    "by\n"
    "`shardctl hosts --in NAME --by DIR`, tried every 10 s. It says --files as well.\n"
    "\n"
    "examples:\n"
    "  shardctl keys new keys/cluster.json a=10.77.0.1:7100/cpu0,cpu1 b=10.77.0.2:7100/cpu2\n"
    "  shardctl host --cluster keys/cluster.json --name a\n"
    "  shardctl host --cluster keys/cluster.json --resume /shared/run1 --keep 3\n"
    "  shardctl host --cluster keys/cluster.json --replicas 2 --arbiter file:/shared/arbiter\n"
    "  srun --no-kill -K0 -N2 --ntasks-per-node=1 shardctl host --cluster keys/cluster.json\n"
    "\n"
    "default DIR, and environment: as of `shardctl up`\n"
    "\n"
    "exit codes:\n"
    "  0  a signal (INT, TERM, HUP, QUIT) has ended it\n"
    "  1  not all got ready, DIR is kept already, or something failed for good\n"
    "  2  the command line was wrong\n";

struct host {
    struct updir dir;
    struct devices own; /* that are started */
    char **all;         /* owned, [all_count], of own and others' devices: in the owners' order */
    uint32_t all_count;
    struct run_far far;
    struct host_replicas replicas;
    const char *refill;                                     /* borrowed: a directory; NULL: none */
    char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)]; /* of all of them */
    char name[CLUSTER_NAME_BYTES];
};

/* -- Who and what ------------------------------------------------------------------------------ */

/* Which host of the cluster is this? Errors: SHD_ENOENT, with where the name is from. */
static int find_self(const struct cluster *cluster, const char *given,
                     char name[CLUSTER_NAME_BYTES], struct shd_err *e)
{
    const char *slurm = getenv("SLURMD_NODENAME");
    const char *from = given != NULL   ? "--name"
                       : slurm != NULL ? "$SLURMD_NODENAME"
                                       : "the host name; --name says another";
    char host[CLUSTER_NAME_BYTES] = "";
    if (given != NULL || slurm != NULL)
        snprintf(host, sizeof host, "%s", given != NULL ? given : slurm);
    else if (gethostname(host, sizeof host - 1) < 0)
        return err_sys(e, SHD_EIO, "find out the host name");
    if (given == NULL && slurm == NULL && cluster_by_name(cluster, host) == NULL)
        host[strcspn(host, ".")] = '\0';
    if (cluster_by_name(cluster, host) == NULL)
        return err_set(e, SHD_ENOENT, "the cluster file has no host '%s' (%s)", host, from);
    snprintf(name, CLUSTER_NAME_BYTES, "%s", host);
    return SHD_OK;
}

/* cpu0, cpu1, ... of a host of which the file names none. */
static int count_devices(const struct cluster *cluster, struct host *h, uint32_t daemons,
                         struct shd_err *e)
{
    int r = devices_parse(NULL, daemons, &h->own, e);
    for (uint32_t i = 0; r == SHD_OK && i < h->own.count; i++) {
        const struct cluster_host *other = cluster_by_device(cluster, h->own.names[i]);
        if (other != NULL)
            r = err_set(e, SHD_EEXIST,
                        "--daemons %" PRIu32 " starts %s, which host '%s' has: name this host's "
                        "devices in the cluster file",
                        daemons, h->own.names[i], other->name);
    }
    return r;
}

/* daemons: 0: as the file says. */
static int find_devices(const struct cluster *cluster, struct host *h, uint32_t daemons,
                        struct shd_err *e)
{
    const char *list = cluster_by_name(cluster, h->name)->devices;
    bool any = false;
    for (uint32_t i = 0; i < cluster->count; i++)
        any = any || cluster->hosts[i].devices[0] != '\0';
    if (list[0] == '\0' && daemons > 0)
        return count_devices(cluster, h, daemons, e);
    if (!any)
        return err_set(e, SHD_EINVAL,
                       "the cluster file names no devices: \"devices\": [\"cpu0\"] of a host says "
                       "which daemons it has (`shardctl keys new` NAME=ADDRESS:PORT/cpu0), or "
                       "--daemons how many");
    h->own.listed = true; /* none, too */
    if (list[0] == '\0')
        return SHD_OK;
    const int r = devices_parse(list, 0, &h->own, e);
    if (r == SHD_OK && daemons > 0 && daemons != h->own.count)
        return err_set(e, SHD_EINVAL,
                       "--daemons %" PRIu32 ", and the cluster file names %" PRIu32
                       " devices of host '%s': %.100s",
                       daemons, h->own.count, h->name, list);
    return r;
}

static int compare_devices(const void *a, const void *b)
{
    return address_compare(*(char *const *)a, *(char *const *)b);
}

static int add_name(struct host *h, const char *device, struct shd_err *e)
{
    char **grown = realloc(h->all, (h->all_count + 1) * sizeof *grown);
    char *copy = strdup(device);
    h->all = grown != NULL ? grown : h->all;
    if (grown == NULL || copy == NULL) {
        free(copy);
        return err_set(e, SHD_ENOMEM, "no memory for the devices' names");
    }
    h->all[h->all_count++] = copy;
    return SHD_OK;
}

/* All that workers here may attach to. */
static int list_all(const struct cluster *cluster, struct host *h, struct shd_err *e)
{
    char device[CLUSTER_DEVICE_BYTES];
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < h->own.count; i++)
        r = add_name(h, h->own.names[i], e);
    for (uint32_t i = 0; r == SHD_OK && i < cluster->count; i++) {
        if (strcmp(cluster->hosts[i].name, h->name) == 0)
            continue;
        for (const char *at = cluster->hosts[i].devices;
             r == SHD_OK && cluster_next_device(&at, device);)
            r = add_name(h, device, e);
    }
    if (r == SHD_OK && h->all_count > DEVICES_MAX)
        r = err_set(e, SHD_ERANGE, "%" PRIu32 " devices in the cluster file, at most %u",
                    h->all_count, DEVICES_MAX);
    if (r == SHD_OK)
        qsort(h->all, h->all_count, sizeof *h->all, compare_devices);
    return r;
}

/* What the command line says. */
struct wanted {
    const char *cluster, *name, *dir, *arbiter, *refill; /* NULL: not given */
    uint32_t daemons;                                    /* 0: as the file says */
    uint32_t replicas;
    bool files;
};

/* All hosts pair what the file names, so what is started here has to be there. */
static int pair(const struct cluster *cluster, struct host *h, const char *arbiter,
                struct shd_err *e)
{
    for (uint32_t i = 0; i < h->own.count; i++)
        if (cluster_by_device(cluster, h->own.names[i]) == NULL)
            return err_set(
                e, SHD_EINVAL,
                "--daemons starts %s, which the cluster file does not name, and replicas "
                "are paired by it: name this host's devices there",
                h->own.names[i]);
    return host_replicas_plan(cluster, arbiter, &h->replicas, e);
}

static int know(struct host *h, const struct wanted *w, struct shd_err *e)
{
    struct cluster cluster;
    int r = cluster_load(w->cluster, &cluster, e);
    if (r != SHD_OK)
        return r;
    r = find_self(&cluster, w->name, h->name, e);
    if (r == SHD_OK)
        r = find_devices(&cluster, h, w->daemons, e);
    if (r == SHD_OK)
        r = list_all(&cluster, h, e);
    if (r == SHD_OK && w->replicas > 1)
        r = pair(&cluster, h, w->arbiter, e);
    cluster_free(&cluster);
    h->far = (struct run_far){ .cluster = w->cluster, .host = h->name };
    return r;
}

/* -- Running ----------------------------------------------------------------------------------- */

/* As sd_notify(3) does, but for so long at most; 0: without end. Nobody listens: nothing. */
static void tell_manager(const char *text, time_t wait_s)
{
    const char *path = getenv("NOTIFY_SOCKET");
    const struct timeval wait = { .tv_sec = wait_s };
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    if (path == NULL || path[0] == '\0' || strlen(path) >= sizeof to.sun_path)
        return;
    memcpy(to.sun_path, path, strlen(path) + 1);
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path) +
                                        (path[0] != '@'));
    if (path[0] == '@')
        to.sun_path[0] = '\0';
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) < 0 ||
        sendto(fd, text, strlen(text), MSG_NOSIGNAL, (const struct sockaddr *)&to, bytes) < 0)
        ctl_say("tell the service manager at '%s': %s", path, strerror(errno));
    close(fd);
}

static void *tell_ready(void *arg)
{
    (void)arg;
    tell_manager("READY=1", /* wait_s= */ 0);
    return NULL;
}

/* A manager waits for this one, and may be stopped itself: its socket is full then, and daemons and
 * relay are not to wait. Signals are the loop's. */
static int begin_tell_ready(struct shd_err *e)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, NULL, tell_ready, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0)
        return err_set(e, SHD_ENOMEM, "no thread to tell the service manager: %s",
                       strerror(failed));
    pthread_detach(thread);
    return SHD_OK;
}

static void name_all(const struct host *h, struct devices *ret_all)
{
    *ret_all = (struct devices){ .count = h->all_count, .listed = true };
    for (uint32_t i = 0; i < h->all_count; i++)
        snprintf(ret_all->names[i], sizeof ret_all->names[i], "%s", h->all[i]);
}

/* One host saves and restores for all: that of the first owner, without which nobody trains. */
static bool is_first(const struct host *h)
{
    for (uint32_t i = 0; i < h->own.count; i++)
        if (strcmp(h->own.names[i], h->all[0]) == 0)
            return true;
    return false;
}

static int all_ready(void *arg, struct shd_err *e)
{
    const struct host *h = arg;
    if (h->dir.record.lock_fd >= 0) /* by which other commands here find them */
        rundir_note(&h->dir.record, h->address);
    printf("export SHARDD_ADDRESS='%s'\n", h->address);
    fflush(stdout);
    const int r = h->refill != NULL ? host_refill_begin(h->name, h->dir.path, h->refill, e)
                                    : SHD_OK;
    return r == SHD_OK ? begin_tell_ready(e) : r;
}

static void find_address(struct host *h)
{
    struct devices all;
    name_all(h, &all);
    if (h->replicas.pairs.count > 0)
        pairs_address(&h->replicas.pairs, h->dir.path, h->address, sizeof h->address);
    else
        devices_address(&all, h->dir.path, h->address, sizeof h->address);
}

static int keep(struct host *h, struct run_options *o, const char *path)
{
    struct shd_err e = { 0 };
    if (updir_take(path, &h->own, &h->dir, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    if (h->replicas.pairs.count > 0 &&
        host_replicas_begin(&h->replicas, h->dir.path, h->name, &e) != SHD_OK) {
        updir_release(&h->dir, /* keep_log= */ false);
        return ctl_fail("%s", e.text);
    }
    find_address(h);
    o->address = h->address;
    if (!is_first(h))
        o->resume = NULL;
    o->devices = &h->own;
    o->daemons = h->own.count;
    o->far = &h->far;
    o->dir = h->dir.path;
    o->ready = all_ready;
    o->arg = h;
    const int code = supervise(o);
    tell_manager("STOPPING=1", /* wait_s= */ 1);
    updir_release(&h->dir, /* keep_log= */ false);
    return code == CTL_OK ? CTL_OK : CTL_FAILED;
}

/* -1: to go on, else the exit code. */
static int check_words(const struct wanted *w, const struct run_options *o)
{
    if (w->cluster == NULL)
        return ctl_usage("which cluster? --cluster FILE, as `shardctl keys` makes it");
    if (w->replicas > 1 && w->arbiter == NULL)
        return ctl_usage("--replicas %" PRIu32
                         " needs --arbiter: where the hosts agree who is out, "
                         "file:DIR or etcd:URL/PREFIX",
                         w->replicas);
    if (w->replicas < 2 && w->arbiter != NULL)
        return ctl_usage("--arbiter is where hosts with replicas agree who is out: --replicas 2");
    if (w->replicas < 2 && w->refill != NULL)
        return ctl_usage("--refill fills a host by the replicas of its slices: --replicas 2");
    if (w->refill != NULL && w->refill[0] != '/')
        return ctl_usage("--refill '%.100s': an absolute path is wanted, that all hosts have",
                         w->refill);
    if (o->resume == NULL && (o->keep > 0 || o->checkpoint_every != 100))
        return ctl_usage("--keep and --checkpoint-every say how: --resume DIR says where");
    return -1;
}

int verb_host(int argc, char **argv)
{
    static struct host h;
    struct wanted w = { .replicas = 1 };
    struct run_words words = { 0 };
    struct run_options o = { RUN_DEFAULTS, .checkpoint_every = 100 };
    const struct flag own[] = {
        { "cluster", 'c', FLAG_STRING, "FILE", "hosts, keys and devices, by `shardctl keys`",
          &w.cluster, 0, 0 },
        { "name", 0, FLAG_STRING, "NAME", "this host in FILE (see below)", &w.name, 0, 0 },
        { "daemons", 'n', FLAG_U32, "N", "as many as FILE names; cpu0, ... where it names none",
          &w.daemons, 1, RUN_DAEMONS_MAX },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "where the sockets go (see below)", &w.dir, 0,
          0 },
        { "files", 0, FLAG_BOOL, NULL, "workers of other hosts may save and restore (see below)",
          &w.files, 0, 0 },
        { "replicas", 0, FLAG_U32, "N", "daemons that hold a slice: 1, or 2 (see below)",
          &w.replicas, 1, 2 },
        { "arbiter", 0, FLAG_STRING, "A",
          "where hosts agree who is out: file:DIR or etcd:URL/PREFIX", &w.arbiter, 0, 0 },
        { "refill", 0, FLAG_STRING, "DIR", "with replicas: when this host is out, fill it by DIR",
          &w.refill, 0, 0 },
        { "resume", 0, FLAG_STRING, "DIR", "save in DIR, and go back to its latest (see below)",
          &o.resume, 0, 0 },
        { "checkpoint-every", 0, FLAG_U32, "STEPS", "steps between checkpoints (100)",
          &o.checkpoint_every, 1, UINT32_MAX },
        { "keep", 0, FLAG_U32, "N", "checkpoints to keep (all)", &o.keep, 1, 1000000 },
    };
    struct flag_table table = { .count = 0 };
    FLAGS_ADD(&table, own);
    run_flags_add(&table, &o, &words);
    const struct flags flags = VERB_FLAGS_OF(host, "shardctl host --cluster FILE [FLAGS]", table);
    int code = verb_start(&flags, argc, argv, NULL);
    if (code < 0)
        code = check_words(&w, &o);
    if (code >= 0)
        return code;
    char path[RUNDIR_PATH_BYTES];
    struct shd_err e = { 0 };
    if (run_flags_take(&o, &words, &e) != SHD_OK || know(&h, &w, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    if (updir_path(w.dir, path, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    h.refill = w.refill;
    h.far.files = w.files || o.resume != NULL || w.refill != NULL;
    return keep(&h, &o, path);
}
