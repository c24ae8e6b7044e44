/* Looking things up in a model. See client/shd.h. */
#include <inttypes.h>
#include <string.h>

#include "client/paths/path.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/spec/spec_dump.h"

const char *shd_model_name(const shd_model *m)
{
    return m->spec->name;
}

uint64_t shd_step(const shd_model *m)
{
    return m->step;
}

const char *shd_model_spec(shd_model *m)
{
    if (m->spec_json == NULL && spec_dump(m->spec, &m->spec_json, /* e= */ NULL) != SHD_OK)
        return NULL;
    return m->spec_json;
}

uint32_t shd_micro_batches(const shd_model *m)
{
    return m->spec->micro_batches;
}

uint32_t shd_accumulate(const shd_model *m)
{
    return m->spec->accumulate;
}

bool shd_unit_frozen(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count && m->spec->units[unit].frozen;
}

uint64_t shd_unit_misses(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count ? m->holds[unit].misses : 0;
}

double shd_loss_scale(const shd_model *m)
{
    uint32_t good_steps;
    return loss_scale_next(m->decided ? &m->decision : NULL, &good_steps);
}

uint32_t shd_units(const shd_model *m)
{
    return m->spec->unit_count;
}

const char *shd_unit_name(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count ? m->spec->units[unit].name : NULL;
}

enum shd_dtype shd_param_dtype(const shd_model *m)
{
    return m->spec->publish;
}

uint32_t shd_tensors(const shd_model *m)
{
    return m->spec->tensor_count;
}

void shd_tensor_get(const shd_model *m, uint32_t index, struct shd_tensor *ret_tensor)
{
    CHECK(index < m->spec->tensor_count);
    const struct spec_tensor *t = &m->spec->tensors[index];
    *ret_tensor = (struct shd_tensor){ t->name, t->unit, t->offset_elems, t->elems };
}

int shd_tensor_find(const shd_model *m, const char *name, struct shd_tensor *ret_tensor,
                    struct shd_err *e)
{
    for (uint32_t i = 0; i < m->spec->tensor_count; i++)
        if (strcmp(m->spec->tensors[i].name, name) == 0) {
            shd_tensor_get(m, i, ret_tensor);
            return SHD_OK;
        }
    return err_set(e, SHD_ENOENT, "model '%s' has no tensor '%.100s'", m->spec->name, name);
}

const void *shd_params(const shd_model *m, uint32_t unit)
{
    if (unit >= m->spec->unit_count || m->holds[unit].acquired == 0)
        return NULL;
    return m->reader->params(m, unit);
}

int shd_blob(shd_model *m, void *buf, size_t capacity, size_t *ret_bytes, struct shd_err *e)
{
    return m->session->control->blob(m, buf, capacity, ret_bytes, e);
}

int shd_digest(shd_model *m, char ret_hex[65], uint64_t *ret_step, struct shd_err *e)
{
    static_assert(DIGEST_HEX_BYTES == 65, "shd.h and digest.h agree");
    uint64_t step;
    const int r = digest_run(m->spec, m->session->control->leaves, m, ret_hex, &step, e);
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = step;
    return r;
}
