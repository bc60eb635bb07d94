"""Sources become pipelines that any number of tasks share: exact batches, each example once per epoch over all tasks.

    train = tfdist.data.from_arrays((x, y), global_batch_size=128, shuffle=True, seed=7)
    model.fit(train, epochs=5)

A `Pipeline` knows no task. `fit` asks it for this task's rows of each global batch; so does `pipeline.batches(epoch)`
in a loop of your own. Its order is a function of seed and epoch, its position a number of steps.

    print(tfdist.data.audit(train, tasks=3))  # which example goes to which task
"""

from tfdist.data.arrays import from_arrays
from tfdist.data.auditing import Audit, Visit, audit
from tfdist.data.files import from_files
from tfdist.data.function import InputContext, from_function
from tfdist.data.pipeline import Pipeline

__all__ = ["Audit", "InputContext", "Pipeline", "Visit", "audit", "from_arrays", "from_files", "from_function"]
