/* shardctl plan as a user meets it: text, JSON, refusals and exit codes, with models from specs and
 * from safetensors files that are good, odd and hostile. The drawings in the documents are compared
 * by test_docs_schedules.sh. */
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "tests/lib/test.h"

#define OUTPUT_BYTES (1u << 20)
#define EXAMPLE      " --spec " SHD_SOURCE_DIR "/docs/example-spec.json"
#define TIED         " --spec " SHD_SOURCE_DIR "/docs/example-tied.json"

static char output[OUTPUT_BYTES]; /* stdout and stderr of the last run */
static char dir[64];              /* of this process, for files */

/* Run `shardctl <args>`, with the binaries' directory in PATH; returns its exit code. */
static int ctl(const char *args)
{
    char command[2048];
    snprintf(command, sizeof command,
             "cd %s && export XDG_CACHE_HOME=$PWD/cache && PATH=%s:$PATH && shardctl %s 2>&1", dir,
             SHD_BIN_DIR, args);
    FILE *f = popen(command, "r");
    CHECK(f != NULL);
    const size_t bytes = fread(output, 1, sizeof output - 1, f);
    output[bytes] = '\0';
    const int status = pclose(f);
    EXPECT(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int plan(const char *args)
{
    char words[2048];
    snprintf(words, sizeof words, "plan %s", args);
    return ctl(words);
}

static void expect_plan(const char *args, int code, const char *text)
{
    const int got = plan(args);
    EXPECT_HAS(output, text);
    EXPECT_EQ(got, code);
}

/* -- Text and JSON --------------------------------------------------------------------------- */

TEST(help_teaches)
{
    expect_plan("--help", 0, "usage: shardctl plan [FLAGS]");
    EXPECT_HAS(output, "--max-live-bytes B");
    EXPECT_HAS(output, "SHARD_GRAD_OP");
    EXPECT_HAS(output, "examples:");
    EXPECT_HAS(output, "exit code 1:");
}

TEST(text_has_model_policy_timeline_and_costs)
{
    expect_plan(EXAMPLE " --daemons 2", 0, "model example: 5 units, 1048576 parameters");
    EXPECT_HAS(output, "policy: zero3, backward prefetch pre, forward prefetch 1");
    EXPECT_HAS(output, "step: 1 micro-batch for this worker");
    EXPECT_HAS(output, "compute   .  F0 F1 F2 F3 F4 B4---");
    EXPECT_HAS(output, "parameters             2      2.0 MiB");
    EXPECT_HAS(output, "both together                 3.0 MiB");
    EXPECT_HAS(output, "parameters fetched         9      7.5 MiB");
    EXPECT_HAS(output,
               "Owner memory, 2 daemons: 8.0 MiB state + 2.0 MiB published + 1.0 MiB inboxes "
               "(1 worker, 2 slots)\n  + 7.8 MiB ledger, board and spec + 3.0 MiB spare for a "
               "successor = 21.9 MiB each at most, 43.8 MiB in all.\n  While gradients wait "
               "for a slow worker up to 2.0 MiB more each, in host memory;\n"
               "  for each step that readers have pinned (two at most) 2.0 MiB.\n");
    expect_plan(TIED " --max-live-bytes 1.5MiB --grad-dtype bf16 --param-dtype bf16", 0,
                "at most 1.5 MiB of parameters");
    EXPECT_HAS(output, "gradients as bf16");
    EXPECT_HAS(output, "uses 0");
}

static json_t *plan_json(const char *args)
{
    json_error_t why;
    EXPECT_EQ(plan(args), 0);
    json_t *root = json_loads(output, 0, &why);
    if (root == NULL)
        FAIL("line %d: %s in '%.200s'", why.line, why.text, output);
    EXPECT_EQ(json_integer_value(json_object_get(root, "schema")), 1);
    return root;
}

static long long json_at(const json_t *root, const char *object, const char *key)
{
    const json_t *v = json_object_get(json_object_get(root, object), key);
    if (!json_is_integer(v))
        FAIL("no integer %s.%s", object, key);
    return (long long)json_integer_value(v);
}

/* What crosses from a to b, or the other way. */
static long long crossing_at(const json_t *root, const char *from, const char *to, const char *key)
{
    const json_t *all = json_object_get(root, "crossing");
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *c = json_array_get(all, i);
        if (strcmp(json_string_value(json_object_get(c, "from")), from) == 0 &&
            strcmp(json_string_value(json_object_get(c, "to")), to) == 0)
            return (long long)json_integer_value(json_object_get(c, key));
    }
    FAIL("nothing from %s to %s", from, to);
}

/* test_hosts_many compares it with what is counted. The example has 1,048,576 parameters, f32. */
TEST(what_crosses_between_hosts_is_what_owners_there_have)
{
    const long long bytes = 4 << 20, micros = 10;
    char path[128], args[256];
    json_t *spec = json_load_file(SHD_SOURCE_DIR "/docs/example-spec.json", 0, NULL);
    json_object_set_new(spec, "micro_batches", json_integer(micros));
    snprintf(path, sizeof path, "%s/ten.json", dir);
    EXPECT(json_dump_file(spec, path, 0) == 0);
    json_decref(spec);
    snprintf(args, sizeof args, "--spec %s --json --host a:2:1 --host b:0:3", path);
    json_t *root = plan_json(args);
    EXPECT_EQ(crossing_at(root, "a", "b", "parameters_bytes"), bytes); /* not for each worker */
    EXPECT_EQ(crossing_at(root, "a", "b", "gradients_bytes"), 0);
    EXPECT_EQ(crossing_at(root, "b", "a", "parameters_bytes"), 0);
    const long long first = (micros + 3) / 4; /* of rank 0, on a */
    EXPECT_EQ(crossing_at(root, "b", "a", "gradients_bytes"), (micros - first) * bytes);
    json_decref(root);
    snprintf(args, sizeof args,
             "--spec %s --json --host a:1:2 --host b:1:0 --grad-dtype bf16 --accumulate 2", path);
    root = plan_json(args);
    EXPECT_EQ(crossing_at(root, "a", "b", "gradients_bytes") +
                  crossing_at(root, "b", "a", "parameters_bytes"),
              micros / 2 * bytes / 4 + bytes / 2);
    EXPECT_EQ(crossing_at(root, "a", "b", "parameters_bytes"), 0); /* nobody reads it there */
    json_decref(root);
    root = plan_json(EXAMPLE " --json");
    EXPECT(json_object_get(root, "crossing") == NULL);
    json_decref(root);
}

/* test_hosts_replicas compares it with what is counted. */
TEST(replicas_cross_as_often_as_there_are_copies_elsewhere)
{
    const long long bytes = 4 << 20; /* of the example, whose step has one micro-batch */
    json_t *root = plan_json(EXAMPLE " --json --replicas 2 --host a:2:1 --host b:2:1");
    EXPECT_EQ(crossing_at(root, "a", "b", "parameters_bytes"), bytes); /* a copy of all is there */
    EXPECT_EQ(crossing_at(root, "a", "b", "gradients_bytes"), bytes);
    EXPECT_EQ(json_at(root, "owners", "daemons"), 4);
    const long long total = json_at(root, "owners", "total_bytes");
    json_decref(root);
    root = plan_json(EXAMPLE " --json --host a:1:1 --host b:1:1"); /* as large slices, once */
    EXPECT_EQ(total, 2 * json_at(root, "owners", "total_bytes"));
    json_decref(root);
    /* a has a copy of every slice, of three on the two others. */
    root = plan_json(EXAMPLE " --json --replicas 2 --host b:1:1 --host a:3:1 --host w:0:1 "
                             "--host c:2:1");
    EXPECT_EQ(crossing_at(root, "b", "a", "gradients_bytes"), bytes);
    EXPECT_EQ(crossing_at(root, "b", "w", "parameters_bytes") +
                  crossing_at(root, "c", "w", "parameters_bytes"),
              bytes);
    json_decref(root);
    root = plan_json(EXAMPLE " --json --replicas 2 --hosts 2 --gpus 2");
    const json_t *relays = json_object_get(json_object_get(root, "scale"), "relays");
    EXPECT_EQ(json_integer_value(json_object_get(relays, "bytes_in")), 3 * bytes);
    EXPECT_EQ(json_at(root, "scale", "mirror_bytes"), bytes);
    json_decref(root);
    expect_plan(EXAMPLE " --replicas 2 --hosts 2 --gpus 2", 0,
                "2 hosts with 2 daemons and workers each, each slice on two");
    expect_plan(EXAMPLE " --replicas 2 --host a:1:1 --host b:1:1 --daemons 2", 0,
                "Owner memory, 2 daemons, two for each slice:");
}

TEST(hosts_that_do_not_fit_are_refused)
{
    static const char *const wrong[][2] = {
        { "--replicas 2", "--replicas 2 is of several hosts: it needs --host" },
        { "--replicas 2 --host a:2:1", "'a' alone has devices" },
        { "--replicas 2 --host a:1:1 --host b:1:1 --host c:1:1", "3 devices make no pairs" },
        { "--replicas 2 --host a:3:1 --host b:1:1", "'a' has 3 of 4 devices" },
        { "--replicas 2 --host a:1:1 --host b:1:1 --daemons 1",
          "--host: 2 daemons, --daemons says 1" },
        { "--replicas 2 --host a:200:1 --host b:200:1", "more than a cluster file has room for" },
        { "--host a", "'a' is not NAME:DAEMONS:WORKERS" },
        { "--host a:1", "'a:1' is not" },
        { "--host a:1:1:1", "'a:1:1:1' is not" },
        { "--host :1:1", "':1:1' is not" },
        { "--host a:-1:1", "'a:-1:1' is not" },
        { "--host a:99999999999999999999:1", "is not" },
        { "--host a:1:1 --host a:1:1", "there is a host 'a' already" },
        { "--host a:0:1", "no host has any daemons" },
        { "--host a:1:0", "no host has any workers" },
        { "--host a:1:1 --daemons 2", "--host: 1 daemons, --daemons says 2" },
        { "--host a:1:1 --workers 2", "--host: 1 workers, --workers says 2" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char args[200];
        snprintf(args, sizeof args, EXAMPLE " %s", wrong[i][0]);
        EXPECT(plan(args) == 1);
        EXPECT_HAS(output, wrong[i][1]);
    }
}

/* The example with units that are all of this shape, at dir/NAME.json. */
static void write_units_of(char *path, size_t bytes, const char *name, int rows, int columns)
{
    json_t *spec = json_load_file(SHD_SOURCE_DIR "/docs/example-spec.json", 0, NULL);
    const json_t *all = json_object_get(spec, "units");
    for (size_t u = 0; u < json_array_size(all); u++)
        json_object_set_new(json_array_get(json_object_get(json_array_get(all, u), "tensors"), 0),
                            "shape", json_pack("[i, i]", rows, columns));
    snprintf(path, bytes, "%s/%s.json", dir, name);
    EXPECT(json_dump_file(spec, path, 0) == 0);
    json_decref(spec);
}

/* The formulas of docs/hosts.md, for units that 1,024 owners can share evenly, with as many bytes
 * of gradients in each of two micro-batches as of parameters, which zero3 fetches twice, but the
 * last. test_hosts_many compares with what is counted. */
TEST(hosts_that_are_alike_cross_what_the_formulas_say)
{
    static const long long of[][2] = { { 8, 8 }, { 128, 8 }, { 2, 1 } };
    const long long unit = 16 << 20, units = 5, bytes = units * unit;
    char path[128];
    write_units_of(path, sizeof path, "even", 4096, 1024);
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        const long long hosts = of[i][0], gpus = of[i][1], others = hosts - 1;
        char args[300];
        snprintf(args, sizeof args,
                 "--spec %s --json --hosts %lld --gpus %lld --micro-batches-per-worker 2 "
                 "--prefetch none --bandwidth 1 --latency 50 --compute 0.25",
                 path, hosts, gpus);
        json_t *root = plan_json(args);
        const json_t *scale = json_object_get(root, "scale");
        const json_t *relays = json_object_get(scale, "relays");
        const json_t *direct = json_object_get(scale, "all_to_all");
        const long long gradients = gpus * 2 * bytes * others / hosts;
        const long long fetched = json_at(root, "cost", "fetched_bytes");
        EXPECT_EQ(fetched, 4 * bytes - 2 * unit);
        const long long with = bytes * others / hosts + gradients;
        EXPECT_EQ(json_integer_value(json_object_get(relays, "bytes_in")), with);
        EXPECT_EQ(json_integer_value(json_object_get(relays, "bytes_out")), with);
        EXPECT_EQ(json_integer_value(json_object_get(direct, "bytes_in")),
                  gpus * fetched * others / hosts + gradients);
        EXPECT_EQ(json_integer_value(json_object_get(relays, "messages_in")),
                  (units + 2 * units * gpus + 2 * gpus) * gpus * others);
        EXPECT_EQ(json_integer_value(json_object_get(scale, "mirror_bytes")),
                  bytes * others / hosts);
        const double wire = (double)with * 8 / 1e9 + 6 * 50e-6;
        EXPECT_NEAR(json_real_value(json_object_get(relays, "network_s")), wire, 1e-9);
        EXPECT_NEAR(json_real_value(json_object_get(relays, "step_s")), wire + 0.5, 1e-9);
        EXPECT_NEAR(json_real_value(json_object_get(relays, "step_hidden_s")),
                    wire > 0.5 ? wire : 0.5, 1e-9);
        json_decref(root);
    }
    expect_plan(EXAMPLE " --hosts 8 --gpus 8", 0, "8 hosts with 8 daemons and workers each");
}

/* Five units of one block, which the last of four owners has: each worker returns to all of them,
 * and the other host fetches five slices. bench_scale counts the same. */
TEST(who_has_no_part_of_a_unit_is_told_of_its_gradient_all_the_same)
{
    char path[128], args[300];
    write_units_of(path, sizeof path, "small", 2, 16);
    snprintf(args, sizeof args, "--spec %s --json --hosts 2 --gpus 2 --micro-batches-per-worker 2",
             path);
    json_t *root = plan_json(args);
    const json_t *relays = json_object_get(json_object_get(root, "scale"), "relays");
    EXPECT_EQ(json_integer_value(json_object_get(relays, "messages_in")), 5 + 5 * 2 * 2 * 2 + 8);
    EXPECT_EQ(json_integer_value(json_object_get(relays, "messages_out")), 5 + 5 * 2 * 2 * 2 + 8);
    json_decref(root);
}

TEST(hosts_beyond_a_relays_connections_are_named)
{
    json_t *root = plan_json(EXAMPLE " --json --hosts 29 --gpus 8");
    EXPECT_EQ(json_at(root, "scale", "relay_connections"), 2 * 8 * 9 * 28);
    EXPECT_EQ(json_at(root, "scale", "relay_connections_max"), 4096);
    json_decref(root);
    expect_plan(EXAMPLE " --hosts 29 --gpus 8", 0, "of inboxes, and 4032 connections.");
    expect_plan(EXAMPLE " --hosts 30 --gpus 8", 0, "at most 4096 connections: these hosts do not");
}

TEST(hosts_that_are_alike_and_do_not_fit_are_refused)
{
    static const struct {
        const char *args;
        int code;
        const char *text;
    } wrong[] = {
        { "--hosts 8", 1, "--hosts without --gpus" },
        { "--gpus 8", 1, "--gpus without --hosts" },
        { "--bandwidth 8", 1, "--bandwidth is of a network: it needs --hosts" },
        { "--latency 8", 1, "--latency is of a network" },
        { "--hosts 2 --gpus 2 --latency 8", 1, "--latency 8 without --bandwidth" },
        { "--replicas 2 --hosts 3 --gpus 1", 1, "3 daemons make no pairs, they have to be even" },
        { "--replicas 2 --hosts 2 --gpus 2 --daemons 2", 1, "4 daemons, --daemons says 2" },
        { "--hosts 1 --gpus 2", 2, "hosts" },
        { "--hosts 2 --gpus 0", 2, "gpus" },
        { "--hosts 2 --gpus 2 --bandwidth 0", 2, "bandwidth" },
        { "--hosts 1024 --gpus 2", 1, "2048 daemons, at most 1024" },
        { "--hosts 2 --gpus 2 --host a:1:1", 1, "with --host" },
        { "--hosts 2 --gpus 2 --daemons 3", 1, "4 daemons, --daemons says 3" },
        { "--hosts 2 --gpus 2 --workers 3", 1, "4 workers, --workers says 3" },
        { "--hosts 2 --gpus 2 --compare", 2, "--hosts is of one plan" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char args[200];
        snprintf(args, sizeof args, EXAMPLE " %s", wrong[i].args);
        EXPECT_EQ(plan(args), wrong[i].code);
        EXPECT_HAS(output, wrong[i].text);
    }
}

TEST(json_has_the_documented_fields)
{
    json_t *root = plan_json(EXAMPLE " --json --strategy zero2 --micro-batches-per-worker 3");
    EXPECT_EQ(json_at(root, "cost", "fetched_bytes"), 3 * (4 << 20));
    EXPECT_EQ(json_at(root, "cost", "returned_bytes"), 3 * (4 << 20));
    EXPECT_EQ(json_at(root, "cost", "live_units_max"), 5);
    EXPECT_EQ(json_at(root, "timeline", "idle"), 5);
    EXPECT_EQ(json_at(root, "owners", "daemons"), 1);
    EXPECT_EQ(json_at(root, "model", "parameters"), 1 << 20);
    EXPECT_EQ(json_array_size(json_object_get(json_object_get(root, "model"), "units")), 5);
    const json_t *ops = json_object_get(root, "ops");
    EXPECT_STR(json_string_value(json_array_get(json_array_get(ops, 0), 0)), "FETCH");
    EXPECT_STR(json_string_value(json_array_get(json_array_get(ops, json_array_size(ops) - 1), 0)),
               "COMMIT");
    json_decref(root);
}

TEST(state_on_files_takes_a_window_of_memory)
{
    json_t *memory = plan_json(EXAMPLE " --json --daemons 2");
    json_t *file = plan_json(EXAMPLE " --json --daemons 2 --state file");
    const long long state = json_at(memory, "owners", "state_bytes_max"),
                    window = json_at(file, "owners", "window_bytes_max");
    EXPECT_EQ(json_at(memory, "owners", "window_bytes_max"), 0);
    EXPECT_EQ(json_at(memory, "owners", "file_bytes_max"), 0);
    EXPECT_EQ(json_at(file, "owners", "file_bytes_max"), state);
    EXPECT_EQ(json_at(file, "owners", "total_file_bytes"), 2 * state);
    EXPECT(window > 0 && window < state);
    EXPECT_EQ(json_at(file, "owners", "bytes_max"),
              json_at(memory, "owners", "bytes_max") - state + window);
    json_decref(memory);
    json_decref(file);
    expect_plan(EXAMPLE " --daemons 2 --state file", 0, " of the state + 2.0 MiB published");
    EXPECT_HAS(output, "\n  On files: 8.0 MiB state each at most, 16.0 MiB in all.\n");
    expect_plan(EXAMPLE " --state file:/tmp", 2, "--state is 'file:/tmp', must be memory or file");
    expect_plan(EXAMPLE " --state disk", 2, "--state is 'disk', must be memory or file");
}

/* A successor's as well, which was spare memory. */
TEST(what_is_published_on_files_takes_no_memory)
{
    json_t *memory = plan_json(EXAMPLE " --json --daemons 2 --state file");
    json_t *file = plan_json(EXAMPLE " --json --daemons 2 --state file --publish file");
    const long long publish = json_at(memory, "owners", "publish_bytes_max");
    EXPECT(publish > 0);
    EXPECT_EQ(json_at(memory, "owners", "publish_file_bytes_max"), 0);
    EXPECT_EQ(json_at(file, "owners", "publish_file_bytes_max"), 2 * publish);
    EXPECT_EQ(json_at(file, "owners", "bytes_max"),
              json_at(memory, "owners", "bytes_max") - 2 * publish);
    EXPECT_EQ(json_at(file, "owners", "total_file_bytes"),
              json_at(memory, "owners", "total_file_bytes") + 4 * publish);
    json_decref(memory);
    json_decref(file);
    expect_plan(EXAMPLE " --daemons 2 --state file --publish file", 0,
                " of the state + 0 B published");
    EXPECT_HAS(output,
               "\n  On files: 8.0 MiB state + 4.0 MiB published, a successor's too, each at "
               "most, 24.0 MiB in all.\n");
    expect_plan(
        EXAMPLE " --publish file", 0,
        "\n  On files: 8.0 MiB published, a successor's too, each at most, 8.0 MiB in all.\n");
    expect_plan(EXAMPLE " --publish bf16", 2, "--publish is 'bf16', must be memory or file");
}

TEST(compare_puts_all_strategies_side_by_side)
{
    expect_plan(EXAMPLE " --compare --max-live-units 2", 0,
                "refused: max_live_units is 2, must be "
                "at least 5: ddp holds all units");
    EXPECT_HAS(output, "zero3     none      2        1      2.0 MiB");
    EXPECT_HAS(output, "hybrid    -         refused");
    json_t *root = plan_json(EXAMPLE " --compare --json --max-live-units 2");
    const json_t *plans = json_object_get(root, "plans");
    EXPECT_EQ(json_array_size(plans), 7);
    EXPECT(json_object_get(json_array_get(plans, 0), "refused") != NULL);
    EXPECT_EQ(json_at(json_array_get(plans, 5), "cost", "live_units_max"), 2);
    json_decref(root);
}

TEST(auto_walks_the_tree)
{
    expect_plan(EXAMPLE " --auto --device host --device-memory 58MiB", 0, "so: --strategy zero1");
    expect_plan(EXAMPLE " --auto --device host --device-memory 40MiB --workers 2", 0,
                "so: --strategy zero1");
    expect_plan(EXAMPLE " --auto --device host --device-memory 29MiB --workers 2", 0,
                "so: --strategy zero1");
    expect_plan(EXAMPLE " --auto --device host --device-memory 28.5MiB --workers 2", 0,
                "so: --strategy zero2");
    expect_plan(EXAMPLE " --auto --device host --device-memory 27MiB --workers 2", 0,
                "so: --strategy zero3 --prefetch pre --forward-prefetch 1");
    expect_plan(EXAMPLE " --auto --device host --device-memory 26MiB --workers 2", 0,
                "so: --strategy zero3 --prefetch none --forward-prefetch 0");
    expect_plan(EXAMPLE " --auto --device host --device-memory 4MiB --offload --activations 1MiB",
                0, "so: --strategy zero3 --prefetch pre");
    json_t *root = plan_json(EXAMPLE
                             " --auto --device host --device-memory 27MiB --workers 2 --json");
    const json_t *steps = json_object_get(json_object_get(root, "auto"), "steps");
    EXPECT_EQ(json_array_size(steps), 5);
    EXPECT(json_is_true(json_object_get(json_array_get(steps, 4), "fits")));
    json_decref(root);
}

TEST(auto_refuses_with_what_would_do)
{
    expect_plan(EXAMPLE " --auto --device host --device-memory 12MiB --workers 2", 1,
                "a device of 12.0 MiB is too small: zero3 without prefetch needs 26.0 MiB; 16 "
                "daemons instead of 2 would do");
    expect_plan(EXAMPLE " --auto --device host --device-memory 12MiB --workers 2 --daemons 16", 0,
                "so: ");
    expect_plan(
        EXAMPLE " --auto --device host --device-memory 1MiB --workers 2", 1,
        "needs 26.0 MiB, and 10.3 MiB with 1024 daemons; the largest unit, 1 'h.0', has 1.0 "
        "MiB: cut it into smaller ones");
    expect_plan(EXAMPLE " --auto --device host --device-memory 10.1MiB --workers 2", 1,
                "with 1024 daemons");
    expect_plan(EXAMPLE " --auto --device host --device-memory 10.3MiB --workers 2", 1,
                " daemons instead of 2");
}

TEST(auto_says_what_else_would_do)
{
    expect_plan(EXAMPLE " --auto --device host --device-memory 22MiB --workers 2", 1,
                "what else would do, beside that?\n"
                "  no   moments in 8 bits (\"moments\": \"int8\" of the spec's optimizer)?\n"
                "       worker 2.0 MiB + owner 21.0 MiB = 23.0 MiB\n"
                "  no   the owners' state on files (shardd --state file:DIR)?\n"
                "       worker 2.0 MiB + owner 22.0 MiB = 24.0 MiB\n");
    expect_plan(EXAMPLE " --auto --device host --device-memory 23.5MiB --workers 2", 1,
                "  yes  moments in 8 bits");
    expect_plan(EXAMPLE " --auto --device host --device-memory 22MiB --workers 2 --state file", 1,
                "is too small");
    EXPECT(strstr(output, "state on files") == NULL);
    expect_plan(EXAMPLE " --auto --device-memory 1GiB", 1,
                "  yes  the owners in host memory (--offload)?\n"
                "       worker 2.0 MiB + owner 0 B + contexts 544 MiB = 546 MiB\n"
                "       there they take ");
    expect_plan(EXAMPLE " --auto --device host --device-memory 24.5MiB --workers 2", 1,
                "  yes  units cut into tiles (\"tiles\", 2 at most, of 512 KiB)?\n"
                "       worker 1.0 MiB + owner 22.0 MiB = 23.0 MiB\n");
    expect_plan(EXAMPLE " --auto --device host --device-memory 10MiB --workers 2 --daemons 8", 1,
                "  no   units cut into tiles (\"tiles\", ");
    expect_plan(EXAMPLE " --auto --device host --device-memory 22MiB --workers 2 --json", 1,
                "is too small");
    EXPECT(strstr(output, "what else") == NULL);
}

/* On a GPU each process has a context and staging memory, and segments come in granules. */
TEST(auto_counts_what_a_gpu_takes)
{
    json_t *root = plan_json(EXAMPLE " --auto --device-memory 24GiB --json --context 300MiB");
    const json_t *step = json_array_get(json_object_get(json_object_get(root, "auto"), "steps"), 0);
    const long long mib = 1 << 20;
    const long long owner = json_integer_value(json_object_get(step, "owner_bytes"));
    EXPECT_EQ(json_integer_value(json_object_get(step, "gpu_bytes")), 2 * (300 + 16) * mib);
    EXPECT_EQ(owner % (2 * mib), 0); /* state and trail, twice published, inbox */
    EXPECT(owner >= (16 + 30 + 2 * 4 + 2) * mib && owner <= (16 + 30 + 2 * 4 + 2 + 8) * mib);
    json_decref(root);
    expect_plan(EXAMPLE " --auto --device-memory 1GiB", 1,
                "a device of 1.0 GiB is too small: zero3 without prefetch needs 1.1 GiB");
    EXPECT_HAS(output, " + contexts 1.0 GiB = ");
    expect_plan(EXAMPLE " --auto --device-memory 1GiB --offload", 0,
                "worker 8.0 MiB + owner 0 B + contexts 544 MiB = 552 MiB");
    expect_plan(EXAMPLE " --auto --device-memory 1GiB --context 100MiB", 0, "so: --strategy zero1");
    EXPECT_HAS(output, "nor are NCCL's buffers: --context");
    expect_plan(EXAMPLE " --auto --device-memory 1GiB --device tpu", 2, "must be gpu or host");
    expect_plan(EXAMPLE " --auto --device-memory 1GiB --device host --context 1MiB", 2, "of a GPU");
    expect_plan(EXAMPLE " --context 1MiB", 2, "are questions to --auto");
}

/* The units of an open model, read from its daemons, and the owners' memory as they are. */
TEST(open_model_is_read_from_its_daemons)
{
    EXPECT_EQ(ctl("run --daemons 2 --workers 1 -- sh -c "
                  "'shd-gpt --steps 1 >/dev/null && shardctl plan --strategy zero2'"),
              0);
    EXPECT_HAS(output, "model gpt: ");
    EXPECT_HAS(output, "policy: zero2");
    EXPECT_HAS(output, "Owner memory, 2 daemons");
}

/* -- Seconds --------------------------------------------------------------------------------- */

/* The rates are measured once, into the usual file. */
static void calibrate_once(void)
{
    static bool done;
    if (!done)
        expect_plan("--calibrate", 0, "/cache/shardd/rates.json'");
    done = true;
}

static double seconds_at(const json_t *time, const char *key)
{
    const json_t *v = json_object_get(time, key);
    if (!json_is_number(v))
        FAIL("no number time.%s in '%.300s'", key, output);
    return json_number_value(v);
}

static void expect_seconds(const json_t *time)
{
    static const char *const parts[] = { "compute_s", "fetch_s", "return_s", "update_s", "wait_s" };
    double sum = 0;
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        EXPECT(seconds_at(time, parts[i]) >= 0);
        sum += seconds_at(time, parts[i]);
    }
    EXPECT(sum > 0);
    EXPECT_NEAR(sum, seconds_at(time, "step_s"), 1e-9);
    EXPECT(json_is_string(json_object_get(time, "bound")));
}

TEST(without_rates_there_are_no_seconds)
{
    if (ctl("plan --rates nowhere.json" EXAMPLE) != 1)
        FAIL("a file that is not there was taken: '%.200s'", output);
    EXPECT_HAS(output, "open 'nowhere.json'");
    EXPECT_EQ(ctl("plan" EXAMPLE " --rates /dev/null"), 1);
    EXPECT_HAS(output, "/dev/null: line 1");
}

TEST(calibrated_plans_have_seconds)
{
    calibrate_once();
    expect_plan(EXAMPLE, 0, "Compute is not counted, a file does not say it");
    EXPECT_HAS(output, "A step takes ");
    expect_plan(EXAMPLE " --compute 0.5 --micro-batches-per-worker 4", 0, "A step takes 2");
    EXPECT_HAS(output, " s, most of it compute: compute 2");
    expect_plan(EXAMPLE " --compute 0.5 --compare", 0, "STEP");
    EXPECT_HAS(output, "STEP: predicted, with the workers' compute");
    json_t *root = plan_json(EXAMPLE " --json --compute 0.25 --workers 2 --daemons 2 --path copy");
    const json_t *time = json_object_get(root, "time");
    expect_seconds(time);
    EXPECT(seconds_at(time, "step_s") >= 0.25); /* times the micro-batches of one worker: 1 */
    EXPECT_STR(json_string_value(json_object_get(time, "compute_from")), "given");
    EXPECT_STR(json_string_value(json_object_get(time, "path")), "copy");
    json_decref(root);
    root = plan_json(EXAMPLE " --json --compare");
    time = json_object_get(json_array_get(json_object_get(root, "plans"), 0), "time");
    expect_seconds(time);
    EXPECT_STR(json_string_value(json_object_get(time, "compute_from")), "none");
    json_decref(root);
}

TEST(tuned_plans_are_sorted_by_their_seconds)
{
    calibrate_once();
    expect_plan(EXAMPLE " --tune", 1, "--tune has to know what compute takes: give --compute");
    expect_plan(EXAMPLE " --tune --rates /dev/null", 1, "/dev/null: line 1");
    expect_plan(EXAMPLE " --tune --strategy ddp", 2, "--tune looks for --strategy");
    expect_plan(EXAMPLE " --tune --compute 0.5", 0, "of ");
    EXPECT_HAS(output, "  ddp ");
    EXPECT_HAS(output, "  zero3     post");
    json_t *root = plan_json(EXAMPLE " --tune --json --compute 0.001 --workers 2 --daemons 2 "
                                     "--path copy --micro-batches-per-worker 2");
    const json_t *rows = json_object_get(root, "tuned");
    const size_t count = json_array_size(rows);
    const double best = seconds_at(json_object_get(json_array_get(rows, 0), "time"), "step_s");
    EXPECT(count > 20);
    for (size_t i = 0; i < count; i++) {
        const json_t *time = json_object_get(json_array_get(rows, i), "time");
        const json_t *before = json_object_get(json_array_get(rows, i > 0 ? i - 1 : 0), "time");
        expect_seconds(time);
        EXPECT(seconds_at(time, "step_s") >= seconds_at(before, "step_s") - best * 0.001);
    }
    char strategy[16];
    snprintf(strategy, sizeof strategy, "%s",
             json_string_value(
                 json_object_get(json_object_get(json_array_get(rows, 0), "policy"), "strategy")));
    json_decref(root);
    root = plan_json(EXAMPLE " --tune --ops --compute 0.001 --workers 2 --daemons 2 "
                             "--path copy --micro-batches-per-worker 2");
    EXPECT_STR(json_string_value(json_object_get(json_object_get(root, "policy"), "strategy")),
               strategy);
    EXPECT(json_array_size(json_object_get(root, "ops")) > 20);
    json_decref(root);
    expect_plan(EXAMPLE " --tune --compute 0.5 --max-live-units 1", 0,
                "18 refused: max_live_units");
}

/* A copy of the rates with something else in it is refused by name where it was named, and left out
 * where it is the usual one. */
static void expect_refused(const char *sed, const char *why)
{
    char command[512];
    snprintf(command, sizeof command,
             "cd %s && mkdir -p other/shardd && sed '%s' cache/shardd/rates.json "
             ">other/shardd/rates.json",
             dir, sed);
    EXPECT_EQ(system(command), 0);
    expect_plan(EXAMPLE " --rates other/shardd/rates.json", 1, why);
    EXPECT_HAS(output, "other/shardd/rates.json: ");
    EXPECT_EQ(ctl("plan --timeline" EXAMPLE " >/dev/null && XDG_CACHE_HOME=$PWD/other shardctl "
                  "plan" EXAMPLE),
              0);
    EXPECT_HAS(output, "no seconds: ");
    EXPECT_HAS(output, why);
    EXPECT_HAS(output, "Owner memory, 1 daemon");
}

TEST(rates_of_another_machine_are_refused)
{
    calibrate_once();
    expect_refused("s/\"version\": \".*\"/\"version\": \"0.0.9\"/",
                   "measured with version 0.0.9, this is");
    expect_refused("s/\"processor\": \".*\"/\"processor\": \"Z80\"/", "x Z80, here are");
    expect_refused("s/\"processors\": [0-9]*,/\"processors\": 4095,/", "measured on 4095 x");
    expect_refused("s/\"schema\": 1/\"schema\": 7/", "not rates of schema 1");
    expect_refused("s/\"wake_ns\"/\"woke_ns\"/", "rates.wake_ns is no number");
    expect_refused("s/\"send_ns\": .*,/\"send_ns\": -1,/", "rates.send_ns is no number");
    expect_refused("s/\"sum_next\"/\"sum\"/", "rates.sum_next.f32 is no pair");
}

/* What a worker computes is taken from its trace while it trains. */
TEST(an_open_model_says_what_compute_takes)
{
    calibrate_once();
    EXPECT_EQ(ctl("run --daemons 2 --workers 1 -- sh -c '"
                  "shd-gpt --steps 1000000 --layers 2 --dim 32 --heads 2 --seq 16 --batch 1 "
                  "--eval-windows 0 --sample 0 >/dev/null & worker=$!; "
                  "until shardctl plan --json >answer 2>/dev/null && grep -q trace answer; do "
                  "kill -0 $worker || exit 9; sleep 0.05; done; "
                  "kill $worker; wait $worker; cat answer; exit 0'"),
              0);
    EXPECT_HAS(output, "\"compute_from\":\"trace\"");
}

/* -- Wrong questions ------------------------------------------------------------------------- */

TEST(wrong_flags_are_usage_errors)
{
    expect_plan(EXAMPLE " --strategy zero4", 2, "--strategy is 'zero4', must be ddp, zero1");
    expect_plan(EXAMPLE " --prefetch soon", 2, "--prefetch is 'soon', must be pre, post or none");
    expect_plan(EXAMPLE " --grad-dtype i8", 2, "--grad-dtype is 'i8'");
    expect_plan(EXAMPLE " --forward-prefetch 70000", 2, "its limits are 0 and 65536");
    expect_plan(EXAMPLE " --max-live-bytes lots", 2, "takes bytes, as 512, 1.5GiB or 24GB");
    expect_plan(EXAMPLE " --max-live-bytes 0", 2, "its limits are 1 and 2^60 bytes");
    expect_plan(EXAMPLE " --max-live-bytes 9999999TiB", 2, "its limits are 1 and 2^60 bytes");
    expect_plan(EXAMPLE " --path nccl", 2, "--path is 'nccl', must be map or copy");
    expect_plan(EXAMPLE " --compute 0", 2, "--compute");
    expect_plan(EXAMPLE " --replicas 3", 2, "--replicas is 3, its limits are 1 and 2");
    expect_plan(EXAMPLE " --replicas 2 --host a:1:1 --host b:1:1 --auto --device-memory 1GiB", 2,
                "--auto is of one device at a time: not with --replicas");
    expect_plan(EXAMPLE " --auto", 2, "--auto needs --device-memory");
    expect_plan(EXAMPLE " --offload", 2, "are questions to --auto");
    expect_plan(EXAMPLE " --auto --compare --device-memory 1GiB", 2, "one at a time");
    expect_plan(EXAMPLE " --stratgy ddp", 2, "did you mean --strategy");
}

TEST(refused_policies_fail_with_the_numbers)
{
    expect_plan(EXAMPLE " --strategy hybrid", 1, "replica groups");
    expect_plan(EXAMPLE " --strategy zero2 --max-live-units 4", 1,
                "max_live_units is 4, must be at least 5");
    expect_plan(EXAMPLE " --micro-batches-per-worker 3 --accumulate 2", 1,
                "must be a multiple of accumulate (2)");
    expect_plan(EXAMPLE " --param-dtype f8", 1, "--param-dtype is 'f8'");
    expect_plan(EXAMPLE " --tie a=b", 1, "other models have units already");
    expect_plan(EXAMPLE " --model gpt", 1, "--spec a file: one or the other");
    expect_plan("--spec nowhere.json", 1, "open 'nowhere.json'");
    expect_plan("--spec /dev/null", 1, "/dev/null: spec line 1");
    expect_plan("--address /nowhere", 1, "/nowhere");
}

/* -- safetensors ----------------------------------------------------------------------------- */

/* A file of this header and so many bytes behind it; size < 0: as long as the header is. */
static void write_file(const char *header, long long size, uint64_t data_bytes)
{
    char path[128];
    snprintf(path, sizeof path, "%s/t.safetensors", dir);
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL);
    const uint64_t bytes = size >= 0 ? (uint64_t)size : strlen(header);
    for (unsigned i = 0; i < 8; i++)
        fputc((int)(bytes >> (8 * i) & 0xff), f);
    fwrite(header, 1, strlen(header), f);
    fflush(f);
    CHECK(ftruncate(fileno(f), (off_t)(8 + strlen(header) + data_bytes)) == 0);
    CHECK(fclose(f) == 0);
}

