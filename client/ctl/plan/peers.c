/* What the knobs of DeepSpeed (0.19's deepspeed/runtime/config.py and docs/_pages/config-json.md)
 * and of FSDP (transformers' --fsdp and fsdp_config, accelerate's plugin, Giotto's words) are
 * here. Rows stand in the order of those documents. */
#include "client/ctl/plan/peers.h"

#include <math.h>
#include <string.h>
#include <strings.h>

#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/spec/layout.h"

static bool word_is(const json_t *value, const char *word)
{
    return json_is_string(value) && strcasecmp(json_string_value(value), word) == 0;
}

/* A count, also where it is written 5e8. 0 and false: none, and the answer says why. */
static uint64_t count_of(const json_t *value, struct peer_answer *a)
{
    const double n = json_is_number(value) ? json_number_value(value) : -1;
    if (n >= 1 && n <= 0x1p53 && floor(n) == n)
        return (uint64_t)n;
    peer_say(a, PEER_REFUSED, "must be a whole number from 1");
    return 0;
}

/* -- Sizes ------------------------------------------------------------------------------------ */

static void take_step_batch(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    c->sizes.step_batch = count_of(value, a);
}

static void take_micro_batch(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    c->sizes.micro_batch = count_of(value, a);
}

static void take_accumulate(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const uint64_t n = count_of(value, a);
    if (n > SHD_MICROS_MAX)
        peer_say(a, PEER_REFUSED, "at most %u micro-batches of a worker in a step", SHD_MICROS_MAX);
    else
        c->sizes.accumulate = n;
}

/* -- Strategy and prefetch -------------------------------------------------------------------- */

static void set_strategy(struct peer_config *c, enum plan_strategy strategy, struct peer_answer *a,
                         const char *why)
{
    c->ask->policy.strategy = strategy;
    peer_say(a, PEER_SETS, "--strategy %s%s", plan_strategy_name(strategy), why);
}

static void take_stage(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    static const struct {
        enum plan_strategy strategy;
        const char *why;
    } stages[] = {
        { PLAN_DDP, ": optimizer state is with the daemons in any case" },
        { PLAN_ZERO1, "" },
        { PLAN_ZERO1, ": which holds one gradient at a time, as stage 2 is meant to" },
        { PLAN_ZERO3, "" },
    };
    const json_int_t stage = json_is_integer(value) ? json_integer_value(value) : -1;
    if (stage < 0 || stage >= (json_int_t)ARRAY_SIZE(stages))
        peer_say(a, PEER_REFUSED, "must be 0, 1, 2 or 3");
    else
        set_strategy(c, stages[stage].strategy, a, stages[stage].why);
}

static void take_live(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    c->sizes.live_elems = count_of(value, a);
}

static void take_ahead(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    c->ask->policy.forward_prefetch = peer_is_on(value) ? 1 : 0;
    if (!peer_is_on(value))
        c->ask->policy.backward_prefetch = PLAN_PREFETCH_NONE;
    peer_say(a, PEER_SETS,
             peer_is_on(value) ? "--forward-prefetch 1: units are counted, not elements; "
                                 "--max-live-bytes bounds them"
                               : "--prefetch none --forward-prefetch 0");
}

static void take_forward_prefetch(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    c->ask->policy.forward_prefetch = peer_is_on(value) ? 1 : 0;
    peer_say(a, PEER_SETS, "--forward-prefetch %d", peer_is_on(value) ? 1 : 0);
}

static void take_backward_prefetch(struct peer_config *c, const json_t *value,
                                   struct peer_answer *a)
{
    const bool pre = word_is(value, "BACKWARD_PRE"), post = word_is(value, "BACKWARD_POST");
    if (!pre && !post && peer_is_on(value)) {
        peer_say(a, PEER_REFUSED, "must be BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH");
        return;
    }
    c->ask->policy.backward_prefetch = pre    ? PLAN_PREFETCH_PRE
                                       : post ? PLAN_PREFETCH_POST
                                              : PLAN_PREFETCH_NONE;
    peer_say(a, PEER_SETS, "--prefetch %s", plan_prefetch_name(c->ask->policy.backward_prefetch));
}

