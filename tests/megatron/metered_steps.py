"""zerocast.metrics on an attached host, on the ranks of a pool."""

from tests.megatron.ranks_host import host
from tests.megatron.training import MIXED, Case, build
from zerocast.integrations import megatron as integration
from zerocast.metrics import Meter, Sample


def steps(overlap: bool, every: int | None, te: str = "") -> tuple[list[float], list[Sample | None], dict[str, float]]:
    """Losses and samples of four steps, and the largest magnitudes of the quantized weights' masters in the end."""
    with host(te):
        with integration.quantized_params():
            run = build(Case("te" if te else MIXED, overlap, experts=True, te=te))
        attached = integration.attach(run.optimizer, run.ddp)
        meter, losses, samples = None if every is None else Meter(attached, every), [], []
        for number in range(4):
            if meter is None:
                losses.append(run.step(number))
                continue
            with meter.step() as measured:
                with measured.phase("forward and backward"):
                    losses.append(run.forward_and_backward(number))
                with measured.phase("step"):
                    run.optimizer.step()
            samples.append(measured.sample)
        masters = run.masters()
        return losses, samples, {f"module.{name}": float(masters[name].abs().max()) for name in run.weights}
