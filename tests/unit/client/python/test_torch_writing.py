#!/usr/bin/env python3
"""test_torch_writing.py BUILD_DIR: values that are written beside training, by one worker of several, by one that is late
or was started again: all have the same ones, or it is said whose are dropped."""
import contextlib
import fcntl
import io
import os
import sys
import time
import unittest
import unittest.mock

import torch_run
from torch_run import kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from libshd.torch import attach  # noqa: E402
from test_torch_wrong import Case, Normed, Two, adamw  # noqa: E402

SHORT_S = 2 * torch_run.PACE  # that a worker waits for one that was refused


def mark(path):
    with open(path, 'w', encoding='ascii'):
        pass


def wait_for(path, at_most=torch_run.LIMIT_S):
    end = time.monotonic() + at_most
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(0.01)


class Alone(Case):
    """writable() by one of two workers."""

    def test_it_is_said_to_whom_it_hits(self):
        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name='alone')
            try:
                for step in range(2):
                    while sd.step_of(module) == step:
                        with contextlib.suppress(sd.StepReset):
                            module(self.X).backward()
                            opt.step()
                    if not step and os.environ['RANK'] == '0':
                        with sd.writable(module):
                            nn.init.zeros_(module.layers[0].bias)
                        return 'put'
            except libshd.Misuse as e:
                return str(e)
        put, said = run(work, 2)
        self.assertEqual(put, 'put')
        self.assertRegex(said, 'Has another worker used writable..')

    def test_who_is_waited_for_is_named(self):
        def work():
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name='named', timeout=SHORT_S)
            said = os.path.join(DAEMONS.directory, 'named')
            if os.environ['RANK'] == '1':
                wait_for(said)
                return os.getpid()
            try:
                with sd.writable(module):
                    pass
            except libshd.TimedOut as e:
                return str(e)
            finally:
                mark(said)
        said, pid = run(work, 2)
        self.assertRegex(said, rf'waits .* for named \(pid {pid}, .*all workers, before values are put in step 0')

    def test_it_is_refused_where_nobody_has_put_any(self):
        """To a worker that has just begun, as to one that was started again."""
        def work():
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name='nobody')
            refused = os.path.join(DAEMONS.directory, 'refused')
            if os.environ['RANK'] == '1':
                module(self.X).backward()
                wait_for(refused)
                return ''
            try:
                with sd.writable(module):
                    nn.init.zeros_(module.layers[0].bias)
                return 'put'
            except libshd.Misuse as e:
                return str(e)
            finally:
                mark(refused)
        self.assertRegex(run(work, 2)[0], 'is not put.*rank 0 alone cannot')

    def test_what_rank_0_alone_has_written(self):
        """The other one has written nothing, and is first."""
        def work():
            module, opt = sd.shard(module := Normed(), adamw(module.parameters()), name='rank-0')
            left, said = os.path.join(DAEMONS.directory, 'left'), []
            for what in ('fc.bias', 'norm.running_mean'):
                try:
                    with sd.writable(module):
                        if os.environ['RANK'] == '0':
                            wait_for(f'{left}-{what}')
                            module.state_dict()[what].fill_(3)
                except libshd.Misuse as e:
                    said.append(str(e))
                mark(f'{left}-{what}')
            return said, sd.digest(module)
        (said, digest), (other, its) = run(work, 2)
        for text, what in zip(said, ('fc.bias', 'norm.running_mean'), strict=True):
            self.assertRegex(text, f"written to '{what}' .of [13]. is dropped: another worker left it first")
        self.assertEqual((other, its), ([], digest))


