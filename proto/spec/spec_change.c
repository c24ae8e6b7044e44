/* See spec_change.h. */
#include "proto/spec/spec_change.h"

#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/settings_text.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"

#define KEY_BYTES_MAX 200u

static const char space[] = " \t\r\n";

static const char *const fields[] = {
    "micro_batches", "accumulate", "verify_every", "publish",    "grad_dtype",
    "guard",         "eps",        "ema",          "ema_warmup",
};

/* What people may want to be other, and cannot. */
static const struct {
    const char *name, *why;
} fixed[] = {
    { "name", "it is given beside what is changed" },
    { "seed", "the initial values are made of it, and a fork has others" },
    { "optimizer", "its moments are of the optimizer of the model that it is made of" },
    { "codec",
      "tensors begin at other places with one than without, and its arrays are those of the "
      "model that it is made of" },
    { "grad_codec", "tensors begin at other places with one than without, and its arrays are those "
                    "of the model that it is made of" },
    { "groups", "lr_scale.GROUP, weight_decay.GROUP and betas.GROUP change what is of a group" },
    { "units", "its arrays are laid out by them, and are those of the model that it is made of" },
};

struct change {       /* what is asked for, told apart */
    json_t *fields;   /* owned: an object */
    json_t *settings; /* owned: likewise, of text that was an object */
    char *words;      /* owned: of text that was words; with a NUL */
};

/* -- Keys -------------------------------------------------------------------------------------- */

static bool is_field(const char *key)
{
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++)
        if (strcmp(fields[i], key) == 0)
            return true;
    return false;
}

/* What is a field as well is one: it may be what a model is laid out by. key: may go on with '='.
 */
static bool is_setting(const char *key)
{
    const size_t bytes = strcspn(key, ".=");
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++)
        if (strlen(fields[i]) == bytes && memcmp(fields[i], key, bytes) == 0)
            return false;
    return settings_has_key(key);
}

static int check_field(const char *key, struct shd_err *e)
{
    const char *names[ARRAY_SIZE(fields) + SETTINGS_KEYS_MAX];
    char near[160];
    size_t count = 0;
    if (is_field(key))
        return SHD_OK;
    for (size_t i = 0; i < ARRAY_SIZE(fixed); i++)
        if (strcmp(key, fixed[i].name) == 0)
            return err_set(e, SHD_EINVAL, "%s cannot be other in a fork: %s", key, fixed[i].why);
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++)
        names[count++] = fields[i];
    for (uint32_t i = 0; settings_key(i) != NULL; i++)
        if (!is_field(settings_key(i)))
            names[count++] = settings_key(i);
    return err_set(e, SHD_EINVAL, "a fork has no '%.40s' of its own%s", key,
                   suggest(key, names, count, "", near, sizeof near));
}

/* value: taken over. */
static int put_field(struct change *c, const char *key, json_t *value, struct shd_err *e)
{
    int r = check_field(key, e);
    const json_t *before = json_object_get(c->fields, key);
    if (r == SHD_OK && json_is_string(value) && strcmp(key, "guard") == 0)
        r = err_set(e, SHD_EINVAL,
                    "guard is a list of rules, as guard=[{\"norm_above\":100}], or null: what a "
                    "guard has stopped is told to go on with shardctl set MODEL guard=go-on");
    if (r == SHD_OK && before != NULL && !json_equal(before, value))
        r = err_set(e, SHD_EINVAL, "%s is given twice, with different values", key);
    if (r != SHD_OK) {
        json_decref(value);
        return r;
    }
    return json_object_set_new(c->fields, key, value) == 0
               ? SHD_OK
               : err_set(e, SHD_ENOMEM, "no memory for what a fork is to have");
}

/* -- Text -------------------------------------------------------------------------------------- */

/* The end of the word that begins here: at a blank, for a field outside of brackets and quotes. A
 * group's name may have some. */
static const char *word_end(const char *at)
{
    if (is_setting(at))
        return at + strcspn(at, space);
    uint32_t depth = 0;
    bool quoted = false, value = false;
    for (; *at != '\0'; at++) {
        value = value || *at == '=';
        if (quoted && *at == '\\' && at[1] != '\0')
            at++;
        else if (value && *at == '"')
            quoted = !quoted;
        else if (value && !quoted && (*at == '[' || *at == '{'))
            depth++;
        else if (!quoted && (*at == ']' || *at == '}') && depth > 0)
            depth--;
        else if (!quoted && depth == 0 && strchr(space, *at) != NULL)
            break;
    }
    return at;
}

