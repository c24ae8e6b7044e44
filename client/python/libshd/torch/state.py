"""What the owners hold, read and replaced: writable(), the optimizer's state, safetensors.

Whatever is replaced is one put (shd.h): all of it at all owners, or nothing.
"""
from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Union

import torch
from torch import nn

from .. import _c
from ..errors import Busy, InvalidArgument, Misuse, NotSupported
from .cut import refuse
from .device import tensor_at
from .engine import Engine, engine_of
from .guard import unguard
from .layout import Part, Unit, elems_of, is_adafactor, is_muon

PARAMS, MOMENTS = _c.SHD_PARAMS, (_c.SHD_MOMENT1, _c.SHD_MOMENT2)
Fill = Callable[[Unit, int, torch.Tensor], None]
TRIES = 100  # that a put is refused for gradients that others return


class Stamp(NamedTuple):
    """Of which state something was read: the open step, and so many updates were applied to the unit."""
    step: int
    updates: int


def read(engine: Engine, unit: Unit, array: int) -> tuple[torch.Tensor, Stamp]:
    """An array of a unit as the owners have it, fp32."""
    values = torch.empty(engine.model.unit_elems(unit.index), dtype=torch.float32, device='cpu')
    return values, Stamp(*engine.model.get(unit.index, array, values.data_ptr()))


def stamp(engine: Engine) -> Stamp:
    return read(engine, min(engine.units, key=elems_of), PARAMS)[1]


def masters(engine: Engine, units: Iterable[Unit]) -> dict[Unit, torch.Tensor]:
    """The fp32 parameters of units. They are published with all bits, or read for the purpose."""
    return {unit: unit.array if unit.array.dtype == torch.float32 else read(engine, unit, PARAMS)[0] for unit in units}


def _is_there(engine: Engine, arrays: Mapping[Unit, int], fill: Fill, whole: bool) -> bool:
    """Whether the owners have what is to be put."""
    for unit, bits in arrays.items():
        for array in (PARAMS, *MOMENTS):
            if not bits >> array & 1:
                continue
            found = read(engine, unit, array)[0]
            wanted = found.clone() if whole else torch.zeros(elems_of(unit), dtype=torch.float32, device='cpu')
            fill(unit, array, wanted)
            if whole and not torch.equal(found, wanted):
                return False
            if not all(torch.equal(engine.view(found, part), engine.view(wanted, part)) for part in unit.parts):
                return False
    return True


def _is_past(engine: Engine, arrays: Mapping[Unit, int]) -> bool:
    """Whether values were put here before the open step began, of which gradients are in. Who is started again behind
    that writes what it likes (random values without a seed), but nobody computes with it: said, and dropped."""
    if not engine.model.after_put():
        return False
    print(f"libshd: values that are written in front of step {engine.step} are dropped ({len(arrays)} units, the first "
          f"is '{next(iter(arrays)).name}'): others were put there before this worker was started, and the step has "
          "begun with them. It goes on with those, as all workers do; to begin with other ones say shard(name='…')",
          file=sys.stderr, flush=True)
    return True


def put(engine: Engine, arrays: Mapping[Unit, int], fill: Fill, updates: Optional[Mapping[Unit, int]] = None,
        whole: bool = False) -> bool:
    """arrays: of each unit the bits of what is put; fill writes one of them into a tensor. updates: how many count,
    of each unit that is trained; None: as many as before. False: another worker put other ones at the same time, and
    those are there. whole: fill has all of a unit's array, with its statistics, as it is."""
    def filled(index: int, array: int, address: int) -> None:
        unit = engine.every[index]
        fill(unit, array, tensor_at(address, engine.model.unit_elems(index) if whole else elems_of(unit),
                                    torch.float32))
    for unit in engine.units:
        engine.release(unit)
    most, counts = None, None
    if updates is not None:
        most = max(updates.values())
        if min(updates.values()) < most:
            counts = [updates.get(unit, most) for unit in engine.every]
    for left in reversed(range(TRIES)):
        try:
            mine = engine.model.put(bytes(arrays.get(unit, 0) for unit in engine.every), filled, most, counts)
            break
        except Busy as e:
            if engine.new and (_is_there(engine, arrays, fill, whole) or _is_past(engine, arrays)):
                engine.moved()
                return True  # it was put before this worker was started again, and the step has begun since
            if not engine.fixed or engine.new or not left:
                raise Misuse('what writable() and its like have written is not put: other workers have begun the next '
                             'step. Each calls it, at the same point of its loop, also those whose values do not '
                             f'count; rank 0 alone cannot ({e})') from e
            # A worker that was started again does not come here, and computes the step's batches once more.
            engine.model.reset_step()
    engine.new = False
    engine.moved()
    return mine


