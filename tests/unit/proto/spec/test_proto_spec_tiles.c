/* spec: units that are cut into tiles, what they are called, and what of them is whole. */
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define CUT                                                                                    \
    "{" HEAD ",'units':[{'name':'a','tensors':[{'name':'x','shape':[7]}]},"                    \
    "{'name':'fc','tiles':3,'uses':['a'],'tensors':[{'name':'w','shape':[8,5]},"               \
    "{'name':'b','shape':[4]}]},{'name':'z','uses':['fc','a'],'tensors':[{'name':'y','shape':" \
    "[2]}]}]}"

TEST(a_unit_becomes_its_tiles)
{
    struct spec *s = parse(quoted(CUT));
    static const char *const names[] = { "a", "fc/0", "fc/1", "fc/2", "z" };
    EXPECT_EQ(s->unit_count, 5);
    EXPECT_EQ(s->tensor_count, 8);
    EXPECT_EQ(s->elems, 7 + 40 + 4 + 2);
    for (uint32_t u = 0; u < 5; u++)
        EXPECT_STR(s->units[u].name, names[u]);
    /* 8 rows: 2, 3 and 3; 4 of them: 1, 1 and 2 */
    static const uint64_t rows[] = { 2, 1, 3, 1, 3, 2 }, first[] = { 0, 0, 2, 1, 5, 2 };
    for (uint32_t i = 0; i < 6; i++) {
        const struct spec_tensor *t = &s->tensors[1 + i];
        const bool vector = i % 2 == 1;
        EXPECT(t->unit == 1 + i / 2 && s->units[t->unit].tile == i / 2);
        EXPECT_STR(t->of, vector ? "b" : "w");
        EXPECT(t->shape[0] == rows[i] && t->first_row == first[i]);
        EXPECT_EQ(t->elems, rows[i] * (vector ? 1 : 5));
        EXPECT_EQ(spec_whole_first(t), first[i] * (vector ? 1 : 5));
        EXPECT_EQ(spec_whole_elems(t), vector ? 4 : 40);
        EXPECT_EQ(spec_whole_size(t, 0), vector ? 4 : 8);
        EXPECT(spec_whole_begins(t) == (i < 2));
    }
    EXPECT_STR(s->tensors[5].name, "w/2");
    EXPECT(s->units[2].uses_count == 1 && s->units[2].uses[0] == 0);
    EXPECT(s->units[4].uses_count == 4 && s->units[4].uses[2] == 3 && s->units[4].uses[3] == 0);
    EXPECT(s->tensors[0].of == NULL && s->units[0].tiles == 0 && s->units[1].tiles == 3);
    spec_free(s);
}

TEST(what_is_written_has_the_tensors_whole)
{
    struct spec *s = parse(quoted(CUT));
    struct shd_err e;
    char *text, *again_text;
    EXPECT_OK(spec_dump(s, &text, &e), &e);
    EXPECT_HAS(text, "{\"name\":\"fc\",\"tiles\":3,\"uses\":[\"a\"],\"tensors\":[{\"name\":\"w\","
                     "\"shape\":[8,5],");
    EXPECT_HAS(text, "\"uses\":[\"fc\",\"a\"]");
    EXPECT(strchr(text, '/') == NULL);
    struct spec *again = parse(text);
    EXPECT_OK(spec_compare(s, again, &e), &e);
    EXPECT_OK(spec_dump(again, &again_text, &e), &e);
    EXPECT_STR(text, again_text);
    spec_free(again);
    spec_free(s);
    free(text);
    free(again_text);
}

/* Builds of before reads what has none. */
TEST(one_tile_is_none)
{
    struct spec *one = parse(quoted("{" HEAD ",'units':[{'name':'u','tiles':1,'tensors':["
                                    "{'name':'t','shape':[3]}]}]}"));
    struct spec *none = parse(quoted("{" HEAD "," SMALL_UNITS "}"));
    struct shd_err e;
    char *text;
    EXPECT_OK(spec_compare(none, one, &e), &e);
    EXPECT_OK(spec_dump(one, &text, &e), &e);
    EXPECT(strstr(text, "tiles") == NULL && strstr(text, "/0") == NULL);
    free(text);
    spec_free(one);
    spec_free(none);
}

