/* See rewind.h. */
#include "client/paths/rewind.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/rewind_turn.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"

#define ATTEMPTS_MAX 16u                /* while other sessions are at the same */
#define REACH_NS     (2000 * NS_PER_MS) /* for a step a little ahead */
#define POLL_NS      (20 * NS_PER_MS)
#define LEAD_MAX     4096u
#define MOVES_SHIFT  48u /* attempts are below that: LEDGER_RESETS_MAX */

/* -- Looking ------------------------------------------------------------------------------------
 */

/* Of the owners whose boards are there: boards[SHD_OWNERS_MAX]. */
static uint32_t look(const struct shd_model *m, struct rewind_seen *boards)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < m->map->member_count; i++) {
        const struct board *board = m->map->owners[i].board.base;
        if (board == NULL || hub_lost(m->session->hub, i))
            continue;
        boards[count].attempt = board_rewound(board, &boards[count].step);
        count++;
    }
    return count;
}

static struct rewind_seen newest(const struct shd_model *m, bool *ret_apart)
{
    struct rewind_seen boards[SHD_OWNERS_MAX];
    const uint32_t count = look(m, boards);
    return rewind_newest_of(boards, count, ret_apart);
}

struct rewind_mark rewind_mark(const struct shd_model *m)
{
    struct rewind_seen boards[SHD_OWNERS_MAX];
    const uint32_t count = look(m, boards);
    return rewind_mark_of(boards, count);
}

bool rewind_since(const struct shd_model *m, const struct rewind_mark *asked)
{
    const struct rewind_mark now = rewind_mark(m);
    return rewind_between(asked, &now);
}

uint64_t rewind_newest(const struct shd_model *m, uint64_t *ret_step)
{
    bool apart;
    const struct rewind_seen seen = newest(m, &apart);
    *ret_step = seen.step;
    return seen.attempt;
}

uint64_t rewind_known(const struct shd_model *m)
{
    return m->map != NULL ? m->map->rewound + (m->map->moves << MOVES_SHIFT) : 0;
}

int rewind_seen(const struct shd_model *m, struct shd_err *e)
{
    uint64_t to;
    if (rewind_newest(m, &to) <= m->map->rewound)
        return SHD_OK;
    return err_set(e, SHD_ERESET, "model '%s' went back to step %" PRIu64 " from step %" PRIu64,
                   m->spec->name, to, m->step);
}

static bool is_copied_back(const struct shd_model *m)
{
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct board *board = m->map->owners[i].board.base;
        if (board != NULL && board_version(board, 0) == UINT64_MAX)
            return true;
    }
    return false;
}

int rewind_await(struct shd_model *m, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    atomic_thread_fence(memory_order_acquire); /* what was read of parameters was read before */
    while (r == SHD_OK && is_copied_back(m)) {
        if (hub_left_ns(hub, start_ns, POLL_NS) == 0)
            return err_set(e, SHD_ETIMEDOUT,
                           "model '%s' goes back to a snapshot, and a daemon does not come to an "
                           "end with that: look at its log",
                           m->spec->name);
        r = hub_poll(hub, POLL_NS, e);
    }
    return r;
}

/* -- Going back ---------------------------------------------------------------------------------
 */

struct rewinding { /* ctx of its rounds */
    const struct shd_model *m;
    struct rewind_turn turn; /* over those that are there: */
    uint32_t members[SHD_OWNERS_MAX];
    uint32_t count;
};

/* Members that are there, in their order: owner 0 is the first. */
static void take_members(struct rewinding *r)
{
    r->count = 0;
    for (uint32_t i = 0; i < r->m->map->member_count; i++)
        if (!hub_lost(r->m->session->hub, i))
            r->members[r->count++] = i;
}

/* One that does not know of it would undo settings that its twin keeps. */
static bool all_keep_settings(const struct rewinding *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        if (r->m->session->hub->links[r->members[i]].peer.level < WIRE_LEVEL_STAYS)
            return false;
    return true;
}

static bool lacks_one(const struct rewinding *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        if (hub_lost(r->m->session->hub, r->members[i]))
            return true;
    return false;
}

static void make_rewind(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct rewinding *r = round->ctx;
    ret_request->rewind = r->turn.ask;
    ret_request->rewind.model = r->m->map->owners[link->index].layout.handle;
}

static int take_rewound(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    struct rewinding *r = round->ctx;
    struct shd_err why = { 0 };
    const int s = rewind_turn_answered(&r->turn, (uint32_t)round->arg, &reply->rewound, &why);
    return s == SHD_OK ? s : link_err(link, s, e, "%s", why.text);
}

