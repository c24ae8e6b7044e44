/* spec: what is accepted, what it becomes, and that it comes back from its canonical form. */
#include <jansson.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "proto/spec/muon.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

TEST(example_of_the_public_header_is_understood)
{
    struct spec *s = parse(example);
    EXPECT_STR(s->name, "gpt");
    EXPECT_EQ(s->seed, 1);
    EXPECT_EQ(s->micro_batches, 4);
    EXPECT_EQ(s->publish, SHD_F32);
    EXPECT_EQ(s->optimizer, SPEC_ADAMW);
    EXPECT(s->beta1 == 0.9 && s->beta2 == 0.95 && s->eps == 1e-8);
    EXPECT_EQ(s->group_count, 2);
    EXPECT_STR(s->groups[0].name, "decay");
    EXPECT(s->groups[0].weight_decay == 0.1 && s->groups[0].lr_scale == 1);
    EXPECT(s->groups[1].weight_decay == 0 && s->groups[1].lr_scale == 1);
    EXPECT_EQ(s->unit_count, 2);
    EXPECT_EQ(s->tensor_count, 2);
    const struct spec_tensor *t = &s->tensors[0];
    EXPECT(t->rank == 2 && t->shape[0] == 256 && t->shape[1] == 128 && t->elems == 32768);
    EXPECT(t->init == SPEC_INIT_NORMAL && t->init_a == 0 && t->init_b == 0.02 && t->group == 0);
    t = &s->tensors[1];
    EXPECT(t->init == SPEC_INIT_CONST && t->init_a == 1 && t->group == 1 && t->unit == 1);
    EXPECT(s->units[1].uses_count == 1 && s->units[1].uses[0] == 0);
    EXPECT_EQ(s->units[1].elems, 2048);
    EXPECT_EQ(s->elems, 32768 + 128);
    EXPECT_EQ(spec_moments(s), 2);
    spec_free(s);
}

TEST(defaults_are_filled_in)
{
    struct spec *s = parse(
        quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'}," SMALL_UNITS "}"));
    EXPECT(s->seed == 0 && s->publish == SHD_F32);
    EXPECT(s->beta1 == 0.9 && s->beta2 == 0.999 && s->eps == 1e-8);
    EXPECT_EQ(s->group_count, 1);
    EXPECT_STR(s->groups[0].name, "default");
    EXPECT(s->groups[0].lr_scale == 1 && s->groups[0].weight_decay == 0);
    EXPECT(s->tensors[0].init == SPEC_INIT_CONST && s->tensors[0].init_a == 0);
    spec_free(s);
    s = parse(quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'}," SMALL_UNITS "}"));
    EXPECT(s->optimizer == SPEC_SGD && s->beta1 == 0 && s->beta2 == 0 && s->eps == 0);
    EXPECT_EQ(spec_moments(s), 1);
    spec_free(s);
    s = parse(quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'lion'}," SMALL_UNITS "}"));
    EXPECT(s->optimizer == SPEC_LION && s->beta1 == 0.9 && s->beta2 == 0.99);
    EXPECT_EQ(spec_moments(s), 1);
    spec_free(s);
    spec_free(NULL);
}

/* Older builds read what has none. */
TEST(an_average_is_of_the_spec_where_it_is_asked_for)
{
    struct spec *plain = parse(
        quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'}," SMALL_UNITS "}"));
    struct spec *s = parse(quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},"
                                  "'ema':0.999,'ema_warmup':true," SMALL_UNITS "}"));
    struct shd_err e;
    char *text;
    EXPECT(plain->ema == 0 && !plain->ema_warmup && s->ema == 0.999 && s->ema_warmup);
    EXPECT(spec_arrays(plain) == 3 && spec_arrays(s) == 4 && spec_ema_array(s) == 3);
    EXPECT_STATUS(spec_compare(s, plain, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "ema is 0, the open model has 0.999");
    EXPECT_OK(spec_dump(plain, &text, &e), &e);
    EXPECT(strstr(text, "ema") == NULL);
    free(text);
    EXPECT_OK(spec_dump(s, &text, &e), &e);
    struct spec *again = parse(text);
    EXPECT_OK(spec_compare(s, again, &e), &e);
    again->ema_warmup = false;
    EXPECT_STATUS(spec_compare(s, again, &e), SHD_ESPEC);
    free(text);
    spec_free(again);
    spec_free(s);
    spec_free(plain);
}

TEST(tensors_are_aligned_and_units_padded)
{
    struct spec *s = parse(
        quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'},'units':["
               "{'name':'a','tensors':[{'name':'1','shape':[1]},{'name':'2','shape':[33]},"
               "{'name':'3','shape':[32]},{'name':'4','shape':[]}]},"
               "{'name':'b','tensors':[{'name':'5','shape':[2048]}]},"
               "{'name':'c','tensors':[{'name':'6','shape':[2,2,2,2,2,2,2,2]},{'name':'7','shape':["
               "2017]}]}"
               "]}"));
    const uint64_t offsets[] = { 0, 32, 96, 128, 0, 0, 256 };
    const uint64_t elems[] = { 1, 33, 32, 1, 2048, 256, 2017 };
    for (uint32_t i = 0; i < ARRAY_SIZE(offsets); i++) {
        EXPECT_EQ(s->tensors[i].offset_elems, offsets[i]);
        EXPECT_EQ(s->tensors[i].elems, elems[i]);
    }
    EXPECT_EQ(s->units[0].elems, 2048);
    EXPECT_EQ(s->units[1].elems, 2048);
    EXPECT_EQ(s->units[2].elems, 4096); /* 256 + 2017 is past one block */
    EXPECT(s->units[2].first_tensor == 5 && s->units[2].tensor_count == 2);
    EXPECT_EQ(s->tensors[3].rank, 0);
    EXPECT_EQ(s->elems, 1 + 33 + 32 + 1 + 2048 + 256 + 2017);
    spec_free(s);
}

