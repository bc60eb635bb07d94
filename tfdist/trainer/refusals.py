"""What several tasks can't make right, and what to use instead: refused before the first step."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals

# Losses that look at all values of a batch at once, so that the parts of a batch don't add up to it.
_WHOLE_BATCH = {"circle": "Circle", "dice": "Dice", "tversky": "Tversky"}


def refuse(model: Any) -> None:
    """Checks a built model for several tasks.

    Raises:
        UnsupportedError: It can't give what one process gives; the message names the way out.
    """
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        _refuse_loss(loss)
    stateful = [layer.name for layer in internals.layers_of(model) if getattr(layer, "stateful", False) is True]
    if stateful:
        raise UnsupportedError(
            f"{', '.join(stateful)}: a stateful RNN keeps a state for each row of a batch, and tasks take other rows; "
            "use stateful=False"
        )


def _refuse_loss(loss: Any) -> None:
    if loss is None:
        return
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    kind = _WHOLE_BATCH.get(name.lower())
    if kind and getattr(loss, "axis", None) is None:
        raise UnsupportedError(
            f"the loss {kind} is of a batch as a whole, so the tasks' parts of a batch don't add up to it"
            + ("; give it an axis that leaves out the rows, such as axis=(1, 2, 3)" if kind != "Circle" else "")
        )
    if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none"):
        raise UnsupportedError(
            f"the loss {type(loss).__name__} has reduction={loss.reduction!r}, whose gradient is a sum over a task's "
            "rows; use reduction='sum' or 'sum_over_batch_size'"
        )
