#!/usr/bin/env python3
"""test_torch.py BUILD_DIR: training by libshd.torch has the numbers of plain PyTorch, through kills, too.

How far apart rounding alone may lead is measured beside it: plain PyTorch, from start values that differ by one
unit in the last place. The losses of shardd may be NOISE times as far away.
"""
import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import torch_run
from torch_run import run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd import errors as sd_errors  # noqa: E402

NOISE = 8


class Mlp(nn.Module):
    """8 numbers to one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, seed):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(self.layers(x), x.sum(1, keepdim=True).sin())


class Idle(Mlp):
    """A layer of experts: each batch goes to one of three, one of which is never chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def forward(self, seed):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(self.layers(x) + self.experts[seed % 1000 % 3 // 2](x), x.sum(1, keepdim=True).sin())


class Moe(Idle):
    """Experts that are routed to now and then: in a step by no worker, by one of two, or by both."""

    def forward(self, seed):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        chosen = (seed // 1000 * 2 + seed % 1000) % 5 // 2
        return F.mse_loss(self.layers(x) + self.experts[chosen](x), x.sum(1, keepdim=True).sin())


class Cnn(nn.Module):
    """Convolutions and batch norm; two frozen layers, a scalar, and one that takes no part."""

    def __init__(self, statistics):
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, track_running_stats=statistics)
        self.conv_2, self.norm_2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, track_running_stats=statistics)
        self.conv_2.requires_grad_(False)
        self.norm_2.bias.requires_grad_(False)
        self.scale, self.fc = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 4)

    def forward(self, seed):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 1, 8, 8, generator=draw), torch.randint(4, (8,), generator=draw)
        x = F.relu(self.norm_1(self.conv_1(x)))
        x = F.relu(self.norm_2(self.conv_2(x)))
        return F.cross_entropy(self.fc(x.mean((2, 3))) * self.scale, y)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # Keys without a bias: its gradient is zero but for noise, which Adam turns into steps of full length.
        self.attn, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.fc, self.mlp = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.attn(self.ln_1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(F.gelu(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    """Two blocks over 32 tokens, the head tied to the embedding."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.wte.weight
        self.checkpointed = checkpointed

    def forward(self, seed):
        tokens = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(seed)).cumsum(1) % 32
        x = self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.blocks:
            x = (torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointed == 'reentrant')
                 if self.checkpointed else block(x))
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), tokens[:, 1:].flatten())


def breaks(_module, _inputs, output):
    """A hook of a layer's forward: its backward runs out of memory."""
    def no_memory(_grad):
        raise torch.OutOfMemoryError('of the test')
    output.register_hook(no_memory)


def made(build, seed=1):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return build()


def adamw(module):
    """Two groups, as is usual: matrices decay."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW([{'params': [p for p in trainable if p.dim() > 1], 'weight_decay': 0.1},
                              {'params': [p for p in trainable if p.dim() < 2], 'weight_decay': 0.0}], lr=1e-2)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))


def plain(build, steps, world=1, accumulate=1, optimizer=adamw, schedule=warm_up, noise=False):
    """Losses of plain PyTorch over all workers' batches, a list for each step."""
    module = made(build)
    if noise:
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, 9.0)))
    made_of = optimizer(module)
    schedule, losses = schedule(made_of), []
    for step in range(steps):
        # Each worker has statistics of its own batches alone, so they go through one after the other.
        losses.append([])
        for micro in range(world * accumulate):
            loss = module(1000 * step + micro)
            (loss / world / accumulate).backward()
            losses[-1].append(loss.item())
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        made_of.step()
        schedule.step()
        made_of.zero_grad()
    return losses


def sharded(build, name, steps, accumulate=1, optimizer=adamw, schedule=warm_up, fault=lambda step: None, **flags):
    """The loop of plain(), sharded; a function for run(). What it returns: {step: losses}, digest."""
    def work():
        module = made(build)
        original = optimizer(module)
        moved = schedule(original)  # of the user's optimizer, made before
        module, opt = sd.shard(module, original, name=name, accumulate=accumulate, **flags)
        place, losses = opt.engine.place, {}
        for _ in range(sd.step_of(module)):
            moved.step()
        for step in range(sd.step_of(module), steps):
            losses[step] = []
            for backward in range(accumulate):
                loss = module(1000 * step + place.micro(backward))
                (loss / accumulate).backward()
                sd.report(module, loss=loss)
                losses[step].append(loss.item())
            fault(step)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            opt.step()
            moved.step()
            opt.zero_grad()
            losses[step].append(opt.last.loss)
        return losses, sd.digest(module)
    return work


