"""shard() and what is done with a module afterwards."""
from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from .. import _c
from ..errors import Busy, InvalidArgument, Misuse, NotSupported, StepReset, WrongStep
from ..session import Session
from . import attach, check, layout
from .buffers import Buffers, Which, buffers_of
from .cut import is_cut
from .device import device_of
from .engine import ENGINES, Engine, Place, engine_of
from .hooks import add_hooks
from .merge import Merge, begun, check_merge
from .optimizer import Optimizer
from .policy import Policy, ZeRO3
from .stages import Stages
from .tiled import TiledLinear
from .wrapped import Group, Prepared

if TYPE_CHECKING:
    from .parallel import Ranks


def place_of(accumulate: int) -> Place:
    """By torchrun's and shardctl's variables."""
    rank, world = check.number_from('RANK', 0), check.number_from('WORLD_SIZE', 1)
    if not 0 <= rank < world:
        raise InvalidArgument(f'RANK={rank} with WORLD_SIZE={world} in the environment: must be 0 to WORLD_SIZE - 1, '
                              'as torchrun and `shardctl run` set them')
    return Place(rank, world, accumulate)


def ranks_of(module: nn.Module, mesh: Any, dp: Optional[tuple[int, int]], full: Optional[nn.Module]) -> Optional[Ranks]:
    """Those of the group that this process is of, where there is a mesh."""
    if mesh is None:
        cut = next((name for name, p in module.named_parameters() if is_cut(p)), None)
        if cut is not None or dp is not None or full is not None:
            what = f'{cut!r} is a DTensor' if cut is not None else f'{"dp" if dp is not None else "full"}='
            raise InvalidArgument(f"{what} without mesh=: give shard() the DeviceMesh, of dimensions 'tp', 'pp', 'dp'")
        if isinstance(module, Stages):
            raise InvalidArgument(f'a list of {len(module)} modules without mesh=: shard() takes one module, or stages of a '
                                  "pipeline and a DeviceMesh with 'pp'")
        return None
    tiled = next((name for whole in (module, full) if whole is not None for name, inner in whole.named_modules()
                  if isinstance(inner, TiledLinear)), None)
    if tiled is not None:
        raise NotSupported(f"{tiled!r} is a TiledLinear, with mesh=: ranks of 'tp' have parts of layers as it is; put "
                           'an nn.Linear in its place')
    from .parallel import Ranks  # with it a good part of torch.distributed
    ranks = Ranks(mesh, dp)
    if full is None and ranks.stages > 1:
        raise InvalidArgument(f"mesh= has a 'pp' of {ranks.stages}: give full=, the whole module (on the meta device, if "
                              'you like), whose names and order the model at the daemons has')
    return ranks


def ranks_alone(**wanted: Any) -> None:
    """What ranks of a group do not have."""
    why = {'merge': 'merge=', 'micro_batches': 'micro_batches=, whose leases() each worker would have by itself,',
           'sums': "sums='host'", 'loss_sum': "loss='sum'", 'codec': 'codec= and grad_codec='}
    for name, value in wanted.items():
        if value:
            raise NotSupported(f'{why[name]} with mesh=: the ranks of a group are one worker with a fixed share; leave '
                               'it out')


def _share_of(place: Place, sums: str, grads: str, micro_batches: int, micro_batches_max: int, verify_every: int) -> int:
    """How many workers' gradients are added up before they are returned, of a share that is checked."""
    if micro_batches and (place.accumulate > 1 or grads == 'step'):
        raise InvalidArgument('micro_batches is for leases(), where each backward() is one: leave out accumulate '
                              'and grads')
    if micro_batches_max and not 0 < micro_batches <= micro_batches_max:
        raise InvalidArgument(f'micro_batches_max={micro_batches_max}: give micro_batches, of leases(), at most as many')
    if verify_every and not micro_batches:
        raise InvalidArgument(f'verify_every={verify_every}: a fixed share is computed by nobody else; say '
                              'shard(micro_batches=…) and train by leases()')
    summed = place.summed() if sums == 'host' else 1
    if summed > 1 and micro_batches:
        raise NotSupported("sums='host' with micro_batches: what leases() hands out is computed by one worker; leave out "
                           'micro_batches, or sums')
    return summed


