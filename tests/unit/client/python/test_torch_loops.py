#!/usr/bin/env python3
"""test_torch_loops.py BUILD_DIR: loops as they are written elsewhere, with libshd.torch: FSDP2's, DeepSpeed's, with
torch.amp's scaler, torch.compile, every scheduler; sums over tokens; readers, and a session at a notebook."""
import contextlib
import copy
import difflib
import io
import os
import re
import runpy
import shutil
import sys
import sysconfig
import tempfile
import time
import unittest

import torch_run
from torch_run import run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402  (once, not in each fork)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from test_torch import NOISE, Block, Gpt, Mlp, adamw, made  # noqa: E402

EXAMPLES = os.path.join(torch_run.ROOT, 'examples', 'pytorch')


def trained(module, opt, steps, micros=1, first=0):
    """Losses of this worker's share."""
    losses, world = [], int(os.environ['WORLD_SIZE'])
    for step in range(first, steps):
        for micro in range(micros):
            loss = module(1000 * step + micro * world + int(os.environ['RANK']))
            (loss / micros).backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses


class Refuses(unittest.TestCase):
    def refuses(self, what, *arguments, says, kind=libshd.NotSupported, **named):
        with self.assertRaisesRegex(kind, says):
            what(*arguments, **named)


class FullyShard(Refuses):
    """fully_shard() and Optimizer(model, optimizer) are shard()."""

    def marked(self, options=lambda at: {}, root=None, build=Gpt):
        module = made(build)
        for at, block in enumerate(module.blocks):
            self.assertIs(sd.fully_shard(block, **options(at)), block)
        return sd.fully_shard(module, **(root or {}))

    def test_the_same_bits_as_shard(self):
        def by_shard():
            module, opt = sd.shard(module := made(Gpt), adamw(module), units=[Block], name='by-shard')
            return trained(module, opt, 4), sd.digest(module)

        def marked(name, **how):
            def work():
                module = self.marked(**how)
                opt = sd.Optimizer(module, adamw(module), name=name)
                self.assertIsInstance(opt, sd.Optimizer)
                return trained(module, opt, 4), sd.digest(module)
            return work
        want = run(by_shard, 2)
        self.assertEqual(run(marked('by-marks'), 2), want)
        self.assertEqual(run(marked('by-marks-kept', options=lambda at: {'reshard_after_forward': bool(at)},
                                    root={'reshard_after_forward': True}), 2), want)

    def test_calls_of_its_modules(self):
        def work():
            module = self.marked()
            module.set_modules_to_forward_prefetch(list(module.blocks))
            module.set_modules_to_backward_prefetch([module.blocks[0]])
            module.set_reshard_after_forward(False)
            before = copy.deepcopy(module)  # of the plain class, and may be trained
            self.assertIs(type(before), Gpt)
            before(0).backward()
            self.refuses(module, 0, kind=libshd.Misuse, says=r'not yet to sd\.Optimizer\(model, optimizer\)')
            with torch.no_grad():
                module(0)
            opt = sd.Optimizer(module, adamw(module), name='marked-calls', address='local:')
            self.assertIs(type(copy.deepcopy(module)), Gpt)
            self.assertEqual(opt.engine.policy.forward_prefetch, 2)
            self.assertTrue(all(opt.engine.policy.holds(f'blocks.{at}') for at in range(2)))
            module.set_requires_gradient_sync(False)
            module(0).backward()
            self.assertIsNotNone(module.blocks[0].fc.weight.grad)
            module.set_requires_gradient_sync(True)
            module.set_is_last_backward(True)
            module.unshard(async_op=True).wait()
            module(1).backward()
            opt.step()
            self.assertIsNone(module.blocks[0].fc.weight.grad)
            self.refuses(module.set_reshard_after_forward, True, kind=libshd.Misuse, says='call it before')
            self.refuses(module.set_custom_all_gather, None, says=r'set_custom_all_gather\(\): there are no coll')
            self.refuses(sd.fully_shard, module.blocks[0], kind=libshd.Misuse, says='sharded already')
            self.refuses(sd.Optimizer, before, adamw(before), kind=libshd.Misuse, says=r'not given to fully_shard\(\)')
            self.refuses(sd.Optimizer, module, adamw(module), policy=sd.DDP(), kind=libshd.Misuse, says='policy=')
        run(work)

    def test_arguments_that_are_refused(self):
        class Mesh:
            def __init__(self, *sizes):
                self.sizes, self.ndim = sizes, len(sizes)

            def size(self):
                return self.sizes[0]
        for argument, value in {'mesh': Mesh(2, 2), 'reshard_after_forward': 2, 'offload_policy': 'disk',
                                'shard_placement_fn': lambda p: None, 'ignored_params': set(),
                                'dp_mesh_dims': ()}.items():
            self.refuses(sd.fully_shard, made(Mlp), says=fr'fully_shard\({argument}=', **{argument: value})
        self.refuses(sd.fully_shard, made(Mlp), mesh=Mesh(3), says='of 3 ranks.*WORLD_SIZE=1')
        for field, value in {'reduce_dtype': torch.bfloat16, 'param_dtype_override_fn': lambda p: None}.items():
            policy = sd.MixedPrecisionPolicy(**{field: value})
            self.refuses(sd.fully_shard, made(Mlp), mp_policy=policy, says=fr'MixedPrecisionPolicy\({field}=')
        module = made(Mlp)
        sd.fully_shard(module, mesh=Mesh(1), reshard_after_forward=False, offload_policy=sd.CPUOffloadPolicy())

    def test_modules_of_one_unit(self):
        def grouped():
            module = made(Gpt)
            sd.fully_shard(list(module.blocks))
            sd.fully_shard(module)
            return module, sd.Optimizer(module, adamw(module), name='listed', address='local:')

        def work():
            module = self.marked()
            opt = sd.Optimizer(module, adamw(module), name='listed', address='local:')
            names = opt.engine.model.unit_names()
            sd.close(module)
            first, (module, opt) = grouped(), grouped()  # of a process that has marked others meanwhile
            units = first[1].engine.model.unit_names()
            self.assertEqual(opt.engine.model.unit_names(), units)
            return names, units, trained(module, opt, 2)
        apart, together, losses = run(work)[0]
        self.assertEqual(len(apart), len(together) + 1)
        self.assertIn('blocks.0+1', together)
        self.assertLess(losses[1], losses[0] + 1)

    def test_mixed_precision(self):
        """Against plain PyTorch that does it by hand: fp32 masters, a module of bfloat16 made of them in each step."""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

            def forward(self, x):
                types.append((x.dtype, self.blocks[0].weight.dtype))
                for block in self.blocks:
                    x = block(x).tanh()
                return x
        types = []
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))

        def work():
            policy = sd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
            module = self.marked(lambda at: {'mp_policy': sd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
                                 {'mp_policy': policy}, Net)
            opt = sd.Optimizer(module, torch.optim.SGD(module.parameters(), 0.5), name='mixed', address='local:')
            losses = []
            for _ in range(8):
                y = module(x)
                self.assertEqual(y.dtype, torch.float32)
                loss = (y - 0.3).square().mean()
                losses.append(loss.item())
                loss.backward()
                opt.step()
            self.assertEqual(set(types), {(torch.bfloat16, torch.bfloat16)})
            return losses

        def reference():
            module = made(Net)
            opt = torch.optim.SGD(module.parameters(), 0.5, foreach=False)
            losses = []
            for _ in range(8):
                low = copy.deepcopy(module).bfloat16()
                loss = (low(x.bfloat16()).float() - 0.3).square().mean()
                losses.append(loss.item())
                loss.backward()
                for p, q in zip(module.parameters(), low.parameters()):
                    p.grad = q.grad.float()
                opt.step()
            return losses
        self.assertEqual(run(work), run(reference))


class Ported(unittest.TestCase):
    """Scripts of others in five lines."""

    def differing(self, name):
        """The lines that differ, without what the script says of itself; docs/pytorch.md has them all."""
        sides = []
        for side in ('before', 'after'):
            with open(os.path.join(EXAMPLES, f'{name}_{side}.py'), encoding='utf-8') as file:
                sides.append(re.sub('""".*?"""\n', '', file.read(), count=1, flags=re.DOTALL).splitlines())
        lines = [line for line in difflib.ndiff(*sides) if line[0] in '+-']
        with open(os.path.join(torch_run.ROOT, 'docs', 'pytorch.md'), encoding='utf-8') as file:
            docs = file.read().splitlines()
        for line in lines:
            self.assertIn(line[0] + line[2:], docs)
        return [sum(line[0] == sign for line in lines) for sign in '+-']

    def script(self, name, *arguments):
        """A function for run(): the script as a program, and what it printed."""
        def work():
            torch.set_num_threads(1)
            sys.argv = [name, *map(str, arguments)]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                runpy.run_path(os.path.join(EXAMPLES, name), run_name='__main__')
            return printed.getvalue()
        return work

    @staticmethod
    def losses(printed):
        return [float(loss) for loss in re.findall(r'loss (\S+)', printed)]

    def test_fsdp2(self):
        self.assertLessEqual(max(self.differing('fsdp2')), 5)
        tiny = ('--layers', 2, '--dim', 32, '--heads', 2, '--length', 16, '--batch', 4, '--steps', 8)
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(torch_run.free_port()))
        for more, bound in (((), 1e-4), (('--mixed-precision',), 2e-2)):
            if more:  # another type, under the same name
                daemons = torch_run.Daemons(BUILD)
                self.addCleanup(os.environ.update, SHARDD_ADDRESS=DAEMONS.address)
                self.addCleanup(daemons.down)
            before, after = (self.losses(run(self.script(f'fsdp2_{side}.py', *tiny, *more), 2)[0])
                             for side in ('before', 'after'))
            worst = max(abs(a - b) for a, b in zip(before, after))
            print(f'FSDP2 {more}: {worst:.1e} apart')
            self.assertEqual((len(before), len(after)), (8, 8))
            self.assertLess(worst, bound)
            self.assertLess(after[-1], after[0])

    def test_deepspeed(self):
        self.assertLessEqual(max(self.differing('deepspeed')), 5)
        printed = run(self.script('deepspeed_after.py', '--pictures', 160, '--steps', 30), 2)[0]
        losses = self.losses(printed)
        self.assertEqual(len(losses), 3)
        self.assertLess(losses[-1], losses[0])
        self.assertRegex(printed, r'% of the pictures')
        with open(os.path.join(EXAMPLES, 'deepspeed_before.py'), encoding='utf-8') as file:
            compile(file.read(), 'deepspeed_before.py', 'exec')


