/* A session's gradient slots for one model: memory that the worker writes and a kernel reads. A
 * RETURN names the slot that its gradient lies in; the slot is the worker's again when the RETURN
 * is credited. Loop thread, but for inbox_new(). */
#ifndef SHD_INBOX_H
#define SHD_INBOX_H

#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "proto/share/activity.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

struct model;
struct op;
struct session;

/* Counted: one reference by the session, one by each
 * RETURN whose slot is still to be read. */
struct inbox {
    struct segment segment;
    struct segment activity; /* the host's, where segment is not; else closed */
    struct model *model;     /* borrowed */
    uv_work_t work;          /* closing it */
    uint32_t slots;
    uint64_t busy;     /* bit per slot: a RETURN of it is pending */
    uint64_t spilling; /* bit per slot: it is being copied */
    uint64_t taken_ns; /* when the last slot was taken */
    uint32_t refs;
    uint32_t op_index[SHD_SLOTS_MAX]; /* of a busy slot's RETURN */
    struct activity_waits waits_seen; /* what the worker had counted when last looked at */
};

/* An inbox of no session yet. Not for the loop's thread: it waits for the device. */
int inbox_new(struct model *m, uint32_t slots, struct inbox **ret_inbox, struct shd_err *e);

/* It is there: its bytes count for the model. */
void inbox_count(const struct inbox *inbox);

/* The last reference closes it, on libuv's pool. */
void inbox_unref(struct inbox *inbox);

struct inbox *inbox_of(const struct session *s, const struct model *m); /* or NULL */

/* How many sessions have slots of m, but for one; up to four are named in text. */
uint32_t inbox_name_trainers(const struct model *m, const struct session *but, char *text,
                             size_t bytes);

/* The page on which the worker shows what it does. Untrusted: see activity.h. */
const struct activity *inbox_activity(const struct inbox *inbox);

/* The session's inbox for the model that a request's handle names, where that can be trained: sets
 * op->model, as model_of() does. NULL: it has none, or there is no such model. */
struct inbox *inbox_named(struct op *op, uint32_t handle);

/* The slot of the inbox (NULL: the session has none) that a RETURN names is busy from here on,
 * op->inbox is counted. Errors: SHD_EINVAL, SHD_ERANGE. */
int inbox_take_slot(struct op *op, struct inbox *inbox);

/* It is the worker's again; nothing happens where none was taken. */
void inbox_release_slot(struct op *op);

/* The session's reference to its inbox of m goes, if it has one. */
void inbox_let_go(struct session *s, const struct model *m);

/* A session ended: its references go. */
void inbox_end(struct session *s);

#endif
