"""Deaths, stops and signals, which only real processes show; without TensorFlow they start in a moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from group_tasks import DEADLINE_S, DEATH, Tasks, started


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Tasks]]:
    with started(tmp_path) as start:
        yield start


@pytest.fixture(params=[True, False], ids=["memory", "TCP"])
def start_both_ways(start, request):
    """Like `start`; the tasks share memory, then they do not."""
    return partial(start, share_memory=request.param)


REDUCE_FOR_EVER = """
array = np.ones(1 << 22, np.float32)
group.barrier("ready")
say("ready")
while True:
    group.all_reduce([array], tag="gradients")
"""

WAIT_FOR_EACH_OTHER = """
group.barrier("ready")
say("ready")
if index != 1:
    group.barrier("end")
wait()
"""

CALL_WHEN_POKED = """
group.barrier("ready")
say("ready")
wait()
group.barrier("end")
"""


@pytest.mark.parametrize("body", [REDUCE_FOR_EVER, WAIT_FOR_EACH_OTHER], ids=["in mid-call", "while waited for"])
def test_a_killed_task_is_named_by_all_survivors_within_two_seconds(start_both_ways, body):
    tasks = start_both_ways(3, body)
    for index in range(3):
        tasks.expect(index, "ready")
    killed_at = tasks.signal(1, signal.SIGKILL)
    for survivor in (0, 2):
        assert float(tasks.expect(survivor, DEATH)[1]) - killed_at < 2
        assert tasks.ends(survivor) == 1


def test_a_task_killed_between_calls_is_named_at_the_next_call(start_both_ways):
    tasks = start_both_ways(2, CALL_WHEN_POKED)
    tasks.expect(0, "ready")
    tasks.signal(1, signal.SIGKILL)
    tasks.ends(1)
    poked_at = time.monotonic()
    tasks.poke(0)
    assert float(tasks.expect(0, DEATH)[1]) - poked_at < 2


def test_the_first_cause_is_blamed_also_when_who_told_us_has_ended(start):
    """Worker 0 ends because of worker 1, and worker 2 comes to its call when both are gone."""
    tasks = start(3, "group.barrier('ready')\nsay('ready')\nif index:\n    wait()\ngroup.barrier('end')")
    for index in range(3):
        tasks.expect(index, "ready")
    tasks.signal(1, signal.SIGKILL)
    assert tasks.ends(0) == 1
    tasks.poke(2)
    tasks.expect(2, DEATH)


def test_a_stopped_task_is_named_after_the_heartbeat_time_and_told_when_it_goes_on(start_both_ways):
    # Worker 0 has sent its part of 'end' before it gives up, so that worker 1 may get through, but no further.
    body = WAIT_FOR_EACH_OTHER + "group.barrier('end')\ngroup.barrier('next')"
    tasks = start_both_ways(2, body, heartbeat_timeout_s=1.0)
    tasks.expect(1, "ready")
    tasks.expect(0, "ready")
    stopped_at = tasks.signal(1, signal.SIGSTOP)
    found = tasks.expect(0, r"PeerLostError for worker 1 at ([\d.]+): worker 1 has been silent for 1 s")
    assert 0.5 < float(found[1]) - stopped_at < 3
    tasks.signal(1, signal.SIGCONT)
    tasks.poke(1)
    tasks.expect(1, "worker 0 gave this task up: worker 1 has been silent")


def test_a_task_stopped_for_less_than_the_heartbeat_time_is_waited_for(start_both_ways):
    tasks = start_both_ways(2, CALL_WHEN_POKED + "say('done')", heartbeat_timeout_s=5.0)
    for index in range(2):
        tasks.expect(index, "ready")
    tasks.signal(1, signal.SIGSTOP)
    tasks.poke(0)
    with pytest.raises(AssertionError, match="did not say"):
        tasks.expect(0, "done", within_s=0.5)
    tasks.signal(1, signal.SIGCONT)
    tasks.poke(1)
    tasks.expect(0, "done")


@pytest.mark.parametrize(
    "child",
    [
        "if os.fork() == 0:\n    say('child')\n    time.sleep(60)\n    os._exit(0)",
        "import multiprocessing\ncontext = multiprocessing.get_context('fork')\n"
        "child = context.Process(target=lambda: (say('child'), time.sleep(60)))\nchild.start()",
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(\"child\", flush=True); time.sleep(60)'],"
        " close_fds=False)",
    ],
    ids=["fork", "multiprocessing", "subprocess"],
)
def test_a_child_that_outlives_its_task_does_not_hide_the_death(start, child):
    lives_on = f"os.setpgid(0, 0)\n{child}\nwait()"
    body = f"group.barrier('ready')\nsay('ready')\nif index == 1:\n{_indented(lives_on)}\ngroup.barrier('end')"
    tasks = start(2, body)
    tasks.expect(1, "child")
    tasks.expect(0, "ready")
    family = tasks.processes[1].pid
    try:
        killed_at = tasks.signal(1, signal.SIGKILL)
        assert float(tasks.expect(0, DEATH)[1]) - killed_at < 2
    finally:
        os.killpg(family, signal.SIGKILL)


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())


def test_a_forked_child_can_not_use_or_end_its_parents_group(start):
    body = """
