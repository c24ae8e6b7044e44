/* See model.h. */
#include "client/ctl/state/model.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/state/meter.h"
#include "client/shd.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

/* -- restore -------------------------------------------------------------------------------------
 */

static const char restore_about[] =
    "Make daemons open a model as a checkpoint has it: DIR/step-N, or DIR for its latest. There "
    "may\n"
    "be more or fewer daemons than when it was saved. Every byte is checked; all daemons open it "
    "or\n"
    "none. Workers then go on at its step. With --weights: parameters alone, found by tensor name "
    "in\n"
    "a safetensors file, or a directory with model.safetensors or its index, of any tool.\n"
    "With --replace a model that is open gives way to the checkpoint's. Nobody may be training "
    "it:\n"
    "end the workers first, or --force. For a moment there is memory for both.";

static const char restore_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl restore /data/run1\n"
    "  shardctl restore /data/run1/step-000000000500\n"
    "  shardctl restore --replace /data/run1/step-000000000500    go back to it\n"
    "  shardctl restore /data/run1 --spec tiles.json              cut into other tiles\n"
    "  shardctl restore --weights llama/model.safetensors --spec spec.json\n"
    "\nexit code 1: nothing was opened; the reason is on stderr\n";

struct ask {
    const char *path, *weights, *spec, *address;
    bool json, replace, force;
};

static void print_restored(const struct ask *ask, const struct shd_restored *r)
{
    if (!ask->json) {
        printf("restored model=%s step=%" PRIu64 " bytes=%" PRIu64 "\n", r->model, r->step,
               r->bytes);
        return;
    }
    json_t *o = json_pack("{s:s, s:I, s:I}", "model", r->model, "step", (json_int_t)r->step,
                          "bytes", (json_int_t)r->bytes);
    verb_json(o, JSON_COMPACT, stdout);
}

static int restore(const struct ask *ask, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl restore",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    struct shd_restore_options how = { .size = sizeof how,
                                       .weights = ask->weights != NULL,
                                       .replace = ask->replace,
                                       .force = ask->force };
    struct shd_restored restored = { .size = sizeof restored };
    char *spec = NULL;
    size_t bytes;
    shd_session *s = NULL;
    int r = SHD_OK;
    if (ask->spec != NULL)
        r = verb_file(ask->spec, SPEC_JSON_BYTES_MAX, &spec, &bytes, e);
    how.spec_json = spec;
    if (r == SHD_OK)
        r = shd_connect(&options, &s, e);
    const struct meter_ask how_far = { METER_RESTORE, ask->address, ask->json };
    struct meter *meter = r == SHD_OK ? meter_begin(&how_far) : NULL;
    if (r == SHD_OK)
        r = shd_restore(s, ask->weights != NULL ? ask->weights : ask->path, &how, &restored, e);
    meter_end(meter);
    if (r == SHD_OK)
        print_restored(ask, &restored);
    shd_close(s);
    free(spec);
    return r;
}

static int check_ask(const struct ask *ask, struct shd_err *e)
{
    if (ask->force && !ask->replace)
        return err_set(e, SHD_EINVAL, "--force without --replace: it is of what is replaced");
    if (ask->weights == NULL && ask->path == NULL)
        return err_set(e, SHD_EINVAL, "nothing to restore: shardctl restore DIR");
    if (ask->weights != NULL && ask->path != NULL)
        return err_set(e, SHD_EINVAL, "a checkpoint or --weights: one of them");
    if (ask->weights != NULL && ask->spec == NULL)
        return err_set(e, SHD_EINVAL,
                       "--weights and --spec go together: weights have no spec of their own");
    return SHD_OK;
}

