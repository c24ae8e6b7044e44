/* What a successor finds: state that cannot be adopted, which is kept, or none; adoptions and
 * workers that take their time. The keeper is tests/lib/keeper.h's.
 */
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "daemon/base/keeper.h"
#include "daemon/core/ledger.h"
#include "proto/share/history.h"
#include "proto/spec/layout.h"
#include "tests/lib/adopt_toy.h"
#include "tests/lib/child.h"

/* -- What cannot be adopted ---------------------------------------------------------------------
 */

/* The stored ledger, mapped here. */
static struct ledger_head *stored_ledger(uint64_t *ret_bytes)
{
    int fd;
    EXPECT(keeper_ask(daemons.control, KEEPER_GIVE, 0, "-ledger", &fd) == 1 && fd >= 0);
    struct stat st;
    EXPECT_EQ(fstat(fd, &st), 0);
    *ret_bytes = (uint64_t)st.st_size;
    void *base = mmap(NULL, *ret_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    EXPECT(base != MAP_FAILED);
    return base;
}

static void restart_with(void (*spoil)(struct ledger_head *h))
{
    uint64_t bytes;
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    struct ledger_head *h = stored_ledger(&bytes);
    spoil(h);
    munmap(h, bytes);
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
}

/* Of a model with the keeper: ledger, state, what is spare and, on files, where to publish next. */
static int parts(void)
{
    return getenv("SHD_TEST_PUBLISH") != NULL ? 4 : 3;
}

/* Two steps of kinds[0], kept. */
static void start_and_train(struct past *got)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    struct pt_run run = run_of(&kinds[0]);
    *got = (struct past){ .known = { false } };
    fixture_start_kept(&daemons, 1, "");
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(&kinds[0]), &m, &e), &e);
    for (int i = 0; i < 2; i++)
        EXPECT_OK(train_step(m, &run, got, &e), &e);
    shd_close(s);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), parts());
}

static void expect_refused(int status, const char *why)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_STATUS(shd_model_open(s, kind_spec(&kinds[0]), &m, &e), status);
    EXPECT_HAS(e.text, why);
    EXPECT_HAS(e.text, "kept");
    e = (struct shd_err){ 0 };
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), &e); /* others can be had */
    shd_close(s);
}

static void expect_adopted(struct past *got)
{
    struct past want;
    struct shd_err e = { 0 };
    reference(&kinds[0], &want);
    if (!adopt_train(daemons.address, &kinds[0], got, &e))
        FAIL("%s", e.text);
    adopt_expect_same(got, &want);
}

static void leave_alone(struct ledger_head *h)
{
    (void)h;
}

static void make_newer(struct ledger_head *h)
{
    h->version += 2; /* than LEDGER_COMMON, too */
}

static void make_older(struct ledger_head *h)
{
    h->version -= 2;
}

TEST(ledger_of_another_version_is_refused_and_kept_for_its_own)
{
    struct past got;
    start_and_train(&got);
    restart_with(make_newer);
    expect_refused(SHD_ENOTSUP, "version 10");
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""),
              2 * parts()); /* and those of the other model */
    restart_with(make_older);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

static uint32_t stored_version(void)
{
    uint64_t bytes;
    struct ledger_head *h = stored_ledger(&bytes);
    const uint32_t version = h->version;
    munmap(h, bytes);
    return version;
}

static void make_3_and_spoil(struct ledger_head *h)
{
    h->version = 3;
    const uint64_t history_end = h->blobs_at + 2 * LEDGER_BLOB_BYTES +
                                 h->history_slots * sizeof(struct history_slot);
    h->bytes = layout_align(layout_align(history_end, 128) + 2 * sizeof(struct ledger_more),
                            SHD_PAGE_BYTES);
    h->state_bytes += 4096;
}

static void mend_older(struct ledger_head *h)
{
    h->state_bytes -= 4096;
}

/* Whoever goes back to the build that wrote it finds it as that one left it. One of version 4 stays
 * that for good. */