class Scales(Refuses):
    """GradScaler, and losses that are sums."""

    def test_a_scaled_loss_is_unscaled_by_the_owners(self):
        def work(scaled, **flags):
            module, opt = sd.shard(module := made(Gpt), torch.optim.SGD(module.parameters(), 0.1), address='local:',
                                   name='scaled', **flags)
            scaler, seen = sd.GradScaler('cpu', init_scale=65536.0, enabled=scaled), []
            for step in range(4):
                scaler.scale(module(step)).backward()
                scaler.unscale_(opt)
                if flags and scaled:
                    seen.append(max(p.grad.abs().max().item() for p in module.parameters()))
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                seen.append((opt.last.grad_norm, opt.last.skipped))
            if scaled:
                self.assertEqual((scaler.get_scale(), scaler.state_dict()['scale']), (65536.0, 65536.0))
            return seen, module(9).item()
        # A power of two: no bit is lost.
        plain = run(lambda: work(False))[0]
        self.assertEqual(run(lambda: work(True))[0], plain)
        looked, loss = run(lambda: work(True, grads='step'))[0]
        self.assertEqual(([one for one in looked if isinstance(one, tuple)], loss), plain)
        self.assertLess(max(looked[::2]), 100)

    def test_a_step_that_overflows_is_skipped_for_all(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='overflows')
            scaler = sd.GradScaler(module=module)
            before, rank = module(0).item(), int(os.environ['RANK'])
            loss = module(0) * (float('inf') if rank else 1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            skipped = opt.last.skipped, scaler.get_scale(), module(0).item() == before
            scaler.scale(module(0)).backward()
            scaler.step(opt)
            scaler.update()
            return skipped, opt.last.skipped, module(0).item() == before
        self.assertEqual(run(work, 2), [((True, 32768.0, True), False, False)] * 2)

    def test_what_is_refused(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='scaler', address='local:')
            theirs = torch.amp.GradScaler('cpu')
            theirs.scale(module(0)).backward()
            self.refuses(theirs.step, opt, kind=libshd.Misuse, says=r'use sd\.GradScaler')
            self.refuses(sd.GradScaler, growth_interval=100, says='growth_interval=100.*2000')
            scaler = sd.GradScaler()
            self.refuses(scaler.update, 4.0, says='update')
            self.refuses(scaler.load_state_dict, {'scale': 2.0}, says='scale 2.0.*65536')
            scaler.load_state_dict(scaler.state_dict())
            self.refuses(scaler.step, adamw(made(Mlp)), kind=libshd.Misuse, says='not the sharded')
            self.refuses(sd.weight, module, 3, kind=libshd.Misuse, says="loss='sum'")
            other, _ = sd.shard(other := made(Mlp), adamw(other), name='second', address='local:')
            self.refuses(sd.GradScaler().scale, torch.ones(1), kind=libshd.Misuse, says='2 modules.*module=')
            summed, its = sd.shard(summed := made(Mlp), adamw(summed), name='summed', address='local:', loss='sum')
            summed(0).backward()
            self.refuses(its.step, kind=libshd.Misuse, says=r'sd\.weight\(model, n\)')
            self.refuses(sd.weight, summed, -1, kind=libshd.InvalidArgument, says='weight -1')
            self.refuses(sd.report, summed, weight=1, kind=libshd.InvalidArgument, says="'weight'")
            sd.weight(summed, 1)
            its.step()
        run(work)

    def test_losses_that_are_sums_of_tokens(self):
        """Micro-batches of 1 to 9 tokens; the reference is one process that divides by all of them."""
        def tokens(step, micro):
            draw = torch.Generator().manual_seed(100 * step + micro)
            count = int(torch.randint(1, 10, (), generator=draw))
            return torch.randn(count, 8, generator=draw), torch.randint(8, (count,), generator=draw)

        def summed(module, step, micro):
            x, y = tokens(step, micro)
            return F.cross_entropy(module(x), y, reduction='sum'), len(y)

        def work():
            module = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
            module, opt = sd.shard(module, adamw(module), name='tokens', loss='sum', accumulate=2)
            losses = []
            for step in range(8):
                for backward in range(2):
                    loss, count = summed(module, step, 2 * backward + int(os.environ['RANK']))
                    loss.backward()
                    sd.weight(module, count)
                    sd.report(module, loss=loss)
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                opt.step()
                losses.append((opt.last.loss, opt.last.metrics['weight'], opt.last.grad_norm))
            return losses

        def reference(noise):
            module = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
            if noise:
                with torch.no_grad():
                    for p in module.parameters():
                        p.copy_(torch.nextafter(p, torch.full_like(p, 9.0)))
            opt, losses = adamw(module), []
            for step in range(8):
                of_all = [summed(module, step, micro) for micro in range(4)]
                count = sum(n for _, n in of_all)
                loss = sum(one for one, _ in of_all) / count
                loss.backward()
                losses.append((loss.item(), count, nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()))
                opt.step()
                opt.zero_grad()
            return losses
        first, second = run(work, 2)
        self.assertEqual(first, second)
        want, moved = run(lambda: (reference(False), reference(True)))[0]
        noise = max(abs(a[0] - b[0]) for a, b in zip(want, moved))
        worst = max(abs(a[0] - b[0]) for a, b in zip(want, first))
        print(f'sums over tokens: {worst:.1e} from plain PyTorch, whose own noise is {noise:.1e}')
        self.assertLessEqual(worst, NOISE * noise + 1e-6)
        self.assertEqual([count for _, count, _ in first], [count for _, count, _ in want])
        self.assertGreater(len({count for _, count, _ in first}), 3)


class Compiled(unittest.TestCase):
    """torch.compile of each block, as is usual with FSDP2: hooks stay outside of its graphs."""

    def train(self, backend, way):
        module = made(Gpt)
        if backend and way == 'before':
            for block in module.blocks:
                block.compile(backend=backend)
        module, opt = sd.shard(module, adamw(module), name='compiled', address='local:')
        if backend and way == 'after':
            for block in module.blocks:
                block.compile(backend=backend)
        if backend and way == 'whole':
            module.compile(backend=backend)
        losses = trained(module, opt, 3)
        sd.close(module)
        return losses

    def test_blocks_and_the_whole(self):
        def work():
            os.environ.update(RANK='0', WORLD_SIZE='1')
            plain, found = self.train(None, ''), {}
            for backend, way in (('eager', 'before'), ('eager', 'after'), ('aot_eager', 'after'), ('eager', 'whole')):
                found[backend, way] = self.train(backend, way)
            graphs = torch._dynamo.utils.counters['stats'].get('unique_graphs', 0)
            return plain, found, graphs
        plain, found, graphs = run(work)[0]
        print(f'compiled: {graphs} graphs')
        self.assertTrue(4 <= graphs <= 8, graphs)  # one a block and backend, and what is around them
        for way, losses in found.items():
            worst = max(abs(a - b) for a, b in zip(losses, plain))
            print(f'compiled {way}: {worst:.1e} apart')
            self.assertLess(worst, 1e-4 if way[0] == 'aot_eager' else 1e-6)

    @unittest.skipUnless(shutil.which('g++') and
                         os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')),
                         "inductor compiles by g++ and Python's headers, which are not both there")
    def test_inductor(self):
        """One layer of two: each graph is a program for a C++ compiler."""
        def work():
            from torch._inductor import config, metrics
            config.cpp_cache_precompile_headers, config.compile_threads = False, 1
            os.environ.update(RANK='0', WORLD_SIZE='1', TORCHINDUCTOR_CACHE_DIR=cache)
            losses = []
            for compiled in (False, True):
                module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
                with torch.no_grad():
                    for p in module.parameters():
                        p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
                module, opt = sd.shard(module, adamw(module), name='inductor', address='local:')
                if compiled:
                    module[1].compile(backend='inductor')
                losses.append([])
                for _ in range(3):
                    loss = module(torch.ones(4, 8)).square().mean()
                    loss.backward()
                    opt.step()
                    losses[-1].append(loss.item())
                sd.close(module)
            return losses, metrics.generated_kernel_count
        with tempfile.TemporaryDirectory() as cache:
            (plain, compiled), kernels = run(work)[0]
        self.assertGreater(kernels, 0)
        self.assertLess(max(abs(a - b) for a, b in zip(plain, compiled)), 1e-5)
        self.assertNotEqual(plain[0], plain[-1])


def schedules():
    """{name: (steps of plain torch and of shard() alike, whether it takes a loss)} of all of torch's."""
    lr = torch.optim.lr_scheduler
    return {
        'LambdaLR': lambda o: lr.LambdaLR(o, lambda at: 0.9 ** at),
        'MultiplicativeLR': lambda o: lr.MultiplicativeLR(o, lambda at: 0.8),
        'StepLR': lambda o: lr.StepLR(o, 2, 0.5),
        'MultiStepLR': lambda o: lr.MultiStepLR(o, [2, 4], 0.3),
        'ConstantLR': lambda o: lr.ConstantLR(o, 0.3, 3),
        'LinearLR': lambda o: lr.LinearLR(o, 0.1, total_iters=4),
        'ExponentialLR': lambda o: lr.ExponentialLR(o, 0.7),
        'SequentialLR': lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)], [2]),
        'PolynomialLR': lambda o: lr.PolynomialLR(o, 6, 2.0),
        'CosineAnnealingLR': lambda o: lr.CosineAnnealingLR(o, 5),
        'ChainedScheduler': lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)]),
        'ReduceLROnPlateau': lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
        'CyclicLR': lambda o: lr.CyclicLR(o, 0.001, 0.1, step_size_up=2),
        'CosineAnnealingWarmRestarts': lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
        'OneCycleLR': lambda o: lr.OneCycleLR(o, 0.1, total_steps=9),
        'SWALR': lambda o: torch.optim.swa_utils.SWALR(o, 0.002, anneal_epochs=4),
        'by hand': Decays}


