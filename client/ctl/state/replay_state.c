/* See replay_state.h. */
#include "client/ctl/state/replay_state.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

#include "client/ctl/base/text.h"
#include "client/ctl/state/replay_judge.h"
#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"

/* -- State ------------------------------------------------------------------------------------- */

static int read_unit(shd_model *m, uint32_t unit, float *values, uint64_t *hashes,
                     struct shd_err *e)
{
    static const enum shd_array arrays[REPLAY_ARRAYS] = { SHD_PARAMS, SHD_MOMENT1, SHD_MOMENT2,
                                                          SHD_EMA };
    for (uint32_t i = 0; i < REPLAY_ARRAYS; i++) {
        const int r = shd_get(m, unit, arrays[i], values, NULL, NULL, e);
        if (r == SHD_OK)
            hashes[i] = replay_hash(values, shd_unit_elems(m, unit));
        else if (r != SHD_EINVAL) /* the unit has no such array */
            return r;
    }
    return SHD_OK;
}

int replay_state_read(shd_model *m, struct replay_state *ret_state, struct shd_err *e)
{
    struct replay_state s = { .units = shd_units(m) };
    uint64_t elems_max = 1;
    for (uint32_t u = 0; u < s.units; u++)
        if (shd_unit_elems(m, u) > elems_max)
            elems_max = shd_unit_elems(m, u);
    float *values = sys_calloc(elems_max, sizeof *values);
    s.hashes = sys_calloc((size_t)s.units * REPLAY_ARRAYS, sizeof *s.hashes);
    if (values == NULL || s.hashes == NULL) {
        free(values);
        replay_state_free(&s);
        return err_set(e, SHD_ENOMEM, "no memory for a unit of %" PRIu64 " elements", elems_max);
    }
    int r = shd_digest(m, s.digest, NULL, e);
    for (uint32_t u = 0; r == SHD_OK && u < s.units; u++)
        r = read_unit(m, u, values, &s.hashes[(size_t)u * REPLAY_ARRAYS], e);
    free(values);
    if (r != SHD_OK) {
        replay_state_free(&s);
        return r;
    }
    s.known = true;
    *ret_state = s;
    return SHD_OK;
}

void replay_state_free(struct replay_state *state)
{
    free(state->hashes);
    *state = (struct replay_state){ 0 };
}

uint32_t replay_state_unit(const struct replay_state *a, const struct replay_state *b)
{
    CHECK(a->units == b->units);
    for (size_t i = 0; i < (size_t)a->units * REPLAY_ARRAYS; i++)
        if (a->hashes[i] != b->hashes[i])
            return (uint32_t)(i / REPLAY_ARRAYS);
    return UINT32_MAX;
}

/* -- Settings ---------------------------------------------------------------------------------- */

static uint64_t from_of(const json_t *o)
{
    return (uint64_t)json_integer_value(json_object_get(o, "from"));
}

static json_t *settings_of(shd_model *m, struct shd_err *e)
{
    char *text = NULL;
    if (shd_settings(m, &text, e) != SHD_OK)
        return NULL;
    json_t *root = json_loads(text, 0, NULL);
    free(text);
    if (root == NULL)
        err_set(e, SHD_EPROTO, "the daemon's settings are no JSON object");
    return root;
}

static int lost(const char *key, struct shd_err *e)
{
    return err_set(e, SHD_ENOENT,
                   "setting %.100s was changed again since the snapshot, and is not recorded as it "
                   "was then",
                   key);
}

/* What waits in the fork is still what came in the run. */
static int check_waits(const json_t *next, const json_t *now, uint64_t end, struct shd_err *e)
{
    json_t *settings = json_object_get(next, "settings"), *v;
    const char *key;
    if (from_of(next) >= end)
        return SHD_OK;
    json_object_foreach(settings, key, v)
    {
        if (from_of(json_object_get(now, key)) != from_of(next))
            return lost(key, e);
    }
    return SHD_OK;
}

static int check_kept(json_t *was, const json_t *now, uint64_t end, struct shd_err *e)
{
    json_t *v;
    const char *key;
    size_t i;
    json_object_foreach(json_object_get(was, "now"), key, v)
    {
        if (json_object_get(now, key) == NULL)
            return lost(key, e);
    }
    int r = check_waits(json_object_get(was, "next"), now, end, e);
    json_array_foreach(json_object_get(was, "later"), i, v)
    {
        if (r == SHD_OK)
            r = check_waits(v, now, end, e);
    }
    return r;
}

static int set_one(shd_model *fork, const char *key, const json_t *entry, struct shd_err *e)
{
    json_t *o = json_pack("{s:O}", key, json_object_get(entry, "value"));
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    const int r = text != NULL ? shd_model_set(fork, text, from_of(entry), NULL, e)
                               : err_set(e, SHD_ENOMEM, "no memory for a setting");
    free(text);
    json_decref(o);
    return r;
}

int replay_sets(shd_model *m, shd_model *fork, uint64_t from, uint64_t end,
                char ret_changed[REPLAY_KEY_BYTES], struct shd_err *e)
{
    json_t *is = settings_of(m, e), *was = is != NULL ? settings_of(fork, e) : NULL;
    json_t *now = json_object_get(is, "now"), *v;
    const char *key;
    ret_changed[0] = '\0';
    int r = was != NULL ? check_kept(was, now, end, e) : e->code;
    json_object_foreach(now, key, v)
    {
        const json_t *had = json_object_get(json_object_get(was, "now"), key);
        if (had == NULL || from_of(had) != from_of(v))
            text_clean(key, ret_changed, REPLAY_KEY_BYTES);
        if (r != SHD_OK || from_of(v) < from || from_of(v) >= end ||
            (had != NULL && from_of(had) == from_of(v)))
            continue;
        r = set_one(fork, key, v, e);
    }
    json_decref(was);
    json_decref(is);
    return r;
}