TEST(older_ledger_stays_one_until_all_of_its_model_is_adopted)
{
    struct past got;
    start_and_train(&got);
    restart_with(make_3_and_spoil);
    EXPECT_EQ(stored_version(), 3);
    expect_refused(SHD_ESEGMENT, "bytes of state");
    restart_with(mend_older);
    EXPECT_EQ(stored_version(), 4);
    expect_adopted(&got);
    restart_with(leave_alone);
    EXPECT_EQ(stored_version(), 4);
    fixture_stop(&daemons);
}

static void spoil_commits(struct ledger_head *h)
{
    atomic_fetch_add(&h->commits, 1);
}

static void mend_commits(struct ledger_head *h)
{
    atomic_fetch_sub(&h->commits, 1);
}

static void spoil_places(struct ledger_head *h)
{
    h->units_at += 128;
}

static void mend_places(struct ledger_head *h)
{
    h->units_at -= 128;
}

static void spoil_units(struct ledger_head *h)
{
    h->units -= 1;
}

static void mend_units(struct ledger_head *h)
{
    h->units += 1;
}

static void spoil_spec(struct ledger_head *h)
{
    *((char *)h + h->spec_at) = '[';
}

static void mend_spec(struct ledger_head *h)
{
    *((char *)h + h->spec_at) = '{';
}

static void spoil_state(struct ledger_head *h)
{
    h->state_bytes += 4096;
}

static void mend_state(struct ledger_head *h)
{
    h->state_bytes -= 4096;
}

static void spoil_instance(struct ledger_head *h)
{
    h->instance ^= 1;
}

static struct ledger_unit units_before[SHD_UNITS_MAX];
static bool skip_before;

static struct ledger_unit *stored_units(struct ledger_head *h)
{
    return (struct ledger_unit *)(void *)((uint8_t *)h + h->units_at);
}

/* Idle in the last step, which is to update them all the same, for the first time. (What was killed
 * may have had some of them left to update.) */
static void spoil_counts(struct ledger_head *h)
{
    struct ledger_unit *units = stored_units(h);
    memcpy(units_before, units, h->units * sizeof *units);
    for (uint32_t u = 0; u < h->units; u++) {
        atomic_store(&units[u].version, atomic_load(&h->commits) - 1);
        atomic_store(&units[u].progress, 0);
        units[u].updates[atomic_load(&h->commits) & 1] = 0;
    }
    skip_before = h->record[atomic_load(&h->commits) & 1].decision.skip;
    h->record[atomic_load(&h->commits) & 1].decision.skip = false;
}

static void mend_counts(struct ledger_head *h)
{
    memcpy(stored_units(h), units_before, h->units * sizeof *units_before);
    h->record[atomic_load(&h->commits) & 1].decision.skip = skip_before;
}

