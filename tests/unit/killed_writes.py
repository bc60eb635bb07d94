"""`killed_writes.py WHAT FOLDER` kills writers at each of their calls to the file system and looks at what they leave.

Moment 1, 2, 3, ...: a forked process writes over an old file or folder and kills itself before that call; Python's
audit hooks tell of each. The next moment writes over what this one left. Prints how many moments there were.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from tfdist import files

CALLS = ("open", "os.", "shutil.")


def write_file(content: str):
    return lambda target: Path(target).write_text(content * 100)


def write_folder(content: str):
    def write(target: str) -> None:
        (Path(target) / "deep").mkdir(parents=True)
        for name in ("first", "deep/second", "manifest"):
            (Path(target) / name).write_text(content * 100)

    return write


def die_before_call(moment: int) -> None:
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event.startswith(CALLS) and event != "os.listdir":
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def survives(moment: int, action) -> bool:
    """Returns whether the action ends before it comes to that moment."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_before_call(moment)
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"moment {moment}: the writer failed with {status}"
    return status == 0


def content_of(path: Path) -> str:
    """The one content of all files; a mixture, a part or a missing file is an error."""
    if path.is_file():
        texts = [path.read_text()]
    else:
        texts = [(path / name).read_text() for name in ("first", "deep/second", "manifest")]
    assert len(set(texts)) == 1, f"a mixture in {path}: {texts}"
    word = texts[0][: len(texts[0]) // 100]
    assert texts[0] == word * 100, f"a part in {path}"
    return word


def one_target(folder: Path, writer, *, may_be_away: bool) -> int:
    path = folder / "m"
    moment, old = 1, "old"
    files.write(str(path), writer(old))
    while True:
        new = f"<{moment}>"
        ended = survives(moment, lambda new=new: files.write(str(path), writer(new)))
        if may_be_away:
            files.tidy(str(folder))
        left = content_of(path)
        assert left in ((new,) if ended else (old, new)), f"moment {moment}: {left}, not {old} or {new}"
        if ended:
            assert sorted(os.listdir(folder)) == ["m"], os.listdir(folder)
            return moment
        moment, old = moment + 1, left


def numbered(folder: Path) -> int:
    """As checkpoints are written: a new folder, then the oldest goes, its manifest first."""
    writer = write_folder
    whole = lambda: sorted(p for p in folder.glob("step-*") if (p / "manifest").exists())  # noqa: E731
    moment = step = 1
    files.write(str(folder / "step-0000"), writer("<0>"))
    while True:

        def action(step=step) -> None:
            files.tidy(str(folder))
            files.write(str(folder / f"step-{step:04d}"), writer(f"<{step}>"), last="manifest")
            for path in sorted(folder.glob("step-*"), reverse=True)[2:]:
                files.remove(str(path), first="manifest")

        ended = survives(moment, action)
        assert whole(), f"moment {moment}: no whole one is left"
        for path in whole():
            assert content_of(path) == f"<{int(re.sub(r'.*-', '', path.name))}>"
        assert step - int(whole()[-1].name[5:]) <= 1, f"moment {moment}: more than the newest one is lost"
        if ended:
            assert len(os.listdir(folder)) == 2, os.listdir(folder)
            return moment
        moment, step = moment + 1, int(whole()[-1].name[5:]) + 1


def main(what: str, folder: Path) -> int:
    if what == "folder without a swap":
        files.exchange = lambda one, other: False
    if what == "numbered folders":
        return numbered(folder)
    writer = write_file if what == "file" else write_folder
    return one_target(folder, writer, may_be_away=what == "folder without a swap")


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])))