int verb_restore(int argc, char **argv)
{
    struct ask ask = { .path = NULL };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "weights", 'w', FLAG_STRING, "FILE", "parameters alone, from here", &ask.weights, 0, 0 },
        { "spec", 's', FLAG_STRING, "FILE",
          "the model's spec, with --weights; or a checkpoint's with other tiles", &ask.spec, 0, 0 },
        { "replace", 0, FLAG_BOOL, NULL, "also where the model is open: its state goes",
          &ask.replace, 0, 0 },
        { "force", 0, FLAG_BOOL, NULL, "with --replace: also where somebody trains it: that ends",
          &ask.force, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object: model, step, bytes", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(restore, "shardctl restore DIR [FLAGS]", table);
    const char *more;
    const int code = verb_start_word(&flags, argc, argv, &ask.path, &more);
    if (code >= 0)
        return code;
    if (more != NULL)
        err_set(&e, SHD_EINVAL, "one checkpoint at a time, got '%s' as well", more);
    if (e.code != SHD_OK || check_ask(&ask, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    const int r = restore(&ask, &e);
    if (r == SHD_OK)
        return CTL_OK;
    ctl_say("%s", e.text);
    if (r == SHD_EEXIST)
        ctl_say(
            "nothing was changed; to go on from the checkpoint instead end its workers and restore "
            "with --replace: what is open is gone then (`shardctl checkpoint DIR` keeps it)");
    return CTL_FAILED;
}

/* -- digest --------------------------------------------------------------------------------------
 */

static const char digest_about[] =
    "Print SHA-256 over a model's parameters and optimizer state in tensor order. It does not\n"
    "depend on how many daemons hold the model. While training runs the step may move during the\n"
    "computation: then it is an error (exit code 1), try again.";

static const char digest_more[] = VERB_WHERE "\nexample:\n"
                                             "  shardctl digest --address /run/shardd --model gpt\n"
                                             "  digest sha256:5f0c... step=20 model=gpt\n";

struct digest {
    char hex[65];
    uint64_t step;
    const char *model; /* borrowed from the open model */
};

static void print_digest(const struct digest *d, bool as_json)
{
    if (!as_json) {
        printf("digest sha256:%s step=%" PRIu64 " model=%s\n", d->hex, d->step, d->model);
        return;
    }
    json_t *o = json_pack("{s:s, s:I, s:s}", "sha256", d->hex, "step", (json_int_t)d->step, "model",
                          d->model);
    verb_json(o, JSON_COMPACT, stdout);
}

static int digest_at(const char *address, const char *model_name, bool as_json, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl digest",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    shd_session *s;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    shd_model *m = NULL;
    struct digest d;
    r = shd_model_attach(s, model_name, &m, e);
    if (r == SHD_OK)
        r = shd_digest(m, d.hex, &d.step, e);
    if (r == SHD_OK) {
        d.model = shd_model_name(m);
        print_digest(&d, as_json);
    }
    shd_model_close(m);
    shd_close(s);
    return r;
}

/* The same for any number of daemons; training may go on, but the digest is of one step or an
 * error. */
int verb_digest(int argc, char **argv)
{
    const char *address = NULL, *model = NULL;
    bool as_json = false;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(address),
        { "model", 'm', FLAG_STRING, "NAME", "which model (the only one there)", &model, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object: sha256, step, model", &as_json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(digest, "shardctl digest [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    struct shd_err e = { 0 };
    if (digest_at(address, model, as_json, &e) == SHD_OK)
        return CTL_OK;
    return ctl_fail("%s", e.text);
}

/* -- drop ----------------------------------------------------------------------------------------
 */

static const char drop_about[] =
    "Drop a model: parameters, optimizer state and history are gone at all its daemons, or at "
    "none,\n"
    "whatever dies meanwhile, and the memory is given back. Other models go on. Who reads the "
    "model "
    "is\n"
    "told, and ends. Nobody may be training, saving or digesting it: end that first, or --force.\n"
    "What is in no checkpoint is lost: it goes after a yes at the terminal, or with --yes.";

static const char drop_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl drop gpt\n"
    "  shardctl checkpoint /data/run1 && shardctl drop --yes gpt    keep it on disk\n"
    "\n"
    "exit codes:\n"
    "  0  it is gone\n"
    "  1  it is there as before; the reason is on stderr\n"
    "  2  the command line was wrong, or there is no terminal to ask at\n";

struct drop {
    const char *name, *address;
    bool yes, force, json;
};

static int drop(const struct drop *ask, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl drop",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    const struct shd_drop_options how = { .size = sizeof how, .force = ask->force };
    shd_session *s = NULL;
    int r = shd_connect(&options, &s, e);
    if (r == SHD_OK)
        r = shd_model_drop(s, ask->name, &how, e);
    shd_close(s);
    return r;
}

/* Else *ret_code: it has said why. */
static bool may_drop(const struct drop *ask, int *ret_code)
{
    char answer[8];
    if (ask->yes)
        return true;
    if (!isatty(STDIN_FILENO)) {
        *ret_code = ctl_usage("not dropped: model '%s' would be lost. Save it (shardctl checkpoint "
                              "DIR), or let it go with --yes",
                              ask->name);
        return false;
    }
    ctl_say("drop model '%s', and lose what is in no checkpoint? [y/N]", ask->name);
    if (fgets(answer, sizeof answer, stdin) != NULL && (answer[0] == 'y' || answer[0] == 'Y'))
        return true;
    *ret_code = ctl_fail("not dropped");
    return false;
}

int verb_drop(int argc, char **argv)
{
    struct drop ask = { .name = NULL };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "yes", 'y', FLAG_BOOL, NULL, "do not ask", &ask.yes, 0, 0 },
        { "force", 0, FLAG_BOOL, NULL, "also where somebody trains it: that ends", &ask.force, 0,
          0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object: model, dropped", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(drop, "shardctl drop MODEL [FLAGS]", table);
    const char *more;
    struct shd_err e = { 0 };
    int code = verb_start_word(&flags, argc, argv, &ask.name, &more);
    if (code >= 0)
        return code;
    if (ask.name == NULL || ask.name[0] == '\0')
        return ctl_usage("which model? shardctl drop MODEL");
    if (more != NULL)
        return ctl_usage("one model at a time, got '%s' as well", more);
    if (!may_drop(&ask, &code))
        return code;
    if (drop(&ask, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    if (ask.json)
        verb_json(json_pack("{s:s, s:b}", "model", ask.name, "dropped", 1), JSON_COMPACT, stdout);
    else
        printf("dropped model=%s\n", ask.name);
    return CTL_OK;
}

/* -- fork ----------------------------------------------------------------------------------------
 */

static const char fork_about[] =
    "Make a second model, NEW, of what MODEL is at its open step, or was at STEP, of which there "
    "is a\n"
    "snapshot (`shardctl snapshots`): the same spec, parameters, optimizer state, counts, and the\n"
    "workers' own state; at all its daemons, or at none. It is a copy in memory, which training\n"
    "waits for; parameters of frozen units are there once for both. Then both go on by "
    "themselves;\n"
    "the history stays with MODEL. --set is in force from NEW's first step on.";

static const char fork_more[] = VERB_WHERE
    "\n"
    "what --set takes: what `shardctl set` takes, and fields of the spec that lay out no array:\n"
    "micro_batches, accumulate, verify_every, publish, grad_dtype, guard, eps, ema, ema_warmup\n"
    "\n"
    "examples:\n"
    "  shardctl fork gpt gpt-slow --set lr_scale=0.5     two learning rates from here on\n"
    "  shardctl fork gpt@1000 gpt-16 --set micro_batches=16 --set publish=bf16\n"
    "  shardctl fork gpt gpt-safe --set 'guard=[{\"norm_above\": 100}]'\n"
    "\nexit code 1: nothing was made; the reason is on stderr\n";

struct fork {
    const char *address;
    char name[SPEC_NAME_BYTES_MAX]; /* without its step */
    bool exact;
    uint64_t step; /* with exact */
    struct flag_list sets;
    bool json;
};

/* MODEL or MODEL@STEP: what digits alone follow an @ are. False: it is too long to be one. */
static bool take_at(const char *word, struct fork *ask)
{
    const char *at = strrchr(word, '@');
    const size_t digits = at != NULL ? strspn(at + 1, "0123456789") : 0;
    ask->exact = digits > 0 && digits < 16 && at[1 + digits] == '\0';
    const size_t bytes = ask->exact ? (size_t)(at - word) : strlen(word);
    if (bytes >= sizeof ask->name)
        return false;
    memcpy(ask->name, word, bytes);
    ask->name[bytes] = '\0';
    if (ask->exact)
        ask->step = strtoull(at + 1, NULL, 10);
    return true;
}

/* All of --set as one text; the caller's to free. NULL: there is none, or (*ret_failed) no memory.
 */
static char *join_sets(const struct flag_list *sets, bool *ret_failed)
{
    size_t bytes = 1;
    for (uint32_t i = 0; i < sets->count; i++)
        bytes += strlen(sets->items[i]) + 1;
    char *text = sets->count > 0 ? sys_calloc(bytes, 1) : NULL;
    *ret_failed = sets->count > 0 && text == NULL;
    size_t used = 0;
    for (uint32_t i = 0; text != NULL && i < sets->count; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i > 0 ? " " : "",
                                 sets->items[i]);
    return text;
}

static int fork_model(const struct fork *ask, const char *to, uint64_t *ret_step, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl fork",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    bool failed;
    char *set = join_sets(&ask->sets, &failed);
    const struct shd_fork_options how = {
        .size = sizeof how, .exact = ask->exact, .step = ask->step, .set = set
    };
    shd_session *s = NULL;
    shd_model *m = NULL;
    int r = failed ? err_set(e, SHD_ENOMEM, "no memory for --set") : SHD_OK;
    if (r == SHD_OK)
        r = shd_connect(&options, &s, e);
    if (r == SHD_OK)
        r = shd_model_attach(s, ask->name, &m, e);
    if (r == SHD_OK)
        r = shd_model_fork_with(m, to, &how, ret_step, e);
    shd_close(s);
    free(set);
    return r;
}

int verb_fork(int argc, char **argv)
{
    struct fork ask = { .address = NULL };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "set", 0, FLAG_LIST, "KEY=VALUE", "what is other in NEW; may be given again, or JSON",
          &ask.sets, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object: model, fork, step", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(fork, "shardctl fork MODEL[@STEP] NEW [FLAGS]", table);
    struct shd_err e = { 0 };
    uint64_t step = 0;
    int count = 0;
    const int code = verb_start_words(&flags, argc, argv, &count);
    if (code >= 0)
        return code;
    if (count != 2)
        return ctl_usage("which model, and what is its fork to be called? %s", flags.usage);
    const char *to = argv[2];
    if (!take_at(argv[1], &ask))
        return ctl_usage("a model's name has at most %u characters", SPEC_NAME_BYTES_MAX - 1);
    if (fork_model(&ask, to, &step, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    if (ask.json)
        verb_json(
            json_pack("{s:s, s:s, s:I}", "model", ask.name, "fork", to, "step", (json_int_t)step),
            JSON_COMPACT, stdout);
    else
        printf("forked model=%s from=%s step=%" PRIu64 "\n", to, ask.name, step);
    return CTL_OK;
}
