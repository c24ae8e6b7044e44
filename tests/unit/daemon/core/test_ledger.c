/* Ledgers as bytes: where the parts lie, and what is refused of one that was found. */
#include "daemon/core/ledger.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"

#include <math.h>
#include <stdlib.h>

#include "daemon/core/step.h"
#include "daemon/core/step_rewind.h"
#include "proto/base/check.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/segment.h"
#include "proto/share/unit_window.h"
#include "proto/spec/guard.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

#define UNITS  3u
#define MICROS 5u

static struct ledger_shape shape_of(uint32_t units, uint32_t micros)
{
    return (struct ledger_shape){ .name = "model",
                                  .spec = "{\"name\":\"model\"}",
                                  .spec_bytes = 16,
                                  .owner = 1,
                                  .owners = 3,
                                  .units = units,
                                  .micros = micros,
                                  .instance = 77,
                                  .state_bytes = 4096,
                                  .chunk_count = 9 };
}

static void *zeroed(uint64_t bytes)
{
    void *memory = aligned_alloc(128, bytes);
    CHECK(memory != NULL);
    return memset(memory, 0, bytes);
}

/* One after two commits, with every kind of word in it. bytes: of the segment. */
static struct ledger make(uint64_t *ret_bytes)
{
    const struct ledger_shape shape = shape_of(UNITS, MICROS);
    struct ledger l;
    struct shd_err e;
    CHECK(ledger_bytes(&shape, ret_bytes, &e) == SHD_OK);
    ledger_init(&l, zeroed(*ret_bytes), &shape);
    atomic_store(&l.head->ready, 1);
    atomic_store(&l.head->commits, 2);
    struct ledger_record *r = &l.head->record[0];
    *r = (struct ledger_record){
        .step = 1, .updates = 2, .finite = true, .metric_count = 1, .blob_bytes = 3
    };
    r->decision.scale = 0.5f;
    for (uint32_t u = 0; u < UNITS; u++) {
        atomic_store(&l.unit[u].version, u == 0 ? 2 : 1);
        atomic_store(&l.unit[u].progress,
                     u == 0 ? ledger_progress(2, true, 1) : ledger_progress(1, true, MICROS));
        l.unit[u].updates[0] = u == 0 ? 0 : 2;
    }
    atomic_store(&l.cell[3], ledger_cell(2, LEDGER_CELL_SPILLED, SHD_BF16));
    atomic_store(&l.cell[4], ledger_cell(2, LEDGER_CELL_NONE, 0));
    atomic_store(&l.metrics[0].tag, ledger_metrics_tag(2, 4));
    return l;
}

TEST(sizes_are_whole_pages_and_grow_with_each_count)
{
    struct ledger_shape s = shape_of(1, 1);
    uint64_t bytes, more;
    struct shd_err e;
    EXPECT_OK(ledger_bytes(&s, &bytes, &e), &e);
    EXPECT_EQ(bytes % SHD_PAGE_BYTES, 0);
    EXPECT(bytes > 2 * LEDGER_BLOB_BYTES + KERN_TRAIL_BYTES);
    s.units = s.micros = 1000;
    EXPECT_OK(ledger_bytes(&s, &more, &e), &e);
    EXPECT(more >= bytes + 8 * 1000 * 1000);
    s.chunk_count += 1000000;
    EXPECT_OK(ledger_bytes(&s, &bytes, &e), &e);
    EXPECT(bytes + SHD_PAGE_BYTES > more + 8 * 1000000); /* both are rounded up */
}

/* Also of one in whose padding something lay. */
TEST(who_made_it_is_known_unless_an_older_build_did)
{
    for (int known = 0; known < 2; known++) {
        struct ledger_shape shape = shape_of(UNITS, MICROS);
        struct ledger l;
        struct shd_err e;
        uint64_t bytes;
        shape.maker = (struct ledger_maker){ known != 0, 1000, 4294967294u };
        CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK);
        ledger_init(&l, zeroed(bytes), &shape);
        const struct ledger_maker maker = ledger_maker(l.head);
        EXPECT_EQ(maker.known, known != 0);
        EXPECT_EQ(maker.uid, 1000);
        EXPECT_EQ(maker.gid, 4294967294u);
        for (uint64_t tag = 0; tag < 1000; tag++) {
            l.head->made.tag = tag * UINT64_C(0x0123456789abcdef);
            EXPECT(!ledger_maker(l.head).known);
        }
        free(l.head);
    }
}

