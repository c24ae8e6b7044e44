/* See health.h. */
#include "daemon/view/health.h"

#include <stdio.h>

#include "daemon/base/state.h"
#include "daemon/model/adopt.h"
#include "daemon/view/snapshot.h"

bool health_trouble(const struct daemon *d, const struct view_snapshot *s, char *text, size_t bytes)
{
    if (d->adopt->refused_count > 0) {
        snprintf(text, bytes, "model '%s' of a predecessor was refused: %s\n",
                 d->adopt->refused[0].name, d->adopt->refused[0].why.text);
        return true;
    }
    for (uint32_t i = 0; s != NULL && i < s->model_count; i++) {
        if (s->models[i].status == SHD_OK)
            continue;
        snprintf(text, bytes, "model '%s' has failed: %s\n", s->models[i].spec->name,
                 status_meaning(s->models[i].status));
        return true;
    }
    return false;
}
