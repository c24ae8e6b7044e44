#!/usr/bin/env python3
"""test_torch_tiles.py BUILD_DIR: TiledLinear has nn.Linear's numbers, names and values at the beginning; a worker holds
one tile of it at a time; owners keep it as whole tensors, also through kills."""
import copy
import os
import pickle
import sys
import unittest

import torch_run
from torch_run import first, kill_here, run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import libshd.torch as sd  # noqa: E402
from libshd import errors  # noqa: E402
from test_torch import NOISE, Mlp, adamw, made, plain, sharded  # noqa: E402

WIDE, TILES = 32, 5


class Tiled(Mlp):
    """Mlp with its widest layer, and its first, in tiles, not all of one size."""

    def __init__(self, tiles=TILES):
        super().__init__()
        for at, count in ((0, 3), (2, tiles)):
            self.layers[at] = sd.TiledLinear.from_linear(self.layers[at], count)


class Alone(unittest.TestCase):
    """Without daemons."""

    def pair(self, *sizes, tiles=TILES, **how):
        torch.manual_seed(3)
        plain_one = nn.Linear(*sizes, **how)
        torch.manual_seed(3)
        return plain_one, sd.TiledLinear(*sizes, tiles=tiles, **how)

    def test_begins_as_linear_does(self):
        for bias in (True, False):
            for tiles in (1, 2, 5, 13):
                linear, tiled = self.pair(7, 13, bias=bias, tiles=tiles)
                self.assertEqual(list(linear.state_dict()), list(tiled.state_dict()))
                for name, value in linear.state_dict().items():
                    self.assertTrue(torch.equal(value, tiled.state_dict()[name]), (name, tiles))
                rows = [tile.weight.shape[0] for tile in tiled.tiles]
                self.assertEqual(sum(rows), 13)
                self.assertLessEqual(max(rows) - min(rows), 1)

    def test_computes_what_linear_does(self):
        for sizes, shape in (((7, 13), (4, 7)), ((8, 6), (2, 3, 8))):
            linear, tiled = self.pair(*sizes)
            x = torch.randn(*shape)
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            outputs = [layer(of) for layer, of in zip((linear, tiled), inputs)]
            self.assertLess((outputs[0] - outputs[1]).abs().max().item(), 1e-5)
            weights = torch.randn_like(outputs[0])
            for output in outputs:
                (output * weights).sum().backward()
            self.assertLess((inputs[0].grad - inputs[1].grad).abs().max().item(), 1e-5)
            for name in ('weight', 'bias'):
                got = torch.cat([getattr(tile, name).grad for tile in tiled.tiles])
                self.assertLess((got - getattr(linear, name).grad).abs().max().item(), 1e-5)

    def test_takes_and_gives_the_names_of_linear(self):
        linear, tiled = self.pair(7, 13)
        with torch.no_grad():
            linear.weight.mul_(2)
        for how in ({}, {'assign': True}):
            other = sd.TiledLinear(7, 13, tiles=4)
            other.load_state_dict(linear.state_dict(), **how)
            self.assertTrue(torch.equal(other.state_dict()['weight'], linear.weight))
        linear.load_state_dict(tiled.state_dict())
        self.assertTrue(torch.equal(tiled.state_dict()['weight'], linear.weight))
        self.assertEqual(list(nn.Sequential(tiled).state_dict()), ['0.weight', '0.bias'])
        self.assertTrue(tiled.state_dict(keep_vars=True)['weight'].requires_grad)
        with self.assertRaisesRegex(RuntimeError, 'Missing key.*"bias"'):
            tiled.load_state_dict({'weight': linear.weight})
        with self.assertRaisesRegex(RuntimeError, 'Unexpected key.*"other"'):
            tiled.load_state_dict({**linear.state_dict(), 'other': linear.bias})
        with self.assertRaisesRegex(RuntimeError, 'size mismatch for weight'):
            tiled.load_state_dict({**linear.state_dict(), 'weight': linear.bias})
        tiled.load_state_dict({'weight': linear.weight}, strict=False)

    def test_from_linear_and_copies(self):
        linear = nn.Linear(6, 10, dtype=torch.bfloat16).requires_grad_(False).eval()
        tiled = sd.TiledLinear.from_linear(linear, 3)
        for layer in (tiled, copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled))):
            self.assertTrue(torch.equal(layer.state_dict()['weight'], linear.weight))
            self.assertFalse(any(p.requires_grad for p in layer.parameters()) or layer.training)
            self.assertEqual({p.dtype for p in layer.parameters()}, {torch.bfloat16})
        self.assertIn('in_features=6, out_features=10, bias=True, tiles=3', repr(tiled))
        for wrong in (0, 11):
            with self.assertRaisesRegex(errors.InvalidArgument, f'tiles={wrong}.: tiles must be 1 to out_features'):
                sd.TiledLinear(6, 10, tiles=wrong)


