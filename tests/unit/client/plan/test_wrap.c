/* Grouping tensors into units: by layer, by pattern, by size, in both kinds of list, with ties and
 * frozen tensors; and the spec that comes of it is one that spec_parse() takes. */
#include "client/plan/wrap.h"

#include <errno.h>

#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

/* After the others. */
#include "client/shd.h"

#define TENSORS_MAX 64u

static struct wrap_tensor list[TENSORS_MAX];
static uint32_t list_count;

static struct wrap_tensor *add(const char *name, uint64_t elems)
{
    CHECK(list_count < TENSORS_MAX);
    list[list_count] = (struct wrap_tensor){
        .name = name, .rank = 1, .shape = { elems }, .tied_to = WRAP_UNTIED
    };
    return &list[list_count++];
}

static void add_gpt(void)
{
    list_count = 0;
    add("wte.weight", 100);
    add("wpe.weight", 10);
    add("h.0.attn.weight", 40);
    add("h.0.mlp.weight", 80);
    add("h.1.attn.weight", 40);
    add("h.1.mlp.weight", 80);
    add("ln_f.weight", 4);
}

/* "wte:110 h.0:120 ...", with [f] for frozen and (uses) */
static const char *units_text(const struct wrap *w)
{
    static char text[2048];
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t u = 0; u < w->unit_count; u++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s=%" PRIu64, u > 0 ? " " : "",
                                 w->units[u].name, w->units[u].elems);
        for (uint32_t i = 0; i < w->units[u].uses_count; i++)
            used += (size_t)snprintf(text + used, sizeof text - used, "%c%s", i > 0 ? ',' : '(',
                                     w->units[w->units[u].uses[i]].name);
        if (w->units[u].uses_count > 0)
            used += (size_t)snprintf(text + used, sizeof text - used, ")");
    }
    return text;
}

static void expect_units(struct wrap_rule rule, const char *want)
{
    struct shd_err e = { 0 };
    struct wrap w;
    EXPECT_OK(wrap_build(list, list_count, &rule, &w, &e), &e);
    EXPECT_STR(units_text(&w), want);
    for (uint32_t i = 0; i < list_count; i++)
        EXPECT(w.unit_of[i] < w.unit_count);
    wrap_deinit(&w);
}

static void expect_refused(struct wrap_rule rule, int code, const char *text)
{
    struct shd_err e = { 0 };
    struct wrap w = { 0 };
    EXPECT_STATUS(wrap_build(list, list_count, &rule, &w, &e), code);
    EXPECT_HAS(e.text, text);
    EXPECT(w.units == NULL);
}

#define BY_LAYER ((struct wrap_rule){ 0 })
#define SORTED   ((struct wrap_rule){ .sort = true })

TEST(layers_are_units_and_leftovers_join_their_neighbours)
{
    add_gpt();
    expect_units(BY_LAYER, "wte=110 h.0=120 h.1=120 ln_f=4");
}

TEST(layer_is_the_first_number_of_any_depth)
{
    list_count = 0;
    add("model.layers.0.experts.3.w1.weight", 1);
    add("model.layers.0.experts.4.w1.weight", 2);
    add("model.layers.12.norm.weight", 4);
    add("blocks.7", 8);
    add("x2.weight", 16); /* a number inside a word is no layer */
    expect_units(BY_LAYER, "model.layers.0=3 model.layers.12=4 blocks.7=8 x2=16");
}

TEST(files_sorted_by_name_come_in_forward_order)
{
    list_count = 0;
    add("h.0.w", 1);
    add("h.10.w", 2);
    add("h.2.w", 4);
    add("lm_head.weight", 8);
    add("ln_f.weight", 16);
    add("wpe.weight", 32);
    add("wte.weight", 64);
    expect_units(SORTED, "wpe=96 h.0=1 h.2=4 h.10=2 lm_head=24");
    expect_units(BY_LAYER, "h.0=1 h.10=2 h.2=4 lm_head=120");
}

TEST(numbers_that_differ_in_zeros_only_are_different)
{
    list_count = 0;
    add("h.01.w", 1);
    add("h.1.w", 2);
    add("a.001.02.w", 4);
    add("a.01.002.w", 8);
    static const char *const patterns[] = { "^a\\.[0-9]+\\.[0-9]+", "^h\\.[0-9]+" };
    expect_units((struct wrap_rule){ .sort = true, .patterns = patterns, .pattern_count = 2 },
                 "a.001.02=4 a.01.002=8 h.1=2 h.01=1");
}

