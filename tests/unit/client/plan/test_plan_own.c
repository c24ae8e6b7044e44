/* Plans that somebody gives: as text there and back, each mistake by its operation, cut to any
 * number of micro-batches; and whatever the check passes comes to the right numbers. */
#include "client/plan/plan_own.h"

#include <errno.h>
#include <stdlib.h>

#include "client/plan/plan_check.h"
#include "client/plan/plan_text.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "tests/lib/plan_run.h"
#include "tests/lib/plan_toy.h"

static struct plan build(const struct spec *spec, const struct plan_policy *p, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct plan plan;
    EXPECT_OK(plan_build(spec, p, /* trace= */ NULL, micros, &plan, &e), &e);
    return plan;
}

static char *text_of(const struct spec *spec, const struct plan_policy *p, const struct plan *plan)
{
    struct shd_err e = { 0 };
    char *text;
    EXPECT_OK(plan_text_write(spec, p, plan, &text, &e), &e);
    return text;
}

static void expect_same(const struct plan *a, const struct plan *b)
{
    EXPECT_EQ(a->op_count, b->op_count);
    EXPECT_EQ(a->micros, b->micros);
    for (uint32_t i = 0; i < a->op_count; i++)
        EXPECT(a->ops[i].kind == b->ops[i].kind && a->ops[i].unit == b->ops[i].unit &&
               a->ops[i].micro == b->ops[i].micro);
    EXPECT_EQ(a->cost.live_units_max, b->cost.live_units_max);
    EXPECT_EQ(a->cost.live_grads_max, b->cost.live_grads_max);
    EXPECT_EQ(a->cost.live_bytes_max, b->cost.live_bytes_max);
    EXPECT_EQ(a->cost.fetched_bytes, b->cost.fetched_bytes);
    EXPECT_EQ(a->cost.returned_bytes, b->cost.returned_bytes);
}

static void expect_same_policy(const struct plan_policy *a, const struct plan_policy *b)
{
    EXPECT(a->strategy == b->strategy && a->backward_prefetch == b->backward_prefetch);
    EXPECT_EQ(a->forward_prefetch, b->forward_prefetch);
    EXPECT_EQ(a->max_live_units, b->max_live_units);
    EXPECT_EQ(a->max_live_bytes, b->max_live_bytes);
    EXPECT(a->grad_dtype == b->grad_dtype);
}

/* -- There and back ---------------------------------------------------------------------------- */

/* A model, and a policy of one. */
static struct plan_policy draw(struct toy *t, uint64_t *rng)
{
    toy_random(t, rng);
    struct plan_policy policy = toy_policy(rng);
    t->spec.grad_dtype = policy.grad_dtype != 0 ? policy.grad_dtype : SHD_F32;
    return policy;
}

TEST(every_plan_is_the_same_text_and_plan_there_and_back)
{
    uint64_t rng = test_seed(20261126);
    for (int i = 0; i < 1000; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        struct plan_own *own;
        struct plan_policy policy = draw(&t, &rng);
        struct plan plan = build(&t.spec, &policy, (1 + toy_below(&rng, 3)) * t.spec.accumulate);
        if (toy_below(&rng, 2) == 0) { /* with bounds that it keeps */
            policy.max_live_units = plan.cost.live_units_max;
            policy.max_live_bytes = plan.cost.live_param_bytes_max;
        }
        char *text = text_of(&t.spec, &policy, &plan);
        EXPECT_OK(plan_own_new(&t.spec, text, strlen(text), &own, &e), &e);
        expect_same(&own->plan, &plan);
        expect_same_policy(&own->policy, &policy);
        char *again = text_of(&t.spec, &own->policy, &own->plan);
        EXPECT_STR(again, text);
        free(again);
        free(text);
        plan_own_free(own);
        plan_free(&plan);
    }
}