class Gan(unittest.TestCase):
    """The loop of docs/pytorch.md, as it stands there, by two workers."""

    STEPS = 4

    def made(self):
        torch.manual_seed(5)
        generator, discriminator = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        return generator, discriminator, *(torch.optim.Adam(m.parameters(), 0.02) for m in (generator, discriminator))

    @staticmethod
    def loss(score, real):
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, real))

    @staticmethod
    def batch(step, rank):
        draw = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(6, 4, generator=draw) + 2, torch.randn(6, 3, generator=draw)

    @staticmethod
    def values(*modules):
        return [p.detach().clone() for module in modules for p in module.parameters()]

    def sharded(self, killed=None):
        with open(os.path.join(torch_run.ROOT, 'docs', 'pytorch.md'), encoding='utf-8') as file:
            code = re.search(r'### Two modules.*?```python\n(.*?)```', file.read(), re.S)[1]

        def work():
            rank = int(os.environ['RANK'])
            names = dict(zip(('G', 'D', 'opt_g', 'opt_d'), self.made()), sd=sd, loss=self.loss, steps=self.STEPS,
                         batch=lambda step: self.batch(step, rank))
            text = code.replace("name='", f"name='{killed or 'whole'}-")
            if killed and rank and torch_run.first(DAEMONS, 'gan'):
                text = text.replace('    opt_g.zero_grad()\n',
                                    '    if step == 2:\n        kill()\n    opt_g.zero_grad()\n')
                names['kill'] = torch_run.kill_here
            exec(text, names)
            return self.values(names['G'], names['D'])
        one, two = run(work, 2)
        self.assertTrue(all(map(torch.equal, one, two)))
        return one

    def plain(self):
        generator, discriminator, opt_g, opt_d = self.made()
        for step in range(self.STEPS):
            batches = [self.batch(step, rank) for rank in range(2)]
            opt_d.zero_grad()
            for real, noise in batches:
                fake = generator(noise).detach()
                ((self.loss(discriminator(real), 1) + self.loss(discriminator(fake), 0)) / 2).backward()
            opt_d.step()
            opt_g.zero_grad()
            for _, noise in batches:
                (self.loss(discriminator(generator(noise)), 1) / 2).backward()
            opt_g.step()
        return self.values(generator, discriminator)

    def test_it_has_the_numbers_of_plain_pytorch_through_a_kill_too(self):
        found = self.sharded()
        for one, two in zip(found, run(self.plain)[0]):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
        self.assertTrue(all(map(torch.equal, found, self.sharded('killed'))))

    def test_without_it_the_others_are_told_what_to_write(self):
        returned = os.path.join(DAEMONS.directory, 'gan-returned')

        def work():
            _, module, _, opt = self.made()
            module, opt = sd.shard(module, opt, name='told')
            self.loss(module(self.batch(0, 0)[0]), 1).backward()
            if os.environ['RANK'] == '1':
                torch_run.first(DAEMONS, 'gan-returned')
                with self.assertRaisesRegex(sd.StepReset, r'\(writable\(\) and its like\), or a batch .*discriminator: '
                                                          r'say shard\(grads="step"\) of that'):
                    opt.step()
                return
            while not os.path.exists(returned):
                time.sleep(0.01)
            opt.zero_grad()
        run(work, 2)


