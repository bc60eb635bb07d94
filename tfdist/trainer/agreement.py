"""What all tasks must agree on: they do the same thing with the same values, or all get the same clear error."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.collectives import Group
from tfdist.errors import DataError, MismatchError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import local_component

logger = logging.getLogger(__name__)


class Agreement:
    """Small collective questions between the tasks of a group; with one task every answer is its own."""

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def any(self, flag: bool, tag: str) -> bool:
        """Returns whether the flag is set on any task."""
        if self.group is None:
            return flag
        return bool(self.group.all_reduce([np.array(flag)], op="max", tag=tag)[0])

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
                if theirs.get(name) != value:
                    raise MismatchError(
                        f"{call}: {name} is {value!r} on {self.group.tasks[0]} and {theirs.get(name)!r} on {task}; "
                        "every task must run the same script with the same arguments and data"
                    )

    def share_variables(self, model: Any, *, optimizer: bool) -> None:
        """Gives every task the chief's variables where they differ (weights loaded or changed on one task only)."""
        if self.group is None:
            return
        variables = list(model.variables)
        if optimizer and model.optimizer is not None:
            variables += list(model.optimizer.variables)
        arrays = _values(variables)
        shapes = [(v.path, list(a.shape), str(a.dtype)) for v, a in zip(variables, arrays, strict=True)]
        mine = json.dumps([len(shapes), zlib.crc32(json.dumps([s[1:] for s in shapes]).encode()), _checksum(arrays)])
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
            local_component(internals.native(variable)).assign(array)

    def from_chief(self, number: int, tag: str) -> int:
        """Returns the chief's number on every task."""
        if self.group is None:
            return number
        return int(self.group.broadcast([np.array(number, np.int64)], root=0, tag=tag)[0])

    def check_variables(self, variables: Sequence[Any], epoch: int) -> None:
        """Raises where tasks hold different values after an epoch: something changed them on one task alone.

        Raises:
            MismatchError: The message names the first variable that differs, and the tasks.
        """
        if self.group is None:
            return
        mine = [_checksum([array]) for array in _values(variables)]
        total = np.array(zlib.crc32(json.dumps(mine).encode()), np.int64)
        every = [int(value) for value in self.group.all_gather(total, tag="variables after an epoch")]
        if len(set(every)) == 1:
            return
        lists = [json.loads(t) for t in self.group.all_gather_bytes(json.dumps(mine).encode(), tag="which variables")]
        different = [
            variable.path
            for number, variable in enumerate(variables)
            if any(theirs[number : number + 1] != mine[number : number + 1] for theirs in lists)
        ]
        apart = [str(task) for task, theirs in zip(self.group.tasks, lists, strict=True) if theirs != lists[0]]
        raise MismatchError(
            f"after epoch {epoch + 1} {' and '.join(apart)} hold other values than {self.group.tasks[0]} of "
            f"{', '.join(different[:3])}{' ...' if len(different) > 3 else ''}: a callback changed them on some tasks "
            "only, or the step updates them from its own rows without optimizer.apply_gradients"
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


def _values(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """This task's own values."""
    return [np.asarray(local_component(internals.native(v)).numpy()) for v in variables]


def _checksum(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return checksum
