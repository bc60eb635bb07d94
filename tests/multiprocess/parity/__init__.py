"""Small trainings that must give the same numbers in one plain Keras process and on N tasks.

Each case is a function of a `Run` and returns named arrays: epoch logs, batch logs, weights, predictions. It is
ordinary Keras code; only the scope is entered, which is no strategy at all in the plain process.
"""

# Each makes its cases when it is imported.
from parity import inputs, losses, metrics, models, optimizing, own_loops, own_steps, precision, sizes, state, ways  # noqa: F401
from parity.cases import CASES, Case, Run

__all__ = ["CASES", "Case", "Run"]
