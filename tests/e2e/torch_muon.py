#!/usr/bin/env python3
"""torch_muon.py LIBSHD: groups whose optimizer is Muon against torch.optim.Muon, with AdamW for the rest beside it; and
groups of Adafactor against torch.optim.Adafactor.

The same start values and gradients are given to torch and to libshd in this process ("local:"). Momentum, and what
AdamW updates in the same unit, must have torch's bits. The orthogonalized matrix cannot: torch iterates in bf16,
libshd in fp32. Both are held against torch's own code with its bf16 replaced by fp64, step by step:

    an error of bf16 is of the rounding of each product's result, u16 = 2^-9;
    one of fp32 is of its sums, of n terms at most: n u32 = n 2^-24, n the longer side;
    what comes after either is the same iteration, so to first order libshd is off by at most n 2^-15 of what torch
    is off by;

and then a step of the parameters adds three roundings of fp32. That is the tolerance: libshd's parameters are within
it of the exact ones, and so of torch's within it and torch's own error.

Adafactor is held against torch's own code with everything in fp64; see adafactor() for its tolerance.

Ends with 77 where there is no torch that has Muon (2.9), or a processor without AVX2."""
import ctypes as c
import importlib
import inspect
import json
import os
import sys

import torch_bits as tb  # goes on in the Python that has torch
import torch

STEPS, BIAS, U32 = 10, 128, 2.0 ** -24
if not hasattr(torch.optim, "Muon"):
    print(f"skipped: torch {torch.__version__} has no Muon")
    sys.exit(77)


def exact_iteration():
    """torch's own iteration, in fp64."""
    muon = importlib.import_module("torch.optim._muon")
    source = inspect.getsource(muon._zeropower_via_newtonschulz)
    if source.count("torch.bfloat16") != 1:
        sys.exit("torch's Newton-Schulz iteration is not in bf16 any more: look at torch/optim/_muon.py")
    scope = dict(vars(muon))
    exec(source.replace("torch.bfloat16", "torch.float64"), scope)
    return scope["_zeropower_via_newtonschulz"], muon._zeropower_via_newtonschulz, muon._adjust_lr


EXACT, IN_BF16, ADJUST = exact_iteration()


def run_shd(shape, options, decay, lrs, grads, biases, start):
    """After each step: parameters and momentum of the matrix, and the other tensor's parameters."""
    spec = {"name": "m", "seed": 4, "micro_batches": 1,
            "optimizer": {"kind": "adamw", "order": "torch", "beta2": 0.95},
            "groups": [{"name": "rest"}, {"name": "matrices", "weight_decay": decay,
                                          "optimizer": dict(options, kind="muon")}],
            "units": [{"name": "u", "tensors": [
                {"name": "b", "shape": [BIAS], "group": "rest", "init": ["const", 0.5]},
                {"name": "w", "shape": list(shape), "group": "matrices", "init": ["normal", 0, 0.1]}]}]}
    session, model = c.c_void_p(), c.c_void_p()
    grad = c.POINTER(c.c_float)()
    count = shape[0] * shape[1]
    out = []
    tb.lib.shd_unit_elems.restype = c.c_uint64
    tb.call("shd_connect", c.byref(tb.Options(8 + 8, b"local:")), c.byref(session))
    tb.call("shd_model_open", session, json.dumps(spec).encode(), c.byref(model))
    values = (c.c_float * tb.lib.shd_unit_elems(model, 0))()

    def matrix(array):
        tb.call("shd_get", model, 0, array, values, None, None)
        return torch.tensor(values[BIAS:BIAS + count]).reshape(shape)

    start.copy_(matrix(0))
    for lr, g, b in zip(lrs, grads, biases):
        tb.call("shd_grad", model, 0, 0, c.byref(grad))
        c.memmove(grad, b.data_ptr(), BIAS * 4)
        c.memmove(c.addressof(grad.contents) + BIAS * 4, g.contiguous().data_ptr(), count * 4)
        tb.call("shd_return", model, 0, 0)
        tb.call("shd_commit", model, c.byref(tb.Update(c.sizeof(tb.Update), lr=lr)), None)
        p, momentum = matrix(0), matrix(1)
        out.append((p, momentum, torch.tensor(values[:BIAS])))
        tb.call("shd_get", model, 0, 0, values, None, None)
        out[-1] = (p, momentum, torch.tensor(values[:BIAS]))
    tb.lib.shd_close(session)
    return out


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def compare(shape, options, decay):
    """What is wrong, in words; and how far torch and libshd were off."""
    lrs = [0.02 * (1 + k % 3) for k in range(STEPS)]
    grads = [torch.randn(shape) * 10 ** (torch.rand(shape) * 3 - 2) for _ in range(STEPS)]
    biases = [torch.randn(BIAS) for _ in range(STEPS)]
    start = torch.zeros(shape)
    ours = run_shd(shape, options, decay, lrs, grads, biases, start)
    w, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.full((BIAS,), 0.5))
    torch_options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    muon = torch.optim.Muon([w], lr=1, weight_decay=decay, **torch_options)
    adamw = torch.optim.AdamW([b], lr=1, betas=(0.9, 0.95), weight_decay=0, fused=True)
    group = muon.param_groups[0]
    exact, tolerance, off_torch, off_ours = start.double(), 0.0, 0.0, 0.0
    for k, (lr, g, bias) in enumerate(zip(lrs, grads, biases)):
        w.grad, b.grad = g.clone(), bias.clone()
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        momentum = muon.state[w]["momentum_buffer"]
        p, own_momentum, own_bias = ours[k]
        if not same_bits(own_momentum, momentum):
            return f"momentum has other bits than torch's after step {k}", 0, 0
        if not same_bits(own_bias, b.detach()):
            return f"what AdamW updates has other bits than torch's after step {k}", 0, 0
        u = g.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        rest = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        o, in_bf16 = EXACT(u, *rest), IN_BF16(u, *rest)
        rate = ADJUST(lr, group["adjust_lr_fn"], shape)
        exact = exact * (1 - lr * decay) - rate * o
        torch_error = (in_bf16.double() - o).abs().max().item()
        size = exact.abs().max().item() + rate * o.abs().max().item()
        tolerance += rate * torch_error * max(shape) * 2.0 ** -15 + 3 * U32 * size
        off_ours = (p.double() - exact).abs().max().item()
        off_torch = (w.detach().double() - exact).abs().max().item()
        if off_ours > tolerance:
            return f"off by {off_ours:.3g} after step {k}, the tolerance is {tolerance:.3g}", off_torch, off_ours
    return None, off_torch, off_ours


