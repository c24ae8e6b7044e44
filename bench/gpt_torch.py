#!/usr/bin/env python3
"""The model of examples/gpt in PyTorch, to put figures beside: same shapes, text and batches' sizes.

GPT-2's blocks over bytes: 256 tokens, learned positions, layer norm first, tanh GELU, tied head, no
dropout; AdamW with fp32 parameters (fused on a GPU), bf16 by autocast, PyTorch's own attention kernel,
gradients clipped to norm 1, the mean over micro-batches. Windows are drawn from the same text, not the
same ones.

Reads commands from stdin, a line each, and answers each with one line of JSON:
  eager N | compiled N      N steps: {"variant", "step_s": [...], "loss"}; compiled compiles at first
  shardd N | shardd_compiled N   the same with parameters and optimizer at daemons ($SHARDD_ADDRESS), by libshd.torch
  quit
The first line it prints is {"ready": ..., "params": ...}.
"""
import argparse
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.mlp = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.attn(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(F.gelu(self.fc(self.ln_2(x)), approximate='tanh'))


class Gpt(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, o.dim), nn.Embedding(o.seq, o.dim)
        self.blocks = nn.ModuleList(Block(o.dim, o.heads) for _ in range(o.layers))
        self.ln_f = nn.LayerNorm(o.dim)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, 256).float(), targets.reshape(-1))


class Trainer:
    def __init__(self, o, text, compiled, sharded=False):
        torch.manual_seed(1)
        self.o, self.text, self.device = o, text, torch.device(o.device)
        self.model = Gpt(o).to(self.device)
        gpu = self.device.type == 'cuda'
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=gpu)
        if sharded:
            import libshd.torch as sd  # of those that ask for it
            self.model, self.optimizer = sd.shard(self.model, self.optimizer, accumulate=o.micro_batches,
                                                  name=f'gpt-{compiled}', timeout=60)
        self.call = torch.compile(self.model) if compiled else self.model
        self.bf16 = o.precision == 'bf16'

    def batch(self):
        at = torch.randint(len(self.text) - self.o.seq - 1, (self.o.batch,))
        rows = torch.stack([self.text[i:i + self.o.seq + 1] for i in at.tolist()]).long()
        if self.device.type == 'cuda':
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def step(self):
        for _ in range(self.o.micro_batches):
            tokens, targets = self.batch()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.call(tokens, targets) / self.o.micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item() * self.o.micro_batches  # waits for the device


def read_text(paths):
    parts = []
    for path in paths:
        files = sorted(os.path.join(path, f) for f in os.listdir(path)) if os.path.isdir(path) else [path]
        for name in files:
            with open(name, 'rb') as f:
                parts.append(f.read())
    return torch.frombuffer(bytearray(b''.join(parts)), dtype=torch.uint8)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('layers', 12), ('dim', 768), ('heads', 12), ('seq', 1024), ('batch', 16),
                          ('micro-batches', 2)):
        p.add_argument(f'--{name}', type=int, default=default)
    p.add_argument('--data', action='append', default=[])
    p.add_argument('--device', default='cuda:0')
    p.add_argument('--precision', default='bf16', choices=('bf16', 'fp32'))
    o = p.parse_args()
    text = read_text(o.data or ['/usr/share/games/fortunes'])
    trainers = {}
    with torch.device('meta'):
        params = sum(x.numel() for x in Gpt(o).parameters())
    print(json.dumps({'ready': torch.__version__, 'params': params}), flush=True)
    for line in sys.stdin:
        words = line.split()
        if not words or words[0] == 'quit':
            break
        variant, steps = words[0], int(words[1])
        if variant not in trainers:
            trainers[variant] = Trainer(o, text, variant.endswith('compiled'), variant.startswith('shardd'))
        times, loss = [], None
        for _ in range(steps):
            start = time.perf_counter()
            loss = trainers[variant].step()
            times.append(time.perf_counter() - start)
        print(json.dumps({'variant': variant, 'step_s': times, 'loss': loss}), flush=True)


if __name__ == '__main__':
    main()
