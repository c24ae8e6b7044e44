/* See inbox.h. */
#include "daemon/model/inbox.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/model/model.h"
#include "daemon/model/spare.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"

#define NAMES_MAX 4u /* workers that are named */

int inbox_new(struct model *m, uint32_t slots, struct inbox **ret_inbox, struct shd_err *e)
{
    struct inbox *inbox = sys_calloc(1, sizeof *inbox);
    if (inbox == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an inbox");
    inbox->segment = inbox->activity = SEGMENT_CLOSED;
    int r = spare_inbox(m, shardmap_inbox_bytes(m->map, slots), &inbox->segment, e);
    if (r == SHD_OK && inbox->segment.place != SEGMENT_HOST)
        r = segment_new("shardd-activity", SEGMENT_ACTIVITY, ACTIVITY_BYTES, &inbox->activity, e);
    if (r != SHD_OK) {
        spare_inbox_close(m, &inbox->segment);
        free(inbox);
        return err_prefix(e, "an inbox of %" PRIu32 " slots", slots);
    }
    inbox->model = m;
    inbox->slots = slots;
    inbox->refs = 1;
    *ret_inbox = inbox;
    return SHD_OK;
}

void inbox_count(const struct inbox *inbox)
{
    inbox->model->use.inbox_bytes += inbox->segment.bytes;
    inbox->model->use.inboxes++;
    spare_watch(inbox->model);
}

static void close_inbox(uv_work_t *work)
{
    struct inbox *inbox = work->data;
    spare_inbox_close(inbox->model, &inbox->segment);
    segment_close(&inbox->activity);
}

static void inbox_closed(uv_work_t *work, int cancelled)
{
    struct inbox *inbox = work->data;
    CHECK(cancelled == 0);
    inbox->model->use.inboxes--;
    free(inbox);
}

void inbox_unref(struct inbox *inbox)
{
    struct daemon *d = inbox->model->daemon;
    CHECK(inbox->refs > 0);
    if (--inbox->refs > 0)
        return;
    inbox->model->use.inbox_bytes -= inbox->segment.bytes;
    if (!d->stopping)
        spare_watch(inbox->model);
    inbox->work.data = inbox;
    if (!d->stopping) { /* unmapping much memory takes a while */
        uv_queue_work(d->loop, &inbox->work, close_inbox, inbox_closed);
        return;
    }
    close_inbox(&inbox->work);
    free(inbox);
}

const struct activity *inbox_activity(const struct inbox *inbox)
{
    if (inbox->activity.base != NULL)
        return inbox->activity.base;
    const uint8_t *base = inbox->segment.base;
    return (const struct activity *)(base + shardmap_activity_offset_bytes(inbox->model->map,
                                                                           inbox->slots));
}

struct inbox *inbox_of(const struct session *s, const struct model *m)
{
    for (uint32_t i = 0; i < s->inbox_count; i++)
        if (s->inboxes[i]->model == m)
            return s->inboxes[i];
    return NULL;
}

uint32_t inbox_name_trainers(const struct model *m, const struct session *but, char *text,
                             size_t bytes)
{
    const struct session_table *table = m->daemon->sessions;
    uint32_t count = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < table->made; i++) {
        const struct session *s = &table->items[i];
        const size_t used = strlen(text);
        if (s->state != SESSION_OPEN || s == but || inbox_of(s, m) == NULL)
            continue;
        if (count++ < NAMES_MAX)
            snprintf(text + used, bytes - used, "%s%.30s (pid %d)", used > 0 ? ", " : "", s->name,
                     (int)s->pid);
        else if (count == NAMES_MAX + 1)
            snprintf(text + used, bytes - used, " and more");
    }
    return count;
}

struct inbox *inbox_named(struct op *op, uint32_t handle)
{
    const struct session *s = op->session;
    for (uint32_t i = 0; i < s->inbox_count; i++) {
        struct model *m = s->inboxes[i]->model;
        if (m->handle != handle || !m->ready)
            continue;
        op->model = m;
        return s->inboxes[i];
    }
    return NULL;
}

int inbox_take_slot(struct op *op, struct inbox *inbox)
{
    const uint32_t slot = op->req.return_grad.slot;
    if (inbox == NULL)
        return err_set(&op->err, SHD_EINVAL, "session has no gradient slots for model '%s'",
                       op->model->ledger->head->name);
    if (slot >= inbox->slots)
        return err_set(&op->err, SHD_ERANGE, "slot %" PRIu32 " of an inbox with %" PRIu32, slot,
                       inbox->slots);
    if (inbox->busy & UINT64_C(1) << slot)
        return err_set(&op->err, SHD_EINVAL, "slot %" PRIu32 " was not credited yet", slot);
    inbox->busy |= UINT64_C(1) << slot;
    inbox->refs++;
    inbox->op_index[slot] = op->index;
    inbox->taken_ns = uv_hrtime();
    op->inbox = inbox;
    return SHD_OK;
}

void inbox_release_slot(struct op *op)
{
    if (op->inbox == NULL)
        return;
    op->inbox->busy &= ~(UINT64_C(1) << op->req.return_grad.slot);
    inbox_unref(op->inbox);
    op->inbox = NULL;
}

void inbox_let_go(struct session *s, const struct model *m)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->inbox_count; i++) {
        struct inbox *inbox = s->inboxes[i];
        if (inbox->model == m)
            inbox_unref(inbox);
        else
            s->inboxes[kept++] = inbox;
    }
    s->inbox_count = kept;
}

void inbox_end(struct session *s)
{
    for (uint32_t i = 0; i < s->inbox_count; i++)
        inbox_unref(s->inboxes[i]);
    s->inbox_count = 0;
}
