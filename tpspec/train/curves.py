"""Pictures of a training run: loss and acceptance over its steps. Needs matplotlib, which the extra `train` brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpspec.written import whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def draw(path: Path, history: Sequence[dict[str, Any]]) -> bool:
    """A PNG of both curves; False where there is no matplotlib to draw it with."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, chains = figure.subplots(1, 2)
    steps = [point["step"] for point in history]
    found = [point["acceptance"]["all"] for point in history]
    for depth in range(len(history[0]["loss"])):
        losses.plot(steps, [point["loss"][depth] for point in history], label=f"draft step {depth + 1}")
    for depth in range(len(found[0]["by_depth"])):
        chains.plot(steps, [point["by_depth"][depth] for point in found], label=f"first {depth + 1} right")
    last = found[-1]["tokens_per_round"]
    losses.set(title="loss", xlabel="step", ylabel="cross-entropy with the target's law")
    chains.set(title=f"held-out greedy acceptance; {last:.2f} tokens per round", xlabel="step", ylim=(0, 1))
    for axes in (losses, chains):
        axes.grid(alpha=0.3)
        axes.legend()
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=120)
    return True