class Late(Case):
    """writable() by two workers, of which one is late."""

    SOON_S = 0.2 * torch_run.PACE  # in which a worker that waited for nobody would have put values

    def train(self, name, where):
        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), torch.optim.AdamW(module.parameters(), lr=0.5), name=name)
            late = os.environ['RANK'] == '1'
            for step in range(2):
                marker = os.path.join(DAEMONS.directory, f'{name}-{step}')
                commit = opt.engine.model.commit

                def commits_late(*arguments, marker=marker, commit=commit, **rates):
                    wait_for(marker, self.SOON_S)
                    return commit(*arguments, **rates)
                if late and where == 'at the end of step()':
                    opt.engine.model.commit = commits_late
                module(self.X).backward()
                opt.step()
                opt.engine.model.commit = commit
                if late and where == 'before':
                    wait_for(marker, self.SOON_S)
                with sd.writable(module):
                    if late and where == 'inside, before it writes':
                        wait_for(marker)
                    for p in module.parameters():
                        p.data.mul_(0.9).clamp_(-0.3, 0.3)
                    if late and where == 'inside, after it has written':
                        wait_for(marker)
                mark(marker)
            digest = sd.digest(module)
            sd.close(module)
            return digest
        digests = run(work, 2)
        self.assertEqual(digests[0], digests[1], where)
        return digests[0]

    def test_values_of_the_first_count(self):
        want = self.train('together', 'nowhere')
        for i, where in enumerate(['at the end of step()', 'before', 'inside, before it writes',
                                    'inside, after it has written']):
            self.assertEqual(self.train(f'late-{i}', where), want, where)

    def swapped(self, name, swaps):
        """Parameters after two steps, after each of which an average takes their place for an evaluation. One worker is
        late, and is the first to put back what it has a copy of."""
        def path(what, step):
            return os.path.join(DAEMONS.directory, f'{name}-{what}-{step}')

        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name=name)
            late = os.environ['RANK'] == '1'
            for step in range(2):
                module(self.X).backward()
                opt.step()
                if not swaps:
                    continue
                if late:
                    wait_for(path('in', step), self.SOON_S)
                if step:
                    kept = {key: p.detach().clone() for key, p in module.named_parameters()}
                with sd.writable(module):
                    if not step:
                        kept = {key: p.detach().clone() for key, p in module.named_parameters()}
                    for p in module.parameters():
                        p.data.fill_(0.25)
                if not late:
                    mark(path('in', step))
                self.assertTrue(all(p.eq(0.25).all() for p in module.parameters()))
                with sd.writable(module):
                    if not late:
                        wait_for(path('out', step))
                    for key, p in module.named_parameters():
                        p.data.copy_(kept[key])
                if late:
                    mark(path('out', step))
            return [p.tolist() for p in module.parameters()]
        one, two = run(work, 2)
        self.assertEqual(one, two)
        return one

    def test_copies_to_go_back_to(self):
        self.assertEqual(self.swapped('swapped', True), self.swapped('not-swapped', False))

    def halved(self, name, killed=''):
        """The digest of three steps, after each of which the parameters are halved. One worker is killed before the
        second of these times, or in it; its successor begins with the third step."""
        def path(what):
            return os.path.join(DAEMONS.directory, f'{name}-{what}')

        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), torch.optim.SGD(module.parameters(), 0.1), name=name)
            mine = os.environ['RANK'] == '1' and not os.path.exists(path('killed'))

            def dies(step, where):
                if (step, where, mine) == (1, killed, True):
                    mark(path('killed'))
                    kill_here()
            for step in range(begun := sd.step_of(module), 3):
                while sd.step_of(module) == step:
                    with contextlib.suppress(sd.StepReset):
                        module(self.X).backward()
                        if begun == step == 2:
                            mark(path('trains'))
                        opt.step()
                dies(step, 'before')
                with sd.writable(module):
                    dies(step, 'inside')
                    if step == 1 and killed == 'inside':
                        wait_for(path('trains'))
                    for p in module.parameters():
                        p.data.mul_(0.5)
            return sd.digest(module)
        one, two = run(work, 2)
        self.assertEqual(one, two, killed)
        return one

    def test_a_reset_while_a_worker_catches_up(self):
        """In a backward that has handed a unit over: nothing of it is left, and another try is a step."""
        def work():
            module, opt = sd.shard(module := Two(), torch.optim.SGD(module.parameters(), 0.1), name='caught-up')
            engine = sd.engine.engine_of(module)
            commit, acquired = engine.model.commit, []

            def reset(*_, **__):
                engine.model.commit = commit
                raise sd.StepReset('another worker puts values')

            def behind(unit):
                if engine.missing is not None and len(engine.missing) == 1:
                    acquired.append(unit)
                    engine.model.commit = reset
                    engine.catch_up()
            send = engine.send

            def late(*arguments):
                send(*arguments)
                if not acquired:
                    behind(arguments[1])
            engine.send = late
            with self.assertRaises(sd.StepReset):
                module(self.X).backward()
            engine.model.reset_step()
            module(self.X).backward()
            opt.step()
            return sd.step_of(module), len(acquired)
        self.assertEqual(run(work)[0], (1, 1))

    def test_a_worker_that_is_killed_and_does_not_come_again(self):
        want = self.halved('halved')
        self.assertEqual(self.halved('halved-before', 'before'), want)
        self.assertEqual(self.halved('halved-inside', 'inside'), want)