TEST(an_operation_is_a_line)
{
    struct toy t;
    const struct plan_policy policy = { .strategy = PLAN_DDP, .forward_prefetch = 3 };
    toy_chain(&t, 2);
    struct plan plan = build(&t.spec, &policy, 1);
    char *text = text_of(&t.spec, &policy, &plan);
    EXPECT_STR(text, "{\n"
                     "  \"schema\": 1,\n"
                     "  \"model\": {\"units\": [{\"name\": \"u\"}, {\"name\": \"u\"}]},\n"
                     "  \"policy\": {\"strategy\": \"ddp\", \"backward_prefetch\": \"pre\", "
                     "\"forward_prefetch\": 3,\n"
                     "             \"max_live_units\": 0, \"max_live_bytes\": 0},\n"
                     "  \"micro_batches_per_worker\": 1,\n"
                     "  \"ops\": [\n"
                     "    [\"FETCH\", 0, 0],\n"
                     "    [\"WAIT\", 0, 0],\n"
                     "    [\"FETCH\", 1, 0],\n"
                     "    [\"FORWARD\", 0, 0],\n"
                     "    [\"WAIT\", 1, 0],\n"
                     "    [\"FORWARD\", 1, 0],\n"
                     "    [\"BACKWARD\", 1, 0],\n"
                     "    [\"BACKWARD\", 0, 0],\n"
                     "    [\"RETURN\", 1, 0],\n"
                     "    [\"RETURN\", 0, 0],\n"
                     "    [\"FREE\", 1, 0],\n"
                     "    [\"FREE\", 0, 0],\n"
                     "    [\"PREPARE\"],\n"
                     "    [\"COMMIT\"]\n"
                     "  ]\n"
                     "}\n");
    free(text);
    plan_free(&plan);
}

/* -- What is wrong ----------------------------------------------------------------------------- */

#define HEAD                                                                          \
    "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]}," \
    "\"policy\":{\"strategy\":\"own\"},\"micro_batches_per_worker\":1,\"ops\":["
#define OP(kind, unit) "[\"" #kind "\"," #unit ",0],"
#define BEGIN \
    OP(FETCH, 0) OP(WAIT, 0) OP(FORWARD, 0) OP(FREE, 0) OP(FETCH, 1) OP(WAIT, 1) OP(FORWARD, 1)
#define BACK   OP(BACKWARD, 1) OP(FREE, 1) OP(RETURN, 1)
#define LAST   OP(FETCH, 0) OP(WAIT, 0) OP(BACKWARD, 0)
#define ENDING "[\"PREPARE\"],[\"COMMIT\"]]}"

/* Two units of 1,000 elements. */
static void two_units(struct toy *t)
{
    static char embed[] = "embed", head[] = "head";
    toy_chain(t, 2);
    t->units[0].name = embed;
    t->units[1].name = head;
}

static int read_own(const struct toy *t, const char *json, struct shd_err *e)
{
    struct plan_own *own = NULL;
    const int r = plan_own_new(&t->spec, json, strlen(json), &own, e);
    plan_own_free(own);
    return r;
}