class Numbers(unittest.TestCase):
    """Loss by loss."""

    def compare(self, build, name, steps, world=1, accumulate=1, **how):
        answers = run(sharded(build, name, steps, accumulate, **how), world)
        reference = run(lambda: plain(build, steps, world, accumulate, **how))[0]
        moved = run(lambda: plain(build, steps, world, accumulate, noise=True, **how))[0]
        noise = max(abs(a - b) for x, y in zip(reference, moved) for a, b in zip(x, y))
        self.assertEqual(len({digest for _, digest in answers}), 1)
        worst = 0.0
        for step in range(steps):
            means = {answers[rank][0][step][-1] for rank in range(world)}
            self.assertEqual(len(means), 1)
            for micro, loss in enumerate(reference[step]):
                worst = max(worst, abs(answers[micro % world][0][step][micro // world] - loss))
            self.assertAlmostEqual(means.pop(), sum(reference[step]) / len(reference[step]),
                                   delta=NOISE * noise + 1e-6)
        print(f'{name}: {worst:.1e} from plain PyTorch, whose own noise is {noise:.1e}')
        self.assertLessEqual(worst, NOISE * noise + 1e-6)
        self.assertNotEqual(reference[-1], reference[0])
        return answers

    def test_mlp(self):
        self.compare(Mlp, 'mlp-1', 20)

    def test_mlp_of_two_workers_with_two_batches_each(self):
        self.compare(Mlp, 'mlp-2', 10, world=2, accumulate=2)

    def test_cnn_with_batch_norm(self):
        self.compare(lambda: Cnn(True), 'cnn-1', 8)

    def test_cnn_of_two_workers(self):
        self.compare(lambda: Cnn(False), 'cnn-2', 8, world=2)
        self.compare(lambda: Cnn(True), 'cnn-3', 8, world=2)

    def test_gpt_with_a_tied_head(self):
        self.compare(Gpt, 'gpt-1', 10)

    def test_gpt_of_two_workers(self):
        self.compare(Gpt, 'gpt-2', 8, world=2)

    def test_the_other_optimizers(self):
        self.compare(Mlp, 'sgd', 15, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9,
                                                                         weight_decay=0.1, nesterov=True))
        self.compare(Mlp, 'sgd-dampened', 8, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9,
                                                                                dampening=0.5))
        self.compare(Mlp, 'adam', 8, optimizer=lambda m: torch.optim.Adam(m.parameters(), 1e-2, weight_decay=0.1))

    def test_schedules_of_each_group_that_move_betas_too(self):
        def two_rates(module):
            halves = list(module.parameters())
            return torch.optim.AdamW([{'params': halves[:2], 'lr': 1e-3}, {'params': halves[2:], 'weight_decay': 0.3}],
                                     lr=1e-2)
        lr = torch.optim.lr_scheduler
        self.compare(Mlp, 'one-cycle', 15, optimizer=two_rates,
                     schedule=lambda o: lr.OneCycleLR(o, max_lr=[1e-2, 3e-2], total_steps=20))
        self.compare(Mlp, 'cosine', 8, optimizer=two_rates, schedule=lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 5)], [3]))

    def test_a_layer_that_takes_no_part_stays(self):
        self.compare(Idle, 'idle', 8)
        self.compare(Idle, 'idle-2', 8, world=2)

    def test_experts_that_are_idle_now_and_then(self):
        def sgd(module):
            return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        self.compare(Moe, 'experts-1', 10, optimizer=sgd)
        self.compare(Moe, 'experts-2', 10, world=2, optimizer=sgd)

    def test_checkpointing(self):
        self.compare(lambda: Gpt(True), 'gpt-checkpoint', 3)
        self.compare(lambda: Gpt('reentrant'), 'gpt-reentrant', 3)