pid = os.fork()
if pid == 0:
    group.leave(1, "the child says goodbye")
    group.close()
    try:
        group.barrier("in the child")
    except GroupError as error:
        say(error)
    os._exit(0)
os.waitpid(pid, 0)
group.barrier("in the parents")
say("whole")
"""
    tasks = start(2, body)
    for index in range(2):
        tasks.expect(index, f"this process was forked from worker {index}")
        tasks.expect(index, "whole")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("raise ValueError('bad')", 1, "worker 1 is gone: its connection closed without a goodbye"),
        ("sys.exit(0)", 0, "worker 1 is gone: its connection closed without a goodbye"),
        ("os._exit(3)", 3, "worker 1 is gone: its connection closed without a goodbye"),
        ("group.leave(3, 'out of disk')\nos._exit(3)", 3, "worker 1 left with code 3: out of disk"),
        ("group.leave(0)", 0, "worker 1 left with code 0"),
    ],
    ids=["exception", "exit", "hard exit", "goodbye and hard exit", "goodbye"],
)
def test_a_task_that_ends_does_not_hang_and_is_named(start_both_ways, ending, code, words):
    tasks = start_both_ways(2, f"if index == 1:\n{_indented(ending)}\nelse:\n    group.barrier('end')")
    assert tasks.ends(1, within_s=10) == code
    tasks.expect(0, words)
    assert tasks.ends(0, within_s=10) == 1


def test_control_c_ends_a_wait_and_the_others_are_told(start_both_ways):
    tasks = start_both_ways(2, "if index == 1:\n    wait()\ngroup.barrier('end')\ngroup.barrier('next')")
    tasks.expect(0, "worker 0 is waiting for worker 1 in barrier 'end'")
    tasks.signal(0, signal.SIGINT)
    tasks.expect(0, "KeyboardInterrupt")
    assert tasks.ends(0) == -signal.SIGINT
    tasks.poke(1)
    tasks.expect(1, "PeerLostError for worker 0 at .*: worker 0 was stopped in barrier 'end' by KeyboardInterrupt")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_meeting(start, number):
    tasks = start(2, "", start=1)
    tasks.expect(0, "waiting for worker 1 at")
    tasks.signal(0, number)
    assert tasks.ends(0, within_s=5) == -number


def test_a_task_killed_in_the_meeting_is_named(start):
    tasks = start(3, "", start=2)
    tasks.expect(0, "waiting for worker 2 at")
    tasks.signal(1, signal.SIGKILL)
    tasks.expect(0, "MeetingError for None at .*: worker 1 came, and ended before all tasks were here", within_s=5)


def test_ten_thousand_calls_leak_neither_memory_nor_descriptors(start_both_ways):
    body = """
