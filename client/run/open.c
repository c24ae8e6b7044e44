/* Opening models and closing them. See client/shd.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/path.h"
#include "client/run/exec.h"
#include "client/run/grads.h"
#include "client/run/policy.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

static void model_free(struct shd_model *m)
{
    if (m->saving != NULL)
        m->save_free(m->saving);
    m->session->control->close(m);
    exec_free(m->exec);
    grads_free(m->grads);
    free(m->holds);
    free(m->reports);
    spec_free(m->spec);
    free(m->spec_json);
    free(m);
}

static int check_not_open(const struct shd_session *s, const struct shd_model *opened,
                          struct shd_err *e)
{
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        if (strcmp(m->spec->name, opened->spec->name) == 0)
            return err_set(e, SHD_EEXIST, "model '%s' is open in this session already",
                           m->spec->name);
    return SHD_OK;
}

/* spec (taken in any case) or, when NULL, the model called name. */
static int open_model(shd_session *s, struct spec *spec, const char *name, shd_model **ret_model,
                      struct shd_err *e)
{
    struct shd_model *m = sys_calloc(1, sizeof *m);
    if (m == NULL) {
        spec_free(spec);
        return err_set(e, SHD_ENOMEM, "no memory for a model");
    }
    m->session = s;
    m->reader = s->reader;
    m->in.step = UINT64_MAX;
    m->policy = (struct policy){ .plan = PLAN_POLICY_DEFAULT, .grad_dtype = SHD_F32 };
    uint32_t slots = 0;
    int r = SHD_OK;
    if (spec != NULL) {
        r = model_set_spec(m, spec, e);
        if (r != SHD_OK)
            spec_free(spec);
        else
            r = check_not_open(s, m, e);
        if (r == SHD_OK && s->hub != NULL)
            r = policy_slots(m, &slots, e);
    }
    if (r == SHD_OK)
        r = s->control->open(m, name, slots, e);
    if (r == SHD_OK)
        policy_opened(m);
    if (r == SHD_OK && spec == NULL)
        r = check_not_open(s, m, e);
    if (r != SHD_OK) {
        model_free(m);
        return r;
    }
    m->next = s->models;
    s->models = m;
    *ret_model = m;
    return SHD_OK;
}

int shd_model_open(shd_session *s, const char *spec_json, shd_model **ret_model, struct shd_err *e)
{
    if (spec_json == NULL)
        return err_set(e, SHD_EINVAL, "no spec: shd_model_attach() attaches without one");
    struct spec *spec;
    const int r = spec_parse(spec_json, strlen(spec_json), &spec, e);
    return r == SHD_OK ? open_model(s, spec, "", ret_model, e) : r;
}

int shd_model_attach(shd_session *s, const char *name, shd_model **ret_model, struct shd_err *e)
{
    return open_model(s, /* spec= */ NULL, name != NULL ? name : "", ret_model, e);
}

void shd_model_close(shd_model *m)
{
    if (m == NULL)
        return;
    struct shd_model **at = &m->session->models;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    model_free(m);
}
