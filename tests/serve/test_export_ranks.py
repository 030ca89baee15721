"""Exports by several ranks: each writes files of its own, which together are those of one process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.optim.memory import allocations, live_bytes
from tests.serve.test_export import read
from tests.workers import Ranks, error_of
from zerocast import QuantizedWeight, Recipe, ZeroAdamW
from zerocast.checkpoint.sources.safetensors_files import DTYPES
from zerocast.export import export_hf, export_safetensors
from zerocast.fsdp2 import torch_fsdp
from zerocast.serve import slices
from zerocast.serve.safetensors_file import SafetensorsFile
from zerocast.serve.weight_source import Batch, ShardedModel
from zerocast.serve.write import INDEX

FORMATS = ("nvfp4", "fp8_block", "mxfp8", "fp8_current")
WIDTH, HIDDEN = 128, 384
# Buffers of every dtype, of odd sizes.
KEPT = {
    "int64": torch.arange(3),
    "int32": torch.arange(5, dtype=torch.int32),
    "int16": torch.arange(3, dtype=torch.int16),
    "int8": torch.arange(7, dtype=torch.int8),
    "uint8": torch.arange(3, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "float64": torch.linspace(0, 1, 3, dtype=torch.float64),
    "float16": torch.linspace(0, 1, 3).half(),
    "bfloat16": torch.linspace(0, 1, 3).bfloat16(),
    "e4m3": torch.linspace(0, 1, 3).to(torch.float8_e4m3fn),
    "e5m2": torch.linspace(0, 1, 3).to(torch.float8_e5m2),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
}


def net() -> Net:
    model = Net(FORMATS, WIDTH, HIDDEN)
    for name, value in KEPT.items():
        model.register_buffer(f"kept_{name}", value.clone())
    return model


def whole() -> nn.Module:
    model = net()
    return zerocast.quantize_(model, Recipe(model.recipe), dtype=torch.bfloat16)


def check_same(folder: Path, wanted: Path) -> None:
    """The tensors of two folders are equal to the bit, and the index of the first says what is in its files."""
    found, expected = read(folder), read(wanted)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(_bytes(tensor), _bytes(expected[name])), name
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        for name, offset, dtype in _entries(file):
            assert offset % getattr(torch, DTYPES[dtype]).itemsize == 0, f"{name} is not aligned"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _entries(file: Path) -> Iterator[tuple[str, int, str]]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            yield name, start + entry["data_offsets"][0], entry["dtype"]


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The names of the files that this rank opens meanwhile."""
    names: list[str] = []
    begin = SafetensorsFile.__init__

    def noted(self: SafetensorsFile, folder: Any, layout: Any) -> None:
        names.append(layout.name)
        begin(self, folder, layout)

    with mock.patch.object(SafetensorsFile, "__init__", noted):
        yield names


def open_at_once(folder: str) -> int:
    """The most files that this rank has open at a time while it exports. FSDP2 gathers the head with the embedding, and norms, of
    which zerocast knows nothing, are gathered last.
    """
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, WIDTH), *blocks, nn.Linear(WIDTH, 64, bias=False))
    zerocast.fsdp2.prepare(model, Recipe({"0.weight": "identity", "[1-4].1.weight": "fp8_block", "5.weight": "nvfp4"}))
    for block in blocks:
        fully_shard(block, mesh=models.mesh(), mp_policy=models.BF16)
    fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)
    levels, held = [0], set[str]()
    begin, end = SafetensorsFile.__init__, SafetensorsFile.close

    def begun(self: SafetensorsFile, folder: Any, layout: Any) -> None:
        begin(self, folder, layout)
        held.add(layout.name)
        levels.append(len(held))

    def closed(self: SafetensorsFile) -> None:
        end(self)
        held.remove(self._path.name)

    with mock.patch.object(SafetensorsFile, "__init__", begun), mock.patch.object(SafetensorsFile, "close", closed):
        export_safetensors(model, folder, "modelopt", 20_000)
    assert not held and len(levels) > 2
    return max(levels)