class Sharded(unittest.TestCase):
    def test_has_the_numbers_of_linear(self):
        reference, moved = (run(lambda: plain(Mlp, 12, 2, noise=noise))[0] for noise in (False, True))
        noise = max(abs(a - b) for x, y in zip(reference, moved) for a, b in zip(x, y))
        answers = run(sharded(Tiled, 'tiles-numbers', 12), 2)
        for step, losses in enumerate(reference):
            for micro, loss in enumerate(losses):
                self.assertAlmostEqual(answers[micro][0][step][0], loss, delta=NOISE * noise + 1e-6)
        self.assertNotEqual(reference[0], reference[-1])

    def test_the_same_bits_by_any_policy_and_through_kills(self):
        def die(step):
            if step in (2, 5) and os.environ['RANK'] == '1' and first(DAEMONS, f'tiles-{step}'):
                kill_here()
        wanted = run(sharded(Tiled, 'tiles-ddp', 8, 2, policy=sd.DDP()))[0][1]
        for name, world, how in (('zero3', 1, {'policy': sd.ZeRO3(max_live_bytes=WIDE * WIDE)}),
                                 ('zero2', 2, {'policy': sd.ZeRO2()}), ('local', 1, {'address': 'local:'}),
                                 ('killed', 2, {'fault': die, 'policy': sd.ZeRO3()})):
            accumulate = 2 // world
            answers = run(sharded(Tiled, f'tiles-{name}', 8, accumulate, **how), world)
            self.assertEqual({digest for _, digest in answers}, {wanted}, name)

    def test_one_tile_is_held_at_a_time(self):
        def work():
            module = made(Tiled)
            module, opt = sd.shard(module, adamw(module), name='tiles-held', policy=sd.ZeRO3(), units=lambda *_: 'one')
            engine, held = opt.engine, []
            names = [unit.name for unit in engine.units]
            tiles = {unit.index for unit in engine.units if unit.name.startswith('layers.2/')}
            acquire = engine.acquire

            def watched(unit, **how):
                answer = acquire(unit, **how)
                held.append(len(tiles & engine.held))
                return answer
            engine.acquire = watched
            for step in range(2):
                module(step).backward()
                opt.step()
            return names, max(held), held.count(1), opt.engine.model.spec
        names, most, times, spec = run(work)[0]
        self.assertEqual(names, [*(f'layers.0/{at}' for at in range(3)), *(f'layers.2/{at}' for at in range(TILES)), 'one'])
        self.assertEqual(most, 1)
        self.assertGreaterEqual(times, 2 * 2 * TILES)  # forward and backward
        self.assertIn('"name":"layers.2","tiles":5,', spec)
        self.assertIn('"name":"layers.2.weight","shape":[32,32]', spec)

    def test_files_have_whole_tensors(self):
        directory = os.path.join(DAEMONS.directory, 'tiles')
        os.makedirs(directory)

        def work():
            module = made(Tiled)
            module, opt = sd.shard(module, adamw(module), name='tiles-files')
            module(1).backward()
            opt.step()
            saved = sd.save(module, directory)
            sd.save_safetensors(module, os.path.join(directory, 'own.safetensors'))
            with sd.reader(name='tiles-files') as r, r.snapshot() as snapshot, r.pinned() as pinned:
                seen = [{name: value.clone() for name, value in of.items()} for of in (snapshot, pinned)]
            state = {name: value.clone() for name, value in module.state_dict().items()}
            with torch.no_grad():
                moments = load_file(os.path.join(directory, saved, 'optimizer-m.safetensors'))
            for key, value in moments.items():
                self.assertEqual(value.shape, state[key].shape)
            return state, seen, load_file(os.path.join(directory, saved, 'model.safetensors'))
        state, seen, saved = run(work)[0]
        self.assertEqual(set(state), set(Mlp().state_dict()))
        for found in (*seen, saved, load_file(os.path.join(directory, 'own.safetensors'))):
            self.assertEqual(set(found), set(state))
            for name, value in state.items():
                self.assertTrue(torch.equal(found[name], value), name)
        Mlp().load_state_dict(state)

        def again():
            module = made(Tiled, seed=5)
            opt = adamw(module)
            module, opt = sd.shard(module, opt, name='tiles-files-2')
            sd.load_safetensors(module, os.path.join(directory, 'own.safetensors'))
            loaded = {name: value.clone() for name, value in module.state_dict().items()}
            with sd.writable(module):
                module.load_state_dict(made(Mlp, seed=9).state_dict())
            with self.assertRaisesRegex(errors.InvalidArgument, "has shape .32, 31., the module's 'layers.2.weight' has"):
                sd.load_safetensors(module, os.path.join(directory, 'wrong.safetensors'))
            return loaded, {name: value.clone() for name, value in module.state_dict().items()}
        save_file({**state, 'layers.2.weight': torch.zeros(32, 31)}, os.path.join(directory, 'wrong.safetensors'))
        loaded, written = run(again)[0]
        for name, value in made(Mlp, seed=9).state_dict().items():
            self.assertTrue(torch.equal(loaded[name], state[name]), name)
            self.assertTrue(torch.equal(written[name], value), name)

    def test_made_unit_by_unit_from_the_meta_device(self):
        def work():
            with torch.device('meta'):
                module = nn.Sequential(nn.Linear(4, 4), sd.TiledLinear(4, 64, tiles=4))
            torch.manual_seed(1)
            module, opt = sd.shard(module, torch.optim.SGD(module.parameters(), 0.1), name='tiles-meta')
            F.mse_loss(module(torch.ones(2, 4)), torch.ones(2, 64)).backward()
            opt.step()
            return module[1].state_dict()['weight'].clone()
        weight = run(work)[0]
        self.assertEqual(weight.shape, (64, 4))
        self.assertGreater(weight.std(), 0.1)
        self.assertLess(weight.abs().max(), 1)

    def test_tiles_that_are_not_alike_are_refused(self):
        def work():
            said = []
            for name, change in (('bias', lambda m: [tile.bias.requires_grad_(False) for tile in m.layers[2].tiles]),
                                 ('one', lambda m: m.layers[2].tiles[1].requires_grad_(False))):
                module = made(Tiled)
                change(module)
                with self.assertRaises(errors.NotSupported) as caught:
                    sd.shard(module, adamw(module), name=f'tiles-refused-{name}')
                said.append(str(caught.exception))
            return said
        for text in run(work)[0]:
            self.assertIn("'layers.2' is a TiledLinear of which tile", text)

    def test_ranks_of_a_group_have_none(self):
        for module, full in ((Tiled(), None), (Mlp(), Tiled())):
            with self.assertRaisesRegex(errors.NotSupported, "'layers.0' is a TiledLinear, with mesh="):
                sd.shard(module, adamw(module), name='tiles-mesh', mesh='any', full=full)

    def test_frozen_tiles_stay(self):
        def work():
            module = made(Tiled)
            module.layers[2].requires_grad_(False)
            before = module.layers[2].state_dict()['weight'].clone()
            module, opt = sd.shard(module, adamw(module), name='tiles-frozen')
            module(1).backward()
            opt.step()
            return torch.equal(before, module.layers[2].state_dict()['weight'])
        self.assertTrue(run(work)[0])


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
