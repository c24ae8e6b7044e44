#!/usr/bin/env python3
"""test_torch_batch.py BUILD_DIR: a batch that memory is too small for is halved, and the attempts count in no step."""
import resource
import sys
import unittest
import weakref

import torch_run

if __name__ == '__main__':
    torch_run.start(sys.argv[1])

import torch  # noqa: E402
from torch import nn  # noqa: E402

import libshd  # noqa: E402
import libshd.torch as sd  # noqa: E402

MIB = 1 << 20
SAMPLE = 16 * MIB  # of fp32, so much does the backward of a sample take: 64 MiB


class Takes(torch.autograd.Function):
    """Takes real memory in backward, when the gradients of the layer behind it are with the owners."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.empty(grad.shape[0], SAMPLE)
        return grad


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.layers[1](Takes.apply(self.layers[0](x))).square().mean()


def sharded(name, **flags):
    torch.manual_seed(1)
    module = Two()
    return sd.shard(module, torch.optim.AdamW(module.parameters(), lr=0.01), name=name, **flags)


def steps_of(module, opt, size, until):
    for step in range(sd.step_of(module), until):
        module(torch.full((size, 4), float(step + 1))).backward()
        opt.step()
        opt.zero_grad()


def address_space():
    with open('/proc/self/statm', encoding='ascii') as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class Halves(unittest.TestCase):
    """Each in a fork, which has a limit of its own."""

    def test_what_does_not_fit_is_halved_and_leaves_nothing(self):
        def work(limited, **flags):
            name = f'halves-{limited}-{len(flags)}'
            module, opt = sharded(name, **flags)
            tried = []

            @sd.find_executable_batch_size(starting_batch_size=32 if limited else 4)
            def train(size, until, *, wanted=True):
                self.assertTrue(wanted)
                tried.append(size)
                steps_of(module, opt, size, until)
                return size
            if limited:  # 4 samples, and not 8: 256 MiB and 512 MiB
                resource.setrlimit(resource.RLIMIT_AS, (address_space() + 384 * MIB, resource.RLIM_INFINITY))
            found = train(2)
            again = train(3, wanted=True)
            return tried, found, again, sd.step_of(module), sd.digest(module)

        for flags in {}, {'grads': 'step'}:
            (tried, found, again, step, digest), = torch_run.run(lambda: work(True, **flags))
            (_, _, _, _, want), = torch_run.run(lambda: work(False, **flags))
            self.assertEqual((tried, found, again, step), ([32, 16, 8, 4, 4], 4, 4, 3))
            self.assertEqual(digest, want)

    def test_a_function_that_shards(self):
        """What an attempt has made goes with it."""
        class Token(Two):
            def __init__(self):
                super().__init__()
                self.cls_token = nn.Parameter(torch.zeros(4))

        def work():
            seen, tried, _ = [], [], sharded('without-its-optimizer')[0]

            @sd.find_executable_batch_size(starting_batch_size=8)
            def train(size):
                tried.append(size)
                module = Token()
                seen.append(weakref.ref(module))
                module, opt = sd.shard(module, torch.optim.AdamW(module.parameters(), lr=0.01))
                module(torch.ones(2, 4)).backward()
                if size > 2:
                    raise MemoryError
                opt.step()
                return sd.step_of(module)
            return train(), tried, [module() for module in seen]
        self.assertEqual(torch_run.run(work), [(1, [8, 4, 2], [None] * 3)])

    def test_other_errors_are_not_about_the_batch(self):
        tried = []
        for error in (ValueError('no memory'), RuntimeError('shapes cannot be multiplied'),
                      libshd.NoMemory('no memory at the daemons')):
            @sd.find_executable_batch_size(starting_batch_size=8)
            def train(size, error):
                tried.append(size)
                raise error
            with self.assertRaises(type(error)) as raised:
                train(error)
            self.assertIs(raised.exception, error)
        self.assertEqual(tried, [8, 8, 8])

    def test_not_even_one(self):
        tried = []

        @sd.find_executable_batch_size(starting_batch_size=5)
        def train(size):
            tried.append(size)
            raise MemoryError
        with self.assertRaisesRegex(RuntimeError, 'No executable batch size found: .* a batch of 1') as raised:
            train()
        self.assertIsInstance(raised.exception.__cause__, MemoryError)
        self.assertEqual(tried, [5, 2, 1])
        with self.assertRaisesRegex(libshd.InvalidArgument, 'starting_batch_size'):
            sd.find_executable_batch_size(starting_batch_size=0)


if __name__ == '__main__':
    DAEMONS = torch_run.Daemons(sys.argv.pop(1))
    torch_run.main(DAEMONS)
