/* See reshard.h. */
#include "client/ctl/state/reshard.h"

#include <inttypes.h>
#include <stdio.h>

#include "client/checkpoint/reshard.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"

static const char reshard_about[] =
    "Give models other owners while they are trained: the daemons of --to have them from then on, "
    "more,\n"
    "fewer or others. The daemons that have a model save it into DIR, those of --to read it, and "
    "it "
    "goes\n"
    "on from there: workers go along without a restart, and compute the steps since then again, to "
    "the\n"
    "same bits. Without MODEL: the only one.";

static const char reshard_more[] =
    "Daemons that are in both hold a model twice until it has moved; where one finds no memory "
    "for\n"
    "that, nothing is done. Interrupted at any point, do it again, with the same words. Give "
    "programs\n"
    "that start later the new address, or leave the daemon that was the first: it says where the "
    "model\n"
    "is.\n"
    "\n" VERB_WHERE "Name them, in their order: DIR?cpu0,cpu1.\n"
    "\n"
    "examples:\n"
    "  shardctl reshard -a /run/shardd?cpu0,cpu1 --to cpu0,cpu1,cpu2 --by /var/tmp    one more\n"
    "  shardctl reshard -a /run/shardd?cpu0,cpu1,cpu2 --to cpu2 --by /var/tmp gpt\n"
    "\nexit code 1: a model has not moved, or say it again; the reason is on stderr\n";

static void tell(void *ctx, const char *line)
{
    (void)ctx;
    ctl_say("%s", line);
}

static int reshard_one(struct reshard *ask, const char *model, bool json)
{
    struct resharded done = { .step = 0 };
    struct shd_err e = { 0 };
    ask->model = model;
    if (reshard_model(ask, &done, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    if (json)
        verb_json(json_pack("{s:s, s:s, s:I}", "model", done.model, "to", ask->to, "step",
                            (json_int_t)done.step),
                  JSON_COMPACT, stdout);
    else
        printf("resharded model=%s to=%s step=%" PRIu64 "\n", done.model, ask->to, done.step);
    return CTL_OK;
}

int verb_reshard(int argc, char **argv)
{
    struct reshard ask = { .say = tell };
    bool json = false;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "to", 0, FLAG_STRING, "DEVICES", "the daemons that are to have them, as cpu0,cpu1,cpu2",
          &ask.to, 0, 0 },
        { "by", 0, FLAG_STRING, "DIR", "a directory that all their hosts have", &ask.dir, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "a JSON object for each: model, to, step", &json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(
        reshard, "shardctl reshard --to DEVICES --by DIR [MODEL...] [FLAGS]", table);
    int count = 0;
    int code = verb_start_words(&flags, argc, argv, &count);
    if (code >= 0)
        return code;
    if (ask.to == NULL || ask.dir == NULL)
        return ctl_usage("--to DEVICES says who is to have it, --by DIR by which directory: both "
                         "are wanted");
    code = count == 0 ? reshard_one(&ask, NULL, json) : CTL_OK;
    for (int i = 1; code == CTL_OK && i <= count; i++)
        code = reshard_one(&ask, argv[i], json);
    return code;
}
