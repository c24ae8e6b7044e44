/* See move.h. */
#include "client/run/move.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/lease.h"
#include "client/paths/map.h"
#include "client/paths/moved.h"
#include "client/paths/path.h"
#include "client/paths/place.h"
#include "client/paths/remote.h"
#include "client/run/drop.h"
#include "client/run/grads.h"
#include "client/run/pin.h"
#include "client/session/address.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/hub_open.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

#define HOPS_MAX 16u /* from owners to owners */
#define POLL_NS  (20 * NS_PER_MS)
#define SAY_NS   (2 * NS_PER_S)
#define LOOK_NS  (10 * NS_PER_S) /* for one of the old owners to say where it is */

struct going { /* where a model is */
    struct shd_session there;
    struct shd_model *model;        /* owned; NULL: it is not open yet */
    struct moved_word word;         /* the last */
    char name[SPEC_NAME_BYTES_MAX]; /* "": the only one's, until that is known */
    bool said;
};

/* -- Where it is ------------------------------------------------------------------------------- */

/* looks: for a question alone, which is not worth a longer wait. */
static int hub_like(const struct hub *hub, const char *devices, bool looks, struct hub **ret_hub,
                    struct shd_err *e)
{
    const char *path = hub->links[0].path, *slash = strrchr(path, '/');
    const struct hub_options options = { .name = hub->name,
                                         .role = hub->role,
                                         .timeout_ns = looks && hub->timeout_ns > LOOK_NS
                                                           ? LOOK_NS
                                                           : hub->timeout_ns,
                                         .patient = hub->patient && !looks,
                                         .idle = hub->idle,
                                         .events = looks ? (struct event_sink){ 0 } : hub->events };
    struct address address = { 0 };
    CHECK(slash != NULL);
    const size_t bytes = (size_t)(slash - path) + strlen(devices) + 2;
    char *text = sys_malloc(bytes);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an address");
    snprintf(text, bytes, "%.*s?%s", (int)(slash - path), path, devices);
    int r = address_parse(text, &address, e);
    if (r == SHD_OK)
        r = hub_new(&address, &options, ret_hub, e);
    address_free(&address);
    free(text);
    return r;
}

/* The hub may have a fault: in a session of its own. */
static int ask_one(const struct hub *hub, uint32_t index, const char *name,
                   struct moved_word *ret_word, struct shd_err *e)
{
    struct hub *one = NULL;
    int r = hub_like(hub, hub->links[index].device, /* looks= */ true, &one, e);
    if (r == SHD_OK)
        r = moved_look(one, 0, name, ret_word, e);
    hub_free(one);
    return r;
}

/* A later word than the last one, which becomes the last. Owner 0's is the one that counts; one
 * that another daemon has comes after it, and so is true as well. One of before is of no use: who
 * has it has the model still, or not yet again. */
static int find_word(const struct hub *hub, struct going *g, bool *ret_found, struct shd_err *e)
{
    struct moved_word word = { .away = false };
    int r = SHD_OK;
    *ret_found = false;
    for (uint32_t i = 0; r == SHD_OK && !*ret_found && i < hub->owner_count; i++) {
        r = ask_one(hub, i, g->name, &word, e);
        *ret_found = r == SHD_OK && word.away && word.id > g->word.id;
    }
    if (*ret_found) {
        moved_word_free(&g->word);
        g->word = word;
        snprintf(g->name, sizeof g->name, "%s", word.name);
    } else {
        moved_word_free(&word);
    }
    return r;
}

/* -- There ------------------------------------------------------------------------------------- */

static void free_model(struct shd_model *n)
{
    if (n == NULL)
        return;
    n->session->control->close(n);
    activity_detach(&n->activity);
    spec_free(n->spec);
    free(n->spec_json);
    free(n->holds);
    free(n->reports);
    free(n);
}

static void leave(struct going *g)
{
    free_model(g->model);
    hub_free(g->there.hub);
    blame_free(g->there.blame);
    moved_word_free(&g->word);
    g->model = NULL;
    g->there.hub = NULL;
    g->there.blame = NULL;
}

static int connect_there(const struct shd_session *s, struct going *g, struct shd_err *e)
{
    struct hub *hub = NULL;
    const struct hub *from = g->there.hub != NULL ? g->there.hub : s->hub;
    const int r = hub_like(from, g->word.to, /* looks= */ false, &hub, e);
    if (r != SHD_OK)
        return r;
    hub_free(g->there.hub);
    blame_free(g->there.blame);
    g->there.hub = hub;
    g->there.blame = NULL;
    return remote_attach(&g->there, blame_sink_of(s->blame), e);
}

