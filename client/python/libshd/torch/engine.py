"""A module's steps: what its hooks, its optimizer and the owners of its parameters have to do with each other.

Parameters are read in the owners' memory. Each backward() is a micro-batch: a unit's gradient is handed over
when it is complete (early), or when backward() is done. The last unit of a micro-batch is held back until the
next forward or step(), as metrics may be reported until then.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, NamedTuple, NoReturn, Optional

import torch
from torch import nn

from .. import _c
from ..errors import InternalError, InvalidArgument, Misuse, NotSupported, StepReset, WrongStep
from ..session import Model, Result
from . import check
from .buffers import Buffers
from .cut import apart, keep, local, place, refuse
from .device import DTYPES, Device
from .guard import PENDING, guard, unguard
from .layout import Part, Unit, elems_of
from .merge import Merger
from .policy import Policy

if TYPE_CHECKING:
    from .parallel import Ranks

ENGINES: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
APART = ('Has another worker used writable(), or its like, where this one did not? Each calls it, at the same point of '
         'its loop, also those whose values do not count')
BEHIND = ('This worker was started again, and others have put values since (writable(), or its like): compute the '
          'batches of its first step once more')
CHANGING = (1 << 64) - 1  # Model.unit_version()
BACK = ('The model is at step {now} again, where it was at step {was}, as it went back to a snapshot or has other '
        'owners: go on with the batches, and the rates, of sd.step_of(model)')


class Place(NamedTuple):
    """Whose micro-batches these are: rank of world workers, accumulate of them in each step."""
    rank: int
    world: int
    accumulate: int

    def micro(self, backward: int) -> int:
        return backward * self.world + self.rank

    def summed(self) -> int:
        """Micro-batches that the workers of a host make of one backward(), each of them one: neighbours, by rank."""
        here = check.number_from('LOCAL_WORLD_SIZE', self.world)
        if here < 1 or self.world % here:
            raise InvalidArgument(f"sums='host' with WORLD_SIZE={self.world}, LOCAL_WORLD_SIZE={here} in the environment: "
                                  'there have to be as many workers on each host')
        return here


def engine_of(module: nn.Module) -> 'Engine':
    if (engine := ENGINES.get(module)) is None:
        raise Misuse(f'{type(module).__name__} is not sharded: give the module that shard() returned')
    return engine


def wait_for(engine: weakref.ref[Engine], unit: Unit) -> None:
    """What a parameter does before it is read."""
    if (alive := engine()) is not None and unit in alive.pending:
        alive.wait(unit)


def why_gone(engine: weakref.ref[Engine], unit: Unit) -> str:
    """Of a gradient that is not with its parameter: whether it has been, in this step."""
    alive = engine()
    if alive is None or not alive.stream or alive.writing or not unit.trainable:
        return ''
    if not alive.backwards and (alive.missing is None or unit in alive.missing):
        return ''
    return ('gradients leave for the owners during backward(); say shard(grads="step") to look at them or to change '
            'them before step() (they are this worker\'s, before the mean over workers), or change them in '
            'p.register_hook(); optimizer.zero_grad() drops those of the step')


def _in_brief(names: tuple[str, ...]) -> str:
    """For other workers to compare."""
    text = ', '.join(ascii(name)[1:-1] for name in names)
    return text if len(text) < 128 else f'{text[:100]}... #{hashlib.sha256(text.encode()).hexdigest()[:16]}'


class Unknown(torch.Tensor):
    """A norm before step(): who looks at it would find NaN, and take the step for one to be left out."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, '__name__', '') in ('__get__', 'size', 'dim', 'numel', 'fill_', '__hash__'):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise Misuse('clip_grad_norm_() of a sharded module: the norm is of all gradients, and known after step(): '
                     'look at it then, or at optimizer.last.grad_norm; a step whose gradients are not finite is '
                     'skipped by itself (optimizer.last.skipped)')


