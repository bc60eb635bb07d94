"""Ends a task whose step does not end, and says where it hangs.

TensorFlow never notices a hang in Python: its heartbeats come from another thread. Peers only see a task that is alive
and does not come.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from types import TracebackType
from typing import ClassVar

from tfdist import process
from tfdist.errors import WaitError


class Watchdog:
    """While it is open, `pat()` must be called every `timeout_s` seconds; the time to the first call is not limited.

    So tracing, which comes with the first step, is not counted. When the time is over, the stacks of all threads go to
    stderr and the process ends with code 75. One may be open inside another, where a callback of `fit` calls
    `evaluate`, whose steps count for both.
    """

    _newest: ClassVar[float] = 0.0  # when a step ended last, whoever's

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._has_begun = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdist watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def pat(self) -> None:
        """Says that a step has ended."""
        self._has_begun = True
        Watchdog._newest = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._timeout_s / 4, 5.0)):
            if not self._has_begun or time.monotonic() - self._newest < self._timeout_s:
                continue
            print("tfdist: no step ends; the stacks of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            process.fail(WaitError(f"no step of this task ended within {self._timeout_s:g} s (step_timeout_s)"))
