"""Looking at a model while others train it."""
from __future__ import annotations

import contextlib
import ctypes
import json
from typing import Iterator, Optional

import torch

from .. import _c
from . import attach

_TYPES = {_c.SHD_F32: torch.float32, _c.SHD_BF16: torch.bfloat16, _c.SHD_F16: torch.float16}


class Snapshot(dict[str, torch.Tensor]):
    """Parameters by name, all of one step."""
    step = 0


class Reader:
    """A model that others train. Nobody waits for a reader."""

    def __init__(self, address: Optional[str], name: Optional[str], timeout: float):
        self.session = attach.connect(address, 'reader', timeout, reader=True)
        self.model = self.session.attach(name, timeout)
        tensors = [tensor for unit in json.loads(self.model.spec)['units'] for tensor in unit['tensors']]
        self.shapes: dict[str, tuple[int, ...]] = {tensor['name']: tuple(tensor['shape']) for tensor in tensors}

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """The parameters of one step, copied; `step` says which. For torch.func.functional_call(module, them, x)."""
        dtype = _TYPES[self.model.dtype]
        arrays = [torch.empty(self.model.unit_elems(unit), dtype=dtype, device='cpu')
                  for unit in range(len(self.model.unit_names()))]
        found = Snapshot()
        found.step = self.model.read_step([array.data_ptr() for array in arrays])
        found.update(self._whole({
            tensor.name: arrays[tensor.unit][tensor.offset_elems:tensor.offset_elems + tensor.elems]
            for tensor in self.model.tensors()}))
        yield found
        found.clear()

    @contextlib.contextmanager
    def pinned(self, step: int = 0, every: int = 0, ema: bool = False) -> Iterator[Snapshot]:
        """The same without a copy (of what is not in tiles): the latest step, or the first possible one from `step` on
        (of those that `every` divides), kept by the owners meanwhile; with `ema` their moving average. Nobody may write
        to these tensors: the process would end."""
        found = Snapshot()
        found.step = self.model.pin(step, every=every, wait=True, ema=ema)
        try:
            dtype = _TYPES[self.model.dtype]
            flat = {}
            for tensor in self.model.tensors():
                start = self.model.pinned(tensor.unit) + tensor.offset_elems * dtype.itemsize
                raw = (ctypes.c_uint8 * (tensor.elems * dtype.itemsize)).from_address(start)
                flat[tensor.name] = torch.frombuffer(raw, dtype=dtype)
            found.update(self._whole(flat))
            yield found
        finally:
            found.clear()
            self.model.unpin()

    def _whole(self, flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of tensors in tiles ('w/0', 'w/1', ...) the whole ones, copied."""
        rows: dict[str, list[torch.Tensor]] = {}
        for name, values in flat.items():
            rows.setdefault(name.partition('/')[0], []).append(values)
        return {name: (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.shapes[name])
                for name, parts in rows.items() if name in self.shapes}  # and not an optimizer's statistics

    def close(self) -> None:
        """Let go of the daemons."""
        self.session.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reader(address: Optional[str] = None, name: Optional[str] = None, timeout: float = 60) -> Reader:
    """Attach to a model (None: the only one) without training it; it is waited for so many seconds:

        with sd.reader() as r, r.snapshot() as params:
            y = torch.func.functional_call(module, params, x)
    """
    return Reader(address, name, timeout)
