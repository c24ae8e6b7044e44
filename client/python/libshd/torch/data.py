"""Which samples are whose: a pure function of (seed, step, micro-batch), so there is nothing to save."""
from __future__ import annotations

from typing import Iterator, Sized

import torch
from torch import nn

from ..errors import InvalidArgument
from .check import check_count
from .engine import engine_of


class Sampler(torch.utils.data.Sampler):
    """Batches of this worker, from the open step on, for ever: DataLoader(data, batch_sampler=Sampler(…)).

    The step's batches are those of its micro-batches; each epoch is a permutation of its own. What a killed
    worker's successor draws, and what other numbers of workers draw, are the same batches. Where a step can have
    more micro-batches than it has (shard(micro_batches_max=)), those of the others are left out.
    """

    def __init__(self, module: nn.Module, data: Sized, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        self.engine, self.count, self.size = engine_of(module), len(data), batch_size
        self.seed, self.shuffle, self.micros = seed, shuffle, self.engine.model.micro_batches_max
        check_count('batch_size', batch_size, 1)
        if batch_size > self.count:
            raise InvalidArgument(f'batch_size={batch_size}: there are {self.count} samples')
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, step: int, micro: int) -> list[int]:
        """Indices of the samples of one micro-batch; an epoch's short rest is left out."""
        per_epoch = self.count // self.size
        epoch, at = divmod(step * self.micros + micro, per_epoch)
        if epoch != self._epoch:
            source = torch.Generator('cpu').manual_seed(self.seed * 1_000_003 + epoch)
            self._order = (torch.randperm(self.count, generator=source, device='cpu') if self.shuffle else
                           torch.arange(self.count, device='cpu'))
            self._epoch = epoch
        return self._order[at * self.size:(at + 1) * self.size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        step = self.engine.asked()
        while True:
            for backward in range(self.engine.place.accumulate):
                yield self.batch(step, self.engine.place.micro(backward))
            step += 1
