"""Collective: what the calls of one kind carry in a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """The calls of one kind that a rank makes in a step.

    Attributes:
        kind: reduce-scatter, all-to-all, all-gather or all-reduce.
        content: what it carries.
        calls: how many calls a step makes.
        sent: bytes that this rank sends in all of them.
        ranks: how many ranks take part.
    """

    kind: str
    content: str
    calls: int
    sent: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.content}"
