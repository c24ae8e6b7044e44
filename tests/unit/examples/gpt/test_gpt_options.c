/* The command line of shd-gpt, and what follows from it: learning rate, micro-batches, schedule. */
#include "examples/gpt/data.h"
#include "examples/gpt/options.h"
#include "examples/gpt/schedule.h"
#include "examples/gpt/tune.h"
#include "tests/lib/test.h"

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
    EXPECT_STR(o.data.items[0], DATA_DEFAULT_PATH);
    EXPECT_NEAR(o.min_lr, o.lr / 10, 1e-15);
    EXPECT(o.threads >= 1 && o.log_every >= 1 && o.rank == 0 && o.world == 1);
    EXPECT_OK(parse("--dim=96 --heads 3 --lr=0.5 --data x --data y --standalone", &o, &e), &e);
    EXPECT_EQ(o.dim, 96);
    EXPECT_EQ(o.data.count, 2);
    EXPECT(o.standalone);
    EXPECT_OK(parse("--optimizer lion", &o, &e), &e);
    EXPECT_NEAR(o.lr, 0.0003, 0);
}

static const struct {
    const char *line, *part; /* what is said about it */
} bad_options[] = {
    { "--layers 0", "--layers is 0, its limits are 1 and 1024" },
    { "--dim 99999", "its limits are 1 and 16384" },
    { "--dim -4", "--dim takes a whole number, got '-4'" },
    { "--steps 1e3", "takes a whole number, got '1e3'" },
    { "--steps 99999999999999999999", "its limits are 1 and 9007199254740992" },
    { "--lr nan", "takes a number, got 'nan'" },
    { "--lr x", "--lr takes a number, got 'x'" },
    { "--clip -1", "its limits are 0 and 1000000000" },
    { "--dim 100 --heads 3", "--dim 100 is not a multiple of --heads 3" },
    { "--optimizer adam", "'adam' is not adamw, sgd, lion, muon, lamb or adafactor" },
    { "--grad-codec fp8", "--grad-codec 'fp8' is not none or int8" },
    { "--codec int2", "--codec 'int2' is not none, int8, fp8 or int4" },
    { "--moments bf16", "--moments 'bf16' is not fp32 or int8" },
    { "--optimizer muon --moments int8", "--moments int8 with --optimizer muon: " },
    { "--optimizer lamb --moments int8", "--moments int8 with --optimizer lamb: " },
    { "--optimizer adafactor --moments int8", "--moments int8 with --optimizer adafactor: " },
    { "--threads 1000", "its limits are 1 and 256" },
    { "--seq", "--seq needs a value" },
    { "--standalone=1", "takes no value" },
    { "--bogus", "unknown flag '--bogus'; known: --data" },
    { "bogus", "'bogus' is not a flag" },
    { "--min-lr 1 --lr 0.1", "--min-lr 1 is above --lr 0.1" },
    { "--standalone --address /x", "/x" },
    { "--strategy fsdp", "'fsdp' is not ddp, zero1, zero2 or zero3" },
    { "--strategy hybrid", "replica groups" },
    { "--prefetch backward", "'backward' is not pre, post or none" },
    { "--plan x --strategy ddp", "--strategy with --plan x: the plan's \"policy\" has it" },
    { "--plan x --forward-prefetch 2", "--forward-prefetch with --plan x" },
    { "--plan x --max-live-bytes 1", "--max-live-bytes with --plan x" },
    { "--plan x --evaluate", "--plan x with --evaluate: nothing is trained by it" },
    { "--evaluate --eval-windows 0",
      "--evaluate with --eval-windows 0: a held-out loss is that of at least one window" },
    { "--path rdma", "'rdma' is not map, copy, nccl or auto" },
    { "--path copy --standalone", "use --path auto, or daemons" },
    { "--fetch-delay-ms 1", "add --path copy" },
    { "--fetch-delay-ms 1 --path map", "only the copy path fetches" },
    { "--strategy ddp --max-live-units 3", "holds all 6 units" },
    { "--strategy zero1 --max-live-units 5", "at least 6" },
    { "--precision fp8", "'fp8' is not fp32, bf16 or fp16" },
    { "--grad-precision fp8", "--grad-precision 'fp8'" },
    { "--bf16-gemm native", "add --precision bf16" },
    { "--bf16-gemm fast --precision bf16", "'fast' is not auto, native or emulated" },
    { "--loss-scale dynamic", "add --precision fp16" },
    { "--loss-scale dynamic --precision bf16", "do not underflow" },
    { "--loss-scale 0 --precision fp16", "a number from 1 to 16777216" },
    { "--loss-scale big --precision fp16", "'big' is not dynamic, static" },
    { "--batch 0", "--batch 0 is out of range: 1 to 4096" },
    { "--batch 12x", "'12x' is not a number, auto or auto:S" },
    { "--batch auto:", "--batch auto:: S of auto:S is the sequences of a step, from 1 to 4096" },
    { "--batch auto:4097", "from 1 to 4096" },
    { "--batch auto:8 --micro-batches 8", "--batch auto:8 with --micro-batches 8" },
    { "--batch auto --micro-batches 4", "--batch auto with --micro-batches 4" },
    { "--batch auto --accumulate local:5", "A must divide --micro-batches 32" },
    { "--batch auto --print-spec", "--batch auto with --print-spec" },
    { "--batch auto --device cuda:0", "--batch auto with --device" },
    { "--accumulate worker", "'worker' is not owner, local:A or host:A" },
    { "--accumulate local:", "A a number" },
    { "--accumulate local:3", "A must divide --micro-batches 4" },
    { "--accumulate local:8", "A must divide --micro-batches 4" },
    { "--accumulate local:0", "A must divide" },
    { "--experts 300", "its limits are 0 and 256" },
    { "--experts 4 --adapters 4", "leave one of them out" },
    { "--experts 256 --layers 16", "4114 units, the limit is 4096" },
    { "--adapters 200", "--adapters 200 is above --dim 128" },
    { "--tiles 3", "--tiles 3 must divide --dim 128, --seq 128 and the 256 bytes" },
    { "--tiles 257", "its limits are 0 and 256" },
    { "--tiles 4 --experts 2", "--tiles 4 with --experts: tiles are of dense blocks" },
    { "--tiles 4 --adapters 2", "--tiles 4 with --adapters" },
    { "--tiles 4 --recompute", "--tiles 4 with --recompute" },
    { "--tiles 4 --device cuda:0", "--tiles 4 with --device" },
    { "--tiles 4 --optimizer muon", "--tiles 4 with --optimizer muon: it updates whole tensors" },
    { "--tiles 64 --layers 20", "20 layers in 64 tiles are 5289 units, the limit is 4096" },
    { "--stop-at 5", "go together" },
    { "--stop-rank 1", "go together" },
    { "--stop-rank 0 --stop-at 5", "its limits are 1 and 4294967295" },
    { "--stop-rank 1 --stop-at 5", "there are 1 workers" },
    { "--device gpu", "'gpu' is not host or cuda:N" },
    { "--device cuda:", "'cuda:' is not host or cuda:N" },
    { "--device cuda:1x", "N is a whole number below 1024" },
    { "--device cuda:1024", "N is a whole number below 1024" },
    { "--math fp64", "'fp64' is not fp32 or tf32" },
    { "--math tf32", "add --device cuda:0" },
    { "--math tf32 --device cuda:0 --precision bf16", "it is about fp32 products" },
    { "--device cuda:0 --precision bf16 --bf16-gemm emulated", "the host's products" },
    { "--device cuda:0 --dim 96 --heads 24", "a head's width, here 4" },
    { "--device cuda:0 --adapters 4", "--adapters 4 with --device cuda:0" },
};

