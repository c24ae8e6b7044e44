/* shardd: the daemon's command line. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/daemon.h"
#include "proto/base/version.h"

static const char help[] =
    "Usage: shardd --device DEVICE [options]\n"
    "\n"
    "Owns one device's shard of every model: parameters, optimizer state, gradients in\n"
    "progress. Training workers attach over sockets in the runtime directory and may come\n"
    "and go; the state stays here.\n"
    "\n"
    "  --device NAME        device to own: cpu0, cpu1, ... (host memory) or gpu0, gpu1, ...\n"
    "                       (NVIDIA GPU of that number, its memory); one daemon each\n"
    "  --runtime-dir DIR    where the sockets go (default $RUNTIME_DIRECTORY, else /run/shardd);\n"
    "                       made with mode 0700 when missing; members of its group may attach\n"
    "                       if it is open to them (chgrp GROUP DIR && chmod 2750 DIR)\n"
    "  --threads N          compute threads, 1 to 256, or auto (default): one per CPU; of\n"
    "                       host devices, as are the next two\n"
    "  --pin                give each compute thread a CPU of its own\n"
    "  --isa NAME           scalar, avx2, avx512 or auto (default): the best one here; same\n"
    "                       bits in all\n"
    "  --log-level LEVEL    error, warn, info or debug (default info)\n"
    "  --status-address A   answer HTTP at HOST:PORT too, as 127.0.0.1:9464 (see docs/status.md)\n"
    "  --help, --version\n"
    "\n"
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

static const struct option options[] = {
    { "device", required_argument, NULL, 'd' },
    { "runtime-dir", required_argument, NULL, 'r' },
    { "threads", required_argument, NULL, 't' },
    { "pin", no_argument, NULL, 'p' },
    { "isa", required_argument, NULL, 'i' },
    { "log-level", required_argument, NULL, 'l' },
    { "status-address", required_argument, NULL, 's' },
    { "help", no_argument, NULL, 'h' },
    { "version", no_argument, NULL, 'V' },
    { NULL, 0, NULL, 0 },
};

static int usage_error(const char *fmt, const char *value)
{
    fprintf(stderr, "shardd: ");
    fprintf(stderr, fmt, value); /* NOLINT(clang-diagnostic-format-nonliteral): our literals */
    fprintf(stderr, "; see shardd --help\n");
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

/* 0 to go on, else the exit status + 1. */
static int take_option(int option, struct daemon_config *config)
{
    switch (option) {
    case 'd':
        config->device = optarg;
        return 0;
    case 'r':
        config->runtime_dir = optarg;
        return 0;
    case 't':
        if (!parse_threads(optarg, &config->threads))
            return usage_error("--threads '%s' is neither auto nor a number from 1 to 256",
                               optarg) +
                   1;
        return 0;
    case 'p':
        config->pin = true;
        return 0;
    case 'i':
        config->isa = strcmp(optarg, "auto") == 0 ? NULL : optarg;
        return 0;
    case 's':
        config->status_address = optarg;
        return 0;
    case 'l': {
        const enum log_level level = log_level_parse(optarg);
        if (level == 0)
            return usage_error("--log-level '%s' is none of error, warn, info, debug", optarg) + 1;
        log_set_level(level);
        return 0;
    }
    case 'h':
        fputs(help, stdout);
        return EXIT_SUCCESS + 1;
    case 'V':
        printf("shardd %s\n", SHARDD_VERSION);
        return EXIT_SUCCESS + 1;
    default:
        fprintf(stderr, "see shardd --help\n"); /* getopt has named the option */
        return SHARDD_EXIT_USAGE + 1;
    }
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

int main(int argc, char **argv)
{
    const char *managed = getenv("RUNTIME_DIRECTORY");
    struct daemon_config config = { .runtime_dir = managed != NULL ? managed : "/run/shardd" };
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        const int stop = take_option(option, &config);
        if (stop > 0)
            return stop - 1;
    }
    if (optind < argc)
        return usage_error("unexpected argument '%s'", argv[optind]);
    if (config.device == NULL)
        return usage_error("%s is required", "--device");

    raise_descriptor_limit();
    umask(0007); /* sockets: ours and our group's */
    struct daemon *d;
    struct shd_err e = { 0 };
    if (daemon_new(&config, &d, &e) != SHD_OK) {
        fprintf(stderr, "shardd: %s: %s\n", config.device, e.text);
        return e.code == SHD_EINVAL || e.code == SHD_ENOTSUP ? SHARDD_EXIT_USAGE : EXIT_FAILURE;
    }
    sd_notify(/* unset_environment= */ 0, "READY=1\nSTATUS=Serving");
    if (daemon_run(d) != SHD_OK)
        _exit(EXIT_FAILURE); /* to be restarted */
    /* What the keeper has it keeps: a restart goes on where this ends. */
    const bool drained = d->drain_session != 0;
    sd_notify(/* unset_environment= */ 0, drained ? "STOPPING=1\nSTATUS=Drained" : "STOPPING=1");
    daemon_free(d);
    log_flush(/* all= */ true);
    return drained ? SHARDD_EXIT_DRAINED : EXIT_SUCCESS;
}
