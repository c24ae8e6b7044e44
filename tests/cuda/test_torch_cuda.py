#!/usr/bin/env python3
"""test_torch_cuda.py BUILD_DIR SHIM_DIR|gpu: libshd.torch with parameters on a GPU.

SHIM_DIR: the library, the daemons and their kernels are the real ones, on the stand-in for the driver, whose device
memory is host memory at the same addresses: PyTorch computes there with its kernels for the host. gpu: on a GPU.

Wherever the state is, and however the work is split and killed, the bits are the same; losses are those of plain
PyTorch on the same device, as far apart as rounding leads.
"""
import contextlib
import functools
import os
import signal
import sys
import tempfile
import unittest
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, 'unit', 'client', 'python'))
import torch_run  # noqa: E402

os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # a fixed one: the same bits
BUILD, SHIM = os.path.abspath(sys.argv[1]), sys.argv[2]
if __name__ == '__main__':
    if SHIM != 'gpu' and 'SHD_TEST_TORCH' not in os.environ:
        # The driver's stand-in alone: PyTorch is not to find those of other libraries.
        only = tempfile.mkdtemp(prefix='shd-libcuda-')
        os.symlink(os.path.join(os.path.abspath(SHIM), 'libcuda.so.1'), os.path.join(only, 'libcuda.so.1'))
        os.environ.update(SHD_TEST_DRIVER=only, LD_LIBRARY_PATH=only, SHIM_CUDA_OPEN='')
    torch_run.start(BUILD)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import libshd.torch as sd  # noqa: E402
from libshd.errors import NotSupported  # noqa: E402
from libshd.torch import api, device  # noqa: E402

WHERE = 'cuda:0' if SHIM == 'gpu' else 'cpu'
MICRO, STEPS, NOISE = 2, 5, 8


class ShimStream:
    """What is queued there is done when somebody waits for it."""

    def __init__(self, handle):
        self.cuda_stream, self.queue = handle, []

    def wait_stream(self, other):
        while other.queue:
            other.queue.pop(0)()

    @contextlib.contextmanager
    def current(self):
        before, ShimCuda.now = ShimCuda.now, self
        try:
            yield
        finally:
            ShimCuda.now = before


class ShimCuda(device.Cuda):
    """The stand-in's device, whose addresses are the host's; what is computed is done at once."""
    now = ShimStream(0)

    tensor = staticmethod(device.tensor_at)

    def stream(self):
        return ShimCuda.now


class Late(torch.Tensor):
    """A gradient of a GPU that another stream is still to make."""
    is_cuda = True
    kept, copied = [], []  # until what streams its memory is kept; the streams in which it was copied

    @classmethod
    def of(cls, grad, stream):
        values = torch.full_like(grad, float('nan'))
        stream.queue.append(functools.partial(values.copy_, grad.clone()))
        return values.as_subclass(cls)

    def record_stream(self, stream):
        self.kept.append(stream)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            cls.copied.append(ShimCuda.now)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Elsewhere(ShimCuda):
    """Hooks run in another stream than the one that the library knows, and are ahead of it."""
    other, given = ShimStream(1), 0

    def give(self, model, micro, unit, grads, scale):
        late = [Late.of(grad, self.other) if grad is not None else None for grad in grads]
        Elsewhere.given += sum(grad is not None for grad in grads)
        with self.other.current():
            super().give(model, micro, unit, late, scale)
        assert ShimCuda.now is not self.other


if SHIM != 'gpu':
    warnings.filterwarnings('ignore', 'CUDA initialization')  # PyTorch's, by a driver that is none
    api.device_of = lambda parts, wanted=None: ShimCuda(torch.device('cuda', 0))


