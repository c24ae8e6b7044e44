#!/usr/bin/env python3
"""test_torch_wrong.py BUILD_DIR: what would train something else in silence is refused, with what to do instead."""
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
import unittest
import unittest.mock

import torch_run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402  (before anything is sharded)

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402


class Two(nn.Module):
    """Two layers, the second of which may be left out, and what breaks a backward between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, breaks=False, count=2):
        for layer in self.layers[:count]:
            x = layer(x)
            if breaks:
                x = Breaks.apply(x)
                breaks = False
        return x.square().mean()


class Normed(nn.Module):
    """With BatchNorm, whose statistics are put back to the owners' after each backward()."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.fc(self.norm(x).square())


class Breaks(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError('no memory for this batch')


def adamw(p):
    return torch.optim.AdamW(p, lr=0.01)


class Case(unittest.TestCase):
    """A sharded module of its own for each test."""

    def shard(self, make=lambda p: torch.optim.AdamW(p, lr=0.01), module=None, **flags):
        torch.manual_seed(1)
        module = module or Two()
        name = f'{self.id().rpartition(".")[2]}-{len(self.sharded)}'
        sharded, opt = sd.shard(module, make(module.parameters()), name=name, **flags)
        self.sharded.append(sharded)
        return sharded, opt

    def setUp(self):
        self.sharded = []

    def tearDown(self):
        for module in self.sharded:
            sd.close(module)

    def refuses(self, what, *arguments, says, kind=libshd.Misuse, **named):
        with self.assertRaisesRegex(kind, says):
            what(*arguments, **named)

    X = torch.ones(2, 4)


class Writes(Case):
    """To parameters, by whatever way."""

    def test_a_write_names_the_tensor(self):
        module, opt = self.shard()
        weight, before = module.layers[0].weight, module(self.X).item()
        with torch.no_grad():
            for write in (lambda: weight.mul_(2), lambda: weight.data.clamp_(0, 1), lambda: weight.zero_(),
                          lambda: weight[0].fill_(1), lambda: weight.detach().view(-1).zero_(),
                          lambda: weight.__setitem__(0, 1), lambda: torch._foreach_mul_([weight], 2.0),
                          lambda: torch.add(weight, 1, out=weight), lambda: nn.init.normal_(weight),
                          module.layers[0].reset_parameters, lambda: weight.copy_(torch.ones(4, 4))):
                self.refuses(write, says=r"'layers.0.weight'.*with sd\.writable")
        self.refuses(module.load_state_dict, module.state_dict(), says=r'load_state_dict.*with sd\.writable')
        self.assertEqual(module(self.X).item(), before)

    def test_arrays_of_numpy_are_read_only(self):
        module, _ = self.shard()
        weight = module.layers[0].weight
        for array in (weight.detach().numpy(), np.asarray(weight.data), weight.data.view(-1).numpy()):
            self.assertEqual(array.flat[0], weight[0, 0].item())
            with self.assertRaisesRegex(ValueError, 'read-only'):
                array.flat[0] = 1
        weight.detach().clone().numpy()[0] = 1

    def test_what_gets_at_the_memory_says_the_name_and_ends(self):
        for traced in (False, True):
            read, write = os.pipe()

            def work():
                os.dup2(write, 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if traced:
                    faulthandler.enable()
                module, _ = self.shard()
                weight = module.layers[1].weight
                ctypes.memset(weight.data_ptr() + 4 * 5, 0, 4)
            fork = torch_run.Fork(work, 0, 1)
            os.close(write)
            while not fork.done():
                time.sleep(0.005)
            with os.fdopen(read) as file:
                said = file.read()
            self.assertEqual(fork.answer(), (False, signal.SIGSEGV))
            self.assertRegex(said, r"libshd: write to tensor 'layers.1.weight' of model '\S+', element 5: .*a copy")
            self.assertEqual('Fatal Python error' in said, traced)

    def test_what_writable_refuses_puts_nothing(self):
        module, opt = self.shard()
        before, ones = sd.digest(module), torch.ones(4, 4)

        def write(what):
            with sd.writable(module):
                module.layers[1].weight.data.fill_(7)
                what()

        def assign():
            module.load_state_dict(Two().state_dict(), assign=True)

        def cast():
            module.layers[0].weight.data = ones.double()
        was = module.layers[0].weight
        self.refuses(write, lambda: 1 / 0, says='division', kind=ZeroDivisionError)
        self.refuses(write, cast, says="'layers.0.weight' became torch.float64")
        self.refuses(write, lambda: module(self.X).backward(), says='inside of writable')
        self.refuses(write, opt.step, says='inside of writable')
        self.refuses(write, lambda: write(int), says='inside of writable')
        parameters = [(layer, dict(layer._parameters)) for layer in module.layers]
        self.refuses(write, assign, says="'layers.0.weight' is another parameter.*assign=True")
        for layer, known in parameters:
            layer._parameters.update(known)
        self.assertEqual((sd.digest(module), sd.step_of(module)), (before, 0))
        self.refuses(was.fill_, 1.0, says="fill_.. of 'layers.0.weight'")
        with sd.writable(module):
            pass
        module(self.X).backward()
        self.refuses(sd.writable(module).__enter__, says='between a backward.. and its step')
        self.refuses(opt.state_dict, says='between a backward.. and its step')
        opt.step()

    def test_reading_gives_ordinary_tensors(self):
        module, _ = self.shard()
        path = os.path.join(DAEMONS.directory, 'weights')
        torch.save(module.state_dict(), path)
        loaded = torch.load(path, weights_only=True)
        self.assertEqual([type(value) for value in loaded.values()], [torch.Tensor] * 4)
        plain = Two()
        plain.load_state_dict(module.state_dict())
        self.assertEqual(plain(self.X).item(), module(self.X).item())


class Moves(Case):
    """What makes a private copy of a parameter, which no step would change."""

    def test_moved_and_cast_parameters(self):
        for change in (lambda m: m.double(), lambda m: m.to(torch.bfloat16),
                       lambda m: setattr(m.layers[1].weight, 'data', torch.ones(4, 4))):
            module, opt = self.shard()
            change(module)
            self.refuses(opt.step, says=r"'layers\.\d\.weight' is a private copy.*before")

    def test_added_removed_replaced_and_frozen(self):
        for change, says in ((lambda m: m.layers.append(nn.Linear(4, 4)), "'layers.2.weight' was added"),
                             (lambda m: setattr(m.layers[1], 'weight', nn.Parameter(torch.ones(4, 4))), 'was added'),
                             (lambda m: delattr(m, 'layers'), 'was taken out'),
                             (lambda m: m.layers[1].requires_grad_(False), 'requires_grad is False')):
            module, opt = self.shard()
            module(self.X).backward()
            change(module)
            self.refuses(opt.step, says=says)

    def test_what_is_not_there_yet_is_refused_at_once(self):
        mixed, two = Two(), Two()
        mixed.layers[1].bfloat16()
        self.refuses(self.shard, module=mixed, kind=libshd.NotSupported, says='must have one type')
        self.refuses(self.shard, module=Two().double(), kind=libshd.NotSupported, says='float64.*cast')
        self.refuses(self.shard, device='gpu0', kind=libshd.InvalidArgument, says="device='gpu0': must be 'cpu', 'cuda'")
        self.refuses(self.shard, device='mps', kind=libshd.NotSupported, says='host memory and of CUDA')
        if not torch.cuda.is_available():
            self.refuses(self.shard, device='cuda', kind=libshd.NotSupported, says='PyTorch has no CUDA here')
        self.refuses(self.shard, lambda p: torch.optim.AdamW(list(p)[:2]), says='in no group.*freeze')
        self.refuses(sd.shard, two, torch.optim.AdamW(Two().parameters()), says="not the module's")
        self.refuses(self.shard, lambda p: torch.optim.AdamW(p, amsgrad=True), kind=libshd.NotSupported,
                     says='amsgrad')
        self.refuses(self.shard, torch.optim.RMSprop, kind=libshd.NotSupported, says='RMSprop')
        self.refuses(self.shard, module=nn.ModuleDict({'a/b': nn.Linear(4, 4)}), kind=libshd.InvalidArgument,
                     says='has byte 0x2f')  # what tiles are counted after
        self.refuses(self.shard, grads='late', kind=libshd.InvalidArgument, says="'stream' or 'step'")
        self.refuses(sd.report, two, loss=1.0, says='not sharded')

    def test_a_module_of_bfloat16_is_published_so(self):
        module, opt = self.shard(module=Two().bfloat16())
        module(self.X.bfloat16()).backward()
        before = module.layers[0].weight.clone()
        opt.step()
        self.assertEqual(before.dtype, torch.bfloat16)
        self.assertFalse(torch.equal(before, module.layers[0].weight))


class Backwards(Case):
    """Gradients that would be lost, or count twice."""

    def test_two_losses(self):
        module, opt = self.shard()
        module(self.X).backward()
        self.refuses(module(self.X).backward, says=r"backward\(\) 2 of a step with 1.*accumulate=2.*grads='step'")
        module, opt = self.shard(grads='step')
        module(self.X).backward()
        module(self.X).backward()
        self.assertIsNotNone(module.layers[0].weight.grad)
        opt.step()

    def test_a_number_of_micro_batches_that_is_not_this_share(self):
        module, opt = self.shard(accumulate=2)
        opt.engine.model.set('micro_batches=1')  # of the next step on
        for at in range(2):
            module(self.X).backward()
        opt.step()
        self.refuses(module(self.X).backward, says=r'a step has 1 micro-batches now \(shardctl set.*accumulate=2 compute 2')
        opt.engine.model.set('micro_batches=spec')
        self.refuses(sd.shard, nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), micro_batches=4, micro_batches_max=3,
                     says='micro_batches_max=3', kind=libshd.InvalidArgument)

    def test_steps_without_gradients_and_dropped_ones(self):
        module, opt = self.shard()
        self.refuses(opt.step, says='without a backward')
        module(self.X).backward()
        opt.zero_grad()
        self.refuses(opt.step, says='without a backward')
        module(self.X).backward()
        opt.step()
        opt.zero_grad()
        opt.step(idle=True)
        self.assertEqual(sd.step_of(module), 2)

    def test_a_backward_that_broke_off(self):
        module, opt = self.shard()
        with self.assertRaises(torch.OutOfMemoryError):
            module(self.X, breaks=True).backward()
        self.refuses(module, self.X, says=r'broke off when 1 of 2 units.*zero_grad\(\).*sd\.reset')
        self.refuses(opt.step, says='broke off')
        sd.reset(module)
        module(self.X).backward()
        opt.step()

    def test_another_try_is_as_if_the_first_had_not_been(self):
        steps = set()
        for flags in ({'policy': sd.DDP()}, {}, {'grads': 'step'}, {'accumulate': 2}, {'policy': sd.ZeRO2()}):
            for broken in (False, True):
                module, opt = self.shard(**flags)
                for step in range(2):
                    if broken and 'accumulate' in flags:
                        module(self.X * 50).backward()
                    if broken:
                        with self.assertRaises(torch.OutOfMemoryError):
                            module(self.X * 100, breaks=True).backward()
                        opt.zero_grad()
                    module(self.X).backward()
                    opt.step()
                    opt.zero_grad()
                steps.add((opt.last.grad_norm, sd.digest(module)))
        self.assertEqual(len(steps), 1)

    def test_gradients_of_inputs_are_no_backward(self):
        module, opt = self.shard()
        x = self.X.clone().requires_grad_()
        torch.autograd.grad(module(x), x)
        module(x).backward()
        opt.step()

    def test_a_graph_from_before_the_step(self):
        module, opt = self.shard()
        loss = module(self.X)
        loss.backward(retain_graph=True)
        opt.step()
        self.refuses(loss.backward, kind=RuntimeError, says='modified by an inplace operation')

    def test_a_unit_that_took_no_part(self):
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 0.1))
        before = module.layers[1].weight.clone()
        module(self.X, count=1).backward()
        opt.step()
        self.assertTrue(torch.equal(before, module.layers[1].weight))


