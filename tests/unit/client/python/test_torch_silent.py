#!/usr/bin/env python3
"""test_torch_silent.py BUILD_DIR: what has other numbers than it seems to have is refused, or is right; and whatever is
refused is called by its name."""
import os
import subprocess
import sys
import unittest
import unittest.mock
import weakref

import torch_run
from torch_run import run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from torch import nn  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402
from test_torch_wrong import Case, Normed, Two, adamw  # noqa: E402

INVALID, REFUSED = libshd.InvalidArgument, libshd.NotSupported


SHORT_S = 2 * torch_run.PACE  # that a worker waits for one that was refused


class Coded(nn.Module):
    """What is trained of it is no call of it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def loss(self, x):
        return (self.decoder(self.encoder(x)) - x).square().mean()


class Metrics(Case):
    """Of several workers, by name."""

    def reported(self, name, report, **flags):
        """Each step's metrics, as each of two workers has them: report(rank, step) is what it reports."""
        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name=name, **flags)
            rank, found = int(os.environ['RANK']), []
            for step in range(2):
                for micro in range(flags.get('accumulate', 1)):
                    module(self.X).backward()
                    if numbers := report(rank, step, micro):
                        sd.report(module, **numbers)
                try:
                    opt.step()
                except libshd.InvalidArgument as e:
                    found.append(str(e))
                    break
                found.append(opt.last.metrics)
            return found
        return run(work, 2)

    def test_their_order_does_not_matter(self):
        self.assertEqual(self.reported('in-order', lambda rank, step, _: dict(
            [('loss', 10.0 + rank), ('accuracy', 1.0 + rank)][::1 - 2 * rank])),
            [[{'loss': 10.5, 'accuracy': 1.5}] * 2] * 2)

    def test_they_may_be_others_in_another_step(self):
        found = self.reported('by-step', lambda rank, step, _: {'loss': 1.0 + rank} if step else
                              {'accuracy': 3.0 + rank, 'loss': 5.0})
        self.assertEqual(found, [[{'accuracy': 3.5, 'loss': 5.0}, {'loss': 1.5}]] * 2)

    def test_the_mean_is_over_those_that_report(self):
        self.assertEqual(self.reported('one-reports', lambda rank, *_: {'loss': 4.0} if rank == 0 else {}),
                         [[{'loss': 4.0}] * 2, [{}] * 2])
        found = self.reported('once-a-step', lambda rank, _, micro: {'loss': 4.0 + rank} if micro else {}, accumulate=2)
        self.assertEqual(found, [[{'loss': 4.5}] * 2] * 2)
        log = subprocess.run([DAEMONS.shardctl, 'log', '--csv', '--model', 'one-reports'], capture_output=True,
                             text=True, check=True)
        self.assertEqual(log.stdout.splitlines()[-1].split(',')[2], '4', log.stdout)

    def test_other_names_in_the_same_step_are_refused(self):
        def work():
            torch.manual_seed(1)
            module, opt = sd.shard(module := Two(), adamw(module.parameters()), name='other-names', timeout=SHORT_S)
            module(self.X).backward()
            sd.report(module, **({'acc': 0.5, 'loss': 1.0} if os.environ['RANK'] == '1' else {'loss': 1.0}))
            try:
                opt.step()
            except libshd.Error as e:
                return f'{type(e).__name__}: {e}'
        said = sorted(run(work, 2))  # whoever comes second, which may be each of them at one of the two daemons
        refused = ("InvalidArgument.*metrics '(loss|loss, acc)' of micro-batch [01] in a step in which "
                   "micro-batch [01] has '(loss|loss, acc)': all workers report the same")
        self.assertRegex(said[0], refused)
        self.assertRegex(said[1], f'TimedOut|{refused}')

    def test_names_of_one_worker(self):
        module, opt = self.shard(accumulate=2)
        module(self.X).backward()
        sd.report(module, loss=1.0)
        module(self.X).backward()
        sd.report(module, acc=1.0)
        self.refuses(opt.step, says='sd.report.. of acc in a step in which another micro-batch has loss')
        module, opt = self.shard()
        odd = {'ä' * 60: 1.0, 'with\nlines': 2.0, 'b' * 200: 3.0}
        module(self.X).backward()
        sd.report(module, **odd)
        opt.step()
        self.assertEqual(opt.last.metrics, odd)


    def test_what_comes_after_the_step(self):
        module, opt = self.shard(address='local:')
        for _ in range(2):
            with torch.no_grad():
                module(self.X)
            loss = module(self.X)
            sd.report(module, loss=2.0)
            loss.backward()
            sd.report(module, loss=3.0, accuracy=0.5)
            opt.step()
            self.assertEqual(opt.last.metrics, {'loss': 3.0, 'accuracy': 0.5})
            self.refuses(sd.report, module, loss=1.0, says=r'nothing of step \d has been computed yet.*and step\(\)')
            with torch.no_grad():
                module(self.X)
            self.refuses(sd.report, module, validation=1.0, says='sd.report.. of validation where nothing')

    def test_a_batch_after_one_that_is_given_up(self):
        module, opt = self.shard(address='local:')
        module(self.X).backward()
        loss = module(self.X)
        opt.zero_grad()
        sd.report(module, loss=loss)
        loss.backward()
        opt.step()
        self.assertEqual(opt.last.loss, loss.item())

    def test_a_forward_that_is_not_the_modules_own(self):
        module, opt = self.shard(module=Coded(), address='local:')
        for _ in range(2):
            loss = module.loss(self.X)
            sd.report(module, loss=loss)
            loss.backward()
            opt.step()
            self.assertEqual(opt.last.loss, loss.item())


