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

enum key_kind { KEY_MODEL, KEY_RATE, KEY_EPS };

struct setting_key {
    const char *name;
    enum key_kind kind;
    uint32_t count;         /* of numbers */
    enum setting_rate rate; /* KEY_RATE: the first of them */
};

static const struct setting_key keys[] = {
    { "clip_norm", KEY_MODEL, 1, SETTING_LR_SCALE },
    { "micro_batches", KEY_MODEL, 1, SETTING_LR_SCALE },
    { "lr_scale", KEY_RATE, 1, SETTING_LR_SCALE },
    { "weight_decay", KEY_RATE, 1, SETTING_WEIGHT_DECAY },
    { "betas", KEY_RATE, 2, SETTING_BETA1 },
    { "beta1", KEY_RATE, 1, SETTING_BETA1 },
    { "beta2", KEY_RATE, 1, SETTING_BETA2 },
    { "momentum", KEY_RATE, 1, SETTING_BETA1 },
    { "eps", KEY_EPS, 1, SETTING_LR_SCALE },
};

/* Where the key's numbers are. */
static uint32_t first_index(const struct spec *spec, const struct setting_key *k, uint32_t group)
{
    if (k->kind == KEY_EPS)
        return setting_eps(spec->group_count, group);
    if (k->kind == KEY_RATE)
        return setting_of(group, k->rate);
    return strcmp(k->name, "clip_norm") == 0 ? SETTINGS_CLIP_NORM
                                             : setting_micros(spec->group_count);
}

/* What people may want to change, and cannot. */
#define RESTORE "restore the weights into a model with another spec (shardctl restore --weights)"
static const struct {
    const char *name, *why;
} fixed[] = {
    { "lr", "the learning rate is the worker's, given with each step: lr_scale multiplies it" },
    { "loss_scale", "it is the worker's, given with each step" },
    { "micro_batches_max", "the owners' memory is laid out for it; " RESTORE },
    { "accumulate", "workers sum so many micro-batches, and the owners' memory is laid out by it; "
                    "micro_batches can be changed, in multiples of it; " RESTORE },
    { "verify_every", "it is part of the spec; " RESTORE },
    { "guard_audit", "it is part of the spec; " RESTORE },
    { "publish", "workers have mapped the parameters in that type; " RESTORE },
    { "grad_dtype", "workers' gradients have that type; " RESTORE },
    { "optimizer", "moments are of one optimizer; " RESTORE },
    { "ema", "its decay is fixed with the model; " RESTORE },
    { "ema_warmup", "it is fixed with the model; " RESTORE },
    { "seed", "the initial values are made of it, and they are made" },
    { "name", "it is what everybody opens the model by; shardctl fork makes another one" },
    { "units", "they are how the owners' memory is laid out; " RESTORE },
    { "groups", "which tensor is of which is part of the spec; a group's rates can be changed, as "
                "lr_scale.GROUP=0.5" },
    { "guard",
      "its rules are part of the spec; guard=go-on, alone, trains on what it has stopped" },
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
    const struct spec_optimizer_row *row = &spec_optimizer_rows[spec_group_optimizer(spec, group)];
    const char *const beta1 = row->beta1_key, *const beta2 = row->beta2_key;
    if (spec->groups[group].mean)
        return false;
    if (key->kind == KEY_EPS)
        return row->eps_key != NULL;
    if (key->count == 2)
        return beta2 != NULL;
    if (key->rate == SETTING_BETA1)
        return beta1 != NULL && strcmp(key->name, beta1) == 0;
    return key->rate != SETTING_BETA2 || beta2 != NULL;
}

/* -- A change ---------------------------------------------------------------------------------- */

static int err_values(const char *key, const struct setting_key *k, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "%.60s takes %s, or one of the words spec and now", key,
                   k->count == 2                           ? "two numbers, as 0.9,0.95"
                   : strcmp(k->name, "micro_batches") == 0 ? "a number, as 8"
                                                           : "a number, as 0.5");
}

/* values: an array of numbers; or of a word: spec, it is not set any more; now, what waits of it is
 * given up. */
