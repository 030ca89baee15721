"""attach(): zerocast casts the masters of Megatron's DistributedOptimizer after its step.

`attach` in order:

1. validates the settings of the host (`validate.py`),
2. finds the masters that this rank owns, their weights, and the bucket groups that gather these
   (`shards.py`),
3. compares them between ranks,
4. makes a plan of casts for each group of ranks that share masters,
5. replaces methods of the host (`methods.py`), which `detach` gives back.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from zerocast import CastPlan, verify
from zerocast.cast.host import CastDriver, Host
from zerocast.distributed.agreement import first_of, together, validate_across_ranks
from zerocast.formats.layout import byte_range
from zerocast.integrations import Patches
from zerocast.verification.master_views import MasterViews
from zerocast.weight.validity import Use, debugging

from . import host, methods, offload, unattached
from .gathers import AttachedShare, Gathers, Guard, raising_on_all
from .primary import is_primary
from .shards import OwnedShare, collect
from .validate import has_stepped, validate

Result = TypeVar("Result")


def attach(optimizer: Any, ddp_chunks: Any, verify_every: int | None = None) -> "Attachment":
    """Let zerocast cast the quantized weights of `ddp_chunks`, whose masters `optimizer` owns.

    `optimizer` was returned by `get_megatron_optimizer`, chained or not; `ddp_chunks` is the
    DistributedDataParallel or a list of them. Both must have been built inside
    `quantized_params()`. Call it on every rank, before the first step and before a checkpoint is
    loaded. Every `verify_every` steps all live bytes are compared with an unsharded cast of the
    masters (`zerocast.verify`), and VerificationError is raised on every rank of the data-parallel
    group if any differ.

    An error of one rank is raised on every rank of its data-parallel group: ValueError for settings
    that are not supported, for a byte that a rank casts and does not send, for elements that no
    rank owns; TypeError for quantized weights of a different library; RuntimeError for a second
    attachment, an optimizer that has already stepped, and a Megatron version without a needed name.
    """
    chunks = list(ddp_chunks) if isinstance(ddp_chunks, (list, tuple, nn.ModuleList)) else [ddp_chunks]
    with Patches() as patches, host.known_api():
        distributed = host.distributed_optimizers(optimizer)
        validate(optimizer, distributed, chunks, verify_every)

        # Find the masters of this rank, their weights and the buffers that are gathered.
        if any(is_primary(param) for chunk in chunks for param in chunk.parameters()):
            # Before `collect`, which then finds the masters in CPU memory.
            for inner in distributed:
                offload.keep_on_cpu(inner, patches)
        owned_shares = collect(distributed, chunks)

        # An error of one rank must be raised on all, before they build plans together.
        detached_states = [state for state in map(unattached.state_left_in, distributed) if state is not None]
        _each_on_all_ranks(owned_shares, functools.partial(agree, was_detached=bool(detached_states)))

        # Build the plans. Weights that the last attachment left partial stay partial.
        partial = (state.validity for state in detached_states if state.validity.partial)
        guard = Guard(next(partial, None))
        shares: list[AttachedShare] = []
        # A model whose weights are all plain has nothing to cast.
        if any(owned.weights for owned in owned_shares):
            build = functools.partial(build_share, guard=guard, patches=patches)
            shares = _each_on_all_ranks(owned_shares, build)

        # Let the host's step call them. The methods that raise without an attachment are removed
        # first: the replacements call the host's own methods.
        attachment = Attachment([optimizer, *distributed], shares, guard, verify_every)
        unattached.restore_until_undone(patches, [optimizer, *distributed])
        patches.apply(methods.replacements(optimizer, distributed, chunks, shares, guard, attachment._after_step))
        for hook in methods.module_hooks(chunks, shares, guard):
            patches.callback(hook.remove)
        attachment._patches = patches.pop_all()
    return attachment


def _each_on_all_ranks(owned_shares: Sequence[OwnedShare], work: Callable[[OwnedShare], Result]) -> list[Result]:
    """Call `work`, which raises on all ranks of a share if on any, for each share in order. Returns
    its results.

    An error about experts raises on all ranks of the dense layers, whose share is the first: ranks
    with other experts would continue, and wait in their next collective.
    """
    dense = owned_shares[0]
    results = []
    for owned in owned_shares:
        if owned.process_group is dense.process_group:
            results.append(work(owned))
        else:
            results.append(together(dense.group, functools.partial(work, owned), "attaches zerocast to experts"))
    return results


def agree(owned: OwnedShare, was_detached: bool) -> None:
    """Raise, on all ranks that share masters, if one of them finds an error. Collective.

    `was_detached` is True if an earlier attachment of these optimizers was detached.
    """
    # `detach` leaves no state in an optimizer of plain parameters, which may have stepped while it
    # was attached.
    is_of_detached = unattached.state_left_in(owned.optimizer) is not None
    may_have_stepped = is_of_detached or (was_detached and not owned.weights)
    problem: Exception | None = None
    if not may_have_stepped and has_stepped(owned.optimizer):
        problem = RuntimeError("the optimizer has stepped or was loaded already: attach before")
    elif wrong := bytes_not_sent(owned):
        problem = ValueError(wrong)
    validate_across_ranks(owned.group, [weight.name for weight in owned.weights], problem, "attaches zerocast")


def bytes_not_sent(owned: OwnedShare) -> str | None:
    """Return the error if this rank casts bytes that it does not send, or None.

    In an all-gather each rank sends an equal part of a bucket's bytes. Bytes that a rank casts
    outside its part are overwritten by those of a different rank.
    """
    places = {
        param: (group, bucket)
        for group in owned.bucket_groups
        for bucket in group.buckets
        for param in bucket.params_list
    }
    for own in owned.weights:
        name, weight, span = own.name, own.weight, own.span
        if own.param not in places:
            return f"{name} is owned by the optimizer, and in no bucket of the model chunks that were given"
        group, bucket = places[own.param]
        data, rowwise = bucket.param_data, weight.rowwise_data
        if data is None or data.untyped_storage().data_ptr() != rowwise.untyped_storage().data_ptr():
            return f"{name} is not in the buffer of its bucket: build DistributedDataParallel inside quantized_params()"
        # The position of the weight in its bucket, in bytes.
        offset = rowwise.data_ptr() - data.data_ptr()
        first, last = byte_range(weight.format, weight.shape, span, weight.dtype)
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        sent = data.numel() * data.element_size() // size
        low, high = rank * sent, (rank + 1) * sent
        if span.numel and not low <= offset + first <= offset + last <= high:
            return (
                f"{name} ({weight.format}): this rank casts elements [{span.start}, {span.stop}), bytes "
                f"[{offset + first}, {offset + last}) of bucket {bucket.bucket_id}, and sends bytes [{low}, {high}); codes "
                "outside of these would be lost. Build model, DistributedDataParallel and optimizer inside quantized_params()"
            )
    return None


def build_share(owned: OwnedShare, guard: Guard, patches: Patches) -> AttachedShare:
    """Build the gathers and the plan of casts of one share. Collective."""
    gathers = Gathers(owned, guard)
    patches.callback(gathers.te_tensors.release)
    driver = CastDriver(
        Host(
            owner="an attachment to Megatron-Core",
            group=owned.group,
            names=[own.name for own in owned.weights],
            weights=[own.weight for own in owned.weights],
            masters=[own.master for own in owned.weights],
            starts=[own.start for own in owned.weights],
            plain=owned.plain,
            gather=gathers,
            validity=guard.validity.part(),
            raises_together=debugging(),
        )
    )
    (views,) = driver.plan.master_views()
    if views.left_out:
        # All ranks of the share raise: a plan knows the elements that each of them owns.
        raise ValueError(
            f"no rank of its group owns some elements of {first_of(views.left_out)}: build the optimizer again"
        )
    delayed = driver.plan.delayed
    detached = unattached.state_left_in(owned.optimizer)
    earlier_scaling = None if detached is None else detached.delayed.get(owned.suffix)
    if earlier_scaling is None:
        # First attachment: all ranks use the scales of rank 0, since the bytes of different ranks
        # are gathered into one weight with one scale.
        delayed.broadcast(owned.group)
    else:
        # Attached again: continue with the scales and histories of the detached attachment, so that
        # detach() and attach() between two steps change no byte.
        delayed.load_state_dict(earlier_scaling.state_dict())
        delayed.unseeded = earlier_scaling.unseeded
    return AttachedShare(owned, gathers, driver, raises_alone=host.is_layer_wise(owned.optimizer))


class Attachment:
    """An attachment to Megatron-Core, as `attach` returns it.

    Attributes:
        plans: the CastPlans, one for each group of ranks that divides masters of one optimizer. An
            optimizer whose parameters are all plain has one too. Empty after `detach`.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        shares: Sequence[AttachedShare],
        guard: Guard,
        verify_every: int | None,
    ) -> None:
        # The optimizer given to `attach` and those inside it. Empty after `detach`.
        self._optimizers = list(optimizers)
        # The shares of each optimizer follow each other. Empty after `detach`.
        self._shares = list(shares)
        self._guard = guard
        self.plans: list[CastPlan] = [share.driver.plan for share in shares]
        self._verify_every = verify_every
        # The number of complete steps since `attach`.
        self._steps = 0
        # The replaced methods of the host, from the end of `attach` on. Closing it gives them back.
        self._patches = Patches()

    def refresh(self) -> None:
        """Cast, gather and transpose masters that were written by hand. Collective.

        The optimizer does this by itself when it loads a checkpoint or reads its masters from the
        model. Raises RuntimeError after a step that failed partway: some masters are still old.
        """
        self._check_attached()
        with raising_on_all(self._shares):
            if self._guard.validity.has_partial_masters:
                self._guard.check(Use.STEP)
            with self._guard.validity.transaction("a cast", masters=False):
                for share in self._shares:
                    share.driver.refresh()

    def master_views(self) -> Iterator[MasterViews]:
        """Yield the masters of all parameters, one source per optimizer, for `zerocast.verify`.

        Bytes that were not gathered since the last cast are gathered first, as in the next forward
        pass.
        """
        self._check_attached()
        for share in self._shares:
            yield from share.driver.master_views()

    def detach(self) -> None:
        """Give the host its own methods back.

        Methods of the host that would write over quantized weights raise until the next `attach`.
        The model stays as it is and can be read. Collective where gathers overlap: the gathers of
        the last step are finished first.
        """
        # Partial weights may come from a rank that died: a collective would then never end.
        if not self._guard.validity.partial:
            for share in self._shares:
                share.gathers.start_due()
        try:
            self._patches.close()
        finally:
            # Closing copies offloaded masters back to the device, which may run out of memory. Even
            # then the host's own copy must not overwrite the quantized weights.
            for optimizer in self._optimizers:
                if unattached.owns_quantized_weights(optimizer):
                    of_optimizer = [share for share in self._shares if share.owned.optimizer is optimizer]
                    delayed = {share.owned.suffix: share.driver.plan.delayed for share in of_optimizer}
                    unattached.refuse(optimizer, unattached.DetachedState(delayed, self._guard.validity))
            self.plans = []
            self._optimizers = []
            self._shares = []

    def _after_step(self) -> None:
        """Verify every `verify_every` steps. Raises VerificationError on every rank."""
        self._steps += 1
        if self._verify_every is not None and self._steps % self._verify_every == 0:
            verify(self).raise_for_differences()

    def _check_attached(self) -> None:
        if not self._optimizers:
            raise ValueError(
                "this attachment was detached: nothing casts its masters; attach(optimizer, ddp_chunks) again"
            )
