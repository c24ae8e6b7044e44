#!/usr/bin/env python3
"""A small GPT over bytes, in plain PyTorch but for the lines marked `shardd`.

    shardctl run --daemons 2 --workers 2 -- python3 gpt.py          # and kill whatever you like
    eval "$(shardctl up --daemons 2)" && python3 gpt.py             # the state stays; run it again and it goes on
    torchrun --nproc-per-node 2 --max-restarts 9 gpt.py             # beside daemons that are there
"""
import argparse
import glob

import torch
from torch import nn
from torch.nn import functional as F

import libshd.torch as sd  # shardd


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.mlp = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attn(self.ln_1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(F.gelu(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, o.dim), nn.Embedding(o.seq, o.dim)
        self.blocks = nn.ModuleList(Block(o.dim, o.heads) for _ in range(o.layers))
        self.ln_f, self.head = nn.LayerNorm(o.dim), nn.Linear(o.dim, 256, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset):
    """Windows of a text."""

    def __init__(self, paths, seq):
        self.bytes, self.seq = b''.join(open(path, 'rb').read() for path in sorted(paths)), seq

    def __len__(self):
        return (len(self.bytes) - 1) // self.seq

    def __getitem__(self, at):
        window = torch.tensor(list(self.bytes[at * self.seq:(at + 1) * self.seq + 1]))
        return window[:-1], window[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('layers', 4), ('dim', 128), ('heads', 4), ('seq', 128), ('batch', 8), ('steps', 100)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--name', help='of the model, which the daemons keep (Gpt)')
    parser.add_argument('--text', nargs='*', default=glob.glob('/usr/share/games/fortunes/*[!t]'))
    o = parser.parse_args()
    torch.manual_seed(1)
    model, data = Gpt(o), Text(o.text, o.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    model, optimizer = sd.shard(model, optimizer, name=o.name)  # shardd
    begun = sd.step_of(model)  # shardd: 0, or where whoever was killed has been
    loader = torch.utils.data.DataLoader(data, batch_sampler=sd.Sampler(model, data, o.batch))  # shardd: whose is what
    for step, (tokens, targets) in zip(range(begun, o.steps), loader):
        loss = model(tokens, targets)
        loss.backward()
        sd.report(model, loss=loss)  # shardd: the mean of all workers', for `shardctl top` and below
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f'step {step + 1} loss {optimizer.last.loss:.4f} norm {optimizer.last.grad_norm:.3f}', flush=True)
    print(f'digest sha256:{sd.digest(model)}')


if __name__ == '__main__':
    main()
