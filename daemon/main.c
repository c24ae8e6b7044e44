/* shardd: the daemon's command line. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "daemon/base/log.h"
#include "daemon/base/manager.h"
#include "daemon/base/state.h"
#include "daemon/daemon.h"
#include "daemon/relay/relay.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/flags.h"
#include "proto/base/memory.h"
#include "proto/base/process.h"
#include "proto/base/version.h"
#include "proto/share/reserve.h"

#define NEXT "\n                                " /* a further line of a flag's help */

static const char about[] =
    "Owns one device's shard of every model: parameters, optimizer state, gradients in\n"
    "progress. Training workers attach over sockets in the runtime directory and may come\n"
    "and go; the state stays here.";

static const char more[] =
    "Sockets: DIR/DEVICE.sock (credentials, file descriptors), DIR/DEVICE.zmq (requests),\n"
    "DIR/DEVICE.status (HTTP: curl --unix-socket DIR/DEVICE.status http://localhost/status).\n"
    "Tells its service manager READY=1 (sd_notify) when it can be reached.\n"
    "Exit status: 0 after SIGTERM or SIGINT, 10 after one when drained (shardctl drain), 1 when "
    "it\n"
    "cannot start or its device failed, 2 for wrong usage or a device or instruction set that is\n"
    "not here.\n"
    "\n"
    "Example: shardd --device cpu0 --runtime-dir /run/shardd --threads 2\n"
    "Normally started by systemd or by `shardctl run`.\n";

/* The reason is in e. */
static int usage_error(const struct shd_err *e)
{
    fprintf(stderr, "shardd: %s; see shardd --help\n", e->text);
    return SHARDD_EXIT_USAGE;
}

static bool parse_threads(const char *text, uint32_t *ret_threads)
{
    if (strcmp(text, "auto") == 0) { /* a unit file cannot leave a flag out */
        *ret_threads = 0;
        return true;
    }
    char *end;
    errno = 0;
    const long n = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || n < 1 || n > 256)
        return false;
    *ret_threads = (uint32_t)n;
    return true;
}

struct words { /* flags that are parsed further */
    const char *threads, *isa, *log_level, *log_format;
    bool core_dumps, version, relay;
    uint64_t quota_model; /* 0: none */
    struct flag_list quotas;
    struct relay_config other; /* of --relay */
    struct flag_list from;     /* its words */
};

static int take_relay(const struct words *w, const struct daemon_config *config, struct shd_err *e)
{
    const struct relay_config *other = &w->other;
    if (!w->relay &&
        (other->cluster != NULL || other->host != NULL || w->from.count > 0 || other->files))
        return err_set(e, SHD_EINVAL, "--cluster, --host, --from and --files are for --relay");
    if (!w->relay)
        return config->device != NULL ? SHD_OK : err_set(e, SHD_EINVAL, "--device is required");
    if (other->cluster == NULL || other->host == NULL)
        return err_set(e, SHD_EINVAL, "--relay needs --cluster and --host");
    return SHD_OK;
}

static int take_quotas(const struct words *w, struct daemon_config *config, struct shd_err *e)
{
    int r = SHD_OK;
    if (w->relay && (w->quota_model > 0 || w->quotas.count > 0))
        return err_set(e, SHD_EINVAL, "--relay has no models: quotas are the daemons'");
    if (w->quota_model > 0)
        quota_models(w->quota_model, &config->quota);
    for (uint32_t i = 0; r == SHD_OK && i < w->quotas.count; i++)
        r = quota_parse(w->quotas.items[i], &config->quota, e);
    return r;
}

static int take_words(const struct words *w, struct daemon_config *config, struct shd_err *e)
{
    const enum log_level level = log_level_parse(w->log_level);
    if (!parse_threads(w->threads, &config->threads))
        return err_set(e, SHD_EINVAL, "--threads '%s' is neither auto nor a number from 1 to 256",
                       w->threads);
    if (level == 0)
        return err_set(e, SHD_EINVAL, "--log-level '%s' is none of error, warn, info, debug",
                       w->log_level);
    if (!log_set_format(w->log_format))
        return err_set(e, SHD_EINVAL, "--log-format '%s' is neither text nor json", w->log_format);
    if (take_relay(w, config, e) != SHD_OK || take_quotas(w, config, e) != SHD_OK)
        return e->code;
    if (process_core_dumps() < 0)
        return err_set(e, SHD_EINVAL, "SHARDD_CORE_DUMPS '%s' is neither 0 nor 1",
                       getenv("SHARDD_CORE_DUMPS"));
    log_set_level(level);
    log_set_device(w->relay ? "relay" : config->device);
    config->isa = strcmp(w->isa, "auto") == 0 ? NULL : w->isa;
    if (!w->core_dumps && process_core_dumps() == 0 && !process_close())
        log_warn("op=start device=%s why=\"core dumps and ptrace cannot be turned off: %s\" "
                 "do=\"let nobody else run programs as this user\"",
                 w->relay ? "relay" : config->device, strerror(errno));
    return SHD_OK;
}

