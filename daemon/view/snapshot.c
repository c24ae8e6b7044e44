/* See snapshot.h. */
#include "daemon/view/snapshot.h"

#include <stdio.h>

#include "daemon/base/keeper.h"
#include "daemon/base/state.h"
#include "daemon/model/model.h"
#include "kernels/kern.h"
#include "proto/base/check.h"

_Static_assert(VIEW_HOME_BYTES == KEEPER_HOME_BYTES, "a home's text fits");

struct view_daemon view_daemon_of(const struct daemon *d)
{
    const struct kern_ops *ops = d->kern->ops;
    const uint8_t *u = ops->uuid;
    struct view_daemon v = { .device = d->device,
                             .place = segment_place_name(ops->place),
                             .isa = ops->name,
                             .keeper = keeper_name(d->keeper),
                             .gpu = ops->place != SEGMENT_HOST ? ops->product : NULL,
                             .threads = d->threads,
                             .adopt = d->adopt };
    keeper_home(d->keeper, KEEPER_STATE, v.state_home);
    keeper_home(d->keeper, KEEPER_NEXT, v.publish_home);
    keeper_home(d->keeper, KEEPER_SNAPSHOT, v.snapshots_home);
    snprintf(v.gpu_uuid, sizeof v.gpu_uuid, /* as a GPU's tools write it */
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
    return v;
}

uint32_t view_kernels_of(const struct daemon *d, struct view_kernel ret[VIEW_KERNELS_MAX])
{
    uint32_t count;
    const struct kern_choice *made = d->kern->ops->choices(d->kern, &count);
    CHECK(count <= VIEW_KERNELS_MAX);
    for (uint32_t i = 0; i < count; i++)
        ret[i] = (struct view_kernel){ .work = made[i].work,
                                       .isa = made[i].isa,
                                       .beside = made[i].other,
                                       .ns = made[i].isa_ns,
                                       .beside_ns = made[i].other_ns,
                                       .ratio = made[i].ratio };
    return count;
}

double view_loss(const struct view_model *vm)
{
    return vm->last.committed.metric / vm->spec->accumulate;
}

const struct view_model *view_model_find(const struct view_snapshot *s, uint32_t handle)
{
    for (uint32_t i = 0; i < s->model_count && handle != 0; i++)
        if (s->models[i].handle == handle)
            return &s->models[i];
    return NULL;
}

const struct view_model *view_model_at(const struct view_snapshot *s, uint32_t place)
{
    for (uint32_t i = 0; i < s->model_count && place != 0; i++)
        if (model_place(s->models[i].handle) == place)
            return &s->models[i];
    return NULL;
}

const struct view_session *view_session_find(const struct view_snapshot *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->session_count && id != 0; i++)
        if (s->sessions[i].id == id)
            return &s->sessions[i];
    return NULL;
}
