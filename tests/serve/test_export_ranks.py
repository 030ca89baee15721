"""Exports by several ranks: each writes files of its own, which together are those of one process."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.observed import allocations, live_bytes, same_on_all
from tests.serve.test_export import read
from tests.workers import Ranks, error_of, on_ranks
from zerocast import QuantizedWeight, Recipe, ZeroAdamW
from zerocast.checkpoint.sources.safetensors_files import DTYPES
from zerocast.export import export_hf, export_safetensors
from zerocast.fsdp2 import torch_fsdp
from zerocast.serve import weight_source
from zerocast.serve.export_files import SafetensorsFile
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
def noted_files() -> Iterator[tuple[list[str], set[str]]]:
    """The names of the files that this rank opens meanwhile, and those that are open."""
    names: list[str] = []
    held: set[str] = set()
    begin, end = SafetensorsFile.__init__, SafetensorsFile.close

    def begun(self: SafetensorsFile, folder: Any, layout: Any) -> None:
        begin(self, folder, layout)
        names.append(layout.name)
        held.add(layout.name)
        assert len(held) == 1, "files are written one after another"

    def closed(self: SafetensorsFile) -> None:
        end(self)
        held.remove(self._path.name)

    with mock.patch.object(SafetensorsFile, "__init__", begun), mock.patch.object(SafetensorsFile, "close", closed):
        yield names, held


@on_ranks(1, 2)
def test_files_are_written_one_after_another(tmp_path: Path) -> None:
    """A store, which takes whole files, has each of them in memory until it is complete. FSDP2 gathers the head with the embedding,
    and norms, of which zerocast knows nothing, are gathered last.
    """
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, WIDTH), *blocks, nn.Linear(WIDTH, 64, bias=False))
    zerocast.fsdp2.prepare(model, Recipe({"0.weight": "identity", "[1-4].1.weight": "fp8_block", "5.weight": "nvfp4"}))
    for block in (*blocks, model):
        fully_shard(block, mesh=models.mesh(), mp_policy=models.BF16)
    with noted_files() as (names, held):
        export_safetensors(model, tmp_path / "out", "modelopt", 20_000)
    assert len(names) > 2 and not held


def of_fsdp2(folder: str, naming: str, shard_bytes: int) -> list[str]:
    model = models.sharded(net())
    with noted_files() as (names, _):
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


@on_ranks(2)
def test_whole_weights_of_zero_adamw(tmp_path: Path) -> None:
    """The ranks export together after a step, and rank 0 alone."""
    model = whole()
    optimizer = ZeroAdamW(model.named_parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    optimizer.step()
    with noted_files() as (names, _):
        export_safetensors(model, tmp_path / "ranks", "modelopt", group=dist.group.WORLD)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, names)
    assert all(everyone) and not {*everyone[0]} & {*everyone[1]}
    if dist.get_rank() == 0:
        export_safetensors(model, tmp_path / "one", "modelopt")
        check_same(tmp_path / "ranks", tmp_path / "one")


@on_ranks(2)
@pytest.mark.parametrize(
    ("fmt", "buffer", "at", "is_padding"),
    [
        ("nvfp4", "rowwise_data", -1, False),
        ("nvfp4", "rowwise_scale_inv", 0, False),
        ("nvfp4", "amax", 0, False),
        ("fp8_current", "rowwise_scale_inv", 0, False),
        ("nvfp4", "rowwise_scale_inv", -1, True),
    ],
)
def test_weights_that_differ_between_ranks(tmp_path: Path, fmt: str, buffer: str, at: int, is_padding: bool) -> None:
    """An export leaves padding out, so ranks do not compare it."""
    model = nn.Sequential(nn.Linear(96, 144, bias=False))
    zerocast.quantize_(model, {"*.weight": fmt}, dtype=torch.bfloat16)
    weight: Any = model[0].weight
    _bytes(weight.state.buffers[buffer])[at] ^= dist.get_rank()
    said = same_on_all(error_of(lambda: export_safetensors(model, tmp_path / "out", "bf16", group=dist.group.WORLD)))
    assert not said if is_padding else "0.weight differs between ranks" in said
    assert is_padding == (tmp_path / "out").exists()


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
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh["tp"], [Shard(1)]))
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


@on_ranks(2)
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
def test_a_rank_that_fails(tmp_path: Path, rank: int, what: str, message: str) -> None:
    """All ranks raise the same error, and nothing is left."""
    model = models.sharded(net())
    failure = what if dist.get_rank() == rank else ""
    target: Any = "nowhere://out" if failure == "the folder" else tmp_path / "out"
    naming = "gguf" if failure == "the naming" else "modelopt"
    if failure == "the plan":
        model.register_buffer("more", torch.zeros(3))
    if failure == "a buffer":
        model.kept_int16[1] += 1
    writes = iter(range(1000))
    write, batches = SafetensorsFile.write, ShardedModel.batches

    def full(self: SafetensorsFile, name: str, tensor: Tensor) -> None:
        if failure == "the disk" and next(writes) == 3:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    def broken(self: ShardedModel) -> Iterator[Batch]:
        for number, batch in enumerate(batches(self)):
            if failure == "a batch" and number == 2:
                raise MemoryError("out of memory")
            yield batch

    with mock.patch.object(SafetensorsFile, "write", full), mock.patch.object(ShardedModel, "batches", broken):
        said = same_on_all(error_of(lambda: export_safetensors(model, target, naming)))
    assert message in said and (f"rank {rank}: " in said or what in ("the plan", "a buffer"))
    assert not any(group.is_unsharded for group in torch_fsdp.groups(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_codes_of_every_matrix_are_joined_and_compared(count: int) -> None:
    weight = QuantizedWeight.empty((count, 32, 64), "fp8_block")
    codes = weight.rowwise_data.copy_(torch.arange(count).repeat_interleave(32)[:, None])
    assert torch.equal(weight_source.unpadded(weight, "rowwise_data", codes), codes.view(count, 32, 64))


@on_ranks(2)
def test_a_rank_without_memory_for_a_weight_of_slices(tmp_path: Path) -> None:
    fails = mock.patch.object(weight_source, "unpadded", side_effect=MemoryError("none"))
    with contextlib.nullcontext() if dist.get_rank() else fails:
        said = same_on_all(error_of(lambda: of_slices(str(tmp_path / "out"), "fp8_block", "deepseek")))
    assert "rank 0: MemoryError('none')" in said
    assert not list(tmp_path.iterdir())


class Deep(nn.Module):
    """Eight blocks of one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 512, bias=False)) for _ in range(8))
        self.recipe = {"*.weight": "fp8_block"}


def test_memory_is_that_of_scales() -> None:
    """One process has a whole model. Beyond it, it has scales that are not contiguous."""
    model = Deep()
    zerocast.quantize_(model, Recipe(model.recipe))
    with TemporaryDirectory() as folder:
        assert allocations(lambda: export_safetensors(model, f"{folder}/out", "deepseek")).peak < CODES / 8


@on_ranks(2)
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Beyond its part of the model a rank has what FSDP2 gathers, here two of eight matrices at most, when it has written a tensor.
    The allocator would also count what the threads of gloo let go of late.
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
        export_safetensors(model, tmp_path / "out", "deepseek")
    assert max(levels) - before < 3 * CODES
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > 8 * CODES


CODES = 256 * 512
FOLDERS = [("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp8"), ("deepseek", "fp8_block")]


def of_llama(folder: str) -> None:
    """Folders of a Llama under FSDP2, by all ranks."""
    from tests.serve.models import made

    for naming, fmt in FOLDERS:
        model: Any = made("llama")
        zerocast.fsdp2.prepare(model, Recipe({"*_proj.weight": fmt}, share_amax="llama"))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=models.mesh(), mp_policy=models.BF16)
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
