"""fully_shard() in FSDP2's manner: modules are marked, and sd.Optimizer(model, optimizer) shards what is marked.

    from libshd.torch import fully_shard, Optimizer
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = Optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

Until then the module is an ordinary one: it may be loaded, filled or cast, but not trained.
"""
from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import InvalidArgument, Misuse, NotSupported
from .api import shard
from .check import number_from
from .engine import ENGINES, engine_of
from .hooks import Inert
from .optimizer import Optimizer
from .policy import ZeRO3


@dataclasses.dataclass(eq=False)
class _Mark:
    """What fully_shard() was told of a module."""
    group: object             # alike in all modules of one call, which are a unit
    reshard: Optional[bool]   # None: as FSDP2 has it, all but the root
    mixed: Any                # MixedPrecisionPolicy
    forward: Optional[int] = None   # units fetched ahead, if that was said
    backward: Optional[int] = None
    guard: Any = None         # the handle of its _Untrained


MARKS: weakref.WeakKeyDictionary[nn.Module, _Mark] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _PerUnit(ZeRO3):
    """What a worker holds when, said for each unit."""
    kept: frozenset[str] = frozenset()
    frees_root: bool = False

    def holds(self, unit: str) -> bool:
        return unit.removesuffix(':frozen') in self.kept


def fully_shard(module: Union[nn.Module, Sequence[nn.Module]], *, mesh: Any = None,
                reshard_after_forward: Union[bool, int, None] = None, shard_placement_fn: Any = None,
                mp_policy: Any = None, offload_policy: Any = None, ignored_params: Any = None,
                dp_mesh_dims: Any = None) -> Any:
    """Mark a module as a unit, or a list of modules as one; the model itself last. Its arguments are FSDP2's.

    mesh                   None, or one dimension with all workers
    reshard_after_forward  True frees the unit after its forward (None: all but the root's own), False keeps it
    mp_policy              param_dtype is what owners publish, beside their fp32; inputs and outputs are cast
    offload_policy         state is in the daemons' host memory with any
    """
    _refuse(mesh, reshard_after_forward, offload_policy, shard_placement_fn=shard_placement_fn,
            ignored_params=ignored_params, dp_mesh_dims=dp_mesh_dims)
    _check_mixed(mp_policy)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    group = object()
    for one in modules:
        if one in ENGINES or one in MARKS:
            raise Misuse(f'{type(one).__name__} is sharded already')
        mark = MARKS[one] = _Mark(group, reshard_after_forward, mp_policy)
        mark.guard = one.register_forward_pre_hook(_Untrained())
        plain = type(one)
        one.__class__ = type(plain.__name__, (FSDPModule, plain), {'shd_plain': plain, '__module__': plain.__module__})
    return module


def _refuse(mesh: Any, reshard: Any, offload: Any, **others: Any) -> None:
    """What is not honoured, by its name."""
    why = {'shard_placement_fn': 'parameters are whole tensors here, daemons cut them between themselves',
           'ignored_params': 'freeze them by requires_grad_(False), or keep them out of the module',
           'dp_mesh_dims': 'a step is of all workers'}
    for name, value in others.items():
        if value is not None:
            raise NotSupported(f'fully_shard({name}=…): {why[name]}; leave it out')
    if mesh is not None:
        world = number_from('WORLD_SIZE', 1)
        if mesh.ndim != 1:
            raise NotSupported(f'fully_shard(mesh=…) of {mesh.ndim} dimensions: daemons hold one copy of the '
                               'parameters for all workers, so none is replicated; leave it out. Tensor and pipeline '
                               'parallel workers give theirs to sd.shard(mesh=)')
        if mesh.size() != world:
            raise NotSupported(f'fully_shard(mesh=…) of {mesh.size()} ranks: a step is of all WORLD_SIZE={world} '
                               'workers; leave it out')
    if reshard not in (None, True, False) or type(reshard) is int:
        raise NotSupported(f'fully_shard(reshard_after_forward={reshard!r}): workers hold nothing for each other; say '
                           'True (free a unit after its forward) or False (keep it)')
    if offload is not None and type(offload).__name__ not in ('OffloadPolicy', 'CPUOffloadPolicy'):
        raise NotSupported(f'fully_shard(offload_policy={offload!r}): state is in host memory, as CPUOffloadPolicy() '
                           'says; leave it out')


def _check_mixed(policy: Any) -> None:
    if policy is None:
        return
    if policy.param_dtype_override_fn is not None:
        raise NotSupported('MixedPrecisionPolicy(param_dtype_override_fn=…): all parameters have one type; leave it '
                           'out')
    if policy.reduce_dtype not in (None, torch.float32):
        raise NotSupported(f'MixedPrecisionPolicy(reduce_dtype={policy.reduce_dtype}): owners sum gradients in '
                           'float32; leave it out')


def _sharded(module: nn.Module, original: torch.optim.Optimizer, **flags: Any) -> Optimizer:
    """Shard what is marked: Optimizer(model, original) of a module of fully_shard()."""
    inside = dict(module.named_modules())
    marks = {path: MARKS[inner] for path, inner in inside.items() if inner in MARKS}
    if '' not in marks:
        raise Misuse(f'{type(module).__name__} was not given to fully_shard(): call that for the model too, after its '
                     'layers, or sd.shard(model, optimizer)')
    if refused := {'policy', 'units', 'publish'} & set(flags):
        raise Misuse(f'Optimizer({refused.pop()}=…) of a module of fully_shard(), which says that itself')
    root = marks['']
    if len({mark.mixed.param_dtype if mark.mixed else None for mark in marks.values()}) > 1:
        raise NotSupported('MixedPrecisionPolicy(param_dtype=…) differs between modules: all parameters have one '
                           'type')
    names = _names(marks)
    kept = frozenset(names[path] for path, mark in marks.items() if mark.reshard is False)
    ahead = [mark.forward for mark in marks.values() if mark.forward is not None]
    back = [mark.backward for mark in marks.values() if mark.backward is not None]
    policy = _PerUnit(kept=kept, frees_root=root.reshard is True, forward_prefetch=max(ahead, default=1),
                      prefetch='pre' if max(back, default=1) else 'none')
    shard(module, original, policy=policy, units=_rule(names), publish=root.mixed.param_dtype if root.mixed else None,
          **flags)
    for path, mark in marks.items():
        mark.guard.remove()
        _add_casts(inside[path], mark.mixed)
    return engine_of(module).optimizer()


