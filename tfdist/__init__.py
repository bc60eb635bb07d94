"""tfdist: train the Keras 3 model you have on many workers, and get what one process gives.

Names load when first used, so `import tfdist` never imports TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist import first_use as _first_use

__version__ = "0.1.0.dev0"

# name -> the module it lives in
_HOME = {
    "Cluster": "tfdist.cluster",
    "TFConfig": "tfdist.cluster",
    "Task": "tfdist.cluster",
    "TfdistError": "tfdist.errors",
    "all_reduce": "tfdist.process",
    "barrier": "tfdist.process",
    "callbacks": "tfdist.callbacks",
    "check_same": "tfdist.trainer.agreement",
    "create_strategy": "tfdist.strategy",
    "data": "tfdist.data",
    "errors": "tfdist.errors",
    "is_chief": "tfdist.process",
    "load": "tfdist.saving",
    "load_weights": "tfdist.saving",
    "resolve": "tfdist.tf_config",
    "save": "tfdist.saving",
    "testing": "tfdist.testing",
    "whole_batch": "tfdist.trainer.whole_batch",
}
__all__ = sorted([*_HOME, "__version__"])

if TYPE_CHECKING:
    from tfdist import callbacks as callbacks
    from tfdist import data as data
    from tfdist import errors as errors
    from tfdist import testing as testing
    from tfdist.cluster import Cluster as Cluster
    from tfdist.cluster import Task as Task
    from tfdist.cluster import TFConfig as TFConfig
    from tfdist.errors import TfdistError as TfdistError
    from tfdist.process import all_reduce as all_reduce
    from tfdist.process import barrier as barrier
    from tfdist.process import is_chief as is_chief
    from tfdist.saving import load as load
    from tfdist.saving import load_weights as load_weights
    from tfdist.saving import save as save
    from tfdist.strategy import create_strategy as create_strategy
    from tfdist.tf_config import resolve as resolve
    from tfdist.trainer.agreement import check_same as check_same
    from tfdist.trainer.whole_batch import whole_batch as whole_batch

# Before TensorFlow is imported, so that a create_strategy() that comes too late can say what came before it.
_first_use.watch()


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if _HOME[name] == f"tfdist.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
