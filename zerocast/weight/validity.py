"""Validity: whether the bytes of weights that are written together may be used.

One `Validity` is shared by all weights of a plan, or of a model that is prepared for FSDP2. Code
that steps, casts, gathers or loads reports the event to it, and code that is about to use bytes
calls `check`. An event is recorded once for all weights, and a check compares numbers.

    event            reported by                      `check` raises afterwards for

    stepped          hooks of all torch optimizers    SEND, and READ in debug mode, until `cast`
    written          version counters of masters      the same
    cast             every cast                       columnwise copies until `copied`; READ in
                                                      debug mode, where ranks share masters
    skipped          a first cast that a plan skips   what it did before, such as every read of
                                                      weights that were never cast
    copied           the end of a gather              nothing
    changed          a step, a load, a swapped-in     the backward pass of a forward pass before
                     average, casts of frameworks     it (`WeightState.check_recorded`)
                     and of FSDP2
    moved            a weight that is given storage   nothing; casts and gathers use the new storage
    failed partway   a `transaction` that raises      everything, until a transaction of as much
                                                      completes
    a write runs     a `transaction` elsewhere        everything in other threads, until it returns

COPY, READ and SEND also raise for bytes that were never cast, loaded or filled. `add_precheck` adds
checks that only an owner can make, such as for writes of other code to the weights that it gathers.

Two kinds of writes change no version counter: writes through `.data`, and writes of custom kernels.
`zerocast.verify` notices both.
"""

import contextlib
import enum
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

CAST = "call plan.cast() after the masters change, then all-gather the bytes and call plan.post_all_gather()"
RELOAD = "masters, moments and weights may be of different steps; {load}, or end the run if ranks have died"
CAST_AGAIN = "weights are partly of two casts; cast again, which rewrites them, or end the run if ranks have died"

_versions = itertools.count()


class Use(enum.Enum):
    """A use of weights. The value is its name in errors. The first three are uses of one weight,
    the others of masters, moments and weights together.
    """

    # A copy takes the bytes as they are, also if the masters have changed since.
    COPY = "a copy"
    # `dequantize` is one as well.
    READ = "a product"
    # Another process gets the bytes, such as an inference engine.
    SEND = "a refit"
    # An optimizer reduces before it clips or steps.
    REDUCE = "a reduction of gradients"
    STEP = "an optimizer step"
    SAVE = "a save"
    VERIFY = "a verification"
    SWITCH = "a switch of formats"
    SWAP = "a swap of an average"
    ADD = "an addition of parameters"
    # A load may overwrite partial weights.
    LOAD = "a load"

    # Members are equal only to themselves. The hash of Enum would be a call of Python at each
    # product.
    __hash__ = object.__hash__


class InvalidWeights(RuntimeError):
    """Weights that may not be used.

    Attributes:
        what: the error of the weights.
        since: the event that made them so.
        remedy: the call that makes them valid.
    """

    def __init__(self, what: str, since: str = "", remedy: str = "") -> None:
        super().__init__(what, since, remedy)
        self.what = what
        self.since = since
        self.remedy = remedy

    def __str__(self) -> str:
        wrong = ", ".join(part for part in (self.what, self.since) if part)
        return f"{wrong}: {self.remedy}" if self.remedy else wrong


@dataclass(eq=False)
class _Writing:
    """The write in progress over many parts (masters, moments, weights), and the last write that
    failed partway. All weights that are written together share one record.

    Attributes:
        failed: the name of a write that failed partway, until another write completes.
        failed_masters: True if that one wrote masters.
        thread: the thread that is writing; None between writes.
        what: the name of the last write, for errors.
    """

    failed: str | None = None
    failed_masters: bool = False
    thread: int | None = None
    what: str = ""

    def is_here(self) -> bool:
        """Return True if this thread is writing."""
        return self.thread == threading.get_ident()

    def is_elsewhere(self) -> bool:
        """Return True if another thread is writing."""
        return self.thread not in (None, threading.get_ident())


