"""Where a task listens after the meeting, so that tasks which start anew find the job again.

Who knocks is asked what it would be asked in the meeting, and hears a verdict with the answer: it is let in, and its
connection takes the place of that to the process before it; or it is told why not. The task that let it in is all that
it has connections to.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdist import wire
from tfdist.collectives import reception
from tfdist.collectives.identity import Identity
from tfdist.collectives.listener import listen
from tfdist.errors import MeetingError

if TYPE_CHECKING:
    from tfdist.collectives.group import Group

logger = logging.getLogger(__name__)

YES, LATER, NO = "yes", "later", "no"
# The process before it may have died a moment ago; longer than this the one who knocks asks again.
FORMER_S = 3.0
# For those who are at the door when it is closed.
CLOSE_S = 2.0


@dataclass(frozen=True)
class Verdict:
    """What a task that keeps a door open answers.

    Attributes:
        answer: YES, LATER or NO.
        why: Why not.
    """

    answer: str
    why: str = ""

    @staticmethod
    def of(identity: Mapping[str, Any]) -> Verdict | None:
        """Returns the verdict in what a task said of itself; None where it is still in the meeting itself."""
        words = identity.get("door")
        if not isinstance(words, dict):
            return None
        answer = words.get("answer")
        return Verdict(answer if answer in (YES, LATER) else NO, str(words.get("why"))[:1000])


class Door:
    """A door that is shut until `open`.

    Args:
        group: The tasks that have met.
        me: This task, as in the meeting.
        secret: The job's.
    """

    def __init__(self, group: Group, me: Identity, secret: bytes | None) -> None:
        self._group, self._me, self._secret = group, me, secret
        self._why_not: Callable[[int], str] = lambda index: ""
        self._reception: reception.Reception | None = None

    def open(self, why_not: Callable[[int], str] = lambda index: "") -> None:
        """Listens at this task's address, until `close`.

        Args:
            why_not: Returns, for the index of a task, why it can not come back; "" if it can.

        Raises:
            MeetingError: The port is taken.
        """
        me, self._why_not = self._me, why_not
        others = [address for i, address in enumerate(me.addresses) if i != me.index]
        listeners = listen(me.addresses[me.index], others=others, task=me.name)
        self._reception = reception.Reception(listeners, self._receive)

    def close(self) -> None:
        """Lets nobody in any more; those who were let in are in the group when it returns."""
        if self._reception is not None:
            self._reception.close(wait_s=CLOSE_S)
            self._reception = None

    def _receive(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        verdict = Verdict(NO)

        def reply(theirs: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal verdict
            mine = self._me.message("data")
            if self._me.difference(theirs):
                return mine  # in which it finds the difference itself
            verdict = self._judge(theirs)
            return {**mine, "door": {"answer": verdict.answer, "why": verdict.why}}

        try:
            arrival = reception.shake_hands(
                sock,
                wire.answer,
                None,
                me=self._me,
                secret=self._secret,
                deadline=time.monotonic() + reception.HANDSHAKE_S,
                reply=reply,
            )
            if verdict.answer == YES:
                self._group.admit(arrival.identity["index"], sock, arrival.identity["heartbeat_timeout_s"])
                return
            if verdict.answer == NO:
                logger.warning("%s did not let %s in: %s", self._me.name, arrival.identity["task"], verdict.why)
        except (MeetingError, wire.WireError, OSError) as error:
            text = str(error) if isinstance(error, MeetingError) else f"it {error}"
            reception.log_dropped(self._me.name, f"a connection from {address[0]}: {text}", error)
        sock.close()

    def _judge(self, theirs: Mapping[str, Any]) -> Verdict:
        index, name = theirs["index"], str(theirs["task"])
        if index == self._me.index:
            return Verdict(NO, f"{name} is there twice: {self._me.message('data')['process']}, and {theirs['process']}")
        if why := self._why_not(index):
            return Verdict(NO, why)
        alive = self._group.is_alive(index, wait_s=FORMER_S)
        if alive is None:
            return Verdict(LATER, f"the {name} before it may still be there: nothing was heard of its end yet")
        if alive:
            return Verdict(NO, f"{name} is there twice: the one that came first is alive, end {theirs['process']}")
        return Verdict(YES)
