"""From a module and its optimizer to units and the model's specification."""
from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import nn

from ..errors import Misuse, NotSupported
from .cut import Cut
from .tiled import TiledLinear, first_row

Rule = Union[str, Sequence[Union[type, str]], Callable[[str, nn.Module], str]]
DTYPES = {torch.float32: 'f32', torch.bfloat16: 'bf16', torch.float16: 'f16'}


@dataclasses.dataclass(eq=False)
class Part:
    """A parameter, in its unit. `home` is where its values are: the owners' memory. Or a buffer."""
    name: str
    parameter: torch.Tensor
    owner: nn.Module
    group: int
    trainable: bool
    offset: int = 0
    index: int = 0
    home: int = 0
    cut: Optional[Cut] = None               # of a rank of a group: what it has of it
    start: Optional[torch.Tensor] = None    # its start values, where they are not in the parameter
    rows: int = 0  # of a tile's, whose name is 'WHOLE/TILE': how many the whole parameter has, and which is its first
    first: int = 0

    @property
    def whole(self) -> str:
        """The name of the parameter that it is, or has rows of."""
        return self.name.rpartition('/')[0] if self.rows else self.name

    @property
    def key(self) -> str:
        """Its name in its owner."""
        return self.whole.rpartition('.')[2]

    @property
    def shape(self) -> list[int]:
        """Of the whole one."""
        return [self.rows, *self.parameter.shape[1:]] if self.rows else list(self.parameter.shape)


@dataclasses.dataclass(eq=False)
class Unit:
    """What is held at the same time: a layer's parameters, trainable or frozen alike."""
    name: str
    index: int
    parts: list[Part]
    trainable: bool
    address: int = 0
    align: int = 32  # where tensors begin, in elements: 64 in a model with moments in 8 bits, or a codec
    array: Any = None
    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    tile: int = 0   # it is this one, its name 'WHOLE/TILE', of so many; 0: it is not cut
    tiles: int = 0


def unit_by_layer(name: str) -> str:
    """Names that agree up to the first number: 'blocks.3.fc.weight' is of 'blocks.3'; else ''."""
    found = re.match(r'(?:[^.]+\.)*?\d+(?=\.)', name)
    return found[0] if found else ''


def _unit_of(name: str, path: str, module: nn.Module, modules: dict[str, nn.Module], rule: Rule) -> str:
    """By the rule; '' for what no rule claims."""
    if callable(rule) and not isinstance(rule, type):
        return rule(name, module)
    if rule == 'auto':
        return unit_by_layer(name)
    if isinstance(rule, str):
        raise Misuse(f"units={rule!r}: must be 'auto', module classes, or a function of name and module")
    classes = tuple(kind for kind in rule if isinstance(kind, type))
    steps = path.split('.') if path else []
    for depth in range(len(steps) + 1):
        outer = '.'.join(steps[:depth])
        if isinstance(modules[outer], classes) or type(modules[outer]).__name__ in rule:
            return outer or type(module).__name__
    return ''


def groups_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The optimizer's group of each parameter; both must mean the same ones."""
    found = {p: at for at, group in enumerate(optimizer.param_groups) for p in group['params']}
    names = {p: name for name, p in module.named_parameters()}
    strangers = [tuple(p.shape) for p in found if p not in names]
    if strangers:
        raise Misuse(f'the optimizer has {len(strangers)} parameters that are not the module\'s (the first has '
                     f'shape {strangers[0]}): make it of module.parameters()')
    left = [name for p, name in names.items() if p not in found and p.requires_grad and p.numel()]
    if left:
        raise Misuse(f'{left[0]!r} (of {len(left)}) requires a gradient and is in no group of the optimizer: '
                     'one optimizer has all; give it to that, or freeze it by requires_grad_(False)')
    return found


