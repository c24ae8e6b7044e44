#!/usr/bin/env python3
"""What each sharding strategy costs in time and memory, and what prefetch hides.

For each strategy: shardctl run -- shd-gpt on the mapped path, then on the copy path with 0, 1 and 5 ms
added to each fetch, which stand for a slow link. (The mapped path fetches nothing, so there is nothing
to delay.) Rounds alternate all variants; a round's figure is the median over its steps behind the
warm-up, as `shd-gpt --json` reports them; shown are median, least and greatest over rounds.

  step_ms       a training step
  wait_share    of it spent waiting for parameters, slots and the commit
  live_mib      parameters and gradients the worker holds at once, at most (by copy, or as if)
  fetch_ms      what a fetch takes: wait per fetch of zero3 without any prefetch, over the mapped
                path's wait; the delay, the copy, and what the thread that does it costs
  hidden        of the time of all fetches, the share that was not waited for:
                1 - (wait - wait on the mapped path) / (fetches x fetch_ms)
  hidden_plan   the same as the plan says it: `shardctl plan`'s operations laid out in time, one link
                that serves one fetch after the other, each unit's compute as measured in the same
                run. A fetch is then waited for max(0, fetch_ms - compute before its
                use).

hidden should be hidden_plan, within what else runs on the machine.
"""
import json
import os
import statistics
import tempfile

from figures import (
    finish, machine, parse_steps, read_steps, shd_gpt, show, show_head, start, steps_parser, under_daemons,
)  # fmt: skip

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MIB = 1 << 20


def parse():
    p = steps_parser("policies", __doc__, 5, "rounds of all variants", 12, 3)
    p.add_argument("--delays", default="0,1,5", help="ms added to each fetch (0,1,5); 0 is needed")
    p.add_argument("--strategies", default=",".join(STRATEGIES), help="(all)")
    p.add_argument("--prefetch", default="pre", help="in backward: pre, post, none (pre)")
    p.add_argument("--forward-prefetch", type=int, default=1, help="units ahead in forward (1)")
    p.add_argument("--micro-batches", type=int, default=4, help="of a step (4)")
    a = parse_steps(p)
    a.delays = [float(d) for d in a.delays.split(",")]
    a.strategies = a.strategies.split(",")
    if 0 not in a.delays or min(a.delays) < 0:
        p.error("--delays needs 0, which the others are compared with, and none below it")
    a.delays.sort()
    return a


def call(command):
    return finish("policies", start(command))


def model_arguments(a):
    return ["--micro-batches", str(a.micro_batches), *a.gpt]


def policy_arguments(strategy, prefetch, forward_prefetch):
    return ["--strategy", strategy, "--prefetch", prefetch, "--forward-prefetch", str(forward_prefetch)]


def plan(a, spec, policy):
    """The operations of a policy: [(kind, unit)]."""
    command = [os.path.join(a.bin, "shardctl"), "plan", "--spec", spec, "--json", *policy]
    ops = json.loads(call(command))["ops"]
    return [(op[0].lower(), op[1] if len(op) > 1 else None) for op in ops]


def fetches(ops):
    return sum(1 for kind, _ in ops if kind == "fetch")


def run(a, folder, policy, path, delay):
    """The steps behind the warm-up of one run, as shd-gpt reports them."""
    log = os.path.join(folder, "log")
    gpt = shd_gpt(a, a.steps, log, "--threads", "1", "--path", path, *policy, *model_arguments(a))
    if delay > 0:
        gpt += ["--fetch-delay-ms", str(delay)]
    call(under_daemons(a, 1, "--workers", "1", "--", *gpt))
    return read_steps(a, "policies", log, a.steps)


def median(steps, key):
    return statistics.median(s[key] for s in steps)


def unit_ms(a, steps, key):
    """Median compute of each unit and micro-batch."""
    units = len(steps[0][key])
    return [statistics.median(s[key][u] for s in steps) * 1e-6 / a.micro_batches for u in range(units)]