class Decays:
    """None of torch's moves it: weight decay of each group, by the loop itself."""

    def __init__(self, optimizer):
        self.groups, self.at = optimizer.param_groups, 0

    def step(self):
        self.at += 1
        for index, group in enumerate(self.groups):
            group['weight_decay'] = 0.02 * (self.at + index)


class Schedules(unittest.TestCase):
    """Every scheduler that torch has moves lr, momentum and betas here as it does there."""

    OPTIMIZERS = {'SGD': lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.01, foreach=False),
                  'AdamW': lambda groups: torch.optim.AdamW(groups, 0.01, foreach=False)}

    def losses(self, build, schedule, sharded, noise=False):
        """Of seven steps, and the rates that each began with."""
        module = made(Mlp)
        if noise:
            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(torch.nextafter(p, torch.full_like(p, 9.0)))
        halves = list(module.parameters())
        opt = build([{'params': halves[:2]}, {'params': halves[2:]}])
        if not sharded:
            moved = schedule(opt)
        elif sharded == 'before':
            moved = schedule(opt)
            module, opt = sd.shard(module, opt, name='scheduled', address='local:')
        else:
            module, opt = sd.shard(module, opt, name='scheduled', address='local:')
            moved = schedule(opt)
        losses, rates = [], []
        for step in range(7):
            loss = module(step)
            loss.backward()
            rates.append([[group.get(key) for key in ('lr', 'momentum', 'betas', 'weight_decay')]
                          for group in opt.param_groups])
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            if isinstance(moved, torch.optim.lr_scheduler.ReduceLROnPlateau):
                moved.step(round(losses[-1], 3))
            else:
                moved.step()
        if sharded:
            sd.close(module)
        return losses, rates

    def test_all_of_them(self):
        """SGD to the bit; AdamW as near as plain PyTorch is to itself after one unit in the last place."""
        lr = torch.optim.lr_scheduler
        known = {name for name, value in vars(lr).items()
                 if isinstance(value, type) and issubclass(value, lr.LRScheduler) and not name.startswith('_')}
        self.assertEqual(known - set(schedules()), {'LRScheduler'})

        def work():
            apart = {}
            for kind, build in self.OPTIMIZERS.items():
                for name, schedule in schedules().items():
                    want, rates = self.losses(build, schedule, '')
                    if kind == 'SGD':
                        bound = 0
                    else:
                        moved, _ = self.losses(build, schedule, '', noise=True)
                        bound = NOISE * max(abs(a - b) for a, b in zip(want, moved)) + 1e-6
                    for when in ('before', 'after'):
                        found, same = self.losses(build, schedule, when)
                        worst = max(abs(a - b) for a, b in zip(want, found))
                        if same != rates or worst > bound:
                            apart[kind, name, when] = worst, bound
                    if all(rate == rates[0] for rate in rates):
                        apart[kind, name] = 'nothing was moved'
            return apart
        self.assertEqual(run(work)[0], {})


