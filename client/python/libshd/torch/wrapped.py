"""What accelerate and trainers do with a module and an optimizer that are given to them: here, to ones of shard().

accelerate asks each thing whether it `_is_accelerate_prepared`. A sharded module says yes, so that it is wrapped
in nothing; an Optimizer says no, and looks at that moment whether all is as it has to be.
"""
from __future__ import annotations

import functools
import os
import time
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..errors import Gone, Misuse, NotSupported


class Prepared:
    """True for accelerate; a copy of the module is one like any other."""

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return False

    def __reduce__(self) -> Any:
        return bool, ()


class Face(nn.DataParallel):
    """A module that trainers take for wrapped already. Its class is one that they all know how to unwrap."""

    def __init__(self, module: nn.Module):
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


class Group:
    """The process group that workers have as well, for what their trainer gathers by itself. Who is gone from it cannot
    join it again, however often it is started: that is said, instead of being waited for."""
    GRACE_S = 3  # it may have ended well, and what it has returned be on its way

    def __init__(self, world: int):
        self.pids: list[int] = [0] * world
        torch.distributed.all_gather_object(self.pids, os.getpid())

    @classmethod
    def find(cls, world: int) -> Optional[Group]:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        if world == 1 or not there or torch.distributed.get_world_size() != world or \
                torch.distributed.get_backend() != 'gloo':
            return None
        return cls(world)

    def __call__(self) -> Callable[[], None]:
        begun = time.monotonic()

        def watch() -> None:
            gone = [f'{rank} (pid {pid})' for rank, pid in enumerate(self.pids) if not _lives(pid)]
            if gone and time.monotonic() > begun + self.GRACE_S:
                raise Gone(f'rank {" and ".join(gone)} of the process group is gone, and what is started in its place '
                           'cannot join it: end all workers and start them again; they go on at the open step')
        return watch


def _lives(pid: int) -> bool:
    try:
        with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a checkpoint of a trainer's has to have beside the owners': rates, where a schedule has moved them to."""
    return [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]


def set_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups):
        group.update(saved)


def meet_accelerate(world: int) -> None:
    """accelerate.prepare() has been given an Optimizer: look at what accelerate is set up for."""
    from accelerate import optimizer as theirs
    from accelerate.state import AcceleratorState
    state = AcceleratorState()
    kind = state.distributed_type.value
    if kind in ('FSDP', 'DEEPSPEED', 'MEGATRON_LM', 'XLA'):
        raise NotSupported(f'accelerate is set up for {kind}, which keeps the state itself: launch without it, and say '
                           'shard(**sd.from_fsdp(plugin)) or shard(**sd.from_deepspeed(config))')
    if state.mixed_precision != 'no':
        raise Misuse(f'Accelerator(mixed_precision={state.mixed_precision!r}) does not reach a sharded module: leave '
                     'it out and write `with torch.autocast("cpu", torch.bfloat16):` around the forward')
    if state.num_processes != world:
        raise Misuse(f'accelerate has {state.num_processes} processes, WORLD_SIZE is {world}: each worker would be '
                     'given the data of all; launch by torchrun, `accelerate launch` or `shardctl run`')
    _keep_state_where_it_is(theirs.AcceleratedOptimizer)


def _keep_state_where_it_is(kind: Any) -> None:
    """accelerate moves an optimizer's state to its device by way of state_dict(); it is with the owners."""
    plain = kind.__init__
    if getattr(plain, 'is_shd', False):
        return

    @functools.wraps(plain)
    def init(self: Any, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: Any = None) -> None:
        from .optimizer import Optimizer
        plain(self, optimizer, device_placement and not isinstance(optimizer, Optimizer), scaler)
    init.is_shd = True  # type: ignore[attr-defined]
    kind.__init__ = init
