"""A model, its loss, metrics and optimizer: all variables made in the scope, before anything is traced."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import keras as internals


def build(model: Any, element_spec: Any, strategy: Any) -> None:
    """Builds what is not built yet.

    Args:
        model: A compiled model.
        element_spec: The structure of a batch, as tf.data's specs.
        strategy: In whose scope the variables are made.
    """
    batch = symbolic(element_spec)
    optimizer = model.optimizer
    with strategy.scope():
        if optimizer is not None and not optimizer.built:
            for part in internals.optimizers_inside(optimizer):
                internals.set_optimizer_strategy(part, strategy)  # compiled outside the scope
        try:
            internals.symbolic_build(model, batch)
        except RuntimeError:
            # A model without call(), such as a GAN, has nothing to build from: its step knows its parts.
            if internals.has_stock_train_step(model):
                raise


def build_by_calling(model: Any, element_spec: Any, strategy: Any) -> None:
    """Builds a model that was never compiled, from the shapes of x."""
    x, _, _ = internals.UNPACK.find()(symbolic(element_spec))
    with strategy.scope():
        internals.OUTPUT_SPEC.find()(model, x, training=False)


def symbolic(specs: Any) -> Any:
    """tf.data's specs as KerasTensors, None where the data holds None."""

    def as_keras_tensor(spec: Any) -> Any:
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            return None
        return keras.KerasTensor((None, *spec.shape[1:]), spec.dtype.name)

    return keras.tree.map_structure(as_keras_tensor, specs)


def without_optionals(data: Any) -> Any:
    """tf.data stands an Optional where Keras expects None."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