class Validity:
    """The record of events of weights that are written together. It keeps neither masters nor the
    owner alive.

    Args:
        load: the call that loads a state, for the error of a write of masters that raised partway;
            None if only weights are written.
        recast_remedy: the remedy in the error of a write of weights only, whose masters are
            complete; None if only a load helps.
        advice: the call that casts and gathers, for the error of stale weights.

    Attributes:
        casts: the number of completed casts. Under FSDP2 a weight has its own Validity, which
            counts the gathers that filled it (`gathered_together`).
        copies: the cast that the columnwise copies of all weights were made from.
        version: changes with the values of the weights.
        storage_version: changes when any of the weights is given different storage, for code that
            keeps addresses.
        has_masters: True if the weights are cast from masters, so that the parameters that
            represent them are trained.
        sharded: True if other ranks hold masters too.
        owner: gives the object that shows the masters to `zerocast.verify`, while it lives.
        before_read: called with a weight before its bytes are read: completes a gather in flight,
            or raises: under FSDP2 if the master of a weight that is left gathered was written,
            under Megatron if the last cast was not gathered. None while there is nothing to do.
        rebuild: makes the columnwise copy of a weight when it is first read; None where a stale
            copy is an error.
    """

    def __init__(
        self,
        load: str | None = None,
        recast_remedy: str | None = None,
        advice: str = CAST,
    ) -> None:
        self._load = load
        self._recast_remedy = recast_remedy
        self.advice = advice
        self.casts = 0
        self.copies = -1
        self.version = next(_versions)
        self.storage_version = next(_versions)
        self.has_masters = self.sharded = False
        self.owner: Callable[[], Any] | None = None
        self.before_read: Callable[[Any], None] | None = None
        self.rebuild: Callable[[Any], None] | None = None
        self._writing = _Writing()
        self._prechecks: dict[Use, list[weakref.WeakMethod[Callable[[Use], None]]]] = {use: [] for use in Use}
        self._masters: list[weakref.ref[Tensor]] = []
        # The version counters of the masters at the last cast. None unless debug mode or a SEND
        # compares them.
        self._counters: list[int] | None = None
        self._casts_before_step = 0
        self._has_stepped = False
        self._is_observed = False
        # When a SEND last compared the masters.
        self._compared: object = None

    def part(self) -> "Validity":
        """Return a validity for some of these weights, whose casts are counted separately. All
        parts share writes in progress, writes that failed partway, and the checks of
        `add_precheck`.
        """
        part = Validity(self._load, self._recast_remedy, self.advice)
        part._writing = self._writing
        part._prechecks = self._prechecks
        return part

    # -- checks

    def check(self, use: Use, weight: Any = None, moment: object = None) -> None:
        """Raise RuntimeError unless the bytes may be used.

        Args:
            use: the use.
            weight: the weight for COPY, READ and SEND. None for the other uses.
            moment: an object that stands for a point in time. A check of SEND, or of READ in debug
                mode, compares the version counters of all masters. Of several checks with the same
                `moment` only the first compares them. None to compare them in each check.
        """
        writing = self._writing
        if writing.thread is not None or writing.failed is not None:
            if weight is not None and writing.is_elsewhere():
                # The other thread may be at the end of a gather.
                weight.wait()
            self._check_idle()
            partial = self.partial
            if partial is not None and use is not Use.LOAD:
                raise partial
        if weight is not None:
            if not weight.state.ever_cast:
                raise InvalidWeights(
                    f"{described(weight)} has never been cast",
                    "",
                    f"{self.advice}; or load a state dict into it, or make it over existing bytes by QuantizedWeight.of_buffers",
                )
            if use is Use.SEND or (use is Use.READ and _debug_hooks and debugging()):
                self._check_current(weight, moment)
            if use is Use.SEND:
                self._observe()
        for reference in self._prechecks[use]:
            look = reference()
            if look is not None:
                look(use)

    @property
    def all_clean(self) -> bool:
        """True if `check` would pass, and has no further check to make, before a READ of a weight
        that these casts write. A gather may still be in flight, for which the reader waits. A step
        reads every weight several times, so this calls nothing.
        """
        writing = self._writing
        is_idle = writing.thread is None and writing.failed is None
        return is_idle and self.casts > 0 and self.has_masters and not self._prechecks[Use.READ] and not _debug_hooks

    def add_precheck(self, look: Callable[[Use], None], *uses: Use) -> None:
        """Let `check` call `look`, a method that raises if something is wrong, before these uses
        for as long as its object lives.
        """
        for use in uses:
            self._prechecks[use].append(weakref.WeakMethod(look))

    def _observe(self) -> None:
        """Compare masters with the last cast from the next cast on, as debug mode does."""
        if self._masters and not self._is_observed:
            self._is_observed = True
            if not _observers:
                _observers.extend(_hook_steps(lambda validity: validity._is_observed))

    def _check_current(self, weight: Any, moment: object) -> None:
        weight.wait()
        if moment is None or moment is not self._compared:
            if since := self._masters_changed():
                raise InvalidWeights(f"{described(weight)} is stale", since, self.advice)
            self._compared = moment
        if self.sharded and self.casts and not self.rebuild and not weight.state.is_gathered():
            raise not_gathered(weight, self.advice)

    def _masters_changed(self) -> str:
        """Return the change of the masters since their last cast that was seen, or an empty
        text.
        """
        if self._has_stepped:
            return "an optimizer has updated its masters since its last cast"
        for master, counter in zip(self._masters, self._counters or (), strict=False):
            alive = master()
            if alive is not None and alive._version != counter:
                return "its masters have been written since its last cast"
        return ""

    # -- events

    def watch(self, masters: Sequence[Tensor], sharded: bool) -> None:
        """Record that the weights are cast from these masters, and hold a cast of them now."""
        self._masters = [weakref.ref(master) for master in masters]
        self.sharded = sharded
        _watching.add(self)
        self._note_masters()

    def cast(self) -> None:
        """Record that the weights hold a cast of the masters as they are now."""
        self.casts += 1
        self._note_masters()

    def skipped(self) -> None:
        """Record that the last cast has written nothing."""
        self.casts -= 1

    def copied(self) -> None:
        """Record that all bytes of the last cast are gathered, and columnwise copies made."""
        self.copies = self.casts

    def changed(self) -> None:
        """Record that the values of the weights have changed: an optimizer has stepped, or
        loaded.
        """
        self.version = next(_versions)

    def moved(self) -> None:
        """Record that one of the weights was given different storage, or joined another plan."""
        self.storage_version = next(_versions)

    def is_cast_from(self, storages: set[int]) -> bool:
        """Return True if a master is stored in one of `storages`, given by their addresses."""
        masters = [reference() for reference in self._masters]
        return any(master is not None and _address(master) in storages for master in masters)

    def step_begins(self) -> None:
        """Record that an optimizer over these masters begins a step."""
        self._casts_before_step = self.casts

    def stepped(self) -> None:
        """Record that an optimizer over these masters has stepped. If a hook of the optimizer cast
        already, the weights are current.
        """
        self._has_stepped |= self.casts == self._casts_before_step

    def _note_masters(self) -> None:
        self._has_stepped = False
        self._counters = None
        if _debug_hooks or self._is_observed:
            masters = [reference() for reference in self._masters]
            self._counters = [-1 if master is None else master._version for master in masters]

    # -- writes of many parts

    @contextlib.contextmanager
    def transaction(self, what: str, *, masters: bool = True) -> Iterator[None]:
        """Mark everything as being written by `what` while the context is open. An exception leaves
        everything partial until another transaction completes.

        A transaction inside another one is a part of it. One that writes no `masters` does not
        complete partial ones.
        """
        # Every step and every cast come here, so this calls nothing.
        writing, thread = self._writing, threading.get_ident()
        if writing.thread == thread:
            yield
            return
        if writing.thread is not None:
            self._check_idle()
        if masters or not writing.failed_masters:
            writing.failed = what
            writing.failed_masters = masters
        # In this order, since an interrupt before `try` must not leave a thread that never ends.
        writing.what = what
        writing.thread = thread
        try:
            yield
            if masters or not writing.failed_masters:
                writing.failed_masters = False
                writing.failed = None
        finally:
            writing.thread = None

    @contextlib.contextmanager
    def reading_partial(self) -> Iterator[None]:
        """Allow partial weights to be read while the context is open. For a reader that is going to
        overwrite everything.
        """
        self._check_idle()
        writing = self._writing
        before, writing.thread = writing.thread, threading.get_ident()
        writing.what = writing.what if before else "a load"
        try:
            yield
        finally:
            writing.thread = before

    def failed_partway(self, what: str, *, masters: bool = True) -> None:
        """Record that `what` raised while it wrote weights, and masters if `masters`."""
        self._writing.failed = what
        self._writing.failed_masters = masters

    @property
    def records(self) -> list[object]:
        """The objects whose attributes are the whole record, for code that restores it."""
        return [self, self._writing]

    @property
    def is_writing(self) -> bool:
        """True if this thread is within a transaction."""
        return self._writing.is_here()

    @property
    def partial(self) -> InvalidWeights | None:
        """The error of a write that failed partway, until another one completes; None inside a
        transaction of this thread.
        """
        writing = self._writing
        if writing.failed is None or writing.is_here():
            return None
        remedy = CAST_AGAIN if self._load is None else RELOAD.format(load=self._load)
        if not writing.failed_masters and self._recast_remedy is not None:
            remedy = self._recast_remedy
        return InvalidWeights("", f"{writing.failed} failed partway", remedy)

    @property
    def has_partial_masters(self) -> bool:
        """True if a write of masters failed partway, which no cast can complete."""
        return self.partial is not None and self._writing.failed_masters

    def _check_idle(self) -> None:
        if self._writing.is_elsewhere():
            raise InvalidWeights(
                f"another thread is in the middle of {self._writing.what}",
                "",
                "what it writes is partly old and partly new until that returns, so let threads take turns",
            )


