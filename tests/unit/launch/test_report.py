"""Exit codes and ends in words."""

from __future__ import annotations

import pytest

from tfdist.launch import report


@pytest.mark.parametrize(
    ("code", "shell", "words"),
    [
        (0, 0, "exit code 0"),
        (3, 3, "exit code 3"),
        (75, 75, "exit code 75 (time-out)"),
        (-9, 137, "killed by SIGKILL (out of memory?)"),
        (-11, 139, "killed by SIGSEGV"),
        (-64, 192, "killed by SIGRTMAX"),
        (-50, 178, "killed by signal 50"),
    ],
)
def test_an_end_is_told_as_a_shell_and_a_reader_know_it(code, shell, words):
    assert report.exit_code(code) == shell
    assert report.describe_end(code) == words


def test_the_kernels_word_on_memory_is_passed_on():
    assert report.describe_end(-9, out_of_memory=True) == "killed by SIGKILL (out of memory, says the kernel)"