static const struct {
    const char *json;
    int code;
    const char *says;
} wrong[] = {
    { "", SHD_EINVAL, "plan line 1 column" },
    { "[1]", SHD_EINVAL, "a plan is a JSON object" },
    { "{}", SHD_EINVAL, "schema is missing" },
    { "{\"schema\":2}", SHD_ERANGE, "schema is 2, must be 1 to 1" },
    { "{\"schema\":1,\"opps\":[]}", SHD_EINVAL, "opps is not a known field; did you mean ops?" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"}]}}", SHD_ESPEC,
      "model.units has 1 entries, the model has 2 units" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"tail\"}]}}", SHD_ESPEC,
      "model.units[1].name is 'tail', the model has 'head' there" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"hybrid\"}}",
      SHD_EINVAL, "policy.strategy is 'hybrid', must be own, ddp, zero1, zero2 or zero3" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"own\",\"max_live_bytes\":-1}}",
      SHD_ERANGE, "policy.max_live_bytes is -1, must be 0 to 9223372036854775807" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"own\",\"max_live_bytes\":9223372036854775808}}",
      SHD_ERANGE, "plan line 1 column 128: too big integer" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"own\",\"max_live_units\":4294967296}}",
      SHD_ERANGE, "policy.max_live_units is 4294967296, must be 0 to 4294967295" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"own\",\"grad_dtype\":\"bf16\"},\"micro_batches_per_worker\":1,"
      "\"ops\":[[\"COMMIT\"]]}",
      SHD_ESPEC, "policy.grad_dtype is 'bf16', must be 'f32'" },
    { "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
      "\"policy\":{\"strategy\":\"own\"},\"micro_batches_per_worker\":4097}",
      SHD_ERANGE, "micro_batches_per_worker is 4097, must be 1 to 4096" },
    { HEAD "]}", SHD_ERANGE, "ops has 0 entries, must be 1 to 1048576" },
    { HEAD "\"FETCH\"]}", SHD_EINVAL, "operation 0: ops[0] must be an array, is a string" },
    { HEAD OP(FETCH, 0) "[0,0,0]]}", SHD_EINVAL,
      "operation 1: ops[1][0] must be a string, is an integer" },
    { HEAD OP(FETCH, 0) OP(FECTH, 1) ENDING, SHD_EINVAL,
      "operation 1: 'FECTH' is no operation; did you mean FETCH?" },
    { HEAD OP(FETCH, 0) OP(fetch, 1) ENDING, SHD_EINVAL, "operation 1: 'fetch' is no operation" },
    { HEAD "[\"FETCH\",0]]}", SHD_EINVAL,
      "operation 0, FETCH: has 2 values, must be [\"FETCH\", unit, micro-batch]" },
    { HEAD "[\"PREPARE\",0,0]]}", SHD_EINVAL,
      "operation 0, PREPARE: has 3 values, must be [\"PREPARE\"]" },
    { HEAD OP(FETCH, 0) OP(FETCH, 2) ENDING, SHD_ERANGE,
      "operation 1, FETCH, its unit: ops[1][1] is 2, must be 0 to 1" },
    { HEAD OP(FETCH, 18446744073709551615) ENDING, SHD_ERANGE, "too big integer" },
    { HEAD OP(FETCH, 4294967296) ENDING, SHD_ERANGE, "is 4294967296, must be 0 to 1" },
    { HEAD OP(FETCH, "embed") ENDING, SHD_EINVAL, "ops[0][1] must be an integer, is a string" },
    { HEAD "[\"FETCH\",0,1]]}", SHD_ERANGE,
      "operation 0, FETCH, its micro-batch: ops[0][2] is 1, must be 0 to 0" },
    { HEAD OP(FETCH, 0) OP(FETCH, 1) OP(FETCH, 0) ENDING, SHD_EINVAL,
      "operation 2, FETCH of unit 0 'embed', micro-batch 0: is held already, since operation 0" },
    { HEAD OP(FORWARD, 0) ENDING, SHD_EINVAL,
      "operation 0, FORWARD of unit 0 'embed', micro-batch 0: reads unit 0 'embed', which is not "
      "held: FETCH and WAIT must come before" },
    { HEAD OP(FETCH, 0) OP(FORWARD, 0) ENDING, SHD_EINVAL,
      "operation 1, FORWARD of unit 0 'embed', micro-batch 0: reads unit 0 'embed', which is not "
      "waited for: a WAIT must come before" },
    { HEAD OP(WAIT, 1) ENDING, SHD_EINVAL, "was not fetched: a FETCH must come before" },
    { HEAD OP(FETCH, 0) OP(WAIT, 0) OP(WAIT, 0) ENDING, SHD_EINVAL,
      "operation 2, WAIT of unit 0 'embed', micro-batch 0: was waited for already, by operation "
      "1" },
    { HEAD OP(FREE, 1) ENDING, SHD_EINVAL, "is not held: a FETCH must come before" },
    { HEAD OP(FETCH, 1) OP(WAIT, 1) OP(FREE, 1) ENDING, SHD_EINVAL,
      "was fetched for nothing, by operation 0" },
    { HEAD OP(FETCH, 1) OP(WAIT, 1) OP(FORWARD, 1) ENDING, SHD_EINVAL,
      "operation 2, FORWARD of unit 1 'head', micro-batch 0: is out of order: unit 0 'embed' is "
      "next" },
    { HEAD OP(FETCH, 0) OP(WAIT, 0) OP(FORWARD, 0) OP(FORWARD, 0) ENDING, SHD_EINVAL,
      "out of order: unit 1 'head' is next" },
    { HEAD OP(FETCH, 0) OP(WAIT, 0) OP(FORWARD, 0) OP(BACKWARD, 0) ENDING, SHD_EINVAL,
      "is out of order: FORWARD of unit 1 'head' is missing" },
    { HEAD BEGIN OP(FETCH, 0) OP(WAIT, 0) OP(BACKWARD, 0) ENDING, SHD_EINVAL,
      "is out of order: unit 1 'head' is next" },
    { HEAD BEGIN OP(RETURN, 1) ENDING, SHD_EINVAL,
      "has not had the last backward that adds to its gradient" },
    { HEAD BEGIN BACK OP(RETURN, 1) ENDING, SHD_EINVAL,
      "operation 10, RETURN of unit 1 'head', micro-batch 0: was returned already, by operation "
      "9" },
    { HEAD BEGIN BACK LAST OP(FREE, 0) ENDING, SHD_EINVAL,
      "operation 14, PREPARE: RETURN of unit 0 'embed' is missing, in micro-batch 0" },
    { HEAD BEGIN BACK LAST OP(RETURN, 0) ENDING, SHD_EINVAL,
      "operation 14, PREPARE: comes while 1 unit is held: FREE of unit 0 'embed' is missing, which "
      "operation 10 fetched" },
    { HEAD BEGIN BACK ENDING, SHD_EINVAL, "PREPARE: BACKWARD of unit 0 'embed' is missing" },
    { HEAD BEGIN BACK LAST OP(FREE, 0) OP(RETURN, 0) "[\"COMMIT\"]]}", SHD_EINVAL,
      "operation 15, COMMIT: comes before PREPARE" },
    { HEAD BEGIN BACK LAST OP(FREE, 0) OP(RETURN, 0) "[\"PREPARE\"]]}", SHD_EINVAL,
      "plan of 16 operations ends without COMMIT" },
};

