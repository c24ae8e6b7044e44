/* Forking a model. See client/shd.h, and client/paths/create.h for how it comes to be at all owners
 * or at none. */
#include <stdlib.h>
#include <string.h>

#include "client/paths/create.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "client/session/spec_out.h"
#include "proto/spec/spec_json.h"

/* m's spec under another name, checked as any: *ret_spec and *ret_json are the caller's. */
static int rename_spec(shd_model *m, const char *name, struct spec **ret_spec, char **ret_json,
                       struct shd_err *e)
{
    struct spec named = { 0 };
    char *json = NULL;
    memcpy(&named, m->spec, sizeof named);
    named.name = (char *)(uintptr_t)name; /* it is read */
    int r = spec_dump(&named, &json, e);
    if (r == SHD_OK)
        r = spec_parse(json, strlen(json), ret_spec, e);
    if (r == SHD_OK)
        *ret_json = json;
    else
        free(json);
    return r == SHD_OK ? r : err_prefix(e, "a fork of model '%.60s'", m->spec->name);
}

static int check(const shd_model *m, const char *name, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (m->session->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" does not fork: run daemons");
    if (name == NULL || strlen(name) >= SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_EINVAL, "a fork needs a name of 1 to %u characters",
                       SPEC_NAME_BYTES_MAX - 1);
    return SHD_OK;
}

int shd_model_fork(shd_model *m, const char *name, uint64_t *ret_step, struct shd_err *e)
{
    struct spec_out out = { .segment = SEGMENT_CLOSED };
    struct spec *spec = NULL;
    char *json = NULL;
    int r = check(m, name, e);
    if (r == SHD_OK)
        r = rename_spec(m, name, &spec, &json, e);
    if (r != SHD_OK)
        return r;
    struct shd_model fork = { .session = m->session, .spec = spec }; /* all that is looked at */
    struct starts starts = { .from = m };
    r = spec_out_init(&out, json, e);
    if (r == SHD_OK) {
        r = create_model(&fork, &out, &starts, e);
        spec_out_deinit(&out);
    }
    if (r == SHD_ECANCELED)
        hub_renew(m->session->hub);
    if (r == SHD_OK && !starts.created)
        r = err_set(e, SHD_EEXIST, "model '%s' is open already", name);
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = starts.step;
    spec_free(spec);
    free(json);
    return r;
}
