"""One thin override of Keras' `fit`, `evaluate` and `predict`: models of our strategies go to our loop.

Every other model runs Keras' own code. It works for Sequential, Functional and subclassed models alike and changes
neither saving nor cloning nor class names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import files, process, tf_config
from tfdist.errors import StrategyError, UnsupportedError
from tfdist.internals import keras as internals
from tfdist.internals.tensorflow import sum_states_with
from tfdist.trainer import hooks, loop
from tfdist.trainer.loop import Engine
from tfdist.trainer.synchronous import SynchronousEngine

logger = logging.getLogger(__name__)

_engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()
_evaluators: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()  # their `fit`
_local_models: weakref.WeakSet[Any] = weakref.WeakSet()  # that were warned of
_installed = False
_cluster_text: str | None = None  # TF_CONFIG when the strategy was made


def register(strategy: tf.distribute.Strategy, engine: Engine, *, fit: Callable[..., Any] | None = None) -> None:
    """Sends models made in the scope of `strategy` to `engine`, by the loop, or by a `fit` that trains nothing."""
    global _cluster_text
    _install()
    _engines[strategy] = engine
    if fit is not None:
        _evaluators[strategy] = fit
    _cluster_text = os.environ.get("TF_CONFIG")


def _engine_for(model: Any, method: str) -> Engine | None:
    strategy = internals.strategy_of(model)
    engine = None if strategy is None else _engines.get(strategy)
    if engine is None and method in ("fit", "train_on_batch"):
        shared = next((e for e in _engines.values() if isinstance(e, SynchronousEngine) and e.size > 1), None)
        if shared is not None or _is_evaluator():
            who = "the evaluator" if shared is None else f"each of the {shared.size} tasks"
            raise StrategyError(
                f"model.{method}: {model.name} was made outside the strategy's scope, so {who} would train its own "
                "copy. Make and compile it inside:\n"
                "    with strategy.scope():\n        model = ...\n        model.compile(...)"
            )
        if _is_coordinator() and model not in _local_models:
            _local_models.add(model)
            logger.warning(
                "model.%s: %s was made outside the strategy's scope, so this task trains it alone; made and compiled "
                "inside `with strategy.scope():`, the workers train it",
                method,
                model.name,
            )
    if strategy in _evaluators and method == "train_on_batch":
        raise UnsupportedError(
            "model.train_on_batch: the evaluator trains nothing, and evaluates what fit saves with "
            "tfdist.callbacks.Checkpoint; train with fit, or start without --evaluator"
        )
    if engine is not None and engine.size == 1 and method == "fit":
        _refuse_late_cluster()
    return engine


def _is_evaluator() -> bool:
    current = process.current()
    return current is not None and current.config is not None and current.config.is_evaluator


def _is_coordinator() -> bool:
    """Whether this is the chief of workers and parameter servers: no other task of theirs runs the script so far."""
    current = process.current()
    return current is not None and current.presence is not None


def _refuse_late_cluster() -> None:
    """Raises where TF_CONFIG was set after the strategy was made: N tasks would each train alone, unnoticed."""
    text = os.environ.get("TF_CONFIG")
    if text == _cluster_text:
        return
    config = tf_config.resolve()
    if config is not None and config.cluster.num_training_tasks > 1:
        raise StrategyError(
            f"TF_CONFIG was set after create_strategy(), which therefore made a strategy of one task, and names "
            f"{config.cluster.num_training_tasks} training tasks. Set it before; `python -m tfdist.run` does"
        )


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    hooks.install(lambda strategy: strategy in _engines)
    for method in ("fit", "evaluate", "predict"):
        internals.override(internals.trainer_method(method), _send_to_loop(method))
    for method in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        internals.override(internals.trainer_method(method), _send_to_loop(method, several_only=True))
    for method in ("save", "save_weights", "export"):
        internals.override(internals.model_method(method), _leave_to_chief(method))
    internals.override(internals.model_method("get_state_tree"), _read_own_part)
    internals.override(internals.model_method("get_metrics_result"), _read_all_rows)
    sum_states_with(lambda strategy: _several(_engines.get(strategy), lambda engine: engine.sum_of_states))


def _several(engine: Any, then: Callable[[SynchronousEngine], Any]) -> Any:
    return then(engine) if isinstance(engine, SynchronousEngine) and engine.size > 1 else None


def _read_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """A user's callback reads what the logs show, also of metrics whose states do not add up."""

    def dispatched(self: Any) -> Any:
        strategy = internals.strategy_of(self)
        engine = _several(None if strategy is None else _engines.get(strategy), lambda engine: engine)
        if engine is None or internals.in_stateless_scope() or not tf.executing_eagerly():
            return original(self)
        with engine.errors():
            return engine.metrics_result(self)

    return dispatched


def _read_own_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """The states of metrics in it are this task's: the chief alone saves them, in OrbaxCheckpoint."""

    def dispatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = internals.strategy_of(self)
        scope = _several(None if strategy is None else _engines.get(strategy), lambda e: e.with_own_states(self))
        with scope or contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return dispatched


def _leave_to_chief(method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatched(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            strategy = internals.strategy_of(self)
            engine = None if strategy is None else _engines.get(strategy)
            if isinstance(engine, SynchronousEngine) and not engine.is_chief:
                # All tasks writing one file leave a broken one.
                logger.info("model.%s(%r) is left to the chief", method, str(filepath))
                return None
            if isinstance(engine, SynchronousEngine) and _can_be_replaced(filepath, *args, **kwargs):
                # Keras empties the old file first: a kill while ModelCheckpoint writes would leave none.
                return files.write(os.fspath(filepath), lambda path: original(self, path, *args, **kwargs))
            return original(self, filepath, *args, **kwargs)

        return dispatched

    return make


def _can_be_replaced(
    filepath: Any,
    overwrite: bool = True,
    third: Any = None,  # zipped or max_shard_size
    *,
    zipped: bool | None = None,
    max_shard_size: float | None = None,
    **_: Any,
) -> bool:
    """Whether `save` or `save_weights` writes this as one file of this machine, and asks nobody before."""
    if not overwrite or zipped is False or not (max_shard_size is None and third in (None, True)):
        return False
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    is_file = path.endswith((".keras", ".h5")) and not files.is_remote(path)
    return is_file and not os.path.isdir(files.local(path)) and not files.is_unfinished(path)


def _send_to_loop(method: str, *, several_only: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    shortened = internals.TRACEBACK.find()
    in_loop = shortened(getattr(loop, method))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatched(self: Any, *args: Any, **kwargs: Any) -> Any:
            engine = _engine_for(self, method)
            if engine is None or (several_only and engine.size == 1):
                return original(self, *args, **kwargs)
            fit = _evaluators.get(internals.strategy_of(self)) if method == "fit" else None
            return (in_loop if fit is None else shortened(fit))(engine, self, *args, **kwargs)

        return dispatched

    return make
