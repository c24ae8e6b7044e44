/* See plan_text.h. */
#include "client/plan/plan_text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_node.h"

/* -- Reading ----------------------------------------------------------------------------------- */

struct reading {
    const struct spec *spec; /* borrowed */
    struct plan_policy policy;
    struct plan plan; /* owned until it is handed out */
    struct shd_err *e;
};

static int read_schema(const struct node *root, struct shd_err *e)
{
    const struct node n = node_field(root, "schema");
    uint64_t schema;
    return node_u64(&n, 1, 1, &schema, e);
}

static int read_unit(const struct reading *r, const struct node *n)
{
    static const char *const known[] = { "name",   "parameters", "param_bytes", "grad_bytes",
                                         "frozen", "mean",       "uses" };
    const char *name = "";
    int code = node_object(n, known, ARRAY_SIZE(known), r->e);
    if (code != SHD_OK)
        return code;
    const struct node field = node_field(n, "name");
    code = node_text(&field, &name, r->e);
    if (code != SHD_OK)
        return code;
    const char *ours = r->spec->units[n->index].name;
    if (strcmp(name, ours) != 0)
        return err_set(r->e, SHD_ESPEC,
                       "%s is '%.60s', the model has '%.60s' there: a plan is for the units that "
                       "it was made for",
                       node_path(&field).text, name, ours);
    return SHD_OK;
}

/* The units are the model's, by name: their indices are what operations say. */
static int read_model(const struct reading *r, const struct node *root)
{
    static const char *const known[] = { "name",          "parameters", "publish", "codec",
                                         "micro_batches", "accumulate", "units" };
    const struct node n = node_field(root, "model"), units = node_field(&n, "units");
    uint32_t count = 0;
    int code = node_object(&n, known, ARRAY_SIZE(known), r->e);
    if (code == SHD_OK)
        code = node_array(&units, 1, SHD_UNITS_MAX, &count, r->e);
    if (code == SHD_OK && count != r->spec->unit_count)
        code = err_set(r->e, SHD_ESPEC,
                       "model.units has %" PRIu32 " entries, the model has %" PRIu32
                       " units: a plan is for the units that it was made for",
                       count, r->spec->unit_count);
    struct node item = node_item(&units, 0);
    for (uint32_t i = 0; code == SHD_OK && i < count; i++, item = node_next(&item))
        code = read_unit(r, &item);
    return code;
}

/* An optional number. */
static int read_bound(const struct node *object, const char *key, uint64_t max, uint64_t *value,
                      struct shd_err *e)
{
    const struct node n = node_field(object, key);
    return n.json != NULL ? node_u64(&n, 0, max, value, e) : SHD_OK;
}

static int wrong_word(const struct node *n, const char *word, const char *right, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "%s is '%.40s', must be %s", node_path(n).text, word, right);
}

static int read_words(struct reading *r, const struct node *n)
{
    const struct node strategy = node_field(n, "strategy");
    const struct node prefetch = node_field(n, "backward_prefetch");
    const struct node dtype = node_field(n, "grad_dtype");
    const char *word = "";
    int code = node_text(&strategy, &word, r->e);
    if (code != SHD_OK)
        return code;
    const int kind = plan_strategy_parse(word);
    if (kind < 0 || kind == PLAN_HYBRID)
        return wrong_word(&strategy, word,
                          "own, ddp, zero1, zero2 or zero3: whose rules the operations keep", r->e);
    r->policy.strategy = (enum plan_strategy)kind;
    if (prefetch.json != NULL) {
        code = node_text(&prefetch, &word, r->e);
        const int which = code == SHD_OK ? plan_prefetch_parse(word) : 0;
        if (which < 0)
            return wrong_word(&prefetch, word, "pre, post or none", r->e);
        r->policy.backward_prefetch = (enum plan_backward_prefetch)which;
    }
    if (code == SHD_OK && dtype.json != NULL) {
        code = node_text(&dtype, &word, r->e);
        r->policy.grad_dtype = code == SHD_OK ? dtype_parse(word) : 0;
        if (code == SHD_OK && !dtype_valid(r->policy.grad_dtype))
            return wrong_word(&dtype, word, "f32, bf16 or f16", r->e);
    }
    return code;
}

static int read_policy(struct reading *r, const struct node *root)
{
    static const char *const known[] = { "strategy",       "backward_prefetch", "forward_prefetch",
                                         "max_live_units", "max_live_bytes",    "grad_dtype" };
    const struct node n = node_field(root, "policy");
    uint64_t forward = r->policy.forward_prefetch, units = 0;
    int code = node_object(&n, known, ARRAY_SIZE(known), r->e);
    if (code == SHD_OK)
        code = read_words(r, &n);
    if (code == SHD_OK)
        code = read_bound(&n, "forward_prefetch", SHD_UNITS_MAX, &forward, r->e);
    if (code == SHD_OK)
        code = read_bound(&n, "max_live_units", UINT32_MAX, &units, r->e);
    if (code == SHD_OK)
        code = read_bound(&n, "max_live_bytes", INT64_MAX, &r->policy.max_live_bytes, r->e);
    r->policy.forward_prefetch = (uint32_t)forward;
    r->policy.max_live_units = (uint32_t)units;
    return code;
}

