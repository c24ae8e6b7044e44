/* See grads.h. */
#include "client/run/grads.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/paths/kern_run.h"
#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

int grads_new(const struct shd_model *m, struct grads **ret_grads, struct shd_err *e)
{
    struct grads *g = sys_calloc(1, sizeof *g);
    if (g != NULL) {
        g->entry_count = m->spec->unit_count + SHD_SLOTS_MAX;
        g->entries = sys_calloc(g->entry_count, sizeof *g->entries);
        g->units = sys_calloc(m->spec->unit_count, sizeof *g->units);
        g->buffers = sys_calloc(2 * (size_t)g->entry_count, sizeof *g->buffers);
    }
    if (g == NULL || g->entries == NULL || g->units == NULL || g->buffers == NULL) {
        grads_free(g);
        return err_set(e, SHD_ENOMEM, "no memory for the gradients of %" PRIu32 " units",
                       m->spec->unit_count);
    }
    g->in = buffers_for(m, sizeof(float));
    for (uint32_t i = g->entry_count; i-- > 0;) {
        g->entries[i].next = g->unused;
        g->unused = &g->entries[i];
    }
    *ret_grads = g;
    return SHD_OK;
}

void grads_free(struct grads *g)
{
    if (g == NULL)
        return;
    for (uint32_t i = 0; g->buffers != NULL && i < g->buffer_count; i++)
        buffer_free(&g->in, &g->buffers[i]);
    free(g->entries);
    free(g->units);
    free(g->buffers);
    free(g);
}

/* -- Buffers ----------------------------------------------------------------------------------- */

/* What the unit had last, if it can have it again: where many are held, looking takes long. */
static int take_buffer(struct grads *g, uint32_t unit, uint64_t elems, struct buffer **ret_buffer,
                       float **ret_base, struct shd_err *e)
{
    const uint64_t bytes = elems * sizeof(float);
    struct buffer *b = g->units[unit].last;
    if (b == NULL || b->busy || b->bytes != bytes)
        b = buffer_find(g->buffers, g->buffer_count, bytes);
    CHECK(b != NULL || g->buffer_count < 2 * g->entry_count); /* an entry has two at most */
    const bool fresh = b == NULL;
    if (fresh)
        b = &g->buffers[g->buffer_count];
    const int r = buffer_hold(&g->in, b, bytes, e);
    if (r != SHD_OK)
        return r;
    g->buffer_count += fresh;
    b->busy = true;
    g->units[unit].last = *ret_buffer = b;
    *ret_base = b->base;
    return SHD_OK;
}

static void give_buffer(struct buffer **buffer, float **base)
{
    if (*buffer != NULL)
        (*buffer)->busy = false;
    *buffer = NULL;
    *base = NULL;
}

/* -- Entries ----------------------------------------------------------------------------------- */

struct grad_entry *grads_find(struct grads *g, uint32_t group, uint32_t unit)
{
    struct grad_entry *entry = g->units[unit].first;
    while (entry != NULL && entry->group != group)
        entry = entry->next;
    return entry;
}

/* From the first unused one on it is its unit's. */
static void use(struct grads *g, struct grad_entry *entry)
{
    struct grads_unit *u = &g->units[entry->unit];
    if (entry->used)
        return;
    CHECK(entry == g->unused);
    g->unused = entry->next;
    entry->next = u->first;
    u->first = entry;
    entry->used = true;
}

static void unuse(struct grads *g, struct grad_entry *entry)
{
    struct grad_entry **at = &g->units[entry->unit].first;
    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    *entry = (struct grad_entry){ .next = g->unused };
    g->unused = entry;
}

/* Not used yet: use(). */
static int new_entry(struct grads *g, uint32_t group, uint32_t unit, struct grad_entry **ret_entry,
                     struct shd_err *e)
{
    struct grad_entry *entry = g->unused;
    if (entry == NULL)
        return err_set(e, SHD_EBUSY, "%" PRIu32 " gradients are held here: return one",
                       g->entry_count);
    *entry = (struct grad_entry){ .next = entry->next, .group = group, .unit = unit };
    *ret_entry = entry;
    return SHD_OK;
}

