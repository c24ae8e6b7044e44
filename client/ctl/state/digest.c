/* shardctl digest: SHA-256 over a model's parameters and optimizer state. The same for any number
 * of daemons; training may go on, but the digest is of one step or an error. */
#include "client/ctl/state/digest.h"

#include <inttypes.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/shd.h"
#include "proto/base/check.h"

static const char digest_about[] =
    "Print SHA-256 over a model's parameters and optimizer state in tensor order. It does not\n"
    "depend on how many daemons hold the model. While training runs the step may move during the\n"
    "computation: then it is an error (exit code 1), try again.";

static const char digest_more[] = "example:\n"
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
                                         .name = "shardctl digest" };
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

int verb_digest(int argc, char **argv)
{
    const char *address = NULL, *model = NULL;
    bool as_json = false;
    const struct flag table[] = {
        { "address", 'a', FLAG_STRING, "A", "where the daemons are ($SHARDD_ADDRESS, /run/shardd)",
          &address, 0, 0 },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "the same", &address, 0, 0 },
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
