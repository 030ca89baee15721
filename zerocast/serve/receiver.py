"""Receiver: a copy of the weights of a run, updated by the messages of a Sender.

It has tensors in checkpoint layout, and the run and the number of the refit that they come from. A
message whose header is damaged, or that is not the next one, is rejected before it changes
anything, and an older refit is never accepted. After the bytes are written their digest is compared
with the sender's. During a refit, and after an interrupted one, the tensors are partly of two
steps, and reading them raises.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.distributed.agreement import first_of
from zerocast.formats.memory import as_bytes, check_storage
from zerocast.serve.receiving import (
    RefitOrder,
    changes_of,
    check_sizes,
    digests_after,
    have_digests,
    layout_of,
    sizes_of,
    write_changes,
)
from zerocast.serve.refit_message import ASK, DELTA, END, FULL, Header, RefitError, check_header, layout_digest


class Receiver:
    """Applies refits to tensors by name.

    Args:
        tensors: contiguous tensors that are written in place, such as those of an engine; None to
            allocate the tensors of the first refit.
        device: where to allocate.

    Raises ValueError for tensors that are not contiguous or share memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu") -> None:
        self._tensors = dict(tensors or {})
        self._is_given = tensors is not None
        _check_given(self._tensors)
        self._device = torch.device(device)
        self._order = RefitOrder()
        # (kind, run, refit) of the refit under way, and the index of its next message.
        self._arriving: tuple[str, str, int] | None = None
        self._next = 0
        # The naming of the last full refit, and by bucket the names and the layout of its tensors.
        self._naming = ""
        self._buckets: list[list[str]] = []
        self._layouts: list[str] = []

    @property
    def refit(self) -> int:
        """The number of the last complete refit, for `Sender.named_deltas`.

        It is 0 before the first one, and while the tensors are partly of two refits.
        """
        return self._order.refit

    @property
    def naming(self) -> str:
        """The naming in which the tensors are stored."""
        return self._naming

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, keyed by name. Raises RefitError before the first refit and while they are
        partial.
        """
        if not self._order.complete:
            state = "a refit is in progress or failed" if self._order.has_begun else "there was no refit yet"
            raise RefitError(f"these weights are not to be read, {state}: {ASK}")
        return self._tensors

    def buffers(self, header: Header) -> list[Tensor]:
        """Tensors into which the tensors of a message may be received.

        For a full refit they are the receiver's own. Raises what `accept` raises for a message that
        is not the next one.
        """
        self._admit(header)
        if header["kind"] == FULL:
            # The caller will write into them.
            self._order.complete = None
            return [self._tensors[name] for name, _, _ in header["tensors"]]
        device = self._bucket()[0].device if header["kind"] == DELTA else self._device
        return [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes_of(header)]

    @torch.no_grad()
    def accept(self, header: Header, tensors: Sequence[Tensor]) -> list[str]:
        """Apply a message: a header and its tensors, or the filled tensors of `buffers`. Returns
        the names of the tensors that have changed.

        Raises RefitError. Nothing has changed if the header is damaged, or the message is not the
        next one, or has tensors of another format. If the bytes then differ from the sender's, or
        the sender lacks tensors, they were written: ask the sender for a full refit.
        """
        check_header(header)
        check_sizes(header, tensors)
        self._admit(header)
        if header["kind"] == END:
            self._end(header)
            return []
        bucket = self._bucket()
        changes = changes_of(header, tensors[0], bucket) if header["kind"] == DELTA else None
        # An error after this line leaves tensors that are partly of two refits.
        arriving = self._arriving
        self._arriving = None
        self._order.complete = None
        names = self._buckets[self._next]
        changed_names = names
        if changes is None:
            _copy(bucket, tensors)
        else:
            changed_names = [names[index] for index in write_changes(bucket, *changes)]
        if not have_digests(bucket, digests_after(header)):
            raise RefitError(
                f"the bytes of {names[0]} or of its message differ from the sender's: something else "
                f"wrote to these tensors, or a message was damaged; {ASK}"
            )
        self._arriving = arriving
        self._next += 1
        return changed_names

    def _admit(self, header: Header) -> None:
        """Prepare for a message. Raises RefitError, with nothing changed, unless it is the next
        one.
        """
        check_header(header)
        index, arriving = header["index"], self._arriving
        # The last message of a refit has a separate kind, END.
        kind = arriving[0] if arriving and header["kind"] == END else header["kind"]
        refit = kind, header["run"], header["refit"]
        begins = refit != arriving and index == 0 and kind != END
        if begins:
            self._check_begins(header)
        elif refit != arriving or index != self._next:
            expected = f"{self._next} of refit {arriving[2]}" if arriving else "0 of none"
            raise RefitError(
                f"message {index} of refit {header['refit']} came, and message {expected} was expected: {ASK}"
            )
        if header["kind"] == DELTA and self._layouts[index : index + 1] != [header["layout"]]:
            raise RefitError(f"bucket {index} of the changes is not laid out as the receiver's tensors: {ASK}")
        if header["kind"] == FULL:
            self._check_full(header, [] if begins else self._buckets[:index])
        if begins:
            self._begin(header)
        if header["kind"] == FULL and len(self._buckets) == index:
            self._allocate(header)

    def _check_begins(self, header: Header) -> None:
        """Raise RefitError unless the refit that begins is newer than all before it, and the
        tensors still have their memory.
        """
        try:
            for name, tensor in self._tensors.items():
                check_storage(name, tensor)
        except ValueError as error:
            raise RefitError(str(error)) from None
        self._order.check(header)

    def _check_full(self, header: Header, earlier_buckets: Sequence[Sequence[str]]) -> None:
        """Raise RefitError for tensors that an earlier bucket of the refit had, or that do not fit
        the tensors that the receiver was given.
        """
        seen = {name for names in earlier_buckets for name in names}
        for name, dtype, shape in layout_of(header):
            if name in seen:
                raise RefitError(f"{name} came twice in refit {header['refit']}: {ASK}")
            seen.add(name)
            if not self._is_given or self._fits(name, dtype, shape):
                continue
            tensor = self._tensors.get(name)
            state = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RefitError(
                f"the sender has {name} as {dtype} {shape}, and this receiver {state}: they store weights in different formats"
            )

    def _begin(self, header: Header) -> None:
        self._order.begin(header)
        self._arriving = (header["kind"], header["run"], header["refit"])
        self._next = 0
        if header["kind"] == FULL:
            self._order.complete = None
            self._naming = header["naming"]
            self._buckets = []
            self._layouts = []

    def _allocate(self, header: Header) -> None:
        """Allocate the tensors of the next bucket of a full refit that are missing."""
        for name, dtype, shape in layout_of(header):
            if not self._fits(name, dtype, shape):
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        self._buckets.append([name for name, _, _ in header["tensors"]])
        self._layouts.append(layout_digest(header["tensors"]))

    def _fits(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)

    def _end(self, header: Header) -> None:
        if self._next != len(self._buckets):
            raise RefitError(f"a refit ended after {self._next} of {len(self._buckets)} buckets: {ASK}")
        self._arriving = None
        self._next = 0
        received = {name for names in self._buckets for name in names}
        missing = sorted(set(self._tensors) - received)
        if missing and self._is_given:
            raise RefitError(f"the sender has no {first_of(missing)}: its weights are not this receiver's")
        for name in missing:
            del self._tensors[name]
        self._order.end(header)

    def _bucket(self) -> list[Tensor]:
        """Return the tensors of the next message's bucket."""
        return [self._tensors[name] for name in self._buckets[self._next]]


def _copy(bucket: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the tensors of a message to those of its bucket, unless they were received in place."""
    for own, tensor in zip(bucket, tensors, strict=True):
        if own.data_ptr() != tensor.data_ptr():
            as_bytes(own).copy_(as_bytes(tensor.contiguous()))


def _check_given(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for tensors that are not contiguous or share memory."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {tensor.stride()}: changes are written byte by byte")
    ranges = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.nbytes
    )
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < end:
            raise ValueError(
                f"{name} and {other} share memory, so each would overwrite the other: pass a separate tensor for every name"
            )
