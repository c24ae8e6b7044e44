/* See snapshot.h. */
#include "daemon/view/snapshot.h"

const struct view_session *view_session_find(const struct view_snapshot *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->session_count && id != 0; i++)
        if (s->sessions[i].id == id)
            return &s->sessions[i];
    return NULL;
}
