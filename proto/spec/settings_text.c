/* See settings_text.h. Numbers are read and written by jansson, in whichever locale. */
#include "proto/spec/settings_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/optimizer.h"
#include "proto/spec/spec.h"

#define KEY_BYTES_MAX 200u

/* -- Keys -------------------------------------------------------------------------------------- */

struct setting_key {
    const char *name;
    enum setting_rate rate; /* the first of */
    uint32_t rates;         /* so many; 0: clip_norm */
};

static const struct setting_key keys[] = {
    { "clip_norm", SETTING_LR_SCALE, 0 },
    { "lr_scale", SETTING_LR_SCALE, 1 },
    { "weight_decay", SETTING_WEIGHT_DECAY, 1 },
    { "betas", SETTING_BETA1, 2 },
    { "beta1", SETTING_BETA1, 1 },
    { "beta2", SETTING_BETA2, 1 },
    { "momentum", SETTING_BETA1, 1 },
};

/* What people may want to change, and cannot. */
static const struct {
    const char *name, *why;
} fixed[] = {
    { "lr", "the learning rate is the worker's, given with each step: lr_scale multiplies it" },
    { "loss_scale", "it is the worker's, given with each step" },
    { "eps", "it is one for all groups and fixed with the model" },
    { "micro_batches",
      "the owners' memory is laid out by it; restore the weights into a model with "
      "another spec (shardctl restore --weights)" },
    { "accumulate", "the owners' memory is laid out by it; restore the weights into a model with "
                    "another spec (shardctl restore --weights)" },
    { "verify_every",
      "it is part of the spec; restore the weights into a model with another one (shardctl restore "
      "--weights)" },
    { "guard_audit", "it is part of the spec; restore the weights into a model with another one "
                     "(shardctl restore --weights)" },
    { "publish",
      "workers have mapped the parameters in that type; restore the weights into a model "
      "with another spec (shardctl restore --weights)" },
    { "grad_dtype", "workers' gradients have that type; restore the weights into a model with "
                    "another spec (shardctl restore --weights)" },
    { "optimizer", "moments are of one optimizer; restore the weights into a model with another "
                   "spec (shardctl restore --weights)" },
    { "ema", "its decay is fixed with the model; restore it into a model with another spec "
             "(shardctl restore --weights)" },
    { "seed", "the initial values are made of it, and they are made" },
};

static int err_unknown(const char *key, struct shd_err *e)
{
    const char *names[ARRAY_SIZE(keys)];
    char near[160];
    for (size_t i = 0; i < ARRAY_SIZE(fixed); i++)
        if (strcmp(key, fixed[i].name) == 0)
            return err_set(e, SHD_EINVAL, "%s cannot be changed: %s", key, fixed[i].why);
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        names[i] = keys[i].name;
    return err_set(e, SHD_EINVAL, "no setting is called '%.40s'%s", key,
                   suggest(key, names, ARRAY_SIZE(names), "", near, sizeof near));
}

static int find_group(const struct spec *spec, const char *key, const char *name,
                      uint32_t *ret_group, struct shd_err *e)
{
    const char *names[SHD_GROUPS_MAX];
    char near[160];
    for (uint32_t g = 0; g < spec->group_count; g++) {
        names[g] = spec->groups[g].name;
        *ret_group = g;
        if (strcmp(names[g], name) == 0)
            return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "%.20s: model '%.60s' has no group '%.40s'%s", key, spec->name,
                   name, suggest(name, names, spec->group_count, "", near, sizeof near));
}

/* The key's name without its group. */
static const struct setting_key *find_key(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (strcmp(keys[i].name, name) == 0)
            return &keys[i];
    return NULL;
}

_Static_assert(ARRAY_SIZE(keys) <= SETTINGS_KEYS_MAX, "settings_text.h says so");

const char *settings_key(uint32_t index)
{
    return index < ARRAY_SIZE(keys) ? keys[index].name : NULL;
}

bool settings_has_key(const char *key)
{
    const size_t bytes = strcspn(key, ".=");
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (strlen(keys[i].name) == bytes && memcmp(keys[i].name, key, bytes) == 0)
            return true;
    return false;
}

