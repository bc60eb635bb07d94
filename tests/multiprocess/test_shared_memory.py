"""Tasks that share memory, as real processes: killed, stopped and slowed in a sum, on hosts of their own, and after."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from group_tasks import DEATH, Tasks, started

from tfdist.collectives import segment

pytestmark = pytest.mark.skipif(bool(segment.missing()), reason="no memory to share here")

COUNT = """
def left():
    maps = open("/proc/self/maps").read().count("memfd:tfdist")
    sockets = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in os.listdir("/proc/self/fd")[:-1]
                  if os.path.lexists(f"/proc/self/fd/{fd}"))
    return maps, sockets, len(os.listdir("/proc/self/fd"))
"""

SUM_FOR_EVER = """
import threading
array = np.ones(1 << 20, np.float32)
group.barrier("ready")
say("ready", group.sharing)
number = 0
while True:
    (total,) = group.all_reduce([array], tag="gradients")
    assert (total == group.size).all()
    number += 1
    if number == 20:
        say("going on")
"""


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Tasks]]:
    with started(tmp_path) as start:
        yield start


HOSTS = pytest.mark.parametrize("hosts", ["aaaa", "abab", "aabb"])


@HOSTS
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_task_killed_in_a_sum_is_named_by_all_within_two_seconds(start, hosts, victim):
    tasks = start(4, SUM_FOR_EVER, hosts=hosts)
    for index in range(4):
        tasks.expect(index, "going on")
    killed_at = tasks.signal(victim, signal.SIGKILL)
    for survivor in {0, 1, 2, 3} - {victim}:
        found = tasks.expect(survivor, DEATH.replace("worker 1", f"worker {victim}"))
        assert float(found[1]) - killed_at < 2
        assert tasks.ends(survivor) == 1


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_a_task_stopped_in_a_sum_is_named_after_the_heartbeat_time(start, hosts):
    tasks = start(3, SUM_FOR_EVER, hosts=hosts, heartbeat_timeout_s=1.0)
    for index in range(3):
        tasks.expect(index, "going on")
    stopped_at = tasks.signal(2, signal.SIGSTOP)
    for index in range(2):
        found = tasks.expect(index, r"PeerLostError for worker 2 at ([\d.]+): worker 2 has been silent")
        assert 0.5 < float(found[1]) - stopped_at < 3
    tasks.signal(2, signal.SIGCONT)
    tasks.expect(2, "gave this task up: worker 2 has been silent|worker 2 has been silent")
    assert tasks.ends(2) == 1


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_a_task_stopped_for_a_moment_changes_no_result(start, hosts):
    tasks = start(3, SUM_FOR_EVER.replace("number == 20", "number % 20 == 0"), hosts=hosts, heartbeat_timeout_s=20.0)
    for _ in range(3):
        tasks.output = [""] * 3
        for index in range(3):
            tasks.expect(index, "going on")
        tasks.signal(1, signal.SIGSTOP)
        with pytest.raises(AssertionError, match="did not say"):
            tasks.expect(0, "no such word", within_s=0.3)
        tasks.signal(1, signal.SIGCONT)


SLOW = """
if index == 2:
    wait()
group.all_reduce([np.ones(1 << 20)], tag="slow")
say("done")
"""


@pytest.mark.parametrize("hosts", ["aaa", "aba", "abb"])
def test_a_task_that_does_not_come_is_named_by_all_after_the_step_time(start, hosts):
    tasks = start(3, SLOW, hosts=hosts, step_timeout_s=1.0, heartbeat_timeout_s=2.0)
    for index in range(2):
        tasks.expect(index, "WaitError for worker 2 at .*: worker 2 .*did not come to all_reduce 'slow' within 1 s")
        assert tasks.ends(index) == 1
    tasks.poke(2)
    tasks.expect(2, "did not come to all_reduce 'slow' within 1 s|worker . is gone")


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_what_is_waited_for_is_said(start, hosts):
    tasks = start(3, SLOW, hosts=hosts)
    for index in range(2):
        # Who waits for the first task of a host is told of that.
        tasks.expect(index, f"worker {index} is waiting for .*worker . in all_reduce 'slow'")
    tasks.poke(2)
    for index in range(3):
        tasks.expect(index, "done")


LEAVE_NOTHING = (
    COUNT
    + """
