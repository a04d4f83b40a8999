"""What a model should do on well-known boxes: one table for each width of weights, as lines of text.

Predictions of `cost.py` over the links shipped here; must not print. Weights are streamed as common formats pack them
(8.25 and 4.5 bits with their scales, head included), which is more than this package's own. The column of weights is
what one row reads: of a mixture, six read more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.published.shape import ModelShape, shape_of
from tpspec.topology.caches import kv_bytes_read, num_attended
from tpspec.topology.cards import Card, card
from tpspec.topology.cost import Load, StepCost, sequential_round_s, step_cost, tokens_per_round
from tpspec.topology.links import link
from tpspec.topology.report import table
from tpspec.topology.shards import split
from tpspec.topology.sizes import expert_params, num_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpspec.topology.links import LinkTable

STREAMED_BITS = {16: 16.0, 8: 8.25, 4: 4.5}
CONTEXT, DRAFTED, DRAFT_S = 4096, 5, 1e-3
ACCEPTANCES = (0.6, 0.75, 0.85)
BOXES = (
    ("8x3090 gen3x8 stock", "3090", "rtx3090x8_gen3x8_2socket_stock/nccl"),
    ("8x3090 gen3x8 stock, host-staged kernel", "3090", "rtx3090x8_gen3x8_2socket_stock/host_staged"),
    ("8x3090 gen3x8 P2P, NCCL", "3090", "rtx3090x8_gen3x8_2socket_p2p_patched/nccl"),
    ("8x3090 gen3x8 P2P, own kernel", "3090", "rtx3090x8_gen3x8_2socket_p2p_patched/twoshot"),
    ("8x3090 gen4x16 stock", "3090", "rtx3090x8_gen4x16_stock/nccl"),
    ("8x3090 gen4x16 P2P, NCCL", "3090", "rtx3090x8_gen4x16_2socket_p2p_patched/nccl"),
    ("8x3090 gen4x16 P2P, own kernel", "3090", "rtx3090x8_gen4x16_2socket_p2p_patched/custom"),
    ("4x4090 gen4x16 stock", "4090", "rtx4090x4_gen4x16_stock/nccl"),
    ("4x4090 gen4x16 P2P, NCCL", "4090", "rtx4090x4_gen4_p2p_patched/nccl"),
    ("4x4090 gen4x16 P2P, own kernel", "4090", "rtx4090x4_gen4_p2p_patched/push1shot"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a box, and the model's step on it."""

    name: str
    link: LinkTable
    step: StepCost

    @property
    def plain_tokens_per_s(self) -> float:
        return 1 / self.step.seconds(1)

    def tokens_per_s(self, acceptance: float) -> float:
        """With DRAFTED tokens drafted one after another, at DRAFT_S each."""
        round_s = sequential_round_s(self.step.seconds(DRAFTED + 1), DRAFTED * DRAFT_S)
        return tokens_per_round(acceptance, DRAFTED) / round_s


def even_step(shape: ModelShape, on: Card, num_ranks: int, bits: int, over: LinkTable | None) -> StepCost | None:
    """A step of num_ranks equal shares on cards of one kind; None when a share is more than the card holds."""
    load = even_load(shape, num_ranks, bits)
    if load.weights + load.kv > on.usable_bytes:
        return None
    loads, cards = [load] * num_ranks, [on] * num_ranks
    return step_cost(loads, cards, shape, 2 * shape.summed, over)


def even_load(shape: ModelShape, num_ranks: int, bits: int) -> Load:
    """An equal share of weights and of CONTEXT tokens, as if every part could be divided; but of latents, which every
    rank holds whole, what the first rank has."""
    is_cut = shape.latent is not None
    held, parts = split(shape, (1.0,) * (num_ranks if is_cut else 1))[0], 1 if is_cut else num_ranks
    params, num_bytes = num_params(shape, held) / parts, STREAMED_BITS[bits] / 8
    of_experts = expert_params(shape, held) / parts
    idle = 0.0 if shape.experts is None else of_experts * (1 - shape.experts.share_read(1))
    return Load(
        weights=(params + idle) * num_bytes,
        params=params + num_attended(shape, held, CONTEXT) / parts,
        kv=kv_bytes_read(shape, held, "bfloat16", CONTEXT) / parts,
        bits=bits,
        expert_weights=of_experts * num_bytes,
        experts=shape.experts,
    )


def cases(shape: ModelShape, bits: int) -> Iterator[Case]:
    """The boxes that hold the model."""
    for name, card_name, link_name in BOXES:
        over = link(link_name)
        assert over.num_ranks is not None, "a box has a number of ranks"
        step = even_step(shape, card(card_name), over.num_ranks, bits, over)
        if step is not None:
            yield Case(name, over, step)


def what_if(model: str) -> list[str]:
    """The tables. UserError for a model nobody knows."""
    shape = shape_of(model)
    lines = [
        f"{model}, one request, {CONTEXT} tokens of context: predicted, plain and with {DRAFTED} drafts of "
        f"{DRAFT_S * 1e3:.0f} ms each, accepted with probability a",
        f"times in ms; AR: us of an all-reduce of 1 and of {DRAFTED + 1} rows; most of them are estimates (links.yaml)",
    ]
    for bits in STREAMED_BITS:
        rows = [_row(case) for case in cases(shape, bits)]
        lines += ["", f"{bits}-bit", *(table([_heads(), *rows]) if rows else ["fits none of these boxes"])]
    return lines


def _heads() -> tuple[str, ...]:
    drafted = (f"tok/s a={acceptance}" for acceptance in ACCEPTANCES)
    return ("box", "AR us", "weights", "AR", "T1", "tok/s", "AR share", f"T{DRAFTED + 1}", *drafted)


def _row(case: Case) -> tuple[str, ...]:
    step, num_rows = case.step, DRAFTED + 1
    one, several = (case.link.seconds(rows * step.row_bytes) * 1e6 for rows in (1, num_rows))
    return (
        case.name,
        f"{one:.0f}/{several:.0f}",
        f"{max(rank.reading_s(1) for rank in step.ranks) * 1e3:.1f}",
        f"{step.waiting_s(1) * 1e3:.1f}",
        f"{step.seconds(1) * 1e3:.1f}",
        f"{case.plain_tokens_per_s:.0f}",
        f"{step.waiting_s(1) / step.seconds(1):.0%}",
        f"{step.seconds(num_rows) * 1e3:.1f}",
        *(f"{case.tokens_per_s(acceptance):.0f}" for acceptance in ACCEPTANCES),
    )
