"""Every causal family that one rule builds small, exported and read back by transformers: to the bit, or refused."""

import copy
import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerocast
from tests.serve import families
from tests.serve.modelopt_reader import decoded
from tests.serve.models import dequantized, transformers
from tests.serve.test_export import read
from zerocast import QuantizedWeight, Recipe, get_format
from zerocast.export import export_hf
from zerocast.formats.layout import check_shape

pytest.importorskip("accelerate")
pytest.importorskip("compressed_tensors")
pytest.importorskip("modelopt")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

MAX_NUMEL = 3 * 10**7
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 512),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_key_value_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 64
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "sliding_window", "rotary_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok", "bos_token_id"), 1),
    "vocab_size": 96,
    "state_size": 16,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# What the rule misses.
MORE_SIZES: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
}
# One step of bf16: compressed-tensors divides by a global scale of NVFP4 that is rounded, and holds the scale of a tensor in bf16.
# ModelOpt multiplies two scales of NVFP4 first, so a value beside the middle of two of bf16 may be rounded to the other one.
ROUNDING = dict.fromkeys(
    [("compressed-tensors", "nvfp4"), ("compressed-tensors", "fp8_current"), ("modelopt", "nvfp4")], 2**-7
)
# By the last part of a module's path: routers, which no engine quantizes.
ROUTERS = ("gate", "router", "wg", "layer", "shared_expert_gate", "classifier")
QUICK = ("gpt_neox", "llama", "mixtral", "hunyuan_v1_moe", "phimoe", "apertus", "bamba")


def on_meta(family: str) -> Any:
    """A model of a family without memory. Whatever its configuration raises where the rule does not fit."""
    config = CONFIG_MAPPING[family]
    known = {*inspect.signature(config.__init__).parameters, *getattr(config, "__dataclass_fields__", {})}
    other_names = getattr(config, "attribute_map", {})
    sizes = {name: size for name, size in SIZES.items() if name in known and name not in other_names}
    sizes |= MORE_SIZES.get(family, {})
    name = CAUSAL[family]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    with torch.device("meta"):
        model = kind._from_config(config(**sizes))
    numel = sum(parameter.numel() for parameter in model.parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel} parameters")
    return model


def small(family: str) -> Any:
    """The same with random weights."""
    model = on_meta(family)
    torch.manual_seed(0)
    return type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32).eval()


def matrices(model: Any, fmt: str) -> dict[str, str]:
    """A recipe for the weights of all Linears besides heads and routers, and of experts, as far as the format takes them."""
    chosen = {}
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_linear = (
                isinstance(module, nn.Linear) and name == "weight" and module is not model.get_output_embeddings()
            )
            if parameter not in first_names or path.rpartition(".")[2] in ROUTERS:
                continue
            if not is_linear and not (parameter.dim() == 3 and "experts" in path):
                continue
            try:
                check_shape(get_format(fmt), parameter.shape)
            except ValueError:
                continue
            chosen[first_names[parameter]] = fmt
    return chosen


def outcome(family: str, naming: str, fmt: str, folder: Path) -> str:
    """`equal`, `within a rounding`, or who refused the export and why."""
    try:
        model = small(family)
    except Exception as error:  # of any kind, by its family
        return f"not built: {type(error).__name__}"
    recipe = matrices(model, fmt)
    if not recipe:
        return "no weight"
    zerocast.quantize_(model, Recipe(recipe), dtype=torch.bfloat16)
    try:
        export_hf(model, folder, naming, allow_unequal_scales=True)
    except ValueError as error:
        assert not folder.exists()
        return f"refused: {error}"
    return read_back(model, recipe, naming, fmt, folder)


def read_back(model: Any, recipe: dict[str, str], naming: str, fmt: str, folder: Path) -> str:
    """`equal` where transformers reads the values of the weights in the folder, or why it reads none. AssertionError for others."""
    rounding = ROUNDING.get((naming, fmt), 0.0)
    shapes = [parameter.shape for name, parameter in model.named_parameters() if name in recipe]
    if naming == "modelopt":
        decode_by_modelopt(folder)
    try:
        reader, said = type(model).from_pretrained(folder, output_loading_info=True)
    except (AttributeError, RuntimeError) as error:
        if refusal := refused_by_the_reader(str(error), naming, fmt, shapes):
            return f"refused by the reader: {refusal}"
        raise
    assert not any(said.values()), said
    if naming == "compressed-tensors":
        try:
            with torch.no_grad():  # it decompresses at the first forward pass
                reader(torch.arange(1, 9).view(1, 8), use_cache=False)
        except (RuntimeError, ValueError):
            return "no forward pass in the reader"
    weights, live, how = dict(reader.named_parameters()), dict(model.named_parameters()), "equal"
    for name, parameter in dequantized(model).named_parameters():
        is_plain = not isinstance(live[name], QuantizedWeight)
        wanted = live[name] if is_plain and weights[name].dtype == torch.float32 else parameter
        found, wanted = weights[name].float(), wanted.float()
        if not torch.equal(found, wanted):
            bound = rounding if name in recipe else 0.0
            assert torch.allclose(found, wanted, rtol=bound, atol=0.0), f"{name} is read as other values"
            how = "within a rounding"
    return how