# -- Parameters ------------------------------------------------------------------------------------

class Written(NamedTuple):
    """What writable() has written to a parameter; and the first element that became another, as it was."""
    part: Part
    values: torch.Tensor
    at: int
    was: torch.Tensor


def _between_steps(engine: Engine, what: str) -> None:
    refuse(engine, what, 'it has a part of the model; sd.save() writes all of it, whatever its shape, shard(restore=) begins '
           'with that, and sd.reader() reads it')
    if engine.leased is not None:
        raise Misuse(f'{what} in the loop over leases(): the step has begun; do it before the loop')
    if engine.open or engine.backwards or engine.due or engine.sealed or engine.spoilt:
        raise Misuse(f'{what} between a backward() and its step(): gradients are of the parameters as they are; '
                     'call step() first')
    engine.check()


@contextlib.contextmanager
def writable(module: nn.Module) -> Iterator[nn.Module]:
    """In here parameters are ordinary ones, private copies that may be written to; at its end the owners get what
    has changed, all of it or (if an exception ends it) nothing. Between two steps; where several workers train,
    each comes here at the same point, and the values of the first count."""
    engine = engine_of(module)
    if engine.writing:
        raise Misuse('writable() inside of writable()')
    _between_steps(engine, 'writable()')
    grads = engine.grads()
    if grads and engine.stream:
        raise Misuse('writable() after a backward() in no_sync(), whose gradients are of the parameters as they are: '
                     'call step() first, or zero_grad() to drop them')
    changed: dict[Unit, list[Written]] = {}
    if engine.new and engine.fixed and engine.behind():
        engine.catch_up()
    with engine.all_held(or_late=True) as late:
        engine.writing = True
        try:  # memory may run out here, and Ctrl-C come
            for part in engine.parts():
                unguard(part.parameter)
                part.parameter.data = part.parameter.data.clone()
            engine.meet()
            yield module
            for unit in engine.units:
                for part in unit.parts:
                    _note(engine, changed, unit, part)
            buffers = engine.buffers.all_changed()
            late = late or engine.behind()
        finally:
            engine.writing = False
            for unit in engine.units:
                for part in unit.parts:
                    part.parameter.data = engine.view(unit.array, part)
                    engine.protect(unit, part)
            engine.drop(but=grads)
            engine.buffers.restore()
    if (late or engine.fixed) and not changed:  # another worker's values may count: this one has to hear of it
        changed[min(engine.units, key=elems_of)] = []
    if changed or buffers:
        engine.check()
        kept, before = masters(engine, changed), dict(engine.buffers.kept)

        def fill(unit: Unit, _: int, to: torch.Tensor) -> None:
            if unit in buffers:
                to.copy_(buffers[unit])
            else:
                _merge(engine, unit, changed[unit], kept[unit], to)
        if not put(engine, dict.fromkeys([*changed, *buffers], _c.SHD_PUT_PARAMS), fill):
            _check_dropped(engine, changed, {unit: before[unit] for unit in buffers})


