/* See spec_optimizer.h. */
#include "proto/spec/spec_optimizer.h"

#include <float.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_muon.h"
#include "proto/spec/spec_node.h"

static int parse_kind(const struct node *n, enum spec_optimizer *ret_kind, struct shd_err *e)
{
    const char *kind = NULL;
    const int r = node_text(n, &kind, e);
    if (r != SHD_OK)
        return r;
    for (int i = 1; i <= SPEC_OPTIMIZERS; i++)
        if (!spec_optimizer_rows[i].in_torch_order &&
            strcmp(kind, spec_optimizer_rows[i].kind) == 0) {
            *ret_kind = (enum spec_optimizer)i;
            return SHD_OK;
        }
    if (strcmp(kind, spec_optimizer_rows[SPEC_MUON].kind) == 0 ||
        strcmp(kind, spec_optimizer_rows[SPEC_LAMB].kind) == 0 ||
        strcmp(kind, spec_optimizer_rows[SPEC_ADAFACTOR].kind) == 0)
        return err_set(e, SHD_EINVAL,
                       "%s is '%s', which is of a group (groups[].optimizer): the model's, of all "
                       "other groups, must be adamw, sgd or lion",
                       node_path(n).text, kind);
    return err_set(e, SHD_EINVAL, "%s is '%.40s', must be adamw, sgd or lion", node_path(n).text,
                   kind);
}

static int parse_order(const struct node *n, enum spec_optimizer *kind, struct shd_err *e)
{
    const char *order = NULL;
    const struct spec_optimizer_row *row = &spec_optimizer_rows[*kind];
    if (n->json == NULL)
        return SHD_OK;
    const int r = node_text(n, &order, e);
    if (r != SHD_OK || strcmp(order, "shardd") == 0)
        return r;
    if (strcmp(order, "torch") != 0)
        return err_set(e, SHD_EINVAL, "%s is '%.40s', must be shardd or torch", node_path(n).text,
                       order);
    if (row->torch == 0)
        return err_set(e, SHD_EINVAL, "%s is 'torch', and PyTorch has no %s", node_path(n).text,
                       row->kind);
    *kind = row->torch;
    return SHD_OK;
}

static int parse_moments(struct spec *s, const struct node *n, struct shd_err *e)
{
    const char *moments = "f32";
    const int r = n->json != NULL ? node_text(n, &moments, e) : SHD_OK;
    s->int8 = strcmp(moments, "int8") == 0;
    if (r == SHD_OK && !s->int8 && strcmp(moments, "f32") != 0)
        return err_set(e, SHD_EINVAL, "%s is '%.40s', must be f32 or int8", node_path(n).text,
                       moments);
    return r;
}

/* What there is in torch's order alone. */
static int parse_torch(struct spec *s, const struct node *n, struct shd_err *e)
{
    const struct node decay = node_field(n, "decay"), nesterov = node_field(n, "nesterov");
    const struct node dampening = node_field(n, "dampening");
    const bool sgd = s->optimizer == SPEC_SGD_TORCH;
    const char *how = sgd ? "coupled" : "decoupled"; /* as torch.optim.SGD and AdamW */
    int r = decay.json != NULL ? node_text(&decay, &how, e) : SHD_OK;
    s->torch.coupled_decay = strcmp(how, "coupled") == 0;
    if (r == SHD_OK && !s->torch.coupled_decay && strcmp(how, "decoupled") != 0)
        return err_set(e, SHD_EINVAL, "%s is '%.40s', must be coupled or decoupled",
                       node_path(&decay).text, how);
    if (r == SHD_OK && sgd && nesterov.json != NULL)
        r = node_bool(&nesterov, &s->torch.nesterov, e);
    if (r == SHD_OK && sgd && dampening.json != NULL)
        r = node_real(&dampening, (struct node_range){ 0, FLT_MAX }, &s->torch.dampening, e);
    if (r == SHD_OK && s->torch.nesterov && (s->beta1 == 0 || s->torch.dampening != 0))
        return err_set(e, SHD_EINVAL,
                       "%s is true with momentum %g and dampening %g: it needs a momentum and no "
                       "dampening",
                       node_path(&nesterov).text, s->beta1, s->torch.dampening);
    return r;
}

