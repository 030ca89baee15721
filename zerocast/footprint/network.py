"""Time of the collectives of a step on a network, by the alpha-beta model. Nothing is measured.

A call takes the latency of its hops, and its bytes take the time that a rank needs to send them.
An all-gather and a reduce-scatter go round a ring of their ranks, one hop for each other rank. An
all-reduce goes up a tree of nodes and down again. In an all-to-all a rank sends each other one a
message of its own, through its own port where that one is in another node. These are the terms by
which NCCL itself chooses among its algorithms; its constants, protocols and switches that add are
left out, and so is everything that a step computes meanwhile.
"""

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
        distance: how far apart two neighbours of the group are among all ranks.
    """

    kind: str
    content: str
    calls: int
    sent: int
    ranks: int
    distance: int = 1

    def __str__(self) -> str:
        return f"{self.kind} of {self.content}"


@dataclass(frozen=True)
class Network:
    """Nodes of `node_ranks` ranks, each with a port of its own to the network."""

    latency: float = 5.0
    """Microseconds of a hop from node to node."""
    bandwidth: float = 50.0
    """GB/s that the port of a rank sends; ranks of a node lend their ports to a ring through all of
    them.
    """
    node_ranks: int = 8
    """Ranks of a node, which have consecutive numbers."""
    node_latency: float = 1.0
    """Microseconds of a hop within a node."""
    node_bandwidth: float = 400.0
    """GB/s that a rank sends within its node."""

    def __post_init__(self) -> None:
        """Raise ValueError for a network that cannot be."""
        for name in ("latency", "node_latency"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("bandwidth", "node_bandwidth", "node_ranks"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def waiting(self, collective: Collective) -> float:
        """Seconds that hops take, whatever is sent."""
        inside, nodes = self._placed(collective)
        if collective.kind == "all-reduce":
            rounds = (nodes - 1).bit_length()  # log2, rounded up
            hops = 2 * (rounds * self.latency + (inside - 1) * self.node_latency)
        elif collective.kind == "all-to-all":
            hops = (collective.ranks - inside) * self.latency + (inside - 1) * self.node_latency
        else:
            hops = (nodes - 1) * self.latency + (collective.ranks - nodes) * self.node_latency
        return collective.calls * hops * 1e-6

    def sending(self, collective: Collective) -> float:
        """Seconds that the bytes take."""
        inside, nodes = self._placed(collective)
        ports = 1 if collective.kind == "all-to-all" else inside
        rate = min(self.node_bandwidth, ports * self.bandwidth) if nodes > 1 else self.node_bandwidth
        return collective.sent / (rate * 1e9)

    def _placed(self, collective: Collective) -> tuple[int, int]:
        """(ranks of the group in a node, nodes)."""
        inside = min(collective.ranks, max(1, self.node_ranks // collective.distance))
        return inside, -(-collective.ranks // inside)
