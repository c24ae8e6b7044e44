/* See memory.h. */
#include "daemon/model/memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/keeper.h"
#include "daemon/core/ledger.h"
#include "daemon/model/common.h"
#include "daemon/model/model.h"
#include "daemon/model/paging.h"
#include "daemon/model/quota.h"
#include "daemon/model/spare.h"
#include "kernels/kern.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"
#include "proto/share/owner_bytes.h"
#include "proto/share/reserve.h"
#include "proto/share/shardmap.h"

int memory_init(struct model *m, struct shd_err *e)
{
    m->kept.spare_fd = -1;
    m->kept.next_fd = -1;
    return spare_new(m, e);
}

/* Whether the model, with what a successor will need to adopt it, fits into what is left. */
static int check_room(const struct model *m, const struct ledger_shape *shape, struct shd_err *e)
{
    const struct kern_ops *ops = m->kern->ops;
    const struct owner_ask ask = { .spec_bytes = shape->spec_bytes,
                                   .returns = shape->micros,
                                   .keeper = spare_bytes_first(m) > 0,
                                   .on_file = m->state.file,
                                   .publish_on_file = m->publish.file };
    const struct owner_bytes b = owner_bytes(m->map, &ask);
    if (ops->place == SEGMENT_HOST)
        return reserve_check(b.all - m->json.segment.bytes, RESERVE_SPARED, e); /* it is taken */
    const uint64_t needed = shape->state_bytes + 2 * b.publish; /* a successor's, too */
    const uint64_t available = ops->available(m->kern);
    if (needed > available)
        return err_set(e, SHD_ENOMEM, "%" PRIu64 " MiB are needed, %" PRIu64 " MiB are free on %s",
                       (needed >> 20) + 1, available >> 20, ops->product);
    return reserve_check(b.ledger + b.board, RESERVE_SPARED, e);
}

static int share(struct model *m, struct shd_err *e)
{
    int r = SHD_OK;
    if (!m->publish.file)
        r = m->kern->ops->segment_new(m->kern, "shardd-publish", SEGMENT_PUBLISH,
                                      shardmap_publish_bytes(m->map), &m->publish, e);
    if (r == SHD_OK)
        r = segment_new("shardd-board", SEGMENT_BOARD, board_bytes(m->map->units),
                        &m->board_segment, e);
    if (r == SHD_OK) {
        m->board = m->board_segment.base;
        board_init(m->board, m->map->units);
    }
    return r;
}

static uint64_t kept_bytes(const struct model *m)
{
    const uint64_t others = common_counts(m) ? 0 : common_bytes(m);
    return m->state.bytes - others + m->ledger_segment.bytes + m->json.segment.bytes;
}

static uint64_t shared_bytes(const struct model *m)
{
    return m->publish.bytes + m->board_segment.bytes;
}

/* Before any of it is made. */
static int take_quota(const struct model *m, const struct ledger_shape *shape, uint64_t *ret_bytes,
                      struct shd_err *e)
{
    uint64_t ledger = 0;
    int r = ledger_bytes(shape, &ledger, e);
    *ret_bytes = shape->state_bytes + ledger + m->json.segment.bytes +
                 shardmap_publish_bytes(m->map) + board_bytes(m->map->units);
    return r == SHD_OK ? quota_take(m->kept.quota, *ret_bytes, "the state", e) : r;
}

void memory_adopted(struct model *m)
{
    quota_have(m->kept.quota, kept_bytes(m));
    spare_next_taken(m);
}

void memory_registered(struct model *m)
{
    if (m->kept.adopted)
        spare_watch(m);
}

/* Under the lock. */
static int make_segments(struct model *m, const struct ledger_shape *shape, struct shd_err *e)
{
    uint64_t bytes = 0;
    int r = ledger_bytes(shape, &bytes, e);
    if (r == SHD_OK)
        r = check_room(m, shape, e);
    if (r == SHD_OK && !m->state.file)
        r = m->kern->ops->segment_new(m->kern, "shardd-state", SEGMENT_STATE, shape->state_bytes,
                                      &m->state, e);
    if (r == SHD_OK)
        r = segment_new("shardd-ledger", SEGMENT_LEDGER, bytes, &m->ledger_segment, e);
    if (r == SHD_OK)
        r = share(m, e);
    if (r == SHD_OK)
        r = spare_grow(m, spare_bytes_first(m), e);
    return r;
}

/* Give the keeper what outlives this process. */
static int store_kept(struct model *m, struct shd_err *e)
{
    const struct {
        enum keeper_part part;
        int fd;
    } parts[] = { { KEEPER_LEDGER, m->ledger_segment.fd },
                  { KEEPER_STATE, m->state.fd },
                  { KEEPER_SPARE, m->kept.spare_fd },
                  { KEEPER_NEXT, m->kept.next_fd } };
    int r = SHD_OK;
    m->kept.stored = true; /* one of them at least, from here on */
    for (size_t i = 0; i < sizeof parts / sizeof *parts && r == SHD_OK; i++)
        if (parts[i].fd >= 0)
            r = keeper_store(m->kept.keeper, m->kept.instance, parts[i].part, parts[i].fd, e);
    return r;
}

