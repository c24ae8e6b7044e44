#!/usr/bin/env python3
"""test_torch_parallel.py BUILD_DIR: groups of ranks, tensor and pipeline parallel by PyTorch's own means, are workers.

The model is that of examples/pytorch/parallel.py. A pipeline adds gradients up in the order of its pieces, as one process
does, so its bits are those of one process. Tensor parallelism adds products up in two halves, so it is held to NOISE times
what a change of the start values by one unit in the last place comes to (test_torch.py).
"""
import contextlib
import functools
import glob
import importlib.util
import io
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest

import torch_run
from torch_run import Fork, first, kill_here

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleGPipe,  # noqa: E402
                                          ScheduleInterleaved1F1B)

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd.torch import attach  # noqa: E402

NOISE = 8
EXAMPLE = os.path.join(torch_run.ROOT, 'examples', 'pytorch', 'parallel.py')
spec = importlib.util.spec_from_file_location('parallel_example', EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
SIZES = types.SimpleNamespace(layers=2, dim=32, heads=2, seq=16)
ROWS, STEPS = 4, 5


class Group:
    """So many processes with a process group of their own. When one is killed all are, and are started again."""

    def __init__(self, function, ranks, **told):
        self.function, self.ranks, self.told, self.starts = function, ranks, told, 0
        self.forks, self.answers = {}, {}
        self.start()

    def start(self):
        self.starts += 1
        store = tempfile.mktemp(dir=DAEMONS.directory)
        self.forks = {rank: Fork(self.work(rank, store), rank, self.ranks) for rank in range(self.ranks)}
        self.answers = {}

    def work(self, rank, store):
        def work():
            torch.set_num_threads(1)
            dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=self.ranks)
            return self.function(types.SimpleNamespace(starts=self.starts, **self.told))
        return work

    def look(self):
        """Whether all have ended."""
        for rank, fork in list(self.forks.items()):
            if fork.done():
                del self.forks[rank]
                by_itself, self.answers[rank] = fork.answer()
                if not by_itself:
                    if self.answers[rank] != signal.SIGKILL:
                        raise AssertionError(f'rank {rank} was ended by signal {self.answers[rank]}')
                    self.end()
                    self.start()
                    return False
        return not self.forks

    def end(self):
        for fork in self.forks.values():
            os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)
        self.forks = {}


def run(function, ranks=1, groups=1, starts=None, **told):
    """What the ranks of each group returned, [group][rank]; of one group, [rank]."""
    running = [Group(function, ranks, group=group, groups=groups, **told) for group in range(groups)]
    try:
        while not all([group.look() for group in running]):
            time.sleep(0.005)
    finally:
        for group in running:
            group.end()
    if starts is not None:
        starts.extend(group.starts for group in running)
    answers = [[group.answers[rank] for rank in range(ranks)] for group in running]
    return answers if groups > 1 else answers[0]


def batch(step, micro):
    source = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(256, (ROWS, SIZES.seq + 1), generator=source).cumsum(1) % 16
    return tokens[:, :-1], tokens[:, 1:]


def whole(noise=False):
    torch.manual_seed(1)
    model = example.Gpt(SIZES)
    for module in model.modules():
        example.init(module)
    if noise:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, 9.0)))
    return model


