/* The parts of shd-gpt around the arithmetic: text, batches, units and spec, sample, pool. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "examples/gpt/data.h"
#include "examples/gpt/model.h"
#include "examples/gpt/sample.h"
#include "tests/lib/gpt_whole.h"
#include "tests/lib/test.h"

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
    gpt_tensor_at(&s, EMBED_TENSORS + BLOCK_ROUTER_W + BLOCK_MLP_W, &t);
    EXPECT_STR(t.name, "h.1.mlp.c_proj.weight");
    EXPECT_EQ(t.unit, 2);
    EXPECT_EQ(t.dims[0], 160);
    EXPECT_EQ(t.dims[1], 40);
    EXPECT_NEAR(t.init_std, 0.02 / sqrt(6), 1e-15);
    gpt_tensor_at(&s, gpt_tensors(&s) - 1, &t);
    EXPECT_STR(t.name, "ln_f.bias");
    EXPECT_EQ(t.unit, 4);
    EXPECT_EQ(layout.at[GPT_EMBED][EMBED_WPE], 256 * 40);
    EXPECT_EQ(layout.at[GPT_BLOCK][BLOCK_LN1_B], 64); /* 40 rounded up to 32s */
    EXPECT_EQ(layout.elems[GPT_HEAD], 128);
}

