"""Prints every benchmark's ratios, measured one after the other on this machine.

    python benchmarks/run.py

Only ratios within one run mean anything: seconds depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Print ratios of speed, measured on this machine.")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement, interleaved (5)")
    parser.add_argument("--quick", action="store_true", help="a few steps only: whether it runs, not how fast")
    options = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "numpy"))
    print(f"{os.cpu_count()} processors, Python {platform.python_version()}, {packages}", flush=True)
    flags = ["--repeats", str(options.repeats), *["--quick"] * options.quick]
    code = 0
    scripts = {"fit.py": flags, "launch.py": flags, "parameter_servers.py": flags, "group.py": []}
    for script, arguments in scripts.items():
        if script == "group.py" and options.quick:
            continue
        print(flush=True)
        code |= subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
