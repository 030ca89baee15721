"""DistributedFusedAdam over quantized weights: Apex's update, then zerocast's cast and gathers.

One method of Apex is overridden for that: `_check_params_shard_dtypes`, which it calls between the
update of the master shards and the all-gather of plain parameters. It casts into this rank's part
of a bucket's bytes (`QuantizedBuckets`), and leaves these buckets out of Apex's gather. Apex makes
the masters too, from the values before quantization. One call, `_local_step`, writes masters,
weights and columnwise copies: an exception in it leaves the optimizer partial, and its methods then
raise.
"""

import contextlib
import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.host import CastDriver, Gather, Host, casting, raising_together
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.bucket import Bucket, fill_buckets
from zerocast.distributed.group import Group
from zerocast.formats.layout import SHARD_ALIGNMENT_ELEMENTS
from zerocast.integrations import known_api, overrides
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import listed_parameters
from zerocast.verification.master_views import MasterViews
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.validity import Use, Validity, debugging

from . import checkpoint, host
from .host import problem_of

ADVICE = (
    "masters that were written by hand are cast by optimizer.refresh(), loaded ones by optimizer.load_state_dict(...)"
)


class QuantizedBuckets(dict[int, BucketBytes], Gather):
    """The flat bytes of the buckets of quantized weights, by Apex's number of the bucket. The part
    of a rank has the bytes of the elements that it owns, so that gathers run in place.

    `group` has the ranks that share the masters.
    """

    def __init__(self, buckets: Mapping[int, Bucket], group: Group, device: torch.device) -> None:
        super().__init__({index: BucketBytes(bucket, device) for index, bucket in buckets.items()})
        self._group = group
        # One buffer for all weights, so that zeroing or reducing all of them is one launch.
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            kept = [weight for bucket in self.values() if not bucket.gathers(name) for weight in bucket.weights]
            into_flat_buffer([weight for weight in kept if weight.state.buffers[name] is not None], name)

    def host(self, masters: Mapping[int, Tensor]) -> Host:
        """Apex as a Host. `masters[i]` is this rank's FP32 shard of bucket i."""
        names, owned, starts = [], [], []
        for index, buffers in self.items():
            bucket = buffers.bucket
            for slot in bucket.slots:
                span, start = bucket.owned(slot, self._group.rank)
                # `start` counts from the first bucket, and Apex has a tensor for each.
                start -= bucket.start
                names.append(slot.name)
                owned.append(masters[index][start : start + span.numel])
                starts.append(span.start)
        return Host(
            owner="Apex's DistributedFusedAdam",
            group=self._group,
            names=names,
            weights=[weight for buffers in self.values() for weight in buffers.weights],
            masters=owned,
            starts=starts,
            gather=self,
            validity=Validity("load a state with optimizer.load_state_dict(...)", advice=ADVICE),
            raises_together=debugging(),
        )

    def prepare(self) -> None:
        """Move weights that were given a different storage back into their bucket."""
        for bucket in self.values():
            bucket.reclaim()

    def start(self, plan: CastPlan) -> None:
        """All-gather the bytes of the last cast, and make columnwise copies."""
        if self._group.size > 1:
            for bucket in self.values():
                bucket.start(self._group)
            for bucket in self.values():
                bucket.wait()
        plan.post_all_gather()


_Host: Any = host.optimizer_class()
OTHER_GROUPS = (
    "parameters of this optimizer were added, removed or moved after it was built, and their buckets are laid out once: build a "
    "new one and load the state of this one"
)
WRITTEN = (
    "{count} parameters were written after this optimizer was built, and its masters, which have the earlier values, would "
    "overwrite them: build it after the last write of its parameters, or load a state"
)


