"""Headers of the messages of a refit: plain values, with a digest of themselves.

A header says of which run and refit a message is, the how manieth, and what its tensors are,
digests of their bytes included. With the digest of the header each message is whole or known to be
damaged, whichever way it came.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

FULL, DELTA, END = "full", "delta", "end"
Header = Mapping[str, Any]

_OWN_DIGEST = "header_digest"


class RefitError(RuntimeError):
    """A refit cannot be sent or applied: a message is damaged, or is not the one that has to come,
    or the weights are others than those of the refit before.

    A receiver is then either as it was before the message, complete or in the middle of a refit, or
    its tensors are partly of two refits: its `refit` is 0, and the next full refit mends it.
    """


def with_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The header of these fields."""
    return {**fields, _OWN_DIGEST: _digest_of(fields)}


def check_header(header: Header) -> None:
    """RefitError for a header that is not as it was sent."""
    fields = {key: value for key, value in header.items() if key != _OWN_DIGEST}
    if header.get(_OWN_DIGEST) != _digest_of(fields):
        raise RefitError(
            f"the header of message {header.get('index')} of refit {header.get('refit')} is not as it was sent, so the message "
            "was damaged: ask the sender for named_tensors()"
        )


def layout_digest(layout: Sequence[Sequence[Any]]) -> str:
    """A text that tells layouts apart: names, dtypes and shapes."""
    return _digest_of(layout)


def _digest_of(values: Any) -> str:
    # Tuples and lists have one text, so it does not matter what carried the header.
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