def refused_by_the_reader(error: str, naming: str, fmt: str, shapes: list[torch.Size]) -> str:
    """Why transformers raises where it loads a folder, or an empty text for errors of another kind."""
    if naming == "deepseek" and any(size > 128 and size % 128 for shape in shapes for size in shape):
        return "blocks that are cut"
    # Initializations and conversions of some families ask for weights that have become packed ones.
    is_packed = naming == "compressed-tensors" and fmt in ("nvfp4", "mxfp4", "int4")
    known = ("has no attribute 'weight'", "issues during automatic conversion")
    return "packed weights" if is_packed and any(part in error for part in known) else ""


def decode_by_modelopt(folder: Path) -> None:
    """Let ModelOpt decode the weights of a folder, whose names transformers then reads."""
    values = decoded(read(folder))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "modelopt"
    (folder / "config.json").write_text(json.dumps(config))


QUICK_CASES = [
    ("modelopt", "nvfp4"),
    ("deepseek", "fp8_block"),
    ("compressed-tensors", "fp8_block"),
    ("compressed-tensors", "mxfp8"),
    ("bf16", "nvfp4"),
]


def check(family: str, naming: str, fmt: str, folder: Path) -> str:
    """The outcome, which has to be that of the page: read back where the matrix says so, else refused."""
    recorded = json.loads(families.RECORD.read_text())[family]
    said = outcome(family, naming, fmt, folder)
    is_accepted = not isinstance(recorded, str) and recorded[f"{naming} {fmt}"] == families.YES
    is_read = said.startswith(("equal", "within a rounding", "refused by the reader", "no forward pass"))
    assert is_accepted == is_read, f"{family}: {said}"
    return said


# Two cases of each family, and each case of several.
PAIRS = [(family, QUICK_CASES[(2 * at + more) % 5]) for at, family in enumerate(QUICK) for more in (0, 1)]


@pytest.mark.parametrize(
    ("family", "case"), PAIRS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_some_families(tmp_path: Path, family: str, case: tuple[str, str]) -> None:
    assert check(family, *case, tmp_path / "out").startswith(("equal", "refused: "))


def test_linears_that_are_stored_under_other_names(tmp_path: Path) -> None:
    """hy_v3 stores `shared_experts` as `shared_mlp`, and GPT-NeoX `lm_head` as `embed_out`. transformers looks for a module in the
    list of those that are not quantized by the first name, engines by the second. vLLM calls the head of BioGPT `lm_head` too.
    """
    assert outcome("hy_v3", "compressed-tensors", "fp8_current", tmp_path / "hy_v3") == "within a rounding"
    assert outcome("gpt_neox", "deepseek", "fp8_block", tmp_path / "gpt_neox") == "equal"
    assert outcome("biogpt", "deepseek", "fp8_block", tmp_path / "biogpt") == "equal"
    for family, head in {"gpt_neox": "embed_out", "biogpt": "output_projection"}.items():
        said = json.loads((tmp_path / family / "config.json").read_text())["quantization_config"]
        assert sorted(said["modules_to_not_convert"]) == sorted([head, "lm_head"])


def test_the_matrix_of_the_page() -> None:
    """docs/reference/export.md shows what exports accept, by what is recorded; a few families are asked again."""
    record = json.loads(families.RECORD.read_text())
    assert record.keys() == CAUSAL.keys()
    assert families.PAGE.read_text() == families.written(families.PAGE.read_text(), record), "make families"
    for family in ("gpt_neox", "mixtral", "gpt2", "jetmoe", "hrm_text", "exaone_moe"):
        assert families.row(family) == record[family], f"{family}: make families"


@pytest.mark.slow
def test_the_matrix_of_all_families() -> None:
    assert json.loads(families.RECORD.read_text()) == {family: families.row(family) for family in sorted(CAUSAL)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", families.CASES, ids=" ".join)
def test_all_families(tmp_path: Path, case: tuple[str, str]) -> None:
    """Each is read back as the matrix says, or refused, in no other way than those that `outcome` knows."""
    said = {family: check(family, *case, tmp_path / family) for family in sorted(CAUSAL)}
    counts = Counter(text.partition(":")[0] for text in said.values())
    print(*case, dict(counts), *(f"{family}: {text}" for family, text in said.items() if text != "equal"), sep="\n")
    assert counts["equal"] + counts["within a rounding"] >= 90
