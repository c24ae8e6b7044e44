/* See lost.h. */
#include "client/ctl/run/lost.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/watch/status_node.h"

/* One model over all daemons that answered. */
struct lost_model {
    char name[DOC_NAME_BYTES];
    double step, bytes;
    double saved_step, saved_s; /* NAN: none is known */
};

static void add_model(struct lost_model *models, uint32_t *count, const struct doc_model *m)
{
    struct lost_model *found = NULL;
    for (uint32_t i = 0; i < *count && found == NULL; i++)
        if (strcmp(models[i].name, m->name) == 0)
            found = &models[i];
    if (found == NULL && *count == DOC_MODELS_MAX)
        return;
    if (found == NULL) {
        found = &models[(*count)++];
        *found = (struct lost_model){ .step = NAN, .saved_step = NAN, .saved_s = NAN };
        memcpy(found->name, m->name, sizeof(found->name));
    }
    found->step = fmax(found->step, m->step);
    found->bytes += isnan(m->bytes[DOC_STATE]) ? 0 : m->bytes[DOC_STATE];
    if (isnan(found->saved_s) || m->saved_s > found->saved_s) { /* all parts are there since then */
        found->saved_step = m->saved_step;
        found->saved_s = m->saved_s;
    }
}

static void say_model(const struct lost_model *m, const char *what)
{
    char steps[TEXT_BYTES], bytes[TEXT_BYTES], saved[TEXT_BYTES], age[TEXT_BYTES], last[128];
    snprintf(last, sizeof last, "no checkpoint is known");
    if (!isnan(m->saved_s))
        snprintf(last, sizeof last, "the last checkpoint is of step %s, %s ago",
                 text_count(m->saved_step, saved), text_time(m->saved_s, age));
    ctl_say("%s: model '%s', %s steps, %s of state; %s", what, m->name, text_count(m->step, steps),
            text_bytes(m->bytes, bytes), last);
}

bool lost_say(const char *address, const char *what)
{
    struct lost_model models[DOC_MODELS_MAX];
    uint32_t count = 0;
    bool lost = false;
    struct node n;
    struct shd_err e = { 0 };
    if (node_open_at(address, &n, &e) != SHD_OK) {
        ctl_say("%s: what cannot be told: %s", what, e.text);
        return true;
    }
    node_ask_once(&n);
    for (uint32_t i = 0; i < n.count; i++) {
        const struct node_daemon *d = &n.daemons[i];
        for (uint32_t k = 0; d->up && k < d->doc->model_count; k++)
            add_model(models, &count, &d->doc->models[k]);
        if (!d->up)
            ctl_say("%s: what daemon %s had, which does not answer", what, d->device);
        lost = lost || !d->up;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (models[i].saved_step == models[i].step)
            continue;
        say_model(&models[i], what);
        lost = true;
    }
    node_close(&n);
    return lost;
}