/* Ask whom the turn names, until it is done. SHD_EGONE: a member was lost in it: begin again. */
static int run(struct rewinding *r, struct shd_err *e)
{
    struct hub *hub = r->m->session->hub;
    struct round round = { .what = "Rewind",
                           .hint = "it may be busy with its memory",
                           .asks = WIRE_REWIND,
                           .type = WIRE_REWOUND,
                           .make = make_rewind,
                           .take = take_rewound,
                           .replicated = true,
                           .ctx = r };
    uint32_t from, end;
    int s = SHD_OK;
    while (s == SHD_OK && rewind_turn_next(&r->turn, &from, &end)) {
        const enum wire_rewind_what what = r->turn.ask.what;
        if (what == WIRE_REWIND_GO)
            FAIL_POINT("rewind:asked");
        for (uint32_t i = from; s == SHD_OK && i < end; i++)
            s = round_ask(&round, &hub->links[r->members[i]], i, e);
        s = round_finish(&round, hub, s, e);
        if (what == WIRE_REWIND_GO)
            FAIL_POINT("rewind:gone");
        if (s == SHD_OK && lacks_one(r))
            s = err_set(e, SHD_EGONE, "a host was lost while model '%s' went back",
                        r->m->spec->name);
    }
    return s;
}

int rewind_together(struct shd_model *m, bool *ret_apart, struct shd_err *e)
{
    struct rewinding r = { .m = m };
    int s;
    do {
        const struct rewind_seen seen = newest(m, ret_apart);
        take_members(&r);
        rewind_turn_follow(&r.turn, r.count, seen);
        s = *ret_apart ? run(&r, e) : SHD_OK;
    } while (s == SHD_EGONE && lacks_one(&r));
    return s;
}

/* A member that was lost meanwhile is SHD_ESTEP, too. */
int rewind_owners(struct shd_model *m, uint64_t step, uint64_t known, bool keep_settings,
                  struct shd_err *e)
{
    struct rewinding r = { .m = m };
    take_members(&r);
    const struct wire_rewind ask = { .step = step,
                                     .attempt = known,
                                     .keep_settings = keep_settings && all_keep_settings(&r) };
    rewind_turn_begin(&r.turn, r.count, &ask);
    const int s = run(&r, e);
    return s == SHD_EGONE && lacks_one(&r) ? SHD_ESTEP : s;
}

/* Who was faster may have decided, and its owners not be there yet. */
int rewind_once(struct shd_model *m, uint64_t step, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    int s = SHD_ESTEP;
    for (uint32_t i = 0; s == SHD_ESTEP && i < ATTEMPTS_MAX; i++) {
        bool apart;
        s = i > 0 ? hub_poll(hub, POLL_NS, e) : SHD_OK;
        if (s == SHD_OK)
            s = rewind_together(m, &apart, e);
        if (s == SHD_OK && rewind_seen(m, NULL) != SHD_OK)
            return SHD_OK;
        if (s == SHD_OK)
            s = rewind_owners(m, step, m->map->rewound, /* keep_settings= */ true, e);
    }
    return s;
}

/* -- Snapshots ----------------------------------------------------------------------------------
 */

struct listing { /* ctx of its rounds */
    const struct shd_model *m;
    struct wire_snapshot ask;
    struct snapshot_row rows[WIRE_SNAPSHOTS_MAX];
    uint32_t owners[WIRE_SNAPSHOTS_MAX]; /* that have it, and replicas */
    uint32_t count, answers;
    uint64_t seen_ns; /* the step that is taken was open, or was asked for */
};

static void make_snapshot(const struct round *round, const struct link *link,
                          struct wire_request *ret_request)
{
    const struct listing *l = round->ctx;
    ret_request->snapshot = l->ask;
    ret_request->snapshot.model = l->m->map->owners[link->index].layout.handle;
}

static void count_row(struct listing *l, bool first, const uint64_t *row)
{
    if (first && l->count < WIRE_SNAPSHOTS_MAX)
        l->rows[l->count++] = (struct snapshot_row){ .step = row[0] };
    for (uint32_t i = 0; i < l->count; i++) {
        if (l->rows[i].step != row[0])
            continue;
        l->owners[i]++;
        l->rows[i].bytes += row[1];
        if (row[2] > l->rows[i].time_ns)
            l->rows[i].time_ns = row[2];
    }
}

