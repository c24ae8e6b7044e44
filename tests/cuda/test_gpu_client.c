/* Workers and owners on GPUs and on the host, in every mix: all come to what a run in one process
 * on the host ("local:") comes to, by the path that was to be expected, and copy the bytes they
 * say. Nothing here ran on hardware (gpu_worker.h). */
#include "tests/cuda/gpu_worker.h"

/* -- The same bits everywhere -------------------------------------------------------------------
 */

/* What a strategy copies on the copy path is the same wherever from and to. Shared: [SHD_DDP + 1]
 */
static uint64_t *copied;

/* Of one run. */
static void expect_bytes(const struct worker *w, enum shd_path path, const struct shd_stats *run)
{
    uint64_t *want = &copied[w->policy.strategy];
    EXPECT_EQ(run->bytes_unpinned, 0);
    if (path == SHD_PATH_COPY) {
        *want = *want == 0 ? run->bytes_copied : *want;
        EXPECT(*want >= run->bytes_fetched + run->bytes_returned); /* with padding */
        EXPECT_EQ(run->bytes_copied, *want);
    } else if (w->policy.strategy == SHD_ZERO3 && w->model.accumulate <= 1 &&
               w->policy.grad_dtype == 0) {
        EXPECT_EQ(run->bytes_copied, 0);
    }
}

static struct shd_stats minus(struct shd_stats a, const struct shd_stats *b)
{
    a.bytes_copied -= b->bytes_copied;
    a.bytes_fetched -= b->bytes_fetched;
    a.bytes_returned -= b->bytes_returned;
    return a;
}

/* What owners keep of a step for a reader is in the host's memory, wherever they and it are. */
static void expect_pin(shd_model *m)
{
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
    for (uint32_t u = 0; shd_param_dtype(m) == SHD_F32 && u < shd_units(m); u++) {
        float *values = malloc(shd_unit_elems(m, u) * sizeof *values);
        EXPECT_OK(shd_get(m, u, SHD_PARAMS, values, NULL, NULL, &e), &e);
        EXPECT_EQ(memcmp(values, shd_pinned(m, u), shd_unit_elems(m, u) * sizeof *values), 0);
        free(values);
    }
    shd_unpin(m);
}

/* In the worker's process: one policy, a model of its own. */
static void one_policy(struct worker *w, shd_session *s, struct gpu_toy *toy)
{
    struct shd_err e = { 0 };
    struct shd_stats before = { .size = sizeof before }, after = before;
    char name[32];
    const bool maps = can_map(w->owners, w->device != NULL);
    snprintf(name, sizeof name, "%s-%d-%d", w->device != NULL ? "gpu" : "host",
             (int)w->policy.strategy, (int)w->policy.path);
    w->model.name = name;
    memset(toy->seen, 0, sizeof toy->seen);
    shd_stats(s, &before, NULL);
    const int r = train(w, s, toy, &e);
    shd_stats(s, &after, NULL);
    after = minus(after, &before);
    if (w->policy.path == SHD_PATH_MAP && !maps) {
        EXPECT_STATUS(r, SHD_ENOTSUP);
        EXPECT_HAS(e.text, "path map");
        return;
    }
    EXPECT_OK(r, &e);
    if (strcmp(w->report->hex, w->want) != 0)
        FAIL("%s, owners %s %s: other digest", name, w->owners->devices[0],
             w->owners->devices[1] != NULL ? w->owners->devices[1] : "");
    EXPECT_EQ(w->report->path,
              maps && w->policy.path != SHD_PATH_COPY ? SHD_PATH_MAP : SHD_PATH_COPY);
    expect_bytes(w, w->report->path, &after);
    expect_pin(s->models);
}

static void every_path(struct worker *w, enum shd_strategy strategy)
{
    struct shd_err e = { 0 };
    shd_session *s;
    struct gpu_toy toy = { .pt = { .overflow_step = UINT64_MAX } };
    const enum shd_dtype grad_dtype = w->policy.grad_dtype;
    EXPECT_OK(open_session(w, &s, &e), &e);
    EXPECT(gt_open(&toy, w->device != NULL));
    for (int path = SHD_PATH_AUTO; path <= SHD_PATH_COPY; path++) {
        w->policy = policy_of(strategy, (enum shd_path)path, grad_dtype);
        one_policy(w, s, &toy);
    }
    shd_close(s);
    gt_close(&toy);
    expect_nothing_left("after all paths");
}

static void every_policy(struct worker *w)
{
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++)
        every_path(w, (enum shd_strategy)strategy);
}

