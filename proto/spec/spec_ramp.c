/* See spec_ramp.h. */
#include "proto/spec/spec_ramp.h"

#include <inttypes.h>

#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/ramp.h"

static int parse_row(const struct node *n, struct ramp *ramp, struct shd_err *e)
{
    struct ramp_row *row = &ramp->rows[ramp->count];
    uint64_t least = 0, micro_batches = 0;
    uint32_t count;
    int r = node_array(n, 2, 2, &count, e);
    if (r != SHD_OK)
        return r;
    const struct node from = node_item(n, 0), number = node_item(n, 1);
    if (ramp->count > 0)
        least = row[-1].from + 1;
    r = node_u64(&from, least, ramp->count > 0 ? RAMP_STEP_MAX : 0, &row->from, e);
    if (r == SHD_OK)
        r = node_u64(&number, 1, SHD_MICROS_MAX, &micro_batches, e);
    row->micro_batches = (uint32_t)micro_batches;
    ramp->count++;
    return r;
}

static int parse_rows(const struct node *n, struct ramp *ramp, struct shd_err *e)
{
    uint32_t count;
    int r = node_array(n, 1, RAMP_ROWS_MAX, &count, e);
    if (r != SHD_OK)
        return r;
    struct node row = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++, row = node_next(&row))
        r = parse_row(&row, ramp, e);
    return r;
}

static int parse_micro_batches(const struct node *n, struct ramp *ramp, struct shd_err *e)
{
    uint64_t micro_batches = 0;
    if (n->json != NULL && n->json->kind == TEXT_ARRAY)
        return parse_rows(n, ramp, e);
    const int r = node_u64(n, 1, SHD_MICROS_MAX, &micro_batches, e);
    ramp->count = 1;
    ramp->rows[0].micro_batches = (uint32_t)micro_batches;
    return r;
}

int spec_ramp_parse(struct spec *s, const struct node *root, struct shd_err *e)
{
    const struct node number = node_field(root, "micro_batches");
    const struct node room = node_field(root, "micro_batches_max");
    uint64_t most = 0;
    s->ramp = sys_calloc(1, sizeof *s->ramp);
    if (s->ramp == NULL)
        return node_no_memory(e);
    int r = parse_micro_batches(&number, s->ramp, e);
    s->micro_batches = ramp_max(s->ramp);
    if (r == SHD_OK && room.json != NULL)
        r = node_u64(&room, s->micro_batches, SHD_MICROS_MAX, &most, e);
    if (r == SHD_OK && most > 0)
        s->micro_batches = (uint32_t)most;
    return r;
}

int spec_ramp_check(const struct spec *s, const struct node *n, uint64_t a, struct shd_err *e)
{
    for (uint32_t i = 0; i < s->ramp->count; i++)
        if (s->ramp->rows[i].micro_batches % a != 0)
            return err_set(e, SHD_EINVAL,
                           "%s is %" PRIu64 ", must divide micro_batches (%" PRIu32 ")",
                           node_path(n).text, a, s->ramp->rows[i].micro_batches);
    if (s->micro_batches % a != 0)
        return err_set(e, SHD_EINVAL,
                       "%s is %" PRIu64 ", must divide micro_batches_max (%" PRIu32 ")",
                       node_path(n).text, a, s->micro_batches);
    return SHD_OK;
}

/* json_array_append_new() takes a NULL as an error, and then the rest is missing, too. */
static json_t *rows_json(const struct ramp *ramp)
{
    json_t *array = json_array();
    for (uint32_t i = 0; array != NULL && i < ramp->count; i++)
        if (json_array_append_new(array, json_pack("[I, I]", (json_int_t)ramp->rows[i].from,
                                                   (json_int_t)ramp->rows[i].micro_batches)) != 0) {
            json_decref(array);
            array = NULL;
        }
    return array;
}

json_t *spec_ramp_json(const struct spec *s)
{
    if (s->ramp != NULL && s->ramp->count > 1)
        return rows_json(s->ramp);
    return json_integer((json_int_t)spec_micro_batches(s, 0));
}
