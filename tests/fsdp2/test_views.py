"""A write to a master through any view of it is a write to the master: every operator of this torch, by its schema."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net, slow
from tests.observed import operators
from tests.workers import error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW
from zerocast.fsdp2.manager import CastManager
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.weight import FSDPWeight


class Recorder(FSDPWeight):
    """A weight that keeps what it is told of."""

    def __init__(self, manager: CastManager) -> None:
        super().__init__("weight", zerocast.get_format("nvfp4"), manager)
        self.is_located, self.found = True, list[Tensor]()

    def after_write(self, data: Tensor) -> None:
        """Keep what was written to."""
        self.found.append(data)


def a_master(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[MasterParameter, Recorder]:
    """Return a master, and the recorder of writes to it."""
    manager = CastManager(nn.Module(), None)
    recorder = Recorder(manager)
    plain = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)
    return MasterParameter(plain, recorder), recorder


def writes(argument: Any) -> bool:
    """Return whether an argument of a schema is written to."""
    return argument.alias_info is not None and argument.alias_info.is_write


class Unrun:
    """An operator as dispatch sees it, which computes nothing."""

    def __init__(self, operator: Any) -> None:
        self._schema, self.namespace, self.tags = operator._schema, operator.namespace, operator.tags

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing at all here."""


def dispatched(operator: Any, written: Any) -> tuple[list[Tensor], Tensor]:
    """Return the writes that are noticed when `operator` writes a master as its argument `written`, and the
    tensor inside the master.
    """
    master, recorder = a_master(4, 4)
    args, kwargs = [], {}
    for argument in operator._schema.arguments:
        value = [master] if "List" in str(argument.type) else master
        value = value if argument.name == written.name else None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    MasterParameter.__torch_dispatch__(Unrun(operator), (MasterParameter,), tuple(args), kwargs)
    return recorder.found, master.plain


@pytest.mark.notices(
    "an operator of torch (in place, `out=`, foreach, fused) writes to a master or its view, or a compiled function to a master",
    where="FSDP2",
    answer="the next gather casts again; raises on all ranks if only some wrote",
)
def test_every_operator_that_writes_is_noticed() -> None:
    count = 0
    for operator in operators("aten"):
        for argument in filter(writes, operator._schema.arguments):
            if operator is torch.ops.aten.detach_.default:
                continue  # writes nothing
            if torch.Tag.inplace_view in operator.tags:
                with pytest.raises(RuntimeError, match=r"weight: .*shape or memory"):
                    dispatched(operator, argument)
                continue
            found, plain = dispatched(operator, argument)
            assert len(found) == 1, operator
            assert found[0] is plain, operator
            count += 1
    assert count > 1000


VALUES: dict[str, Any] = {
    **{
        name: 0 for name in ("dim", "dim0", "axis0", "index", "start", "dimension", "source", "destination", "sections")
    },
    **{name: 1 for name in ("dim1", "axis1", "length", "step", "chunks")},
    **{name: [4, 4] for name in ("size", "shape", "sizes")},
    **{name: [1] for name in ("indices",)},
    **{name: [0, 1] for name in ("dims",)},
    **{name: torch.ones(4, 4) for name in ("other", "src")},
    "stride": [4, 1],
    "device": "cpu",
    "dtype": torch.float32,
    "split_size": 2,
    "split_sizes": [1, 3],
    "cuda_enabled": False,
    "cpu_enabled": False,
    "cuda_dtype": torch.float16,
    "cpu_dtype": torch.bfloat16,
}
OF_ITS_OWN: dict[str, dict[str, Any]] = {
    **{f"aten.{name}": {"sections": 2} for name in ("hsplit.int", "vsplit.int", "dsplit.int", "tensor_split.sections")},
    **{f"aten.{name}.intlist": {"source": [0], "destination": [1]} for name in ("movedim", "moveaxis")},
    "aten.dsplit.int": {"self": (4, 4, 4), "sections": 2},
    "aten.dsplit.array": {"self": (4, 4, 4)},
    "aten.split.sizes": {"split_size": [1, 3]},
    "aten.unflatten.int": {"sizes": [2, 2]},
    "aten.unfold.default": {"size": 2},
    "aten.squeeze.dims": {"dim": [0]},
    "aten.view.dtype": {"dtype": torch.int32},
    "aten.view_as_complex.default": {"self": (4, 2)},
    "aten.narrow.Tensor": {"start": torch.tensor(0)},
    "aten.tensor_split.tensor_indices_or_sections": {"tensor_indices_or_sections": torch.tensor(2)},
    "aten.slice_inverse.default": {"src": torch.ones(4, 4)},
}
OF_COMPLEX = ("view_as_real", "imag", "real", "conj", "_conj")
# Operators of named tensors whose overloads do not say so.
NAMED = {"flatten.named_out_dim", "flatten.using_names"}
UNDECLARED = ("unsafe_split.Tensor", "unsafe_split_with_sizes.default", "unsafe_chunk.default", "_unsafe_view.default")
NOT_OF_MASTERS = {
    "sparse": "_nested_get_values _values row_indices crow_indices coalesce _indices indices ccol_indices col_indices values "
    "_sparse_broadcast_to",
    "nested": "_nested_view_from_jagged _nested_view_from_buffer",
    "dual": "_make_dual _unpack_dual _fw_primal",
    "named, in older torches": "align_to align_as refine_names rename",
    "needs a GPU": "pin_memory",
    "torch's own test": "_test_autograd_multiple_dispatch_view",
}