static void on_every_mix(struct pt_model model, enum shd_dtype grad_dtype)
{
    struct worker w = { .model = model, .policy = { .grad_dtype = grad_dtype }, .steps = STEPS };
    struct pt_run like = { .policy = { .grad_dtype = grad_dtype },
                           .steps = STEPS,
                           .t = { .overflow_step = UINT64_MAX } };
    w.model.name = "reference";
    w.model.grad_dtype = grad_dtype;
    pt_reference(pt_spec(&w.model), &like, w.want);
    copied = share((SHD_DDP + 1) * sizeof *copied);
    for (size_t i = 0; i < mix_count(); i++) {
        w.owners = &mixes[i];
        fixture_start(&daemons, use_owners(w.owners), NULL);
        for (int gpu = 0; gpu <= 1; gpu++) {
            w.device = gpu ? "cuda:0" : NULL;
            await_worker(in_child(every_policy, &w));
        }
        fixture_stop(&daemons);
    }
}

TEST(every_mix_and_policy_gives_the_same_bits)
{
    on_every_mix((struct pt_model){ .publish = "f32", .mean = true }, 0);
}

TEST(the_same_with_half_precision_and_local_sums)
{
    on_every_mix((struct pt_model){ .publish = "bf16", .accumulate = 2, .frozen = true }, SHD_BF16);
}

/* Without a policy; and with a model in the worker's own process. */
TEST(nothing_needs_a_policy)
{
    char want[65];
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "plain", .publish = "bf16", .accumulate = 2 },
                        .steps = STEPS };
    struct pt_run like = { .steps = STEPS, .t = { .overflow_step = UINT64_MAX } };
    pt_reference(pt_spec(&w.model), &like, want);
    for (size_t i = 0; i < mix_count(); i++) {
        fixture_start(&daemons, use_owners(&mixes[i]), NULL);
        run_worker(&w);
        fixture_stop(&daemons);
        EXPECT_STR(w.report->text, "");
        EXPECT_STR(w.report->hex, want);
    }
    w.address = "local:";
    run_worker(&w);
    EXPECT_STR(w.report->text, "");
    EXPECT_STR(w.report->hex, want);
}

/* -- Refused ------------------------------------------------------------------------------------
 */

static void expect_refused(struct worker *w, int status, const char *text)
{
    run_worker(w);
    EXPECT_EQ(w->report->status, status);
    EXPECT_HAS(w->report->text, text);
}

TEST(what_cannot_be_is_said_with_a_remedy)
{
    struct worker w = { .model = { .name = "no" }, .steps = 1 };
    fixture_start(&daemons, use_owners(&mixes[2]), NULL);
    w.device = "gpu0";
    expect_refused(&w, SHD_EINVAL, "device is 'gpu0': \"host\", or \"cuda:N\"");
    w.device = "cuda:";
    expect_refused(&w, SHD_EINVAL, "device is 'cuda:'");
    w.device = "cuda:1x";
    expect_refused(&w, SHD_EINVAL, "device is 'cuda:1x'");
    w.device = "cuda:7";
    expect_refused(&w, SHD_ENOTSUP, "device cuda:7: ");
    setenv("CUDA_VISIBLE_DEVICES", "1", 1); /* the worker's: the daemon has the other one */
    w.device = NULL;
    expect_refused(&w, SHD_ENOTSUP, "CUDA_VISIBLE_DEVICES");
    EXPECT_HAS(w.report->text, "daemon gpu0 ");
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv(shim_is_there() ? "SHIM_CUDA_DEVICES" : "CUDA_VISIBLE_DEVICES",
           shim_is_there() ? "0" : "", 1);
    expect_refused(&w, SHD_ENOTSUP, "daemon gpu0 ");
    w.device = "cuda:0";
    expect_refused(&w, SHD_ENOTSUP, "device cuda:0: ");
    setenv("SHIM_CUDA_DEVICES", "2", 1);
    unsetenv("CUDA_VISIBLE_DEVICES");
    fixture_stop(&daemons);
}

/* By whoever would have to update them; workers on a GPU read those of the host as any others. */
TEST(matrices_of_owners_on_a_gpu_are_refused)
{
    struct worker w = { .model = { .name = "no", .whole = "muon" }, .steps = 1 };
    fixture_start(&daemons, use_owners(&mixes[2]), NULL);
    expect_refused(&w, SHD_ENOTSUP,
                   "a group's optimizer is muon, lamb or adafactor, which is not done on a GPU "
                   "(");
    fixture_stop(&daemons);
    w.device = "cuda:0";
    w.address = "local:";
    expect_refused(&w, SHD_ENOTSUP,
                   "a group's optimizer is muon, lamb or adafactor, which is not done on a GPU "
                   "(");
    w.address = NULL;
    fixture_start(&daemons, use_owners(&mixes[1]), NULL);
    run_worker(&w);
    EXPECT_STR(w.report->text, "");
    EXPECT_EQ(w.report->status, SHD_OK);
    fixture_stop(&daemons);
}

int main(int argc, char **argv)
{
    setenv("SHIM_CUDA_DEVICES", "2", 1);
    return test_run_all(argc, argv);
}