static int check_known(const struct spec *s, const struct node *n, struct shd_err *e)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[s->optimizer];
    const bool torch = row->in_torch_order, sgd = s->optimizer == SPEC_SGD_TORCH;
    const char *const known[] = { "kind",
                                  row->beta1_key,
                                  row->beta2_key,
                                  row->eps_key,
                                  "moments",
                                  row->torch != 0 || torch ? "order" : NULL,
                                  torch ? "decay" : NULL,
                                  sgd ? "nesterov" : NULL,
                                  sgd ? "dampening" : NULL };
    static const char *const torchs[] = { "decay", "nesterov", "dampening" };
    const struct node lr = node_field(n, "lr");
    if (lr.json != NULL)
        return err_set(
            e, SHD_EINVAL,
            "%s is not a known field: the learning rate is the worker's, given with each "
            "step; groups have lr_scale",
            node_path(&lr).text);
    for (size_t i = 0; i < ARRAY_SIZE(torchs) && row->torch != 0; i++) {
        const struct node field = node_field(n, torchs[i]);
        if (field.json != NULL)
            return err_set(e, SHD_EINVAL,
                           "%s is there in torch's order alone: add \"order\": \"torch\"",
                           node_path(&field).text);
    }
    return node_object(n, known, ARRAY_SIZE(known), e);
}

int spec_optimizer_parse(struct spec *s, const struct node *n, struct shd_err *e)
{
    if (n->json == NULL || n->json->kind != TEXT_OBJECT)
        return node_wrong_type(n, "an object", e);
    const struct node kind = node_field(n, "kind"), order = node_field(n, "order");
    int r = parse_kind(&kind, &s->optimizer, e);
    if (r == SHD_OK)
        r = parse_order(&order, &s->optimizer, e);
    if (r == SHD_OK)
        r = check_known(s, n, e);
    if (r != SHD_OK)
        return r;
    const struct node moments = node_field(n, "moments");
    r = parse_moments(s, &moments, e);
    if (r != SHD_OK)
        return r;
    const struct spec_optimizer_row *row = &spec_optimizer_rows[s->optimizer];
    s->beta1 = row->beta1;
    s->beta2 = row->beta2;
    s->eps = row->eps;
    const struct {
        const char *key;
        struct node_range range;
        double *value;
    } fields[] = {
        { row->beta1_key, { 0, SPEC_BETA_MAX }, &s->beta1 },
        { row->beta2_key, { 0, SPEC_BETA_MAX }, &s->beta2 },
        /* Not 0: padding has neither gradient nor moments, and 0 / (0 + eps) must stay 0. */
        { row->eps_key, { FLT_MIN, FLT_MAX }, &s->eps },
    };
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(fields); i++) {
        if (fields[i].key == NULL)
            continue;
        const struct node field = node_field(n, fields[i].key);
        if (field.json != NULL)
            r = node_real(&field, fields[i].range, fields[i].value, e);
    }
    return r == SHD_OK && row->in_torch_order ? parse_torch(s, n, e) : r;
}

/* -- Of a group -------------------------------------------------------------------------------- */

/* {"kind": "mean"}, or {"kind": "muon", ...}, lamb or adafactor: what else a group could have is
 * the model's. */
