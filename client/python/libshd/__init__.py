"""libshd: the client of the shardd training-state service, in Python.

`libshd.torch` is for PyTorch. This module has the C calls (client/shd.h describes them) as methods, with
an exception for every result that is no success, and needs nothing but Python.
"""
from .errors import (AlreadyExists, BadSegment, Busy, Canceled, Error, Gone, InternalError, InvalidArgument,
                     IOFailed, Misuse, Moved, NoMemory, NotAllowed, NotFound, NotSupported, OutOfRange, ProtocolError,
                     SpecDiffers, StepReset, Stopped, TimedOut, WrongStep)
from .session import Model, Result, Session, Stats, Tensor, version

__all__ = ['AlreadyExists', 'BadSegment', 'Busy', 'Canceled', 'Error', 'Gone', 'IOFailed', 'InternalError',
           'InvalidArgument', 'Misuse', 'Model', 'Moved', 'NoMemory', 'NotAllowed', 'NotFound', 'NotSupported',
           'OutOfRange', 'ProtocolError', 'Result', 'Session', 'SpecDiffers', 'Stats', 'StepReset', 'Stopped', 'Tensor', 'TimedOut',
           'WrongStep', 'version']
