"""Prints how fast the group's calls are, as ratios within one run on this machine.

    python benchmarks/group.py [--tasks 2]

Each all_reduce is compared with a plain copy of the same memory and with a ping-pong of the same bytes over one plain
TCP connection between two processes; `GiB/s` counts the payload once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from tfdist.cluster import Task
from tfdist.collectives import meet

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time all_reduce against memory copies and a plain TCP ping-pong.")
    parser.add_argument("--tasks", type=int, default=2)
    tasks = parser.parse_args().tasks
    listener = socket.create_server(("127.0.0.1", 0))
    ports = _free_ports(tasks)
    context = multiprocessing.get_context("fork")
    results, theirs = context.Pipe(duplex=False)
    processes = [context.Process(target=_task, args=(i, ports, listener, theirs)) for i in range(tasks)]
    for process in processes:
        process.start()
    theirs.close()
    print(f"{'':>8}  {'all_reduce':>12}  {'GiB/s':>6}  {'/ copy':>8}  {'/ ping-pong':>11}")
    for name, size in SIZES.items():
        reduce_s, copy_s, ping_s = results.recv()
        rate = size / reduce_s / 2**30
        line = f"{name:>8}  {reduce_s * 1e3:9.3f} ms  {rate:6.2f}  {reduce_s / copy_s:8.1f}  {reduce_s / ping_s:11.2f}"
        print(line, flush=True)
    for process in processes:
        process.join()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _task(index: int, ports: list[int], listener: socket.socket, results: Connection) -> None:
    names = [Task("worker", i) for i in range(len(ports))]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    group = meet(addresses, names, index, secret=None, start_timeout_s=30, step_timeout_s=60)
    plain = None
    if index == 0:
        plain, _ = listener.accept()
    elif index == 1:
        plain = socket.create_connection(listener.getsockname())
    if plain is not None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in SIZES.values():
        array = np.full(size // 4, index + 1, np.float32)
        repeats = max(10, min(1000, (64 << 20) // size))
        reduce_s = _median(lambda: group.all_reduce([array], tag="time"), repeats)  # noqa: B023
        copy_s = _median(array.copy, repeats)
        group.barrier("ping")
        ping_s = _median(lambda: _ping(plain, array, index), repeats) if plain is not None else 0.0  # noqa: B023
        group.barrier("next")
        if index == 0:
            results.send((reduce_s, copy_s, ping_s))
    group.leave(0, wait_s=10)
    group.close()


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[len(times) // 5 :])


def _ping(sock: socket.socket, array: np.ndarray, index: int) -> None:
    """Task 0 sends the array, task 1 sends it back."""
    if index == 0:
        sock.sendall(array.data)
    buffer = memoryview(np.empty_like(array)).cast("B")
    while buffer:
        buffer = buffer[sock.recv_into(buffer) :]
    if index == 1:
        sock.sendall(array.data)


if __name__ == "__main__":
    main()
