"""GradScaler: torch.amp's calls, with the scale where the model is."""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import Misuse, NotSupported
from .engine import ENGINES, Engine, engine_of
from .optimizer import Optimizer

# The owners' way: of a step's gradients they see whether one is not finite.
_FIXED = {'init_scale': 2.0 ** 16, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000}


class GradScaler:
    """Multiply losses by the model's scale; owners divide gradients by it, and skip a step that has an infinite one.

    The scale is kept with the model, through kills and checkpoints, and is one for all workers. module: what
    shard() returned, where there are several. It begins at 65,536; a skipped step halves it, 2,000 good ones in a
    row double it.
    """

    def __init__(self, device: str = 'cpu', *, enabled: bool = True, module: Optional[nn.Module] = None,
                 **fixed: float):
        for name, value in fixed.items():
            if name not in _FIXED:
                raise TypeError(f'GradScaler() got an unexpected keyword argument {name!r}')
            if value != _FIXED[name]:
                raise NotSupported(f'GradScaler({name}={value}): owners have {_FIXED[name]:g}; leave it out')
        self._enabled, self._engine = enabled, None
        self._unscaled = False
        if enabled and (module is not None or len(ENGINES) == 1):
            self._bind(module)

    def _bind(self, module: Optional[nn.Module]) -> Engine:
        if module is None and len(ENGINES) != 1:
            raise Misuse(f'{len(ENGINES)} modules are sharded: say GradScaler(module=…)')
        engine = engine_of(module) if module is not None else next(iter(ENGINES.values()))
        if engine.leased is not None and not engine.scales:
            raise Misuse('GradScaler() within leases(): who ends a step may have computed nothing of it; make it after '
                         'shard() and before the loop')
        engine.scales, self._engine = True, engine
        return engine

    @property
    def engine(self) -> Engine:
        return self._engine or self._bind(None)

    def scale(self, outputs: Any) -> Any:
        """The loss, or several, times the scale."""
        if not self._enabled:
            return outputs
        factor = self.engine.model.loss_scale
        return pytree.tree_map_only(torch.Tensor, lambda output: output * factor, outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """clip_grad_norm_() is of unscaled gradients with it and without it. With grads='step' those in p.grad are
        unscaled from here on."""
        if not self._enabled:
            return
        if self._unscaled:
            raise RuntimeError('unscale_() has already been called on this optimizer since the last update().')
        self._unscaled = True
        self._mine(optimizer).unscale()

    def step(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        """optimizer.step(), which is left out by the owners if a gradient is not finite: optimizer.last.skipped."""
        if self._enabled:
            if arguments or 'closure' in named:
                raise NotSupported('GradScaler.step() with a closure: call backward() before it')
            self._mine(optimizer)
        return optimizer.step(*arguments, **named)

    def update(self, new_scale: Any = None) -> None:
        """The owners have done it with the step."""
        if self._enabled and new_scale is not None:
            raise NotSupported(f'GradScaler.update({new_scale}): the scale is the owners\'; leave it out')
        self._unscaled = False

    def _mine(self, optimizer: Any) -> Engine:
        if not isinstance(optimizer, Optimizer) or optimizer.engine is not self.engine:
            raise Misuse('GradScaler with an optimizer that is not the sharded module\'s: give it what shard() '
                         'returned, or use torch.amp.GradScaler')
        return self.engine

    def get_scale(self) -> float:
        return self.engine.model.loss_scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def get_growth_factor(self) -> float:
        return _FIXED['growth_factor']

    def get_backoff_factor(self) -> float:
        return _FIXED['backoff_factor']

    def get_growth_interval(self) -> int:
        return int(_FIXED['growth_interval'])

    def state_dict(self) -> dict[str, float]:
        """For the record: the state is with the model, in its checkpoints, too."""
        if not self._enabled:
            return {}
        return {**{name: value for name, value in _FIXED.items() if name != 'init_scale'}, 'scale': self.get_scale()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Nothing is to be loaded; another scale than the model's is refused."""
        if self._enabled and state_dict.get('scale') != self.get_scale():
            raise NotSupported(f'GradScaler.load_state_dict() of scale {state_dict.get("scale")}: the model at the '
                               f'owners has {self.get_scale():g}, which comes with it from its own checkpoint')
