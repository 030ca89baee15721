"""vLLM reads folders, on a CPU: `python vllm_reader.py REPORT FOLDER ...`, in an environment that has vLLM and needs no zerocast.

Its configuration, loaders and fusing of layers are its own. It has no product of these weights on a CPU, so a stand-in
takes the place of each (`examples/rollout/vllm_stand_in.py`). REPORT gets, by folder, the decoded matrices and the logarithms of
the probabilities of prompts, or the error.
"""

import os
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from examples.rollout.vllm_stand_in import Dequantizing, decoded, use

PROMPTS = torch.arange(24).view(2, 12).tolist()


def read(folder: str) -> dict[str, Any]:
    Dequantizing.layers.clear()
    model = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = model.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    found = [
        [places[token].logprob for places, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        for answer, ids in zip(answers, PROMPTS, strict=True)
    ]
    layers = {layer.prefix: decoded(layer).bfloat16() for layer in Dequantizing.layers}
    return {"layers": layers, "logprobs": torch.tensor(found)}


def found_in(folder: str) -> dict[str, Any]:
    try:
        return read(folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    report, *folders = sys.argv[1:]
    use(Dequantizing)
    torch.save({folder: found_in(folder) for folder in folders}, report)