class Groups(Case):
    """What of the optimizer the owners are told once."""

    def test_what_would_change_the_result_is_refused_at_the_step(self):
        adam = {'eps': 0.5, 'amsgrad': True, 'maximize': True, 'decoupled_weight_decay': False, 'differentiable': True}
        for make, changes in ((adamw, adam), (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
                                              {'nesterov': True, 'dampening': 0.5, 'maximize': True})):
            module, opt = self.shard(make)
            module(self.X).backward()
            for key, value in changes.items():
                was, opt.param_groups[0][key] = opt.param_groups[0][key], value
                self.refuses(opt.step,
                             says=rf"param_groups\[0\]\['{key}'\] is {value}, at shard\(\) it was {was}.*before")
                opt.param_groups[0][key] = was
            opt.step()

    def test_what_moves_in_each_step_and_what_is_harmless_is_taken(self):
        for changes in ({'foreach': True, 'fused': False, 'capturable': True, 'betas': (0.5, 0.9), 'weight_decay': 0.3,
                         'lr': torch.tensor(0.5), 'mine': 'x'},):
            module, opt = self.shard()
            before = module.layers[0].weight.detach().clone()
            module(self.X).backward()
            opt.param_groups[0].update(changes)
            opt.step()
            self.assertGreater((module.layers[0].weight - before).abs().max(), 0.3)

    def test_momentum(self):
        plain = Two()
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1))
        plain.load_state_dict(module.state_dict())
        its = torch.optim.SGD(plain.parameters(), 0.1)
        for one, optimizer in ((module, opt), (plain, its)):
            optimizer.param_groups[0]['momentum'] = 0.9  # from the first step on
            for _ in range(3):
                optimizer.zero_grad()
                one(self.X).backward()
                optimizer.step()
        self.assertTrue(torch.allclose(module.layers[0].weight, plain.layers[0].weight, atol=1e-6))
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1))
        module(self.X).backward()
        opt.step()
        module(self.X).backward()
        opt.param_groups[0]['momentum'] = 0.9
        self.refuses(opt.step, says='momentum.. is 0.9 after steps with 0.*begin with')

    def test_parameters_that_change_groups(self):
        module, opt = self.shard(lambda p: torch.optim.SGD([{'params': (p := list(p))[:2]}, {'params': p[2:]}], 0.1))
        module(self.X).backward()
        opt.param_groups[1]['params'].append(opt.param_groups[0]['params'].pop())
        self.refuses(opt.step, says=r'the parameters of param_groups\[0\] are not those of shard')

    def test_hooks_of_the_original(self):
        module, calls = Two(), []
        original = adamw(module.parameters())
        original.register_step_pre_hook(lambda opt, *_: calls.append(('pre', type(opt) is sd.Optimizer)))
        original.register_step_post_hook(lambda *_: calls.append('post'))
        original.register_state_dict_post_hook(lambda _, state: calls.append(len(state['state'])))
        original.register_load_state_dict_pre_hook(lambda *_: calls.append('load'))
        module, opt = sd.shard(module, original, name='hooks')
        self.sharded.append(module)
        opt.register_step_post_hook(lambda *_: calls.append('later'))
        for step in (opt.step, original.step):
            module(self.X).backward()
            step()
            self.assertEqual(calls, [('pre', True), 'post', 'later'])
            calls.clear()
        opt.load_state_dict(opt.state_dict())
        self.assertEqual(calls, [4, 'load'])