/* Giotto's fetch_type. */
static void take_fetch_type(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const int prefetch = json_is_string(value) ? plan_prefetch_parse(json_string_value(value)) : -1;
    if (prefetch < 0) {
        take_backward_prefetch(c, value, a);
        return;
    }
    c->ask->policy.backward_prefetch = (enum plan_backward_prefetch)prefetch;
    peer_say(a, PEER_SETS, "--prefetch %s", json_string_value(value));
}

/* Which copies there are is the daemons' to say. */
#define HYBRID ": its copies are daemons', `shardctl host --replicas 2` on each host"

static void take_sharding(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    static const struct {
        const char *word, *number;
        enum plan_strategy strategy;
        const char *why;
    } words[] = {
        { "FULL_SHARD", "1", PLAN_ZERO3, "" },
        { "SHARD_GRAD_OP", "2", PLAN_ZERO2, "" },
        { "NO_SHARD", "3", PLAN_DDP, "" },
        { "HYBRID_SHARD", "4", PLAN_ZERO3, HYBRID },
        { "HYBRID_SHARD_ZERO2", "5", PLAN_ZERO2, HYBRID },
        { "FSDP_ZERO3", "", PLAN_ZERO3, "" },
        { "FSDP_ZERO2", "", PLAN_ZERO2, "" },
        { "DDP", "", PLAN_DDP, "" },
    };
    const bool flag = json_is_boolean(value); /* FSDP2's reshard_after_forward */
    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        if (word_is(value, words[i].word) || word_is(value, words[i].number)) {
            set_strategy(c, words[i].strategy, a, words[i].why);
            return;
        }
    if (flag)
        set_strategy(c, json_is_true(value) ? PLAN_ZERO3 : PLAN_ZERO2, a, "");
    else
        peer_say(a, PEER_REFUSED, "must be FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD");
}

static void take_full(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)value;
    set_strategy(c, PLAN_ZERO3, a, "");
}

static void take_grad_op(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)value;
    set_strategy(c, PLAN_ZERO2, a, "");
}

static void take_hybrid(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)value;
    set_strategy(c, PLAN_ZERO3, a, HYBRID);
}

static void take_hybrid_grad_op(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)value;
    set_strategy(c, PLAN_ZERO2, a, HYBRID);
}

static void take_no_shard(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)value;
    set_strategy(c, PLAN_DDP, a, "");
}

static void take_unit_min(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const uint64_t n = peer_is_on(value) ? count_of(value, a) : 0;
    if (n > UINT32_MAX)
        peer_say(a, PEER_REFUSED, "at most %u", UINT32_MAX);
    else if (n > 0)
        c->ask->unit_elems_min = (uint32_t)n;
}

static void take_offload(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const json_t *device = json_is_object(value) ? json_object_get(value, "device") : value;
    (void)c;
    if (word_is(device, "nvme"))
        peer_say(
            a, PEER_SCRIPT,
            "start cpu daemons with state on files: `shardctl up --daemons N --state file:DIR`");
    else if (!peer_is_on(device))
        peer_say(a, PEER_OFF, "a daemon of a GPU holds its shard there");
    else
        peer_say(a, PEER_SCRIPT,
                 "start cpu daemons: `shardctl up --daemons N`; for --auto: "
                 "--offload");
}

static void take_codes(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)c;
    if (!peer_is_on(value))
        peer_say(a, PEER_OFF, "as here");
}

/* What workers read, and not what owners update. */
static void take_offload_param(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const json_t *device = json_is_object(value) ? json_object_get(value, "device") : value;
    if (word_is(device, "nvme"))
        peer_say(a, PEER_SCRIPT,
                 "start cpu daemons that publish on files: `shardctl up --daemons N --publish "
                 "file:DIR`");
    else
        take_offload(c, value, a);
}

/* -- Precision -------------------------------------------------------------------------------- */

static void set_param(struct peer_config *c, enum shd_dtype dtype, struct peer_answer *a)
{
    c->ask->param_dtype = dtype_name(dtype);
    peer_say(a, PEER_SETS, "--param-dtype %s: fp32 masters stay with the daemons%s",
             dtype_name(dtype), dtype == SHD_F16 ? "; sd.GradScaler() scales losses" : "");
}

static void take_bf16(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    if (peer_is_on(value))
        set_param(c, SHD_BF16, a);
    else
        peer_say(a, PEER_OFF, "parameters are read as fp32");
}

