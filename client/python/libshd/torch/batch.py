"""As large a batch as there is memory for: find_executable_batch_size(), as accelerate has it."""
from __future__ import annotations

import functools
import gc
from typing import Any, Callable, Optional

import torch

from ..errors import Error
from .check import check_count
from .engine import ENGINES

# What PyTorch says by a RuntimeError: of its allocator for the CPU, of oneDNN, of a GPU's libraries.
_TEXTS = ("can't allocate memory", 'out of memory', 'could not create a memory object', 'CUBLAS_STATUS_ALLOC_FAILED',
          'CUDNN_STATUS_NOT_SUPPORTED')


def _lacks_memory(error: BaseException) -> bool:
    """For a batch, that is: the daemons' memory (NoMemory) is as large with any."""
    if isinstance(error, Error):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _give_up() -> None:
    """What the attempt has left: gradients of open steps, cycles that hold tensors, a GPU's cache."""
    for engine in list(ENGINES.values()):
        if (optimizer := engine.optimizer()) is not None:  # else the attempt's own
            optimizer.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def find_executable_batch_size(function: Optional[Callable[..., Any]] = None, *,
                               starting_batch_size: int = 128) -> Callable[..., Any]:
    """A decorator: function(batch_size, ...) is called as function(...), with starting_batch_size, and where memory
    does not suffice (an allocation fails, as a limit of a process or a GPU has it) again with half of it.

        @sd.find_executable_batch_size(starting_batch_size=256)
        def train(batch_size):
            for step in range(sd.step_of(model), 1000):
                ...

    Steps that were made before it failed are made; the open one's gradients are given up, as by zero_grad(). The
    next call begins with the size that was found. RuntimeError: not even 1 can be had.
    """
    check_count('starting_batch_size', starting_batch_size, 1)
    if function is None:
        return functools.partial(find_executable_batch_size, starting_batch_size=starting_batch_size)
    size = starting_batch_size

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal size
        while True:
            try:
                return function(size, *arguments, **named)
            except Exception as error:
                if not _lacks_memory(error):
                    raise
                if size == 1:
                    raise RuntimeError('No executable batch size found: there is no memory for a batch of 1') from error
            # Behind the exception, whose traceback holds the attempt's tensors.
            _give_up()
            size //= 2
    return call
