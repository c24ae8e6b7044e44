/* spec: every error names the path and the value, and leaves nothing behind. */
#include "proto/spec/spec.h"

#include <errno.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

static void expect_error(const char *json, int status, const char *text)
{
    struct shd_err e = { 0 };
    struct spec *spec = (struct spec *)&e;
    const int r = spec_parse(json, strlen(json), &spec, &e);
    if (r != status || strstr(e.text, text) == NULL)
        FAIL("%s: expected %s '%s', got %s '%s'", json, status_name(status), text, status_name(r),
             e.text);
    EXPECT_EQ(e.code, status);
    EXPECT(spec == (struct spec *)&e); /* untouched */
    EXPECT_STATUS(spec_parse(json, strlen(json), &spec, NULL), status);
}

struct bad {
    const char *json; /* with single quotes */
    int status;
    const char *text;
};

static void expect_all_bad(const struct bad *cases, size_t count, const char *frame)
{
    for (size_t i = 0; i < count; i++)
        expect_error(quoted(frame, cases[i].json), cases[i].status, cases[i].text);
}

TEST(malformed_json_names_line_and_column)
{
    static const struct bad cases[] = {
        { "", SHD_EINVAL, "spec line 1 column" },
        { "{", SHD_EINVAL, "spec line 1 column" },
        { "\n{'a' 1}", SHD_EINVAL, "spec line 2 column" },
        { "{} x", SHD_EINVAL, "end of file expected" },
        { "{'name':'a','name':'b'}", SHD_EINVAL, "duplicate object key" },
        { "{'groups':[{'name':'a','name':'a'}]}", SHD_EINVAL, "duplicate object key" },
        { "[]", SHD_EINVAL, "spec must be an object, is an array" },
        { "{'seed':9223372036854775808}", SHD_ERANGE, "integers (seeds too) end at 2^63-1" },
        { "{'seed':1e999}", SHD_ERANGE, "must be finite" },
        { "{'name':'a\\u0000b'}", SHD_EINVAL, "spec line 1" },
        { "{'name':NaN}", SHD_EINVAL, "spec line 1" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases), "%s");
    struct shd_err e;
    struct spec *s;
    EXPECT_STATUS(spec_parse("{}\0", 3, &s, &e), SHD_EINVAL);
    EXPECT_STATUS(spec_parse("{\"name\":\"\xff\"}", 12, &s, &e), SHD_EINVAL);
}

