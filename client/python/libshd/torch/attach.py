"""Where the daemons are, who makes the model there, and with which values it begins."""
from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Callable, Optional, Sequence, TypeVar

import torch
from torch import nn

from ..errors import IOFailed, Misuse, NotFound, WrongStep
from ..library import call, lib, program
from ..session import Model, Session
from . import check
from .layout import Part, Unit, elems_of


Begun = TypeVar('Begun')
FOR_EVER = 3600 * 24 * 365  # seconds
TRIES = 10  # that values are put while a worker begins


def connect(address: Optional[str], name: str, timeout: Optional[float], reader: bool = False,
            device: Optional[str] = None, slots: int = 0) -> Session:
    """A session with the daemons at the address; 'up:N' starts N, unless this user's are up already."""
    address = check.address_of(address)
    if address and (up := re.fullmatch(r'up(?::(\d+))?', address)):
        address = start(int(up[1] or 1))
    session = Session(address, name=name, timeout=timeout or 0, reader=reader, device=device, slots=slots)
    call(lib.shd_explain_writes)  # to what nothing in Python guards: ctypes, C++
    return session


def attached(address: Optional[str], name: str, timeout: Optional[float], begin: Callable[[Session], Begun],
             device: Optional[str] = None, slots: int = 0) -> Begun:
    """What begin() makes of a session; of another one where a worker that was here before has put values meanwhile. A
    step may be wrong for good as well: owners of which one was restored and another was not."""
    left = TRIES
    while True:
        session, left = connect(address, name, timeout, device=device, slots=slots), left - 1
        try:
            return begin(session)
        except WrongStep:
            session.close()
            if not left:
                raise
        except BaseException:
            session.close()
            raise


def start(daemons: int) -> str:
    """The address of daemons that stay until `shardctl down`; several workers find the same ones. They are where
    `shardctl up` has them, or in $SHARDD_ADDRESS."""
    with open(os.path.join(tempfile.gettempdir(), f'.libshd-up-{os.getuid()}'), 'a', encoding='ascii') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shardctl = program('shardctl')
        directory = os.environ.get('SHARDD_ADDRESS', '').partition('?')[0]
        where = ['--runtime-dir', directory] if os.path.isabs(directory) else []
        done = subprocess.run([shardctl, 'up', '--daemons', str(daemons), *where], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, check=False)
        if found := re.search(r'SHARDD_ADDRESS=(\S+)', done.stdout):
            return found[1].strip('\'";')
        # It is up already, and says where.
        if found := re.search(r"'([^']+)' is kept by a `shardctl up`", done.stderr):
            return found[1]
        raise IOFailed(f'shardctl up --daemons {daemons}: {done.stderr.strip()}')


def open_model(session: Session, spec: str, name: str, units: Sequence[Unit], first: bool, wait: Optional[float],
               init: Optional[Callable[[nn.Module], None]], restore: Optional[str]) -> Model:
    """The model: if the daemons have none of this name, restored, or made with the values of the first worker."""
    if not first:
        # By name it is not said whether it is the same one.
        session.attach(name, FOR_EVER if wait is None else wait).close()
        return session.open(spec)
    restored = restore is not None and not has_model(session, name)
    if restored:
        session.restore(os.path.abspath(restore))
    model = session.open(spec, lambda unit, address: fill(units[unit], address, init))
    if not model.created and not restored:
        print(f"libshd: the daemons have model '{name}' already: goes on from step {model.step - model.puts}, with its "
              "parameters and optimizer state; say shard(name='…') for another one, which begins anew",
              file=sys.stderr, flush=True)
    return model


def restored_name(directory: str, name: Optional[str]) -> str:
    """Of the model that a checkpoint is of; another one is refused."""
    step = directory
    try:
        if os.path.exists(latest := os.path.join(directory, 'LATEST')):
            with open(latest, encoding='ascii') as file:
                step = os.path.join(directory, file.read().strip())
        with open(os.path.join(step, 'shardd.json'), encoding='utf-8') as file:
            found = json.load(file)['spec']['name']
    except OSError as e:
        raise NotFound(f'restore={directory!r}: no checkpoint ({e})') from None
    if name not in (None, found):
        raise Misuse(f'restore={directory!r} is a checkpoint of the model {found!r}, which has that name wherever it '
                     f'is restored: say name={found!r}, or leave it out')
    return found


def has_model(session: Session, name: str) -> bool:
    try:
        session.attach(name).close()
        return True
    except NotFound:
        return False


def fill(unit: Unit, address: int, init: Optional[Callable[[nn.Module], None]]) -> None:
    """A unit's start values to where the library wants them. What is on the meta device is made for it alone."""
    values = values_of(unit, init)
    array = torch.frombuffer((ctypes.c_float * elems_of(unit)).from_address(address), dtype=torch.float32)
    for part in unit.parts:
        array[part.offset:part.offset + part.parameter.numel()] = values[part].detach().flatten()


def values_of(unit: Unit, init: Optional[Callable[[nn.Module], None]]) -> dict[Part, torch.Tensor]:
    values = {part: part.parameter if part.start is None else part.start for part in unit.parts}
    empty = [part for part in unit.parts if part.parameter.is_meta]
    for owner in dict.fromkeys(part.owner for part in empty):
        names = {key: p for key, p in owner._parameters.items() if p is not None}
        try:
            for key, p in names.items():
                empty_one = torch.empty(p.shape, dtype=p.dtype, device='cpu')
                owner._parameters[key] = nn.Parameter(empty_one, p.requires_grad)
            (init or _reset)(owner)
            made = {id(p): owner._parameters[key] for key, p in names.items()}
        finally:
            owner._parameters.update(names)
        values.update({part: made[id(part.parameter)] for part in empty if part.owner is owner})
    return values


def _reset(owner: nn.Module) -> None:
    if not hasattr(owner, 'reset_parameters'):
        raise Misuse(f'{type(owner).__name__} has no reset_parameters(): say shard(init=function of a module)')
    owner.reset_parameters()