def viewing() -> Iterator[Any]:
    """Yield the operators that may return a view of their first argument."""
    elsewhere = {name for names in NOT_OF_MASTERS.values() for name in names.split()}
    for operator in operators("aten"):
        declared = any(
            value.alias_info is not None and not value.alias_info.is_write for value in operator._schema.returns
        )
        name = str(operator).removeprefix("aten.")
        if "dimname" in name.lower() or name in NAMED:  # named tensors, which later torches no longer have
            continue
        if ((declared and not operator._schema.is_mutable) or name in UNDECLARED) and name.split(".")[
            0
        ] not in elsewhere:
            yield operator


def viewed(operator: Any) -> tuple[list[Tensor], MasterParameter, Recorder]:
    """Apply an operator to a master. Return the results, the master and its recorder."""
    own = OF_ITS_OWN.get(str(operator), {})
    first, *others = operator._schema.arguments
    dtype = torch.complex64 if str(operator).split(".")[1] in OF_COMPLEX else torch.float32
    master, recorder = a_master(*own.get(first.name, (4, 4)), dtype=dtype)
    args: list[Any] = [master]
    kwargs = {}
    for argument in others:
        if argument.has_default_value() and argument.name not in own:
            continue
        assert argument.name in VALUES | own, f"{operator} is new: give a value to its argument {argument.name}"
        value = own.get(argument.name, VALUES.get(argument.name))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    result = operator(*args, **kwargs)
    return list(result) if isinstance(result, list | tuple) else [result], master, recorder


@pytest.mark.notices(
    "an operator of torch (in place, `out=`, foreach, fused) writes to a master or its view, or a compiled function to a master",
    where="FSDP2",
    answer="the next gather casts again; raises on all ranks if only some wrote",
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_every_view_is_noticed(context: Callable[[], Any]) -> None:
    """Tensors that share memory with a master are wrappers, like their own views, and report writes."""
    found = 0
    for operator in viewing():
        with context():
            views, master, recorder = viewed(operator)
            assert views, operator
            for view in views:
                if torch._C._is_alias_of(getattr(view, "plain", view), master.plain):
                    assert isinstance(view, MasterParameter), operator
                    again = view[..., :1].unsqueeze(0)
                    assert isinstance(again, MasterParameter), operator
                    recorder.found.clear()
                    again.zero_()
                    assert recorder.found, operator
                    found += 1
    assert found > 60


def test_what_has_memory_of_its_own_is_plain() -> None:
    """New tensors are plain: otherwise what optimizers keep would be taken for masters."""
    master, _ = a_master(4, 4)
    for made in (
        master + 1,
        master.clone(),
        torch.zeros_like(master),
        master.t().contiguous(),
        master.sum(),
        master[[0, 1]],
    ):
        assert type(made) is Tensor


def row(local: Tensor) -> None:
    local[0] = local.abs().max().item() + 1.0


FORMS: dict[str, Callable[[Any], object]] = {
    "local row": lambda p: row(p.to_local()),
    "foreach": lambda p: torch._foreach_mul_(list(p.to_local().unbind()), 3),
    "index_put": lambda p: p.to_local().view(-1).index_fill_(0, torch.tensor([0, 1], device=p.device), 5.0),
    "view of a view": lambda p: p.to_local().t()[1:].unsqueeze(0)[0, 0].copy_(torch.ones(())),
    "data row": lambda p: row(p.data.to_local()),
    "detached, flat": lambda p: p.detach().to_local().view(-1).mul_(2),
    "DTensor column": lambda p: p.data[:, 0].mul_(3),
    "DTensor transpose": lambda p: p.detach().t().mul_(3),
}


def a_weight(model: nn.Module) -> Any:
    """Return the parameter that is written to."""
    return models.masters(model)["blocks.0.1.weight"][0]


def forward(model: nn.Module) -> str:
    """Return the error of a forward pass."""
    return error_of(lambda: models.forward(model))


def check_after(model: nn.Module, what: str) -> None:
    """Check that a forward pass casts what was written."""
    assert forward(model) == "", what
    models.check(model, what)


def written_everywhere(reshard: bool) -> None:
    """Write through views on all ranks, in one form after another."""
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96), reshard_after_forward=reshard)
    assert forward(model) == ""
    for form, write in FORMS.items():
        before = a_weight(model).full_tensor()
        with torch.no_grad():
            write(a_weight(model))
        assert not torch.equal(before, a_weight(model).full_tensor()), form
        check_after(model, form)
        forward(model)  # leaves weights gathered where nothing reshards them