/* Before the lock, for a disk takes its time. */
static int make_state_file(struct model *m, uint64_t bytes, struct shd_err *e)
{
    const struct keeper *k = m->kept.keeper;
    if (m->kern->ops->place != SEGMENT_HOST || !keeper_on_file(k, KEEPER_STATE))
        return SHD_OK;
    const int r = keeper_segment_new(k, KEEPER_STATE, SEGMENT_STATE, bytes, &m->state, e);
    FAIL_POINT("model:file:after");
    return r;
}

static int lend(struct model *m, int fd, struct shd_err *e)
{
    const int r = keeper_room_lend(fd, SEGMENT_PUBLISH, shardmap_publish_bytes(m->map), &m->publish,
                                   e);
    if (r != SHD_OK)
        close(fd);
    return r;
}

/* Likewise. */
static int make_publish_file(struct model *m, struct shd_err *e)
{
    int fd = -1;
    if (m->kern->ops->place != SEGMENT_HOST || !keeper_on_file(m->kept.keeper, KEEPER_NEXT))
        return SHD_OK;
    const int r = keeper_room_new(m->kept.keeper, KEEPER_NEXT, SEGMENT_PUBLISH,
                                  shardmap_publish_bytes(m->map), &fd, e);
    return r == SHD_OK ? lend(m, fd, e) : r;
}

/* Matrices are updated by the host alone. */
static int check_matrices(const struct model *m, struct shd_err *e)
{
    if (m->map->scratch_elems == 0 || m->kern->ops->place == SEGMENT_HOST)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "a group's optimizer is muon, lamb or adafactor, which is not done on a GPU "
                   "(%s) yet: open the model "
                   "at daemons of the host (--device cpu0)",
                   m->kern->ops->product);
}

int memory_make(struct model *m, const struct ledger_shape *shape, struct shd_err *e)
{
    uint64_t asked;
    int r = check_matrices(m, e);
    if (r == SHD_OK)
        r = take_quota(m, shape, &asked, e);
    if (r == SHD_OK)
        r = make_state_file(m, shape->state_bytes, e);
    if (r == SHD_OK)
        r = make_publish_file(m, e);
    if (r == SHD_OK)
        r = spare_next(m, e);
    if (r != SHD_OK)
        return r;
    reserve_lock();
    r = make_segments(m, shape, e);
    reserve_unlock();
    if (r != SHD_OK)
        return r;
    quota_settle(m->kept.quota, asked, kept_bytes(m) + shared_bytes(m));
    ledger_init(m->ledger, m->ledger_segment.base, shape);
    FAIL_POINT("model:segments:after");
    return store_kept(m, e);
}

int memory_page(struct model *m, struct shd_err *e)
{
    return m->state.file && m->kept.paging == NULL ? paging_new(m, e) : SHD_OK;
}

void memory_passed(struct model *m, uint64_t bytes)
{
    paging_passed(m, bytes);
}

/* The group's file, which keeps it until nothing may fail; or a new one, where that made none. */
static int publish_file_again(struct model *m, struct shd_err *e)
{
    if (m->kept.next_fd < 0)
        return make_publish_file(m, e);
    const int fd = fcntl(m->kept.next_fd, F_DUPFD_CLOEXEC, 0);
    return fd >= 0 ? lend(m, fd, e) : err_sys(e, SHD_EIO, "have the next file a second time");
}

int memory_share_again(struct model *m, struct shd_err *e)
{
    int r = publish_file_again(m, e);
    if (r != SHD_OK)
        return r;
    const uint64_t bytes = spare_bytes_first(m);
    struct stat st;
    if (m->kept.spare_fd >= 0 && fstat(m->kept.spare_fd, &st) == 0)
        m->kept.spare_bytes = (uint64_t)st.st_size;
    quota_have(m->kept.quota, m->kept.spare_bytes);
    reserve_lock();
    spare_give(m, bytes);
    r = reserve_check(bytes, RESERVE_SPARED_MIN, e);
    if (r == SHD_OK)
        r = share(m, e);
    reserve_unlock();
    if (r == SHD_OK)
        quota_have(m->kept.quota, shared_bytes(m));
    return r;
}

void memory_free(struct model *m)
{
    if (m->kept.stored && !ledger_filled(m->ledger->head))
        keeper_remove(m->kept.keeper, m->kept.instance);
    spare_free(m);
    common_free(m);
    segment_close(&m->board_segment);
    if (m->publish.file)
        keeper_segment_close(m->kept.keeper, &m->publish);
    else
        m->kern->ops->segment_close(m->kern, &m->publish);
    segment_close(&m->ledger_segment);
    if (m->state.file)
        keeper_segment_close(m->kept.keeper, &m->state);
    else
        m->kern->ops->segment_close(m->kern, &m->state);
    paging_free(m);
    if (m->use.dropped)
        keeper_wait(m->kept.keeper);
}
