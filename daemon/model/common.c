/* See common.h. */
#include "daemon/model/common.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/model/quota.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/reserve.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

struct common { /* what one model has in common with others */
    struct common *next;
    struct model *model; /* borrowed */
    uint64_t number;     /* random: those of the same have the same memory */
    uint64_t bytes;
    int fd;       /* owned */
    bool counted; /* as this model's */
};

/* Of all models of this process. */
static struct {
    pthread_mutex_t lock;
    struct common *first;
} all = { PTHREAD_MUTEX_INITIALIZER, NULL };

/* -- Who has it --------------------------------------------------------------------------------
 */

/* Another one of this number; counted: that it counts for. Under the lock. */
static struct common *find_other(const struct common *c, uint64_t number, bool counted)
{
    struct common *other = all.first;
    while (other != NULL && (other == c || other->number != number || (counted && !other->counted)))
        other = other->next;
    return other;
}

/* fd is taken. */
static int add(struct model *m, uint64_t number, uint64_t bytes, int fd, struct common **ret_common,
               struct shd_err *e)
{
    struct common *c = sys_calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for what models have in common");
    *c = (struct common){ .model = m, .number = number, .bytes = bytes, .fd = fd };
    pthread_mutex_lock(&all.lock);
    c->counted = find_other(c, number, /* counted= */ true) == NULL;
    c->next = all.first;
    all.first = c;
    pthread_mutex_unlock(&all.lock);
    *ret_common = c;
    return SHD_OK;
}

/* Whoever has the memory still is counted for it, whatever is allowed. */
static void take_out(struct common *c)
{
    pthread_mutex_lock(&all.lock);
    struct common **at = &all.first;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    struct common *heir = c->counted ? find_other(c, c->number, /* counted= */ false) : NULL;
    if (heir != NULL) {
        heir->counted = true;
        quota_have(heir->model->kept.quota, heir->bytes);
    }
    pthread_mutex_unlock(&all.lock);
}

uint64_t common_bytes(const struct model *m)
{
    return m->kept.common != NULL ? m->kept.common->bytes : 0;
}

bool common_counts(const struct model *m)
{
    const struct common *c = m->kept.common;
    if (c == NULL)
        return false;
    pthread_mutex_lock(&all.lock);
    const bool counted = c->counted;
    pthread_mutex_unlock(&all.lock);
    return counted;
}

/* -- Places ------------------------------------------------------------------------------------
 */

struct range { /* of the state segment */
    uint64_t at_bytes, bytes;
};

/* Frozen units side by side, from *unit on, which is set behind them. False: no more are. */
static bool next_range(const struct model *m, uint32_t *unit, struct range *ret_range)
{
    const struct spec *spec = m->spec;
    const struct slice *slice = m->map->slice;
    uint32_t u = *unit;
    while (u < spec->unit_count && (!spec->units[u].frozen || slice[u].elems == 0))
        u++;
    if (u == spec->unit_count)
        return false;
    const uint64_t first = m->map->base_elem[u];
    uint64_t end = first;
    for (; u < spec->unit_count && (spec->units[u].frozen || slice[u].elems == 0); u++)
        end += slice[u].elems;
    *unit = u;
    *ret_range = (struct range){ first * sizeof(float), (end - first) * sizeof(float) };
    return true;
}

static uint64_t frozen_bytes(const struct model *m)
{
    struct range r;
    uint64_t bytes = 0;
    for (uint32_t u = 0; next_range(m, &u, &r);)
        bytes += r.bytes;
    return bytes;
}

/* Map the ranges where they belong: out of the common segment fd, or, fd -1, out of the state's
 * own pages. The values are the same, so who reads meanwhile sees no difference. */
static int map_over(const struct model *m, int fd, struct shd_err *e)
{
    struct range r;
    uint64_t at_bytes = 0;
    int status = SHD_OK;
    for (uint32_t u = 0; status == SHD_OK && next_range(m, &u, &r); at_bytes += r.bytes)
        status = segment_place((uint8_t *)m->state.base + r.at_bytes, fd >= 0 ? fd : m->state.fd,
                               fd >= 0 ? at_bytes : r.at_bytes, r.bytes,
                               /* writable= */ true, e);
    return status;
}

/* Pages that stay are no harm. */
static void make_holes(const struct model *m)
{
    struct range r;
    for (uint32_t u = 0; next_range(m, &u, &r);)
        if (fallocate(m->state.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)r.at_bytes,
                      (off_t)r.bytes) != 0)
            log_warn("op=common model=%s why=\"give memory back: %s\" do=\"nothing: it goes with "
                     "the model\"",
                     m->spec->name, strerror(errno));
}

/* Under the lock of reserve.h. */
static int fill_holes(const struct model *m, struct shd_err *e)
{
    struct range r;
    int status = SHD_OK;
    for (uint32_t u = 0; status == SHD_OK && next_range(m, &u, &r);)
        status = reserve_pages(m->state.fd, r.at_bytes, r.bytes, /* huge= */ NULL, e);
    return status;
}