TEST(each_mistake_is_named_with_its_operation_and_what_is_right)
{
    struct toy t;
    two_units(&t);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct shd_err e = { 0 };
        const int r = read_own(&t, wrong[i].json, &e);
        if (r != wrong[i].code || strstr(e.text, wrong[i].says) == NULL)
            FAIL("%s: expected %s '%s', got %s '%s'", wrong[i].json, status_name(wrong[i].code),
                 wrong[i].says, status_name(r), e.text);
    }
    struct shd_err e = { 0 };
    EXPECT_OK(read_own(&t, HEAD BEGIN BACK LAST OP(FREE, 0) OP(RETURN, 0) ENDING, &e), &e);
}

static const char bounded[] =
    "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"embed\"},{\"name\":\"head\"}]},"
    "\"policy\":{\"strategy\":\"own\",\"max_live_%s\":%u},\"micro_batches_per_worker\":1,\"ops\":"
    "[" OP(FETCH, 0) OP(WAIT, 0) OP(FORWARD, 0) OP(FETCH, 1) OP(WAIT, 1) OP(FORWARD, 1)
        OP(BACKWARD, 1) OP(FREE, 1) OP(RETURN, 1) OP(BACKWARD, 0) OP(FREE, 0) OP(RETURN, 0) ENDING;