/* -- Round trips ----------------------------------------------------------------------------- */

static char *dump(const struct spec *s)
{
    struct shd_err e;
    char *json = NULL;
    EXPECT_OK(spec_dump(s, &json, &e), &e);
    return json;
}

TEST(canonical_form_is_exactly_this)
{
    struct spec *s = parse(example);
    char *json = dump(s);
    EXPECT_STR(json,
               quoted("{'name':'gpt','seed':1,'micro_batches':4,'accumulate':1,"
                      "'publish':'f32',"
                      "'optimizer':{'kind':'adamw','beta1':0.90000000000000002,"
                      "'beta2':0.94999999999999996,'eps':1e-8},"
                      "'groups':[{'name':'decay','lr_scale':1.0,"
                      "'weight_decay':0.10000000000000001},"
                      "{'name':'plain','lr_scale':1.0,'weight_decay':0.0}],"
                      "'units':[{'name':'embed','uses':[],'tensors':[{'name':'wte',"
                      "'shape':[256,128],'group':'decay','init':['normal',0.0,0.02],"
                      "'trainable':true}]},"
                      "{'name':'head','uses':['embed'],'tensors':[{'name':'ln_f.weight',"
                      "'shape':[128],'group':'plain','init':['const',1.0],'trainable':true}]}]}"));
    free(json);
    spec_free(s);
}

static double random_real(uint64_t *seed, double low, double high)
{
    const uint64_t how = test_random(seed) % 8;
    if (how == 0)
        return low;
    if (how == 1)
        return high;
    return low + (high - low) * ((double)(test_random(seed) >> 11) * 0x1p-53);
}

static json_t *random_tensor(uint64_t *seed, uint32_t index, uint32_t groups)
{
    char name[64], group[16];
    snprintf(name, sizeof name, "t%" PRIu32 ".%" PRIx64, index, test_random(seed) % 1000);
    snprintf(group, sizeof group, "g%u", (unsigned)(test_random(seed) % groups));
    json_t *shape = json_array();
    for (uint64_t rank = test_random(seed) % 5; rank > 0; rank--)
        json_array_append_new(shape, json_integer((json_int_t)(test_random(seed) % 50) + 1));
    json_t *t = json_pack("{s:s, s:o, s:s}", "name", name, "shape", shape, "group", group);
    const double low = random_real(seed, -3.4e38, 3.4e38), std = random_real(seed, 0, 1);
    switch (test_random(seed) % 4) {
    case 0:
        json_object_set_new(t, "init", json_pack("[s, f]", "const", low));
        break;
    case 1:
        json_object_set_new(t, "init", json_pack("[s, f, f]", "normal", low, std));
        break;
    case 2:
        json_object_set_new(t, "init",
                            json_pack("[s, f, f]", "uniform", low, random_real(seed, low, 3.4e38)));
        break;
    default:
        break;
    }
    return t;
}

static json_t *random_units(uint64_t *seed, uint32_t groups)
{
    json_t *units = json_array();
    const uint32_t count = (uint32_t)(test_random(seed) % 6) + 1;
    uint32_t tensors_made = 0;
    for (uint32_t u = 0; u < count; u++) {
        char name[16];
        snprintf(name, sizeof name, "u%" PRIu32, u);
        json_t *tensors = json_array(), *uses = json_array();
        for (uint64_t t = test_random(seed) % 4 + 1; t > 0; t--)
            json_array_append_new(tensors, random_tensor(seed, tensors_made++, groups));
        for (uint32_t o = 0; o < count; o++)
            if (o != u && test_random(seed) % 4 == 0)
                json_array_append_new(uses, json_sprintf("u%u", o));
        json_array_append_new(
            units, json_pack("{s:o, s:o, s:s}", "uses", uses, "tensors", tensors, "name", name));
    }
    return units;
}

static char *random_json(uint64_t *seed)
{
    static const char *const publish[] = { "f32", "bf16", "f16" };
    const uint32_t groups = (uint32_t)(test_random(seed) % 4) + 1;
    json_t *group_array = json_array(), *optimizer = NULL;
    for (uint32_t g = 0; g < groups; g++)
        json_array_append_new(group_array,
                              json_pack("{s:o, s:f, s:f}", "name", json_sprintf("g%u", g),
                                        "lr_scale", random_real(seed, 0, 3), "weight_decay",
                                        random_real(seed, 0, 1)));
    switch (test_random(seed) % 3) {
    case 0:
        optimizer = json_pack("{s:s, s:f, s:f, s:f}", "kind", "adamw", "beta1",
                              random_real(seed, 0, 0.999), "beta2", random_real(seed, 0, 0.99999),
                              "eps", random_real(seed, 1e-37, 1));
        break;
    case 1:
        optimizer = json_pack("{s:s, s:f}", "kind", "sgd", "momentum", random_real(seed, 0, 0.99));
        break;
    default:
        optimizer = json_pack("{s:s, s:f}", "kind", "lion", "beta1", random_real(seed, 0, 0.99));
        break;
    }
    json_t *root = json_pack(
        "{s:o, s:I, s:I, s:s, s:s, s:s, s:o, s:o}", "units", random_units(seed, groups), "seed",
        (json_int_t)(test_random(seed) >> 1), "micro_batches",
        (json_int_t)(test_random(seed) % SHD_MICROS_MAX) + 1, "name", "model", "publish",
        publish[test_random(seed) % 3], "grad_dtype", publish[test_random(seed) % 3], "groups",
        group_array, "optimizer", optimizer);
    char *json = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    return json;
}

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void expect_equal_specs(const struct spec *a, const struct spec *b)
{
    struct shd_err e;
    EXPECT_OK(spec_compare(a, b, &e), &e);
    EXPECT_OK(spec_compare(b, a, &e), &e);
    EXPECT_EQ(a->elems, b->elems);
    for (uint32_t i = 0; i < a->tensor_count; i++) {
        const struct spec_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        EXPECT(x->offset_elems == y->offset_elems && x->unit == y->unit && x->elems == y->elems);
        EXPECT(bits_of(x->init_a) == bits_of(y->init_a));
        EXPECT(bits_of(x->init_b) == bits_of(y->init_b));
        EXPECT(spec_tensor_key(a, x) == spec_tensor_key(b, y));
    }
}

