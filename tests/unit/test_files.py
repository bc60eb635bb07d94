"""`tfdist.files`: a file or a folder, whole under its path or not there, whatever happens in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import files

KILLED = Path(__file__).with_name("killed_writes.py")


def write_file(content: str):
    return lambda target: Path(target).write_text(content)


def write_folder(content: str):
    def write(target: str) -> None:
        for name in ("first", "deep/second"):
            path = Path(target) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def content_of(path: Path) -> set[str]:
    return {p.read_text() for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()}


WRITERS = pytest.mark.parametrize("writer", [write_file, write_folder])


@WRITERS
def test_what_is_written_stands_alone_under_its_path(writer, tmp_path):
    for content in ("one", "two"):
        files.write(str(tmp_path / "deep" / "er" / "m"), writer(content))
        assert content_of(tmp_path / "deep" / "er" / "m") == {content}
    assert [p.name for p in (tmp_path / "deep" / "er").iterdir()] == ["m"]


@WRITERS
def test_a_failure_in_the_middle_leaves_the_old_one_whole(writer, tmp_path):
    files.write(str(tmp_path / "m"), writer("old"))

    def break_off(target: str) -> None:
        writer("new")(target)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write(str(tmp_path / "m"), break_off)
    assert content_of(tmp_path / "m") == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.h5", "m"])
def test_the_writer_sees_the_suffix_of_the_path(name, tmp_path):
    seen = []

    def write(target: str) -> None:
        seen.append(target)
        Path(target).write_text("x")

    files.write(str(tmp_path / name), write)
    assert seen[0].endswith(name.partition(".")[2])
    assert Path(seen[0]).parent == tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_linux_swaps_two_folders_in_one_moment(tmp_path):
    for name in ("a", "b"):
        files.write(str(tmp_path / name), write_folder(name))
    assert files.exchange(tmp_path / "a", tmp_path / "b")
    assert content_of(tmp_path / "a") == {"b"}


def test_a_swap_with_nothing_is_no_swap(tmp_path):
    (tmp_path / "a").mkdir()
    assert not files.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()


def test_a_folder_is_replaced_where_the_system_has_no_swap(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    for content in ("old", "new"):
        files.write(str(tmp_path / "m"), write_folder(content))
    assert content_of(tmp_path / "m") == {"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_tidy_puts_back_what_was_moved_away_and_removes_the_rest(tmp_path):
    files.write(str(tmp_path / ".lost.tfdist-old"), write_folder("lost"))
    files.write(str(tmp_path / ".kept.tfdist-old"), write_folder("older"))
    files.write(str(tmp_path / "kept"), write_folder("kept"))
    files.write(str(tmp_path / ".half.keras.tfdist-new.keras"), write_file("half"))
    files.write(str(tmp_path / ".mine"), write_file("mine"))
    files.tidy(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", "kept", "lost"]
    assert content_of(tmp_path / "lost") == {"lost"}
    assert content_of(tmp_path / "kept") == {"kept"}


def test_tidy_of_a_folder_that_is_not_there_does_nothing(tmp_path):
    files.tidy(str(tmp_path / "none"))
    files.tidy("ram://files-none")


def test_a_remote_folder_gets_its_last_file_last(monkeypatch):
    """`ram://` is a file system of TensorFlow's like `gs://`, in memory."""
    copied = []
    copy = files._copy  # noqa: SLF001
    monkeypatch.setattr(files, "_copy", lambda here, there: (copied.append(there), copy(here, there)))
    for _ in range(2):
        files.write("ram://files/m", write_folder("x"), last="first")
    assert copied == ["ram://files/m/deep/second", "ram://files/m/first"] * 2
    with files.reading("ram://files/m") as here:
        assert content_of(here) == {"x"}
        assert sorted(p.name for p in here.rglob("*")) == ["deep", "first", "second"]
    assert not here.exists()


def test_a_remote_folder_is_removed():
    import tensorflow as tf

    files.write("ram://files-gone/m", write_folder("x"))
    files.remove("ram://files-gone/m", first="first")
    assert not tf.io.gfile.exists("ram://files-gone/m/deep/second")


@pytest.mark.parametrize("what", ["file", "folder", "folder without a swap", "numbered folders"])
def test_a_kill_before_any_call_to_the_file_system_leaves_the_old_or_the_new_one(what, tmp_path):
    """Every such call is a moment of its own; the script kills a process at each of them in turn."""
    done = subprocess.run(
        [sys.executable, KILLED, what, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    moments = int(done.stdout)
    assert moments > 5
