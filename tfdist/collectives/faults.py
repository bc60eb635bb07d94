"""What is known of the peers -> the error of a call that can not go on, in words that name the task at fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.cluster import Task
from tfdist.collectives.calls import Call
from tfdist.collectives.monitor import BROKEN, LEFT, MAX_TEXT, SILENT, Monitor, Trouble
from tfdist.errors import GroupError, MismatchError, PeerLostError, WaitError

logger = logging.getLogger(__name__)


@dataclass
class Now:
    """What this task is doing.

    Attributes:
        number: Of its calls so far.
        call: The last one.
        is_in_call: Whether it has not ended.
        step: Where training is.
        is_leaving: Whether this task has said goodbye.
        timeout_s: How long a call waits for a task that is alive.
    """

    timeout_s: float
    number: int = 0
    call: Call | None = None
    is_in_call: bool = False
    step: int | None = None
    is_leaving: bool = False

    def status(self) -> dict[str, Any]:
        """Returns what a heartbeat says of this task."""
        doing = "before its first call"
        if self.call is not None:
            doing = f"{'in' if self.is_in_call else 'after'} {self.call}"
        return {"step": self.step, "doing": doing, "calls": self.number}

    @property
    def where(self) -> str:
        return f"{self.call}{'' if self.step is None else f' at step {self.step}'}"


class Faults:
    """The errors of one group's calls.

    Args:
        tasks: All of them.
        index: This one.
        now: What it is doing.
        monitor: What is known of the others.
    """

    def __init__(self, tasks: Sequence[Task], index: int, now: Now, monitor: Monitor) -> None:
        self._tasks, self._index, self._now, self._monitor = tasks, index, now, monitor
        self._task = tasks[index]
        self._account: dict[str, Any] | None = None

    def begin(self) -> None:
        """Raises if a call that begins now can not end: it needs every task, and misses even one that left in peace."""
        self._account = None
        if (trouble := self._monitor.first()) is not None:
            raise self._error_of(trouble)

    def check(self, pending: Sequence[int]) -> bool:
        """Raises if the call can not end; returns whether a peer owes us data that must come now or never."""
        self._raise_if_leaving()
        trouble = self._monitor.fatal()
        if trouble is None:
            return any(self._monitor.of(index) for index in pending)
        # A dead peer may have sent its part of this call before; the end of its data shows if not.
        if trouble.kind in (BROKEN, SILENT) or trouble.source not in pending:
            raise self._error_of(trouble)
        return True

    def lost(self, index: int) -> GroupError:
        """Returns the error for a peer whose connection ended."""
        self._raise_if_leaving()
        if self._monitor.of(index, wait_s=1.0) is None:
            return self._error_of(Trouble(index, LEFT, f"{self._tasks[index]} closed its data connection", index))
        trouble = self._monitor.first()
        assert trouble is not None
        return self._error_of(trouble)

    def late(self, pending: Sequence[int]) -> GroupError:
        """Returns the error for peers that did not come in time."""
        for index in pending:
            if self._monitor.of(index) is not None:
                return self.lost(index)
        pending = self._behind(pending)
        accounts = []
        for index in pending:
            said = self._monitor.said(index)
            step = "" if said.get("step") is None else f" at step {said['step']},"
            accounts.append(f"{self._tasks[index]} (alive,{step} {said.get('doing', 'before its first call')})")
        why = f"{names_text(accounts)} did not come to {self._now.where} within {self._now.timeout_s:g} s"
        self._account = {"error": "WaitError", "why": f"{why}, {self._task} gave up", "blame": pending[0]}
        return WaitError(f"{why}, while {self._task} waited there", task=self._tasks[pending[0]])

    def say(self, pending: Sequence[int], waited_s: float) -> None:
        """Says who is waited for."""
        names = names_text([str(self._tasks[index]) for index in pending])
        message = "%s is waiting for %s in %s (%.0f s of %.0f s)"
        logger.warning(message, self._task, names, self._now.where, waited_s, self._now.timeout_s)

    def account(self, error: BaseException) -> tuple[GroupError, Mapping[str, Any]]:
        """Returns the error that ends the group for this task, and what the peers are told is to blame."""
        if isinstance(error, GroupError):
            told = self._account or {"error": type(error).__name__, "why": str(error), "blame": self._index}
        else:
            what = f"{self._task} was stopped in {self._now.where} by {type(error).__name__}: {error}"
            error = GroupError(f"{what}; the group can not go on")
            told = {"error": "PeerLostError", "why": what, "blame": self._index}
        # The traceback would keep what the call used, such as shared memory.
        return copy_of(error), {**told, "why": told["why"][:MAX_TEXT]}

    def _raise_if_leaving(self) -> None:
        if self._now.is_leaving:
            raise GroupError(f"{self._task} has left the group; no call can follow")

    def _behind(self, pending: Sequence[int]) -> Sequence[int]:
        """Returns who is to blame: a peer that is waited for may itself wait for another that has not come."""
        others = [i for i in range(len(self._tasks)) if i != self._index]
        behind = [i for i in others if self._monitor.said(i).get("calls", self._now.number) < self._now.number]
        return [i for i in pending if i in behind] or behind or pending

    def _error_of(self, trouble: Trouble) -> GroupError:
        told = f" (told by {trouble.told_by})" if trouble.told_by and trouble.blame != trouble.source else ""
        self._account = {"error": trouble.error, "why": trouble.text, "blame": trouble.blame}
        if trouble.error == "MismatchError":
            return MismatchError(trouble.text)
        blamed = self._tasks[trouble.blame if 0 <= trouble.blame < len(self._tasks) else trouble.source]
        if trouble.error == "WaitError":
            return WaitError(f"{trouble.text}{told}", task=blamed)
        if trouble.blame == self._index:
            text = f"{trouble.told_by} gave this task up: {trouble.text}"
            return PeerLostError(text, task=self._tasks[trouble.source])
        text = f"{trouble.text}{told}, while {self._task} waited for it in {self._now.where}"
        return PeerLostError(text, task=blamed)


def copy_of(error: GroupError) -> GroupError:
    """Returns the same error without its traceback."""
    if isinstance(error, (PeerLostError, WaitError)):
        return type(error)(str(error), task=error.task)
    return type(error)(str(error))


def names_text(names: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