def changed_together(weights: Iterable[Any]) -> None:
    """Record that the values of these weights have changed, as in a step. Pass their validities,
    or, for weights that share a validity with unchanged ones, their WeightStates.
    """
    version = next(_versions)
    for weight in weights:
        weight.version = version


def gathered_together(validities: Iterable[Validity]) -> None:
    """Record that weights hold the bytes of another gather, which has completed. Columnwise copies
    that were made before are stale, since `casts` counts the gathers of such weights.
    """
    for validity in validities:
        validity.casts += 1
        validity.before_read = None


def any_shared() -> bool:
    """Return True if other ranks have masters of any weights of this process."""
    return any(validity.sharded for validity in list(_watching))


@contextlib.contextmanager
def transaction_together(all_written: Iterable[Validity], what: str) -> Iterator[None]:
    """Mark the weights of several owners as being written by `what` while the context is open. If
    it raises, the weights of all of them are partial.
    """
    with contextlib.ExitStack() as stack:
        for validity in all_written:
            stack.enter_context(validity.transaction(what))
        yield


def not_gathered(weight: Any, remedy: str) -> InvalidWeights:
    """Return the error of a weight whose bytes of the last cast were not gathered."""
    return InvalidWeights(f"{described(weight)} holds this rank's part of the last cast only", "", remedy)