def _check_dropped(engine: Engine, changed: Mapping[Unit, list[Written]], buffers: Mapping[Unit, torch.Tensor]) -> None:
    """Another worker's values are there: are they none? buffers: those that were written to, as they were."""
    written = [(unit, one) for unit, some in changed.items() for one in some]
    names = [*(one.part.name for _, one in written), *(part.name for unit in buffers for part in unit.parts)]
    if names and all(engine.view(unit.array, one.part).flatten()[one.at] == one.was != one.values.flatten()[one.at]
                     for unit, one in written) and \
            all(torch.equal(was, engine.buffers.kept[unit]) for unit, was in buffers.items()):
        raise Misuse(f'what writable() has written to {names[0]!r} (of {len(names)}) is dropped: another worker left '
                     'it first, has written nothing there, and the values of the first count. Each worker writes the '
                     'same; rank 0 alone cannot')


def _note(engine: Engine, changed: dict[Unit, list[Written]], unit: Unit, part: Part) -> None:
    """Keep what was written to a parameter, if anything was."""
    p, was = part.parameter, engine.view(unit.array, part)
    if part.owner._parameters.get(part.key) is not p:
        raise Misuse(f'{part.name!r} is another parameter than before writable(): write into the one that is there '
                     '(load_state_dict() without assign=True); nothing is put')
    if p.shape != was.shape or p.dtype != was.dtype or p.device != was.device:
        raise Misuse(f'{part.name!r} became {p.dtype} {tuple(p.shape)} on {p.device}, it is {was.dtype} '
                     f'{tuple(was.shape)} on {was.device}: nothing is put')
    if not torch.equal(p.data, was):
        at = int((p.data != was).flatten().view(torch.uint8).argmax())
        changed.setdefault(unit, []).append(Written(part, p.data, at, was.flatten()[at].clone()))


def _merge(engine: Engine, unit: Unit, changed: list[Written], kept: torch.Tensor, to: torch.Tensor) -> None:
    """What was not written to keeps all bits of its fp32 masters, of which the parameters may be roundings."""
    to.copy_(kept[:to.numel()])
    for part, value, *_ in changed:
        master, was = engine.view(to, part), engine.view(unit.array, part)
        kept_bits, value = (value == was).to(master.device), value.to(master.device)
        master.copy_(torch.where(kept_bits, master, value.float()))


# -- Optimizer state -------------------------------------------------------------------------------

def _names(optimizer: Any, part: Part) -> tuple[str, ...]:
    """PyTorch's names of a parameter's moments."""
    if isinstance(optimizer.original, torch.optim.SGD):
        return ('momentum_buffer',) if optimizer.param_groups[part.group]['momentum'] else ()
    if is_muon(optimizer.original):
        return ('momentum_buffer',)
    if is_adafactor(optimizer.original):
        return ()  # it has statistics()
    return 'exp_avg', 'exp_avg_sq'