TEST(first_pattern_that_matches_names_the_unit)
{
    static const char *const patterns[] = { "^l\\.[0-9]+\\.experts\\.[0-9]+", "^l\\.[0-9]+" };
    list_count = 0;
    add("emb", 1);
    add("l.0.attn", 2);
    add("l.0.experts.0.up", 4);
    add("l.0.experts.0.down", 8);
    add("l.0.experts.1.up", 16);
    add("l.0.norm", 32);
    add("l.1.attn", 64);
    add("norm", 128);
    expect_units((struct wrap_rule){ .patterns = patterns, .pattern_count = 2 },
                 "emb=1 l.0=34 l.0.experts.0=12 l.0.experts.1=16 l.1=64 norm=128");
    expect_units((struct wrap_rule){ .patterns = patterns, .pattern_count = 2, .sort = true },
                 "emb=1 l.0=34 l.0.experts.0=12 l.0.experts.1=16 l.1=64 norm=128");
    static const char *const bad[] = { "h.[0-9" };
    expect_refused((struct wrap_rule){ .patterns = bad, .pattern_count = 1 }, SHD_EINVAL,
                   "pattern 'h.[0-9':");
}

TEST(small_units_are_joined_up_to_the_size_asked_for)
{
    add_gpt();
    expect_units((struct wrap_rule){ .unit_elems_min = 111 }, "wte=230 h.1=124");
    expect_units((struct wrap_rule){ .unit_elems_min = 5 }, "wte=110 h.0=120 h.1=124");
    expect_units((struct wrap_rule){ .unit_elems_min = 1000 }, "wte=354");
}

TEST(alias_makes_its_unit_use_the_owners)
{
    add_gpt();
    add("lm_head.weight", 100)->tied_to = 0;
    expect_units(BY_LAYER, "wte=110 h.0=120 h.1=120 ln_f=4(wte)");
    static const char *const patterns[] = { "^h\\.[0-9]+", "^lm_head", "^ln_f" };
    /* a unit of aliases only would store nothing: the unit before reads for it */
    expect_units((struct wrap_rule){ .patterns = patterns, .pattern_count = 3 },
                 "wte=110 h.0=120 h.1=120 ln_f=4(wte)");
    /* joined with the unit it uses, there is nothing to use */
    expect_units((struct wrap_rule){ .unit_elems_min = 1000 }, "wte=354");
    list[7].shape[0] = 99;
    expect_refused(BY_LAYER, SHD_EINVAL, "'lm_head.weight' has 99 elements, 'wte.weight'");
    list[7].tied_to = 7;
    expect_refused(BY_LAYER, SHD_EINVAL, "tied to number 7");
    list[7].tied_to = 8;
    expect_refused(BY_LAYER, SHD_EINVAL, "tied to number 8");
}

TEST(alias_listed_first_belongs_to_what_follows)
{
    list_count = 0;
    add("in.weight", 6)->tied_to = 2;
    add("h.0.w", 3);
    add("out.weight", 6);
    expect_units(BY_LAYER, "h.0=3(out) out=6");
}

TEST(frozen_tensors_get_a_unit_that_the_rest_uses)
{
    add_gpt();
    list[2].frozen = list[3].frozen = true; /* layer 0 as a whole */
    list[5].frozen = true;                  /* half of layer 1 */
    expect_units(BY_LAYER, "wte=110 h.0=120 h.1:frozen=80 h.1=40(h.1:frozen) ln_f=4");
    expect_units(SORTED, "wte=110 h.0=120 h.1:frozen=80 h.1=40(h.1:frozen) ln_f=4");
    /* never joined across */
    expect_units((struct wrap_rule){ .unit_elems_min = 1000 }, "wte=110 h.0=200 h.1=44(h.0)");
}

TEST(equal_names_of_units_are_told_apart)
{
    list_count = 0;
    add("a.x", 1);
    add("h.0.w", 2);
    add("a.y", 4);
    expect_units(BY_LAYER, "a=1 h.0=2 a~2=4");
}