static void take_fp16(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    if (peer_is_on(value))
        set_param(c, SHD_F16, a);
    else
        peer_say(a, PEER_OFF, "parameters are read as fp32");
}

static enum shd_dtype dtype_of(const json_t *value, struct peer_answer *a)
{
    const char *word = json_is_string(value) ? json_string_value(value) : "";
    const char *name = strncmp(word, "torch.", 6) == 0 ? word + 6 : word;
    const enum shd_dtype dtype = dtype_parse(name);
    if (dtype == 0)
        peer_say(a, PEER_REFUSED, "must be fp32, bf16 or fp16");
    return dtype;
}

static void take_param_dtype(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    if (!peer_is_on(value)) {
        peer_say(a, PEER_OFF, "parameters are read as fp32");
        return;
    }
    const enum shd_dtype dtype = dtype_of(value, a);
    if (dtype != 0)
        set_param(c, dtype, a);
}

static void take_grad_dtype(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const enum shd_dtype dtype = peer_is_on(value) ? dtype_of(value, a) : SHD_F32;
    if (dtype == 0)
        return;
    c->ask->policy.grad_dtype = dtype;
    peer_say(a, PEER_SETS, "--grad-dtype %s: sums are fp32 in any case", dtype_name(dtype));
}

static void take_sum_dtype(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)c;
    if (!peer_is_on(value) || dtype_of(value, a) == SHD_F32)
        peer_say(a, PEER_SAME, "sums are fp32");
    else if (a->verdict != PEER_REFUSED)
        peer_say(a, PEER_REFUSED,
                 "sums are fp32: a result that depends on who sums first would "
                 "not survive a kill to the bit");
}

/* -- The rest --------------------------------------------------------------------------------- */

static void take_optimizer(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    static const char *const kinds[] = { "adam", "adamw", "sgd", "lion" };
    (void)c;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (word_is(value, kinds[i]))
            return;
    peer_say(a, PEER_REFUSED, "the daemons know adamw, sgd and lion");
}

static void take_reduce_op(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    (void)c;
    if (!word_is(value, "mean"))
        peer_say(a, PEER_REFUSED,
                 "a step's gradient is the mean over micro-batches; multiply the "
                 "loss where a sum is meant");
}

static void take_devices(struct peer_config *c, const json_t *value, struct peer_answer *a)
{
    const uint64_t n = json_is_array(value) ? json_array_size(value) : count_of(value, a);
    if (n == 0 || n > SHD_MICROS_MAX)
        return;
    c->ask->workers = (uint32_t)n;
    peer_say(a, PEER_SETS, "--workers %u", (unsigned)n);
}

/* -- DeepSpeed -------------------------------------------------------------------------------- */

#define Z "zero_optimization."