/* KEY=VALUE of a setting goes on as it is; a field's value is JSON, or a word that is none. */
static int take_word(struct change *c, const char *word, size_t bytes, struct shd_err *e)
{
    char key[KEY_BYTES_MAX];
    const char *value = memchr(word, '=', bytes);
    const size_t key_bytes = value != NULL ? (size_t)(value - word) : bytes;
    if (key_bytes >= sizeof key)
        return err_set(e, SHD_EINVAL, "a key of %zu bytes, at most %u", key_bytes,
                       KEY_BYTES_MAX - 1);
    memcpy(key, word, key_bytes);
    key[key_bytes] = '\0';
    if (is_setting(key)) {
        const size_t used = strlen(c->words);
        memcpy(c->words + used, word, bytes);
        c->words[used + bytes] = ' '; /* the buffer is of zeros, and longer than the text */
        return SHD_OK;
    }
    if (value == NULL)
        return err_set(e, SHD_EINVAL, "'%.60s' changes nothing: KEY=VALUE, as micro_batches=8",
                       key);
    value++;
    const size_t value_bytes = bytes - key_bytes - 1;
    json_t *parsed = json_loadb(value, value_bytes, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    if (parsed == NULL)
        parsed = json_stringn(value, value_bytes);
    if (parsed == NULL)
        return err_set(e, SHD_EINVAL, "%.60s: its value is no UTF-8", key);
    return put_field(c, key, parsed, e);
}

static int take_words(struct change *c, const char *text, struct shd_err *e)
{
    int r = SHD_OK;
    c->words = sys_calloc(strlen(text) + 2, 1);
    if (c->words == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for what a fork is to have");
    for (text += strspn(text, space); r == SHD_OK && *text != '\0'; text += strspn(text, space)) {
        const char *end = word_end(text);
        r = take_word(c, text, (size_t)(end - text), e);
        text = end;
    }
    return r;
}

static int take_object(struct change *c, const char *text, struct shd_err *e)
{
    json_error_t why;
    const char *key;
    json_t *value, *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    int r = SHD_OK;
    if (!json_is_object(root)) {
        r = err_set(e, SHD_EINVAL, "what is to be other is no JSON object: %.100s at byte %d",
                    root == NULL ? why.text : "another value", root == NULL ? why.position : 0);
        json_decref(root);
        return r;
    }
    json_object_foreach(root, key, value)
    {
        if (r == SHD_OK && is_setting(key) && json_object_set(c->settings, key, value) != 0)
            r = err_set(e, SHD_ENOMEM, "no memory for what a fork is to have");
        else if (r == SHD_OK && !is_setting(key))
            r = put_field(c, key, json_incref(value), e);
    }
    json_decref(root);
    return r;
}

static int take_text(struct change *c, const char *text, struct shd_err *e)
{
    const char *first = text + strspn(text, space);
    if (strlen(text) > SETTINGS_TEXT_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%zu bytes of what is to be other, at most %zu", strlen(text),
                       SETTINGS_TEXT_BYTES_MAX);
    if (*first == '\0')
        return err_set(e, SHD_EINVAL,
                       "nothing is to be other: KEY=VALUE, as micro_batches=8 lr_scale=0.5");
    return *first == '{' ? take_object(c, first, e) : take_words(c, first, e);
}

/* -- The spec ---------------------------------------------------------------------------------- */

/* Of the optimizer's the rest stays. */
static int put_in(json_t *root, const char *name, const struct change *c)
{
    const char *key;
    json_t *value;
    int failed = json_object_set_new(root, "name", json_string(name));
    json_object_foreach(c->fields, key, value)
    {
        json_t *to = strcmp(key, "eps") == 0 ? json_object_get(root, "optimizer") : root;
        if (json_is_null(value))
            json_object_del(to, key);
        else if (json_object_set(to, key, value) != 0)
            failed = -1;
    }
    return failed;
}

/* The canonical JSON of the model, changed, and read as any that a user writes. */
static int parse_changed(const struct spec *spec, const char *name, const struct change *c,
                         struct spec **ret_spec, struct shd_err *e)
{
    char *json = NULL, *changed = NULL;
    int r = spec_dump(spec, &json, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loads(json, JSON_DECODE_ANY, NULL);
    free(json);
    if (root != NULL && put_in(root, name, c) == 0)
        changed = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    if (changed == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a spec, or its name is no UTF-8");
    r = spec_parse(changed, strlen(changed), ret_spec, e);
    free(changed);
    return r;
}

/* Each array of the one is an array of the other. */
static int check_arrays(const struct spec *from, const struct spec *to, struct shd_err *e)
{
    if ((from->ema > 0) == (to->ema > 0))
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "model '%.60s' has %s moving average of its parameters, so its fork has %s: ema "
                   "changes the decay of one that is there",
                   from->name, from->ema > 0 ? "a" : "no", from->ema > 0 ? "one" : "none");
}

static int parse_settings(const struct spec *spec, const struct change *c,
                          struct settings *ret_change, struct shd_err *e)
{
    ret_change->count = 0;
    if (c->words != NULL && c->words[0] != '\0')
        return settings_parse(spec, c->words, ret_change, e);
    if (json_object_size(c->settings) == 0)
        return SHD_OK;
    char *json = json_dumps(c->settings, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for settings");
    const int r = settings_parse(spec, json, ret_change, e);
    free(json);
    return r;
}

int spec_change(const struct spec *spec, const char *name, const char *text,
                struct spec_changed *ret_changed, struct shd_err *e)
{
    struct change c = { .fields = json_object(), .settings = json_object() };
    struct spec_changed changed = { .spec = NULL };
    int r = c.fields == NULL || c.settings == NULL
                ? err_set(e, SHD_ENOMEM, "no memory for what a fork is to have")
                : SHD_OK;
    if (r == SHD_OK && text != NULL)
        r = take_text(&c, text, e);
    if (r == SHD_OK)
        r = parse_changed(spec, name, &c, &changed.spec, e);
    if (r == SHD_OK)
        r = check_arrays(spec, changed.spec, e);
    if (r == SHD_OK)
        r = parse_settings(changed.spec, &c, &changed.change, e);
    if (r == SHD_OK)
        r = spec_dump(changed.spec, &changed.json, e);
    json_decref(c.fields);
    json_decref(c.settings);
    free(c.words);
    if (r == SHD_OK)
        *ret_changed = changed;
    else
        spec_changed_free(&changed);
    return r;
}

void spec_changed_free(struct spec_changed *changed)
{
    spec_free(changed->spec);
    free(changed->json);
    *changed = (struct spec_changed){ .spec = NULL };
}