@overrides("refresh", "master_views", "_check_groups", "_check_unwritten", "_lay_out", "_layout", "_named", "_keys")
class DistributedFusedAdam(_Host):  # type: ignore[misc]
    """Apex's ZeRO-2 Adam for models whose weights `zerocast.quantize_` has replaced.

    It accepts the arguments of Apex's class: `model.named_parameters()`, or only parameters, all of
    them trainable. Rank 0's initial values, before quantization, become the masters on all ranks.
    After a step the weights have the bytes of the unsharded cast on all ranks. Apex updates and
    gathers plain parameters by itself.

    Raises, on every rank if on any: ValueError for options that are not supported, with the reason,
    for a parameter that is listed twice and for a quantized weight that is not trained; TypeError
    for a parameter of an unsupported class; RuntimeError for a weight that has an owner, and for an
    Apex with an unsupported API.
    """

    # Attributes of Apex's class: the alignment of parameters and the size of a rank's part of a
    # bucket, both in elements, and the buckets that Apex is about to gather, by number.
    alignment: int
    default_shard_size: int
    _params_buckets: dict[int, Any]
    # True once the constructor has laid out all buckets. Before that, Apex's constructor calls
    # methods that are overridden here.
    _is_built = False

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        with known_api(host.UNKNOWN):
            super().__init__(params, *args, **options)
            named = [(name, parameter, index) for index, name, parameter in self._named() if _is_quantized(parameter)]
            numel = self.default_shard_size * self.distributed_size
            buckets = fill_buckets(named, numel, self.distributed_size, self.grad_sync_dtype)
            by_index = {self._lay_out(bucket): bucket for bucket in buckets}
            # Plain parameters in reverse, the order in which the backward pass produces gradients.
            self.init_params(reversed([parameter for _, _, parameter in self._named()]))
            masters = {index: self.state["buckets"][index].params_shard for index in by_index}
            # The ranks that share the masters, and all data-parallel ranks: with a redundant group,
            # Apex has several copies of the masters.
            group, replicas = Group.of(self.distributed_process_group), Group.of(self.process_group)
            self._quantized = QuantizedBuckets(by_index, group, self.device)
            self._driver = CastDriver(self._quantized.host(masters))
            self._plan = self._driver.plan
            self._plan.validity.owner = weakref.ref(self)
            self._plan.delayed.broadcast(replicas)
            self._listed = listed_parameters(self.param_groups)
            self._plan.validity.add_precheck(self._check_groups, Use.REDUCE, Use.STEP, Use.SAVE)
            self._is_built = True
        self.refresh()
        # The versions of the parameters that the masters were made from. None once the masters hold
        # later values.
        self._first_versions: list[int] | None = [parameter._version for _, _, parameter in self._named()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast, gather and transpose masters that were written by hand. Collective."""
        with raising_together([self._driver]):
            self._plan.validity.check(Use.STEP)
            self._driver.refresh()

    def param_sync(self) -> None:
        """Do nothing, since a step ends with its gather. Raises RuntimeError after a step that
        failed partway.
        """
        if self._is_built:
            self._plan.validity.check(Use.STEP)
        # A step that raised before its update leaves entries here, and no master was written.
        self._params_buckets.clear()

    def grad_norm(self, *args: Any, **options: Any) -> Tensor:
        """Apex's norm of all gradients, for clipping and loss scaling.

        Raises RuntimeError after a step that failed partway.
        """
        self._plan.validity.check(Use.REDUCE)
        norm: Tensor = super().grad_norm(*args, **options)
        return norm

    def state_dict(self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None) -> Any:
        """Apex's state dict with full FP32 masters, moments and the state of delayed scaling.

        It is the same on every rank. Collective. Raises RuntimeError if the masters of the last
        cast were NaN or Inf, and after a step that failed partway.
        """
        problem: Exception | None = None
        try:
            self._plan.validity.check(Use.SAVE)
            checkpoint.check_format(state_dict_format)
        except (RuntimeError, ValueError) as error:
            problem = error
        validate_across_ranks(Group.of(self.process_group), [], problem, "saves a state")
        with checkpoint.PlainZeros():
            state_dict = super().state_dict(state_dict_format=state_dict_format, gather_on_root=gather_on_root)
        checkpoint.add_delayed(state_dict["state"], self._plan.delayed, self._keys(state_dict))
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same parameters, from any number of ranks and any format, and cast
        its masters. Collective.

        Plain parameters are loaded with the model. After a step that failed partway this makes the
        optimizer usable again, and drops the gradients of that step. Raises ValueError, with
        nothing changed, for the deprecated first format, for a wrong number of parameters and for
        wrong shapes.
        """
        problem = checkpoint.problem_of(state_dict, self.param_groups)
        validate_across_ranks(Group.of(self.process_group), [], problem, what="loads a state")
        if self._plan.validity.partial:
            self.zero_grad()
        with self._plan.validity.transaction("loading a state"), raising_together([self._driver]):
            super().load_state_dict(state_dict)
            checkpoint.load_delayed(state_dict["state"], self._plan.delayed, self._keys(state_dict))
            self._driver.refresh()
        self._first_versions = None

    def master_views(self) -> tuple[MasterViews, ...]:
        """Return the masters of the quantized weights, for `zerocast.verify`."""
        return tuple(self._driver.master_views())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group in the constructor. Raises RuntimeError later, since buckets are laid out
        once.
        """
        if self._is_built:
            raise RuntimeError(OTHER_GROUPS)
        super().add_param_group(param_group)

    def init_params(self, params: Any = None, *args: Any, **options: Any) -> None:
        """Lay out parameters in the constructor. Steps and saves call it too, and raise
        RuntimeError for other parameters than those of the constructor, and for values that the
        first step would overwrite.
        """
        if self._is_built:
            self._check_groups(Use.STEP)
            self._check_unwritten()
        super().init_params(params, *args, **options)

    def _check_groups(self, use: Use) -> None:
        """Raise RuntimeError if parameters were added, removed or moved. Apex finds them by their
        positions, and would never end to gather a bucket with another one.
        """
        if listed_parameters(self.param_groups) != self._listed:
            raise RuntimeError(OTHER_GROUPS)

    def _check_unwritten(self) -> None:
        """Raise RuntimeError if parameters were written before the first step. Apex itself makes
        masters in the first backward pass, and so from these values.
        """
        if self._first_versions is None or self._plan.validity.is_writing:
            return
        versions = [parameter._version for _, _, parameter in self._named()]
        if count := sum(map(operator.ne, versions, self._first_versions)):
            raise RuntimeError(WRITTEN.format(count=count))

    def _broadcast_params(self) -> None:
        """Validate the parameters, then broadcast the plain ones. Apex's constructor calls it.

        It is the first collective of the constructor, so all ranks can raise together in it. The
        values of quantized weights are broadcast one at a time, in `_init_param_state`.
        """
        named = [(name, parameter) for _, name, parameter in self._named()]
        validate_across_ranks(
            Group.of(self.process_group),
            [_describe(*item) for item in named],
            problem_of(self, named),
            "builds a DistributedFusedAdam",
        )
        for _, parameter in named:
            if not _is_quantized(parameter):
                Group.of(self.process_group).broadcast(parameter.detach(), "initial values")

    @torch.no_grad()
    def _init_param_state(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        """Let Apex make the master of a weight from its FP32 value before quantization.

        Apex reads the parameter as a plain tensor. So it gets the value in place of the weight, and
        the state that it makes is then moved to the weight.
        """
        if not isinstance(param, QuantizedWeight) or "fragments" in self.state[param]:
            super()._init_param_state(param, *args, **kwargs)
            return
        initial = param.high_precision_init_val
        value = (param.dequantize() if initial is None else initial).detach().to(self.device, torch.float32, copy=True)
        Group.of(self.process_group).broadcast(value, "an initial value")
        super()._init_param_state(value, *args, **kwargs)
        self.state[param] = self.state.pop(value)
        param.high_precision_init_val = None

    def _local_step(self, bucket_ids: list[int]) -> None:
        """Update the masters, cast, gather and make the columnwise copies.

        Apex would gather after this method. Here it happens inside, so that one transaction covers
        all of it, and the later `param_sync` does nothing.
        """
        with self._plan.validity.transaction("an optimizer step"):
            with raising_together([self._driver]), casting([self._driver]):
                super()._local_step(bucket_ids)
            super().param_sync()
            self._quantized.start(self._plan)
            self._first_versions = None

    def _check_params_shard_dtypes(self, params_buckets: dict[int, Any]) -> None:
        """Cast the updated masters. Their buckets are not among those that Apex gathers."""
        plain = {index: bucket for index, bucket in params_buckets.items() if index not in self._quantized}
        super()._check_params_shard_dtypes(plain)
        self._driver.cast()
        for index in self._quantized:
            del self._params_buckets[index]

    def _lay_out(self, bucket: Bucket) -> int:
        """Let Apex make a bucket with the layout of `bucket`. Returns Apex's number for it.

        Raises RuntimeError if the layouts differ: the cast would write to the wrong elements.
        """
        index = len(self.state["buckets"])
        with self._layout(bucket.shard_numel):
            self.init_params_bucket([slot.parameter for slot in bucket.slots], param_sync_dtype=torch.uint8)
        laid = self.state["buckets"][index:]
        actual = [(fragment.param_range, fragment.bucket_range) for made in laid for fragment in made.fragments]
        expected = [((0, slot.numel), (slot.offset, slot.offset + slot.numel)) for slot in bucket.slots]
        sizes = [made.shard_size for made in laid]
        if actual != expected or sizes != [bucket.shard_numel]:
            raise RuntimeError(
                f"DistributedFusedAdam laid a bucket of shards of {bucket.shard_numel} elements out as {sizes}, its weights at "
                f"{actual[:4]} and not {expected[:4]}: this Apex has a layout that zerocast does not support"
            )
        return index

    @contextlib.contextmanager
    def _layout(self, shard_numel: int) -> Iterator[None]:
        """Set the shard size and the alignment of Apex's next buckets while the context is open.

        The alignment is zerocast's, which is a multiple of Apex's.
        """
        before = self.alignment, self.default_shard_size
        self.alignment = SHARD_ALIGNMENT_ELEMENTS
        self.default_shard_size = shard_numel
        try:
            yield
        finally:
            self.alignment, self.default_shard_size = before

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (group, name, parameter) in order. A name defaults to `group.position`."""
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{index}.{position}" for position in range(len(group["params"]))]
            yield from ((index, name, parameter) for name, parameter in zip(names, group["params"], strict=True))

    def _keys(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a dict from name of a parameter to its key in a state dict."""
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        return {name: key for (_, name, _), key in zip(self._named(), keys, strict=True)}


def _is_quantized(parameter: Tensor) -> bool:
    return isinstance(parameter, QuantizedWeight)


def _describe(name: str, parameter: Tensor) -> str:
    stored = parameter.format if isinstance(parameter, QuantizedWeight) else "plain"
    return f"{name}: {stored} {tuple(parameter.shape)} {parameter.dtype}"