def _statistics(unit: Unit, values: torch.Tensor) -> dict[Part, dict[str, torch.Tensor]]:
    """Adafactor's, by PyTorch's names, in a unit's array of parameters: each part's, aligned as these are, from the
    next block of 2,048 elements on (proto/spec/adafactor.h)."""
    at = -(-elems_of(unit) // 2048) * 2048
    found: dict[Part, dict[str, torch.Tensor]] = {}
    for part in unit.parts:
        shape = list(part.parameter.shape)
        shapes = ({'row_var': [*shape[:-1], 1], 'col_var': [*shape[:-2], 1, shape[-1]]} if len(shape) > 1 else
                  {'variance': shape})
        at, found[part] = -(-at // 32) * 32, {}
        for name, of in shapes.items():
            count = torch.Size(of).numel()
            found[part][name] = values[at:at + count].view(of)
            at += count
    return found


def _moments(optimizer: Any, unit: Unit) -> tuple[int, ...]:
    """Those that any of the unit's parameters has."""
    return MOMENTS[:max(len(_names(optimizer, part)) for part in unit.parts)]


def _indices(optimizer: Any) -> dict[nn.Parameter, int]:
    """PyTorch numbers parameters through all groups."""
    found: dict[nn.Parameter, int] = {}
    for group in optimizer.param_groups:
        for p in group['params']:
            found.setdefault(p, len(found))
    return found


def _count(updates: int) -> torch.Tensor:
    """As PyTorch has it in a state."""
    return torch.tensor(float(updates), dtype=torch.float32, device='cpu')


def optimizer_state(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
    """packed, PyTorch's state_dict() without state, with the owners' state in it. Unit by unit."""
    engine = optimizer.engine
    _between_steps(engine, 'state_dict()')
    indices, step = _indices(optimizer), stamp(engine).step
    for unit in engine.trainable:
        arrays: list[torch.Tensor] = []
        for array in _moments(optimizer, unit):
            values, of = read(engine, unit, array)
            if of.step != step:
                raise Misuse('state_dict() while other workers committed a step: it would be of two; take it where all '
                             'workers are between the same two steps')
            if not of.updates:  # PyTorch makes the state at a parameter's first update
                break
            arrays.append(values)
        if is_adafactor(optimizer.original):
            values, of = read(engine, unit, PARAMS)
            if of.step != step:
                raise Misuse('state_dict() while other workers committed a step: it would be of two; take it where all '
                             'workers are between the same two steps')
            for part, own in _statistics(unit, values).items() if of.updates else ():
                packed['state'][indices[part.parameter]] = {
                    'step': _count(of.updates), **{name: value.clone() for name, value in own.items()}}
            continue
        for part in unit.parts:
            state = {name: engine.view(array, part).clone() for name, array in zip(_names(optimizer, part), arrays)}
            if 'exp_avg' in state:
                state = {'step': _count(of.updates), **state}
            if state:
                packed['state'][indices[part.parameter]] = state
    return packed


# A state says only by its groups' keys what it is of.
_KINDS = {'ns_steps': 'Muon', 'beta2_decay': 'Adafactor', 'momentum_decay': 'NAdam', 'lr_decay': 'Adagrad', 'rho': 'Adadelta', 'etas': 'Rprop', 'alpha': 'RMSprop',
          'dampening': 'SGD', 'lambd': 'ASGD', 'history_size': 'LBFGS', 'amsgrad': 'Adam'}


def _kind(group: Mapping[str, Any]) -> str:
    kind = next((name for key, name in _KINDS.items() if key in group), '')
    return 'AdamW' if kind == 'Adam' and group.get('decoupled_weight_decay') else kind


def _check_kind(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Of which optimizer the state is; moments of another would be left out, or taken for what they are not."""
    own, groups = type(optimizer.original).__name__, state_dict['param_groups']
    known = {name for part in optimizer.engine.parts() if part.trainable for name in _names(optimizer, part)}
    if is_adafactor(optimizer.original):
        known = {'row_var', 'col_var', 'variance'}
    found = {name for state in state_dict['state'].values() for name, value in state.items() if value is not None}
    missing = [key for key in optimizer.original.defaults if groups and key not in groups[0]]
    its = _kind(groups[0]) if groups else ''
    mine = _kind(optimizer.param_groups[0])
    # PyTorch before 2.8 has no decoupled_weight_decay in groups of AdamW.
    if 'decoupled_weight_decay' in missing and {its, mine} <= {'Adam', 'AdamW'}:
        its = mine
    if its != mine and (its or set(missing) - {'decoupled_weight_decay'}):
        raise Misuse(f'the state is of {its or "another optimizer, without " + missing[0]}, the optimizer is {own}: '
                     'its moments are others; make the optimizer that the state is of, before shard()')
    if strange := sorted(found - known - {'step', 'momentum_buffer'}):
        raise Misuse(f'the state has {strange[0]!r}, which {own} has not: it is of another optimizer, or with other '
                     'options (amsgrad); make that one before shard()')
    if 'momentum_buffer' in found - known:
        raise Misuse('the state has momentum, the optimizer was given to shard() with momentum=0, so owners keep none: '
                     'make it with the momentum, before shard()')


def _check_groups(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    own = optimizer.param_groups
    if len(saved) != len(own):
        raise InvalidArgument(f'the state has {len(saved)} parameter groups, the optimizer {len(own)}')
    for at, (group, theirs) in enumerate(zip(own, saved)):
        if len(theirs['params']) != len(group['params']):
            raise InvalidArgument(f'group {at} of the state has {len(theirs["params"])} parameters, the optimizer\'s '
                                  f'{len(group["params"])}')
        for key in ('eps', 'nesterov', 'dampening', 'amsgrad', 'maximize', 'ns_coefficients', 'ns_steps',
                    'adjust_lr_fn', 'beta2_decay', 'd'):
            if key in theirs and key in group and theirs[key] != group[key]:
                raise NotSupported(f'{key} is {theirs[key]} in the state and {group[key]} in the optimizer: owners '
                                   'have it from shard() on; make the optimizer with that value first')


def _updates_of(optimizer: Any, unit: Unit, states: Mapping[nn.Parameter, Mapping[str, Any]], applied: int) -> int:
    """How many updates a unit's parameters have had. Those without a state have moments of zero, and go with the
    others. applied: to the model here."""
    found = {part: states.get(part.parameter, {}) for part in unit.parts}
    steps = {part: int(state['step']) for part, state in found.items() if 'step' in state}
    if steps:
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        if steps[least] != steps[most]:
            raise NotSupported(f'{least.name!r} of the state has had {steps[least]} updates and {most.name!r} '
                               f'{steps[most]}: owners count one number for the parameters of a unit, of which both '
                               'are; shard(units=) makes units of their modules')
        return steps[most]
    if is_adafactor(optimizer.original):
        return 0
    if not _moments(optimizer, unit):
        return applied
    # SGD counts none; its first update has no momentum yet.
    return max(applied, 1) if any(state.get('momentum_buffer') is not None for state in found.values()) else 0


def load_optimizer_state(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """PyTorch's layout, of an Optimizer here or of a plain one, to the owners; rates to the groups."""
    engine = optimizer.engine
    _between_steps(engine, 'load_state_dict()')
    saved = state_dict['param_groups']
    _check_kind(optimizer, state_dict)
    _check_groups(optimizer, saved)
    states: dict[nn.Parameter, Mapping[str, Any]] = {}
    for group, theirs in zip(optimizer.param_groups, saved):
        for p, index in zip(group['params'], theirs['params']):
            states.setdefault(p, state_dict['state'].get(index, {}))
    for part in engine.parts():
        for name in _names(optimizer, part) if part.trainable else ():
            value = states.get(part.parameter, {}).get(name)
            if value is not None and value.shape != part.parameter.shape:
                raise InvalidArgument(f'{name} of {part.name!r} has shape {tuple(value.shape)}, the parameter '
                                      f'{tuple(part.parameter.shape)}')
    for unit in engine.trainable if is_adafactor(optimizer.original) else ():
        for part, own in _statistics(unit, torch.empty(engine.model.unit_elems(unit.index), device='meta')).items():
            for name, value in states.get(part.parameter, {}).items():
                if name in own and value.shape != own[name].shape:
                    raise InvalidArgument(f'{name} of {part.name!r} has shape {tuple(value.shape)}, its parameter\'s has '
                                          f'{tuple(own[name].shape)}')
    applied = 0 if any('step' in state for state in states.values()) else stamp(engine).updates
    updates = {unit: _updates_of(optimizer, unit, states, applied) for unit in engine.trainable}

    def fill_statistics(unit: Unit, _: int, to: torch.Tensor) -> None:
        for part, own in _statistics(unit, to).items():
            for name, value in own.items():
                theirs = states.get(part.parameter, {}).get(name)
                value.copy_(theirs) if theirs is not None else value.zero_()

    def fill(unit: Unit, array: int, to: torch.Tensor) -> None:
        to.zero_()
        for part in unit.parts:
            for name, moment in zip(_names(optimizer, part), MOMENTS):
                value = states.get(part.parameter, {}).get(name)
                if moment == array and value is not None:
                    engine.view(to, part).copy_(value)
    arrays = {unit: sum(1 << array for array in _moments(optimizer, unit)) for unit in engine.trainable}
    adafactor = is_adafactor(optimizer.original)
    if adafactor:
        arrays = dict.fromkeys(engine.trainable, _c.SHD_PUT_PARAMS)
    if any(arrays.values()):
        engine.meet()
        put(engine, arrays, fill_statistics if adafactor else fill, updates, whole=adafactor)
    # In place: who has built on the groups (a scheduler) goes on with them.
    for group, theirs in zip(optimizer.param_groups, saved):
        group.update({key: value for key, value in theirs.items() if key != 'params'})


# -- safetensors -----------------------------------------------------------------------------------

_DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
           'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8, 'U8': torch.uint8,
           'BOOL': torch.bool}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_HEADER_MAX = 100 << 20
Rename = Union[Mapping[str, str], Callable[[str], str], None]


class Loaded(NamedTuple):
    """What load_safetensors() found no use for, and what it found nothing for."""
    unused: list[str]
    missing: list[str]


class _File:
    """A safetensors file, mapped: only what is asked for is read."""

    def __init__(self, path: str):
        self.path = path
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), 'little')
            if size < 8 or not 2 <= length <= min(size - 8, _HEADER_MAX):
                raise InvalidArgument(f'{path}: not a safetensors file: its header would have {length} bytes, the file '
                                      f'has {size}')
            try:
                self.entries = json.loads(file.read(length))
                self.entries.pop('__metadata__', None)
                for name, entry in self.entries.items():
                    begin, end = entry['data_offsets']
                    count = torch.Size(entry['shape']).numel()
                    if not 0 <= begin <= end <= size - 8 - length or (
                            entry['dtype'] in _DTYPES and end - begin != count * _DTYPES[entry['dtype']].itemsize):
                        raise ValueError(f'tensor {name!r} is said to be at {begin} to {end}')
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise InvalidArgument(f'{path}: the header is damaged: {e}') from e
            self.at = 8 + length
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def check(self, name: str) -> None:
        if self.entries[name]['dtype'] not in _DTYPES:
            raise NotSupported(f'{self.path}: {name!r} is {self.entries[name]["dtype"]}: known are '
                               f'{", ".join(_DTYPES)}')

    def tensor(self, name: str) -> torch.Tensor:
        self.check(name)
        entry = self.entries[name]
        dtype, shape = _DTYPES[entry['dtype']], entry['shape']
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype, device='cpu')
        begin = self.at + entry['data_offsets'][0]
        if begin % dtype.itemsize:  # not aligned: a copy is
            raw = bytearray(self.bytes[begin:begin + count * dtype.itemsize])
            return torch.frombuffer(raw, dtype=dtype).view(shape)
        return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=begin).view(shape)