class Saves(Case):
    """sd.save() by several workers."""

    def saved(self, name, **flags):
        """What each of two workers has of it, where both are sure to meet one that saves."""
        directory = os.path.join(DAEMONS.directory, name)

        def path(what):
            return f'{directory}-{what}'

        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name=name, **flags)
            model, rank = opt.engine.model, os.environ['RANK']
            plain = model.checkpoint

            def checkpoint(*arguments):
                try:
                    return plain(*arguments)
                except libshd.Busy:
                    mark(path('busy'))
                    raise
            if not flags:
                module(self.X).backward()
                opt.step()
            if rank == '0':
                os.mkdir(directory)
                with open(os.path.join(directory, '.lock'), 'w', encoding='ascii') as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    mark(path('locked'))
                    wait_for(path('busy'))
            wait_for(path('locked'))
            with unittest.mock.patch.object(model, 'checkpoint', checkpoint):
                try:
                    found = [sd.save(module, directory)]
                except libshd.Busy as e:
                    if not flags:
                        raise
                    return str(e)
            if not flags:
                module(self.X).backward()
                opt.step()
                found.append(sd.save(module, directory, 1))
            return found
        found = run(work, 2)
        self.assertEqual(os.listdir(directory).count('step-000000000001'), 0)
        return found

    def test_all_of_them(self):
        self.assertEqual(self.saved('saved-by-all'), [['step-000000000001', 'step-000000000002']] * 2)

    def test_where_none_has_a_share(self):
        one, other = self.saved('saved-by-two', micro_batches=2)
        self.assertEqual(one, ['step-000000000000'])
        self.assertRegex(other, r"another process saves in '.*'; of workers .* one alone calls sd\.save\(\)")


