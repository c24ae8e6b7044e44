/* See spare.h. */
#include "daemon/model/spare.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/model/model.h"
#include "daemon/model/quota.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/reserve.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"

#define SETTLE_MS UINT64_C(10000) /* in which sessions have come back after an adoption */

struct spare { /* what settles it */
    uv_timer_t timer;
    uv_work_t work;
    bool begun;      /* the timer is of the loop */
    bool settles;    /* work runs */
    bool settled;    /* after an adoption: sessions have had time to come back */
    bool missed;     /* no room was found, and it was said */
    uint64_t wanted; /* here and below: of the work */
    int work_status;
    struct shd_err why;
};

int spare_new(struct model *m, struct shd_err *e)
{
    m->spare = sys_calloc(1, sizeof *m->spare);
    return m->spare != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a timer");
}

void spare_free(struct model *m)
{
    if (m->kept.spare_fd >= 0)
        close(m->kept.spare_fd);
    if (m->kept.next_fd >= 0)
        close(m->kept.next_fd);
    free(m->spare);
}

uint64_t spare_bytes_first(const struct model *m)
{
    if (!m->kept.keeper->notify || m->kern->ops->place != SEGMENT_HOST)
        return 0;
    return (m->publish.file ? 0 : shardmap_publish_bytes(m->map)) +
           layout_align(board_bytes(m->map->units), SHD_PAGE_BYTES);
}

static bool wants_next(const struct model *m)
{
    const struct keeper *k = m->kept.keeper;
    return m->publish.file && k->notify && keeper_on_file(k, KEEPER_NEXT) && m->kept.next_fd < 0;
}

int spare_next(struct model *m, struct shd_err *e)
{
    const uint64_t bytes = shardmap_publish_bytes(m->map);
    if (!wants_next(m))
        return SHD_OK;
    int r = quota_take(m->kept.quota, bytes, "the file that a successor publishes in", e);
    if (r != SHD_OK)
        return r;
    int fd = -1;
    r = keeper_room_new(m->kept.keeper, KEEPER_NEXT, SEGMENT_PUBLISH, bytes, &fd, e);
    if (r != SHD_OK) {
        quota_give(m->kept.quota, bytes);
        return err_prefix(e, "for a successor");
    }
    m->kept.next_fd = fd;
    return SHD_OK;
}

/* Of a model that the keeper has already. One that it does not take is of no use. */
static int make_next(struct model *m, struct shd_err *e)
{
    int r = spare_next(m, e);
    if (r != SHD_OK || m->kept.next_fd < 0)
        return r;
    r = keeper_store(m->kept.keeper, m->kept.instance, KEEPER_NEXT, m->kept.next_fd, e);
    if (r != SHD_OK) {
        close(atomic_exchange(&m->kept.next_fd, -1));
        quota_give(m->kept.quota, shardmap_publish_bytes(m->map));
    }
    return r;
}

void spare_next_taken(struct model *m)
{
    if (m->kept.next_fd < 0)
        return;
    keeper_remove_part(m->kept.keeper, m->kept.instance, KEEPER_NEXT);
    close(atomic_exchange(&m->kept.next_fd, -1));
}

static uint64_t bytes_wanted(const struct model *m)
{
    const uint64_t first = spare_bytes_first(m);
    return first > 0 ? first + m->use.inbox_bytes : 0;
}