static int read_micros(struct reading *r, const struct node *root)
{
    const struct node n = node_field(root, "micro_batches_per_worker");
    const uint32_t a = r->spec->accumulate > 0 ? r->spec->accumulate : 1;
    uint64_t micros = 0;
    const int code = node_u64(&n, 1, SHD_MICROS_MAX, &micros, r->e);
    if (code == SHD_OK && micros % a != 0)
        return err_set(r->e, SHD_EINVAL,
                       "micro_batches_per_worker is %" PRIu64 ", must be a multiple of %" PRIu32
                       ": the model's accumulate, gradients are returned in groups",
                       micros, a);
    r->plan.micros = (uint32_t)micros;
    return code;
}

/* What an operation is told by, in an error. */
static int wrong_op(struct shd_err *e, uint32_t index, const char *name, const char *part)
{
    return err_prefix(e, "operation %" PRIu32 "%s%.40s%s", index, name[0] != '\0' ? ", " : "", name,
                      part);
}

static int read_kind(const struct node *op, enum plan_op_kind *ret_kind, const char **ret_name,
                     struct shd_err *e)
{
    const char *known[PLAN_COMMIT + 1], *name = "";
    char near[120];
    const struct node n = node_item(op, 0);
    const int code = node_text(&n, &name, e);
    if (code != SHD_OK)
        return code;
    const int kind = plan_op_parse(name);
    for (int i = 0; i <= PLAN_COMMIT; i++)
        known[i] = plan_op_name((enum plan_op_kind)i);
    if (kind < 0)
        return err_set(e, SHD_EINVAL, "'%.40s' is no operation%s", name,
                       suggest(name, known, ARRAY_SIZE(known), "", near, sizeof near));
    *ret_kind = (enum plan_op_kind)kind;
    *ret_name = plan_op_name(*ret_kind);
    return SHD_OK;
}

/* ["FETCH", unit, micro-batch], or ["PREPARE"]. */
static int read_op(const struct reading *r, const struct node *n, struct plan_op *ret_op)
{
    uint64_t unit = 0, micro = 0;
    uint32_t values = 0;
    const char *name = "";
    enum plan_op_kind kind = PLAN_COMMIT;
    int code = node_array(n, 1, 3, &values, r->e);
    if (code == SHD_OK)
        code = read_kind(n, &kind, &name, r->e);
    if (code == SHD_OK && values != (kind < PLAN_PREPARE ? 3u : 1u))
        code = err_set(r->e, SHD_EINVAL, "has %" PRIu32 " values, must be [\"%s\"%s]", values, name,
                       kind < PLAN_PREPARE ? ", unit, micro-batch" : "");
    if (code != SHD_OK)
        return wrong_op(r->e, n->index, name, "");
    if (kind < PLAN_PREPARE) {
        const struct node of = node_item(n, 1), in = node_item(n, 2);
        code = node_u64(&of, 0, r->spec->unit_count - 1, &unit, r->e);
        if (code != SHD_OK)
            return wrong_op(r->e, n->index, name, ", its unit");
        code = node_u64(&in, 0, r->plan.micros - 1, &micro, r->e);
        if (code != SHD_OK)
            return wrong_op(r->e, n->index, name, ", its micro-batch");
    }
    *ret_op = (struct plan_op){ kind, (uint32_t)unit, (uint32_t)micro };
    return SHD_OK;
}

static int read_ops(struct reading *r, const struct node *root)
{
    const struct node n = node_field(root, "ops");
    uint32_t count = 0;
    int code = node_array(&n, 1, PLAN_OPS_MAX, &count, r->e);
    if (code != SHD_OK)
        return code;
    r->plan.ops = sys_calloc(count, sizeof *r->plan.ops);
    if (r->plan.ops == NULL)
        return err_set(r->e, SHD_ENOMEM, "no memory for %" PRIu32 " operations", count);
    r->plan.op_count = count;
    struct node item = node_item(&n, 0);
    for (uint32_t i = 0; code == SHD_OK && i < count; i++, item = node_next(&item))
        code = read_op(r, &item, &r->plan.ops[i]);
    return code;
}

static int read_document(struct reading *r, const struct node *root)
{
    static const char *const known[] = { "schema", "model", "policy", "micro_batches_per_worker",
                                         "ops",
                                         /* which shardctl says of them, and nobody reads: */
                                         "cost", "timeline", "owners", "crossing", "auto", "time" };
    if (root->json->kind != TEXT_OBJECT)
        return err_set(r->e, SHD_EINVAL,
                       "a plan is a JSON object, as `shardctl plan --ops` "
                       "prints it");
    int code = node_object(root, known, ARRAY_SIZE(known), r->e);
    if (code == SHD_OK)
        code = read_schema(root, r->e);
    if (code == SHD_OK)
        code = read_model(r, root);
    if (code == SHD_OK)
        code = read_policy(r, root);
    if (code == SHD_OK)
        code = read_micros(r, root);
    return code == SHD_OK ? read_ops(r, root) : code;
}