static int take_values(const char *key, const json_t *values, const struct setting_key *k,
                       double ret_x[2], struct shd_err *e)
{
    const char *word = json_string_value(json_array_get(values, 0));
    const bool spec = word != NULL && strcmp(word, "spec") == 0;
    const bool one = json_array_size(values) == 1;
    if (word != NULL && (!one || (!spec && strcmp(word, "now") != 0)))
        return err_values(key, k, e);
    if (word == NULL && json_array_size(values) != k->count)
        return err_values(key, k, e);
    for (uint32_t i = 0; i < k->count; i++) {
        const json_t *v = json_array_get(values, i);
        if (word == NULL && (!json_is_number(v) || json_number_value(v) < 0))
            return err_values(key, k, e);
        ret_x[i] = word == NULL ? json_number_value(v) : spec ? SETTINGS_BACK : SETTINGS_STAY;
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
        return err_set(e, SHD_EINVAL, "%.60s: group '%.40s' has no %s: its optimizer is %s", key,
                       spec->groups[group].name, k->name,
                       spec_optimizer_rows[spec_group_optimizer(spec, group)].kind);
    for (uint32_t i = 0; r == SHD_OK && i < k->count; i++)
        r = put_number(key, x[i], &change->numbers[first_index(spec, k, group) + i], e);
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
    int r = take_values(key, values, k, x, e);
    if (r != SHD_OK)
        return r;
    if (k->kind == KEY_MODEL && dot != NULL)
        return err_set(e, SHD_EINVAL, "%s is of all groups together: %s=VALUE", k->name, k->name);
    if (k->kind == KEY_MODEL)
        return put_number(key, x[0], &change->numbers[first_index(spec, k, 0)], e);
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
    const bool word_alone = strcmp(value, "spec") == 0 || strcmp(value, "now") == 0;
    snprintf(list, sizeof list, word_alone ? "[\"%s\"]" : "[%s]", value);
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
        json_t *list = json_is_array(v)  ? json_incref(v)
                       : json_is_null(v) ? json_pack("[s]", "spec")
                                         : json_pack("[O]", v);
        if (r == SHD_OK && list != NULL)
            r = take_one(spec, key, list, change, e);
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

/* Those of `waits` that are for the step of the first one; *ret_count: so many. */
static json_t *next_json(const struct spec *spec, const struct settings_wait *waits, uint64_t count,
                         uint64_t *ret_count)
{
    char name[SETTING_NAME_BYTES];
    json_t *o = json_object();
    uint64_t i = 0;
    for (; i < count && waits[i].from == waits[0].from; i++)
        json_object_set_new(o, setting_name(spec, (uint32_t)waits[i].index, name, sizeof name),
                            waits[i].value == SETTINGS_BACK ? json_null()
                                                            : json_real(waits[i].value));
    *ret_count = i;
    return json_pack("{s:I, s:o}", "from", (json_int_t)waits[0].from, "settings", o);
}

/* By their steps, ascending; NULL: no memory. */
static json_t *waits_json(const struct spec *spec, const struct settings_kept *kept, uint64_t step)
{
    json_t *list = json_array();
    uint64_t at = 0, count;
    while (at < kept->waiting && kept->waits[at].from <= step)
        at++;
    for (; list != NULL && at < kept->waiting; at += count)
        if (json_array_append_new(
                list, next_json(spec, &kept->waits[at], kept->waiting - at, &count)) != 0) {
            json_decref(list);
            list = NULL;
        }
    return list;
}

int settings_json(const struct spec *spec, const struct settings_kept *kept, uint64_t step,
                  char **ret_json, struct shd_err *e)
{
    struct settings now;
    uint64_t since[SETTINGS_MAX];
    settings_at(kept, step, &now, since);
    json_t *waits = waits_json(spec, kept, step);
    if (waits == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for settings");
    json_t *next = json_array_size(waits) > 0 ? json_incref(json_array_get(waits, 0)) : json_null();
    json_t *root = json_pack("{s:o, s:o}", "now", now_json(spec, &now, since), "next", next);
    json_array_remove(waits, 0);
    if (root != NULL && json_array_size(waits) > 0) /* as builds that know of one have it, else */
        json_object_set(root, "later", waits);
    json_decref(waits);
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

/* Behind those that are there. */
static int read_next(const struct spec *spec, const json_t *next, struct settings_kept *kept,
                     struct shd_err *e)
{
    const char *key;
    json_t *v, *list = json_object_get(next, "settings");
    uint64_t from = 0;
    if (!json_is_object(list) || !read_step(next, &from))
        return err_read("next", e);
    json_object_foreach(list, key, v)
    {
        const uint32_t i = index_of(spec, kept->now.count, key);
        if (i == UINT32_MAX || !(json_is_number(v) || json_is_null(v)) ||
            kept->waiting == SETTINGS_WAITS_MAX)
            return err_read(key, e);
        struct settings one;
        settings_init(&one, spec);
        one.numbers[i] = json_is_null(v) ? SETTINGS_BACK : json_number_value(v);
        const int r = settings_check(spec, &one, /* change= */ true, e);
        if (r != SHD_OK)
            return r;
        kept->waits[kept->waiting++] = (struct settings_wait){ from, one.numbers[i], i };
    }
    return SHD_OK;
}

static int read_waits(const struct spec *spec, const json_t *root, struct settings_kept *kept,
                      struct shd_err *e)
{
    const json_t *next = json_object_get(root, "next"), *later = json_object_get(root, "later"), *v;
    size_t i;
    int r = json_is_object(next) ? read_next(spec, next, kept, e) : SHD_OK;
    if (later != NULL && !json_is_array(later))
        return err_read("later", e);
    json_array_foreach(later, i, v)
    {
        if (r == SHD_OK)
            r = read_next(spec, v, kept, e);
    }
    if (r == SHD_OK && !settings_kept_plausible(kept))
        r = err_read("later", e);
    return r;
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
    if (r == SHD_OK)
        r = read_waits(spec, root, &kept, e);
    json_decref(root);
    if (r == SHD_OK)
        *ret_kept = kept;
    return r;
}