class Leaves(nn.Module):
    """A layer that one unit has and no forward uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x).square().mean()


class Dropped(Case):
    """Gradients that are not to count, or of which there are none."""

    def test_zero_grad_of_the_module_drops_what_owners_have(self):
        losses = []
        for drops in (False, True):
            module, opt = self.shard(accumulate=2)
            if drops:
                module(self.X * 50).backward()
                module.zero_grad()
            for _ in range(4):
                for _ in range(2):
                    loss = module(self.X)
                    loss.backward()
                opt.step()
            losses.append(loss.item())
        self.assertEqual(*losses)

    def test_parameters_without_a_gradient_beside_others(self):
        module, opt = self.shard(lambda p: torch.optim.SGD(p, lr=0.1), Leaves())
        before = module.unused.weight.detach().clone()
        for _ in range(2):
            module(torch.ones(1, 2)).backward()
            opt.step()
        self.assertTrue(torch.equal(before, module.unused.weight))

    def test_a_step_without_a_token_is_skipped(self):
        module, opt = self.shard(loss='sum')
        before = module.layers[0].weight.detach().clone()
        (module(self.X) * 0).backward()
        sd.weight(module, 0)
        opt.step()
        self.assertTrue(opt.last.skipped)
        self.assertTrue(torch.equal(before, module.layers[0].weight))
        module(self.X).backward()
        sd.weight(module, 3)
        opt.step()
        self.assertFalse(opt.last.skipped or torch.equal(before, module.layers[0].weight))


class Clipping(Case):
    """Of gradients that are not there any more."""

    def test_the_norm_is_the_owners(self):
        module, opt = self.shard()
        module(self.X * 100).backward()
        norm = clip_grad_norm_(module.parameters(), 0.5)  # imported before shard()
        for look in (torch.isfinite, float, str, lambda n: n > 1):  # NaN would be taken for an overflow
            self.refuses(look, norm, says=r'known after step\(\).*optimizer\.last\.skipped')
        opt.step()
        self.assertEqual(norm.item(), torch.tensor(opt.last.grad_norm, dtype=norm.dtype).item())
        self.assertGreater(norm, 1)
        plain = nn.Linear(2, 1)
        plain(torch.ones(1, 2)).backward()
        self.assertGreater(nn.utils.clip_grad_norm_(plain.parameters(), 0.1), 1)
        self.assertLess(plain.weight.grad.norm(), 0.2)

    def test_bounds(self):
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 1.0))
        before = module.layers[0].weight.detach().clone()
        module(self.X).backward()
        for clip in (lambda bound: clip_grad_norm_(module.parameters(), bound), opt.clip_grad_norm_):
            for bound in (0.0, -1.0, float('nan')):
                self.refuses(clip, bound, kind=libshd.InvalidArgument, says=f'max_norm={bound:g} .*above 0.*inf')
        norm = clip_grad_norm_(module.parameters(), float('inf'))  # to look at it
        opt.step()
        moved = [p.detach().clone() for p in module.parameters()]
        self.assertFalse(torch.equal(before, moved[0]))
        self.assertEqual(norm.item(), torch.tensor(opt.last.grad_norm, dtype=norm.dtype).item())
        module, opt = self.shard(lambda p: torch.optim.SGD(p, 1.0), micro_batches=1)
        for _ in sd.leases(module, 1, clip_norm=float('inf')):
            module(self.X).backward()
            clip_grad_norm_(module.parameters(), float('inf'))
            opt.step()
        self.assertTrue(all(map(torch.equal, moved, module.parameters())))

    def test_an_empty_parameter(self):
        two = Two()
        two.none = nn.Parameter(torch.empty(0, 4))
        module, opt = self.shard(module=two)
        (module(self.X) + module.none.sum()).backward()
        clip_grad_norm_(module.parameters(), 1e-3)
        opt.step()
        self.assertGreater(opt.last.grad_norm, 1e-3)

    def test_parts_and_values_are_refused(self):
        module, opt = self.shard()
        module(self.X).backward()
        self.refuses(nn.utils.clip_grad_norm_, module.layers[0].parameters(), 1.0, says='a part')
        self.refuses(nn.utils.clip_grad_value_, module.parameters(), 1.0, kind=libshd.NotSupported,
                     says='clip_grad_norm_')


class Optimizers(Case):
    """The user's optimizer and ours are one."""

    def test_calling_the_original(self):
        torch.manual_seed(1)
        module = Two()
        original = torch.optim.AdamW(module.parameters(), lr=0.01)
        module, opt = sd.shard(module, original, name='original')
        self.addCleanup(sd.close, module)
        module(self.X).backward()
        original.step()
        original.zero_grad()
        self.assertEqual((sd.step_of(module), opt.param_groups is original.param_groups), (1, True))
        self.refuses(original.add_param_group, {'params': [nn.Parameter(torch.ones(1))]}, says='add_param_group')
        self.refuses(sd.shard, module, original, says='sharded already')

    def test_state_that_is_elsewhere(self):
        used = Two()
        optimizer = torch.optim.AdamW(used.parameters())
        used(self.X).backward()
        optimizer.step()
        self.refuses(sd.shard, used, optimizer, says='has state already, from steps.*load_state_dict')

    def test_state_that_does_not_fit(self):
        module, opt = self.shard()
        module(self.X).backward()
        opt.step()
        state, digest = opt.state_dict(), sd.digest(module)
        self.refuses(opt.load_state_dict, {**state, 'param_groups': []}, says='has 0 parameter groups',
                     kind=libshd.InvalidArgument)
        group = state['param_groups'][0]
        self.refuses(opt.load_state_dict, {**state, 'param_groups': [{**group, 'eps': 0.5}]}, says='eps is 0.5 in the',
                     kind=libshd.NotSupported)
        for key, value, says in (('step', torch.tensor(5.0), "'layers.1.weight' of the state has had 1 updates and 'layers.1.bias' 5"),
                                 ('exp_avg', torch.ones(3), "exp_avg of 'layers.1.bias' has shape")):
            other = {**state['state'], 3: {**state['state'][3], key: value}}
            self.refuses(opt.load_state_dict, {**state, 'state': other}, says=says, kind=libshd.Error)
        self.assertEqual(sd.digest(module), digest)

    def test_files_that_do_not_fit(self):
        module, _ = self.shard()
        path, digest = os.path.join(DAEMONS.directory, 'bad.safetensors'), sd.digest(module)
        sd.save_safetensors(module, path)
        with open(path, 'rb') as file:
            good = file.read()
        self.refuses(sd.load_safetensors, module, path, {'layers.0.bias': 'b'}, says="has no 'b' .1 of 4",
                     kind=libshd.InvalidArgument)
        self.refuses(sd.load_safetensors, module, path, {'layers.0.bias': 'layers.0.weight'},
                     says=r'has shape \[4, 4\]', kind=libshd.InvalidArgument)
        for bad in (b'', good[:7], good[:-1], b'\xff' * 64, good[:8] + b'[' + good[9:]):
            with open(path, 'wb') as file:
                file.write(bad)
            self.refuses(sd.load_safetensors, module, path, says='bad.safetensors: ', kind=libshd.InvalidArgument)
        self.assertEqual(sd.digest(module), digest)

    def test_files_that_fail_half_way_change_nothing(self):
        two = Two()
        two.norm = nn.BatchNorm1d(4)  # its statistics are with the owners
        two.register_buffer('own', torch.zeros(2))
        module, opt = self.shard(module=two)
        path = os.path.join(DAEMONS.directory, 'half.safetensors')
        with sd.writable(module):
            module.norm.running_mean.fill_(3)
            module.own.fill_(3)
        sd.save_safetensors(module, path)
        with sd.writable(module):
            module.norm.running_mean.fill_(4)
        module.own.fill_(4)
        digest = sd.digest(module)

        def fails(says, kind):
            self.refuses(sd.load_safetensors, module, path, says=says, kind=kind)
            self.assertEqual((sd.digest(module), module.own.tolist(), module.norm.running_mean.tolist()),
                             (digest, [4, 4], [4] * 4))
        with unittest.mock.patch.object(opt.engine.model, 'put', side_effect=MemoryError('no room')):
            fails('no room', MemoryError)
        with open(path, 'rb') as file:
            good = file.read()
        with open(path, 'wb') as file:  # its data are of no type that is known
            file.write(good.replace(b'"layers.1.bias":{"dtype":"F32"', b'"layers.1.bias":{"dtype":"F6X"'))
        fails("half.safetensors: 'layers.1.bias' is F6X: known are", libshd.NotSupported)
        with open(path, 'wb') as file:
            file.write(good)
        sd.load_safetensors(module, path)
        self.assertEqual((module.own.tolist(), module.norm.running_mean.tolist()), ([3, 3], [3] * 4))
        os.mkdir(parts := os.path.join(DAEMONS.directory, 'parts'))
        os.rename(path, os.path.join(parts, 'one'))
        with open(os.path.join(parts, 'model.safetensors.index.json'), 'w', encoding='ascii') as file:
            file.write('{"weight_map": {"own": "one", "layers.0.bias": "one", "x": "one"}}')
        self.refuses(sd.load_safetensors, module, parts, says="'x' is said to be in one, which does not have it",
                     kind=libshd.InvalidArgument)

    def test_checkpoints(self):
        module, opt = self.shard()
        module(self.X).backward()
        opt.step()
        self.assertEqual(sd.save(module, os.path.join(DAEMONS.directory, 'saved')), 'step-000000000001')


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
