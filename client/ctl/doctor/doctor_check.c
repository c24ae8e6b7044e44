/* See doctor_check.h. */
#include "client/ctl/doctor/doctor_check.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/clock.h"

#define PROBE_NS_MAX (10 * NS_PER_S)

/* -- Reporting --------------------------------------------------------------------------------- */

void doctor_found(struct doctor *d, enum doctor_level level, const char *remedy, const char *fmt,
                  ...)
{
    char what[DOCTOR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    d->counts[level]++;
    d->found(d, level, what, remedy);
}

/* -- The kernel's files ------------------------------------------------------------------------ */

bool doctor_read_line(const char *path, char *buf, size_t bytes)
{
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    const bool read = fgets(buf, (int)bytes, f) != NULL;
    fclose(f);
    if (read)
        buf[strcspn(buf, "\n")] = '\0';
    return read;
}

bool doctor_read_u64(const char *path, uint64_t *ret_n)
{
    char line[64], *end;
    if (!doctor_read_line(path, line, sizeof(line)) || line[0] < '0' || line[0] > '9')
        return false;
    errno = 0;
    const unsigned long long n = strtoull(line, &end, 10);
    if (*end != '\0' || errno != 0)
        return false;
    *ret_n = n;
    return true;
}

uint64_t doctor_meminfo(const char *key)
{
    char line[128];
    uint64_t bytes = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f != NULL && bytes == 0 && fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, key, strlen(key)) == 0 && line[strlen(key)] == ':')
            bytes = strtoull(line + strlen(key) + 1, NULL, 10) * 1024;
    if (f != NULL)
        fclose(f);
    return bytes;
}

bool doctor_process_name(pid_t pid, char *buf, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
    return doctor_read_line(path, buf, bytes);
}

void *doctor_symbol(const char *const *libraries, const char *name)
{
    void *library = NULL;
    for (; library == NULL && *libraries != NULL; libraries++)
        library = dlopen(*libraries, RTLD_NOW | RTLD_LOCAL);
    return library != NULL ? dlsym(library, name) : NULL;
}

/* -- A child for what may crash or hang -------------------------------------------------------- */

/* In the child: its stdout is the pipe alone, so that what a library prints goes nowhere. */
static void probe_main(void (*fn)(FILE *out), int fd)
{
    const struct rlimit no_core = { 0, 0 };
    setrlimit(RLIMIT_CORE, &no_core);
    FILE *out = fdopen(fd, "w");
    if (out == NULL || freopen("/dev/null", "w", stdout) == NULL ||
        freopen("/dev/null", "w", stderr) == NULL)
        _exit(1);
    fn(out);
    fflush(out);
    _exit(0); /* not exit(): a foreign library's destructors are no business of ours */
}

/* Read until the end of the pipe or the deadline; false at the deadline. */
static bool probe_read(int fd, char *buf, size_t bytes)
{
    const uint64_t deadline_ns = clock_now_ns() + PROBE_NS_MAX;
    size_t used = 0;
    for (;;) {
        const uint64_t now_ns = clock_now_ns();
        struct pollfd p = { .fd = fd, .events = POLLIN };
        if (now_ns >= deadline_ns)
            return false;
        const int ready = poll(&p, 1, (int)((deadline_ns - now_ns) / NS_PER_MS) + 1);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0)
            return false;
        char lost[64];
        const bool full = used + 1 == bytes;
        const ssize_t n = read(fd, full ? lost : buf + used,
                               full ? sizeof(lost) : bytes - 1 - used);
        if (n <= 0)
            break;
        used += full ? 0 : (size_t)n;
    }
    buf[used] = '\0';
    buf[strcspn(buf, "\n")] = '\0';
    return true;
}

bool doctor_probe(void (*fn)(FILE *out), char *buf, size_t bytes)
{
    int fds[2], status = -1;
    if (pipe(fds) < 0)
        return false;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        probe_main(fn, fds[1]);
    }
    close(fds[1]);
    const bool read = pid > 0 && probe_read(fds[0], buf, bytes);
    close(fds[0]);
    if (pid < 0)
        return false;
    kill(pid, SIGKILL); /* has ended, or is not going to */
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return read && buf[0] != '\0';
}
