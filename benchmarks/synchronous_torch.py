"""One of two workers that train with PyTorch: `synchronous_torch.py alone|ddp INDEX ADDRESS ADDRESS`.

An order is the name of a case; the answer is the seconds of its epochs. `synchronous.py` runs it,
in a Python that has torch and NumPy.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import synchronous_cases as cases
import teams
import torch
from torch import distributed, nn


def main(way: str, index: int, addresses: list[str]) -> None:
    teams.end_with_parent()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if way == "ddp":
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{addresses[0]}", rank=index, world_size=len(addresses)
        )
    teams.serve(lambda name: trainer(cases.CASES[name], index, together=way == "ddp"))


def build(case: cases.Mlp | cases.Digits) -> nn.Module:
    if isinstance(case, cases.Mlp):
        inner = [layer for _ in range(case.layers) for layer in (nn.Linear(case.units, case.units), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(case.units, 1))
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def trainer(case: cases.Mlp | cases.Digits, index: int, *, together: bool) -> Callable[[], float]:
    """Returns a function that trains on this worker's half, with `DistributedDataParallel` or alone."""
    x, y = map(torch.from_numpy, cases.half(case.data(), index))
    plain = build(case)
    is_digits = isinstance(case, cases.Digits)
    if is_digits:
        x = x.permute(0, 3, 1, 2).contiguous()  # channels first
    loss_of = nn.CrossEntropyLoss() if is_digits else nn.MSELoss()
    # The settings that Keras has by default.
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(plain.parameters(), lr=1e-3, eps=1e-7)
        if is_digits
        else torch.optim.SGD(plain.parameters(), lr=1e-2)
    )
    model = nn.parallel.DistributedDataParallel(plain) if together else plain

    def train() -> float:
        start = time.perf_counter()
        for _ in range(case.epochs):
            loss_sum, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
            for rows in torch.randperm(len(x)).split(case.batch_size):
                x_batch, y_batch = x[rows], y[rows]
                optimizer.zero_grad()
                scores = model(x_batch)
                loss = loss_of(scores, y_batch)
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach() * len(rows)
                if is_digits:
                    right += (scores.detach().argmax(1) == y_batch).sum()
            last_loss = float(loss_sum) / len(x)
            float(right)
        seconds = time.perf_counter() - start
        if not math.isfinite(last_loss):
            raise SystemExit(f"the loss is {last_loss}; such numbers are no measure of speed")
        return seconds

    train()
    return train


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