/* Momentum and beta1 are one number, of different optimizers. */
static bool has(const struct spec *spec, uint32_t group, const struct setting_key *key)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[spec->optimizer];
    const char *const beta1 = row->beta1_key, *const beta2 = row->beta2_key;
    if (spec->groups[group].mean)
        return false;
    if (key->rates == 2)
        return beta2 != NULL;
    if (key->rate == SETTING_BETA1)
        return beta1 != NULL && strcmp(key->name, beta1) == 0;
    return key->rate != SETTING_BETA2 || beta2 != NULL;
}

/* -- A change ---------------------------------------------------------------------------------- */

static int err_values(const char *key, uint32_t count, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "%.60s takes %s, or the word spec", key,
                   count == 2 ? "two numbers, as 0.9,0.95" : "a number, as 0.5");
}

/* values: an array of numbers; NULL: not set any more. */
static int take_values(const char *key, const json_t *values, uint32_t count, double ret_x[2],
                       struct shd_err *e)
{
    if (values != NULL && json_array_size(values) != count)
        return err_values(key, count, e);
    for (uint32_t i = 0; i < count; i++) {
        const json_t *v = values != NULL ? json_array_get(values, i) : NULL;
        if (values != NULL && (!json_is_number(v) || json_number_value(v) < 0))
            return err_values(key, count, e);
        ret_x[i] = v != NULL ? json_number_value(v) : SETTINGS_BACK;
    }
    return SHD_OK;
}

static int put_number(const char *key, double x, double *number, struct shd_err *e)
{
    if (!isnan(*number) && *number != x)
        return err_set(e, SHD_EINVAL, "%.60s is given twice, with different values", key);
    *number = x;
    return SHD_OK;
}

static int put_group(const struct spec *spec, const char *key, const struct setting_key *k,
                     uint32_t group, const double x[2], struct settings *change, struct shd_err *e)
{
    int r = SHD_OK;
    if (!has(spec, group, k))
        return err_set(
            e, SHD_EINVAL, "%.60s: group '%.40s' has no %s: its optimizer is %s", key,
            spec->groups[group].name, k->name,
            spec_optimizer_rows[spec->groups[group].mean ? SPEC_MEAN : spec->optimizer].kind);
    for (uint32_t i = 0; r == SHD_OK && i < k->rates; i++)
        r = put_number(key, x[i],
                       &change->numbers[setting_of(group, (enum setting_rate)(k->rate + i))], e);
    return r;
}

static int take_one(const struct spec *spec, const char *key, const json_t *values,
                    struct settings *change, struct shd_err *e)
{
    char name[KEY_BYTES_MAX];
    double x[2] = { 0 };
    uint32_t group = 0;
    const char *dot = strchr(key, '.');
    const size_t bytes = dot != NULL ? (size_t)(dot - key) : strlen(key);
    if (strlen(key) >= sizeof name)
        return err_set(e, SHD_EINVAL, "a key of %zu bytes, at most %u", strlen(key),
                       KEY_BYTES_MAX - 1);
    memcpy(name, key, bytes);
    name[bytes] = '\0';
    const struct setting_key *k = find_key(name);
    if (k == NULL)
        return err_unknown(name, e);
    int r = take_values(key, values, k->rates > 0 ? k->rates : 1, x, e);
    if (r != SHD_OK)
        return r;
    if (k->rates == 0 && dot != NULL)
        return err_set(e, SHD_EINVAL, "clip_norm is of all groups together: clip_norm=VALUE");
    if (k->rates == 0)
        return put_number(key, x[0], &change->numbers[SETTINGS_CLIP_NORM], e);
    if (dot != NULL) {
        r = find_group(spec, name, dot + 1, &group, e);
        return r == SHD_OK ? put_group(spec, key, k, group, x, change, e) : r;
    }
    bool any = false;
    for (group = 0; r == SHD_OK && group < spec->group_count; group++) {
        const bool mine = has(spec, group, k);
        if (mine)
            r = put_group(spec, key, k, group, x, change, e);
        any = any || mine;
    }
    return r != SHD_OK || any ? r : put_group(spec, key, k, 0, x, change, e);
}

