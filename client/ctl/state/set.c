/* See set.h. */
#include "client/ctl/state/set.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/status_doc.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/shd.h"
#include "proto/base/sys.h"

#define STEP_MAX 0x1p33

static const char set_about[] =
    "Change hyperparameters of a model that trains: its parameters and moments stay, workers go "
    "on.\n"
    "What is set is in force from one step on, the same at all owners, whatever is killed; it is\n"
    "saved with checkpoints. It comes before what the spec and the workers say.\n"
    "Without settings: what is set, and from which step on.";

static const char set_more[] = VERB_WHERE
    "\n"
    "settings, of a group of the spec, or without GROUP of all that have it:\n"
    "  lr_scale.GROUP=X      times the workers' learning rate, instead of the spec's lr_scale\n"
    "  weight_decay.GROUP=X\n"
    "  betas.GROUP=X,Y       or beta1.GROUP=X, beta2.GROUP=Y; of SGD momentum.GROUP=X\n"
    "  eps.GROUP=X           of AdamW\n"
    "  clip_norm=X           of all gradients together; 0: do not clip\n"
    "  micro_batches=N       of a step, from the step after the open one on; at most the spec's\n"
    "                        micro_batches_max, and a multiple of its accumulate\n"
    "  ...=spec              not set any more: as the spec and the workers say\n"
    "  ...=now               what waits of it for its step is given up (with --at: of that step)\n"
    "  guard=go-on           alone: what the model's guard has stopped is trained again\n"
    "\n"
    "examples:\n"
    "  shardctl set gpt lr_scale.decay=0.5 weight_decay.decay=0.05\n"
    "  shardctl set clip_norm=1 --at 2000    from step 2000 on, as `shardctl status` counts\n"
    "  shardctl set gpt micro_batches=16 --at 5000\n"
    "  shardctl set gpt --show\n"
    "\nexit code 1: nothing was changed; the reason is on stderr\n";

struct ask {
    const char *address, *model;
    char *text; /* owned: settings; NULL: none */
    uint64_t at;
    bool show, json;
};

/* -- What is set ------------------------------------------------------------------------------- */

static void print_value(const char *key, const json_t *value)
{
    char name[200], number[TEXT_BYTES] = "spec";
    if (json_is_number(value))
        snprintf(number, sizeof number, "%.9g", json_number_value(value));
    printf("  %s=%s", text_clean(key, name, sizeof name), number);
}

static void print_waits(const json_t *next)
{
    const json_t *v;
    const char *key;
    json_object_foreach(json_object_get(next, "settings"), key, v)
    {
        print_value(key, v);
        printf("  waits for step %" JSON_INTEGER_FORMAT "\n",
               json_integer_value(json_object_get(next, "from")));
    }
}

static void print_settings(const char *model, const json_t *root)
{
    const json_t *next = json_object_get(root, "next"), *v;
    json_t *now = json_object_get(root, "now");
    const char *key;
    size_t i;
    printf("%s: %s\n", model, json_object_size(now) == 0 ? "nothing is set" : "set is");
    json_object_foreach(now, key, v)
    {
        print_value(key, json_object_get(v, "value"));
        printf("  from step %" JSON_INTEGER_FORMAT " on\n",
               json_integer_value(json_object_get(v, "from")));
    }
    print_waits(next);
    json_array_foreach(json_object_get(root, "later"), i, next)
    {
        print_waits(next);
    }
}

static int show(const struct ask *ask, shd_model *m, struct shd_err *e)
{
    char *text = NULL;
    int r = shd_settings(m, &text, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loads(text, 0, NULL);
    free(text);
    if (!json_is_object(root))
        r = err_set(e, SHD_EPROTO, "the daemon's settings are no JSON object");
    else if (ask->json)
        verb_json(json_incref(root), JSON_COMPACT, stdout);
    else
        print_settings(shd_model_name(m), root);
    json_decref(root);
    return r;
}

/* -- Changing ---------------------------------------------------------------------------------- */

static int change(const struct ask *ask, shd_model *m, struct shd_err *e)
{
    uint64_t from = 0;
    const int r = shd_model_set(m, ask->text, ask->at, &from, e);
    if (r != SHD_OK || ask->show)
        return r;
    if (!ask->json)
        printf("set model=%s from=%" PRIu64 "\n", shd_model_name(m), from);
    else
        verb_json(json_pack("{s:s, s:I}", "model", shd_model_name(m), "from", (json_int_t)from),
                  JSON_COMPACT, stdout);
    return r;
}

static int set_or_show(const struct ask *ask, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl set",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    shd_session *s = NULL;
    shd_model *m = NULL;
    int r = shd_connect(&options, &s, e);
    if (r == SHD_OK)
        r = shd_model_attach(s, ask->model, &m, e);
    if (r == SHD_OK && ask->text != NULL)
        r = change(ask, m, e);
    if (r == SHD_OK && (ask->show || ask->text == NULL))
        r = show(ask, m, e);
    shd_close(s);
    return r;
}

/* A first word without '=' is the model's name; the others are settings. */
static int take_words(struct ask *ask, char **words, int count, struct shd_err *e)
{
    size_t bytes = 1;
    int first = 0;
    if (count > 0 && strchr(words[0], '=') == NULL)
        ask->model = words[first++];
    for (int i = first; i < count; i++)
        bytes += strlen(words[i]) + 1;
    if (first == count)
        return SHD_OK;
    ask->text = sys_calloc(1, bytes);
    if (ask->text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %zu bytes of settings", bytes);
    for (int i = first, at = 0; i < count; i++)
        at += snprintf(ask->text + at, bytes - (size_t)at, "%s ", words[i]);
    return SHD_OK;
}

int verb_set(int argc, char **argv)
{
    struct ask ask = { .model = NULL };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "at", 0, FLAG_U64, "STEP", "from this step on (the first that can be)", &ask.at, 0,
          STEP_MAX },
        { "show", 's', FLAG_BOOL, NULL, "what is set, after the change", &ask.show, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(set, "shardctl set [MODEL] [SETTING...] [FLAGS]", table);
    int count;
    const int code = verb_start_words(&flags, argc, argv, &count);
    if (code >= 0)
        return code;
    int r = take_words(&ask, argv + 1, count, &e);
    if (r == SHD_OK && ask.at > 0 && ask.text == NULL)
        return ctl_usage("--at %" PRIu64 " without a setting: shardctl set KEY=VALUE --at STEP",
                         ask.at);
    if (r == SHD_OK)
        r = set_or_show(&ask, &e);
    free(ask.text);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