class Many(nn.Module):
    """10,000 parameters, as an embedding of experts may have: their specification fits no message."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.ParameterList(torch.randn(2) for _ in range(1000))

        def forward(self, x):
            return torch.tanh(x + torch.stack(list(self.shift)))

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[self.Layer() for _ in range(10)])

    def forward(self, seed):
        x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(seed))
        return self.layers(x).sum(1).square().mean()


class ManyTensors(unittest.TestCase):
    def test_ten_thousand(self):
        def work():
            module = made(Many)
            module, opt = sd.shard(module, torch.optim.SGD(module.parameters(), 50.0), name='many')
            self.assertGreater(len(opt.engine.model.spec), 768 * 1024)
            losses = []
            for step in range(3):
                losses.append(module(step))
                losses[-1].backward()
                opt.step()
            return [loss.item() for loss in losses]

        def plainly():
            module = made(Many)
            opt, losses = torch.optim.SGD(module.parameters(), 50.0), []
            for step in range(3):
                losses.append(module(step))
                losses[-1].backward()
                opt.step()
                opt.zero_grad()
            return [loss.item() for loss in losses]
        losses, wanted = run(work)[0], run(plainly)[0]
        self.assertNotEqual(wanted[0], wanted[2])
        self.assertEqual(losses, wanted)  # SGD of one worker: the same operations in the same order


class SameBits(unittest.TestCase):
    """What must not matter at all."""

    def test_policy_units_and_overlap_change_no_bit(self):
        bits = {}
        for name, flags in {'zero3': {}, 'zero2': {'policy': sd.ZeRO2()}, 'zero1': {'policy': sd.ZeRO1()},
                            'ddp': {'policy': sd.DDP()}, 'step': {'grads': 'step'}, 'waits': {'overlap': False},
                            'classes': {'units': [Block, nn.Embedding]},
                            'one': {'units': lambda name, module: 'all'}}.items():
            losses, _ = run(sharded(Gpt, 'bits-' + name, 3, **flags))[0]
            bits[name] = str(losses)
        self.assertEqual(len(set(bits.values())), 1, bits)

    def test_who_reads_after_a_step_waits_for_the_update(self):
        reads = {'detach': lambda p: p.detach().clone(), 'data': lambda p: p.data + 0,
                 'a list': lambda p: torch._foreach_add([p], 0.0)[0], 'copy': copy.deepcopy,
                 'numpy': lambda p: torch.tensor(p.detach().numpy())}

        def elsewhere(module):
            found = []
            other = threading.Thread(target=lambda: found.append(module[-1].weight.detach().clone()))
            other.start()
            other.join()
            return found[0]

        def work():
            torch.set_num_threads(1)
            module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
            module, opt = sd.shard(module, torch.optim.SGD(module.parameters(), 1e-4), name='read')
            before, wrong = module[-1].weight.detach().clone(), []
            for name, read in {'thread': None, 'state_dict': None, **reads}.items():
                module(torch.ones(1, 1024)).sum().backward()
                opt.step()
                found = (elsewhere(module) if name == 'thread' else module.state_dict()['3.weight'].clone()
                         if name == 'state_dict' else read(module[-1].weight))
                module(torch.ones(1, 1024))
                if torch.equal(found, before) or not torch.equal(found, module[-1].weight):
                    wrong.append(name)
                before = module[-1].weight.detach().clone()
            return wrong
        self.assertEqual(run(work)[0], [])

    def test_no_sync_is_accumulation(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='no-sync')
            for step in range(5):
                with sd.no_sync(module):
                    (module(2 * step) / 2).backward()
                (module(2 * step + 1) / 2).backward()
                opt.step()
            return torch.cat([p.detach().flatten() for p in module.parameters()])

        def reference():
            module = made(Mlp)
            opt = adamw(module)
            for step in range(5):
                for micro in range(2):
                    (module(2 * step + micro) / 2).backward()
                opt.step()
                opt.zero_grad()
            return torch.cat([p.detach().flatten() for p in module.parameters()])
        self.assertLess((run(work)[0] - run(reference)[0]).abs().max(), 1e-5)

    def test_a_short_last_window_is_as_in_plain_pytorch(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), torch.optim.SGD(module.parameters(), 0.1), accumulate=4,
                                   name='short')
            (module(1) / 4).backward()
            opt.step()
            return module(1).item()

        def reference():
            module = made(Mlp)
            opt = torch.optim.SGD(module.parameters(), 0.1)
            (module(1) / 4).backward()
            opt.step()
            return module(1).item()
        self.assertAlmostEqual(run(work)[0], run(reference)[0], places=6)


class Values(unittest.TestCase):
    """What the owners hold, written to and taken along."""

    def test_weights_that_are_clipped_after_each_step(self):
        def work():
            module = made(Mlp)
            module, opt = sd.shard(module, adamw(module), name='clipped')
            for step in range(sd.step_of(module), 5):
                module(1000 * step + int(os.environ['RANK'])).backward()
                opt.step()
                with sd.writable(module):
                    for p in module.parameters():
                        p.data.clamp_(-0.2, 0.2)
            found = [p.detach().clone() for p in module.parameters()], sd.step_of(module)
            sd.close(module)
            return found
        module = made(Mlp)
        optimizer = adamw(module)
        for step in range(5):
            for micro in range(2):
                (module(1000 * step + micro) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in module.parameters():
                    p.clamp_(-0.2, 0.2)
        for rank, (found, step) in enumerate(run(work, world=2)):
            self.assertEqual(step, 5, rank)
            for p, q in zip(found, module.parameters()):
                self.assertLess((p - q).abs().max().item(), 1e-5)
                self.assertLess(p.abs().max().item(), 0.2001)

    def test_optimizer_state_goes_to_a_plain_one_and_back(self):
        kinds = {'adamw': adamw, 'sgd': lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5),
                 'plain': lambda m: torch.optim.SGD(m.parameters(), 0.1)}

        def work():
            for name, optimizer in kinds.items():
                module = made(Mlp)
                module, opt = sd.shard(module, optimizer(module), name='state-' + name, address='local:')
                other = made(Mlp, seed=2)
                other, second = sd.shard(other, optimizer(other), name='state-2' + name, address='local:')
                self.assertEqual(opt.state_dict()['state'], {})
                for step in range(3):
                    module(step).backward()
                    opt.step()
                private = copy.deepcopy(module)
                plain_one = optimizer(private)
                plain_one.load_state_dict(opt.state_dict())
                second.load_state_dict(plain_one.state_dict())
                with sd.writable(other):
                    other.load_state_dict(module.state_dict())
                for p, q in zip(module.parameters(), other.parameters()):
                    self.assertTrue(torch.equal(p.detach(), q.detach()))
                ours, theirs = opt.state_dict(), second.state_dict()
                self.assertEqual(ours['state'].keys(), theirs['state'].keys())
                for at, state in ours['state'].items():
                    for key, value in state.items():
                        self.assertTrue(torch.equal(value, theirs['state'][at][key]), (name, at, key))
                losses = []
                for who, its in ((module, opt), (other, second), (private, plain_one)):
                    for step in (3, 4):
                        loss = who(step)
                        loss.backward()
                        its.step()
                        its.zero_grad()
                    losses.append(who(5).item())
                self.assertEqual(losses[0], losses[1])
                self.assertAlmostEqual(losses[0], losses[2], places=5)
                sd.close(module)
                sd.close(other)
            return True
        self.assertTrue(run(work)[0])

    def test_safetensors_in_and_out(self):
        path = os.path.join(DAEMONS.directory, 'gpt.safetensors')

        def work():
            module = made(Gpt).bfloat16()
            module, opt = sd.shard(module, adamw(module), name='files')
            module(1).backward()
            opt.step()
            sd.save_safetensors(module, path)
            sd.save_safetensors(module, path + '.fp32', fp32=True)
            values = load_file(path)
            for name, p in module.named_parameters():
                self.assertTrue(torch.equal(values[name], p.detach()), name)
            with sd.writable(module):
                module.ln_f.bias.data.fill_(1)
                module.wte.weight.data[0].zero_()
            self.assertTrue(module.head.weight[0].eq(0).all())
            self.assertEqual(sd.load_safetensors(module, path + '.fp32', lambda name: name), ([], []))
            sd.save_safetensors(module, path + '.again', fp32=True)
            with open(path + '.fp32', 'rb') as one, open(path + '.again', 'rb') as two:
                self.assertEqual(one.read(), two.read())
            self.assertEqual(sd.step_of(module), 1)
            sd.close(module)
            return True
        self.assertTrue(run(work)[0])


class Statistics(unittest.TestCase):
    """BatchNorm's running statistics: the mean over a step's micro-batches of what each makes of the owners'."""

    STEPS = 4

    @classmethod
    def setUpClass(cls):
        # Their own: a daemon has room for 64 models.
        cls.daemons = torch_run.Daemons(os.path.dirname(os.path.dirname(DAEMONS.shardctl)))

    @classmethod
    def tearDownClass(cls):
        cls.daemons.down()
        os.environ['SHARDD_ADDRESS'] = DAEMONS.address

    @staticmethod
    def build():
        return Cnn(True)

    @staticmethod
    def sgd(module):
        return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1, momentum=0.9)

    def train(self, name, world=1, accumulate=1, fault=lambda step: None, steps=STEPS, **flags):
        """{step: (loss of each micro-batch here, buffers after it)}, the digest."""
        def work():
            module, opt = sd.shard(module := made(self.build), self.sgd(module), name=name, accumulate=accumulate, **flags)
            seen = {}
            for step in range(sd.step_of(module), steps):
                losses = []
                for backward in range(accumulate):
                    loss = module(1000 * step + opt.engine.place.micro(backward))
                    opt.zero_grad() if accumulate == 1 else None  # in many loops it stands here
                    (loss / accumulate).backward()
                    losses.append(loss.item())
                fault(step)
                opt.step()
                seen[step] = losses, {key: b.clone() for key, b in module.named_buffers()}
            return seen, sd.digest(module)
        return run(work, world)

    def plain(self, micros, steps=STEPS, noise=False):
        """The same of plain PyTorch: each micro-batch begins with the step's buffers, and their mean is what follows."""
        def work():
            module = made(self.build)
            if noise:
                with torch.no_grad():
                    for p in module.parameters():
                        p.copy_(torch.nextafter(p, torch.full_like(p, 9.0)))
            opt, seen = self.sgd(module), {}
            for step in range(steps):
                begun = {key: b.clone() for key, b in module.named_buffers()}
                losses, sums = [], {key: torch.zeros(b.shape) for key, b in begun.items()}
                for micro in range(micros):
                    for key, buffer in module.named_buffers():
                        buffer.copy_(begun[key])
                    loss = module(1000 * step + micro)
                    (loss / micros).backward()
                    losses.append(loss.item())
                    sums = {key: sums[key] + b for key, b in module.named_buffers()}
                for key, buffer in module.named_buffers():
                    buffer.copy_(sums[key] / micros)
                opt.step()
                opt.zero_grad()
                seen[step] = losses, {key: b.clone() for key, b in module.named_buffers()}
            return seen
        return run(work)[0]

    def same(self, one, two):
        self.assertEqual(sorted(one), sorted(two))
        for step, (losses, buffers) in one.items():
            self.assertEqual(losses, two[step][0])
            self.differs(buffers, two[step][1], 0)

    def differs(self, one, two, bound):
        self.assertEqual(sorted(one), sorted(two))
        for key, value in one.items():
            self.assertEqual(value.dtype, two[key].dtype)
            self.assertLessEqual((value.double() - two[key].double()).abs().max(), bound, key)

    def test_one_batch_a_step_has_pytorchs_bits(self):
        (seen, _), = self.train('statistics-1')
        self.same(seen, self.plain(1))
        self.assertEqual(seen[3][1]['norm_1.num_batches_tracked'].item(), 4)

        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.fc = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1)

            def forward(self, seed):
                x = self.norm(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
                return self.fc(x.to(self.fc.weight.dtype)).square().mean()

        def cast():
            module, opt = sd.shard(module := made(Half), self.sgd(module), name='statistics-16', publish=torch.bfloat16)
            module(1).backward()
            opt.step()
            return [b.clone() for b in module.buffers()]

        def plain():
            module = made(Half)
            module(1)
            return list(module.buffers())
        # Where workers read fewer bits of the parameters they are fp32 all the same.
        for one, two in zip(run(cast)[0], run(plain)[0]):
            self.assertEqual(one.dtype, two.dtype)
            self.assertTrue(torch.equal(one, two))

    def test_how_batches_are_split_over_workers_changes_no_bit(self):
        (alone, digest), = self.train('statistics-2', accumulate=2)
        (first, same), (second, again) = self.train('statistics-2-workers', world=2)
        self.assertEqual({digest}, {same, again})
        for step, (losses, buffers) in alone.items():
            self.assertEqual(losses, first[step][0] + second[step][0])
            self.differs(buffers, first[step][1], 0)
            self.differs(buffers, second[step][1], 0)
        # Parameters are apart by the rounding of the gradients' sum, statistics of the first step by nothing.
        reference, moved = self.plain(2), self.plain(2, noise=True)
        self.differs(alone[0][1], reference[0][1], 0)
        for step, (losses, buffers) in reference.items():
            noise = max([abs(one - two) for one, two in zip(losses, moved[step][0])]
                        + [(b.double() - moved[step][1][key].double()).abs().max() for key, b in buffers.items()])
            for one, two in zip(losses, alone[step][0]):
                self.assertAlmostEqual(one, two, delta=NOISE * noise + 1e-6)
            self.differs(buffers, alone[step][1], NOISE * noise + 1e-6)
        (here, same), = self.train('statistics-2', accumulate=2, address='local:')
        self.assertEqual(same, digest)
        self.differs(here[3][1], alone[3][1], 0)

    def test_kills_change_no_bit(self):
        (whole, digest), _ = self.train('statistics-whole', world=2)
        for what in ('worker', 'daemon'):
            marker = os.path.join(DAEMONS.directory, 'statistics-' + what)

            def fault(step, what=what, marker=marker):
                if step == 2 and os.environ['RANK'] == '1' and not os.path.exists(marker):
                    with open(marker, 'w', encoding='ascii'):
                        pass
                    session = libshd.Session()
                    os.kill(os.getpid() if what == 'worker' else session.status(0)['pid'], signal.SIGKILL)
                    session.close()
            for found, same in self.train('statistics-' + what, world=2, fault=fault):
                self.assertEqual(same, digest)
                for step, (_, buffers) in found.items():
                    self.differs(buffers, whole[step][1], 0)
            self.assertTrue(os.path.exists(marker))

    def test_leased_batches_too(self):
        def work(name):
            module, opt = sd.shard(module := made(self.build), self.sgd(module), name=name, micro_batches=3)
            for step, micro in sd.leases(module, self.STEPS):
                module(1000 * step + micro).backward()
                opt.step()
            return sd.digest(module), {key: b.clone() for key, b in module.named_buffers()}
        (digest, buffers), = run(lambda: work('statistics-leased-1'))
        for same, others in run(lambda: work('statistics-leased-2'), 2):
            self.assertEqual(same, digest)
            self.differs(buffers, others, 0)
        self.assertGreater(buffers['norm_1.running_mean'].abs().max(), 0)

    def test_what_is_skipped_frozen_or_given_up_leaves_them(self):
        def work():
            module, opt = sd.shard(module := made(self.build), self.sgd(module), name='statistics-stay', accumulate=7)
            buffers = dict(module.named_buffers())

            def step(*changes):
                before = {key: b.clone() for key, b in buffers.items()}
                for micro in range(7):
                    loss = module(micro)
                    loss = loss * float('nan') if 'nan' in changes and micro == 3 else loss
                    (loss / 7).backward()
                    if 'again' in changes and micro == 2:
                        opt.zero_grad()
                        break
                else:
                    opt.step()
                return {key for key, b in buffers.items() if not torch.equal(b, before[key])}
            everything = set(buffers)
            self.assertEqual(step(), everything)
            self.assertEqual(step('nan'), set())
            self.assertTrue(opt.last.skipped)
            self.assertEqual(step('again'), set())
            module.norm_1.eval()  # is a layer of its own: of seven equal numbers the sum is rounded
            self.assertEqual(step(), {key for key in everything if key.startswith('norm_2')})
            self.assertEqual(buffers['norm_2.num_batches_tracked'].item(), 2)
            return True
        self.assertTrue(run(work)[0])

    def test_they_are_read_and_replaced_with_the_rest(self):
        directory = os.path.join(DAEMONS.directory, 'statistics')

        def work():
            module, opt = sd.shard(module := made(self.build), self.sgd(module), name='statistics-put')
            module(1).backward()
            opt.step()
            path = os.path.join(sd.save(module, directory) and directory, 'x.safetensors')
            with open(os.path.join(directory, 'LATEST'), encoding='ascii') as file:
                saved = load_file(os.path.join(directory, file.read().strip(), 'model.safetensors'))
            other = Cnn(True)
            other.load_state_dict(saved)  # a checkpoint's weights are the whole module
            kept = {key: b.clone() for key, b in module.named_buffers()}
            self.differs(kept, dict(other.named_buffers()), 0)
            sd.save_safetensors(module, path)
            with self.assertRaises(ZeroDivisionError), sd.writable(module):
                module.norm_1.running_mean.fill_(3)
                raise ZeroDivisionError
            self.differs(kept, dict(module.named_buffers()), 0)
            with sd.writable(module):
                module.load_state_dict(Cnn(True).state_dict())
                module.norm_1.running_mean.fill_(3)
            found = sd.shard(again := made(self.build, 7), self.sgd(again), name='statistics-put')[0]
            self.assertTrue(found.norm_1.running_mean.eq(3).all())  # also for who comes later
            self.assertEqual(found.norm_1.num_batches_tracked.item(), 0)
            sd.load_safetensors(module, path)
            self.differs(kept, dict(module.named_buffers()), 0)
            plain = self.sgd(made(self.build))
            plain.load_state_dict(opt.state_dict())
            with sd.reader(name='statistics-put') as looking, looking.snapshot() as params:
                self.assertTrue(torch.equal(params['norm_1.running_var'], kept['norm_1.running_var']))
            return kept

        def restored():
            module, _ = sd.shard(module := made(self.build, 5), self.sgd(module), restore=directory, address=fresh.address)
            return {key: b.clone() for key, b in module.named_buffers()}
        kept = run(work)[0]
        fresh = torch_run.Daemons(os.path.dirname(os.path.dirname(DAEMONS.shardctl)), 1)
        try:
            self.differs(kept, run(restored)[0], 0)
        finally:
            fresh.down()
            os.environ['SHARDD_ADDRESS'] = self.daemons.address

    def test_other_buffers(self):
        class Own(Mlp):
            def __init__(self):
                super().__init__()
                self.register_buffer('seen', torch.zeros(1))
                self.register_buffer('mask', torch.ones(2, dtype=torch.bool))

            def forward(self, seed):
                self.seen += seed
                return super().forward(seed)

        def work(**flags):
            def one():
                module, opt = sd.shard(module := made(Own), self.sgd(module), name=flags.pop('name'), **flags)
                module(10 + opt.engine.place.rank).backward()
                opt.step()
                return module.seen.item()
            return one
        self.assertEqual(run(work(name='own-1'), 2), [10, 11])
        self.assertEqual(run(work(name='own-2', buffers=lambda name, module: name == 'seen'), 2), [10.5, 10.5])

        def grows():
            module, opt = sd.shard(module := made(Own), self.sgd(module), name='own-inf',
                                   buffers=lambda name, module: name == 'seen')
            skipped = []
            for seed in (5, 6, 7):
                if seed == 6:
                    module.seen.fill_(float('inf'))  # gradients are finite all the same
                module(seed).backward()
                opt.step()
                skipped.append((opt.last.skipped, module.seen.item()))
            return skipped
        self.assertEqual(run(grows)[0], [(False, 5.0), (True, 5.0), (False, 12.0)])
        for flags, why in (({'buffers': 'mean'}, "must be 'auto', or a function"),
                           ({'buffers': lambda name, module: True}, "'mask' is torch.bool")):
            with self.assertRaisesRegex(AssertionError, why):
                run(work(name='own-3', **flags))

        def met():
            sd.shard(module := nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), self.sgd(module), name='own-4')
        with self.assertRaisesRegex(AssertionError, "'1' is a SyncBatchNorm: it meets 2 workers"):
            run(met, 2)