TEST(counts_outside_the_limits_are_refused)
{
    struct ledger_shape s;
    uint64_t bytes = 1;
    struct shd_err e = { 0 };
#define REFUSED(change, name)                                \
    s = shape_of(UNITS, MICROS);                             \
    change;                                                  \
    EXPECT_STATUS(ledger_bytes(&s, &bytes, &e), SHD_ERANGE); \
    EXPECT_HAS(e.text, name)
    REFUSED(s.units = 0, "units");
    REFUSED(s.units = SHD_UNITS_MAX + 1, "units");
    REFUSED(s.micros = 0, "micros");
    REFUSED(s.micros = SHD_MICROS_MAX + 1, "micros");
    REFUSED(s.spec_bytes = UINT64_MAX, "spec_bytes");
    REFUSED(s.owners = 0, "owners");
    REFUSED(s.owner = 3, "owner");
    REFUSED(s.spec_bytes = 0, "spec_bytes");
    REFUSED(s.chunk_count = UINT64_MAX, "chunk_count");
    REFUSED(s.window.rows = GUARD_WINDOW_MAX + 2, "rows of its window");
    REFUSED(s.window.columns = GUARD_COLUMNS_MAX + 1, "columns of its window");
    EXPECT_EQ(bytes, 1); /* untouched */
}

/* Behind all else, and of what its counts make it. */
TEST(windows_of_units_are_there_where_a_guard_has_some)
{
    struct ledger_shape s = shape_of(UNITS, MICROS);
    const uint64_t window = unit_window_bytes(5, 2);
    uint64_t none, bytes;
    struct ledger l, adopted;
    struct shd_err e = { 0 };
    EXPECT_OK(ledger_bytes(&s, &none, &e), &e);
    ledger_init(&l, zeroed(none), &s);
    EXPECT(l.window == NULL);
    free(l.head);
    s.window.rows = 5;
    s.window.columns = 2;
    EXPECT_OK(ledger_bytes(&s, &bytes, &e), &e);
    EXPECT(bytes >= none && bytes <= none + SHD_PAGE_BYTES);
    ledger_init(&l, zeroed(bytes), &s);
    uint8_t *end = (uint8_t *)l.window + window;
    EXPECT((uint8_t *)l.window >= (uint8_t *)(l.chosen + 2) && end <= (uint8_t *)l.head + bytes);
    memset(l.window, 0xff, window);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(adopted.window == l.window);
    l.head->made.window.columns = 1000;
    EXPECT_STATUS(ledger_adopt(&adopted, l.head, bytes, &e), SHD_ESEGMENT);
    free(l.head);
}

TEST(parts_do_not_overlap_and_hold_what_was_given)
{
    uint64_t bytes;
    struct ledger l = make(&bytes);
    uint8_t *base = (uint8_t *)l.head;
    EXPECT_STR(l.head->name, "model");
    EXPECT(l.head->instance == 77 && l.head->bytes == bytes && l.head->owner == 1);
    EXPECT(memcmp(l.spec, "{\"name\":\"model\"}", 16) == 0);
    const struct {
        const void *at;
        uint64_t bytes;
    } parts[] = {
        { l.head, sizeof *l.head },
        { l.unit, UNITS * sizeof *l.unit },
        { (const void *)l.cell, UNITS * MICROS * sizeof *l.cell },
        { l.metrics, MICROS * sizeof *l.metrics },
        { l.trail, KERN_TRAIL_BYTES },
        { (const void *)l.chunks, 9 * sizeof *l.chunks },
        { l.spec, 16 },
        { l.blob[0], LEDGER_BLOB_BYTES },
        { l.blob[1], LEDGER_BLOB_BYTES },
    };
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        const uint64_t at = (uint64_t)((const uint8_t *)parts[i].at - base);
        EXPECT(at + parts[i].bytes <= bytes);
        if (i + 1 < ARRAY_SIZE(parts))
            EXPECT((const uint8_t *)parts[i].at + parts[i].bytes <=
                   (const uint8_t *)parts[i + 1].at);
    }
    EXPECT_EQ((uintptr_t)l.trail % 128, 0);
    free(l.head);
}

TEST(words_keep_their_fields)
{
    const uint64_t p = ledger_progress(LEDGER_STEP_MAX, true, SHD_MICROS_MAX);
    EXPECT(ledger_progress_round(p) == LEDGER_STEP_MAX && ledger_progress_started(p));
    EXPECT_EQ(ledger_progress_next(p), SHD_MICROS_MAX);
    EXPECT(!ledger_progress_started(ledger_progress(3, false, SHD_MICROS_MAX)));
    const uint64_t c = ledger_cell(LEDGER_STEP_MAX, LEDGER_CELL_SPILLED, SHD_F16);
    EXPECT(ledger_cell_round(c) == LEDGER_STEP_MAX && ledger_cell_kind(c) == LEDGER_CELL_SPILLED);
    EXPECT_EQ(ledger_cell_dtype(c), SHD_F16);
    uint64_t bytes;
    struct ledger l = make(&bytes);
    EXPECT_EQ(ledger_op(&l, 1, 0), ledger_op(&l, 0, MICROS) + 1); /* the update was the last one */
    EXPECT(ledger_op(&l, 0, 0) > 0);
    free(l.head);
}