TEST(other_tiles_are_another_model)
{
    struct spec *three = parse(quoted(CUT)), *two = parse(quoted(CUT));
    struct spec *whole = parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':["
                                      "{'name':'t','shape':[3]}]}]}"));
    struct spec *cut = parse(quoted("{" HEAD ",'units':[{'name':'u','tiles':2,'tensors':["
                                    "{'name':'t','shape':[3]}]}]}"));
    struct shd_err e;
    EXPECT_OK(spec_compare(three, two, &e), &e);
    EXPECT_STATUS(spec_compare(whole, cut, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "unit 'u': tiles is 2, the open model has 1");
    EXPECT_STATUS(spec_compare(cut, whole, &e), SHD_ESPEC);
    EXPECT_STR(e.text, "unit 'u': tiles is 1, the open model has 2");
    EXPECT(!spec_whole_is(&cut->tensors[1], 1, (const uint64_t[]){ 2 }));
    EXPECT(spec_whole_is(&cut->tensors[1], 1, (const uint64_t[]){ 3 }));
    EXPECT(!spec_whole_is(&cut->tensors[1], 2, (const uint64_t[]){ 3, 1 }));
    spec_free(three);
    spec_free(two);
    spec_free(whole);
    spec_free(cut);
}

TEST(initial_values_have_the_key_of_the_whole_tensor)
{
    struct spec *whole = parse(quoted("{" HEAD ",'units':[{'name':'u','tensors':["
                                      "{'name':'t','shape':[3]}]}]}"));
    struct spec *cut = parse(quoted("{" HEAD ",'units':[{'name':'v','tiles':3,'tensors':["
                                    "{'name':'t','shape':[3]}]}]}"));
    for (uint32_t t = 0; t < 3; t++)
        EXPECT_EQ(spec_tensor_key(cut, &cut->tensors[t]),
                  spec_tensor_key(whole, &whole->tensors[0]));
    spec_free(whole);
    spec_free(cut);
}

/* 2^48 rows times 65,536 tiles are past 64 bits. */
TEST(rows_of_the_largest_tensor_are_counted)
{
    struct spec *s = parse(quoted("{" HEAD ",'units':[{'name':'u','tiles':65536,'tensors':["
                                  "{'name':'t','shape':[281474976710655]}]}]}"));
    uint64_t next = 0;
    for (uint32_t t = 0; t < s->tensor_count; t++) {
        EXPECT_EQ(s->tensors[t].first_row, next);
        EXPECT(s->tensors[t].elems - (UINT64_C(1) << 32) + 1 <= 1);
        next += s->tensors[t].elems;
    }
    EXPECT_EQ(next, UINT64_C(281474976710655));
    spec_free(s);
}

struct bad {
    const char *units; /* with single quotes */
    int status;
    const char *text;
};

#define UNIT(more, shape) "{'name':'u'," more ",'tensors':[{'name':'t','shape':" shape "}]}"
#define GROUPS                                             \
    ",'groups':[{'name':'m','optimizer':{'kind':'muon'}}," \
    "{'name':'l','optimizer':{'kind':'lamb'}},{'name':'f','optimizer':{'kind':'adafactor'}}]"
#define LONG "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn"

