/* See set.h. A daemon that dies is asked again: a change that is there already, by its id or as a
 * whole, changes nothing. */
#include "client/paths/set.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client/paths/local_state.h"
#include "client/paths/map.h"
#include "client/paths/rejoin.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/round.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/spec/settings_text.h"

struct setting {
    const struct shd_model *m;
    const struct path_set *set;
    uint64_t from;
    uint64_t id; /* of the change */
    char *json;  /* owned */
};

/* What an owner of an older build, or whose ledger is of one, cannot be told or keep. */
static int check_owners(const struct shd_model *m, const struct settings *change, struct shd_err *e)
{
    const struct hub *hub = m->session->hub;
    const bool all = settings_new(change);
    bool any = all;
    for (uint32_t i = 0; i < change->count; i++)
        any = any || change->numbers[i] == SETTINGS_STAY;
    for (uint32_t i = 0; any && i < (all ? hub->link_count : 1); i++) {
        const struct link *link = &hub->links[i];
        if (link->peer.level < WIRE_LEVEL_AUDITS)
            return link_err(link, SHD_ENOTSUP, e,
                            "is of an older build, which knows no micro_batches or eps that are "
                            "set, and takes nothing back: upgrade it");
        if (all && m->map->owners[i].layout.room == 0)
            return link_err(link, SHD_ENOTSUP, e,
                            "has model '%s' as an older build opened it, without room for "
                            "micro_batches or eps that are set: save it, and restore it in this "
                            "build (shardctl restore --replace)",
                            m->spec->name);
    }
    return SHD_OK;
}

static void make_set(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    const struct setting *s = round->ctx;
    const struct settings *change = s->set->change;
    ret_request->set = (struct wire_set){ .model = s->m->map->owners[link->index].layout.handle,
                                          .from = s->set->from,
                                          .id = s->id,
                                          .look = change == NULL && !s->set->go_on,
                                          .go_on = s->set->go_on };
    if (change == NULL)
        return;
    const struct settings_bytes b = settings_pack(change);
    ret_request->set.change = (struct wire_bytes){ b.old, b.old_bytes };
    ret_request->set.more = (struct wire_bytes){ b.more, b.more_bytes };
}

static int take_set(const struct round *round, const struct link *link,
                    const struct wire_reply *reply, struct shd_err *e)
{
    struct setting *s = round->ctx;
    const struct wire_bytes *json = &reply->set_answer.json;
    (void)link;
    free(s->json); /* of an answer that came twice */
    s->json = sys_malloc(json->bytes + 1);
    if (s->json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for settings");
    if (json->bytes > 0)
        memcpy(s->json, json->data, json->bytes);
    s->json[json->bytes] = '\0';
    s->from = reply->set_answer.from;
    return SHD_OK;
}

static void give(struct setting *s)
{
    if (s->set->ret_from != NULL)
        *s->set->ret_from = s->from;
    if (s->set->ret_json != NULL)
        *s->set->ret_json = s->json;
    else
        free(s->json);
}

/* Of what owner 0 says of steps its replica takes the same from the same step on, should it ever be
 * asked. One that is past that step already is one behind which owner 0 is as well: it is told what
 * is left of it. */
static int tell_replica(struct setting *s, struct round *round, struct shd_err *e)
{
    struct hub *hub = s->m->session->hub;
    if (hub->link_count == hub->owner_count || (s->set->change == NULL && !s->set->go_on))
        return SHD_OK;
    const struct path_set *asked = s->set;
    struct path_set same = *asked;
    same.from = s->set->change != NULL ? s->from : 0;
    s->set = &same;
    const int r = round_one(round, &hub->links[hub->owner_count], 0, e);
    s->set = asked;
    return r == SHD_OK ? r
                       : err_prefix(e, "set at owner 0, not at its replica: set the same again");
}

int set_owner(struct shd_model *m, const struct path_set *set, struct shd_err *e)
{
    const struct hub *hub = m->session->hub;
    struct setting s = { .m = m, .set = set };
    struct round round = { .what = "Set",
                           .asks = WIRE_SET,
                           .type = WIRE_SET_ANSWER,
                           .make = make_set,
                           .take = take_set,
                           .ctx = &s };
    int r = set->change != NULL ? check_owners(m, set->change, e) : SHD_OK;
    while (r == SHD_OK && set->change != NULL && s.id == 0)
        if (getrandom(&s.id, sizeof s.id, 0) != (ssize_t)sizeof s.id)
            r = err_sys(e, SHD_EIO, "get random bytes");
    const bool changes = set->change != NULL || set->go_on;
    bool again = true, any = false;
    while (r == SHD_OK && again) {
        const uint32_t successions = hub->members.successions;
        if (changes) /* a replica that came in is told, too */
            r = rejoin_look(m, /* opening= */ NULL, &any, e);
        if (r == SHD_OK)
            r = round_one(&round, &hub->links[0], 0, e);
        if (r == SHD_OK)
            r = tell_replica(&s, &round, e);
        FAIL_POINT("set:told");
        any = false; /* one that came in with a rewind that this session's boards do not show yet */
        if (r == SHD_OK && changes && rejoin_may_forget(m))
            r = rejoin_look(m, /* opening= */ NULL, &any, e);
        again = any || successions != hub->members.successions; /* owner 0 may be another one */
    }
    if (r == SHD_OK)
        give(&s);
    else
        free(s.json);
    return r;
}

int set_local(struct shd_model *m, const struct path_set *set, struct shd_err *e)
{
    struct setting s = { .m = m, .set = set };
    struct settings_kept after = m->local->settings;
    const struct settings_when when = { m->step, m->step, set->from, 0 };
    int r = SHD_OK;
    s.from = m->step;
    if (set->go_on)
        m->local->stopped = (struct local_stopped){ 0 };
    if (set->change != NULL)
        r = settings_give(&m->local->settings, set->change, &when, &after, &s.from, e);
    if (r == SHD_OK)
        r = settings_json(m->spec, &after, m->step, &s.json, e);
    if (r != SHD_OK)
        return r;
    m->local->settings = after;
    give(&s);
    return r;
}
