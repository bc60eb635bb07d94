"""Every error tfdist raises, one tree.

    TfdistError
    ├── ClusterError (ValueError)            a cluster, or a task in it, that can not be
    │   └── TFConfigError                    TF_CONFIG text that names no usable cluster
    ├── StrategyError (RuntimeError)         a strategy that can not be made here and now
    ├── UnsupportedError (ValueError)        a Keras feature we can not make right, with the way out
    ├── DataError (ValueError)               input that can not be split over the tasks
    ├── SaveError (OSError)                  a model that could not be written; the old file is untouched
    ├── LoadError (OSError)                  a model or checkpoint that could not be read, or not the same everywhere
    ├── LaunchError (ValueError)             a command line that can not be started
    ├── TravelError (TypeError)              a function, argument or result that can not be sent to a task of a test
    ├── TaskFailedError (RuntimeError)       a task of a test failed; the text holds what all tasks wrote
    │   └── TaskTimeoutError (TimeoutError)  the tasks of a test did not end in time
    ├── ParityError (AssertionError)         a function that gives other numbers on several tasks than in one process
    └── GroupError (RuntimeError)            the tasks can not go on together
        ├── MeetingError                     they did not find each other, or do not belong together
        ├── PeerLostError (ConnectionError)  a task died, left or fell silent
        ├── MismatchError                    tasks made different calls where all must make the same
        └── WaitError (TimeoutError)         a live task did not come in time

Each class also derives from the standard class that a caller would expect.
"""

from __future__ import annotations


class TfdistError(Exception):
    """The root: `except tfdist.TfdistError` catches whatever tfdist raises on purpose."""


class ClusterError(TfdistError, ValueError):
    """A cluster, or a task in it, that can not be."""


class TFConfigError(ClusterError):
    """TF_CONFIG text that names no usable cluster."""


class StrategyError(TfdistError, RuntimeError):
    """A strategy that can not be made here and now."""


class UnsupportedError(TfdistError, ValueError):
    """A Keras feature that can not be made right on several tasks; the message names the way out."""


class DataError(TfdistError, ValueError):
    """Input that can not be split over the tasks."""


class SaveError(TfdistError, OSError):
    """A model that could not be written; what was there before is untouched."""


class LoadError(TfdistError, OSError):
    """A model or checkpoint that could not be read, or that is not the same on every task."""


class LaunchError(TfdistError, ValueError):
    """A command line that can not be started."""


class TravelError(TfdistError, TypeError):
    """A function, argument or result that can not be sent to a task of a test's cluster, or back."""


class TaskFailedError(TfdistError, RuntimeError):
    """A task of a test's cluster failed; the text holds what all tasks wrote.

    Attributes:
        task: The name of the task that failed first, e.g. "worker 1", where it is known.
        code: The exit code of the run.
    """

    def __init__(self, message: str, *, task: str | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.task = task
        self.code = code


class TaskTimeoutError(TaskFailedError, TimeoutError):
    """The tasks of a test's cluster did not end in time; the text holds where each of them was."""


class ParityError(TfdistError, AssertionError):
    """A function gives other numbers on several tasks than in one process; the text is a table of the worst."""


class GroupError(TfdistError, RuntimeError):
    """The tasks of a job can not go on together."""


class MeetingError(GroupError):
    """The tasks did not find each other in time, or do not belong together.

    Attributes:
        timed_out: Whether time was all that was lacking.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class PeerLostError(GroupError, ConnectionError):
    """Another task died, left or fell silent.

    Attributes:
        task: The task that was lost, e.g. `Task("worker", 1)`.
    """

    def __init__(self, message: str, *, task: object = None) -> None:
        super().__init__(message)
        self.task = task


class MismatchError(GroupError):
    """Tasks made different calls where all must make the same."""


class WaitError(GroupError, TimeoutError):
    """A task that is alive did not come in time.

    Attributes:
        task: The task that did not come, e.g. `Task("worker", 1)`.
    """

    def __init__(self, message: str, *, task: object = None) -> None:
        super().__init__(message)
        self.task = task