TEST(found_ledger_is_adopted_with_everything_in_it)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), found;
    struct shd_err e;
    EXPECT_OK(ledger_adopt(&found, l.head, bytes, &e), &e);
    EXPECT(found.head == l.head && found.cell == l.cell && found.blob[1] == l.blob[1]);
    EXPECT(found.trail == l.trail && found.chunks == l.chunks && found.spec == l.spec);
    free(l.head);
}

static void expect_refused(struct ledger *l, uint64_t bytes, const char *what, int status)
{
    static struct ledger untouched;
    struct ledger found = untouched;
    struct shd_err e = { 0 };
    const int r = ledger_adopt(&found, l->head, bytes, &e);
    if (r != status || e.code != status || e.text[0] == '\0')
        FAIL("%s: %s '%s'", what, status_name(r), e.text);
    EXPECT(found.head == NULL);
    free(l->head);
}

static void begin_rewind(struct ledger *l, uint64_t step, uint64_t attempt)
{
    l->rewind->step = step;
    l->rewind->attempt = attempt;
    l->rewind->under_way = 1;
}

/* Each field alone, in a ledger that is good without it. */
TEST(ledger_that_contradicts_itself_is_refused)
{
    uint64_t bytes;
    struct ledger l;
#define BROKEN(change) \
    l = make(&bytes);  \
    change;            \
    expect_refused(&l, bytes, #change, SHD_ESEGMENT)
    struct ledger_record *r;
    BROKEN(l.head->magic++);
    BROKEN(bytes = 100);
    BROKEN(bytes -= SHD_PAGE_BYTES);
    BROKEN(memset(l.head->name, 'x', sizeof l.head->name));
    BROKEN(l.head->bytes += SHD_PAGE_BYTES);
    BROKEN(l.head->owners = 0);
    BROKEN(l.head->owner = 3);
    BROKEN(l.head->units = 0);
    BROKEN(l.head->units = UINT32_MAX);
    BROKEN(l.head->units++);
    BROKEN(l.head->micros = SHD_MICROS_MAX + 1);
    BROKEN(l.head->micros = 100);
    BROKEN(l.head->spec_bytes = UINT64_MAX);
    BROKEN(l.head->chunk_count = UINT64_MAX);
    BROKEN(l.head->trail_bytes--);
    BROKEN(l.head->units_at += 64);
    BROKEN(l.head->cells_at += 8);
    BROKEN(l.head->metrics_at = UINT64_MAX);
    BROKEN(l.head->blobs_at = 0);
    BROKEN(l.head->trail_at += 128);
    BROKEN(l.head->chunks_at += 8);
    BROKEN(l.head->spec_at = bytes);
    BROKEN(l.head->ready = 2);
    BROKEN(l.head->commits = 1); /* the record is of another step */
    BROKEN(l.head->commits = LEDGER_STEP_MAX + 1);
    BROKEN((r = l.head->record)->step = 0);
    BROKEN((r = l.head->record)->updates = 3);
    BROKEN((r = l.head->record)->metric_count = LEDGER_METRICS + 1);
    BROKEN((r = l.head->record)->blob_at = 2);
    BROKEN((r = l.head->record)->blob_bytes = LEDGER_BLOB_BYTES + 1);
    BROKEN((r = l.head->record)->sum.limb[3] = UINT64_C(1) << 32);
    BROKEN((r = l.head->record)->decision.scale = -1);
    BROKEN((r = l.head->record)->decision.lr = INFINITY);
    BROKEN((r = l.head->record)->decision.loss_scale = NAN);
    BROKEN(memset(&(r = l.head->record)->finite, 7, 1));
    BROKEN(memset(&(r = l.head->record)->decision.sets_updates, 7, 1));
    BROKEN(l.unit[1].updates[0] = 0); /* it took part in the last step */
    BROKEN(l.unit[1].updates[0] = 3);
    BROKEN(l.unit[1].version = 3);
    BROKEN(l.unit[1].version = 0);
    BROKEN(l.unit[0].progress = ledger_progress(3, true, 1));
    BROKEN(l.unit[0].progress = ledger_progress(2, true, MICROS + 1));
    BROKEN(l.unit[1].progress = ledger_progress(2, true, 1)); /* its update is not done */
    BROKEN(l.cell[3] = ledger_cell(3, LEDGER_CELL_NONE, 0));
    BROKEN(l.cell[3] = ledger_cell(2, (enum ledger_cell_kind)3, 0));
    BROKEN(l.cell[3] = ledger_cell(2, LEDGER_CELL_SPILLED, 0));
    BROKEN(l.cell[3] = ledger_cell(2, LEDGER_CELL_NONE, SHD_F32));
    BROKEN(l.metrics[4].tag = ledger_metrics_tag(3, 1));
    BROKEN(l.metrics[4].tag = ledger_metrics_tag(2, LEDGER_METRICS + 1));
    BROKEN(l.head->resets = LEDGER_RESETS_MAX + 1);
    BROKEN(l.head->beside.resets[0] = 1);
    BROKEN(l.head->promised = 4);
    BROKEN(l.rewind->under_way = 2);
    BROKEN(l.rewind->last = LEDGER_RESETS_MAX + 2);
    BROKEN(l.rewind->options = ledger_snapshot_options(1, LEDGER_SNAPSHOTS));
    BROKEN(l.rewind->under_way = 1); /* an attempt that is none */
    BROKEN(begin_rewind(&l, 0, LEDGER_RESETS_MAX + 2));
    BROKEN(begin_rewind(&l, LEDGER_STEP_MAX + 1, 1));
}

/* Of one that goes back only where it goes counts: the rest may be half of each. */
TEST(what_is_being_gone_back_from_is_not_looked_at)
{
    uint64_t bytes, step = 0;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    l.head->commits = 1;
    l.unit[1].version = 0;
    l.rewind->step = 1;
    l.rewind->attempt = 9;
    l.rewind->under_way = 1;
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(ledger_rewinding(&adopted, &step) && step == 1);
    const uint64_t updates[UNITS] = { 1, 0, 1 };
    struct rewind_record record = { .step = 1, .record = { .step = 0, .updates = 1 } };
    struct rewind_more more = { .chosen = { .micro_batches = 3, .returns = 2 } };
    fixsum_init(&record.record.sum);
    fixsum_carry(&record.record.sum);
    step_rewind_done(&adopted, &record, &more, updates, (const uint8_t *)"");
    EXPECT(!ledger_rewinding(&adopted, &step));
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(ledger_round(&adopted) == 1 + 8 && adopted.rewind->last == 9);
    EXPECT(ledger_unit_updates(&adopted, 0) == 1 && ledger_unit_updates(&adopted, 1) == 0);
    EXPECT(adopted.chosen[1].micro_batches == 3 && adopted.chosen[1].returns == 2);
    free(l.head);
}

/* As a build of version 6 or 7 would have laid it out: settings, then guard and rewind. */
static void make_old(struct ledger *l, uint32_t version, uint64_t *bytes)
{
    uint8_t *base = (uint8_t *)l->head, *set = (uint8_t *)l->guard;
    uint64_t end = layout_align((uint64_t)(set - base) + sizeof(struct ledger_set), 128);
    if (version == 7)
        end = layout_align(end + sizeof(struct ledger_guard), 128) + sizeof(struct ledger_rewind);
    l->head->version = version;
    l->head->bytes = *bytes = layout_align(end, SHD_PAGE_BYTES);
    memset(set, 0, *bytes - (uint64_t)(set - base));
}

/* A build of version 6 knows none. */
TEST(ledger_of_an_older_build_has_no_rewinds)
{
    uint64_t bytes, step;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    make_old(&l, 6, &bytes);
    EXPECT_OK(ledger_adopt(&adopted, l.head, l.head->bytes, &e), &e);
    EXPECT(adopted.rewind == NULL && adopted.set != NULL && !ledger_rewinding(&adopted, &step));
    free(l.head);
}

/* A build of version 7 knows none, and none that goes back. */
TEST(ledger_of_an_older_build_has_no_audits)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    struct decision d = { .skip = true, .guard = { .what = 1, .stop = true, .bound = 1 } };
    make_old(&l, 7, &bytes);
    EXPECT_OK(ledger_adopt(&adopted, l.head, l.head->bytes, &e), &e);
    EXPECT(adopted.audit == NULL && adopted.back == NULL && adopted.rewind != NULL);
    EXPECT(ledger_decision_room(&adopted, &d));
    d.cause = (struct decision_cause){ .unit = 1, .norm = 5 };
    EXPECT(ledger_decision_room(&adopted, &d)); /* it is not kept */
    ledger_decision_put(&adopted, 0, &d);
    ledger_decision_get(&adopted, 0, &d);
    EXPECT(d.guard.what == 1 && d.cause.unit == 0);
    d.guard.rewind = true;
    EXPECT(!ledger_decision_room(&adopted, &d));
    free(l.head);
}