int plan_text_parse(const char *json, size_t bytes, const struct spec *spec,
                    struct plan_policy *ret_policy, struct plan *ret_plan, struct shd_err *e)
{
    struct shd_err own;
    struct text_doc doc;
    struct reading r = { .spec = spec, .policy = PLAN_POLICY_DEFAULT, .e = e != NULL ? e : &own };
    CHECK(spec->unit_count > 0);
    if (bytes > PLAN_TEXT_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "a plan of %zu bytes, the limit is %zu", bytes,
                       PLAN_TEXT_BYTES_MAX);
    int code = text_read("plan", json, bytes, &doc, r.e);
    if (code != SHD_OK)
        return code;
    const struct node root = { .json = doc.values };
    code = read_document(&r, &root);
    text_free(&doc);
    if (code == SHD_OK)
        code = plan_count(&r.plan, spec, r.policy.grad_dtype, &r.plan.cost, r.e);
    if (code != SHD_OK) {
        plan_free(&r.plan);
        return code;
    }
    *ret_policy = r.policy;
    *ret_plan = r.plan;
    return SHD_OK;
}

/* -- Writing ----------------------------------------------------------------------------------- */

struct writing {
    char *at; /* owned; NULL: nothing yet, or no memory */
    size_t used, room;
    bool failed;
};

/* Of less than a hundred bytes beside names, of which a unit's is the longest. */
#define PUT_BYTES_MAX (SPEC_NAME_BYTES_MAX + 100)

static void put(struct writing *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void put(struct writing *w, const char *fmt, ...)
{
    if (!w->failed && w->room - w->used < PUT_BYTES_MAX) {
        const size_t room = 2 * w->room + 4096;
        char *at = sys_realloc(w->at, room);
        w->failed = at == NULL;
        w->at = at != NULL ? at : w->at;
        w->room = at != NULL ? room : w->room;
    }
    if (w->failed)
        return;
    va_list args;
    va_start(args, fmt);
    const int bytes = vsnprintf(w->at + w->used, w->room - w->used, fmt, args);
    va_end(args);
    CHECK(bytes >= 0 && (size_t)bytes < PUT_BYTES_MAX);
    w->used += (size_t)bytes;
}

static void put_policy(struct writing *w, const struct plan_policy *p)
{
    put(w, "  \"policy\": {\"strategy\": \"%s\", \"backward_prefetch\": \"%s\",",
        plan_strategy_name(p->strategy), plan_prefetch_name(p->backward_prefetch));
    put(w, " \"forward_prefetch\": %" PRIu32 ",\n             \"max_live_units\": %" PRIu32,
        p->forward_prefetch, p->max_live_units);
    put(w, ", \"max_live_bytes\": %" PRIu64, p->max_live_bytes);
    if (p->grad_dtype != 0)
        put(w, ", \"grad_dtype\": \"%s\"", dtype_name(p->grad_dtype));
    put(w, "},\n");
}

static void put_ops(struct writing *w, const struct plan *plan)
{
    put(w, "  \"ops\": [\n");
    for (uint32_t i = 0; i < plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        put(w, "    [\"%s\"", plan_op_name(op->kind));
        if (op->kind < PLAN_PREPARE)
            put(w, ", %" PRIu32 ", %" PRIu32, op->unit, op->micro);
        put(w, "]%s\n", i + 1 < plan->op_count ? "," : "");
    }
    put(w, "  ]\n");
}

int plan_text_write(const struct spec *spec, const struct plan_policy *policy,
                    const struct plan *plan, char **ret_text, struct shd_err *e)
{
    struct writing w = { .used = 0 };
    if (plan->op_count > PLAN_OPS_MAX)
        return err_set(e, SHD_ERANGE,
                       "a plan of %" PRIu32 " operations, the limit of what is written down is %u",
                       plan->op_count, PLAN_OPS_MAX);
    put(&w, "{\n  \"schema\": 1,\n  \"model\": {\"units\": [");
    for (uint32_t u = 0; u < spec->unit_count; u++)
        put(&w, "%s{\"name\": \"%s\"}", u > 0 ? ", " : "", spec->units[u].name);
    put(&w, "]},\n");
    put_policy(&w, policy);
    put(&w, "  \"micro_batches_per_worker\": %" PRIu32 ",\n", plan->micros);
    put_ops(&w, plan);
    put(&w, "}\n");
    if (w.failed || w.used > PLAN_TEXT_BYTES_MAX) {
        free(w.at);
        return w.failed ? err_set(e, SHD_ENOMEM, "no memory for a plan as text")
                        : err_set(e, SHD_ERANGE, "a plan of %zu bytes, the limit is %zu", w.used,
                                  PLAN_TEXT_BYTES_MAX);
    }
    *ret_text = w.at;
    return SHD_OK;
}
