"""Whether shard() was given what it takes: each refusal names the value, and what would be right."""
from __future__ import annotations

import inspect
import os
from typing import Any, Optional

import torch
from torch import nn

from ..errors import InvalidArgument, Misuse, NotSupported
from . import layout
from .policy import Policy


def check_two(module: Any, optimizer: Any) -> None:
    """The two that every call has."""
    if isinstance(module, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise InvalidArgument('shard(optimizer, module): the module comes first, shard(module, optimizer)')
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f'module={_shown(module)}: must be a torch.nn.Module')
    if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f'optimizer={optimizer.__name__}: that is the class; give shard() one, '
                              f'{optimizer.__name__}(module.parameters(), …)')
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f'optimizer={_shown(optimizer)}: must be a torch.optim.Optimizer of the module\'s '
                              'parameters')
    parameters = [p for p in module.parameters() if p.numel()]
    if not any(p.requires_grad for p in parameters):
        raise Misuse(f'{type(module).__name__} has {len(parameters) or "no"} parameters'
                     + (', and all of them are frozen: there is nothing to train' if parameters else ''))
    for name, inner in module.named_modules():
        if getattr(inner, 'sparse', False) and isinstance(inner, (nn.Embedding, nn.EmbeddingBag)):
            raise NotSupported(f'{name!r} is {type(inner).__name__}(sparse=True): owners take dense gradients; make it '
                               'with sparse=False')


def policy_of(policy: Any) -> Policy:
    """A policy, or the class of one."""
    if inspect.isclass(policy) and issubclass(policy, Policy):
        policy = policy()
    if not isinstance(policy, Policy) or type(policy) is Policy:
        raise InvalidArgument(f'policy={_shown(policy)}: must be sd.ZeRO3(), sd.ZeRO2(), sd.ZeRO1() or sd.DDP()')
    for field in ('forward_prefetch', 'max_live_units', 'max_live_bytes'):
        check_count(f'policy: {field}', getattr(policy, field), 0)
    return policy


def rule_of(units: Any) -> layout.Rule:
    """units=, where one class stands for a list of it."""
    if inspect.isclass(units) and issubclass(units, nn.Module):
        return [units]
    if isinstance(units, str) and units == 'auto' or callable(units) and not inspect.isclass(units):
        return units
    if isinstance(units, (list, tuple, set, frozenset)) and units and all(
            isinstance(kind, str) or inspect.isclass(kind) and issubclass(kind, nn.Module) for kind in units):
        return list(units)
    raise InvalidArgument(f"units={_shown(units)}: must be 'auto', a list of module classes or of their names "
                          '([nn.Linear]), or a function of a parameter\'s name and its module')


def check_choice(name: str, value: Any, *choices: str) -> None:
    if value not in choices:
        raise InvalidArgument(f'{name}={value!r}: must be {" or ".join(map(repr, choices))}')


def check_count(name: str, value: Any, least: int) -> None:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f'{name}={value!r}: must be a whole number, of type int')
    if value < least:
        raise InvalidArgument(f'{name}={value}: at least {least}')


def check_dtype(name: str, value: Optional[torch.dtype]) -> None:
    if value is not None and value not in layout.DTYPES:
        raise InvalidArgument(f'{name}={value!r}: must be torch.float32, torch.bfloat16 or torch.float16')


def check_timeout(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float('inf'):
        raise InvalidArgument(f'timeout={value!r}: must be seconds, a number above 0, or None (no limit)')


def check_name(value: Any) -> None:
    """Of a model."""
    if value is not None and (not isinstance(value, str) or not value or not (value.isascii() and value.isprintable())):
        raise InvalidArgument(f'name={_shown(value)}: must be a string of printable ASCII, or None (the class\'s name)')


def number_of(what: str, value: Any) -> float:
    """A number, or a tensor of one element."""
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        shown = f'of shape {tuple(value.shape)}' if isinstance(value, torch.Tensor) else _shown(value)
        raise InvalidArgument(f'{what} is {shown}: must be a number, or a tensor of one element') from None


def clip_norm_of(value: Any) -> float:
    """As owners take it: 0 is no bound."""
    norm = number_of('max_norm', value)
    if not norm > 0:
        raise InvalidArgument(f'max_norm={norm:g} of clip_grad_norm_(): must be above 0 (PyTorch would take the '
                              'gradients for zeros, or turn them round); leave it out, or say inf, not to clip, and '
                              'step(idle=True) in the place of a backward() for a batch that does not count')
    return norm if norm < float('inf') else 0.0


def check_function(name: str, value: Any, of: str) -> None:
    if value is not None and not callable(value):
        raise InvalidArgument(f'{name}={_shown(value)}: must be a function of {of}')


def address_of(address: Any) -> Optional[str]:
    """An address as a string; those that begin with 'up' start daemons."""
    if address is None:
        return None
    if not isinstance(address, (str, os.PathLike)) or not str(address):
        raise InvalidArgument(f"address={address!r}: must be None, a directory of daemons, 'up:N' or 'local:'")
    address = os.fspath(address)
    how, _, count = address.partition(':')
    if how == 'up' and address != 'up' and not (count.isascii() and count.isdigit() and int(count)):
        raise InvalidArgument(f"address={address!r}: must be 'up:N', where N is how many daemons to start, 1 or more")
    return address


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """The owners begin with none."""
    if any(optimizer.state.values()):  # looking for a parameter's makes an empty one
        raise Misuse('the optimizer has state already, from steps it has made or from load_state_dict(): it would be '
                     'lost; shard() with a new one, then call load_state_dict(old.state_dict()) of the one that '
                     'shard() returns')


def check_buffers(module: nn.Module, world: int) -> None:
    """Whether their values can begin here, and go on without one of several workers."""
    if empty := [key for key, buffer in module.named_buffers() if buffer.is_meta]:
        raise Misuse(f'buffer {empty[0]!r} is on the meta device: init= is for parameters; give buffers values first')
    if world > 1 and (met := [key for key, inner in module.named_modules() if isinstance(inner, nn.SyncBatchNorm)]):
        raise NotSupported(f'{met[0]!r} is a SyncBatchNorm: it meets {world} workers within each forward, and '
                           'one that is killed could not go on; use BatchNorm, of whose statistics the mean is kept')


def number_from(variable: str, default: int) -> int:
    """Of the environment."""
    text = os.environ.get(variable, '')
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidArgument(f'{variable}={text!r} in the environment: must be a number, as torchrun and `shardctl '
                              'run` set it; unset it to train with one worker') from None


def _shown(value: Any) -> str:
    """In brief: a module would fill the screen."""
    if isinstance(value, (str, int, float)) or value is None:
        return repr(value)
    return value.__name__ if inspect.isclass(value) else f'an object of class {type(value).__name__}'
