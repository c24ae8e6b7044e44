/* See rewind.h. */
#include "client/paths/rewind.h"

#include <inttypes.h>
#include <string.h>

#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"

#define ATTEMPTS_MAX 16u                /* while other sessions are at the same */
#define REACH_NS     (2000 * NS_PER_MS) /* for a step a little ahead */
#define POLL_NS      (20 * NS_PER_MS)
#define LEAD_MAX     4096u

/* -- Looking ------------------------------------------------------------------------------------
 */

uint64_t rewind_newest(const struct shd_model *m, uint64_t *ret_step)
{
    uint64_t newest = 0;
    *ret_step = 0;
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct board *board = m->map->owners[i].board.base;
        uint64_t step = 0;
        const uint64_t attempt = board != NULL ? board_rewound(board, &step) : 0;
        if (attempt <= newest)
            continue;
        newest = attempt;
        *ret_step = step;
    }
    return newest;
}

uint64_t rewind_known(const struct shd_model *m)
{
    return m->map != NULL ? m->map->rewound : 0;
}

int rewind_seen(const struct shd_model *m, struct shd_err *e)
{
    uint64_t to;
    if (rewind_newest(m, &to) <= m->map->rewound)
        return SHD_OK;
    return err_set(e, SHD_ERESET, "model '%s' went back to step %" PRIu64 " from step %" PRIu64,
                   m->spec->name, to, m->step);
}

/* -- Going back ---------------------------------------------------------------------------------
 */

struct rewinding { /* ctx of its rounds */
    const struct shd_model *m;
    struct wire_rewind ask;
    struct wire_rewound answer; /* the last one */
};

static void make_rewind(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct rewinding *r = round->ctx;
    ret_request->rewind = r->ask;
    ret_request->rewind.model = r->m->map->owners[link->index].layout.handle;
}

static int take_rewound(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    struct rewinding *r = round->ctx;
    r->answer = reply->rewound;
    if (r->ask.what != WIRE_REWIND_FOLLOW || r->answer.attempt >= r->ask.attempt)
        return SHD_OK;
    return link_err(link, SHD_EPROTO, e, "has not followed a rewind to step %" PRIu64, r->ask.step);
}

static struct round rewind_round(struct rewinding *r)
{
    return (struct round){ .what = "Rewind",
                           .hint = "it may be busy with its memory",
                           .asks = WIRE_REWIND,
                           .type = WIRE_REWOUND,
                           .make = make_rewind,
                           .take = take_rewound,
                           .ctx = r };
}

static int follow(struct shd_model *m, uint64_t step, uint64_t attempt, struct shd_err *e)
{
    struct rewinding r = {
        .m = m, .ask = { .step = step, .what = WIRE_REWIND_FOLLOW, .attempt = attempt }
    };
    struct round round = rewind_round(&r);
    return round_all(&round, m->session->hub, 0, e);
}

int rewind_together(struct shd_model *m, bool *ret_apart, struct shd_err *e)
{
    uint64_t to, own;
    const uint64_t newest = rewind_newest(m, &to);
    *ret_apart = false;
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct board *board = m->map->owners[i].board.base;
        *ret_apart = *ret_apart || (board != NULL && board_rewound(board, &own) < newest);
    }
    return *ret_apart ? follow(m, to, newest, e) : SHD_OK;
}

static int hold(struct rewinding *r, struct shd_err *e)
{
    struct hub *hub = r->m->session->hub;
    struct round round = rewind_round(r);
    r->ask.what = WIRE_REWIND_HOLD;
    int s = round_one(&round, &hub->links[0], 0, e);
    r->ask.consent = r->answer.consent;
    for (uint32_t i = 1; s == SHD_OK && i < hub->link_count; i++)
        s = round_one(&round, &hub->links[i], 0, e);
    return s;
}

/* From owner 0's answer on nothing can be taken back, and whoever looks at the boards goes on with
 * it. */
static int go(struct rewinding *r, struct shd_err *e)
{
    struct hub *hub = r->m->session->hub;
    struct round round = rewind_round(r);
    r->ask.what = WIRE_REWIND_GO;
    return round_one(&round, &hub->links[0], 0, e);
}

/* attempt: that began with the last rewind; another one since is SHD_ESTEP. */
static int rewind_from(struct shd_model *m, uint64_t step, uint64_t attempt, struct shd_err *e)
{
    struct rewinding r = { .m = m, .ask = { .step = step, .attempt = attempt } };
    int s = hold(&r, e);
    FAIL_POINT("rewind:asked");
    if (s == SHD_OK)
        s = go(&r, e);
    FAIL_POINT("rewind:gone");
    return s == SHD_OK ? follow(m, r.answer.step, r.answer.attempt, e) : s;
}

int rewind_owners(struct shd_model *m, uint64_t step, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    int s = SHD_ESTEP;
    for (uint32_t i = 0; s == SHD_ESTEP && i < ATTEMPTS_MAX; i++) {
        uint64_t to;
        bool apart;
        s = i > 0 ? hub_poll(hub, POLL_NS, e) : SHD_OK;
        if (s == SHD_OK)
            s = rewind_together(m, &apart, e);
        if (s == SHD_OK)
            s = rewind_from(m, step, rewind_newest(m, &to), e);
    }
    return s;
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
            s = rewind_from(m, step, m->map->rewound, e);
    }
    return s;
}

/* -- Snapshots ----------------------------------------------------------------------------------
 */

struct listing { /* ctx of its rounds */
    const struct shd_model *m;
    struct wire_snapshot ask;
    struct snapshot_row rows[WIRE_SNAPSHOTS_MAX];
    uint32_t owners[WIRE_SNAPSHOTS_MAX]; /* that have it */
    uint32_t count;
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

/* Owner 0's are looked for at the others. */
static int take_snapshots(const struct round *round, const struct link *link,
                          const struct wire_reply *reply, struct shd_err *e)
{
    struct listing *l = round->ctx;
    const struct wire_bytes *rows = &reply->snapshots.rows;
    uint64_t row[WIRE_SNAPSHOT_BYTES / sizeof(uint64_t)];
    (void)e;
    for (size_t at = 0; at + sizeof row <= rows->bytes; at += sizeof row) {
        memcpy(row, rows->data + at, sizeof row);
        count_row(l, link->index == 0, row);
    }
    return SHD_OK;
}

static struct round snapshot_round(struct listing *l)
{
    return (struct round){ .what = "Snapshot",
                           .hint = "it may be busy with its memory",
                           .asks = WIRE_SNAPSHOT,
                           .type = WIRE_SNAPSHOTS,
                           .make = make_snapshot,
                           .take = take_snapshots,
                           .ctx = l };
}

static int ask(struct shd_model *m, const struct wire_snapshot *what, struct shd_err *e)
{
    struct listing l = { .m = m, .ask = *what };
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
        if (l.owners[i] == hub->link_count)
            ret_rows[(*ret_count)++] = l.rows[i];
    return SHD_OK;
}
