/* See task.h. A lock-free stack takes completions from any thread; the loop takes it whole and
 * turns it round, so that tasks run in the order they were finished. Those of the loop's own thread
 * are in a list that it looks at before each sleep. */
#include "daemon/base/task.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"

/* The loop looks at its sockets again after so long: what completes may begin more, which this
 * thread may do itself. */
#define HERE_NS UINT64_C(200000)

struct task_queue {
    uv_async_t async;
    uv_prepare_t prepare;
    uv_idle_t more; /* running while the loop must not sleep */
    struct task *here, **here_last;
    struct daemon *daemon; /* borrowed: its owner */
    uint64_t served;
    _Atomic(struct task *) pushed;
};

static void run(struct task_queue *queue, struct task *task)
{
    if (task->status == SHD_EIO)
        queue->daemon->hooks->device_failed(queue->daemon);
    queue->served++;
    task->fn(task);
}

static void keep_awake(uv_idle_t *more)
{
    (void)more;
}

static void run_here(uv_prepare_t *prepare)
{
    struct task_queue *queue = prepare->data;
    const uint64_t begun_ns = queue->here != NULL ? clock_now_ns() : 0;
    while (queue->here != NULL) {
        struct task *task = queue->here;
        queue->here = task->next;
        if (queue->here == NULL)
            queue->here_last = &queue->here;
        run(queue, task);
        if (clock_now_ns() - begun_ns > HERE_NS)
            break;
    }
    if (queue->here != NULL)
        uv_idle_start(&queue->more, keep_awake);
    else
        uv_idle_stop(&queue->more);
}

static void queue_woken(uv_async_t *async)
{
    struct task_queue *queue = async->data;
    struct task *newest = atomic_exchange_explicit(&queue->pushed, NULL, memory_order_acquire);
    struct task *oldest = NULL;
    while (newest != NULL) {
        struct task *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    while (oldest != NULL) {
        struct task *next = oldest->next; /* fn may use the task again */
        run(queue, oldest);
        oldest = next;
    }
    struct daemon *d = queue->daemon;
    if (!d->kernel_full)
        return;
    d->kernel_full = false;
    d->hooks->kernel_room(d);
}

int task_queue_new(struct daemon *d, struct task_queue **ret_queue, struct shd_err *e)
{
    struct task_queue *queue = sys_calloc(1, sizeof *queue);
    if (queue == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the completion queue");
    const int r = uv_async_init(d->loop, &queue->async, queue_woken);
    if (r < 0) {
        free(queue);
        return err_set(e, SHD_EIO, "start the completion queue: %s", uv_strerror(r));
    }
    uv_prepare_init(d->loop, &queue->prepare);
    uv_prepare_start(&queue->prepare, run_here);
    uv_idle_init(d->loop, &queue->more);
    queue->async.data = queue->prepare.data = queue;
    queue->here_last = &queue->here;
    queue->daemon = d;
    *ret_queue = queue;
    return SHD_OK;
}

uint64_t task_queue_served(const struct task_queue *queue)
{
    return queue->served;
}

void task_queue_close(struct task_queue *queue)
{
    if (queue == NULL)
        return;
    uv_close((uv_handle_t *)&queue->async, NULL);
    uv_close((uv_handle_t *)&queue->prepare, NULL);
    uv_close((uv_handle_t *)&queue->more, NULL);
}

void task_queue_free(struct task_queue *queue)
{
    free(queue);
}

void task_post(struct task *task, int status)
{
    struct task_queue *queue = task->queue;
    task->status = status;
    struct task *head = atomic_load_explicit(&queue->pushed, memory_order_relaxed);
    do {
        task->next = head;
    } while (!atomic_compare_exchange_weak_explicit(&queue->pushed, &head, task,
                                                    memory_order_release, memory_order_relaxed));
    const int r = uv_async_send(&queue->async);
    CHECK(r == 0);
}

void task_post_here(struct task *task, int status)
{
    struct task_queue *queue = task->queue;
    task->status = status;
    task->next = NULL;
    *queue->here_last = task;
    queue->here_last = &task->next;
}

static void kernel_done(struct kern_done *done, int status)
{
    struct task *task = (struct task *)((char *)done - offsetof(struct task, done));
    task_post(task, status);
}

void task_init(struct task *task, struct task_queue *queue, void (*fn)(struct task *task))
{
    *task = (struct task){ .done.fn = kernel_done, .queue = queue, .fn = fn };
}
