/* See sys.h. */
#include "proto/base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define SYS_WAITV      449 /* futex_waitv(), of every machine; headers before 5.16 lack it */
#define WAITV_32       0x02u
#define WAITV_PRIVATE  0x80u
#define WAIT_WORDS_MAX 2u

int (*sys_fault)(enum sys_kind kind);

/* 0, or the errno a test wants this call to fail with (then set). */
static int fault(enum sys_kind kind)
{
    const int code = sys_fault != NULL ? sys_fault(kind) : 0;
    if (code != 0)
        errno = code;
    return code;
}

void *sys_malloc(size_t bytes)
{
    return fault(SYS_ALLOC) != 0 ? NULL : malloc(bytes);
}

void *sys_calloc(size_t count, size_t bytes)
{
    size_t total;
    if (__builtin_mul_overflow(count, bytes,
                               &total)) { /* calloc() checks too; its checkers abort */
        errno = ENOMEM;
        return NULL;
    }
    return fault(SYS_ALLOC) != 0 ? NULL : calloc(count, bytes);
}

void *sys_realloc(void *p, size_t bytes)
{
    return fault(SYS_ALLOC) != 0 ? NULL : realloc(p, bytes);
}

char *sys_strdup(const char *s)
{
    return fault(SYS_ALLOC) != 0 ? NULL : strdup(s);
}

void *sys_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return fault(SYS_MAP) != 0 ? MAP_FAILED : mmap(addr, bytes, prot, flags, fd, offset);
}

void *sys_pages(size_t bytes)
{
    void *pages = sys_mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

void sys_pages_free(void *pages, size_t bytes)
{
    if (pages != NULL)
        munmap(pages, bytes);
}

int sys_memfd(const char *name, unsigned flags)
{
    return fault(SYS_OPEN) != 0 ? -1 : memfd_create(name, flags);
}

int sys_open_at(int dir_fd, const char *path, int flags, unsigned mode)
{
    return fault(SYS_OPEN) != 0 ? -1 : openat(dir_fd, path, flags, mode);
}

int sys_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    return fault(SYS_RESERVE) != 0 ? -1 : fallocate(fd, mode, offset, bytes);
}

ssize_t sys_sendmsg(int fd, const struct msghdr *msg, int flags)
{
    return fault(SYS_SEND) != 0 ? -1 : sendmsg(fd, msg, flags);
}

int sys_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    return fault(SYS_RENAME) != 0 ? -1 : renameat2(from_fd, from, to_fd, to, flags);
}

/* As the kernel's headers have it from 5.16 on. */
struct waitv {
    uint64_t value, address;
    uint32_t flags, zero;
};

int sys_wait_words(const struct sys_word *words, uint32_t count, uint64_t sleep_ns)
{
    struct waitv waits[WAIT_WORDS_MAX];
    CHECK(count <= WAIT_WORDS_MAX);
    if (fault(SYS_WAIT) != 0)
        return -1;
    for (uint32_t i = 0; i < count; i++)
        waits[i] = (struct waitv){ .value = words[i].is,
                                   .address = (uintptr_t)words[i].at,
                                   .flags = WAITV_32 | (words[i].shared ? 0 : WAITV_PRIVATE) };
    const uint64_t sleep_ns_max = 3600 * NS_PER_S; /* a time that can be added to */
    const struct timespec until = clock_timespec(
        clock_now_ns() + (sleep_ns < sleep_ns_max ? sleep_ns : sleep_ns_max));
    return syscall(SYS_WAITV, waits, count, 0, &until, CLOCK_MONOTONIC) < 0 ? -1 : 0;
}

int sys_thread(pthread_t *ret_thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(ret_thread, attr, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void sys_condition(pthread_cond_t *ret_condition)
{
    pthread_condattr_t attr;
    CHECK(pthread_condattr_init(&attr) == 0);
    CHECK(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(ret_condition, &attr) == 0);
    pthread_condattr_destroy(&attr);
}

uint32_t sys_processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN); /* more than a set has room for */
    return online > 0 ? (uint32_t)online : 1;
}