def _check_twin(name: str, at: str, rank: int) -> None:
    """A model has the name of its module's class where it is given none, as another module here may have."""
    def twin() -> bool:
        return any((engine.model.name, engine.at, engine.place.rank) == (name, at, rank) for engine in ENGINES.values())
    if at.startswith('local:') or not twin():  # each session there has models of its own
        return
    gc.collect()  # a cell that is run again has let go of its module
    if twin():
        raise Misuse(f'another {name} of this process is sharded, and both would be one model, which is called like '
                     "the class: say shard(name='…') for each; or sd.close() that one first, to go on with its model")


def shard(module: Union[nn.Module, Sequence[nn.Module]], optimizer: torch.optim.Optimizer, *, policy: Policy = ZeRO3(),
          units: layout.Rule = 'auto', accumulate: int = 1, micro_batches: int = 0,
          micro_batches_max: int = 0, verify_every: int = 0, grads: str = 'stream', loss: str = 'mean',
          buffers: Which = 'auto', init: Optional[Callable[[nn.Module], None]] = None,
          name: Optional[str] = None, address: Optional[str] = None, overlap: bool = True,
          publish: Optional[torch.dtype] = None, grad_dtype: Optional[torch.dtype] = None,
          restore: Optional[str] = None, timeout: Optional[float] = None, device: Any = None,
          guard: Sequence[Mapping[str, Any]] = (), guard_audit: bool = False, moments: str = 'f32',
          merge: Optional[Merge] = None, sums: str = 'own', mesh: Any = None, dp: Optional[tuple[int, int]] = None,
          full: Optional[nn.Module] = None, codec: str = 'none',
          grad_codec: str = 'none') -> tuple[nn.Module, Optimizer]:
    """Give the module's parameters and the optimizer's state to daemons; train on as before.

    policy      what a worker holds when: ZeRO3(), ZeRO2(), ZeRO1(), DDP(). Results do not depend on it.
    units       what is fetched together: 'auto' (by layer), module classes, or a function of a parameter's
                name and module that names its unit
    accumulate  backward() calls in a step of one worker. As in plain PyTorch their gradients add up (divide
                each loss by it); over workers they are averaged, as DDP does.
    micro_batches  for leases(): so many batches are a step, whoever computes them
    micro_batches_max  with micro_batches: so many they can be set to be while the model trains (shardctl set MODEL
                micro_batches=N); memory is laid out for it
    verify_every  with micro_batches: in each so-many-th step two workers compute one of them, and the daemons
                compare the bits; who differs is named by log, status and metrics. Needs deterministic workers
    grads       'stream': a unit's gradient leaves during backward(). 'step': gradients stay in p.grad until
                step(), for several losses, for looking at them, for another try.
    loss        'mean': the step's gradient is the mean of all workers'. 'sum': each micro-batch's loss is a sum (over
                tokens, say), weight() is told of how many, and the sum of all is divided by the sum of these
    buffers     which buffers the owners keep, of each the mean over a step's micro-batches: 'auto', the running
                statistics of BatchNorm and InstanceNorm; or a function of a buffer's name and module. Others are
                each worker's own
    init        gives a module on the meta device its own parameters' values (None: reset_parameters()); each
                unit is made, handed over and dropped, so the model may be larger than this process
    name        of the model at the daemons; one that is there already is gone on with
    address     of the daemons: None as everywhere ($SHARDD_ADDRESS, `shardctl up`), 'up:2' starts two,
                'local:' keeps all in this process
    overlap     step() returns while the owners update; the next forward waits for each unit, and who reads a
                parameter for that one. False: step() waits for all
    publish     type of the module's parameters, whose masters are fp32: None: as they are; or torch.bfloat16,
                torch.float16
    grad_dtype  gradients travel as this (None: fp32); they are summed in fp32 in any case
    restore     a checkpoint to begin with, where the daemons have no model of its name
    timeout     seconds that another worker may be late (None: no limit while it may still come; who is waited for
                is said every 10 s)
    device      where parameters of the meta device come to be: None, the host, or 'cuda', 'cuda:N'. Others stay where
                they are, in the memory of a daemon of that GPU, or copied from wherever daemons have them
    guard       rules by which a step that is far from those before is skipped, or training stopped:
                [{'norm_above': 100}, {'norm_zscore': 6, 'window': 100, 'action': 'stop'}] (docs/states.md).
                optimizer.last.guard says which one did; the loss of a rule is the first number of sd.report().
                With 'rewind' the model goes back to a snapshot: that is a StepReset
    guard_audit a step that is skipped names the micro-batch that brought most of it (optimizer.last.cause_micro)
    merge       sd.DiLoCo(...) or sd.LocalSGD(...): these workers are one of several groups, which train by themselves and
                merge now and then (docs/local-steps.md)
    moments     of the optimizer, as the owners keep them: 'f32', or 'int8', which is 2 bytes of a parameter where
                AdamW's are 8, by block-wise dynamic quantization (docs/numerics.md)
    codec       parameters travel in codes with a scale for each 64 of them: 'int8' or 'fp8', a byte of a parameter,
                or 'int4', half of one; 'none': as `publish` says (docs/numerics.md). With policy=sd.ZeRO2() or the
                like, without bounds; daemons and workers in host memory alone
    grad_codec  gradients, too: 'int8', rounded at random without bias; 'none': as `grad_dtype` says
    sums        'host': workers of a host add up what each has computed and return that once (docs/hosts.md). The
                bits are of $LOCAL_WORLD_SIZE, which is the micro-batches of a sum. 'own': each worker returns its own
    mesh        a DeviceMesh with dimensions 'tp', 'pp' and 'dp' (or 'dp_replicate', 'dp_shard'), those that there are: the
                module is tensor parallel by torch's parallelize_module(), a stage of a pipeline by torch's PipelineStage,
                or both. The ranks of 'pp' and 'tp' together are one worker. module may be a list of stages, where a rank
                has several; what comes back is one module of these
    dp          (which, of how many) where each such group has a mesh, and a torchrun, of its own
    full        the whole module, whose stage this one is, by the same names: it may be on the meta device, and is what
                the model at the daemons is made of
    """
    if isinstance(module, (list, tuple)):
        module = Stages(module)
    check.check_two(module, optimizer)
    check.check_choice('grads', grads, 'stream', 'step')
    check.check_choice('loss', loss, 'mean', 'sum')
    check.check_choice('moments', moments, 'f32', 'int8')
    check.check_choice('sums', sums, 'own', 'host')
    check.check_choice('codec', codec, 'none', 'int8', 'fp8', 'int4')
    check.check_choice('grad_codec', grad_codec, 'none', 'int8')
    check.check_count('accumulate', accumulate, 1)
    check.check_count('micro_batches', micro_batches, 0)
    check.check_count('micro_batches_max', micro_batches_max, 0)
    check.check_count('verify_every', verify_every, 0)
    check.check_dtype('publish', publish)
    check.check_dtype('grad_dtype', grad_dtype)
    check.check_timeout(timeout)
    check_merge(merge)
    check.check_name(name)
    check.check_function('init', init, 'a module')
    if loss == 'sum' and any('loss_zscore' in rule for rule in guard):
        raise NotSupported("guard: loss_zscore with loss='sum', where what is reported is a sum: take norm_zscore")
    policy, units, address = check.policy_of(policy), check.rule_of(units), check.address_of(address)
    if module in ENGINES:
        raise Misuse(f'{type(module).__name__} is sharded already')
    if hasattr(module, 'shd_plain') and not hasattr(policy, 'kept'):
        raise Misuse(f'{type(module).__name__} was given to fully_shard(): call sd.Optimizer(module, optimizer) in the '
                     'place of shard()')
    ranks = ranks_of(module, mesh, dp, full)
    if ranks is not None:
        ranks_alone(merge=merge, micro_batches=micro_batches, sums=sums == 'host', loss_sum=loss == 'sum',
                    codec=(codec, grad_codec) != ('none', 'none'))
        grads = 'step' if ranks.stages > 1 else grads  # a schedule's step() has several backward()
        overlap = overlap and not ranks.cuts           # DTensors do not wait when they are read
    if grads == 'step':
        accumulate = 1
    place = place_of(accumulate) if ranks is None else Place(ranks.rank, ranks.world, accumulate)
    summed = _share_of(place, sums, grads, micro_batches, micro_batches_max, verify_every)
    if restore is not None:
        name = attach.restored_name(restore, name)
    whole = module if full is None else full
    at = os.fspath(address or os.environ.get('SHARDD_ADDRESS', ''))
    if name is None:
        name = type(whole).__name__
        _check_twin(name, at, place.rank)
    groups = layout.groups_of(module, optimizer) if ranks is None else ranks.groups_of(module, whole, optimizer)
    parts = layout.units_of(whole, groups, units)
    layout.optimizer_spec(optimizer)  # refuses what owners do not have
    check.check_state(optimizer)
    check.check_buffers(module, place.world)
    statistics = buffers_of(module, buffers, len(optimizer.param_groups))
    if ranks is not None and any(ranks.tell(bool(statistics))):
        raise NotSupported('running statistics (BatchNorm, buffers=) in a group (mesh=): each rank would have its own of '
                           'them; say buffers=lambda name, module: False to leave them to the ranks')
    every = statistics + parts  # they are updated in this order, and step() waits for the statistics
    for index, unit in enumerate(every):
        unit.index, unit.align = index, 64 if moments == 'int8' or codec != 'none' or grad_codec != 'none' else 32
    dtype, where = layout.dtype_of(parts), device_of((part for unit in parts for part in unit.parts), device)
    spec = layout.spec_of(every, optimizer, name, micro_batches or place.world * place.accumulate, publish or dtype,
                          grad_dtype, verify_every, guard, guard_audit, micro_batches_max, moments, summed, codec,
                          grad_codec)
    own, first = parts, place.rank == 0
    if ranks is not None:
        own, first = ranks.own(module, parts), ranks.first
        if restore is None:
            ranks.start_values(parts, address, name, timeout)

    def begin(session: Session) -> Engine:
        model = attach.open_model(session, spec, name, every, first, timeout, init, restore)
        model.set_policy(**policy.fields(), sums=_c.SHD_SUMS_HOST if summed > 1 else _c.SHD_SUMS_OWN)
        where.check_path(model, policy, codec)
        with begun(model, merge, place.rank > 0 and not micro_batches, timeout) as merger:
            return Engine(module, model, own, place, policy, device=where, buffers=Buffers(model, statistics, where),
                          dtype=publish or dtype, stream=grads == 'stream', overlap=overlap,
                          elastic=micro_batches > 0, weighted=loss == 'sum', merger=merger, ranks=ranks)
    with ranks.numbered() if ranks is not None else contextlib.nullcontext():
        engine = attach.attached(address, name, timeout, begin, where.name, where.slots(every, policy))
    engine.at = at
    engine.model.session.watch = Group.find(place.world if ranks is None else torch.distributed.get_world_size())
    if ranks is not None:
        engine.agree()
    ENGINES[module] = engine
    engine.stages = module if isinstance(module, Stages) else None  # which nobody else may keep
    add_hooks(module, engine)
    engine.let_root_go(module)
    if not getattr(module, '_is_accelerate_prepared', False):
        module._is_accelerate_prepared = Prepared()  # type: ignore[assignment]
    return module, Optimizer(engine, optimizer)


