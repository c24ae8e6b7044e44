/* Opening a model with start values of the program's, and waiting for another's. See client/shd.h.
 */
#include <inttypes.h>
#include <string.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define PAUSE_NS_MIN (2 * NS_PER_MS)
#define PAUSE_NS_MAX (50 * NS_PER_MS)
#define WAIT_MS_MAX  (UINT64_C(1000) * 3600 * 24 * 365)

static int open_once(shd_session *s, const struct shd_open_options *o, shd_model **ret_model,
                     bool *ret_created, struct shd_err *e)
{
    struct starts starts = { .fill = o->fill, .ctx = o->ctx };
    if (o->fill != NULL && o->spec_json != NULL)
        s->starts = &starts;
    const int r = o->spec_json != NULL ? shd_model_open(s, o->spec_json, ret_model, e)
                                       : shd_model_attach(s, o->name, ret_model, e);
    s->starts = NULL;
    if (r == SHD_OK)
        *ret_created = starts.created;
    return r;
}

/* How long the wait may go on now. */
static uint64_t left_ns(struct hub *hub, const struct shd_open_options *o, uint64_t start_ns,
                        uint64_t pause_ns)
{
    const uint64_t session_ns = hub_left_ns(hub, start_ns, pause_ns);
    const uint64_t wait_ns = o->wait_ms * NS_PER_MS, waited_ns = clock_now_ns() - start_ns;
    if (o->wait_ms == 0)
        return session_ns;
    const uint64_t left = waited_ns < wait_ns ? wait_ns - waited_ns : 0;
    return left < pause_ns ? left : pause_ns;
}

static int check_options(const struct shd_open_options *o, struct shd_err *e)
{
    if (o->spec_json != NULL && o->name != NULL)
        return err_set(e, SHD_EINVAL, "both a spec and the name '%.100s': the spec has one",
                       o->name);
    if (o->fill != NULL && o->spec_json == NULL)
        return err_set(e, SHD_EINVAL, "start values without a spec: a model cannot be made so");
    if (o->wait_ms > WAIT_MS_MAX)
        return err_set(e, SHD_ERANGE, "a wait of %" PRIu64 " ms, at most %" PRIu64, o->wait_ms,
                       WAIT_MS_MAX);
    return SHD_OK;
}

int shd_model_open_with(shd_session *s, const struct shd_open_options *options,
                        shd_model **ret_model, bool *ret_created, struct shd_err *e)
{
    struct shd_open_options o = { 0 };
    struct shd_err why = { 0 };
    bool created = false;
    int r = sized_take(&o, sizeof o, options, sizeof o.size, "shd_open_options", e);
    if (r == SHD_OK)
        r = check_options(&o, e);
    if (r != SHD_OK)
        return r;
    const uint64_t start_ns = clock_now_ns();
    const bool waits = s->hub != NULL && (o.spec_json != NULL || o.wait_ms > 0);
    uint64_t pause_ns = PAUSE_NS_MIN, sleep_ns = 1;
    while ((r = open_once(s, &o, ret_model, &created, &why)) == SHD_ENOENT && waits &&
           (sleep_ns = left_ns(s->hub, &o, start_ns, pause_ns)) > 0) {
        const int polled = hub_poll(s->hub, sleep_ns, e);
        if (polled != SHD_OK)
            return polled;
        pause_ns = 2 * pause_ns < PAUSE_NS_MAX ? 2 * pause_ns : PAUSE_NS_MAX;
    }
    if (r == SHD_ENOENT && sleep_ns == 0)
        return err_set(e, SHD_ETIMEDOUT, "not within %" PRIu64 " ms: %.200s",
                       (clock_now_ns() - start_ns) / NS_PER_MS, why.text);
    if (r == SHD_OK && ret_created != NULL)
        *ret_created = created;
    return r == SHD_OK ? r : err_copy(&why, e);
}
