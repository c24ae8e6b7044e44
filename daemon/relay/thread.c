/* See thread.h. */
#include "daemon/relay/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/relay/relay.h"
#include "proto/base/sys.h"

#define STACK_BYTES ((size_t)1 << 20)

struct task {
    struct relay *relay;
    void (*main)(struct relay *relay, void *arg);
    void *arg;
};

static void *thread_main(void *arg)
{
    const struct task task = *(struct task *)arg;
    free(arg);
    task.main(task.relay, task.arg);
    __atomic_fetch_sub(&task.relay->threads, 1, __ATOMIC_RELAXED);
    return NULL;
}

int relay_thread(struct relay *relay, void (*main)(struct relay *relay, void *arg), void *arg,
                 struct shd_err *e)
{
    pthread_attr_t attr;
    pthread_t thread;
    struct task *task = sys_malloc(sizeof *task);
    if (task == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a thread");
    *task = (struct task){ .relay = relay, .main = main, .arg = arg };
    if (__atomic_fetch_add(&relay->threads, 1, __ATOMIC_RELAXED) >= RELAY_THREADS_MAX) {
        __atomic_fetch_sub(&relay->threads, 1, __ATOMIC_RELAXED);
        free(task);
        return err_set(e, SHD_EBUSY, "more than %u connections", RELAY_THREADS_MAX);
    }
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    const int failed = sys_thread(&thread, &attr, thread_main, task);
    pthread_attr_destroy(&attr);
    if (failed == 0)
        return SHD_OK;
    __atomic_fetch_sub(&relay->threads, 1, __ATOMIC_RELAXED);
    free(task);
    return err_set(e, SHD_ENOMEM, "no thread: %s", strerror(failed));
}
