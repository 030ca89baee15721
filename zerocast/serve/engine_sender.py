"""EngineSender: keep an inference engine at the bytes of a run, over its control plane.

Headers of messages go through the engine's own calls, tensors through a folder that the trainer and
all ranks of the engine see: in shared memory on one host, otherwise on a shared file system. The
calls and their order are in docs/reference/engines.md.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from zerocast.serve.refit_message import PROTOCOL, RefitError
from zerocast.serve.sender import Message, Sender

logger = logging.getLogger(__name__)

# The kind of a message that only engines receive.
APPLY = "apply"
# The error of an engine to a trainer that connects while a refit is open.
OPEN = "a refit is still open"


class EngineClient(Protocol):
    """The control plane of an engine. vLLM's weight-sync clients have the first four calls; one
    that also has `pause` and `resume` is called before and after the engine must not compute.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect every rank of the engine to the folder of refits. Raises an error with the text
        of OPEN if a refit is open.
        """
        ...

    def start_weight_update(self) -> None:
        """Begin a refit on every rank of the engine."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Hand a message to every rank."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a refit. One that was not applied is dropped."""
        ...


class EngineSender:
    """Refits an engine. All ranks of the sender's group make one and call `refit` together; the
    first of them talks to the engine.

    Args:
        sender: makes the messages, for this engine alone. Of two engines of one sender each would
            get all bytes every time.
        client: the engine's control plane, an `EngineClient`; used by the first rank only.
        folder: where tensors are handed over, in a separate folder that is created, and removed by
            `close`.

    Attributes:
        nbytes: the bytes of the tensors of the last refit.

    Raises RefitError on all ranks if the engine cannot be refitted.
    """

    def __init__(self, sender: Sender, client: Any, folder: str | os.PathLike[str]) -> None:
        self._sender = sender
        self._client = client
        self._folder = Path(folder, f"zerocast-{secrets.token_hex(8)}")
        self._is_first = sender.group.rank == 0
        # False until a refit was applied, and after one that was not.
        self._is_current = False
        # True after a refit that may have been written in part. Then the engine stays paused.
        self._is_broken = False
        self.nbytes = 0
        self._together(self._connect, "the connection to an engine")

    def refit(self, full: bool = False) -> int:
        """Send the live weights to the engine, the changes or all of them. Returns the number of
        the refit. Collective.

        An engine that rejects changes immediately gets a full refit; `full` requests one, as after
        a wake-up from sleep level 2. Raises RefitError on all ranks if that fails too: the engine
        continues with its old weights, or stays paused if it does not have those of one refit. A
        later refit that succeeds resumes it.
        """
        if self._is_current and not full:
            try:
                self._send(self._sender.named_deltas(since=self._sender.refit))
                return self._sender.refit
            except RefitError as error:
                logger.warning("a full refit follows: %s", error)
        self._send(self._sender.named_tensors())
        return self._sender.refit

    def close(self) -> None:
        """Remove the folder of refits. Collective."""
        self._together(self._remove_folder, "the end of a connection")

    def _send(self, messages: Iterable[Message]) -> None:
        self._is_current = False
        self.nbytes = 0
        self._together(self._start, "a refit")
        failure: Exception | None = None
        for message in messages:
            self.nbytes += message.nbytes
            if self._is_first and failure is None:
                try:
                    self._hand_over(message)
                except Exception as error:
                    # Making messages is collective, so this rank must continue to read them after
                    # an error.
                    failure = error
        self._together(lambda: self._finish(failure), "a refit")
        self._is_current = True

    def _together(self, action: Any, what: str) -> None:
        """Let the first rank act. Raises RefitError on all ranks if it fails."""
        text, cause = None, None
        if self._is_first:
            try:
                action()
            except Exception as error:
                text, cause = f"{type(error).__name__}: {error}", error
        text = self._sender.group.broadcast_object(text, what)
        if text is not None:
            raise RefitError(f"{what} failed: {text}") from cause

    def _connect(self) -> None:
        self._folder.mkdir(parents=True)
        try:
            self._init()
        except BaseException:
            self._remove_folder()
            raise

    def _init(self) -> None:
        info = {"protocol": PROTOCOL, "folder": str(self._folder)}
        try:
            self._client.init_weight_transfer_engine(info)
        except Exception as error:
            if OPEN not in str(error):
                raise
            # The open refit is of a trainer that died, or an earlier one of this trainer.
            self._close_refit()
            self._client.init_weight_transfer_engine(info)

    def _start(self) -> None:
        self._init()
        self._client.start_weight_update()

    def _close_refit(self) -> None:
        try:
            self._client.finish_weight_update()
        except Exception as error:
            # Ranks of the engine on which the refit is closed already raise.
            logger.debug("the engine closed a refit: %s", error)

    def _hand_over(self, message: Message) -> None:
        header: Mapping[str, Any] = dict(message.header)
        name = f"{header['run']}-{header['refit']}-{header['index']}.pt"
        path = self._folder / name
        try:
            if message.tensors:
                # A view would be saved with the whole of its storage.
                torch.save([tensor.detach().to("cpu", copy=True) for tensor in message.tensors], path)
            self._client.update_weights({"header": header, "file": name if message.tensors else None})
        finally:
            path.unlink(missing_ok=True)

    def _finish(self, failure: Exception | None) -> None:
        try:
            if failure is not None:
                raise failure
            self._write()
        except Exception:
            self._close_refit()
            raise

    def _write(self) -> None:
        try:
            self._pause(True)
            self._is_broken = True
            self._client.update_weights({"header": {"kind": APPLY}})
            self._is_broken = False
            self._client.finish_weight_update(f"{self._sender.run}-{self._sender.refit}")
        finally:
            if not self._is_broken:
                self._pause(False)

    def _pause(self, on: bool) -> None:
        call = getattr(self._client, "pause" if on else "resume", None)
        if call is not None:
            call()

    def _remove_folder(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()
