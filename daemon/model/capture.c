/* See capture.h. */
#include "daemon/model/capture.h"

#include "daemon/base/keeper.h"
#include "daemon/model/checkpoint.h"
#include "daemon/model/model.h"
#include "daemon/model/paging.h"
#include "daemon/model/pin.h"
#include "daemon/model/snapshots.h"
#include "proto/share/shardmap.h"

int capture_before_update(struct model *m, uint32_t unit, struct shd_err *e)
{
    int r = checkpoint_before_update(m, unit, e);
    if (r == SHD_OK)
        r = pins_before_update(m, unit, e);
    return r == SHD_OK ? snapshots_before_update(m, e) : r;
}

int capture_before_work(struct model *m, uint32_t unit, bool updates, bool all, struct shd_err *e)
{
    const int r = updates ? capture_before_update(m, unit, e) : SHD_OK;
    return r == SHD_OK ? paging_begin(m, unit, all, e) : r;
}

void capture_worked(struct model *m, uint32_t unit, bool all, bool over)
{
    paging_done(m, unit, all, over);
}

void capture_published(struct model *m, uint32_t unit)
{
    keeper_segment_write(m->kept.keeper, &m->publish, shardmap_publish_offset_bytes(m->map, unit),
                         shardmap_publish_slice_bytes(m->map, unit));
}

void capture_moved(struct model *m)
{
    pins_moved(m);
    snapshots_moved(m);
}

void capture_retry(struct model *m)
{
    checkpoint_retry(m);
    pins_retry(m);
    snapshots_retry(m);
}

void capture_forget_session(struct model *m, const struct session *s)
{
    pins_forget_session(m, s);
}

bool capture_is_idle(const struct model *m)
{
    struct pin_shown pins[PINS_MAX];
    return m->checkpoint == NULL && pins_show(m, pins) == 0 && snapshots_are_idle(m) &&
           paging_is_idle(m);
}

void capture_free(struct model *m)
{
    checkpoint_free(m->checkpoint);
    m->checkpoint = NULL;
    pins_free(m);
    snapshots_free(m);
}