TEST(spec_is_complete)
{
    const struct gpt_shape s = { .layers = 1, .dim = 8, .heads = 2, .seq = 4 };
    const struct gpt_spec spec = {
        .optimizer = "lion", .seed = 5, .micro_batches = 3, .publish = SHD_F32, .weight_decay = 0.25
    };
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

/* Tensors lie one behind the other in spec order, in units that are what they say. */
static void check_units(const struct gpt_shape *s)
{
    struct gpt_layout layout;
    uint32_t unit = 0, index = 0, next = 0; /* after the unit */
    gpt_layout_compute(s, &layout);
    for (uint32_t i = 0; i < gpt_tensors(s); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(s, i, &t);
        EXPECT(t.unit == unit || t.unit == next);
        next = t.unit + t.tiles;
        index = t.unit == unit ? index : 0;
        unit = t.unit;
        EXPECT_EQ(gpt_unit_at(s, unit).kind, t.kind);
        for (uint32_t u = unit; u < next; u++) {
            EXPECT_EQ(gpt_unit_find(s, gpt_unit_at(s, u)), u);
            EXPECT_EQ(gpt_unit_at(s, u).expert,
                      s->experts > 0 ? gpt_unit_at(s, u).expert : u - unit);
        }
        EXPECT(t.index >= index);
        EXPECT(layout.at[t.kind][t.index] + t.elems / t.tiles <= layout.elems[t.kind]);
        index = t.index + 1;
    }
    EXPECT_EQ(next, gpt_units(s));
}

TEST(experts_and_adapters_are_units)
{
    const struct gpt_shape dense = { .layers = 3, .dim = 8, .heads = 2, .seq = 4 };
    struct gpt_shape moe = dense, lora = dense;
    moe.experts = 5;
    lora.rank = 2;
    check_units(&dense);
    check_units(&moe);
    check_units(&lora);
    EXPECT_EQ(gpt_units(&moe), 2 + 3 * 6);
    EXPECT_EQ(gpt_units(&lora), 2 + 3 * 2);
    EXPECT_EQ(gpt_unit_uses(&lora, 2), 1);
    EXPECT_EQ(gpt_unit_uses(&lora, 1), GPT_UNIT_NONE);
    EXPECT_EQ(gpt_unit_uses(&lora, 7), GPT_UNIT_EMBED);
    EXPECT_EQ(gpt_parameters_trained(&moe), gpt_parameters(&moe));
    /* rank times in + out of each matrix */
    EXPECT_EQ(gpt_parameters_trained(&lora), 3u * 2 * 8 * (4 + 2 + 5 + 5));
    EXPECT_EQ(gpt_parameters(&lora), gpt_parameters(&dense) + gpt_parameters_trained(&lora));
}

TEST(tiles_are_units_of_one_size)
{
    struct gpt_shape s = { .layers = 3, .dim = 8, .heads = 2, .seq = 4, .tiles = 4 };
    const struct gpt_spec spec = { .optimizer = "adamw", .micro_batches = 1 };
    struct gpt_shape dense = s;
    struct shd_err e;
    dense.tiles = 0;
    check_units(&s);
    EXPECT_EQ(gpt_units(&s), 4 + 3 * (2 + 4 * 4) + 1 + 4);
    EXPECT_EQ(gpt_parameters(&s), gpt_parameters(&dense) + GPT_VOCAB * 8); /* the output matrix */
    for (uint32_t u = 0; u < gpt_units(&s); u++)
        EXPECT_EQ(gpt_unit_uses(&s, u), GPT_UNIT_NONE);
    char *json = gpt_spec_json(&s, &spec);
    EXPECT_HAS(
        json,
        "{\"name\":\"embed\",\"tiles\":4,\"tensors\":[{\"name\":\"wte.weight\",\"shape\":[256,8]");
    EXPECT_HAS(json, "{\"name\":\"h.2.ln_1\",\"tensors\"");
    EXPECT_HAS(json,
               "{\"name\":\"h.1.fc\",\"tiles\":4,\"tensors\":[{\"name\":\"h.1.mlp.c_fc.weight\"");
    EXPECT_HAS(json, "{\"name\":\"lm_head\",\"tiles\":4,\"tensors\":[{\"name\":\"lm_head.weight\"");
    free(json);
    EXPECT_OK(gpt_shape_check(&s, &e), &e);
    s.seq = 6;
    EXPECT_STATUS(gpt_shape_check(&s, &e), SHD_ERANGE);
    EXPECT_STR(e.text, "seq 6 is not a multiple of tiles 4");
    s.seq = 4;
    s.experts = 2;
    EXPECT_STATUS(gpt_shape_check(&s, &e), SHD_ENOTSUP);
}

TEST(spec_names_experts_and_freezes_what_is_adapted)
{
    struct gpt_shape s = { .layers = 1, .dim = 8, .heads = 2, .seq = 4, .experts = 2 };
    const struct gpt_spec spec = {
        .optimizer = "sgd", .micro_batches = 4, .accumulate = 2, .publish = SHD_BF16
    };
    char *json = gpt_spec_json(&s, &spec);
    EXPECT_HAS(json, "\"publish\":\"bf16\"");
    EXPECT_HAS(json, "\"accumulate\":2");
    EXPECT_HAS(json, "\"name\":\"h.0.expert.1\"");
    EXPECT_HAS(json, "h.0.expert.1.c_fc.weight");
    EXPECT_HAS(json, "h.0.router.weight");
    EXPECT(strstr(json, "h.0.mlp") == NULL);
    EXPECT(strstr(json, "trainable") == NULL);
    free(json);
    s.experts = 0;
    s.rank = 3;
    json = gpt_spec_json(&s, &spec);
    EXPECT_HAS(json, "\"name\":\"h.0.lora\",\"uses\":[\"h.0\"]");
    EXPECT_HAS(json, "\"trainable\":false");
    int frozen = 0;
    for (const char *at = json; (at = strstr(at, "\"trainable\":false")) != NULL; at++)
        frozen++;
    EXPECT_EQ(frozen, EMBED_TENSORS + BLOCK_ROUTER_W + HEAD_TENSORS);
    free(json);
}

/* -- Sample ---------------------------------------------------------------------------------- */

struct toy {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool;
    float *params[16];
};

static void toy_init_as(struct toy *t, uint32_t threads, uint32_t experts, uint32_t rank)
{
    struct shd_err e;
    uint64_t seed = test_seed(301);
    *t = (struct toy){
        .shape = { .layers = 2, .dim = 48, .heads = 3, .seq = 20, .experts = experts, .rank = rank }
    };
    gpt_layout_compute(&t->shape, &t->layout);
    EXPECT_OK(pool_new(threads, &t->pool, &e), &e);
    for (uint32_t u = 0; u < gpt_units(&t->shape); u++) {
        const uint64_t elems = gpt_unit_elems(&t->shape, &t->layout, u);
        t->params[u] = malloc(elems * sizeof(float));
        for (uint64_t i = 0; i < elems; i++)
            t->params[u][i] = (float)((double)(test_random(&seed) >> 11) * 0x1p-53 - 0.5);
    }
}

static void toy_init(struct toy *t, uint32_t threads)
{
    toy_init_as(t, threads, /* experts= */ 0, /* rank= */ 0);
}

static void toy_deinit(struct toy *t)
{
    pool_free(t->pool);
    for (uint32_t u = 0; u < gpt_units(&t->shape); u++)
        free(t->params[u]);
}

/* Byte by byte, the sampler must see what the model sees: the loss of a window by both. The bound
 * is that of fp32_is_near_fp64 in test_gpt_bits.c, with shorter sums. */
static void check_sampler(uint32_t experts, uint32_t rank)
{
    struct shd_err e;
    struct toy t;
    struct gpt *gpt;
    struct sampler *s;
    uint8_t window[21];
    toy_init_as(&t, 2, experts, rank);
    for (int i = 0; i < 21; i++)
        window[i] = (uint8_t)(i * 37);
    EXPECT_OK(gpt_new(&t.shape, &t.layout, 1, false, t.pool, &gpt, &e), &e);
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

TEST(sampler_agrees_with_the_model)
{
    check_sampler(0, 0);
    check_sampler(/* experts= */ 3, 0);
    check_sampler(0, /* rank= */ 4);
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
        sampler_free(s);
        EXPECT_OK(sampler_new(&t.shape, &t.layout, t.pool, (const float *const *)t.params, &s, &e),
                  &e);
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