/* KEY=VALUE. */
static int take_word(const struct spec *spec, const char *word, size_t bytes,
                     struct settings *change, struct shd_err *e)
{
    char text[2 * KEY_BYTES_MAX], list[2 * KEY_BYTES_MAX + 4];
    if (bytes >= sizeof text)
        return err_set(e, SHD_EINVAL, "a setting of %zu bytes, at most %zu", bytes,
                       sizeof text - 1);
    memcpy(text, word, bytes);
    text[bytes] = '\0';
    char *value = strrchr(text, '='); /* a group's name may have one */
    if (value == NULL)
        return err_set(e, SHD_EINVAL,
                       "'%.60s' is no setting: KEY=VALUE, or KEY.GROUP=VALUE, as "
                       "lr_scale.decay=0.5",
                       text);
    *value++ = '\0';
    if (strcmp(value, "spec") == 0)
        return take_one(spec, text, NULL, change, e);
    snprintf(list, sizeof list, "[%s]", value);
    json_t *values = json_loads(list, JSON_DECODE_INT_AS_REAL, NULL);
    if (values == NULL)
        values = json_array(); /* which is no number */
    const int r = take_one(spec, text, values, change, e);
    json_decref(values);
    return r;
}

static int take_words(const struct spec *spec, const char *text, struct settings *change,
                      struct shd_err *e)
{
    static const char space[] = " \t\r\n";
    int r = SHD_OK;
    for (text += strspn(text, space); r == SHD_OK && *text != '\0'; text += strspn(text, space)) {
        const size_t bytes = strcspn(text, space);
        r = take_word(spec, text, bytes, change, e);
        text += bytes;
    }
    return r;
}

static int take_object(const struct spec *spec, const char *text, struct settings *change,
                       struct shd_err *e)
{
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &why), *v;
    const char *key;
    int r = SHD_OK;
    if (!json_is_object(root)) {
        json_decref(root);
        return err_set(e, SHD_EINVAL, "settings, line %d: not a JSON object: %.100s", why.line,
                       why.text);
    }
    json_object_foreach(root, key, v)
    {
        json_t *list = json_is_array(v) ? json_incref(v) : json_pack("[O]", v);
        if (r == SHD_OK && list != NULL)
            r = take_one(spec, key, json_is_null(v) ? NULL : list, change, e);
        else if (r == SHD_OK)
            r = err_set(e, SHD_ENOMEM, "no memory for settings");
        json_decref(list);
    }
    json_decref(root);
    return r;
}

int settings_parse(const struct spec *spec, const char *text, struct settings *ret_change,
                   struct shd_err *e)
{
    struct settings change;
    bool any = false;
    settings_init(&change, spec);
    if (strlen(text) > SETTINGS_TEXT_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "settings of %zu bytes, at most %zu", strlen(text),
                       SETTINGS_TEXT_BYTES_MAX);
    const char *first = text + strspn(text, " \t\r\n");
    int r = *first == '{' ? take_object(spec, first, &change, e)
                          : take_words(spec, first, &change, e);
    for (uint32_t i = 0; i < change.count; i++)
        any = any || !isnan(change.numbers[i]);
    if (r == SHD_OK && !any)
        r = err_set(e, SHD_EINVAL, "no setting is given: KEY=VALUE, as lr_scale.%.60s=0.5",
                    spec->groups[0].name);
    if (r == SHD_OK)
        r = settings_check(spec, &change, /* change= */ true, e);
    if (r == SHD_OK)
        *ret_change = change;
    return r;
}

/* -- What is set ------------------------------------------------------------------------------- */

static json_t *now_json(const struct spec *spec, const struct settings *now, const uint64_t *since)
{
    char name[SETTING_NAME_BYTES];
    json_t *o = json_object();
    for (uint32_t i = 0; i < now->count; i++)
        if (!isnan(now->numbers[i]))
            json_object_set_new(
                o, setting_name(spec, i, name, sizeof name),
                json_pack("{s:f, s:I}", "value", now->numbers[i], "from", (json_int_t)since[i]));
    return o;
}