class Again(unittest.TestCase):
    """A step that a worker gives up and begins again."""

    def train(self, name, gives_up=lambda rank, step: False, elastic=False, held_up=lambda step: None,
              begins=lambda step: None):
        def step_of(module, opt, step, micro, again):
            if again:  # before the last gradient is in, after which others may commit
                handle = module.wte.register_forward_hook(breaks)
                with self.assertRaises(torch.OutOfMemoryError):
                    # Leased, another may compute it meanwhile, so it must be the same.
                    module(1000 * step + micro + (0 if elastic else 500)).backward()
                handle.remove()
                held_up(step)
                opt.zero_grad()
            module(1000 * step + micro).backward()
            opt.step()

        def work():
            module, rank = made(Gpt), int(os.environ['RANK'])
            module, opt = sd.shard(module, adamw(module), name=name, micro_batches=4 if elastic else 0)
            if elastic:
                for step, micro in sd.leases(module, 4):
                    begins(step)
                    step_of(module, opt, step, micro, micro == 2 and gives_up(rank, step))
            while sd.step_of(module) < 4:
                step = sd.step_of(module)
                try:
                    step_of(module, opt, step, rank, gives_up(rank, step))
                    opt.zero_grad()
                except sd.StepReset:
                    pass
            return sd.digest(module)
        digests = set(run(work, 2))
        self.assertEqual(len(digests), 1)
        return digests.pop()

    def test_all_workers_compute_it_again(self):
        self.assertEqual(self.train('again', lambda rank, step: (rank + step) % 2 == 0), self.train('at-once'))

    def test_what_was_leased_too(self):
        again = set()

        def once(_rank, step):
            return step % 2 == 1 and not (step in again or again.add(step))
        self.assertEqual(self.train('again-leased', once, elastic=True), self.train('at-once-leased', elastic=True))

    def test_what_another_has_computed_meanwhile(self):
        """Then the step is over, and nothing is there to be given up."""
        held, over = (os.path.join(DAEMONS.directory, name) for name in ('again-held', 'again-over'))

        def wait(step):
            open(held, 'x').close()
            while not os.path.exists(over):
                time.sleep(0.01)

        def begins(step):
            if step == 2 and os.path.exists(held):  # by the other one
                open(over, 'w').close()
        late = self.train('again-late', lambda rank, step: step == 1 and not os.path.exists(held), elastic=True,
                          held_up=wait, begins=begins)
        self.assertEqual(late, self.train('again-in-time', elastic=True))


