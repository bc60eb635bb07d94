"""Private names of TensorFlow: the only place that imports them.

Read in TensorFlow 2.21.0; the oldest release this is tested with is 2.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy, values
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

READ_IN = "2.21.0"


def is_initialized() -> bool:
    """Whether TensorFlow's runtime has started, after which no cluster can be joined."""
    return context.context()._context_handle is not None


@contextmanager
def outside_strategy() -> Iterator[None]:
    """Code inside sees no strategy, also when called in some `strategy.scope()`.

    Keras then behaves as in one process: no loss scaling by 1/N, no merge_call.
    """
    if not tf.distribute.has_strategy():
        yield
        return
    graph = ops.get_default_graph()
    creators = graph._variable_creator_stack  # the scope's own: variables made inside are plain ones
    distribute_lib._push_per_thread_mode(distribute_lib._DefaultReplicaThreadMode())
    graph._variable_creator_stack = []
    try:
        yield
    finally:
        graph._variable_creator_stack = creators
        distribute_lib._pop_per_thread_mode()


def local_component(variable: Any) -> Any:
    """Returns this task's own part of a variable (a plain variable is its own part).

    An on-read variable (a metric's) sums over all tasks when it is read as a whole: a hidden collective.
    """
    return variable.values[0] if isinstance(variable, values.DistributedValues) else variable


def own_dataset(x: Any) -> tf.data.Dataset | None:
    """Returns this task's part of what a strategy has split already; None for anything else."""
    if getattr(x, "_tfdist_is_own", False):  # SynchronousExtended, below
        return x
    if isinstance(x, tf.distribute.DistributedDataset) or type(x).__name__ == "DistributedDatasetsFromFunction":
        parts = getattr(x, "_cloned_datasets", None) or getattr(x, "_datasets", None)
        return parts[0] if parts else None
    return None


def are_unique(indices: tf.Tensor) -> bool:
    """Whether the rows of a sparse gradient come from tf.unique, as those of `tf.nn.embedding_lookup_sparse` do.

    Known while a graph is traced; eagerly it is taken for granted that they are as the layer left them.
    """
    if tf.executing_eagerly():
        return False
    operation = indices.op
    while operation.type in ("Reshape", "Cast", "Identity", "StridedSlice", "ConcatV2") and len(operation.inputs) > 0:
        operation = operation.inputs[0].op
    return operation.type in ("Unique", "UniqueV2")


def float16_terms(gradient: Any) -> str:
    """Returns which terms of a wider gradient are float16 sums over rows: "all", "one" or "none".

    Layers of mixed_float16 compute it in float16 and cast it; "one" is where a regularizer's gradient is added to it.
    Known while a graph is traced; eagerly the answer is "none".
    """
    if tf.executing_eagerly() or not isinstance(gradient, tf.Tensor) or gradient.dtype == tf.float16:
        return "none"
    operation = _behind_reshapes(gradient.op)
    if _is_cast_from_float16(operation):
        return "all"
    if operation.type not in ("AddN", "AddV2"):
        return "none"
    terms = [_is_cast_from_float16(_behind_reshapes(term.op)) for term in operation.inputs]
    return "one" if sum(terms) == 1 else "none"


def _behind_reshapes(operation: tf.Operation) -> tf.Operation:
    while operation.type in ("Reshape", "Identity"):
        operation = operation.inputs[0].op
    return operation


def _is_cast_from_float16(operation: tf.Operation) -> bool:
    return operation.type == "Cast" and operation.inputs[0].dtype == tf.float16


def let_mirrored_variables_be_numbers() -> None:
    """Lets `float(model.optimizer.learning_rate)` work under MultiWorkerMirroredStrategy as it does without it.

    Keras' own `float(variable)` ends in `float(tf_variable)`, which TensorFlow's mirrored variables alone lack.
    """
    for name, number in (("__float__", float), ("__int__", int)):
        if not hasattr(values.MirroredVariable, name):
            setattr(values.MirroredVariable, name, lambda self, number=number: number(self.values[0].numpy()))


def sum_states_with(find: Callable[[Any], Callable[[Any], Any] | None]) -> None:
    """Lets metric states that are read outside a step be added up by us, who notice where other tasks do not read them.

    TensorFlow's own sum would wait for those tasks for ever.

    Args:
        find: A strategy -> a function from this task's NumPy array to the sum over tasks, or None for TensorFlow's way.
    """
    original = values.SyncOnReadVariable._get_cross_replica

    def read(self: Any) -> Any:
        is_sum = tf.executing_eagerly() and self.aggregation == tf.VariableAggregation.SUM
        add_up = find(self._distribute_strategy) if is_sum else None
        return original(self) if add_up is None else tf.convert_to_tensor(add_up(self.values[0].numpy()))

    values.SyncOnReadVariable._get_cross_replica = read