class Begins(Case):
    """A model that is there already."""

    def test_values_that_come_while_a_worker_begins(self):
        """One that was killed when all had come to writable(), and is there again before the others leave it."""
        def path(which):
            return os.path.join(DAEMONS.directory, f'begins-{which}')

        def work():
            late, again = os.environ['RANK'] == '1', os.path.exists(path('killed'))
            adopt = sd.engine.Engine.adopt

            def adopt_late(engine):
                if late and again and not os.path.exists(path('opened')):
                    mark(path('opened'))
                    wait_for(path('put'))
                adopt(engine)
            with unittest.mock.patch.object(sd.engine.Engine, 'adopt', adopt_late):
                module, opt = sd.shard(module := Normed(), adamw(module.parameters()), name='begins')
            if not (late and again):
                with sd.writable(module):
                    if late:
                        mark(path('killed'))
                        kill_here()
                    wait_for(path('opened'))
                    nn.init.constant_(module.fc.weight, 0.5)
                    module.norm.running_mean.fill_(3)
                mark(path('put'))
            module(torch.linspace(-1, 1, 32).view(8, 4)).mean().backward()
            opt.step()
            return sd.digest(module)
        first, second = run(work, 2)
        self.assertEqual(first, second)

    def test_values_that_are_there(self):
        """A worker that was killed in its first step puts them again, where it and others have gradients in."""
        def work():
            torch.manual_seed(2)
            plain, name = Normed(), f'there-{os.environ["WORLD_SIZE"]}'
            path = os.path.join(DAEMONS.directory, name)
            save_file(plain.state_dict(), f'{path}-{os.environ["RANK"]}')
            torch.manual_seed(1)
            module, opt = sd.shard(module := Normed(), adamw(module.parameters()), name=name)
            if sd.step_of(module) == 0:
                with sd.writable(module):
                    module.load_state_dict(plain.state_dict())
                sd.load_safetensors(module, f'{path}-{os.environ["RANK"]}')
                opt.load_state_dict(adamw(plain.parameters()).state_dict())
            module(torch.linspace(-1, 1, 32).view(8, 4)).mean().backward()
            if os.environ['RANK'] == '0' and torch_run.first(DAEMONS, name):
                time.sleep(0.1 * torch_run.PACE)  # gradients are with the owners
                kill_here()
            opt.step()
            return sd.digest(module)
        (one,), (two, three) = run(work), run(work, 2)
        self.assertEqual((one, two), (two, three))

    def written_anew(self, name, world, **flags):
        """Each life of a worker writes other values. The last worker is killed twice when gradients of the step are in:
        digest and values as each life then found them, and what the last one was told."""
        def path(what):
            return os.path.join(DAEMONS.directory, f'{name}-{what}')

        def returned(model):
            return next(one['returned'] for one in model.session.status(0)['models'] if one['name'] == name)

        def work():
            rank = int(os.environ['RANK'])
            life = next((i for i in range(2) if torch_run.first(DAEMONS, f'{name}-{rank}-{i}')), 2)
            torch.manual_seed(10 * rank + life)
            plain = Normed()
            its = adamw(plain.parameters())
            plain(torch.rand(8, 4)).mean().backward()
            its.step()
            save_file(plain.state_dict(), path(f'file-{rank}'))
            with contextlib.redirect_stderr(io.StringIO()) as said:
                module, opt = sd.shard(module := Normed(), adamw(module.parameters()), name=name, **flags)
                if sd.step_of(module) == 0:
                    with sd.writable(module):
                        module.load_state_dict(plain.state_dict())
                    sd.load_safetensors(module, path(f'file-{rank}'))
                    opt.load_state_dict(its.state_dict())
            values = {key: value.flatten()[0].item() for key, value in module.state_dict().items()}
            with open(path('lives'), 'a', encoding='ascii') as file:
                file.write(f'{sd.digest(module)} {values}\n')
            for _ in sd.leases(module, 1) if flags else range(1):
                module(torch.linspace(-1, 1, 32).view(8, 4)).mean().backward()
                if rank == world - 1 and life < 2:
                    while not returned(opt.engine.model):
                        time.sleep(0.01)
                    kill_here()
                opt.step()
            return said.getvalue()
        said = run(work, world)
        with open(path('lives'), encoding='ascii') as file:
            return file.read().splitlines(), said[-1]

    def test_other_values_where_others_compute_already(self):
        """By a worker that was started again: those that are there stay, and it is told."""
        for world, flags in ((1, {}), (2, {}), (1, {'micro_batches': 2})):
            lives, said = self.written_anew(f'anew-{world}-{len(flags)}', world, **flags)
            self.assertEqual(len(lives), world + 2, lives)
            self.assertEqual(len(set(lives)), 1, lives)
            self.assertEqual(said.count('values that are written in front of step 0 are dropped'), 3, said)

    def test_a_step_that_stays_wrong(self):
        """Values that are put while a worker begins have it begin again, but not for ever."""
        for good in (3, None):
            sessions = []

            def connect(*_, sessions=sessions, **__):
                sessions.append(unittest.mock.Mock())
                return sessions[-1]

            def begin(_, sessions=sessions, good=good):
                if len(sessions) != good:
                    raise libshd.WrongStep(f'try {len(sessions)}')
                return 'begun'
            with unittest.mock.patch.object(attach, 'connect', connect):
                if good:
                    self.assertEqual(attach.attached(None, 'wrong', None, begin), 'begun')
                else:
                    self.refuses(attach.attached, None, 'wrong', None, begin, says='try 10', kind=libshd.WrongStep)
            self.assertEqual([session.close.called for session in sessions],
                             [True, True, False] if good else [True] * 10)

    def begun(self, **flags):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            module = Two()
            module, opt = sd.shard(module, adamw(module.parameters()), name='begun', **flags)
        module(self.X).backward()
        opt.step()
        sd.close(module)
        return said.getvalue()

    def test_who_goes_on_says_so(self):
        self.assertEqual(self.begun(), '')
        self.assertRegex(self.begun(), r"^libshd: the daemons have model 'begun' already: goes on from step 1, with.*"
                                       r"say shard\(name='…'\).*begins anew\n$")
        self.assertEqual(self.begun(address='local:'), '')


class Writing(Case):
    """What was there before writable() is there afterwards."""

    def test_memory_that_runs_out_at_its_begin(self):
        module, opt = self.shard()
        copies, plain = [], torch.Tensor.clone

        def clone(tensor):
            copies.append(tensor)
            if len(copies) == 3:
                raise MemoryError('no room for a copy')
            return plain(tensor)
        with unittest.mock.patch.object(torch.Tensor, 'clone', clone):
            with self.assertRaisesRegex(MemoryError, 'no room'), sd.writable(module):
                pass
        self.refuses(module.layers[0].weight.zero_, says="the parameter is the owners' memory")
        module(self.X).backward()
        opt.step()

    def test_gradients_that_lie_with_the_parameters(self):
        norms = []
        for writes in (False, True):
            module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1), grads='step')
            for _ in range(2):
                module(self.X).backward()
                with sd.writable(module) if writes else contextlib.nullcontext():
                    pass
            opt.step()
            norms.append(opt.last.grad_norm)
        self.assertEqual(*norms)
        module, opt = self.shard()
        with sd.no_sync(module):
            module(self.X).backward()
        self.refuses(sd.writable(module).__enter__, says=r'after a backward\(\) in no_sync\(\).*zero_grad')
        opt.zero_grad()
        with sd.writable(module):
            nn.init.zeros_(module.layers[0].bias)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
