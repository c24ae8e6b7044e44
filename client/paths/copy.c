/* See copy.h. */
#include "client/paths/copy.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/paths/coded.h"
#include "client/paths/map.h"
#include "client/paths/order.h"
#include "client/paths/place.h"
#include "client/paths/rewind.h"
#include "client/session/gpu.h"
#include "client/session/hub.h"
#include "kernels/cuda/stream.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define SLICE_NS (5 * NS_PER_MS) /* between two looks at the daemons' lives */

/* -- Memory ------------------------------------------------------------------------------------ */

void copy_grow(struct copy_model *c, uint32_t slots)
{
    CHECK(slots <= c->slots_max);
    if (slots > c->slot_count)
        c->slot_count = slots;
}

/* An owner's slice of a unit: where it lies there and here, whose board vouches for it, and who
 * copies it. One that is sent has no bytes here. */
static struct transfer_piece piece_of(const struct shd_model *m, const struct copy_model *c,
                                      const struct map_owner *owner, uint32_t unit)
{
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    const struct slice slice = owner->shards->slice[unit];
    const uint8_t *from = owner->mover->published(m, owner, unit);
    return (struct transfer_piece){
        .board = owner->board.base,
        .from = from,
        .gpu = c->gpu != NULL ? c->gpu : owner->whole.gpu,
        .offset_bytes = slice.first_elem * elem_bytes,
        .bytes = from != NULL ? coded_bytes(m, slice.elems) : 0,
        .codec = m->spec->codec,
        .dtype = m->spec->publish,
        .elems = slice.elems,
    };
}

static void fill_pieces(const struct shd_model *m, struct copy_model *c)
{
    const uint32_t owners = m->map->owner_count;
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        for (uint32_t i = 0; i < owners; i++)
            c->pieces[(size_t)u * owners + i] = piece_of(m, c, &m->map->owners[i], u);
}

int copy_new(struct shd_model *m, uint32_t slots, uint64_t delay_ns, struct copy_model **ret_copy,
             struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count;
    struct copy_model *c = sys_calloc(1, sizeof *c);
    if (c != NULL) {
        c->slots = sys_calloc(units, sizeof *c->slots);
        c->jobs = sys_calloc(units, sizeof *c->jobs);
        c->marks = sys_calloc(units, sizeof(struct CUevent_st *));
        c->slots_max = units;
        c->slot_of = sys_calloc(units, sizeof *c->slot_of);
        c->pieces = sys_calloc((size_t)units * m->map->owner_count, sizeof *c->pieces);
    }
    if (c == NULL || c->slots == NULL || c->jobs == NULL || c->marks == NULL ||
        c->slot_of == NULL || c->pieces == NULL) {
        copy_free(c);
        return err_set(e, SHD_ENOMEM, "no memory for the copy path of %" PRIu32 " units", units);
    }
    c->in = buffers_for(m, dtype_bytes(m->spec->publish));
    for (uint32_t u = 0; u < units; u++)
        c->slot_of[u] = COPY_NO_SLOT;
    int r = SHD_OK;
    copy_grow(c, slots);
    for (uint32_t i = 0; r == SHD_OK && i < m->map->owner_count; i++)
        r = m->map->owners[i].mover->ready(m, &m->map->owners[i], e);
    if (r == SHD_OK && m->session->on_gpu)
        r = gpu_open(m->session->ordinal, &c->gpu, e);
    if (r == SHD_OK)
        r = transfer_new(delay_ns, &c->transfer, e);
    if (r == SHD_OK)
        fill_pieces(m, c);
    if (r != SHD_OK) {
        copy_free(c);
        return r;
    }
    *ret_copy = c;
    return SHD_OK;
}

void copy_settle(const struct copy_model *c, uint32_t slot)
{
    struct shd_err ignored; /* a sticky error: whoever copies there next has it, too */
    if (c->marks[slot] != NULL)
        cuda_mark_wait(c->gpu, c->marks[slot], &ignored);
}

void copy_free(struct copy_model *c)
{
    if (c == NULL)
        return;
    transfer_free(c->transfer); /* first: it writes to the slots */
    for (uint32_t i = 0; c->marks != NULL && i < c->slot_count; i++) {
        copy_settle(c, i);
        cuda_mark_free(c->gpu, c->marks[i]);
    }
    for (uint32_t i = 0; c->slots != NULL && i < c->slot_count; i++)
        buffer_free(&c->in, &c->slots[i]);
    if (c->gpu != NULL)
        c->gpu->ops->free(c->gpu);
    free(c->slots);
    free(c->jobs);
    free(c->marks);
    free(c->slot_of);
    free(c->pieces);
    free(c);
}

/* -- Fetching ---------------------------------------------------------------------------------- */

/* A free slot. Where there are as many as units each has its own, so that its parameters are always
 * at one address: PyTorch's tensors cannot move. */
static struct buffer *find_slot(const struct copy_model *c, uint32_t unit, uint64_t bytes)
{
    if (c->slot_count == c->slots_max && !c->slots[unit].busy)
        return &c->slots[unit];
    return buffer_find(c->slots, c->slot_count, bytes);
}

