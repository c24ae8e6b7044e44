#!/usr/bin/env python3
"""test_torch_merge.py BUILD_DIR: shard(merge=…): two groups that merge now and then have the numbers of DiLoCo, and of
local SGD, as PyTorch computes them; and the same bits when workers and daemons are killed, and by leases()."""
import os
import signal
import sys
import unittest

import torch_run
from torch_run import first, kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd import errors  # noqa: E402
from test_torch import Cnn, Mlp, adamw, made  # noqa: E402

GROUPS, WORLD, EVERY, STEPS = 2, 2, 3, 12


def batch(group, step, micro):
    return 100000 * group + 1000 * step + micro


def reference(build, rule):
    """Losses by group and step, and the outer parameters at the end: of plain PyTorch."""
    outer = made(build)
    inner = [made(build) for _ in range(GROUPS)]
    optimizers = [adamw(module) for module in inner]
    trained = [p for p in outer.parameters() if p.requires_grad]
    merger = (torch.optim.SGD(trained, rule.lr, momentum=rule.momentum, nesterov=True) if isinstance(rule, sd.DiLoCo)
              else torch.optim.SGD(trained, 1.0))
    losses = {}
    for step in range(STEPS):
        for group, (module, optimizer) in enumerate(zip(inner, optimizers)):
            found = []
            optimizer.zero_grad()
            for micro in range(WORLD):
                loss = module(batch(group, step, micro))
                (loss / WORLD).backward()
                found.append(loss.item())
            optimizer.step()
            losses[group, step] = found
        if (step + 1) % EVERY == 0:
            for name, p in outer.named_parameters():
                if p.requires_grad:
                    p.grad = sum(p.data - dict(module.named_parameters())[name].data for module in inner) / GROUPS
            merger.step()
            for module in inner:
                with torch.no_grad():
                    for mine, theirs in zip(module.parameters(), outer.parameters()):
                        mine.copy_(theirs)
    return losses, [p.detach().clone() for p in outer.parameters()]


def group_of(index):
    """Of the forks that run() makes: who this one is. What torchrun says is of its group."""
    group, rank = divmod(index, WORLD)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    return group, rank


def work(build, name, rule, fault=lambda group, rank, step: None):
    """What a worker does: losses by step, and digests and parameters at the end."""
    def worker():
        group, rank = group_of(int(os.environ['RANK']))
        module = made(build)
        module, opt = sd.shard(module, adamw(module), name=f'{name}-{group}',
                               merge=rule._replace(group=group, name=f'{name}-outer'))
        losses = {}
        for step in range(sd.step_of(module), STEPS):
            loss = module(batch(group, step, rank))
            loss.backward()
            losses[step] = loss.item()
            fault(group, rank, step)
            opt.step()
        outer = None if rank else opt.engine.merger.outer.digest()
        return losses, sd.digest(module), outer, [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    return worker


def leased(build, name, rule, fault=lambda group, step: None):
    """The same by leases()."""
    def worker():
        group, _ = group_of(int(os.environ['RANK']))
        module = made(build)
        module, opt = sd.shard(module, adamw(module), name=f'{name}-{group}', micro_batches=WORLD,
                               merge=rule._replace(group=group, name=f'{name}-outer'))
        for step, micro in sd.leases(module, STEPS):
            fault(group, step)
            module(batch(group, step, micro)).backward()
            opt.step()
        return {}, sd.digest(module), opt.engine.merger.outer.digest(), None
    return worker


def rule_of(kind, **rates):
    return kind(every=EVERY, outer=os.environ['SHARDD_ADDRESS'], group=0, groups=GROUPS, **rates)


def digests(answers):
    return [answer[1] for answer in answers], answers[0][2]


class Merges(unittest.TestCase):
    def check(self, name, rule, build=Mlp):
        answers = run(work(build, name, rule), GROUPS * WORLD)
        losses, outer = reference(build, rule)
        for index, (found, _, _, parameters) in enumerate(answers):
            group, rank = divmod(index, WORLD)
            for step in range(STEPS):
                self.assertAlmostEqual(found[step], losses[group, step][rank], delta=1e-5, msg=(group, step))
            for mine, theirs in zip(parameters, outer):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        # Merging is of consequence: groups alone are elsewhere.
        self.assertGreater(abs(losses[0, EVERY][0] - losses[1, EVERY][0]), 1e-3)
        return digests(answers)

    def test_diloco(self):
        whole = self.check('diloco', rule_of(sd.DiLoCo, lr=0.5, momentum=0.8))

        def fault(group, rank, step):
            # Before, in and behind a merge: of who merges, of who follows; and the daemons of all.
            if (group, rank, step) in ((0, 0, EVERY - 1), (1, 1, EVERY), (1, 0, 2 * EVERY)) and \
                    first(DAEMONS, f'killed-{group}-{rank}'):
                kill_here()
            if (group, rank, step) == (0, 1, 3 * EVERY - 1) and first(DAEMONS, 'daemon'):
                session = libshd.Session()
                os.kill(session.status(1)['pid'], signal.SIGKILL)
                os.kill(session.status(0)['pid'], signal.SIGKILL)
                session.close()
        killed = run(work(Mlp, 'killed', rule_of(sd.DiLoCo, lr=0.5, momentum=0.8), fault), GROUPS * WORLD)
        self.assertEqual(digests(killed), whole)
        for point in ('killed-0-0', 'killed-1-1', 'killed-1-0', 'daemon'):
            self.assertFalse(first(DAEMONS, point), point)

        def lease_fault(group, step):
            if group == 1 and step == EVERY - 1 and first(DAEMONS, 'leaser'):
                kill_here()
        by_leases = run(leased(Mlp, 'leased', rule_of(sd.DiLoCo, lr=0.5, momentum=0.8), lease_fault), GROUPS * WORLD)
        self.assertEqual(digests(by_leases), whole)

    def test_local_sgd(self):
        self.check('mean', rule_of(sd.LocalSGD))
        # Of layers that are frozen, and batch norm's buffers, which are averaged as all else.
        answers = run(work(lambda: Cnn(True), 'buffers', rule_of(sd.LocalSGD)), GROUPS * WORLD)
        self.assertNotEqual(answers[0][0], answers[-1][0])
        for mine, theirs in zip(answers[0][3], answers[-1][3]):
            self.assertTrue(torch.equal(mine, theirs))

    def test_wrong(self):
        def worker():
            module = made(Mlp)
            with self.assertRaisesRegex(errors.InvalidArgument, 'sd.DiLoCo'):
                sd.shard(module, adamw(module), merge='diloco')
            with self.assertRaisesRegex(errors.InvalidArgument, 'groups - 1'):
                sd.shard(module, adamw(module), merge=rule_of(sd.DiLoCo)._replace(group=2))
            with self.assertRaisesRegex(errors.InvalidArgument, 'LocalSGD'):
                sd.shard(module, adamw(module), merge=rule_of(sd.DiLoCo, momentum=0.0))
            # An outer model that is further than this group: it was restored from before, say.
            done = rule_of(sd.LocalSGD)._replace(groups=1, name='wrong-outer')
            first_module = made(Mlp)
            first_module, opt = sd.shard(first_module, adamw(first_module), name='wrong-a', merge=done)
            for step in range(EVERY):
                first_module(step).backward()
                opt.step()
            with self.assertRaisesRegex(errors.Misuse, 'not of one training'):
                sd.shard(module, adamw(module), name='wrong-b', merge=done)
            return True
        self.assertEqual(run(worker), [True])


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