TEST(audits_that_are_none_are_refused)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    const struct decision_cause cause = { .unit = 2, .norm = 5, .group = MICROS, .share = 0.5f };
    struct decision d = { .skip = true, .cause = cause }, got;
    ledger_decision_put(&l, 0, &d);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    ledger_decision_get(&adopted, 0, &got);
    EXPECT(got.cause.unit == 2 && got.cause.norm == 5 && got.cause.group == MICROS &&
           got.cause.share == 0.5f);
    struct audit_row *row = &l.audit[1].row; /* of step 1 */
    const struct audit_row good = *row;
#define NO_AUDIT(change)                                                    \
    *row = good;                                                            \
    change;                                                                 \
    EXPECT_STATUS(ledger_adopt(&adopted, l.head, bytes, &e), SHD_ESEGMENT); \
    EXPECT_HAS(e.text, "ledger says that step 1 was skipped for unit")
    NO_AUDIT(row->unit = 0);
    NO_AUDIT(row->unit = UNITS + 1);
    NO_AUDIT(row->norm = NAN);
    NO_AUDIT(row->norm = -1);
    NO_AUDIT(row->group = MICROS + 1);
    NO_AUDIT(row->share = -1);
    NO_AUDIT(memset(row->worker.name, 'x', sizeof row->worker.name));