TEST(errors_name_what_cannot_be_cut)
{
    static const struct bad cases[] = {
        { UNIT("'tiles':0", "[4]"), SHD_ERANGE, "units[0].tiles is 0, must be 1 to 65536" },
        { UNIT("'tiles':'2'", "[4]"), SHD_EINVAL, "units[0].tiles must be an integer" },
        { UNIT("'tiles':5", "[4,8]"), SHD_ERANGE,
          "units[0].tensors[0]: 't' has 4 rows, and its unit is cut into 5 tiles of whole rows" },
        { UNIT("'tiles':2", "[]"), SHD_ERANGE, "'t' has 1 row, and its unit is cut into 2 tiles" },
        { UNIT("'tiles':2,'place':'whole'", "[4]"), SHD_EINVAL,
          "units[0].tiles is 2, and the unit's place is whole" },
        { "{'name':'u','tiles':2,'tensors':[{'name':'t','shape':[4,4],'group':'m'}]}", SHD_EINVAL,
          "units[0].tensors[0]: 't' is of group 'm', whose optimizer, muon, is of whole tensors, "
          "and its unit is cut into 2 tiles" },
        { "{'name':'u','tiles':2,'tensors':[{'name':'t','shape':[4,4],'group':'l'}]}", SHD_EINVAL,
          "'t' is of group 'l', whose optimizer, lamb, is of whole" },
        { "{'name':'u','tiles':2,'tensors':[{'name':'t','shape':[4,4],'group':'f'}]}", SHD_EINVAL,
          "units[0].tiles is 2, and the unit's optimizer is adafactor" },
        { UNIT("'tiles':2", "[4]") "," UNIT("'tiles':3", "[4]"), SHD_EINVAL,
          "units[1].name 'u' is the name of unit 0 too" },
        { UNIT("'tiles':2", "[4]") ",{'name':'v','tensors':[{'name':'t','shape':[4]}]}", SHD_EINVAL,
          "units[0].tensors[0].name 't' is the name of tensor 2 too" },
        { UNIT("'tiles':2", "[4]") ",{'name':'v','tiles':2,'tensors':[{'name':'t','shape':[4]}]}",
          SHD_EINVAL, "units[1].tensors[0].name 't' is the name of tensor 0 too" },
        { UNIT("'tiles':2,'uses':['u']", "[4]"), SHD_EINVAL, "units[0].uses[0] is 'u', the unit" },
        { UNIT("'tiles':2,'uses':['u/1']", "[4]"), SHD_EINVAL, "'u/1', there is no such unit" },
        { UNIT("'tiles':17", "[17]") ",{'name':'v','uses':['u'],'tensors':[{'name':'s','shape':[4]"
                                     "}]}",
          SHD_ERANGE,
          "units[1].uses[0] is 'u', which is cut into 17 tiles: the unit would use 17, at most "
          "16" },
        { UNIT("'tiles':2", "[4]") ",{'name':'v','uses':['u','u'],'tensors':[{'name':'s','shape':[4"
                                   "]}]}",
          SHD_EINVAL, "units[1].uses[1] 'u' is listed twice" },
        { UNIT("'tiles':65536", "[65536]") ",{'name':'v','tensors':[{'name':'s','shape':[4]}]}",
          SHD_ERANGE,
          "units[1]: the model reaches 65537 units with its tiles, the limit is 65536" },
        { "{'name':'" LONG LONG LONG "123456','tiles':2,'tensors':[{'name':'t','shape':[4]}]}",
          SHD_ERANGE,
          "units[0].name has 126 bytes, and with the number of a tile behind it, '/0', "
          "128: it may have 127" },
        { "{'name':'u','tiles':2,'tensors':[{'name':'" LONG LONG LONG "123456','shape':[4]}]}",
          SHD_ERANGE, "units[0].tensors[0].name has 126 bytes" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const bool grouped = strstr(cases[i].units, "group") != NULL;
        const char *json = quoted("{'name':'m','micro_batches':1,'optimizer':{'kind':'adamw'}%s,"
                                  "'units':[%s]}",
                                  grouped ? GROUPS : "", cases[i].units);
        struct spec *s = NULL;
        struct shd_err e = { 0 };
        const int r = spec_parse(json, strlen(json), &s, &e);
        if (r != cases[i].status || strstr(e.text, cases[i].text) == NULL)
            FAIL("%s: expected '%s', got %s '%s'", cases[i].units, cases[i].text, status_name(r),
                 e.text);
    }
}

TEST_MAIN()
