"""Losses and metric functions of a batch as a whole: each task sees the rows of all tasks.

A loss that is a mean over rows is the share-weighted mean of the tasks' own, and nothing needs to cross tasks. Dice,
Circle, a contrast with the other rows of the batch or a correlation are not: their rows are gathered, every task
computes the same number, and what flows back to a task is the part of its rows.

`whole_batch` marks a loss of the user's own. Those of Keras are known here; functions of the user's own that are given
to `compile` are found by trying them (`trying.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.trainer.step import Step, active, suspended

_MARK = "_tfdist_whole_batch"

# Keras' functions that add up, or divide, along an axis: of the whole batch where the axis takes in the rows. The
# default is the axis where none is given; None is all of them.
_ALONG_AN_AXIS: dict[str, int | None] = {
    "categorical_crossentropy": -1,
    "categorical_focal_crossentropy": -1,
    "categorical_generalized_cross_entropy": -1,
    "circle": None,
    "concordance_correlation": -1,
    "cosine_similarity": -1,
    "dice": None,
    "kl_divergence": -1,
    "pearson_correlation": -1,
    "tversky": None,
}
_ROWS = ("y_true", "y_pred", "sample_weight")

Loss = TypeVar("Loss")


def whole_batch(loss: Loss) -> Loss:
    """Returns a loss, or a metric function, that sees the rows of all tasks, as it would in one process.

    For what contrasts rows with each other or divides one sum over rows by another: in-batch negatives, a Dice score, a
    root of a mean. Such a function given to `compile` is found and treated so by itself; mark one that a `train_step`,
    a layer's `add_loss` or another loss calls. In one process it changes nothing.

    Inside a training or test step its tensors are gathered from all tasks, in the order of the batch, and it returns
    the value of the whole batch on every task. Positional arguments and those named y_true, y_pred and sample_weight
    are gathered if they are tensors with rows, of shape [rows, ...]; other arguments pass as they are. Gradients flow
    to each task's rows. Anything that is not one entry per row belongs into a keyword argument.

    Args:
        loss: A function of (y_true, y_pred) or of any tensors, a `keras.losses.Loss`, or a class of it. As a decorator,
            below `keras.saving.register_keras_serializable` if there is one.

    Raises:
        TypeError: It is none of these.
        UnsupportedError: While the step is traced: a ragged or a string tensor, which can't be gathered.

    Example:
        import keras
        import tfdist

        @tfdist.whole_batch
        def info_nce(queries, keys):  # row i of one belongs to row i of the other, and to no other row
            scores = keras.ops.matmul(queries, keras.ops.transpose(keys)) / 0.1
            return keras.losses.sparse_categorical_crossentropy(
                keras.ops.arange(keras.ops.shape(scores)[0]), scores, from_logits=True
            )

        dice = tfdist.whole_batch(keras.losses.dice)  # to be called in a train_step: dice(y, y_pred)
    """
    base = keras.losses.Loss
    if isinstance(loss, type) and issubclass(loss, base):
        if loss.__call__ is not base.__call__:
            loss.__call__ = _of_the_whole_batch(loss.__call__)  # type: ignore[method-assign]
        setattr(loss, _MARK, True)
        return loss
    if isinstance(loss, base):
        if type(loss).__call__ is not base.__call__ and not getattr(loss, _MARK, False):
            raise TypeError(
                f"whole_batch: {type(loss).__name__} has a __call__ of its own; decorate the class, not one of its "
                "objects"
            )
        mark(loss)
        return loss
    if isinstance(loss, (str, type)) or not callable(loss):
        raise TypeError(
            f"whole_batch takes a function, a keras.losses.Loss or a class of it, not {loss!r}"
            + ("; keras.losses.get() turns a name into a function" if isinstance(loss, str) else "")
        )
    marked = _of_the_whole_batch(loss)
    mark(marked)
    return marked  # type: ignore[return-value]


def mark(loss: Any) -> None:
    """Has the hooks treat a loss or metric as one of the whole batch."""
    object.__setattr__(loss, _MARK, True)


def _of_the_whole_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_whole_batch(*args: Any, **kwargs: Any) -> Any:
        step = active()
        if step is None:
            return function(*args, **kwargs)
        rows = {name: value for name, value in kwargs.items() if name in _ROWS}
        (args, rows), _ = gathered(step, (args, rows))
        with suspended():
            return function(*args, **{**kwargs, **rows})

    return on_whole_batch


def is_whole(owner: Any, function: Any, arguments: dict[str, Any], rank: int | None) -> bool:
    """Returns whether a loss or metric object needs the whole batch.

    Args:
        owner: The object, which may be marked.
        function: What it calls, or None.
        arguments: The keyword arguments of that.
        rank: Dimensions of y_pred, if known.
    """
    if getattr(owner, _MARK, False) or getattr(function, _MARK, False):
        return True
    name = getattr(function, "__name__", "")
    if name not in _ALONG_AN_AXIS or not getattr(function, "__module__", "").startswith("keras."):
        return False
    axis = arguments.get("axis", _ALONG_AN_AXIS[name])
    if axis is None or rank is None:
        return True
    axes = [axis] if isinstance(axis, int) else axis
    return any(a % rank == 0 for a in axes)


# -- called by the hooks


def call_loss(step: Step, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, weight: Any) -> Any:
    """Runs `Loss.__call__`, on the rows of all tasks if the loss needs them."""
    function, arguments = internals.function_of_loss(loss)
    if not is_whole(loss, function, arguments, _rank(y_pred)):
        return original(loss, y_true, y_pred, weight)
    (y_true, whole, weight), mine = gathered(step, (y_true, y_pred, weight))
    with suspended():
        value = original(loss, y_true, whole, weight)
    if value.shape.rank == 0:
        return value
    axis = arguments.get("axis")
    if axis is not None and getattr(function, "__module__", "").startswith("keras."):
        raise UnsupportedError(
            f"the loss {loss.name} with axis={axis} has no value per row, so reduction={loss.reduction!r} can't give "
            "each task its rows' values; use reduction='sum' or 'sum_over_batch_size'"
        )
    return mine(value)  # not reduced: one value per row, as of any other loss


def update_metric(step: Step, original: Callable[..., Any], metric: Any, y_true: Any, y_pred: Any, weight: Any) -> Any:
    """Runs `MeanMetricWrapper.update_state`, on the rows of all tasks if its function needs them."""
    function, arguments = internals.function_of_metric(metric)
    if not is_whole(metric, function, arguments, _rank(y_pred)):
        return original(metric, y_true, y_pred, weight)
    before = [(variable, tf.convert_to_tensor(variable)) for variable in metric.variables]
    (y_true, y_pred, weight), _ = gathered(step, (y_true, y_pred, weight))
    with suspended():
        result = original(metric, y_true, y_pred, weight)
    # Every task has added what the whole batch gives, and the tasks' states are summed.
    for variable, old in before:
        variable.assign(old + step.times_share(tf.convert_to_tensor(variable) - old))
    return result


def gathered(step: Step, values: Any) -> tuple[Any, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the structure with the rows of all tasks in its tensors, and a function: whole tensor -> own rows."""
    tensors = [_as_tensor(leaf) for leaf in keras.tree.flatten(values)]
    with_rows = [i for i, t in enumerate(tensors) if tf.is_tensor(t) and t.shape.rank != 0]
    masks = [internals.mask_of(tensors[i]) for i in with_rows]
    parts = [tensors[i] for i in with_rows] + [mask for mask in masks if mask is not None]
    if not parts:
        return values, lambda whole: whole
    wholes, mine = step.gather_rows(parts)
    rest = iter(wholes[len(with_rows) :])
    for i, mask, whole in zip(with_rows, masks, wholes, strict=False):
        tensors[i] = whole
        if mask is not None:
            internals.set_mask(whole, next(rest))
    return keras.tree.pack_sequence_as(values, tensors), mine


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor) or (tf.is_tensor(leaf) and leaf.dtype == tf.string):
        kind = "ragged" if isinstance(leaf, tf.RaggedTensor) else "string"
        raise UnsupportedError(
            f"a loss of the whole batch can't gather a {kind} tensor of shape {leaf.shape}; give it numbers in a dense "
            "one, such as .to_tensor(shape=...)"
        )
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf)
    if isinstance(leaf, (np.ndarray, keras.Variable)) and len(leaf.shape) > 0:
        return tf.convert_to_tensor(leaf)
    return leaf


def _rank(y_pred: Any) -> int | None:
    leaves: Sequence[Any] = keras.tree.flatten(y_pred)
    shape = getattr(leaves[0], "shape", None) if len(leaves) == 1 else None
    return None if shape is None else len(shape)