static int open_there(struct going *g, uint32_t slots, struct shd_err *e)
{
    struct shd_model *n = sys_calloc(1, sizeof *n);
    if (n == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a model");
    n->session = &g->there;
    n->reader = g->there.reader;
    n->in.step = UINT64_MAX;
    n->policy = (struct policy){ .plan = PLAN_POLICY_DEFAULT };
    const int r = g->there.control->open(n, g->name, slots, e);
    if (r == SHD_OK)
        g->model = n;
    else
        free_model(n);
    return r;
}

static void say_waiting(struct going *g, uint64_t start_ns)
{
    char line[400];
    if (g->said || clock_now_ns() - start_ns < SAY_NS)
        return;
    g->said = true;
    snprintf(line, sizeof line,
             "shd: model '%.100s' moves to %.100s, which do not have it yet: waiting; should "
             "nobody be at it any more, do `shardctl reshard` again",
             g->name, g->word.to);
    blame_say(g->there.blame, line);
}

/* Not there, or not yet: SHD_EMOVED, it has moved on; SHD_PENDING: it may come; else *e says why it
 * does not. code: of the attempt to open it. One that is in both sets has its old part still. */
static int look_on(struct going *g, int code, struct shd_err *e)
{
    bool found = false;
    int r = SHD_OK;
    if (code == SHD_EMOVED || (code == SHD_ENOENT && g->word.there))
        r = find_word(g->there.hub, g, &found, e);
    if (r != SHD_OK || found)
        return r != SHD_OK ? r : SHD_EMOVED;
    if (code == SHD_ENOENT && g->word.there)
        return err_set(e, code, "model '%.60s' was dropped at %.80s, to which it had moved",
                       g->name, g->word.to);
    return SHD_PENDING;
}

static bool may_come(int code)
{
    return code == SHD_ENOENT || code == SHD_EBUSY || code == SHD_ESPEC || code == SHD_EMOVED;
}

/* Who moves it has them open it soon after it was decided. */
static int await_there(struct going *g, uint32_t slots, struct shd_err *e)
{
    struct hub *hub = g->there.hub;
    const uint64_t start_ns = clock_now_ns();
    struct shd_err why = { 0 };
    int r;
    while (may_come(r = open_there(g, slots, &why))) {
        const int looked = look_on(g, r, e);
        if (looked != SHD_PENDING)
            return looked;
        const uint64_t left_ns = hub_left_ns(hub, start_ns, POLL_NS);
        say_waiting(g, start_ns);
        if (left_ns == 0)
            return err_set(e, SHD_ETIMEDOUT,
                           "model '%.60s' has moved to %.60s, and is not there: do `shardctl "
                           "reshard` again: %.100s",
                           g->name, g->word.to, why.text);
        hub_renew(hub); /* some may have it open for this session already */
        const int polled = hub_poll(hub, left_ns, e);
        if (polled != SHD_OK)
            return polled;
    }
    return r == SHD_OK ? r : err_copy(&why, e);
}

/* From owners to owners, to those that have it. SHD_ENOENT: nobody knows that it has moved, or
 * (g->word.there) those that had it last do not have it any more. */
static int reach(const struct shd_session *s, struct going *g, uint32_t slots, struct shd_err *e)
{
    bool found;
    int r = find_word(s->hub, g, &found, e);
    if (r == SHD_OK && !found)
        return err_set(e, SHD_ENOENT, "nobody knows where model '%.100s' is", g->name);
    if (r == SHD_OK)
        r = SHD_EMOVED;
    for (uint32_t hops = 0; r == SHD_EMOVED && hops < HOPS_MAX; hops++) {
        r = connect_there(s, g, e);
        FAIL_POINT("move:connected");
        if (r == SHD_OK)
            r = await_there(g, slots, e);
    }
    return r;
}

static struct going going_from(const struct shd_session *s, const char *name)
{
    struct going g = { .said = false };
    snprintf(g.name, sizeof g.name, "%s", name);
    g.there.control = s->control;
    g.there.reader = s->reader;
    g.there.timeout_ns = s->timeout_ns;
    g.there.slots = s->slots;
    g.there.reads = s->reads;
    g.there.pid = s->pid;
    return g;
}

static void take_hub(struct shd_session *s, struct going *g)
{
    struct hub *hub = s->hub;
    struct blame *blame = s->blame;
    s->hub = g->there.hub;
    s->blame = g->there.blame;
    s->hub->reopen_ctx = s;
    g->there.hub = hub;
    g->there.blame = blame;
}

/* -- In the place of what is open -------------------------------------------------------------- */

/* Nothing of the step is kept, nor of what the old owners were asked. */
static void let_go(struct shd_model *m)
{
    if (m->saving != NULL)
        m->save_free(m->saving);
    m->saving = NULL;
    pin_close(m);
    drop_step(m);
    lease_close(m);
    hub_forget(m->session->hub, m);
    for (uint32_t i = 0; i < m->slot_count; i++)
        m->slots[i] = (struct grad_slot){ .state = SLOT_FREE };
    m->fault = (struct shd_err){ 0 };
}

/* The page that owner 0 shows is another one; what is being done goes on. */
static void take_activity(struct shd_model *m, struct shd_model *n)
{
    activity_detach(&m->activity);
    m->activity.page = n->activity.page;
    m->activity.shown = ACTIVITY_SILENT;
    n->activity.page = NULL;
}

static void take_model(struct shd_model *m, struct shd_model *n)
{
    struct map_model *map = m->map;
    n->map->moves = map->moves + 1;
    m->map = n->map;
    n->map = map;
    take_activity(m, n);
    m->step = n->step;
    m->in = n->in;
    m->decided = n->decided;
    m->decision = n->decision;
    model_step_over(m);
}

static void say_moved(const struct shd_model *m, const struct going *g)
{
    char line[300], text[100];
    snprintf(line, sizeof line,
             "shd: model '%.100s' has moved to %.100s: this worker goes along, from step %" PRIu64,
             g->name, g->word.to, m->step);
    blame_say(m->session->blame, line);
    snprintf(text, sizeof text, "the model has other owners: it is at step %" PRIu64, m->step);
    event_say(&m->session->hub->events,
              &(struct shd_event){
                  .kind = SHD_EVENT_RESET, .daemon = "", .text = text, .step = m->step });
}

static int check_same(const struct shd_model *m, const struct shd_model *n, struct shd_err *e)
{
    struct shd_err why = { 0 };
    int r = spec_compare(n->spec, m->spec, &why);
    if (r == SHD_OK && n->map->whole)
        r = err_set(&why, SHD_ENOTSUP, "it is in a GPU's memory");
    return r == SHD_OK ? r
                       : err_set(e, SHD_EMOVED,
                                 "model '%.60s' has other owners now, and this worker cannot go "
                                 "along: %.120s",
                                 m->spec->name, why.text);
}

static int go_along(struct shd_model *m, struct going *g, struct shd_err *e)
{
    const uint64_t from = m->step;
    int r = reach(m->session, g, m->slot_count, e);
    if (r == SHD_OK)
        r = check_same(m, g->model, e);
    if (r == SHD_OK)
        r = place_take_over(m, g->model, e);
    if (r != SHD_OK)
        return r;
    let_go(m);
    take_model(m, g->model);
    take_hub(m->session, g);
    say_moved(m, g);
    return err_set(e, SHD_ERESET,
                   "model '%s' has other owners, %.80s: it is at step %" PRIu64
                   ", and this worker was at step %" PRIu64 ": go on where it is",
                   m->spec->name, g->word.to, m->step, from);
}

/* NULL: it can go along. */
static const char *find_why_not(const struct shd_model *m)
{
    const struct shd_session *s = m->session;
    if (s->models != m || m->next != NULL || s->opening != NULL)
        return "its session has several models";
    if (s->hub->link_count > s->hub->owner_count)
        return "its owners had replicas";
    if (s->on_gpu || m->map->whole || m->order != NULL)
        return "a GPU has a part in it";
    if (m->grads != NULL && m->grads->hostsum != NULL)
        return "it sums with the other workers of its host, which may be at another step";
    if (m->copy != NULL || m->nccl != NULL || m->nccl_joining != NULL)
        return "it works on copies of parameters";
    return NULL;
}

/* Of a daemon that lost the word of it in time: it knows of none, or has another part of it now. */
static bool may_be_news(int r)
{
    return r == SHD_ENOENT || r == SHD_ESPEC;
}

/* It has ended by what old owners say as a model moves. */
static bool may_have_moved(const struct shd_model *m, int r)
{
    const struct hub *hub = m->session->hub;
    if (r == SHD_OK || hub == NULL || m->map == NULL || hub->members.stays)
        return false;
    return r == SHD_EMOVED || (may_be_news(r) && hub_check(hub, NULL) == r);
}

static int stay(const struct shd_model *m, struct going *g, const char * not, struct shd_err *e)
{
    bool found;
    const int r = find_word(m->session->hub, g, &found, e);
    if (r != SHD_OK)
        return r;
    if (!found)
        return err_set(e, SHD_ENOENT, "it has not moved");
    return err_set(e, SHD_EMOVED,
                   "model '%.60s' has moved to %.80s, as of step %" PRIu64
                   ", and this worker cannot go along, for %s: start it again there",
                   g->name, g->word.to, g->word.step, not );
}

int move_along(struct shd_model *m, int r, struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (!may_have_moved(m, r))
        return r;
    const char *not = find_why_not(m);
    struct going g = going_from(m->session, m->spec->name);
    const int gone = not == NULL ? go_along(m, &g, &why) : stay(m, &g, not, &why);
    const bool away = g.word.away;
    leave(&g);
    if (!away && (gone == SHD_ENOENT || (may_be_news(r) && gone != SHD_ECANCELED)))
        return r; /* it was dropped, or lost; nobody says otherwise */
    return err_copy(&why, e);
}

/* -- Before one is open ------------------------------------------------------------------------ */

int move_session(struct shd_session *s, char name[SPEC_NAME_BYTES_MAX], struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (s->hub->members.stays || s->hub->link_count > s->hub->owner_count)
        return SHD_EMOVED;
    if (s->models != NULL)
        return err_prefix(e, "this session has another model at other owners");
    struct going g = going_from(s, name);
    int r = reach(s, &g, /* slots= */ 0, &why);
    if (r == SHD_ENOENT && g.word.there) /* it may be made there */
        r = SHD_OK;
    if (r == SHD_OK) {
        free_model(g.model);
        g.model = NULL;
        take_hub(s, &g);
        memcpy(name, g.name, sizeof g.name);
    }
    leave(&g);
    if (r == SHD_OK)
        return r;
    return err_copy(&why, e);
}
