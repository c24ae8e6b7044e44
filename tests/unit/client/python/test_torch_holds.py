#!/usr/bin/env python3
"""test_torch_holds.py BUILD_DIR: what a sharded module goes through: kills, steps that begin again, workers that come
and go, Ctrl-C, BatchNorm's statistics over workers, thousands of tensors and of steps."""
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import unittest.mock

import torch_run
from torch_run import first, kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd import errors as sd_errors  # noqa: E402
from test_torch import NOISE, Cnn, Gpt, Mlp, Moe, adamw, made, sharded, warm_up  # noqa: E402


class Normed(Mlp):
    """With BatchNorm, whose statistics are read anew in each step, and a layer that takes no part."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(32))
        self.idle = nn.Linear(2, 2)


def kill_daemon():
    """kill -9 of owner 0's."""
    session = libshd.Session()
    os.kill(session.status(0)['pid'], signal.SIGKILL)
    session.close()


def breaks(_module, _inputs, output):
    """A hook of a layer's forward: its backward runs out of memory."""
    def no_memory(_grad):
        raise torch.OutOfMemoryError('of the test')
    output.register_hook(no_memory)


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
            module, opt = sd.shard(module := made(self.build), self.sgd(module), name=name, accumulate=accumulate,
                                   **flags)
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
        """The same of plain PyTorch: each micro-batch begins with the step's buffers; what follows is their mean."""
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
            marker = 'statistics-' + what

            def fault(step, what=what, marker=marker):
                if step == 2 and os.environ['RANK'] == '1' and first(DAEMONS, marker):
                    (kill_here if what == 'worker' else kill_daemon)()
            for found, same in self.train('statistics-' + what, world=2, fault=fault):
                self.assertEqual(same, digest)
                for step, (_, buffers) in found.items():
                    self.differs(buffers, whole[step][1], 0)
            self.assertFalse(first(DAEMONS, marker))

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
            module, _ = sd.shard(module := made(self.build, 5), self.sgd(module), restore=directory,
                                 address=fresh.address)
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
        over = os.path.join(DAEMONS.directory, 'again-over')

        def wait(step):
            while not os.path.exists(over):
                time.sleep(0.01)

        def begins(step):
            if step == 2:  # by the other one
                first(DAEMONS, 'again-over')
        # Both may have leased it where one is slow, and only one of them is held up.
        late = self.train('again-late', lambda rank, step: step == 1 and first(DAEMONS, 'again-held'), elastic=True,
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

    def test_the_same_bits_whoever_comes_leaves_and_is_killed(self):
        def kill_worker(step, micro):
            if (step, micro) == (3, 2) and first(DAEMONS, 'leased'):
                kill_here()

        def kill_both(step, micro):
            if (step, micro) == (2, 1) and first(DAEMONS, 'daemon'):
                kill_daemon()
            if (step, micro) == (5, 0) and first(DAEMONS, 'leased-too'):
                kill_here()

        def join_late(step, _micro):
            """Rank 1 computes nothing before rank 0 has come so far."""
            late = os.path.join(DAEMONS.directory, 'late')
            if os.environ['RANK'] == '0' and step == 3:
                first(DAEMONS, 'late')
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
            self.assertFalse(first(DAEMONS, marker), marker)


class Overtaken(unittest.TestCase):
    """A leased micro-batch that another worker has computed meanwhile, wherever this one is held up with it."""

    def train(self, name, calls=(), does=lambda module, opt: None):
        """The digest. calls: before the first of these calls of the model in step 1 a worker waits until the other one
        has begun step 2; does: what is done with each leased batch beside training."""
        def begun(step):
            return os.path.join(DAEMONS.directory, f'{name}-begun-{step}')

        def work():
            module, opt = sd.shard(module := made(Normed), adamw(module), name=name, micro_batches=4)
            model = opt.engine.model

            def late(call):
                def called(*arguments, **named):
                    if opt.engine.step == 1 and first(DAEMONS, f'{name}-held'):
                        while not os.path.exists(begun(2)):
                            time.sleep(0.01)
                    return call(*arguments, **named)
                return called
            for call in calls:
                setattr(model, call, late(getattr(model, call)))
            for step, micro in sd.leases(module, 4):
                first(DAEMONS, begun(step))
                loss = module(1000 * step + micro)
                loss.backward()
                sd.report(module, loss=loss)
                does(module, opt)
                opt.step()
            return sd.digest(module)
        digests = set(run(work, 2))
        self.assertEqual(len(digests), 1, name)
        if calls:
            self.assertFalse(first(DAEMONS, f'{name}-held'), name)
        return digests.pop()

    def test_it_is_dropped(self):
        want = self.train('in-time')
        for call in ('acquire', 'return_parts', 'return_none', 'report', 'lease', 'commit'):
            self.assertEqual(self.train(f'overtaken-{call}', [call]), want, call)

    def test_what_is_looked_at_is_of_a_later_step(self):
        def looks(module, opt):
            sd.digest(module)
            sd.save(module, os.path.join(DAEMONS.directory, opt.engine.model.name + os.environ['RANK']))
        want = self.train('looked-at-in-time')
        for call in ('digest', 'checkpoint'):
            self.assertEqual(self.train(f'looked-at-{call}', [call], looks), want, call)

    def test_a_digest_while_others_go_on(self):
        """Some step ends within it, unless each takes much longer than it does."""
        def work():
            module, opt = sd.shard(module := made(Mlp), adamw(module), name='digests', micro_batches=2)
            for step, micro in sd.leases(module, 100):
                module(1000 * step + micro).backward()
                opt.step()
                if os.environ['RANK'] == '1':
                    sd.digest(module)
            return sd.digest(module)
        self.assertEqual(len(set(run(work, 2))), 1)

    def test_the_number_of_a_steps_batches_is_set_on_the_way(self):
        """leases() hands out as many as the step has; what a sampler draws does not depend on who draws it when."""
        def work(name):
            module, opt = sd.shard(module := made(Normed), adamw(module), name=name, micro_batches=2, micro_batches_max=6)
            opt.engine.model.set({'micro_batches': 5}, at=2)
            sampler, seen = sd.Sampler(module, range(200), 2), {}
            for step, micro in sd.leases(module, 4):
                late = sd.Sampler(module, range(200), 2)  # as a worker that comes now
                self.assertEqual(late.batch(step, micro), sampler.batch(step, micro))
                seen[step, micro] = sampler.batch(step, micro)
                module(1000 * step + micro).backward()
                opt.step()
            return sd.digest(module), seen
        (digest, seen), = run(lambda: work('ramp-set-1'))
        self.assertEqual(sorted(seen), [(step, micro) for step in range(4) for micro in range(2 if step < 2 else 5)])
        self.assertEqual(len({index for batch in seen.values() for index in batch}), 28)
        for same, others in run(lambda: work('ramp-set-2'), 2):
            self.assertEqual(same, digest)
            self.assertEqual(others, {key: seen[key] for key in others})

    def test_a_batch_without_data(self):
        def work():
            module, opt = sd.shard(module := made(Normed), adamw(module), name='no-data', micro_batches=4, timeout=30)
            for step, micro in sd.leases(module, 2):
                if micro != 2:
                    module(1000 * step + micro).backward()
                opt.step(idle=micro == 2)
            return sd.digest(module)
        self.assertEqual(len(set(run(work, 2))), 1)


class Kills(unittest.TestCase):
    """kill -9 changes no bit."""

    def kill(self, name, fault, world=2, build=Gpt):
        whole = run(sharded(build, name, 8), world)
        harmed = run(sharded(build, name + '-killed', 8, fault=fault), world)
        for rank, ((losses, _), (found, _)) in enumerate(zip(whole, harmed)):
            self.assertTrue(found)
            # A successor begins at the step at which the other died.
            self.assertEqual({step: losses[step] for step in found}, found, rank)
        self.assertIn(7, harmed[0][0])
        # The name is in no digest.
        self.assertEqual(whole[0][1], harmed[0][1])

    def test_a_worker(self):
        def fault(step):
            if step == 5 and os.environ['RANK'] == '1' and first(DAEMONS, 'killed'):
                kill_here()
        self.kill('kill-worker', fault)
        self.assertFalse(first(DAEMONS, 'killed'))

    def test_a_daemon(self):
        def fault(step):
            if step == 5 and os.environ['RANK'] == '0':
                kill_daemon()
        self.kill('kill-daemon', fault)
        self.kill('kill-experts', fault, build=Moe)


class Moves(unittest.TestCase):
    """A model gets two owners in place of one, and one again, while workers train it: the bits of a run that nobody
    disturbs. What came after the step that the new ones have is computed once more."""

    STEPS, MOVES = 12, ((2, 'cpu0', 'cpu0,cpu1'), (7, 'cpu0,cpu1', 'cpu1'))

    def marked(self, name):
        """Wait for whoever leaves that mark."""
        end = time.monotonic() + torch_run.LIMIT_S
        while not os.path.exists(os.path.join(DAEMONS.directory, name)):
            self.assertLess(time.monotonic(), end, name)
            time.sleep(0.005)

    def move(self, name):
        """Beside the workers, of which each goes on for some steps meanwhile, and ends after it."""
        for at, of, to in self.MOVES:
            self.marked(f'{name}-{at}')
            done = subprocess.run([DAEMONS.shardctl, 'reshard', name, '-a', f'{DAEMONS.runtime}?{of}', '--to', to, '--by',
                                   DAEMONS.directory], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            first(DAEMONS, f'{name}-moved-{at}')

    def look(self, name, step):
        first(DAEMONS, f'{name}-{step}')
        for at, _, _ in self.MOVES:
            if step == at + 4:
                self.marked(f'{name}-moved-{at}')

    def train(self, name, work, world=2, moves=True):
        """What each worker's work(look) returned."""
        def function():
            os.environ['SHARDD_ADDRESS'] = DAEMONS.runtime + '?cpu0'
            if os.environ['RANK'] == str(world):
                return self.move(name)
            os.environ['WORLD_SIZE'] = str(world)
            return work(name, (lambda step: self.look(name, step)) if moves else lambda step: None)
        return run(function, world + moves)[:world]

    def same(self, name, work, world=2):
        whole, harmed = self.train(name + '-still', work, world, moves=False), self.train(name, work, world)
        self.assertEqual(len({digest for _, digest in whole + harmed}), 1, name)
        for (losses, _), (found, _) in zip(whole, harmed):
            self.assertTrue(found)
            self.assertEqual({step: losses[step] for step in found}, found, name)

    def fixed(self, build=Gpt, fault=lambda name, step: None, **flags):
        def work(name, look):
            module, rank, losses = made(build), int(os.environ['RANK']), {}
            module, opt = sd.shard(module, adamw(module), name=name, **flags)
            while (step := sd.step_of(module)) < self.STEPS:
                try:
                    look(step)
                    for group in opt.param_groups:
                        group['lr'] = 0.01 * min(1, (step + 1) / 5)
                    loss = module(1000 * step + rank)
                    fault(name, step)
                    loss.backward()
                    opt.step()
                    losses[step] = loss.item()
                except sd.StepReset as e:
                    self.assertIn('step', str(e))
                opt.zero_grad()
            return losses, sd.digest(module)
        return work

    def test_workers_with_fixed_shares(self):
        self.same('moves', self.fixed())

    def test_gradients_that_stay_and_statistics(self):
        self.same('moves-step', self.fixed(lambda: Cnn(True), grads='step'))

    def test_workers_that_are_killed_meanwhile(self):
        def fault(name, step):
            for at, _, _ in self.MOVES:
                if step == at + 2 and os.environ['RANK'] == '1' and 'still' not in name and first(DAEMONS, f'{name}-killed-{at}'):
                    kill_here()
        self.same('moves-killed', self.fixed(fault=fault))
        self.assertFalse(first(DAEMONS, 'moves-killed-killed-7'))

    def test_leased_batches(self):
        def work(name, look):
            module, losses = made(Gpt), {}
            original = adamw(module)
            module, opt = sd.shard(module, original, name=name, micro_batches=4)
            for step, micro in sd.leases(module, self.STEPS, warm_up(original), clip_norm=1.0):
                look(step)
                loss = module(1000 * step + micro)
                loss.backward()
                opt.step()
            return {0: 0}, sd.digest(module)
        self.same('moves-leased', work)

    def test_scripts_that_are_started_again(self):
        """Where a loop cannot go back, or a worker cannot go along, it ends, and goes on as any that was killed."""
        def script(name, look, losses, sums):
            module, rank = made(Gpt), int(os.environ['RANK'])
            os.environ['LOCAL_WORLD_SIZE'] = '2'
            module, opt = sd.shard(module, adamw(module), name=name, sums=sums)
            try:
                for step in range(sd.step_of(module), self.STEPS):
                    look(step)
                    loss = module(1000 * step + rank)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    losses[step] = loss.item()
                return losses, sd.digest(module)
            finally:
                sd.close(module)

        def plain(name, look, losses={}):
            while True:
                try:
                    return script(name, look, losses, 'own')
                except sd.StepReset:
                    pass

        def host(name, look, losses={}):
            while True:
                try:
                    return script(name, look, losses, 'host')
                except libshd.Moved as e:
                    self.assertRegex(str(e), 'moved to cpu.*, as of step .*cannot go along, for it sums with the other '
                                             'workers of its host.*: start it again')
                except libshd.errors.Busy as e:  # the other one has not heard of it yet
                    self.assertRegex(str(e), 'other workers of this host sum a model')
                    time.sleep(0.05)
        self.same('moves-again', plain)
        self.same('moves-host', host)

    def test_the_plain_client(self):
        spec = '''{ "name": "%s", "micro_batches": 1, "optimizer": { "kind": "sgd", "momentum": 0.5 }, "units": [
            { "name": "all", "tensors": [ { "name": "w", "shape": [9000], "init": ["const", 2] } ] } ] }'''

        def work(name, look):
            with contextlib.closing(libshd.Session()) as session:
                model, seen, floats = session.open(spec % name), {}, ctypes.c_float * 9000
                params = floats.from_address(model.acquire(0))
                model.release(0)
                while (step := model.step) < self.STEPS:
                    try:
                        look(step)
                        self.assertEqual(model.acquire(0), ctypes.addressof(params))
                        seen[step] = list(params[::999])
                        floats.from_address(model.grad(0, 0))[:] = [step - value / 8 for value in params]
                        model.release(0)
                        model.return_grad(0, 0)
                        model.commit(0.1)
                    except libshd.StepReset:
                        self.assertLessEqual(model.step, step)
                return seen, model.digest()[0]
        self.same('moves-plain', work, world=1)


class GoesBack(unittest.TestCase):
    """A model that somebody takes back to a snapshot."""

    def train(self, name, elastic, back, loop):
        def work():
            module = made(Gpt)
            original = adamw(module)
            schedule = warm_up(original)
            module, opt = sd.shard(module, original, name=name, micro_batches=2 * elastic)
            with contextlib.closing(libshd.Session()) as session:
                other, done = session.attach(name), set()

                def look(step):
                    if step in (2, 6) and step not in done:
                        done.add(step)
                        other.snapshot() if step == 2 else back and other.rewind(2)
                loop(module, opt, schedule, look)
                return sd.digest(module), sd.step_of(module)
        return run(work)[0]

    def test_the_schedule_of_leases_goes_back_too(self):
        def loop(module, opt, schedule, look):
            for step, micro in sd.leases(module, 9, schedule):
                look(step)
                module(1000 * step + micro).backward()
                opt.step()
                self.assertEqual(opt.param_groups[0]['lr'], 0.01 * min(1, (step + 1) / 5))
        self.assertEqual(self.train('back-not', True, False, loop), self.train('back-leased', True, True, loop))

    def test_the_step_that_has_just_ended_begins_again(self):
        """What is computed again is the loop's, also with gradients that stay: those of the step that was are gone."""
        def work(name, back):
            module = made(lambda: Cnn(True))
            module, opt = sd.shard(module, adamw(module), name=name, grads='step')
            with contextlib.closing(libshd.Session()) as session:
                other, engine, reset = session.attach(name), opt.engine, []
                refresh = engine.refresh

                def harmed():
                    if back and engine.model.step == 4 and not reset:
                        other.rewind(3)
                    refresh()
                engine.refresh = harmed
                while (step := sd.step_of(module)) < 6:
                    if step == 3 and not reset:
                        other.snapshot()
                    module(step).backward()
                    try:
                        opt.step()
                    except sd.StepReset as e:
                        reset.append(str(e))
                    opt.zero_grad()
                self.assertEqual(len(reset), back)
                return sd.digest(module)
        self.assertEqual(*[run(lambda: work(f'back-ended-{back}', back))[0] for back in (0, 1)])

    def test_a_guard_takes_the_step_back_that_it_skips(self):
        def work(grads):
            module = made(Mlp)
            module, opt = sd.shard(module, adamw(module), name='back-guard-' + grads, grads=grads,
                                   guard=[{'norm_above': 1e4, 'action': 'rewind'}])
            opt.engine.model.snapshot_every(1, 2)
            seen = []
            while (step := sd.step_of(module)) < 6:
                again = seen.count(3) > 0
                while step == 3 and not again and 3 not in opt.engine.model.snapshots():
                    time.sleep(0.01)  # a daemon that has no memory for it yet keeps it as soon as it has
                (module(step) * (1e6 if step == 3 and not again else 1)).backward()
                seen.append(step)
                try:
                    opt.step()
                except sd.StepReset as e:
                    self.assertRegex(str(e), 'for step 3, which its guard skips')
                opt.zero_grad()
            return sd.digest(module), seen
        found = [run(lambda: work(grads))[0] for grads in ('stream', 'step')]
        self.assertEqual(*found)
        self.assertEqual(found[0][1], [0, 1, 2, 3, 3, 4, 5])

    def test_a_loop_that_does_not_ask_is_refused(self):
        def loop(module, opt, _schedule, look):
            for step in range(7):
                look(step)
                try:
                    module(step).backward()
                    opt.step()
                except sd.StepReset as e:
                    self.assertEqual(step, 6)
                    self.assertRegex(str(e), 'at step 2 again.* at step 6.*of sd.step_of')
                    for retry in (lambda: module(step).backward(), lambda: opt.step(idle=True)):
                        with self.assertRaisesRegex(sd_errors.Misuse, 'at step 2 again.*has not asked it since'):
                            retry()
                        opt.zero_grad()
                    self.assertEqual(sd.step_of(module), 2)
                    module(2).backward()
                    opt.step()
        self.assertEqual(self.train('back-unasked', False, True, loop)[1], 3)


class Torchrun(unittest.TestCase):
    """Workers of torchrun: when one is killed it ends the others, too, and starts all of them again."""

    def train(self, name, kill_at=None):
        """The digests that both ranks of examples/pytorch/gpt.py print, and all that it printed."""
        text, out = os.path.join(DAEMONS.directory, 'text'), os.path.join(DAEMONS.directory, name)
        with open(text, 'w', encoding='ascii') as file:
            file.writelines(f'{i * i} is the square of {i}\n' for i in range(2000))
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '--max-restarts', '3',
                   os.path.join(torch_run.ROOT, 'examples', 'pytorch', 'gpt.py'), '--layers', '1', '--dim', '32', '--heads', '2',
                   '--seq', '32', '--batch', '2', '--steps', '60', '--text', text, '--name', name]
        with open(out, 'w', encoding='utf-8') as file:
            # Without the first: PyTorch 2.15 finds the dead workers' addresses in its store.
            launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT,
                                        env={**os.environ, 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1',
                                             'TMPDIR': DAEMONS.directory})  # for its logs, which it leaves
        try:
            end = time.monotonic() + torch_run.LIMIT_S
            while launcher.poll() is None:
                with open(out, encoding='utf-8') as file:
                    said = file.read()
                if kill_at is not None and f'step {kill_at} ' in said:
                    kill_at = None
                    with open(f'/proc/{launcher.pid}/task/{launcher.pid}/children', encoding='ascii') as file:
                        os.kill(int(file.read().split()[-1]), signal.SIGKILL)
                self.assertLess(time.monotonic(), end, said)
                time.sleep(0.01)
        finally:
            launcher.kill()
            launcher.wait()
        with open(out, encoding='utf-8') as file:
            said = file.read()
        self.assertEqual(launcher.returncode, 0, said)
        self.assertIsNone(kill_at)
        return re.findall('digest sha256:[0-9a-f]{64}', said), said  # ranks write into one another's lines

    def test_it_goes_on_where_it_was(self):
        whole, said = self.train('run-whole')
        self.assertEqual([len(whole), len(set(whole))], [2, 1], said)
        harmed, said = self.train('run-killed', kill_at=20)
        self.assertEqual(harmed, whole, said)
        self.assertRegex(said, 'exitcode *: -9|Signal 9|SIGKILL')
        self.assertEqual(said.count('step 10 '), 2, said)  # of each rank once: nothing was done again


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

    def train(self, name, where=None, behind=True, again=lambda opt: opt.step(), **flags):
        """The digest of three steps, what each came to, and how often one was broken off. where: of a function, whose
        second call in a step() a signal's handler ends, behind what it does or before. again: what is done then."""
        def work():
            module, opt = sd.shard(module := made(Normed), adamw(module), name=name, **flags)
            told, broken, calls = {}, 0, []
            owner, of = where(opt.engine) if where else (opt.engine, 'settle')
            plain = getattr(owner, of)

            def call(*arguments):
                calls.append(opt.engine.missing is None)  # in step()
                ends = where and calls[-1] and sum(calls) == 2
                if ends and not behind:
                    raise KeyboardInterrupt
                if sum(calls) > 4:
                    raise AssertionError('a step is ended of which nothing was returned')
                answer = plain(*arguments)
                if ends:
                    raise KeyboardInterrupt
                return answer
            with unittest.mock.patch.object(owner, of, call):
                while (step := sd.step_of(module)) < 3:
                    module(step).backward()
                    sd.report(module, loss=float(step))
                    if flags:
                        sd.weight(module, 2)
                    try:
                        opt.step()
                    except KeyboardInterrupt:
                        broken += 1
                        again(opt)
                    told[step] = opt.last.step, opt.last.metrics, opt.last.grad_norm
            return sd.digest(module), told, broken
        return run(work)[0]

    def test_a_step_that_is_over(self):
        """The signal comes when the library's call has succeeded, or behind that."""
        digest, told, _ = self.train('not-broken-off')
        for at, where in enumerate((lambda _: (libshd.session.lib, 'shd_commit'), lambda engine: (engine, 'refresh'),
                                    lambda engine: (engine, 'merge'))):
            self.assertEqual(self.train(f'broken-off-{at}', where), (digest, told, 1), at)
        given_up = self.train('given-up', lambda _: (libshd.session.lib, 'shd_commit'),
                              again=lambda opt: opt.zero_grad())
        self.assertEqual((given_up[0], given_up[2]), (digest, 1))

    def test_a_step_of_leases_that_is_over(self):
        def train(name, breaks):
            def work():
                module, opt = sd.shard(module := made(Normed), adamw(module), name=name, micro_batches=2)
                commit, calls, broken = libshd.session.lib.shd_commit, [], 0

                def call(*arguments):
                    calls.append(commit(*arguments))
                    if breaks and len(calls) in (2, 3):  # the last one, too
                        raise KeyboardInterrupt
                    return calls[-1]
                with unittest.mock.patch.object(libshd.session.lib, 'shd_commit', call):
                    for _ in range(3):
                        with contextlib.suppress(KeyboardInterrupt):
                            for step, micro in sd.leases(module, 3):
                                module(1000 * step + micro).backward()
                                opt.step()
                            break
                        broken += 1
                return sd.digest(module), opt.last.step, opt.last.grad_norm, len(calls), broken
            return run(work)[0]
        self.assertEqual(train('leases-broken-off', True), (*train('leases-not-broken-off', False)[:-1], 2))

    def test_the_last_unit_of_a_step(self):
        digest, told, _ = self.train('sums', loss='sum')
        for behind in (False, True):
            again = self.train(f'sums-broken-off-{behind}', lambda engine: (engine, 'send'), behind, loss='sum')
            self.assertEqual(again, (digest, told, 1), behind)

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
        libc = ctypes.CDLL(None)

        def private_kib(pid):
            # Private_Clean is not the process's own: pages of libtorch's file go from shared to private by themselves
            # as other programs that map the file end.
            with open(f'/proc/{pid}/smaps_rollup', encoding='ascii') as file:
                return sum(int(line.split()[1]) for line in file if line.startswith(('Private_Dirty:', 'Swap:')))

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
                if (step + 1) % (steps // 8) == 0:
                    libc.malloc_trim(0)
                    rows.append([(private_kib(pid), len(os.listdir(f'/proc/{pid}/fd'))) for pid in pids])
            return rows
        rows = run(work)[0]
        for row in rows:
            print('KiB and descriptors of worker and daemons:', row)
        # What leaks grows in each part; what is made once, in some: a step fills 700 bytes of a daemon's trace, which
        # has room for some 5,000. The history of steps has rows of 88 bytes.
        in_daemon = 88 + (700 if steps < 10000 else 0)
        for process, parts in enumerate(zip(*rows)):
            self.assertEqual(parts[0][1], parts[-1][1])
            growth = min(after[0] - before[0] for before, after in zip(parts, parts[1:]))
            self.assertLess(growth, 100 + steps / 8 * (in_daemon if process > 0 else 0) / 1024)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
