"""How a run starts its tasks: from anywhere, with which arguments and environment."""

from __future__ import annotations

import json

import pytest
from launching import run, write

SHOW = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), sys.stdin.read(), __name__]))
"""


def shown(ended):
    return json.loads(ended.said_by("worker 0")[-1])


def test_a_script_is_found_from_any_folder_and_runs_there(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "work").mkdir()
    write(tmp_path / "code", SHOW)
    ended = run("--workers", 2, "../code/script.py", cwd=tmp_path / "work")
    assert ended.code == 0, ended
    assert shown(ended) == [[], str(tmp_path / "work"), "", "__main__"]


@pytest.mark.parametrize(
    "arguments", [["--workers", "5"], ["-m", "--help"], ["--", "x"], ["a b", "", "ü", "$HOME", "'\"", "*"]]
)
def test_the_scripts_arguments_arrive_as_they_are(tmp_path, arguments):
    ended = run(write(tmp_path, SHOW), *arguments)
    assert shown(ended)[0] == arguments, ended


def test_a_module_is_run_from_the_working_folder(tmp_path):
    (tmp_path / "pack").mkdir()
    write(tmp_path / "pack", "from pack import other\n" + SHOW, "train.py")
    write(tmp_path / "pack", "", "other.py")
    ended = run("--workers", 1, "-m", "pack.train", "--x", cwd=tmp_path)
    assert shown(ended) == [["--x"], str(tmp_path), "", "__main__"], ended


def test_a_run_inside_a_task_is_a_run_of_its_own(tmp_path):
    write(tmp_path, "import os\nprint('of', os.environ['TFDIST_LOCAL_COUNT'])\n", "inner.py")
    outer = write(
        tmp_path,
        """
        import subprocess, sys
        print(subprocess.run(
            [sys.executable, "-m", "tfdist.run", "--workers", "2", "inner.py"], capture_output=True, text=True
        ).stdout.count("of 2"))
        """,
        "outer.py",
    )
    ended = run("--workers", 1, outer, cwd=tmp_path)
    assert ended.said_by("worker 0") == ["2"], ended


def test_a_long_folder_for_temporary_files_is_no_trouble(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    ended = run(
        write(tmp_path, "from tfdist import process\nprint(process._control.connect())\n"), env={"TMPDIR": str(folder)}
    )
    assert ended.said_by("worker 0") == ["True"], ended


def test_tasks_that_cannot_be_started_are_told_in_one_sentence(tmp_path):
    ended = run("--log-dir", "/proc/no/such", write(tmp_path, ""))
    assert ended.code == 1
    assert ended.err.startswith("tfdist: --log-dir /proc/no/such: "), ended
    assert len(ended.err.splitlines()) == 1