TEST(dump_and_parse_round_trip_to_the_bit)
{
    uint64_t seed = test_seed(0x59ec);
    for (int i = 0; i < 300; i++) {
        char *json = random_json(&seed);
        struct spec *a = parse(json);
        char *first = dump(a);
        struct spec *b = parse(first);
        char *second = dump(b);
        EXPECT_STR(first, second);
        expect_equal_specs(a, b);
        free(json);
        free(first);
        free(second);
        spec_free(a);
        spec_free(b);
    }
}

/* Builds that do not know the field can read what is written of models with the default. */
TEST(grad_dtype_is_fp32_where_nothing_is_said_and_then_not_written)
{
    struct spec *silent = parse(example);
    struct spec *said = parse(quoted("{" HEAD ",'grad_dtype':'bf16','units':[{'name':'u','tensors':"
                                     "[{'name':'t','shape':[1]}]}]}"));
    EXPECT_EQ(silent->grad_dtype, SHD_F32);
    EXPECT_EQ(said->grad_dtype, SHD_BF16);
    char *without = dump(silent), *with = dump(said);
    EXPECT(strstr(without, "grad_dtype") == NULL);
    EXPECT_HAS(with, "\"grad_dtype\":\"bf16\"");
    free(without);
    free(with);
    spec_free(silent);
    spec_free(said);
}

