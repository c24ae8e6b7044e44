/* Starting the daemons and workers of `shardctl run`: their command lines and environments. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/ctl/child.h"
#include "client/ctl/ctl.h"
#include "client/ctl/environ.h"
#include "client/ctl/notify.h"
#include "client/ctl/supervise.h"
#include "proto/check.h"

#define ADDRESS_BYTES (RUNDIR_PATH_BYTES + RUN_DAEMONS_MAX * 8u + 8u)

/* Processors this process may use: a taskset or cpuset counts. */
static uint32_t processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (uint32_t)online : 1;
}

static uint32_t share_of(uint32_t processors_total, uint32_t count)
{
    return processors_total / count > 0 ? processors_total / count : 1;
}

/* shardd beside our own binary, else by PATH. */
static void find_shardd(char *buf, size_t bytes)
{
    char self[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n > 0) {
        self[n] = '\0';
        char *slash = strrchr(self, '/');
        if (slash != NULL) {
            *slash = '\0';
            if (snprintf(buf, bytes, "%s/shardd", self) < (int)bytes && access(buf, X_OK) == 0)
                return;
        }
    }
    snprintf(buf, bytes, "shardd");
}

/* Start c with its output relayed behind its name (relayed) or written straight to ours. */
static int launch(struct run *r, struct run_child *c, struct child_spawn *spawn, bool relayed,
                  struct shd_err *e)
{
    int out = -1;
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0)
        return err_sys(e, SHD_EIO, "open /dev/null");
    spawn->files = &r->files;
    spawn->in = relayed || isatty(STDIN_FILENO) ? null : STDIN_FILENO;
    spawn->out = STDOUT_FILENO;
    spawn->err = STDERR_FILENO;
    int rc = SHD_OK;
    if (relayed) {
        rc = relay_open(&c->relay, &r->loop, c->name, &out, e);
        spawn->out = out;
        spawn->err = out;
    }
    if (rc == SHD_OK)
        rc = child_spawn(spawn, &c->pid, e);
    c->running = rc == SHD_OK;
    if (rc != SHD_OK)
        relay_close(&c->relay);
    if (out >= 0)
        close(out);
    close(null);
    return rc;
}

static int launch_daemon(struct run *r, uint32_t index, uint32_t threads, const struct environ *env,
                         struct shd_err *e)
{
    struct run_child *c = &r->daemons[index];
    snprintf(c->name, sizeof(c->name), "cpu%" PRIu32, index);
    char count[12];
    snprintf(count, sizeof(count), "%" PRIu32, threads);
    char *argv[] = { r->shardd,
                     (char[]){ "--device" },
                     c->name,
                     (char[]){ "--runtime-dir" },
                     r->dir.path,
                     (char[]){ "--threads" },
                     count,
                     (char[]){ "--log-level" },
                     r->options->verbose ? (char[]){ "info" } : (char[]){ "warn" },
                     NULL };
    struct child_spawn spawn = { .argv = argv, .envp = env->vars };
    const int rc = launch(r, c, &spawn, /* relayed= */ true, e);
    if (rc != SHD_OK)
        return err_prefix(e, "daemon %s", c->name);
    r->daemons_running++;
    run_note(r, "started daemon %s pid=%ld threads=%" PRIu32, c->name, (long)c->pid, threads);
    return SHD_OK;
}

int launch_daemons(struct run *r, struct shd_err *e)
{
    const struct run_options *o = r->options;
    struct environ env;
    int rc = environ_new(&env, e);
    if (rc != SHD_OK)
        return rc;
    find_shardd(r->shardd, sizeof(r->shardd));
    rc = environ_set(&env, e, "NOTIFY_SOCKET", "%s/" NOTIFY_FILE, r->dir.path);
    const uint32_t threads = o->threads_per_daemon > 0 ? o->threads_per_daemon
                                                       : share_of(processors(), o->daemons);
    for (uint32_t i = 0; i < o->daemons && rc == SHD_OK; i++)
        rc = launch_daemon(r, i, threads, &env, e);
    environ_free(&env);
    return rc;
}

/* A TCP port that was free a moment ago, for frameworks that want MASTER_PORT; 0: none found. */
static unsigned free_port(void)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t bytes = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unsigned port = 0;
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0 &&
        getsockname(fd, (struct sockaddr *)&a, &bytes) == 0)
        port = ntohs(a.sin_port);
    if (fd >= 0)
        close(fd);
    return port;
}

/* "DIR?cpu0,cpu1": these daemons, in this order. */
static void address_of(const struct run *r, char *buf, size_t bytes)
{
    size_t used = (size_t)snprintf(buf, bytes, "%s", r->dir.path);
    for (uint32_t i = 0; i < r->options->daemons; i++) {
        CHECK(used < bytes);
        used += (size_t)snprintf(buf + used, bytes - used, "%ccpu%" PRIu32, i == 0 ? '?' : ',', i);
    }
    CHECK(used < bytes);
}

/* What all workers share: where the daemons are, and torchrun's names for who works here. */
static int worker_environ(const struct run *r, struct environ *env, struct shd_err *e)
{
    char address[ADDRESS_BYTES];
    address_of(r, address, sizeof(address));
    const uint32_t workers = r->options->workers;
    const uint32_t threads = share_of(processors(), workers);
    int rc = environ_new(env, e);
    if (rc != SHD_OK)
        return rc;
    rc = environ_set(env, e, "SHARDD_ADDRESS", "%s", address);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "WORLD_SIZE", "%" PRIu32, workers);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "LOCAL_WORLD_SIZE", "%" PRIu32, workers);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "GROUP_RANK", "0");
    if (rc == SHD_OK)
        rc = environ_set(env, e, "MASTER_ADDR", "127.0.0.1");
    if (rc == SHD_OK)
        rc = environ_set(env, e, "MASTER_PORT", "%u", free_port());
    if (rc == SHD_OK && !environ_has(env, "OPENBLAS_NUM_THREADS"))
        rc = environ_set(env, e, "OPENBLAS_NUM_THREADS", "%" PRIu32, threads);
    if (rc == SHD_OK && !environ_has(env, "OMP_NUM_THREADS"))
        rc = environ_set(env, e, "OMP_NUM_THREADS", "%" PRIu32, threads);
    if (rc != SHD_OK)
        environ_free(env);
    return rc;
}

int launch_workers(struct run *r, struct shd_err *e)
{
    struct environ env;
    int rc = worker_environ(r, &env, e);
    if (rc != SHD_OK)
        return rc;
    for (uint32_t rank = 0; rank < r->options->workers && rc == SHD_OK; rank++) {
        struct run_child *c = &r->workers[rank];
        snprintf(c->name, sizeof(c->name), "rank %" PRIu32, rank);
        rc = environ_set(&env, e, "RANK", "%" PRIu32, rank);
        if (rc == SHD_OK)
            rc = environ_set(&env, e, "LOCAL_RANK", "%" PRIu32, rank);
        struct child_spawn spawn = { .argv = r->options->command, .envp = env.vars };
        if (rc == SHD_OK)
            rc = launch(r, c, &spawn, /* relayed= */ rank > 0, e);
        if (rc != SHD_OK) {
            rc = err_prefix(e, "worker %s", c->name);
            break;
        }
        r->workers_running++;
        run_note(r, "started worker %s pid=%ld", c->name, (long)c->pid);
    }
    environ_free(&env);
    return rc;
}