def run_adafactor(shape, options, decay, lrs, grads, start):
    """After each step: parameters and statistics. A unit's statistics are its last tensor."""
    spec = {"name": "f", "seed": 5, "micro_batches": 1, "optimizer": {"kind": "adamw", "order": "torch"},
            "groups": [{"name": "g", "weight_decay": decay, "optimizer": dict(options, kind="adafactor")}],
            "units": [{"name": "u", "tensors": [{"name": "w", "shape": list(shape), "init": ["normal", 0, 0.1]}]}]}
    session, model = c.c_void_p(), c.c_void_p()
    grad = c.POINTER(c.c_float)()
    tb.lib.shd_unit_elems.restype = c.c_uint64
    tb.call("shd_connect", c.byref(tb.Options(8 + 8, b"local:")), c.byref(session))
    tb.call("shd_model_open", session, json.dumps(spec).encode(), c.byref(model))
    values = (c.c_float * tb.lib.shd_unit_elems(model, 0))()
    count, behind = start.numel(), -(-start.numel() // 2048) * 2048

    def state():
        tb.call("shd_get", model, 0, 0, values, None, None)
        return torch.tensor(values[:count]).reshape(shape), torch.tensor(values[behind:])
    start.copy_(state()[0])
    out = []
    for lr, g in zip(lrs, grads):
        tb.call("shd_grad", model, 0, 0, c.byref(grad))
        c.memmove(grad, g.contiguous().data_ptr(), count * 4)
        tb.call("shd_return", model, 0, 0)
        tb.call("shd_commit", model, c.byref(tb.Update(c.sizeof(tb.Update), lr=lr)), None)
        out.append(state())
    tb.lib.shd_close(session)
    return out


def adafactor(shape, options, decay):
    """What is wrong, and how far torch and libshd were off of torch's code in fp64. Of u = 2^-24:

    statistics are positive, and a step adds to what is off of them at most 5 u of them: the mean is rounded, and the
    weight of what is new, and three roundings are in fma(w, mean - s, s), of which that of mean - s counts w / (1 - w)
    times, less than 1.4 (in the first step s is 0). So they are within 5 k u after k steps, which the update before it
    is clipped has 1.5 times (a product of two over a third, of which it has the root) and its norm once more; the
    roundings between are ten, so an update is within (15 k + 12) u of itself, and by what the parameters' size, which
    it is relative to, is off by: the tolerance before it over that size. Three more are in the parameters."""
    lrs = [0.02 * (1 + k % 3) for k in range(STEPS)]
    grads = [torch.randn(shape) * 10 ** (torch.rand(shape) * 3 - 2) for _ in range(STEPS)]
    start = torch.zeros(shape)
    ours = run_adafactor(shape, options, decay, lrs, grads, start)
    eps1, eps2 = options.get("eps1", 2.0 ** -23), options.get("eps2", 1e-3)
    both = []
    for dtype in (torch.float64, torch.float32):
        w = torch.nn.Parameter(start.to(dtype))
        both.append((w, torch.optim.Adafactor([w], lr=1, eps=(eps1, eps2), d=options.get("d", 1.0), weight_decay=decay,
                                              beta2_decay=options.get("beta2_decay", -0.8))))
    (exact, _), (plain, _) = both
    tolerance, off_torch, off_ours = 0.0, 0.0, 0.0
    for k, (lr, g) in enumerate(zip(lrs, grads)):
        before = exact.detach().clone()
        for w, optimizer in both:
            w.grad = g.to(w.dtype)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        change = (exact.detach() - before * (1 - lr * decay)).abs().max().item()
        rms = max(eps2, before.square().mean().sqrt().item())
        tolerance += change * ((15 * (k + 1) + 12) * U32 + tolerance / rms) + 3 * U32 * before.abs().max().item()
        state = both[0][1].state[exact]
        kept = [state[key].flatten() for key in ("row_var", "col_var", "variance") if key in state]
        for name, of, found in zip(("rows", "columns"), kept, ours[k][1].split([len(x) for x in kept] + [
                len(ours[k][1]) - sum(len(x) for x in kept)])):
            off = ((found.double() - of).abs() / of).max().item()
            if off > 5 * (k + 1) * U32:
                return f"statistics of {name} are off by {off / U32:.3g} units after step {k}", 0, 0
        p = ours[k][0]
        off_ours = (p.double() - exact.detach()).abs().max().item()
        off_torch = (plain.detach().double() - exact.detach()).abs().max().item()
        if off_ours > tolerance:
            return f"off by {off_ours:.3g} after step {k}, the tolerance is {tolerance:.3g}", off_torch, off_ours
    return None, off_torch, off_ours


def by_shard(kind):
    """A module given to sd.shard() with the optimizer, beside a plain one: what is wrong, in words. The same state,
    and parameters as near as an iteration in bf16 lets them be (its steps are of 0.02, of which it is off by a tenth
    at most each); Adafactor's by rounding. A state of PyTorch's is loaded and given back bit by bit."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(sys.argv[1])), "../python"))
    import libshd.torch as sd
    nn, muon = torch.nn, kind == "Muon"
    plain, mine = (nn.Sequential(nn.Linear(16, 32, not muon), nn.Tanh(), nn.Linear(32, 8, not muon)) for _ in "ab")
    mine.load_state_dict(plain.state_dict())
    first, second = (getattr(torch.optim, kind)(m.parameters(), lr=0.02, weight_decay=0.1) for m in (plain, mine))
    mine, second = sd.shard(mine, second, address="local:", name=kind)
    for _ in range(5):
        x = torch.randn(12, 16)
        for m, optimizer in ((plain, first), (mine, second)):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    off = max((p.detach() - q.detach()).abs().max().item() for p, q in zip(plain.parameters(), mine.parameters()))
    state = first.state_dict()
    if off > (0.01 if muon else 1e-6) or {k: v.keys() for k, v in second.state_dict()["state"].items()} != {
            k: v.keys() for k, v in state["state"].items()}:
        return f"parameters are off by {off:.3g}, or the state has other names"
    second.load_state_dict(state)
    own = second.state_dict()["state"]
    same = all(torch.equal(own[k][name], value) for k, of in state["state"].items() for name, value in of.items())
    return None if same else "the state that was loaded is another"


def main():
    torch.set_num_threads(1)
    torch.manual_seed(20261127)
    torch.set_flush_denormal(True)
    cases = [((48, 100), {}, 0.1), ((100, 48), {}, 0.1), ((64, 64), {"nesterov": False}, 0),
             ((130, 257), {"adjust_lr_fn": "match_rms_adamw"}, 0.1),
             ((257, 130), {"adjust_lr_fn": "spectral_unclamped", "momentum": 0.3}, 0.01),
             ((96, 40), {"ns_steps": 3, "eps": 1e-3}, 0.1), ((1, 40), {}, 0), ((40, 1), {}, 0),
             ((32, 32), {"ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 8}, 0)]
    adafactors = [((48, 100), {}, 0.1), ((100, 48), {"d": 2.0, "beta2_decay": -0.5}, 0), ((257, 130), {}, 0.01),
                  ((1, 40), {}, 0), ((40, 1), {"eps1": 1e-3}, 0.1), ((4099,), {}, 0.1), ((7,), {"eps2": 0.5}, 0),
                  ((3, 5, 33, 21), {}, 0.1)]
    failed = 0
    for of, (shape, options, decay) in [(compare, case) for case in cases] + [(adafactor, case) for case in adafactors]:
        wrong, off_torch, off_ours = of(shape, options, decay)
        print(f"{'FAILED ' if wrong else 'ok     '} {'Adafactor' if of is adafactor else 'Muon'} {shape} {options} weight_decay {decay}: "
              f"{wrong or f'after {STEPS} steps off by {off_ours:.2g}, torch by {off_torch:.2g}'}")
        failed += wrong is not None
    for kind in ("Muon", "Adafactor"):
        wrong = by_shard(kind)
        print(f"{'FAILED ' if wrong else 'ok     '} sd.shard() with {kind}{': ' + wrong if wrong else ''}")
        failed += wrong is not None
    count = len(cases) + len(adafactors) + 2
    print(f"{count - failed} of {count}; torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
