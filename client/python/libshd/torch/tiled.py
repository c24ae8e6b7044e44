"""TiledLinear: a linear layer in tiles, each of which is fetched, computed, handed over and freed by itself, so that a
layer may be larger than what a worker may hold (docs/memory.md)."""
from __future__ import annotations

import math
from typing import Any, Iterator, Optional

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InvalidArgument


def first_row(rows: int, tile: int, tiles: int) -> int:
    """As owners cut them (docs/protocol.md, Tiles)."""
    return rows * tile // tiles


class Tile(nn.Module):
    """Some outputs of a TiledLinear, which has their names in a state_dict()."""

    def __init__(self, weight: nn.Parameter, bias: Optional[nn.Parameter]):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        _reset(self.weight)
        if self.bias is not None:
            _reset(self.bias, self.weight.shape[1])

    def _save_to_state_dict(self, *_: Any, **__: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        pass


class TiledLinear(nn.Module):
    """nn.Linear in so many tiles of its outputs. Its state_dict() has `weight` and `bias` as nn.Linear's has, whole,
    and takes them; its parameters are tiles.0.weight, tiles.0.bias, ... shard() makes a unit of each tile, and keeps
    whole tensors in checkpoints. Values at the beginning are nn.Linear's, of the same seed; what is computed is what
    that computes but for rounding, as the inputs' gradient is a sum over tiles."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, tiles: int = 4, device: Any = None,
                 dtype: Optional[torch.dtype] = None):
        super().__init__()
        if not 1 <= tiles <= out_features or in_features < 1:
            raise InvalidArgument(f'TiledLinear({in_features}, {out_features}, tiles={tiles}): tiles must be 1 to '
                                  f'out_features, which has a row for each, and in_features 1 at least')
        self.in_features, self.out_features = in_features, out_features
        rows = [first_row(out_features, at + 1, tiles) - first_row(out_features, at, tiles) for at in range(tiles)]
        how = {'device': device, 'dtype': dtype}
        self.tiles = nn.ModuleList(
            Tile(nn.Parameter(torch.empty(count, in_features, **how)),
                 nn.Parameter(torch.empty(count, **how)) if bias else None) for count in rows)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, tiles: int = 4) -> TiledLinear:
        """With the values of an nn.Linear, on its device, of its type, frozen where it is."""
        weight = linear.weight
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, tiles, device='meta',
                   dtype=weight.dtype)
        for name, mine in made._whole():
            whole = getattr(linear, name)
            for tile, rows in zip(made.tiles, whole.detach().split([p.shape[0] for p in mine])):
                setattr(tile, name, nn.Parameter(rows.clone(), whole.requires_grad))
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        """Weights first, as nn.Linear draws them."""
        for name, parts in self._whole():
            for p in parts:
                _reset(p, self.in_features if name == 'bias' else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tile(x) for tile in self.tiles], -1)

    def extra_repr(self) -> str:
        return (f'in_features={self.in_features}, out_features={self.out_features}, '
                f'bias={self.tiles[0].bias is not None}, tiles={len(self.tiles)}')

    def _whole(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        for name in ('weight', 'bias'):
            if getattr(self.tiles[0], name) is not None:
                yield name, [getattr(tile, name) for tile in self.tiles]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, parts in self._whole():
            whole = torch.cat(parts)
            destination[prefix + name] = whole if keep_vars else whole.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        own = dict(self._whole())
        for name, parts in own.items():
            whole = state_dict.get(prefix + name)
            if whole is None:
                missing_keys.extend([prefix + name] * strict)
                continue
            wanted = torch.Size([self.out_features, *parts[0].shape[1:]])
            if whole.shape != wanted:
                error_msgs.append(f'size mismatch for {prefix + name}: copying a param with shape {whole.shape} from '
                                  f'checkpoint, the shape in current model is {wanted}.')
                continue
            pieces = whole.detach().split([p.shape[0] for p in parts])
            for tile, p, piece in zip(self.tiles, parts, pieces):
                if local_metadata.get('assign_to_params_buffers', False):
                    setattr(tile, name, nn.Parameter(piece.clone(), p.requires_grad))
                else:
                    with torch.no_grad():
                        p.copy_(piece)
        unexpected_keys.extend(key for key in state_dict if strict and key.startswith(prefix)
                               and key[len(prefix):] not in own)


def _reset(p: nn.Parameter, fan_in: Optional[int] = None) -> None:
    """As nn.Linear does: kaiming_uniform_(a=sqrt(5)) of a weight, and what follows of a bias."""
    if fan_in is None:
        nn.init.kaiming_uniform_(p, a=math.sqrt(5))
    else:
        nn.init.uniform_(p, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