@pytest.mark.parametrize("world", [1, 2])
def test_files_are_written_one_after_another(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """A store, which takes whole files, has each of them in memory until it is complete."""
    assert ranks(world)(open_at_once, str(tmp_path / "out")) == [1] * world


def of_fsdp2(folder: str, naming: str, shard_bytes: int) -> list[str]:
    model = models.sharded(net())
    with opened_files() as names:
        files = export_safetensors(model, folder, naming, shard_bytes)
    assert not any(group.is_unsharded for group in torch_fsdp.groups(model))
    assert all(Path(str(file)).is_file() for file in files)
    return names


@pytest.mark.parametrize(
    ("world", "naming", "shard_bytes"),
    [(1, "modelopt", 40_000), (2, "modelopt", 2**30), (2, "bf16", 2**30), (3, "modelopt", 40_000)],
)
def test_shards_of_fsdp2(ranks: Ranks, tmp_path: Path, world: int, naming: str, shard_bytes: int) -> None:
    files = ranks(world)(of_fsdp2, str(tmp_path / "ranks"), naming, shard_bytes)
    export_safetensors(whole(), tmp_path / "one", naming)
    check_same(tmp_path / "ranks", tmp_path / "one")
    names = [name for of_rank in files for name in of_rank]
    assert len(names) == len(set(names)) and all(files)
    sizes = [sum((tmp_path / "ranks" / name).stat().st_size for name in of_rank) for of_rank in files]
    assert max(sizes) < 1.3 * sum(sizes) / world


def of_zero(folder: str) -> list[str]:
    """After a step, the ranks together, and rank 0 alone."""
    model = whole()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    optimizer.step()
    with opened_files() as names:
        export_safetensors(model, f"{folder}/ranks", "modelopt", group=dist.group.WORLD)
    if dist.get_rank() == 0:
        export_safetensors(model, f"{folder}/one", "modelopt")
    dist.barrier()
    return names


def test_whole_weights_of_zero_adamw(ranks: Ranks, tmp_path: Path) -> None:
    files = ranks(2)(of_zero, str(tmp_path))
    assert all(files) and not {*files[0]} & {*files[1]}
    check_same(tmp_path / "ranks", tmp_path / "one")


def of_other_weights(folder: str, fmt: str, buffer: str, at: int) -> str:
    """One byte of a weight is another one on rank 1."""
    model = nn.Sequential(nn.Linear(96, 144, bias=False))
    zerocast.quantize_(model, {"*.weight": fmt}, dtype=torch.bfloat16)
    if dist.get_rank() == 1:
        weight: Any = model[0].weight
        _bytes(weight.state.buffers[buffer])[at] ^= 1
    return error_of(lambda: export_safetensors(model, f"{folder}/out", "bf16", group=dist.group.WORLD))


@pytest.mark.parametrize(
    ("fmt", "buffer", "at"),
    [
        ("nvfp4", "rowwise_data", -1),
        ("nvfp4", "rowwise_scale_inv", 0),
        ("nvfp4", "amax", 0),
        ("fp8_current", "rowwise_scale_inv", 0),
    ],
)
def test_weights_that_differ_between_ranks(ranks: Ranks, tmp_path: Path, fmt: str, buffer: str, at: int) -> None:
    first, second = ranks(2)(of_other_weights, str(tmp_path), fmt, buffer, at)
    assert first == second and "0.weight differs between ranks" in first
    assert not list(tmp_path.iterdir())


def test_padding_that_differs_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """An export leaves padding out, so ranks do not compare it."""
    assert ranks(2)(of_other_weights, str(tmp_path), "nvfp4", "rowwise_scale_inv", -1) == ["", ""]


class Experts(nn.Module):
    """Two linear layers, and experts whose blocks would span two of them."""

    def __init__(self, slices: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 96 * slices, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def of_slices(folder: str, fmt: str, naming: str) -> None:
    """Two slices, each of which FSDP2 shards over the other ranks."""
    model = Experts(2)
    mesh = models.mesh((dist.get_world_size() // 2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    placed = torch.distributed.tensor.distribute_tensor(
        model.experts.detach(), mesh["tp"], [torch.distributed.tensor.Shard(1)]
    )
    model.experts = nn.Parameter(placed)
    recipe = Recipe({"*.weight": fmt, "experts": fmt if naming == "bf16" else "identity"})
    zerocast.fsdp2.prepare(model, recipe, weight_mesh=mesh["dp", "tp"]._flatten("all"))
    fully_shard(model, mesh=mesh["dp"], mp_policy=models.BF16)
    export_safetensors(model, folder, naming)


@pytest.mark.parametrize(
    ("world", "fmt", "naming"),
    [
        (2, "nvfp4", "compressed-tensors"),
        (2, "fp8_block", "deepseek"),
        (2, "nvfp4", "bf16"),
        (2, "mxfp8:block=32x32", "bf16"),
        *(pytest.param(4, *case, marks=pytest.mark.slow) for case in [("mxfp8", "modelopt"), ("fp8_current", "bf16")]),
    ],
)
def test_slices_of_tensor_parallelism(ranks: Ranks, tmp_path: Path, world: int, fmt: str, naming: str) -> None:
    ranks(world)(of_slices, str(tmp_path / "ranks"), fmt, naming)
    model = Experts(2)
    experts = fmt if naming == "bf16" else "identity"
    model = zerocast.quantize_(model, Recipe({"*.weight": fmt, "experts": experts}), dtype=torch.bfloat16)
    export_safetensors(model, tmp_path / "one", naming)
    check_same(tmp_path / "ranks", tmp_path / "one")


def failing(folder: str, rank: int, what: str) -> str:
    """What a rank raises while one of them cannot go on."""
    model = models.sharded(net())
    naming = "modelopt"
    target: Any = Path(folder) / "out"
    is_here = dist.get_rank() == rank
    if what == "the plan" and is_here:
        model.register_buffer("more", torch.zeros(3))
    if what == "a buffer" and is_here:
        model.kept_int16[1] += 1
    if what == "the folder" and is_here:
        target = "nowhere://out"
    if what == "the naming" and is_here:
        naming = "gguf"
    writes = iter(range(1000))

    def full(self: SafetensorsFile, name: str, tensor: Tensor) -> None:
        if is_here and next(writes) == 3:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    def broken(self: ShardedModel) -> Iterator[Batch]:
        for number, batch in enumerate(batches(self)):
            if is_here and number == 2:
                raise MemoryError("out of memory")
            yield batch

    write, batches = SafetensorsFile.write, ShardedModel.batches
    with (
        mock.patch.object(SafetensorsFile, "write", full if what == "the disk" else write),
        mock.patch.object(ShardedModel, "batches", broken if what == "a batch" else batches),
    ):
        said = error_of(lambda: export_safetensors(model, target, naming))
    dist.barrier()
    assert not any(group.is_unsharded for group in torch_fsdp.groups(model))
    return said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("the disk", "No space left on device"),
        ("a batch", "out of memory"),
        ("the naming", "naming is one of bf16"),
        ("the folder", "Protocol not known: nowhere"),
        ("the plan", "all pass the same list"),
        ("a buffer", "kept_int16 differs between ranks"),
    ],
)
def test_a_rank_that_fails(ranks: Ranks, tmp_path: Path, rank: int, what: str, message: str) -> None:
    """All ranks raise the same error, and nothing is left."""
    first, second = ranks(2)(failing, str(tmp_path), rank, what)
    assert first == second and message in first
    assert f"rank {rank}: " in first or what in ("the plan", "a buffer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_codes_of_every_matrix_are_joined_and_compared(count: int) -> None:
    weight = QuantizedWeight.empty((count, 32, 64), "fp8_block")
    codes = weight.rowwise_data.copy_(torch.arange(count).repeat_interleave(32)[:, None])
    assert torch.equal(slices.unpadded(weight, "rowwise_data", codes), codes.view(count, 32, 64))


def failing_slices(folder: str) -> str:
    with mock.patch.object(
        slices, "unpadded", slices.unpadded if dist.get_rank() else mock.Mock(side_effect=MemoryError("none"))
    ):
        return error_of(lambda: of_slices(folder, "fp8_block", "deepseek"))


def test_a_rank_without_memory_for_a_weight_of_slices(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2)(failing_slices, str(tmp_path / "out"))
    assert first == second and "rank 0: MemoryError('none')" in first
    assert not list(tmp_path.iterdir())


class Deep(nn.Module):
    """Eight blocks of one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 512, bias=False)) for _ in range(8))
        self.recipe = {"*.weight": "fp8_block"}


def allocated(folder: str) -> int:
    """The most bytes above those of a whole model that one process allocates while it exports."""
    model = Deep()
    zerocast.quantize_(model, Recipe(model.recipe))
    return allocations(lambda: export_safetensors(model, f"{folder}/out", "deepseek")).peak


def live_at_writes(folder: str) -> int:
    """The most bytes above those of its part of a model that a rank refers to when it has written a tensor. The allocator would
    also count what the threads of gloo let go of late.
    """
    model = models.sharded(Deep(), keep_codes=True)
    list(models.manager(model).master_views())  # the first gathers allocate what stays
    levels = []
    write = SafetensorsFile.write

    def noted(self: SafetensorsFile, name: str, tensor: Tensor) -> None:
        write(self, name, tensor)
        levels.append(live_bytes())

    before = live_bytes()
    with mock.patch.object(SafetensorsFile, "write", noted):
        export_safetensors(model, f"{folder}/out", "deepseek")
    return max(levels) - before


@pytest.mark.parametrize("world", [1, 2])
def test_memory_is_that_of_one_tensor(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Beyond its part of the model a rank has what FSDP2 gathers, here two of eight matrices at most, and scales that are not
    contiguous. It has neither a file nor a model.
    """
    codes = 256 * 512
    for nbytes in ranks(world)(allocated if world == 1 else live_at_writes, str(tmp_path)):
        assert nbytes < (codes / 8 if world == 1 else 3 * codes)
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > 8 * codes


FOLDERS = [("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp8"), ("deepseek", "fp8_block")]


def of_llama(folder: str) -> None:
    """Folders of a Llama under FSDP2, by all ranks."""
    from tests.serve.models import made

    for naming, fmt in FOLDERS:
        model: Any = made("llama")
        zerocast.fsdp2.prepare(model, Recipe({"*_proj.weight": fmt}, share_amax="llama"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=models.mesh(), mp_policy=models.BF16)
        fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)
        export_hf(model, f"{folder}/{naming} {fmt}", naming)


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3))])
def test_transformers_reads_what_ranks_wrote(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Codes in uint8 and float8, scales of both and FP32, the rest in bf16: as one process writes them."""
    for package in ("transformers", "accelerate", "compressed_tensors"):
        pytest.importorskip(package)
    from tests.serve.models import logits, quantized
    from tests.serve.models import read as read_model

    ranks(world)(of_llama, str(tmp_path))
    for naming, fmt in FOLDERS:
        written, wanted = tmp_path / f"{naming} {fmt}", tmp_path / f"one {naming} {fmt}"
        export_hf(quantized("llama", fmt, "llama"), wanted, naming)
        check_same(written, wanted)
        assert (written / "config.json").read_bytes() == (wanted / "config.json").read_bytes()
        assert torch.equal(logits(read_model(written)), logits(read_model(wanted)))