def adamw(model):
    """Two groups, as is usual: matrices decay."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{'params': [p for p in parameters if p.dim() > 1], 'weight_decay': 0.1},
                              {'params': [p for p in parameters if p.dim() < 2], 'weight_decay': 0.0}], lr=1e-2)


def plain(world=1, noise=False):
    """Each step's mean loss in plain PyTorch."""
    model = whole(noise)
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        losses.append(0.0)
        for micro in range(world):
            tokens, targets = batch(step, micro)
            loss = example.loss_of(model(tokens), targets) / world
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(name, tp=1, pp=1, dp=1, pieces=1, steps=STEPS, kind=Schedule1F1B, fault=lambda o, step, where: None,
            spoil=None, save=None, values='given', **flags):
    """A function for run(): the rank's losses by steps, the digest. dp: groups of one process group."""
    def work(o):
        mesh = init_device_mesh('cpu', (dp, pp, tp), mesh_dim_names=('dp', 'pp', 'tp'))
        at = mesh.get_local_rank('pp')
        with torch.device('meta') if values == 'made' else contextlib.nullcontext():
            stage = example.stage_of(SIZES, at, pp)
        full = whole()
        if values == 'given' and pp == 1:
            stage.load_state_dict(full.state_dict())
        if tp > 1:
            example.cut(stage, mesh['tp'])
        # What has its start values at hand needs no full=; where it is given, its values are those that count.
        own = {} if values == 'given' and pp == 1 else {'full': full}
        stage, optimizer = sd.shard(stage, adamw(stage), name=name, **own, **flags,
                                    **{'mesh': mesh, 'dp': None} if o.groups == 1 else
                                    {'mesh': mesh['pp', 'tp'], 'dp': (o.group, o.groups)})
        if spoil is not None:
            spoil(stage)
        schedule = kind(PipelineStage(stage, at, pp, torch.device('cpu'), group=mesh.get_group('pp')), pieces,
                        example.loss_of) if pp > 1 else None
        found = {}
        for step in range(sd.step_of(stage), steps):
            fault(o, step, 'begin')
            tokens, targets = batch(step, optimizer.engine.place.rank)
            losses = []
            if schedule is not None:
                schedule.step(*[tokens] * (at == 0), **{'target': targets, 'losses': losses} if at == pp - 1 else {})
            else:
                for piece, target in zip(tokens.chunk(pieces), targets.chunk(pieces)):
                    losses.append(example.loss_of(stage(piece), target))
                    losses[-1].backward()
                if pieces > 1:
                    for p in stage.parameters():
                        p.grad.div_(pieces)
            if at == pp - 1:
                sd.report(stage, loss=torch.stack(losses).mean())
            nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
            fault(o, step, 'before')
            optimizer.step()
            optimizer.zero_grad()
            fault(o, step, 'after')
            found[step] = (optimizer.last.loss, optimizer.last.grad_norm)
        if save is not None:
            if dist.get_rank() == 0:
                sd.save(stage, save)
            dist.barrier()
        return found, sd.digest(stage), os.getpid()
    return work


@functools.cache
def undisturbed(ranks, **shape):
    """What the ranks return where nothing happens to them; its lines are not to be changed."""
    return run(trained('undisturbed-' + '-'.join(f'{flag}-{value}' for flag, value in sorted(shape.items())), **shape), ranks)


def losses_of(answers):
    """Of the ranks that report."""
    return [losses for losses, *_ in answers if losses[0][0] is not None]


@functools.cache
def alone(world, noise):
    return run(lambda o: plain(world, noise))[0]