class Elastic(unittest.TestCase):
    """Micro-batches to whoever asks."""

    STEPS, MICROS = 8, 4

    def train(self, name, world, fault=lambda step, micro: None, last=lambda rank, step: False):
        """Losses and norms as each worker saw them, and the digest. last: this worker leaves in that step."""
        def work():
            module = made(Gpt)
            original = adamw(module)
            module, opt = sd.shard(module, original, name=name, micro_batches=self.MICROS)
            seen = {}

            def look():
                if opt.last is not None and opt.last.loss is not None:  # this worker has seen its end
                    seen[opt.last.step] = opt.last.loss, opt.last.grad_norm
            for step, micro in sd.leases(module, self.STEPS, warm_up(original), clip_norm=1.0):
                look()
                loss = module(1000 * step + micro)
                loss.backward()
                fault(step, micro)
                sd.report(module, loss=loss)
                if micro:  # may be left out, or said once more; another one is refused
                    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                else:
                    with self.assertRaisesRegex(sd_errors.Misuse, r'leases\(clip_norm=2'):
                        opt.clip_grad_norm_(2.0)
                opt.step()
                if last(int(os.environ['RANK']), step):
                    return seen, None
            look()
            return seen, (sd.digest(module), sd.step_of(module))
        answers = run(work, world)
        ends = {end for _, end in answers if end is not None}
        self.assertEqual(len(ends), 1)
        return [seen for seen, _ in answers], ends.pop()

    def marked(self, name):
        """Whether nobody has been here yet."""
        try:
            os.close(os.open(os.path.join(DAEMONS.directory, name), os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False

    def test_the_same_bits_whoever_comes_leaves_and_is_killed(self):
        def kill_worker(step, micro):
            if (step, micro) == (3, 2) and self.marked('leased'):
                os.kill(os.getpid(), signal.SIGKILL)

        def kill_both(step, micro):
            if (step, micro) == (2, 1) and self.marked('daemon'):
                session = libshd.Session()
                os.kill(session.status(0)['pid'], signal.SIGKILL)
                session.close()
            if (step, micro) == (5, 0) and self.marked('leased-too'):
                os.kill(os.getpid(), signal.SIGKILL)

        def join_late(step, _micro):
            """Rank 1 computes nothing before rank 0 has come so far."""
            late = os.path.join(DAEMONS.directory, 'late')
            if os.environ['RANK'] == '0' and step == 3:
                with open(late, 'w', encoding='ascii'):
                    pass
            while os.environ['RANK'] == '1' and not os.path.exists(late):
                time.sleep(0.01)
        (alone,), end = self.train('elastic-1', 1)
        self.assertEqual((sorted(alone), end[1]), (list(range(self.STEPS)), self.STEPS))
        for name, how in {'elastic-2': {}, 'elastic-kill': {'fault': kill_worker}, 'elastic-both': {'fault': kill_both},
                          'elastic-leave': {'last': lambda rank, step: rank == 1 and step >= 2},
                          'elastic-join': {'fault': join_late}}.items():
            seen, same = self.train(name, 2, **how)
            self.assertEqual(same, end, name)
            for worker in seen:
                self.assertEqual({step: alone[step] for step in worker}, worker, name)
        for marker in ('leased', 'daemon', 'leased-too', 'late'):
            self.assertTrue(os.path.exists(os.path.join(DAEMONS.directory, marker)), marker)


class Starts(unittest.TestCase):
    """Where a model's first values come from."""

    def test_one_worker_gives_its_values_to_all(self):
        def work():
            module = made(Mlp, seed=1 + int(os.environ['RANK']))
            mine = module(7).item()
            module, _ = sd.shard(module, adamw(module), name='values')
            return mine, module(7).item()
        (first, begun), (other, found) = run(work, 2)
        self.assertNotEqual(first, other)
        self.assertEqual((begun, found), (first, first))

    def test_the_meta_device_and_this_process(self):
        def work():
            with torch.device('meta'):
                module = made(Gpt)
            optimizer = adamw(module)
            module, opt = sd.shard(module, optimizer, name='meta', address='local:')
            losses = []
            for _ in range(8):
                loss = module(3)
                losses.append(loss.item())
                loss.backward()
                opt.step()
            return losses, module.head.weight is module.wte.weight
        losses, tied = run(work)[0]
        self.assertTrue(tied)
        self.assertLess(losses[-1], 0.9 * losses[0])


    def test_daemons_that_are_started(self):
        home = os.path.join(DAEMONS.directory, 'home')

        def work():
            tempfile.tempdir = DAEMONS.directory
            os.environ['SHARDD_ADDRESS'] = home
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='started', address='up:2')
            module(int(os.environ['RANK'])).backward()
            opt.step()
            session = opt.engine.model.session
            return session.owners, session.status(1)['pid'], sd.digest(module)
        try:
            answers = run(work, 2)
        finally:
            subprocess.run([DAEMONS.shardctl, 'down', '--yes', '--runtime-dir', home], check=True, capture_output=True)
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0][0], 2)


