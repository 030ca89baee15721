"""IdleParameters: which parameters of an optimizer get no gradient, said once."""

import logging

logger = logging.getLogger(__name__)
PATIENCE = 100  # backward passes


class IdleParameters:
    """Counts the backward passes since each parameter's last gradient on this rank.

    Experts without tokens and frozen phases are idle rightly, so this warns, and once. A parameter that was replaced in the model
    is idle too.
    """

    def __init__(self) -> None:
        self._passes: dict[str, int] = {}  # of parameters without a gradient in the last pass
        self._warned = False

    def note(self, name: str, has_gradient: bool) -> None:
        """A backward pass that is reduced has brought a gradient of this parameter, or none."""
        if has_gradient:
            if self._passes:
                self._passes.pop(name, None)
            return
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] > PATIENCE and not self._warned:
            self._warned = True
            idle = [other for other, passes in self._passes.items() if passes >= PATIENCE]
            logger.warning(
                "%d parameters of a ZeroAdamW got no gradient on this rank in %d backward passes, the first is %s: they are "
                "unused, frozen or no longer parameters of the model (this is said once)",
                len(idle),
                PATIENCE,
                idle[0],
            )