#undef NO_AUDIT
    *row = good;
    d.cause = (struct decision_cause){ 0 }; /* the same step again: what was there is not */
    ledger_decision_put(&l, 0, &d);
    ledger_decision_get(&l, 0, &got);
    EXPECT_EQ(got.cause.unit, 0);
    free(l.head);
}

/* Words of a round are good up to that of the last reset. */
TEST(words_count_by_round)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    l.head->resets = 3;
    l.head->beside.resets[0] = 1; /* of the two commits the last one was of the second attempt */
    l.head->promised = 6;
    l.unit[0].progress = ledger_progress(5, true, 1);
    l.unit[1].progress = l.unit[2].progress = ledger_progress(2, true, MICROS);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(ledger_round(&adopted) == 5 && ledger_committed_round(&adopted) == 2);
    EXPECT(ledger_resets(&adopted) == 3 && ledger_resets_room(&adopted));
    l.unit[1].progress = ledger_progress(3, true, 1);
    EXPECT_STATUS(ledger_adopt(&adopted, l.head, bytes, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "the update before it is not done");
    free(l.head);
}

/* As a build of version 3, 4 or 5 would have laid it out. */
static void make_without_settings(struct ledger *l, uint32_t version, uint64_t *bytes)
{
    l->head->version = version;
    *bytes = layout_align((uint64_t)((uint8_t *)&l->more[2] - (uint8_t *)l->head), SHD_PAGE_BYTES);
    l->head->bytes = *bytes;
}

/* Such a build may have answered Prepare of the open step, and has not written so. */
TEST(step_of_an_older_build_is_not_given_up)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    make_without_settings(&l, 3, &bytes);
    l.head->resets = 77; /* where it has padding */
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(ledger_resets(&adopted) == 0 && !ledger_resets_room(&adopted));
    EXPECT(adopted.head->version == 3 && adopted.head->resets == 77); /* as it was */
    ledger_renew(&adopted);
    EXPECT(adopted.head->version == 4 && ledger_resets(&adopted) == 0);
    EXPECT_EQ(adopted.head->promised, ledger_round(&adopted) + 1);
    adopted.head->promised = 0;
    ledger_renew(&adopted); /* once */
    EXPECT_EQ(adopted.head->promised, 0);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(ledger_resets_room(&adopted));
    free(l.head);
}

/* It counts one number for all units, as at owners that are not upgraded yet, and goes on to. */
TEST(units_of_an_older_build_count_as_the_model)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    EXPECT(ledger_unit_updates(&l, 0) == 0 && ledger_unit_updates(&l, 1) == 2);
    make_without_settings(&l, 4, &bytes);
    l.unit[1].updates[0] = UINT64_MAX; /* where it has padding */
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    ledger_renew(&adopted);
    EXPECT(adopted.head->version == 4 && !ledger_counts_units(&adopted));
    ledger_unit_updates_next(&adopted, 1, 7);
    EXPECT(ledger_unit_updates(&adopted, 0) == 2 && ledger_unit_updates(&adopted, 1) == 2);
    atomic_store(&l.head->commits, 3);
    l.head->record[1].updates = 3;
    EXPECT_EQ(ledger_unit_updates(&adopted, 1), 3);
    free(l.head);
}