static const struct peer_knob deepspeed_knobs[] = {
    { "train_batch_size", PEER_SCRIPT, "the loader's; with the other two it gives --workers",
      take_step_batch },
    { "train_micro_batch_size_per_gpu", PEER_SCRIPT, "the loader's", take_micro_batch },
    { "gradient_accumulation_steps", PEER_SETS, "--micro-batches-per-worker", take_accumulate },
    { "managed_gradient_accumulation", PEER_SCRIPT, "shard(accumulate=)", NULL },
    { "optimizer.type", PEER_SCRIPT, "the optimizer given to shard()", take_optimizer },
    { "optimizer.params.*", PEER_SCRIPT, "the optimizer given to shard(): its groups and rates",
      NULL },
    { "optimizer.legacy_fusion", PEER_NEEDLESS, "the daemons' update is one pass", NULL },
    { "scheduler.*", PEER_SCRIPT, "one of torch.optim.lr_scheduler: rates go with each step",
      NULL },
    { "communication_data_type", PEER_SETS, "", take_grad_dtype },
    { "seq_parallel_communication_data_type", PEER_REFUSED, "no sequence parallelism", NULL },
    { "gradient_allreduce_op", PEER_SAME, "mean over micro-batches", take_reduce_op },
    { "prescale_gradients", PEER_NEEDLESS, "sums are fp32 and scaled once", NULL },
    { "gradient_predivide_factor", PEER_NEEDLESS, "sums are fp32 and scaled once", NULL },
    { "sparse_gradients", PEER_REFUSED, "gradients are dense", NULL },
    { "fp16.enabled", PEER_SETS, "", take_fp16 },
    { "fp16.auto_cast", PEER_SCRIPT, "torch.autocast", NULL },
    { "fp16.loss_scale", PEER_SCRIPT,
      "sd.GradScaler(); in C shd_update.loss_scale, or dynamic_loss_scale", NULL },
    { "fp16.initial_scale_power", PEER_NEEDLESS, "fixed: the dynamic scale begins at 2^16", NULL },
    { "fp16.loss_scale_window", PEER_NEEDLESS,
      "fixed: the dynamic scale doubles after 2,000 good steps", NULL },
    { "fp16.hysteresis", PEER_NEEDLESS, "fixed: the dynamic scale halves at each overflow", NULL },
    { "fp16.consecutive_hysteresis", PEER_NEEDLESS,
      "fixed: the dynamic scale halves at each overflow", NULL },
    { "fp16.min_loss_scale", PEER_NEEDLESS, "fixed: the dynamic scale is at least 1", NULL },
    { "fp16.fp16_master_weights_and_grads", PEER_REFUSED, "masters are fp32", NULL },
    { "bf16.enabled", PEER_SETS, "", take_bf16 },
    { "bfloat16.enabled", PEER_SETS, "", take_bf16 },
    { "bf16.check_grad_overflow", PEER_SAME, "a step with a gradient not finite is skipped", NULL },
    { "bf16.immediate_grad_update", PEER_SAME, "a gradient is added when it comes", NULL },
    { "bf16.bf16_master_weights_and_grads", PEER_REFUSED, "masters are fp32", NULL },
    { "bf16.bf16_optimizer_states", PEER_REFUSED, "moments are fp32, or int8", NULL },
    { "amp.*", PEER_REFUSED, "apex is not supported: torch.autocast in the script", NULL },
    { "torch_autocast.*", PEER_SCRIPT, "torch.autocast around the forward", NULL },
    { "data_types.grad_accum_dtype", PEER_SAME, "", take_sum_dtype },
    { "gradient_clipping", PEER_SCRIPT, "optimizer.clip_grad_norm_(): the whole model's norm",
      NULL },
    { Z "stage", PEER_SETS, "", take_stage },
    { Z "allgather_partitions", PEER_NEEDLESS, "parameters are fetched unit by unit", NULL },
    { Z "allgather_bucket_size", PEER_NEEDLESS, "a unit is the bucket: --units", NULL },
    { Z "overlap_comm", PEER_SAME, "fetches and returns overlap computing", NULL },
    { Z "reduce_scatter", PEER_SAME, "an owner gets its shard alone", NULL },
    { Z "reduce_bucket_size", PEER_NEEDLESS, "a unit is the bucket: --units", NULL },
    { Z "use_multi_rank_bucket_allreduce", PEER_NEEDLESS, "a unit is the bucket", NULL },
    { Z "contiguous_gradients", PEER_SAME, "a unit's gradient is one array", NULL },
    { Z "load_from_fp32_weights", PEER_SAME, "masters are restored as fp32", NULL },
    { Z "elastic_checkpoint", PEER_SAME, "any number of daemons restores a checkpoint", NULL },
    { Z "grad_hooks", PEER_SAME, "a gradient leaves when it is complete", NULL },
    { Z "round_robin_gradients", PEER_NEEDLESS, "each owner takes its shard", NULL },
    { Z "offload_param.*", PEER_SCRIPT, "", take_offload_param },
    { Z "offload_optimizer.*", PEER_SCRIPT, "", take_offload },
    { Z "cpu_offload", PEER_SCRIPT, "", take_offload },
    { Z "cpu_offload_param", PEER_SCRIPT, "", take_offload },
    { Z "cpu_offload_use_pin_memory", PEER_NEEDLESS, "what a GPU reads is pinned", NULL },
    { Z "sub_group_size", PEER_NEEDLESS, "the update goes in blocks of 2,048", NULL },
    { Z "zenflow.*", PEER_REFUSED, "updates are never late", NULL },
    { Z "stage3_max_live_parameters", PEER_SETS, "--max-live-bytes", take_live },
    { Z "stage3_max_reuse_distance", PEER_NEEDLESS, "a unit that is needed next is kept", NULL },
    { Z "stage3_prefetch_bucket_size", PEER_SETS, "", take_ahead },
    { Z "stage3_param_persistence_threshold", PEER_NEEDLESS,
      "small tensors travel with their unit; on one host units are mapped, not moved", NULL },
    { Z "stage3_model_persistence_threshold", PEER_NEEDLESS, "as the one above", NULL },
    { Z "stage3_module_granularity_threshold", PEER_NEEDLESS, "--unit-elems-min joins small units",
      NULL },
    { Z "stage3_gather_16bit_weights_on_model_save", PEER_SAME,
      "a checkpoint is whole, in safetensors", NULL },
    { Z "stage3_gather_fp16_weights_on_model_save", PEER_SAME,
      "a checkpoint is whole, in safetensors", NULL },
    { Z "stage3_use_all_reduce_for_fetch_params", PEER_NEEDLESS, "no collectives", NULL },
    { Z "stage3_allgather_sequential", PEER_NEEDLESS, "no collectives", NULL },
    { Z "ignore_unused_parameters", PEER_SAME, "a unit may take no part in a step", NULL },
    { Z "legacy_stage1", PEER_NEEDLESS, "there is one implementation", NULL },
    { Z "zero_hpz_partition_size", PEER_REFUSED, "one copy, held by the daemons", NULL },
    { Z "zero_quantized_weights", PEER_SCRIPT, "shard(codec=\"int8\")", take_codes },
    { Z "zero_quantized_nontrainable_weights", PEER_SCRIPT, "shard(codec=) is of frozen units, too",
      take_codes },
    { Z "zero_quantized_gradients", PEER_SCRIPT, "shard(grad_codec=\"int8\")", take_codes },
    { Z "zeropp_loco_param.*", PEER_REFUSED, "gradients are fp32, bf16 or fp16", NULL },
    { Z "mics_shard_size", PEER_REFUSED, "one copy, held by the daemons", NULL },
    { Z "mics_hierarchical_params_gather", PEER_REFUSED, "one copy, held by the daemons", NULL },
    { Z "memory_efficient_linear", PEER_NEEDLESS, "modules are not replaced", NULL },
    { Z "pipeline_loading_checkpoint", PEER_NEEDLESS, "daemons restore side by side", NULL },
    { Z "override_module_apply", PEER_NEEDLESS, "modules are not replaced", NULL },
    { Z "log_trace_cache_warnings", PEER_NEEDLESS, "there is no trace to lose", NULL },
    { Z "enable_sanity_checks", PEER_SAME, "a plan is checked before it runs", NULL },
    { Z "save_muon_momentum_buffer_in_memory", PEER_REFUSED, "muon is not built", NULL },
    { Z "leaf_module.*", PEER_SCRIPT, "shard(units=): what is one unit", NULL },
    { "zero_allow_untested_optimizer", PEER_NEEDLESS, "an optimizer that is not known is refused",
      NULL },
    { "zero_force_ds_cpu_optimizer", PEER_SAME, "the daemons update", NULL },
    { "aio.*", PEER_NEEDLESS, "files (`--state file:DIR`) are mapped, and read ahead", NULL },
    { "tensor_parallel.*", PEER_SCRIPT, "shard(mesh=), with PyTorch's parallelize_module()", NULL },
    { "expert_parallel.*", PEER_REFUSED,
      "expert parallelism is not built; idle experts cost "
      "nothing here",
      NULL },
    { "hybrid_engine.*", PEER_REFUSED, "not built; shd_read_step() has the live weights", NULL },
    { "steps_per_print", PEER_SCRIPT, "the script's own lines; also `shardctl log`", NULL },
    { "wall_clock_breakdown", PEER_SCRIPT, "`shardctl trace`", NULL },
    { "dump_state", PEER_SCRIPT, "`shardctl status --json`", NULL },
    { "memory_breakdown", PEER_SCRIPT, "`shardctl status`", NULL },
    { "autotuning.*", PEER_SCRIPT, "`shardctl plan --auto` and --compare", NULL },
    { "flops_profiler.*", PEER_SCRIPT, "torch.profiler; `shardctl trace` for the waits", NULL },
    { "activation_checkpointing.*", PEER_SCRIPT, "torch.utils.checkpoint in the model", NULL },
    { "sparse_attention.*", PEER_SCRIPT, "the model's", NULL },
    { "data_efficiency.*", PEER_SCRIPT, "the loader's", NULL },
    { "curriculum_learning.*", PEER_SCRIPT, "the loader's", NULL },
    { "progressive_layer_drop.*", PEER_SCRIPT, "the model's: a unit may take no part", NULL },
    { "eigenvalue.*", PEER_REFUSED, "not built", NULL },
    { "tensorboard.*", PEER_SCRIPT, "the script's own writer; also /metrics", NULL },
    { "wandb.*", PEER_SCRIPT, "the script's own writer; also /metrics", NULL },
    { "comet.*", PEER_SCRIPT, "the script's own writer; also /metrics", NULL },
    { "csv_monitor.*", PEER_SCRIPT, "`shardctl log --csv`", NULL },
    { "elasticity.*", PEER_SCRIPT, "`shardctl run --elastic`: workers come and go", NULL },
    { "comms_logger.*", PEER_SCRIPT, "`shardctl trace`", NULL },
    { "compression_training.*", PEER_REFUSED, "not built", NULL },
    { "checkpoint.*", PEER_SAME, "each daemon writes its shard; any number restores it", NULL },
    { "dataloader_drop_last", PEER_SCRIPT, "the loader's", NULL },
    { "disable_allgather", PEER_NEEDLESS, "no collectives", NULL },
    { "use_data_before_expert_parallelism", PEER_REFUSED, "expert parallelism is not built", NULL },
    { "log_level", PEER_SCRIPT, "--log-level and $SHARDD_LOG_LEVEL", NULL },
};