class Numbers(unittest.TestCase):
    """Loss by loss."""

    def check_noise(self, answers, world=1):
        reference, moved = (alone(world, noise) for noise in (False, True))
        noise = max(abs(a - b) for a, b in zip(reference, moved))
        self.assertEqual(len({digest for _, digest, _ in answers}), 1)
        reported = losses_of(answers)
        self.assertTrue(reported)
        for losses in reported:
            worst = max(abs(losses[step][0] - reference[step]) for step in range(STEPS))
            print(f'{worst:.1e} from plain PyTorch, whose own noise is {noise:.1e}')
            # The noise may be none by chance: a loss is rounded itself, in units of the last place of the largest.
            self.assertLessEqual(worst, NOISE * max(noise, math.ulp(max(reference)) * 2 ** 29))
        self.assertNotEqual(reference[0], reference[-1])

    def test_a_pipeline_has_the_bits_of_one_process(self):
        one = run(trained('pp-one', pieces=2, grads='step'))
        for kind in ScheduleGPipe, Schedule1F1B:
            two = run(trained(f'pp-{kind.__name__}', pp=2, pieces=2, kind=kind), 2)
            self.assertEqual([two[0][1], two[1][1]], [one[0][1]] * 2)
            self.assertEqual(losses_of(two), [one[0][0]])
        self.check_noise(two)

    def test_several_stages_a_rank(self):
        sizes = types.SimpleNamespace(**{**vars(SIZES), 'layers': 4})

        def one(_):
            torch.manual_seed(1)
            full = example.Gpt(sizes)
            full, optimizer = sd.shard(full, adamw(full), name='stages-1', grads='step')
            for step in range(STEPS):
                tokens, targets = batch(step, 0)
                for piece, target in zip(tokens.chunk(2), targets.chunk(2)):
                    example.loss_of(full(piece), target).backward()
                for p in full.parameters():
                    p.grad.div_(2)
                nn.utils.clip_grad_norm_(full.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return sd.digest(full)

        def pipeline(_):
            torch.manual_seed(1)
            full, at = example.Gpt(sizes), dist.get_rank()
            mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('pp',))
            parts = [example.stage_of(sizes, stage, 4) for stage in (at, at + 2)]
            optimizer = adamw(nn.ModuleList(parts))
            parts, optimizer = sd.shard(parts, optimizer, mesh=mesh, full=full, name='stages-2')
            schedule = ScheduleInterleaved1F1B(
                [PipelineStage(part, stage, 4, torch.device('cpu')) for part, stage in zip(parts, (at, at + 2))], 2,
                example.loss_of)
            for step in range(sd.step_of(parts), STEPS):
                tokens, targets = batch(step, 0)
                losses = []
                schedule.step(*[tokens] * (at == 0), **{'target': targets, 'losses': losses} if at else {})
                if losses:
                    sd.report(parts, loss=torch.stack(losses).mean())
                nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return sd.digest(parts)
        self.assertEqual(run(pipeline, 2), run(one) * 2)

    def test_pipelines_beside_each_other_have_those_of_as_many_processes(self):
        two = undisturbed(2, dp=2, pieces=2, grads='step')
        four = run(trained('pp-dp', pp=2, dp=2, pieces=2), 4)
        self.assertEqual({digest for _, digest, _ in two + four}, {two[0][1]})
        self.assertEqual(losses_of(four), losses_of(two))

    def test_tensor_parallel(self):
        self.check_noise(undisturbed(2, tp=2))

    def test_groups_by_two_dimensions(self):
        def work(_):
            mesh = init_device_mesh('cpu', (2, 1, 2), mesh_dim_names=('dp_replicate', 'tp', 'dp_shard'))
            model, optimizer = sd.shard(model := whole(), adamw(model), mesh=mesh, name='dp-two-dimensions')
            place = optimizer.engine.place
            for step in range(2):
                tokens, targets = batch(step, place.rank)
                example.loss_of(model(tokens), targets).backward()
                optimizer.step()
            return place[:2], sd.digest(model)

        def plainly(_):
            model, optimizer = sd.shard(model := whole(), adamw(model), name='dp-four')
            for step in range(2):
                tokens, targets = batch(step, int(os.environ['RANK']))
                example.loss_of(model(tokens), targets).backward()
                optimizer.step()
            return sd.digest(model)
        answers = run(work, 4)
        self.assertEqual([place for place, _ in answers], [(rank, 4) for rank in range(4)])
        self.assertEqual([digest for _, digest in answers], run(plainly, 4))

    def test_muon_is_of_whole_matrices(self):
        def work(o, ranks):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
            flags = {}
            if ranks > 1:
                flags['mesh'] = init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))
                parallelize_module(model, flags['mesh'], {'0': ColwiseParallel(), '2': RowwiseParallel()})
            model, optimizer = sd.shard(model, torch.optim.Muon(model.parameters(), lr=0.02), name=f'muon-{ranks}', **flags)
            losses = []
            for step in range(STEPS):
                losses.append(model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean())
                losses[-1].backward()
                optimizer.step()
            return [loss.item() for loss in losses]
        (one,), two = run(lambda o: work(o, 1)), run(lambda o: work(o, 2), 2)
        # Muon's matrices are of bfloat16: a sum that is rounded otherwise may move an element of them by 2^-9 of itself.
        for losses in two:
            self.assertLess(max(abs(a - b) for a, b in zip(one, losses)), 2 ** -9 * one[0])
        self.assertLess(one[-1], 0.9 * one[0])

    def test_no_step_ends_while_a_rank_is_before_its_step(self):
        """Also one that returns no unit, as there are fewer than ranks."""
        def work(_):
            mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
            parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})
            model, optimizer = sd.shard(model, adamw(model), mesh=mesh, name='one-unit', units=lambda name, module: 'all')
            for _ in range(2):
                model(torch.ones(4, 8)).square().mean().backward()
                if dist.get_rank() == 1:
                    values = [p.to_local().clone() for p in model.parameters()]
                    time.sleep(0.2)
                    assert all(torch.equal(p.to_local(), was) for p, was in zip(model.parameters(), values))
                optimizer.step()
            return optimizer.engine.ranks.returns(optimizer.engine.units[0])
        self.assertEqual(run(work, 2), [True, False])

    def test_both(self):
        two = run(trained('tp-pieces', tp=2, pieces=2, grads='step'), 2)
        four = run(trained('tp-pp', tp=2, pp=2, pieces=2), 4)
        self.check_noise(four)
        self.assertEqual({digest for _, digest, _ in two + four}, {two[0][1]})

    def test_two_groups(self):
        two = undisturbed(4, tp=2, dp=2)
        self.check_noise(two, world=2)

        def work(_):
            mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))
            model = whole()
            example.cut(model, mesh)
            model, optimizer = sd.shard(model, adamw(model), mesh=mesh, name='tp-accumulate', accumulate=2)
            for step in range(STEPS):
                for tokens, targets in (batch(step, micro) for micro in range(2)):
                    (example.loss_of(model(tokens), targets) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            digest, held = sd.digest(model), [p.full_tensor().clone() if hasattr(p, 'full_tensor') else p.clone()
                                              for p in model.parameters()]
            sd.close(model)
            with torch.no_grad():
                for p, was in zip(model.parameters(), held):
                    assert torch.equal(p.full_tensor() if hasattr(p, 'full_tensor') else p, was)
                    p.add_(1)  # it is this process's own
            return digest
        self.assertEqual(run(work, 2), [two[0][1]] * 2)

    def test_beside_fully_shard(self):
        """What it says of units and of when they are freed changes no bit."""
        def work(o):
            mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))
            model = whole()
            example.cut(model, mesh['tp'])
            for block in model.blocks.values():
                sd.fully_shard(block)
            sd.fully_shard(model)
            optimizer = sd.Optimizer(model, adamw(model), mesh=mesh, name='tp-fully')
            for step in range(STEPS):
                tokens, targets = batch(step, 0)
                example.loss_of(model(tokens), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            return optimizer.last.grad_norm
        norms, reference = run(work, 2), undisturbed(2, tp=2)
        self.assertEqual(norms, [losses[STEPS - 1][1] for losses, *_ in reference])

    def test_rows_that_do_not_come_out_even_and_parameters_in_bf16(self):
        """Of five columns the first rank has three; and what is published in two bytes is cut as well."""
        def work(o, ranks=2, **flags):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))
            if ranks > 1:
                mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))
                parallelize_module(model, mesh, {'0': ColwiseParallel(use_local_output=False), '2': RowwiseParallel()})
                flags['mesh'] = mesh
            model, optimizer = sd.shard(model, adamw(model), name=f'uneven-{ranks}-{len(flags)}', **flags)
            losses = []
            for step in range(STEPS):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(optimizer.engine.dtype)
                losses.append(model(x).square().mean())
                losses[-1].backward()
                optimizer.step()
            return [loss.item() for loss in losses], [tuple(p.to_local().shape) if ranks > 1 else tuple(p.shape)
                                                       for p in model.parameters()]
        for flags, delta in ({}, 1e-6), ({'publish': torch.bfloat16}, 4e-3):
            (one, _), = run(lambda o, flags=flags: work(o, 1, **flags))
            (two, first_rank), (other, last_rank) = run(lambda o, flags=flags: work(o, 2, **flags), 2)
            self.assertEqual(two, other)
            self.assertEqual([first_rank[0], last_rank[0], first_rank[2], last_rank[2]], [(3, 8), (2, 8), (8, 3), (8, 2)])
            self.assertLess(max(abs(a - b) for a, b in zip(one, two)), delta)
            self.assertGreater(abs(one[0] - one[-1]), 4 * delta)

    def test_start_values_that_are_made_unit_by_unit(self):
        made = run(trained('made', tp=2, steps=1, values='made'), 2)
        given = run(trained('given', tp=2, steps=1), 2)
        self.assertEqual(made[0][:2], given[0][:2])


