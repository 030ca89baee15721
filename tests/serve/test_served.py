"""`serve` refuses before training what no export of the trained weights could hold for an engine."""

import contextlib
import json
from collections.abc import Iterable

import pytest
import torch

import zerocast
from tests.serve import families
from tests.serve.models import made
from tests.serve.test_families import CAUSAL, matrices, on_meta
from tests.workers import error_of
from zerocast import QuantizedWeight, Recipe, get_format
from zerocast.formats.readers import READERS
from zerocast.serve.hugging_face import check_served

REFUSED = {
    "experts that no naming has for it": (
        "mixtral",
        {"*.experts.*": "mxfp4"},
        r"no export of these weights could be read by vllm 0.32.0. compressed-tensors: \S+experts.0.w1.weight is mxfp4: readers "
        r"of .* misread experts of this format.*; modelopt: vllm does not read mxfp4 in it; deepseek: vllm does not read mxfp4",
    ),
    "formats that no naming has together": (
        "llama",
        {"*.self_attn.*_proj.weight": "fp8_block", "*.mlp.*": "nvfp4"},
        "compressed-tensors: vllm does not read fp8_block in it; modelopt: .*fp8_block and nvfp4: in a model of several "
        "algorithms.*; deepseek: vllm does not read nvfp4 in it",
    ),
    "a transposed weight": ("gpt2", {"*.c_fc.weight": "nvfp4"}, "c_fc.weight is nvfp4 and not the weight of a Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_exported_is_refused_before_training(case: str) -> None:
    name, formats, said = REFUSED[case]
    model = made(name)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for train in (zerocast.quantize_, zerocast.fsdp2.prepare):
        with pytest.raises(ValueError, match=said):
            train(model, Recipe(formats), serve="vllm")
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())


def test_formats_that_one_naming_has_together() -> None:
    recipe = Recipe({"*.self_attn.*_proj.weight": "mxfp8", "*.mlp.*": "nvfp4"})
    model = zerocast.quantize_(made("llama"), recipe, dtype=torch.bfloat16, serve="vllm")
    assert sum(isinstance(parameter, QuantizedWeight) for parameter in model.parameters()) == 7


@pytest.mark.parametrize(
    ("family", "fmt", "said"),
    [
        ("mamba", "mxfp8", r"this weight of MambaForCausalLM as identity only: match it with one of these"),
        ("jamba", "mxfp8", r"mamba.in_proj.weight is mxfp8, and vllm 0.32.0 loads this weight of JambaForCausalLM"),
        (
            "bloom",
            "nvfp4",
            r"query_key_value.weight is nvfp4, and .* of BloomForCausalLM as fp8_current .* mxfp8 or identity only",
        ),
        (
            "gpt_bigcode",
            "fp8_block",
            r"c_attn.weight is fp8_block, and .* as fp8_current or fp8_delayed or int4 or .* only",
        ),
        ("bloom", "mxfp8", ""),
        ("mamba2", "mxfp8", ""),
        ("falcon", "nvfp4", ""),
    ],
)
def test_models_of_vllm_that_load_fewer_formats(family: str, fmt: str, said: str) -> None:
    """Refused before training; that vLLM raises for them is asked in test_vllm_families.py."""
    model = on_meta(family)
    recipe = Recipe(matrices(model, fmt))
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        recipe.for_reader("vllm", model)


def check(names: Iterable[str]) -> None:
    """`check_served` accepts what the page on exports says of one naming that the engine reads."""
    record = json.loads(families.RECORD.read_text())
    for family in names:
        if isinstance(record[family], str):
            continue
        model = on_meta(family)
        for fmt in sorted({fmt for naming, fmt in families.CASES if naming != "bf16"}):
            formats = {name: get_format(fmt) for name in matrices(model, fmt)}
            for reader, facts in READERS.items():
                namings = [naming for naming, readable in facts.namings.items() if fmt in readable]
                accepted = any(record[family][f"{naming} {fmt}"] == families.YES for naming in namings)
                said = error_of(lambda: check_served(model, formats, reader))  # noqa: B023, since it is called at once
                assert bool(said) == (bool(formats) and not accepted), f"{family} {fmt} {reader}: {said}"


def test_some_families() -> None:
    check(("gpt_neox", "mixtral", "jetmoe", "hrm_text", "exaone_moe"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_families() -> None:
    check(sorted(CAUSAL))
