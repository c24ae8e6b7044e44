"""libshd.so: found, loaded, its calls with their types; programs that come with it."""
from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import sys
from typing import Any, Callable

from . import _c, errors

SONAME = 'libshd.so.0'
HERE = os.path.dirname(os.path.abspath(__file__))
STATUS = {value: name for name, value in vars(_c).items()
          if name.startswith('SHD_E') and isinstance(value, int) and value < 0}


def find() -> str:
    """$SHD_LIB, else the one that came with this package, else the system's."""
    if given := os.environ.get('SHD_LIB'):
        return given
    own = os.path.join(HERE, 'lib', SONAME)
    return own if os.path.exists(own) else SONAME


def program(name: str) -> str:
    """The path of shardctl or shardd: $SHARDD_BIN's neighbour, this package's own, or by PATH."""
    own = os.path.join(HERE, 'bin')
    places = [os.path.dirname(os.environ.get('SHARDD_BIN', '')), own]
    for place in filter(None, places):
        if os.access(path := os.path.join(place, name), os.X_OK):
            return path
    if found := shutil.which(name):
        return found
    raise errors.NotFound(f'there is no {name} in {own} or $PATH: install shardd, or set SHARDD_BIN')


def shardctl() -> None:
    """The command shardctl of the wheel: becomes the program that lies in it."""
    path = program('shardctl')
    os.execv(path, [path, *sys.argv[1:]])


def load() -> ctypes.CDLL:
    path = find()
    try:
        lib = ctypes.CDLL(path)
    except OSError as e:
        raise errors.NotFound(f'{path} cannot be loaded ({e}): install libshd, or set SHD_LIB to its file') from e
    for name, (result, arguments) in _c.FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise errors.NotSupported(f'{path} has no {name}(): it is older than this package '
                                      f'({_c.SHD_VERSION})')
        function.restype, function.argtypes = result, arguments
    return lib


lib = load()


def call(function: Callable[..., int], *arguments: Any) -> int:
    """Call what takes a struct shd_err last; raise what it says."""
    e = _c.shd_err()
    code = function(*arguments, ctypes.byref(e))
    if code < 0:
        raise errors.error(STATUS.get(code, ''), code, e.text.decode(errors='replace'))
    return code


def sized(struct: Any, **fields: Any) -> Any:
    """A struct that says its size, as those that may grow do."""
    return struct(size=ctypes.sizeof(struct), **fields)
