"""The optimizer's face: param_groups are the very ones of the optimizer it is made of, the work is the owners'."""
from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import Misuse, NotSupported
from ..session import Result
from .check import number_of
from .engine import ENGINES, Engine
from .guard import Shared
from .state import load_optimizer_state, optimizer_state
from .wrapped import meet_accelerate


class Step(NamedTuple):
    """What a step came to. metrics: means over its micro-batches that reported any; with loss='sum' over the sum of
    `weight`."""
    step: int
    grad_norm: float
    skipped: bool
    metrics: dict[str, float]
    guard: str = ''  # why the model's guard skipped it: 'norm_above 100 (12345.6)'
    stopped: bool = False  # by its guard: the next step() raises sd.Stopped
    cause: str = ''  # of a skipped step: its unit with the largest norm, or the first not finite: 'h.3 (12000)'
    cause_micro: int = -1  # with guard_audit: the micro-batch that brought most of it; -1: not known

    @property
    def loss(self) -> Optional[float]:
        return self.metrics.get('loss')


class Optimizer(torch.optim.Optimizer):
    """Schedulers that move the groups of the original go on doing so; their rates are those of each step."""

    sharded: Callable[..., Optimizer]  # fsdp.py's

    def __new__(cls, of: Any, original: torch.optim.Optimizer, **flags: Any) -> Optimizer:
        """Optimizer(model, optimizer, …) of a module of fully_shard() shards it; arguments are those of shard()."""
        return super().__new__(cls) if isinstance(of, Engine) else cls.sharded(of, original, **flags)

    def __init__(self, engine: Any, original: torch.optim.Optimizer, **_: Any):
        if not isinstance(engine, Engine):
            return  # sharded() has made it
        super().__init__(original.param_groups, original.defaults)
        engine.optimizer = weakref.ref(self)
        self.param_groups, self.state = original.param_groups, original.state
        self._fixed = [_fixed_of(group) for group in self.param_groups]
        self._still = [False] * len(self._fixed)  # groups whose last step was without momentum
        for kind in _HOOKS:  # those that the original has, and will be given, are of its step
            setattr(self, kind, getattr(original, kind))
        self.engine, self.original = engine, original
        self.last: Optional[Step] = None
        # Who goes on calling the original means this. (A scheduler that has wrapped its step() asks for the mark.)
        def step(*arguments: Any, **named: Any) -> Any:
            return self.step(*arguments, **named)
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        original.step, original.zero_grad = step, self.zero_grad
        original.add_param_group = self.add_param_group
        if engine.step:  # schedulers ask that, and steps that others have made are steps
            self._opt_called = original._opt_called = True
        _patch()

    @staticmethod
    def _rates(group: dict[str, Any]) -> tuple[float, float, float, float]:
        """Learning rate, weight decay, and both betas, or a momentum and nothing; Adafactor has neither."""
        none = float('nan')
        beta1, beta2 = group.get('betas', (group.get('momentum', none if 'beta2_decay' in group else 0.0), none))
        rates = {'lr': group['lr'], 'weight_decay': group['weight_decay'], 'betas or momentum': beta1, 'betas': beta2}
        lr, decay, beta1, beta2 = (number_of(f'{key} of a group', value) for key, value in rates.items())
        return lr, decay, beta1, beta2

    def step(self, closure: Optional[Callable[[], Any]] = None, *, idle: bool = False) -> Any:
        """idle: this worker has no data in this step."""
        self.engine.check_open()
        self._check_groups()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.original._opt_called = True  # schedulers ask that
        if self.engine.leased is not None:  # one of the step's micro-batches; leases() ends the step
            self.engine.settle(idle)
            if not self.engine.backwards:
                self.engine.give_none(self.engine.leased)
            self.engine.backwards, self.engine.leased, self.engine.ran = 0, None, False
        else:
            self._note(self.engine.commit(*self.rates(), idle))
        self._still = [group.get('momentum') == 0 and 'ns_steps' not in group for group in self.param_groups]
        return loss

    def _check_groups(self) -> None:
        """What the owners have been told of the groups at shard(), and is not of each step."""
        for at, (group, was) in enumerate(zip(self.param_groups, self._fixed)):
            now = _fixed_of(group)
            if now['params'] != was['params']:
                raise Misuse(f'the parameters of param_groups[{at}] are not those of shard(): owners know which group '
                             'each is in; make the groups before shard()')
            for key in (key for key in was if now[key] != was[key]):
                raise Misuse(f"param_groups[{at}][{key!r}] is {group.get(key)}, at shard() it was {was[key]}, and "
                             'owners have it from there on (lr, weight_decay, betas and momentum may move): set it '
                             'before shard(), for a model of another name')
            if group.get('momentum') and self._still[at]:
                raise Misuse(f"param_groups[{at}]['momentum'] is {group['momentum']} after steps with 0: PyTorch would "
                             'begin with the next gradient, owners have summed all of them; begin with a momentum '
                             'above 0')
        if len(self.param_groups) != len(self._fixed):
            raise Misuse(f'the optimizer has {len(self.param_groups)} param_groups, at shard() it had '
                         f'{len(self._fixed)}: make them before shard()')

    def finish(self) -> None:
        """The step of leases() is over: decide it, or learn how it was decided."""
        self._note(self.engine.decide(*self.rates()))

    def rates(self) -> tuple[float, list[tuple[float, float, float, float]]]:
        rates = [self._rates(group) for group in self.param_groups]
        return rates[0][0], rates

    def _note(self, result: Result) -> None:
        engine = self.engine
        if result.over:  # others ended it, and more is not known here
            self.last = Step(result.step - engine.model.puts, float('nan'), False, {})
            return
        total = result.metrics[0] if engine.weighted else result.reported or engine.model.micro_batches
        self.last = Step(result.step - engine.model.puts, result.grad_norm, result.skipped,
                         {name: total if engine.weighted and not at else result.metrics[at] / total
                          for at, name in enumerate(engine.names)},
                         f'{result.guard} {result.guard_bound:g} ({result.guard_value:g})' if result.guard else '',
                         result.stopped,
                         f'{result.cause_unit} ({result.cause_norm:g})' if result.cause_unit else '',
                         result.cause_micro)
        engine.forget_names()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before step() it drops the step's gradients, also those that the owners have; also of other workers, who
        compute theirs again (sd.StepReset). After step() there is nothing to do."""
        engine = self.engine
        if torch._C._current_graph_task_id() == -1 and (
                engine.open or engine.spoilt or engine.backwards or engine.sealed):
            # In many loops this stands between a forward and its backward.
            engine.reset(buffers=engine.open or bool(engine.spoilt) or engine.forward != 'done')
        engine.drop()
        if not engine.elastic:  # the norm was to be of what is dropped
            engine.clip_norm, engine.norms = 0.0, []

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """At the coming step the gradient's norm is at most this. What is returned has the norm after step()."""
        norm = torch.full((), float('nan'), dtype=torch.float32, device='cpu')
        self.engine.clip(max_norm, norm)
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, 'engine'):
            raise Misuse('add_param_group() after shard(): owners have the parameters that the module had; '
                         'make optimizer and module whole first')
        super().add_param_group(param_group)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """accelerate asks in prepare()."""
        meet_accelerate(self.engine.place.world)
        return False

    def state_dict(self) -> dict[str, Any]:
        """In PyTorch's layout, whole tensors: a plain optimizer of the same kind and groups can load it. Between
        two steps."""
        # Hooks that come after see the whole of it.
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            packed = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        packed = optimizer_state(self, packed)
        for hook in hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What state_dict() gave, here or of a plain optimizer: moments and number of updates to the owners (a put,
        as writable() is), rates to the groups, in place."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        load_optimizer_state(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks before it looks for gradients, which have left."""
        raise Misuse('torch.amp.GradScaler with an optimizer of shard(): workers would skip steps each by itself; use '
                     'sd.GradScaler()')

    def __reduce__(self) -> Any:
        raise Misuse('an Optimizer of shard() cannot be pickled: state_dict() can, and sd.save(module, directory) '
                     'saves parameters, too')


