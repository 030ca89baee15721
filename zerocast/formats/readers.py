"""Readers: what inference engines do with the weights of a checkpoint, engine by engine.

An engine computes the products of some weights together. It concatenates query, key and value, gate
and up, and all experts of a block. Such weights need one format, and one tensor amax where the
format has one, since the engine keeps one global scale.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerocast.formats.shared_amax import Patterns, groups_of
from zerocast.formats.spec import FormatSpec


@dataclass(frozen=True)
class Limited:
    """Weights that the models of an engine load in some formats only.

    Attributes:
        architectures: the classes of these models in transformers.
        layers: the last parts of the names of their layers.
        formats: the formats in which they are loaded.
    """

    architectures: tuple[str, ...]
    layers: tuple[str, ...]
    formats: frozenset[str] = frozenset()

    def excludes(self, name: str, fmt: FormatSpec) -> bool:
        """Return True for a weight that these models do not load in its format."""
        is_quantized = fmt.element is not None and fmt.name not in self.formats
        return is_quantized and name.endswith(tuple(f".{layer}.weight" for layer in self.layers))


@dataclass(frozen=True)
class Reader:
    """The facts of one engine.

    Attributes:
        name: its name, as `reader_called` takes it.
        version: the version whose source they are from.
        fused: the weights that it lays behind each other, a group of patterns of names for each
            kind of layer.
        namings: the formats that it reads in each naming of `zerocast.export`.
        limited: the weights that its models load in fewer formats.
    """

    name: str
    version: str
    fused: Patterns
    namings: Mapping[str, frozenset[str]]
    limited: tuple[Limited, ...] = ()

    @property
    def formats(self) -> frozenset[str]:
        """The formats that it reads in some naming."""
        return frozenset().union(*self.namings.values())

    def check(self, formats: Mapping[str, FormatSpec], shapes: Mapping[str, Sequence[int]], architecture: str) -> None:
        """Raise ValueError for weights that the engine could not read.

        Args:
            formats: the format of every matrix of a model by name; plain ones are identity.
            shapes: their shapes.
            architecture: the name of the model's class.
        """
        for name, fmt in formats.items():
            if fmt.element is not None and fmt.name not in self.formats:
                raise ValueError(
                    f"{name} is {fmt}, and {self.name} {self.version} reads {', '.join(sorted(self.formats))}"
                )
            for limit in self.limited:
                if architecture in limit.architectures and limit.excludes(name, fmt):
                    raise ValueError(
                        f"{name} is {fmt}, and {self.name} {self.version} loads this weight of {architecture} as "
                        f"{' or '.join([*sorted(limit.formats), 'identity'])} only: match it with one of these"
                    )
        check_layers(formats)
        for group in groups_of(self.fused, formats):
            blocks = [name for name in group.names if formats[name].name == "fp8_block"]
            if any(shapes[name][0] % BLOCK_ROWS for name in blocks):
                raise ValueError(
                    f"{self.name} fuses {group}, and has no scales for blocks of less than {BLOCK_ROWS} rows between them: match "
                    "them with another format"
                )


# The module of the head in vLLM, also where a checkpoint has another name for it.
HEAD = "lm_head"
# Models whose head vLLM makes without a name, so that no list of modules can have it.
NAMELESS_HEADS = frozenset({"AfmoeForCausalLM", "ExaoneMoeForCausalLM"})
# The rows of a block of fp8_block, of which engines fuse whole ones.
BLOCK_ROWS = 128
# Of vLLM the `packed_modules_mapping` in vllm/model_executor/models, with the names that causal
# language models have in checkpoints. SGLang fuses the same (sglang/srt/models).
FUSED: Patterns = (
    ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"),
    ("*.query.weight", "*.key.weight", "*.value.weight"),
    ("*.gate_proj.weight", "*.up_proj.weight"),
    ("*.c_fc_0.weight", "*.c_fc_1.weight"),
    ("*.q_a_proj.weight", "*.kv_a_proj_with_mqa.weight"),
    ("*.in_proj_qkv.weight", "*.in_proj_z.weight"),
    ("*.in_proj_b.weight", "*.in_proj_a.weight"),
)
_PER_TENSOR = {"fp8_current", "fp8_delayed"}
# Of vLLM: its mixers of Mamba 1 have no quantization, and some loaders of joined query, key and
# value divide all tensors of the weight by rows. `modelopt` has a row of scales for each.
_LIMITED = (
    Limited(
        ("FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM"), ("in_proj", "x_proj", "dt_proj", "out_proj")
    ),
    Limited(("BloomForCausalLM",), ("query_key_value",), frozenset({"mxfp4", "mxfp8", *_PER_TENSOR})),
    Limited(
        ("FalconForCausalLM", "GPTBigCodeForCausalLM"),
        ("query_key_value", "c_attn"),
        frozenset({"nvfp4", "mxfp4", "int4", "mxfp8", *_PER_TENSOR}),
    ),
)
READERS: Mapping[str, Reader] = {
    "vllm": Reader(
        "vllm",
        "0.32.0",
        FUSED,
        {
            # Not fp8_block: its scheme for blocks asserts that inputs are quantized too.
            "compressed-tensors": frozenset({"nvfp4", "mxfp4", "int4", "mxfp8", *_PER_TENSOR}),
            "modelopt": frozenset({"nvfp4", "mxfp8", "fp8_block", *_PER_TENSOR}),
            "deepseek": frozenset({"fp8_block"}),
        },
        _LIMITED,
    ),
    "sglang": Reader(
        "sglang",
        "0.5.23",
        FUSED,
        {
            "compressed-tensors": frozenset({"nvfp4", "int4", *_PER_TENSOR}),
            "modelopt": frozenset({"nvfp4"}),
            "deepseek": frozenset({"fp8_block"}),
        },
    ),
}

# Routers of experts, which engines do not quantize, and the block that they are in.
_ROUTER = re.compile(r"(.*)\.(?:gate|router|shared_expert_gate)\.(?:\w+\.)?weight")
# The weights of the experts of one block, in one parameter or separate ones; their biases stay
# plain.
_EXPERT = re.compile(r"(.*\.experts)\.(?!router\.).+(?<!bias)")


def reader_called(name: str) -> Reader:
    """Return the reader of that name. Raises ValueError for an unknown one."""
    if name not in READERS:
        raise ValueError(f"the reader is one of {', '.join(READERS)}, got {name!r}")
    return READERS[name]


def check_layers(formats: Mapping[str, FormatSpec]) -> None:
    """Raise ValueError unless the weights that engines compute together have one format, and for
    quantized routers of experts.

    Args:
        formats: the format of every matrix of a model by name; plain ones are identity.
    """
    blocks = {expert[1].removesuffix(".experts") for expert in map(_EXPERT.fullmatch, formats) if expert}
    for name, fmt in formats.items():
        router = _ROUTER.fullmatch(name)
        if router and router[1] in blocks and fmt.element is not None:
            raise ValueError(
                f"{name} is {fmt} and the weight of a router of experts: engines keep these in the dtype of the model; match it "
                "with 'identity'"
            )
    for names in _layers(formats):
        # One weight of each format, the first.
        name_of = {formats[name].name: name for name in reversed(names)}
        if len(name_of) > 1:
            described = " and ".join(
                f"{name} is {'not quantized' if formats[name].element is None else formats[name]}"
                for name in sorted(name_of.values(), key=names.index)
            )
            raise ValueError(
                f"{described}: engines compute the {len(names)} weights of this layer together and read them in one format, so "
                "train them in one, or export bf16"
            )


def _layers(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the names of the weights of each layer that engines make of several."""
    experts: dict[str, list[str]] = {}
    others: list[str] = []
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert:
            experts.setdefault(expert[1], []).append(name)
        else:
            others.append(name)
    return [*(group.names for group in groups_of(FUSED, others)), *map(tuple, experts.values())]