TEST(ledger_that_begins_at_a_checkpoint_has_its_counts)
{
    const struct ledger_shape shape = shape_of(UNITS, MICROS);
    const uint64_t counts[UNITS] = { 4, 0, 3 }, too_many[UNITS] = { 4, 9, 3 };
    struct ledger_start start = { .step = 5, .updates = 4 };
    uint64_t bytes;
    struct ledger l;
    struct shd_err e = { 0 };
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK);
        ledger_init(&l, zeroed(bytes), &shape);
        start.unit_updates = i == 0 ? NULL : i == 1 ? counts : too_many;
        EXPECT_STATUS(ledger_start_at(&l, &start, &e), i == 2 ? SHD_ERANGE : SHD_OK);
        for (uint32_t u = 0; i < 2 && u < UNITS; u++)
            EXPECT_EQ(ledger_unit_updates(&l, u), i == 0 ? 4 : counts[u]);
        free(l.head);
    }
    EXPECT_HAS(e.text, "9 updates of unit 1");
}

/* As a build of that version would have left it: without what lies behind the history, of which
 * there is none here. */
static void make_older(struct ledger *l, uint32_t version, uint64_t *bytes)
{
    l->head->version = version;
    *bytes = layout_align(l->head->blobs_at + 2 * LEDGER_BLOB_BYTES, SHD_PAGE_BYTES);
    l->head->bytes = *bytes;
}

TEST(another_version_is_named_and_left_alone)
{
    uint64_t bytes;
    struct ledger l = make(&bytes);
    const struct ledger_head *head;
    l.head->version = LEDGER_COMMON + 1;
    l.head->units = 0; /* may mean anything there */
    EXPECT(ledger_known(l.head, bytes, &head) && strcmp(head->name, "model") == 0);
    expect_refused(&l, bytes, "version", SHD_ENOTSUP);
}

/* The word has a version of its own, which is not taken back: what an older one has there is no
 * word. */
TEST(what_is_in_common_is_of_a_version_of_its_own)
{
    uint64_t bytes;
    struct shd_err e = { 0 };
    struct ledger l = make(&bytes), again;
    atomic_store(&l.head->made.common, 77);
    EXPECT_EQ(ledger_common(&l), 0);
    EXPECT(ledger_common_room(&l));
    ledger_set_common(&l, 5);
    EXPECT_EQ(l.head->version, LEDGER_COMMON);
    EXPECT_OK(ledger_adopt(&again, l.head, bytes, &e), &e);
    EXPECT_EQ(ledger_common(&again), 5);
    EXPECT(again.settings != NULL && again.chosen != NULL && again.back != NULL);
    ledger_set_common(&again, 0);
    EXPECT_OK(ledger_adopt(&l, l.head, bytes, &e), &e);
    EXPECT_EQ(ledger_common(&l), 0);
    l.head->version = LEDGER_ONE_COUNT;
    EXPECT(!ledger_common_room(&l));
    free(l.head);
}

/* Rows of the last `slots - 1` steps can be read, whatever slot the next row is being written to.
 */
TEST(history_is_a_ring_of_committed_steps)
{
    static struct history_slot ring[5];
    struct history_row rows[8];
    memset(ring, 0, sizeof ring);
    for (uint64_t step = 3; step < 20; step++) {
        history_put(ring, 5, &(struct history_row){ .step = step, .norm = (double)step });
        for (uint64_t commits = step; commits <= step + 1; commits++) {
            uint64_t from = 0;
            const uint64_t kept = commits - 3 < 4 ? commits - 3 : 4;
            EXPECT_EQ(history_read(ring, 5, commits, &from, rows, 8), kept);
            EXPECT_EQ(from, commits);
            for (uint64_t i = 0; i < kept; i++)
                EXPECT(rows[i].step == commits - kept + i && rows[i].norm == (double)rows[i].step);
        }
    }
    uint64_t from = 17;
    EXPECT_EQ(history_read(ring, 5, 20, &from, rows, 2), 2);
    EXPECT(from == 19 && rows[0].step == 17 && rows[1].step == 18);
    EXPECT_EQ(history_read(ring, 0, 20, &from, rows, 2), 0);
}