def there(name):
    """Wait until some process has been at first(…, name)."""
    end = time.monotonic() + torch_run.LIMIT_S
    while not os.path.exists(os.path.join(DAEMONS.directory, name)):
        if time.monotonic() > end:
            raise AssertionError(f'nobody came to {name}')
        time.sleep(0.005)


def kill_daemon():
    """kill -9 of owner 0's."""
    session = libshd.Session()
    os.kill(session.status(0)['pid'], signal.SIGKILL)
    session.close()


class Kills(unittest.TestCase):
    """kill -9 of a rank: the other group goes on, the rank's own is started again, no bit is another."""

    def check(self, name, reference, fault, pieces=1, **shape):
        starts = []
        groups = run(trained(name, fault=fault, pieces=pieces, **shape), 2, groups=2, starts=starts)
        self.assertEqual(starts, [1, 2])
        self.assertEqual({digest for group in groups for _, digest, _ in group}, {reference[0][1]})
        expected, (lasting, restarted) = losses_of(reference)[0], groups
        self.assertEqual(losses_of(lasting)[0], expected)
        for losses, *_ in restarted:
            self.assertTrue(0 < len(losses) < STEPS)
            for step, (loss, norm) in losses.items():
                self.assertEqual(norm, expected[step][1])
                self.assertIn(loss, (None, expected[step][0]))

    def test_a_rank_of_a_tensor_parallel_group(self):
        def fault(o, step, where):
            if (o.group, os.environ['RANK'], step, where) == (1, '1', 2, 'before') and o.starts == 1:
                kill_here()
        self.check('kill-tp', undisturbed(4, tp=2, dp=2), fault, tp=2)

    def test_a_stage(self):
        def fault(o, step, where):
            if (o.group, os.environ['RANK'], step, where) == (1, '0', 3, 'begin') and o.starts == 1:
                kill_here()
        self.check('kill-pp', undisturbed(2, dp=2, pieces=2, grads='step'), fault, pp=2, pieces=2)

    def all_in(self, name):
        """The second group is killed where it waits for the first, which ends the step when that computes it again."""
        def fault(o, step, where):
            if step != 2:
                return
            if o.group == 0 and where == 'before':
                there(f'{name}-again')
            if o.group == 0 and where == 'after':
                first(DAEMONS, f'{name}-over')
            if o.group == 1 and o.starts == 1 and where == 'before' and os.environ['RANK'] == '0':
                threading.Timer(0.5, kill_here).start()
            if o.group == 1 and o.starts == 2 and where == 'begin':
                first(DAEMONS, f'{name}-again')
                there(f'{name}-over')
        return fault

    def test_what_is_in_may_be_counted_meanwhile(self):
        self.check('kill-in', undisturbed(4, tp=2, dp=2), self.all_in('in'), tp=2)

    def test_ranks_that_begin_at_different_steps(self):
        attached, name = attach.attached, 'apart'

        def late(*arguments):
            """The second rank attaches when the step is over that the first one finds open."""
            if first(DAEMONS, f'{name}-attached'):
                engine = attached(*arguments)
                first(DAEMONS, f'{name}-again')
                return engine
            there(f'{name}-over')
            return attached(*arguments)

        def work(o):
            if o.group == 1 and o.starts == 2:
                attach.attached = late
            return trained('kill-apart', tp=2, fault=self.all_in(name))(o)
        starts = []
        groups = run(work, 2, groups=2, starts=starts)
        self.assertEqual(starts, [1, 2])
        self.assertEqual({digest for group in groups for _, digest, _ in group},
                         {undisturbed(4, tp=2, dp=2)[0][1]})
        self.assertEqual([sorted(losses) for losses, *_ in groups[1]], [[3, 4]] * 2)


    def test_a_group_that_goes_back(self):
        """Its ranks end, wherever they hear of it, and go on at the earlier step when they are started again."""
        def fault(o, step, where):
            if (step, where, os.environ['RANK'], o.starts) == (3, 'before', '0', 1):
                session = libshd.Session()
                model = session.attach('goes-back')
                model.rewind(2)
                session.close()

        def work(o):
            try:
                if o.starts == 1:
                    trained('goes-back', tp=2, steps=2)(o)
                    if dist.get_rank() == 0:
                        session = libshd.Session()
                        assert session.attach('goes-back').snapshot() == 2
                        session.close()
                    dist.barrier()
                return trained('goes-back', tp=2, fault=fault)(o)
            except libshd.errors.Gone as e:
                assert 'end the group and start it again' in str(e), e
                kill_here()
        starts = []
        answers = run(work, 2, starts=starts)
        self.assertEqual(starts, [2])
        self.assertEqual([sorted(losses) for losses, *_ in answers], [[2, 3, 4]] * 2)
        self.assertEqual(answers[0][1], undisturbed(2, tp=2)[0][1])

    def test_a_daemon(self):
        def fault(o, step, where):
            if (step, where, os.environ['RANK']) == (2, 'before', '0'):
                kill_daemon()
        reference = undisturbed(2, tp=2)
        self.assertEqual(run(trained('kill-daemon', tp=2, fault=fault), 2)[0][:2], reference[0][:2])


