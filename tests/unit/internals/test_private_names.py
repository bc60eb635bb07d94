"""What we use of Keras' and TensorFlow's insides is there, and behaves as we count on. A release that drops a name
fails the test with that name."""

from __future__ import annotations

from importlib import import_module

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import first_use
from tfdist.errors import StrategyError
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow as tf_internals

TF_NAMES = [
    (
        "distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._get_variable_creator_initial_value",
    ),
    ("distribute.distribute_lib", "_DefaultReplicaThreadMode"),
    ("distribute.distribute_lib", "_pop_per_thread_mode"),
    ("distribute.distribute_lib", "_push_per_thread_mode"),
    ("distribute.distribute_lib", "ReplicaContext"),
    *[
        ("distribute.one_device_strategy", f"OneDeviceExtended.{name}")
        for name in (
            "_call_for_each_replica",
            "_container_strategy",
            "_create_variable",
            "_distribute_datasets_from_function",
            "_experimental_distribute_dataset",
            "_get_local_replica_id",
            "_in_multi_worker_mode",
            "_num_replicas_in_sync",
            "_reduce_to",
            "_replica_ctx_all_reduce",
            "_use_merge_call",
            "read_var",
        )
    ],
    ("distribute.values", "DistributedValues"),
    ("distribute.values", "MirroredVariable"),
    ("distribute.values", "SyncOnReadVariable._get_cross_replica"),
    ("eager.context", "Context.configure_coordination_service"),
    ("eager.context", "Context.ensure_initialized"),
    ("eager.context", "context"),
    ("eager.context", "coordination_config_pb2.CoordinatedJob"),
    ("framework.ops", "get_default_graph"),
]


@pytest.fixture(scope="module")
def strategy():
    return tfdist.create_strategy(environ={})


@pytest.fixture
def model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    return model


# -- the names


@pytest.mark.parametrize("name", keras_internals.ALL, ids=str)
def test_keras_has_the_name(name):
    assert name.find() is not None


@pytest.mark.parametrize(("module", "path"), TF_NAMES)
def test_tensorflow_has_the_name(module, path):
    found = import_module(f"tensorflow.python.{module}")
    for part in path.split("."):
        found = getattr(found, part)


def test_the_module_that_is_watched_for_the_first_use_is_tensorflows_own():
    assert hasattr(import_module(first_use.CONTEXT_MODULE).context(), "_context_handle")


def test_nothing_is_missing_in_this_keras():
    assert keras_internals.missing() == []


def test_what_a_keras_release_has_dropped_is_named(monkeypatch):
    monkeypatch.delattr(import_module(keras_internals.GET_ADAPTER.module), keras_internals.GET_ADAPTER.path)
    assert keras_internals.missing() == [keras_internals.GET_ADAPTER]
    with pytest.raises(StrategyError, match=r"Keras .* lacks keras\.src\.trainers\.data_adapters\.get_data_adapter"):
        tfdist.create_strategy(environ={})


# -- attributes of objects of Keras


def test_a_model_tells_its_strategy_and_its_parts(model, strategy):
    assert keras_internals.strategy_of(model) is strategy
    assert keras_internals.strategy_of(keras.Sequential()) is None
    assert keras_internals.optimizer_strategy(model.optimizer) is strategy
    assert [v.path for v in keras_internals.trainable_variables(model.optimizer)] == [v.path for v in model.weights]
    assert [
        layer for layer in keras_internals.layers_of(model) if isinstance(layer, keras.layers.Dense)
    ] == model.layers
    assert keras_internals.initial_epoch(model) is None


def test_the_compiled_loss_is_another_object_after_compile(model):
    before = keras_internals.compiled_loss(model)
    assert before is keras_internals.compiled_loss(model)
    model.compile("sgd", "mse")
    assert keras_internals.compiled_loss(model) is not before


def test_losses_and_metrics_tell_what_they_call():
    function, arguments = keras_internals.function_of_loss(keras.losses.Dice(axis=(1, 2)))
    assert (function, arguments) == (keras.losses.dice, {"axis": (1, 2)})
    function, arguments = keras_internals.function_of_metric(keras.metrics.CosineSimilarity(axis=0))
    assert (function.__name__, arguments) == ("cosine_similarity", {"axis": 0})


