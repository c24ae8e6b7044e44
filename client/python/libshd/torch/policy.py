"""What a worker holds when: schedules, by the names they are known by (docs/schedules.md).

Results do not depend on it, to the bit.
"""
from __future__ import annotations

import dataclasses

from .. import _c
from ..errors import InvalidArgument

_PREFETCH = {'pre': _c.SHD_PREFETCH_PRE, 'post': _c.SHD_PREFETCH_POST, 'none': _c.SHD_PREFETCH_NONE}


@dataclasses.dataclass(frozen=True)
class Policy:
    """forward_prefetch: units fetched ahead of the one that computes. max_live_*: hard bounds; 0: none."""
    prefetch: str = 'pre'
    forward_prefetch: int = 1
    max_live_units: int = 0
    max_live_bytes: int = 0
    strategy = _c.SHD_ZERO3
    # A unit's parameters are held from forward to backward; its gradient leaves when it is complete.
    keeps, early = True, True

    # Whether what no layer of its own has is freed after forward, too.
    frees_root = False

    def holds(self, _unit: str) -> bool:
        """Whether the unit's parameters are held from its forward to its backward."""
        return self.keeps

    @property
    def in_place(self) -> bool:
        """Whether copies of parameters stay where they are: each unit has a place of its own."""
        return self.keeps and not self.max_live_units and not self.max_live_bytes

    def fields(self) -> dict[str, int]:
        """Of struct shd_policy. PyTorch's parameters are the owners' memory itself: the path is map."""
        if self.prefetch not in _PREFETCH:
            raise InvalidArgument(f'prefetch={self.prefetch!r}: must be one of {", ".join(_PREFETCH)}')
        return {'strategy': self.strategy, 'forward_prefetch': self.forward_prefetch,
                'backward_prefetch': _PREFETCH[self.prefetch], 'max_live_units': self.max_live_units,
                'max_live_bytes': self.max_live_bytes, 'path': _c.SHD_PATH_AUTO}


class ZeRO3(Policy):
    """FULL_SHARD: freed after forward, fetched again for backward."""
    keeps = False


class ZeRO2(Policy):
    """SHARD_GRAD_OP: kept from forward to backward."""
    strategy = _c.SHD_ZERO2


class ZeRO1(Policy):
    """All parameters are kept for the step; a gradient leaves as its unit's backward ends."""
    strategy = _c.SHD_ZERO1


class DDP(Policy):
    """All is kept; gradients leave when the whole backward is done, so one that fails may be tried again."""
    strategy = _c.SHD_DDP
    early = False
