"""Parameters that cannot be written to: their memory is the owners' and mapped read-only, so a write would
end the process by SIGSEGV. Here it is an exception that names the tensor.

Arrays of NumPy are made read-only; for what still gets at the memory libshd says the tensor's name before the process
ends. A sharded parameter's class is Shared; what PyTorch gives as a view of its values (p.data, p.detach(), and
under no_grad p[0], p.view(…)) is of class View. Copies (deepcopy, pickle) are plain again.

Who reads them waits here until the owners' update is there, where step() did not.
"""
from __future__ import annotations

import sys
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ..errors import Misuse

# They change what a tensor is, or its hooks, and no values.
_HARMLESS = {'requires_grad_', 'detach_', 'retain_grad', '__set__'}
_VIEWS = {'view', 'view_as', 'reshape', 'flatten', 'unflatten', 't', 'transpose', 'permute', 'squeeze', 'unsqueeze',
          'expand', 'narrow', 'select', 'chunk', 'split', 'unbind', 'diagonal', '__getitem__', '__get__'}
# They say what a tensor is and read no values. Of its attributes (__get__) those that do:
_ABOUT = {'size', 'dim', 'numel', 'nelement', 'stride', 'is_contiguous', 'element_size', 'storage_offset', '__hash__',
          'is_floating_point', 'is_complex', 'requires_grad_', 'register_hook', 'register_post_accumulate_grad_hook',
          '__set__'}
_VALUES = {'data', 'T', 'mT', 'H', 'mH', 'real', 'imag'}
# Who has parameters that may not be there yet.
PENDING: set[int] = set()


_ARRAYS = {'numpy', '__array__'}
_ATTRIBUTE = {'__get__', '__set__', '__delete__'}
_OWN = ('torch.', 'libshd.', 'accelerate.')


def _is_write(name: str) -> bool:
    return (name.endswith('_') and not name.endswith('__') or name == '__setitem__'
            or name.startswith('__i') and name not in ('__init__', '__invert__', '__index__', '__int__', '__iter__'))


def _reads(func: Any, name: str) -> bool:
    if name == '__get__':
        return getattr(getattr(func, '__self__', None), '__name__', 'data') in _VALUES
    return name not in _ABOUT


def _shared(value: Any) -> Iterator[Any]:
    """The tensors in it that are not to be written to."""
    if isinstance(value, (Shared, View)):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _shared(one)


class _Guarded:
    """What Shared and View have in common."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        if name in _ATTRIBUTE and getattr(func.__self__, '__name__', '') == 'grad':
            return _grad(func, args, kwargs)
        if _is_write(name) and name not in _HARMLESS:
            written = args[:1] or tuple(kwargs.values())[:1]
        else:
            written = (kwargs.get('out'),) if 'out' in kwargs else ()
        for tensor in _shared(written):
            raise Misuse(f'{name}() of {tensor.shd_name!r}: the parameter is the owners\' memory, which only a step '
                         'changes; write to it in `with sd.writable(module):`, or to a copy (.clone())')
        if name == 'detach' and sys._getframe(1).f_globals.get('__name__') == 'torch.nn.parameter':
            raise Misuse(f'nn.Parameter() of {args[0].shd_name!r}: no step would change it; use the parameter as it '
                         'is, or nn.Parameter(p.detach().clone()) for one of its own')
        # A graph of torch.compile() that knew of PENDING would be made anew whenever that changes.
        if not torch.compiler.is_compiling() and PENDING and _reads(func, name):
            for tensor in _shared((args, tuple(kwargs.values()))):
                tensor.shd_wait()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if name in _ARRAYS:
                result.flags.writeable = False
            # A view that autograd knows is guarded by PyTorch itself.
            if name == 'detach' or name in _VIEWS and not (torch.is_grad_enabled() and _has_grad(result)):
                return _as_views(result, args)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = plain(self)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def _grad(func: Any, args: Any, kwargs: Any) -> Any:
    """p.grad, read or written. Where it has left for the owners, None would be taken for "took no part", and what is
    written for what counts."""
    p = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        gone = p.shd_gone() if isinstance(p, Shared) and torch.Tensor.grad.__get__(p) is None else ''
        asks = sys._getframe(2).f_globals.get('__name__', '') if gone else ''
        # Those that look for gradients and are prepared for none: clip_grad_norm_(), dynamo.
        if gone and not f'{asks}.'.startswith(_OWN):
            raise Misuse(f'{p.shd_name!r}.grad: {gone}')
        return func(*args, **kwargs)


def _has_grad(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad


def _as_views(result: Any, args: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)([_as_views(one, args) for one in result])
    base = next(_shared(args), None)
    # Of p.grad, say, the memory is another.
    if type(result) is not torch.Tensor or base is None or \
            result.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return result
    view = result.as_subclass(View)
    view.shd_name, view.shd_wait = base.shd_name, base.shd_wait
    return view


class View(_Guarded, torch.Tensor):
    """Values of a sharded parameter."""


class Shared(_Guarded, nn.Parameter):
    """A sharded parameter."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy like any other tensor."""
    tensor.shd_wait()
    with torch._C.DisableTorchFunctionSubclass():
        copy = tensor.detach().as_subclass(torch.Tensor).clone()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, tensor.requires_grad)
        return copy


def guard(parameter: nn.Parameter, name: str, wait: Callable[[], None], gone: Callable[[], str]) -> None:
    """From here on writes to it raise; wait() returns when it may be read; gone() says why its gradient is not there,
    or nothing."""
    parameter.shd_name, parameter.shd_wait, parameter.shd_gone = name, wait, gone
    parameter.__class__ = Shared


def unguard(parameter: nn.Parameter) -> None:
    if not isinstance(parameter, Shared):
        return
    parameter.__class__ = nn.Parameter
    del parameter.shd_name, parameter.shd_wait, parameter.shd_gone
