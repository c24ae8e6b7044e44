/* shardctl restore: make running daemons open a model from a checkpoint, or from weights. */
#include "client/ctl/state/restore.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/spec/spec.h"

static const char restore_about[] =
    "Make daemons open a model as a checkpoint has it: DIR/step-N, or DIR for its latest. There "
    "may\n"
    "be more or fewer daemons than when it was saved. Every byte is checked; all daemons open it "
    "or\n"
    "none. Workers then go on at its step. With --weights: parameters alone, found by tensor name "
    "in\n"
    "a safetensors file, or a directory with model.safetensors or its index, of any tool.";

static const char restore_more[] =
    "examples:\n"
    "  shardctl restore /data/run1\n"
    "  shardctl restore /data/run1/step-000000000500\n"
    "  shardctl restore --weights llama/model.safetensors --spec spec.json\n"
    "\nexit code 1: nothing was opened; the reason is on stderr\n";

struct ask {
    const char *path, *weights, *spec, *address;
    bool json;
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
                                         .name = "shardctl restore" };
    struct shd_restore_options how = { .size = sizeof how, .weights = ask->weights != NULL };
    struct shd_restored restored;
    char *spec = NULL;
    size_t bytes;
    shd_session *s = NULL;
    int r = SHD_OK;
    if (ask->spec != NULL)
        r = verb_file(ask->spec, SPEC_JSON_BYTES_MAX, &spec, &bytes, e);
    how.spec_json = spec;
    if (r == SHD_OK)
        r = shd_connect(&options, &s, e);
    if (r == SHD_OK)
        r = shd_restore(s, ask->weights != NULL ? ask->weights : ask->path, &how, &restored, e);
    if (r == SHD_OK)
        print_restored(ask, &restored);
    shd_close(s);
    free(spec);
    return r;
}

static int check_ask(const struct ask *ask, struct shd_err *e)
{
    if (ask->weights == NULL && ask->path == NULL)
        return err_set(e, SHD_EINVAL, "nothing to restore: shardctl restore DIR");
    if (ask->weights != NULL && ask->path != NULL)
        return err_set(e, SHD_EINVAL, "a checkpoint or --weights: one of them");
    if ((ask->weights != NULL) != (ask->spec != NULL))
        return err_set(e, SHD_EINVAL,
                       "--weights and --spec go together: a checkpoint has its own "
                       "spec, weights have none");
    return SHD_OK;
}

int verb_restore(int argc, char **argv)
{
    struct ask ask = { .path = NULL };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        { "address", 'a', FLAG_STRING, "A", "where the daemons are ($SHARDD_ADDRESS, /run/shardd)",
          &ask.address, 0, 0 },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "the same", &ask.address, 0, 0 },
        { "weights", 'w', FLAG_STRING, "FILE", "parameters alone, from here", &ask.weights, 0, 0 },
        { "spec", 's', FLAG_STRING, "FILE", "the model's spec, with --weights", &ask.spec, 0, 0 },
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
    if (restore(&ask, &e) == SHD_OK)
        return CTL_OK;
    return ctl_fail("%s", e.text);
}