def planned_wait(a, ops, fetch_ms, steps):
    """Lay the operations out in time; returns the ms that compute waits for fetches."""
    compute = {"forward": unit_ms(a, steps, "forward_ns"), "backward": unit_ms(a, steps, "backward_ns")}
    now = link = waited = 0.0
    ready = {}
    for kind, unit in ops:
        if kind == "fetch":
            link = max(link, now) + fetch_ms
            ready[unit] = link
        elif kind == "wait":
            waited += max(0.0, ready[unit] - now)
            now = max(now, ready[unit])
        elif kind in compute:
            now += compute[kind][unit]
    return waited


def waited_ms(steps, mapped):
    return (median(steps, "wait_ns") - median(mapped, "wait_ns")) * 1e-6


def basic(steps):
    """{name: (unit, value)} that every run has."""
    total = sum(s["step_ns"] for s in steps)
    return {
        "step_ms": ("ms", median(steps, "step_ns") * 1e-6),
        "wait_share": ("share", sum(s["wait_ns"] for s in steps) / total),
        "live_mib": ("MiB", max(s["live_bytes_max"] for s in steps) / MIB),
    }


def hiding(a, ops, fetch_ms, steps, mapped):
    whole = fetches(ops) * fetch_ms
    return {
        "hidden": ("share", 1 - waited_ms(steps, mapped) / whole),
        "hidden_plan": ("share", 1 - planned_wait(a, ops, fetch_ms, steps) / whole),
    }


def one_round(a, folder, plans, collected):
    def collect(prefix, figures):
        for name, (unit, value) in figures.items():
            collected.setdefault((f"policies.{prefix}.{name}", unit), []).append(value)

    bare = policy_arguments("zero3", "none", 0)
    mapped, fetch_ms = run(a, folder, bare, "map", 0), {}
    for delay in a.delays:
        steps = run(a, folder, bare, "copy", delay)
        fetch_ms[delay] = waited_ms(steps, mapped) / fetches(plans["bare"])
        collect(f"noprefetch.copy.{delay:g}ms", {"fetch_ms": ("ms", fetch_ms[delay]), **basic(steps)})
    for strategy in a.strategies:
        policy = policy_arguments(strategy, a.prefetch, a.forward_prefetch)
        mapped = run(a, folder, policy, "map", 0)
        collect(f"{strategy}.map", basic(mapped))
        for delay in a.delays:
            steps = run(a, folder, policy, "copy", delay)
            figures = basic(steps)
            if delay > 0:
                figures.update(hiding(a, plans[strategy], fetch_ms[delay], steps, mapped))
            collect(f"{strategy}.copy.{delay:g}ms", figures)


def main():
    a = parse()
    if not a.json:
        print(
            f"policies: 1 daemon, 1 worker, 1 thread each, {a.micro_batches} micro-batches, backward "
            f"prefetch {a.prefetch}, forward prefetch {a.forward_prefetch}; {a.rounds} rounds of "
            f"{a.steps} steps, first {a.warmup} not counted; shd-gpt {' '.join(a.gpt) or '(defaults)'}; "
            f"{machine()}",
            flush=True,
        )
    collected = {}
    with tempfile.TemporaryDirectory(prefix="shardd-bench-") as folder:
        spec = os.path.join(folder, "spec.json")
        with open(spec, "w", encoding="utf-8") as f:
            f.write(call([os.path.join(a.bin, "shd-gpt"), "--print-spec", *model_arguments(a)]))
        plans = {"bare": plan(a, spec, policy_arguments("zero3", "none", 0))}
        for strategy in a.strategies:
            plans[strategy] = plan(
                a, spec, policy_arguments(strategy, a.prefetch, a.forward_prefetch)
            )
        for _ in range(a.rounds):
            one_round(a, folder, plans, collected)
    show_head(a)
    for (name, unit), values in collected.items():
        show(a, name, unit, values)


if __name__ == "__main__":
    main()