def _open(path: str) -> dict[str, _File]:
    """Tensor name: the file that has it. A file, or a directory with model.safetensors or its index."""
    if os.path.isdir(path):
        index = os.path.join(path, 'model.safetensors.index.json')
        if os.path.exists(index):
            with open(index, encoding='utf-8') as file:
                names = json.load(file)['weight_map']
            files = {name: _File(os.path.join(path, os.path.basename(name))) for name in sorted(set(names.values()))}
            for tensor, name in names.items():
                if tensor not in files[name].entries:
                    raise InvalidArgument(f'{index}: {tensor!r} is said to be in {name}, which does not have it')
            return {tensor: files[name] for tensor, name in names.items()}
        path = os.path.join(path, 'model.safetensors')
    one = _File(path)
    return dict.fromkeys(one.entries, one)


def load_safetensors(module: nn.Module, path: str, rename: Rename = None, *, strict: bool = True) -> Loaded:
    """Parameters (and buffers) from a safetensors file, or a directory with model.safetensors or its index, by name:
    one put, unit by unit, so that this process never holds the model. rename: of a name in the module the one in
    the file, as a dict of those that differ or as a function. Not strict: what is missing stays as it is."""
    engine = engine_of(module)
    _between_steps(engine, 'load_safetensors()')
    files = _open(path)
    named = rename if callable(rename) else (lambda name: (rename or {}).get(name, name))
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(p, []).append(name)
    used, missing, found = set(), [], {}
    for part in engine.parts():
        names = [named(name) for name in ([part.whole] if part.rows else aliases[part.parameter])]
        used.update(names)
        if (there := next((name for name in names if name in files), None)) is None:
            missing.extend([part.whole] * (not part.first))
            continue
        shape = list(files[there].entries[there]['shape'])
        if shape != part.shape:
            raise InvalidArgument(f'{path}: {there!r} has shape {shape}, the module\'s {part.whole!r} has {part.shape}')
        found[part] = there
    if missing and strict:
        raise InvalidArgument(f'{path} has no {named(missing[0])!r} ({len(missing)} of {len(list(engine.parts()))} '
                              'parameters are missing): say rename= where names differ, or strict=False to leave '
                              'those as they are')

    def fill(unit: Unit, _: int, to: torch.Tensor) -> None:
        if unit in kept:
            to.copy_(kept[unit][:to.numel()])
        for part in unit.parts:
            if part in found:
                values = files[found[part]].tensor(found[part])
                if part.rows:
                    values = values[part.first:part.first + part.parameter.shape[0]]
                engine.view(to, part).copy_(values)
    units = [unit for unit in engine.units if any(part in found for part in unit.parts)]
    # Owners keep a scalar as one element.
    loads = {there: buffer for name, buffer in module.named_buffers() if (there := named(name)) in files
             and (list(files[there].entries[there]['shape']) or [1]) == (list(buffer.shape) or [1])}
    used.update(loads)
    for there in {*found.values(), *loads}:
        files[there].check(there)
    kept = masters(engine, [unit for unit in units if any(part not in found for part in unit.parts)])
    before = {there: buffer.clone() for there, buffer in loads.items()}
    try:
        with torch.no_grad():
            for there, buffer in loads.items():
                buffer.copy_(files[there].tensor(there).view(buffer.shape))
        kept.update(buffers := engine.buffers.all_changed())
        if units or buffers:
            engine.meet()
            put(engine, dict.fromkeys([*units, *buffers], _c.SHD_PUT_PARAMS), fill)
    except BaseException:
        with torch.no_grad():
            for there, buffer in loads.items():
                buffer.copy_(before[there])
        engine.buffers.restore()
        raise
    return Loaded(sorted(set(files) - used), missing)


