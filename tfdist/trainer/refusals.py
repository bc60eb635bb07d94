"""What several tasks can't make right, and what to use instead: refused before the first step."""

from __future__ import annotations

from typing import Any

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals


def refuse(model: Any) -> None:
    """Checks a built model for several tasks.

    Raises:
        UnsupportedError: It can't give what one process gives; the message names the way out.
    """
    stateful = [layer.name for layer in internals.layers_of(model) if getattr(layer, "stateful", False) is True]
    if stateful:
        raise UnsupportedError(
            f"{', '.join(stateful)}: a stateful RNN keeps a state for each row of a batch, and tasks take other rows; "
            "use stateful=False"
        )
