"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from parity.cases import Run, case, fitted, regression, trained

layers, optimizers, losses = keras.layers, keras.optimizers, keras.losses


def _optimizer_cases() -> None:
    o = optimizers
    made: dict[str, Callable[[], Any]] = {
        "sgd_momentum": lambda: o.SGD(0.05, momentum=0.9),
        "adamw": lambda: o.AdamW(1e-2, weight_decay=0.1),
        "schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.01, 3, 0.5)),
        "clipnorm": lambda: o.Adam(1e-2, clipnorm=0.1),
        "global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.05),
        "clipvalue": lambda: o.SGD(0.1, clipvalue=0.01),
        "accumulation": lambda: o.Adam(1e-2, gradient_accumulation_steps=3),
        "accumulation_and_clipping": lambda: o.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.05
        ),
        "ema": lambda: o.Adam(1e-2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        "lion": lambda: o.Lion(1e-3),
        "adafactor": lambda: o.Adafactor(1e-2),
        "loss_scale": lambda: o.LossScaleOptimizer(
            o.Adam(1e-2, clipnorm=0.1), initial_scale=1024.0, dynamic_growth_steps=3
        ),
        "loss_scale_and_accumulation": lambda: o.LossScaleOptimizer(
            o.Adam(1e-2, gradient_accumulation_steps=2), initial_scale=1024.0, dynamic_growth_steps=3
        ),
    }
    for name, make in made.items():
        case(
            lambda run, make=make: trained(run, optimizer=make, epochs=3), name=f"optimizer_{name}", core="clip" in name
        )


_optimizer_cases()


@case(core=True)
def overflow_on_one_task(run: Run) -> dict:
    """Row 22 overflows float32 in one task only: all must skip that step, with one scale."""
    x, y = regression(36)
    x[22] = 1e25
    with run.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        scaled = optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), initial_scale=1024.0, dynamic_growth_steps=3)
        model.compile(scaled, "mse", jit_compile=False)
    result = fitted(model, x, y)
    del result["log loss"], result["batch logs"]  # inf and NaN
    return {**result, "scale": np.array(scaled.dynamic_scale), "iterations": np.array(scaled.iterations)}