class Checkpoints(unittest.TestCase):
    """Of one shape, begun with in another."""

    def drop(self, name):
        session = libshd.Session()
        session.drop(name, force=True)
        session.close()

    def test_each_shape_loads_in_each(self):
        saved = os.path.join(DAEMONS.directory, 'saved')
        shapes = {'one': (1, {}), 'tp': (2, {'tp': 2}), 'pp': (2, {'pp': 2}), 'both': (4, {'tp': 2, 'pp': 2})}
        digests = {}
        for shape, (ranks, flags) in shapes.items():
            name, where = f'saved-{shape}', f'{saved}-{shape}'
            digests[shape] = run(trained(name, steps=2, pieces=2, grads='step', save=where, **flags), ranks)[0][1]
            self.drop(name)
            with safe_open(glob.glob(f'{where}/step-*/model*.safetensors')[0], 'pt') as file:
                self.assertEqual(set(file.keys()), set(whole().state_dict()))
        for one, other in (('one', 'tp'), ('tp', 'pp'), ('pp', 'both'), ('both', 'one'), ('tp', 'one')):
            name, (ranks, flags) = f'saved-{one}', shapes[other]
            loaded = run(trained(name, steps=2, pieces=2, grads='step', restore=f'{saved}-{one}', **flags), ranks)
            self.assertEqual([digest for _, digest, _ in loaded], [digests[one]] * ranks)
            further = run(trained(name, pieces=2, grads='step', **flags), ranks)
            digests[one, other] = further[0][1]
            self.drop(name)
        self.assertEqual(digests['tp', 'pp'], digests['tp', 'one'])  # what goes on goes on with moments

    def test_other_numbers_of_groups(self):
        saved = os.path.join(DAEMONS.directory, 'saved-groups')
        two = run(trained('groups', tp=2, dp=2, steps=2, save=saved), 4)
        session = libshd.Session()
        model = session.attach('groups')
        model.fork('groups-1', set='micro_batches=1')
        session.close()
        one = run(trained('groups-1', tp=2, steps=2), 2)
        self.assertEqual(one[0][1], two[0][1])
        self.assertEqual(sorted(run(trained('groups-1', tp=2), 2)[0][0]), [2, 3, 4])


