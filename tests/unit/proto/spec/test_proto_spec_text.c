/* The reader and the writer of specs against jansson: the same documents are taken, with the same
 * values, and the same bytes are written. */
#include "proto/spec/spec_text.h"

#include <errno.h>
#include <locale.h>
#include <math.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

static const char document[] =
    "{ \"a\": [1, -2, 0, -0, 1e3, 2.5E-3, -0.0, 9223372036854775807, 12345678901234567890.5],\r\n"
    "\t\"b\\u0041\\n\\\"\\\\\\/\\b\\f\\t\\r\": {\"x\": [], \"y\": {}, \"z\": [[[]], {}, \"\"]},\n"
    "  \"\": [true, false, null, \"\\u00e4\\u20ac\\ud83d\\ude00\", \"plain\"] }";

static bool same(const json_t *j, const struct text_value *v)
{
    const char *key;
    json_t *member;
    size_t i;
    const struct text_value *in = v + 1;
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        if (v->kind != TEXT_OBJECT || json_object_size(j) != v->count)
            return false;
        json_object_foreach((json_t *)j, key, member)
        {
            if (strcmp(in->at, key) != 0 || !same(member, in + 1) || text_member(v, key) != in + 1)
                return false;
            in += 1 + in[1].span;
        }
        return in == v + v->span;
    case JSON_ARRAY:
        if (v->kind != TEXT_ARRAY || json_array_size(j) != v->count)
            return false;
        json_array_foreach(j, i, member)
        {
            if (!same(member, in))
                return false;
            in += in->span;
        }
        return in == v + v->span;
    case JSON_STRING:
        return v->kind == TEXT_STRING && strcmp(json_string_value(j), v->at) == 0;
    case JSON_INTEGER:
        return v->kind == TEXT_INTEGER && json_integer_value(j) == strtoll(v->at, NULL, 10);
    case JSON_REAL:
        return v->kind == TEXT_REAL && json_real_value(j) == text_real(v);
    case JSON_TRUE:
        return v->kind == TEXT_TRUE;
    case JSON_FALSE:
        return v->kind == TEXT_FALSE;
    case JSON_NULL:
        return v->kind == TEXT_NULL;
    }
    return false;
}

/* Whether it was taken. */
static bool expect_as_jansson(const char *json, size_t bytes)
{
    struct text_doc doc;
    struct shd_err e = { 0 };
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, NULL);
    const int r = text_read("spec", json, bytes, &doc, &e);
    if ((root != NULL) != (r == SHD_OK) || (r == SHD_OK && !same(root, doc.values)) ||
        (r != SHD_OK && strncmp(e.text, "spec line ", 10) != 0))
        FAIL("jansson %s it, here: %s %s: %.*s", root != NULL ? "takes" : "refuses", status_name(r),
             e.text, (int)bytes, json);
    json_decref(root);
    if (r == SHD_OK)
        text_free(&doc);
    return r == SHD_OK;
}

TEST(documents_have_the_values_that_jansson_reads)
{
    EXPECT(expect_as_jansson(document, strlen(document)));
    for (size_t bytes = 0; bytes < strlen(document);
         bytes++) { /* cut off: read to its end, no more */
        char *part = malloc(bytes + 1);
        memcpy(part, document, bytes);
        EXPECT(!expect_as_jansson(part, bytes));
        free(part);
    }
}

TEST(what_jansson_refuses_is_refused)
{
    static const char *const texts[] = {
        "",
        " ",
        "1",
        "\"a\"",
        "[1,]",
        "[,1]",
        "[1 2]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{1:2}",
        "{\"a\":1 \"b\":2}",
        "[1]]",
        "[1}",
        "{\"a\":1]",
        "[[1]",
        "[01]",
        "[-]",
        "[-01]",
        "[+1]",
        "[.5]",
        "[1.]",
        "[1e]",
        "[1e+]",
        "[0x10]",
        "[1.5.5]",
        "[Infinity]",
        "[NaN]",
        "[nul]",
        "[nulll]",
        "[True]",
        "[\"a]",
        "[\"\\x\"]",
        "[\"\\u12\"]",
        "[\"\\u12g4\"]",
        "[\"\\u0000\"]",
        "[\"\\ud800\"]",
        "[\"\\udc00\"]",
        "[\"\\ud800\\u0041\"]",
        "[\"\t\"]",
        "[\"\x7f\"]",
        "[\"\xc3\xa4\"]",
        "[\"\xc3\"]",
        "[\"\xff\"]",
        "[\"\xed\xa0\x80\"]",
        "\xef\xbb\xbf[]",
        "[9223372036854775808]",
        "[-9223372036854775808]",
        "[-9223372036854775809]",
        "[1e308]",
        "[1e309]",
        "[-1e309]",
        "[1e-400]",
        "[000]",
        "[1e05]",
        "[] []",
        "[]x",
        "[]\n",
        "{\"a\":1,\"a\":1}",
        "{\"a\":{\"b\":1,\"c\":2,\"b\":3}}",
        "{\"a\":1,\"\\u0061\":1}",
    };
    int taken = 0;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        taken += expect_as_jansson(texts[i], strlen(texts[i]));
    EXPECT_EQ(taken, 7); /* the DEL, the a-umlaut, the least integer, 1e308, 1e-400, 1e05, []\n */
    EXPECT(!expect_as_jansson("[]\0", 3) && !expect_as_jansson("[\0]", 3));
    struct text_doc doc;
    struct shd_err e;
    EXPECT_STATUS(text_read("spec", "[1\0]", 4, &doc, &e),
                  SHD_EINVAL); /* jansson overlooks it there */
    EXPECT_STR(e.text, "spec byte 2: no JSON");
}