def save_safetensors(module: nn.Module, path: str, *, fp32: bool = False) -> None:
    """Parameters and buffers as one safetensors file, written unit by unit. fp32: all bits, as the owners keep them;
    else as the module has them. Whatever fails, what was at the path before stays."""
    engine = engine_of(module)
    _between_steps(engine, 'save_safetensors()')
    sizes: dict[str, tuple[str, list[int], int]] = {}
    for part in engine.parts():
        dtype = torch.float32 if fp32 else part.parameter.dtype
        sizes[part.whole] = _WORDS[dtype], part.shape, torch.Size(part.shape).numel() * dtype.itemsize
    buffers = {name: b for name, b in module.named_buffers() if name in module.state_dict(keep_vars=True)}
    for name, b in buffers.items():
        sizes[name] = _WORDS[b.dtype], list(b.shape), b.numel() * b.element_size()
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
    at = 0
    for name, (word, shape, length) in sizes.items():
        header[name] = {'dtype': word, 'shape': shape, 'data_offsets': [at, at + length]}
        at += length
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    partial = f'{path}.{os.getpid()}.partial'
    step = stamp(engine).step
    try:
        with open(partial, 'wb') as file:
            file.write(len(text).to_bytes(8, 'little') + text)
            for unit in engine.units:
                array = read(engine, unit, PARAMS)[0] if fp32 else None
                with engine.all_held([unit]):
                    for part in unit.parts:  # a tile's are rows of a tensor
                        values = engine.view(unit.array if array is None else array, part)
                        before = part.first * values[0].numel() * values.element_size() if part.rows else 0
                        file.seek(8 + len(text) + header[part.whole]['data_offsets'][0] + before)
                        _write(file, values)
            for name, b in buffers.items():
                file.seek(8 + len(text) + header[name]['data_offsets'][0])
                _write(file, b)
            if stamp(engine).step != step:
                raise Misuse('save_safetensors() while other workers committed a step: the file would be of two; save '
                             'where all workers are between the same two steps, or use sd.save()')
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)


def _write(file: Any, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().contiguous().cpu()
    if tensor.numel():
        file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))
