"""What preprocessing layers of a model were adapted to: vocabularies, bins, means.

Little of it lies in the model's variables, so giving every task the chief's variables does not heal a layer that was
adapted to other data on some task; the tasks compare it when `fit` begins.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import keras
import numpy as np

from tfdist.internals import keras as internals


def summary(model: Any) -> dict[str, Any]:
    """Returns, by a name for messages, something that differs where tasks have adapted a layer differently."""
    found: dict[str, Any] = {}
    for layer in internals.layers_of(model):
        lookup = internals.lookup_of(layer)
        if callable(getattr(lookup, "get_vocabulary", None)):
            words = [str(word) for word in lookup.get_vocabulary()]
            found[f"vocabulary of {layer.name} (size, checksum)"] = [len(words), zlib.crc32(json.dumps(words).encode())]
            weights = getattr(lookup, "idf_weights", None)
            if weights is not None:
                found[f"document frequencies of {layer.name} (checksum)"] = _checksum_of(weights)
        elif isinstance(layer, keras.layers.Discretization):
            found[f"bins of {layer.name}"] = [float(edge) for edge in np.ravel(layer.bin_boundaries or ())]
        elif isinstance(layer, keras.layers.Normalization) and layer.mean is not None:
            found[f"mean and variance of {layer.name} (checksums)"] = [
                _checksum_of(layer.mean),
                _checksum_of(layer.variance),
            ]
    return found


def _checksum_of(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(value)).tobytes())
