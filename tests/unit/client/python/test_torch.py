#!/usr/bin/env python3
"""test_torch.py BUILD_DIR: training by libshd.torch has the numbers of plain PyTorch.

How far apart rounding alone may lead is measured beside it: plain PyTorch, from start values that differ by one
unit in the last place. The losses of shardd may be NOISE times as far away.
"""
import copy
import os
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings

import torch_run
from torch_run import first, kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import libshd.torch as sd  # noqa: E402
from libshd.errors import NotSupported  # noqa: E402

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

    def test_workers_of_a_host_that_sum_together(self):
        def die(step):
            if step in (2, 6) and int(os.environ['RANK']) == 3 and first(DAEMONS, f'sums-{step}'):
                kill_here()
        reference = run(lambda: plain(Mlp, 10, 4, 2))[0]
        moved = run(lambda: plain(Mlp, 10, 4, 2, noise=True))[0]
        noise = max(abs(a - b) for x, y in zip(reference, moved) for a, b in zip(x, y))
        whole = run(sharded(Mlp, 'sums', 10, 2, sums='host'), 4)
        killed = run(sharded(Mlp, 'sums-killed', 10, 2, sums='host', fault=die), 4)
        own = run(sharded(Mlp, 'sums-own', 10, 2), 4)
        self.assertEqual(len({digest for _, digest in whole + killed}), 1)
        self.assertNotEqual(whole[0][1], own[0][1])  # rounded elsewhere
        for step, losses in enumerate(reference):
            for micro, loss in enumerate(losses):
                self.assertAlmostEqual(whole[micro % 4][0][step][micro // 4], loss, delta=NOISE * noise + 1e-6)
            self.assertAlmostEqual(whole[0][0][step][-1], sum(losses) / len(losses), delta=NOISE * noise + 1e-6)

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
        # Adam's bias correction goes by how often an expert was updated.
        self.compare(Moe, 'experts-adamw-1', 10)
        self.compare(Moe, 'experts-adamw-2', 10, world=2)

    def test_checkpointing(self):
        self.compare(lambda: Gpt(True), 'gpt-checkpoint', 3)
        self.compare(lambda: Gpt('reentrant'), 'gpt-reentrant', 3)


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


class Guard(unittest.TestCase):
    """Steps that are far from those before."""

    def test_a_planted_batch_is_skipped_and_the_next_rule_stops(self):
        def work():
            module = made(Mlp)
            module, opt = sd.shard(module, adamw(module), name='guarded', guard=[
                {'norm_above': 1e4, 'action': 'stop'}, {'norm_zscore': 100, 'window': 4}])
            found = []
            for step in range(8):
                before = [p.detach().clone() for p in module.parameters()]
                (module(1000 * step) * {5: 1e3, 7: 1e9}.get(step, 1)).backward()
                opt.step()
                same = all(torch.equal(p, q) for p, q in zip(before, module.parameters()))
                found.append((opt.last.guard.split(' ')[0], opt.last.skipped, opt.last.stopped, same))
            module(0).backward()
            try:
                opt.step()
            except sd.Stopped as why:
                found.append(str(why))
            return found
        found, = run(work, world=1)
        self.assertEqual(found[:8], [('', False, False, False)] * 5 + [
            ('norm_zscore', True, False, True), ('', False, False, False), ('norm_above', True, True, True)])
        self.assertIn('stopped training at step 7', found[8])

    def test_what_is_no_rule_is_named(self):
        def work():
            module = made(Mlp)
            try:
                sd.shard(module, adamw(module), name='no', guard=[{'norm_above': 1, 'action': 'rewindd'}])
            except ValueError as why:
                return str(why)
        self.assertIn('must be skip, stop or rewind', run(work, world=1)[0])


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

    @staticmethod
    def experts(opt):
        """The step in the state of each expert's weight; 0: the state has none; None: there is no state."""
        state, names = opt.state_dict()['state'], {part.parameter: part.name for part in opt.engine.parts()}
        parameters = [p for group in opt.param_groups for p in group['params']]
        found = {names[p]: state.get(at) for at, p in enumerate(parameters)}
        return [of and int(of.get('step', 0)) for of in (found[f'experts.{i}.weight'] for i in range(3))]

    def test_counts_of_experts_go_through_a_checkpoint(self):
        directory = os.path.join(DAEMONS.directory, 'experts')

        def go_on(module, opt):
            experts, losses = self.experts(opt), []
            for step in range(3, 7):
                losses.append(module(step))
                losses[-1].backward()
                opt.step()
            return experts, [loss.item() for loss in losses], sd.digest(module)

        def work():
            module, opt = sd.shard(module := made(Moe), adamw(module), name='experts-saved')
            for step in range(3):
                module(step).backward()
                opt.step()
            sd.save(module, directory)
            return go_on(module, opt)

        def restored():
            return go_on(*sd.shard(module := made(Moe, 5), adamw(module), name='experts-saved', restore=directory,
                                   address=fresh.address))
        whole, address = run(work)[0], os.environ['SHARDD_ADDRESS']
        fresh = torch_run.Daemons(os.path.dirname(os.path.dirname(DAEMONS.shardctl)), 1)
        try:
            self.assertEqual(run(restored)[0], whole)
        finally:
            fresh.down()
            os.environ['SHARDD_ADDRESS'] = address
        self.assertEqual(whole[0], [2, 1, None])

    def test_optimizer_state_goes_to_a_plain_one_and_back(self):
        kinds = {'adamw': adamw, 'sgd': lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5),
                 'plain': lambda m: torch.optim.SGD(m.parameters(), 0.1)}
        cases = [(name, Mlp, optimizer) for name, optimizer in kinds.items()]
        # In three steps expert 0 has two updates, 1 has one, 2 none.
        cases += [('experts-' + name, Moe, kinds[name]) for name in ('adamw', 'sgd')]

        def work():
            for name, build, optimizer in cases:
                module = made(build)
                module, opt = sd.shard(module, optimizer(module), name='state-' + name, address='local:')
                other = made(build, seed=2)
                other, second = sd.shard(other, optimizer(other), name='state-2' + name, address='local:')
                self.assertEqual(opt.state_dict()['state'], {})
                for step in range(3):
                    module(step).backward()
                    opt.step()
                private = copy.deepcopy(module)
                plain_one = optimizer(private)
                if build is Moe:
                    self.assertEqual(self.experts(opt), {'experts-adamw': [2, 1, None], 'experts-sgd': [0, 0, None]}[name])
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

    def test_moments_in_8_bits(self):
        """Losses near those of fp32 moments; state that goes to a plain optimizer and back bit by bit; no bit of a split."""
        def work():
            found = {}
            for name, flags in {'wide': {}, 'small': {'moments': 'int8'}}.items():
                module = made(Gpt)
                module, opt = sd.shard(module, adamw(module), name='moments-' + name, address='local:', **flags)
                found[name] = []
                for step in range(8):
                    loss = module(step)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    found[name].append(loss.item())
                found[name + '-digest'] = sd.digest(module)
                state = opt.state_dict()
                opt.load_state_dict(state)
                again = opt.state_dict()
                for at, values in state['state'].items():
                    for key, value in values.items():
                        self.assertTrue(torch.equal(value, again['state'][at][key]), (name, at, key))
                plain_one = adamw(copy.deepcopy(module))
                plain_one.load_state_dict(state)
                sd.close(module)
            return found
        found = run(work)[0]
        self.assertNotEqual(found['wide-digest'], found['small-digest'])
        for a, b in zip(found['wide'], found['small']):
            self.assertAlmostEqual(a, b, delta=0.01 * a)

        def two(**where):
            module = made(Gpt)
            module, opt = sd.shard(module, adamw(module), name='moments-split', moments='int8', **where)
            for step in range(2):
                module(step).backward()
                opt.step()
                opt.zero_grad()
            return sd.digest(module), [p.detach().sum().item() for p in module.parameters()]
        self.assertEqual(run(two)[0], run(lambda: two(address='local:'))[0])

    def test_published_in_codes(self):
        """Losses near those without; no bit of a split; and a block of int4 has 15 values."""
        def two(codec, grads='none', **where):
            module = made(Gpt)
            module, opt = sd.shard(module, adamw(module), name='codec-' + codec + grads, codec=codec, grad_codec=grads,
                                   policy=sd.ZeRO2(), **where)
            losses = []
            for step in range(3):
                loss = module(step)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
            block = next(p for p in module.parameters() if p.numel() >= 64).detach().flatten()[:64]
            return sd.digest(module), [p.detach().sum().item() for p in module.parameters()], losses, block.tolist()
        def zero3():
            with self.assertRaisesRegex(NotSupported, r"codec='int8' with ZeRO3.*policy=sd.ZeRO2\(\)"):
                sd.shard(module := made(Mlp), adamw(module), name='codec-zero3', codec='int8', policy=sd.ZeRO3())
        run(zero3)
        plain = run(lambda: two('none', address='local:'))[0]
        for codec in 'int8', 'int4':
            far, near = run(lambda codec=codec: two(codec))[0], run(lambda codec=codec: two(codec, address='local:'))[0]
            self.assertEqual(far, near)
            self.assertNotEqual(near[0], plain[0])
            for a, b in zip(plain[2], near[2]):
                self.assertAlmostEqual(a, b, delta=(0.01 if codec == 'int8' else 0.2) * a)
        self.assertLessEqual(len(set(near[3])), 15)
        for codec in 'none', 'fp8':  # of the owners' memory, and of copies
            near = run(lambda codec=codec: two(codec, 'int8', address='local:'))[0]
            self.assertEqual(run(lambda codec=codec: two(codec, 'int8'))[0], near)
            self.assertNotEqual(near[0], plain[0])

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

    def test_the_manuals_loop_through_a_kill(self):
        with open(os.path.join(torch_run.ROOT, 'docs', 'pytorch.md'), encoding='utf-8') as file:
            loop = file.read().partition('## From a plain loop')[2].split('```')[1].removeprefix('python')

        def trained(name, dies):
            def forward(module, batch):
                if dies and sd.step_of(module) == 4 and first(DAEMONS, name):
                    kill_here()
                return F.mse_loss(module.layers(batch), batch.sum(1, keepdim=True))

            def work():
                torch.manual_seed(1)
                data = torch.randn(64, 8)
                seen = {'Gpt': type(name, (Mlp,), {'forward': forward}), 'data': data, 'steps': 8, 'torch': torch,
                        'sd': sd, 'DataLoader': torch.utils.data.DataLoader,
                        'warm_up': lambda step: min(1, (step + 1) / 6)}
                with warnings.catch_warnings():
                    warnings.simplefilter('error')  # of a schedule that moves before a step
                    exec(loop, seen)
                return sd.digest(seen['model']), seen['schedule'].get_last_lr(), seen['schedule'].last_epoch
            return run(work)[0]
        self.assertEqual(trained('manual_killed', True), trained('manual', False))

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
