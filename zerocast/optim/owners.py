"""Who owns the parameters of a ZeroAdamW: nobody else, and the last that was built over them."""

from collections.abc import Sequence

from torch import Tensor

from zerocast.formats.layout import Span
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, Held, find_conflict, overlapping

WHO = "a ZeroAdamW"
TAKEN_OVER = (
    "another optimizer was built over these parameters: this one gets no gradients any more, and writes no weights. Use the newer "
    "one, and load states into that"
)
Named = tuple[str, Tensor, int]  # name, parameter, index of its parameter group


def check_owners(named: Sequence[Named]) -> None:
    """RuntimeError for a weight that has no value yet, and for one that another owner writes."""
    for name, parameter, _ in named:
        if isinstance(parameter, QuantizedWeight) and not _has_value(parameter):
            raise RuntimeError(
                f"{name}, {parameter!r}, has never been cast: masters start from its value, so give it one (quantize_, "
                "load_state_dict, QuantizedWeight.of_buffers)"
            )
    other = find_conflict(_held(named), lambda claim: claim.who == WHO, _parameters(named))
    if other is not None:
        raise RuntimeError(
            f"{other.who} writes weights that {WHO} is built over: a weight has one owner, so remove() the handle of that, or "
            "del it"
        )


def _has_value(weight: QuantizedWeight) -> bool:
    return weight.state.ever_cast or weight.high_precision_init_val is not None


def check_owns(claim: Claim) -> None:
    """RuntimeError once a newer optimizer has taken a parameter over."""
    if claim.ended:
        raise RuntimeError(TAKEN_OVER)


def take_over(named: Sequence[Named]) -> Claim:
    """Hold these parameters; any older ZeroAdamW over any of them has lost all of its own."""
    for older in overlapping(_held(named), _parameters(named)):
        older.end()
    return Claim(WHO, _held(named), _parameters(named))


def _parameters(named: Sequence[Named]) -> list[Tensor]:
    return [parameter for _, parameter, _ in named]


def _held(named: Sequence[Named]) -> Held:
    return [(p.state, (Span(0, p.numel()),)) for _, p, _ in named if isinstance(p, QuantizedWeight)]
