/* What shardctl writes to terminals: sizes, times and counts at the edges of their units, names
 * from outside cleaned, tables; and a daemon's status document, whole, torn and hostile. */
#include <locale.h>

#include "client/ctl/base/status_doc.h"
#include "client/ctl/base/text.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

/* -- Numbers --------------------------------------------------------------------------------- */

struct number {
    double n;
    const char *text;
};

static void expect_numbers(const char *(*fn)(double, char *), const struct number *cases,
                           size_t count)
{
    char buf[TEXT_BYTES];
    for (size_t i = 0; i < count; i++) {
        EXPECT_STR(fn(cases[i].n, buf), cases[i].text);
        EXPECT(strlen(buf) < TEXT_BYTES);
    }
}

TEST(sizes_change_their_unit_at_1024)
{
    static const struct number cases[] = {
        { 0, "0 B" },
        { 1023, "1023 B" },
        { 1024, "1.0 KiB" },
        { 1536, "1.5 KiB" },
        { 99.9 * 1024, "99.9 KiB" },
        { 100 * 1024, "100 KiB" },
        { 1024 * 1024 - 1, "1024 KiB" },
        { 1024 * 1024, "1.0 MiB" },
        { 0x1p30, "1.0 GiB" },
        { 0x1p40, "1.0 TiB" },
        { 0x1p50, "1.0 PiB" },
        { 0x1p63, "8192 PiB" },
        { 1e300, "8.88e+284 PiB" },
        { -1, "-" },
        { NAN, "-" },
        { INFINITY, "-" },
    };
    char buf[TEXT_BYTES];
    expect_numbers(text_bytes, cases, ARRAY_SIZE(cases));
    EXPECT_STR(text_size(UINT64_C(3) << 20, buf), "3.0 MiB");
}

TEST(times_change_their_form_at_a_hundred_seconds_an_hour_and_a_day)
{
    static const struct number cases[] = {
        { -3, "0.0 s" },
        { 0, "0.0 s" },
        { 0.34, "0.3 s" },
        { 99.9, "99.9 s" },
        { 100, "1:40" },
        { 247, "4:07" },
        { 3599.9, "59:59" },
        { 3600, "1:00:00" },
        { 11529, "3:12:09" },
        { 86399, "23:59:59" },
        { 86400, "1 d 0 h" },
        { 12 * 86400 + 3 * 3600, "12 d 3 h" },
        { 1e12, "11574074 d 1 h" },
        { 1.1e12, "-" },
        { NAN, "-" },
    };
    expect_numbers(text_time, cases, ARRAY_SIZE(cases));
}

TEST(counts_are_whole_and_numbers_have_four_digits)
{
    static const struct number counts[] = {
        { 0, "0" },   { 128, "128" },    { 999999999999999, "999999999999999" },
        { -7, "-7" }, { 1e15, "1e+15" }, { 1.3e20, "1.3e+20" },
        { NAN, "-" }, { INFINITY, "-" },
    };
    static const struct number numbers[] = {
        { 2.41349, "2.413" }, { 0, "0" }, { 123456, "1.235e+05" }, { NAN, "-" }
    };
    expect_numbers(text_count, counts, ARRAY_SIZE(counts));
    expect_numbers(text_number, numbers, ARRAY_SIZE(numbers));
}

/* -- Names from outside ---------------------------------------------------------------------- */

static void need_utf8(void)
{
    if (setlocale(LC_ALL, "C.UTF-8") == NULL)
        SKIP("no locale C.UTF-8");
}

TEST(what_a_terminal_would_obey_is_a_question_mark)
{
    char buf[64];
    need_utf8();
    EXPECT(text_is_utf8());
    EXPECT_STR(text_clean("plain", buf, sizeof buf), "plain");
    EXPECT_STR(text_clean("a\x1b[31mb\tc\x7f", buf, sizeof buf), "a?[31mb?c?");
    EXPECT_STR(text_clean("\u00e9\u20ac\U0001f600", buf, sizeof buf), "\u00e9\u20ac\U0001f600");
    EXPECT_STR(text_clean("a\u202eb\ufeffc\u200bd", buf, sizeof buf), "a?b?c?d"); /* directions */
    EXPECT_STR(text_clean("\xc2\x9b", buf, sizeof buf), "?"); /* an escape of 8 bits */
}

TEST(what_is_no_utf8_is_a_question_mark_a_byte)
{
    char buf[64];
    need_utf8();
    EXPECT_STR(text_clean("\xff\xfe", buf, sizeof buf), "??");
    EXPECT_STR(text_clean("\xc0\x80", buf, sizeof buf), "??");      /* longer than it need be */
    EXPECT_STR(text_clean("\xed\xa0\x80", buf, sizeof buf), "???"); /* half a pair */
    EXPECT_STR(text_clean("\xf4\x90\x80\x80", buf, sizeof buf), "????"); /* beyond the last */
    EXPECT_STR(text_clean("\xe2\x82", buf, sizeof buf), "??");           /* cut */
    setlocale(LC_ALL, "C");
    EXPECT_STR(text_clean("\u00e9x", buf, sizeof buf), "?x"); /* as one, though none can be shown */
}

