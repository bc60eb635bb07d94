"""Private names of TensorFlow's parameter-server strategy and its coordinator: the only place that uses them.

Read in TensorFlow 2.21.0; the oldest release this is tested with is 2.19.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.framework import ops

READ_IN = "2.21.0"


def num_workers(strategy: Any) -> int:
    return int(strategy._num_workers)


def num_ps(strategy: Any) -> int:
    return int(strategy._num_ps)


def is_worker_failure(error: BaseException) -> bool:
    """Whether an error says that a worker is gone, whose closure the coordinator then runs again."""
    return bool(cluster_coordinator._is_worker_failure(error)) and not is_ps_failure(error)


def is_ps_failure(error: BaseException) -> bool:
    """Whether an error says that a parameter server is gone."""
    return bool(cluster_coordinator._is_ps_failure(error))


def failed_ps(error: BaseException) -> list[int]:
    """Returns the indices of the parameter servers that an error names."""
    return sorted({int(number) for number in re.findall(r"/job:ps/replica:0/task:([0-9]+)", str(error))})


def per_worker_iterators(
    coordinator: Any, make: Callable[[int, int, tf.Tensor], tf.data.Dataset], skip: Callable[[int], int]
) -> tuple[Any, Any, Any]:
    """Returns (iterators, indices of the workers), as arguments of closures, and the function that makes the first.

    TensorFlow's own `create_per_worker_dataset` calls its function once, with the context of worker 0 of 1, for all
    workers (parameter_server_strategy_v2.py, `_distribute_datasets_from_function`). It makes what `create_resource` was
    given anew when a worker is back, in the worker's thread.

    Args:
        coordinator: TensorFlow's.
        make: (the worker's index, number of workers, elements to leave out) -> a dataset.
        skip: The worker's index -> how many elements its iterator leaves out if it is made now.
    """
    workers = coordinator._cluster.workers
    iterators, indices, functions = [], [], []
    for worker in workers:
        made = tf.function(functools.partial(make, worker.worker_index, len(workers)), autograph=False)
        concrete = made.get_concrete_function(tf.TensorSpec([], tf.int64))

        def start(concrete: Any = concrete, index: int = worker.worker_index) -> Any:
            return iter(concrete(tf.constant(skip(index), tf.int64)))

        iterator = worker.create_resource(start)
        iterator._type_spec = iterator_ops.IteratorSpec(concrete.structured_outputs.element_spec)
        index = worker.create_resource(lambda i=worker.worker_index: tf.constant(i))
        index._type_spec = tf.TensorSpec([], tf.int32)
        iterators.append(iterator)
        indices.append(index)
        functions.append(concrete)
    values = coordinator_values.PerWorkerValues
    return values(tuple(iterators)), values(tuple(indices)), functions[0]


def spec_of(per_worker: Any) -> Any:
    """Returns what a function is traced for that gets the value of the worker which runs it."""
    return per_worker._values[0]._type_spec


def runs_python(concrete: Any) -> bool:
    """Whether a traced function, or one that it holds, calls Python, which runs in the process that traced it."""
    graph = concrete.graph.as_graph_def()
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return any(node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc") for nodes in bodies for node in nodes)


def place(strategy: Any, choose: Callable[[Sequence[int], int], int]) -> None:
    """Lets `choose(shape, bytes of an item)` say on which parameter server each further variable is made.

    TensorFlow takes turns, whatever the variables' sizes (parameter_server_strategy_v2.py,
    `_create_variable_round_robin`); an optimizer's slots go where their variable is.
    """
    extended = strategy.extended

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        shape, dtype = _shape_and_dtype(kwargs)
        index = choose(shape, dtype.size)
        with ops.colocate_with(None, ignore_existing=True), tf.device(f"/job:ps/task:{index}/device:CPU:0"):
            variable = next_creator(**kwargs)
        extended._variable_count += 1
        return variable

    extended._create_variable_round_robin = create


# On each server. A lock has a thread there; variables share one only where there are more of them.
LOCKS = 1024


def let_updates_exclude_each_other(strategy: Any) -> None:
    """Lets one worker at a time update a variable and its slots, which are all on one parameter server.

    TensorFlow runs an optimizer's update on the variable's server, for several workers at once
    (parameter_server_strategy.py, `_update`); Keras' optimizers assign slot after slot there, and read them again.
    Adam divides one slot by the root of another: the first as another worker has just left it and the second as it was
    before make a step that is far too long.

    tf.CriticalSection would do it, and doubles the time of a small step: its locks wait for each other, and for
    messages from the worker.
    """
    extended = strategy.extended
    update = extended._update
    numbers = itertools.count()

    @functools.cache
    def number_of(variable: str) -> int:
        return next(numbers) % LOCKS

    @functools.cache
    def mutex(device: str, number: int) -> tf.Tensor:
        with tf.init_scope(), ops.colocate_with(None, ignore_existing=True), tf.device(device):
            return tf.raw_ops.MutexV2(shared_name=f"tfdist_updates_{number}")

    def update_alone(variable: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        # From Python, the chief's own assignments: no worker computes then.
        if tf.executing_eagerly():
            return update(variable, fn, args, kwargs, group)
        mine = mutex(variable.device, number_of(variable._unique_id))

        def locked(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tf.nest.map_structure(_here, (args, kwargs))
            tensors = [
                value for value in tf.nest.flatten((args, kwargs), expand_composites=True) if tf.is_tensor(value)
            ]
            # What happens under the lock waits for nobody else: the gradients are here before.
            with tf.control_dependencies(tensors):
                lock = tf.raw_ops.MutexLock(mutex=mine)
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            with tf.control_dependencies([lock]):
                result = fn(*args, **kwargs)
            with tf.control_dependencies([lock, *graph.get_operations()[before:]]):
                release = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            # Or TensorFlow lets each operation that has an effect and no resource wait for the one before it
            # (auto_control_deps.py, `last_write_to_resource[None]`): one lock would wait for another, for ever.
            if graph.experimental_acd_manager is not None:
                graph.experimental_acd_manager.run_independently(release)
            return result

        return update(variable, locked, args, kwargs, group)

    extended._update = update_alone


def _here(value: Any) -> Any:
    """Brings a tensor to the device where operations are being made; anything else stays what it is."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(*map(tf.identity, (value.values, value.indices)), value.dense_shape)
    return tf.identity(value) if isinstance(value, tf.Tensor) else value


def _shape_and_dtype(kwargs: dict[str, Any]) -> tuple[Sequence[int], tf.DType]:
    """Of a variable that is about to be made; its initializer is only traced."""
    initial, dtype, shape = kwargs.get("initial_value"), kwargs.get("dtype"), kwargs.get("shape")
    if callable(initial):
        traced = tf.function(lambda: tf.convert_to_tensor(initial(), dtype=dtype), autograph=False)
        spec = traced.get_concrete_function().structured_outputs
    else:
        spec = initial if tf.is_tensor(initial) else tf.convert_to_tensor(initial, dtype=dtype)
    shape = spec.shape if shape is None else tf.TensorShape(shape)
    return [size or 0 for size in (shape.as_list() if shape.rank is not None else [])], spec.dtype