static void copy_out(const struct model *m, uint8_t *to)
{
    struct range r;
    for (uint32_t u = 0; next_range(m, &u, &r); to += r.bytes)
        memcpy(to, (const uint8_t *)m->state.base + r.at_bytes, r.bytes);
}

/* What is mapped there, into the state's own pages. */
static int copy_in(const struct model *m, struct shd_err *e)
{
    struct range r;
    for (uint32_t u = 0; next_range(m, &u, &r);)
        for (uint64_t done = 0; done < r.bytes;) {
            const uint64_t at = r.at_bytes + done;
            const ssize_t n = pwrite(m->state.fd, (const uint8_t *)m->state.base + at,
                                     r.bytes - done, (off_t)at);
            if (n < 0 && errno == EINTR)
                continue;
            if (n <= 0)
                return err_sys(e, SHD_EIO, "copy %" PRIu64 " bytes of frozen units", r.bytes);
            done += (uint64_t)n;
        }
    return SHD_OK;
}

/* -- Having pages of its own -------------------------------------------------------------------
 */

static int own_pages(const struct model *m, struct shd_err *e)
{
    const struct common *c = m->kept.common;
    int r = quota_take(m->kept.quota, c->bytes, "frozen units of its own", e);
    if (r != SHD_OK)
        return r;
    reserve_lock();
    r = reserve_check(c->bytes, RESERVE_SPARED, e);
    if (r == SHD_OK)
        r = fill_holes(m, e);
    reserve_unlock();
    FAIL_POINT("common:filled");
    if (r == SHD_OK)
        r = copy_in(m, e);
    if (r == SHD_OK)
        r = map_over(m, /* fd= */ -1, e);
    FAIL_POINT("common:back");
    if (r == SHD_OK)
        return r;
    quota_give(m->kept.quota, c->bytes);
    CHECK(map_over(m, c->fd, NULL) == SHD_OK); /* else a successor does */
    make_holes(m);
    return err_prefix(e, "%" PRIu64 " bytes of frozen units", c->bytes);
}

int common_leave(struct model *m, bool *ret_left, struct shd_err *e)
{
    const int r = m->kept.common != NULL ? own_pages(m, e) : SHD_OK;
    *ret_left = m->kept.common != NULL && r == SHD_OK;
    return r;
}

void common_left(struct model *m)
{
    struct common *c = m->kept.common;
    ledger_set_common(m->ledger, 0);
    FAIL_POINT("common:left");
    m->kept.common = NULL;
    take_out(c);
    if (c->counted) /* it was, and is now for pages of its own alone */
        quota_give(m->kept.quota, c->bytes);
    keeper_remove_part(m->kept.keeper, m->kept.instance, KEEPER_COMMON);
    close(c->fd);
    free(c);
}

/* -- Having them in common ---------------------------------------------------------------------
 */

bool common_can(const struct model *from, const struct model *to)
{
    struct decision last;
    const bool put = step_last_decision(from->core, &last) && last.puts > 0;
    return from->kern->ops->place == SEGMENT_HOST && !from->state.file && !to->state.file &&
           from->put == NULL && !(put && from->waits.snapshots != NULL) &&
           ledger_common_room(from->ledger) && ledger_common_room(to->ledger) &&
           frozen_bytes(from) > 0 && frozen_bytes(from) == frozen_bytes(to);
}

static bool same(const struct model *a, const struct model *b)
{
    return a->kept.common != NULL && b->kept.common != NULL &&
           a->kept.common->number == b->kept.common->number;
}

bool common_due(const struct model *from, const struct model *to, bool can)
{
    return !same(from, to) && (can || to->kept.common != NULL);
}

/* `to` is the one that has pages for nothing: they are given up for these. */
static int make_segment(const struct common_work *w, uint64_t bytes, struct segment *ret_segment,
                        struct shd_err *e)
{
    reserve_lock();
    make_holes(w->to);
    const int r = segment_new("shardd-common", SEGMENT_STATE, bytes, ret_segment, e);
    reserve_unlock();
    return r;
}

static int new_number(uint64_t *ret_number, struct shd_err *e)
{
    *ret_number = 0;
    while (*ret_number == 0)
        if (getrandom(ret_number, sizeof *ret_number, 0) != (ssize_t)sizeof *ret_number)
            return err_sys(e, SHD_EIO, "get random bytes");
    return SHD_OK;
}

/* The keeper has it, and it is mapped; its word is the loop's to write. fd is taken on SHD_OK, and
 * may be mapped in part after an error. */