static void expect_file(const char *header, uint64_t data_bytes, const char *flags, int code,
                        const char *text)
{
    char args[512];
    write_file(header, -1, data_bytes);
    snprintf(args, sizeof args, "--safetensors t.safetensors %s", flags);
    expect_plan(args, code, text);
}

static const char gpt[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"h.0.mask\":{\"dtype\":\"BOOL\",\"shape\":[4],\"data_offsets\":[0,4]},"
    "\"h.0.w\":{\"dtype\":\"BF16\",\"shape\":[8,16],\"data_offsets\":[4,260]},"
    "\"h.10.w\":{\"dtype\":\"BF16\",\"shape\":[8,16],\"data_offsets\":[260,516]},"
    "\"h.9.w\":{\"dtype\":\"BF16\",\"shape\":[8,16],\"data_offsets\":[516,772]},"
    "\"ln_f.w\":{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[772,836]},"
    "\"wte.weight\":{\"dtype\":\"BF16\",\"shape\":[32,8],\"data_offsets\":[836,1348]}}";

TEST(safetensors_become_units_by_layer)
{
    expect_file(gpt, 1348, "", 0, "model t.safetensors: 5 units, 656 parameters, read as bf16");
    EXPECT_HAS(output, "0  wte   256         512 B  -");
    EXPECT_HAS(output, "3  h.10  128         256 B  -"); /* not between h.0 and h.9 */
    EXPECT_HAS(output, "4  ln_f  16          32 B   -");
    expect_file(gpt, 1348, "--tie lm_head.weight=wte.weight", 0, "uses 0");
    expect_file(gpt, 1348, "--units '^(h|ln)' --param-dtype f32", 0, "3 units");
    expect_file(gpt, 1348, "--unit-elems-min 250", 0, "2 units");
    expect_file(gpt, 1348, "--frozen '^h' --micro-batches-per-worker 4 --workers 2", 0, "frozen");
    EXPECT_HAS(output, "step: 4 micro-batches");
}

TEST(safetensors_questions_that_make_no_sense_are_refused)
{
    expect_file(gpt, 1348, "--tie lm_head", 1, "--tie is 'lm_head', takes ALIAS=TENSOR");
    expect_file(gpt, 1348, "--tie =wte.weight", 1, "takes ALIAS=TENSOR");
    expect_file(gpt, 1348, "--tie a=b", 1, "there is no tensor 'b'");
    expect_file(gpt, 1348, "--tie h.0.w=wte.weight", 1, "'h.0.w' is listed twice");
    expect_file(gpt, 1348, "--frozen .", 1, "leaves nothing to train");
    expect_file(gpt, 1348, "--frozen '['", 1, "is no POSIX extended expression");
    expect_file(gpt, 1348, "--units '['", 1, "pattern '['");
    expect_file(gpt, 1348, "--workers 4096 --micro-batches-per-worker 2", 1, "8192 micro-batches");
    expect_plan("--safetensors nowhere", 1, "open 'nowhere'");
    expect_plan("--safetensors .", 1, "not a regular file");
    expect_plan("--safetensors a --spec b", 1, "one model at a time");
}

#define ONE(dtype, shape, offsets) \
    "{\"w\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

TEST(hostile_safetensors_are_refused)
{
    expect_file(ONE("\"F32\"", "[4]", "[0,16]"), 15, "", 1, "'w' ends at byte 16 of 15");
    expect_file(ONE("\"F32\"", "[4]", "[0,12]"), 16, "", 1, "need 16 bytes");
    expect_file(ONE("\"F32\"", "[4]", "[16,0]"), 16, "", 1, "need 16 bytes");
    expect_file(ONE("\"F32\"", "[4]", "[-16,0]"), 16, "", 1, "data_offsets is not");
    expect_file(ONE("\"F32\"", "[4]", "[0,16,32]"), 16, "", 1, "data_offsets is not");
    expect_file(ONE("\"F32\"", "[0]", "[0,0]"), 16, "", 1, "shape has a size");
    expect_file(ONE("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 16, "", 1, "shape has a size");
    expect_file(ONE("\"F32\"", "[9223372036854775807,2]", "[0,0]"), 16, "", 1, "shape has a size");
    expect_file(ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 16, "", 1, "at most 8 numbers");
    expect_file(ONE("\"F33\"", "[4]", "[0,16]"), 16, "", 1, "dtype is not known");
    expect_file(ONE("7", "[4]", "[0,16]"), 16, "", 1, "dtype is not known");
    expect_file("{\"w\":7}", 16, "", 1, "tensor 'w': dtype is not known");
    expect_file("{\"w\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[0,16]}}", 16, "", 1,
                "1 to 262144 tensors, not 0");
    expect_file("{\"a b\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", 16, "", 1,
                "called 'a b'");
    expect_file("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
                "\"b\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[12,28]}}",
                28, "", 1, "tensors 'a' and 'b' overlap");
    expect_file("{\"w\":1,\"w\":2}", 16, "", 1, "duplicate");
    expect_file("[]", 16, "", 1, "header is not a JSON object");
    expect_file("{", 16, "", 1, "header, line 1");
    write_file("{}", 1000, 10);
    expect_plan("--safetensors t.safetensors", 1,
                "header claims more than the 12 bytes behind its size");
    write_file("{}", INT64_MAX, 10);
    expect_plan("--safetensors t.safetensors", 1, "header claims more than");
    write_file("{}", 100000001, 200000000);
    expect_plan("--safetensors t.safetensors", 1, "limit of 100000000");
}

/* Every truncation of a good file, and every byte of its header changed: an answer, never a crash.
 */
TEST(damaged_safetensors_get_an_answer)
{
    char header[sizeof gpt];
    uint64_t rng = test_seed(11);
    for (size_t i = 0; i < sizeof gpt - 1; i += 7) {
        memcpy(header, gpt, sizeof gpt);
        header[i] = (char)(1 + test_random(&rng) % 255);
        write_file(header, -1, 1348);
        EXPECT(plan("--safetensors t.safetensors") <= 1);
        memcpy(header, gpt, sizeof gpt);
        header[i] = '\0';
        write_file(header, -1, 1348);
        EXPECT_EQ(plan("--safetensors t.safetensors"), 1);
    }
}

/* -- Large models ---------------------------------------------------------------------------- */

TEST(long_models_are_elided)
{
    static char spec[64u * 1024];
    size_t used = (size_t)snprintf(spec, sizeof spec,
                                   "{\"name\":\"long\",\"micro_batches\":8,"
                                   "\"optimizer\":{\"kind\":\"sgd\"},\"units\":[");
    for (int u = 0; u < 200; u++)
        used += (size_t)snprintf(spec + used, sizeof spec - used,
                                 "%s{\"name\":\"h.%d\",\"tensors\":[{\"name\":\"h.%d.w\","
                                 "\"shape\":[64]}]}",
                                 u > 0 ? "," : "", u, u);
    snprintf(spec + used, sizeof spec - used, "]}");
    char path[128];
    snprintf(path, sizeof path, "%s/long.json", dir);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(spec, f) >= 0 && fclose(f) == 0);
    expect_plan("--spec long.json", 0, "(micro-batches 1 to 6 left out)");
    EXPECT_HAS(output, "  ..   ..     ..          ..     ..");
    EXPECT_HAS(output, "  192  h.192  64");
    EXPECT_HAS(output, "F199 B199-----");
    for (const char *line = output; *line != '\0'; line += strcspn(line, "\n") + 1)
        EXPECT(strcspn(line, "\n") <= 120);
}

/* -- Configurations of other tools ------------------------------------------------------------- */

static void write_config(const char *text)
{
    char path[96];
    snprintf(path, sizeof path, "%s/peer.json", dir);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

static void expect_peer(const char *flag, const char *config, int code, const char *text)
{
    char args[64];
    write_config(config);
    snprintf(args, sizeof args, "%s peer.json", flag);
    expect_plan(args, code, text);
}

TEST(deepspeeds_stages_are_strategies_when_asked_for)
{
    static const struct {
        const char *config, *flags;
    } rows[] = {
        { "{}", "so: --strategy zero3 --prefetch pre --forward-prefetch 1\n" },
        { "{\"zero_optimization\": {\"stage\": 0}}", "so: --strategy ddp " },
        { "{\"zero_optimization\": {\"stage\": 1}}", "so: --strategy zero1 " },
        { "{\"zero_optimization\": {\"stage\": 2}}", "so: --strategy zero1 " },
        { "{\"zero_optimization\": {\"stage\": 3, \"stage3_max_live_parameters\": 1e6}}",
          "so: --strategy zero3 --prefetch pre --forward-prefetch 1 --max-live-bytes 4000000\n" },
        { "{\"zero_optimization\": {\"stage3_max_live_parameters\": 1e6}, \"bf16\": "
          "{\"enabled\": true}}",
          " --max-live-bytes 2000000 --param-dtype bf16\n" },
        { "{\"fp16\": {\"enabled\": false, \"loss_scale\": 0}}", "off       not enabled\n" },
        { "{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 4, "
          "\"gradient_accumulation_steps\": 8}",
          " --micro-batches-per-worker 8 --workers 2\n" },
        { "{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 4}",
          " --micro-batches-per-worker 16\n" },
        { "{\"train_batch_size\": \"auto\"}", "script    the trainer fills it in" },
        { "{\"communication_data_type\": \"bf16\"}", " --grad-dtype bf16\n" },
        { "{\"zero_optimization\": {\"zero_quantized_weights\": false}}", "off       as here\n" },
        { "{\"zero_optimization\": {\"zero_quantized_weights\": true}}",
          "script    shard(codec=\"int8\")\n" },
        { "{\"zero_optimization\": {\"zero_quantized_gradients\": true}}",
          "script    shard(grad_codec=\"int8\")\n" },
        { "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\"}}}",
          "script    start cpu daemons with state on files" },
        { "{\"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}}}",
          "script    start cpu daemons that publish on files: `shardctl up --daemons N --publish" },
        { "{\"zero_optimization\": {\"offload_param\": {\"device\": \"cpu\"}}}",
          "script    start cpu daemons: `" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        expect_peer("--deepspeed", rows[i].config, 0, rows[i].flags);
}

TEST(knobs_are_refused_by_name_when_they_cannot_be_had)
{
    static const struct {
        const char *config, *text;
    } rows[] = {
        { "{\"zero_optimization\": {\"stage\": 4}}", "must be 0, 1, 2 or 3" },
        { "{\"zero_optimization\": {\"zero_hpz_partition_size\": 8}}",
          "zero_optimization.zero_hpz_partition_size  8      refused" },
        { "{\"zero_optimization\": {\"stge\": 3}}",
          "not known as a knob of DeepSpeed; did you mean zero_optimization.stage?" },
        { "{\"zero_optimization\": true}", "must be an object of knobs" },
        { "{\"gradient_accumulation_steps\": -1}", "must be a whole number from 1" },
        { "{\"gradient_accumulation_steps\": 1e9}", "at most 4096 micro-batches" },
        { "{\"optimizer\": {\"type\": \"OneBitAdam\"}}", "the daemons know adamw, sgd and lion" },
        { "{\"communication_data_type\": \"int8\"}", "must be fp32, bf16 or fp16" },
        { "{\"data_types\": {\"grad_accum_dtype\": \"bf16\"}}", "sums are fp32" },
        { "{\"pony\\u001b[31m\": 1}", "pony?[31m" },
        { "[1]", "not a JSON object of knobs" },
        { "{\"stage\": 1, \"stage\": 2}", "duplicate" },
        { "stage: 3", "JSON is read" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        expect_peer("--deepspeed", rows[i].config, 1, rows[i].text);
    expect_plan("--deepspeed none.json", 1, "none.json");
    expect_plan("--deepspeed peer.json --fsdp full_shard", 2, "one at a time");
}

TEST(fsdps_words_and_files_are_read_when_given)
{
    expect_plan("--fsdp 'full_shard auto_wrap offload'", 0, "so: --strategy zero3 ");
    expect_plan("--fsdp shard_grad_op", 0, "so: --strategy zero2 ");
    expect_plan("--fsdp FSDP_ZERO2", 0, "so: --strategy zero2 ");
    expect_plan("--fsdp hybrid_shard", 0, "so: --strategy zero3 ");
    EXPECT_HAS(output, "its copies are daemons', `shardctl host --replicas 2` on each host");
    expect_plan("--fsdp hybrid_shard_zero2", 0, "so: --strategy zero2 ");
    expect_plan("--fsdp fulshard", 1, "did you mean full_shard");
    expect_peer("--fsdp",
                "{\"fsdp_config\": {\"fsdp_sharding_strategy\": \"SHARD_GRAD_OP\", "
                "\"fsdp_backward_prefetch\": \"BACKWARD_POST\", \"fsdp_forward_prefetch\": false, "
                "\"fsdp_min_num_params\": 1000}, \"mixed_precision\": \"bf16\", "
                "\"num_processes\": 4}",
                0,
                "so: --strategy zero2 --prefetch post --forward-prefetch 0 --param-dtype bf16 "
                "--unit-elems-min 1000 --workers 4\n");
    expect_peer("--fsdp",
                "{\"sharding_strategy\": \"FULL_SHARD\", \"mixed_precision_policy\": "
                "{\"param_dtype\": \"torch.bfloat16\", \"reduce_dtype\": \"torch.float32\"}}",
                0, " --param-dtype bf16 --grad-dtype f32\n");
    expect_peer("--fsdp",
                "{\"strategy\": \"FSDP_ZERO2\", \"fetch_type\": \"post\", \"devices\": [0, 1], "
                "\"mixed_precision\": \"fp16\"}",
                0,
                "so: --strategy zero2 --prefetch post --forward-prefetch 1 --param-dtype f16 "
                "--workers 2\n");
    expect_peer("--fsdp", "{\"reshard_after_forward\": false}", 0, "so: --strategy zero2 ");
    expect_peer("--fsdp", "{\"xla\": true}", 1, "no TPUs");
}

TEST(plan_follows_a_configuration_when_a_model_is_named)
{
    write_config("{\"zero_optimization\": {\"stage\": 1}, \"gradient_accumulation_steps\": 4}");
    expect_plan("--deepspeed peer.json" EXAMPLE, 0, "so: --strategy zero1 ");
    EXPECT_HAS(output, "4 micro-batches");
    EXPECT_EQ(plan("--deepspeed peer.json --json" EXAMPLE), 0);
    json_t *config = json_loads(output, 0, NULL);
    EXPECT_STR(json_string_value(json_object_get(json_object_get(config, "policy"), "strategy")),
               "zero1");
    json_decref(config);
    EXPECT_EQ(plan("--deepspeed peer.json --strategy zero2 --json" EXAMPLE), 0);
    config = json_loads(output, 0, NULL);
    EXPECT_STR(json_string_value(json_object_get(json_object_get(config, "policy"), "strategy")),
               "zero2");
    json_decref(config);
    EXPECT_EQ(plan("--deepspeed peer.json --json"), 0);
    config = json_loads(output, 0, NULL);
    EXPECT_EQ(json_array_size(json_object_get(config, "knobs")), 2);
    EXPECT_EQ(json_integer_value(json_object_get(config, "refused")), 0);
    json_decref(config);
}

int main(int argc, char **argv)
{
    snprintf(dir, sizeof dir, "/tmp/shd-plan-XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    const int code = test_run_all(argc, argv);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    return system(command) == 0 ? code : 1;
}