class Engine:
    """What a sharded module and its Optimizer share."""

    def __init__(self, module: nn.Module, model: Model, units: list[Unit], place: Place, policy: Policy, *,
                 device: Device, buffers: Buffers, dtype: torch.dtype, stream: bool, overlap: bool, elastic: bool,
                 weighted: bool, merger: Optional[Merger] = None, ranks: Optional[Ranks] = None):
        self.module, self.model, self.units, self.place, self.policy = weakref.ref(module), model, units, place, policy
        self.device, self.buffers = device, buffers
        self.every = [*buffers.units, *units]  # as the specification has them
        self.dtype, self.stream, self.overlap, self.elastic = dtype, stream, overlap, elastic
        self.trainable = [unit for unit in units if unit.trainable]
        self.quiet = False              # no_sync(): gradients stay where PyTorch puts them
        self.metrics: dict[str, float] = {}
        self.names: tuple[str, ...] = ()  # of the open step's metrics; of all steps' within leases()
        self.new = True  # it has made no step and no put: one that was started again may be behind the others' puts
        self.clip_norm = 0.0
        self.norms: list[torch.Tensor] = []  # handed out by clip_grad_norm_(), filled in by step()
        self.held: set[int] = set()
        self.pending: set[Unit] = set()  # nobody has waited for their update since the last step
        self.by = (0, 0)                # process and thread that made it
        self.backwards = 0              # done in the open step
        self.resets = 0                 # of it, by others
        self.known = model.step         # the open step as whoever computes its batches knows it
        self.ran = False                # something of it was computed, or begun
        self.heard = False              # a forward was ever heard of: those are that do not call the module itself
        self.forward = ''               # since the last backward: 'begun', 'done'
        self.open = False               # a backward has begun and has not ended
        self.missing: Optional[dict[Unit, set[Part]]] = None  # of the backward that goes on
        self.spoilt = ''                # why the open step cannot be ended
        self.due: Optional[tuple[int, Unit, list[Any]]] = None
        self.told: Any = None           # `due` whose metrics the owners have
        self.handles: list[Any] = []    # of hooks
        self.sealed: Optional[tuple[int, int]] = None  # everything is returned: the step that is being ended, and puts
        self.result: Optional[Result] = None           # what that came to
        self.optimizer: Any = None      # its face, weakly
        self.leased: Optional[int] = None  # the micro-batch that leases() has handed out
        self.void = False               # the step has begun again since, so it is dropped
        self.handed = False             # something of the open step is with the owners
        # The owners divide by all micro-batches; a worker's own are added up, as in plain PyTorch.
        self.weighted = weighted        # or they divide by the sum of what weight() was told
        self.scale = 1.0 if weighted else float(place.accumulate)
        self.scales = False             # GradScaler: losses are multiplied by the model's scale
        self.unscaled = 1.0             # what gradients in p.grad have been divided by
        self.merger = merger            # of shard(merge=…)
        self.stages: Optional[nn.Module] = None
        self.ranks = ranks              # of shard(mesh=…): of a group, which is one worker
        self.copied: dict[Unit, torch.Tensor] = {}  # by a group alone, see agree(): the owners' arrays
        self.writing = False            # writable(): parameters are private copies
        self.closed = False
        self.at = ''                    # the daemons' address
        try:
            self.adopt()
        except BaseException:
            self.let_go()  # the session is closed next, and its memory gone
            raise

    @property
    def fixed(self) -> bool:
        """There are several workers, and it is known how many."""
        return self.place.world > 1 and not self.elastic

    # -- Parameters ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The open step, puts not counted: which batches it has depends on it."""
        return self.model.step - self.model.puts

    def asked(self) -> int:
        """The open step, for who computes its batches."""
        if self.void:
            self.begin_again()
            self.void = False
        self.known = self.model.step
        return self.step

    def parts(self) -> Iterator[Part]:
        return (part for unit in self.units for part in unit.parts)

    @contextlib.contextmanager
    def all_held(self, units: Optional[list[Unit]] = None, *, or_late: bool = False) -> Iterator[bool]:
        """In here they can be read at the open step. or_late: or, if it is True, another worker has put values where
        this one does so next, and they can be read as they are."""
        added = [unit for unit in units or self.units if unit.index not in self.held]
        late = False
        try:
            for unit in added:
                if not late:
                    late = not self.acquire(unit, or_late=or_late)
            yield late
        finally:
            for unit in added:
                self.release(unit)

    def adopt(self) -> None:
        """Let each parameter be the owners' memory."""
        self.device.computes(self.model)
        places = {tensor.name: tensor for tensor in self.model.tensors()}
        order = {name: index for index, name in enumerate(places)}
        for unit in self.units:
            address = unit.address = self.reach(unit)
            unit.array = self.device.tensor(address, elems_of(unit), self.dtype)
            for part in unit.parts:
                part.index = order[part.name]
                if places[part.name][1:] != (unit.index, part.offset, part.parameter.numel()):
                    raise InternalError(f'{part.name!r} is not where this package expects it: {places[part.name]}')
                self.lay(unit, part)
                part.parameter.grad = None
                self.protect(unit, part)
            self.model.release(unit.index)
        for unit in self.buffers.units:
            elems_of(unit)
            for part in unit.parts:
                part.index = order[part.name]
        self.refresh()

    def refresh(self) -> None:
        """Let the module's buffers be the owners' of the open step."""
        for unit in self.buffers.units:
            try:
                self.buffers.read(unit, self.reach(unit) if unit not in self.buffers.kept
                                  else self.model.acquire(unit.index))
            except WrongStep:
                if unit not in self.buffers.kept:
                    raise
                # Others were faster: what is computed of this step is dropped, or this worker puts values next.
        self.buffers.restore()

    def lay(self, unit: Unit, part: Part) -> None:
        place(part, self.view(unit.array, part))
        part.home = local(part.parameter).data_ptr()

    def protect(self, unit: Unit, part: Part) -> None:
        if local(part.parameter) is not part.parameter:
            return  # a DTensor asks no class of ours
        this = weakref.ref(self)
        guard(part.parameter, part.name, functools.partial(wait_for, this, unit),
              functools.partial(why_gone, this, unit))

    def reach(self, unit: Unit) -> int:
        """The address of the unit's parameters at the open step, which others may move on meanwhile."""
        while True:
            try:
                return self.model.acquire(unit.index)
            except WrongStep:
                if not self.elastic:
                    raise
            except StepReset:
                continue  # nothing is computed of what is read here
            with contextlib.suppress(StepReset):
                what, micro = self.model.lease()  # asking is how a worker hears of it
                if what == _c.SHD_LEASE_MICRO:
                    self.model.unlease(micro)
                elif what == _c.SHD_LEASE_OVER:
                    self.model.commit(0.0)  # is decided already

    def detach(self) -> None:
        """Private copies instead, without hooks."""
        self.closed = True
        for handle in self.handles:
            handle.remove()
        self.wait_all()
        self.let_go()
        self.model.session.close()
        if self.merger is not None:
            self.merger.close()

    def let_root_go(self, module: nn.Module) -> None:
        """ENGINES would keep a module that is referred to from here."""
        for unit in self.every:
            unit.modules = []  # hooks are made
            for part in unit.parts:
                if part.owner is module:
                    part.owner = weakref.proxy(module)

    def let_go(self) -> None:
        """Parameters that may lie in the owners' memory become private copies."""
        for part in (part for unit in self.units if unit.array is not None for part in unit.parts):
            unguard(part.parameter)
            if not part.parameter.is_meta:
                keep(part.parameter)

    @staticmethod
    def view(array: torch.Tensor, part: Part) -> torch.Tensor:
        return array[part.offset:part.offset + part.parameter.numel()].view(part.parameter.shape)

    def acquire(self, unit: Unit, *, or_late: bool = False) -> bool:
        """Wait until the unit is at the open step, and hold it. False: the step is over."""
        if unit.index in self.held or unit in self.copied:
            return True
        try:
            address = self.model.acquire(unit.index)
        except WrongStep as e:
            if self.elastic or or_late:
                return False  # others were faster, and the step is over: what is computed of it here is dropped
            if not self.new:
                raise Misuse(f'{e}. {APART}') from e
            if self.ranks is not None:
                apart(e)
            self.catch_up()
            raise StepReset(f'{e}. {BEHIND}') from e
        except StepReset as e:
            if not self.elastic:
                self.was_reset(e)
            self.void = True
            return False
        self.held.add(unit.index)
        self.arrives(unit)
        if address != unit.address:
            raise Misuse(f'unit {unit.name!r} moved in memory: PyTorch needs parameters in place')
        return True

    def agree(self) -> None:
        """Let all ranks of the group begin with the same step, and none find it over where another does not. As long as
        the step lacks gradients of this group it stays open; but those that were there before may have been killed when
        all were in, so the first one is computed with copies. What comes of it is dropped then."""
        while True:
            said = self.ranks.tell((self.model.step, self.model.created))
            steps = {step for step, _ in said}
            if len(steps) == 1 and (any(created for _, created in said) or all(self.ranks.tell(self.copy()))):
                return
            self.let_copies_go()
            if len(steps) == 1 or self.model.step < max(steps):
                self.catch_up()

    def copy(self) -> bool:
        """Compute the open step with private copies of the parameters. False: it is over."""
        for unit in self.units:
            if not self.acquire(unit, or_late=True):
                return False
            self.copied[unit], unit.array = unit.array, unit.array.clone()
            self.release(unit)
            if self.model.unit_version(unit.index) != self.model.step:
                return False
            for part in unit.parts:
                self.lay(unit, part)
        return True

    def let_copies_go(self) -> None:
        for unit, array in self.copied.items():
            unit.array = array
            for part in unit.parts:
                self.lay(unit, part)
        self.copied = {}

    def behind(self) -> bool:
        """Another worker's values are there, or on their way, where all of this step were before."""
        return any(self.model.unit_version(unit.index) != self.model.step for unit in self.units)

    def meet(self) -> None:
        """No worker puts values before all have come here: what each has read of the step is what all have read."""
        if self.fixed:
            self.model.meet(self.place.world)

    def catch_up(self) -> None:
        """Go on with the open step: other workers have put values, and nothing of the step before counts."""
        for unit in self.units:
            self.release(unit)
        try:
            self.model.commit(0.0)  # is decided already
        except StepReset as e:
            self.was_reset(e)  # nor does anything of the next one
        self.begin_again()
        self.drop()
        self.moved()
        self.merge()

    def release(self, unit: Unit) -> None:
        if unit.index in self.held:
            self.held.remove(unit.index)
            self.model.release(unit.index)

    def arrives(self, unit: Unit) -> None:
        self.pending.discard(unit)
        if not self.pending:
            PENDING.discard(id(self))

    def wait(self, unit: Unit) -> None:
        """Until the unit may be read, outside of forward and backward."""
        if self.by == (os.getpid(), threading.get_ident()):
            self.acquire(unit, or_late=True)
            self.release(unit)
            self.arrives(unit)
            return
        # The library is that thread's, which may be in the midst of a call.
        while unit in self.pending and not self.model.step <= self.model.unit_version(unit.index) < CHANGING:
            time.sleep(0.0005)

    def wait_all(self) -> None:
        for unit in self.trainable:
            if unit in self.pending:
                self.wait(unit)

    def check_open(self) -> None:
        if self.closed:
            raise Misuse('this is after sd.close(), since which the module has its parameters as private ones: go '
                         'on with a new optimizer of torch.optim, or shard() it again with one')

    def check(self) -> None:
        """Whether the module's parameters are still the ones that the owners have."""
        self.check_open()
        module = self.module()
        known = {part.parameter: part for unit in self.units for part in unit.parts}
        found = {p: name for name, p in module.named_parameters() if p.numel()} if module is not None else known
        for p, name in found.items():
            if p not in known:
                raise Misuse(f'{name!r} was added after shard(), or put in place of another parameter: owners know '
                             'nothing of it; make the module whole before shard()')
        for p, part in known.items():
            with torch._C.DisableTorchFunctionSubclass():
                home, requires_grad = local(p).data_ptr(), p.requires_grad
            if p not in found:
                raise Misuse(f'{part.name!r} was taken out of the module after shard(): shard() the module as it is')
            if home != part.home:
                raise Misuse(f'{part.name!r} is a private copy that no step changes: .to(), .double(), .half() or '
                             '.data = … were called after shard(); do that before')
            if requires_grad != part.trainable:
                raise Misuse(f'{part.name!r}.requires_grad is {requires_grad}, at shard() it was {part.trainable}: '
                             'freeze and thaw before shard()')

    def check_asked(self) -> None:
        """Whoever computes batches knows that the model went back."""
        if self.model.step < self.known and not self.void:
            raise Misuse(f'{self.back()}. This loop has not asked it since')

    # -- Backward --------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The module's own forward, not one that is computed again within a backward."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.open:
            self.broken()
        self.device.computes(self.model)
        if torch.is_grad_enabled():
            self.flush()
            self.runs()
            self.forward = 'begun'

    def runs(self) -> None:
        """A forward goes on, with gradients."""
        self.ran = self.heard = True

    def forward_ends(self) -> None:
        self.forward = self.forward and 'done'

    def begin(self) -> None:
        """The first that is heard of a backward, which may be none that gives parameters gradients."""
        if not self.open and not self.quiet and not self.writing:
            self.open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def count(self) -> None:
        """A backward has brought its first gradient: it is a micro-batch."""
        if self.spoilt:
            raise Misuse(self.spoilt)
        self.check_asked()
        if self.sealed:
            raise Misuse('backward() while the step is being ended: step() was broken off; call it once more, or '
                         'sd.reset(model) and compute the step again')
        whole = self.place.world * self.place.accumulate
        if not self.elastic and self.model.micro_batches != whole:
            raise Misuse(f'a step has {self.model.micro_batches} micro-batches now (shardctl set MODEL micro_batches), and '
                         f'{self.place.world} workers with accumulate={self.place.accumulate} compute {whole}: set that '
                         'again, or train by leases(), which take any number')
        if self.backwards == self.place.accumulate:
            raise Misuse(f'backward() {self.backwards + 1} of a step with {self.place.accumulate}: say '
                         f"shard(accumulate={self.backwards + 1}) if each is a batch of its own, add up the losses of "
                         "one batch and call backward() once, or say shard(grads='step')")
        self.flush()
        self.missing = {unit: set(unit.parts) for unit in self.trainable}
        self.ran = True

    def arrived(self, unit: Unit, part: Part) -> None:
        """PyTorch has the parameter's gradient of this backward."""
        if self.writing:
            raise Misuse('backward() inside of writable(): its gradients would be of values that the owners do not '
                         'have; leave writable() first')
        if self.quiet:
            return
        self.begin()
        if self.missing is None:
            self.count()
        missing = self.missing.get(unit)
        if missing is None:
            raise Misuse(f'{part.name!r} got a gradient again after its unit was handed over (reentrant '
                         'checkpointing of a module that is used twice): say shard(policy=DDP())')
        missing.discard(part)
        if not missing and self.policy.early:
            self.hand(unit)

    def end(self) -> None:
        """backward() is done: what has no gradient took no part."""
        self.open, self.forward = False, ''
        if self.missing is not None:
            self.buffers.give(self.micro(), self.tell)
            if self.stream:
                self.buffers.restore()  # else they stay, as gradients do, in case that the step begins again
            for unit in [unit for unit in reversed(self.trainable) if unit in self.missing]:
                self.hand(unit)
            self.missing = None
            self.backwards += 1

    def broken(self) -> None:
        """A backward ended by an exception."""
        handed = len(self.trainable) - len(self.missing) if self.missing is not None else 0
        self.open, self.missing, self.forward = False, None, ''
        if handed and not (handed == 1 and self.due):
            self.spoilt = (f'a backward() of this step broke off when {handed} of {len(self.trainable)} units were '
                           'handed over, and another try would add to them: call zero_grad() of the optimizer, or '
                           'sd.reset(model), and compute the step again from its first batch')
            raise Misuse(self.spoilt)
        if handed:
            self.due = None
        self.drop()
        self.buffers.restore()

    def reset(self, buffers: bool = True) -> None:
        """Nothing of the open step is anywhere afterwards; other workers compute theirs again. Not buffers: they stay
        as a forward has made them, whose backward is to come."""
        refuse(self, 'giving up a step', 'its ranks are in step with each other; end the group and start it again, as '
               'torchrun --max-restarts does')
        if self.over:  # nothing of the open step is here
            self.decide(0.0, ())
            return
        if self.handed:
            try:
                self.model.reset_step()
            except WrongStep:
                if self.leased is None:
                    raise
                # Others have computed the micro-batch too, for this worker was late; whoever did, its gradients are
                # the same.
        self.begin_again(buffers)

    def begin_again(self, buffers: bool = True) -> None:
        """The step has begun again, and nothing of it is here. With grads="step" gradients (and buffers) stay: they
        are all there is to it."""
        self.open, self.missing, self.due, self.spoilt = False, None, None, ''
        self.backwards, self.metrics, self.sealed, self.result, self.handed = 0, {}, None, None, False
        self.ran = self.ran and not buffers  # a forward, whose backward is to come
        self.forget_names()
        if self.stream:
            self.drop()
            if buffers:
                self.buffers.restore()
        if self.model.step < self.known:
            self.drop()
            for unit in self.units:
                self.release(unit)
            self.moved()

    def was_reset(self, e: StepReset) -> NoReturn:
        """Another worker has given the step up, perhaps as it puts values (put()), which takes it a moment without
        gradients."""
        if self.ranks is not None:
            apart(e)
        self.begin_again()
        if self.model.step < self.known:
            e.args = (f'{e}. {self.back()}',)
            raise e
        if not self.elastic:
            self.resets += 1
            time.sleep(min(0.01 * 2 ** self.resets, 1.0))
        e.args = (f'{e}. It put values that you have none of yet (writable() and its like), or a batch of it failed. In '
                  'every step it is gradients that are dropped, as those that a GAN\'s generator leaves in its '
                  'discriminator: say shard(grads="step") of that module',)
        raise e

    def back(self) -> str:
        return BACK.format(now=self.step, was=self.known - self.model.puts)

    def forget_names(self) -> None:
        """Of metrics: those of the next step may be others. Who leases nothing of a step has to know them."""
        if not self.elastic:
            self.names = ()

    def grads(self) -> dict[Part, torch.Tensor]:
        """Those that lie with the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return {part: part.parameter.grad for unit in self.trainable for part in unit.parts
                    if part.parameter.grad is not None}

    def drop(self, but: Mapping[Part, torch.Tensor] = {}) -> None:
        """No gradients but these lie with the parameters afterwards."""
        self.unscaled = self.unscaled if but else 1.0
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self.trainable:
                for part in unit.parts:
                    if part.parameter.grad is not but.get(part):
                        part.parameter.grad = None

    def hand(self, unit: Unit) -> None:
        """Take the unit's gradients from PyTorch."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [part.parameter.grad for part in unit.parts]
            for part in unit.parts:
                part.parameter.grad = None
        del self.missing[unit]
        if self.ranks is not None:
            self.hand_whole(unit, grads)
        elif self.missing:
            self.send(self.micro(), unit, grads)
        else:
            self.due = (self.micro(), unit, grads)
        self.release(unit)

    def hand_whole(self, unit: Unit, grads: list[Any]) -> None:
        """Of a group, one rank of which returns the unit. Each holds back the last one that it does."""
        whole = self.ranks.whole(unit, grads)
        if whole is None:
            return
        if self.due is not None:
            self.send(*self.due)
        self.due = (self.micro(), unit, whole)

    def micro(self) -> int:
        """The micro-batch at hand."""
        return self.place.micro(self.backwards) if self.leased is None else self.leased

    def flush(self) -> None:
        """Hand over what was held back, with the metrics of its micro-batch."""
        if self.due is None:
            return
        micro, unit, grads = self.due
        if self.told is not self.due:
            self.tell_metrics(micro)
            self.told = self.due
        self.send(micro, unit, grads)
        self.due = self.told = None

    def tell_metrics(self, micro: int) -> None:
        if self.weighted and 'weight' not in self.metrics:
            raise Misuse("loss='sum', and a micro-batch without weight: call sd.weight(model, n) for each, after its "
                         'forward')
        if self.metrics:
            # The weight is the first: owners are told to divide by that. Else the loss is: that is shown elsewhere.
            names = tuple(sorted(self.metrics, key=lambda name: (name != 'weight', name != 'loss', name)))
            if self.names not in ((), names):
                where = 'run of leases()' if self.elastic else 'step'
                raise Misuse(f'sd.report() of {", ".join(names)} in a {where} in which another micro-batch has '
                             f'{", ".join(self.names)}: report the same ones for all')
            self.names = names
            self.tell(self.model.report, micro, [self.metrics[name] for name in names], _in_brief(names))
            self.metrics = {}

    def send(self, micro: int, unit: Unit, grads: list[Any]) -> None:
        if all(grad is None for grad in grads):
            self.tell(self.model.return_none, micro, unit.index)
            return
        for part, grad in zip(unit.parts, grads):
            if grad is not None and (grad.layout != torch.strided or grad.dtype not in DTYPES):
                self.check()  # the module may have been cast
                raise NotSupported(f'the gradient of {part.name!r} is {grad.dtype}, {grad.layout}: owners take dense '
                                   'float32, bfloat16 and float16')
        self.tell(self.device.give, self.model, micro, unit, grads, self.scale * self.unscaled)

    def unscale(self) -> None:
        """Gradients that are still here (grads="step") are looked at without the loss's scale."""
        if self.stream:
            return
        grads = self.grads().values()
        if any(grad.dtype == torch.float16 for grad in grads):
            raise NotSupported('unscale_() of float16 gradients: most would become zero; leave it out, owners unscale '
                               'in float32')
        self.unscaled = self.model.loss_scale
        for grad in grads:
            grad.mul_(1 / self.unscaled)

    def tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Hand something over. Of a leased micro-batch it may be too late for that: the step is over, others have
        computed it, and what is handed over is dropped. So it is where another worker has reset the step."""
        if self.void:
            return
        self.handed = True
        try:
            call(*arguments)
        except WrongStep:
            if self.leased is None:
                raise
        except StepReset as e:
            if self.leased is None:
                self.was_reset(e)
            self.void = True

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """At the coming step; norm is filled in then."""
        clip_norm = check.clip_norm_of(max_norm)
        if self.elastic and clip_norm != self.clip_norm:
            raise Misuse(f'clip_grad_norm_({max_norm}) within leases(): who ends a step may have computed nothing '
                         f'of it; say leases(clip_norm={max_norm}), alike in all workers')
        self.clip_norm = clip_norm
        norm.__class__ = Unknown
        self.norms.append(norm)

    # -- Step ------------------------------------------------------------------------------------

    def settle(self, idle: bool) -> None:
        """What backward() has left with the parameters is with the owners afterwards."""
        if self.writing:
            raise Misuse('step() inside of writable()')
        if self.open:
            self.broken()
        if self.spoilt:
            raise Misuse(self.spoilt)
        self.check_asked()
        self.check()
        if self.grads():
            if self.backwards == self.place.accumulate:
                raise Misuse(f'there are gradients beyond the {self.place.accumulate} backward() of a step: say '
                             f'shard(accumulate={self.backwards + 1})')
            self.take()
        if self.ranks is not None:
            self.ranks.settle()
        if not self.backwards and not idle:
            raise Misuse('step() without a backward(): it would decay and move parameters all the same; a worker '
                         'that has no data in a step says step(idle=True)')
        self.flush()

    def gather(self, idle: bool) -> None:
        """Everything of this worker's share of the step is with the owners afterwards."""
        self.settle(idle)
        for backward in range(self.backwards, self.place.accumulate):
            self.give_none(self.place.micro(backward))

    def give_none(self, micro: int) -> None:
        """A micro-batch without a backward; what a forward has made of buffers counts."""
        if self.forward == 'begun':
            self.buffers.restore()
        self.buffers.give(micro, self.tell)
        if self.stream:
            self.buffers.restore()
        for unit in self.trainable:
            if self.ranks is None or self.ranks.returns(unit):
                self.tell(self.model.return_none, micro, unit.index)

    def take(self) -> None:
        """Gradients that lie with the parameters (no_sync(), grads="step"): one micro-batch."""
        self.missing = {unit: set() for unit in self.trainable}
        kept = {} if self.stream else self.grads()
        try:
            self.flush()
            self.end()
        finally:
            for part, grad in kept.items():
                part.parameter.grad = grad

    def commit(self, lr: float, groups: Iterable[Any], idle: bool = False) -> Result:
        if self.elastic:
            raise Misuse('step() outside of leases(), which shard(micro_batches=…) is for')
        groups, metrics, step = tuple(groups), dict(self.metrics), self.model.step
        while True:
            try:
                if not self.sealed:
                    self.gather(idle)
                self.end_step(lr, groups)
                break
            except StepReset:
                if self.stream or self.model.step != step:
                    raise  # else the gradients are still here, and of the step
                self.metrics = dict(metrics)
        return self.ended()

    def decide(self, lr: float, groups: Iterable[Any]) -> Result:
        """End the step, when all workers have returned all of it."""
        self.end_step(lr, groups)
        return self.ended()

    @property
    def over(self) -> bool:
        """A step is, and what ends it here was broken off: it is ended by the same call, whatever that is told."""
        return self.result is not None or self.model.committed

    def end_step(self, lr: float, groups: Iterable[Any]) -> None:
        if self.result is not None:
            return
        self.sealed = self.sealed or (self.model.step, self.model.puts)
        for unit in self.units:
            self.release(unit)
        groups = (*groups, *[(float('nan'),) * 4] * bool(self.buffers.units))  # they have no rates
        try:
            self.result = self.model.commit(lr, clip_norm=self.clip_norm, groups=groups,
                                            divide_by=1 if self.weighted else 0, dynamic_loss_scale=self.scales)
        except StepReset as e:
            self.was_reset(e)

    def ended(self) -> Result:
        """The step that is being ended is over. That the model goes back from here on (StepReset) takes the gradients
        with it, also where it goes back to this step. Broken off, it is begun again."""
        result, (step, puts) = self.result, self.sealed
        self.known = max(self.known, self.model.step)
        self.backwards, self.clip_norm, self.metrics = 0, 0.0, {}
        self.handed, self.unscaled, self.ran, self.forward, self.resets = False, 1.0, False, '', 0
        for norm in self.norms:
            norm.__class__ = torch.Tensor
            norm.fill_(result.grad_norm)
        self.norms = []
        if result.rewound:
            if self.ranks is not None:
                apart(Misuse('the model went back'))
            self.begin_again()
            self.drop()
            self.moved()
            why = f', for step {result.guard_step}, which its guard skips' if result.guard_step >= 0 else ''
            raise StepReset(f'the model went back{why}. {self.back()}')
        if not self.elastic and 0 < self.model.puts - puts == self.model.step - step:  # they took this step's place
            if not self.new:
                self.sealed = self.result = None
                raise Misuse(f'the gradients of this step were dropped. {APART}')
            if self.ranks is not None:
                apart(Misuse('the gradients of this step were dropped'))
            self.begin_again()
            self.drop()
            self.moved()
            raise StepReset(f'the gradients of this step were dropped. {BEHIND}')
        self.new = False
        self.let_copies_go()
        # A graph from before the step must not be walked again: its saved parameters have changed.
        torch.autograd.graph.increment_version([part.parameter for unit in self.units for part in unit.parts])
        self.pending, self.by = set(self.trainable), (os.getpid(), threading.get_ident())
        PENDING.add(id(self))
        try:
            self.refresh()
        except StepReset as e:
            self.was_reset(e)
        if not self.overlap:
            self.wait_all()
        self.merge()
        self.sealed = self.result = None
        return result

    def merge(self) -> bool:
        """With the other groups, where the open step is a merge. False."""
        if self.merger is not None and self.merger.due():
            for unit in self.units:
                self.release(unit)
            self.merger.merge()
            self.moved()
        return False

    def moved(self) -> None:
        """A put has been made: wait for its values."""
        torch.autograd.graph.increment_version([part.parameter for part in self.parts()])
        self.handed = False
        while True:
            try:
                with contextlib.suppress(WrongStep):  # this worker puts values next, and others have done so
                    for unit in self.units:
                        self.model.acquire(unit.index)
                        self.model.release(unit.index)
                self.refresh()
                break
            except StepReset:
                pass  # it has moved on
        self.pending.clear()
        PENDING.discard(id(self))