static const char *environment(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : otherwise;
}

/* The flags, in the order of the help. */
static void add_device_flags(struct flag_table *table, struct words *w,
                             struct daemon_config *config)
{
    const struct flag rows[] = {
        { "device", 0, FLAG_STRING, "NAME",
          "device to own: cpu0, cpu1, ... (host memory) or gpu0, gpu1," NEXT
          "... (NVIDIA GPU of that number, its memory); one daemon each",
          &config->device, 0, 0 },
        { "runtime-dir", 0, FLAG_STRING, "DIR",
          "where the sockets go ($RUNTIME_DIRECTORY, /run/shardd); made" NEXT
          "with mode 0700 when missing; members of its group may attach" NEXT
          "if it is open to them (chgrp GROUP DIR && chmod 2750 DIR)",
          &config->runtime_dir, 0, 0 },
        { "threads", 0, FLAG_STRING, "N",
          "compute threads, 1 to 256, or auto (auto): one per CPU; of" NEXT
          "host devices, as are the next two",
          &w->threads, 0, 0 },
        { "pin", 0, FLAG_BOOL, NULL,
          "give each compute thread a CPU of its own; cpuI with T threads" NEXT
          "takes those from number I*T on that it may use",
          &config->pin, 0, 0 },
        { "isa", 0, FLAG_STRING, "NAME",
          "scalar, avx2, avx512 or auto (auto): the widest one here, or" NEXT
          "beside it what it finds to be quicker; same bits in all",
          &w->isa, 0, 0 },
        { "log-level", 0, FLAG_STRING, "LEVEL",
          "error, warn, info or debug ($SHARDD_LOG_LEVEL, info)", &w->log_level, 0, 0 },
        { "log-format", 0, FLAG_STRING, "F",
          "lines of text or json ($SHARDD_LOG_FORMAT, text); with the" NEXT
          "time where they do not go to the journal",
          &w->log_format, 0, 0 },
        { "state", 0, FLAG_STRING, "WHERE",
          "where models' parameters, moments and sums are: memory, or" NEXT
          "file:DIR, files without names on a disk (memory); cpuI only",
          &config->homes.state, 0, 0 },
        { "publish", 0, FLAG_STRING, "WHERE",
          "where what workers read is: memory or file:DIR (memory); cpuI" NEXT "only",
          &config->homes.publish, 0, 0 },
        { "snapshots", 0, FLAG_STRING, "WHERE",
          "where models' snapshots are: memory or file:DIR (memory)", &config->homes.snapshots, 0,
          0 },
    };
    FLAGS_ADD(table, rows);
}

