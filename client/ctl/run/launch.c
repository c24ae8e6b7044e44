/* See launch.h. */
#include "client/ctl/run/launch.h"

#include <arpa/inet.h>
#include <envz.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define PORT_TRIES 100

static uint32_t share_of(uint32_t processors_total, uint32_t count)
{
    return processors_total / count > 0 ? processors_total / count : 1;
}

/* Start c with its output relayed behind its name (relayed) or written straight to ours. */
static int launch(struct run_child *c, struct child_spawn *spawn, const struct environ *env,
                  bool relayed, struct shd_err *e)
{
    int out = -1;
    char **list = NULL;
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0)
        return err_sys(e, SHD_EIO, "open /dev/null");
    spawn->in = relayed || isatty(STDIN_FILENO) ? null : STDIN_FILENO;
    spawn->out = STDOUT_FILENO;
    spawn->err = STDERR_FILENO;
    int rc = environ_list(env, &list, e);
    spawn->envp = list;
    if (rc == SHD_OK && relayed) {
        rc = relay_open(&c->relay, &c->run->loop, c->name, &out, e);
        if (env == &c->run->daemon_env && say_as_json())
            c->relay.prefix[0] = '\0'; /* a line of theirs names its device */
        spawn->out = out;
        spawn->err = out;
    }
    if (rc == SHD_OK)
        rc = child_spawn(spawn, &c->pid, e);
    if (rc == SHD_OK)
        c->state = CHILD_RUNNING;
    else
        relay_close(&c->relay);
    if (out >= 0)
        close(out);
    free(list);
    close(null);
    return rc;
}

/* The variables by which a daemon finds what it stored; none when that is nothing. */
static int listen_environ(const struct kept *kept, struct environ *env, struct shd_err *e)
{
    if (kept->count == 0) {
        envz_remove(&env->text, &env->bytes, "LISTEN_FDS");
        envz_remove(&env->text, &env->bytes, "LISTEN_FDNAMES");
        envz_remove(&env->text, &env->bytes, "LISTEN_PID");
        return SHD_OK;
    }
    char *names = NULL;
    int rc = keeper_names(kept, &names, e);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "LISTEN_FDNAMES", "%s", names);
    free(names);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "LISTEN_FDS", "%" PRIu32, kept->count);
    if (rc == SHD_OK) /* room for the child to write its own pid */
        rc = environ_set(env, e, "LISTEN_PID", "%*s", (int)CHILD_PID_BYTES - 1, "");
    return rc;
}

bool launch_is_far(const struct run_child *c)
{
    return c == &c->run->daemons.list[c->index] && c->index >= c->run->options->daemons;
}

#define DAEMON_WORDS_MAX 20u

/* The relay's own words, behind those that both have. */
static void far_words(const struct run *r, char *argv[DAEMON_WORDS_MAX], size_t n,
                      char own[DEVICES_MAX * DEVICE_NAME_BYTES])
{
    size_t used = 0;
    for (uint32_t i = 0; i < r->options->devices->count; i++)
        used += (size_t)sprintf(own + used, "%s%s", i > 0 ? "," : "",
                                r->options->devices->names[i]);
    argv[n++] = (char *)"--relay";
    CHECK(n + 7 < DAEMON_WORDS_MAX);
    argv[n++] = (char *)"--cluster";
    argv[n++] = (char *)r->options->far->cluster;
    argv[n++] = (char *)"--host";
    argv[n++] = (char *)r->options->far->host;
    if (used > 0) {
        argv[n++] = (char *)"--device";
        argv[n++] = own;
    }
    if (r->options->far->files)
        argv[n++] = (char *)"--files";
}

