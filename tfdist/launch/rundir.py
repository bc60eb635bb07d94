"""The run's private folder: the secret, the control socket, and what failed tasks wrote about themselves."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from typing import Any

from tfdist.errors import LaunchError

# sockaddr_un.sun_path holds 104 bytes on macOS, 108 on Linux, with a zero at the end.
LONGEST_SOCKET_PATH = 103


def make_run_dir(*, with_secret: bool = True) -> str:
    """Returns a new folder that only this user can enter.

    Args:
        with_secret: Whether the run's secret is in it, by which its tasks know each other.

    Raises:
        LaunchError: No folder for temporary files can be written.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(os.path.join(folder, "tfdist-12345678", "control.sock"))) > LONGEST_SOCKET_PATH:
        folder = "/tmp"
    try:
        path = tempfile.mkdtemp(prefix="tfdist-", dir=folder)
        if with_secret:
            number = os.open(os.path.join(path, "secret"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(number, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise LaunchError(f"the run's private folder can not be made in {folder}: {error}; set TMPDIR") from error
    return path


def remove_run_dir(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def read_error_file(run_dir: str, local_index: int) -> dict[str, Any]:
    """Returns what a task wrote of its own death; empty where it wrote nothing that can be read."""
    try:
        with open(_error_path(run_dir, local_index), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def forget_error_file(run_dir: str, local_index: int) -> None:
    """Removes what a task wrote of its death, before another takes its place."""
    with contextlib.suppress(OSError):
        os.unlink(_error_path(run_dir, local_index))


def _error_path(run_dir: str, local_index: int) -> str:
    return os.path.join(run_dir, f"error-{local_index}.json")