static int enter(struct model *m, uint64_t number, int fd, struct common **ret_common,
                 struct shd_err *e)
{
    struct common *c = NULL;
    int r = keeper_store(m->kept.keeper, m->kept.instance, KEEPER_COMMON, fd, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("common:stored");
    r = map_over(m, fd, e);
    if (r == SHD_OK)
        r = add(m, number, frozen_bytes(m), fd, &c, e);
    if (r == SHD_OK)
        *ret_common = c;
    else
        keeper_remove_part(m->kept.keeper, m->kept.instance, KEEPER_COMMON);
    return r;
}

/* There are holes in `to`, or none. */
static void own_again(struct common_work *w)
{
    struct shd_err why;
    reserve_lock();
    const int filled = fill_holes(w->to, &why);
    reserve_unlock();
    w->broken = filled != SHD_OK || map_over(w->to, /* fd= */ -1, &why) != SHD_OK;
}

/* The model that is forked has nothing in common yet. */
static int found(struct common_work *w, struct shd_err *e)
{
    struct segment segment;
    uint64_t number;
    int r = new_number(&number, e);
    if (r == SHD_OK)
        r = make_segment(w, frozen_bytes(w->from), &segment, e);
    if (r != SHD_OK) {
        own_again(w);
        return r;
    }
    copy_out(w->from, segment.base);
    FAIL_POINT("common:copied");
    munmap(segment.base, segment.bytes);
    segment.base = NULL;
    r = enter(w->from, number, segment.fd, &w->from_has, e);
    if (r == SHD_OK)
        return r;
    CHECK(map_over(w->from, /* fd= */ -1, NULL) == SHD_OK); /* else a successor begins anew */
    segment_close(&segment);
    own_again(w);
    return r;
}

/* The pages that it was made with are given up. */
static int join(struct common_work *w, const struct common *with, struct shd_err *e)
{
    CHECK(with != NULL);
    const int fd = fcntl(with->fd, F_DUPFD_CLOEXEC, 0);
    const int r = fd >= 0 ? enter(w->to, with->number, fd, &w->to_has, e)
                          : err_sys(e, SHD_EIO, "another descriptor of frozen units");
    if (r == SHD_OK) {
        make_holes(w->to);
        quota_give(w->to->kept.quota, with->bytes);
        return r;
    }
    if (fd >= 0)
        close(fd);
    own_again(w);
    return r;
}

int common_make(struct common_work *w, struct shd_err *e)
{
    int r = SHD_OK;
    if (w->to->kept.common != NULL) {
        r = own_pages(w->to, e);
        w->to_left = r == SHD_OK;
        w->broken = r != SHD_OK; /* what is to be copied there is not for the others */
        return r;                /* and asked again */
    }
    if (!w->can)
        return r;
    if (w->from->kept.common == NULL)
        r = found(w, e);
    if (r == SHD_OK)
        r = join(w, w->from_has != NULL ? w->from_has : w->from->kept.common, e);
    return r;
}

static void enter_done(struct model *m, struct common *has)
{
    const uint64_t own = m->state.bytes - has->bytes;
    m->kept.common = has;
    m->state.huge_bytes = m->state.huge_bytes < own ? m->state.huge_bytes : own;
    ledger_set_common(m->ledger, has->number);
}

bool common_done(struct common_work *w)
{
    if (w->to_left)
        common_left(w->to);
    if (w->from_has != NULL) {
        enter_done(w->from, w->from_has);
        FAIL_POINT("common:said");
    }
    if (w->to_has != NULL) {
        enter_done(w->to, w->to_has);
        FAIL_POINT("common:joined");
    }
    return w->from_has != NULL;
}

void common_end(const struct common_work *w)
{
    make_holes(w->from);
    FAIL_POINT("common:holes");
}

/* -- After a predecessor -----------------------------------------------------------------------
 */

int common_adopt(struct model *m, const struct keeper_group *g, struct shd_err *e)
{
    const uint64_t number = ledger_common(m->ledger), bytes = frozen_bytes(m);
    const int fd = g->fd[KEEPER_COMMON];
    if (number == 0)
        return SHD_OK;
    if (fd < 0 || bytes == 0 || m->state.file)
        return err_set(e, SHD_ESEGMENT,
                       "the keeper has no segment %016" PRIx64 " of the %" PRIu64
                       " bytes of frozen units that other models have as well",
                       number, bytes);
    int r = segment_check(fd, SEGMENT_STATE, bytes, e);
    if (r == SHD_OK)
        r = map_over(m, fd, e);
    if (r == SHD_OK)
        r = add(m, number, bytes, fd, &m->kept.common, e);
    if (r == SHD_OK)
        make_holes(m);
    return r;
}

void common_adopted(const struct model *m, struct keeper_group *g)
{
    if (m->kept.common != NULL || g->fd[KEEPER_COMMON] < 0)
        return;
    keeper_remove_part(m->kept.keeper, m->kept.instance, KEEPER_COMMON);
    close(g->fd[KEEPER_COMMON]);
    g->fd[KEEPER_COMMON] = -1;
}

void common_unadopt(struct model *m)
{
    if (m->kept.common != NULL)
        m->kept.common->fd = -1; /* the group's */
    common_free(m);
}

void common_free(struct model *m)
{
    struct common *c = m->kept.common;
    if (c == NULL)
        return;
    m->kept.common = NULL;
    take_out(c);
    if (c->fd >= 0)
        close(c->fd);
    free(c);
}
