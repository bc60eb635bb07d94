"""What all tasks must agree on: they do the same thing with the same values, or all get the same clear error."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import process
from tfdist.collectives import Group
from tfdist.errors import DataError, MismatchError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component

logger = logging.getLogger(__name__)
# Ends the names of arguments whose values say nothing to a reader.
CHECKSUM = " (checksum)"


def check_same(what: Any, name: str = "check_same") -> None:
    """Raises on every task where the tasks hold different values; every task calls it. Costs one small message.

    `fit` does so after every epoch by itself, and `tfdist.callbacks.CheckSame` between its steps; this is for a loop of
    your own, or after a model was made or loaded.

    Args:
        what: A Keras model (its variables and its optimizer's), an optimizer, or a list of variables.
        name: Begins the message, e.g. "after step 7".

    Raises:
        MismatchError: The message names the first variable that differs, and the tasks that hold another value of it
            than the chief.

    Example:
        tfdist.check_same(model, "before training")
    """
    current = process.current()
    if current is None or current.group is None:
        return
    if isinstance(what, keras.Model):
        variables = shared_variables(what)
    elif hasattr(what, "variables"):
        variables = _variables_of(what)
    else:
        variables = list(what)
    Agreement(current.group).check_variables(variables, name)


class Agreement:
    """Small collective questions between the tasks of a group; with one task every answer is its own."""

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def any(self, flag: bool, tag: str) -> bool:
        """Returns whether the flag is set on any task."""
        if self.group is None:
            return flag
        return bool(self.group.all_reduce([np.array(flag)], op="max", tag=tag)[0])

    def any_after_step(self, flag: bool, scalars: Sequence[Any], when: str) -> bool:
        """Returns whether the flag is set on any task; in the same small message it checks a few variables.

        Args:
            flag: This task's.
            scalars: Variables of one number each, of which every task holds the same, e.g. the learning rate.
            when: For the message, e.g. "after step 3 of epoch 1".

        Raises:
            MismatchError: On every task, where one holds another number.
        """
        if self.group is None or not scalars:
            return self.any(flag, "stop")
        checksum = _checksum(_values(scalars))
        # The largest of x and of -x tell whether all tasks have the same x.
        mine = np.array([flag, checksum, -checksum], np.int64)
        stop, largest, smallest = self.group.all_reduce([mine], op="max", tag="stop")[0]
        if largest != -smallest:
            self.check_variables(scalars, when)
        return bool(stop)

    def require_same(self, call: str, arguments: dict[str, Any]) -> None:
        """Raises on every task where tasks would not do the same thing.

        Raises:
            MismatchError: Tasks call `fit` with other epochs, steps, batch sizes; the message names task and value.
        """
        if self.group is None:
            return
        mine = json.dumps(arguments, default=str)
        every = [json.loads(text) for text in self.group.all_gather_bytes(mine.encode(), tag=f"{call} arguments")]
        for task, theirs in zip(self.group.tasks, every, strict=True):
            for name, value in every[0].items():
                if theirs.get(name) == value:
                    continue
                if name.endswith(CHECKSUM):
                    raise MismatchError(
                        f"{call}: the {name.removesuffix(CHECKSUM)} are not the same on {self.group.tasks[0]} and "
                        f"{task}; every task must run the same script with the same arguments and data, whole and in "
                        "the same order: each takes its rows of every batch by itself"
                    )
                raise MismatchError(
                    f"{call}: {name} is {value!r} on {self.group.tasks[0]} and {theirs.get(name)!r} on {task}; "
                    "every task must run the same script with the same arguments and data"
                )

    def share_variables(self, model: Any, *, optimizer: bool) -> None:
        """Gives every task the chief's variables where they differ (weights loaded or changed on one task only)."""
        if self.group is None:
            return
        variables = shared_variables(model) if optimizer else list(model.variables)
        if optimizer and self.group.index > 0:
            for kept in [] if model.optimizer is None else internals.accumulators(model.optimizer):
                _assign(kept, np.zeros_like(_values([kept])[0]))  # the chief keeps the whole sum; see below
        arrays = _values(variables)
        shapes = json.dumps([[list(array.shape), str(array.dtype)] for array in arrays])
        mine = json.dumps([len(arrays), zlib.crc32(shapes.encode()), _checksum(arrays)])
        every = [json.loads(text) for text in self.group.all_gather_bytes(mine.encode(), tag="variables")]
        for task, theirs in zip(self.group.tasks, every, strict=True):
            if theirs[:2] != every[0][:2]:
                raise MismatchError(
                    f"the model on {task} has other variables ({theirs[0]} of them) than on {self.group.tasks[0]} "
                    f"({every[0][0]}); every task must build the same model and optimizer, in the scope"
                )
        different = [str(t) for t, theirs in zip(self.group.tasks, every, strict=True) if theirs != every[0]]
        if not different:
            return
        if self.group.index == 0:
            logger.warning(
                "%s held other values of the model's variables than %s (loaded or changed on some tasks only?); "
                "all tasks now use those of %s",
                ", ".join(different),
                self.group.tasks[0],
                self.group.tasks[0],
            )
        received = self.group.broadcast(arrays, root=0, tag="variables")
        for variable, array in zip(variables, received, strict=True):
            _assign(variable, array)

    def collect_accumulated(self, model: Any) -> None:
        """Leaves to the chief the sums that tasks keep between two updates: what it saves of them is then whole."""
        kept = [] if model.optimizer is None else internals.accumulators(model.optimizer)
        if self.group is None or not kept:
            return
        for variable, total in zip(
            kept, self.group.all_reduce(_values(kept), op="sum", tag="accumulated"), strict=True
        ):
            _assign(variable, total if self.group.index == 0 else np.zeros_like(total))

    def from_chief(self, number: int, tag: str) -> int:
        """Returns the chief's number on every task."""
        if self.group is None:
            return number
        return int(self.group.broadcast([np.array(number, np.int64)], root=0, tag=tag)[0])

    def check_variables(self, variables: Sequence[Any], when: str) -> None:
        """Raises where tasks hold different values: something changed them on one task alone.

        Args:
            variables: The same ones on every task, in the same order.
            when: For the message, e.g. "after epoch 1".

        Raises:
            MismatchError: On every task; the message names the first variable that differs, and the tasks.
        """
        if self.group is None:
            return
        mine = [_summary(_value(variable)) for variable in variables]  # one at a time: they may be on a GPU
        total = np.array(zlib.crc32(json.dumps([checksum for checksum, _ in mine]).encode()), np.int64)
        every = [int(value) for value in self.group.all_gather(total, tag="values of variables")]
        if len(set(every)) == 1:
            return
        text = json.dumps(mine).encode()
        lists = [json.loads(t) for t in self.group.all_gather_bytes(text, tag="which variables")]
        if len({len(theirs) for theirs in lists}) > 1:
            counts = ", ".join(f"{len(v)} on {task}" for task, v in zip(self.group.tasks, lists, strict=True))
            raise MismatchError(f"{when}: the tasks hold other numbers of variables: {counts}")
        checksums = [[checksum for checksum, _ in theirs] for theirs in lists]
        different = [n for n in range(len(variables)) if len({theirs[n] for theirs in checksums}) > 1]
        apart = [i for i, theirs in enumerate(checksums) if theirs != checksums[0]]
        names = ", ".join(_name_of(variables[n]) for n in different[:3]) + (" ..." if len(different) > 3 else "")
        first, other = lists[0][different[0]][1], lists[apart[0]][different[0]][1]
        numbers = "" if first is None else f" ({other} on {self.group.tasks[apart[0]]}, not {first})"
        raise MismatchError(
            f"{when}: {' and '.join(str(self.group.tasks[i]) for i in apart)} "
            f"{'holds' if len(apart) == 1 else 'hold'} other values than {self.group.tasks[0]} of {names}{numbers}: a "
            "callback changed them on some tasks only, or the step updates them from its own rows. A state that Keras "
            "made (add_weight) is merged if it is updated before optimizer.apply_gradients"
        )

    def rows_of_step(self, rows: int | None, step: int, *, own: bool) -> int | None:
        """Returns the rows of a step over all tasks, or None where all tasks' data has ended.

        Args:
            rows: This task's, or None where its data has ended.
            step: For the message.
            own: Whether each task brings rows of its own, so that one may end before another.

        Raises:
            DataError: Some tasks' data has ended, and all must read the same batches; the message names them.
        """
        if self.group is None:
            return rows
        mine = np.array(-1 if rows is None else rows, np.int64)
        every = [int(value) for value in self.group.all_gather(mine, tag="rows of a step")]
        ended = [str(task) for task, value in zip(self.group.tasks, every, strict=True) if value < 0]
        if len(ended) == len(every):
            return None
        if ended and not own:
            others = [str(task) for task, value in zip(self.group.tasks, every, strict=True) if value >= 0]
            raise DataError(
                f"the data of {' and '.join(ended)} ended before step {step}, that of {' and '.join(others)} goes on; "
                "every task must read the same global batches, of which it takes its rows"
            )
        return sum(max(value, 0) for value in every)

    def check_same_batch(self, checksum: int, which: str = "first batch") -> None:
        """Raises where tasks read different data: a shuffle without a common seed would lose and double rows."""
        if self.group is None:
            return
        every = self.group.all_gather(np.array(checksum, np.int64), tag=which)
        different = [str(task) for task, value in zip(self.group.tasks, every, strict=True) if value != every[0]]
        if different:
            raise DataError(
                f"{' and '.join(different)} read another {which} than {self.group.tasks[0]}; every task must "
                "read the same global batches, of which it takes its rows: give shuffle() a seed, don't shard the "
                "dataset"
            )


def shared_variables(model: Any) -> list[Any]:
    """Returns the variables of a model and its optimizer that are the same on every task between two steps."""
    return [*model.variables, *_variables_of(getattr(model, "optimizer", None)), *_unknown_to_keras(model)]


def _variables_of(optimizer: Any) -> list[Any]:
    """Returns those that are the same on every task: not the sums of gradients, of which each keeps its part."""
    if optimizer is None:
        return []
    apart = {id(variable) for variable in internals.accumulators(optimizer)}
    return [variable for variable in optimizer.variables if id(variable) not in apart]


def _unknown_to_keras(model: Any) -> list[Any]:
    """Returns the variables of TensorFlow's own that layers hold as attributes; nothing merges what steps put there."""
    holders = {id(holder): holder for holder in (model, *internals.layers_of(model))}
    held = [v for holder in holders.values() for v in vars(holder).values() if isinstance(v, tf.Variable)]
    return [v for v in held if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool]


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", "a variable"))


def _values(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """This task's own values."""
    return [_value(variable) for variable in variables]


def _value(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(_own(variable).numpy())


def _summary(array: np.ndarray[Any, Any]) -> tuple[int, str | None]:
    """The checksum, and what to show of a single number."""
    return _checksum([array]), str(array.ravel()[0]) if array.size == 1 else None


def _assign(variable: Any, value: np.ndarray[Any, Any]) -> None:
    _own(variable).assign(value)


def _own(variable: Any) -> Any:
    """This task's part of a variable of Keras' or of TensorFlow's."""
    return local_component(internals.native(variable) if isinstance(variable, keras.Variable) else variable)


def _checksum(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return checksum
