#!/usr/bin/env python3
"""torch_bits.py LIBSHD: optimizers in torch's order ("order": "torch") against PyTorch's own, bit by bit; and moving
averages of parameters ("ema") against torch.optim.swa_utils.AveragedModel.

The same start values and gradients are given to torch.optim, one tensor at a time on the CPU, and to
libshd in this process ("local:"), once in every step and once with steps in between in which there is
no gradient, which neither moves the tensor nor counts as one of its steps. SGD must come to the same bits as it is. AdamW must where torch's
square root rounds correctly: MKL's, which PyTorch's wheels use, is off by an ulp in one of six, so it
is replaced by one through fp64; and with fused=True, whose root is the processor's, as it is.
Values are of ordinary size: shardd flushes denormals, as torch.set_flush_denormal(True) does.

Ends with 77 where there is no torch, or a processor without AVX2 (torch rounds otherwise there)."""
import ctypes as c
import itertools
import json
import math
import os
import subprocess
import sys

if "SHD_TEST_TORCH" not in os.environ:  # go on in the Python that has torch
    at = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/torch_env.py")
    found = subprocess.run([at, "--print"], capture_output=True, text=True, check=False)
    if found.returncode:
        print(found.stderr.strip())
        sys.exit(77)
    os.environ["SHD_TEST_TORCH"] = "1"
    os.execv(found.stdout.strip(), [found.stdout.strip(), *sys.argv])
import torch

if "AVX" not in torch.backends.cpu.get_cpu_capability():
    print("skipped: torch computes without AVX2 here")
    sys.exit(77)

N, STEPS = 4099, 25  # no multiple of a vector
lib = c.CDLL(sys.argv[1])


class Err(c.Structure):
    _fields_ = [("code", c.c_int), ("text", c.c_char * 256)]


class Options(c.Structure):
    _fields_ = [("size", c.c_size_t), ("address", c.c_char_p), ("more", c.c_char * 64)]


class Rates(c.Structure):
    _fields_ = [(n, c.c_double) for n in ("lr", "weight_decay", "beta1", "beta2")]


class Update(c.Structure):
    _fields_ = [("size", c.c_size_t), ("lr", c.c_double), ("clip_norm", c.c_double),
                ("loss_scale", c.c_double), ("dynamic_loss_scale", c.c_bool), ("blob", c.c_void_p),
                ("blob_bytes", c.c_size_t), ("divide_by", c.c_uint32),
                ("groups", c.POINTER(Rates)), ("group_count", c.c_uint32)]


err = Err()


def call(name, *args):
    if getattr(lib, name)(*args, c.byref(err)) != 0:
        sys.exit(f"{name}: {err.text.decode()}")


def run_shd(optimizer, decay, lrs, grads, beta1=math.nan, ema=None):
    """Parameters after the steps. They begin at 0.5: the first gradient is what tells them apart. There is another
    unit beside them, which has a gradient in each step."""
    spec = {"name": "m", "micro_batches": 1, "optimizer": dict(optimizer, order="torch"),
            "groups": [{"name": "g", "weight_decay": decay, "idle": "skip"}],
            "units": [{"name": "u", "tensors": [{"name": "w", "shape": [N], "init": ["const", 0.5]}]},
                      {"name": "busy", "tensors": [{"name": "x", "shape": [1]}]}]}
    if ema is not None:
        spec.update(ema)
    session, model = c.c_void_p(), c.c_void_p()
    grad, params = c.POINTER(c.c_float)(), c.c_void_p()
    call("shd_connect", c.byref(Options(8 + 8, b"local:")), c.byref(session))
    call("shd_model_open", session, json.dumps(spec).encode(), c.byref(model))
    for lr, g in zip(lrs, grads):
        if g is None:
            call("shd_return_none", model, 0, 0)
        else:
            call("shd_grad", model, 0, 0, c.byref(grad))
            c.memmove(grad, g.data_ptr(), N * 4)
            call("shd_return", model, 0, 0)
        call("shd_grad", model, 0, 1, c.byref(grad))
        grad[0] = 1
        call("shd_return", model, 0, 1)
        rates = Rates(lr, math.nan, beta1, math.nan)
        call("shd_commit", model, c.byref(Update(c.sizeof(Update), lr=1, groups=c.pointer(rates), group_count=1)), None)
    if ema is not None:
        lib.shd_unit_elems.restype = c.c_uint64
        average = (c.c_float * lib.shd_unit_elems(model, 0))()
        call("shd_get", model, 0, 5, average, None, None)
        lib.shd_close(session)
        return torch.tensor(average[:N])
    call("shd_acquire", model, 0, c.byref(params))
    out = torch.frombuffer((c.c_float * N).from_address(params.value), dtype=torch.float32).clone()
    lib.shd_release(model, 0)
    lib.shd_close(session)
    return out


def run_torch(make, lrs, grads):
    p = torch.nn.Parameter(torch.full((N,), 0.5))
    optimizer = make([p])
    for lr, g in zip(lrs, grads):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = g if g is None else g.clone()
        optimizer.step()
    return p.detach()