/* A ledger of a build without a history is adopted, and has none. */
TEST(ledger_without_a_history_is_adopted)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct history_row row;
    struct shd_err e = { 0 };
    make_older(&l, 1, &bytes);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(adopted.more == NULL);
    uint64_t from = 0;
    EXPECT_EQ(history_read(adopted.history, adopted.head->history_slots, 2, &from, &row, 1), 0);
    l.head->history_slots = 1;
    EXPECT_STATUS(ledger_adopt(&adopted, l.head, bytes, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "history_slots is 1, must be 0 to 0");
    free(l.head);
}

/* What a put says goes to the next owner as it was, also from a successor of the first. */
TEST(put_without_updates_comes_back_without)
{
    uint64_t bytes;
    struct ledger l = make(&bytes);
    struct decision got, put = { .skip = true, .put = 3, .puts = 1 };
    for (uint32_t version = 4; version <= 5; version++)
        for (uint64_t updates = 0; updates <= 3; updates += 3) {
            l.head->version = version;
            put.updates = updates;
            ledger_decision_put(&l, 0, &put);
            ledger_decision_get(&l, 0, &got);
            EXPECT_EQ(got.updates, version == 4 ? 3 : updates);
        }
    free(l.head);
}

TEST(decisions_are_kept_whole_where_there_is_room)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    struct decision got, given = { .scale = 0.5f, .lr = 3, .divisor = 7, .rate_count = 4 };
    given.rates[1] = (double)NAN;
    given.rates[3] = 0.25;
    ledger_decision_put(&l, 0, &given);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    ledger_decision_get(&adopted, 0, &got);
    EXPECT(decision_equal(&got, &given));
    l.more[0].rate_count = 3;
    expect_refused(&l, bytes, "3 rates of groups", SHD_ESEGMENT);

    l = make(&bytes);
    l.more[0].divisor = -1;
    expect_refused(&l, bytes, "divisor -1", SHD_ESEGMENT);

    l = make(&bytes);
    make_older(&l, 2, &bytes);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(!ledger_decision_room(&adopted, &given));
    given.rate_count = 0;
    given.divisor = 0;
    EXPECT(ledger_decision_room(&adopted, &given));
    ledger_decision_put(&adopted, 0, &given);
    ledger_decision_get(&adopted, 0, &got);
    EXPECT(decision_equal(&got, &given));
    free(l.head);
}

/* A ledger of a build without settings is adopted, and has no room for them. */
TEST(ledger_without_settings_is_adopted)
{
    uint64_t bytes;
    struct ledger l = make(&bytes), adopted;
    struct shd_err e = { 0 };
    make_without_settings(&l, 5, &bytes);
    EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
    EXPECT(adopted.set == NULL && adopted.more != NULL);
    free(l.head);
}

TEST(settings_that_are_none_are_refused)
{
    static const double bad[] = { -2, INFINITY, 1e39 };
    uint64_t bytes;
    struct ledger adopted;
    struct shd_err e = { 0 };
    for (size_t i = 0; i < 4 + ARRAY_SIZE(bad); i++) {
        struct ledger l = make(&bytes);
        make_old(&l, 7, &bytes);
        EXPECT_OK(ledger_adopt(&l, l.head, bytes, &e), &e);
        struct settings_old_kept *kept = &l.set->kept[1];
        l.set->kept[0].now.count = 77; /* not the one that counts */
        atomic_store(&l.set->given, 3);
        kept->now.count = kept->next.count = 1 + SETTINGS_RATES;
        for (uint32_t n = 0; n < kept->now.count; n++)
            kept->now.numbers[n] = kept->next.numbers[n] = (double)NAN;
        kept->next.numbers[0] = SETTINGS_BACK;
        EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
        if (i == 0)
            kept->now.numbers[0] = SETTINGS_BACK;
        else if (i == 1)
            kept->now.count = SETTINGS_OLD_MAX + SETTINGS_RATES;
        else if (i == 2)
            kept->next.count = 2;
        else if (i == 3)
            kept->from = LEDGER_STEP_MAX + 1;
        else
            kept->next.numbers[4] = bad[i - 4];
        expect_refused(&l, bytes, "ledger's settings", SHD_ESEGMENT);
    }
}

static struct settings settings_of_one(uint32_t index, double x)
{
    struct settings s = { .count = settings_count(1) };
    for (uint32_t i = 0; i < s.count; i++)
        s.numbers[i] = i == index ? x : (double)NAN;
    return s;
}

static int give(struct ledger *l, uint32_t index, double x, uint64_t from, struct shd_err *e)
{
    struct settings_kept room = { .waiting = 0 }, after;
    const struct settings change = settings_of_one(index, x);
    const struct settings_when when = { 2, 3, from, 0 };
    uint64_t ignored;
    const struct settings_kept *kept = ledger_settings(l, &room);
    EXPECT(kept != NULL);
    EXPECT_OK(settings_give(kept, &change, &when, &after, &ignored, e), e);
    return ledger_settings_keep(l, &after, e);
}

