"""Proof of equal bits: digests of the weights of an uninterrupted run, of one that is killed and
resumed, and of its checkpoint on a different number of ranks.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from examples.gpt_pretrain.launch import Run

CHECKPOINT_EVERY = 8
ARGUMENTS = (
    "--format nvfp4 --parallel zero --deterministic --batch-size 1 --grad-accum 1 --steps 24 --log-every 1 --eval-every 24 "
    f"--eval-sequences 2 --checkpoint-every {CHECKPOINT_EVERY}"
).split()
Digests = dict[str, str]


def prove(folder: Path, arguments: Sequence[str], ranks: int, timeout: float) -> Digests:
    """Train a few steps without a break, and again with a kill in the middle. Returns the digest of
    the final weights of each run, keyed by its description. Raises RunFailedError if a run failed.
    """
    arguments = [*arguments, *ARGUMENTS]
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    with Run(folder / "whole", arguments, ranks=ranks, timeout=timeout) as run:
        whole = run.wait()[-1]["weights_sha256"]
    with Run(folder / "killed", arguments, ranks=ranks, timeout=timeout) as run:
        # After the first checkpoint, and after a step that no checkpoint has.
        while not run.is_over() and not any(record["step"] > CHECKPOINT_EVERY for record in run.records()):
            time.sleep(0.02)
        run.kill()
    with Run(folder / "killed", [*arguments, "--resume"], ranks=ranks, timeout=timeout) as run:
        resumed = run.wait()[-1]["weights_sha256"]
    return {
        f"{ranks} ranks, without a break": whole,
        f"{ranks} ranks, killed after step {CHECKPOINT_EVERY + 1}, resumed": resumed,
        "1 rank, cast from the masters of that checkpoint": _digest_of_checkpoint(folder / "whole", arguments),
    }


def _digest_of_checkpoint(folder: Path, arguments: Sequence[str]) -> str:
    """Return the digest of the weights that this single rank casts from a checkpoint."""
    # They import torch, which the demo itself does not wait for.
    import torch  # noqa: PLC0415

    from examples.gpt_pretrain import build, checkpoint, measure  # noqa: PLC0415
    from examples.gpt_pretrain.config import options  # noqa: PLC0415

    config = options([*arguments, "--out", str(folder)])
    model = build.build_model(config, torch.device("cpu"))
    optimizer = build.build_optimizer(model, config)
    checkpoint.load_newest(optimizer, model, config.out)
    return measure.digest_of_weights(model)


def table(digests: Digests) -> Table:
    """Lay the digests out for 80 columns."""
    same = len(set(digests.values())) == 1
    caption = (
        "The digests are equal: the same bits." if same else "THE DIGESTS DIFFER, which is a bug: please report it."
    )
    out = Table(title="nvfp4 weights, SHA-256", caption=caption, box=box.SIMPLE_HEAD)
    out.add_column("after 24 steps", no_wrap=True)
    out.add_column("begins", no_wrap=True)
    for what, digest in digests.items():
        out.add_row(what, digest[:16])
    return out