class _Begun:
    """A schedule, and what it was as leases() began: from there it goes to the step that the model went back to."""

    def __init__(self, schedule: Any, optimizer: Optimizer):
        self.schedule, self.groups = schedule, optimizer.param_groups
        if schedule is not None:
            self.state = copy.deepcopy(schedule.state_dict())
            self.rates = [{key: copy.deepcopy(value) for key, value in group.items() if key != 'params'}
                          for group in self.groups]
        self.step = 0

    def look(self, step: int) -> None:
        before, self.step = self.step, step
        if step >= before or self.schedule is None:
            return
        if step < self.state['last_epoch']:
            raise Misuse(f"the model went back to step {step}, and leases() was given a schedule of step "
                         f"{self.state['last_epoch']}: start this worker again, with one that begins at 0")
        self.schedule.load_state_dict(copy.deepcopy(self.state))
        for group, rates in zip(self.groups, self.rates):
            group.update(copy.deepcopy(rates))


def leases(module: nn.Module, steps: int, schedule: Any = None, clip_norm: float = 0) -> Iterator[tuple[int, int]]:
    """(step, micro-batch) for this worker to compute, as the owners hand them out, until `steps` are done:

        for step, micro in sd.leases(model, 1000, schedule):
            loss = model(batch_of(step, micro)); loss.backward(); opt.step()

    opt.step() hands the micro-batch over; the step ends when all of it is in, whoever computed it. Workers may
    come, go and be killed. schedule.step() is called here, once for each step, and the norm clipped, as who ends a
    step may have computed nothing of it.
    """
    engine = engine_of(module)
    if not engine.elastic:
        raise Misuse('leases() of a module whose micro-batches are shared out by rank: say shard(micro_batches=M)')
    optimizer = engine.optimizer()
    begun = _Begun(schedule, optimizer)
    if engine.over:
        with contextlib.suppress(StepReset):
            optimizer.finish()
    while engine.merge() or engine.asked() < steps:
        begun.look(engine.step)
        while schedule is not None and schedule.last_epoch < engine.step:
            optimizer.original._opt_called = True  # steps that others have made are steps
            schedule.step()
        engine.clip_norm = check.clip_norm_of(clip_norm) if clip_norm else 0.0
        try:
            what, micro = engine.model.lease()
            if what != _c.SHD_LEASE_MICRO:
                optimizer.finish()
                continue
        except StepReset:
            engine.begin_again()
            continue
        engine.leased, engine.void = micro, False
        try:
            yield engine.step, micro
            if engine.leased is not None:
                raise Misuse(f'micro-batch {micro} of step {engine.step} was not handed over: call opt.step() in '
                             'the loop')
        finally:
            if engine.leased is not None:
                engine.model.unlease(micro)
                engine.leased = None


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Gradients of backward() in here stay in p.grad; the next one outside hands over the sum."""
    engine = engine_of(module)
    before, engine.quiet = engine.quiet, True
    try:
        yield
    finally:
        engine.quiet = before


def report(module: nn.Module, **metrics: Union[float, torch.Tensor]) -> None:
    """Numbers of the micro-batch that has been computed last, the loss above all, before step(). Their means over
    the step's micro-batches are in opt.last.metrics, `shardctl top` and `shardctl log`."""
    engine = engine_of(module)
    room = _c.SHD_METRICS_MAX - engine.weighted
    if len(metrics) > room:
        raise InvalidArgument(f'{len(metrics)} metrics: at most {room}')
    if engine.weighted and 'weight' in metrics:
        raise InvalidArgument("the metric 'weight' is what sd.weight() was told")
    numbers = {key: check.number_of(f'metric {key!r}', value) for key, value in metrics.items()}
    # Where no forward calls the module, nothing is heard of it before its backward.
    if engine.heard and not engine.ran and not engine.grads():
        raise Misuse(f'sd.report() of {", ".join(metrics)} where nothing of step {engine.step} has been computed yet: '
                     'it would count in that step; call it between the forward of a micro-batch and step()')
    engine.metrics.update(numbers)


