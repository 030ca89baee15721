"""Casts: the prepared weights of one model, and when they are cast again.

An optimizer step makes a cast due on every rank; the next gather, which is a collective and so comes on every rank, casts all
weights first, however many optimizers stepped. Any other write to a master is known only where it happens, and no collective
may depend on that. So a rank that was written to gathers all the same and says so in the header of its bytes (`master.py`).
After the gather every rank knows what all said: if all were written to, all cast and gather once more; if only some were, all
raise.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerocast.distributed.agreement import check_same_call, validate_across_ranks
from zerocast.distributed.group import Caller, Group
from zerocast.fsdp2 import torn
from zerocast.fsdp2.amax_group import AmaxGroup, Reduction
from zerocast.fsdp2.delayed_state import DelayedState
from zerocast.fsdp2.gathers import Gathers
from zerocast.fsdp2.headers import UNREAD, Gather, Headers
from zerocast.fsdp2.held import Held, Places
from zerocast.fsdp2.master import Master
from zerocast.fsdp2.master_memory import MasterMemory
from zerocast.fsdp2.sources import sources
from zerocast.fsdp2.unsharded import check_managed
from zerocast.verification.master_views import MasterViews
from zerocast.weight.freshness import debugging


class Casts:
    """The casts of `model`. `generation` counts them; it is the same on all ranks, or gathers raise."""

    def __init__(self, model: nn.Module, weight_mesh: DeviceMesh | None) -> None:
        self._model, self._weight_mesh = weakref.ref(model), weight_mesh
        self.masters: list[Master] = []
        self.memory = MasterMemory({})
        self.due = True
        self._stepped = True  # whether a step made it due
        self.generation = 0
        self._caller = Caller("zerocast.fsdp2", "cast")
        self.steps = 0  # casts after an optimizer step
        self.headers = Headers()
        self.groups: list[AmaxGroup] = []
        self._places = Places([])  # of the masters that the groups were made for
        self.rewrapped = False  # whether some may lie elsewhere
        self._delayed = DelayedState()
        self.measuring: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose steps leave amaxes in the groups
        self._reductions: list[tuple[Reduction, list[Held]]] = []
        self.gathers = Gathers()
        self.written: list[Master] = []  # all that say so
        self.guard = torn.guard_of(self)

    @property
    def model(self) -> nn.Module:
        """The module that was prepared."""
        model = self._model()
        if model is None:
            raise RuntimeError("the module that was given to zerocast.fsdp2.prepare no longer exists")
        return model

    def make_due(self, by: Optimizer | None = None) -> None:
        """Cast before the next gather, and let there be one. `by` is who stepped."""
        self.due = self._stepped = True
        if by not in self.measuring:
            self.forget_measured()
        if by is None:
            self.gathers.discard()
        else:
            self.gathers.after_step()

    def check_sharded(self) -> None:
        """RuntimeError unless FSDP2 manages all weights, as it does from the first forward pass on; on the meta device later."""
        if self._reductions or any(parameter.is_meta for parameter in self.model.parameters()):
            return
        check_managed(self.masters, [one.master for held in self.gathers.find(self.model, self) for one in held])

    def is_written(self, master: Master) -> bool:
        """Whether a write to a master was counted since the last cast, as torch counts those of compiled functions too."""
        return self._places.is_written(master.place)

    def by_reduction(self) -> list[tuple[Reduction, list[Master]]]:
        """The weights, by those who share their amaxes."""
        if self._moved():
            for master in self.masters:
                master.mark_written()
        return [(reduction, [one.master for one in held]) for reduction, held in self._reductions]

    def forget_measured(self) -> None:
        """Amaxes that a step has left are no longer those of the masters."""
        for group in self.groups:
            group.measured = frozenset()

    def before_measuring(self) -> None:
        """Forget amaxes of masters that something wrote to since: a step is about to leave others, or a cast to use them."""
        if any(group.measured for group in self.groups) and self._places.any_written():
            self.forget_measured()

    def after_measuring(self) -> None:
        """A step has left amaxes: writes that are counted from now on make them old."""
        self._places.note()

    def before_gather(self) -> None:
        """Cast if that is due; RuntimeError where headers of earlier gathers, read now, say that ranks disagree."""
        due = self.due and not self.gathers.step_goes_on
        for reduction, _ in self._reductions:
            check_same_call(
                reduction.group, f"{'casts and gathers' if due else 'gathers'} after cast {self.generation}"
            )
        self.headers.check(leave=0 if due else UNREAD)
        if due:
            self.gathers.before_cast()
            self.refresh(repeat=not self._stepped)
        elif not self.groups:
            self.bind()

    def cast_again(self) -> None:
        """Cast because all ranks were written to; by a step, perhaps, whose cast this then is."""
        self.refresh(repeat=not self._stepped)

    def delayed(self) -> dict[str, dict[str, Tensor]]:
        """The state of delayed scaling by weight, as a step leaves it; casts first if that is due."""
        self.before_gather()
        self.guard.check_complete()
        return self._delayed.by_name()

    def load_delayed(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a saved state: the next cast repeats its last one. What it lacks is found anew, with a warning.

        Casts nothing: `state` may be what is in use, filled by a reader.
        """
        self.bind()
        self._delayed.load(state)
        self.due, self._stepped = True, False
        self.gathers.free()

    def refresh(self, repeat: bool) -> None:
        """Cast all weights from their masters as they are now, on every rank; with `repeat` not as another step.

        A repeated cast uses the delayed scales of the last one and leaves amax histories as they are.
        """
        self.bind()
        self._caller.number = self.generation + 1
        self.before_measuring()
        self._delayed.seed()
        with self._delayed.or_as_before():
            for group in self.groups:
                group.cast(repeat)
                group.stamp(self.generation + 1)
        self._places.note()
        self.generation += 1
        self.steps += not repeat
        self.due = self._stepped = False
        self.gathers.after_cast()
        written, self.written = self.written, []
        for master in written:
            master.written_to = False
        for master in self.masters if debugging() else ():
            master.freshness.count_cast()

    def master_views(self) -> Iterator[MasterViews]:
        """The masters and their gathered weights, for `zerocast.verify`; every rank asks for them."""
        return sources(self)

    def reduction_of(self, master: Master) -> Reduction:
        """Who shares the amax of a weight that was cast."""
        return next(reduction for reduction, held in self._reductions if any(one.master is master for one in held))

    def bind(self) -> None:
        """Find the masters where they lie now. The first time all ranks agree on the weights; later nothing is sent."""
        if not self._reductions:
            by_group = self.gathers.find(self.model, self)
            self._reductions = list(self._agree([one for held in by_group for one in held]))
            for held in by_group:
                gather = Gather(self.headers, [one.master for one in held])
                for one in held:
                    one.master.gather = gather
        if not self.groups or self._moved():
            self.groups = []  # whatever raises from here on is begun anew
            for master in self.masters:
                master.mark_written()  # buffers to send are new ones: a cast fills them, or the next gather says so
            self._places = Places([one for _, held in self._reductions for one in held])
            self.groups = [AmaxGroup([one.shard() for one in held], reduction) for reduction, held in self._reductions]
            self._delayed.bind(self.masters, self.groups)
        self.rewrapped = False

    def _moved(self) -> bool:
        """Whether masters lie elsewhere than when they were bound. It takes a new wrapper; debug mode looks all the same."""
        return (self.rewrapped or debugging()) and self._places.moved()

    def _agree(self, held: Sequence[Held]) -> Iterator[tuple[Reduction, list[Held]]]:
        """Who reduces amaxes with whom, once FSDP2 has sharded the model. The only communication but that of casts."""
        check_managed(self.masters, [one.master for one in held])
        by_group: dict[str, list[Held]] = {}
        for one in held:
            by_group.setdefault(self._mesh_of(one).get_group().group_name, []).append(one)
        for members in by_group.values():
            mesh = self._mesh_of(members[0])
            group = Group.of(mesh).called_by(self._caller)
            problems = [problem for problem in (one.problem(self._weight_mesh) for one in members) if problem]
            peers = tuple(dist.get_process_group_ranks(members[0].shard_mesh.get_group()))
            lanes = sorted(
                set(validate_across_ranks(group, [one.line for one in members], next(iter(problems), None), peers))
            )
            yield Reduction(group, mesh.device_type, lanes.index(peers), len(lanes)), members

    def _mesh_of(self, held: Held) -> DeviceMesh:
        return self._weight_mesh if self._weight_mesh is not None else held.shard_mesh
