/* See replay.h. */
#include "client/session/replay.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct replay {
    uint64_t step;
    char fork[SPEC_NAME_BYTES_MAX], model[SPEC_NAME_BYTES_MAX];
};

static const char *replay_text(void)
{
    const char *text = getenv(REPLAY_ENV);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

static int replay_parse(const char *text, struct replay *ret_replay, struct shd_err *e)
{
    static_assert(SPEC_NAME_BYTES_MAX == 128, "the widths below are one less");
    struct replay r;
    char more;
    if (sscanf(text, "%20" SCNu64 " %127s %127s%c", &r.step, r.fork, r.model, &more) != 3)
        return err_set(e, SHD_EINVAL,
                       REPLAY_ENV " is '%.100s', must be \"STEP FORK MODEL\": shardctl replay sets "
                                  "it",
                       text);
    *ret_replay = r;
    return SHD_OK;
}

int replay_name(const char *name, char ret_name[SPEC_NAME_BYTES_MAX], struct shd_err *e)
{
    const char *text = replay_text();
    struct replay replay = { .step = 0 };
    if (text == NULL) {
        snprintf(ret_name, SPEC_NAME_BYTES_MAX, "%s", name);
        return SHD_OK;
    }
    const int r = replay_parse(text, &replay, e);
    if (r != SHD_OK)
        return r;
    if (name[0] != '\0' && strcmp(name, replay.model) != 0 && strcmp(name, replay.fork) != 0)
        return err_set(e, SHD_ENOTSUP,
                       "model '%.60s' is replayed, and this program opens '%.60s': a worker of one "
                       "model can be replayed",
                       replay.model, name);
    memcpy(ret_name, replay.fork, sizeof replay.fork);
    return SHD_OK;
}

int replay_goes_on(uint64_t step, struct shd_err *e)
{
    const char *text = replay_text();
    struct replay replay = { .step = 0 };
    if (text == NULL)
        return SHD_OK;
    const int r = replay_parse(text, &replay, e);
    if (r != SHD_OK || step < replay.step)
        return r;
    return err_set(e, SHD_ESTOPPED, "the replay of step %" PRIu64 " of model '%.100s' is done",
                   replay.step, replay.model);
}

int replay_allows(const char *call, struct shd_err *e)
{
    if (replay_text() == NULL)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "%s in a worker that shardctl replay has started: it would change more than the "
                   "step that is looked at; leave it out of that command line",
                   call);
}
