#!/usr/bin/env python3
"""A classifier of small pictures, with DeepSpeed:  deepspeed --num_gpus 2 deepspeed_before.py

deepspeed_after.py is the same script with shardd; docs/pytorch.md has the lines that differ.
"""
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import deepspeed

ADAM = {'lr': 1e-3, 'betas': (0.8, 0.999), 'eps': 1e-8, 'weight_decay': 3e-7}
CONFIG = {'train_micro_batch_size_per_gpu': 16, 'optimizer': {'type': 'Adam', 'params': ADAM},
          'zero_optimization': {'stage': 3}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc_1, self.fc_2, self.fc_3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv_1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv_2(x)), 2).flatten(1)
        return self.fc_3(F.relu(self.fc_2(F.relu(self.fc_1(x)))))


class Pictures(Dataset):
    """Of CIFAR-10's size and number of classes: a pattern for each class, under noise."""

    def __init__(self, count):
        draw = torch.Generator().manual_seed(0)
        self.labels = torch.randint(10, (count,), generator=draw)
        self.pictures = torch.randn(10, 3, 32, 32, generator=draw)[self.labels] / 2
        self.pictures += torch.randn(count, 3, 32, 32, generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        return self.pictures[at], self.labels[at]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pictures', type=int, default=2000)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--local_rank', type=int, help='said by the launcher')
    o = parser.parse_args()
    torch.manual_seed(0)
    net, pictures = Net(), Pictures(o.pictures)
    engine, optimizer, loader, _ = deepspeed.initialize(model=net, training_data=pictures, config=CONFIG)
    for step, (images, labels) in zip(range(o.steps), loader):
        loss = F.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        if (step + 1) % 10 == 0:
            print(f'step {step + 1} loss {loss.item():.4f}', flush=True)
    with torch.no_grad():
        wrong = sum(int((engine(images).argmax(1) != labels).sum()) for images, labels in DataLoader(pictures, 100))
    print(f'{100 - 100 * wrong / len(pictures):.1f} % of the pictures are recognized')


if __name__ == '__main__':
    main()