class Kills(unittest.TestCase):
    """kill -9 changes no bit."""

    def kill(self, name, fault, world=2):
        whole = run(sharded(Gpt, name, 8), world)
        harmed = run(sharded(Gpt, name + '-killed', 8, fault=fault), world)
        for rank, ((losses, _), (found, _)) in enumerate(zip(whole, harmed)):
            self.assertTrue(found)
            # A successor begins at the step at which the other died.
            self.assertEqual({step: losses[step] for step in found}, found, rank)
        self.assertIn(7, harmed[0][0])
        # The name is in no digest.
        self.assertEqual(whole[0][1], harmed[0][1])

    def test_a_worker(self):
        marker = os.path.join(DAEMONS.directory, 'killed')

        def fault(step):
            if step == 5 and os.environ['RANK'] == '1' and not os.path.exists(marker):
                with open(marker, 'w', encoding='ascii'):
                    os.kill(os.getpid(), signal.SIGKILL)
        self.kill('kill-worker', fault)
        self.assertTrue(os.path.exists(marker))

    def test_a_daemon(self):
        def fault(step):
            if step == 5 and os.environ['RANK'] == '0':
                session = libshd.Session()
                os.kill(session.status(0)['pid'], signal.SIGKILL)
                session.close()
        self.kill('kill-daemon', fault)