static int parse_own(struct spec_group *g, const struct node *n, struct shd_err *e)
{
    static const char *const mean[] = { "kind" };
    const char *kind = NULL;
    if (n->json->kind != TEXT_OBJECT)
        return node_wrong_type(n, "an object", e);
    const struct node field = node_field(n, "kind");
    const int r = node_text(&field, &kind, e);
    if (r != SHD_OK)
        return r;
    if (strcmp(kind, spec_optimizer_rows[SPEC_MUON].kind) == 0)
        return spec_muon_parse(n, &g->muon, e);
    if (strcmp(kind, spec_optimizer_rows[SPEC_LAMB].kind) == 0)
        return spec_lamb_parse(n, &g->lamb, e);
    if (strcmp(kind, spec_optimizer_rows[SPEC_ADAFACTOR].kind) == 0)
        return spec_adafactor_parse(n, &g->adafactor, e);
    if (strcmp(kind, spec_optimizer_rows[SPEC_MEAN].kind) == 0)
        return node_object(n, mean, ARRAY_SIZE(mean), e);
    return err_set(
        e, SHD_EINVAL,
        "%s is '%.40s', must be mean, muon, lamb or adafactor: other groups have the model's "
        "optimizer",
        node_path(&field).text, kind);
}

/* Passes over whole tensors have moments in fp32 alone. */
static int check_wide(const struct spec *s, const struct spec_group *g, const struct node *n,
                      struct shd_err *e)
{
    const enum spec_optimizer kind = g->muon != NULL   ? SPEC_MUON
                                     : g->lamb != NULL ? SPEC_LAMB
                                                       : SPEC_ADAFACTOR;
    if (!s->int8)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "%s is %s, whose state is fp32, and the model's are in 8 bits "
                   "(optimizer.moments: int8): say f32 there, or leave this optimizer out",
                   node_path(n).text, spec_optimizer_rows[kind].kind);
}

int spec_optimizer_parse_group(const struct spec *s, struct spec_group *g, const struct node *n,
                               struct shd_err *e)
{
    const struct node optimizer = node_field(n, "optimizer"), idle = node_field(n, "idle");
    const struct {
        const char *key;
        double value, none;
    } rates[] = { { "lr_scale", g->lr_scale, 1 }, { "weight_decay", g->weight_decay, 0 } };
    if (optimizer.json == NULL)
        return SHD_OK;
    const int r = parse_own(g, &optimizer, e);
    if (r != SHD_OK)
        return r;
    if (g->muon != NULL || g->lamb != NULL || g->adafactor != NULL)
        return check_wide(s, g, &optimizer, e);
    for (size_t i = 0; i < ARRAY_SIZE(rates); i++) {
        const struct node field = node_field(n, rates[i].key);
        if (rates[i].value != rates[i].none)
            return err_set(e, SHD_EINVAL, "%s is %g, and group '%.60s' is a mean: it has none",
                           node_path(&field).text, rates[i].value, g->name);
    }
    if (idle.json != NULL && !g->skips_idle)
        return err_set(e, SHD_EINVAL,
                       "%s is 'zero', and group '%.60s' is a mean: there is none of nothing, what "
                       "took no part stays as it is",
                       node_path(&idle).text, g->name);
    g->mean = g->skips_idle = true;
    return SHD_OK;
}

/* -- Writing ----------------------------------------------------------------------------------- */

json_t *spec_json_with(json_t *o, const char *key, json_t *value)
{
    if (o == NULL) {
        json_decref(value);
        return NULL;
    }
    if (json_object_set_new(o, key, value) == 0)
        return o;
    json_decref(o);
    return NULL;
}

json_t *spec_optimizer_json(const struct spec *spec)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[spec->optimizer];
    json_t *o = json_pack("{s:s, s:f}", "kind", row->kind, row->beta1_key, spec->beta1);
    if (row->beta2_key != NULL)
        o = spec_json_with(o, row->beta2_key, json_real(spec->beta2));
    if (row->eps_key != NULL)
        o = spec_json_with(o, row->eps_key, json_real(spec->eps));
    if (row->in_torch_order) {
        o = spec_json_with(o, "order", json_string("torch"));
        o = spec_json_with(o, "decay",
                           json_string(spec->torch.coupled_decay ? "coupled" : "decoupled"));
    }
    if (spec->optimizer == SPEC_SGD_TORCH) {
        o = spec_json_with(o, "nesterov", json_boolean(spec->torch.nesterov));
        o = spec_json_with(o, "dampening", json_real(spec->torch.dampening));
    }
    if (spec->int8)
        o = spec_json_with(o, "moments", json_string("int8"));
    return o;
}
