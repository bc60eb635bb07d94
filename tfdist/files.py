"""A function that writes a file or a folder -> what it wrote, whole under its path or not there at all.

    files.write("run/model.keras", lambda path: model.save(path))

What stood at the path stays whole until the new one is complete: a kill at any moment leaves the old or the new one. A
file is replaced by one rename. A folder is swapped by one call of Linux's (`renameat2`); where the system or the file
system lacks it, two renames leave a moment with no folder under the name, and the next write to it, or `tidy`, puts
back the old one that a kill in that moment left beside. Remote paths (`gs://...`) are written here and then copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.errors import SaveError

# Beside a target `name`, hidden: `.name.tfdist-new`, with the target's suffix again where Keras looks at it.
_SUFFIXES = (".weights.h5", ".keras", ".h5")
_LEFT_BEHIND = re.compile(r"\.(?P<name>.+)\.tfdist-(?P<kind>new|old)(\.weights\.h5|\.keras|\.h5)?$")


def is_remote(path: str) -> bool:
    """Returns whether a path is no path of this machine, e.g. `gs://bucket/model.keras`."""
    return "://" in path and not path.startswith("file://")


def local(path: str) -> Path:
    """Returns the path behind a `file://` URL or a plain path."""
    return Path(path.removeprefix("file://"))


def write(path: str, write: Callable[[str], object], *, last: str = "", size: int = 0) -> None:
    """Calls `write` with a path beside `path`, and puts what it wrote in the place of what was there.

    Where the path is a symbolic link, what it points to is replaced, and the link stays.

    Args:
        path: A file or folder, local or remote.
        write: Writes one file or folder at the path that it gets.
        last: The file of a folder whose presence says that the folder is whole: a remote folder can't be renamed, so
            there it goes first and comes last.
        size: How many bytes will be written at least, where that is known: HDF5 ends the process when a disk is full.

    Raises:
        SaveError: The disk has less space than that.
    """
    if is_remote(path):
        _write_remote(path, write, last)
        return
    target = Path(os.path.realpath(local(path)))
    target.parent.mkdir(parents=True, exist_ok=True)
    _put_back(target)
    _remove(_beside(target))
    _require_space(target.parent, size)
    _write_local(target, write)


def is_unfinished(path: str) -> bool:
    """Returns whether a path is one that `write` gave away, so that what is written there is not seen yet."""
    return _LEFT_BEHIND.match(_name(path)) is not None


def require_writable(folder: str) -> None:
    """Makes a folder if it is missing, and raises SaveError where nothing can be written in it.

    To be told so before the first step is better than after hours. (A remote folder tells only when it is written to.)
    """
    if is_remote(folder):
        return
    try:
        local(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=local(folder)):
            pass
    except OSError as error:
        raise SaveError(f"nothing can be written in {folder} ({error})") from error


def remove(path: str, *, first: str = "") -> None:
    """Removes a file or a folder, of which `first` goes first."""
    if is_remote(path):
        import tensorflow as tf

        if first and tf.io.gfile.exists(f"{path}/{first}"):
            tf.io.gfile.remove(f"{path}/{first}")
        tf.io.gfile.rmtree(path)
        return
    if first:
        (local(path) / first).unlink(missing_ok=True)
    _remove(local(path))


def tidy(folder: str) -> None:
    """Cleans up in a folder after writes that were killed: puts back what they had moved away, removes the rest."""
    if is_remote(folder) or not local(folder).is_dir():
        return
    for entry in sorted(local(folder).iterdir()):
        match = _LEFT_BEHIND.match(entry.name)
        if match is not None and match["kind"] == "old":
            _put_back(entry.parent / match["name"])
        elif match is not None:
            _remove(entry)


@contextlib.contextmanager
def reading(path: str) -> Iterator[Path]:
    """Gives the local path of a file or folder; a remote one is copied, for as long as it is read."""
    if not is_remote(path):
        yield local(path)
        return
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="tfdist-load-") as folder:
        target = Path(folder) / _name(path)
        if not tf.io.gfile.isdir(path):
            tf.io.gfile.copy(path, str(target))
        else:
            for parent, _, names in tf.io.gfile.walk(path):
                here = target / parent[len(path) :].strip("/")
                here.mkdir(parents=True, exist_ok=True)
                for name in names:
                    tf.io.gfile.copy(f"{parent.rstrip('/')}/{name}", str(here / name))
        yield target


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


# -- here


def _write_local(path: Path, write: Callable[[str], object]) -> None:
    beside = _beside(path)
    try:
        write(str(beside))
        _sync(beside)
        if beside.is_dir():
            _swap_folder(beside, path)
        else:
            os.replace(beside, path)
        _sync_names(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(beside)
        raise


def _beside(path: Path) -> Path:
    # One fixed name per target: what a kill leaves behind, the next write takes over. Keras looks at the suffix.
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), "")
    return path.parent / f".{path.name}.tfdist-new{suffix}"


def _require_space(folder: Path, size: int) -> None:
    usage = shutil.disk_usage(folder)
    # A file system without a size of its own (a mounted bucket) says that it has none at all.
    if usage.total and usage.free < size:
        raise SaveError(
            f"{folder} has {usage.free:,} bytes of free space, and {size:,} are to be written; make room there"
        )


def _swap_folder(new: Path, path: Path) -> None:
    """Puts a complete folder in the place of an old one; the old one comes back if that fails."""
    if not os.path.lexists(path):
        os.rename(new, path)
        return
    if exchange(new, path):
        _remove(new)
        return
    old = _old(path)
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    _remove(old)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one moment; returns False, with nothing done, where that can't be had."""
    if sys.platform != "linux":
        return False
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28, linux/fs.h
    at_working_directory, rename_exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other), rename_exchange)
        == 0
    )


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.tfdist-old"


def _put_back(path: Path) -> None:
    """Ends what a kill between two renames left half done."""
    old = _old(path)
    if not os.path.lexists(old):
        return
    if os.path.lexists(path):
        _remove(old)
    else:
        os.rename(old, path)


def _sync(path: Path) -> None:
    """Returns when the file, or every file of the folder, is on the disk: a rename must not overtake what it names."""
    paths = [path] if path.is_file() else [Path(parent) / name for parent, _, names in os.walk(path) for name in names]
    for each in paths:
        with open(each, "rb") as file:
            os.fsync(file.fileno())


def _sync_names(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems have no fsync for folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- elsewhere


def _write_remote(path: str, write: Callable[[str], object], last: str) -> None:
    """Writes here, then copies: h5 and zip need a seekable file, and object stores replace a file as a whole."""
    import tensorflow as tf

    path = path.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="tfdist-save-") as folder:
        here = os.path.join(folder, _name(path))
        write(here)
        tf.io.gfile.makedirs(path.rsplit("/", 1)[0])
        if not os.path.isdir(here):
            _copy(here, path)
            return
        if last and tf.io.gfile.isdir(path):
            remove(path, first=last)
        for parent, _, names in os.walk(here):
            target = path if parent == here else f"{path}/{os.path.relpath(parent, here)}"
            tf.io.gfile.makedirs(target)
            for name in names:
                if (parent, name) != (here, last):
                    _copy(os.path.join(parent, name), f"{target}/{name}")
        if last:
            _copy(os.path.join(here, last), f"{path}/{last}")


def _copy(local: str, remote: str) -> None:
    import tensorflow as tf

    tf.io.gfile.copy(local, remote, overwrite=True)
    written, expected = tf.io.gfile.stat(remote).length, os.path.getsize(local)
    if written != expected:
        raise SaveError(f"{remote} holds {written:,} of {expected:,} bytes; save again")