class Gpt(nn.Module):
    """A block over 32 tokens with attention, the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.wte, self.attn, self.proj = nn.Embedding(32, 32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.ln_1, self.ln_2, self.fc, self.out = nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, seed):
        tokens = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(seed)).cumsum(1).to(WHERE) % 32
        x = self.wte(tokens[:, :-1])
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.attn(self.ln_1(x)).chunk(3, 2))
        with sdpa_kernel(SDPBackend.MATH):  # on a GPU others sum in any order
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        x = x + self.out(F.gelu(self.fc(self.ln_2(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Cnn(nn.Module):
    """Convolution and batch norm, whose statistics the owners keep; a frozen layer; one that takes no part."""

    def __init__(self):
        super().__init__()
        self.conv_1, self.norm, self.conv_2 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.fc, self.idle = nn.Linear(8, 4), nn.Linear(3, 3)
        self.conv_2.requires_grad_(False)

    def forward(self, seed):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 1, 8, 8, generator=draw).to(WHERE), torch.randint(4, (8,), generator=draw).to(WHERE)
        x = F.relu(self.conv_2(F.relu(self.norm(self.conv_1(x)))))
        return F.cross_entropy(self.fc(x.mean((2, 3))), y)


def begin(kind, nudge=0.0):
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    module = kind().to(WHERE)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + nudge)
    trained = [p for p in module.parameters() if p.requires_grad]
    return module, torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)


def plain(kind, nudge=0.0):
    """Losses of plain PyTorch, a process alone."""
    module, optimizer = begin(kind, nudge)
    losses = []
    for step in range(STEPS):
        mine = [module(step * MICRO + micro) / MICRO for micro in range(MICRO)]
        sum(mine).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in mine))
    return losses


def train(kind, policy, at_step=lambda step: None, publish=None):
    """(losses of this worker's micro-batches by step, the digest)."""
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    module, optimizer = begin(kind)
    module, optimizer = sd.shard(module, optimizer, accumulate=MICRO // world, policy=policy, publish=publish,
                                 timeout=60 * torch_run.PACE)
    losses = {}
    while (step := sd.step_of(module)) < STEPS:
        at_step(step)
        sums = 0.0
        for micro in range(rank, MICRO, world):
            loss = module(step * MICRO + micro) / (MICRO // world)
            loss.backward()
            sums += loss.item() / world
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = sums
    return losses, sd.digest(module)


class Daemons(torch_run.Daemons):
    def __init__(self, devices):
        super().__init__(BUILD, devices=devices)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()


def trained(devices, world, kind, policy, **more):
    """Losses of all micro-batches by step, and the digest."""
    with Daemons(devices):
        answers = torch_run.run(lambda: train(kind, policy, **more), world)
    digests = {digest for _, digest in answers}
    assert len(digests) == 1, digests
    return [sum(losses.get(step, float('nan')) for losses, _ in answers) for step in range(STEPS)], digests.pop()


class Everywhere(unittest.TestCase):
    def near(self, kind, losses):
        (exact,), (nudged,) = torch_run.run(lambda: plain(kind)), torch_run.run(lambda: plain(kind, 2.0 ** -23))
        noise = max(abs(a - b) for a, b in zip(exact, nudged)) + 1e-7
        apart = max(abs(a - b) for a, b in zip(exact, losses))
        self.assertLess(apart, NOISE * noise, f'{losses}, plain PyTorch {exact}')

    def everywhere(self, kind, ways, **more):
        want = None
        for devices, world, policy in ways:
            losses, digest = trained(devices, world, kind, policy, **more)
            if want is None:
                want = digest
                if not more:
                    self.near(kind, losses)
            self.assertEqual(digest, want, f'{devices}, {world} workers, {policy}')

    def test_the_same_bits_wherever_the_state_is(self):
        self.everywhere(Gpt, (('gpu0', 1, sd.ZeRO3()), ('gpu0', 2, sd.DDP()), ('cpu0', 1, sd.ZeRO2()),
                              ('cpu0,gpu0', 2, sd.ZeRO1())))

    def test_statistics_and_layers_that_take_no_part(self):
        self.everywhere(Cnn, (('gpu0', 1, sd.ZeRO2()), ('cpu0,cpu1', 2, sd.ZeRO2())))

    def test_parameters_in_bfloat16(self):
        self.everywhere(Gpt, (('gpu0', 1, sd.ZeRO3()), ('cpu0', 1, sd.ZeRO2())), publish=torch.bfloat16)


@unittest.skipIf(SHIM == 'gpu', 'the stand-in\'s streams')
class Streams(unittest.TestCase):
    """Of two: one that the library knows, and one that hooks are in."""

    @staticmethod
    def elsewhere():
        api.device_of = lambda parts, wanted=None: Elsewhere(torch.device('cuda', 0))
        torch.cuda.stream = ShimStream.current
        answer = train(Gpt, sd.ZeRO2())
        known = ShimCuda.now
        return (*answer, Elsewhere.given, sum(stream is known for stream in Late.kept),
                sum(stream is known for stream in Late.copied), len(Late.copied))

    def test_gradients_of_another_stream_are_waited_for_and_kept(self):
        losses, digest = trained('gpu0', 1, Gpt, sd.ZeRO2())
        with Daemons('gpu0'):
            ((found, same, given, kept, in_order, copied),) = torch_run.run(self.elsewhere)
        self.assertEqual((list(found.values()), same), (losses, digest))
        self.assertGreater(given, STEPS * MICRO)
        self.assertEqual((kept, in_order, copied), (given, given, given))

    def test_the_librarys_own_stream_is_not_waited_for(self):
        def work():
            waited = []
            ShimStream.wait_stream = lambda self, other: waited.append(other)
            return train(Gpt, sd.ZeRO2()), len(waited)
        with Daemons('gpu0'):
            self.assertEqual(torch_run.run(work)[0][1], 0)


class Killed(unittest.TestCase):
    def killed(self, devices, whom):
        """whom(daemons): kill it, in the midst of training, once."""
        want = trained(devices, 1, Gpt, sd.ZeRO2())[1]
        with Daemons(devices) as daemons:
            def at_step(step):
                if step == 2 and torch_run.first(daemons, 'killed'):
                    whom(daemons)
            ((_, digest),) = torch_run.run(lambda: train(Gpt, sd.ZeRO2(), at_step))
        self.assertEqual(digest, want)

    @staticmethod
    def daemon(daemons):
        found = [int(pid) for pid in os.listdir('/proc') if pid.isdigit() and _is_daemon(pid, daemons.runtime)]
        assert found
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def test_a_worker(self):
        self.killed('gpu0', lambda daemons: torch_run.kill_here())

    def test_a_daemon_of_the_gpu(self):
        self.killed('gpu0', self.daemon)

    def test_daemons_of_which_copies_are_made(self):
        self.killed('cpu0,gpu0', self.daemon)


def _is_daemon(pid, address):
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            words = file.read().split(b'\0')
    except OSError:
        return False
    return words[0].endswith(b'shardd') and any(address.encode() in word for word in words) and b'--device' in b' '.join(words)


class Read(unittest.TestCase):
    def test_written_saved_and_let_go_of(self):
        def work():
            module, optimizer = begin(Gpt)
            module, optimizer = sd.shard(module, optimizer, policy=sd.ZeRO2())
            module(1).backward()
            optimizer.step()
            with sd.writable(module), torch.no_grad():
                module.fc.weight.fill_(0.5)
            assert module.fc.weight.eq(0.5).all()
            module(2).backward()
            optimizer.step()
            state = optimizer.state_dict()
            assert len(state['state']) == len(list(module.parameters()))
            with tempfile.TemporaryDirectory() as folder:
                sd.save_safetensors(module, os.path.join(folder, 'all.safetensors'))
                sd.load_safetensors(module, os.path.join(folder, 'all.safetensors'))
            optimizer.load_state_dict(state)
            before = [p.detach().clone() for p in module.parameters()]
            sd.close(module)
            assert all(torch.equal(a, b) and b.device.type == torch.device(WHERE).type
                       for a, b in zip(before, module.parameters()))
            return True
        for devices in ('gpu0', 'cpu0'):
            with Daemons(devices):
                self.assertEqual(torch_run.run(work), [True])

    def test_what_cannot_stay_in_place_is_refused(self):
        def work():
            module, optimizer = begin(Gpt)
            try:
                sd.shard(module, optimizer, policy=sd.ZeRO3())
            except NotSupported as e:
                return str(e)
            return ''
        with Daemons('cpu0'):
            self.assertIn('policy=sd.ZeRO2()', torch_run.run(work)[0])


if __name__ == '__main__':
    del sys.argv[2]
    torch.set_num_threads(1)
    passed = unittest.main(argv=[sys.argv[0], *sys.argv[2:]], exit=False, verbosity=2).result.wasSuccessful()
    if 'SHD_TEST_DRIVER' in os.environ:
        os.unlink(os.path.join(os.environ['SHD_TEST_DRIVER'], 'libcuda.so.1'))
        os.rmdir(os.environ['SHD_TEST_DRIVER'])
    sys.exit(not passed)