def units_of(module: nn.Module, groups: dict[nn.Parameter, int], rule: Rule) -> list[Unit]:
    """The module's parameters as units in the order of its attributes; a tied one is where it comes first."""
    modules = dict(module.named_modules())
    named: dict[tuple[str, bool], list[Part]] = {}
    if isinstance(rule, (list, tuple)) and (unknown := {kind for kind in rule if isinstance(kind, str)}
                                            - {type(inner).__name__ for inner in modules.values()}):
        raise Misuse(f'units={list(rule)}: {type(module).__name__} has no module of class {sorted(unknown)[0]}')
    last, loose, tiles = '', 0, _tiles_of(modules)
    for name, p in module.named_parameters():
        if not p.numel():
            continue  # nothing to keep anywhere
        path = name.rpartition('.')[0]
        if path in tiles:
            unit, part = _tile_part(tiles[path], name, p, modules[path], groups.get(p, 0))
            named.setdefault((unit, p.requires_grad), []).append(part)
            last = unit
            continue
        unit = _unit_of(name, path, modules[path], modules, rule)
        if not unit:  # neighbours that nobody claims
            loose += not last.startswith('rest.')
            unit = f'rest.{loose}'
        last = unit
        # Frozen and trainable ones never share a unit: owners keep no moments of the former.
        named.setdefault((unit, p.requires_grad), []).append(
            Part(name, p, modules[path], groups.get(p, 0), p.requires_grad))
    if not named:
        raise Misuse(f'{type(module).__name__} has no parameters')
    both = {unit for unit, trainable in named if trainable} & {unit for unit, trainable in named if not trainable}
    units = []
    for (unit, trainable), parts in named.items():
        name = unit + (':frozen' if unit in both and not trainable else '')
        units.append(Unit(name, len(units), parts, trainable))
    for unit in units:
        unit.modules = modules_that_need(unit, modules)
    _check_tiles(units, tiles)
    return units


class _Place(NamedTuple):
    """Of a tile in its layer."""
    layer: str
    unit: str
    tile: int
    of: TiledLinear


def _tiles_of(modules: Mapping[str, nn.Module]) -> dict[str, _Place]:
    """By their paths."""
    return {f'{path}.tiles.{at}' if path else f'tiles.{at}': _Place(path, path or type(layer).__name__, at, layer)
            for path, layer in modules.items() if isinstance(layer, TiledLinear) and len(layer.tiles) > 1
            for at in range(len(layer.tiles))}


def _tile_part(place: _Place, name: str, p: nn.Parameter, owner: nn.Module, group: int) -> tuple[str, Part]:
    """Its unit, whatever the rule, and its part, by the name that owners have."""
    key, rows = name.rpartition('.')[2], place.of.out_features
    whole = f'{place.layer}.{key}' if place.layer else key
    return f'{place.unit}/{place.tile}', Part(
        f'{whole}/{place.tile}', p, owner, group, p.requires_grad, rows=rows,
        first=first_row(rows, place.tile, len(place.of.tiles)))


def _check_tiles(units: Sequence[Unit], tiles: Mapping[str, _Place]) -> None:
    """All of a layer's are alike, and one behind the other: a specification has them as one unit."""
    places = {f'{place.unit}/{place.tile}': place for place in tiles.values()}
    for at, unit in enumerate(units):
        place = places.get(unit.name.removesuffix(':frozen'))
        if place is None:
            continue
        unit.tile, unit.tiles = place.tile, len(place.of.tiles)
        first = units[at - unit.tile]
        alike = [[(part.key, part.group, part.trainable) for part in one.parts] for one in (first, unit)]
        if first.name != f'{place.unit}/0' or alike[0] != alike[1] or unit.name.endswith(':frozen'):
            raise NotSupported(f'{place.unit!r} is a TiledLinear of which tile {place.tile} is not as tile 0: all of '
                               'its tiles are frozen or none, weights and biases alike, their weights are of one '
                               'group of the optimizer, so are their biases, and none is tied to another parameter')