int launch_daemon(struct run_child *c, struct shd_err *e)
{
    struct run *r = c->run;
    static char own[DEVICES_MAX * DEVICE_NAME_BYTES];
    char count[12];
    const char *asked = getenv(SAY_LEVEL_ENV);
    char *level = asked != NULL && *asked != '\0' ? (char *)asked
                  : r->options->verbose           ? (char[]){ "info" }
                                                  : (char[]){ "warn" };
    snprintf(count, sizeof(count), "%" PRIu32, r->daemon_threads);
    char *argv[DAEMON_WORDS_MAX] = {
        r->shardd, (char *)"--runtime-dir",
        (char *)r->path, /* execve() takes what it does not change as char * */
        (char *)"--log-level", level
    };
    if (launch_is_far(c)) {
        far_words(r, argv, 5, own);
    } else {
        argv[5] = (char *)"--device";
        argv[6] = c->name;
        argv[7] = (char *)"--threads";
        argv[8] = count;
        argv[9] = (char *)"--state";
        argv[10] = (char *)r->options->state;
        argv[11] = (char *)"--snapshots";
        argv[12] = (char *)r->options->snapshots;
        argv[13] = (char *)"--publish";
        argv[14] = (char *)r->options->publish;
    }
    int rc = listen_environ(&c->kept, &r->daemon_env, e);
    /* No .files: with more descriptors than the limit its own loader could open nothing. */
    struct child_spawn spawn = { .argv = argv,
                                 .fds = c->kept.fds,
                                 .fd_count = c->kept.count,
                                 .listen_pid = envz_get(r->daemon_env.text, r->daemon_env.bytes,
                                                        "LISTEN_PID") };
    if (rc == SHD_OK)
        rc = launch(c, &spawn, &r->daemon_env, /* relayed= */ true, e);
    if (rc != SHD_OK)
        return err_prefix(e, "daemon %s", c->name);
    c->ready = false;
    uv_timer_start(&c->timer, r->child_timer, (uint64_t)r->options->timeout_s * 1000, 0);
    if (launch_is_far(c))
        run_note(r, "started the relay pid=%ld", (long)c->pid);
    else
        run_note(r, "started daemon %s pid=%ld threads=%" PRIu32, c->name, (long)c->pid,
                 r->daemon_threads);
    return SHD_OK;
}

static bool is_free(int fd, uint32_t port)
{
    const struct sockaddr_in a = { .sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                   .sin_port = htons((uint16_t)port) };
    return bind(fd, (const struct sockaddr *)&a, sizeof(a)) == 0;
}

/* The first of the TCP ports that whoever connects somewhere gets from the kernel. */
static uint32_t first_given(void)
{
    unsigned first = 32768;
    FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
    if (f != NULL && fscanf(f, "%u", &first) != 1)
        first = 32768;
    if (f != NULL)
        fclose(f);
    return first;
}

/* A TCP port that is free now, for frameworks that want MASTER_PORT and bind it in a while, so none
 * of those that others are given meanwhile; 0: none found. */
static uint32_t free_port(void)
{
    const uint32_t end = first_given(), begin = end / 2 > 1024 ? end / 2 : 1024;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    uint64_t at = clock_now_ns() ^ (uint64_t)getpid() << 32;
    uint32_t port = 0;
    for (int tries = 0; fd >= 0 && begin < end && port == 0 && tries < PORT_TRIES; tries++) {
        at = at * UINT64_C(6364136223846793005) + 1;
        port = begin + (uint32_t)((at >> 33) % (end - begin));
        if (!is_free(fd, port))
            port = 0;
    }
    if (fd >= 0)
        close(fd);
    return port;
}

/* Variables of all workers: the daemons' address, and torchrun's names for how many work here. */
static int worker_environ(const struct run *r, struct environ *env, struct shd_err *e)
{
    char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)];
    if (r->options->address != NULL)
        snprintf(address, sizeof(address), "%s", r->options->address);
    else
        devices_address(r->options->devices, r->path, address, sizeof(address));
    const uint32_t workers = r->options->workers.last;
    const uint32_t threads = share_of(sys_processors(), workers > 0 ? workers : 1);
    const struct {
        const char *name;
        uint32_t value;
        bool only_default;
    } numbers[] = {
        { "WORLD_SIZE", workers, false },
        { "LOCAL_WORLD_SIZE", workers, false },
        { "GROUP_RANK", 0, false },
        { "MASTER_PORT", free_port(), false },
        { "OPENBLAS_NUM_THREADS", threads, true },
        { "OMP_NUM_THREADS", threads, true },
    };
    int rc = environ_set(env, e, "SHARDD_ADDRESS", "%s", address);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "MASTER_ADDR", "127.0.0.1");
    if (rc == SHD_OK && r->options->elastic)
        rc = environ_set(env, e, "SHARDD_ELASTIC", "1");
    for (size_t i = 0; i < ARRAY_SIZE(numbers) && rc == SHD_OK; i++)
        if (!numbers[i].only_default || !envz_entry(env->text, env->bytes, numbers[i].name))
            rc = environ_set(env, e, numbers[i].name, "%" PRIu32, numbers[i].value);
    return rc;
}