TEST(ledgers_that_contradict_themselves_are_refused_and_kept)
{
    static const struct {
        void (*spoil)(struct ledger_head *h), (*mend)(struct ledger_head *h);
        int status;
        const char *why;
    } cases[] = {
        { spoil_commits, mend_commits, SHD_ESEGMENT, "commits" },
        { spoil_places, mend_places, SHD_ESEGMENT, "not where" },
        { spoil_units, mend_units, SHD_ESEGMENT, "not where" },
        { spoil_spec, mend_spec, SHD_EINVAL, "" },
        { spoil_state, mend_state, SHD_ESEGMENT, "bytes of state" },
        { spoil_instance, spoil_instance, SHD_ESEGMENT, "instance" },
        { spoil_counts, mend_counts, SHD_ESEGMENT, "has 0 updates, and step 1 is to update it" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct past got;
        start_and_train(&got);
        restart_with(cases[i].spoil);
        expect_refused(cases[i].status, cases[i].why);
        restart_with(cases[i].mend);
        expect_adopted(&got);
        fixture_stop(&daemons);
    }
}

TEST(missing_state_segment_is_said)
{
    struct past got;
    start_and_train(&got);
    fixture_ask(&daemons, KEEPER_FORGET, 0, "-state");
    restart_with(leave_alone);
    expect_refused(SHD_ESEGMENT, "no state segment");
    fixture_stop(&daemons);
}

static uint64_t instance_found;

static void find_instance(struct ledger_head *h)
{
    instance_found = h->instance;
}

/* As a predecessor would have stored the values of a put. */
static void store_no_put(void)
{
    const struct keeper keeper = { .notify = true, .wait_us = 10 * US_PER_S };
    struct shd_err e = { 0 };
    char path[300];
    const int fd = memfd_create("no put", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    snprintf(path, sizeof path, "%s/notify0", daemons.dir);
    setenv("NOTIFY_SOCKET", path, 1);
    EXPECT_OK(keeper_store(&keeper, instance_found, KEEPER_PUT, fd, &e), &e);
    unsetenv("NOTIFY_SOCKET");
    close(fd);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4);
}

TEST(values_of_a_put_that_nobody_needs_and_can_use_go)
{
    struct past got;
    start_and_train(&got);
    restart_with(find_instance);
    const int fds = count_memfds(daemons.pids[0]);
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    store_no_put();
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 3);
    EXPECT_EQ(count_memfds(daemons.pids[0]), fds);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

/* Of the model's state and publish, as /status has it. */
static unsigned long long huge_bytes(void)
{
    struct http_reply reply = http_get(&daemons, 0, "/status");
    const char *at = reply.body != NULL ? strstr(reply.body, "\"huge\":") : NULL;
    EXPECT(at != NULL);
    const unsigned long long bytes = strtoull(at + strlen("\"huge\":"), NULL, 10);
    free(reply.text);
    return bytes;
}

TEST(huge_pages_of_a_predecessor_are_counted)
{
    static const char spec[] =
        "{\"name\":\"large\",\"seed\":1,\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},"
        "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[2048,1024]}]}]}";
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    fixture_start_kept(&daemons, 1, "");
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    shd_close(s);
    const unsigned long long before = huge_bytes();
    restart_with(leave_alone);
    EXPECT(huge_bytes() >= before / 2); /* the state is more than half of it */
    fixture_stop(&daemons);
    if (before == 0)
        SKIP("no huge pages for a memfd on this host");
}

static void make_unready(struct ledger_head *h)
{
    atomic_store(&h->ready, 0);
}

TEST(model_without_all_initial_values_is_dropped_and_made_again)
{
    struct past got;
    start_and_train(&got);
    restart_with(make_unready);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 0);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

TEST(terminated_in_good_order_goes_on_too)
{
    struct past got;
    start_and_train(&got);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_TERM, 0, ""), 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), parts());
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

/* So that a manager's limit for starts ends only one that hangs: before each part of the work. */
TEST(adoption_asks_for_time_and_says_what_it_does)
{
    struct past got;
    start_and_train(&got);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "EXTEND_TIMEOUT_USEC="), 0);
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: mapping"), 1);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: repairing"), 1);
    EXPECT(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: publishing") == 1);
    EXPECT(fixture_ask(&daemons, KEEPER_SAID, 0, "EXTEND_TIMEOUT_USEC=300000000") >= 4);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

/* -- State that is gone --------------------------------------------------------------------------
 */

/* All of step 0, as who computes it by itself does; what it read may be anything. */
static int hand_over_all(shd_model *m, struct shd_err *e)
{
    const struct shd_update update = toy_update(0);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = shd_units(m); u-- > 0;) {
            float *grad;
            int r = shd_grad(m, micro, u, &grad, e);
            if (r == SHD_OK)
                memset(grad, 0, shd_unit_elems(m, u) * sizeof *grad);
            if (r == SHD_OK)
                r = shd_return(m, micro, u, e);
            if (r != SHD_OK)
                return r;
        }
    return shd_commit(m, &update, NULL, e);
}

/* An owner whose keeper has nothing begins anew at step 0, beside another one at `steps`: a worker
 * that comes then, and one that was there, are told so, by name, and at once. So is one that is
 * late since step 0, to which both look alike: it computes of what the other owner has since, and
 * that would be all that the new one gets to sum. */