def modules_that_need(unit: Unit, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """The one module that has all of the unit, if it is no more than a layer; else each that has a part."""
    inside = modules.get(unit.name.removesuffix(':frozen'))
    if inside is not None and inside is not modules['']:
        return [inside]
    return list(dict.fromkeys(part.owner for part in unit.parts))


def elems_of(unit: Unit) -> int:
    """Of the unit's array; and where each tensor is in it: at the next multiple of unit.align (docs/protocol.md)."""
    at = 0
    for part in unit.parts:
        part.offset = -(-at // unit.align) * unit.align
        at = part.offset + part.parameter.numel()
    return at


def dtype_of(units: Sequence[Unit]) -> torch.dtype:
    """The one type of all parameters; they are published in it, and kept in fp32."""
    found: dict[torch.dtype, str] = {}
    for unit in units:
        for part in unit.parts:
            found.setdefault(part.parameter.dtype, part.name)
    if len(found) > 1:
        first, second = list(found.items())[:2]
        raise NotSupported(f'{first[1]!r} is {first[0]}, {second[1]!r} is {second[0]}: all parameters must have one '
                           'type; cast the module first, or leave it in fp32 and use torch.autocast')
    dtype = next(iter(found))
    if dtype not in DTYPES:
        raise NotSupported(f'{next(iter(found.values()))!r} is {dtype}: parameters are float32, bfloat16 or float16; '
                           'cast the module before shard()')
    return dtype


_F32 = torch.finfo(torch.float32)
_EPS1_MIN = 2.0 ** -63  # its square is an ordinary number


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is getattr(torch.optim, 'Muon', None)  # from 2.9 on


def is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is getattr(torch.optim, 'Adafactor', None)  # from 2.5 on


def optimizer_spec(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The owners' optimizer of the same formula, or a refusal by the name of what differs."""
    kind, first = type(optimizer), optimizer.param_groups[0]
    for flag in ('amsgrad', 'maximize', 'differentiable'):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise NotSupported(f'{kind.__name__}({flag}=True): owners do not have it; leave it out')
    if is_muon(optimizer) or is_adafactor(optimizer):
        for at in range(len(optimizer.param_groups)):
            group_optimizer(optimizer, at)
        # Of no parameter, but a model has one: the one with the fewest moments, of which Muon's is the first.
        return {'kind': 'sgd', 'order': 'torch'}
    for key in ('eps', 'nesterov', 'dampening'):
        if any(group.get(key) != first.get(key) for group in optimizer.param_groups):
            raise NotSupported(f'{key} differs between groups: it is one for the model')
    # Owners update in PyTorch's own order of operations.
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        decoupled = kind is torch.optim.AdamW or first.get('decoupled_weight_decay', False)
        return {'kind': 'adamw', 'order': 'torch', 'eps': first['eps'],
                'decay': 'decoupled' if decoupled else 'coupled'}
    if kind is torch.optim.SGD:
        return {'kind': 'sgd', 'order': 'torch', 'momentum': float(first['momentum']),
                'nesterov': first['nesterov'], 'dampening': first['dampening']}
    raise NotSupported(f'torch.optim.{kind.__name__}: owners have AdamW, Adam, SGD, Muon and Adafactor')


def group_optimizer(optimizer: torch.optim.Optimizer, at: int) -> Optional[dict[str, Any]]:
    """That of the group's own, where groups have one; or a refusal by the name of what owners do not have."""
    group = optimizer.param_groups[at]
    if is_muon(optimizer):
        for key, most in (('momentum', 1.0), ('ns_steps', 100)):
            if not 0 <= group[key] < most or not (group[key] or key == 'momentum'):
                raise NotSupported(f'Muon({key}={group[key]}): owners have {"0" if key == "momentum" else "1"} to below '
                                   f'{most:g}')
        if not _F32.tiny <= group['eps'] <= _F32.max or len(group['ns_coefficients']) != 3:
            raise NotSupported(f'Muon(eps={group["eps"]}, ns_coefficients={group["ns_coefficients"]}): owners have an eps '
                               f'of {_F32.tiny:g} and more, and three coefficients')
        return {'kind': 'muon', 'momentum': float(group['momentum']), 'nesterov': bool(group['nesterov']),
                'ns_steps': int(group['ns_steps']), 'ns_coefficients': [float(x) for x in group['ns_coefficients']],
                'eps': float(group['eps']), 'adjust_lr_fn': group['adjust_lr_fn'] or 'original'}
    if not is_adafactor(optimizer):
        return None
    eps1, eps2 = group['eps']
    if eps1 is not None and not _EPS1_MIN <= eps1 <= _F32.max:
        raise NotSupported(f'Adafactor(eps=({eps1}, {eps2})): owners divide by its square in float32, and have None '
                           f'({_F32.eps:g}, whatever type parameters are read in) or {_EPS1_MIN:g} and more')
    flat = [p for p in group['params'] if p.dim() > 8]
    if flat:
        raise NotSupported(f'Adafactor of a parameter of shape {tuple(flat[0].shape)}: owners have up to 8 dimensions')
    return {'kind': 'adafactor', 'beta2_decay': float(group['beta2_decay']), 'd': float(group['d']),
            'eps1': float(_F32.eps if eps1 is None else eps1), 'eps2': float(eps2)}


def spec_of(units: Sequence[Unit], optimizer: torch.optim.Optimizer, name: str, micro_batches: int,
            publish: torch.dtype, grad_dtype: Optional[torch.dtype] = None,
            verify_every: int = 0, guard: Sequence[Mapping[str, Any]] = (), guard_audit: bool = False,
            micro_batches_max: int = 0, moments: str = 'f32', accumulate: int = 1,
            codec: str = 'none', grad_codec: str = 'none') -> str:
    """The model's specification, in JSON (docs/protocol.md)."""
    # Rates are those of each step, so the specification has none. As in PyTorch, what had no gradient stays.
    groups: list[dict[str, Any]] = [{'name': f'group{at}', 'idle': 'skip'}
                                    for at in range(len(optimizer.param_groups))]
    for at, group in enumerate(groups):
        if (own := group_optimizer(optimizer, at)) is not None:
            group['optimizer'] = own
    if any(part.group == len(groups) for unit in units for part in unit.parts):  # buffers: buffers_of()
        groups.append({'name': f'group{len(groups)}', 'optimizer': {'kind': 'mean'}})
    rules = {'verify_every': verify_every} if verify_every else {}  # older daemons do not know these fields
    rules |= {'guard_audit': True} if guard_audit else {}
    if micro_batches_max > micro_batches:
        rules['micro_batches_max'] = micro_batches_max
    if codec != 'none':
        rules['codec'] = codec
    if grad_codec != 'none':
        rules['grad_codec'] = grad_codec
    if accumulate > 1:
        rules['accumulate'] = accumulate
    owners = optimizer_spec(optimizer) | ({'moments': moments} if moments != 'f32' else {})
    return json.dumps(rules | ({'guard': list(guard)} if guard else {}) | {
        'name': name, 'micro_batches': micro_batches, 'publish': DTYPES[publish],
        'grad_dtype': DTYPES[grad_dtype or torch.float32], 'optimizer': owners, 'groups': groups,
        'units': [_unit_spec(unit) for unit in units if not unit.tile]})


def _unit_spec(unit: Unit) -> dict[str, Any]:
    """Of tiles the first stands for all."""
    name = unit.name.rpartition('/')[0] if unit.tiles else unit.name
    return {'name': name} | ({'tiles': unit.tiles} if unit.tiles else {}) | {'tensors': [
        {'name': part.whole, 'shape': part.shape if part.rows else shape_of(part.parameter),
         'group': f'group{part.group}', 'trainable': part.trainable} for part in unit.parts]}


def shape_of(p: torch.Tensor) -> list[int]:
    """As a specification takes it: 1 to 8 sizes."""
    return list(p.shape) if 1 <= p.dim() <= 8 else [p.numel()]