class Wrong(unittest.TestCase):
    """What is refused, or found to be wrong, says what, and what would be right."""

    def refused(self, function, ranks, kind, text):
        def work(o):
            try:
                function(o)
            except Exception as e:
                return type(e).__name__, str(e)
            return '', 'nothing is refused'
        answers = run(work, ranks)
        self.assertTrue(any(name == kind and re.search(text, said) for name, said in answers), answers)

    def test_a_gradient_that_is_not_alike(self):
        def spoil(stage):
            if dist.get_rank() == 1:
                stage.wpe.weight.register_hook(lambda grad: grad * 2)
        self.refused(trained('not-alike', tp=2, spoil=spoil), 2, 'Misuse',
                     "gradient of 'wpe.weight', .* at rank [01] than at rank [01]")

        def frees(stage):
            if dist.get_rank() == 1:
                weight = stage.wpe.weight.detach()
                del stage.wpe
                stage.wpe = types.SimpleNamespace(weight=weight)
        self.refused(trained('not-there', tp=2, spoil=frees), 2, 'Misuse',
                     "'wpe.weight' has a gradient at rank 0 and none at rank 1")

    def test_meshes(self):
        def work(change=lambda o: {}, names=('dp', 'tp'), shape=(1, 2), build=lambda o: example.stage_of(SIZES, 0, 1)):
            def work(o):
                o.mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
                o.stage = build(o)
                flags = {'mesh': o.mesh, 'name': 'wrong', **change(o)}
                sd.shard(o.stage, adamw(nn.ModuleList(o.stage) if isinstance(o.stage, list) else o.stage), **flags)
            return work

        def parallel(o):
            stage = example.stage_of(SIZES, 0, 1)
            example.cut(stage, o.mesh['tp'])
            return stage
        for function, kind, text in (
                (work(names=('dp', 'cp')), 'NotSupported', "dimension 'cp': known are 'dp', 'dp_replicate'"),
                (work(lambda o: {'mesh': 2}), 'InvalidArgument', r"mesh=2: must be a DeviceMesh .* names"),
                (work(lambda o: {'mesh': o.mesh['dp']}), 'InvalidArgument', 'of 1 ranks, the process group of 2'),
                (work(lambda o: {'dp': (0, 2)}), 'InvalidArgument', r"dp=\(0, 2\) with a mesh that has 'dp'"),
                (work(lambda o: {'dp': (2, 2)}, ('pp', 'tp')), 'InvalidArgument', r'dp=\(2, 2\): must be \(which'),
                (work(lambda o: {'mesh': None, 'dp': (0, 2)}), 'InvalidArgument', 'dp= without mesh='),
                (work(lambda o: {'mesh': None}, build=parallel), 'InvalidArgument',
                 "'wte.weight' is a DTensor without mesh="),
                (work(names=('tp', 'pp')), 'InvalidArgument', "'pp' of 2: give full="),
                (work(lambda o: {'full': whole()}, ('tp', 'pp')), 'Misuse', 'is .* in stage 1, .* in stage 0: it is in one'),
                (work(lambda o: {'full': whole()}, build=lambda o: example.stage_of(SIZES, 0, 2)), 'Misuse',
                 "'blocks.1.ln_1.weight' .* is in no stage"),
                (work(lambda o: {'full': whole(), 'units': lambda name, module: 'all'}, ('tp', 'pp'),
                      build=lambda o: example.stage_of(SIZES, dist.get_rank(), 2)), 'Misuse',
                 "are one unit, 'all', and of two stages"),
                (work(lambda o: {'full': nn.Linear(2, 2)}, ('tp', 'pp')), 'Misuse',
                 "'wte.weight' of this stage is no parameter"),
                (work(lambda o: {'mesh': None}, build=lambda o: [nn.Linear(2, 2)]), 'InvalidArgument',
                 'a list of 1 modules without mesh='),
                (work(build=lambda o: [nn.Linear(2, 2), nn.Linear(2, 2)]), 'Misuse', "two stages have a 'weight'"),
                (work(lambda o: {'micro_batches': 4}), 'NotSupported', r'micro_batches=, whose leases\(\) .* with mesh='),
                (work(lambda o: {'sums': 'host'}), 'NotSupported', "sums='host' with mesh="),
                (work(lambda o: {'grad_codec': 'int8'}), 'NotSupported', 'codec= and grad_codec= with mesh='),
                (work(lambda o: {'loss': 'sum'}), 'NotSupported', "loss='sum' with mesh=")):
            with self.subTest(text):
                self.refused(function, 2, kind, text)

    def test_what_ranks_do_not_do(self):
        def work(what):
            def work(o):
                mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))
                stage = example.stage_of(SIZES, 0, 1)
                example.cut(stage, mesh['tp'])
                stage, optimizer = sd.shard(stage, adamw(stage), mesh=mesh, name='not-done', full=whole())
                what(stage, optimizer)
            return work

        def begun(stage, optimizer):
            example.loss_of(stage(batch(0, 0)[0]), batch(0, 0)[1]).backward()
            optimizer.zero_grad()

        def another(stage, _):
            torch.optim.SGD(list(stage.blocks['0'].attn.q.parameters()), 0.1).step()

        def writes(stage, _):
            with sd.writable(stage):
                pass
        for what, text in (
                (writes, r'writable\(\) by a rank of a group .* sd.save\(\)'),
                (lambda stage, optimizer: optimizer.state_dict(), r'state_dict\(\) by a rank of a group'),
                (lambda stage, optimizer: sd.save_safetensors(stage, 'x'), r'save_safetensors\(\) by a rank of a group'),
                (lambda stage, optimizer: sd.load_safetensors(stage, 'x'), r'load_safetensors\(\) by a rank of a group'),
                (lambda stage, optimizer: optimizer.load_state_dict({}), r'load_state_dict\(\) by a rank of a group'),
                (begun, 'giving up a step by a rank of a group .* torchrun --max-restarts')):
            with self.subTest(text):
                self.refused(work(what), 2, 'NotSupported', text)
        self.refused(work(another), 2, 'Misuse', r"SGD.step\(\) of 'blocks.0.attn.q.weight', which another optimizer")

    def test_fully_shard_says_where_meshes_of_more_dimensions_go(self):
        def work(o):
            sd.fully_shard(whole(), mesh=init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp')))
        self.refused(work, 2, 'NotSupported', r'of 2 dimensions: .*sd.shard\(mesh=\)')


class Torchrun(unittest.TestCase):
    """examples/pytorch/parallel.py, by torchrun."""
    FLAGS = ['--tp', '2', '--layers', '1', '--dim', '32', '--heads', '2', '--seq', '32', '--batch', '2', '--steps', '40']

    def setUp(self):
        self.text = os.path.join(DAEMONS.directory, 'text')
        with open(self.text, 'w', encoding='ascii') as file:
            file.writelines(f'{i * i} is the square of {i}\n' for i in range(2000))

    def forks(self, ranks, *flags):
        """The example in forks of this process, which has imported what it needs: each returns what it prints."""
        port = str(torch_run.free_port())

        def work():
            os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
            sys.argv = [EXAMPLE, *self.FLAGS, '--text', self.text, *flags]
            with contextlib.redirect_stdout(io.StringIO()) as said:
                example.main()
            return said.getvalue()
        return [Fork(work, rank, ranks) for rank in range(ranks)]

    def answers(self, forks, meanwhile=lambda: None):
        left = list(forks)
        try:
            while left:
                meanwhile()
                left = [fork for fork in left if not fork.done()]
                time.sleep(0.01)
        finally:
            for fork in left:
                os.kill(fork.pid, signal.SIGKILL)
                os.waitpid(fork.pid, 0)
        return [fork.answer()[1] for fork in forks]

    @staticmethod
    def digests(said):
        return re.findall('digest sha256:([0-9a-f]{64})', said)

    def test_it_starts_a_group_again(self):
        whole_run = self.answers(self.forks(4, '--name', 'torchrun-none'))
        digest, = set(sum(map(self.digests, whole_run), []))
        out, killed = os.path.join(DAEMONS.directory, 'torchrun'), []
        # Else ranks look for each other by the host's name, which need not be one that resolves.
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', '127.0.0.1',
                   '--nproc-per-node', '2', '--max-restarts', '3', EXAMPLE, *self.FLAGS, '--text', self.text,
                   '--name', 'torchrun', '--group', '1', '--groups', '2']
        with open(out, 'w', encoding='utf-8') as file:
            launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={
                **os.environ, 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1',
                'TMPDIR': DAEMONS.directory})  # for its logs, which it leaves

        def said():
            with open(out, encoding='utf-8') as file:
                return file.read()

        def kill():
            self.assertIn(launcher.poll(), (None, 0), said())
            if not killed and 'step 10 ' in said():
                with open(f'/proc/{launcher.pid}/task/{launcher.pid}/children', encoding='ascii') as file:
                    killed.append(int(file.read().split()[-1]))
                os.kill(killed[0], signal.SIGKILL)
        try:
            # The other group is as it would be under a torchrun, which has nothing to do.
            lasting = self.answers(self.forks(2, '--name', 'torchrun', '--group', '0', '--groups', '2'), kill)
            self.assertEqual(launcher.wait(torch_run.LIMIT_S), 0, said())
        finally:
            launcher.terminate()  # which ends its ranks
            launcher.wait()
        self.assertEqual(len(killed), 1)
        self.assertEqual([self.digests(each) for each in lasting], [[digest]] * 2)
        self.assertEqual(self.digests(said()), [digest] * 2)
        self.assertRegex(said(), 'exitcode *: -9|Signal 9|SIGKILL')
        self.assertNotIn('WARNING: process', said())
        for each in lasting:
            self.assertEqual(each.count('step 10 '), 1)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
