/* The parts of shd-gpt around the arithmetic: text, batches, schedule, options, spec, sample. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "examples/gpt/data.h"
#include "examples/gpt/model.h"
#include "examples/gpt/options.h"
#include "examples/gpt/sample.h"
#include "examples/gpt/schedule.h"
#include "tests/test.h"

/* -- A folder of its own --------------------------------------------------------------------- */

static char folder[64];

static const char *in_folder(const char *name)
{
    static char path[4][PATH_MAX];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
    return path[next];
}

static void folder_new(void)
{
    strcpy(folder, "/tmp/shd-gpt-test-XXXXXX");
    EXPECT(mkdtemp(folder) != NULL);
}

static void folder_remove(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    EXPECT_EQ(system(command), 0);
}

/* count bytes: c, c, ... */
static void write_file(const char *name, char c, size_t count)
{
    FILE *f = fopen(in_folder(name), "w");
    EXPECT(f != NULL);
    for (size_t i = 0; i < count; i++)
        fputc(c, f);
    fclose(f);
}

/* Text in which every window is different: decimal numbers. */
static void write_numbers(const char *name, int count)
{
    FILE *f = fopen(in_folder(name), "w");
    EXPECT(f != NULL);
    for (int i = 0; i < count; i++)
        fprintf(f, "%d\n", i);
    fclose(f);
}

static int load(const char *path, uint32_t seq, struct data **ret_data, struct shd_err *e)
{
    return data_load(&path, 1, seq, ret_data, e);
}

/* -- Reading --------------------------------------------------------------------------------- */