TEST(random_damage_is_taken_or_refused_as_by_jansson)
{
    static const char *const from[] = { document, example };
    uint64_t seed = test_seed(0x7e87);
    int taken = 0;
    for (int i = 0; i < 40000; i++) {
        const char *text = from[i % 2];
        const size_t bytes = strlen(text);
        char *json = malloc(bytes); /* exact: a read past the end is caught */
        memcpy(json, text, bytes);  /* NOLINT: no terminator wanted */
        for (uint64_t k = test_random(&seed) % 3 + 1; k > 0; k--)
            json[test_random(&seed) % bytes] =
                test_random(&seed) % 4 == 0
                    ? (char)(test_random(&seed) % 255 + 1)
                    : "0123456789-\"[]{},:e.\\u tfn"[test_random(&seed) % 26];
        taken += expect_as_jansson(json, bytes);
        free(json);
    }
    EXPECT(taken > 1000);
}

/* No recursion: what is nested deeply is read, and refused where jansson refuses it. */
TEST(nesting_is_bounded)
{
    char json[2 * 5000 + 1];
    for (size_t depth = 2046; depth <= 5000; depth = depth < 2050 ? depth + 1 : depth + 1000) {
        memset(json, '[', depth);
        memset(json + depth, ']', depth);
        EXPECT_EQ(expect_as_jansson(json, 2 * depth), depth <= 2048);
        json[depth] = '7';
        memset(json + depth + 1, ']', depth);
        EXPECT_EQ(expect_as_jansson(json, 2 * depth + 1), depth < 2048);
    }
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static void expect_canonical(const struct spec *s)
{
    struct shd_err e;
    char *text = NULL;
    EXPECT_OK(spec_dump(s, &text, &e), &e);
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    char *again = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    EXPECT_STR(text, again);
    json_decref(root);
    free(again);
    free(text);
}

TEST(specs_are_written_as_jansson_writes_them)
{
    static const double reals[] = { 0,      -0.0, 1,    -1,    0.02,   0.1,    1e-8,     -1e-8,
                                    1e16,   1e17, 1e22, 1e38,  -3e38,  1e-37,  0x1p-149, 5e-324,
                                    123456, 1e-4, 1e-5, 1e100, 1e-100, 100000, 1.5e300 };
    uint64_t seed = test_seed(0xd0b1e);
    struct spec *s = parse(quoted("{" HEAD "," SMALL_UNITS "}"));
    s->tensors[0].init = SPEC_INIT_NORMAL;
    for (size_t i = 0; i < 5000; i++) {
        uint64_t bits = test_random(&seed);
        double x;
        memcpy(&x, &bits, sizeof x);
        s->tensors[0].init_a = i < ARRAY_SIZE(reals) ? reals[i] : isfinite(x) ? x : 0;
        s->tensors[0].init_b = (double)(float)s->tensors[0].init_a;
        if (!isfinite(s->tensors[0].init_b))
            s->tensors[0].init_b = 7;
        s->tensors[0].shape[0] = i < 2 ? i : bits >> i % 64;
        if (s->tensors[0].shape[0] <= INT64_MAX)
            expect_canonical(s);
    }
    spec_free(s);
    s = parse(example);
    expect_canonical(s);
    spec_free(s);
}

/* A program may have set it: Python does, when it is asked to. */
TEST(a_decimal_comma_changes_nothing)
{
    struct spec *s, *again;
    struct shd_err e;
    char *point = NULL, *comma = NULL;
    if (setlocale(LC_NUMERIC, "de_DE.UTF-8") == NULL &&
        setlocale(LC_NUMERIC, "fr_FR.UTF-8") == NULL)
        SKIP("no locale with a decimal comma");
    setlocale(LC_NUMERIC, "C");
    s = parse(example);
    EXPECT_OK(spec_dump(s, &point, &e), &e);
    if (setlocale(LC_NUMERIC, "de_DE.UTF-8") == NULL)
        setlocale(LC_NUMERIC, "fr_FR.UTF-8");
    EXPECT_OK(spec_dump(s, &comma, &e), &e);
    EXPECT_OK(spec_parse(point, strlen(point), &again, &e), &e);
    setlocale(LC_NUMERIC, "C");
    EXPECT_STR(point, comma);
    EXPECT_OK(spec_compare(s, again, &e), &e);
    spec_free(again);
    spec_free(s);
    free(point);
    free(comma);
}

static int allocs_left;

static int fault_alloc(enum sys_kind kind)
{
    return kind == SYS_ALLOC && allocs_left-- == 0 ? ENOMEM : 0;
}

TEST(every_failed_allocation_of_writing_is_an_error_without_leak)
{
    struct spec *s = parse(example);
    char *text = NULL;
    int failures = 0;
    for (int r = SHD_ENOMEM; r != SHD_OK; failures += r != SHD_OK) {
        struct shd_err e;
        allocs_left = failures;
        sys_fault = fault_alloc;
        r = spec_dump(s, &text, &e);
        sys_fault = NULL;
        EXPECT(r == SHD_OK || (r == SHD_ENOMEM && text == NULL));
    }
    EXPECT_EQ(failures, 2); /* the units, and all of it */
    free(text);
    spec_free(s);
}

TEST_MAIN()
