"""The launcher as a test's child: `python -m tfdist.testing.child OPTIONS FOLDER` runs what JSON OPTIONS ask for.

Its stdin is a pipe that the test's process holds. Where that ends unasked the test's process is gone, however it
ended, and so the run ends too, and FOLDER with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from tfdist.errors import LaunchError, TfdistError
from tfdist.launch.launcher import launch
from tfdist.launch.plan import Options
from tfdist.launch.rundir import remove_run_dir

EXIT_USAGE = 2


def main(options: dict[str, Any], folder: str) -> int:
    """Returns the launcher's exit code."""
    parent_is_gone = threading.Event()

    # Until the launcher takes signals, and after: an end with its folder removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def watch() -> None:
        # Whatever comes: the test's process writes nothing.
        os.read(0, 1)
        parent_is_gone.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    try:
        return launch(Options(**{**options, "command": tuple(options["command"])}), os.environ)
    except TfdistError as error:
        print(f"tfdist: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, LaunchError) else 1
    finally:
        if parent_is_gone.is_set():
            remove_run_dir(folder)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2]))