TEST(fields_of_the_model_are_checked)
{
    static const struct bad cases[] = {
        { "", SHD_EINVAL, "name is missing" },
        { "'nmae':'m'", SHD_EINVAL, "nmae is not a known field; did you mean name or ema?" },
        { "'name':1", SHD_EINVAL, "name must be a string, is an integer" },
        { "'name':''", SHD_ERANGE, "name has 0 bytes, must be 1 to 127" },
        { "'name':'a b'", SHD_EINVAL, "name has byte 0x20 at 1" },
        { "'name':'a/b'", SHD_EINVAL, "name has byte 0x2f at 1" },
        { "'name':'a\\\\b'", SHD_EINVAL, "name has byte 0x5c at 1" },
        { "'name':'\\u0007'", SHD_EINVAL, "name has byte 0x7 at 0" },
        { "'name':'\\u00e4'", SHD_EINVAL, "name has byte 0xc3 at 0" },
        { "'name':'..'", SHD_EINVAL, "name is '..', which names a directory" },
        { "'name':'m','seed':-1", SHD_ERANGE, "seed is -1, must be 0 to 9223372036854775807" },
        { "'name':'m','seed':1.0", SHD_EINVAL, "seed must be an integer, is a real number" },
        { "'name':'m','seed':null", SHD_EINVAL, "seed must be an integer, is null" },
        { "'name':'m'", SHD_EINVAL, "micro_batches is missing" },
        { "'name':'m','micro_batches':0", SHD_ERANGE, "micro_batches is 0, must be 1 to 4096" },
        { "'name':'m','micro_batches':4097", SHD_ERANGE, "micro_batches is 4097, must be" },
        { "'name':'m','micro_batches':4294967297", SHD_ERANGE, "micro_batches is 4294967297" },
        { "'name':'m','micro_batches':[]", SHD_ERANGE, "micro_batches has 0 entries" },
        { "'name':'m','micro_batches':[4]", SHD_EINVAL, "micro_batches[0] must be an array" },
        { "'name':'m','micro_batches':[[0]]", SHD_ERANGE, "micro_batches[0] has 1 entr" },
        { "'name':'m','micro_batches':[[1,4]]", SHD_ERANGE,
          "micro_batches[0][0] is 1, must be 0 " },
        { "'name':'m','micro_batches':[[0,4],[0,8]]", SHD_ERANGE,
          "micro_batches[1][0] is 0, must be 1 to 8589934591" },
        { "'name':'m','micro_batches':[[0,4],[8589934592,8]]", SHD_ERANGE, "micro_batches[1][0]" },
        { "'name':'m','micro_batches':[[0,4],[9,0]]", SHD_ERANGE,
          "micro_batches[1][1] is 0, must be 1 to 4096" },
        { "'name':'m','micro_batches':[[0,4],[9,6]],'accumulate':4", SHD_EINVAL,
          "accumulate is 4, must divide micro_batches (6)" },
        { "'name':'m','micro_batches':4,'micro_batches_max':3", SHD_ERANGE,
          "micro_batches_max is 3, must be 4 to 4096" },
        { "'name':'m','micro_batches':[[0,4],[9,8]],'micro_batches_max':4", SHD_ERANGE,
          "micro_batches_max is 4, must be 8 to 4096" },
        { "'name':'m','micro_batches':4,'micro_batches_max':4097", SHD_ERANGE,
          "micro_batches_max is 4097, must be 4 to 4096" },
        { "'name':'m','micro_batches':4,'micro_batches_max':6,'accumulate':4", SHD_EINVAL,
          "accumulate is 4, must divide micro_batches_max (6)" },
        { "'name':'m','micro_batches':1,'publish':'f64'", SHD_EINVAL,
          "publish is 'f64', must be f32, bf16 or f16" },
        { "'name':'m','micro_batches':1,'publish':16", SHD_EINVAL, "publish must be a string" },
        { "'name':'m','micro_batches':1", SHD_EINVAL, "optimizer is missing" },
        { HEAD, SHD_EINVAL, "units is missing" },
        { HEAD ",'units':{}", SHD_EINVAL, "units must be an array, is an object" },
        { HEAD ",'units':[]", SHD_ERANGE, "units has 0 entries, must be 1 to 65536" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases), "{%s}");
}

TEST(fields_of_the_optimizer_are_checked)
{
    static const struct bad cases[] = {
        { "3", SHD_EINVAL, "optimizer must be an object, is an integer" },
        { "{}", SHD_EINVAL, "optimizer.kind is missing" },
        { "{'kind':'adam'}", SHD_EINVAL, "optimizer.kind is 'adam', must be adamw, sgd or lion" },
        { "{'kind':'muon'}", SHD_EINVAL,
          "optimizer.kind is 'muon', which is of a group (groups[].optimizer): the model's" },
        { "{'kind':true}", SHD_EINVAL, "optimizer.kind must be a string, is a boolean" },
        { "{'kind':'sgd','beta1':0}", SHD_EINVAL, "optimizer.beta1 is not a known field" },
        { "{'kind':'adamw','momentum':0}", SHD_EINVAL, "optimizer.momentum is not a known field" },
        { "{'kind':'lion','eps':1}", SHD_EINVAL, "optimizer.eps is not a known field" },
        { "{'kind':'adamw','lr':1}", SHD_EINVAL,
          "optimizer.lr is not a known field: the learning rate is the worker's" },
        { "{'kind':'adamw','beta1':1}", SHD_ERANGE, "optimizer.beta1 is 1, must be 0 to 0.9999" },
        { "{'kind':'adamw','beta1':-0.1}", SHD_ERANGE, "optimizer.beta1 is -0.1" },
        { "{'kind':'adamw','beta2':0.99999999}", SHD_ERANGE, "optimizer.beta2 is 0.99999999" },
        { "{'kind':'adamw','beta2':'a'}", SHD_EINVAL, "optimizer.beta2 must be a number" },
        { "{'kind':'adamw','eps':0}", SHD_ERANGE, "optimizer.eps is 0, must be 1.17549435e-38" },
        { "{'kind':'adamw','eps':1e39}", SHD_ERANGE, "optimizer.eps is" },
        { "{'kind':'sgd','momentum':1}", SHD_ERANGE, "optimizer.momentum is 1" },
        { "{'kind':'sgd','order':'any'}", SHD_EINVAL, "order is 'any', must be shardd or torch" },
        { "{'kind':'adamw','moments':'bf16'}", SHD_EINVAL,
          "optimizer.moments is 'bf16', must be f32 or int8" },
        { "{'kind':'adamw','moments':8}", SHD_EINVAL, "optimizer.moments" },
        { "{'kind':'lion','order':'torch'}", SHD_EINVAL, "'torch', and PyTorch has no lion" },
        { "{'kind':'sgd','nesterov':true}", SHD_EINVAL,
          "optimizer.nesterov is there in torch's order alone: add \"order\": \"torch\"" },
        { "{'kind':'adamw','order':'shardd','decay':'coupled'}", SHD_EINVAL,
          "optimizer.decay is there in torch's order alone" },
        { "{'kind':'adamw','order':'torch','nesterov':true}", SHD_EINVAL,
          "optimizer.nesterov is not a known field" },
        { "{'kind':'sgd','order':'torch','decay':'none'}", SHD_EINVAL,
          "optimizer.decay is 'none', must be coupled or decoupled" },
        { "{'kind':'sgd','order':'torch','nesterov':true}", SHD_EINVAL, "needs a momentum" },
        { "{'kind':'sgd','order':'torch','dampening':-1}", SHD_ERANGE, "dampening is -1" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases), "{'name':'m','micro_batches':1,'optimizer':%s}");
}