before = left()
say("has", before)
group.all_reduce([np.ones(1000)], tag="x")
say("used")
wait()
try:
    group.barrier("again")
except GroupError as error:
    say("lost")
group.leave(0)
group.close()
say("left", left())
wait()
"""
)


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_nothing_is_left_in_the_survivors_of_a_task_that_was_killed(start, hosts):
    tasks = start(3, LEAVE_NOTHING, hosts=hosts)
    for index in range(3):
        tasks.expect(index, "used")
    assert int(tasks.expect(0, r"has \((\d+), (\d+), (\d+)\)")[1]) == hosts.count("a")
    segments = int(tasks.expect(0, r"has \((\d+)")[1])
    tasks.signal(2, signal.SIGKILL)
    tasks.ends(2)
    for index in range(2):
        tasks.poke(index)
        tasks.expect(index, "lost")
        found = tasks.expect(index, r"left \((\d+), (\d+), (\d+)\)")
        assert (int(found[1]), int(found[2])) == (0, 0), f"of {segments} segments"


def test_a_task_keeps_no_socket_open_to_share_memory(start):
    tasks = start(3, COUNT + 'say("has", left())\nwait()')
    # Two connections to each of two peers.
    assert int(tasks.expect(0, r"has \(\d+, (\d+), \d+\)")[1]) == 4


IN_NAMESPACES = """
say("shares", group.sharing)
rng = np.random.default_rng(index)
array = rng.normal(size=700_001).astype(np.float32)
for _ in range(5):
    (total,) = group.all_reduce([array], tag="sum")
terms = [np.random.default_rng(i).normal(size=700_001).astype(np.float32) for i in range(4)]
assert total.tobytes() == ((terms[0] + terms[2]) + (terms[1] + terms[3])).tobytes()
assert group.all_gather_bytes(bytes([index]) * 1000, tag="bytes") == [bytes([i]) * 1000 for i in range(4)]
say("right")
group.leave(0, wait_s=10)
"""


def test_tasks_in_two_network_namespaces_share_within_each_and_use_tcp_between(start, monkeypatch):
    """The kernel is one, so that they try; but no socket of the other namespace can be reached."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    namespaces = pytest.importorskip("namespaces")
    try:
        with namespaces.two_hosts() as hosts:
            prefixes = [host.prefix for host in (*hosts, *hosts)]
            addresses = [f"{host.address}:{2222 + i}" for i, host in enumerate((*hosts, *hosts))]
            tasks = start(4, IN_NAMESPACES, addresses=addresses, prefixes=prefixes)
            for index in range(4):
                tasks.expect(index, r"shares \[\[0, 2\], \[1, 3\]\]")
                tasks.expect(index, "right")
                assert tasks.ends(index) == 0
    except namespaces.RefusedError as error:
        pytest.skip(f"no network namespaces here: {error}")


MANY = """
import resource
array, small = np.ones(300_000, np.float32), np.ones(10)
def measure():
    return len(os.listdir("/dev/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for turn in range(COUNT + 100):
    if turn == 100:
        before = measure()
    group.all_reduce([array if turn % 10 == 0 else small], tag=f"turn {turn}")
    group.exchange([small], rows=[array[: turn % 1000]], tag="rows")
say("grew by", *np.subtract(measure(), before))
group.leave(0, wait_s=10)
"""


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_many_sums_leak_neither_memory_nor_descriptors(start, hosts, count):
    tasks = start(len(hosts), MANY.replace("COUNT", str(count)), hosts=hosts)
    for index in range(len(hosts)):
        grown = tasks.expect(index, r"grew by (-?\d+) (-?\d+)", within_s=120)
        assert int(grown[1]) == 0
        assert int(grown[2]) < 5  # MiB
        assert tasks.ends(index) == 0
