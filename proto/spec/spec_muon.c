/* See spec_muon.h. */
#include "proto/spec/spec_muon.h"

#include <float.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/adafactor.h"
#include "proto/spec/layout.h"
#include "proto/spec/optimizer.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_node.h"

static int parse_coefficients(const struct node *n, double coefficients[3], struct shd_err *e)
{
    static const struct node_range range = { -FLT_MAX, FLT_MAX };
    uint32_t count = 0;
    int r = node_array(n, 3, 3, &count, e);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const struct node item = node_item(n, i);
        r = node_real(&item, range, &coefficients[i], e);
    }
    return r;
}

static int parse_adjust(const struct node *n, enum muon_adjust *ret_adjust, struct shd_err *e)
{
    const char *name = NULL;
    const int r = node_text(n, &name, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 1; i <= MUON_ADJUSTS; i++)
        if (strcmp(name, muon_adjust_names[i]) == 0) {
            *ret_adjust = (enum muon_adjust)i;
            return SHD_OK;
        }
    return err_set(e, SHD_EINVAL,
                   "%s is '%.40s', must be original, match_rms_adamw or "
                   "spectral_unclamped",
                   node_path(n).text, name);
}

static int parse_fields(const struct node *n, struct muon_rule *rule, struct shd_err *e)
{
    const struct node momentum = node_field(n, "momentum"), eps = node_field(n, "eps");
    const struct node steps = node_field(n, "ns_steps"), nesterov = node_field(n, "nesterov");
    const struct node coefficients = node_field(n, "ns_coefficients");
    const struct node adjust = node_field(n, "adjust_lr_fn");
    uint64_t count = rule->steps;
    int r = SHD_OK;
    if (momentum.json != NULL)
        r = node_real(&momentum, (struct node_range){ 0, SPEC_BETA_MAX }, &rule->momentum, e);
    if (r == SHD_OK && eps.json != NULL)
        r = node_real(&eps, (struct node_range){ FLT_MIN, FLT_MAX }, &rule->eps, e);
    if (r == SHD_OK && steps.json != NULL)
        r = node_u64(&steps, 1, MUON_STEPS_MAX, &count, e);
    rule->steps = (uint32_t)count;
    if (r == SHD_OK && nesterov.json != NULL)
        r = node_bool(&nesterov, &rule->nesterov, e);
    if (r == SHD_OK && coefficients.json != NULL)
        r = parse_coefficients(&coefficients, rule->coefficients, e);
    if (r == SHD_OK && adjust.json != NULL)
        r = parse_adjust(&adjust, &rule->adjust, e);
    return r;
}

int spec_muon_parse(const struct node *n, struct muon_rule **ret_rule, struct shd_err *e)
{
    static const char *const known[] = { "kind",     "momentum",        "eps",         "ns_steps",
                                         "nesterov", "ns_coefficients", "adjust_lr_fn" };
    int r = node_object(n, known, ARRAY_SIZE(known), e);
    if (r != SHD_OK)
        return r;
    struct muon_rule *rule = sys_malloc(sizeof *rule);
    if (rule == NULL)
        return node_no_memory(e);
    *rule = muon_default;
    r = parse_fields(n, rule, e);
    if (r == SHD_OK)
        *ret_rule = rule;
    else
        free(rule);
    return r;
}

int spec_lamb_parse(const struct node *n, struct spec_lamb **ret_lamb, struct shd_err *e)
{
    static const char *const known[] = { "kind", "beta1", "beta2", "eps" };
    static const struct node_range betas = { 0, SPEC_BETA_MAX }, all = { FLT_MIN, FLT_MAX };
    const struct spec_optimizer_row *row = &spec_optimizer_rows[SPEC_LAMB];
    const struct node beta1 = node_field(n, "beta1"), beta2 = node_field(n, "beta2");
    const struct node eps = node_field(n, "eps");
    struct spec_lamb lamb = { row->beta1, row->beta2, row->eps };
    int r = node_object(n, known, ARRAY_SIZE(known), e);
    if (r == SHD_OK && beta1.json != NULL)
        r = node_real(&beta1, betas, &lamb.beta1, e);
    if (r == SHD_OK && beta2.json != NULL)
        r = node_real(&beta2, betas, &lamb.beta2, e);
    if (r == SHD_OK && eps.json != NULL)
        r = node_real(&eps, all, &lamb.eps, e);
    if (r != SHD_OK)
        return r;
    struct spec_lamb *own = sys_malloc(sizeof *own);
    if (own == NULL)
        return node_no_memory(e);
    *own = lamb;
    *ret_lamb = own;
    return SHD_OK;
}

