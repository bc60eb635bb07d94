"""Callbacks for training on several tasks: ordinary Keras callbacks, one a file.

    model.fit(x, y, epochs=20, callbacks=[tfdist.callbacks.Checkpoint("run/"), tfdist.callbacks.ChiefOnly(MyLogger())])

Keras' own callbacks work as they are: those that write files run on the chief alone; `docs/callbacks.md` lists them.
"""

from tfdist.callbacks.check_same import CheckSame as CheckSame
from tfdist.callbacks.checkpoint import Checkpoint as Checkpoint
from tfdist.callbacks.chief_only import ChiefOnly as ChiefOnly

__all__ = ["CheckSame", "Checkpoint", "ChiefOnly"]