/* One of an older build keeps what it has room for, as that build does, and nothing else. */
TEST(older_ledgers_keep_the_settings_that_they_have_room_for)
{
    uint64_t bytes;
    struct shd_err e = { 0 };
    struct settings_kept room;
    struct settings s;
    for (uint32_t version = 6; version <= 8; version++) {
        struct ledger l = make(&bytes);
        if (version < 8)
            make_old(&l, version, &bytes);
        EXPECT_OK(ledger_adopt(&l, l.head, bytes, &e), &e);
        EXPECT((l.set != NULL) == (version < 8) && (l.settings != NULL) == (version == 8));
        EXPECT_OK(give(&l, 1, 0.5, 3, &e), &e);
        EXPECT_OK(give(&l, SETTINGS_CLIP_NORM, 2, 3, &e), &e);
        EXPECT_OK(ledger_adopt(&l, l.head, bytes, &e), &e);
        const int want = version < 8 ? SHD_ENOTSUP : SHD_OK;
        EXPECT_STATUS(give(&l, 2, 0.25, 9, &e), want); /* for another step */
        EXPECT_STATUS(give(&l, setting_micros(1), 2, 3, &e), want);
        EXPECT_STATUS(give(&l, setting_eps(1, 0), 1e-3, 3, &e), want);
        if (version < 8)
            EXPECT_HAS(e.text, "no room for micro_batches, eps, or changes");
        EXPECT_OK(ledger_adopt(&l, l.head, bytes, &e), &e);
        const struct settings_kept *kept = ledger_settings(&l, &room);
        EXPECT(kept != NULL);
        EXPECT_EQ(kept->waiting, version < 8 ? 2 : 5);
        settings_at(kept, 2, &s, NULL);
        EXPECT_EQ(s.count, 0);
        settings_at(kept, 3, &s, NULL);
        EXPECT(setting_get(&s, 1) == 0.5 && setting_get(&s, SETTINGS_CLIP_NORM) == 2);
        EXPECT_EQ(settings_micro_batches(kept, 3), version < 8 ? 0 : 2);
        free(l.head);
    }
}

TEST(settings_of_this_version_that_are_none_are_refused)
{
    uint64_t bytes;
    struct shd_err e = { 0 };
    for (int i = 0; i < 8; i++) {
        struct ledger l = make(&bytes), adopted;
        EXPECT_OK(give(&l, 1, 0.5, 3, &e), &e);
        EXPECT_OK(give(&l, 1, 0.25, 9, &e), &e);
        EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
        struct settings_kept *kept = &l.settings->kept[atomic_load(&l.settings->given) & 1];
        if (i == 0)
            kept->now.count = SETTINGS_MAX + 5;
        else if (i == 1)
            kept->now.count -= 1;
        else if (i == 2)
            kept->waiting = SETTINGS_WAITS_MAX + 1;
        else if (i == 3)
            kept->waits[1].index = kept->now.count;
        else if (i == 4)
            kept->waits[1].from = 2; /* before the one before it */
        else if (i == 5)
            kept->waits[1].from = LEDGER_STEP_MAX + 1;
        else if (i == 6)
            kept->waits[1].value = SETTINGS_STAY;
        else
            kept->now.numbers[setting_micros(1)] = 1.5;
        expect_refused(&l, bytes, "ledger's settings", SHD_ESEGMENT);
    }
}

TEST(micro_batches_of_a_decision_that_cannot_be_are_refused)
{
    uint64_t bytes;
    struct shd_err e = { 0 };
    for (int i = 0; i < 4; i++) {
        struct ledger l = make(&bytes), adopted;
        struct ledger_chosen *chosen = &l.chosen[0]; /* of two commits */
        *chosen = (struct ledger_chosen){ .micro_batches = SHD_MICROS_MAX, .eps_count = 1 };
        chosen->eps[0] = (double)NAN;
        EXPECT_OK(ledger_adopt(&adopted, l.head, bytes, &e), &e);
        if (i == 0)
            chosen->micro_batches = SHD_MICROS_MAX + 1;
        else if (i == 1)
            chosen->returns = l.head->micros + 1;
        else if (i == 2)
            chosen->eps_count = DECISION_GROUPS_MAX + 1;
        else
            chosen->eps[0] = 0;
        expect_refused(&l, bytes, "ledger's last decision", SHD_ESEGMENT);
    }
}

TEST_MAIN()
