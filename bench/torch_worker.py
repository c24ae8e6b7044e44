#!/usr/bin/env python3
"""torch_worker.py VARIANT: one process of bench_torch.py, which trains the GPT of gpt_torch.py on the CPU.

Without --record it reads commands from stdin, until that ends, and answers each with a line of JSON:
  steps N   N steps: {"begin", "end" (CLOCK_MONOTONIC), "each" (seconds), "step", "loss"}
  save      a checkpoint in --state, from which the next process there goes on: {"step"}
The first line it prints is {"pid", "imported" (when PyTorch and the tool were there), "params", "step"}.

With --record FILE it makes --steps steps and saves a checkpoint every --save-every; FILE.RANK has a line for
each step that is done. Started again, it goes on from the last checkpoint; under shardd from the open step.
"""
import argparse
import json
import os
import sys
import time

import torch
from torch import nn

import gpt_torch
from groups import SIZES

RATES = {'lr': 3e-4, 'betas': (0.9, 0.95), 'weight_decay': 0.1}
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '../docs')
RANK, WORLD = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True, **RATES)


class Plain:
    """A process of its own, that exchanges nothing."""
    begun = 0

    def __init__(self, model):
        self.model, self.optimizer = model, adamw(model)

    def step(self, tokens, targets):
        loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def save(self, folder, step):
        """All of it by one process, in a file that is whole or not there."""
        if RANK == 0:
            state = {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(), 'step': step}
            torch.save(state, os.path.join(folder, 'new'))
            os.replace(os.path.join(folder, 'new'), os.path.join(folder, 'last'))

    def load(self, folder):
        path = os.path.join(folder, 'last')
        if os.path.exists(path):
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state['model'])
            self.optimizer.load_state_dict(state['optimizer'])
            self.begun = state['step']


class Ddp(Plain):
    def __init__(self, model, zero=False):
        torch.distributed.init_process_group('gloo')
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, fused=True, **RATES)
        else:
            self.optimizer = adamw(self.model)
        self.zero = zero

    def save(self, folder, step):
        if self.zero:
            self.optimizer.consolidate_state_dict(to=0)
        super().save(folder, step)


class Fsdp(Plain):
    def __init__(self, model, reshard):
        from torch.distributed.fsdp import fully_shard
        torch.distributed.init_process_group('gloo')
        mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        super().__init__(fully_shard(model, mesh=mesh, reshard_after_forward=reshard))

    def _state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {'model': model, 'optimizer': optimizer}

    def save(self, folder, step):
        name = f'step-{step}'
        torch.distributed.checkpoint.save(self._state(), checkpoint_id=os.path.join(folder, name))
        if RANK == 0:
            os.symlink(name, os.path.join(folder, 'new'))
            os.replace(os.path.join(folder, 'new'), os.path.join(folder, 'last'))

    def load(self, folder):
        from torch.distributed.checkpoint.state_dict import set_state_dict
        path = os.path.join(folder, 'last')
        if os.path.islink(path):
            state = self._state()
            torch.distributed.checkpoint.load(state, checkpoint_id=path)
            set_state_dict(self.model, self.optimizer, model_state_dict=state['model'],
                           optim_state_dict=state['optimizer'])
            self.begun = int(os.readlink(path).rpartition('-')[2])


class DeepSpeed(Plain):
    def __init__(self, model, stage):
        import deepspeed
        deepspeed.init_distributed('gloo', verbose=False)
        config = {'train_micro_batch_size_per_gpu': 1, 'gradient_clipping': 1.0, 'zero_allow_untested_optimizer': True,
                  'zero_optimization': {'stage': stage}, 'steps_per_print': 1 << 30}
        self.model, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(self, tokens, targets):
        loss = self.model(tokens, targets)
        self.model.backward(loss)
        self.model.step()
        return loss.item()

    def save(self, folder, step):
        self.model.save_checkpoint(folder, tag=f'step-{step}')

    def load(self, folder):
        path, _ = self.model.load_checkpoint(folder) if os.path.exists(os.path.join(folder, 'latest')) else (None, 0)
        if path:
            self.begun = int(os.path.basename(os.path.dirname(path) or path).rpartition('-')[2])


