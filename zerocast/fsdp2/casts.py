"""Casts: the prepared weights of one model, and when they are cast again.

An optimizer step makes a cast due on every rank; the next gather, which is a collective and so comes on every rank, casts all
weights first, however many optimizers stepped. Any other write to a master is known only where it happens, and no collective
may depend on that. So a rank that was written to gathers all the same and says so in the header of its bytes (`master.py`).
After the gather every rank knows what all said: if all were written to, all cast and gather once more; if only some were, all
raise.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.agreement import agree, roll_call
from zerocast.freshness import debugging
from zerocast.fsdp2 import torch_fsdp, torn
from zerocast.fsdp2.amax_group import AmaxGroup, Reduction
from zerocast.fsdp2.headers import UNREAD, Gather, Headers
from zerocast.fsdp2.held import Held, Places, held_by
from zerocast.fsdp2.master import Master
from zerocast.fsdp2.master_memory import MasterMemory
from zerocast.fsdp2.sources import sources
from zerocast.group import Group
from zerocast.master_source import MasterSource


class Casts:
    """The casts of `model`. `generation` counts them; it is the same on all ranks, or gathers raise."""

    def __init__(self, model: nn.Module, weight_mesh: DeviceMesh | None) -> None:
        self._model, self._weight_mesh = weakref.ref(model), weight_mesh
        self.masters: list[Master] = []
        self.memory = MasterMemory({})
        self.due = True
        self._stepped = True  # whether a step made it due
        self._within: int | None = None  # the backward pass within which that was, by a hook of a gradient
        self.generation = 0
        self.steps = 0  # casts after an optimizer step
        self.headers = Headers()
        self.groups: list[AmaxGroup] = []
        self._places = Places([])  # of the masters that the groups were made for
        self.rewrapped = False  # whether some may lie elsewhere
        self._delayed: list[Master] = []
        self._seeded: frozenset[str] = frozenset()  # those whose delayed scale comes from an amax
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose steps leave amaxes in the groups
        self._reductions: list[tuple[Reduction, list[Held]]] = []
        self._of_groups: list[Held] = []  # a weight of each
        self._gathering: list[weakref.ref[Any]] = []  # FSDP2's parameter groups
        self.written: list[Master] = []  # all that say so
        self.wholeness = torn.wholeness(self)

    @property
    def model(self) -> nn.Module:
        """The module that was prepared."""
        model = self._model()
        if model is None:
            raise RuntimeError("the module that was given to zerocast.fsdp2.prepare no longer exists")
        return model

    def make_due(self, by: Optimizer | None = None) -> None:
        """Cast before the next gather, and let there be one: weights left gathered are freed. `by` is who stepped.

        Optimizers that step within a backward pass, each a few parameters, take one step together: what is gathered for the rest
        of that pass are the weights of its forward pass.
        """
        self.due = self._stepped = True
        if by not in self.measuring:
            self.forget_measured()
        within = None if by is None else torch_fsdp.backward_pass()
        if within is None:
            self._discard()
            self._free_gathered()
        elif within != self._within:
            torch_fsdp.at_end_of_backward(self._free_idle)
        self._within = within

    def _discard(self) -> None:
        torch_fsdp.discard_gathers(group() for group in self._gathering)

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._gathering) if torch_fsdp.is_idle(group))

    def gathered(self) -> list[Held]:
        """One weight of each of FSDP2's groups that is gathered now."""
        return [held for held in self._of_groups if held.is_gathered]

    def by_reduction(self) -> list[tuple[Reduction, list[Master]]]:
        """The weights, by those who share their amaxes."""
        if self._moved():
            for master in self.masters:
                master.mark_written()
        return [(reduction, [one.master for one in held]) for reduction, held in self._reductions]

    def _free_gathered(self) -> None:
        """Let the next forward pass gather."""
        torch_fsdp.reshard(group() for group in self._gathering)

    def forget_measured(self) -> None:
        """Amaxes that a step has left are no longer those of the masters."""
        for group in self.groups:
            group.measured = frozenset()

    def before_gather(self) -> None:
        """Cast if that is due; RuntimeError where headers of earlier gathers, read now, say that ranks disagree."""
        due = self.due and (self._within is None or torch_fsdp.backward_pass() is None)
        for reduction, _ in self._reductions:
            roll_call(reduction.group, f"{'casts and gathers' if due else 'gathers'} after cast {self.generation}")
        self.headers.check(leave=0 if due else UNREAD)
        if due:
            if self._within is not None:
                self._discard()  # of a backward pass that raised
            self.refresh(repeat=not self._stepped)
        elif not self.groups:
            self.bind()

    def cast_again(self) -> None:
        """Cast because all ranks were written to; by a step, perhaps, whose cast this then is."""
        self.refresh(repeat=not self._stepped)

    def delayed(self) -> dict[str, dict[str, Tensor]]:
        """The state of delayed scaling by weight, as a step leaves it; casts first if that is due."""
        self.before_gather()
        self.wholeness.check_whole()
        return {master.name: master.delayed for master in self.masters if master.delayed}

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a saved state: the next cast repeats its last one. What it lacks is found anew, with a warning.

        Casts nothing: `state` may be what is in use, filled by a reader.
        """
        self.bind()
        seeded = []
        for master in self._delayed:
            saved = state.get(master.name, {})
            if "scale" in saved and "amax_history" in saved:
                for name, tensor in master.delayed.items():
                    tensor.copy_(saved.get(name, saved["scale"]))
                seeded.append(master.name)
            else:
                warnings.warn(
                    f"no state of delayed scaling for {master.name}: it starts anew from its amax", stacklevel=3
                )
        self._seeded = frozenset(seeded)
        self.due, self._stepped = True, False
        self._free_gathered()

    def refresh(self, repeat: bool) -> None:
        """Cast all weights from their masters as they are now, on every rank; with `repeat` not as another step.

        A repeated cast uses the delayed scales of the last one and leaves amax histories as they are.
        """
        self.bind()
        with self._or_as_before():
            self._seed()
        with self._or_as_before():
            for group in self.groups:
                group.cast(repeat)
                group.stamp(self.generation + 1)
        self.generation += 1
        self.steps += not repeat
        self.due, self._stepped, self._within = False, False, None
        written, self.written = self.written, []
        for master in written:
            master.written_to = False
        for master in self.masters if debugging() else ():
            master.freshness.count_cast()

    @contextlib.contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """Within, delayed scaling moves on; what raises puts it back, and the next gather casts as if this had never begun."""
        seeded = self._seeded
        state = [tensor for group in self.groups for tensor in group.delayed.arenas]
        kept = [tensor.clone() for tensor in state]
        try:
            yield
        except BaseException:
            self._seeded = seeded
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
            raise

    def master_sources(self) -> Iterator[MasterSource]:
        """The masters and their gathered weights, for `zerocast.verify`; every rank asks for them."""
        return sources(self)

    def reduction_of(self, master: Master) -> Reduction:
        """Who shares the amax of a weight that was cast."""
        return next(reduction for reduction, held in self._reductions if any(one.master is master for one in held))

    def bind(self) -> None:
        """Find the masters where they lie now. The first time all ranks agree on the weights; later nothing is sent."""
        if not self._reductions:
            self._gathering = [weakref.ref(group) for group in torch_fsdp.groups(self.model)]
            self._reductions = list(self._agree())
            self._of_groups = [first for first, *_ in self._by_group()]
            for held in self._by_group():
                gather = Gather(self.headers, [one.master for one in held])
                for one in held:
                    one.master.gather = gather
        if not self.groups or self._moved():
            self.groups = []  # whatever raises from here on is begun anew
            for master in self.masters:
                master.mark_written()  # buffers to send are new ones: a cast fills them, or the next gather says so
            self._places = Places([one for _, held in self._reductions for one in held])
            self.groups = [AmaxGroup([one.shard() for one in held], reduction) for reduction, held in self._reductions]
            self._delayed = [master for master in self.masters if master.delayed]
        self.rewrapped = False

    def _moved(self) -> bool:
        """Whether masters lie elsewhere than when they were bound. It takes a new wrapper; debug mode looks all the same."""
        return (self.rewrapped or debugging()) and self._places.moved()

    def _seed(self) -> None:
        """Give delayed scales that nobody has set the amax of the present master: a cast of its own, once."""
        if len(self._seeded) == len(self._delayed):
            return
        unseeded = [master for master in self._delayed if master.name not in self._seeded]
        kept = [
            (tensor, tensor.clone())
            for master in self._delayed
            if master.name in self._seeded
            for tensor in master.delayed.values()
        ]
        for master in unseeded:
            master.delayed["amax_history"].zero_()
        for group in self.groups:
            group.cast(repeat=False)
        for tensor, value in kept:
            tensor.copy_(value)
        for master in unseeded:
            master.delayed["cast_scale"].copy_(master.delayed["scale"])
        self._seeded = frozenset(master.name for master in self._delayed)

    def _by_group(self) -> list[list[Held]]:
        """The weights by who gathers them, each group's in the order of its gather."""
        groups = [held_by(group(), self) for group in self._gathering]
        return [held for held in groups if held]

    def _agree(self) -> Iterator[tuple[Reduction, list[Held]]]:
        """Who reduces amaxes with whom, once FSDP2 has sharded the model. The only communication but that of casts."""
        held = [one for group in self._by_group() for one in group]
        missing = sorted({master.name for master in self.masters} - {one.master.name for one in held})
        if missing:
            raise RuntimeError(
                f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: call fully_shard on the "
                "model that was given to zerocast.fsdp2.prepare, or on modules in it"
            )
        by_group: dict[str, list[Held]] = {}
        for one in held:
            by_group.setdefault(self._mesh_of(one).get_group().group_name, []).append(one)
        for members in by_group.values():
            mesh = self._mesh_of(members[0])
            group = Group.of(mesh)
            problems = [problem for problem in (one.problem(self._weight_mesh) for one in members) if problem]
            peers = tuple(dist.get_process_group_ranks(members[0].shard_mesh.get_group()))
            lanes = sorted(set(agree(group, [one.line for one in members], next(iter(problems), None), peers)))
            yield Reduction(group, mesh.device_type, lanes.index(peers), len(lanes)), members

    def _mesh_of(self, held: Held) -> DeviceMesh:
        return self._weight_mesh if self._weight_mesh is not None else held.shard_mesh