static void add_other_flags(struct flag_table *table, struct words *w, struct daemon_config *config)
{
    const struct flag rows[] = {
        { "status-address", 0, FLAG_STRING, "A",
          "answer HTTP at HOST:PORT too, as 127.0.0.1:9464 (see" NEXT "docs/status.md)",
          &config->status_address, 0, 0 },
        { "quota-model", 0, FLAG_BYTES, "BYTES",
          "the most memory of this device that a model may take, as 8GiB", &w->quota_model, 0, 0 },
        { "quota", 0, FLAG_LIST, "WHO=BYTES",
          "likewise all models together that WHO has made: uid:1000," NEXT
          "gid:team; uid:*, gid:*: each that is not named; may be given" NEXT "again",
          &w->quotas, 0, 0 },
        { "core-dumps", 0, FLAG_BOOL, NULL,
          "allow them, and debuggers of the same user" NEXT "($SHARDD_CORE_DUMPS=1)",
          &w->core_dumps, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

static void add_relay_flags(struct flag_table *table, struct words *w)
{
    const struct flag rows[] = {
        { "relay", 0, FLAG_BOOL, NULL,
          "be no daemon: let workers of other hosts attach to the daemons of" NEXT
          "--runtime-dir (--device cpu0,cpu1: these), and stand in there for" NEXT
          "other hosts' daemons (--from)",
          &w->relay, 0, 0 },
        { "cluster", 0, FLAG_STRING, "FILE",
          "of --relay: hosts, addresses and public keys, by `shardctl keys`", &w->other.cluster, 0,
          0 },
        { "host", 0, FLAG_STRING, "NAME",
          "of --relay: this host in FILE; its key is NAME.key beside it", &w->other.host, 0, 0 },
        { "from", 0, FLAG_LIST, "HOST:cpu0,cpu1",
          "of --relay: a host that has daemons cpu0, cpu1, ...; once for each" NEXT
          "(all others that have devices in FILE; then HOST alone will do)",
          &w->from, 0, 0 },
        { "files", 0, FLAG_BOOL, NULL,
          "of --relay: workers of other hosts may have the daemons here" NEXT
          "save and restore: for a directory that all hosts have",
          &w->other.files, 0, 0 },
        { "version", 0, FLAG_BOOL, NULL, "print the version", &w->version, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

/* -1 to go on, else the exit status. *ret_relay: it is to be one, of *ret_other. */
static int parse(int argc, char **argv, struct daemon_config *config, bool *ret_relay,
                 struct relay_config *ret_other)
{
    static struct words w; /* what is found stays */
    w = (struct words){ .threads = "auto",
                        .isa = "auto",
                        .log_level = environment("SHARDD_LOG_LEVEL", "info"),
                        .log_format = environment("SHARDD_LOG_FORMAT", "text") };
    struct flag_table table = { .count = 0 };
    add_device_flags(&table, &w, config);
    add_other_flags(&table, &w, config);
    add_relay_flags(&table, &w);
    const struct flags flags = { .usage = "shardd --device DEVICE [FLAGS]",
                                 .about = about,
                                 .more = more,
                                 .table = table.rows,
                                 .count = table.count };
    struct shd_err e = { 0 };
    int rest = argc;
    const enum flags_result r = flags_parse(&flags, argc, argv, &rest, &e);
    if (r == FLAGS_HELP)
        flags_help(&flags, stdout);
    else if (r == FLAGS_OK && w.version)
        printf("shardd %s\n", SHARDD_VERSION);
    if (r == FLAGS_HELP || w.version)
        return EXIT_SUCCESS;
    if (r == FLAGS_OK && rest < argc)
        err_set(&e, SHD_EINVAL, "unexpected argument '%s'", argv[rest]);
    else if (r == FLAGS_OK)
        take_words(&w, config, &e);
    *ret_relay = w.relay;
    *ret_other = w.other;
    ret_other->from = w.from.items;
    ret_other->from_count = w.from.count;
    return e.code == SHD_OK ? -1 : usage_error(&e);
}

/* Each session takes a few descriptors: use what the system grants us. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        log_warn("op=start why=\"cannot raise the descriptor limit: %s\" do=\"set LimitNOFILE= or "
                 "ulimit -n if sessions are refused\"",
                 strerror(errno));
}

/* All models' memory is asked for in turn with this directory's other daemons. */
static void share_memory(const struct daemon_config *config)
{
    const struct memory_room room = memory_room();
    char text[MEMORY_TEXT_BYTES];
    reserve_share(config->runtime_dir);
    log_info("op=start device=%s memory=\"%s\"", config->device, memory_room_text(&room, text));
    if (room.ignored[0] != '\0')
        log_warn(
            "op=start device=%s why=\"%s: ignored\" do=\"if this cgroup has a limit of memory, "
            "daemons do not see it\"",
            config->device, room.ignored);
}

static bool said_ready; /* else the manager had no room for it */

static void say_ready(void)
{
    said_ready = manager_tell("READY=1\nSTATUS=Relaying", /* fd= */ -1, /* wait_us= */ 0) != EAGAIN;
}

/* Where the service manager looks after it (WatchdogSec=, --watchdog). */
static void say_alive(void)
{
    if (!said_ready)
        say_ready();
    if (sd_watchdog_enabled(/* unset_environment= */ 0, NULL) > 0)
        manager_tell("WATCHDOG=1", /* fd= */ -1, /* wait_us= */ 0);
}

/* Its threads have no end of their own: the process has. */
static int be_relay(const struct daemon_config *config, struct relay_config *other)
{
    struct shd_err e = { 0 };
    other->runtime_dir = config->runtime_dir;
    other->devices = config->device;
    reserve_share(config->runtime_dir);
    umask(0007);
    const int r = relay_run(other, say_ready, say_alive, &e);
    if (r != SHD_OK)
        fprintf(stderr, "shardd: relay: %s\n", e.text);
    log_flush(/* all= */ true);
    _exit(r == SHD_OK ? EXIT_SUCCESS : r == SHD_EINVAL ? SHARDD_EXIT_USAGE : EXIT_FAILURE);
}

int main(int argc, char **argv)
{
    const char *managed = getenv("RUNTIME_DIRECTORY");
    struct daemon_config config = { .runtime_dir = managed != NULL ? managed : "/run/shardd" };
    struct relay_config other;
    bool relay;
    const int code = parse(argc, argv, &config, &relay, &other);
    if (code >= 0)
        return code;
    raise_descriptor_limit();
    if (relay)
        return be_relay(&config, &other);
    share_memory(&config);
    umask(0007); /* sockets: ours and our group's */
    struct daemon *d;
    struct shd_err e = { 0 };
    if (daemon_new(&config, &d, &e) != SHD_OK) {
        fprintf(stderr, "shardd: %s: %s\n", config.device, e.text);
        return e.code == SHD_EINVAL || e.code == SHD_ENOTSUP ? SHARDD_EXIT_USAGE : EXIT_FAILURE;
    }
    if (daemon_run(d) != SHD_OK)
        _exit(EXIT_FAILURE); /* to be restarted */
    /* The keeper keeps what it has, so that a restart goes on where this ends. */
    const bool drained = d->drain_session != 0;
    manager_tell(drained ? "STOPPING=1\nSTATUS=Drained" : "STOPPING=1", /* fd= */ -1, US_PER_S);
    daemon_free(d);
    log_flush(/* all= */ true);
    return drained ? SHARDD_EXIT_DRAINED : EXIT_SUCCESS;
}