static void lose_one_owner(uint64_t steps)
{
    struct past got;
    struct shd_err e = { 0 };
    shd_session *s, *late, *slow;
    shd_model *m, *other, *first;
    const struct kind *k = &kinds[1];
    struct pt_run run = run_of(k);
    fixture_start_kept(&daemons, 2, "");
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(k), &m, &e), &e);
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &slow, &e), &e);
    EXPECT_OK(shd_model_open(slow, kind_spec(k), &first, &e), &e);
    while (shd_step(m) < steps)
        EXPECT_OK(train_step(m, &run, &got, &e), &e);
    fixture_ask(&daemons, KEEPER_KILL, 1, "");
    while (fixture_ask(&daemons, KEEPER_COUNT, 1, "") > 0)
        fixture_ask(&daemons, KEEPER_FORGET, 1, "");
    fixture_succeed(&daemons, 1, "");
    fixture_wait_up(&daemons, 1);
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &late, &e), &e);
    const uint64_t start_ms = test_now_ms();
    EXPECT_STATUS(shd_model_open(late, kind_spec(k), &other, &e), SHD_ESTEP);
    EXPECT(test_now_ms() - start_ms < TIMEOUT_MS / 2); /* not after all that it would wait */
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "cpu1 lost its state");
    shd_close(late);
    EXPECT_STATUS(train_step(m, &run, &got, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "committed state is lost");
    shd_close(s);
    EXPECT_STATUS(hand_over_all(first, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "came back with another model 'kept', at step 0");
    shd_close(slow);
    fixture_stop(&daemons);
}

TEST(owner_that_lost_its_state_is_named_at_once)
{
    lose_one_owner(1); /* looks like an owner whose commit is still to come */
    lose_one_owner(3);
}

#define LIMIT_MS test_paced(1500) /* of the one that is stopped for longer than that */

/* A process of its own, for it is stopped: computes micro-batch 0 and waits for the others'. */
static void stopped_worker(const char *address)
{
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    struct pt_run run = run_of(&kinds[1]);
    struct shd_result result = { .size = sizeof result };
    const uint32_t mine[] = { 0 };
    run.update = toy_update(0);
    int r = try_connect(address, TIMEOUT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, kind_spec(&kinds[1]), &m, &e);
    if (r == SHD_OK) /* of what it waits for from here on */
        limit_waits(s, LIMIT_MS);
    if (r == SHD_OK)
        r = pt_step(m, &run, mine, 1, &result, &e);
    if (r != SHD_OK)
        printf("  the stopped one: %s\n", e.text);
    fflush(stdout);
    _exit(r == SHD_OK ? 0 : 1);
}

static bool waits_in_prepare(void)
{
    struct http_reply reply = http_get(&daemons, 0, "/status");
    const bool waits = strstr(reply.body, "\"what\":\"prepare\"") != NULL;
    free(reply.text);
    return waits;
}

/* Whatever takes its time on a busy machine is done before it goes on: then the last unit alone is
 * missing. */
TEST(worker_that_was_stopped_has_its_time_again)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    const struct shd_update update = toy_update(0);
    fixture_start_kept(&daemons, 2, "");
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        stopped_worker(daemons.address);
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(&kinds[1]), &m, &e), &e);
    const uint32_t last = shd_units(m) - 1;
    for (uint32_t micro = 1; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            if (micro + 1 < TOY_MICROS || u != last)
                EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
    EXPECT_SOON(waits_in_prepare());
    kill(pid, SIGSTOP);
    sleep_ms((long)LIMIT_MS + (long)test_paced(1000));
    kill(pid, SIGCONT);
    sleep_ms(100); /* it looks how late it is */
    EXPECT_OK(shd_return_none(m, TOY_MICROS - 1, last, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    shd_close(s);
    expect_well(pid);
    fixture_stop(&daemons);
}

TEST_MAIN()