TEST(fields_of_groups_are_checked)
{
    static const struct bad cases[] = {
        { "{}", SHD_EINVAL, "groups must be an array, is an object" },
        { "[]", SHD_ERANGE, "groups has 0 entries, must be 1 to 64" },
        { "[1]", SHD_EINVAL, "groups[0] must be an object, is an integer" },
        { "[{}]", SHD_EINVAL, "groups[0].name is missing" },
        { "[{'name':'a','lr':1}]", SHD_EINVAL,
          "groups[0].lr is not a known field; did you mean lr_scale?" },
        { "[{'name':'a'},{'name':'a'}]", SHD_EINVAL,
          "groups[1].name 'a' is the name of group 0 too" },
        { "[{'name':'a','lr_scale':-1}]", SHD_ERANGE, "groups[0].lr_scale is -1, must be 0 to" },
        { "[{'name':'a','weight_decay':1e300}]", SHD_ERANGE, "groups[0].weight_decay is" },
        { "[{'name':'a','idle':'none'}]", SHD_EINVAL,
          "groups[0].idle is 'none', must be zero or skip" },
        { "[{'name':'a','idle':1}]", SHD_EINVAL, "groups[0].idle must be a string" },
        { "[{'name':'a','weight_decay':'x'}]", SHD_EINVAL,
          "groups[0].weight_decay must be a number, is a string" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases), "{" HEAD ",'groups':%s,'units':[]}");
}