def test_a_compiled_model_tells_its_losses(model):
    assert [type(loss).__name__ for loss in keras_internals.compiled_losses(model)] == ["LossFunctionWrapper"]
    assert keras_internals.compiled_losses(keras.Sequential()) == []


def test_a_metric_tells_those_it_holds():
    class Holding(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()

    holding = Holding()
    assert keras_internals.metrics_of(holding) == [holding.mean]
    assert holding.variables == holding.mean.variables


def test_a_mask_travels_with_its_tensor():
    ids = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    assert keras_internals.mask_of(ids).numpy().tolist() == [[True, False]]
    other = tf.constant([[1.0, 2.0]])
    keras_internals.set_mask(other, keras_internals.mask_of(ids))
    loss = keras.losses.MeanSquaredError()(tf.constant([[1.0], [0.0]]), tf.reshape(other, (2, 1)))
    assert float(loss) == 2.0  # reshaped: no mask any more
    assert keras_internals.mask_of(other) is not None


def test_the_layer_with_the_vocabulary_is_found():
    text = keras.layers.TextVectorization(vocabulary=["one", "two"])
    assert keras_internals.lookup_of(text).get_vocabulary() == text.get_vocabulary()
    assert keras_internals.lookup_of(keras.layers.Dense(1)).units == 1


def test_the_native_variable_is_tensorflows_and_can_be_assigned():
    variable = keras.Variable([1.0, 2.0])
    assert isinstance(keras_internals.native(variable), tf.Variable)
    with keras.StatelessScope():
        keras_internals.assign_native(variable, tf.constant([3.0, 4.0]))
        assert keras_internals.native(variable).numpy().tolist() == [3.0, 4.0]


def test_outside_a_stateless_scope_variables_are_real():
    with keras.StatelessScope() as scope:
        with keras_internals.outside_stateless_scope():
            assert keras_internals.native(keras.Variable(5.0)).numpy() == 5.0
        assert keras.src.backend.common.global_state.get_global_attribute("stateless_scope") is scope


# -- TensorFlow's objects


@pytest.fixture(params=["ours", "mirrored"])
def any_strategy(request, strategy):
    return strategy if request.param == "ours" else tf.distribute.MirroredStrategy(["/CPU:0"])


def test_no_strategy_is_seen_outside_it(any_strategy):
    with any_strategy.scope():
        with tf_internals.outside_strategy():
            assert not tf.distribute.has_strategy()
            assert type(tf.Variable(1.0)).__name__ == "ResourceVariable"
        assert tf.distribute.get_strategy() is any_strategy


def test_the_strategy_is_back_after_an_error(any_strategy):
    with any_strategy.scope():
        with pytest.raises(KeyError), tf_internals.outside_strategy():
            raise KeyError("x")
        assert tf.distribute.get_strategy() is any_strategy
    assert not tf.distribute.has_strategy()


def test_the_local_component_of_a_distributed_variable_is_a_plain_one():
    with tf.distribute.MirroredStrategy(["/CPU:0"]).scope():
        mirrored = tf.Variable(1.0)
        on_read = tf.Variable(
            2.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    for variable in (mirrored, on_read):
        component = tf_internals.local_component(variable)
        assert component is not variable
        assert type(component).__name__ == "ResourceVariable"
    plain = tf.Variable(3.0)
    assert tf_internals.local_component(plain) is plain


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda d: d, None),
        (lambda d: d.batch(4), 4),
        (lambda d: d.batch(4, drop_remainder=True), 4),
        (lambda d: d.batch(tf.constant(4, tf.int64)), 4),
        (lambda d: d.padded_batch(4), 4),
        (lambda d: d.shuffle(8).batch(4).prefetch(2), 4),
        (lambda d: d.batch(4).cache().repeat().with_options(tf.data.Options()).prefetch(tf.data.AUTOTUNE), 4),
        (lambda d: d.batch(4).batch(2), 2),
        (lambda d: d.batch(4).map(lambda x: x[:2]), None),
        (lambda d: d.batch(4).unbatch(), None),
        (lambda d: d.batch(4).filter(lambda x: True), None),
    ],
)
def test_the_batch_size_of_a_dataset_is_that_of_its_last_batch_step(change, size):
    assert tf_internals.batch_size_of(change(tf.data.Dataset.range(10))) == size


