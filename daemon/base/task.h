/* Work that other threads finish: its completion runs on the loop thread. */
#ifndef SHD_TASK_H
#define SHD_TASK_H

#include <stdint.h>

#include "kernels/done.h"

struct daemon;
struct shd_err;
struct task_queue;

/* Embed; pass &task->done to a kernel. fn runs on the loop thread, once per use. */
struct task {
    struct kern_done done;
    struct task_queue *queue; /* set by task_init() */
    void (*fn)(struct task *task);
    int status;
    struct task *next;
};

int task_queue_new(struct daemon *d, struct task_queue **ret_queue, struct shd_err *e);

/* Counts the completions that have run: as long as it grows, the device works. Loop thread. */
uint64_t task_queue_served(const struct task_queue *queue);

/* Stop delivering. Close the async handle; free by task_queue_free() once the loop has run. */
void task_queue_close(struct task_queue *queue);
void task_queue_free(struct task_queue *queue);

void task_init(struct task *task, struct task_queue *queue, void (*fn)(struct task *task));

/* Complete a task from any thread. */
void task_post(struct task *task, int status);

/* Loop thread: complete a task whose work is done already. fn runs before the loop sleeps, not
 * from here; nobody is woken. */
void task_post_here(struct task *task, int status);

#endif
