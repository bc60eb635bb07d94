"""Bytes of a task's pipe -> lines on the console and in the log."""

from __future__ import annotations

import io
import os

import pytest

from tfdist.control import QUIET_MARK
from tfdist.launch.console import Console
from tfdist.launch.streams import LONGEST_LINE, TaskOutput

MARK = QUIET_MARK.encode()


@pytest.fixture
def outputs(tmp_path):
    """Feeds pieces of stderr to a task's output; returns what the console wrote, the log, and the tail."""

    def feed(pieces, is_noise=lambda line: line.startswith(b"noise")):
        path = tmp_path / "console"
        log = io.BytesIO()
        with open(path, "wb") as console:
            output = TaskOutput("worker 0", Console(console.fileno(), console.fileno()), log, is_noise)
            ours, theirs = os.pipe()
            stream = output.stream("stderr", ours, live=False)
            for piece in pieces:
                os.write(theirs, piece)
                assert stream.read_ready()
            os.close(theirs)
            assert not stream.read_ready()
            stream.close()
        return path.read_bytes(), log.getvalue(), list(output.tail)

    return feed


@pytest.mark.parametrize(
    ("pieces", "console", "log"),
    [
        ([b"a\n"], b"[worker 0] a\n", b"a\n"),
        ([b"a", b"b\nc", b"\n"], b"[worker 0] ab\n[worker 0] c\n", b"ab\nc\n"),
        ([b"\n\n"], b"[worker 0] \n[worker 0] \n", b"\n\n"),
        ([b"rest"], b"[worker 0] rest\n", b"rest\n"),
        ([b"noise 1\nword\n"], b"[worker 0] word\n", b"noise 1\nword\n"),
        ([b"1%\r2%", b"\r3%\n"], b"[worker 0] 3%\n", b"1%\r2%\r3%\n"),
        ([b"a\n" + MARK + b"\nTraceback\n", b"more\n"], b"[worker 0] a\n", b"a\nTraceback\nmore\n"),
        ([b"half" + MARK[:5], MARK[5:] + b"\nTraceback\n"], b"[worker 0] half\n", b"half\nTraceback\n"),
    ],
)
def test_lines_are_cut_named_filtered_and_logged(outputs, pieces, console, log):
    assert outputs(pieces)[:2] == (console, log)


def test_the_tail_is_the_last_lines_that_are_not_noise(outputs):
    lines = [b"noise\nline %d\n" % i for i in range(30)]
    assert outputs(lines)[2] == [b"line %d" % i for i in range(10, 30)]


def test_a_line_without_an_end_goes_out_in_pieces(outputs):
    console, log, _ = outputs([b"x" * 65536] * (2 * LONGEST_LINE // 65536 + 1))
    assert console.count(b"[worker 0] ") == 3
    assert log.count(b"x") == 2 * LONGEST_LINE + 65536
