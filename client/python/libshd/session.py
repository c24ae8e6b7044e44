"""Session and Model: the calls of shd.h as methods. Arrays are addresses here (int)."""
from __future__ import annotations

import ctypes
import functools
import json
import weakref
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

from . import _c, errors
from .library import call, lib, sized

_free = ctypes.CDLL(None).free
_free.restype, _free.argtypes = None, [ctypes.c_void_p]


def version() -> str:
    """Of the library that is loaded."""
    return lib.shd_version().decode()


class Tensor(NamedTuple):
    """Where a tensor is in its unit's array."""
    name: str
    unit: int
    offset_elems: int
    elems: int


class Stats(NamedTuple):
    """What a tensor's values come to, over all owners (shd.h: struct shd_tensor_stats)."""
    step: int
    updates: int  # of its unit
    of_step: int  # 'grad': the step whose sum it is,
    micro_batches: int  # and of how many micro-batches, from the first on
    elems: int
    zeros: int
    nans: int
    infs: int
    min: float
    max: float
    mean: float
    rms: float
    update_ratio: float  # 'update': its norm over the parameters'
    quantiles: dict[float, float]  # exact to a power of two, linear inside
    histogram: dict[float, tuple[int, int]]  # by the least magnitude of its power of two: below and above zero


class UnitStats(NamedTuple):
    """What a unit came to in a step, over all owners (shd.h: struct shd_unit_stats); nan: not known, inf: not finite."""
    step: int
    measured_step: int  # that weight_norm and update_ratio are of
    skipped: bool
    guard: str  # the rule that skipped it
    grad_norm: float  # of its mean gradient, before clipping
    weight_norm: float
    update_ratio: float  # the norm of its update over weight_norm


ARRAYS = ('param', 'm', 'v', 'grad', 'update', 'ema')
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class Result(NamedTuple):
    """What a step came to."""
    step: int
    grad_norm: float
    skipped: bool
    over: bool
    reported: int  # micro-batches that had metrics; 0: not known
    metrics: tuple[float, ...]
    guard: str = ''  # why the model's guard skipped it: 'norm_above', 'norm_zscore', 'loss_zscore', 'unit_norm_above', ...
    guard_value: float = 0.0  # the norm or the loss, which is above
    guard_bound: float = 0.0
    stopped: bool = False  # nothing is trained from here on, until model.set('guard=go-on')
    rewound: bool = False  # the model went back (rewind()): go on at Model.step
    cause_unit: str = ''  # of a skipped step: the unit with the largest norm, or the first that is not finite
    cause_norm: float = 0.0  # its norm; inf: not finite
    cause_micro: int = -1  # with guard_audit: the micro-batch that brought most of it; -1: not known
    guard_step: int = -1  # rewound: the step that its guard went back for; -1: somebody did (rewind())


_GUARDS = ('', 'norm_above', 'norm_zscore', 'loss_zscore', 'unit_norm_above', 'unit_norm_zscore')
_OPEN = (1 << 64) - 1  # in a struct that no commit has filled yet


class _Interrupts:
    """Asks in every wait whether a signal's handler (Ctrl-C, say) wants to raise, and keeps what it raised.

    A function of Python's would raise at its very begin, outside of any try: so it is a generator, whose
    next() is called, that stands inside of one.
    """

    def __init__(self) -> None:
        self.raised: Optional[BaseException] = None
        self.watch: Optional[Callable[[], None]] = None  # may raise, too
        asked = self._ask()
        next(asked)
        self.callback = dict(_c.shd_options._fields_)['idle'](functools.partial(next, asked))

    def _ask(self) -> Iterator[int]:
        answer = 0
        while True:
            try:
                yield answer
                ctypes.pythonapi.PyErr_CheckSignals()
                if self.watch is not None:
                    self.watch()
                answer = 0
            except GeneratorExit:
                return
            except BaseException as e:  # whatever the handler raises is raised again by the call
                self.raised, answer = e, 1

    def take(self) -> Optional[BaseException]:
        raised, self.raised = self.raised, None
        return raised