class Interrupts(unittest.TestCase):
    """Ctrl-C ends every wait within 0.3 s, and the call can be made again."""

    def broken_off(self, wait, *arguments, **named):
        """Seconds from the signal to KeyboardInterrupt."""
        begun = []

        def interrupt():
            begun.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        timer = threading.Timer(0.2, interrupt)
        try:
            timer.start()
            wait(*arguments, **named)
        except KeyboardInterrupt:
            return time.monotonic() - begun[0]
        finally:
            timer.join()
        raise AssertionError(f'{wait} waited for nothing')

    def test_a_step_that_others_are_missing_from(self):
        def work():
            os.environ['WORLD_SIZE'] = '2'
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='interrupted')
            module(0).backward()
            passed = self.broken_off(opt.step)
            os.environ['RANK'] = '1'  # who was waited for
            other, its = sd.shard(other := made(Mlp), adamw(other), name='interrupted')
            other(1).backward()
            its.engine.gather(False)
            opt.step()
            return passed, opt.last.step
        passed, step = run(work)[0]
        self.assertEqual(step, 0)
        self.assertLess(passed, 0.3 * torch_run.PACE)

    def test_what_else_is_waited_for(self):
        def work():
            passed = {}
            module = made(Mlp)
            os.environ.update(RANK='1', WORLD_SIZE='2')
            passed['a model that rank 0 makes'] = self.broken_off(sd.shard, module, adamw(module), name='never')
            passed['a model to read'] = self.broken_off(sd.reader, name='never', timeout=1000)
            os.environ.update(RANK='0', WORLD_SIZE='1')
            gone = os.path.join(DAEMONS.directory, 'gone')
            os.mkdir(gone)
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(os.path.join(gone, 'cpu0.sock'))
            passed['a daemon that left its socket'] = self.broken_off(sd.shard, module, adamw(module), address=gone)
            module, opt = sd.shard(module, adamw(module), name='waited-for', micro_batches=1)
            other, _ = sd.shard(other := made(Mlp), adamw(other), name='waited-for', micro_batches=1)
            leases = sd.leases(module, 1)
            self.assertEqual(next(leases), (0, 0))
            passed['what another has leased'] = self.broken_off(next, sd.leases(other, 1))
            module(0).backward()
            opt.step()
            self.assertEqual(list(leases), [])
            return passed
        for what, passed in run(work)[0].items():
            self.assertLess(passed, 0.3 * torch_run.PACE, what)


