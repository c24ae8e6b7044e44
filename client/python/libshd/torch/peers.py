"""What other tools' configurations say, as what shard() takes: DeepSpeed's, FSDP's, accelerate's, Giotto's.

Each knob is answered by `shardctl plan` (docs/schedules.md), which has the one table of them.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import os
import shlex
import subprocess
import warnings
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import nn

from ..errors import InvalidArgument, Misuse, NotSupported
from ..library import program
from .check import number_from
from .layout import unit_by_layer
from .policy import DDP, ZeRO1, ZeRO2, ZeRO3

Config = Union[str, 'os.PathLike[str]', Mapping[str, Any]]
_POLICIES = {'ddp': DDP, 'zero1': ZeRO1, 'zero2': ZeRO2, 'zero3': ZeRO3}
_DTYPES = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}
# Where classes of layers are named; the answers are the table's all the same.
_LAYERS = ('transformer_layer_cls_to_wrap', 'transformer_cls_names_to_wrap')


class Answer(NamedTuple):
    """answer: 'set' here, always the 'same', for the 'script' to say, 'needless', 'off'."""
    knob: str
    value: str
    answer: str
    text: str


class Settings(dict):
    """Keywords for shard(), and all answers: shard(module, optimizer, **settings); print(settings)."""

    def __init__(self, keywords: Mapping[str, Any] = {}, answers: Iterable[Answer] = ()):
        super().__init__(keywords)
        self.answers = list(answers)

    def __str__(self) -> str:
        widths = [max((len(answer[at]) for answer in self.answers), default=0) for at in range(3)]
        return '\n'.join(f'{a.knob:{widths[0]}}  {a.value:{widths[1]}}  {a.answer:{widths[2]}}  {a.text}'.rstrip()
                         for a in self.answers)


class Joined:
    """units= of shard(): layers, joined with their neighbours until a unit has so many elements."""

    def __init__(self, elems: int):
        self.least, self.layer, self.unit, self.elems = elems, '', '', 0

    def __call__(self, name: str, module: nn.Module) -> str:
        path, _, key = name.rpartition('.')
        layer = unit_by_layer(name) or path
        if not self.unit or layer != self.layer and self.elems >= self.least:
            self.unit, self.elems = f'{layer or "all"}+', 0  # no module's name: it has parts of several
        self.layer = layer
        self.elems += module._parameters[key].numel()
        return self.unit


def from_deepspeed(config: Config, *, world: Optional[int] = None, quiet: bool = False) -> Settings:
    """Of DeepSpeed's configuration, a file or a dictionary: shard(module, optimizer, **from_deepspeed(...)).

    A knob that cannot be had is an exception that names it. What a script says itself (the optimizer, clipping) is
    listed in a warning, unless quiet. world: of workers; None: $WORLD_SIZE.
    """
    given = os.fspath(config) if not isinstance(config, Mapping) else _plain(config)
    return _settings('--deepspeed', given, 'DeepSpeed', world, quiet)


def from_fsdp(config: Any, *, world: Optional[int] = None, quiet: bool = False) -> Settings:
    """Of FSDP's words ("full_shard auto_wrap", also in a list), of fsdp_config, accelerate's or Giotto's
    configuration (a JSON file or a dictionary), or of accelerate's FullyShardedDataParallelPlugin."""
    if dataclasses.is_dataclass(config):
        given: Any = _plain(config)
    elif isinstance(config, (list, tuple, set)):
        given = ' '.join(str(getattr(word, 'value', word)) for word in config)
    else:
        given = os.fspath(config) if not isinstance(config, Mapping) else _plain(config)
    return _settings('--fsdp', given, 'FSDP', world, quiet)


def _plain(value: Any) -> Any:
    """As JSON has it. What a dataclass has by default says nothing."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if one is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__name__ in ('CPUOffload', 'OffloadPolicy', 'CPUOffloadPolicy'):
            return getattr(value, 'offload_params', type(value).__name__ == 'CPUOffloadPolicy')
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)
                       if getattr(value, field.name) != field.default})
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple, set)):
        return [_plain(one) for one in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(getattr(value, 'func', value), '__name__', type(value).__name__)


def _settings(flag: str, given: Union[str, dict[str, Any]], tool: str, world: Optional[int], quiet: bool) -> Settings:
    workers = world if world is not None else number_from('WORLD_SIZE', 1)
    document = _ask(flag, given, workers)
    answers = [Answer(knob['knob'], knob['value'], knob['answer'], knob['text']) for knob in document['knobs']]
    if refused := [a for a in answers if a.answer == 'refused']:
        raise NotSupported(f'{tool}: ' + '; '.join(f'{a.knob}={a.value}: {a.text}' for a in refused))
    words = shlex.split(document['flags'])
    flags = dict(zip(words[::2], words[1::2]))
    asked = int(flags.get('--workers', workers))
    if asked != workers:
        raise Misuse(f'{tool}: the configuration is for {asked} workers, there {"is" if workers == 1 else "are"} '
                     f'{workers}: start it by `shardctl run --workers {asked}` or torchrun, or change its batch sizes')
    settings = Settings(_keywords(flags), answers)
    if isinstance(given, str) and os.path.exists(given):
        with open(given, encoding='utf-8') as file:
            given = json.load(file)
    if isinstance(given, dict) and (layers := _layers(given)):
        settings['units'] = layers
    scaled = settings.get('publish') is torch.float16
    if not quiet and (left := [a for a in answers if a.knob.split('.')[-1].removeprefix('fsdp_') not in _LAYERS and
                               (a.answer == 'script' or scaled and a.text.startswith('--param-dtype'))]):
        warnings.warn(f'{tool}: for the script to say, as here: '
                      + '; '.join(f'{a.knob}={a.value}: {a.text}' for a in left), stacklevel=3)
    return settings


def _ask(flag: str, given: Union[str, dict[str, Any]], workers: int) -> dict[str, Any]:
    """The answers of `shardctl plan`."""
    is_text = isinstance(given, str)
    done = subprocess.run([program('shardctl'), 'plan', flag, given if is_text else '/dev/stdin', '--json',
                           '--workers', str(workers)], input=None if is_text else json.dumps(given),
                          stdin=subprocess.DEVNULL if is_text else None, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        raise InvalidArgument(done.stderr.strip().removeprefix('shardctl: ') or f'{given}: not understood') from None


def _keywords(flags: Mapping[str, str]) -> dict[str, Any]:
    """The flags of `shardctl plan` as keywords of shard()."""
    keywords: dict[str, Any] = {'policy': _POLICIES[flags['--strategy']](
        prefetch=flags['--prefetch'], forward_prefetch=int(flags['--forward-prefetch']),
        max_live_bytes=int(flags.get('--max-live-bytes', 0)))}
    if '--param-dtype' in flags:
        keywords['publish'] = _DTYPES[flags['--param-dtype']]
    if flags.get('--grad-dtype', 'f32') != 'f32':
        keywords['grad_dtype'] = _DTYPES[flags['--grad-dtype']]
    if '--micro-batches-per-worker' in flags:
        keywords['accumulate'] = int(flags['--micro-batches-per-worker'])
    if '--unit-elems-min' in flags:
        keywords['units'] = Joined(int(flags['--unit-elems-min']))
    return keywords


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
    """Classes of layers by their names."""
    for key, value in config.items():
        if key.removeprefix('fsdp_') in _LAYERS and value:
            return [one.strip() for one in value.split(',')] if isinstance(value, str) else list(value)
        if key == 'fsdp_config' and isinstance(value, Mapping) and (found := _layers(value)):
            return found
    return []
