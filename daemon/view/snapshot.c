/* See snapshot.h. */
#include "daemon/view/snapshot.h"

#include <stdatomic.h>
#include <stdlib.h>

void view_unref(struct view_snapshot *s)
{
    if (s == NULL || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (uint32_t i = 0; s->models != NULL && i < s->model_count; i++) {
        free(s->models[i].units);
        free(s->models[i].leases);
        free(s->models[i].missing);
        free(s->models[i].waiting_list);
    }
    for (uint32_t i = 0; s->sessions != NULL && i < s->session_count; i++)
        free(s->sessions[i].spans);
    free(s->models);
    free(s->sessions);
    free(s->transfers);
    free(s);
}

const struct view_session *view_session_find(const struct view_snapshot *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->session_count && id != 0; i++)
        if (s->sessions[i].id == id)
            return &s->sessions[i];
    return NULL;
}
