#!/usr/bin/env python3
"""torch_muon.py LIBSHD: groups whose optimizer is Muon against torch.optim.Muon, with AdamW for the rest beside it.

The same start values and gradients are given to torch and to libshd in this process ("local:"). Momentum, and what
AdamW updates in the same unit, must have torch's bits. The orthogonalized matrix cannot: torch iterates in bf16,
libshd in fp32. Both are held against torch's own code with its bf16 replaced by fp64, step by step:

    an error of bf16 is of the rounding of each product's result, u16 = 2^-9;
    one of fp32 is of its sums, of n terms at most: n u32 = n 2^-24, n the longer side;
    what comes after either is the same iteration, so to first order libshd is off by at most n 2^-15 of what torch
    is off by;

and then a step of the parameters adds three roundings of fp32. That is the tolerance: libshd's parameters are within
it of the exact ones, and so of torch's within it and torch's own error.

Ends with 77 where there is no torch that has Muon (2.9), or a processor without AVX2."""
import ctypes as c
import importlib
import inspect
import json
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


def main():
    torch.set_num_threads(1)
    torch.manual_seed(20261127)
    torch.set_flush_denormal(True)
    cases = [((48, 100), {}, 0.1), ((100, 48), {}, 0.1), ((64, 64), {"nesterov": False}, 0),
             ((130, 257), {"adjust_lr_fn": "match_rms_adamw"}, 0.1),
             ((257, 130), {"adjust_lr_fn": "spectral_unclamped", "momentum": 0.3}, 0.01),
             ((96, 40), {"ns_steps": 3, "eps": 1e-3}, 0.1), ((1, 40), {}, 0), ((40, 1), {}, 0),
             ((32, 32), {"ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 8}, 0)]
    failed = 0
    for shape, options, decay in cases:
        wrong, off_torch, off_ours = compare(shape, options, decay)
        print(f"{'FAILED ' if wrong else 'ok     '} {shape} {options} weight_decay {decay}: "
              f"{wrong or f'after {STEPS} steps off by {off_ours:.2g}, torch by {off_torch:.2g}'}")
        failed += wrong is not None
    print(f"{len(cases) - failed} of {len(cases)}; torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