int launch_prepare(struct run *r, struct shd_err *e)
{
    const struct run_options *o = r->options;
    r->daemon_threads = o->threads_per_daemon > 0
                            ? o->threads_per_daemon
                            : share_of(sys_processors(), o->daemons > 0 ? o->daemons : 1);
    int rc = child_find_shardd(r->shardd, sizeof(r->shardd), e);
    if (rc == SHD_OK)
        rc = environ_new(&r->daemon_env, e);
    if (rc == SHD_OK)
        rc = environ_set(&r->daemon_env, e, "NOTIFY_SOCKET", "%s/" NOTIFY_FILE, r->path);
    if (rc == SHD_OK && o->watchdog_s > 0)
        rc = environ_set(&r->daemon_env, e, "WATCHDOG_USEC", "%" PRIu64,
                         (uint64_t)o->watchdog_s * 1000 * 1000);
    const bool any = o->workers.last > 0 || o->resume != NULL;
    if (rc == SHD_OK && any)
        rc = environ_new(&r->worker_env, e);
    if (rc == SHD_OK && any)
        rc = worker_environ(r, &r->worker_env, e);
    return rc;
}

void launch_free(struct run *r)
{
    environ_free(&r->daemon_env);
    environ_free(&r->worker_env);
}

int launch_worker(struct run_child *c, struct shd_err *e)
{
    struct run *r = c->run;
    struct environ *env = &r->worker_env;
    int rc = environ_set(env, e, "RANK", "%" PRIu32, c->index);
    if (rc == SHD_OK)
        rc = environ_set(env, e, "LOCAL_RANK", "%" PRIu32, c->index);
    struct child_spawn spawn = { .argv = r->options->command, .files = &r->files };
    if (rc == SHD_OK)
        rc = launch(c, &spawn, env, /* relayed= */ c->index > 0, e);
    if (rc != SHD_OK)
        return err_prefix(e, "worker %s", c->name);
    c->leaving = false;
    run_note(r, "started worker %s pid=%ld", c->name, (long)c->pid);
    return SHD_OK;
}

/* Another shardctl beside the workers, with these words behind its name. */
static int launch_helper(struct run_child *c, char *const *words, struct shd_err *e)
{
    char self[PATH_MAX];
    char *argv[10] = { self };
    struct child_spawn spawn = { .argv = argv };
    for (size_t i = 0; words[i] != NULL; i++) {
        CHECK(i + 2 < ARRAY_SIZE(argv));
        argv[i + 1] = words[i];
    }
    int rc = child_find_self(self, sizeof(self), e);
    if (rc != SHD_OK)
        return rc;
    rc = launch(c, &spawn, &c->run->worker_env, /* relayed= */ true, e);
    if (rc != SHD_OK)
        return err_prefix(e, "%s", c->name);
    run_note(c->run, "started %s pid=%ld", c->name, (long)c->pid);
    return SHD_OK;
}

int launch_restorer(struct run *r, struct shd_err *e)
{
    char *words[] = { (char[]){ "restore" }, (char *)r->options->restore, NULL };
    return launch_helper(&r->helpers.list[RUN_RESTORER], words, e);
}

int launch_saver(struct run *r, bool stays, struct shd_err *e)
{
    const struct run_options *o = r->options;
    char verb[] = "checkpoint", every_flag[] = "--every", keep_flag[] = "--keep";
    char resume_flag[] = "--resume", every[12], keep[12], *words[8];
    size_t n = 0;
    snprintf(every, sizeof(every), "%" PRIu32, o->checkpoint_every);
    snprintf(keep, sizeof(keep), "%" PRIu32, o->keep);
    words[n++] = verb;
    words[n++] = (char *)(o->resume != NULL ? o->resume : o->checkpoint);
    if (o->resume != NULL)
        words[n++] = resume_flag;
    if (stays) {
        words[n++] = every_flag;
        words[n++] = every;
    }
    if (o->keep > 0) {
        words[n++] = keep_flag;
        words[n++] = keep;
    }
    words[n] = NULL;
    return launch_helper(&r->helpers.list[RUN_SAVER], words, e);
}