class Lasts(unittest.TestCase):
    """Steps upon steps: SHD_TEST_STEPS=10000 for the whole of it."""

    def test_memory_and_descriptors_stay(self):
        steps = int(os.environ.get('SHD_TEST_STEPS', '400'))

        def private_kib(pid):
            with open(f'/proc/{pid}/smaps_rollup', encoding='ascii') as file:
                return sum(int(line.split()[1]) for line in file if line.startswith(('Private', 'Swap:')))

        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='lasts')
            pids = [os.getpid()]
            session = libshd.Session()
            pids += [session.status(owner)['pid'] for owner in range(session.owners)]
            session.close()
            rows = []
            for step in range(steps):
                loss = module(step % 50)
                loss.backward()
                sd.report(module, loss=loss)
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                if (step + 1) % (steps // 4) == 0:
                    rows.append([(private_kib(pid), len(os.listdir(f'/proc/{pid}/fd'))) for pid in pids])
            return rows
        rows = run(work)[0]
        for row in rows:
            print('KiB and descriptors of worker and daemons:', row)
        for quarters in zip(*rows):
            self.assertEqual(quarters[0][1], quarters[-1][1])
            # What leaks grows in each quarter; what is made once, in one. The history of steps has rows of 88 bytes.
            growth = min(after[0] - before[0] for before, after in zip(quarters, quarters[1:]))
            self.assertLess(growth, 200 + steps / 4 * 88 / 1024)


class Copies(unittest.TestCase):
    """A copy of a sharded module is an ordinary one."""

    def test_deepcopy_and_pickle(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='copies')
            average = torch.optim.swa_utils.AveragedModel(module)
            path = os.path.join(DAEMONS.directory, 'module')
            torch.save(module, path)
            copied, loaded = copy.deepcopy(module), torch.load(path, weights_only=False)
            before = module(0).item()
            module(0).backward()
            opt.step()
            average.update_parameters(module)
            copied(0).backward()
            return (before, copied(0).item(), loaded(0).item(), module(0).item(), average(0).item(),
                    copied.layers[0].weight.grad is not None)
        before, copied, loaded, after, average, has_grad = run(work)[0]
        self.assertEqual((before, copied), (loaded, before))
        self.assertNotEqual(before, after)
        self.assertAlmostEqual(average, after, places=6)
        self.assertTrue(has_grad)

    def test_sampler_and_close(self):
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='sampler', accumulate=2)
            sampler = sd.Sampler(module, range(10), 3, seed=4)
            drawn = [batch for batch, _ in zip(sampler, range(6))]
            again = sd.Sampler(module, range(10), 3, seed=4)
            before = module(0).item()
            sd.close(module)
            module(0).backward()
            return (drawn, [again.batch(micro // 2, micro % 2) for micro in range(6)], before, module(0).item(),
                    module.layers[0].weight.grad is not None)
        drawn, again, before, after, has_grad = run(work)[0]
        self.assertEqual(drawn, again)
        self.assertEqual(len({index for batch in drawn[:3] for index in batch}), 9)
        self.assertEqual(before, after)
        self.assertTrue(has_grad)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