def run_averaged(average, lrs, grads):
    """What torch's AveragedModel has that is updated after each step of SGD."""
    module = torch.nn.Module()
    module.p = torch.nn.Parameter(torch.full((N,), 0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=1, momentum=0.9, weight_decay=0.1, foreach=False)
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average)
    for lr, g in zip(lrs, grads):
        optimizer.param_groups[0]["lr"] = lr
        module.p.grad = g.clone()
        optimizer.step()
        averaged.update_parameters(module)
    return averaged.module.p.detach()


def warmed(averages, params, n):
    """ema_warmup: torch has none of its own."""
    torch._foreach_lerp_(averages, params, 1 - min(0.97, (1 + int(n)) / (10 + int(n))))


def compare_averages(lrs, grads):
    """Returns how many comparisons failed, and of how many."""
    decays = (0.999, 0.9, 0.5, 0.3)
    cases = [({"ema": d}, torch.optim.swa_utils.get_ema_multi_avg_fn(d)) for d in decays]
    cases.append(({"ema": 0.97, "ema_warmup": True}, warmed))
    failed, sgd = 0, {"kind": "sgd", "momentum": 0.9}
    for ema, average in cases:
        got, want = run_shd(sgd, 0.1, lrs, grads, ema=ema), run_averaged(average, lrs, grads)
        differ = int((got.view(torch.int32) != want.view(torch.int32)).sum())
        print(f"{'ok     ' if differ == 0 else 'FAILED '} {ema}: {differ} of {N} elements differ after {STEPS} steps")
        failed += differ != 0
    return failed, len(cases)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(20261122)
    torch.set_flush_denormal(True)
    grads = [torch.randn(N) * 10 ** (torch.rand(N) * 4 - 3) for _ in range(STEPS)]
    lrs = [1e-2 * (1 + math.cos(math.pi * k / STEPS)) / 2 + 1e-4 for k in range(STEPS)]
    own_sqrt, failed, count = torch.Tensor.sqrt, 0, 0
    for name in ("release", "grad", "return", "commit", "acquire", "close"):
        getattr(lib, f"shd_{name}").argtypes = None
    lib.shd_release.argtypes = [c.c_void_p, c.c_uint32]

    def exact(x):
        return own_sqrt(x.double()).float() if x.dtype == torch.float32 else own_sqrt(x)

    cases = []
    for momentum, dampening, nesterov, decay in ((0, 0, False, 0), (0, 0, False, 0.1), (0.9, 0, False, 0.1),
                                                 (0.9, 0.3, False, 0.01), (0.9, 0, True, 0.05)):
        o = {"kind": "sgd", "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        cases.append((o, decay, own_sqrt, N, lambda p, m=momentum, d=dampening, n=nesterov, w=decay: torch.optim.SGD(
            p, lr=1, momentum=m, dampening=d, nesterov=n, weight_decay=w, foreach=False)))
    for beta1, beta2, eps, decay, coupled in ((0.9, 0.999, 1e-8, 0.01, False), (0.9, 0.95, 1e-8, 0, False),
                                              (0.3, 0.9, 1e-6, 0.1, False), (0.9, 0.999, 1e-8, 0.1, True)):
        o = {"kind": "adamw", "beta1": beta1, "beta2": beta2, "eps": eps,
             "decay": "coupled" if coupled else "decoupled"}
        kind = torch.optim.Adam if coupled else torch.optim.AdamW
        for fused in (False, True):
            if fused and coupled:
                continue
            # Behind the last whole vector fused=True rounds otherwise, by the compiler's choice.
            whole = N // 64 * 64 if fused else N
            cases.append((o, decay, own_sqrt if fused else exact, whole,
                          lambda p, k=kind, b=(beta1, beta2), e=eps, w=decay, f=fused: k(
                              p, lr=1, betas=b, eps=e, weight_decay=w, foreach=False, fused=f)))
    idle = [g if k % 5 > 1 else None for k, g in enumerate(grads)]  # 10 of 25, the first too
    for (optimizer, decay, root, whole, make), given in itertools.product(cases, (grads, idle)):
        torch.Tensor.sqrt = root
        want = run_torch(make, lrs, given)
        torch.Tensor.sqrt = own_sqrt
        got = run_shd(optimizer, decay, lrs, given)
        differ = int((got[:whole].view(torch.int32) != want[:whole].view(torch.int32)).sum())
        print(f"{'ok     ' if differ == 0 else 'FAILED '} {optimizer} weight_decay {decay}"
              f"{' against fused' if whole != N else ''}{' with idle steps' if given is idle else ''}: "
              f"{differ} of {whole} elements differ after {STEPS} steps")
        failed += differ != 0
        count += 1
    averages_failed, averages = compare_averages(lrs, grads)
    failed, count = failed + averages_failed, count + averages
    print(f"{count - failed} of {count} bit-equal; torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