TEST(texts_are_cut_at_whole_characters)
{
    char buf[8];
    need_utf8();
    memset(buf, 'x', sizeof buf);
    EXPECT_STR(text_clean("12\u20ac4", buf, 5), "12");
    EXPECT_STR(text_clean("12\u20ac4", buf, 6), "12\u20ac");
    EXPECT_STR(text_clean("abc", buf, 1), "");
    EXPECT_EQ(buf[7], 'x');
    EXPECT_EQ(text_width("a\u20acb"), 3);
    EXPECT_EQ(text_width("\u4e2d"), 2);
}

/* -- Tables and quotes ----------------------------------------------------------------------- */

static char printed[512];

static FILE *print_begin(void)
{
    memset(printed, 0, sizeof printed);
    FILE *f = fmemopen(printed, sizeof printed, "w");
    CHECK(f != NULL);
    return f;
}

TEST(columns_are_as_wide_as_their_widest_cell)
{
    struct table t;
    need_utf8();
    table_init(&t, (const char *[]){ "NAME", "N" }, 2);
    EXPECT_EQ(table_row(&t, (const char *[]){ "a\u20acbcde", "1" }), 1);
    EXPECT_EQ(table_row(&t, (const char *[]){ "b", "22" }), 1);
    FILE *f = print_begin();
    table_print(&t, "> ", f);
    fclose(f);
    EXPECT_STR(printed, "> NAME    N\n> a\u20acbcde  1\n> b       22\n");
    table_deinit(&t);
}

TEST(a_table_without_rows_is_nothing_and_a_full_one_takes_no_more)
{
    struct table t;
    table_init(&t, (const char *[]){ "NAME" }, 1);
    FILE *f = print_begin();
    table_print(&t, "", f);
    fclose(f);
    EXPECT_STR(printed, "");
    for (unsigned i = 1; i < TABLE_ROWS_MAX; i++)
        EXPECT_EQ(table_row(&t, (const char *[]){ "a cell that is longer than there is room for" }),
                  1);
    EXPECT_EQ(table_row(&t, (const char *[]){ "x" }), 0);
    EXPECT_EQ(strlen(t.cells[1][0]), TABLE_CELL_BYTES_MAX - 1);
    table_deinit(&t);
}

TEST(quotes_survive_a_shell)
{
    FILE *f = print_begin();
    text_quote("it's $HOME\\", f);
    fclose(f);
    EXPECT_STR(printed, "it'\\''s $HOME\\");
}

/* -- Status documents ------------------------------------------------------------------------ */

static struct doc *parse(const char *json, bool with_tools)
{
    struct shd_err e = { 0 };
    struct doc *d = NULL;
    EXPECT_OK(doc_parse(json, strlen(json), with_tools, &d, NULL, &e), &e);
    return d;
}