const struct peer_table peer_deepspeed = { "DeepSpeed", deepspeed_knobs,
                                           ARRAY_SIZE(deepspeed_knobs), NULL, false };

/* -- FSDP ------------------------------------------------------------------------------------- */

#define FSDP_KNOBS(below)                                                                          \
    { below "version", PEER_SAME, "as FSDP2: whole plain tensors while a unit computes", NULL },   \
        { below "sharding_strategy", PEER_SETS, "", take_sharding },                               \
        { below "reshard_after_forward", PEER_SETS, "", take_sharding },                           \
        { below "backward_prefetch", PEER_SETS, "", take_backward_prefetch },                      \
        { below "forward_prefetch", PEER_SETS, "", take_forward_prefetch },                        \
        { below "limit_all_gathers", PEER_SAME, "so many units are held at once as the plan says", \
          NULL },                                                                                  \
        { below "use_orig_params", PEER_SAME, "parameters stay the module's own", NULL },          \
        { below "sync_module_states", PEER_SAME, "one worker creates the model, all read it",      \
          NULL },                                                                                  \
        { below "cpu_ram_efficient_loading", PEER_SAME, "one worker creates the model", NULL },    \
        { below "auto_wrap_policy", PEER_SCRIPT, "shard(units=): \"auto\", classes or a function", \
          NULL },                                                                                  \
        { below "transformer_layer_cls_to_wrap", PEER_SCRIPT, "shard(units=[the classes])",        \
          NULL },                                                                                  \
        { below "transformer_cls_names_to_wrap", PEER_SCRIPT, "shard(units=[the classes])",        \
          NULL },                                                                                  \
        { below "min_num_params", PEER_SETS, "--unit-elems-min", take_unit_min },                  \
        { below "offload_params", PEER_SCRIPT, "", take_offload },                                 \
        { below "cpu_offload", PEER_SCRIPT, "", take_offload },                                    \
        { below "state_dict_type", PEER_SAME, "a state dict is whole, unit by unit", NULL },       \
        { below "state_dict_config.*", PEER_SAME, "a state dict is whole, unit by unit", NULL },   \
        { below "optim_state_dict_config.*", PEER_SCRIPT,                                          \
          "sd.save(): state goes with a checkpoint", NULL },                                       \
        { below "activation_checkpointing", PEER_SCRIPT, "torch.utils.checkpoint in the model",    \
          NULL },                                                                                  \
        { below "activation_checkpointing_offload", PEER_SCRIPT,                                   \
          "torch.utils.checkpoint in the model", NULL },                                           \
        { below "mixed_precision", PEER_SETS, "", take_param_dtype },                              \
        { below "mixed_precision_policy.param_dtype", PEER_SETS, "", take_param_dtype },           \
        { below "mixed_precision_policy.reduce_dtype", PEER_SETS, "", take_grad_dtype },           \
        { below "mixed_precision_policy.buffer_dtype", PEER_SCRIPT, "buffers are the module's",    \
          NULL },                                                                                  \
        { below "mixed_precision_policy.output_dtype", PEER_SCRIPT, "a cast in the model", NULL }, \
        { below "mixed_precision_policy.cast_forward_inputs", PEER_SCRIPT, "torch.autocast",       \
          NULL },                                                                                  \
        { below "param_init_fn", PEER_SCRIPT, "shard(init=)", NULL },                              \
        { below "ignored_modules", PEER_SCRIPT, "requires_grad_(False): frozen, not left out",     \
          NULL },                                                                                  \
        { below "xla", PEER_REFUSED, "no TPUs", NULL },                                            \
        { below "xla_fsdp_settings.*", PEER_REFUSED, "no TPUs", NULL },                            \
        { below "xla_fsdp_v2", PEER_REFUSED, "no TPUs", NULL },                                    \
        { below "xla_fsdp_grad_ckpt", PEER_REFUSED, "no TPUs", NULL },                             \
    {                                                                                              \
        below "float8_all_gather", PEER_REFUSED, "parameters are fp32, bf16 or fp16", NULL         \
    }

