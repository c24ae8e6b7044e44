"""Tensor and pipeline parallel workers: the ranks of a group, tp x pp of a mesh, are one worker together.

Daemons keep the whole model, by the plain module's names. A rank reads its own of it in their memory: the units of its
stage, and of a tensor that is cut the rows or columns that are its. Of each unit one rank returns the whole gradient.
"""
from __future__ import annotations

import contextlib
import math
import os
import zlib
from typing import Any, Iterator, Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidArgument, Misuse, NotSupported
from . import attach, cut, layout
from .cut import Cut, is_cut
from .layout import Part, Unit

DATA = ('dp', 'dp_replicate', 'dp_shard')  # dimensions of a mesh over which gradients are averaged
WITHIN = ('pp', 'tp')
Grads = Sequence[Optional[torch.Tensor]]


class Ranks:
    """Those of the group that this process is of."""

    def __init__(self, mesh: Any, dp: Optional[tuple[int, int]]):
        names, at = _check_mesh(mesh), mesh.get_coordinate()
        data = [dim for dim, name in enumerate(names) if name in DATA]
        if dp is not None and data:
            raise InvalidArgument(f'dp={dp} with a mesh that has {names[data[0]]!r}: dp= is for groups that each have a '
                                  'mesh of their own; leave out one of the two')
        self.rank, self.world = _check_dp(dp) if dp is not None else (0, 1)
        for dim in data:
            self.rank, self.world = self.rank * mesh.size(dim) + at[dim], self.world * mesh.size(dim)
        self.me = dist.get_rank()
        self.members, self.group = _group_of(mesh.mesh, data, self.me)
        self.first = self.rank == 0 and self.me == self.members[0]
        self.stage = at[names.index('pp')] if 'pp' in names else 0
        self.stages = mesh.size(names.index('pp')) if 'pp' in names else 1
        self.tp = mesh.get_group('tp') if 'tp' in names else None
        self.across = dist.get_process_group_ranks(self.tp) if self.tp is not None else [self.me]
        self.turns: dict[Unit, int] = {}  # who of those returns a unit

    @property
    def cuts(self) -> bool:
        """Several ranks have the same units."""
        return len(self.across) > 1

    def tell(self, what: Any) -> list[Any]:
        """What each rank of the group says, to all of them."""
        said: list[Any] = [None] * len(self.members)
        dist.all_gather_object(said, what, group=self.group)
        return said

    def returns(self, unit: Unit) -> bool:
        """Whether this rank does it, of those that have the unit."""
        return self.across[self.turns[unit]] == self.me

    @contextlib.contextmanager
    def numbered(self) -> Iterator[None]:
        """A session that is made in here tells the owners a number of its own; $RANK is one within the group's torchrun,
        where each has one."""
        before = os.environ.get('RANK')
        os.environ['RANK'] = str(self.rank * len(self.members) + self.members.index(self.me))
        try:
            yield
        finally:
            del os.environ['RANK']
            if before is not None:
                os.environ['RANK'] = before

    def settle(self) -> None:
        """No rank reads parameters of the step once all is in. One that holds back a unit of its own sees to that itself;
        one that returns none is waited for."""
        if len(self.turns) < len(self.across):
            dist.barrier(self.tp)

    # -- What is whose -----------------------------------------------------------------------------

    def groups_of(self, module: nn.Module, whole: nn.Module,
                  optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
        """The optimizers' group of each of the whole module's parameters, of which each stage has some."""
        groups = layout.groups_of(module, optimizer)
        mine = {name: (groups.get(p, 0), tuple(p.shape), p.requires_grad)
                for name, p in module.named_parameters() if p.numel()}
        known = {name: p for name, p in whole.named_parameters() if p.numel()}
        for name, (_, shape, _) in mine.items():
            if name not in known:
                raise Misuse(f'{name!r} of this stage is no parameter of full=: a stage has the names that the whole '
                             'module has, and what is tied to a parameter of another stage cannot be cut apart')
            if shape != tuple(known[name].shape):
                raise Misuse(f'{name!r} has shape {shape} in this stage, {tuple(known[name].shape)} in full=')
        found: dict[str, Any] = {}
        said = self.tell((self.stage, len(optimizer.param_groups), mine))
        for rank, (stage, count, theirs) in zip(self.members, said):
            if count != len(optimizer.param_groups):
                raise Misuse(f"rank {rank}'s optimizer has {count} param_groups, this one's "
                             f'{len(optimizer.param_groups)}: each makes the same, if need be empty ones')
            for name, what in theirs.items():
                if found.setdefault(name, (stage, what)) != (stage, what):
                    raise Misuse(f'{name!r} is {what} (group, shape, trainable) in stage {stage}, {found[name][1]} in '
                                 f'stage {found[name][0]}: it is in one stage, and alike in all ranks of that')
        if missing := [name for name in known if name not in found]:
            raise Misuse(f'{missing[0]!r} (of {len(missing)}) is in no stage: each parameter of full= is in one')
        return {known[name]: what[0] for name, (_, what) in found.items()}

    def own(self, module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
        """Those of the whole module's units that this rank's module has, of its parameters."""
        modules, here = dict(module.named_modules()), dict(module.named_parameters())
        found = []
        for unit in units:
            there = [part.name in here for part in unit.parts]
            if not any(there):
                continue
            if not all(there):
                one, other = (unit.parts[there.index(which)].name for which in (True, False))
                raise Misuse(f'{one!r} and {other!r} are one unit, {unit.name!r}, and of two stages: say shard(units=)')
            parts = [Part(part.name, here[part.name], modules[part.name.rpartition('.')[0]], part.group, part.trainable,
                          cut=self._cut(part.name, here[part.name])) for part in unit.parts]
            found.append(Unit(unit.name, unit.index, parts, unit.trainable, align=unit.align))
            found[-1].modules = layout.modules_that_need(found[-1], modules)
        if not found:
            raise Misuse(f'stage {self.stage} has no parameter')
        for turn, unit in enumerate(unit for unit in found if unit.trainable):
            self.turns[unit] = turn % len(self.across)
        return found

    def _cut(self, name: str, p: torch.Tensor) -> Optional[Cut]:
        if is_cut(p):
            if p.device_mesh.ndim != 1 or self.tp is None or \
                    p.device_mesh.mesh.flatten().tolist() != self.across:
                raise NotSupported(f"{name!r} is a DTensor over {p.device_mesh}: here they are over the mesh's 'tp' "
                                   'alone; leave out fully_shard() and its like, owners keep what these cut')
            placement = p.placements[0]
            if not placement.is_replicate() and type(placement).__name__ != 'Shard':
                raise NotSupported(f'{name!r} is a DTensor of {placement}: owners know of Shard and Replicate')
            dim = placement.dim % p.dim() if not placement.is_replicate() else None
            return Cut(dim, self.across.index(self.me), len(self.across))
        return Cut(None, self.across.index(self.me), len(self.across)) if self.cuts else None

    # -- Start values ------------------------------------------------------------------------------

    def start_values(self, units: Sequence[Unit], address: Optional[str], name: str, timeout: Optional[float]) -> None:
        """Have whole ones of what is cut, at the rank that makes the model, if that is not there."""
        there = self.first and self._is_there(address, name, timeout)
        if any(self.tell(there)):
            return
        for part in (part for unit in units for part in unit.parts):
            p = part.parameter
            if is_cut(p) and not p.is_meta and self.members[0] in self.across and self.rank == 0:
                whole = p.full_tensor().detach()
                part.start = whole if self.first else None

    @staticmethod
    def _is_there(address: Optional[str], name: str, timeout: Optional[float]) -> bool:
        session = attach.connect(address, name, timeout)
        try:
            return attach.has_model(session, name)
        finally:
            session.close()

    # -- Gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self, unit: Unit, grads: Grads) -> Optional[list[Optional[torch.Tensor]]]:
        """A unit's whole gradients, if this rank is the one to return them; else they are with that one afterwards. Each
        rank of 'tp' comes here in the same order."""
        if not self.cuts:
            return list(grads)
        mine = [_placed(part, grad) for part, grad in zip(unit.parts, grads)]
        sizes = [*map(_bytes_of, unit.parts), len(mine)]  # and of each whether there is one
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=cut.local(unit.parts[0].parameter).device)
        *places, there = packed.split(sizes)
        there.copy_(torch.tensor([grad is not None for grad in mine], device='cpu'))
        for to, part, grad in zip(places, unit.parts, mine):
            if grad is not None:
                raw = _raw(grad) if part.cut.dim is not None else _sum_of(grad)
                to[:raw.numel()] = raw
        parts = [torch.empty_like(packed) for _ in self.across] if self.returns(unit) else None
        dist.gather(packed, parts, dst=self.across[self.turns[unit]], group=self.tp)
        if parts is None:
            return None
        *pieces, theirs = zip(*(each.split(sizes) for each in parts))
        self._check_there(unit, theirs)
        return [self._joined(part, grad, of) for part, grad, of in zip(unit.parts, mine, pieces)]

    def _check_there(self, unit: Unit, theirs: Sequence[torch.Tensor]) -> None:
        for rank, there in zip(self.across, theirs):
            for part, is_there, is_here in zip(unit.parts, there.tolist(), theirs[self.across.index(self.me)].tolist()):
                if is_there != is_here:
                    one, other = (rank, self.me) if is_there else (self.me, rank)
                    raise Misuse(f"{part.name!r} has a gradient at rank {one} and none at rank {other}: ranks of 'tp' "
                                 'compute the same batch, by the same layers')

    def _joined(self, part: Part, grad: Optional[torch.Tensor],
                pieces: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        if grad is None:
            return None
        if part.cut.dim is None:
            for rank, piece in zip(self.across, pieces):
                if not torch.equal(piece, pieces[part.cut.at]):
                    raise Misuse(f"the gradient of {part.name!r}, of which each rank of 'tp' has all, is another one at "
                                 f'rank {rank} than at rank {self.me}: what is parallelized around it, or the batch, '
                                 'differs')
            return grad
        whole = torch.empty(part.parameter.shape, dtype=grad.dtype, device=grad.device)
        for piece, to in zip(pieces, part.cut.pieces(whole)):
            to.copy_(piece[:to.numel() * to.element_size()].view(grad.dtype).view(to.shape))
        return whole


def _placed(part: Part, grad: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """What this rank has of a gradient that lies as its parameter does."""
    if grad is None or not is_cut(grad):
        return grad
    here = grad.redistribute(placements=part.parameter.placements).to_local()
    return here.wait() if hasattr(here, 'wait') else here


def _bytes_of(part: Part) -> int:
    """In what goes to the rank that returns it: of a gradient that is cut those of the largest piece, else of a sum."""
    if part.cut.dim is None:
        return 4
    shape = part.parameter.shape
    return shape.numel() // shape[part.cut.dim] * -(-shape[part.cut.dim] // part.cut.of) * part.parameter.element_size()


def _raw(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach().contiguous().flatten().view(torch.uint8)


def _sum_of(grad: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(zlib.crc32(_raw(grad).cpu().numpy()).to_bytes(4, 'little')), dtype=torch.uint8,
                        device='cpu')


# -- What shard() is given -----------------------------------------------------------------------------

def _check_mesh(mesh: Any) -> tuple[str, ...]:
    names = getattr(mesh, 'mesh_dim_names', None)
    if not isinstance(mesh, dist.DeviceMesh) or not names:
        raise InvalidArgument(f'mesh={mesh!r}: must be a DeviceMesh whose dimensions have names, '
                              "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))")
    for name in names:
        if name not in (*DATA, *WITHIN):
            raise NotSupported(f"mesh= has a dimension {name!r}: known are {', '.join(map(repr, (*DATA, *WITHIN)))}")
    if mesh.size() != dist.get_world_size() or mesh.get_coordinate() is None:
        raise InvalidArgument(f'mesh= is of {mesh.size()} ranks, the process group of {dist.get_world_size()}: give the '
                              'mesh of all ranks')
    return tuple(names)


def _check_dp(dp: Any) -> tuple[int, int]:
    if not isinstance(dp, tuple) or len(dp) != 2 or not all(type(n) is int for n in dp) or not 0 <= dp[0] < dp[1]:
        raise InvalidArgument(f'dp={dp!r}: must be (which, of how many) groups, (0, 2) for the first of two')
    return dp


def _group_of(ranks: torch.Tensor, data: list[int], me: int) -> tuple[list[int], Any]:
    """The ranks that differ from this one in no dimension of data, and their process group: all make all of these."""
    within = [dim for dim in range(ranks.dim()) if dim not in data]
    rows = ranks.permute(*data, *within).reshape(-1, math.prod(ranks.shape[dim] for dim in within))
    if len(rows) == 1:
        return rows[0].tolist(), dist.group.WORLD
    mine: tuple[list[int], Any] = ([], None)
    for row in rows.tolist():
        group = dist.new_group(row)
        if me in row:
            mine = (row, group)
    return mine
