/* System calls and allocations that a test must be able to fail: one seam for all of them.
 *
 * Everything below behaves as the call it is named after, unless sys_fault is set (by a test, in
 * its own process) and answers nonzero for this kind: then the call is not made, errno is set to
 * the answer, and it fails as the real one would. Not for the steady state of the data path,
 * which allocates nothing.
 */
#ifndef SHD_SYS_H
#define SHD_SYS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

enum sys_kind { SYS_ALLOC, SYS_MAP, SYS_SEND, SYS_OPEN, SYS_RENAME, SYS_RESERVE, SYS_WAIT };

/* NULL in production. Set before other threads start. */
extern int (*sys_fault)(enum sys_kind kind);

void *sys_malloc(size_t bytes);
void *sys_calloc(size_t count, size_t bytes); /* checks count * bytes for overflow */
void *sys_realloc(void *p, size_t bytes);
char *sys_strdup(const char *s);
void *sys_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset);

/* Pages of zeros, which take memory once they are touched. Also for a large table of which few
 * places are ever used: AddressSanitizer marks each place of a calloc(). NULL with an errno: no
 * memory. */
void *sys_pages(size_t bytes);
void sys_pages_free(void *pages, size_t bytes); /* NULL is fine */

int sys_memfd(const char *name, unsigned flags);
int sys_open_at(int dir_fd, const char *path, int flags, unsigned mode);
int sys_fallocate(int fd, int mode, off_t offset, off_t bytes);
ssize_t sys_sendmsg(int fd, const struct msghdr *msg, int flags);
int sys_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);

struct sys_word { /* a futex word */
    const uint32_t *at;
    uint32_t is; /* sleep while it is that */
    bool shared; /* with other processes */
};

/* Sleep until one of the words (at most 2) is changed and woken, or sleep_ns have passed. 0, or -1
 * with an errno: EAGAIN one had changed, ETIMEDOUT, EINTR, ENOSYS Linux before 5.16. */
int sys_wait_words(const struct sys_word *words, uint32_t count, uint64_t sleep_ns);

/* Start a thread with all signals blocked: they are for the threads that expect them. attr: NULL or
 * as pthread_create()'s. Returns an errno; not failed by sys_fault. */
int sys_thread(pthread_t *ret_thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);

/* A condition whose timed waits go by CLOCK_MONOTONIC. */
void sys_condition(pthread_cond_t *ret_condition);

/* Processors that this process may run on: a taskset or a cpuset counts. At least 1. */
uint32_t sys_processors(void);

#endif
