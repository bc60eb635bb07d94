"""How long a call waits for its peers, what it asks and says meanwhile: over sockets and through memory alike."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.collectives.faults import Faults, Now

FIRST_WORD_S, NEXT_WORD_S = 30.0, 60.0
# For what a peer that is gone sent before.
LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Watch:
    """What a wait asks.

    Attributes:
        wake_fd: Readable when `faults.check` should be asked at once.
        faults: Of the call.
        now: The time-out, which counts from the last thing that came.
    """

    wake_fd: int
    faults: Faults
    now: Now


class Wait:
    """The wait of one call; `moved` starts its time-out anew."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._started = self._moved = time.monotonic()
        self._word_at, self._patience_s = self._started + FIRST_WORD_S, watch.now.timeout_s

    def moved(self) -> None:
        self._moved = time.monotonic()

    @property
    def poll_ms(self) -> float:
        """How long to wait for an event before `look`."""
        until = min(self._moved + self._patience_s, self._word_at)
        return max(0.0, until - time.monotonic()) * 1000 + 1

    def woken(self, pending: Sequence[int]) -> bool:
        """Called when `wake_fd` is readable; raises if the call can not end, returns whether to expect that soon."""
        os.read(self._watch.wake_fd, 4096)
        ends_soon = self._watch.faults.check(pending)
        if ends_soon:
            self._patience_s = min(self._patience_s, LAST_WORDS_S)
        return ends_soon

    def look(self, pending: Sequence[int]) -> None:
        """Called when no event came: raises after the time-out, or says who is waited for."""
        now = time.monotonic()
        if now >= self._moved + self._patience_s:
            self._watch.faults.check(())
            raise self._watch.faults.late(pending)
        if now >= self._word_at:
            self._word_at = now + NEXT_WORD_S
            self._watch.faults.say(pending, now - self._started)
