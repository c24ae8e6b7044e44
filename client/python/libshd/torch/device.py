"""Where a module's parameters and gradients are: in host memory, or in a GPU's.

On a GPU the library hands out addresses of it, and is told of the stream that PyTorch computes in: what is handed over
counts in that stream's order, so that backward() goes on without a wait for the GPU.
"""
from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Iterable, Iterator, Optional, Sequence, Union

import torch

from .. import _c
from ..errors import InvalidArgument, NotSupported
from ..session import Model
from .layout import Part, Unit, elems_of
from .policy import Policy

DTYPES = {torch.float32: _c.SHD_F32, torch.bfloat16: _c.SHD_BF16, torch.float16: _c.SHD_F16}
_C_TYPES = {torch.float32: ctypes.c_float, torch.bfloat16: ctypes.c_uint16, torch.float16: ctypes.c_uint16}
Grads = Sequence[Optional[torch.Tensor]]
_SLOTS_MAX = 64  # SHD_SLOTS_MAX


def tensor_at(address: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of host memory that is somebody else's."""
    return torch.frombuffer((_C_TYPES[dtype] * elems).from_address(address), dtype=dtype)


class Host:
    """The processors' memory."""
    name: Optional[str] = None  # of shd_options.device

    def __init__(self) -> None:
        self._parts: dict[Unit, Any] = {}  # structs for shd_return_parts()

    tensor = staticmethod(tensor_at)

    def slots(self, _units: Sequence[Unit], _policy: Policy) -> int:
        """Gradients on their way to each owner, 0: as many as the plan needs. They are read during a call."""
        return 0

    def check_path(self, model: Model, policy: Policy, codec: str) -> None:
        """In place: in the owners' memory; or decoded to memory that stays where it is."""
        if codec != 'none' and model.path == _c.SHD_PATH_COPY:
            if not policy.in_place:
                raise NotSupported(f'codec={codec!r} with {type(policy).__name__}: parameters are decoded to this '
                                   'process, and PyTorch needs them in place: say policy=sd.ZeRO2(), without bounds')
        elif model.path != _c.SHD_PATH_MAP:
            raise NotSupported('the daemons\' memory cannot be mapped here: PyTorch needs parameters in place')

    def computes(self, _model: Model) -> None:
        """A forward begins, or a step ends."""

    def give(self, model: Model, micro: int, unit: Unit, grads: Grads, scale: float) -> None:
        """Return a unit's gradients, times scale: of each part its own, None: zeros. Read during the call."""
        raw = self._parts.get(unit)
        if raw is None:
            raw = self._parts[unit] = (_c.shd_part * len(unit.parts))(
                *[_c.shd_part(size=ctypes.sizeof(_c.shd_part), tensor=part.index) for part in unit.parts])
        strides = []
        for grad, to in zip(grads, raw):
            if grad is None:
                to.data, to.dtype = None, _c.SHD_F32
                continue
            strides.append((ctypes.c_int64 * max(grad.dim(), 1))(*(grad.stride() or (1,))))
            to.data, to.dtype = grad.data_ptr(), DTYPES[grad.dtype]
            to.strides = None if grad.is_contiguous() else strides[-1]
        model.return_parts(micro, unit.index, raw, scale)


class _Memory:
    """Of a GPU, for PyTorch to take as it is. Two bytes are integers here: the interface has no bfloat16."""

    def __init__(self, address: int, elems: int, item_bytes: int):
        self.__cuda_array_interface__ = {'version': 3, 'shape': (elems,), 'strides': None, 'data': (address, False),
                                         'typestr': '<f4' if item_bytes == 4 else '<i2'}


class Cuda:
    """A GPU's memory. The library's arrays are there; start values, moments and puts are the host's."""

    def __init__(self, device: torch.device):
        self.device, self.name = device, f'cuda:{device.index}'
        self._stream: Any = None  # as the library knows it
        self._arrays: dict[tuple[int, int], torch.Tensor] = {}  # for gradients, by address and size

    def tensor(self, address: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the GPU's memory that is somebody else's."""
        found = torch.as_tensor(_Memory(address, elems, dtype.itemsize), device=self.device)
        if found.data_ptr() != address:
            raise NotSupported(f'PyTorch made a copy of memory of {self.name}: parameters have to be in place')
        return found.view(dtype)

    def slots(self, units: Sequence[Unit], policy: Policy) -> int:
        """As many as take no more memory than PyTorch's own gradients would: backward() is ahead of the GPU, and waits
        where there is no room for what it hands over."""
        if not policy.early:  # all at once, at the end
            return 0
        sizes = [elems_of(unit) for unit in units if unit.trainable]
        return max(2, min(_SLOTS_MAX, sum(sizes) // max(sizes)))

    def stream(self) -> Any:
        """PyTorch's, in which what is computed now is."""
        return torch.cuda.current_stream(self.device)

    def check_path(self, model: Model, policy: Policy, _codec: str) -> None:
        """In place: in the owner's memory, if it is this GPU's, or in copies that stay where they are."""
        if model.path == _c.SHD_PATH_MAP:
            return
        if model.path != _c.SHD_PATH_COPY:
            raise NotSupported(f'{self.name} and the daemons\' GPUs cannot copy from each other but by NCCL: PyTorch '
                               'needs parameters in place')
        if not policy.in_place:
            raise NotSupported(f'{type(policy).__name__} where not one daemon on {self.name} has all of the model: '
                               'parameters are copied there, and PyTorch needs them in place: say '
                               'policy=sd.ZeRO2(), without bounds')

    def computes(self, model: Model) -> None:
        """What follows is in the order of PyTorch's stream."""
        stream = self.stream()
        if self._stream is None or stream.cuda_stream != self._stream.cuda_stream:
            model.set_stream(stream.cuda_stream)
            self._stream = stream

    @contextlib.contextmanager
    def _in_order(self, grads: Grads) -> Iterator[None]:
        """In the stream that the library knows. Hooks may run in another one, where a parameter was used first."""
        stream = self.stream()
        if stream.cuda_stream == self._stream.cuda_stream:
            yield
            return
        self._stream.wait_stream(stream)
        for grad in grads:
            if grad is not None and grad.is_cuda:  # buffers' values are the host's
                grad.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    @torch.no_grad()
    def give(self, model: Model, micro: int, unit: Unit, grads: Grads, scale: float) -> None:
        """As Host.give(), but the GPU reads them later, in its stream's order."""
        address, elems = model.grad(micro, unit.index), elems_of(unit)
        array = self._arrays.get((address, elems))
        if array is None:
            array = self._arrays[address, elems] = self.tensor(address, elems, torch.float32)
        with self._in_order(grads):
            for part, grad in zip(unit.parts, grads):
                to = array[part.offset:part.offset + part.parameter.numel()].view(part.parameter.shape)
                if grad is None:
                    to.zero_()
                    continue
                to.copy_(grad)
                if scale != 1:
                    to.mul_(scale)
        model.return_grad(micro, unit.index)


Device = Union[Host, Cuda]


def device_of(parts: Iterable[Part], wanted: Any = None) -> Device:
    """Where all parameters are; those of the meta device come to be there, or where it is wanted."""
    found: dict[torch.device, str] = {}
    for part in parts:
        if not part.parameter.is_meta:
            found.setdefault(part.parameter.device, part.name)
    if len(found) > 1:
        (first, one), (second, other) = list(found.items())[:2]
        raise NotSupported(f'{one!r} is on {first}, {other!r} on {second}: all parameters must be on one '
                           'device; a worker has one GPU')
    try:
        device = torch.device(wanted) if wanted is not None else next(iter(found), torch.device('cpu'))
    except (RuntimeError, TypeError) as e:
        raise InvalidArgument(f"device={wanted!r}: must be 'cpu', 'cuda' or 'cuda:N' ({e})") from None
    if device.type not in ('cpu', 'cuda'):
        raise NotSupported(f'parameters on {device}: owners know of host memory and of CUDA')
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise NotSupported(f'device={str(device)!r}: PyTorch has no CUDA here')
        device = torch.device('cuda', torch.cuda.current_device() if device.index is None else device.index)
    if wanted is not None and any(there != device for there in found):
        raise InvalidArgument(f'device={str(device)!r}, and {next(iter(found.values()))!r} is on {next(iter(found))}: '
                              'it is for modules on the meta device; move the module before shard()')
    return Host() if device.type == 'cpu' else Cuda(device)