TEST(a_bound_that_is_passed_is_named_with_both_numbers)
{
    struct toy t;
    struct shd_err e = { 0 };
    char json[2048];
    two_units(&t);
    snprintf(json, sizeof json, bounded, "units", 1u);
    EXPECT_STATUS(read_own(&t, json, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "operation 3, FETCH of unit 1 'head', micro-batch 0: makes it 2 units that "
                       "are held, max_live_units is 1");
    snprintf(json, sizeof json, bounded, "bytes", 7999u);
    EXPECT_STATUS(read_own(&t, json, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "makes it 8000 bytes of parameters that are held, max_live_bytes is 7999");
    snprintf(json, sizeof json, bounded, "bytes", 8000u);
    EXPECT_OK(read_own(&t, json, &e), &e);
    /* zero3 would have let go of embed, which is zero3's promise alone */
    toy_chain(&t, 6);
    struct plan_policy keeps = { .strategy = PLAN_ZERO2 };
    struct plan plan = build(&t.spec, &keeps, 1);
    keeps.strategy = PLAN_OWN;
    EXPECT_OK(plan_check(&plan, &t.spec, &keeps, NULL, &e), &e);
    keeps.strategy = PLAN_ZERO3;
    EXPECT_STATUS(plan_check(&plan, &t.spec, &keeps, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "zero3 frees them, own need not");
    plan_free(&plan);
}

TEST(as_much_as_there_may_be_and_no_more)
{
    struct toy t;
    struct shd_err e = { 0 };
    two_units(&t);
    struct plan_policy policy;
    struct plan plan = { .op_count = PLAN_OPS_MAX + 1 };
    char *text = NULL;
    EXPECT_STATUS(plan_text_write(&t.spec, &PLAN_POLICY_DEFAULT, &plan, &text, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "1048577 operations, the limit of what is written down is 1048576");
    char *big = malloc(PLAN_TEXT_BYTES_MAX + 1);
    EXPECT(big != NULL);
    memset(big, ' ', PLAN_TEXT_BYTES_MAX + 1);
    EXPECT_STATUS(plan_text_parse(big, PLAN_TEXT_BYTES_MAX + 1, &t.spec, &policy, &plan, &e),
                  SHD_ERANGE);
    EXPECT_HAS(e.text, "a plan of 67108865 bytes, the limit is 67108864");
    memcpy(big, HEAD, sizeof HEAD - 1);
    static const char op[] = "[\"COMMIT\"],";
    size_t used = sizeof HEAD - 1;
    for (uint32_t i = 0; i <= PLAN_OPS_MAX; i++, used += sizeof op - 1)
        memcpy(big + used, op, sizeof op - 1);
    big[used - 1] = ']';
    big[used] = '}';
    EXPECT_STATUS(plan_text_parse(big, used + 1, &t.spec, &policy, &plan, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "ops has 1048577 entries, must be 1 to 1048576");
    free(big);
}

/* -- Cut to a step ----------------------------------------------------------------------------- */

/* Any number of micro-batches: the rules of every plan, the bounds, and the right numbers. */
static void expect_fits(const struct plan_own *own, struct spec *spec)
{
    const uint32_t a = spec->accumulate, all = own->plan.micros;
    struct plan_policy policy = own->policy;
    policy.strategy = PLAN_OWN;
    for (uint32_t micros = 0; micros <= 2 * all + a; micros += a) {
        struct shd_err e = { 0 };
        struct plan plan;
        EXPECT_OK(plan_own_fit(own, spec, micros, &plan, &e), &e);
        EXPECT_OK(plan_check(&plan, spec, &policy, NULL, &e), &e);
        EXPECT_OK(plan_run(&plan, spec, &policy, &e), &e);
        EXPECT(plan.cost.live_units_max <= own->plan.cost.live_units_max);
        EXPECT(plan.cost.live_grads_max <= own->plan.cost.live_grads_max);
        if (micros == all)
            expect_same(&plan, &own->plan);
        plan_free(&plan);
    }
}

TEST(the_beginning_of_a_policys_plan_is_its_plan_for_fewer)
{
    uint64_t rng = test_seed(20261126);
    for (int i = 0; i < 300; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        struct plan_own own = { .policy = draw(&t, &rng) };
        own.plan = build(&t.spec, &own.policy, 3 * t.spec.accumulate);
        expect_fits(&own, &t.spec);
        for (uint32_t n = 1; n <= 3; n++) {
            struct plan want = build(&t.spec, &own.policy, n * t.spec.accumulate), got;
            EXPECT_OK(plan_own_fit(&own, &t.spec, n * t.spec.accumulate, &got, &e), &e);
            EXPECT_EQ(got.cost.fetched_bytes, want.cost.fetched_bytes);
            EXPECT_EQ(got.cost.returned_bytes, want.cost.returned_bytes);
            EXPECT_EQ(got.op_count, want.op_count);
            plan_free(&want);
            plan_free(&got);
        }
        plan_free(&own.plan);
    }
}

TEST(what_is_fetched_for_the_next_micro_batch_is_left_out_where_there_is_none)
{
    static const char json[] =
        "{\"schema\":1,\"model\":{\"units\":[{\"name\":\"u\"}]},\"policy\":{\"strategy\":\"own\"},"
        "\"micro_batches_per_worker\":2,\"ops\":[[\"FETCH\",0,0],[\"WAIT\",0,0],[\"FORWARD\",0,0],"
        "[\"BACKWARD\",0,0],[\"FREE\",0,0],[\"FETCH\",0,0],[\"WAIT\",0,0],[\"RETURN\",0,0],"
        "[\"FORWARD\",0,1],[\"BACKWARD\",0,1],[\"RETURN\",0,1],[\"FREE\",0,1],[\"PREPARE\"],"
        "[\"COMMIT\"]]}";
    struct toy t;
    struct shd_err e = { 0 };
    struct plan_own *own;
    struct plan plan;
    char got[512];
    toy_chain(&t, 1);
    EXPECT_OK(plan_own_new(&t.spec, json, strlen(json), &own, &e), &e);
    EXPECT_OK(plan_own_fit(own, &t.spec, 1, &plan, &e), &e);
    toy_print(&plan, got, sizeof got);
    EXPECT_STR(got, "FETCH0 WAIT0 FORWARD0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
    plan_free(&plan);
    expect_fits(own, &t.spec);
    plan_own_free(own);
}

/* -- Plans that people made -------------------------------------------------------------------- */

struct edits {
    uint32_t passed, bounded; /* refused for max_live_units */
};

/* From a policy's plan, edit after edit that the check passes. */
static void edit(struct plan_own *own, const struct spec *spec, uint64_t *rng, uint32_t edits,
                 struct edits *counts)
{
    while (edits-- > 0) {
        struct shd_err e = { 0 };
        char *text = text_of(spec, &own->policy, &own->plan);
        struct plan_own *good, *edited = NULL;
        EXPECT_OK(plan_own_new(spec, text, strlen(text), &good, &e), &e);
        free(text);
        plan_edit(&own->plan, spec, rng);
        text = text_of(spec, &own->policy, &own->plan);
        plan_free(&own->plan);
        const bool passed = plan_own_new(spec, text, strlen(text), &edited, &e) == SHD_OK;
        free(text);
        struct plan_own *now = passed ? edited : good;
        own->plan = now->plan;
        now->plan = (struct plan){ 0 };
        plan_own_free(good);
        plan_own_free(edited);
        counts->passed += passed;
        counts->bounded += strstr(e.text, "max_live_units") != NULL;
    }
}

TEST(what_the_check_passes_comes_to_the_right_numbers_and_to_an_end)
{
    uint64_t rng = test_seed(20261126);
    struct edits counts = { 0 };
    for (int i = 0; i < 150; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        struct plan_own own = { .policy = draw(&t, &rng) };
        own.plan = build(&t.spec, &own.policy, (1 + toy_below(&rng, 2)) * t.spec.accumulate);
        own.policy.strategy = PLAN_OWN;
        if (toy_below(&rng, 2) == 0)
            own.policy.max_live_units = own.plan.cost.live_units_max;
        edit(&own, &t.spec, &rng, 40, &counts);
        EXPECT_OK(plan_run(&own.plan, &t.spec, &own.policy, &e), &e);
        EXPECT_OK(plan_run_times(&own.plan, &t.spec, &e), &e);
        expect_fits(&own, &t.spec);
        plan_free(&own.plan);
    }
    printf("%" PRIu32 " of %d edits passed, %" PRIu32 " refused for a bound\n", counts.passed,
           150 * 40, counts.bounded);
    EXPECT(counts.passed > 500 && counts.bounded > 0);
}

/* A check that passes nothing wrong could pass nothing at all; one that passes too much shows
 * here: the same edits, without it. */
TEST(what_the_check_refuses_does_not_come_to_the_right_numbers)
{
    uint64_t rng = test_seed(20261126);
    uint32_t refused = 0, wrong_numbers = 0;
    for (int i = 0; i < 4000; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        struct plan_policy policy = draw(&t, &rng);
        struct plan plan = build(&t.spec, &policy, t.spec.accumulate);
        policy.strategy = PLAN_OWN;
        plan_edit(&plan, &t.spec, &rng);
        char *text = text_of(&t.spec, &policy, &plan);
        struct plan_own *own = NULL;
        if (plan_own_new(&t.spec, text, strlen(text), &own, &e) != SHD_OK) {
            refused++;
            wrong_numbers += plan_run(&plan, &t.spec, &policy, &e) != SHD_OK;
        }
        free(text);
        plan_own_free(own);
        plan_free(&plan);
    }
    printf("%" PRIu32 " refused, %" PRIu32 " of them wrong in numbers\n", refused, wrong_numbers);
    EXPECT(refused > 1000 && wrong_numbers > refused / 2);
}

/* -- Memory ------------------------------------------------------------------------------------ */

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    struct toy t;
    int n = 0, r;
    toy_chain(&t, 8);
    struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 2);
    do {
        struct shd_err e = { 0 };
        struct plan_own *own = NULL;
        struct plan fitted = { 0 };
        char *text = NULL;
        fail_at = ++n;
        sys_fault = fail_nth;
        r = plan_text_write(&t.spec, &PLAN_POLICY_DEFAULT, &plan, &text, &e);
        if (r == SHD_OK)
            r = plan_own_new(&t.spec, text, strlen(text), &own, &e);
        if (r == SHD_OK)
            r = plan_own_fit(own, &t.spec, 3, &fitted, &e);
        sys_fault = NULL;
        free(text);
        plan_free(&fitted);
        plan_own_free(own);
        EXPECT(fail_at > 0 ? r == SHD_OK : r == SHD_ENOMEM && e.text[0] != '\0');
    } while (fail_at <= 0);
    EXPECT(n > 8);
    plan_free(&plan);
}

TEST_MAIN()