static void expect_refused(const char *json, const char *why)
{
    struct shd_err e = { 0 };
    struct doc *d = NULL;
    EXPECT_STATUS(doc_parse(json, strlen(json), true, &d, NULL, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, why);
}

static const char example[] =
    "{\"schema\":2,\"device\":\"cpu0\",\"version\":\"0.9\",\"isa\":\"avx2\",\"keeper\":\"systemd\","
    "\"pid\":7,\"uptime_s\":1.5,\"threads\":4,\"stale_ms\":12,"
    "\"kernels\":[{\"work\":\"adamw bf16\",\"isa\":\"avx2\",\"ns\":0.2,\"beside\":\"avx512\","
    "\"beside_ns\":0.25,\"ratio\":0.8},{\"work\":\"lion "
    "f32\",\"isa\":\"avx512\",\"beside\":\"avx2\","
    "\"ratio\":0.99}],"
    "\"models\":[{\"name\":\"gpt\",\"phase\":\"open\",\"step\":5,\"owner\":1,\"owners\":2,"
    "\"units\":[{\"name\":\"emb\"},{\"name\":\"blk\"}],\"micro_batches\":4,\"hold_step\":9,"
    "\"expected\":8,\"returned\":3,\"waiting\":1,"
    "\"bytes\":{\"state\":100,\"publish\":20,\"inbox\":3,\"board\":4,\"ledger\":5,\"spill\":6},"
    "\"rates\":{\"steps_per_s\":2,\"returns_per_s\":16,\"bytes_per_s\":1e6},"
    "\"loss\":2.5,\"grad_norm\":0.25,"
    "\"checkpoint\":{\"state\":\"writing\",\"step\":4,\"bytes_done\":1,\"bytes_total\":4}}],"
    "\"sessions\":[{\"id\":1,\"name\":\"w\",\"role\":\"worker\",\"state\":\"running\",\"path\":"
    "\"mapped\",\"pid\":9,\"uid\":0,\"age_s\":3,\"slots\":2,\"slots_waiting\":1,"
    "\"now\":{\"what\":\"forward\",\"unit\":1,\"micro\":2,\"step\":5,\"since_s\":0.5}},"
    "{\"name\":\"tool\",\"role\":\"admin\",\"pid\":10}],"
    "\"waits\":[{\"kind\":\"slot\",\"text\":\"w waits\",\"since_s\":2,\"who\":{\"pid\":9,\"name\":"
    "\"w\"},\"on\":[{\"pid\":11,\"name\":\"v\",\"state\":\"stopped\"}]}],"
    "\"errors\":[{\"text\":\"first\"},{\"text\":\"last\"}]}";

TEST(each_field_of_a_document_is_where_it_belongs)
{
    double kinds[DOC_MEMORY];
    struct doc *d = parse(example, false);
    const struct doc_model *m = doc_main_model(d);
    EXPECT(m != NULL);
    EXPECT_STR(d->device, "cpu0");
    EXPECT_STR(d->keeper, "systemd");
    EXPECT(d->schema == 2 && d->pid == 7 && d->uptime_s == 1.5 && d->threads == 4 &&
           d->stale_ms == 12);
    EXPECT_STR(m->checkpoint, "writing step 4 25 %");
    EXPECT(m->step == 5 && m->owner == 1 && m->owners == 2 && m->units == 2 && m->hold_step == 9);
    EXPECT(m->micro_batches == 4 && m->expected == 8 && m->returned == 3 && m->waiting == 1);
    EXPECT(m->steps_per_s == 2 && m->returns_per_s == 16 && m->bytes_per_s == 1e6);
    EXPECT(m->loss == 2.5 && m->norm == 0.25);
    EXPECT(doc_bytes(d, kinds) == 138 && kinds[DOC_STATE] == 100 && kinds[DOC_SPILL] == 6);
    EXPECT_STR(d->kernels, "adamw bf16 avx2 (0.80 of avx512), lion f32 avx512 (0.99 of avx2)");
    EXPECT_STR(d->error, "last");
    EXPECT_STR(d->refused, "");
    EXPECT_EQ(d->wait_count, 1);
    EXPECT_STR(d->waits[0].on[0].state, "stopped");
    EXPECT(d->waits[0].since_s == 2 && d->waits[0].who.pid == 9 && d->waits[0].on_count == 1);
    doc_free(d);
}

TEST(sessions_say_what_they_do_and_tools_are_shown_when_asked_for)
{
    struct doc *d = parse(example, false);
    EXPECT_EQ(d->session_count, 1);
    const struct doc_session *s = &d->sessions[0];
    EXPECT_STR(s->now.what, "forward");
    EXPECT_STR(s->now.unit, "blk"); /* by its index: there is one model */
    EXPECT(s->now.micro == 2 && s->now.step == 5 && s->now.since_s == 0.5);
    EXPECT(s->id == 1 && s->pid == 9 && s->uid == 0 && s->age_s == 3 && s->slots == 2 &&
           s->slots_waiting == 1);
    doc_free(d);
    d = parse(example, true);
    EXPECT_EQ(d->session_count, 2);
    EXPECT_STR(d->sessions[1].role, "admin");
    doc_free(d);
}

TEST(what_is_missing_or_of_another_type_is_not_known)
{
    struct doc *d = parse("{\"schema\":2,\"pid\":\"7\",\"device\":5,\"models\":[3,{\"step\":\"x\","
                          "\"bytes\":[],\"status\":\"SHD_EIO\",\"name\":\"m\"},null],"
                          "\"sessions\":[{\"now\":{\"unit\":12}}],\"waits\":[{\"on\":[1]}]}",
                          true);
    EXPECT(isnan(d->pid) && isnan(d->stale_ms));
    EXPECT_STR(d->device, "");
    EXPECT_EQ(d->model_count, 1); /* what is no object is left out */
    EXPECT(isnan(d->models[0].step) && isnan(d->models[0].bytes[DOC_STATE]));
    EXPECT(doc_bytes(d, (double[DOC_MEMORY]){ 0 }) == 0); /* the sum is of what is known */
    EXPECT_STR(d->refused, "model 'm' has failed: SHD_EIO");
    EXPECT_STR(d->sessions[0].now.unit, "12"); /* no list of units has it */
    EXPECT(isnan(d->waits[0].on[0].pid));
    doc_free(d);
}

TEST(what_is_no_status_is_an_error_that_says_so)
{
    expect_refused("{", "the answer is no JSON");
    expect_refused("[]", "it has no schema number");
    expect_refused("{\"schema\":\"2\"}", "it has no schema number");
    expect_refused("{\"schema\":2,\"models\":{}}", "'models' is no list");
    expect_refused("{\"schema\":2,\"errors\":1}", "'errors' is no list");
}

TEST_MAIN()
