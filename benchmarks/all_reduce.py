"""Prints how many times faster two tasks add up an array with tfdist than with TensorFlow's collectives and with gloo.

    python benchmarks/all_reduce.py [--repeats 15] [--torch-python PATH]

Two processes on two processors of this host, and two over TCP between two network namespaces (Linux; as root, or where
users may make namespaces). A figure of 2 means that tfdist's call takes half the time. In each repeat every way runs
so many calls, one way after the other; a repeat's figure is the ratio of the median calls, and printed are the median
over the repeats, the least and the most. TensorFlow adds up as in a loop of one's own under
`MultiWorkerMirroredStrategy`, PyTorch with `torch.distributed.all_reduce`, in place.

PyTorch needs no place in this environment: `--torch-python` names a Python that has torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import namespaces
import ratios
import teams

WORDS = {"tensorflow": "TensorFlow's collectives", "gloo": "gloo"}
WORKER = str(Path(__file__).with_name("all_reduce_worker.py"))
# Bytes and calls of a turn.
HERE = {"4 KiB": (4 << 10, 500), "16 MiB": (16 << 20, 15)}
BETWEEN_HOSTS = {"64 MiB": (64 << 20, 5)}
QUICK_HERE, QUICK_BETWEEN_HOSTS = {"4 KiB": (4 << 10, 5)}, {"64 KiB": (64 << 10, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare all_reduce of two tasks with TensorFlow's collectives and with gloo: times faster."
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each measurement, interleaved (15)")
    parser.add_argument("--quick", action="store_true", help="a few calls only: whether it runs, not how fast")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python that has torch, for gloo")
    options = parser.parse_args()
    pythons = {"tfdist": sys.executable, "tensorflow": sys.executable}
    if options.torch_python:
        pythons["gloo"] = options.torch_python
    else:
        print("gloo: not measured, for want of --torch-python", flush=True)
    cores = teams.share_cores()
    print(f"all_reduce of 2 tasks on {cores}, {teams.load()}", flush=True)
    with teams.started() as start:
        addresses = {way: teams.free_addresses() for way in pythons}
        device = "lo" if sys.platform == "linux" else None
        compare(start, pythons, addresses, QUICK_HERE if options.quick else HERE, options.repeats, "one host", device)
    try:
        with namespaces.two_hosts() as hosts, teams.started() as start:
            addresses = {way: [f"{host.address}:{2222 + i}" for host in hosts] for i, way in enumerate(pythons)}
            sizes = QUICK_BETWEEN_HOSTS if options.quick else BETWEEN_HOSTS
            prefixes = [host.prefix for host in hosts]
            where = "TCP between two network namespaces"
            compare(start, pythons, addresses, sizes, options.repeats, where, namespaces.DEVICE, prefixes)
    except namespaces.RefusedError as error:
        print(f"TCP between two network namespaces: not measured: {error}", flush=True)


def compare(
    start: Callable[..., teams.Team],
    pythons: Mapping[str, str],
    addresses: Mapping[str, Sequence[str]],
    sizes: Mapping[str, tuple[int, int]],
    repeats: int,
    where: str,
    device: str | None,
    prefixes: Sequence[Sequence[str]] = ((), ()),
) -> None:
    """Prints the ratios of each size."""
    environ = {"GLOO_SOCKET_IFNAME": device} if device else {}
    ways = {
        way: start(
            way,
            [[*prefix, python, WORKER, way, str(i), *addresses[way]] for i, prefix in enumerate(prefixes)],
            [environ] * len(prefixes),
        )
        for way, python in pythons.items()
    }
    print(f"{where}, times faster than another: median of {repeats} (least to most)", flush=True)
    for name, (size, calls) in sizes.items():
        seconds = teams.take_turns(ways, f"{size} {calls}", repeats)
        ours = seconds.pop("tfdist")
        for way, theirs in seconds.items():
            ratios.show(f"{name}, {WORDS[way]}", [b / a for a, b in zip(ours, theirs, strict=True)])
        print(f"  ({name}: {statistics.median(ours) * 1e3:.3g} ms a call)", flush=True)


if __name__ == "__main__":
    main()
