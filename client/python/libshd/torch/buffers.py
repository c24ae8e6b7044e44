"""Buffers that a module's forward updates: the owners keep the mean over each step's micro-batches.

A micro-batch begins with the owners' values, in buffers of the module's own; what its forward has made of them is
returned beside its gradients. So it does not matter which worker computed what, nor how many there are.
"""
from __future__ import annotations

import ctypes
from typing import Callable, Optional, Sequence, Union

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from .. import _c
from ..errors import Misuse, NotSupported
from ..session import Model
from .device import Device, Host
from .layout import Part, Unit, elems_of

Which = Union[str, Callable[[str, nn.Module], bool]]


def is_statistic(_name: str, module: nn.Module) -> bool:
    """Running statistics of PyTorch's BatchNorm and InstanceNorm. SyncBatchNorm's are alike in all workers."""
    return isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm)


def buffers_of(module: nn.Module, which: Which, group: int) -> list[Unit]:
    """The buffers that `which` names. Each module's are a unit: one that leaves its own alone (a layer in eval()) takes
    no part, and they keep all bits."""
    chosen = is_statistic if which == 'auto' else which
    if not callable(chosen):
        raise Misuse(f"buffers={which!r}: must be 'auto', or a function of name and module")
    modules = dict(module.named_modules())
    named: dict[str, list[Part]] = {}
    for name, buffer in module.named_buffers():
        path = name.rpartition('.')[0]
        if not buffer.numel() or not chosen(name, modules[path]):
            continue
        if buffer.dtype.is_complex or buffer.dtype == torch.bool:
            raise NotSupported(f'buffer {name!r} is {buffer.dtype}: there are means of numbers only; leave it out of '
                               'buffers=')
        named.setdefault(f'{path or type(module).__name__}:buffers', []).append(
            Part(name, buffer, modules[path], group, True))
    return [Unit(name, 0, parts, True) for name, parts in named.items()]


class Buffers:
    """Those of a module, and what the owners have of them at the open step."""

    def __init__(self, model: Model, units: Sequence[Unit], device: Device):
        self.model, self.units, self.device = model, units, device
        self.kept: dict[Unit, torch.Tensor] = {}   # the owners', fp32
        self.begun: dict[Unit, torch.Tensor] = {}  # what a micro-batch began with: those in the buffers' own types

    @staticmethod
    def tensor(part: Part) -> torch.Tensor:
        buffer = part.owner._buffers.get(part.key)
        if buffer is None or buffer.numel() != part.parameter.numel():
            raise Misuse(f'buffer {part.name!r} was taken out of the module after shard(), or is of another shape: '
                         'owners have it; make the module whole before shard()')
        return buffer

    def values(self, unit: Unit) -> torch.Tensor:
        """Of the unit, as they are in the module."""
        array = torch.zeros(elems_of(unit), dtype=torch.float32, device='cpu')
        for part in unit.parts:
            array[part.offset:part.offset + part.parameter.numel()] = self.tensor(part).detach().flatten()
        return array

    def read(self, unit: Unit, address: int) -> None:
        """The owners' values of an acquired unit, which is released; fp32, whatever parameters are published in."""
        try:
            values = torch.empty(self.model.unit_elems(unit.index), dtype=torch.float32, device='cpu')
            if self.model.dtype == _c.SHD_F32 and isinstance(self.device, Host):
                ctypes.memmove(values.data_ptr(), address, values.numel() * 4)
            else:
                self.model.get(unit.index, _c.SHD_PARAMS, values.data_ptr())
            self.kept[unit] = values
        finally:
            self.model.release(unit.index)

    @torch.no_grad()
    def restore(self) -> None:
        """Let the module's be the owners'."""
        for unit in self.units:
            array = self.kept[unit]
            for part in unit.parts:
                buffer = self.tensor(part)
                value = array[part.offset:part.offset + buffer.numel()].view(buffer.shape)
                # A backward does not ask for the running statistics of a forward in train(), and PyTorch would refuse
                # to go through such a graph (again): as where BatchNorm itself writes, nobody hears of it.
                to = buffer.data if isinstance(part.owner, _NormBase) and part.owner.training else buffer
                to.copy_(value if buffer.is_floating_point() else value.round())
            self.begun[unit] = self.values(unit)

    def changed(self, unit: Unit) -> Optional[torch.Tensor]:
        """What has become of the unit's; None: nothing, to the bit."""
        values = self.values(unit)
        return None if torch.equal(values.view(torch.int32), self.begun[unit].view(torch.int32)) else values

    def all_changed(self) -> dict[Unit, torch.Tensor]:
        """The units of which something has become something else."""
        return {unit: values for unit in self.units if (values := self.changed(unit)) is not None}

    def give(self, micro: int, tell: Callable[..., None]) -> None:
        """Return what a micro-batch has made of them."""
        for unit in self.units:
            values = self.changed(unit)
            if values is None:
                tell(self.model.return_none, micro, unit.index)
                continue
            parts = [values[part.offset:part.offset + part.parameter.numel()].view(part.parameter.shape)
                     for part in unit.parts]
            tell(self.device.give, self.model, micro, unit, parts, 1.0)