class States(Case):
    """load_state_dict() of another optimizer's."""

    def stepped(self, make):
        plain = Two()
        optimizer = make(plain.parameters())
        plain(self.X).backward()
        optimizer.step()
        return optimizer.state_dict()

    def test_another_kind_is_refused(self):
        o = torch.optim
        makes = {'AdamW': adamw, 'Adam': o.Adam, 'SGD': lambda p: o.SGD(p, 0.1, momentum=0.9),
                 'RMSprop': o.RMSprop, 'NAdam': o.NAdam, 'Adagrad': o.Adagrad, 'RAdam': o.RAdam}
        for own in ('AdamW', 'Adam', 'SGD'):
            module, opt = self.shard(makes[own])
            digest = sd.digest(module)
            for its in set(makes) - {own}:
                self.refuses(opt.load_state_dict, self.stepped(makes[its]),
                             says=f'the state is of {"another" if its == "RAdam" else its}.*the optimizer is {own}:')
            self.assertEqual(sd.digest(module), digest)
            opt.load_state_dict(self.stepped(makes[own]))
            self.assertNotEqual(sd.digest(module), digest)

    def test_an_older_pytorchs_and_other_options(self):
        module, opt = self.shard()
        older = self.stepped(adamw)
        del older['param_groups'][0]['decoupled_weight_decay']
        opt.load_state_dict(older)
        self.refuses(opt.load_state_dict, self.stepped(lambda p: torch.optim.AdamW(p, amsgrad=True)),
                     says="max_exp_avg_sq', which AdamW has not.*amsgrad")
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1))
        self.refuses(opt.load_state_dict, self.stepped(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
                     says='state has momentum.*momentum=0')


    def test_what_has_no_state_is_not_read(self):
        """As PyTorch, which makes it at a parameter's first update: one look at each unit says so."""
        for make, moments in ((adamw, 2), (lambda p: torch.optim.SGD(p, 0.1), 0)):
            module, opt = self.shard(make)
            state = sd.state
            with unittest.mock.patch.object(state, 'read', wraps=state.read) as read:
                self.assertEqual(opt.state_dict()['state'], {})
                self.assertEqual(read.call_count, 1 + 2 * bool(moments))
                module(self.X).backward()
                opt.step()
                self.assertEqual(len(opt.state_dict()['state']), 4 * bool(moments))
                self.assertEqual(read.call_count, 2 + (2 + 2 * 2) * bool(moments))


class Gradients(Case):
    """p.grad of gradients that have left."""

    def test_what_looks_at_them_or_changes_them_is_refused(self):
        module, opt = self.shard()
        self.assertIsNone(module.layers[0].weight.grad)
        module(self.X).backward()

        def noise():
            for p in module.parameters():
                if p.grad is not None:
                    p.grad.add_(1)
        weight = module.layers[0].weight
        for write in (noise, lambda: weight.grad.mul_(2), lambda: setattr(weight, 'grad', None),
                      lambda: setattr(weight, 'grad', torch.ones(4, 4)), lambda: delattr(weight, 'grad')):
            self.refuses(write, says=r"'layers.0.weight'.grad: gradients leave.*grads=\"step\"")
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        self.assertIsNone(weight.grad)
        weight.grad = None

    def test_what_is_frozen_has_none(self):
        module = Two()
        module.layers[0].requires_grad_(False)
        module, _ = self.shard(lambda p: adamw([q for q in p if q.requires_grad]), module)
        module(self.X).backward()
        self.assertIsNone(module.layers[0].weight.grad)
        self.refuses(lambda: module.layers[1].weight.grad, says="'layers.1.weight'.grad: gradients leave")

    def test_where_they_stay_they_can_be_changed(self):
        def trained(change, **flags):
            module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1), **flags)
            change(module)
            module(self.X).backward()
            for p in module.parameters() if flags else ():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            opt.step()
            return module.state_dict()
        stayed = trained(lambda _: None, grads='step')
        hooked = trained(lambda module: [p.register_hook(lambda grad: grad * 0.5) for p in module.parameters()])
        self.assertTrue(all(torch.equal(stayed[key], hooked[key]) for key in stayed))

    def test_hooks_after_accumulation(self):
        def halve(p):
            p.grad.mul_(0.5)
        module, plain = Two(), Two()
        plain.load_state_dict(module.state_dict())
        for one in (module, plain):
            for p in one.parameters():
                p.register_post_accumulate_grad_hook(halve)
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1), module)
        its = torch.optim.SGD(plain.parameters(), 0.1)
        for one, optimizer in ((module, opt), (plain, its)):
            one(self.X).backward()
            optimizer.step()
        self.assertTrue(torch.allclose(module.layers[0].weight, plain.layers[0].weight, atol=1e-6))
        module.layers[0].weight.register_post_accumulate_grad_hook(halve)
        module.layers[0].bias.register_post_accumulate_grad_hook(halve)
        self.refuses(module(self.X).backward, says="'layers.0.*'.grad: gradients leave")

    def test_a_norm_of_what_is_dropped(self):
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 1.0))
        module(self.X).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1e-9)
        opt.zero_grad()
        before = module.layers[0].weight.detach().clone()
        module(self.X).backward()
        opt.step()
        self.assertGreater((module.layers[0].weight - before).abs().max(), 1e-4)

    def test_clipping_with_an_error(self):
        module, opt = self.shard()
        module(self.X).backward()
        self.refuses(nn.utils.clip_grad_norm_, module.parameters(), 1.0, error_if_nonfinite=True, kind=REFUSED,
                     says='error_if_nonfinite.*optimizer.last.skipped')

    def test_another_optimizer_of_the_same_parameters(self):
        module, opt = self.shard()
        other = torch.optim.SGD(module.parameters(), 0.1)
        module(self.X).backward()
        self.refuses(other.step, says=r"SGD.step\(\) of 'layers.0.weight'.*one optimizer")
        opt.step()
        free = nn.Linear(2, 1)
        its = torch.optim.SGD(free.parameters(), 0.1)
        free(torch.ones(1, 2)).sum().backward()
        its.step()