TEST(bad_options_are_named_with_value_and_limits)
{
    clear_environment();
    for (size_t i = 0; i < sizeof bad_options / sizeof bad_options[0]; i++) {
        struct shd_err e;
        struct options o;
        EXPECT(parse(bad_options[i].line, &o, &e) < 0);
        EXPECT_HAS(e.text, bad_options[i].part);
    }
}

#define ROW(strategy, prefetch, ahead, seconds)                                               \
    "{\"policy\":{\"strategy\":\"" strategy "\",\"backward_prefetch\":\"" prefetch            \
    "\",\"forward_prefetch\":" ahead ",\"max_live_units\":0,\"max_live_bytes\":7},\"time\":{" \
    "\"step_s\":" seconds "}}"
#define TUNED(rows) "{\"schema\":1,\"tuned\":[" rows "]}"

/* A policy's steps, the first of which does not count. True: another is to be taken. */
static bool take_steps(struct tune *t, double first, double others)
{
    for (uint32_t i = 0; i + 1 < TUNE_STEPS; i++)
        EXPECT(!tune_step(t, i == 0 ? first : others * (i == 1 ? 100 : 1)));
    return tune_step(t, others);
}

TEST(policies_are_tried_and_the_quickest_is_gone_on_by)
{
    static const char rows[] = TUNED(
        ROW("zero1", "pre", "1", "0.5") "," ROW("zero1", "pre", "2", "0.6") "," ROW(
            "zero3", "post", "3", "0.7") "," ROW("zero3", "none", "0", "1"));
    const struct shd_policy given = { .size = sizeof given, .path = SHD_PATH_COPY };
    char name[TUNE_NAME_BYTES];
    struct shd_err e;
    struct tune t;
    EXPECT_OK(tune_read("{\"ops\":[]}", &given, &t, &e), &e);
    EXPECT_EQ(t.count, 0);
    EXPECT(!tune_step(&t, 1));
    EXPECT_OK(tune_read(rows, &given, &t, &e), &e);
    EXPECT_EQ(t.count, 3); /* of zero1 the first */
    EXPECT_STR(tune_name(&t.tries[1], name), "zero3, forward prefetch 3, backward prefetch post");
    EXPECT_EQ(t.tries[1].policy.path, SHD_PATH_COPY);
    EXPECT_EQ(t.tries[1].policy.max_live_bytes, 7);
    EXPECT_NEAR(t.tries[2].predicted_s, 1, 0);
    EXPECT(take_steps(&t, 0.1, 3) && t.at == 1);
    EXPECT(take_steps(&t, 9, 2) && t.at == 2);
    EXPECT(take_steps(&t, 0.1, 4) && t.at == 1 && t.done);
    EXPECT_NEAR(t.tries[1].measured_s, 2, 0);
    EXPECT(!take_steps(&t, 1, 1));
    EXPECT_OK(tune_read(TUNED(ROW("ddp", "pre", "0", "1")), &given, &t, &e), &e);
    EXPECT(!take_steps(&t, 1, 1) && t.done && t.at == 0); /* the only one stays */
}