class _Open:
    """Something of the library's until it is closed."""
    _handle: Optional[ctypes.c_void_p] = None

    @property
    def handle(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise errors.Misuse(f'the {type(self).__name__.lower()} is closed')
        return self._handle

    def _close(self) -> Optional[ctypes.c_void_p]:
        handle, self._handle = self._handle, None
        return handle


class Session(_Open):
    """Attached to the daemons at an address (shd.h: struct shd_options)."""

    def __init__(self, address: Optional[str] = None, *, name: Optional[str] = None, slots: int = 0,
                 threads: int = 0, timeout: float = 0, waits: Optional[Callable[[str], None]] = None,
                 reader: bool = False, device: Optional[str] = None):
        """device: where the models' arrays are, 'cuda:N' or (None) in host memory."""
        options = sized(_c.shd_options, address=address.encode() if address else None,
                        name=name.encode() if name else None, slots=slots, threads=threads,
                        timeout_ms=int(timeout * 1000), reader=reader, device=device.encode() if device else None)
        if waits is not None:
            options.waits = dict(_c.shd_options._fields_)['waits'](lambda _, line: waits(line.decode()))
        self._interrupts = _Interrupts()
        options.idle = self._interrupts.callback
        self._options = options  # its callbacks live as long as the session
        # Of each commit, which is when other workers are waited for: what looks after them meanwhile, and may raise.
        self.watch: Optional[Callable[[], Callable[[], None]]] = None
        handle = ctypes.c_void_p()
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        self.call(lib.shd_connect, ctypes.byref(options), ctypes.byref(handle))
        self._handle = handle

    def call(self, function: Callable[..., int], *arguments: object) -> int:
        try:
            return call(function, *arguments)
        except errors.Error:
            if raised := self._interrupts.take():
                raise raised from None
            raise

    @property
    def owners(self) -> int:
        return lib.shd_owners(self.handle)

    def open(self, spec: str, fill: Optional[Callable[[int, int], None]] = None) -> Model:
        """fill(unit, address) writes a unit's start values there, if the model has to be made."""
        raised: list[BaseException] = []

        def filled(_: int, unit: int, values: Any) -> int:
            try:
                fill(unit, ctypes.addressof(values.contents))
                return 0
            except BaseException as e:  # raised again below, on Python's side of the call
                raised.append(e)
                return 1
        options = sized(_c.shd_open_options, spec_json=spec.encode())
        if fill is not None:
            options.fill = dict(_c.shd_open_options._fields_)['fill'](filled)
        try:
            return self._open(options)
        except errors.Error:
            if raised:
                raise raised[0] from None
            raise

    def _open(self, options: _c.shd_open_options) -> Model:
        model, created = ctypes.c_void_p(), ctypes.c_bool()
        self.call(lib.shd_model_open_with, self.handle, ctypes.byref(options), ctypes.byref(model),
                  ctypes.byref(created))
        return Model(self, model, created.value)

    def attach(self, name: Optional[str] = None, wait: float = 0) -> Model:
        """A model that another session makes, in so many seconds."""
        return self._open(sized(_c.shd_open_options, name=name.encode() if name else None,
                                wait_ms=int(wait * 1000)))

    def restore(self, path: str, spec: Optional[str] = None) -> int:
        """From a checkpoint, or (with a spec) the weights of a safetensors file; the step it is at."""
        options = sized(_c.shd_restore_options, weights=spec is not None,
                        spec_json=spec.encode() if spec else None)
        restored = sized(_c.shd_restored)
        self.call(lib.shd_restore, self.handle, path.encode(), ctypes.byref(options), ctypes.byref(restored))
        return restored.step

    def drop(self, name: str, force: bool = False) -> None:
        """A model is no more, at any daemon; force: also where somebody trains it."""
        options = sized(_c.shd_drop_options, force=force)
        self.call(lib.shd_model_drop, self.handle, name.encode(), ctypes.byref(options))

    def stats(self) -> _c.shd_stats:
        stats = sized(_c.shd_stats)
        self.call(lib.shd_stats, self.handle, ctypes.byref(stats))
        return stats

    def status(self, owner: int) -> dict[str, Any]:
        """A daemon's status (docs/status.md)."""
        text = ctypes.c_char_p()
        self.call(lib.shd_status, self.handle, owner, ctypes.byref(text))
        try:
            return json.loads(text.value)
        finally:
            _free(text)

    def close(self) -> None:
        """Arrays handed out become invalid."""
        for model in self._models:
            model._close()
        if handle := self._close():
            lib.shd_close(handle)


class Model(_Open):
    """A model of a session; it ends with the session. created: with the values that open() was given."""

    def __init__(self, session: Session, handle: ctypes.c_void_p, created: bool = False):
        self.session, self._handle, self.created = session, handle, created
        session._models.add(self)
        self._pointer = ctypes.c_void_p()
        self._result: Optional[_c.shd_result] = None  # of a commit that has not returned

    def fork(self, name: str, step: Optional[int] = None, set: Optional[str] = None) -> int:
        """A second model of what this one is at its open step, which is returned; step: at that one, of which all
        owners have a snapshot. set: what is other in it, as shd_fork_options has it: 'micro_batches=8 lr_scale=0.5',
        or JSON."""
        options = sized(_c.shd_fork_options, exact=step is not None, step=step or 0, set=set.encode() if set else None)
        at = ctypes.c_uint64()
        self.session.call(lib.shd_model_fork_with, self.handle, name.encode(), ctypes.byref(options),
                          ctypes.byref(at))
        return at.value

    def drop(self, force: bool = False) -> None:
        """Close it, and have it no more at any daemon, as Session.drop()."""
        name, session = self.name, self.session
        self.close()
        session.drop(name, force)

    def snapshot(self) -> int:
        """Keep the open step, or the first possible after it, in the owners' memory: the step."""
        step = ctypes.c_uint64()
        self.session.call(lib.shd_snapshot, self.handle, ctypes.byref(step))
        return step.value

    def snapshot_every(self, steps: int, keep: int = 0) -> None:
        """Keep each step that is a multiple of `steps` (0: none by itself), the last `keep` of all (0: as it is)."""
        self.session.call(lib.shd_snapshot_every, self.handle, steps, keep)

    def snapshots(self) -> list[int]:
        """The steps that all owners keep so, ascending."""
        rows = (_c.shd_snapshot_row * _c.SHD_SNAPSHOTS_MAX)()
        rows[0].size = ctypes.sizeof(_c.shd_snapshot_row)
        count = ctypes.c_uint32()
        self.session.call(lib.shd_snapshots, self.handle, rows, len(rows), ctypes.byref(count))
        return [row.step for row in rows[:count.value]]

    def rewind(self, to: int | None = None) -> int:
        """Go back to a snapshot (None: the last one) at all owners or at none: the step. Workers that train go on
        from there: what they are told of a step is `rewound`, or StepReset."""
        step = ctypes.c_uint64()
        self.session.call(lib.shd_model_rewind, self.handle, (1 << 64) - 1 if to is None else to, ctypes.byref(step))
        return step.value

    def close(self) -> None:
        """The daemons keep the model."""
        if handle := self._close():
            lib.shd_model_close(handle)

    @property
    def name(self) -> str:
        return lib.shd_model_name(self.handle).decode()

    @property
    def spec(self) -> str:
        return lib.shd_model_spec(self.handle).decode()

    @property
    def step(self) -> int:
        """The open one."""
        return lib.shd_step(self.handle)

    @property
    def micro_batches(self) -> int:
        return lib.shd_micro_batches(self.handle)

    @property
    def micro_batches_max(self) -> int:
        """The most that a step can have, by the spec or as it is set."""
        spec = json.loads(self.spec)
        number = spec['micro_batches']
        return spec.get('micro_batches_max') or (number if isinstance(number, int) else max(n for _, n in number))

    @property
    def path(self) -> int:
        return lib.shd_path(self.handle)

    @property
    def dtype(self) -> int:
        """Of parameters: one of SHD_F32, SHD_BF16, SHD_F16."""
        return lib.shd_param_dtype(self.handle)

    def unit_names(self) -> list[str]:
        return [lib.shd_unit_name(self.handle, unit).decode() for unit in range(lib.shd_units(self.handle))]

    def tensors(self) -> list[Tensor]:
        raw, found = sized(_c.shd_tensor), []
        for index in range(lib.shd_tensors(self.handle)):
            self.session.call(lib.shd_tensor_get, self.handle, index, ctypes.byref(raw))
            found.append(Tensor(raw.name.decode(), raw.unit, raw.offset_elems, raw.elems))
        return found

    def set_policy(self, **fields: int) -> None:
        self.session.call(lib.shd_set_policy, self.handle, ctypes.byref(sized(_c.shd_policy, **fields)))

    def set_stream(self, stream: int) -> None:
        """Arrays of a GPU are used in the order of this CUDA stream (its handle; 0: the default one)."""
        self.session.call(lib.shd_set_stream, self.handle, stream)

    def acquire(self, unit: int) -> int:
        """The address of the unit's parameters at the open step; waits for them."""
        self.session.call(lib.shd_acquire, self.handle, unit, ctypes.byref(self._pointer))
        return self._pointer.value

    def release(self, unit: int) -> None:
        lib.shd_release(self.handle, unit)

    def unit_version(self, unit: int) -> int:
        """The step that the unit's parameters are of; 2**64 - 1 while they change. In any thread."""
        return lib.shd_unit_version(self.handle, unit)

    def grad(self, micro: int, unit: int) -> int:
        """The address of an array for the unit's gradient."""
        pointer = ctypes.POINTER(ctypes.c_float)()
        self.session.call(lib.shd_grad, self.handle, micro, unit, ctypes.byref(pointer))
        return ctypes.cast(pointer, ctypes.c_void_p).value

    def return_grad(self, micro: int, unit: int) -> None:
        self.session.call(lib.shd_return, self.handle, micro, unit)

    def return_parts(self, micro: int, unit: int, parts: ctypes.Array[_c.shd_part], scale: float) -> None:
        """The gradient from where it lies, times scale."""
        self.session.call(lib.shd_return_parts, self.handle, micro, unit, parts, len(parts), scale)

    def return_none(self, micro: int, unit: int) -> None:
        self.session.call(lib.shd_return_none, self.handle, micro, unit)

    def reset_step(self) -> None:
        """Give up all gradients of the open step, everybody's, and begin it again."""
        self.session.call(lib.shd_reset_step, self.handle)

    def report(self, micro: int, metrics: Sequence[float], names: str = '') -> None:
        """names: what they are called, at most 127 printable characters; other workers' must be the same."""
        array = (ctypes.c_double * len(metrics))(*metrics)
        self.session.call(lib.shd_report_named, self.handle, micro, names.encode(), array, len(metrics))

    def commit(self, lr: float, *, clip_norm: float = 0, groups: Sequence[Sequence[float]] = (),
               divide_by: int = 0, dynamic_loss_scale: bool = False) -> Result:
        """groups: for each (lr, weight_decay, beta1, beta2) of this step. divide_by: struct shd_update. Where a
        signal's handler has raised behind the library's call, the next one returns what that came to."""
        if not self.committed:
            self._commit(lr, clip_norm, groups, divide_by, dynamic_loss_scale)
        result = self._result
        told = Result(result.step, result.grad_norm, result.skipped, result.over, result.reported,
                      tuple(result.metrics), _GUARDS[result.guard] if result.guard < len(_GUARDS) else '?',
                      result.guard_value, result.guard_bound, result.stopped, result.rewound,
                      lib.shd_unit_name(self.handle, result.cause_unit - 1).decode() if result.cause_unit else '',
                      result.cause_norm, result.cause_micro - 1, result.guard_step - 1)
        self._result = None
        return told

    @property
    def committed(self) -> bool:
        """A step is over, and commit() has not returned what it came to."""
        return self._result is not None and self._result.step != _OPEN

    def _commit(self, lr: float, clip_norm: float, groups: Sequence[Sequence[float]], divide_by: int,
                dynamic_loss_scale: bool) -> None:
        rates = (_c.shd_rates * len(groups))(*[_c.shd_rates(*group) for group in groups])
        update = sized(_c.shd_update, lr=lr, clip_norm=clip_norm, divide_by=divide_by,
                       dynamic_loss_scale=dynamic_loss_scale, groups=rates, group_count=len(groups))
        self._result = sized(_c.shd_result, step=_OPEN)
        interrupts = self.session._interrupts
        interrupts.watch = self.session.watch and self.session.watch()
        try:
            self.session.call(lib.shd_commit, self.handle, ctypes.byref(update), ctypes.byref(self._result))
        finally:
            interrupts.watch = None

    @property
    def loss_scale(self) -> float:
        """To multiply losses of the open step by, with commit(dynamic_loss_scale=True)."""
        return lib.shd_loss_scale(self.handle)

    def lease(self) -> tuple[int, int]:
        """(one of SHD_LEASE_…, the micro-batch)."""
        what, micro = ctypes.c_int(), ctypes.c_uint32()
        self.session.call(lib.shd_lease, self.handle, ctypes.byref(what), ctypes.byref(micro))
        return what.value, micro.value

    def unlease(self, micro: int) -> None:
        self.session.call(lib.shd_unlease, self.handle, micro)

    def read_step(self, to: Sequence[int]) -> int:
        """Copy the parameters of each unit to its address, all of one step, while others train; that step."""
        step = ctypes.c_uint64()
        self.session.call(lib.shd_read_step, self.handle, (ctypes.c_void_p * len(to))(*to), ctypes.byref(step))
        return step.value

    def pin(self, step: int = 0, *, every: int = 0, exact: bool = False, wait: bool = False,
            timeout: float = 0, ema: bool = False) -> int:
        """Have the owners keep a step (shd.h: struct shd_pin_options); which one it is."""
        pinned = ctypes.c_uint64()
        options = sized(_c.shd_pin_options, step=step, every=every, exact=exact, wait=wait,
                        timeout_ms=int(timeout * 1000), ema=ema)
        self.session.call(lib.shd_pin, self.handle, ctypes.byref(options), ctypes.byref(pinned))
        return pinned.value

    def pinned(self, unit: int) -> int:
        """The address of the unit's parameters of that step."""
        address = lib.shd_pinned(self.handle, unit)
        if not address:
            raise errors.Misuse('no step is pinned')
        return address

    def unpin(self) -> None:
        lib.shd_unpin(self.handle)

    def digest(self) -> tuple[str, int]:
        """Of parameters and optimizer state, and the step."""
        text, step = ctypes.create_string_buffer(65), ctypes.c_uint64()
        self.session.call(lib.shd_digest, self.handle, text, ctypes.byref(step))
        return text.value.decode(), step.value

    def stats(self, name: str, array: str = 'param') -> Stats:
        """Of one of ARRAYS of a tensor, while others train: owners count, no worker waits."""
        raw = sized(_c.shd_tensor_stats)
        self.session.call(lib.shd_tensor_stats, self.handle, name.encode(), self._array(array), ctypes.byref(raw))
        numbers = [getattr(raw, field) for field in Stats._fields[:-2]]
        histogram = {2.0 ** (i - 149): counts for i, counts in enumerate(zip(raw.below, raw.above)) if any(counts)}
        return Stats(*numbers, dict(zip(_QUANTILES, raw.quantiles)), histogram)

    def unit_stats(self, first: int = 0, count: Optional[int] = None, step: Optional[int] = None) -> list[UnitStats]:
        """Of units `first` and behind it (all of them) in one of the last steps, or the last one: beside training."""
        count = lib.shd_units(self.handle) - first if count is None else count
        rows, of = (_c.shd_unit_stats * max(count, 1))(), sized(_c.shd_unit_step)
        rows[0].size = ctypes.sizeof(_c.shd_unit_stats)
        self.session.call(lib.shd_unit_stats, self.handle, 2 ** 64 - 1 if step is None else step, first, max(count, 0),
                          rows, ctypes.byref(of))
        guard = _GUARDS[of.guard] if of.guard < len(_GUARDS) else str(of.guard)
        return [UnitStats(of.step, of.measured_step, of.skipped, guard, row.grad_norm, row.weight_norm, row.update_ratio)
                for row in rows]

    def values(self, name: str, first: int, elems: int, array: str = 'param') -> list[float]:
        """Elements first to first + elems - 1 of a tensor, at most SHD_VALUES_MAX, of one step."""
        values = (ctypes.c_float * elems)()
        self.session.call(lib.shd_tensor_values, self.handle, name.encode(), self._array(array), first, elems,
                          values, None)
        return list(values)

    @staticmethod
    def _array(name: str) -> int:
        if name not in ARRAYS:
            raise errors.Misuse(f"no array '{name}': one of {', '.join(ARRAYS)}")
        return ARRAYS.index(name)

    def set(self, settings: str | dict[str, Any], at: int = 0) -> int:
        """Change hyperparameters with moments kept, as shd_model_set(): 'lr_scale.GROUP=0.5 micro_batches=8', or a dict, or
        that as JSON. The step from which on it is in force: `at`, or the first that can be."""
        start = ctypes.c_uint64()
        settings = settings if isinstance(settings, str) else json.dumps(settings)
        self.session.call(lib.shd_model_set, self.handle, settings.encode(), at, ctypes.byref(start))
        return start.value

    @property
    def settings(self) -> dict[str, Any]:
        """What is set (shd_settings())."""
        text = ctypes.c_char_p()
        self.session.call(lib.shd_settings, self.handle, ctypes.byref(text))
        try:
            return json.loads(text.value)
        finally:
            _free(text)

    @property
    def puts(self) -> int:
        """Committed steps that were puts."""
        return lib.shd_puts(self.handle)

    def after_put(self) -> bool:
        """Whether the step before the open one was a put: nothing else is skipped without a gradient."""
        start, row, count = ctypes.c_uint64(max(self.step, 1) - 1), sized(_c.shd_step_row), ctypes.c_uint32()
        self.session.call(lib.shd_history, self.handle, ctypes.byref(start), ctypes.byref(row), 1, ctypes.byref(count))
        return count.value > 0 and row.step == self.step - 1 and row.skipped and not row.grad_norm \
            and not row.metric_count

    def unit_elems(self, unit: int) -> int:
        """Of its array, gaps and all."""
        return lib.shd_unit_elems(self.handle, unit)

    def get(self, unit: int, array: int, address: int) -> tuple[int, int]:
        """One of SHD_PARAMS, SHD_MOMENT1, SHD_MOMENT2, SHD_EMA of a unit to float[unit_elems(unit)] at the address; the step
        and the number of the unit's updates it is of."""
        step, updates = ctypes.c_uint64(), ctypes.c_uint64()
        values = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        self.session.call(lib.shd_get, self.handle, unit, array, values, ctypes.byref(step), ctypes.byref(updates))
        return step.value, updates.value

    def put(self, arrays: bytes, fill: Callable[[int, int, int], None], updates: Optional[int] = None,
            unit_updates: Optional[Sequence[int]] = None) -> bool:
        """arrays: of each unit the SHD_PUT_ bits of what is put; fill(unit, array, address) writes it. updates: so many
        count as applied; unit_updates: of each unit. Whether these values count, or another worker's."""
        raised: list[BaseException] = []

        def filled(_: int, unit: int, array: int, values: Any) -> int:
            try:
                fill(unit, array, ctypes.addressof(values.contents))
                return 0
            except BaseException as e:  # raised again below, on Python's side of the call
                raised.append(e)
                return 1
        options = sized(_c.shd_put_options, arrays=(ctypes.c_uint8 * len(arrays))(*arrays),
                        set_updates=updates is not None, updates=updates or 0)
        if unit_updates is not None:
            options.unit_updates = (ctypes.c_uint64 * len(unit_updates))(*unit_updates)
        options.fill = dict(_c.shd_put_options._fields_)['fill'](filled)
        counts = ctypes.c_bool()
        try:
            self.session.call(lib.shd_put, self.handle, ctypes.byref(options), ctypes.byref(counts))
        except errors.Error:
            if raised:
                raise raised[0] from None
            raise
        return counts.value

    def open_outer(self, session: Session, name: Optional[str], options: _c.shd_merge_options) -> Model:
        """The model that this one merges into, in a session of its own (shd.h: shd_outer_open())."""
        model = ctypes.c_void_p()
        session.call(lib.shd_outer_open, session.handle, self.handle, name.encode() if name else None,
                     ctypes.byref(options), ctypes.byref(model))
        return Model(session, model)

    def merge(self, outer: Optional[Model], options: _c.shd_merge_options) -> bool:
        """Before each step: merges, if the open one is a merge, and waits for the other groups (shd.h: shd_merge())."""
        merged = ctypes.c_bool()
        try:
            self.session.call(lib.shd_merge, self.handle, outer.handle if outer else None, ctypes.byref(options),
                              ctypes.byref(merged))
        except errors.Error:
            if outer and (raised := outer.session._interrupts.take()):
                raise raised from None
            raise
        return merged.value

    def meet(self, workers: int) -> None:
        """Wait until so many workers, this one included, wait so; or something of the step is in, or it is over."""
        self.session.call(lib.shd_meet, self.handle, workers)

    def checkpoint(self, directory: str, keep: int = 0) -> str:
        """Save the open step; the name of what was saved."""
        saved = sized(_c.shd_checkpointed)
        options = sized(_c.shd_checkpoint_options, keep=keep)
        self.session.call(lib.shd_checkpoint, self.handle, directory.encode(), ctypes.byref(options),
                          ctypes.byref(saved))
        return saved.name.decode()