static int make(struct model *m, struct shd_err *e)
{
    m->kept.spare_fd = sys_memfd("shardd-spare", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return m->kept.spare_fd >= 0 ? SHD_OK : err_sys(e, SHD_EIO, "create spare memory");
}

int spare_grow(struct model *m, uint64_t bytes, struct shd_err *e)
{
    const uint64_t before = m->kept.spare_bytes;
    if (bytes == 0)
        return SHD_OK;
    int r = quota_take(m->kept.quota, bytes, "what a successor needs", e);
    if (r != SHD_OK)
        return r;
    r = m->kept.spare_fd < 0 ? make(m, e) : SHD_OK;
    if (r == SHD_OK && ftruncate(m->kept.spare_fd, (off_t)(before + bytes)) < 0)
        r = err_sys(e, SHD_EIO, "size spare memory to %" PRIu64 " bytes", before + bytes);
    if (r != SHD_OK) {
        quota_give(m->kept.quota, bytes);
        return r;
    }
    r = reserve_pages(m->kept.spare_fd, before, bytes, NULL, e);
    m->kept.spare_bytes = before + bytes;
    if (r != SHD_OK) {
        spare_give(m, bytes);
        return err_prefix(e, "%" PRIu64 " bytes spare for a successor", bytes);
    }
    return SHD_OK;
}

void spare_give(struct model *m, uint64_t bytes)
{
    const uint64_t left = bytes < m->kept.spare_bytes ? m->kept.spare_bytes - bytes : 0;
    if (m->kept.spare_fd < 0 || ftruncate(m->kept.spare_fd, (off_t)left) < 0)
        return; /* it stays, which is no harm */
    quota_give(m->kept.quota, m->kept.spare_bytes - left);
    m->kept.spare_bytes = left;
}

/* A session may be one that comes back after an adoption: what the predecessor had spare for it is
 * taken. */
int spare_inbox(struct model *m, uint64_t bytes, struct segment *ret_segment, struct shd_err *e)
{
    const bool host = m->kern->ops->place == SEGMENT_HOST;
    int r = SHD_OK;
    reserve_lock();
    const bool whole = spare_bytes_first(m) > 0 && (!m->kept.adopted || m->spare->settled);
    if (!whole)
        spare_give(m, bytes);
    r = quota_take(m->kept.quota, bytes, "gradient slots", e);
    if (r != SHD_OK) {
        reserve_unlock();
        return r;
    }
    if (host)
        r = reserve_check(whole ? 2 * bytes : bytes, RESERVE_SPARED_MIN, e);
    if (r == SHD_OK && whole)
        r = spare_grow(m, bytes, e);
    if (r == SHD_OK) {
        r = m->kern->ops->segment_new(m->kern, "shardd-inbox", SEGMENT_INBOX, bytes, ret_segment,
                                      e);
        if (r != SHD_OK && whole)
            spare_give(m, bytes);
    }
    quota_settle(m->kept.quota, bytes, r == SHD_OK ? ret_segment->bytes : 0);
    reserve_unlock();
    return r;
}

void spare_inbox_close(const struct model *m, struct segment *segment)
{
    const uint64_t bytes = segment->bytes;
    m->kern->ops->segment_close(m->kern, segment);
    quota_give(m->kept.quota, bytes);
}

bool spare_is_idle(const struct model *m)
{
    return !m->spare->settles;
}

uv_timer_t *spare_timer(struct model *m)
{
    return m->spare->begun ? &m->spare->timer : NULL;
}

/* -- Settling -----------------------------------------------------------------------------------
 */

static void settle(uv_work_t *work)
{
    struct model *m = work->data;
    struct spare *s = m->spare;
    const bool had = m->kept.spare_fd >= 0;
    s->work_status = SHD_OK;
    reserve_lock();
    if (m->kept.spare_bytes > s->wanted)
        spare_give(m, m->kept.spare_bytes - s->wanted);
    else
        s->work_status = spare_grow(m, s->wanted - m->kept.spare_bytes, &s->why);
    reserve_unlock();
    if (s->work_status == SHD_OK && !had && m->kept.spare_fd >= 0)
        s->work_status = keeper_store(m->kept.keeper, m->kept.instance, KEEPER_SPARE,
                                      m->kept.spare_fd, &s->why);
    if (s->work_status == SHD_OK && wants_next(m))
        s->work_status = make_next(m, &s->why);
}

static void settled(uv_work_t *work, int cancelled)
{
    struct model *m = work->data;
    struct spare *s = m->spare;
    (void)cancelled; /* nobody does */
    if (s->work_status != SHD_OK && !s->missed)
        log_warn("op=spare model=%s status=%s why=\"%s\" do=\"free memory (on files: the disk) or "
                 "raise the limit: a successor of this process would wait for it\"",
                 m->ledger->head->name, status_name(s->work_status), s->why.text);
    s->missed = s->work_status != SHD_OK;
    s->settled = !s->missed;
    s->settles = false;
    if (m->kept.spare_bytes != bytes_wanted(m) || wants_next(m))
        spare_watch(m);
}

static void look(uv_timer_t *timer)
{
    struct model *m = timer->data;
    struct spare *s = m->spare;
    s->wanted = bytes_wanted(m);
    if (m->daemon->stopping || s->settles)
        return;
    s->settled = m->kept.spare_bytes == s->wanted && !wants_next(m);
    if (s->settled)
        return;
    s->settles = true;
    s->work.data = m;
    uv_queue_work(m->daemon->loop, &s->work, settle, settled);
}

void spare_watch(struct model *m)
{
    struct spare *s = m->spare;
    if (m->daemon->stopping)
        return;
    if (!s->begun)
        uv_timer_init(m->daemon->loop, &s->timer);
    s->begun = true;
    s->timer.data = m;
    if (!uv_is_active((const uv_handle_t *)&s->timer))
        uv_timer_start(&s->timer, look, SETTLE_MS, /* repeat= */ 0);
}