def _gradient(make, dtype="mixed_float16"):
    """The answer about the gradient of a Dense kernel, while a graph is traced."""
    answers = []
    dense = keras.layers.Dense(2, use_bias=False, dtype=dtype)

    @tf.function
    def trace(x):
        with tf.GradientTape() as tape:
            loss = make(dense, x)
        gradient = tape.gradient(loss, dense.trainable_variables)[0]
        answers.append(tf_internals.float16_terms(gradient))

    trace(tf.ones((4, 3)))
    return answers[-1]


@pytest.mark.parametrize(
    ("dtype", "make", "terms"),
    [
        ("mixed_float16", lambda dense, x: _sum(dense(x)), "all"),
        ("mixed_float16", lambda dense, x: _sum(dense(x)) + 0.1 * tf.nn.l2_loss(dense.kernel.value), "one"),
        ("mixed_float16", lambda dense, x: _sum(dense(x)) + _sum(dense(2 * x)), "none"),  # each has a sum of its own
        ("mixed_bfloat16", lambda dense, x: _sum(dense(x)), "none"),
        ("float16", lambda dense, x: _sum(dense(x)), "none"),
        ("float32", lambda dense, x: _sum(dense(x)), "none"),
    ],
)
def test_float16_sums_behind_a_gradient_are_found(dtype, make, terms):
    assert _gradient(make, dtype) == terms


def _sum(outputs):
    return tf.reduce_sum(tf.cast(outputs, tf.float32))


def test_a_used_runtime_is_seen():
    tf.constant(1)
    assert tf_internals.is_initialized()


# -- other models in the same process


def test_a_plain_model_runs_keras_own_loop(strategy):
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    plain.evaluate(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    plain.predict(np.ones((4, 3)), verbose=0)
    # Keras makes these; our loop has its own.
    assert None not in (plain.train_function, plain.test_function, plain.predict_function)


def test_a_model_of_ours_does_not(model):
    assert model.train_function is None


HOOKED = {
    "reduce_values": (keras_internals.REDUCE_VALUES, lambda f: f(tf.constant([1.0, 2.0]))),
    "apply_mask": (
        keras_internals.APPLY_MASK,
        lambda f: f(None, tf.constant([True, False, True]), "float32", "sum_over_batch_size"),
    ),
    "Mean.update_state": (keras_internals.MEAN_UPDATE, lambda f: _after_update(f)),
    "SeedGenerator.next": (keras_internals.SEED_NEXT, lambda f: f(keras.random.SeedGenerator(7))),
    "_clip_gradients": (
        keras_internals.CLIP,
        lambda f: f(keras.optimizers.SGD(clipnorm=1.0), [tf.constant([3.0, 4.0])])[0],
    ),
    "check_finite": (
        keras_internals.CHECK_FINITE,
        lambda f: f(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), [tf.constant([1.0, np.inf])]),
    ),
    "scale_loss": (
        keras_internals.SCALE_LOSS[0],
        lambda f: f(keras.optimizers.SGD(loss_scale_factor=8.0), tf.constant(3.0)),
    ),
    "BaseOptimizer.apply": (keras_internals.OPTIMIZER_APPLY[0], lambda f: _after_apply(f)),
}


def _after_update(update):
    mean = keras.metrics.Mean()
    update(mean, tf.constant(3.0))
    update(mean, tf.constant([6.0, 9.0]))
    return mean.result()


def _after_apply(apply):
    variable = keras.Variable([1.0, 2.0])
    apply(keras.optimizers.SGD(0.5), [tf.constant([1.0, 1.0])], [variable])
    return variable.value


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_without_a_step_of_ours_does_what_keras_does(strategy, name):
    private, call = HOOKED[name]
    hook = private.find()
    assert hasattr(hook, "__wrapped__"), "not hooked"
    np.testing.assert_array_equal(call(hook), call(hook.__wrapped__))


def test_a_seed_begins_the_numbers_that_nobody_seeded_anew():
    drawn = []
    for _ in range(2):
        keras_internals.set_random_seed(3)
        drawn.append((keras.random.normal((2,)).numpy().tolist(), np.random.random()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][0])) == 2
