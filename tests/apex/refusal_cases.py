"""What the optimizer says about what it does not take, on the ranks of a pool."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.apex.checkpoints import different, held
from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu
from tests.apex.training import SMALL, Case, Run
from tests.workers import error_of
from zerocast import ZeroAdamW

if not WHY_NOT:
    from tests.apex.host_on_cpu import apex
    from zerocast.integrations.apex import DistributedFusedAdam


NEEDED: dict[str, dict[str, Any]] = {  # what Apex itself asks for beside an option
    "store_param_remainders": {"store_params": False, "param_sync_dtype": torch.bfloat16},
    "with_scaled_states": {"dtype": torch.bfloat16},
}


class Foreign(Tensor):
    """A quantized tensor of another library."""

    @staticmethod
    def __new__(cls, *shape: int) -> "Foreign":
        found: Foreign = Tensor._make_wrapper_subclass(cls, shape, device=device(), requires_grad=True)
        found._is_param = True  # what torch.nn.Parameter sets on a subclass
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def model(fmt: str = "nvfp4") -> nn.Module:
    return zerocast.quantize_(
        nn.Linear(64, 32, device=device()), zerocast.Recipe({"weight": fmt}), dtype=torch.bfloat16
    )


def build(what: nn.Module, **options: Any) -> Any:
    return DistributedFusedAdam(what.named_parameters(), **{"bucket_cap_mb": SMALL, **options})


def with_option(name: str) -> str:
    value = False if name == "store_params" else torch.bfloat16 if name == "dtype" else True
    others = NEEDED.get(name, {})
    with host_on_cpu(), mock.patch.object(apex, "_FOUND_DEPRECATED_FUSED_ADAM", True):
        return error_of(lambda: build(model(), **{name: value, "device": device(), **others}))


def twice() -> tuple[str, str]:
    """A second optimizer of either kind over the same weights."""
    with host_on_cpu():
        one = model()
        held = build(one)
        again = error_of(lambda: build(one))
        other = model()
        zero = ZeroAdamW(other.named_parameters())
        after_zero = error_of(lambda: build(other))
        assert held is not None and zero is not None
        del held  # what nobody holds owns nothing
        assert build(one) is not None
        return again, after_zero


def foreign(only_on: int) -> str:
    """A tensor of another library; the other ranks hear of it."""
    with host_on_cpu():
        one = model()
        if dist.get_rank() == only_on:
            one.register_parameter("bias", Foreign(32))
        return error_of(lambda: build(one))


def other_weights() -> str:
    with host_on_cpu():
        return error_of(lambda: build(model("nvfp4" if dist.get_rank() else "fp8_block")))


def not_to_be_trained() -> tuple[str, str]:
    """A weight that needs no gradient, and one that is listed twice."""
    with host_on_cpu():
        frozen, one = model(), model()
        frozen.weight.requires_grad_(False)
        named = [("weight", one.weight), ("again", one.weight)]
        return error_of(lambda: build(frozen)), error_of(lambda: DistributedFusedAdam(named, bucket_cap_mb=SMALL))


def more_parameters() -> str:
    with host_on_cpu():
        optimizer = build(model())
        return error_of(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=device()))]}))


def first_format() -> tuple[str, str, str]:
    with host_on_cpu():
        optimizer = build(model())
        save = error_of(lambda: optimizer.state_dict(state_dict_format=1))
        return (
            save,
            error_of(lambda: optimizer.load_state_dict({"gathered_states": []})),
            error_of(lambda: optimizer.load_state_dict({"format": 1})),
        )


def other_states(only_on: int) -> tuple[list[str], list[str]]:
    """States that do not fit, on one rank: what is said, and what they changed."""
    with host_on_cpu():
        run = Run(Case())
        run.step(0)
        before, state, said = held(run), run.optimizer.state_dict(), []
        entries = [key for key in state["state"] if key != "step"]
        group = state["param_groups"][0]
        for other in (
            {"state": state["state"]},
            {**state, "state": {key: value for key, value in state["state"].items() if key != entries[-1]}},
            {**state, "state": {**state["state"], entries[0]: {"param": torch.zeros(3)}}},
            {
                **state,
                "state": {
                    **state["state"],
                    entries[0]: dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), torch.zeros(3)),
                },
            },
            {**state, "param_groups": [{**group, "params": group["params"][1:]}, *state["param_groups"][1:]]},
        ):
            given = other if dist.get_rank() == only_on else state
            said.append(error_of(lambda given=given: run.optimizer.load_state_dict(dict(given))))
        return said, different(held(run), before)


def without(name: str) -> str:
    """An Apex whose optimizers have no such attribute."""

    def absent(self: Any) -> None:
        raise AttributeError(name)

    with (
        host_on_cpu(),
        mock.patch.object(apex.DistributedFusedAdam, name, property(absent, lambda *_: None), create=True),
    ):
        return error_of(lambda: build(model()))


def of_another_layout() -> str:
    """An Apex that starts fragments elsewhere."""
    with (
        host_on_cpu(),
        mock.patch.object(apex, "_round_to_multiple", lambda number, multiple, round_up=True: number + 1),
    ):
        return error_of(lambda: build(model()))


def moved() -> list[str]:
    """Weights that were given other storage after the optimizer was built are brought back."""
    with host_on_cpu():
        run = Run(Case())
        for weight in run.weights.values():
            weight.rebind(rowwise_data=weight.rowwise_data.clone())
        run.step(0)
        return run.wrong()


def masters_by_hand() -> tuple[bool, list[str]]:
    """Whether changed masters are seen, and what is wrong after `refresh`."""
    with host_on_cpu():
        run = Run(Case(tuple(spec for spec in Case().specs if spec.fmt != "plain")))
        for owned in run.optimizer.master_views()[0].masters:
            if owned.master is not None:
                owned.master.mul_(1.5)
        seen = bool(run.wrong())
        run.optimizer.refresh()
        return seen, run.wrong()


def plain_only() -> tuple[int, bool]:
    """A model without quantized weights is Apex's as ever."""
    with host_on_cpu():
        torch.manual_seed(0)
        one = nn.Linear(8, 8, device=device())
        before, optimizer = one.weight.detach().clone(), build(one)
        one(torch.ones(2, 8, device=device())).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return len(optimizer.master_views()[0].masters), torch.equal(before, one.weight)
