"""FusedAdamW: the fused step of ZeroAdamW for FSDP2: AdamW over local shards, with the amaxes of
the next cast in the same pass.

Any optimizer works under FSDP2. With this one the cast need not read all masters again. Its results
equal ZeroAdamW's bit for bit, and its state has the keys of torch.optim.AdamW, so that a checkpoint
of one can be loaded into the other.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zerocast import backends
from zerocast.cast.adam_update import check_options
from zerocast.cast.captured_step import CapturableStep, CapturedStep, check_capturable
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.adam_passes import AdamPass
from zerocast.fsdp2.manager import CastManager, validity_of
from zerocast.fsdp2.moments_8bit import ShardedMoments
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.prepare import managers_behind
from zerocast.fsdp2.step_tables import StepTables, places_of, steps_taken
from zerocast.optim.config import hyperparameters_by_name
from zerocast.optim.saved_state import ADAM_STATE, check_moments, check_not_kept, check_shapes, problem_of
from zerocast.optim.untrained_checks import listed
from zerocast.optim.update_rule import ADAMW
from zerocast.weight.validity import Use, Validity, transaction_together

if TYPE_CHECKING:
    from zerocast.backends.cuda import StandIns

WITHIN_BACKWARD = (
    "a captured step runs within a backward pass: call it after the pass, or call step() from hooks of gradients"
)
# The dtypes that gradients may have. Gradients of one launch have the same dtype.
GRADIENT_DTYPES = torch.float32, torch.bfloat16


class MomentsOnDemand(defaultdict[Any, Any]):
    """The `state` of a FusedAdamW. It makes the moments of a parameter when they are first read.

    torch's `get_optimizer_state_dict` and torchtitan step an optimizer whose state is empty, to
    fill it, and then look up the moments that they save or load. This state is filled with zeros
    when they ask whether it is empty. A caller who removes entries resets moments, as in torch.
    """

    # The optimizer's param_groups, a new list after a load.
    param_groups: Sequence[Mapping[str, Any]] = ()
    # Makes the 8-bit moments, whose codes are the state. None if moments are FP32.
    eight_bit: ShardedMoments | None = None

    def __bool__(self) -> bool:
        """Make the moments of all trained parameters, and return True."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self:
                    self.__missing__(parameter)
        return True

    def __missing__(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the moments of a parameter for its first step, or for torch's
        `set_optimizer_state_dict`, which reads their names.
        """
        if self.eight_bit is None:
            moments = _zero_moments(parameter)
        else:
            # A caller may have removed the entry. Codes mean nothing without their scales, which
            # are not in the entry.
            self.eight_bit.forget(parameter)
            moments = {"step": torch.zeros((), dtype=torch.float32), **self.eight_bit.codes(parameter)}
        self[parameter] = moments
        return moments


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over FP32 parameters, prepared by `zerocast.fsdp2` or not, with one launch per weight
    format.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        moment_dtype: "8bit" stores both moments in 2.06 bytes per element in place of 8
            (docs/formats/moments_8bit.md). It needs names of parameters,
            `model.named_parameters()`. A step then reduces the largest values of groups that
            boundaries between ranks split. States hold FP32 moments; the attribute `state` holds
            codes.

    Build it after `fully_shard`, like any optimizer, on all ranks that shard the parameters. It
    does not step parameters without a gradient. The update equals the update of ZeroAdamW bit for
    bit (`zerocast/backends/README.md`). It does not check gradients: if one makes masters NaN or
    Inf, an error reports it after the next cast.

    On all ranks, with nothing changed, raises TypeError for parameters that are not FP32, and
    ValueError for parameters on several devices, listed twice, or without names if names are
    needed, and for parameters, `moment_dtype` and hyperparameters that differ between ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        moment_dtype: torch.dtype | Literal["8bit"] = torch.float32,
    ) -> None:
        # True once the constructor has compared all parameter groups among the ranks.
        self._is_built = False
        # The moments in 8 bits; None if they are FP32.
        self._eight_bit = ShardedMoments() if moment_dtype == "8bit" else None
        # Groups have all options of torch.optim.AdamW, so that states have the same keys. Those
        # that are not arguments here have the one value that this update allows.
        options = torch.optim.AdamW([torch.zeros(0)]).defaults
        given = params if isinstance(params, Tensor) else listed(params)
        problem: Exception | None = None
        try:
            if moment_dtype not in (torch.float32, "8bit"):
                raise ValueError(f"moment_dtype of a FusedAdamW is torch.float32 or '8bit', got {moment_dtype}")
            super().__init__(given, {**options, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        except (TypeError, ValueError) as error:
            problem = error
        mesh, action = _reduction_mesh(tree_leaves(given)), "builds a FusedAdamW"
        # Before parameters are compared, since `moment_dtype` says whether that needs their names.
        validate_across_ranks(_groups_of(mesh), [], problem, action, {"moment_dtype": moment_dtype})
        self._agree(mesh, None, action)
        self._is_built = True
        for group in self.param_groups:
            self._lay_out_moments(group)
        self.state = self._moments_on_demand({})
        # The launches of a step. None before the first step, and after a load, an error while they
        # were made and a step without gradients. The next step then makes them.
        self._tables: StepTables | None = None
        # The managers of the prepared models whose masters the last `prepare` has found.
        self._managers: list[CastManager] = []
        # Not at the module's import, since this imports the compiler.
        self._outside_of_graphs = torch.compiler.disable(FusedAdamW._step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch.optim.AdamW does. All ranks that shard the parameters
        call it. With nothing added, raises TypeError for parameters that are not FP32, and
        ValueError for parameters on another device or listed twice, for options that change AdamW
        (`maximize`), for hyperparameters that are out of range, and for groups that differ between
        ranks.
        """
        if not self._is_built:
            self._add(param_group)
            return
        (given,) = listed([param_group])
        count = len(self.param_groups)
        problem: Exception | None = None
        try:
            self._add(given)
        except (TypeError, ValueError) as error:
            problem = error
        try:
            self._agree(_reduction_mesh(given["params"]), problem, "adds parameters to a FusedAdamW")
        except Exception:
            del self.param_groups[count:]
            raise
        self._lay_out_moments(given)

    def _add(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group that passes the checks of this rank."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            if len({id(parameter) for parameter in group["params"]}) < len(group["params"]):
                # torch only warns. A rank could list one parameter twice in place of another.
                raise ValueError("a parameter is listed twice in a parameter group, and would be stepped twice")
            for parameter in group["params"]:
                if parameter.dtype != torch.float32:
                    raise TypeError(
                        f"masters are float32, a parameter is {parameter.dtype}: leave precision to FSDP2's policy"
                    )
            devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
            if len(devices) > 1:
                raise ValueError(f"the parameters of one optimizer are on one device, got {sorted(map(str, devices))}")
            check_options([group])
            ADAMW.check(group)
            if self._eight_bit is not None and "param_names" not in group:
                raise ValueError(
                    "moments in 8 bits are rounded by random numbers of each parameter's name: pass FusedAdamW "
                    "model.named_parameters()"
                )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _lay_out_moments(self, group: Mapping[str, Any]) -> None:
        """Lay out the 8-bit moments of a parameter group that all ranks have."""
        if self._eight_bit is not None:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self._eight_bit.add(name, parameter)

    def _agree(self, mesh: DeviceMesh | None, problem: Exception | None, action: str) -> None:
        """Raise on all ranks of a mesh if any of them has a problem, or if they differ in the
        parameters on it or in hyperparameters.
        """
        lines: list[str] = []
        for index, group in enumerate(self.param_groups):
            # Without moments in 8 bits no bit depends on a name.
            names = range(len(group["params"])) if self._eight_bit is None else group["param_names"]
            lines += [
                f"{name}: {tuple(parameter.shape)} {parameter.placements}{_gathered_as(parameter)} in group {index}"
                for name, parameter in zip(names, group["params"], strict=True)
                if isinstance(parameter, DTensor) and parameter.device_mesh == mesh
            ]
        validate_across_ranks(_groups_of(mesh), lines, problem, action, hyperparameters_by_name(self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and moments. Return the result of `closure`, or None.

        An error before masters are written changes nothing. After an error while they are written,
        the optimizer and the model raise at every call, and cannot be saved, until a state is
        loaded through `zerocast.fsdp2.TrainingState`. If masters are sharded, hyperparameters that
        are out of range and a RuntimeError before masters are written have the same effect: other
        ranks may have stepped, so all ranks raise at the next gather.
        """
        return self._outside_of_graphs(self, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        validity_of(self).check(Use.STEP)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.prepare_or_join_collectives():
            return loss
        for manager in self.managers:
            # Before the launch: even if this rank's step fails partway, all ranks cast before the
            # next gather reports it.
            manager.make_due(self)
        with transaction_together(self.validities, "an optimizer step"):
            for manager in self.managers:
                manager.plan.forget_old_amaxes()
            self.launch({})
            for manager in self.managers:
                manager.plan.after_step()
        return loss

    # -- a step that this rank does not take
    #
    # problem                            error                     this rank      other ranks
    # a gradient that no launch takes    ValueError, TypeError     raises         raise the same
    # masters that cannot be cast        RuntimeError, TypeError   raises         may step
    # partial masters, replaced moments  RuntimeError              raises         may step
    # hyperparameters out of range       ValueError, TypeError     returns        may step
    # no gradient on this rank           none                      returns        may step
    #
    # Ranks that step wait for this one in the collective of 8-bit moments, and in their next cast.
    # So this rank always takes part in that collective, and its next gather casts. After the
    # problems in rows two to four the headers of that gather say so, and all ranks raise. Without
    # other ranks hyperparameters out of range raise here.

    def prepare_or_join_collectives(self) -> object:
        """Prepare a step and return the result of `prepare`. If this rank takes no step, it takes
        part in the collective of the step that other ranks take.
        """
        try:
            places = self.prepare()
        except RuntimeError as error:
            self.refuse(error)
        except Exception:
            # For gradients all ranks raise. For masters `_bind` has made a cast due, which reports
            # them.
            self.join_collectives()
            raise
        if not places:
            self.join_collectives()
        return places

    def refuse(self, problem: Exception) -> NoReturn:
        """Raise the problem of this rank, which takes no step, after the collective of a step that
        the other ranks take.
        """
        if self._break_off(problem):
            for manager in self._managers:
                manager.make_due(self)
        self.join_collectives()
        raise problem

    def _break_off(self, error: Exception) -> bool:
        """Mark masters as partial if other ranks may have stepped, because of an error on this one.
        Return False if there are no others.
        """
        is_shared = any(manager.plan.has_peers for manager in self._managers)
        for validity in self.validities if is_shared else ():
            if not validity.partial:
                validity.failed_partway(f"an optimizer step ({error})")
        return is_shared

    def join_collectives(self) -> None:
        """Take part in the collective of a step that this rank does not take."""
        if self._eight_bit is not None:
            self._eight_bit.begin()
            self._eight_bit.reduce()

    @torch.no_grad()
    def capture(self) -> CapturedStep:
        """Return a function to call in place of `step()`: the step and its cast as one CUDA graph.

        All ranks call `capture`, and later the function, after gradients were reduced and clipped.
        The first call of the function is an ordinary step, the second one records the graph. Every
        call reads the learning rates, numbers or tensors, so schedulers work as usual. So do
        ordinary steps in between, loads and evaluation. The function takes no closure, runs no step
        hooks and cannot be called from a gradient's hook. Raises RuntimeError for parameters that
        are not on a CUDA device, and for other backends than cuda.
        """
        validity_of(self).check(Use.STEP)
        device = self.param_groups[0]["params"][0].device
        backend = backends.choose(device)
        check_capturable(device, backend)
        stand_ins = getattr(backends.load(backend), "StandIns", None)
        if stand_ins is None:
            raise RuntimeError(
                f"the {backend} backend reads gradients where they were when a step was captured, and FSDP2 allocates new ones: "
                "call step()"
            )
        return CapturedStep(CapturableFusedStep(self, stand_ins))

    # -- the parts of a step, for a captured one too

    def prepare(self) -> object:
        """Do the CPU's part of a step, before the device's.

        Return the record of memory that the tables were made for: a new object once anything has
        moved. None if this rank takes no step, without a gradient or because of hyperparameters.
        """
        self._bind()
        for validity in self.validities:
            # Masters are checked too: if another optimizer has left them partial, this step would
            # count as the write that completes them.
            validity.check(Use.STEP)
        try:
            for group in self.param_groups:
                ADAMW.check(group, wait=False)
            if self._tables is not None:
                self._tables.scalars.refresh(self.param_groups)
        except (TypeError, ValueError) as error:
            if not self._break_off(error):
                raise
            return None
        return None if self._tables is None else self._tables.places

    @property
    def managers(self) -> Sequence[CastManager]:
        """The managers of the prepared models whose masters this optimizer steps."""
        return self._managers

    @property
    def validities(self) -> list[Validity]:
        """The validities of masters and moments."""
        return [validity_of(self), *(manager.plan.validity for manager in self._managers)]

    def passes(self) -> Sequence[AdamPass]:
        """Return the launches of a step."""
        return [] if self._tables is None else self._tables.passes

    def launch(self, gradients: Mapping[AdamPass, list[Tensor]]) -> None:
        """Do the device's part of a step that was prepared. `gradients` replace the gradients of
        some of its passes.
        """
        assert self._tables is not None
        self._tables.launch(gradients)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.AdamW does. Step counts are copies, and parameters that
        were never stepped have zeros for moments. Raises RuntimeError after a step or a load that
        failed partway.
        """
        validity_of(self).check(Use.SAVE)
        with self._hooks_held_back("_optimizer_state_dict_post_hooks") as hooks:
            state_dict = super().state_dict()
        # Callers may keep more than moments there, which stays.
        state = dict(state_dict["state"])
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            moments = self.moments(parameter)
            if moments:
                state[index] = {**moments, "step": moments["step"].clone()}
            elif parameter.requires_grad:
                state[index] = _zero_moments(parameter)
        state_dict["state"] = state
        for hook in hooks:
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    @contextlib.contextmanager
    def _hooks_held_back(self, kind: str) -> Iterator[list[Callable[..., Any]]]:
        """Keep torch from calling the hooks of a kind while the context is open, and yield them:
        the state that they see is made after torch's part.
        """
        hooks = getattr(self, kind)
        setattr(self, kind, type(hooks)())
        try:
            yield list(hooks.values())
        finally:
            setattr(self, kind, hooks)

    def moments(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the state of a parameter by torch's names, moments in FP32, which are copies if
        they are kept in 8 bits. Empty before its first step.
        """
        state: dict[str, Tensor] = self.state.get(parameter, {})
        if not state or self._eight_bit is None:
            return state
        return {**state, **self._eight_bit.values(parameter)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of the state of this class, or of torch.optim.AdamW. All ranks that
        shard the parameters call it. Raises ValueError on all of them, with nothing changed, for
        moments and hyperparameters that are out of range, and for different parameters.
        """
        problem = problem_of(lambda: self._check_state(state_dict), "optimizer")
        mesh = _reduction_mesh(parameter for group in self.param_groups for parameter in group["params"])
        validate_across_ranks(_groups_of(mesh), [], problem, "loads the state of a FusedAdamW")
        in_use = {id(value) for moments in self._all_moments().values() for value in moments.values()}
        self._tables = None
        with self._hooks_held_back("_optimizer_load_state_dict_post_hooks") as hooks:
            super().load_state_dict(dict(state_dict))
        self.state = self._moments_on_demand(self.state)
        loaded = self._all_moments()
        if self._eight_bit is not None:
            try:
                self._eight_bit.load(loaded, steps_taken([*loaded.values()]))
            except BaseException:
                # Some moments are loaded, others are zeros.
                validity_of(self).failed_partway("a load")
                raise
        for parameter, moments in loaded.items():
            moments["step"] = torch.as_tensor(moments["step"]).to(torch.float32, copy=True)
            if self._eight_bit is not None:
                moments |= self._eight_bit.codes(parameter)
            else:
                moments |= {
                    key: value.clone() for key, value in moments.items() if key != "step" and id(value) not in in_use
                }
        for hook in hooks:
            hook(self)

    def _moments_on_demand(self, present: Mapping[Any, Any]) -> MomentsOnDemand:
        """Return a state with the tensors that are present, which makes the rest."""
        state = MomentsOnDemand(dict, present)
        state.param_groups = self.param_groups
        state.eight_bit = self._eight_bit
        return state

    def _all_moments(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each parameter that has one, without other entries of callers."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return {parameter: self.state[parameter] for parameter in parameters if parameter in self.state}

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError, on this rank only, for a state that does not
        fit.
        """
        check_options(state_dict["param_groups"])
        for group in state_dict["param_groups"]:
            ADAMW.check(group)
        groups, saved = self.param_groups, state_dict["param_groups"]
        here, there = ([len(group["params"]) for group in of_state] for of_state in (groups, saved))
        if here != there:
            raise ValueError(
                f"the state has parameter groups of {there} parameters, this optimizer has groups of {here}"
            )
        indices = (index for group in saved for index in group["params"])
        parameters = (parameter for group in groups for parameter in group["params"])
        for index, parameter in zip(indices, parameters, strict=True):
            moments = state_dict["state"].get(index)
            if moments is not None:
                check_moments(f"parameter {index}", moments, ADAM_STATE)
                check_shapes(f"parameter {index}", moments, parameter)
                own = self.state.get(parameter, {})
                if "exp_avg" in own and moments["exp_avg"] is own["exp_avg"]:
                    check_not_kept(moments, float(own["step"]))

    def _bind(self) -> None:
        """Find the masters and the managers of the parameters that have gradients now. Make the
        tables of a step again if any of their tensors was replaced, if different parameters have
        gradients, if a parameter is in another group, or if a step count was written.
        """
        if not isinstance(self.state, MomentsOnDemand):
            # A caller has replaced it to reset moments.
            self.state = self._moments_on_demand(self.state)
        stepped = [
            (index, parameter, getattr(parameter, "_local_tensor", parameter))
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._managers = managers_behind(local for _, _, local in stepped)
        for manager in self._managers:
            try:
                manager.plan.bind()
            except (RuntimeError, TypeError, ValueError):
                # The other ranks step and cast. If this rank continues, it casts too.
                manager.make_due(self)
                raise
            manager.measuring.add(self)
        if not stepped:
            self._tables = None
            return
        cast_groups = [group for manager in self._managers for group in manager.plan.cast_groups]
        if self._tables is None or not self._tables.are_current(places_of(stepped, self.state), cast_groups):
            # If this raises, the next call makes the tables.
            self._tables = None
            for _, parameter, _ in stepped:
                _check_gradient(parameter)
                if not self.state[parameter]:
                    # A caller has emptied the entry to reset moments.
                    self.state.__missing__(parameter)
            self._tables = StepTables(stepped, self.state, cast_groups, self._eight_bit)


class CapturableFusedStep(CapturableStep):
    """A step of FusedAdamW and the cast after it, for a CUDA graph. Gathers stay outside.

    The inputs that change from step to step are written to fixed addresses before a replay:
    hyperparameters, and the addresses of the gradients, which FSDP2 allocates for each backward
    pass.

    Args:
        optimizer: the optimizer.
        stand_ins: makes tensors that replace gradients in a graph. None if a replay looks for the
            gradients itself.
    """

    def __init__(self, optimizer: FusedAdamW, stand_ins: "type[StandIns] | None" = None) -> None:
        self._optimizer, self._make_stand_ins = optimizer, stand_ins
        # Stand-ins for the gradients of each launch. They live as long as the graph.
        self._stand_ins: dict[AdamPass, StandIns] = {}

    def prepare(self) -> object:
        """Prepare the step on the CPU. Return the record of memory that the optimizer's tables were
        made for. None if this rank takes no step; it has cast as the others do.
        """
        if torch_fsdp.backward_pass() is not None:
            raise RuntimeError(WITHIN_BACKWARD)
        try:
            places = self._optimizer.prepare_or_join_collectives()
        except RuntimeError:
            self._cast_as_others()
            raise
        if not places:
            self._cast_as_others()
            return None
        return places

    def _cast_as_others(self) -> None:
        """Cast because the captured step of the other ranks does, which this rank does not take."""
        # The models of all parameters, because it can be that no parameter has a gradient on this
        # rank.
        for manager in managers_behind(p for group in self._optimizer.param_groups for p in group["params"]):
            if manager.plan.has_peers:
                manager.make_due(self._optimizer)
                manager.before_gather()

    def has_same_memory(self, now: object, recorded: object) -> bool:
        """Return whether the optimizer's tables are the same as at the recording."""
        return now is recorded

    @property
    def must_step_without_graph(self) -> bool:
        """True if the cast computes the first scales of delayed scaling, which needs the CPU, or if
        this replica has casts of its own to report, which a graph cannot.
        """
        return any(manager.plan.must_seed or manager.plan.replica_only_casts for manager in self._optimizer.managers)

    def step_without_graph(self) -> object:
        """Take an ordinary step and cast."""
        for manager in self._optimizer.managers:
            manager.before_first_step()
        self._optimizer.step()
        for manager in self._optimizer.managers:
            manager.cast_first_step()
        places = self._optimizer.prepare()
        passes = {*self._optimizer.passes()}
        self._stand_ins = {adam: held for adam, held in self._stand_ins.items() if adam in passes}
        return places

    @contextlib.contextmanager
    def launch_context(self) -> Iterator[None]:
        """Let the replay use these gradients, and count its cast.

        Raises RuntimeError before anything is written if ranks disagreed in the step before, and if
        this rank cannot cast.
        """
        managers = self._optimizer.managers
        for manager in managers:
            manager.before_captured_step(self._optimizer)
        for manager in managers:
            manager.plan.ready("takes a captured step")
            if manager.plan.problem is not None:
                try:
                    self._optimizer.refuse(manager.plan.problem)
                finally:
                    self._cast_as_others()
            # The graph measures all masters.
            manager.plan.forget_amaxes()
        with transaction_together(self._optimizer.validities, "a captured step"):
            if self._make_stand_ins is not None:
                for adam in self._optimizer.passes():
                    gradients = adam.gradients()
                    if adam not in self._stand_ins:
                        self._stand_ins[adam] = self._make_stand_ins(gradients)
                    self._stand_ins[adam].fill(gradients)
            yield
            for manager in managers:
                manager.after_captured_cast()

    def launch(self) -> None:
        """Step and cast all prepared weights."""
        self._optimizer.launch({adam: stand_ins.tensors for adam, stand_ins in self._stand_ins.items()})
        for manager in self._optimizer.managers:
            manager.plan.launch(in_graph=True)

    def finish(self) -> None:
        """Notify torch's schedulers that the optimizer has stepped, as a call of `step` does."""
        setattr(self._optimizer, "_opt_called", True)  # noqa: B010


def _zero_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the FP32 moments of a parameter before its first step."""
    exp_avg, exp_avg_sq = (torch.zeros_like(parameter.detach()) for _ in range(2))
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _gathered_as(parameter: DTensor) -> str:
    """Return the format that a prepared parameter is gathered in, for a text that ranks compare."""
    local = parameter._local_tensor
    return f" gathered as {local.format}" if isinstance(local, MasterParameter) else ""


def _reduction_mesh(tensors: Iterable[Any]) -> DeviceMesh | None:
    """Return the largest mesh that any of these tensors is sharded over. None if none is."""
    meshes = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return max(meshes, key=DeviceMesh.size, default=None)


def _groups_of(mesh: DeviceMesh | None) -> list[Group]:
    """Return the groups of this rank along each dimension of a mesh."""
    return [Group.of(group) for group in mesh.get_all_groups()] if mesh else []


def _check_gradient(parameter: Any) -> None:
    """Raise ValueError for a gradient that is not laid out like its parameter, such as a sum that
    tensor parallelism has not reduced, and TypeError for one whose dtype no launch takes, which
    `grad_dtype` of a parameter allows.
    """
    own, of_gradient = (getattr(tensor, "placements", None) for tensor in (parameter, parameter.grad))
    if own != of_gradient:
        raise ValueError(
            f"the gradient of a parameter with placements {own} has placements {of_gradient}: redistribute the gradient"
        )
    if parameter.grad.dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"gradients are float32 or bfloat16, one is {parameter.grad.dtype}: set grad_dtype of its parameter"
        )
