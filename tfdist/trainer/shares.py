"""What of each worker's share of an epoch has been counted, whatever is lost, read twice or never read.

Every worker reads a share of the data from an iterator of its own, and each result says which elements it is of. So
rows count once: a worker that is started anew goes on behind what was counted, what it reads once more is dropped, and
what nobody has read when the others are done is known by its position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator


class Share:
    """The elements of one worker's share, by their position.

    Attributes:
        next: All elements before this one have been counted.
        ended: Whether the worker found the end.
    """

    def __init__(self) -> None:
        self.next, self.ended = 0, False
        self._later: set[int] = set()  # counted, and others before them are missing

    def count(self, first: int, count: int) -> bool:
        """Notes elements as counted; returns False, and notes nothing, where one of them was."""
        elements = range(first, first + count)
        if first < self.next or not self._later.isdisjoint(elements):
            return False
        self._later.update(elements)
        while self.next in self._later:
            self._later.remove(self.next)
            self.next += 1
        return True

    def missing(self) -> Iterator[int]:
        """Yields the positions, from `next` on, that were not counted; without end unless the worker found one."""
        position, last = self.next, self.end
        while position < last or not self.ended:
            if position not in self._later:
                yield position
            position += 1

    @property
    def end(self) -> int:
        """Behind the last element that was counted."""
        return max(self._later, default=self.next - 1) + 1

    @property
    def is_whole(self) -> bool:
        return self.ended and not self._later


class Reading:
    """One epoch of what the workers read: how many steps to ask for next, and when it is over.

    Args:
        shares: Of each worker.
        steps: Steps to run, or None until all shares have ended.
        in_flight: How many closures may be open.

    Attributes:
        begun: Steps that closures were asked for, less those that they did not find.
    """

    def __init__(self, shares: list[Share], steps: int | None, in_flight: int) -> None:
        self.shares, self._steps, self._in_flight = shares, steps, in_flight
        self.begun = 0
        self._open = 0
        # Any worker takes a closure, also one whose share has ended: what it returns empty is not replaced, unless none
        # is open or another one has ended that was not empty.
        self._empty = 0

    def next_count(self, most: int) -> int:
        """Returns how many steps the next closure is asked for; 0: none now."""
        if self._open + self._empty >= self._in_flight:
            return 0
        return most if self._steps is None else max(0, min(most, self._steps - self.begun))

    def is_over(self, missing_workers: Collection[int]) -> bool:
        """Whether the workers that are there have nothing left to read."""
        if self._steps is not None and self.begun >= self._steps and not self._open:
            return True
        here = [share for worker, share in enumerate(self.shares) if worker not in missing_workers]
        return bool(here) and all(share.ended for share in here)

    @property
    def found_nothing(self) -> bool:
        """Whether no closure is open, and all of the last ones were empty: the worker that has data did not answer."""
        return self._open == 0 and self._empty > 0

    def try_again(self) -> None:
        self._empty = 0

    def begin(self, count: int) -> None:
        self.begun += count
        self._open += 1

    def end(self, worker: int, asked: int, first: int, done: int, *, goes_on: bool) -> bool:
        """Notes what a closure found on its worker; returns whether its rows count."""
        share = self.shares[worker]
        self._open -= 1
        share.ended = not goes_on
        if done == 0:
            self._empty += 1
        else:
            self._empty = 0
        counts = done > 0 and share.count(first, done)
        self.begun -= asked - (done if counts else 0)
        return counts

    def steps_left(self) -> int | None:
        return None if self._steps is None else self._steps - self.begun