# What TensorFlow's collectives broadcast on CPUs (CollectiveBcastSendV2).
_BROADCAST_BY_TENSORFLOW = (tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def broadcast_other_initial_values(strategy: tf.distribute.Strategy, from_chief: Callable[[Any], tf.Tensor]) -> None:
    """Lets MultiWorkerMirroredStrategy make variables of dtypes that its own broadcast lacks: bfloat16, int8, float8.

    Args:
        strategy: The strategy in whose scope they are made.
        from_chief: A tensor in every task -> the chief's in every task.
    """
    extended = strategy.extended
    original = extended._get_variable_creator_initial_value

    def make(replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Callable[[], tf.Tensor]:
        broadcast = original(replica_id=replica_id, device=device, primary_var=primary_var, **kwargs)

        def initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            dtype = kwargs.get("dtype")
            if dtype is None:
                value = value() if callable(value) else value
                dtype = tf.convert_to_tensor(value).dtype
            if tf.as_dtype(dtype) in _BROADCAST_BY_TENSORFLOW or not tf.executing_eagerly():
                return broadcast()
            return from_chief(tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype))

        return initial_value

    extended._get_variable_creator_initial_value = make


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Returns the argument of the pipeline's last `batch` step; None where later steps may have changed it."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset", "_RepeatDataset", "CacheDataset"):
        dataset = dataset._input_dataset
    size = getattr(dataset, "_batch_size", None)
    return None if size is None else int(tf.get_static_value(size))


def configure_coordination_service(
    jobs: dict[str, int], *, heartbeat_timeout_s: float, register_timeout_s: float
) -> None:
    """Sets the time-outs of the service that MultiWorkerMirroredStrategy starts; call before the strategy.

    A strategy that finds the service configured keeps it (collective_all_reduce_strategy.py, _initialize_multi_worker).
    """
    leader = "chief" if "chief" in jobs else "worker"
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        heartbeat_timeout_in_ms=int(heartbeat_timeout_s * 1000),
        cluster_register_timeout_in_ms=int(register_timeout_s * 1000),
        coordinated_jobs=[
            context.coordination_config_pb2.CoordinatedJob(name=name, num_tasks=count) for name, count in jobs.items()
        ],
    )


Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


class SynchronousExtended(one_device_strategy.OneDeviceExtended):
    """One device in this task; what crosses tasks goes through two functions.

    Args:
        strategy: The strategy this belongs to.
        device: Where variables live, e.g. "/CPU:0".
        size: Number of tasks.
        index: This task's position among them.
        all_sum: Tensors in every task -> their sums in every task.
        from_chief: A tensor in every task -> the chief's in every task.
    """

    def __init__(self, strategy: Any, device: str, size: int, index: int, all_sum: Sum, from_chief: Callable) -> None:
        super().__init__(strategy, device)
        self._size, self._index, self._all_sum, self._from_chief = size, index, all_sum, from_chief

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._size

    def _use_merge_call(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0  # one component in this task, whatever its number among all

    def _in_multi_worker_mode(self) -> bool:
        return self._size > 1

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), distribute_lib.ReplicaContext(self._container_strategy(), self._index):
            return fn(*args, **kwargs)

    def _reduce(self, op: Any, value: Any) -> Any:
        local = tf.nest.map_structure(lambda v: tf.convert_to_tensor(local_component(v)), value)
        sums = self._all_sum(tf.nest.flatten(local))
        if str(op).upper().endswith("MEAN"):
            sums = [s / tf.cast(self._size, s.dtype) for s in sums]
        return tf.nest.pack_sequence_as(local, sums)

    def _replica_ctx_all_reduce(self, op: Any, value: Any, options: Any = None) -> Any:
        return self._reduce(op, value)

    def _reduce_to(self, op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return self._reduce(op, value)

    def read_var(self, replica_local_var: Any) -> tf.Tensor:
        return self._reduce("SUM", [replica_local_var])[0]

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        initial, dtype = kwargs["initial_value"], kwargs.get("dtype")

        def chiefs(*args: Any, **more: Any) -> tf.Tensor:
            value = initial(*args, **more) if callable(initial) else initial
            return self._from_chief(tf.convert_to_tensor(value, dtype=dtype))

        if self._size > 1:
            kwargs["initial_value"] = chiefs
        variable = super()._create_variable(next_creator, **kwargs)
        if self._size > 1 and kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return values.SyncOnReadVariable(self._container_strategy(), [variable], kwargs.get("aggregation"))
        return variable

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._size == 1:
            return super()._experimental_distribute_dataset(dataset, options)
        return _own(dataset.map(self._share))

    def _share(self, *batch: Any) -> Any:
        """This task's contiguous rows of a global batch."""
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
        low, high = rows * self._index // self._size, rows * (self._index + 1) // self._size
        part = tf.nest.map_structure(lambda t: t[low:high], batch)
        return part if len(batch) > 1 else part[0]

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        if self._size == 1:
            return super()._distribute_datasets_from_function(dataset_fn, options)
        return _own(dataset_fn(tf.distribute.InputContext(self._size, self._index, self._size)))


def _own(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a dataset as split already, so that `fit` does not split it again."""
    dataset._tfdist_is_own = True
    return dataset
