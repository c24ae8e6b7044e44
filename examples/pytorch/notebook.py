# %% [markdown]
# A session at a notebook: attach, train, look, change the script, go on. The state is with the daemons, so a cell
# (or the whole kernel) may be run again, edited or killed: the next one goes on at the open step, with Adam's moments.
# Run the cells one by one, or all of them: python3 notebook.py

# %% Attach. `up:2` starts two daemons, unless yours are up; they stay until `shardctl down`.
import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import libshd.torch as sd

ADDRESS = os.environ.get('SHARDD_ADDRESS', 'up:2')


class Net(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.activation = activation

    def forward(self, x):
        return self.last(self.activation(self.second(self.activation(self.first(x)))))


def batch(step):
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(step)) * 4 - 2
    return x, (x[:, :1] * 2).sin() * x[:, 1:].cos()


def train(model, optimizer, steps, loss_of):
    for step in range(sd.step_of(model), sd.step_of(model) + steps):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    print(f'step {step + 1} loss {F.mse_loss(model(x), y).item():.4f}')


torch.manual_seed(1)
model = Net(torch.tanh)
model, optimizer = sd.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), name='notebook', address=ADDRESS)
print(f'attached at step {sd.step_of(model)}')

# %% Train for a while. Run this cell as often as you like.
train(model, optimizer, 100, F.mse_loss)

# %% Look, here or in any other process, without holding anybody up.
with sd.reader(ADDRESS, name='notebook') as looking, looking.snapshot() as values:
    for name, value in values.items():
        print(f'step {values.step} {name:14} {str(tuple(value.shape)):10} norm {value.norm():.3f}')
    probe = torch.tensor([[0.5, 0.5]])
    print(f'at (0.5, 0.5): {torch.func.functional_call(Net(torch.tanh), values, probe).item():.3f}, '
          f'in truth {math.sin(1.0) * math.cos(0.5):.3f}')

# %% Change the script: another loss, a smaller rate. Let go, attach anew: parameters and moments are warm.
sd.close(model)
model = Net(torch.tanh)
model, optimizer = sd.shard(model, torch.optim.AdamW(model.parameters(), lr=2e-3), name='notebook', address=ADDRESS)
print(f'attached at step {sd.step_of(model)}')
train(model, optimizer, 100, F.smooth_l1_loss)

# %% Keep it: a checkpoint, whose weights are safetensors; then let go. `shardctl top` shows what is there.
print('saved', sd.save(model, os.environ.get('NOTEBOOK_DIR', 'notebook-checkpoints')))
sd.close(model)
