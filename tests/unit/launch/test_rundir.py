"""The private folder."""

from __future__ import annotations

import os
import tempfile

import pytest

from tfdist.errors import LaunchError
from tfdist.launch.rundir import LONGEST_SOCKET_PATH, make_run_dir, read_error_file, remove_run_dir


def test_only_this_user_can_enter_and_read_the_secret():
    path = make_run_dir()
    try:
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert os.stat(f"{path}/secret").st_mode & 0o777 == 0o600
        with open(f"{path}/secret") as file:
            assert len(bytes.fromhex(file.read())) == 32
    finally:
        remove_run_dir(path)
    assert not os.path.exists(path)


def test_a_run_that_spans_hosts_has_no_secret():
    path = make_run_dir(with_secret=False)
    try:
        assert os.listdir(path) == []
    finally:
        remove_run_dir(path)


def test_a_long_temporary_folder_does_not_make_the_socket_path_too_long(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = make_run_dir()
    try:
        assert len(f"{path}/control.sock") <= LONGEST_SOCKET_PATH
    finally:
        remove_run_dir(path)


def test_no_folder_for_temporary_files_is_a_launch_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if len(str(tmp_path)) > 70:
        pytest.skip("the path is too long for this test")
    with pytest.raises(LaunchError, match="set TMPDIR"):
        make_run_dir()


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\x00"])
def test_an_error_file_that_can_not_be_read_is_empty(tmp_path, text):
    if text is not None:
        (tmp_path / "error-0.json").write_text(text)
    assert read_error_file(str(tmp_path), 0) == {}
