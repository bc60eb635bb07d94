"""What several tasks can't make right, and what to use instead: refused before the first step."""

from __future__ import annotations

from typing import Any

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals


def refuse(model: Any) -> None:
    """Checks a built model for several tasks that train in step.

    Raises:
        UnsupportedError: It can't give what one process gives; the message names the way out.
    """
    _refuse_stateful(model, "tasks take other rows")


def refuse_under_parameter_servers(model: Any, workers: int) -> None:
    """Checks a compiled model for workers that train through parameter servers.

    Raises:
        UnsupportedError: It can't work there; the message names the way out.
    """
    if model.jit_compile is True:
        raise UnsupportedError(
            "jit_compile=True: XLA can't reach variables on parameter servers; use jit_compile='auto' or False"
        )
    if model.run_eagerly:
        raise UnsupportedError(
            "run_eagerly=True: workers run steps as functions of TensorFlow; debug without --ps, in one process"
        )
    _refuse_stateful(model, "each batch goes to any worker")
    if workers > 1 and model.optimizer is not None and internals.accumulates(model.optimizer):
        raise UnsupportedError(
            f"gradient_accumulation_steps={model.optimizer.gradient_accumulation_steps}: workers would add to the same "
            "accumulators at their own pace; use a larger batch_size, or workers without --ps"
        )


def _refuse_stateful(model: Any, why: str) -> None:
    stateful = [layer.name for layer in internals.layers_of(model) if getattr(layer, "stateful", False) is True]
    if stateful:
        raise UnsupportedError(
            f"{', '.join(stateful)}: a stateful RNN keeps a state for each row of a batch, and {why}; use "
            "stateful=False"
        )
