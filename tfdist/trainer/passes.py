"""One pass over the data, as the loop asks an engine for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Watched(Enum):
    """Whether somebody looks at the logs of single batches; SOMETIMES is a progress bar."""

    NEVER = 0
    SOMETIMES = 1
    ALWAYS = 2


@dataclass(frozen=True)
class Pass:
    """What an engine needs to know of a pass besides its steps.

    Attributes:
        data: What the engine's `input` returned.
        begin: Called with the number of the first step before each execution of steps.
        end: Called with the number of the last step and the logs after it.
        stopped: Asked after each execution: true where no further one shall begin.
        epoch: Counted from 0; the order of the rows follows from it.
        watched: Where it is not ALWAYS, `end` may get older logs.
        numbers: Variables of one number each that no callback may change on some tasks only.
    """

    data: Any
    begin: Callable[[int], None]
    end: Callable[[int, Any], None]
    stopped: Callable[[], bool]
    epoch: int = 0
    numbers: Sequence[Any] = ()
    watched: Watched = Watched.ALWAYS
