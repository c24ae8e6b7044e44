"""One exception for each result of libshd's that is no success.

All are Error; where Python has a word for it (MemoryError, TimeoutError, …) it is that, too.
"""
from __future__ import annotations

from typing import Type


class Error(Exception):
    """A call failed. `code` is one of libshd's results, the text names the values."""
    code = 0


class InvalidArgument(Error, ValueError):
    """An argument, a file or a message is malformed."""


class OutOfRange(Error, ValueError):
    """A value is outside of its limits."""


class ProtocolError(Error):
    """A message or a protocol version was not understood."""


class NotAllowed(Error, PermissionError):
    """The daemons do not serve this user."""


class NotFound(Error, LookupError):
    """There is no such model, unit, tensor, file or daemon."""


class AlreadyExists(Error):
    """It is there already."""


class SpecDiffers(Error):
    """The daemons hold a model of this name with another specification."""


class WrongStep(Error):
    """The step is not the open one."""


class Busy(Error):
    """A limit on concurrent work is reached."""


class NoMemory(Error, MemoryError):
    """Memory, descriptors or mappings do not suffice."""


class IOFailed(Error, OSError):
    """A system call or the transport failed."""


class Gone(Error, ConnectionError):
    """A daemon is gone, and what it held with it."""


class TimedOut(Error, TimeoutError):
    """What was waited for did not come in time."""


class BadSegment(Error):
    """Shared memory has the wrong size or seals."""


class NotSupported(Error, NotImplementedError):
    """It cannot be done here."""


class InternalError(Error):
    """A mistake in shardd."""


class Canceled(Error):
    """A wait was broken off."""


class StepReset(Error):
    """The open step begins again, as a worker gave up what it had returned of it; or the model is at an earlier step, as it
    went back or has other owners. Compute the batches of the step that it is at again."""


class Stopped(Error):
    """A guard has stopped training: model.set('guard=go-on'), or `shardctl set MODEL guard=go-on`, goes on."""


class Moved(Error):
    """The model has other owners now (`shardctl reshard`), and this session cannot go along: open it there."""


class Misuse(Error, RuntimeError):
    """The program does what would give other numbers than it seems to; the text says what to do instead."""


BY_NAME: dict[str, Type[Error]] = {
    'SHD_EINVAL': InvalidArgument, 'SHD_ERANGE': OutOfRange, 'SHD_EPROTO': ProtocolError,
    'SHD_EAUTH': NotAllowed, 'SHD_ENOENT': NotFound, 'SHD_EEXIST': AlreadyExists, 'SHD_ESPEC': SpecDiffers,
    'SHD_ESTEP': WrongStep, 'SHD_EBUSY': Busy, 'SHD_ENOMEM': NoMemory, 'SHD_EIO': IOFailed,
    'SHD_EGONE': Gone, 'SHD_ETIMEDOUT': TimedOut, 'SHD_ESEGMENT': BadSegment, 'SHD_ENOTSUP': NotSupported,
    'SHD_EINTERNAL': InternalError, 'SHD_ECANCELED': Canceled,
    'SHD_ERESET': StepReset, 'SHD_ESTOPPED': Stopped, 'SHD_EMOVED': Moved}


def error(name: str, code: int, text: str) -> Error:
    """The exception of a result."""
    made = BY_NAME.get(name, Error)(text)
    made.code = code
    return made
