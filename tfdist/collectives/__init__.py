"""NumPy arrays in every task of a job become their sum (or all of them) in every task; no TensorFlow.

    group = meet(["10.0.0.1:2222", "10.0.0.2:2222"], [Task("worker", 0), Task("worker", 1)], index, secret=secret,
                 start_timeout_s=300, step_timeout_s=1800)
    mean, = group.all_reduce([gradient], op="mean", tag="gradients")
    (total, largest), (ids,) = group.exchange([gradient, flag], op=["weighted_sum", "max"], weight=share, rows=[ids],
                                              tag="step")
    group.leave(0)

`meeting` connects every pair of tasks, `sharing` finds out which of them share memory, `monitor` sees peers die. A call
is checked and laid out in `sums` and `layout`; its bytes go through `memory`, over `tcp`, or both (`hierarchy`).
`reduction` does the sums, and `calls` checks that all tasks make the same call. At a `door` a task that starts anew is
let in.
"""

from tfdist.collectives.group import Group
from tfdist.collectives.meeting import meet

__all__ = ["Group", "meet"]