/* The entry that waits for micro-batch micro; a new one is not used yet. */
static int next_entry(struct shd_model *m, uint32_t micro, uint32_t unit,
                      struct grad_entry **ret_entry, struct shd_err *e)
{
    struct grads *g = m->grads;
    const uint32_t a = m->spec->accumulate;
    struct grad_entry *entry = grads_find(g, micro / a, unit);
    const uint32_t taken = entry != NULL ? entry->taken : 0;
    if (micro % a != taken)
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": micro-batches %" PRIu32
                       " to %" PRIu32 " are summed here in ascending order, %" PRIu32 " of them %s "
                       "in",
                       unit, m->spec->units[unit].name, micro, micro / a * a, micro / a * a + a - 1,
                       taken, taken == 1 ? "is" : "are");
    if (entry == NULL)
        return new_entry(g, micro / a, unit, ret_entry, e);
    *ret_entry = entry;
    return SHD_OK;
}

static uint64_t live_bytes(const struct shd_model *m, const struct grad_entry *entry)
{
    return plan_unit_grad_bytes(m->spec, entry->unit, SHD_F32);
}

int grads_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_array,
               bool *ret_fresh, struct shd_err *e)
{
    struct grad_entry *entry = NULL;
    int r = next_entry(m, micro, unit, &entry, e);
    if (r != SHD_OK)
        return r;
    CHECK(entry != NULL);
    const bool first = entry->sum == NULL;
    *ret_fresh = !entry->open;
    if (!entry->open) {
        r = take_buffer(m->grads, unit, m->spec->units[unit].elems,
                        first ? &entry->sum_in : &entry->scratch_in,
                        first ? &entry->sum : &entry->scratch, e);
        if (r != SHD_OK)
            return r;
        use(m->grads, entry);
        entry->open = true;
        if (first)
            session_live(m->session, live_bytes(m, entry), /* more= */ true);
    }
    *ret_array = entry->scratch != NULL ? entry->scratch : entry->sum;
    return SHD_OK;
}

int grads_close(struct shd_model *m, struct grad_entry *entry, struct shd_err *e)
{
    CHECK(entry->open && entry->sum != NULL);
    if (entry->scratch != NULL) {
        const struct kern_accumulate add = {
            .acc = entry->sum,
            .grad = entry->scratch,
            .grad_dtype = SHD_F32,
            .elems = m->spec->units[entry->unit].elems,
        };
        const int r = kern_run_op(m->session->kern,
                                  &(struct kern_op){ KERN_ACCUMULATE, { .accumulate = add } }, e);
        if (r != SHD_OK)
            return r;
        give_buffer(&entry->scratch_in, &entry->scratch);
    }
    entry->open = false;
    entry->taken++;
    return SHD_OK;
}

int grads_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct grad_entry **ret_entry,
               struct shd_err *e)
{
    struct grad_entry *entry = NULL;
    const int r = next_entry(m, micro, unit, &entry, e);
    if (r != SHD_OK)
        return r;
    CHECK(entry != NULL);
    if (entry->open && entry->scratch != NULL) {
        give_buffer(&entry->scratch_in, &entry->scratch);
    } else if (entry->open) {
        give_buffer(&entry->sum_in, &entry->sum);
        session_live(m->session, live_bytes(m, entry), /* more= */ false);
    }
    use(m->grads, entry);
    entry->open = false;
    entry->taken++;
    *ret_entry = entry;
    return SHD_OK;
}

int grads_whole(struct shd_model *m, uint32_t group, uint32_t unit, bool none,
                struct grad_entry **ret_entry, struct shd_err *e)
{
    struct grad_entry *entry = grads_find(m->grads, group, unit);
    int r = entry == NULL ? new_entry(m->grads, group, unit, &entry, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    CHECK(entry != NULL);
    if (!none && entry->sum == NULL) {
        r = take_buffer(m->grads, unit, m->spec->units[unit].elems, &entry->sum_in, &entry->sum, e);
        if (r != SHD_OK)
            return r;
        session_live(m->session, live_bytes(m, entry), /* more= */ true);
    }
    use(m->grads, entry);
    *ret_entry = entry;
    return SHD_OK;
}

void grads_done(struct shd_model *m, struct grad_entry *entry)
{
    CHECK(entry->used);
    if (entry->sum != NULL)
        session_live(m->session, live_bytes(m, entry), /* more= */ false);
    give_buffer(&entry->sum_in, &entry->sum);
    give_buffer(&entry->scratch_in, &entry->scratch);
    unuse(m->grads, entry);
}

bool grads_meant(uint32_t group, uint32_t of)
{
    return group == GRADS_ALL || group == of;
}

void grads_reset(struct shd_model *m, uint32_t group)
{
    for (uint32_t i = 0; m->grads != NULL && i < m->grads->entry_count; i++)
        if (m->grads->entries[i].used && grads_meant(group, m->grads->entries[i].group))
            grads_done(m, &m->grads->entries[i]);
}