/* Likewise. */
TEST(a_codec_is_written_where_there_is_one)
{
    const char *frame = "{'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'},%s'units':[{"
                        "'name':'u','tensors':[{'name':'a','shape':[33]},{'name':'b',"
                        "'shape':[65]},{'name':'c','shape':[1]}]}]}";
    struct shd_err e = { 0 };
    struct spec *none = parse(quoted(frame, "'codec':'none',"));
    for (int codec = CODEC_INT8; codec <= CODEC_INT4; codec++) {
        char field[32], want[40];
        snprintf(field, sizeof field, "'codec':'%s',", codec_name((enum codec)codec));
        snprintf(want, sizeof want, "\"codec\":\"%s\"", codec_name((enum codec)codec));
        struct spec *coded = parse(quoted(frame, field));
        char *json = dump(coded);
        struct spec *again = parse(json);
        EXPECT_EQ(coded->codec, codec);
        EXPECT_EQ(coded->tensors[1].offset_elems, 64);
        EXPECT_EQ(coded->tensors[2].offset_elems, 192);
        EXPECT_STATUS(spec_compare(none, coded, &e), SHD_ESPEC);
        EXPECT_HAS(e.text, "the open model has 'none'");
        EXPECT_OK(spec_compare(coded, again, &e), &e);
        EXPECT_HAS(json, want);
        free(json);
        spec_free(again);
        spec_free(coded);
    }
    struct spec *coded = parse(quoted(frame, "'grad_codec':'int8',"));
    char *json = dump(coded);
    struct spec *again = parse(json);
    EXPECT_EQ(coded->tensors[2].offset_elems, 192);
    EXPECT_EQ(spec_unit_grad_codec(coded, 0), CODEC_INT8);
    EXPECT_STATUS(spec_compare(none, coded, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "grad_codec is 'int8', the open model has 'none'");
    EXPECT_OK(spec_compare(coded, again, &e), &e);
    free(json);
    spec_free(again);
    spec_free(coded);
    json = dump(none);
    EXPECT(strstr(json, "codec") == NULL);
    EXPECT_EQ(none->tensors[2].offset_elems, 160);
    free(json);
    spec_free(none);
}

/* Older builds know none; each tensor begins a block. */
TEST(moments_are_written_where_they_are_in_8_bits)
{
    const char *frame = "{'name':'m','micro_batches':1,'optimizer':{%s},'units':[{'name':'u',"
                        "'tensors':[{'name':'a','shape':[33]},{'name':'b','shape':[65]},"
                        "{'name':'c','shape':[64]},{'name':'d','shape':[1]}]}]}";
    struct shd_err e = { 0 };
    struct spec *wide = parse(quoted(frame, "'kind':'adamw','moments':'f32'"));
    struct spec *small = parse(quoted(frame, "'kind':'adamw','moments':'int8'"));
    struct spec *lion = parse(quoted(frame, "'kind':'lion','moments':'int8'"));
    static const uint64_t at[] = { 0, 64, 192, 256 };
    EXPECT_EQ(wide->tensors[1].offset_elems, 64);
    EXPECT_EQ(wide->tensors[2].offset_elems, 160);
    for (uint32_t t = 0; t < 4; t++)
        EXPECT_EQ(small->tensors[t].offset_elems, at[t]);
    EXPECT_STATUS(spec_compare(wide, small, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "optimizer.moments is 'int8', the open model has 'f32'");
    EXPECT_EQ(spec_array_quant(small, 0), QUANT_NONE);
    EXPECT_EQ(spec_array_quant(small, 1), QUANT_SIGNED);
    EXPECT_EQ(spec_array_quant(small, 2), QUANT_UNSIGNED);
    EXPECT_EQ(spec_array_quant(lion, 2), QUANT_NONE); /* an average */
    EXPECT_EQ(spec_array_quant(wide, 1), QUANT_NONE);
    char *json = dump(small);
    EXPECT_HAS(json, "\"moments\":\"int8\"");
    struct spec *again = parse(json);
    EXPECT_OK(spec_compare(small, again, &e), &e);
    free(json);
    json = dump(wide);
    EXPECT(strstr(json, "moments") == NULL);
    free(json);
    spec_free(again);
    spec_free(wide);
    spec_free(small);
    spec_free(lion);
}

TEST(orders_of_optimizers_are_written_where_they_are_torchs)
{
    static const char *const frame = "{'name':'m','micro_batches':1,'optimizer':{%s}," SMALL_UNITS
                                     "}";
    struct spec *own = parse(quoted(frame, "'kind':'sgd','momentum':0.9,'order':'shardd'"));
    struct spec *sgd = parse(quoted(frame, "'kind':'sgd','momentum':0.9,'order':'torch'"));
    struct spec *other = parse(
        quoted(frame, "'kind':'sgd','momentum':0.9,'order':'torch','nesterov':true"));
    struct spec *adam = parse(quoted(frame, "'kind':'adamw','order':'torch'"));
    struct shd_err e;
    EXPECT(own->optimizer == SPEC_SGD && sgd->optimizer == SPEC_SGD_TORCH &&
           sgd->torch.coupled_decay);
    EXPECT(adam->optimizer == SPEC_ADAMW_TORCH && !adam->torch.coupled_decay &&
           adam->beta2 == 0.999);
    EXPECT(spec_moments(adam) == 2 && spec_moments(sgd) == 1);
    EXPECT_STATUS(spec_compare(own, sgd, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "optimizer.order is 'torch', the open model has 'shardd'");
    EXPECT_STATUS(spec_compare(sgd, other, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "optimizer.nesterov is 'true', the open model has 'false'");
    char *without = dump(own), *with = dump(other);
    EXPECT_HAS(without, "\"optimizer\":{\"kind\":\"sgd\",\"momentum\":0.90000000000000002}");
    EXPECT_HAS(with,
               "\"order\":\"torch\",\"decay\":\"coupled\",\"nesterov\":true,\"dampening\":0.0");
    struct spec *again = parse(with);
    EXPECT_OK(spec_compare(other, again, &e), &e);
    free(without);
    free(with);
    struct spec *all[] = { own, sgd, other, adam, again };
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        spec_free(all[i]);
}

TEST(idle_is_zero_where_nothing_is_said_and_then_not_written)
{
    static const char *const frame = "{" HEAD ",'groups':[{'name':'g'%s}],'units':[{'name':'u',"
                                     "'tensors':[{'name':'t','shape':[1]}]}]}";
    struct spec *silent = parse(quoted(frame, "")), *zero = parse(quoted(frame, ",'idle':'zero'"));
    struct spec *skip = parse(quoted(frame, ",'idle':'skip'"));
    struct shd_err e;
    EXPECT(!silent->units[0].skips_idle && skip->units[0].skips_idle);
    EXPECT_OK(spec_compare(silent, zero, &e), &e);
    EXPECT_STATUS(spec_compare(silent, skip, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'g': idle is 'skip', the open model has 'zero'");
    char *without = dump(zero), *with = dump(skip);
    EXPECT(strstr(without, "idle") == NULL);
    EXPECT_HAS(with, "\"idle\":\"skip\"");
    free(without);
    free(with);
    spec_free(silent);
    spec_free(zero);
    spec_free(skip);
}

/* Told apart from the others by everything that moments, types of gradients and updates depend on.
 */
TEST(a_group_may_be_a_mean)
{
    static const char *const frame = "{" HEAD ",'grad_dtype':'bf16','groups':[{'name':'w'},"
                                     "{'name':'s'%s}],'units':[{'name':'u','tensors':[{'name':'t',"
                                     "'shape':[1],'group':'w'}]},{'name':'b','tensors':[{'name':"
                                     "'c','shape':[1],'group':'s'}]}]}";
    struct spec *plain = parse(quoted(frame, ""));
    struct spec *mean = parse(quoted(frame, ",'optimizer':{'kind':'mean'}"));
    struct shd_err e;
    EXPECT(!plain->units[1].mean && mean->units[1].mean && !mean->units[0].mean);
    EXPECT(mean->units[1].skips_idle && !mean->units[1].frozen);
    EXPECT_EQ(spec_unit_moments(plain, 1), spec_moments(plain));
    EXPECT_EQ(spec_unit_moments(mean, 0), spec_moments(mean));
    EXPECT_EQ(spec_unit_moments(mean, 1), 0);
    EXPECT_EQ(spec_unit_optimizer(mean, 0), mean->optimizer);
    EXPECT_EQ(spec_unit_optimizer(mean, 1), SPEC_MEAN);
    EXPECT_EQ(spec_unit_grad_dtype(mean, 0), SHD_BF16);
    EXPECT_EQ(spec_unit_grad_dtype(mean, 1), SHD_F32);
    char *without = dump(plain), *with = dump(mean);
    EXPECT(strstr(without, "\"mean\"") == NULL);
    EXPECT_HAS(with, "\"idle\":\"skip\",\"optimizer\":{\"kind\":\"mean\"}}");
    struct spec *again = parse(with);
    EXPECT_OK(spec_compare(mean, again, &e), &e);
    mean->groups[1].skips_idle = false; /* what is told first */
    EXPECT_STATUS(spec_compare(plain, mean, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 's': optimizer is 'mean', the open model has 'the model's'");
    free(without);
    free(with);
    spec_free(plain);
    spec_free(mean);
    spec_free(again);
}

/* Its matrices' units are of one owner each, and so are those that say so. */
TEST(a_group_of_matrices_may_be_muons)
{
    static const char *const frame =
        "{" HEAD ",'groups':[{'name':'w'},{'name':'x','lr_scale':2%s}],'units':["
        "{'name':'u','tensors':[{'name':'a','shape':[3,5],'group':'x'},"
        "{'name':'b','shape':[7],'group':'w'}]},"
        "{'name':'f','tensors':[{'name':'c','shape':[9],'group':'x','trainable':false}]},"
        "{'name':'v','place':'whole','tensors':[{'name':'d','shape':[2],'group':'w'}]}]}";
    struct spec *plain = parse(quoted(frame, ""));
    struct spec *muon = parse(quoted(frame, ",'optimizer':{'kind':'muon'}"));
    struct spec *other = parse(quoted(frame,
                                      ",'optimizer':{'kind':'muon','momentum':0.5,'eps':1e-3,"
                                      "'nesterov':false,'ns_steps':3,'ns_coefficients':"
                                      "[3,-4,2],'adjust_lr_fn':'match_rms_adamw'}"));
    struct shd_err e;
    EXPECT(muon->units[0].whole && muon->units[0].wholes);
    EXPECT(!muon->units[1].whole && !muon->units[1].wholes); /* frozen: nobody updates it */
    EXPECT(muon->units[2].whole && !muon->units[2].wholes);
    EXPECT(!plain->units[0].whole && !spec_has_whole(plain) && spec_has_whole(muon));
    EXPECT(spec_is_matrix(muon, &muon->tensors[0]) && !spec_is_matrix(muon, &muon->tensors[1]));
    EXPECT(spec_group_optimizer(muon, 0) == muon->optimizer &&
           spec_group_optimizer(muon, 1) == SPEC_MUON);
    EXPECT_EQ(spec_unit_moments(muon, 0), spec_moments(plain));
    EXPECT(memcmp(muon->groups[1].muon, &muon_default, sizeof muon_default) == 0);
    EXPECT(other->groups[1].muon->steps == 3 && other->groups[1].muon->coefficients[1] == -4 &&
           other->groups[1].muon->adjust == MUON_MATCH_RMS_ADAMW);
    struct spec *const specs[] = { plain, muon, other };
    for (size_t i = 0; i < ARRAY_SIZE(specs); i++) {
        char *text = dump(specs[i]);
        struct spec *again = parse(text);
        EXPECT_OK(spec_compare(specs[i], again, &e), &e);
        free(text);
        spec_free(again);
    }
    EXPECT_STATUS(spec_compare(plain, muon, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': optimizer is 'muon', the open model has 'the model's'");
    EXPECT_STATUS(spec_compare(muon, other, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': momentum is 0.5, the open model has 0.95");
    for (size_t i = 0; i < ARRAY_SIZE(specs); i++)
        spec_free(specs[i]);
}

TEST(a_group_may_be_lambs)
{
    static const char *const frame =
        "{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'},'groups':[{'name':'w'},{'name':"
        "'x'%s}],'units':["
        "{'name':'u','tensors':[{'name':'a','shape':[3,5,2],'group':'x'},"
        "{'name':'b','shape':[7],'group':'w'}]}]}";
    struct spec *plain = parse(quoted(frame, ""));
    struct spec *lamb = parse(quoted(frame, ",'optimizer':{'kind':'lamb'}"));
    struct spec *other = parse(quoted(frame, ",'optimizer':{'kind':'lamb','beta2':0.95}"));
    struct shd_err e;
    EXPECT(lamb->units[0].whole && lamb->units[0].wholes && !plain->units[0].whole);
    EXPECT(spec_is_whole(lamb, &lamb->tensors[0]) && !spec_is_matrix(lamb, &lamb->tensors[0]));
    EXPECT(!spec_is_whole(lamb, &lamb->tensors[1]));
    EXPECT_EQ(spec_group_optimizer(lamb, 1), SPEC_LAMB);
    EXPECT(lamb->groups[1].lamb->beta1 == 0.9 && lamb->groups[1].lamb->eps == 1e-6);
    char *text = dump(other);
    struct spec *again = parse(text);
    EXPECT_OK(spec_compare(other, again, &e), &e);
    EXPECT_STATUS(spec_compare(lamb, other, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': beta2 is 0.95, the open model has 0.999");
    EXPECT_STATUS(spec_compare(plain, lamb, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': optimizer is 'lamb', the open model has 'the model's'");
    free(text);
    spec_free(plain);
    spec_free(lamb);
    spec_free(other);
    spec_free(again);
}

/* The statistics of its tensors are one more tensor of the unit, which has no moments. */
TEST(a_group_may_be_adafactors)
{
    static const char *const frame =
        "{" HEAD ",'groups':[{'name':'w'},{'name':'x'%s}],'units':["
        "{'name':'u','tensors':[{'name':'a','shape':[2,3,5],'group':'x'},"
        "{'name':'b','shape':[7],'group':'x'}]},"
        "{'name':'f','tensors':[{'name':'c','shape':[9],'group':'x','trainable':false}]},"
        "{'name':'v','tensors':[{'name':'d','shape':[40,40],'group':'w'}]}]}";
    struct spec *plain = parse(quoted(frame, ""));
    struct spec *own = parse(quoted(frame, ",'optimizer':{'kind':'adafactor'}"));
    struct spec *other = parse(quoted(frame, ",'optimizer':{'kind':'adafactor','beta2_decay':-0.5,"
                                             "'eps1':1e-9,'eps2':0,'d':2}"));
    struct shd_err e;
    EXPECT(own->units[0].whole && own->units[0].adafactor && !own->units[1].adafactor);
    EXPECT(own->units[0].tensor_count == 3 && own->units[1].tensor_count == 1);
    EXPECT(own->tensor_count == 5 && own->elems == plain->elems);
    const struct spec_tensor *t = &own->tensors[2];
    EXPECT_STR(t->name, "u:adafactor");
    /* Two matrices' rows and columns, 16, and 7 elements behind the next multiple of 32. */
    EXPECT(t->statistics && t->elems == 32 + 32 && t->offset_elems == SHD_BLOCK_ELEMS);
    EXPECT(own->units[0].elems == 2 * SHD_BLOCK_ELEMS && own->tensors[3].unit == 1);
    EXPECT(!spec_is_whole(own, t) && spec_is_whole(own, &own->tensors[1]));
    EXPECT(spec_unit_moments(own, 0) == 0 && spec_unit_moments(own, 2) == spec_moments(plain));
    EXPECT(spec_unit_arrays(own, 0) == 1);
    EXPECT_EQ(spec_group_optimizer(own, 1), SPEC_ADAFACTOR);
    uint32_t found = 0;
    EXPECT(spec_find_tensor(own, "u:adafactor", &found) && found == 2);
    char *text = dump(other);
    EXPECT(strstr(text, "u:adafactor") == NULL);
    struct spec *again = parse(text);
    EXPECT_OK(spec_compare(other, again, &e), &e);
    EXPECT_STATUS(spec_compare(own, other, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': beta2_decay is -0.5, the open model has -0.8");
    EXPECT_STATUS(spec_compare(plain, own, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "group 'x': optimizer is 'adafactor', the open model has 'the model's'");
    free(text);
    spec_free(plain);
    spec_free(own);
    spec_free(other);
    spec_free(again);
}

/* As torch.optim.Muon's _adjust_lr(). */
TEST(muons_rate_depends_on_the_shape)
{
    EXPECT(muon_ratio(MUON_ORIGINAL, 400, 100) == 2 && muon_ratio(MUON_ORIGINAL, 100, 400) == 1);
    EXPECT(muon_ratio(MUON_SPECTRAL_UNCLAMPED, 100, 400) == 0.5);
    EXPECT(muon_ratio(MUON_MATCH_RMS_ADAMW, 100, 400) == 0.2 * 20);
    EXPECT(muon_ratio(MUON_MATCH_RMS_ADAMW, 400, 100) == 0.2 * 20);
}

TEST(negative_zero_has_one_spelling)
{
    struct spec *a = parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':[{'name':'t',"
                                  "'shape':[1],'init':['const',-0.0]}]}]}"));
    struct spec *b = parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':[{'name':'t',"
                                  "'shape':[1],'init':['const',0]}]}]}"));
    expect_equal_specs(a, b);
    spec_free(a);
    spec_free(b);
}

/* -- Comparison ------------------------------------------------------------------------------ */

/* Replace the first `from` in the example by `to`. */
static struct spec *changed(const char *from, const char *to)
{
    static char json[4000];
    char f[200], t[600];
    snprintf(f, sizeof f, "%s", quoted("%s", from));
    snprintf(t, sizeof t, "%s", quoted("%s", to));
    const char *at = strstr(example, f);
    EXPECT(at != NULL);
    snprintf(json, sizeof json, "%.*s%s%s", (int)(at - example), example, t, at + strlen(f));
    return parse(json);
}

/* What is written of micro_batches reads as the same; one row is written as builds that know no
 * other write it. */
TEST(ramps_are_written_as_they_are_read)
{
    static const struct {
        const char *given, *written;
        uint32_t most, at_first, at_last;
    } cases[] = {
        { "[[0, 4]]", "4,", 4, 4, 4 },
        { "[[0, 4], [100, 8], [3000, 6]]", "[[0,4],[100,8],[3000,6]],", 8, 4, 6 },
        { "4, 'micro_batches_max': 16", "4,", 16, 4, 4 },
        { "4, 'micro_batches_max': 4", "4,", 4, 4, 4 },
        { "[[0, 4], [100, 8]], 'micro_batches_max': 12", "[[0,4],[100,8]],", 12, 4, 8 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char to[200], want[200];
        struct shd_err e = { 0 };
        snprintf(to, sizeof to, "'micro_batches': %s", cases[i].given);
        snprintf(want, sizeof want, "\"micro_batches\":%s\"accumulate\":1", cases[i].written);
        struct spec *s = changed("'micro_batches': 4", to);
        EXPECT_EQ(s->micro_batches, cases[i].most);
        EXPECT_EQ(spec_returns(s), cases[i].most);
        EXPECT_EQ(spec_micro_batches(s, 0), cases[i].at_first);
        EXPECT_EQ(spec_micro_batches(s, 3000), cases[i].at_last);
        char *json = dump(s);
        EXPECT_HAS(json, want);
        EXPECT((strstr(json, "micro_batches_max") != NULL) == (i == 2 || i == 4));
        struct spec *again = parse(json);
        EXPECT_OK(spec_compare(s, again, &e), &e);
        EXPECT_EQ(again->micro_batches, s->micro_batches);
        free(json);
        spec_free(again);
        spec_free(s);
    }
}

TEST(first_difference_is_named_with_both_values)
{
    static const struct {
        const char *from, *to, *text;
    } cases[] = {
        { "'gpt'", "'gpt2'", "name is 'gpt2', the open model has 'gpt'" },
        { "'seed': 1", "'seed': 2", "seed is 2, the open model has 1" },
        { "'micro_batches': 4", "'micro_batches': 8", "micro_batches is 8, the open model has 4" },
        { "'micro_batches': 4", "'micro_batches': [[0, 4], [9, 8]]",
          "micro_batches: number of steps that change it is 2, the open model has 1" },
        { "'micro_batches': 4", "'micro_batches': 4, 'accumulate': 2",
          "accumulate is 2, the open model has 1" },
        { "'seed': 1", "'seed': 1, 'verify_every': 9", "verify_every is 9, the open model has 0" },
        { "[256, 128]", "[256, 128], 'trainable': false",
          "tensor 'wte': trainable is 'false', the open model has 'true'" },
        { "'f32'", "'bf16'", "publish is 'bf16', the open model has 'f32'" },
        { "'f32'", "'f32', 'grad_dtype': 'f16'", "grad_dtype is 'f16', the open model has 'f32'" },
        { "'adamw', 'beta1': 0.9, 'beta2': 0.95, 'eps': 1e-8", "'sgd'",
          "optimizer.kind is 'sgd', the open model has 'adamw'" },
        { "0.9,", "0.8,", "optimizer.beta1 is 0.8, the open model has 0.9" },
        { "0.95", "0.9500000000000001",
          "optimizer.beta2 is 0.9500000000000001, the open model has 0.95" },
        { "1e-8", "1e-6", "optimizer.eps is 1e-06, the open model has 1e-08" },
        { "{ 'name': 'plain' }", "{ 'name': 'plain' }, { 'name': 'x' }",
          "number of groups is 3, the open model has 2" },
        { "'weight_decay': 0.1", "'weight_decay': 0.2",
          "group 'decay': weight_decay is 0.2, the open model has 0.1" },
        { "'weight_decay': 0.1", "'weight_decay': 0.1, 'lr_scale': 2",
          "group 'decay': lr_scale is 2, the open model has 1" },
        { "'name': 'embed'", "'uses':['head'], 'name': 'embed'",
          "unit 'embed': number of uses is 1, the open model has 0" },
        { "'wte', 'shape'", "'wte2', 'shape'",
          "unit 'embed': tensors[0].name is 'wte2', the open model has 'wte'" },
        { "[256, 128]", "[256, 129]", "tensor 'wte': shape[1] is 129, the open model has 128" },
        { "[256, 128]", "[32768]", "tensor 'wte': rank is 1, the open model has 2" },
        { "'group': 'decay'", "'group': 'plain'",
          "tensor 'wte': group is 'plain', the open model has 'decay'" },
        { "'normal', 0, 0.02", "'uniform', 0, 0.02",
          "tensor 'wte': init is 'uniform', the open model has 'normal'" },
        { "'normal', 0, 0.02", "'normal', 1, 0.02",
          "tensor 'wte': init[1] is 1, the open model has 0" },
        { "'normal', 0, 0.02", "'normal', 0, 0.03",
          "tensor 'wte': init[2] is 0.03, the open model has 0.02" },
        { "'uses': ['embed'], ", "", "unit 'head': number of uses is 0, the open model has 1" },
        { "{ 'name': 'ln_f", "{ 'name': 'b', 'shape': [1], 'group': 'plain' }, { 'name': 'ln_f",
          "unit 'head': number of tensors is 2, the open model has 1" },
        { "{ 'name': 'head'",
          "{ 'name': 'x', 'tensors': [ { 'name': 'y', 'shape': [1], 'group': 'plain' } ] }, "
          "{ 'name': 'head'",
          "number of units is 3, the open model has 2" },
        { "'name': 'head', 'uses'", "'name': 'tail', 'uses'",
          "units[1].name is 'tail', the open model has 'head'" },
    };
    struct shd_err e;
    struct spec *open = parse(example);
    EXPECT_OK(spec_compare(open, open, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct spec *asked = changed(cases[i].from, cases[i].to);
        EXPECT_STATUS(spec_compare(open, asked, &e), SHD_ESPEC);
        EXPECT_STR(e.text, cases[i].text);
        spec_free(asked);
    }
    spec_free(open);
}

TEST(names_of_groups_and_uses_are_compared)
{
#define NAMES_JSON(g, use)                               \
    "{" HEAD ",'groups':[{'name':'" g "'}],'units':["    \
    "{'name':'a','tensors':[{'name':'1','shape':[1]}]}," \
    "{'name':'b','tensors':[{'name':'2','shape':[1]}]}," \
    "{'name':'c','uses':['" use "'],'tensors':[{'name':'3','shape':[1]}]}]}"
    struct shd_err e;
    struct spec *open = parse(quoted(NAMES_JSON("g", "a")));
    struct spec *group = parse(quoted(NAMES_JSON("h", "a")));
    struct spec *use = parse(quoted(NAMES_JSON("g", "b")));
    EXPECT_STATUS(spec_compare(open, group, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "groups[0].name is 'h', the open model has 'g'");
    EXPECT_STATUS(spec_compare(open, use, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "unit 'c': uses[0] is 'b', the open model has 'a'");
    spec_free(open);
    spec_free(group);
    spec_free(use);
}

TEST(tensor_keys_are_sha256_of_seed_and_name)
{
    /* sha256sum of 01 00 00 00 00 00 00 00 'w' 't' 'e', first 8 bytes little-endian. */
    struct spec *s = parse(example);
    EXPECT(spec_tensor_key(s, &s->tensors[0]) == UINT64_C(0x69ab181b4925a31c));
    EXPECT(spec_tensor_key(s, &s->tensors[0]) != spec_tensor_key(s, &s->tensors[1]));
    s->seed = UINT64_C(0x0807060504030201);
    EXPECT(spec_tensor_key(s, &s->tensors[0]) == UINT64_C(0x656decc30c329595));
    spec_free(s);
}

TEST(random_damage_is_never_more_than_an_error)
{
    uint64_t seed = test_seed(0xda3a6e);
    const size_t bytes = strlen(example);
    int accepted = 0;
    for (int i = 0; i < 20000; i++) {
        char *json = malloc(bytes);   /* exact: a read past the end is caught */
        memcpy(json, example, bytes); /* NOLINT: no terminator wanted */
        for (uint64_t k = test_random(&seed) % 3 + 1; k > 0; k--)
            json[test_random(&seed) % bytes] =
                test_random(&seed) % 2 ? (char)test_random(&seed)
                                       : "0123456789-\"[]{},:e."[test_random(&seed) % 20];
        struct spec *s;
        if (spec_parse(json, bytes - test_random(&seed) % 3, &s, NULL) == SHD_OK) {
            accepted++;
            char *again = dump(s);
            struct spec *b = parse(again);
            expect_equal_specs(s, b);
            free(again);
            spec_free(b);
            spec_free(s);
        }
        free(json);
    }
    EXPECT(accepted > 100);
}

/* Builds that know nothing of it read all specs but those that have it. */
TEST(verified_steps_are_written_where_there_are_any)
{
    struct spec *s = changed("'seed': 1", "'seed': 1, 'verify_every': 0");
    char *json = dump(s);
    EXPECT(s->verify_every == 0 && strstr(json, "verify") == NULL);
    free(json);
    spec_free(s);
    s = changed("'seed': 1", "'seed': 1, 'verify_every': 100");
    EXPECT_EQ(s->verify_every, 100);
    json = dump(s);
    EXPECT_HAS(json, quoted("'verify_every':100"));
    struct spec *again = parse(json);
    struct shd_err e;
    EXPECT_OK(spec_compare(s, again, &e), &e);
    free(json);
    spec_free(again);
    spec_free(s);
}

/* -- Frozen units and groups of micro-batches ------------------------------------------------- */

TEST(frozen_units_and_returns_are_derived)
{
    struct spec *s = changed("'micro_batches': 4", "'micro_batches': 12, 'accumulate': 3");
    EXPECT_EQ(s->accumulate, 3);
    EXPECT_EQ(spec_returns(s), 4);
    EXPECT(!s->units[0].frozen && !s->units[1].frozen && s->tensors[0].trainable);
    spec_free(s);
    s = changed("[256, 128]", "[256, 128], 'trainable': false");
    EXPECT(s->units[0].frozen && !s->tensors[0].trainable && !s->units[1].frozen);
    char *json = dump(s);
    struct spec *again = parse(json);
    struct shd_err e;
    EXPECT_OK(spec_compare(s, again, &e), &e);
    free(json);
    spec_free(again);
    spec_free(s);
}

/* layout: slices partition every unit, whatever the numbers. */

/* All owners' slices follow each other, cover the padded unit, and differ by a block at most. */
static void expect_partition(uint64_t elems, uint32_t owners)
{
    uint64_t next = 0, least = UINT64_MAX, most = 0;
    for (uint32_t o = 0; o < owners; o++) {
        const struct slice s = layout_slice(elems, o, owners);
        EXPECT_EQ(s.first_elem, next);
        EXPECT_EQ(s.first_elem % SHD_BLOCK_ELEMS, 0);
        EXPECT_EQ(s.elems % SHD_BLOCK_ELEMS, 0);
        next += s.elems;
        least = s.elems < least ? s.elems : least;
        most = s.elems > most ? s.elems : most;
    }
    EXPECT_EQ(next, layout_align(elems, SHD_BLOCK_ELEMS));
    EXPECT(most - least <= SHD_BLOCK_ELEMS);
}

TEST(slices_partition_units_of_special_sizes)
{
    static const uint64_t sizes[] = { 0,
                                      1,
                                      2047,
                                      2048,
                                      2049,
                                      4096,
                                      6143,
                                      6144,
                                      6145,
                                      65536,
                                      1000000,
                                      SHD_MODEL_ELEMS_MAX - 1,
                                      SHD_MODEL_ELEMS_MAX };
    static const uint32_t owners[] = { 1, 2, 3, 4, 5, 7, 8, 63, 64, 1000, 1023, SHD_OWNERS_MAX };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        for (size_t k = 0; k < ARRAY_SIZE(owners); k++)
            expect_partition(sizes[i], owners[k]);
}

TEST(slices_partition_random_units)
{
    uint64_t seed = test_seed(0x1a40);
    for (int i = 0; i < 3000; i++) {
        const uint64_t elems = test_random(&seed) >> (16 + test_random(&seed) % 48);
        expect_partition(elems, (uint32_t)(test_random(&seed) % SHD_OWNERS_MAX) + 1);
    }
}

TEST(padded_and_unpadded_sizes_give_the_same_slices)
{
    for (uint64_t elems = 1; elems < 20000; elems += 97) {
        const struct slice a = layout_slice(elems, 1, 3);
        const struct slice b = layout_slice(layout_align(elems, SHD_BLOCK_ELEMS), 1, 3);
        EXPECT(a.first_elem == b.first_elem && a.elems == b.elems);
    }
}

TEST(align_rounds_up)
{
    EXPECT_EQ(layout_align(0, 32), 0);
    EXPECT_EQ(layout_align(1, 32), 32);
    EXPECT_EQ(layout_align(32, 32), 32);
    EXPECT_EQ(layout_align(33, 32), 64);
    EXPECT(layout_align(UINT64_MAX - 4096, 4096) == UINT64_MAX - 4095);
    EXPECT_EQ(layout_blocks(0), 0);
    EXPECT_EQ(layout_blocks(1), 1);
    EXPECT_EQ(layout_blocks(2048), 1);
    EXPECT_EQ(layout_blocks(2049), 2);
}

TEST(intersect_agrees_with_counting_elements)
{
    uint64_t seed = test_seed(0x1a41);
    for (int i = 0; i < 20000; i++) {
        const struct slice s = { test_random(&seed) % 64, test_random(&seed) % 64 };
        const uint64_t first = test_random(&seed) % 64, elems = test_random(&seed) % 64;
        uint64_t count = 0, begin = 0;
        for (uint64_t x = first; x < first + elems; x++)
            if (x >= s.first_elem && x < s.first_elem + s.elems && count++ == 0)
                begin = x;
        uint64_t got = 999;
        EXPECT_EQ(layout_intersect(s, first, elems, &got), count);
        EXPECT_EQ(got, count > 0 ? begin : 999); /* untouched when empty */
    }
}

TEST(every_element_of_a_tensor_has_one_owner)
{
    for (uint32_t owners = 1; owners <= 9; owners++) {
        uint64_t sum = 0, next = 5000;
        for (uint32_t o = 0; o < owners; o++) {
            uint64_t first;
            const uint64_t n = layout_intersect(layout_slice(50000, o, owners), 5000, 33333,
                                                &first);
            if (n > 0)
                EXPECT_EQ(first, next);
            next += n;
            sum += n;
        }
        EXPECT_EQ(sum, 33333);
    }
}

TEST_MAIN()