static const struct peer_knob fsdp_knobs[] = {
    /* the words of transformers' --fsdp */
    { "full_shard", PEER_SETS, "", take_full },
    { "shard_grad_op", PEER_SETS, "", take_grad_op },
    { "no_shard", PEER_SETS, "", take_no_shard },
    { "zero_dp_2", PEER_SETS, "", take_grad_op }, /* --sharded_ddp of transformers 4 */
    { "zero_dp_3", PEER_SETS, "", take_full },
    { "simple", PEER_SETS, "", take_grad_op },
    { "zero2", PEER_SETS, "", take_grad_op }, /* FSDP_ZERO2, as Giotto has it */
    { "zero3", PEER_SETS, "", take_full },
    { "hybrid_shard", PEER_SETS, "", take_hybrid },
    { "hybrid_shard_zero2", PEER_SETS, "", take_hybrid_grad_op },
    { "offload", PEER_SCRIPT, "", take_offload },
    { "auto_wrap", PEER_SCRIPT, "shard(units=\"auto\")", NULL },
    /* Giotto's */
    { "strategy", PEER_SETS, "", take_sharding },
    { "fetch_type", PEER_SETS, "", take_fetch_type },
    { "devices", PEER_SETS, "", take_devices },
    /* fsdp_config by itself, and within accelerate's or transformers' configuration */
    FSDP_KNOBS(""),
    FSDP_KNOBS("fsdp_config."),
    { "distributed_type", PEER_NEEDLESS, "shard() is called in the script", NULL },
    { "num_processes", PEER_SETS, "", take_devices },
    { "num_machines", PEER_SCRIPT, "`shardctl run` starts one host's workers", NULL },
    { "machine_rank", PEER_SCRIPT, "`shardctl run` starts one host's workers", NULL },
    { "gradient_accumulation_steps", PEER_SETS, "--micro-batches-per-worker", take_accumulate },
    { "gradient_clipping", PEER_SCRIPT, "optimizer.clip_grad_norm_()", NULL },
    { "downcast_bf16", PEER_REFUSED, "no TPUs", NULL },
    { "use_cpu", PEER_SCRIPT, "the script's device", NULL },
    { "compute_environment", PEER_NEEDLESS, "nothing depends on it", NULL },
    { "debug", PEER_SCRIPT, "--log-level debug", NULL },
    { "main_training_function", PEER_SCRIPT, "the script's", NULL },
    { "main_process_port", PEER_NEEDLESS, "sockets are files", NULL },
    { "rdzv_backend", PEER_NEEDLESS, "daemons are found by their directory", NULL },
    { "same_network", PEER_NEEDLESS, "daemons are found by their directory", NULL },
    { "dynamo_config.*", PEER_SCRIPT, "torch.compile in the script", NULL },
    { "enable_cpu_affinity", PEER_SCRIPT, "taskset, or systemd's CPUAffinity=", NULL },
};

const struct peer_table peer_fsdp = { "FSDP", fsdp_knobs, ARRAY_SIZE(fsdp_knobs), "fsdp_", true };