int copy_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct copy_model *c = m->copy;
    const uint64_t bytes = m->spec->units[unit].elems * dtype_bytes(m->spec->publish);
    struct buffer *slot = find_slot(c, unit, bytes);
    CHECK(c->slot_of[unit] == COPY_NO_SLOT);
    if (slot == NULL)
        return err_set(e, SHD_EBUSY,
                       "unit %" PRIu32 " '%s': all %" PRIu32 " slots hold other units, as many as "
                       "the policy's plan holds at once: release one",
                       unit, m->spec->units[unit].name, c->slot_count);
    const uint32_t index = (uint32_t)(slot - c->slots);
    if (slot->bytes < bytes)
        copy_settle(c, index); /* its memory goes */
    const int r = buffer_hold(&c->in, slot, bytes, e);
    if (r != SHD_OK)
        return r;
    slot->busy = true;
    c->slot_of[unit] = index;
    struct transfer_job *job = &c->jobs[c->slot_of[unit]];
    job->to = slot->base;
    job->gpu = c->gpu;
    job->behind = c->marks[index];
    job->pieces = &c->pieces[(size_t)unit * m->map->owner_count];
    job->piece_count = m->map->owner_count;
    job->unit = unit;
    job->step = m->step;
    transfer_start(c->transfer, job);
    return SHD_OK;
}

static uint32_t slot_of_unit(const struct shd_model *m, uint32_t unit)
{
    CHECK(m->copy->slot_of[unit] != COPY_NO_SLOT);
    return m->copy->slot_of[unit];
}

static int check_done(const struct shd_model *m, const struct transfer_job *job, struct shd_err *e)
{
    if (job->status == SHD_OK)
        return SHD_OK;
    if (job->status != SHD_ESTEP)
        return err_set(e, job->status, "copy unit %" PRIu32 " '%s': %s", job->unit,
                       m->spec->units[job->unit].name, job->why.text);
    return model_err_past(m, &m->session->hub->links[job->piece], job->unit, job->version, e);
}

/* The job is taken back and started again: the owner that it is stuck at can only be read while the
 * thread does not have it. */
static int fetch_timed_out(struct shd_model *m, struct transfer_job *job, struct shd_err *e)
{
    const bool waits = transfer_waits(m->copy->transfer, job);
    transfer_cancel(m->copy->transfer, job);
    const uint32_t piece = job->piece < job->piece_count ? job->piece : job->piece_count - 1;
    transfer_start(m->copy->transfer, job);
    if (waits)
        return err_set(e, SHD_ETIMEDOUT,
                       "unit %" PRIu32 " '%s': this program's own work on cuda:%" PRIu32
                       " still uses the memory that it is to come to after %" PRIu64 " ms",
                       job->unit, m->spec->units[job->unit].name, m->session->ordinal,
                       m->session->timeout_ns / NS_PER_MS);
    return model_err_unpublished(m, &m->session->hub->links[piece], job->unit, e);
}

/* Has a wait lasted too long? *start_ns is when that for the owners began: not before the program's
 * own work has let go of the memory. */
static bool is_late(struct shd_model *m, const struct transfer_job *job, uint64_t begin_ns,
                    uint64_t *start_ns)
{
    struct hub *hub = m->session->hub;
    const uint64_t now_ns = clock_now_ns();
    if (!transfer_waits(m->copy->transfer, job))
        return now_ns >= hub_deadline_ns(hub, *start_ns);
    *start_ns = now_ns;
    hub_deadline_ns(hub, now_ns); /* it is a wait all the same */
    return !hub->patient && now_ns - begin_ns >= hub->timeout_ns;
}

bool copy_readable(const struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
    return false; /* the transfer thread knows */
}

/* Their stores end these sleeps; the thread has only to copy then. */
static int wait_for_owners(struct shd_model *m, const struct transfer_job *job, uint64_t start_ns,
                           struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < job->piece_count; i++)
        if (job->pieces[i].bytes > 0)
            r = mapped_wait_owner(m, &m->session->hub->links[i], job->unit, start_ns, e);
    return r;
}

int copy_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct transfer_job *job = &m->copy->jobs[slot_of_unit(m, unit)];
    const uint64_t begin_ns = clock_now_ns();
    uint64_t start_ns = begin_ns;
    if (job->step != m->step)
        return err_set(e, SHD_ESTEP,
                       "unit %" PRIu32 " '%s' is held since step %" PRIu64
                       ", the open one is %" PRIu64 ": release it before you acquire it again",
                       unit, m->spec->units[unit].name, job->step, m->step);
    if (job->behind == NULL && !transfer_wait(m->copy->transfer, job, /* timeout_ns= */ 0)) {
        const int r = wait_for_owners(m, job, begin_ns, e);
        if (r != SHD_OK)
            return r;
    }
    while (!transfer_wait(m->copy->transfer, job, SLICE_NS)) {
        int r = hub_poll(m->session->hub, /* timeout_ns= */ 0, e);
        activity_look(m);
        if (r == SHD_OK)
            r = rewind_seen(m, e);
        if (r != SHD_OK)
            return r;
        if (is_late(m, job, begin_ns, &start_ns))
            return fetch_timed_out(m, job, e);
    }
    m->session->bytes_copied += job->bytes_copied;
    job->bytes_copied = 0; /* counted once, however often it is waited for */
    return check_done(m, job, e);
}

void copy_let_go(struct shd_model *m, uint32_t unit)
{
    const uint32_t slot = slot_of_unit(m, unit);
    transfer_cancel(m->copy->transfer, &m->copy->jobs[slot]);
    m->session->bytes_copied += m->copy->jobs[slot].bytes_copied;
    order_mark(m, &m->copy->marks[slot]);
    m->copy->slots[slot].busy = false;
    m->copy->slot_of[unit] = COPY_NO_SLOT;
}

const void *copy_params(const struct shd_model *m, uint32_t unit)
{
    return m->copy->slots[slot_of_unit(m, unit)].base;
}

const struct reader_ops reader_copy = {
    .kind = SHD_PATH_COPY,
    .shown = ACTIVITY_PATH_COPY,
    .fetch = copy_fetch,
    .readable = copy_readable,
    .wait_unit = copy_wait_unit,
    .let_go = copy_let_go,
    .params = copy_params,
};