json_t *spec_lamb_json(const struct spec_lamb *lamb)
{
    return json_pack("{s:s, s:f, s:f, s:f}", "kind", spec_optimizer_rows[SPEC_LAMB].kind, "beta1",
                     lamb->beta1, "beta2", lamb->beta2, "eps", lamb->eps);
}

/* Of tensor `index` of the unit, which is updated as a whole. */
static int check_whole(const struct spec *s, uint32_t unit, uint32_t index, const struct node *n,
                       struct shd_err *e)
{
    const struct spec_unit *u = &s->units[unit];
    const struct spec_tensor *t = &s->tensors[u->first_tensor + index];
    const struct node tensors = node_field(n, "tensors"), item = node_item(&tensors, index);
    const uint32_t moments = spec_optimizer_rows[spec_group_optimizer(s, t->group)].moments;
    if (moments > spec_moments(s))
        return err_set(e, SHD_EINVAL,
                       "%s: '%.60s' is of group '%.40s', whose optimizer, lamb, keeps two moments, "
                       "and the model's, %s, one: say adamw",
                       node_path(&item).text, t->name, s->groups[t->group].name,
                       spec_optimizer_rows[s->optimizer].kind);
    if (t->rank == 2 || !spec_is_matrix(s, t))
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "%s: '%.60s' has %" PRIu32 " dimensions, and group '%.40s' is of Muon, which is "
                   "for matrices: give vectors, embeddings and the like another group",
                   node_path(&item).text, t->name, t->rank, s->groups[t->group].name);
}

int spec_place_parse(struct spec *s, uint32_t unit, const struct node *n, struct shd_err *e)
{
    struct spec_unit *u = &s->units[unit];
    const struct node place = node_field(n, "place");
    const char *how = "spread";
    int r = place.json != NULL ? node_text(&place, &how, e) : SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < u->tensor_count; i++) {
        if (!spec_is_whole(s, &s->tensors[u->first_tensor + i]))
            continue;
        r = check_whole(s, unit, i, n, e);
        u->wholes = true;
    }
    u->whole = u->wholes || strcmp(how, "whole") == 0;
    if (r != SHD_OK || strcmp(how, "whole") == 0)
        return r;
    if (strcmp(how, "spread") != 0)
        return err_set(e, SHD_EINVAL, "%s is '%.40s', must be spread or whole",
                       node_path(&place).text, how);
    if (place.json != NULL && u->wholes)
        return err_set(
            e, SHD_EINVAL,
            "%s is 'spread', and the unit has tensors that Muon, LAMB or Adafactor updates, which "
            "one owner has whole: say whole, or leave it out",
            node_path(&place).text);
    return SHD_OK;
}

/* -- Adafactor ------------------------------------------------------------------------------- */

int spec_adafactor_parse(const struct node *n, struct adafactor_rule **ret_rule, struct shd_err *e)
{
    static const char *const known[] = { "kind", "beta2_decay", "eps1", "eps2", "d" };
    struct adafactor_rule rule = adafactor_default;
    const struct {
        const char *key;
        struct node_range range;
        double *value;
    } fields[] = {
        { "beta2_decay", { -FLT_MAX, 0 }, &rule.beta2_decay },
        /* Not 0: an element that never had a gradient has a mean of 0, which is divided by. */
        { "eps1", { ADAFACTOR_EPS1_MIN, FLT_MAX }, &rule.eps1 },
        { "eps2", { 0, FLT_MAX }, &rule.eps2 },
        { "d", { 1, FLT_MAX }, &rule.d },
    };
    int r = node_object(n, known, ARRAY_SIZE(known), e);
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(fields); i++) {
        const struct node field = node_field(n, fields[i].key);
        if (field.json != NULL)
            r = node_real(&field, fields[i].range, fields[i].value, e);
    }
    if (r != SHD_OK)
        return r;
    struct adafactor_rule *own = sys_malloc(sizeof *own);
    if (own == NULL)
        return node_no_memory(e);
    *own = rule;
    *ret_rule = own;
    return SHD_OK;
}