def reset(module: nn.Module) -> None:
    """Give up what the open step has, all workers' gradients, as opt.zero_grad() does before step(). Other workers
    get StepReset from what they do next, and compute the step's batches again."""
    engine_of(module).reset()


def weight(module: nn.Module, count: Union[float, torch.Tensor]) -> None:
    """How many tokens (or samples) the micro-batch had whose forward has been run last; for shard(loss='sum').
    Of several backward() of a micro-batch (no_sync()) the counts add up."""
    engine = engine_of(module)
    if not engine.weighted:
        raise Misuse("sd.weight() where losses are means: say shard(loss='sum'), and let each loss be a sum")
    count = check.number_of('weight', count)
    if not 0 <= count < float('inf'):
        raise InvalidArgument(f'weight {count}: must be a count')
    engine.metrics['weight'] = engine.metrics.get('weight', 0.0) + count


def step_of(module: nn.Module) -> int:
    """The open step, where to go on: 0 at first, more in a worker that comes later. writable() and its like are not
    counted."""
    return engine_of(module).asked()


def digest(module: nn.Module) -> str:
    """SHA-256 of parameters and optimizer state; the same however the work was split."""
    engine = engine_of(module)
    for _ in range(100 if engine.elastic else 0):
        with contextlib.suppress(WrongStep):  # others have committed one meanwhile: it would be of two
            return engine.model.digest()[0]
    return engine.model.digest()[0]