import resource
array = np.ones(1000, np.float32)
def measure():
    return len(os.listdir("/dev/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for turn in range(500):
    group.all_reduce([array], tag=f"warm {turn}")
before = measure()
for turn in range(10_000):
    (total,) = group.all_reduce([array], tag=f"step {turn}")
assert (total == 2).all()
say("grew by", *np.subtract(measure(), before))
group.leave(0, wait_s=10)
"""
    tasks = start_both_ways(2, body)
    for index in range(2):
        grown = tasks.expect(index, r"grew by (-?\d+) (-?\d+)")
        assert int(grown[1]) == 0
        assert int(grown[2]) < 5  # MiB
        assert tasks.ends(index) == 0


SERVE_AT_A_DOOR = """
import threading

def tell():
    changes = group.changes()
    while (change := changes.get()) is not None:
        number, trouble = change
        say("heard", count := globals().get("count", 0) + 1, number, trouble and trouble.kind)
        globals()["count"] = count

if index == 0:
    group.door.open()
    threading.Thread(target=tell, daemon=True).start()
    say("open")
    wait()
    group.leave(0, wait_s=20)
else:
    say("came back" if group.has_come_back else "came")
    group.wait_until_left(0)
    group.leave(0, wait_s=20)
group.close()
"""


def test_a_task_is_let_in_again_after_its_death_and_in_place_of_one_that_hangs(start):
    tasks = start(3, SERVE_AT_A_DOOR, heartbeat_timeout_s=3.0)
    tasks.expect(0, "open")
    tasks.expect(1, "came")
    tasks.signal(1, signal.SIGKILL)
    tasks.expect(0, "heard 1 1 died")
    tasks.start_anew(1)
    tasks.expect(0, "heard 2 1 None")
    tasks.expect(1, "came back")

    tasks.signal(1, signal.SIGSTOP)
    tasks.expect(0, "heard 3 1 silent")
    tasks.signal(1, signal.SIGCONT)
    tasks.expect(0, "heard 4 1 None")

    tasks.signal(1, signal.SIGSTOP)
    hung = tasks.start_anew(1)  # nobody knows yet
    tasks.expect(0, "heard 5 1 silent\nheard 6 1 None")
    tasks.expect(1, "came back")
    hung.send_signal(signal.SIGCONT)
    assert hung.wait(DEADLINE_S) == 1, "its place is taken"

    tasks.poke(0)
    assert [tasks.ends(index) for index in range(3)] == [0, 0, 0], tasks.all_output()


def test_a_task_that_came_back_sees_the_end_of_the_one_that_let_it_in(start):
    tasks = start(2, SERVE_AT_A_DOOR)
    tasks.expect(0, "open")
    tasks.signal(1, signal.SIGKILL)
    tasks.start_anew(1)
    tasks.expect(1, "came back")
    tasks.signal(0, signal.SIGKILL)
    tasks.expect(1, "PeerLostError for worker 0 at .* worker 0 is gone")
    assert tasks.ends(1) == 1


NEED_ALL = """
from tfdist import attendance
attendance.ASK_S = attendance.STUCK_S = 0.2

if index == 0:
    there = attendance.Attendance(group, has_launcher=False, start_timeout_s=20)
    WAIT
else:
    group.wait_until_left(0)
"""


@pytest.mark.parametrize(
    "wait",
    [
        'with there.needed():\n        say("needs")\n        wait()',
        'say("needs")\n    exec(compile("wait()", "/x/tensorflow/y.py", "exec"))',
    ],
    ids=["in fit", "in a call of TensorFlow's"],
)
def test_a_chief_that_waits_elsewhere_for_a_task_that_hangs_ends_and_names_it(start, wait):
    tasks = start(3, NEED_ALL.replace("WAIT", wait), heartbeat_timeout_s=2.0)
    tasks.expect(0, "needs")
    tasks.signal(1, signal.SIGSTOP)
    tasks.expect(0, "PeerLostError: worker 1 has been silent for .*, and TensorFlow waits for it without end")
    assert tasks.ends(0) == 1
    tasks.expect(2, "PeerLostError for worker 0")
    assert tasks.ends(2) == 1