TEST(fields_of_units_are_checked)
{
    static const struct bad cases[] = {
        { "7", SHD_EINVAL, "units[1] must be an object, is an integer" },
        { "{'name':'b','tensor':[]}", SHD_EINVAL, "units[1].tensor is not a known field" },
        { "{'tensors':[]}", SHD_EINVAL, "units[1].name is missing" },
        { "{'name':'a','tensors':[]}", SHD_EINVAL, "units[1].name 'a' is the name of unit 0 too" },
        { "{'name':'b'}", SHD_EINVAL, "units[1].tensors is missing" },
        { "{'name':'b','tensors':[]}", SHD_ERANGE, "units[1].tensors has 0 entries, must be 1" },
        { "{'name':'b','tensors':[3]}", SHD_EINVAL, "units[1].tensors[0] must be an object" },
        { "{'name':'b','uses':'a','tensors':[{'name':'u','shape':[1]}]}", SHD_EINVAL,
          "units[1].uses must be an array" },
        { "{'name':'b','uses':[0],'tensors':[{'name':'u','shape':[1]}]}", SHD_EINVAL,
          "units[1].uses[0] must be a string" },
        { "{'name':'b','uses':['c'],'tensors':[{'name':'u','shape':[1]}]}", SHD_EINVAL,
          "units[1].uses[0] is 'c', there is no such unit" },
        { "{'name':'b','uses':['b'],'tensors':[{'name':'u','shape':[1]}]}", SHD_EINVAL,
          "units[1].uses[0] is 'b', the unit itself" },
        { "{'name':'b','uses':['a','a'],'tensors':[{'name':'u','shape':[1]}]}", SHD_EINVAL,
          "units[1].uses[1] 'a' is listed twice" },
        { "{'name':'b','uses':['a','a','a','a','a','a','a','a','a','a','a','a','a','a','a','a',"
          "'a'],'tensors':[{'name':'u','shape':[1]}]}",
          SHD_ERANGE, "units[1].uses has 17 entries, must be 0 to 16" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{" HEAD ",'units':[{'name':'a','tensors':[{'name':'t','shape':[1]}]},%s]}");
}

TEST(fields_of_tensors_are_checked)
{
    static const struct bad cases[] = {
        { "{'shape':[1]}", SHD_EINVAL, "units[0].tensors[1].name is missing" },
        { "{'name':'t','shape':[1]}", SHD_EINVAL,
          "units[0].tensors[1].name 't' is the name of tensor 0 too" },
        { "{'name':'u'}", SHD_EINVAL, "units[0].tensors[1].shape is missing" },
        { "{'name':'u','shape':4}", SHD_EINVAL, "tensors[1].shape must be an array" },
        { "{'name':'u','shape':[1,1,1,1,1,1,1,1,1]}", SHD_ERANGE, "shape has 9 entries" },
        { "{'name':'u','shape':[2,0]}", SHD_ERANGE, "tensors[1].shape[1] is 0, must be 1 to" },
        { "{'name':'u','shape':[-3]}", SHD_ERANGE, "tensors[1].shape[0] is -3, must be" },
        { "{'name':'u','shape':[2.0]}", SHD_EINVAL, "tensors[1].shape[0] must be an integer" },
        { "{'name':'u','shape':[281474976710657]}", SHD_ERANGE, "shape[0] is 281474976710657" },
        { "{'name':'u','shape':[16777216,16777217]}", SHD_ERANGE,
          "shape[1]: 16777216 times 16777217 elements exceed the limit of 281474976710656" },
        { "{'name':'u','shape':[4294967296,4294967296]}", SHD_ERANGE, "exceed the limit" },
        { "{'name':'u','shape':[281474976710656]}", SHD_ERANGE,
          "units[0].tensors[1]: the model reaches 281474976710688 elements with padding" },
        { "{'name':'u','shape':[1],'dtype':'f32'}", SHD_EINVAL,
          "units[0].tensors[1].dtype is not a known field" },
        { "{'name':'u','shape':[1],'group':'x'}", SHD_EINVAL,
          "units[0].tensors[1].group is 'x', there is no such group" },
        { "{'name':'u','shape':[1],'init':1}", SHD_EINVAL, "tensors[1].init must be an array" },
        { "{'name':'u','shape':[1],'init':[]}", SHD_ERANGE, "tensors[1].init has 0 entries" },
        { "{'name':'u','shape':[1],'init':[1]}", SHD_EINVAL, "init[0] must be a string" },
        { "{'name':'u','shape':[1],'init':['zero']}", SHD_EINVAL, "init[0] is 'zero', must be" },
        { "{'name':'u','shape':[1],'init':['const']}", SHD_ERANGE, "const takes 1 numbers, has 0" },
        { "{'name':'u','shape':[1],'init':['normal',0]}", SHD_ERANGE, "normal takes 2 numbers" },
        { "{'name':'u','shape':[1],'init':['const',1,2]}", SHD_ERANGE, "takes 1 numbers, has 2" },
        { "{'name':'u','shape':[1],'init':['const','a']}", SHD_EINVAL, "init[1] must be a number" },
        { "{'name':'u','shape':[1],'init':['const',1e39]}", SHD_ERANGE, "init[1] is" },
        { "{'name':'u','shape':[1],'init':['normal',0,-1]}", SHD_ERANGE, "init[2] is -1, must be" },
        { "{'name':'u','shape':[1],'init':['uniform',1,0.5]}", SHD_ERANGE,
          "init[2] is 0.5, must be 1 to" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{" HEAD ",'units':[{'name':'a','tensors':[{'name':'t','shape':[1]},%s]}]}");
}

TEST(group_may_be_left_out_only_when_there_is_one)
{
    spec_free(parse(quoted("{" HEAD ",'groups':[{'name':'a'}]," SMALL_UNITS "}")));
    spec_free(parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':"
                           "[{'name':'t','shape':[1],'group':'default'}]}]}")));
    expect_error(quoted("{" HEAD ",'groups':[{'name':'a'},{'name':'b'}]," SMALL_UNITS "}"),
                 SHD_EINVAL, "units[0].tensors[0].group is missing, the model has 2 groups");
}

TEST(groups_and_frozen_tensors_are_checked)
{
#define FROZEN "{'name':'b','shape':[1],'trainable':false}"
    static const struct bad cases[] = {
        { "'accumulate':0," SMALL_UNITS, SHD_ERANGE, "accumulate is 0" },
        { "'verify_every':-1," SMALL_UNITS, SHD_ERANGE, "verify_every is -1" },
        { "'verify_every':true," SMALL_UNITS, SHD_EINVAL, "verify_every must be" },
        { "'accumulate':7," SMALL_UNITS, SHD_ERANGE, "accumulate is 7" },
        { "'accumulate':4," SMALL_UNITS, SHD_EINVAL, "4, must divide micro_batches (6)" },
        { "'units':[{'name':'u','tensors':[{'name':'a','shape':[1],'trainable':1}]}]", SHD_EINVAL,
          "units[0].tensors[0].trainable must be true or false" },
        { "'units':[{'name':'u','tensors':[{'name':'a','shape':[1]}," FROZEN "]}]", SHD_EINVAL,
          "units[0].tensors[1]: 'b' is frozen, 'a' of the same unit is not" },
        { "'units':[{'name':'u','tensors':[" FROZEN "]}]", SHD_EINVAL, "every tensor is frozen" },
        { "'groups':[{'name':'g'},{'name':'h','idle':'skip'}],'units':[{'name':'u','tensors':["
          "{'name':'a','shape':[1],'group':'g'},{'name':'b','shape':[1],'group':'h'}]}]",
          SHD_EINVAL,
          "units[0].tensors[1]: 'b' is of group 'h', whose idle is \"skip\", 'a' of the same unit "
          "of "
          "'g'" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{'name':'m','micro_batches':6,'optimizer':{'kind':'sgd'},%s}");
}

TEST(means_are_checked)
{
#define MEAN_GROUP "'groups':[{'name':'g'},{'name':'s','optimizer':{'kind':'mean'}}],"
#define OF_MEAN    "{'name':'c','shape':[1],'group':'s'}"
#define MEAN_UNIT  "{'name':'b','tensors':[" OF_MEAN "]}"
#define OTHER_UNIT "{'name':'u','tensors':[{'name':'a','shape':[1],'group':'g'}]}"
    static const struct bad cases[] = {
        { "'groups':[{'name':'g','optimizer':{'kind':'sgd'}}]," SMALL_UNITS, SHD_EINVAL,
          "groups[0].optimizer.kind is 'sgd', must be mean, muon, lamb or adafactor" },
        { "'groups':[{'name':'g','optimizer':'mean'}]," SMALL_UNITS, SHD_EINVAL,
          "groups[0].optimizer must be an object" },
        { "'groups':[{'name':'g','optimizer':{'kind':'mean','beta1':0}}]," SMALL_UNITS, SHD_EINVAL,
          "groups[0].optimizer.beta1 is not a known field" },
        { "'groups':[{'name':'g','optimizer':{'kind':'mean'},'lr_scale':2}]," SMALL_UNITS,
          SHD_EINVAL, "groups[0].lr_scale is 2, and group 'g' is a mean: it has none" },
        { "'groups':[{'name':'g','optimizer':{'kind':'mean'},'weight_decay':2}]," SMALL_UNITS,
          SHD_EINVAL, "groups[0].weight_decay is 2" },
        { "'groups':[{'name':'g','optimizer':{'kind':'mean'},'idle':'zero'}]," SMALL_UNITS,
          SHD_EINVAL, "groups[0].idle is 'zero', and group 'g' is a mean" },
        { "'groups':[{'name':'g','optimizer':{'kind':'mean'}}]," SMALL_UNITS, SHD_EINVAL,
          "every tensor is frozen or a mean" },
        { MEAN_GROUP "'units':[{'name':'u','tensors':[{'name':'a','shape':[1],'group':'g'}," OF_MEAN
                     "]}]",
          SHD_EINVAL, "units[0].tensors[1]: 'c' is of group 's', 'a' of the same unit of 'g'" },
        { MEAN_GROUP "'units':[" OTHER_UNIT ",{'name':'b','tensors':[{'name':'c','shape':[1],"
                     "'group':'s','trainable':false}]}]",
          SHD_EINVAL, "units[1].tensors[0]: 'c' is frozen, and its group 's' is a mean" },
        { "'accumulate':2," MEAN_GROUP "'units':[" OTHER_UNIT "," MEAN_UNIT "]", SHD_EINVAL,
          "accumulate is 2, and group 's' is a mean" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{'name':'m','micro_batches':6,'optimizer':{'kind':'sgd'},%s}");
}

#define ADAFACTOR(fields, more, tensors)                                                   \
    "'groups':[{'name':'f'},{'name':'g','optimizer':{'kind':'adafactor'" fields "}}]" more \
    ",'units':[{'name':'u','tensors':[{'name':'a','shape':[4,4],'group':'g'}" tensors "]}]"

/* Of the group, and of its units, all of whose tensors it updates, and which have no more. */
TEST(groups_of_adafactor_are_checked)
{
    static const struct bad cases[] = {
        { ADAFACTOR(",'eps':0.1", "", ""), SHD_EINVAL,
          "groups[1].optimizer.eps is not a known field" },
        { ADAFACTOR(",'beta2_decay':0.8", "", ""), SHD_ERANGE,
          "groups[1].optimizer.beta2_decay is 0.8" },
        { ADAFACTOR(",'eps1':1e-30", "", ""), SHD_ERANGE, "groups[1].optimizer.eps1 is 1e-30" },
        { ADAFACTOR(",'d':0.5", "", ""), SHD_ERANGE, "groups[1].optimizer.d is 0.5" },
        { ADAFACTOR("", ",'ema':0.9", ""), SHD_EINVAL,
          "units[0] is of group 'g', whose optimizer is adafactor, and the model keeps a moving "
          "average (ema)" },
        { ADAFACTOR("", "", ",{'name':'b','shape':[4],'group':'f'}"), SHD_EINVAL,
          "units[0].tensors[1]: 'b' is of group 'f', 'a' of the same unit of 'g', and the "
          "optimizer "
          "of one of them is adafactor: give them units of their own" },
        { ADAFACTOR("", "", ",{'name':'u:adafactor','shape':[4],'group':'g'}"), SHD_EINVAL,
          "Adafactor's statistics are called 'u:adafactor', which is the name of tensor 1 too" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{'name':'m','micro_batches':6,'optimizer':{'kind':'sgd'},%s}");
}

/* Of the group, and of its tensors, which are matrices that one owner has whole. */
TEST(groups_of_muon_are_checked)
{
#define MUON(fields)  "'groups':[{'name':'g','optimizer':{'kind':'muon'" fields "}}]," SMALL_UNITS
#define MUON_OF(unit) "'groups':[{'name':'g','optimizer':{'kind':'muon'}}],'units':[" unit "]"
    static const struct bad cases[] = {
        { MUON(",'beta1':0.9"), SHD_EINVAL, "groups[0].optimizer.beta1 is not a known field" },
        { MUON(",'momentum':1"), SHD_ERANGE, "groups[0].optimizer.momentum is 1, must be 0 to" },
        { MUON(",'eps':0"), SHD_ERANGE, "groups[0].optimizer.eps is 0" },
        { MUON(",'ns_steps':0"), SHD_ERANGE, "groups[0].optimizer.ns_steps is 0, must be 1 to 99" },
        { MUON(",'ns_steps':100"), SHD_ERANGE, "groups[0].optimizer.ns_steps is 100" },
        { MUON(",'nesterov':1"), SHD_EINVAL, "groups[0].optimizer.nesterov must be" },
        { MUON(",'ns_coefficients':[1,2]"), SHD_ERANGE,
          "groups[0].optimizer.ns_coefficients has 2 entries, must be 3 to 3" },
        { MUON(",'ns_coefficients':[1,2,'c']"), SHD_EINVAL,
          "groups[0].optimizer.ns_coefficients[2] must be a number" },
        { MUON(",'adjust_lr_fn':'none'"), SHD_EINVAL,
          "groups[0].optimizer.adjust_lr_fn is 'none', must be original, match_rms_adamw or "
          "spectral_unclamped" },
        { MUON_OF("{'name':'u','tensors':[{'name':'a','shape':[4,4]},{'name':'b','shape':[3]}]}"),
          SHD_EINVAL, "units[0].tensors[1]: 'b' has 1 dimensions, and group 'g' is of Muon" },
        { MUON_OF("{'name':'u','tensors':[{'name':'a','shape':[2,4,4]}]}"), SHD_EINVAL,
          "units[0].tensors[0]: 'a' has 3 dimensions" },
        { MUON_OF("{'name':'u','place':'spread','tensors':[{'name':'a','shape':[4,4]}]}"),
          SHD_EINVAL,
          "units[0].place is 'spread', and the unit has tensors that Muon, LAMB or Adafactor "
          "updates" },
        { "'groups':[{'name':'g','optimizer':{'kind':'lamb','eps':0}}]," SMALL_UNITS, SHD_ERANGE,
          "groups[0].optimizer.eps is 0" },
        { "'groups':[{'name':'g','optimizer':{'kind':'lamb','momentum':0}}]," SMALL_UNITS,
          SHD_EINVAL, "groups[0].optimizer.momentum is not a known field" },
        { "'groups':[{'name':'g','optimizer':{'kind':'lamb'}}]," SMALL_UNITS, SHD_EINVAL,
          "whose optimizer, lamb, keeps two moments, and the model's, sgd, one: say adamw" },
        { "'units':[{'name':'u','place':'here','tensors':[{'name':'a','shape':[4]}]}]", SHD_EINVAL,
          "units[0].place is 'here', must be spread or whole" },
        { "'units':[{'name':'u','place':1,'tensors':[{'name':'a','shape':[4]}]}]", SHD_EINVAL,
          "units[0].place must be a string" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{'name':'m','micro_batches':6,'optimizer':{'kind':'sgd'},%s}");
}

/* Muon's momentum and LAMB's moments are fp32. */
TEST(whole_tensors_have_no_moments_in_8_bits)
{
#define OWN(optimizer) "'groups':[{'name':'f'},{'name':'g','optimizer':" optimizer "}]," TWO_UNITS
#define TWO_UNITS                                                                         \
    "'units':[{'name':'u','tensors':[{'name':'a','shape':[4,4],'group':'g'},{'name':'b'," \
    "'shape':[4],'group':'f'}]}]"
    static const struct bad cases[] = {
        { OWN("{'kind':'muon'}"), SHD_EINVAL,
          "groups[1].optimizer is muon, whose state is fp32, and the model's are in 8 bits "
          "(optimizer.moments: int8)" },
        { OWN("{'kind':'lamb'}"), SHD_EINVAL,
          "groups[1].optimizer is lamb, whose state is fp32, and the model's are in 8 bits" },
        { OWN("{'kind':'adafactor'}"), SHD_EINVAL,
          "groups[1].optimizer is adafactor, whose state is fp32, and the model's are in 8 bits" },
        { OWN("{'kind':'muon','moments':'int8'}"), SHD_EINVAL,
          "groups[1].optimizer.moments is not a known field" },
        { OWN("{'kind':'lamb','moments':'int8'}"), SHD_EINVAL,
          "groups[1].optimizer.moments is not a known field" },
    };
    expect_all_bad(cases, ARRAY_SIZE(cases),
                   "{'name':'m','micro_batches':6,'optimizer':{'kind':'adamw','moments':'int8'},"
                   "%s}");
}

TEST(names_are_limited_to_127_bytes)
{
    char name[160];
    memset(name, 'n', sizeof name);
    name[127] = 0;
    spec_free(parse(quoted(
        "{'name':'%s','micro_batches':1,'optimizer':{'kind':'sgd'}," SMALL_UNITS "}", name)));
    name[127] = 'n';
    name[128] = 0;
    expect_error(quoted("{'name':'%s'}", name), SHD_ERANGE, "name has 128 bytes, must be 1 to 127");
}

TEST(long_unknown_fields_are_named_in_part)
{
    char key[2000];
    memset(key, 'k', sizeof key - 1);
    key[sizeof key - 1] = 0;
    expect_error(quoted("{'%s':1}", key), SHD_EINVAL, "kkkk is not a known field");
}

TEST(documents_above_the_limit_are_refused)
{
    char *json = calloc(1, SPEC_JSON_BYTES_MAX + 2);
    memset(json, ' ', SPEC_JSON_BYTES_MAX + 1);
    expect_error(json, SHD_ERANGE, "spec has 67108865 bytes, the limit is 67108864");
    free(json);
}

/* Small in bytes and large once it is parsed: refused before that. */
TEST(documents_of_more_values_than_a_spec_has_are_refused)
{
    static const struct {
        const char *part, *error;
    } cases[] = { { "[],", "JSON has 2000000 arrays and objects, the limit is 1310720" },
                  { "{},", "JSON has 2000000 arrays and objects, the limit is 1310720" },
                  { "0,0,0,0,", "JSON has 8000000 commas, the limit is 7864320" } };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const size_t bytes = strlen(cases[i].part);
        char *json = malloc(2000000 * bytes + 1);
        for (size_t k = 0; k < 2000000; k++)
            memcpy(json + k * bytes, cases[i].part, bytes);
        json[2000000 * bytes] = 0;
        expect_error(json, SHD_ERANGE, cases[i].error);
        free(json);
    }
    static const char head[] = "{\"name\":\"\\\"";
    char *text = malloc(2000014);
    memset(text, '[', 2000014);
    memcpy(text, head, sizeof head - 1);
    snprintf(text + 2000011, 3, "\"}");
    expect_error(text, SHD_ERANGE, "name has 2000001 bytes"); /* what is text does not count */
    free(text);
}

/* units units of tensors tensors each. */
static char *big_json(uint32_t units, uint32_t tensors)
{
    const size_t bytes = (size_t)units * tensors * 40 + (size_t)units * 60 + 1000;
    char *json = malloc(bytes);
    size_t used = (size_t)snprintf(json, bytes,
                                   "{\"name\":\"m\",\"micro_batches\":1,\"optimizer\":{\"kind\":"
                                   "\"sgd\"},\"units\":[");
    for (uint32_t u = 0; u < units; u++) {
        used += (size_t)snprintf(json + used, bytes - used, "%s{\"name\":\"%x\",\"tensors\":[",
                                 u > 0 ? "," : "", u);
        for (uint32_t t = 0; t < tensors; t++)
            used += (size_t)snprintf(json + used, bytes - used,
                                     "%s{\"name\":\"%x.%x\",\"shape\":[9]}", t > 0 ? "," : "", u,
                                     t);
        used += (size_t)snprintf(json + used, bytes - used, "]}");
    }
    snprintf(json + used, bytes - used, "]}");
    return json;
}

TEST(largest_number_of_units_is_accepted)
{
    char *json = big_json(SHD_UNITS_MAX, 1);
    struct spec *s = parse(json);
    EXPECT_EQ(s->unit_count, SHD_UNITS_MAX);
    EXPECT_STR(s->tensors[65535].name, "ffff.0");
    spec_free(s);
    free(json);
    json = big_json(SHD_UNITS_MAX + 1, 1);
    expect_error(json, SHD_ERANGE, "units has 65537 entries, must be 1 to 65536");
    free(json);
}

TEST(canonical_form_above_the_limit_is_an_error_of_dump)
{
    char *json = big_json(1, 100);
    struct spec *s = parse(json);
    struct shd_err e;
    char *dump = NULL;
    char *name = malloc((1 << 20) + 1);
    memset(name, 'n', 1 << 20);
    name[1 << 20] = 0;
    for (uint32_t t = 0; t < 100; t++) {
        free(s->tensors[t].name);
        s->tensors[t].name = name;
    }
    EXPECT_STATUS(spec_dump(s, &dump, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "the limit is 67108864");
    EXPECT(dump == NULL);
    for (uint32_t t = 1; t < 100; t++)
        s->tensors[t].name = NULL;
    spec_free(s);
    free(json);
}

TEST(more_tensors_than_there_may_be_are_refused)
{
    char *json = big_json(65, SHD_TENSORS_MAX / 64);
    expect_error(json, SHD_ERANGE,
                 "units[64].tensors: the model reaches 266240 tensors, the limit is 262144");
    free(json);
}

TEST(largest_model_is_accepted_and_a_little_more_is_not)
{
    spec_free(parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':[{'name':'t',"
                           "'shape':[16777216,16777216]}]}]}")));
    expect_error(quoted("{" HEAD ",'units':[{'name':'u','tensors':[{'name':'t',"
                        "'shape':[16777216,16777216]}]},"
                        "{'name':'v','tensors':[{'name':'w','shape':[1]}]}]}"),
                 SHD_ERANGE, "units[1].tensors[0]: the model reaches 281474976710657 elements");
}

/* -- Running out of memory ------------------------------------------------------------------- */

static int allocs_left;

static int fault_alloc(enum sys_kind kind)
{
    return kind == SYS_ALLOC && allocs_left-- == 0 ? ENOMEM : 0;
}

TEST(every_failed_allocation_is_an_error_without_leak)
{
    int failures = 0;
    for (int nth = 0; nth < 100; nth++) {
        struct shd_err e;
        struct spec *s = NULL;
        allocs_left = nth;
        sys_fault = fault_alloc;
        const int r = spec_parse(example, strlen(example), &s, &e);
        sys_fault = NULL;
        if (r == SHD_OK) {
            spec_free(s);
            break;
        }
        EXPECT_STATUS(r, SHD_ENOMEM);
        EXPECT(s == NULL);
        failures++;
    }
    /* text, its values, spec, name, ramp, groups + 2 names, units as written + 2 and their order,
     * units, tensors + 2 and theirs */
    EXPECT_EQ(failures, 17);
}

TEST_MAIN()