TEST(bad_lists_are_refused)
{
    list_count = 0;
    expect_refused(BY_LAYER, SHD_ERANGE, "1 to 262144 tensors, not 0");
    add("a b", 1);
    expect_refused(BY_LAYER, SHD_EINVAL, "tensor 0 is called 'a b'");
    list[0].name = "";
    expect_refused(BY_LAYER, SHD_EINVAL, "tensor 0 is called ''");
    list[0].name = "a";
    add("a", 1);
    expect_refused(BY_LAYER, SHD_EINVAL, "'a' is listed twice");
    list[1].name = "b";
    list[1].shape[0] = 0;
    expect_refused(BY_LAYER, SHD_ERANGE, "'b': shape[0] is 0");
    list[1].rank = 2;
    list[1].shape[0] = list[1].shape[1] = UINT64_C(1) << 32;
    expect_refused(BY_LAYER, SHD_ERANGE, "'b': shape[1]");
    list[1].rank = 1;
    list[0].shape[0] = list[1].shape[0] = SHD_MODEL_ELEMS_MAX;
    expect_refused(BY_LAYER, SHD_ERANGE, "'b' brings the model to");
    list[1].rank = SPEC_RANK_MAX + 1;
    expect_refused(BY_LAYER, SHD_ERANGE, "'b' has 9 dimensions");
}

