#!/usr/bin/env python3
"""A small GPT over bytes by tensor and pipeline parallelism of PyTorch's own, but for the lines marked `shardd`.

    eval "$(shardctl up --daemons 2)"
    torchrun --nproc-per-node 4 parallel.py --pp 2 --tp 2                        # one group of four ranks
    torchrun --nproc-per-node 4 parallel.py --tp 2                               # two groups of two, which fail together
    for g in 0 1; do                                                             # two that each fail alone
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 9 \\
            parallel.py --tp 2 --group $g --groups 2 &
    done
"""
import argparse
import glob
import pathlib

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.nn import functional as F

import libshd.torch as sd  # shardd


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.width = dim // heads
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(2, (-1, self.width)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc, self.proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads), Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """The whole model, or a stage of it, which has those of its parts that are its."""

    def __init__(self, o):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, o.dim), nn.Embedding(o.seq, o.dim)
        self.blocks = nn.ModuleDict({str(at): Block(o.dim, o.heads) for at in range(o.layers)})
        self.ln_f, self.head = nn.LayerNorm(o.dim), nn.Linear(o.dim, 256, bias=False)

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe.weight[:x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def stage_of(o, at, of):
    """One of so many stages, by the names of the whole model."""
    stage = Gpt(o)
    for layer in range(o.layers):
        if layer * of // o.layers != at:
            del stage.blocks[str(layer)]
    if at > 0:
        stage.wte = stage.wpe = None
    if at < of - 1:
        stage.ln_f = stage.head = None
    return stage


def cut(stage, mesh):
    """Tensor parallel, activations cut along the sequence between layers."""
    split = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in stage.blocks.values():
        parallelize_module(block, mesh, {
            'ln_1': SequenceParallel(), 'attn': split, 'attn.q': ColwiseParallel(), 'attn.k': ColwiseParallel(),
            'attn.v': ColwiseParallel(), 'attn.proj': RowwiseParallel(output_layouts=Shard(1)),
            'ln_2': SequenceParallel(), 'mlp': split, 'mlp.fc': ColwiseParallel(),
            'mlp.proj': RowwiseParallel(output_layouts=Shard(1))})
    if stage.wte is not None:
        first = next(iter(stage.blocks.values()))
        parallelize_module(stage, mesh, {'wte': RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())})
        parallelize_module(first, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1),
                                                           use_local_output=True))
    if stage.head is not None:
        parallelize_module(stage, mesh, {'ln_f': SequenceParallel(), 'head': ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate())})


class Text(torch.utils.data.Dataset):
    """Windows of a text."""

    def __init__(self, paths, seq):
        self.bytes, self.seq = b''.join(pathlib.Path(path).read_bytes() for path in sorted(paths)), seq

    def __len__(self):
        return (len(self.bytes) - 1) // self.seq

    def __getitem__(self, at):
        window = torch.tensor(list(self.bytes[at * self.seq:(at + 1) * self.seq + 1]))
        return window[:-1], window[1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init(module):
    """Start values of one module's own parameters."""
    for p in module.parameters(recurse=False):
        if p.dim() > 1:
            nn.init.normal_(p, 0, 0.02)
        else:
            nn.init.constant_(p, float(isinstance(module, nn.LayerNorm) and p is module.weight))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('tp', 1), ('pp', 1), ('group', 0), ('groups', 1), ('layers', 4), ('dim', 128), ('heads', 4),
                          ('seq', 128), ('batch', 8), ('pieces', 4), ('steps', 100)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--name', help='of the model, which the daemons keep (Gpt)')
    parser.add_argument('--text', nargs='*', default=glob.glob('/usr/share/games/fortunes/*[!t]'))
    o = parser.parse_args()
    torch.manual_seed(1)
    dist.init_process_group('gloo')
    mesh = init_device_mesh('cpu', (dist.get_world_size() // o.pp // o.tp, o.pp, o.tp), mesh_dim_names=('dp', 'pp', 'tp'))
    if o.groups > 1:
        mesh = mesh['pp', 'tp']
    at, last = mesh.get_local_rank('pp'), o.pp - 1
    with torch.device('meta'):
        full, stage = Gpt(o), stage_of(o, at, o.pp)
    if o.tp > 1:
        cut(stage, mesh['tp'])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-4, weight_decay=0.1)
    stage, optimizer = sd.shard(stage, optimizer, full=full, init=init, mesh=mesh, name=o.name,  # shardd
                                dp=(o.group, o.groups) if o.groups > 1 else None)
    data = Text(o.text, o.seq)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sd.Sampler(stage, data, o.batch))  # shardd: alike in a group
    begun = sd.step_of(stage)  # shardd: 0, or where whoever was killed has been
    schedule = Schedule1F1B(PipelineStage(stage, at, o.pp, torch.device('cpu'), group=mesh.get_group('pp')), o.pieces,
                            loss_of) if o.pp > 1 else None
    for step, (tokens, targets) in zip(range(begun, o.steps), loader):
        losses = []
        if schedule is None:
            losses.append(loss_of(stage(tokens), targets))
            losses[0].backward()
        else:
            schedule.step(*[tokens] * (at == 0), **{'target': targets, 'losses': losses} if at == last else {})
        if at == last:
            sd.report(stage, loss=torch.stack(losses).mean())  # shardd
        nn.utils.clip_grad_norm_(stage.parameters(), 1.0)  # the norm of the whole model's
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 and at == last:
            print(f'step {step + 1} loss {optimizer.last.loss:.4f} norm {optimizer.last.grad_norm:.3f}', flush=True)
    print(f'digest sha256:{sd.digest(stage)}', flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