/* Owner 0's are looked for at the others. What replicas have is counted once. */
static int take_snapshots(const struct round *round, const struct link *link,
                          const struct wire_reply *reply, struct shd_err *e)
{
    struct listing *l = round->ctx;
    const struct wire_bytes *rows = &reply->snapshots.rows;
    uint64_t row[WIRE_SNAPSHOT_BYTES / sizeof(uint64_t)];
    (void)e;
    l->answers++;
    for (size_t at = 0; at + sizeof row <= rows->bytes; at += sizeof row) {
        memcpy(row, rows->data + at, sizeof row);
        if (link_is_replica(link))
            row[1] = 0;
        count_row(l, link->index == 0, row);
    }
    return SHD_OK;
}

/* A daemon waits for a step to come, as who asks may be the one that opens it. Nobody may. */
static int look_ahead(const struct round *round, struct shd_err *e)
{
    struct listing *l = round->ctx;
    const uint64_t now_ns = clock_now_ns(), open = look_furthest(l->m);
    if (open >= l->ask.step)
        l->seen_ns = now_ns;
    if (now_ns - l->seen_ns < REACH_NS)
        return SHD_OK;
    return err_set(e, SHD_EBUSY,
                   "snapshot of step %" PRIu64 " asked for, the open step is %" PRIu64, l->ask.step,
                   open);
}

static struct round snapshot_round(struct listing *l)
{
    return (struct round){ .what = "Snapshot",
                           .hint = "it may be busy with its memory",
                           .asks = WIRE_SNAPSHOT,
                           .type = WIRE_SNAPSHOTS,
                           .make = make_snapshot,
                           .take = take_snapshots,
                           .replicated = l->ask.what != WIRE_SNAPSHOT_LOOK,
                           .look = l->ask.what == WIRE_SNAPSHOT_TAKE ? look_ahead : NULL,
                           .ctx = l };
}

static int ask(struct shd_model *m, const struct wire_snapshot *what, struct shd_err *e)
{
    struct listing l = { .m = m, .ask = *what, .seen_ns = clock_now_ns() };
    struct round round = snapshot_round(&l);
    return round_all(&round, m->session->hub, 0, e);
}

/* Where owners have gone on, a step ahead of them is asked for; where nobody goes on, the open one.
 */
int snapshot_owners(struct shd_model *m, uint64_t *ret_step, struct shd_err *e)
{
    struct wire_snapshot what = { .what = WIRE_SNAPSHOT_TAKE, .step = look_furthest(m) };
    uint64_t asked_ns = clock_now_ns(), lead = 0;
    for (;;) {
        int r = ask(m, &what, e);
        if (r == SHD_OK)
            *ret_step = what.step;
        if (r != SHD_ESTEP && r != SHD_EBUSY)
            return r;
        const bool nobody = r == SHD_EBUSY && clock_now_ns() - asked_ns > REACH_NS;
        if (r == SHD_ESTEP || nobody) {
            lead = nobody ? 0 : lead == 0 ? 1 : lead < LEAD_MAX ? 2 * lead : LEAD_MAX;
            what.step = look_furthest(m) + lead;
            asked_ns = clock_now_ns();
        }
        if (hub_left_ns(m->session->hub, asked_ns, POLL_NS) == 0)
            return err_set(e, SHD_ETIMEDOUT, "no snapshot of step %" PRIu64, what.step);
        if (r == SHD_EBUSY && (r = hub_poll(m->session->hub, POLL_NS, e)) != SHD_OK)
            return r;
    }
}

int snapshot_options(struct shd_model *m, uint64_t every, uint32_t keep, struct shd_err *e)
{
    const struct wire_snapshot what = { .what = WIRE_SNAPSHOT_EVERY, .every = every, .keep = keep };
    return ask(m, &what, e);
}

int snapshot_list(struct shd_model *m, struct snapshot_row *ret_rows, uint32_t *ret_count,
                  struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct listing l = { .m = m, .ask = { .what = WIRE_SNAPSHOT_LOOK } };
    struct round round = snapshot_round(&l);
    int r = round_one(&round, &hub->links[0], 0, e);
    for (uint32_t i = 1; r == SHD_OK && i < hub->link_count; i++)
        r = round_one(&round, &hub->links[i], 0, e);
    if (r != SHD_OK)
        return r;
    *ret_count = 0;
    for (uint32_t i = 0; i < l.count; i++)
        if (l.owners[i] == l.answers)
            ret_rows[(*ret_count)++] = l.rows[i];
    return SHD_OK;
}