class Arguments(Case):
    """Of shard(): each refusal has the value, and what would be right."""

    def test_wrong_values(self):
        for flags, says in (
                ({'policy': 'zero3'}, r"policy='zero3': must be sd.ZeRO3\(\), sd.ZeRO2"),
                ({'policy': sd.Policy}, 'policy=.*Policy: must be'),
                ({'units': 'Linear'}, r"units='Linear': must be 'auto', a list of module classes.*\[nn.Linear\]"),
                ({'units': [nn.Linear, 3]}, 'units=.*must be'), ({'units': []}, 'units=.*must be'),
                ({'units': int}, 'units=int: must be'),
                ({'grad_dtype': 'bf16'}, "grad_dtype='bf16': must be torch.float32, torch.bfloat16"),
                ({'publish': torch.int8}, 'publish=torch.int8: must be'),
                ({'grad_codec': 'fp8'}, "grad_codec='fp8': must be"),
                ({'codec': 'int2'}, "codec='int2': must be"),
                ({'grads': 'late'}, "grads='late': must be 'stream' or 'step'"),
                ({'timeout': -1}, 'timeout=-1: must be seconds'), ({'timeout': '10'}, "timeout='10': must be seconds"),
                ({'timeout': 0}, 'timeout=0: must be'), ({'timeout': float('nan')}, 'timeout=nan: must be'),
                ({'accumulate': 2.0}, 'accumulate=2.0: must be a whole number'),
                ({'accumulate': 0}, 'accumulate=0: at least 1'), ({'accumulate': True}, 'accumulate=True: must be'),
                ({'micro_batches': -1}, 'micro_batches=-1: at least 0'),
                ({'policy': sd.ZeRO3(max_live_units=-1)}, 'max_live_units=-1: at least 0'),
                ({'policy': sd.ZeRO3(forward_prefetch='2')}, "forward_prefetch='2': must be a whole"),
                ({'address': 'up:two'}, "address='up:two': must be 'up:N'"),
                ({'address': 'up:0'}, "address='up:0': must be 'up:N'"), ({'address': 7}, 'address=7: must be')):
            with self.subTest(flags):
                self.refuses(self.shard, kind=INVALID, says=says, **flags)

    def test_two_modules_of_one_class_without_names(self):
        class Twin(Two):
            def __init__(self):
                super().__init__()
                self.shift = nn.Parameter(torch.zeros(()))

        def sharded(**flags):
            module = Twin()
            return sd.shard(module, adamw(module.parameters()), **flags)

        def work():
            first, opt = sharded()
            self.refuses(sharded, says=r"another Twin of this process.*shard\(name='…'\) for each.*sd\.close")
            sd.close(sharded(address='local:')[0])
            second, _ = sharded(name='the-other-twin')
            self.assertFalse(torch.equal(second.layers[0].weight, first.layers[0].weight))
            first(self.X).backward()
            opt.step()
            sd.close(first)
            first, opt = sharded()
            self.assertEqual(sd.step_of(first), 1)
            first = None  # as a cell that is run again: its module is gone, its optimizer still there
            first, opt = sharded()
            return sd.step_of(first)
        self.assertEqual(run(work), [1])

    def test_names(self):
        for name in (3, '', 'ä', 'a\nb'):
            self.refuses(sd.shard, module := Two(), adamw(module.parameters()), name=name, kind=INVALID,
                         says='name=.*must be')

    def test_numbers(self):
        module, opt = self.shard()
        for value, says in (('x', "'x'"), (None, 'None'), (torch.ones(3), r'of shape \(3,\)')):
            self.refuses(sd.report, module, loss=value, kind=INVALID, says=f"metric 'loss' is {says}: must be a number")
        self.refuses(sd.Sampler, module, range(9), 2.5, kind=INVALID, says='batch_size=2.5: must be a whole')
        module(self.X).backward()
        opt.param_groups[0]['weight_decay'] = None
        self.refuses(opt.step, kind=INVALID, says='weight_decay of a group is None: must be a number')

    def test_both_ways(self):
        module = sd.fully_shard(Two())
        self.refuses(sd.shard, module, adamw(module.parameters()), says=r'given to fully_shard\(\): call sd.Optimizer')

    def test_what_is_plain_is_taken(self):
        module, opt = self.shard(policy=sd.ZeRO2, units=nn.Linear)
        self.assertEqual(opt.engine.model.unit_names(), ['layers.0', 'layers.1'])
        self.assertIsInstance(opt.engine.policy, sd.ZeRO2)

    def test_the_two(self):
        two = Two()
        self.refuses(sd.shard, adamw(two.parameters()), two, kind=INVALID, says='the module comes first')
        self.refuses(sd.shard, two.parameters(), adamw(two.parameters()), kind=INVALID, says='module=.*must be a torch')
        self.refuses(sd.shard, two, torch.optim.AdamW, kind=INVALID, says=r'that is the class.*AdamW\(module.param')
        self.refuses(sd.shard, two, two.parameters(), kind=INVALID, says='optimizer=.*must be a torch.optim.Optimizer')
        self.refuses(sd.shard, nn.ReLU(), adamw(two.parameters()), says='ReLU has no parameters')
        two.requires_grad_(False)
        self.refuses(sd.shard, two, adamw(two.parameters()), says='all of them are frozen')
        sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
        self.refuses(sd.shard, sparse, torch.optim.SGD(sparse.parameters(), 0.1), kind=REFUSED,
                     says="'0' is Embedding.sparse=True.*sparse=False")
        half = Two()
        self.refuses(sd.shard, half, adamw(half.layers[0].parameters()), says="in no group.*one optimizer has all")

    def test_the_environment(self):
        def work():
            for rank, world, says in (('x', '2', "RANK='x' in the environment"), ('0', 'two', "WORLD_SIZE='two'"),
                                      ('2', '2', 'RANK=2 with WORLD_SIZE=2.*must be 0 to'), ('-1', '2', 'RANK=-1')):
                os.environ.update(RANK=rank, WORLD_SIZE=world)
                self.refuses(self.shard, kind=INVALID, says=says)
        run(work)

    def test_the_meta_device(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
        with torch.device('meta'):
            odd = Odd()
        self.refuses(self.shard, module=odd, says=r'Odd has no reset_parameters.*shard\(init=')
        self.refuses(self.shard, module=odd, init=3, kind=INVALID, says='init=3: must be a function of a module')

    def test_recurrent_layers_on_the_meta_device(self):
        def trained(device):
            with torch.device(device):
                module = nn.LSTM(4, 4, num_layers=2)
            module, opt = self.shard(module=module) if device == 'cpu' else self.shard(
                module=module, init=lambda made: made.load_state_dict(values))
            start = {key: p.detach().clone() for key, p in module.named_parameters()}
            for _ in range(2):
                module(self.X)[0].square().sum().backward()
                opt.step()
            return start, sd.digest(module), module._weights_have_changed()
        values, digest, _ = trained('cpu')
        self.assertEqual(trained('meta')[1:], (digest, False))

    def test_a_shard_that_fails_half_way(self):
        """What was laid in the owners' memory is the module's own again."""
        def work():
            module = Two()
            with torch.device('meta'):
                module.last = nn.Linear(4, 4)
            before, seen = module.layers[0].weight.detach().clone(), weakref.ref(module.last.weight)
            for _ in range(2):
                self.refuses(self.shard, module=module, kind=REFUSED, says="'last.weight', of Linear, is on the meta")
                self.assertIs(type(module.layers[0].weight), nn.Parameter)
                self.assertTrue(torch.equal(module.layers[0].weight, before))
            del seen
            module, opt = self.shard(module=module)
            module(self.X).backward()
            opt.step()
            return True
        self.assertEqual(run(work), [True])


class Afterwards(Case):
    """What is done with a module that is sharded, or is no more."""

    def test_closed(self):
        module, opt = self.shard()
        module(self.X).backward()
        opt.step()
        sd.close(module)
        sd.close(module)
        module(self.X).backward()
        for call in (opt.step, opt.original.step, opt.state_dict, lambda: opt.load_state_dict({})):
            self.refuses(call, says=r'after sd.close\(\).*new optimizer')
        self.refuses(sd.report, module, loss=1.0, says='is not sharded')
        again, its = sd.shard(module, adamw(module.parameters()), name='closed-again')
        self.sharded.append(again)
        again(self.X).backward()
        its.step()

    def test_cast_and_trained(self):
        module, opt = self.shard()
        module.double()
        self.refuses(module(self.X.double()).backward, says="'layers.0.weight' is a private copy")
        module, opt = self.shard(grads='step')
        module.double()
        module(self.X.double()).backward()
        self.refuses(opt.step, says="'layers.0.weight' is a private copy")

    def test_wrapped_again(self):
        module, opt = self.shard()
        layer = module.layers[0]
        for value in (layer.weight, layer.weight.data):
            self.refuses(nn.Parameter, value, says=r"nn.Parameter\(\) of 'layers.0.weight'.*detach\(\).clone")
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        self.refuses(lambda: (module(self.X).backward(), opt.step()), says="'layers.0.weight' was added after shard")

    def test_thawed(self):
        frozen = Two()
        frozen.layers[0].requires_grad_(False)
        module, opt = self.shard(lambda p: adamw([q for q in p if q.requires_grad]), frozen)
        module.layers[0].requires_grad_(True)
        module(self.X).backward()
        self.refuses(opt.step, says="'layers.0.weight'.requires_grad is True, at shard.. it was False")

    def test_state_before(self):
        two = Two()
        old = adamw(two.parameters())
        two(self.X).backward()
        old.step()
        new = adamw(two.parameters())
        new.load_state_dict(old.state_dict())
        self.refuses(sd.shard, two, new, says=r'has state already.*load_state_dict\(\).*of the one that shard')

    def test_state_that_was_looked_for(self):
        two = Two()
        new = adamw(two.parameters())
        self.assertFalse(any(new.state[p] for p in two.parameters()))
        module, opt = self.shard(lambda _: new, two)
        module(self.X).backward()
        opt.step()


class Defaults(unittest.TestCase):
    """PyTorch's own, which a program may set: what is the owners' is fp32 in host memory with any."""

    def trained(self, name, dtype=torch.float32, device='cpu'):
        def work():
            torch.manual_seed(1)
            module, draw = Normed(), torch.Generator().manual_seed(1)
            batches = [torch.randn(8, 4, generator=draw) for _ in range(3)]
            with torch.device('meta'):
                module.more = nn.Linear(1, 3)
            init = nn.init.zeros_
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            module, opt = sd.shard(module, adamw(module.parameters()), name=name,
                                   init=lambda inner: [init(p) for p in inner.parameters()])
            order = sd.Sampler(module, range(64), 8).batch(0, 1)
            for x in batches:
                (module(x).square().mean() + module.more(x[:, :1]).square().mean()).backward()
                norm = opt.clip_grad_norm_(1.0)
                opt.step()
            state = opt.state_dict()
            opt.load_state_dict(state)
            with sd.reader(name=name) as reader, reader.snapshot() as read:
                weight = read['fc.weight'].tolist()
            return (sd.digest(module), order, norm.item(), weight, [b.tolist() for b in module.buffers()],
                    [(value.dtype, value.tolist()) for each in state['state'].values() for value in each.values()])
        return run(work)[0]

    def test_they_change_nothing(self):
        plain = self.trained('defaults')
        for at, default in enumerate(({'dtype': torch.bfloat16}, {'dtype': torch.float64}, {'device': 'meta'})):
            with self.subTest(**default):
                self.assertEqual(self.trained(f'defaults-{at}', **default), plain)


class Graphs(Case):
    """What PyTorch walks through with BatchNorm, it walks through when it is sharded."""

    X = torch.linspace(-1, 1, 32).view(8, 4)

    def trained(self, loop, **flags):
        """Parameters after the loop, of plain PyTorch and sharded."""
        found = []
        for sharded in (False, True):
            torch.manual_seed(2)
            module = Normed()
            opt = torch.optim.SGD(module.parameters(), 0.1)
            if sharded:
                module, opt = self.shard(lambda _, its=opt: its, module, **flags)
            loop(module, opt)
            found.append([p.detach().clone() for p in module.parameters()])
        for one, two in zip(*found):
            torch.testing.assert_close(one, two)

    def test_two_losses_of_one_forward(self):
        def loop(module, opt):
            for _ in range(2):
                opt.zero_grad()
                out = module(self.X)
                out.mean().backward(retain_graph=True)
                out.square().mean().backward()
                opt.step()
        self.trained(loop, accumulate=2)

    def test_two_forwards_before_two_backwards(self):
        def loop(module, opt):
            for _ in range(2):
                opt.zero_grad()
                losses = [module(self.X + i).square().mean() for i in range(2)]
                for loss in losses:
                    loss.backward()
                opt.step()
        self.trained(loop, accumulate=2)

    def test_a_batch_that_is_left_out(self):
        def loop(module, opt):
            for batch in range(3):
                loss = module(self.X + batch).square().mean()
                opt.zero_grad()
                loss.backward()
                if batch != 1:
                    opt.step()
        self.trained(loop)

    def statistics(self, loop, **flags):
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.0), Normed(), **flags)
        loop(module, opt)
        return module.norm.num_batches_tracked.item(), module.norm.running_mean.tolist()

    def test_statistics_of_the_batch_after_one_that_is_left_out(self):
        def loop(*batches):
            def run_them(module, opt):
                for batch in batches:
                    loss = module(self.X + batch).square().mean()
                    opt.zero_grad()  # gives the batch before up, if its step was left out, and not this one
                    loss.backward()
                    if batch != 1:
                        opt.step()
            return run_them
        self.assertEqual(self.statistics(loop(0, 1, 2)), self.statistics(loop(0, 2)))

    def test_statistics_of_a_forward_without_a_backward(self):
        def loop(backward):
            def run_it(module, opt):
                module(self.X).mean().backward()
                loss = module(self.X + 1).mean()
                if backward:
                    loss.backward()
                opt.step()
            return run_it
        both = self.statistics(loop(True), accumulate=2)
        self.assertEqual(self.statistics(loop(False), accumulate=2), both)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