static json_t *next_json(const struct spec *spec, const struct settings_kept *kept)
{
    char name[SETTING_NAME_BYTES];
    json_t *o = json_object();
    for (uint32_t i = 0; i < kept->next.count; i++) {
        const double x = kept->next.numbers[i];
        if (!isnan(x))
            json_object_set_new(o, setting_name(spec, i, name, sizeof name),
                                x == SETTINGS_BACK ? json_null() : json_real(x));
    }
    return json_pack("{s:I, s:o}", "from", (json_int_t)kept->from, "settings", o);
}

int settings_json(const struct spec *spec, const struct settings_kept *kept, uint64_t step,
                  char **ret_json, struct shd_err *e)
{
    struct settings now;
    uint64_t since[SETTINGS_MAX];
    settings_at(kept, step, &now, since);
    const bool waits = kept->next.count > 0 && step < kept->from;
    json_t *root = json_pack("{s:o, s:o}", "now", now_json(spec, &now, since), "next",
                             waits ? next_json(spec, kept) : json_null());
    char *json = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for settings");
    *ret_json = json;
    return SHD_OK;
}

static bool read_step(const json_t *o, uint64_t *ret_step)
{
    const json_t *v = json_object_get(o, "from");
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *ret_step = (uint64_t)json_integer_value(v);
    return true;
}

/* The index of a setting by its name; UINT32_MAX: there is none. */
static uint32_t index_of(const struct spec *spec, uint32_t count, const char *key)
{
    char name[SETTING_NAME_BYTES];
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(setting_name(spec, i, name, sizeof name), key) == 0)
            return i;
    return UINT32_MAX;
}

static int err_read(const char *key, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "settings: '%.60s' is not what it must be", key);
}

static int read_now(const struct spec *spec, const json_t *now, struct settings_kept *kept,
                    struct shd_err *e)
{
    const char *key;
    json_t *v;
    if (!json_is_object(now))
        return err_read("now", e);
    json_object_foreach((json_t *)now, key, v)
    {
        const uint32_t i = index_of(spec, kept->now.count, key);
        const json_t *x = json_object_get(v, "value");
        if (i == UINT32_MAX || !json_is_number(x) || !read_step(v, &kept->since[i]))
            return err_read(key, e);
        kept->now.numbers[i] = json_number_value(x);
    }
    return settings_check(spec, &kept->now, /* change= */ false, e);
}

static int read_next(const struct spec *spec, const json_t *next, struct settings_kept *kept,
                     struct shd_err *e)
{
    const char *key;
    json_t *v, *list = json_object_get(next, "settings");
    if (!json_is_object(list) || !read_step(next, &kept->from))
        return err_read("next", e);
    settings_init(&kept->next, spec);
    json_object_foreach(list, key, v)
    {
        const uint32_t i = index_of(spec, kept->next.count, key);
        if (i == UINT32_MAX || !(json_is_number(v) || json_is_null(v)))
            return err_read(key, e);
        kept->next.numbers[i] = json_is_null(v) ? SETTINGS_BACK : json_number_value(v);
    }
    return settings_check(spec, &kept->next, /* change= */ true, e);
}

int settings_read(const struct spec *spec, const char *json, size_t bytes,
                  struct settings_kept *ret_kept, struct shd_err *e)
{
    struct settings_kept kept = { 0 };
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, NULL);
    settings_init(&kept.now, spec);
    int r = json_is_object(root) ? SHD_OK : err_read("the whole", e);
    if (r == SHD_OK)
        r = read_now(spec, json_object_get(root, "now"), &kept, e);
    if (r == SHD_OK && json_is_object(json_object_get(root, "next")))
        r = read_next(spec, json_object_get(root, "next"), &kept, e);
    json_decref(root);
    if (r == SHD_OK)
        *ret_kept = kept;
    return r;
}