# What of a group the owners are told once. `momentum` may move, but not from nothing: there are no arrays for it.
_FIXED = ('eps', 'nesterov', 'dampening', 'amsgrad', 'maximize', 'differentiable', 'decoupled_weight_decay',
          'ns_coefficients', 'ns_steps', 'adjust_lr_fn', 'beta2_decay', 'd')
_HOOKS = ('_optimizer_step_pre_hooks', '_optimizer_step_post_hooks', '_optimizer_state_dict_pre_hooks',
          '_optimizer_state_dict_post_hooks', '_optimizer_load_state_dict_pre_hooks',
          '_optimizer_load_state_dict_post_hooks')


def _fixed_of(group: dict[str, Any]) -> dict[str, Any]:
    return {'params': [id(p) for p in group['params']], **{key: group[key] for key in _FIXED if key in group}}


# -- torch.nn.utils.clip_grad_norm_ and its like ---------------------------------------------------

_plain_clip = clip_grad._clip_grads_with_norm_
_plain_value = clip_grad.clip_grad_value_
_plain_norm = clip_grad._get_total_norm
_asked = threading.local()


def _engines(parameters: Any) -> list[Engine]:
    wanted = {id(p) for p in parameters}
    return [engine for engine in ENGINES.values()
            if any(id(part.parameter) in wanted for unit in engine.trainable for part in unit.parts)]


