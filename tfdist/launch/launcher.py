"""What a command line asks for -> its tasks run on this host -> the exit code: everything around the supervisor.

Synopsis:

    code = launch(Options(command=("train.py",), workers=2), os.environ)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.errors import LaunchError
from tfdist.launch import machine
from tfdist.launch.plan import Options, make_plan
from tfdist.launch.ports import HeldPorts
from tfdist.launch.rundir import make_run_dir, remove_run_dir
from tfdist.launch.supervise import Supervisor


def launch(options: Options, environ: Mapping[str, str]) -> int:
    """Runs what `options` ask for on this host, and returns the exit code.

    Must be called in the main thread: it handles signals while it runs.

    Args:
        options: Which script, how many tasks, and how.
        environ: The environment the tasks inherit, with changes.

    Raises:
        LaunchError: Nothing was started, for the reason given.
    """
    _open_standard_streams()
    _make_log_dir(options.log_dir)
    share = options.share
    # Another host's launcher could not know a secret of ours.
    run_dir = make_run_dir(with_secret=share is None or share.is_whole)
    try:
        with HeldPorts(options.port_count) if share is None else HeldPorts.at(share.ports) as held:
            plan = make_plan(
                options,
                ports=held.ports,
                run_dir=run_dir,
                environ=environ,
                processors=machine.processors(),
                gpus=machine.gpus(environ),
            )
            return Supervisor(plan, run_dir, environ).run()
    finally:
        remove_run_dir(run_dir)


def _open_standard_streams() -> None:
    """Gives a launcher with closed standard streams empty ones: else a socket of ours would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _make_log_dir(log_dir: str | None) -> None:
    if log_dir is not None:
        try:
            os.makedirs(log_dir, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {log_dir}: {error}") from error
