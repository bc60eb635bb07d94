"""The live line among whole lines, as bytes for a terminal."""

from __future__ import annotations

import os
import pty

import pytest

from tfdist.launch.console import Console, LiveLine, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"", b""),
        (b"a", b"a"),
        (b"a\rb", b"b"),
        (b"a\r", b"a"),
        (b"a\r\r", b"a"),
        (b"step 1\b\b\b\b\b\b\rstep 2", b"step 2"),
        (b"step 1\b\b\b\b\b\b", b"step 1"),
        (b"\r", b""),
    ],
)
def test_a_line_is_shown_from_its_last_start(text, shown):
    assert visible(text) == shown


def test_an_endless_live_line_keeps_what_it_shows_and_a_bounded_rest():
    line = LiveLine("stdout", b"")
    for i in range(20_000):
        line.grow(b"\rstep %d" % i)
    assert line.drawn() == b"step 19999"
    assert len(line.text) <= LiveLine.LIMIT


@pytest.fixture
def terminal():
    """A console on a pty whose bytes can be read as they are."""
    import termios

    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)

    def read(count):
        data = b""
        while len(data) < count:
            data += os.read(ours, count - len(data))
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
        return data

    yield Console(theirs, theirs), read
    os.close(theirs)
    os.close(ours)


def test_a_growing_line_is_written_once_and_goes_back_behind_its_name(terminal):
    console, read = terminal
    line = LiveLine("stdout", b"[c] ")
    for more in (b"step 1", b"\rstep 2"):
        line.grow(more)
        console.show_live(line, more)
    expected = b"[c] step 1\r[c] step 2"
    assert read(len(expected)) == expected


def test_another_line_goes_above_the_live_one(terminal):
    console, read = terminal
    line = LiveLine("stdout", b"[c] ")
    line.grow(b"a\rstep 1")
    console.show_live(line, b"a\rstep 1")
    console.write_lines("stderr", b"[w] ", [b"hello"])
    expected = b"[c] step 1" + b"\r\x1b[K" + b"[w] hello\n" + b"[c] step 1"
    assert read(len(expected)) == expected


def test_an_ended_live_line_is_taken_away(terminal):
    console, read = terminal
    line = LiveLine("stdout", b"[c] ")
    line.grow(b"step 1")
    console.show_live(line, b"step 1")
    console.end_live(line)
    console.write_lines("stdout", b"[c] ", [b"step 1"])
    expected = b"[c] step 1" + b"\r\x1b[K" + b"[c] step 1\n"
    assert read(len(expected)) == expected


def test_one_reader_gone_is_told_once_and_the_other_stream_goes_on():
    told = []
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    console = Console(out_write, err_write, on_broken=lambda: told.append(1))
    os.close(out_read)
    console.write_lines("stdout", b"", [b"a"])
    console.write_lines("stdout", b"", [b"b"])
    console.write_lines("stderr", b"", [b"c"])
    assert told == [1]
    assert os.read(err_read, 10) == b"c\n"
    for number in (out_write, err_read, err_write):
        os.close(number)
