"""A callback of the user's -> the same callback, on the chief alone."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import process

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class ChiefOnly(keras.callbacks.Callback):
    """Runs a callback on the chief, and nothing of it on the other tasks: for what writes, prints or sends.

    It must not do what all tasks do together, such as `model.evaluate` or `tfdist.all_reduce`: the others are not
    there. `self.model.stop_training = True` in it stops all tasks.

    Args:
        callback: Any Keras callback.

    Example:
        model.fit(x, y, callbacks=[tfdist.callbacks.ChiefOnly(SendToSlack())])
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(f"ChiefOnly wraps one keras.callbacks.Callback, not a {type(callback).__name__}")
        self.callback = callback
        # Keras asks whether hooks of batches may run beside the next step; without any of them they may.
        self.async_safe = getattr(callback, "async_safe", False)
        for name in _HOOKS:
            hook = getattr(callback, name)
            if getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, name):
                setattr(self, name, _on_chief(hook))

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        if process.is_chief():
            self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if process.is_chief():
            self.callback.set_model(model)


def _on_chief(hook: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        if process.is_chief():
            hook(*args, **kwargs)

    return run