TEST(missing_file_is_named)
{
    struct shd_err e;
    struct data *d;
    EXPECT_STATUS(load("/nonexistent/book.txt", 8, &d, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "/nonexistent/book.txt");
}

TEST(empty_and_short_files_name_bytes_present_and_needed)
{
    struct shd_err e;
    struct data *d;
    folder_new();
    write_file("empty", 'x', 0);
    write_file("short", 'x', 179);
    write_file("enough", 'x', 180);
    EXPECT_EQ(data_bytes_needed(8), 180);
    EXPECT_STATUS(load(in_folder("empty"), 8, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "empty");
    EXPECT_HAS(e.text, " 0 bytes");
    EXPECT_STATUS(load(in_folder("short"), 8, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "179 bytes");
    EXPECT_HAS(e.text, "at least 180");
    EXPECT_OK(load(in_folder("enough"), 8, &d, &e), &e);
    data_free(d);
    folder_remove();
}

TEST(folders_are_walked_sorted_without_symlinks_and_binaries)
{
    struct shd_err e;
    struct data *d;
    uint8_t window[101];
    folder_new();
    EXPECT_EQ(mkdir(in_folder("m"), 0700), 0);
    EXPECT_EQ(mkdir(in_folder("m/deep"), 0700), 0);
    write_file("z", 'z', 700);
    write_file("m/deep/b", 'b', 700);
    write_file("a", 'a', 700);
    write_file("B", 'B', 700); /* capitals first: by bytes, whatever the locale */
    write_file("c.dat", '\0', 700);
    EXPECT_EQ(symlink(in_folder("a"), in_folder("a.u8")), 0);
    EXPECT_EQ(symlink(folder, in_folder("m/loop")), 0);
    EXPECT_EQ(mkfifo(in_folder("pipe"), 0600), 0);
    EXPECT_OK(load(folder, 100, &d, &e), &e);
    EXPECT_EQ(data_bytes(d), 2800);
    EXPECT_EQ(data_files(d), 4);
    EXPECT_EQ(data_held_out_windows(d), 1);
    data_held_out(d, 0, 1, window); /* the last 5 % */
    for (int i = 0; i < 101; i++)
        EXPECT_EQ(window[i], 'z');
    data_free(d);
    folder_remove();
}

TEST(symlink_named_directly_is_followed)
{
    struct shd_err e;
    struct data *d;
    folder_new();
    write_file("text", 'x', 500);
    EXPECT_EQ(symlink(in_folder("text"), in_folder("link")), 0);
    EXPECT_OK(load(in_folder("link"), 8, &d, &e), &e);
    EXPECT_EQ(data_bytes(d), 500);
    data_free(d);
    folder_remove();
}

TEST(binary_file_named_directly_is_refused)
{
    struct shd_err e;
    struct data *d;
    folder_new();
    write_file("blob", '\0', 500);
    EXPECT_STATUS(load(in_folder("blob"), 8, &d, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "blob");
    EXPECT_HAS(e.text, "offset 0");
    EXPECT_STATUS(load("/dev/null", 8, &d, &e), SHD_EINVAL);
    folder_remove();
}

TEST(several_paths_follow_each_other)
{
    struct shd_err e;
    struct data *d;
    folder_new();
    write_file("one", '1', 300);
    write_file("two", '2', 300);
    const char *paths[] = { in_folder("two"), in_folder("one") };
    uint8_t window[9];
    EXPECT_OK(data_load(paths, 2, 8, &d, &e), &e);
    EXPECT_EQ(data_bytes(d), 600);
    data_held_out(d, 0, 1, window);
    EXPECT_EQ(window[0], '1'); /* in the order given */
    data_free(d);
    folder_remove();
}

/* -- Batches --------------------------------------------------------------------------------- */

#define SEQ        16
#define ROWS       64
#define WINDOW     (SEQ + 1)
#define BATCH_HASH (-3891257093477050902)

static struct data *numbers(void)
{
    struct shd_err e;
    struct data *d;
    folder_new();
    write_numbers("numbers", 20000);
    EXPECT_OK(load(in_folder("numbers"), SEQ, &d, &e), &e);
    folder_remove();
    return d;
}

TEST(batch_is_a_pure_function_of_its_key)
{
    static uint8_t first[ROWS * WINDOW], other[ROWS * WINDOW];
    struct data *d = numbers();
    const struct data_key key = { 7, 3, 1 };
    data_batch(d, key, ROWS, first);
    for (uint64_t i = 0; i < 50; i++) /* whatever was drawn before */
        data_batch(d, (struct data_key){ i, i, (uint32_t)i }, 3, other);
    data_batch(d, key, ROWS, other);
    EXPECT(memcmp(first, other, sizeof first) == 0);
    data_batch(d, key, 5, other); /* fewer rows: the same first ones */
    EXPECT(memcmp(first, other, 5 * WINDOW) == 0);

    const struct data_key keys[] = { { 8, 3, 1 }, { 7, 4, 1 }, { 7, 3, 2 }, { 3, 7, 1 } };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        data_batch(d, keys[i], ROWS, other);
        EXPECT(memcmp(first, other, sizeof first) != 0);
    }
    data_free(d);
}

/* The same numbers for ever: a change of the generator changes every digest ever published. */
TEST(batch_of_a_known_key_does_not_change)
{
    uint8_t window[2 * WINDOW];
    struct data *d = numbers();
    uint64_t hash = 0;
    data_batch(d, (struct data_key){ 1, 2, 3 }, 2, window);
    for (size_t i = 0; i < sizeof window; i++)
        hash = hash * 31 + window[i];
    EXPECT_EQ(hash, BATCH_HASH);
    data_free(d);
}

/* Where a window lies: it holds at least one whole number of the text. */
static long window_number(const uint8_t *window)
{
    char text[WINDOW + 1];
    memcpy(text, window, WINDOW);
    text[WINDOW] = '\0';
    return strtol(strchr(text, '\n') + 1, NULL, 10);
}

TEST(training_never_sees_held_out_text)
{
    static bool held_out[20001];
    uint8_t window[ROWS * WINDOW];
    struct data *d = numbers();
    const uint64_t windows = data_held_out_windows(d);
    EXPECT(windows >= 64);
    for (uint64_t i = 0; i < windows; i++) {
        data_held_out(d, i, 1, window);
        held_out[window_number(window)] = true;
    }
    uint64_t differ = 0;
    for (uint64_t step = 0; step < 200; step++) {
        data_batch(d, (struct data_key){ 1, step, 0 }, ROWS, window);
        for (int i = 0; i < ROWS; i++) {
            EXPECT(!held_out[window_number(window + i * WINDOW)]);
            differ += memcmp(window, window + i * WINDOW, WINDOW) != 0;
        }
    }
    EXPECT(differ > 200 * (ROWS - 2));
    data_free(d);
}

TEST(held_out_windows_wrap_around)
{
    uint8_t first[WINDOW], again[WINDOW];
    struct data *d = numbers();
    data_held_out(d, 0, 1, first);
    data_held_out(d, data_held_out_windows(d), 1, again);
    EXPECT(memcmp(first, again, WINDOW) == 0);
    data_free(d);
}

/* -- Schedule -------------------------------------------------------------------------------- */

TEST(learning_rate_warms_up_and_falls)
{
    const struct schedule s = { .lr = 0.01, .lr_min = 0.001, .warmup = 10, .steps = 101 };
    EXPECT_NEAR(schedule_lr(&s, 0), 0.001, 1e-15);
    EXPECT_NEAR(schedule_lr(&s, 9), 0.01, 1e-15);
    EXPECT_NEAR(schedule_lr(&s, 10), 0.01, 1e-15);
    EXPECT_NEAR(schedule_lr(&s, 55), 0.0055, 1e-15); /* half way */
    EXPECT_NEAR(schedule_lr(&s, 100), 0.001, 1e-15);
    EXPECT_NEAR(schedule_lr(&s, 1000), 0.001, 1e-15);
    for (uint64_t k = 10; k < 100; k++)
        EXPECT(schedule_lr(&s, k + 1) < schedule_lr(&s, k));
    const struct schedule warm = { .lr = 1, .lr_min = 0, .warmup = 50, .steps = 20 };
    EXPECT_NEAR(schedule_lr(&warm, 19), 0.4, 1e-15); /* ends before its warm-up does */
    const struct schedule one = { .lr = 1, .lr_min = 0.5, .warmup = 0, .steps = 1 };
    EXPECT_NEAR(schedule_lr(&one, 0), 0.5, 0);
}

/* -- Options --------------------------------------------------------------------------------- */

static void clear_environment(void)
{
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("LOCAL_WORLD_SIZE");
}

/* Words separated by spaces. */
static int parse(const char *line, struct options *o, struct shd_err *e)
{
    static char text[512];
    char *argv[32] = { NULL };
    int argc = 0;
    snprintf(text, sizeof text, "shd-gpt %s", line);
    for (char *word = strtok(text, " "); word != NULL && argc < 31; word = strtok(NULL, " "))
        argv[argc++] = word;
    return options_parse(argc, argv, o, e);
}

TEST(options_have_defaults_and_both_spellings)
{
    struct shd_err e;
    struct options o;
    clear_environment();
    EXPECT_OK(parse("", &o, &e), &e);
    EXPECT_STR(o.data[0], DATA_DEFAULT_PATH);
    EXPECT_NEAR(o.min_lr, o.lr / 10, 1e-15);
    EXPECT(o.threads >= 1 && o.log_every >= 1 && o.rank == 0 && o.world == 1);
    EXPECT_OK(parse("--dim=96 --heads 3 --lr=0.5 --data x --data y --standalone", &o, &e), &e);
    EXPECT_EQ(o.dim, 96);
    EXPECT_EQ(o.data_count, 2);
    EXPECT(o.standalone);
    EXPECT_OK(parse("--optimizer lion", &o, &e), &e);
    EXPECT_NEAR(o.lr, 0.0003, 0);
}

TEST(bad_options_are_named_with_value_and_limits)
{
    static const struct {
        const char *line, *part;
    } cases[] = {
        { "--layers 0", "--layers 0 is outside its limits, 1 to 1024" },
        { "--dim 99999", "1 to 16384" },
        { "--dim -4", "'-4' is not a whole number" },
        { "--steps 1e3", "'1e3' is not a whole number" },
        { "--steps 99999999999999999999", "not a whole number" },
        { "--lr nan", "'nan' is not a number" },
        { "--lr x", "--lr: 'x'" },
        { "--clip -1", "0 to 1000000000" },
        { "--dim 100 --heads 3", "--dim 100 is not a multiple of --heads 3" },
        { "--optimizer adam", "'adam' is not adamw, sgd or lion" },
        { "--threads 1000", "1 to 256" },
        { "--seq", "--seq needs a value" },
        { "--standalone=1", "takes no value" },
        { "--bogus", "unknown option '--bogus'" },
        { "bogus", "'bogus' is not an option" },
        { "--min-lr 1 --lr 0.1", "--min-lr 1 is above --lr 0.1" },
        { "--standalone --address /x", "/x" },
    };
    clear_environment();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct shd_err e;
        struct options o;
        EXPECT(parse(cases[i].line, &o, &e) < 0);
        EXPECT_HAS(e.text, cases[i].part);
    }
}

TEST(environment_gives_rank_and_world)
{
    struct shd_err e;
    struct options o;
    clear_environment();
    setenv("RANK", "2", 1);
    setenv("WORLD_SIZE", "4", 1);
    setenv("LOCAL_WORLD_SIZE", "100000", 1);
    EXPECT_OK(parse("", &o, &e), &e);
    EXPECT_EQ(o.rank, 2);
    EXPECT_EQ(o.world, 4);
    EXPECT_EQ(o.threads, 1);
    EXPECT_STATUS(parse("--standalone", &o, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "WORLD_SIZE is 4");
    setenv("RANK", "4", 1);
    EXPECT_STATUS(parse("", &o, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "RANK=4");
    setenv("RANK", "one", 1);
    EXPECT_STATUS(parse("", &o, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "RANK: 'one'");
    clear_environment();
}

/* -- Shape ----------------------------------------------------------------------------------- */

TEST(tensors_are_gpt2s)
{
    const struct gpt_shape s = { .layers = 3, .dim = 40, .heads = 4, .seq = 10 };
    struct gpt_layout layout;
    struct gpt_tensor t;
    gpt_layout_compute(&s, &layout);
    EXPECT_EQ(gpt_parameters(&s), 256 * 40 + 10 * 40 + 3 * (12 * 40 * 40 + 13 * 40) + 2 * 40);
    gpt_tensor_at(&s, 0, &t);
    EXPECT_STR(t.name, "wte.weight");
    gpt_tensor_at(&s, EMBED_TENSORS + BLOCK_TENSORS + BLOCK_MLP_W, &t);
    EXPECT_STR(t.name, "h.1.mlp.c_proj.weight");
    EXPECT_EQ(t.unit, 2);
    EXPECT_EQ(t.dims[0], 160);
    EXPECT_EQ(t.dims[1], 40);
    EXPECT_NEAR(t.init_std, 0.02 / sqrt(6), 1e-15);
    gpt_tensor_at(&s, gpt_tensors(&s) - 1, &t);
    EXPECT_STR(t.name, "ln_f.bias");
    EXPECT_EQ(t.unit, 4);
    EXPECT_EQ(layout.embed[EMBED_WPE], 256 * 40);
    EXPECT_EQ(layout.block[BLOCK_LN1_B], 64); /* 40 rounded up to 32s */
    EXPECT_EQ(layout.head_elems, 128);
}

TEST(spec_is_complete)
{
    const struct gpt_shape s = { .layers = 1, .dim = 8, .heads = 2, .seq = 4 };
    const struct gpt_spec spec = { "lion", 5, 3, 0.25 };
    char *json = gpt_spec_json(&s, &spec);
    EXPECT(json != NULL);
    EXPECT_HAS(json, "\"seed\":5");
    EXPECT_HAS(json, "\"micro_batches\":3");
    EXPECT_HAS(json, "\"kind\":\"lion\"");
    EXPECT_HAS(json, "\"weight_decay\":0.25");
    EXPECT_HAS(json, "\"uses\":[\"embed\"]");
    EXPECT_HAS(json, "\"shape\":[8,24]");
    free(json);
}

/* -- Sample ---------------------------------------------------------------------------------- */

struct toy {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool;
    float *params[4];
};

static void toy_init(struct toy *t, uint32_t threads)
{
    struct shd_err e;
    uint64_t seed = 301;
    *t = (struct toy){ .shape = { .layers = 2, .dim = 48, .heads = 3, .seq = 20 } };
    gpt_layout_compute(&t->shape, &t->layout);
    EXPECT_OK(pool_new(threads, &t->pool, &e), &e);
    const uint64_t elems[4] = { t->layout.embed_elems, t->layout.block_elems, t->layout.block_elems,
                                t->layout.head_elems };
    for (int u = 0; u < 4; u++) {
        t->params[u] = malloc(elems[u] * sizeof(float));
        for (uint64_t i = 0; i < elems[u]; i++)
            t->params[u][i] = (float)((double)(test_random(&seed) >> 11) * 0x1p-53 - 0.5);
    }
}

static void toy_deinit(struct toy *t)
{
    pool_free(t->pool);
    for (int u = 0; u < 4; u++)
        free(t->params[u]);
}

/* Byte by byte, the sampler must see what the model sees: the loss of a window by both. The bound
 * is that of fp32_is_near_fp64 in test_gpt_bits.c, with shorter sums. */
TEST(sampler_agrees_with_the_model)
{
    struct shd_err e;
    struct toy t;
    struct gpt *gpt;
    struct sampler *s;
    uint8_t window[21];
    toy_init(&t, 2);
    for (int i = 0; i < 21; i++)
        window[i] = (uint8_t)(i * 37);
    EXPECT_OK(gpt_new(&t.shape, &t.layout, 1, t.pool, &gpt, &e), &e);
    EXPECT_OK(sampler_new(&t.shape, &t.layout, t.pool, (const float *const *)t.params, &s, &e), &e);
    gpt_whole(gpt, window, (const float *const *)t.params, NULL);
    for (int i = 0; i < 20; i++) {
        const float *logits = sampler_feed(s, window[i]);
        double sum = 0;
        for (int j = 0; j < GPT_VOCAB; j++)
            sum += exp((double)logits[j]);
        const double loss = log(sum) - (double)logits[window[i + 1]];
        EXPECT_NEAR(loss, gpt_row_losses(gpt)[i], 1e-4);
    }
    sampler_free(s);
    gpt_free(gpt);
    toy_deinit(&t);
}

/* Longer than the window, so that it starts anew, with different threads. */
TEST(sample_is_deterministic)
{
    struct shd_err e;
    uint8_t text[2][90], other[90];
    const struct sample_options how = { .seed = 5, .temperature = 1, .first = '\n' };
    const struct sample_options seed6 = { .seed = 6, .temperature = 1, .first = '\n' };
    for (uint32_t i = 0; i < 2; i++) {
        struct toy t;
        struct sampler *s;
        toy_init(&t, 1 + 2 * i);
        EXPECT_OK(sampler_new(&t.shape, &t.layout, t.pool, (const float *const *)t.params, &s, &e),
                  &e);
        sampler_text(s, &how, text[i], sizeof text[i]);
        sampler_reset(s);
        sampler_text(s, &seed6, other, sizeof other);
        sampler_free(s);
        toy_deinit(&t);
    }
    EXPECT(memcmp(text[0], text[1], sizeof text[0]) == 0);
    EXPECT(memcmp(text[0], other, sizeof other) != 0);
}

TEST(pool_refuses_impossible_thread_counts)
{
    struct shd_err e;
    struct pool *p;
    EXPECT_STATUS(pool_new(0, &p, &e), SHD_ERANGE);
    EXPECT_STATUS(pool_new(POOL_THREADS_MAX + 1, &p, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "257");
}

static void count_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    ((uint32_t *)ctx)[task]++;
}

/* Many short runs of different sizes: helpers that wake late must neither take a task twice nor
 * touch a finished run. */
TEST(pool_runs_each_task_once)
{
    struct shd_err e;
    struct pool *p;
    uint32_t count[40];
    EXPECT_OK(pool_new(5, &p, &e), &e);
    for (uint32_t run = 0; run < 3000; run++) {
        const uint32_t tasks = run % 40 + 1;
        memset(count, 0, sizeof count);
        pool_run(p, tasks, count_task, count);
        for (uint32_t i = 0; i < 40; i++)
            EXPECT_EQ(count[i], i < tasks ? 1 : 0);
    }
    pool_free(p);
}

TEST_MAIN()
