"""The outcome of a study: losses, and gaps to the baseline of the same seed with their spread."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from examples.gpt_pretrain.report import curve
from examples.gpt_pretrain.run_log import Record
from examples.gpt_pretrain.study.plan import BASELINE, Job, Size

Outcome = dict[str, Any]
SAME = ("text", "parameters", "device", "ranks")  # compared runs must share these
PEERS = ("torchao", "transformer_engine")  # other installed packages, read by no run
OF_THE_HOST = ("cores", "host")  # which compute nothing of a run on a GPU


def collect(name: str, size: Size, runs: Mapping[Job, Sequence[Record]]) -> Outcome:
    """Return the data of the table and the picture, from the records of all runs.

    A gap is a run's validation loss minus the loss of the baseline with the same seed, which saw
    the same initial values and the same batches; its spread over the seeds is the sample standard
    deviation. Runs of a seed without a baseline are left out. Raises ValueError for runs of
    different texts, and for runs of one seed on two kinds of machines or with two versions, whose
    difference a gap must not include.
    """
    seeds = {job.seed for job in runs if job.variant == BASELINE}
    runs = {job: records for job, records in runs.items() if job.seed in seeds}
    starts = [records[0] for records in runs.values()]
    cores = sorted({start["machine"]["cores"] for start in starts})
    for key in SAME:
        _check_equal(key, [start[key] for start in starts])
    for seed in seeds:
        _check_equal("machine", [_machine(records[0]) for job, records in runs.items() if job.seed == seed])
    variants: dict[str, dict[str, Any]] = {}
    for job, records in runs.items():
        variants.setdefault(job.variant, {})[str(job.seed)] = _run(records)
    compared = {
        variant: _compared(by_seed, size.compared.get(variant, BASELINE), variants)
        for variant, by_seed in variants.items()
    }
    return {
        "size": name,
        "ranks": size.ranks,
        "config": json.loads(json.dumps(dataclasses.asdict(size.config), default=str)),
        **{key: starts[0][key] for key in SAME},
        "machine": _machine(starts[0]),
        "machines": sorted({start["machine"]["device"] for start in starts}),
        "cores": cores,
        "dates": [min(start["date"] for start in starts), max(start["date"] for start in starts)],
        "variants": {variant: found for variant, found in compared.items() if found["seeds"]},
    }


def _check_equal(key: str, values: Sequence[Any]) -> None:
    texts = {json.dumps(value, sort_keys=True) for value in values}
    if len(texts) > 1:
        raise ValueError(f"runs that differ in {key} are not comparable: {' and '.join(sorted(texts))}")


def _machine(start: Record) -> dict[str, Any]:
    """Return the machine of a run without the facts that change no bit of the run."""
    aside = PEERS if start["device"] == "cpu" else PEERS + OF_THE_HOST
    return {name: fact for name, fact in start["machine"].items() if name not in aside}


def _run(records: Sequence[Record]) -> dict[str, Any]:
    end = records[-1]
    return {
        "validation_loss": end["validation_loss"],
        "train_loss": end["train_loss"],
        "skipped_steps": end["skipped_steps"],
        "products": end["products"],
        "tokens_per_s": end["tokens_per_s"],
        "train_curve": curve(records, "train"),
    }


def _compared(by_seed: Mapping[str, Any], name: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the comparison of a variant with the variant `name`, over all seeds that both have."""
    baseline = variants.get(name, {})
    by_seed = {seed: run for seed, run in by_seed.items() if seed in baseline}
    numbers = _across(by_seed, baseline) if by_seed else {}
    return {**numbers, "compared": name, "seeds": by_seed}


def _across(by_seed: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    losses = [run["validation_loss"] for run in by_seed.values()]
    gaps = [run["validation_loss"] - baseline[seed]["validation_loss"] for seed, run in by_seed.items()]
    bases = [baseline[seed]["validation_loss"] for seed in by_seed]
    return {
        "validation_loss": statistics.fmean(losses),
        "validation_loss_deviation": _deviation(losses),
        "gap": statistics.fmean(gaps),
        "share": statistics.fmean(gaps) / statistics.fmean(bases),
        "gap_deviation": _deviation(gaps),
        "gap_interval": _interval(gaps),
        "gaps": gaps,
    }


def _interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of normally distributed values. Student's
    quantile is approximated from the quantile of the normal distribution (Abramowitz and Stegun,
    26.7.5), to 0.001 from 8 values on.
    """
    freedom = len(values) - 1
    if freedom < 1:
        return math.inf
    z = statistics.NormalDist().inv_cdf(0.975)
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
