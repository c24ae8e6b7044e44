"""Groups of workers that train by themselves, and merge now and then (shd.h: shd_merge())."""
from __future__ import annotations

import contextlib
from typing import Iterator, NamedTuple, Optional, Union

from .. import _c
from ..errors import InvalidArgument, Misuse, WrongStep
from ..library import sized
from ..session import Model
from . import attach, check


class DiLoCo(NamedTuple):
    """shard(merge=DiLoCo(...)): this group trains `every` steps with its own optimizer, on daemons of its own; then what
    it has changed goes to an outer model, which the groups share, whose SGD with Nesterov's momentum takes the mean of
    it (Douillard et al., "DiLoCo", arXiv 2311.08105).

    outer   address of the outer model's daemons, which all groups reach
    group, groups  this group is one of 0 to groups - 1, of so many when the outer model was made
    lr, momentum  of the outer optimizer
    name    of the outer model; None: the model's with '.outer'
    joined  of a group that came later: merges that the outer model had had by then
    """
    every: int
    outer: str
    group: int
    groups: int
    lr: float = 0.7
    momentum: float = 0.9
    name: Optional[str] = None
    joined: int = 0


class LocalSGD(NamedTuple):
    """As DiLoCo, but all groups go on with the mean of their parameters."""
    every: int
    outer: str
    group: int
    groups: int
    name: Optional[str] = None
    joined: int = 0


Merge = Union[DiLoCo, LocalSGD]


def check_merge(merge: object) -> None:
    if merge is None:
        return
    if not isinstance(merge, (DiLoCo, LocalSGD)):
        raise InvalidArgument(f'merge={merge!r}: must be sd.DiLoCo(...) or sd.LocalSGD(...)')
    check.check_count('every', merge.every, 1)
    check.check_count('groups', merge.groups, 1)
    check.check_count('group', merge.group, 0)
    check.check_count('joined', merge.joined, 0)
    if merge.group >= merge.groups and not merge.joined:
        raise InvalidArgument(f'group={merge.group} of groups={merge.groups}: must be 0 to groups - 1')
    if isinstance(merge, DiLoCo) and not (merge.lr > 0 and 0 < merge.momentum < 1):
        raise InvalidArgument(f'DiLoCo(lr={merge.lr}, momentum={merge.momentum}): must be above 0, the momentum below 1; '
                              'a plain mean is sd.LocalSGD(...)')


class Merger:
    """A worker's part in it. Of workers with fixed shares rank 0 merges, and the others wait for it; of others all
    do, and the first counts."""

    def __init__(self, model: Model, merge: Merge, follows: bool, timeout: Optional[float]):
        self.model, self.every, self.outer = model, merge.every, None
        rates = {'lr': merge.lr, 'momentum': merge.momentum} if isinstance(merge, DiLoCo) else {'average': True}
        self.options = sized(_c.shd_merge_options, every=merge.every, group=merge.group, groups=merge.groups,
                             joined=merge.joined, follows=follows, **rates)
        if not follows:
            session = attach.connect(merge.outer, model.name, timeout)
            try:
                self.outer = model.open_outer(session, merge.name, self.options)
            except BaseException:
                session.close()
                raise

    def due(self) -> bool:
        return self.model.step % (self.every + 1) == 0

    def merge(self) -> None:
        self.model.merge(self.outer, self.options)

    def close(self) -> None:
        if self.outer is not None:
            self.outer.session.close()


@contextlib.contextmanager
def begun(model: Model, merge: Optional[Merge], follows: bool, timeout: Optional[float]) -> Iterator[Optional[Merger]]:
    """With the merge made that the model is at; what fails in here lets go of the outer model."""
    merger = Merger(model, merge, follows, timeout) if merge is not None else None
    try:
        if merger is not None:
            try:
                merger.merge()
            except WrongStep as e:  # which attached() takes for another worker's put
                raise Misuse(str(e)) from e
        yield merger
    except BaseException:
        if merger is not None:
            merger.close()
        raise
