"""Which lines of a task's stderr tell its user nothing: what TensorFlow 2.19 to 2.21 says at every start.

TensorFlow's own switches (TF_CPP_MIN_LOG_LEVEL) leave some of these lines and remove useful ones, and nothing brings
back what was never written. So tasks write everything, log files keep everything, and the console leaves these out.
"""

from __future__ import annotations

import re

# absl: level and date, time (or 00:00 and seconds, before absl knows the time zone), thread, C++ source file.
_NATIVE_LINE = re.compile(rb"^(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ [\w./-]+\.(?:cc|h|cu|cpp):\d+\] (?P<text>.*)")
_OLD_NATIVE_LINE = re.compile(
    rb"^\d{4}-\d\d-\d\d [\d:.]+: (?P<level>[IWEF]) [\w./-]+\.(?:cc|h|cu|cpp):\d+\] (?P<text>.*)"
)
_PLAIN_NOISE = re.compile(
    rb"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|^To enable the following instructions: "
    rb"|^\t \[\[\{\{node PyFunc\}\}\]\]$"
    rb"|^/job:\w+/replica:\d+/task:\d+$"  # goes with "Example stragglers:"
)
# Warnings and errors that come at every start on a machine without a GPU, or say nothing one can act on.
_EMPTY_WARNINGS = re.compile(
    rb"failed call to cuInit"
    rb"|SIGTERM caught at "  # by TensorFlow, which then goes on
    rb"|Could not find cuda drivers"
    rb"|Unable to register cu(?:DNN|FFT|BLAS) factory"
    rb"|computation placer already registered"
    rb"|Input of GeneratorDatasetOp::Dataset will not be optimized"
    rb"|Cannot dlopen some GPU libraries"
    rb"|could not open file to read NUMA node"
    rb"|pyfunc_\d+ returns 0 values"  # how a step of ours ends where the group has failed
    rb"|Local rendezvous is aborting with status: ABORTED: Cleanup"  # at the end of a function on a worker
    rb"|Device filters can only be specified when initializing the cluster"
    rb"|Ignoring an error encountered when deleting remote tensors handles"  # of a worker that has come back
    rb"|The calling iterator did not fully read the dataset being cached"
)
# What TensorFlow's coordinator says of a lost worker, for every function and step: the chief names the worker once.
_LOST_WORKER = re.compile(
    rb"Failed to (?:register|remove) function remotely due to "
    rb"|^ERROR:tensorflow:Worker /job:worker/replica:0/task:\d+ failed with (?:Unavailable|Aborted|Cancelled)Error"
)
_LOST_WORKER_LINE = re.compile(
    rb"^Additional GRPC error information from remote target "
    rb"|^:UNKNOWN:Error received from peer "
    rb"|^This could happen if the remote target has been disconnected from the client\."
)

# A message that ends so goes on, in lines of its own, with a protocol buffer as text.
_OPENING = re.compile(rb"(?:Options|Config|Def)\b.*:|debugonly\s*$")
_PROTOCOL_BUFFER_LINE = re.compile(rb"^\s*(?:[\w.\[\]/]+ \{|\}|[\w.]+: (?:\"[^\"]*\"|[\w.+-]+))?\s*$")


class NoiseFilter:
    """Says of each line of one task's stderr, in order, whether the console may leave it out.

    Args:
        keep_info: Whether to keep TensorFlow's lines of level INFO: the user has asked for a level.
    """

    def __init__(self, *, keep_info: bool = False) -> None:
        self._keep_info = keep_info
        self._in_protocol_buffer = False
        self._is_of_lost_worker = False

    def __call__(self, line: bytes) -> bool:
        """Returns whether `line`, without its end, is noise."""
        begins = _LOST_WORKER.search(line) is not None
        self._is_of_lost_worker = begins or (self._is_of_lost_worker and _LOST_WORKER_LINE.match(line) is not None)
        if self._is_of_lost_worker:
            return True
        native = _NATIVE_LINE.match(line) or _OLD_NATIVE_LINE.match(line)
        if native is None:
            self._in_protocol_buffer = self._in_protocol_buffer and _PROTOCOL_BUFFER_LINE.match(line) is not None
            return self._in_protocol_buffer or _PLAIN_NOISE.match(line) is not None
        if native["level"] == b"I":
            is_noise = not self._keep_info
        else:
            is_noise = native["level"] in (b"W", b"E") and _EMPTY_WARNINGS.search(native["text"]) is not None
        self._in_protocol_buffer = is_noise and _OPENING.search(native["text"]) is not None
        return is_noise
