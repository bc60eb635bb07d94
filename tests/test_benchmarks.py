"""The benchmarks run and print ratios; how fast anything is, is no test's matter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from launching import environment

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_one_command_prints_the_ratios_of_each_benchmark(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--repeats", "1"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "processors" in done.stdout
    for name in (r"1 x Dense\(8\), batch 8, 20 steps", "MultiWorkerMirroredStrategy"):
        assert re.search(rf"^  {name} +\d+\.\d\d  \(\d+\.\d\d to \d+\.\d\d\)$", done.stdout, re.MULTILINE), done.stdout