def save(module: nn.Module, directory: str, keep: int = 0) -> str:
    """A checkpoint of parameters and optimizer state (docs/checkpoints.md); its name. keep: so many stay. Workers with
    fixed shares may all call it at the same point: one saves, others wait for that. With leases() one alone does."""
    engine, directory = engine_of(module), os.path.abspath(directory)
    name, before = f'step-{engine.model.step:012}', _latest(directory)
    while True:
        try:
            return engine.model.checkpoint(directory, keep)
        except Busy as e:
            if not engine.fixed and engine.ranks is None:
                e.args = (f'{e}; of workers that have no fixed share one alone calls sd.save()',)
                raise
        time.sleep(0.02)
        if (latest := _latest(directory)) != before and latest[0] == name:
            return name


def _latest(directory: str) -> tuple[str, int, int]:
    """The name of the last checkpoint there, and which file says so."""
    try:
        with open(os.path.join(directory, 'LATEST'), encoding='ascii') as file:
            found = os.fstat(file.fileno())
            return file.read().strip(), found.st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return '', 0, 0


def close(module: nn.Module) -> None:
    """Let go of the daemons. The module keeps a private copy of its parameters. Nothing where that was done before."""
    if (engine := ENGINES.pop(module, None)) is not None:
        engine.detach()
