"""What `fit`, `evaluate` and `predict` are given -> epochs of steps over this task's rows.

Which rows are a task's is in `sources.py`; this is how passes over them become epochs, as Keras has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import own_dataset
from tfdist.trainer import sources
from tfdist.trainer.sources import Source


def read(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    index: int,
    size: int,
    batch_size: int | None,
    steps: int | None,
    shuffle: Any,
    class_weight: Any,
    seed: tuple[int, ...],
) -> Source:
    """Returns this task's rows of whatever Keras takes as x.

    Raises:
        UnsupportedError: Input of a kind that can't be split over tasks, with what to pass instead.
    """
    if sources.is_pipeline(x):
        given = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} can't stand beside a pipeline, which holds its own: {x!r}")
        return sources.from_pipeline(x, index, size)
    own = own_dataset(x)
    if own is not None:
        return sources.from_own(own)
    if isinstance(x, keras.utils.PyDataset):
        internals.GET_ADAPTER.find()(x, y, sample_weight)  # its own words for a y or weights beside it
        return sources.from_py_dataset(x, index, size, shuffle=shuffle, seed=seed, class_weight=class_weight)
    adapter = internals.GET_ADAPTER.find()(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        shuffle=False,
        class_weight=class_weight,
    )
    if isinstance(adapter, internals.ARRAY_ADAPTER.find()):
        return sources.from_arrays(adapter, index, size, shuffle=shuffle, seed=seed)
    if isinstance(adapter, internals.DATASET_ADAPTER.find()):
        return sources.from_dataset(adapter.get_tf_dataset(), index, size, adapter.num_batches)
    if isinstance(adapter, internals.GENERATOR_ADAPTER.find()):
        return sources.from_generator(adapter, index, size)
    raise UnsupportedError(
        f"x is a {type(x).__name__}, which can't be split over the tasks; pass arrays, a tf.data.Dataset, a "
        "keras.utils.PyDataset or a generator, with the same batches on every task"
    )


class Input:
    """The batches of one `fit`, `evaluate` or `predict` call; arguments as of `read`.

    Attributes:
        source: This task's rows.
        batches: Global batches in one pass over the data, or None where that is unknown.
        steps: Steps of one epoch, or None where that is unknown.
        last: The data that this task read last.
        needs_agreement: Tasks may come to their ends at different steps, so each step begins by telling the others.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        index: int,
        size: int,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: Any = False,
        class_weight: Any = None,
        seed: tuple[int, ...] = (),
    ) -> None:
        cap = internals.MAX_STEPS.find()()
        if cap and (not steps or cap < steps):
            warnings.warn(f"Limiting steps_per_epoch to {cap}", stacklevel=2)
            steps = cap
        self._wanted_steps = steps
        self.source = read(
            x,
            y,
            sample_weight,
            index=index,
            size=size,
            batch_size=batch_size,
            steps=steps,
            shuffle=shuffle,
            class_weight=class_weight,
            seed=seed,
        )
        # Of rows of its own a task may have fewer or more than another.
        self.batches = None if self.source.split == "own" and size > 1 else self.source.batches
        self.steps: int | None = steps or self.batches
        self._size = size
        self._passes = 0
        self._iterator: Any = None
        self._seen = 0
        self._peeked: Any = None
        self.last: Any = None

    @property
    def needs_agreement(self) -> bool:
        return self.source.split == "own" or (self._size > 1 and self.batches is None)

    def summary(self, prefix: str) -> dict[str, Any]:
        """What must be the same on every task."""
        own = self.source.split == "own"
        return {
            f"{prefix}steps": self._wanted_steps if own else self.steps,
            f"{prefix}batch size": self.source.global_batch_size,
            f"{prefix}number of rows": self.source.rows,
            f"{prefix}data": [
                f"{spec.dtype.name}{tuple(spec.shape[1:])}"
                for spec in tf.nest.flatten(self.source.element_spec)
                if getattr(spec, "dtype", None) is not None and spec.shape.rank
            ],
            **{f"{prefix}{name}": value for name, value in self.source.fingerprint.items()},
        }

    def peek(self, epoch: int) -> Any:
        """Returns the first element of the pass that begins next, which still gives it.

        To begin a pass just for a look would not do: a generator is read once, and a dataset that shuffles draws an
        order for each pass.
        """
        if self._peeked is None:
            if self.source.split == "indexed":
                return next(self.source.start(epoch))
            self._begin_pass(epoch)
            self._peeked = next(self._iterator)
        return self._peeked

    def next(self, iterator: Any) -> Any:
        """Returns the next element of a pass, or None at its end."""
        element = self.take_peeked()
        return next(iterator, None) if element is None else element

    def take_peeked(self) -> Any:
        """Returns the element that `peek` took out of the pass, once; None where there is none."""
        element, self._peeked = self._peeked, None
        return element

    def reset(self) -> None:
        """Begins anew: what follows reads the data from its beginning, also where epochs are cut out of it."""
        self._finish()
        self._seen, self._peeked = 0, None
        self.source.reset()

    def epoch(self, epoch: int, steps_per_execution: int) -> Iterator[tuple[int, int, Any]]:
        """Yields (first step, steps, iterator) of each execution of an epoch.

        Without `steps`, each epoch is one pass over the data. With it, an epoch takes that many batches and the next
        goes on where it stopped, as Keras does; a finite dataset starts anew when it has been read once.
        """
        if self._peeked is None:
            self._begin_pass(epoch)
        step = 0
        while self.steps is None or step < self.steps:
            count = steps_per_execution if self.steps is None else min(steps_per_execution, self.steps - step)
            if self.batches and self._wanted_steps:
                count = min(count, self.batches - self._seen)
                if count <= 0:
                    self._warn_out_of_data()
                    self._restart(epoch)
                    return
            self._seen += count
            yield step, count, self._iterator
            step += count
        if self._wanted_steps is None or (self.batches and self._seen >= self.batches):
            self._finish()
        if self._wanted_steps is None and self.batches:
            self.source.renew()

    def _begin_pass(self, epoch: int) -> None:
        if self._wanted_steps is None or self._iterator is None:
            self._restart(epoch)

    def ran_out(self, step: int) -> None:
        """Notes that the data ended before step `step` of an epoch."""
        if self.steps is None:
            self.steps = self.batches = step or None
        else:
            self._warn_out_of_data()
        self._finish()

    def _warn_out_of_data(self) -> None:
        warnings.warn(
            "Your input ran out of data; interrupting training. Make sure that your dataset can generate at least "
            "`steps_per_epoch * epochs` batches. You may need to use `.repeat()` when building your dataset.",
            stacklevel=3,
        )

    def _restart(self, epoch: int) -> None:
        self._finish()
        # The order of a pass is a pure function of the agreed seed and this number.
        number = epoch if self._wanted_steps is None else self._passes
        self._passes += 1
        self._seen = 0
        self._iterator = self.source.start(number)

    def _finish(self) -> None:
        if self._iterator is not None:
            self._iterator = None
            self.source.finish()


def seed_of_fit(model: Any, agreed: int) -> tuple[int, ...]:
    """Returns what the order of shuffled rows follows from in the `fit` that begins; nothing where `model` is None.

    Another order in each fit of a model, the same on every task and in every run of the script.

    Args:
        model: The model that is trained; it counts its fits.
        agreed: The seed of all tasks, for a script that set none.
    """
    if model is None:
        return ()
    fits = model.__dict__.get("_tfdist_fits", 0)
    object.__setattr__(model, "_tfdist_fits", fits + 1)
    script_seed = internals.RANDOM_SEED.find()()
    return agreed if script_seed is None else script_seed, fits