TEST(too_many_units_or_uses_are_refused)
{
    static struct wrap_tensor many[SHD_UNITS_MAX + 1];
    static char names[SHD_UNITS_MAX + 1][16];
    struct shd_err e = { 0 };
    struct wrap w = { 0 };
    for (uint32_t i = 0; i <= SHD_UNITS_MAX; i++) {
        snprintf(names[i], sizeof names[i], "h.%" PRIu32 ".w", i);
        many[i] = (struct wrap_tensor){ .name = names[i], .rank = 0, .tied_to = WRAP_UNTIED };
    }
    EXPECT_STATUS(wrap_build(many, SHD_UNITS_MAX + 1, &BY_LAYER, &w, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "more than 65536 units");
    EXPECT_OK(wrap_build(many, SHD_UNITS_MAX, &BY_LAYER, &w, &e), &e);
    wrap_deinit(&w);
    list_count = 0;
    for (uint32_t i = 0; i <= SPEC_USES_MAX; i++)
        add(names[i], 1);
    add("tail.w", 1);
    for (uint32_t i = 0; i <= SPEC_USES_MAX; i++)
        add(names[100 + i] + 2, 1)->tied_to = i; /* "100.w": a unit of aliases */
    expect_refused(BY_LAYER, SHD_ERANGE, "'tail' would use more than 16 units");
}

static struct spec *spec_of(const struct wrap *w)
{
    struct shd_err e = { 0 };
    struct spec *s;
    const struct wrap_model model = { "m", 4, 2, SHD_BF16 };
    EXPECT_OK(wrap_spec(list, list_count, w, &model, &s, &e), &e);
    return s;
}

/* The spec goes through the parser's checks and comes back the same. */
TEST(spec_is_one_the_parser_takes)
{
    struct shd_err e = { 0 };
    struct wrap w;
    add_gpt();
    add("lm_head.weight", 100)->tied_to = 0;
    list[5].frozen = true;
    EXPECT_OK(wrap_build(list, list_count, &BY_LAYER, &w, &e), &e);
    struct spec *s = spec_of(&w), *parsed;
    char *json;
    EXPECT_OK(spec_dump(s, &json, &e), &e);
    EXPECT_OK(spec_parse(json, strlen(json), &parsed, &e), &e);
    EXPECT_OK(spec_compare(s, parsed, &e), &e);
    EXPECT_EQ(s->tensor_count, 7);
    EXPECT_EQ(s->elems, parsed->elems);
    EXPECT_EQ(parsed->elems, 354);
    for (uint32_t u = 0; u < s->unit_count; u++) {
        EXPECT_EQ(s->units[u].elems, parsed->units[u].elems);
        EXPECT_EQ(s->units[u].frozen, parsed->units[u].frozen);
        EXPECT_EQ(plan_unit_param_bytes(s, u), 2 * w.units[u].elems);
    }
    spec_free(parsed);
    spec_free(s);
    free(json);
    wrap_deinit(&w);
}

/* -- Public -------------------------------------------------------------------------------------
 */

#define TENSOR(called, sizes, dims, alias, froze)                                 \
    {                                                                             \
        sizeof(struct shd_wrap_tensor), (called), (sizes), (dims), (alias), froze \
    }

static const uint64_t square[] = { 10, 10 }, row[] = { 4 };
static const struct shd_wrap_tensor public_list[] = {
    TENSOR("wte.weight", square, 2, UINT32_MAX, false),
    TENSOR("h.0.weight", square, 2, UINT32_MAX, false),
    TENSOR("h.0.lora", row, 1, UINT32_MAX, true),
    TENSOR("h.1.weight", square, 2, UINT32_MAX, false),
    TENSOR("scale", NULL, 0, UINT32_MAX, false),
    TENSOR("lm_head.weight", square, 2, 0, false),
};

TEST(public_call_gives_a_spec_to_open)
{
    struct shd_err e = { 0 };
    const struct shd_wrap_rule rule = { .size = sizeof rule,
                                        .model = "wrapped",
                                        .micro_batches = 4,
                                        .accumulate = 2,
                                        .publish = SHD_BF16 };
    const struct shd_options local = { .size = sizeof local, .address = "local:" };
    char *json;
    shd_session *s;
    shd_model *m;
    struct shd_tensor t = { .size = sizeof t };
    EXPECT_OK(shd_wrap(public_list, ARRAY_SIZE(public_list), &rule, &json, &e), &e);
    EXPECT_OK(shd_connect(&local, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, json, &m, &e), &e);
    EXPECT_STR(shd_model_name(m), "wrapped");
    EXPECT_EQ(shd_micro_batches(m), 4);
    EXPECT_EQ(shd_accumulate(m), 2);
    EXPECT_EQ(shd_param_dtype(m), SHD_BF16);
    EXPECT_EQ(shd_tensors(m), 5); /* the tied one is stored once */
    EXPECT_OK(shd_tensor_find(m, "scale", &t, &e), &e);
    EXPECT_EQ(t.elems, 1);
    EXPECT_OK(shd_tensor_find(m, "h.0.lora", &t, &e), &e);
    EXPECT(shd_unit_frozen(m, t.unit));
    shd_close(s);
    free(json);
}

TEST(public_call_names_what_is_wrong)
{
    struct shd_err e = { 0 };
    struct shd_wrap_rule rule = { .size = sizeof rule, .model = "wrapped" };
    const struct shd_wrap_rule good = rule;
    struct shd_wrap_tensor bad[2] = { public_list[0], public_list[1] };
    char *json;
    rule.model = NULL;
    EXPECT_STATUS(shd_wrap(bad, 2, &rule, &json, &e), SHD_EINVAL);
    rule = good;
    bad[1].size--;
    EXPECT_STATUS(shd_wrap(bad, 2, &rule, &json, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "shd_wrap_tensor.size of tensor 1 is ");
    bad[0].size = 0;
    EXPECT_STATUS(shd_wrap(bad, 2, &rule, &json, &e), SHD_EINVAL);
    bad[0] = public_list[0];
    bad[1] = public_list[1];
    rule.model = "no / name";
    EXPECT(shd_wrap(bad, 2, &rule, &json, &e) < 0);
    rule = good;
    rule.publish = (enum shd_dtype)9;
    EXPECT_STATUS(shd_wrap(bad, 2, &rule, &json, &e), SHD_EINVAL);
    rule = good;
    rule.micro_batches = 3;
    rule.accumulate = 2;
    EXPECT(shd_wrap(bad, 2, &rule, &json, &e) < 0);
    bad[1].rank = 9;
    EXPECT_STATUS(shd_wrap(bad, 2, &good, &json, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "'h.0.weight' has 9 dimensions");
    bad[1] = public_list[1];
    bad[1].shape = NULL;
    EXPECT_STATUS(shd_wrap(bad, 2, &good, &json, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "tensor 1 has no shape");
    bad[1].name = NULL;
    EXPECT_STATUS(shd_wrap(bad, 2, &good, &json, &e), SHD_EINVAL);
    bad[1] = public_list[0];
    EXPECT_STATUS(shd_wrap(bad, 2, &good, &json, &e), SHD_EINVAL); /* a name twice */
    EXPECT(shd_wrap(bad, 0, &good, &json, &e) < 0);
}

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    add_gpt();
    int n = 0, r;
    do {
        struct shd_err e = { 0 };
        struct wrap w = { 0 };
        struct spec *s = NULL;
        const struct wrap_model model = { "m", 1, 1, SHD_F32 };
        fail_at = ++n;
        sys_fault = fail_nth;
        r = wrap_build(list, list_count, &BY_LAYER, &w, &e);
        if (r == SHD_OK)
            r = wrap_spec(list, list_count, &w, &model, &s, &e);
        sys_fault = NULL;
        wrap_deinit(&w);
        spec_free(s);
        EXPECT(fail_at > 0 ? r == SHD_OK : r == SHD_ENOMEM && e.text[0] != '\0');
    } while (fail_at <= 0);
    EXPECT(n > 15);
}

TEST_MAIN()
