"""A model and a data set small enough for two cores, through torchtitan's own extension points: a TrainSpec.

`--job.custom_config_module=tests.torchtitan.corpus` has what `zerocast.integrations.torchtitan` has, and the models `tiny`, one of
them a mixture of experts.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from zerocast.integrations.torchtitan import JobConfig, with_tensor_parallelism

# A text of numbers, which a small model learns within some steps.
TEXT = " ".join(f"{a} times {b} is {a * b}." for a in range(2, 20) for b in range(2, 20)).encode()  # bytes are tokens


class Text(IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """The text from another place on every rank, and the place where the next sequence begins."""

    def __init__(self, rank: int, length: int) -> None:
        self._tokens, self._length, self._start = torch.tensor(list(TEXT)), length, 131 * rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            places = (self._start + torch.arange(self._length + 1)) % len(self._tokens)
            self._start += 257
            window = self._tokens[places]
            yield {"input": window[:-1]}, window[1:]

    def state_dict(self) -> dict[str, int]:
        return {"start": self._start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["start"]


__all__ = ["JobConfig"]


def dataloader(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> ParallelAwareDataloader:
    training = job_config.training
    return ParallelAwareDataloader(
        Text(dp_rank, training.seq_len),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=training.local_batch_size,
    )


TINY = TransformerModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=128, multiple_of=32, rope_theta=500000
)

for name in ("llama3", "llama3_zerocast"):
    register_train_spec(
        name.replace("llama3", "corpus"),
        dataclasses.replace(
            get_train_spec(name),
            model_args={"tiny": TINY, "debugmodel": get_train_spec("llama3").model_args["debugmodel"]},
            build_dataloader_fn=dataloader,
            build_tokenizer_fn=None,
        ),
    )

EXPERTS = DeepSeekV3ModelArgs(
    vocab_size=128,
    dim=64,
    inter_dim=128,
    moe_inter_dim=128,
    n_layers=2,
    n_dense_layers=1,
    n_heads=4,
    moe_args=MoEArgs(num_experts=4, top_k=2, score_func="softmax", score_before_experts=False),
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)

register_train_spec(
    "corpus_experts",
    dataclasses.replace(
        with_tensor_parallelism(get_train_spec("deepseek_v3")),
        model_args={"tiny": EXPERTS},
        build_dataloader_fn=dataloader,
        build_tokenizer_fn=None,
    ),
)