json_t *spec_adafactor_json(const struct adafactor_rule *rule)
{
    return json_pack("{s:s, s:f, s:f, s:f, s:f}", "kind", spec_optimizer_rows[SPEC_ADAFACTOR].kind,
                     "beta2_decay", rule->beta2_decay, "eps1", rule->eps1, "eps2", rule->eps2, "d",
                     rule->d);
}

bool spec_adafactor_has(const struct spec *s, const struct node *n)
{
    const struct node tensors = node_field(n, "tensors"), first = node_item(&tensors, 0);
    if (first.json == NULL || first.json->kind != TEXT_OBJECT)
        return false;
    const struct node group = node_field(&first, "group");
    const struct node trainable = node_field(&first, "trainable");
    const char *name = NULL;
    bool trains = true;
    if (group.json != NULL && node_text(&group, &name, NULL) != SHD_OK)
        return false;
    if (trainable.json != NULL && node_bool(&trainable, &trains, NULL) != SHD_OK)
        return false;
    for (uint32_t g = 0; trains && g < s->group_count; g++)
        if (name == NULL || strcmp(s->groups[g].name, name) == 0)
            return s->groups[g].adafactor != NULL;
    return false;
}

int spec_adafactor_add(struct spec *s, uint32_t unit, const struct node *n, uint64_t end,
                       struct shd_err *e)
{
    struct spec_unit *u = &s->units[unit];
    const uint32_t last = u->tensor_count - 1;
    struct spec_tensor *t = &s->tensors[u->first_tensor + last];
    const size_t bytes = strlen(u->name) + sizeof ADAFACTOR_SUFFIX;
    if (bytes > SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_EINVAL,
                       "%s: its name has %zu bytes, and with that of Adafactor's statistics, "
                       "'" ADAFACTOR_SUFFIX "', it may have %u",
                       node_path(n).text, strlen(u->name), SPEC_NAME_BYTES_MAX - 1);
    if (s->ema > 0)
        return err_set(
            e, SHD_EINVAL,
            "%s is of group '%.60s', whose optimizer is adafactor, and the model keeps a "
            "moving average (ema), which there is none of beside it: leave one out",
            node_path(n).text, s->groups[s->tensors[u->first_tensor].group].name);
    t->name = sys_malloc(bytes);
    if (t->name == NULL)
        return node_no_memory(e);
    memcpy(t->name, u->name, strlen(u->name));
    memcpy(t->name + strlen(u->name), ADAFACTOR_SUFFIX, sizeof ADAFACTOR_SUFFIX);
    t->rank = 1;
    t->elems = t->shape[0] = adafactor_offset_elems(s, unit, last);
    t->group = s->tensors[u->first_tensor].group;
    t->unit = unit;
    t->offset_elems = layout_align(end, SHD_BLOCK_ELEMS); /* no block has parameters, too */
    t->init = SPEC_INIT_CONST;
    t->statistics = true;
    u->adafactor = true;
    return SHD_OK;
}

json_t *spec_muon_json(const struct muon_rule *rule)
{
    const double *c = rule->coefficients;
    return json_pack("{s:s, s:f, s:b, s:I, s:[f, f, f], s:f, s:s}", "kind",
                     spec_optimizer_rows[SPEC_MUON].kind, "momentum", rule->momentum, "nesterov",
                     rule->nesterov, "ns_steps", (json_int_t)rule->steps, "ns_coefficients", c[0],
                     c[1], c[2], "eps", rule->eps, "adjust_lr_fn", muon_adjust_names[rule->adjust]);
}