class Shardd(Plain):
    """The daemons have the state: nothing is saved here, and nothing loaded."""

    def __init__(self, model, policy, **flags):
        import libshd.torch as sd
        self.model, self.optimizer = sd.shard(model, adamw(model), policy=getattr(sd, policy)(), name='gpt', **flags)
        self.begun = sd.step_of(self.model)

    def save(self, folder, step):
        pass

    def load(self, folder):
        pass


VARIANTS = {
    'none': Plain,
    'ddp': Ddp,
    'ddp-zero1': lambda model: Ddp(model, zero=True),
    'fsdp2': lambda model: Fsdp(model, True),
    'fsdp2-kept': lambda model: Fsdp(model, False),
    **{f'deepspeed-{stage}': lambda model, stage=stage: DeepSpeed(model, stage) for stage in (1, 2, 3)},
    'shardd-ddp': lambda model: Shardd(model, 'DDP'),
    'shardd-zero2': lambda model: Shardd(model, 'ZeRO2'),
    'shardd-zero3': lambda model: Shardd(model, 'ZeRO3'),
    'shardd-waits': lambda model: Shardd(model, 'ZeRO3', overlap=False),
}


class Data:
    """The batch of a step and a rank, the same for every tool."""

    def __init__(self, seq, batch):
        self.text, self.seq, self.size = gpt_torch.read_text([TEXT + '/design.md', TEXT + '/protocol.md']), seq, batch

    def batch(self, step):
        draw = torch.Generator().manual_seed(1000 * step + RANK)
        at = torch.randint(len(self.text) - self.seq - 1, (self.size,), generator=draw)
        rows = torch.stack([self.text[i:i + self.seq + 1] for i in at.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def made(size, device):
    layers, dim, heads, seq, _ = SIZES[size]
    torch.manual_seed(1)
    with torch.device(device):
        return gpt_torch.Gpt(argparse.Namespace(layers=layers, dim=dim, heads=heads, seq=seq))


def serve(side, data, folder, out):
    step = side.begun
    for line in sys.stdin:
        words = line.split()
        if words[0] == 'save':
            os.makedirs(folder, exist_ok=True)
            side.save(folder, step)
            out({'step': step})
            continue
        times = [time.monotonic()]
        for _ in range(int(words[1])):
            loss = side.step(*data.batch(step))
            step += 1
            times.append(time.monotonic())
        out({'begin': times[0], 'end': times[-1], 'each': [b - a for a, b in zip(times, times[1:])], 'step': step,
             'loss': loss})


def train(side, data, o):
    folder = o.record + '.state'
    os.makedirs(folder, exist_ok=True)
    side.load(folder)
    with open(f'{o.record}.{RANK}', 'a', encoding='ascii') as log:
        for step in range(side.begun, o.steps):
            side.step(*data.batch(step))
            done = time.monotonic()
            if (step + 1) % o.save_every == 0:
                side.save(folder, step + 1)
            log.write(json.dumps({'step': step, 'done': done, 'pid': os.getpid(), 'save_s': time.monotonic() - done})
                      + '\n')
            log.flush()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('variant', choices=VARIANTS)
    p.add_argument('--size', choices=SIZES, default='10.8m')
    p.add_argument('--meta', action='store_true', help='the daemons have the values, so the module needs none')
    p.add_argument('--state', help='a folder')
    p.add_argument('--record')
    p.add_argument('--steps', type=int)
    p.add_argument('--save-every', type=int)
    o = p.parse_args()
    # What tools print to stdout is not ours.
    answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if o.variant.startswith('shardd'):
        import libshd.torch  # noqa: F401
    elif o.variant.startswith('deepspeed'):
        import deepspeed  # noqa: F401

    def out(answer):
        print(json.dumps(answer), file=answers, flush=True)
    imported = time.monotonic()
    model = made(o.size, 'meta' if o.meta else 'cpu')
    params = sum(x.numel() for x in model.parameters())
    side, data = VARIANTS[o.variant](model), Data(*SIZES[o.size][3:])
    if o.record:
        train(side, data, o)
        return
    side.load(o.state)
    out({'pid': os.getpid(), 'imported': imported, 'params': params, 'step': side.begun})
    serve(side, data, o.state, out)
    sys.stdout.flush()
    os._exit(0)  # not in order: nobody waits for how each tool takes itself apart


if __name__ == '__main__':
    main()
