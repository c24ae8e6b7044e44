"""What a sharded module does on forward and backward. Copies of the module (deepcopy, pickle) do nothing of it."""
from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import Misuse
from .engine import Engine
from .layout import Part, Unit


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile() ends its graph before such a call and begins another after it, as around FSDP2's."""
    @functools.wraps(hook)
    def called(*arguments: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch._dynamo.disable(hook, reason='a hook of libshd')(*arguments)
        return hook(*arguments)
    return called


class Inert:
    """What is left of a hook in a copy of its module."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Hook:
    """Knows its engine, and is Inert in a copy."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


class RootBegins(Hook):
    """Before the module's forward: what no layer of its own has is held from here on."""

    def __init__(self, engine: Engine, loose: list[Unit]):
        super().__init__(engine)
        self.loose = loose

    @untraced
    def __call__(self, *_: Any) -> None:
        self.engine.forward_begins()
        for unit in self.loose:
            self.engine.acquire(unit)


class RootEnds(Hook):
    """After it: its outputs' gradients are the first of a backward, also where that has others inside."""

    @untraced
    def __call__(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.engine.forward_ends()
        if self.engine.stream:
            for tensor in pytree.tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.begin)

    def begin(self, _grad: torch.Tensor) -> None:
        self.engine.begin()


class UnitBegins(Hook):
    """Before a layer's forward."""

    def __init__(self, engine: Engine, unit: Unit):
        super().__init__(engine)
        self.unit = unit

    @untraced
    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.engine.runs()
        self.engine.acquire(self.unit)


class UnitEnds(UnitBegins):
    """After it, where a unit is not kept until its backward."""

    @untraced
    def __call__(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.fetch)
        self.engine.release(self.unit)

    def fetch(self, _grad: torch.Tensor) -> None:
        self.engine.acquire(self.unit)


class Arrived(Hook):
    """A parameter's gradient is there."""

    def __init__(self, engine: Engine, unit: Unit, part: Part):
        super().__init__(engine)
        self.unit, self.part = unit, part

    def __call__(self, _parameter: nn.Parameter) -> None:
        self.engine.arrived(self.unit, self.part)


class Loads(Hook):
    """load_state_dict() would write where only the owners may."""

    def __call__(self, *_: Any) -> None:
        if not self.engine.writing:
            raise Misuse('load_state_dict() of a sharded module: write `with sd.writable(module): '
                         'module.load_state_dict(…)`, or load before shard()')


def add_hooks(module: nn.Module, engine: Engine) -> None:
    """All that a sharded module needs."""
    loose: list[Unit] = []
    roots: list[Unit] = []
    last: Optional[nn.Module] = None
    keep = engine.handles.append
    for unit in engine.units:
        layer = len(unit.modules) == 1 and unit.modules[0] is not module
        roots += [] if layer else [unit]
        # Units are updated in their order: at its begin a forward waits for those before the first layer alone, and
        # for others at the end of the layer before them: also where they are used without their module's forward.
        if not layer and (last is None or module in unit.modules):
            loose.append(unit)
            continue
        for inner in unit.modules:
            keep(inner.register_forward_pre_hook(UnitBegins(engine, unit)))
        if not layer:
            keep(last.register_forward_hook(UnitBegins(engine, unit)))
            continue
        last = unit.modules[0]
        if not engine.policy.holds(unit.name):
            keep(unit.modules[0].register_forward_hook(UnitEnds(engine, unit)))
    keep(module.register_forward_pre_hook(RootBegins(engine, loose)))
    for unit in roots if engine.policy.frees_root else []:
        keep(module.register_forward_hook(UnitEnds(engine, unit)))
    keep(module.register_forward_hook(RootEnds(engine)))
    for inner in module.modules():
        keep(inner.register_load_state_dict_pre_hook(Loads(engine)))
    if engine.stream:
        for unit in engine.trainable:
            for part in unit.parts:
                keep(part.parameter.register_post_accumulate_grad_hook(Arrived(engine, unit, part)))