Optimizer.sharded = staticmethod(_sharded)


def _names(marks: dict[str, _Mark]) -> dict[str, str]:
    """Of each marked module's unit: its path; of several the first one's, and how many more. A process that has marked
    others before has the same."""
    together: dict[object, list[str]] = {}
    for path, mark in marks.items():
        together.setdefault(mark.group, []).append(path)
    return {path: f'{paths[0]}+{len(paths) - 1}' if len(paths) > 1 else path
            for paths in together.values() for path in paths}


def _rule(names: dict[str, str]) -> Callable[[str, nn.Module], str]:
    """A parameter is of the innermost marked module's unit; what is the root's alone forms units of neighbours."""
    def unit_of(name: str, _module: nn.Module) -> str:
        path = name.rpartition('.')[0]
        while path not in names:
            path = path.rpartition('.')[0]
        return names[path]
    return unit_of


# -- Mixed precision at a module's borders ------------------------------------------------------------

class _Casts:
    """Floating-point tensors to a type. Stays with copies of the module, whose parameters have that type, too."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def cast(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, values)


class _CastsInputs(_Casts):
    def __call__(self, _module: nn.Module, arguments: Any, named: Any) -> Any:
        return self.cast(arguments), self.cast(named)


class _CastsOutputs(_Casts):
    def __call__(self, _module: nn.Module, _arguments: Any, outputs: Any) -> Any:
        return self.cast(outputs)


def _add_casts(module: nn.Module, policy: Any) -> None:
    if policy is None:
        return
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(_CastsInputs(policy.param_dtype), with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(_CastsOutputs(policy.output_dtype))


# -- What a marked module can do ----------------------------------------------------------------------

class _Untrained:
    """Before a marked module's forward, until its optimizer is given away as well."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            raise Misuse(f'{type(module).__name__} was given to fully_shard(), its optimizer not yet to '
                         'sd.Optimizer(model, optimizer): each worker would train a model of its own')


class _Whole:
    """What unshard(async_op=True) returns: parameters are always there whole."""

    def wait(self) -> None:
        """Nothing is on its way."""


class FSDPModule:
    """The calls of FSDP2's modules. Copies of a module (deepcopy, pickle) are of its own class again."""
    shd_plain: type = nn.Module

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, (_, *arguments), *rest = super().__reduce_ex__(max(2, protocol))
        return (make, (self.shd_plain, *arguments), *rest)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients stay in p.grad, and the next backward() after True hands over the sum."""
        if not recurse:
            raise NotSupported('set_requires_gradient_sync(recurse=False): a micro-batch is of the whole model')
        engine_of(self).quiet = not requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing waits for the last one here."""

    def unshard(self, async_op: bool = False) -> Optional[_Whole]:
        """Parameters are always there whole."""
        return _Whole() if async_op else None

    def reshard(self) -> None:
        """A worker holds nothing of its own."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """As the argument of fully_shard()."""
        for module in self.modules() if recurse else [self]:
            if module in MARKS:
                _open_mark(module, 'set_reshard_after_forward').reshard = bool(reshard_after_forward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The most that is said for any module is how many units are fetched ahead of each."""
        _open_mark(self, 'set_modules_to_forward_prefetch').forward = len(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """One ahead, or none."""
        if len(modules) > 1:
            raise NotSupported(f'set_modules_to_backward_prefetch() of {len(modules)} modules: backward fetches one '
                               'unit ahead; give it one')
        _open_mark(self, 'set_modules_to_backward_prefetch').backward = len(modules)


def _open_mark(module: nn.Module, what: str) -> _Mark:
    if not any(isinstance(hook, _Untrained) for hook in module._forward_pre_hooks.values()):
        raise Misuse(f'{what}() after sd.Optimizer(model, optimizer): call it before')
    return MARKS[module]


def _refused(name: str, why: str) -> Callable[..., None]:
    def refuse(_self: nn.Module, *_: Any, **__: Any) -> None:
        raise NotSupported(f'{name}(): {why}')
    refuse.__name__ = name
    return refuse


for _name, _why in {
        'set_requires_all_reduce': 'daemons hold one copy of the parameters, there is none to reduce to',
        'set_reshard_after_backward': 'a worker holds no parameters of its own; leave it out',
        'set_gradient_divide_factor': 'a step is the mean of its micro-batches',
        'set_reduce_scatter_divide_factor': 'a step is the mean of its micro-batches',
        'set_all_reduce_hook': 'gradients are summed by the daemons; look at them with grads="step"',
        'set_custom_all_gather': 'there are no collectives',
        'set_custom_reduce_scatter': 'there are no collectives',
        'set_manual_backward_finalization': 'a backward ends by itself',
        'set_post_optim_event': 'the update is made by the daemons, step() waits for it (overlap=False)'}.items():
    setattr(FSDPModule, _name, _refused(_name, _why))
