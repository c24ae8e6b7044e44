#!/usr/bin/env python3
"""A small transformer over synthetic text, with FSDP2:  torchrun --nproc-per-node 2 fsdp2_before.py

fsdp2_after.py is the same script with shardd; docs/pytorch.md has the lines that differ.
"""
import argparse
import os

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2)
                   for part in self.attention(self.norm_1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.tokens, self.places = nn.Embedding(o.vocabulary, o.dim), nn.Embedding(o.length, o.dim)
        self.blocks = nn.ModuleList(Block(o.dim, o.heads) for _ in range(o.layers))
        self.norm, self.head = nn.LayerNorm(o.dim), nn.Linear(o.dim, o.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(o, step, rank, world):
    """Each token is the one before it plus one of three numbers."""
    draw = torch.Generator().manual_seed(step * world + rank)
    tokens = torch.randint(3, (o.batch, o.length + 1), generator=draw).cumsum(1) % o.vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('layers', 4), ('dim', 128), ('heads', 4), ('vocabulary', 64), ('length', 64), ('batch', 16),
                          ('steps', 100)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--mixed-precision', action='store_true', help='compute in bfloat16')
    o = parser.parse_args()
    torch.distributed.init_process_group('gloo')
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))

    torch.manual_seed(0)
    model = Transformer(o)
    options = {'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if o.mixed_precision else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    for step in range(o.steps):
        tokens, targets = batch(o, step, rank, world)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f'step {step + 1} loss {loss.item():.6f}', flush=True)
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