def _clip_with_norm(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: Any = None) -> None:
    """What clip_grad_norm_() ends with: by now it has found that the parameters have no gradients."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    engines = _engines(parameters)
    if not engines:
        _plain_clip(parameters, max_norm, total_norm, foreach)
        return
    if getattr(_asked, 'nonfinite', False):
        raise NotSupported('clip_grad_norm_(error_if_nonfinite=True) of a sharded module: the norm is known after '
                           'step(), and a step whose gradients are not finite is skipped (optimizer.last.skipped); '
                           'leave it out')
    if getattr(_asked, 'norm_type', 2.0) != 2.0:
        raise NotSupported(f'clip_grad_norm_(norm_type={_asked.norm_type}) of a sharded module: owners have the 2-norm')
    mine = {part.parameter for unit in engines[0].trainable for part in unit.parts}
    if len(engines) > 1 or mine - set(parameters) or {p for p in parameters if p.requires_grad and p.numel()} - mine:
        raise Misuse('clip_grad_norm_() of a part of a sharded module\'s parameters, or of more: the norm is that of '
                     'all; give it module.parameters()')
    total_norm.fill_(float('nan'))
    engines[0].clip(max_norm, total_norm)


def _total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
                foreach: Any = None) -> torch.Tensor:
    """What clip_grad_norm_() begins with. The kind of norm is heard of here only."""
    _asked.norm_type, _asked.nonfinite = float(norm_type), error_if_nonfinite
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    # Of a rank's part of a model no norm is needed, nor can torch form one of tensors that are cut and others.
    parts = {id(grad) for engine in ENGINES.values() if engine.ranks is not None for grad in engine.grads().values()}
    if parts.issuperset(map(id, tensors)):
        tensors = []
    return _plain_norm(tensors, norm_type, error_if_nonfinite, foreach)


def _clip_value(parameters: Any, clip_value: float, foreach: Any = None) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if _engines(parameters):
        raise NotSupported('clip_grad_value_() of a sharded module: gradients are with the owners, which clip by '
                           'norm; use clip_grad_norm_()')
    _plain_value(parameters, clip_value, foreach)


def _strange_step(optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
    """Before each optimizer's step(): it would find no gradients, and do nothing."""
    if isinstance(optimizer, Optimizer) or not ENGINES:
        return
    # DTensors of ranks say nothing by themselves.
    names = {id(part.parameter): part.name for engine in ENGINES.values() if engine.ranks is not None
             for part in engine.parts()}
    for p in (p for group in optimizer.param_groups for p in group['params'] if isinstance(p, Shared) or id(p) in names):
        name = p.shd_name if isinstance(p, Shared) else names[id(p)]
        raise Misuse(f'{type(optimizer).__name__}.step() of {name!r}, which another optimizer was given to '
                     'shard() with: owners update it; one optimizer for a sharded module, with param_groups where '
                     'rates differ')


_plain_zero = torch.nn.Module.zero_grad


def _zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
    """Of a sharded module (or one around it) gradients have left: what its optimizer does."""
    _plain_zero(module, set_to_none)
    for inner in module.modules() if ENGINES else ():
        if (engine := ENGINES.get(inner)) is not None and (optimizer := engine.optimizer()) is not None:
            optimizer.zero_grad()


def _patch() -> None:
    """Where a program has imported clip_grad_norm_ before does not matter: its last part is looked up."""
    if torch.nn.Module.zero_grad is not _zero_grad:
        register_optimizer_step_pre_hook(_strange_step)
    torch.nn.Module.zero_grad = _zero_grad  # type: ignore[method-assign]
    clip_grad._get_total_norm = _total_norm
    clip_grad._clip_grads_with_norm_ = _clip_with_norm
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = _clip_value