@pytest.mark.parametrize("reshard", [slow(True), False])
@on_ranks(2)
def test_views_written_on_all_ranks_are_cast(reshard: bool) -> None:
    written_everywhere(reshard)


def written_later() -> None:
    """Write through views that were taken at other times."""
    model = Net(FEW, 64, 96)
    of_the_whole = model.blocks[0][1].weight.detach()[0]
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    before_sharding = model.blocks[0][1].weight.detach()[0]
    model = models.sharded(model, prepare=False)
    parameter = a_weight(model)
    kept = [parameter.detach().to_local()[0], parameter.to_local().view(-1)[:3], parameter.data.t()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models.train(model, optimizer, range(1), 64)
    kept += [parameter.detach().to_local().view(-1), parameter.data.to_local()[:, :2]]
    models.train(model, optimizer, range(1), 64)
    for view in kept:
        before = parameter.full_tensor()
        with torch.no_grad():
            view.mul_(-3)
        check_after(model, "kept")
        assert not torch.equal(before, parameter.full_tensor())
    cast_number = models.manager(model).plan.cast_number
    if dist.get_rank() == 0:  # other memory by now: nothing is noticed, nor need it be
        of_the_whole.zero_()
        before_sharding.zero_()
    check_after(model, "memory of before")
    assert models.manager(model).plan.cast_number == cast_number


def double(tensor: Tensor) -> None:
    """Double a tensor. This is compiled, so that its write passes no dispatch."""
    with torch.no_grad():
        tensor.mul_(2)


COMPILED: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda p: p,
    "data": lambda p: p.data,
    "local": lambda p: p.detach().to_local(),
    "row": lambda p: p.detach().to_local()[0],
}


def compiled_writes(fused: bool) -> None:
    """Write to masters in a compiled function, also after a step that measured amaxes."""
    model = models.sharded(Net(("nvfp4", "fp8_current"), 64, 96))
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    for form, of in COMPILED.items():
        torch.compiler.reset()
        write = torch.compile(double, backend="aot_eager")
        for _ in range(2):
            if fused:
                models.train(model, optimizer, range(1), 64)
            before = a_weight(model).full_tensor()
            write(of(a_weight(model)))
            assert not torch.equal(before, a_weight(model).full_tensor())
            check_after(model, form)


@pytest.mark.notices(
    "an operator of torch (in place, `out=`, foreach, fused) writes to a master or its view, or a compiled function to a master",
    where="FSDP2",
    answer="the next gather casts again; raises on all ranks if only some wrote",
)
@pytest.mark.parametrize("fused", [False, slow(True)])
@on_ranks(2)
def test_writes_of_compiled_functions_are_cast(fused: bool) -> None:
    compiled_writes(fused)


@on_ranks(2)
def test_other_memory_in_place_is_refused() -> None:
    model = models.sharded(Net(("fp8_current",), 64, 96))
    assert not forward(model)
    local = a_weight(model).detach().to_local()
    changes = lambda: local.set_(torch.ones(local.shape)), lambda: local.resize_(1), lambda: local.t_()
    said = list(map(error_of, changes))
    assert all("blocks.0.1.weight" in text and "changes shape or memory" in text for text in said)
    check_after(model, "refused")
