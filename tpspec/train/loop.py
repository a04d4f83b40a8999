"""The training loop: batches, AdamW, warm-up and cosine, measurements now and then, checkpoints.

Must not know which head it trains. A run that was stopped goes on from its last checkpoint, over the same batches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from tpspec.errors import UserError
from tpspec.train.batches import endless, shard_batches
from tpspec.train.files import read_checkpoint, save_checkpoint
from tpspec.train.objective import Acceptance, Judge, chained, lengths, weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from tpspec.train.batches import Batch
    from tpspec.train.taps import Shards

WARM_UP = 0.03  # of the run
LEAST = 0.02  # of the rate, at the end
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """steps: batches at most. minutes: of training at most, None for no limit. rate: the highest learning rate.

    rows: positions of a batch, padding included. every: steps between measurements, each with a checkpoint.
    """

    steps: int
    minutes: float | None
    rate: float
    rows: int
    every: int
    seed: int

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1: whichever of steps and minutes is nearer its end."""
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_time))


def rate_at(progress: float) -> float:
    """Share of the highest rate: up in a straight line, down along a cosine."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)
    done = (progress - WARM_UP) / (1 - WARM_UP)
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * done))


class Training:
    """One head over the shards of one folder. history: a point of every measurement."""

    def __init__(
        self, head: nn.Module, judge: Judge, shards: Shards, held: Sequence[int], plan: Plan, bf16: bool
    ) -> None:
        self._accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
        self._shards, self._held, self._plan, self._judge = shards, held, plan, judge
        optimizer = torch.optim.AdamW(head.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._head, self._optimizer = self._accelerator.prepare(head, optimizer)
        self.step, self._seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    def resume(self, folder: Path, made_of: dict[str, Any]) -> None:
        """Goes on from the checkpoint in `folder`, where there is one. made_of: what must be the same as then."""
        if (state := read_checkpoint(folder)) is not None:
            if state["made_of"] != made_of:
                raise UserError(f"{folder} holds a checkpoint of other texts or sizes; delete it or change --out")
            self._accelerator.unwrap_model(self._head).load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self._seconds, self.history = state["step"], state["seconds"], state["history"]

    def save(self, folder: Path, made_of: dict[str, Any]) -> None:
        state: dict[str, Any] = {"head": self._accelerator.unwrap_model(self._head).state_dict()}
        state |= {"optimizer": self._optimizer.state_dict(), "made_of": made_of}
        save_checkpoint(folder, state | {"step": self.step, "seconds": self._seconds, "history": self.history})

    def run(self, indices: Sequence[int], stepped: Callable[[int, float], None], measured: Callable[[], None]) -> None:
        """Trains to the end of the plan. stepped: (tokens, loss) of each; measured: after each point of history."""
        if self._progress() >= 1:
            return
        batches = endless(self._shards, indices, self._plan.rows, self._plan.seed)
        losses: list[list[float]] = []
        for batch in islice(batches, self.step, None):
            if self._progress() >= 1:
                break
            began = time.monotonic()
            losses.append(self._learn(batch.to(self._accelerator.device)))
            self._seconds += time.monotonic() - began
            self.step += 1
            stepped(batch.num_tokens, losses[-1][0])
            if self.step % self._plan.every == 0 or self._progress() >= 1:
                self._measure(losses)
                losses = []
                measured()

    @property
    def _output(self) -> Tensor:
        output: Tensor = self._accelerator.unwrap_model(self._head).output
        return output

    def _progress(self) -> float:
        return self._plan.progress(self.step, self._seconds)

    def _learn(self, batch: Batch) -> list[float]:
        """One step; the losses of its draft steps."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate * rate_at(self._progress())
        losses = self._judge.losses(self._head(batch), self._output, batch)
        self._accelerator.backward(weighted(losses))
        self._accelerator.clip_grad_norm_(self._head.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def _measure(self, losses: list[list[float]]) -> None:
        means = [sum(column) / len(column) for column in zip(*losses, strict=True)]
        point = {"step": self.step, "seconds": round(self._seconds), "loss": means, "acceptance": self.acceptance()}
        self.history.append(point)

    @torch.inference_mode()
    def acceptance(self) -> dict[str, Any]:
        """Of greedy chains, over the held-out texts that were written greedily."""
        found, depth = Acceptance(), self._accelerator.unwrap_model(self._head).depth
        for index in self._held:
            for batch in shard_batches(self._shards, index, self._plan.rows, greedy=True):
                moved = batch.to(self._accelerator.device)
                agreed_BAK = chained(self._judge.agreed(self._head(moved), self._output, moved), depth)
                for text, kind in enumerate(batch.kinds):
                    found.add(kind, lengths(agreed_BAK[text], moved.real_BA()[text]), depth)
        return found.report()
