"""MethodGuard: weights that a step, cast, gather or load left partial are neither used nor saved.

All weights of an attachment are partial together, since one step of the host writes them all. After
an interrupted write of masters or moments only a load helps. An interrupted cast or gather can be
repeated, since the masters are complete.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zerocast.cast.host import raising_together
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.integrations.patches import Patch
from zerocast.weight.validity import Use, Validity

from . import host, optimizer_kinds
from .checkpoint import saving_unpadded
from .inner_state import copy_group_steps, filling_states, prepare_states, reading_states
from .validate import check_checkpoint

if TYPE_CHECKING:
    from .attachment import ShareDriver

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
ADVICE = (
    "the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and with "
    "overlap_param_gather, before the next forward pass, ddp.start_param_sync(force_sync=True)"
)

Method = Callable[..., Any]


# Methods that raise while weights are partial, on this rank: a training loop may call the state
# dict on some ranks only.
USES = {"step": Use.STEP, "state_dict": Use.SAVE}
# Methods that make partial weights complete.
LOAD = ("load_state_dict", "load_parameter_state")


class MethodGuard:
    """Wraps methods of the host so that they check or write the validity of an attachment.

    Attributes:
        validity: the validity of all weights of an attachment. Its plans have parts of it.
        is_preparing: True while a load is prepared. The host then calls its own load methods, on
            state that the real load overwrites.
    """

    def __init__(self, validity: Validity | None = None) -> None:
        self.validity = validity or Validity("load a checkpoint", recast_remedy=AGAIN, advice=ADVICE)
        self.is_preparing = False

    def check(self, use: Use) -> None:
        """Raise RuntimeError if the weights are not valid for this use.

        Nothing is checked while a load is prepared: that reads state only to overwrite it.
        """
        if not self.is_preparing:
            self.validity.check(use)

    def patches(
        self,
        optimizer: Any,
        distributed: Sequence[Any],
        drivers: Sequence["ShareDriver"],
        after_step: Callable[[], None],
    ) -> Iterator[Patch]:
        """Yield patches of the methods that step, save and load.

        `optimizer` is the argument of `attach`, and `distributed` are the optimizers inside it.
        `drivers` cast for them. `after_step` is called after each complete step of `optimizer`.
        """
        for inner in distributed:
            if optimizer_kinds.kind_of(inner).saves_shards:
                yield Patch(inner, "_set_main_param_and_optimizer_states", filling_states(inner))
                yield Patch(inner, "_get_main_param_and_optimizer_states", reading_states(inner))
                yield Patch(inner, "sharded_state_dict", saving_unpadded(inner))
        # An optimizer that is not a chain is also its only distributed optimizer.
        for owner in {id(owner): owner for owner in (optimizer, *distributed)}.values():
            loads_all = owner is optimizer or len(distributed) == 1
            optimizers = distributed if loads_all else [owner]
            of_owner = [driver for driver in drivers if loads_all or driver.shards.optimizer is owner]
            step = self.writing(owner.step_with_ready_grads, Use.STEP, "an optimizer step", masters=True)
            step = raising_on_all(step, of_owner)
            if owner is optimizer:
                step = followed_by(step, after_step)
            yield Patch(owner, "step_with_ready_grads", step)
            kind = optimizer_kinds.kind_of(owner)
            for name, use in (USES | dict.fromkeys(kind.saves, Use.SAVE)).items():
                yield Patch(owner, name, self.checked(getattr(owner, name), use))
            # All pipeline stages and tensor-parallel ranks save together. Inside that call each
            # optimizer of a chain is saved by the ranks that have it.
            everyone = host.groups_of_all_ranks(distributed) if owner is optimizer else []
            savers = [Group.of(group) for group in everyone] or [driver.plan.group for driver in of_owner]
            yield Patch(owner, "save_parameter_state", self.saving(owner.save_parameter_state, savers))
            sharded_state_dict = self.saving(owner.sharded_state_dict, savers)
            yield Patch(owner, "sharded_state_dict", self.preparing(sharded_state_dict, distributed))
            for name in (*LOAD, *kind.loads):
                yield Patch(owner, name, self.loading(getattr(owner, name), of_owner, optimizers, loads_all))

    def refresh(self, drivers: Iterable["ShareDriver"]) -> None:
        """Cast and gather. This completes weights that a cast or a gather left partial.

        Raises RuntimeError where masters are partial.
        """
        if self.validity.has_partial_masters:
            self.check(Use.STEP)
        with self.validity.transaction("a cast", masters=False):
            for driver in drivers:
                driver.refresh()

    def checked(self, method: Method, use: Use) -> Method:
        """Wrap `method`: it raises if the weights are not valid for `use`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            return method(*args, **kwargs)

        return call

    def writing(self, method: Method, use: Use, what: str, *, masters: bool) -> Method:
        """Wrap `method` as `checked` does. An exception in it leaves the weights partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            with self.validity.transaction(what, masters=masters):
                return method(*args, **kwargs)

        return call

    def saving(self, method: Method, groups: Sequence[Group]) -> Method:
        """Wrap a method that all ranks of these groups call to save: while masters or weights are
        partial on one rank, it raises on all. The others would wait for that rank otherwise.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if not host.is_loading(args, kwargs):
                self._check_save(groups)
            return method(*args, **kwargs)

        return call

    def _check_save(self, groups: Sequence[Group]) -> None:
        problem: Exception | None = None
        try:
            self.check(Use.SAVE)
        except RuntimeError as error:
            problem = error
        for group in groups:
            # A rank is in each group with different ranks, which hear of the problem from it.
            try:
                validate_across_ranks(group, [], problem, "saves a checkpoint")
            except RuntimeError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def preparing(self, sharded_state_dict: Method, optimizers: Sequence[Any]) -> Method:
        """Wrap the method that makes sharded state dicts: it prepares `optimizers` for the template
        of a load.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            for optimizer in optimizers:
                check_checkpoint(optimizer, kwargs.get("metadata"))
            if not host.is_loading(args, kwargs):
                return sharded_state_dict(*args, **kwargs)
            # Preparing writes moments. Weights that are partial already stay so, with their first
            # reason, until the load itself.
            with contextlib.nullcontext() if self.validity.partial else self.validity.transaction("preparing a load"):
                prepare_states(optimizers)
                before, self.is_preparing = self.is_preparing, True
                try:
                    # The host rewrites states here, and may give all parameters of a group one step
                    # tensor, which `copy_group_steps` undoes.
                    template = sharded_state_dict(*args, **kwargs)
                finally:
                    self.is_preparing = before
                copy_group_steps(optimizers)
                return template

        return call

    def loading(
        self, method: Method, drivers: Sequence["ShareDriver"], optimizers: Sequence[Any], loads_all: bool
    ) -> Method:
        """Wrap a method that loads `optimizers`: their drivers cast and gather afterwards.

        A load of all optimizers makes partial weights complete.
        """

        def load(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            copy_group_steps(optimizers)
            for driver in drivers:
                driver.refresh()
            return result

        load_together = raising_on_all(load, drivers)

        def call(*args: Any, **kwargs: Any) -> Any:
            # One load of the host consists of several calls. A call inside another one, or one
            # without masters, completes nothing: the outer or the later call does.
            completes = not self.validity.partial or _holds_masters(host.argument_of_load(args, kwargs))
            if self.is_preparing or self.validity.is_writing or not completes:
                return method(*args, **kwargs)
            if not loads_all:
                self.check(Use.STEP)
            with self.validity.transaction("loading a checkpoint"):
                return load_together(*args, **kwargs)

        return call


def _holds_masters(state: Any) -> bool:
    """Return True if `state` has the state of the parameters: masters and moments.

    `state` is the name of a file, or the state dict of one optimizer or of several.
    """
    if isinstance(state, dict) and "optimizer" not in state:
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        return all(map(_holds_masters, state))
    return not isinstance(state, dict) or "param_state" in state or "fp32_from_fp16_params" in state


def raising_on_all(method: Method, drivers: Sequence["ShareDriver"]) -> Method:
    """Wrap a method that casts by `drivers`: an exception before a cast is raised on all ranks. The
    steps and loads of an optimizer that owns whole matrices have collectives of their own before
    the cast, so its methods stay as they are.
    """
    if any(host.is_layer_wise(driver.shards.optimizer) for driver in drivers):
        return method
    return raising_together(method, drivers)


def followed_by(first: Method, second: Callable[[], None]) -> Method:
    """Return a function that calls `first`, then `second` unless `first` raised."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
