"""Several stages of a pipeline that one rank has, as one module."""
from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence

from torch import nn

from ..errors import InvalidArgument, Misuse


class Stages(nn.Module):
    """Its parameters have the names that they have in their stages, which are those of the whole module. It computes
    nothing: a schedule runs the stages."""

    def __init__(self, stages: Sequence[nn.Module]):
        super().__init__()
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise InvalidArgument(f'module={stages!r}: must be a torch.nn.Module, or a list of them, which are stages of a '
                                  'pipeline (mesh=)')
        self.stages = nn.ModuleList(stages)
        names: set[str] = set()
        for name, _ in self.named_parameters():
            if name in names:
                raise Misuse(f'two stages have a {name!r}: a stage has the names that the whole module has, and each of its '
                             'parameters is in one')
            names.add(name)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, at: int) -> nn.Module:
        return self.stages[at]

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.named_parameters(*arguments, **named)

    def named_buffers(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        for stage in self.stages:
            yield from stage.named_buffers(*arguments, **named)

    def named_modules(self, memo: Optional[set[nn.Module]] = None, prefix: str = '',
                      remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self
        for stage in self.stages:
            for name, module in stage.named_modules(memo, prefix, remove_duplicate):
                if module is not stage:
                    yield name, module

    def forward(self, *_: Any, **__: Any) -> None:
        raise Misuse('forward() of several stages: the schedule of the pipeline runs each of them')