class Looks(unittest.TestCase):
    """Readers, and a session at a notebook."""

    def test_a_reader_beside_training(self):
        def work():
            module, opt = sd.shard(module := made(Gpt), adamw(module), name='looked-at')
            with sd.reader(name='looked-at') as looking:
                for step in range(3):
                    with looking.snapshot() as params:
                        self.assertEqual((params.step, len(params)), (step, len(list(module.parameters()))))
                        seen = torch.func.functional_call(made(Gpt), params, (7,)).item()
                        self.assertEqual(seen, module(7).item())
                        kept = params['wte.weight']
                        whole = kept.clone()
                    self.assertEqual(params, {})
                    with looking.pinned() as params:
                        self.assertEqual((params.step, len(params)), (step, len(list(module.parameters()))))
                        module(step).backward()
                        opt.step()
                        self.assertTrue(torch.equal(kept, whole))  # a copy
                        self.assertTrue(torch.equal(params['wte.weight'], whole))  # in place, and of the step before
                    self.assertFalse(torch.equal(kept, module.wte.weight))
            with self.assertRaisesRegex(libshd.TimedOut, 'nowhere'):
                sd.reader(name='nowhere', timeout=2 * torch_run.PACE)  # of which it also attaches
            return sd.step_of(module)
        self.assertEqual(run(work)[0], 3)

    def test_a_session_at_a_notebook(self):
        def work():
            torch.set_num_threads(1)
            os.environ['NOTEBOOK_DIR'] = os.path.join(DAEMONS.directory, 'notebook')
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                runpy.run_path(os.path.join(EXAMPLES, 'notebook.py'), run_name='__main__')
            return printed.getvalue()
        first, second = run(work)[0], run(work)[0]  # the kernel is another one, the state is warm
        for begun, printed in enumerate((first, second)):
            self.assertEqual([int(step) for step in re.findall(r'attached at step (\d+)', printed)],
                             [200 * begun, 200 * begun + 100])
            self.assertEqual(len(re.findall(rf'step {200 * begun + 100} \w+\.\w+ ', printed)), 6)
            self.assertIn(f'saved step-{200 * begun + 200:012}', printed)
        losses = [float(loss) for loss in re.findall(r'loss (\S+)', first + second)]
        self.assertLess(losses[3], losses[0])


if __name__ == '__main__':
    BUILD = sys.argv.pop(1)
    DAEMONS = torch_run.Daemons(BUILD)
    torch_run.main(DAEMONS)