TEST(bad_policies_to_try_are_named)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { TUNED(""), "\"tuned\" must be an array with policies" },
        { "{\"tuned\":3}", "\"tuned\" must be an array with policies" },
        { TUNED("7"), "tuned[0].policy.strategy is not" },
        { TUNED(ROW("zero1", "pre", "1", "1") "," ROW("own", "pre", "1", "1")),
          "tuned[1].policy.strategy is not what `shardctl plan --tune --json` prints" },
        { TUNED(ROW("ddp", "after", "1", "1")), "policy.backward_prefetch" },
        { TUNED(ROW("ddp", "pre", "-1", "1")), "policy.forward_prefetch" },
        { TUNED(ROW("ddp", "pre", "4294967296", "1")), "policy.forward_prefetch" },
        { TUNED(ROW("ddp", "pre", "1", "0")), "time.step_s" },
        { TUNED(ROW("ddp", "pre", "1", "\"1\"")), "time.step_s" },
    };
    const struct shd_policy given = { .size = sizeof given };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct shd_err e = { 0 };
        struct tune t;
        EXPECT_STATUS(tune_read(bad[i].text, &given, &t, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, bad[i].says);
    }
}

TEST(device_is_host_or_a_gpu)
{
    struct shd_err e;
    struct options o;
    clear_environment();
    EXPECT_OK(parse("", &o, &e), &e);
    EXPECT(!o.chosen.cuda && !o.chosen.tf32);
    EXPECT_OK(parse("--device cuda:0 --precision fp16", &o, &e), &e);
    EXPECT(o.chosen.cuda && o.chosen.publish == SHD_F16 && o.chosen.loss_scale == 0);
    EXPECT_OK(parse("--device cuda:0 --experts 5", &o, &e), &e);
    EXPECT(o.chosen.cuda && o.experts == 5);
    EXPECT_OK(parse("--device cuda:3 --math tf32", &o, &e), &e);
    EXPECT(o.chosen.cuda && o.chosen.tf32);
    EXPECT_EQ(o.chosen.device, 3);
    EXPECT_OK(parse("--device cuda:0 --precision bf16 --adapters 8", &o, &e), &e);
    EXPECT(o.chosen.cuda && !o.chosen.gemm_auto);
    EXPECT_EQ(o.chosen.publish, SHD_BF16);
    EXPECT_EQ(o.chosen.gemm, GEMM_FULL);
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

TEST(schedule_and_precision_are_derived)
{
    struct shd_err e;
    struct options o;
    clear_environment();
    EXPECT_OK(parse("", &o, &e), &e);
    EXPECT_EQ(o.chosen.policy.strategy, SHD_ZERO3);
    EXPECT_EQ(o.chosen.policy.forward_prefetch, 1);
    EXPECT_EQ(o.chosen.policy.backward_prefetch, SHD_PREFETCH_PRE);
    EXPECT_EQ(o.chosen.policy.grad_dtype, SHD_F32);
    EXPECT_EQ(o.chosen.publish, SHD_F32);
    EXPECT_EQ(o.chosen.gemm, GEMM_FULL);
    EXPECT_EQ(o.chosen.accumulate, 1);
    EXPECT(o.chosen.loss_scale == 1);
    EXPECT_OK(parse("--strategy zero2 --prefetch post --path copy --precision bf16 "
                    "--grad-precision bf16 --accumulate local:2 --fetch-delay-ms 1.5",
                    &o, &e),
              &e);
    EXPECT_EQ(o.chosen.policy.strategy, SHD_ZERO2);
    EXPECT_EQ(o.chosen.policy.backward_prefetch, SHD_PREFETCH_POST);
    EXPECT_EQ(o.chosen.policy.path, SHD_PATH_COPY);
    EXPECT(o.fetch_delay_ms == 1.5);
    EXPECT_EQ(o.chosen.policy.grad_dtype, SHD_BF16);
    EXPECT_EQ(o.chosen.publish, SHD_BF16);
    EXPECT(o.chosen.gemm == GEMM_BF16_NATIVE && o.chosen.gemm_auto);
    EXPECT_EQ(o.chosen.accumulate, 2);
    EXPECT_OK(parse("--precision fp16", &o, &e), &e);
    EXPECT(o.chosen.gemm == GEMM_F16_EMULATED && o.chosen.loss_scale == 0);
    EXPECT_OK(parse("--precision fp16 --loss-scale 256", &o, &e), &e);
    EXPECT(o.chosen.loss_scale == 256);
    EXPECT_OK(parse("--grad-precision fp16 --loss-scale static", &o, &e), &e);
    EXPECT(o.chosen.gemm == GEMM_FULL && o.chosen.loss_scale == 1024);
}

/* -- Micro-batches --------------------------------------------------------------------------- */

/* Over all ranks: each micro-batch once, groups together, nobody who left. */
static void check_share(struct schedule_share s, uint64_t step)
{
    uint32_t owner[32], micros[32];
    memset(owner, 0xff, sizeof owner);
    for (s.rank = 0; s.rank < s.world; s.rank++) {
        const uint32_t count = schedule_micros(&s, step, micros);
        EXPECT(schedule_takes_part(&s, step) || count == 0);
        EXPECT_EQ(count % (s.together == 1 ? s.accumulate : 1), 0);
        for (uint32_t i = 0; i < count; i++) {
            EXPECT(i == 0 || micros[i] > micros[i - 1]);
            EXPECT_EQ(owner[micros[i]], UINT32_MAX);
            owner[micros[i]] = s.rank;
        }
    }
    for (uint32_t i = 0; i < s.micro_batches; i++) {
        EXPECT(owner[i] < s.world);
        EXPECT_EQ(owner[i] / s.together, owner[i / s.accumulate * s.accumulate] / s.together);
    }
}

TEST(micro_batches_are_shared_out_completely)
{
    for (uint32_t world = 2; world < 6; world++)
        for (uint32_t accumulate = 1; accumulate < 5; accumulate++)
            for (uint64_t step = 0; step < 6; step++)
                check_share((struct schedule_share){ .micro_batches = 12,
                                                     .accumulate = accumulate,
                                                     .together = 1,
                                                     .world = world,
                                                     .stop_rank = world - 1,
                                                     .stop_at = 3 },
                            step);
    const struct schedule_share gone = { .micro_batches = 4,
                                         .accumulate = 1,
                                         .together = 1,
                                         .rank = 1,
                                         .world = 2,
                                         .stop_rank = 1,
                                         .stop_at = 3 };
    EXPECT(schedule_takes_part(&gone, 2));
    EXPECT(!schedule_takes_part(&gone, 3));
}

TEST(workers_of_a_host_share_each_of_its_groups)
{
    for (uint32_t together = 2; together < 5; together++)
        for (uint32_t hosts = 1; hosts < 4; hosts++)
            check_share((struct schedule_share){ .micro_batches = 24,
                                                 .accumulate = 4,
                                                 .together = together,
                                                 .world = hosts * together },
                        0);
    struct options o;
    struct shd_err e;
    EXPECT_OK(parse("--micro-batches 8 --accumulate host:4", &o, &e), &e);
    EXPECT(o.chosen.accumulate == 4 && o.chosen.policy.sums == SHD_SUMS_HOST);
    EXPECT_EQ(parse("--micro-batches 8 --accumulate host:4 --elastic", &o, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "local:4");
    EXPECT_EQ(parse("--micro-batches 8 --accumulate hosts:4", &o, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "owner, local:A or host:A");
    EXPECT_EQ(parse("--micro-batches 8 --accumulate host:3", &o, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "must divide");
}

TEST_MAIN()
