/* Changing what is trained. See client/shd.h. */
#include <inttypes.h>
#include <string.h>

#include "client/paths/path.h"
#include "client/session/session.h"
#include "proto/spec/settings_text.h"

#define GO_ON    "guard=go-on"
#define FROM_MAX (UINT64_C(1) << 33) /* a ledger's steps are fewer */

int shd_model_set(shd_model *m, const char *settings, uint64_t from, uint64_t *ret_from,
                  struct shd_err *e)
{
    struct settings change;
    const size_t space = settings != NULL ? strspn(settings, " ") : 0;
    const bool go_on =
        settings != NULL && strncmp(settings + space, GO_ON, strlen(GO_ON)) == 0 &&
        settings[space + strlen(GO_ON) + strspn(settings + space + strlen(GO_ON), " ")] == '\0';
    int r = session_check(m->session, e);
    if (r == SHD_OK && settings == NULL)
        r = err_set(e, SHD_EINVAL, "no settings: shd_settings() tells what is set");
    if (r == SHD_OK && from >= FROM_MAX)
        r = err_set(e, SHD_ERANGE, "step %" PRIu64 ", must be below %" PRIu64, from, FROM_MAX);
    if (r == SHD_OK && go_on && from != 0)
        r = err_set(e, SHD_EINVAL, GO_ON " is of now, and takes no step");
    if (r == SHD_OK && !go_on)
        r = settings_parse(m->spec, settings, &change, e);
    if (r != SHD_OK)
        return r;
    const struct path_set set = {
        .change = go_on ? NULL : &change, .go_on = go_on, .from = from, .ret_from = ret_from
    };
    return m->session->control->set(m, &set, e);
}

int shd_settings(shd_model *m, char **ret_json, struct shd_err *e)
{
    const struct path_set look = { .ret_json = ret_json };
    const int r = session_check(m->session, e);
    return r == SHD_OK ? m->session->control->set(m, &look, e) : r;
}
