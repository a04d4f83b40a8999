"""Heads on the target's last hidden state that guess the tokens to come, each its own place, all at once.

Cai et al., "Medusa" (arXiv 2401.10774; github.com/FasterDecoding/Medusa). Head 0 guesses the token after the root: the
hidden state is that of the row before the root, and what follows that row is the root, which the target said itself.
Must not know where heads come from (medusa_files.py) or how a verdict is reached.

Shapes: B sequences, H heads, L layers of a head, D hidden, V draft ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F

from tpspec.draft.levels import Levels
from tpspec.draft.protocol import Needs
from tpspec.model.decoder import FINAL
from tpspec.model.graphs import CardRecorder, RowGraphs
from tpspec.model.linear import linear
from tpspec.staged import sent
from tpspec.verify.draw import Draw, rank
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.draft.medusa_files import MedusaWeights
    from tpspec.draft.protocol import Ask, Taps
    from tpspec.draft.shapes import Shape
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.noise import Noise

MOST_RECORDED = 8  # sequences: a recording keeps logits of all heads for each


class MedusaHeads:
    """All heads, run together; on a card they are one replay.

    ids_V: of the target, for the columns of the logits; None where they are the same.
    """

    def __init__(self, weights: MedusaWeights, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.ids_V = None if weights.ids_V is None else weights.ids_V.to(device)
        self.num_heads, self.num_ids = weights.weights_LHDD.shape[1], len(weights.outputs_VD[0])
        # x W^T of all heads in one product
        self._weights_LHDD = weights.weights_LHDD.to(device, dtype).transpose(2, 3)
        self._biases_LH1D = weights.biases_LHD.to(device, dtype).unsqueeze(2)
        bias_V = None if weights.bias_V is None else weights.bias_V.to(device, dtype)
        self._outputs = [linear(output_VD.to(device, dtype), bias_V) for output_VD in weights.outputs_VD]
        self._run: Callable[[Tensor], Tensor] = self._logits
        if device.type == "cuda":
            hidden = weights.weights_LHDD.shape[-1]
            self._run = RowGraphs(self._logits, CardRecorder(), MOST_RECORDED, hidden, self._weights_LHDD)

    @torch.inference_mode()
    def __call__(self, hidden_BD: Tensor) -> Tensor:
        """Logits [B, H, V]; the next call may overwrite them."""
        return self._run(hidden_BD.to(self.device, self.dtype))

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        x_HBD = hidden_BD.expand(self.num_heads, -1, -1)
        for weight_HDD, bias_H1D in zip(self._weights_LHDD, self._biases_LH1D, strict=True):
            x_HBD = x_HBD + F.silu(torch.baddbmm(bias_H1D, x_HBD, weight_HDD))
        x_BHD = x_HBD.transpose(0, 1)
        if len(self._outputs) == 1:
            return self._outputs[0](x_BHD.flatten(0, 1)).reshape(-1, self.num_heads, self.num_ids)
        return torch.stack([output(x_HBD[head]) for head, output in enumerate(self._outputs)], 1)


class Medusa:
    """Proposes the likeliest tree of the heads' candidates: a candidate's odds do not depend on the path to it.

    coupled: a head's candidates are what the target, whose noise this is, would draw from its odds; else they are its
    likeliest tokens. branches: candidates of a head that are considered; 1 makes chains. shape: of every tree, by rank;
    None where the likeliest candidates make it.
    """

    needs = Needs(gives_odds=True, taps=(FINAL,))

    def __init__(
        self, heads: MedusaHeads, vocab: int, noise: Noise, *, coupled: bool, branches: int, shape: Shape | None
    ) -> None:
        self._heads, self._vocab, self._noise, self._coupled = heads, vocab, noise, coupled
        self._width = branches if shape is None else shape.branches
        self._levels = Levels(heads.num_heads, shape)
        self._last: dict[int, tuple[int, Tensor]] = {}  # the last row of a text that is known, and its position

    def observe(self, verdicts: Sequence[Verdict], taps: Taps | None) -> None:
        for seq, known_nD in {} if taps is None else taps.before.items():
            self._last[seq] = len(known_nD) - 1, sent(known_nD[-1].clone(), self._heads.device)
        for seq, (first, rows_nD) in {} if taps is None else taps.rows.items():
            if len(rows_nD):
                self._last[seq] = first + len(rows_nD) - 1, rows_nD[-1].clone()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        for ask in asks:
            self._levels.judge(ask)
        known = [ask for ask in asks if ask.num_tokens > 0 and self._last.get(ask.seq, (-1,))[0] == len(ask.tokens) - 2]
        if known:
            self._guess(known)
        return [self._levels.tree(ask) for ask in asks]

    def forget(self, seq: int) -> None:
        self._last.pop(seq, None)
        self._levels.forget(seq)

    def _guess(self, asks: Sequence[Ask]) -> None:
        num_heads = self._heads.num_heads
        logits_BHV = self._heads(torch.stack([self._last[ask.seq][1] for ask in asks]))
        rows = RowLogits(logits_BHV.flatten(0, 1), self._vocab, listed_V=self._heads.ids_V)
        draws = [self._draw(ask, depth) for ask in asks for depth in range(num_heads)]
        ranked = iter(rank(rows, draws, self._width, self._noise))
        for ask in asks:
            self._levels.guess(ask, [next(ranked) for _ in range(num_heads)])

    def _draw(self, ask: Ask, depth: int) -> Draw:
        """Which tokens will lie between is not known yet, only how many."""
        sampling = ask.sampling if self._coupled else msgspec.structs.replace(ask.sampling, temperature=0.0)
        return Draw(ask.tokens, ask.num_prompt, sampling, (ask.tokens[-1],) * depth)
