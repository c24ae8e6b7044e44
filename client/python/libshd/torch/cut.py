"""What a rank of a group (parallel.py) has of a tensor of which the owners have all."""
from __future__ import annotations

import weakref
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from torch import nn

from ..errors import Gone, NotSupported


class Cut(NamedTuple):
    """Which part of a tensor a rank has: of so many along a dimension, as torch.chunk() makes them. None: all of it,
    as each of its neighbours has."""
    dim: Optional[int]
    at: int
    of: int

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.dim is None else self.pieces(whole)[self.at]

    def pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of all ranks; the last ones may be empty."""
        pieces = list(whole.chunk(self.of, self.dim))
        return pieces + [whole.narrow(self.dim, 0, 0)] * (self.of - len(pieces))


def is_cut(tensor: Any) -> bool:
    """Whether it is a DTensor, of which this rank has a part, or a copy."""
    return hasattr(tensor, '_local_tensor')


def local(p: torch.Tensor) -> torch.Tensor:
    """What of a parameter is here."""
    return p._local_tensor if is_cut(p) else p


def place(part: Any, whole: torch.Tensor) -> None:
    """Let a parameter be (its part of) these values, where they lie."""
    p = part.parameter
    if part.cut is None or not is_cut(p):
        if p.is_meta:
            _swap(part, whole)
        p.data = whole
    elif p.is_meta or p.dtype != whole.dtype:
        made = type(p).from_local(part.cut.own(whole), p.device_mesh, p.placements, run_check=False, shape=whole.shape,
                                  stride=whole.stride())
        _swap(part, made)
    else:
        p._local_tensor = part.cut.own(whole)


def _swap(part: Any, values: torch.Tensor) -> None:
    """PyTorch does so with nothing that anybody refers to weakly, as an RNN does to its own."""
    owner, weights = part.owner, [ref and ref() for ref in getattr(part.owner, '_flat_weight_refs', ())]
    if weights:
        owner._flat_weight_refs = []
    try:
        torch.utils.swap_tensors(part.parameter, nn.Parameter(values, part.trainable))
    except RuntimeError as e:
        raise NotSupported(f'{part.name!r}, of {type(owner).__name__}, is on the meta device, and cannot come to be in '
                           f'its place ({e}): drop what refers to it, or make it on the host') from None
    finally:
        if weights:
            owner._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def keep(p: torch.Tensor) -> None:
    """Let a parameter have what is here of it as its own."""
    values = local(p).detach().clone()
    if is_cut(p):
        p._local_tensor = values
    else:
        p.data = values


def refuse(engine: Any, what: str, instead: str) -> None:
    """Of what ranks of a group would have to do together."""
    if engine.ranks is not None:
        raise NotSupported(f'{what} by a rank of a group (mesh=): {instead}')


def apart(e: BaseException) -> NoReturn:
    """A step began again under a group: its ranks hear of that at different places, and would wait for each other."""
    raise Gone(f'{e}. The ranks of a group (mesh=) are in step with each other, and cannot begin a step again one by '
               'one: end the group and start it again, as torchrun --max-restarts does; it goes on at the open step') from e