def described(weight: Any) -> str:
    """Return the name of a weight in errors."""
    return f"this {weight.format} weight of shape {tuple(weight.shape)}"


_watching: "weakref.WeakSet[Validity]" = weakref.WeakSet()
# The hooks of debug mode on all optimizers. Empty while it is off.
_debug_hooks: list[RemovableHandle] = []
# The same hooks for weights that a SEND observes. Empty until the first one.
_observers: list[RemovableHandle] = []


def debugging() -> bool:
    """Return True if debug mode is on."""
    return bool(_debug_hooks) and not torch.compiler.is_compiling()


def set_debug(enabled: bool) -> None:
    """Turn debug mode on or off. In debug mode a product with a weight whose bytes are older than
    its master raises, and so does `dequantize`, whatever changed the master.

    The RuntimeError says which call is missing. Each read compares the version counters of all
    masters. Weights are covered from their next cast on. Meant for a new training loop; off by
    default.
    """
    for handle in _debug_hooks:
        handle.remove()
    _debug_hooks.clear()
    if enabled:
        _debug_hooks.extend(_hook_steps(lambda _: True))


def _hook_steps(concerns: Callable[[Validity], bool]) -> list[RemovableHandle]:
    """Make every step of a torch optimizer notify the validity of its masters."""

    def tell(optimizer: torch.optim.Optimizer, event: Callable[[Validity], None]) -> None:
        concerned = [validity for validity in list(_watching) if concerns(validity)]
        if concerned:
            stepped = {_address(parameter) for group in optimizer.param_groups for parameter in group["params"]} - {0}
            for validity in concerned:
                if validity.is_cast_from(stepped):
                    event(validity)

    return [
        register_optimizer_step_pre_hook(lambda optimizer, *_: tell(optimizer, Validity.step_begins)),
        register_optimizer_step_post_hook(lambda optimizer, *_: tell(optimizer, Validity.stepped)),
    ]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; zero for subclasses, which may have no memory."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0
