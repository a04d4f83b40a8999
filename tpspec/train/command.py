"""The parts of one training run put together: texts, taps, vocabulary, head, loop, files.

Knows every other file of this room; decides nothing that an option does not say.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tpspec.errors import UserError
from tpspec.train.batches import split
from tpspec.train.curves import draw
from tpspec.train.files import make_folder, publish
from tpspec.train.loop import Training
from tpspec.train.machine import bfloat16_is_faster, device
from tpspec.train.model import DraftModel
from tpspec.train.objective import Caps, Judge
from tpspec.train.progress import Progress
from tpspec.train.taps import Shards, Tapper, fingerprint, usual_size
from tpspec.train.target import taught
from tpspec.train.texts import read_texts
from tpspec.train.vocabulary import DraftVocabulary
from tpspec.written import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpspec.train.eagle import EagleHead
    from tpspec.train.loop import Plan
    from tpspec.train.medusa import MedusaHeads
    from tpspec.train.target import Taught
    from tpspec.train.texts import Told

    # The third: the usual size of each feature.
    Make = Callable[[Taught, DraftVocabulary, Tensor], EagleHead | MedusaHeads | DraftModel]

HELD_OUT = 0.03  # of the shards


@dataclass(frozen=True, slots=True)
class Order:
    """What a user asked for. model: the target's folder. make: the head, from what the data says.

    num_ids: of the draft vocabulary; None: the target's. bf16: whether products are done in bfloat16; None: if that is
    faster here. beside: patterns of files of the target that are copied, for a head that is a model.
    """

    model: Path
    data: Path
    out: Path
    num_ids: int | None
    plan: Plan
    bf16: bool | None
    make: Make
    beside: tuple[str, ...] = ()


def tap(model: Path, data: Path) -> Shards:
    """The taps of all texts in `data`; those that are missing are made."""
    shards = Shards(data, read_texts(data), fingerprint(model))
    if missing := shards.missing():
        tapper = Tapper(model, device())
        progress = Progress("shards of hidden states", len(shards), len(shards) - len(missing))
        for index in missing:
            texts = shards.texts(index)
            shards.write(index, tapper.taps(texts))
            progress.step(tokens=sum(len(told.ids) for told in texts))
        progress.end()
    return shards


class Apprenticeship:
    """One run, from its data to its files."""

    def __init__(self, order: Order) -> None:
        if order.out.resolve() == order.model.resolve():
            raise UserError(f"--out {order.out} is the folder of the target itself; should be another")
        self._order = order
        make_folder("--out", order.out)
        shards = tap(order.model, order.data)
        try:
            self._learnt, held = split(shards, HELD_OUT)
        except UserError as error:
            raise UserError(f"{order.data} holds {error}") from error
        target = taught(order.model)
        texts = [told for index in self._learnt for told in shards.texts(index)]
        answers = [told.answer for told in texts]
        self._num_tokens = sum(map(len, answers))
        num_ids = order.num_ids or target.vocab
        self._vocabulary = DraftVocabulary.most_used(answers, num_ids, target.vocab, target.eos_ids)
        torch.manual_seed(order.plan.seed)
        self._head = order.make(target, self._vocabulary, usual_size(shards.read(self._learnt[0])))
        self._made_of = {"ids": list(self._vocabulary.ids), "texts": _digest(texts), "config": self._head.config()}
        self._bf16 = bfloat16_is_faster(device()) if order.bf16 is None else order.bf16
        self._training = Training(self._head, self._judge(target), shards, held, order.plan, bf16=self._bf16)

    def run(self) -> dict[str, Any]:
        """The record that is also written beside the head."""
        order, training = self._order, self._training
        training.resume(order.out, self._made_of)
        for pattern in order.beside:
            for path in order.model.glob(pattern):
                with whole(order.out / path.name) as part:
                    shutil.copy(path, part)
        progress = Progress("steps", order.plan.steps, training.step)
        training.run(self._learnt, lambda tokens, loss: progress.step(tokens=tokens, loss=loss), self._keep)
        progress.end()
        return self._record()

    def _judge(self, target: Taught) -> Judge:
        ids, bias_V = list(self._vocabulary.ids), target.head_bias_V
        own_V = None if bias_V is None else bias_V[ids].float().to(device())
        head_VD, places = target.head_VD[ids], self._vocabulary.place_of()
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        cap = self._head.cap if isinstance(self._head, DraftModel) else None  # heads say what they say uncapped
        return Judge(head_VD.to(device()), places.to(device()), dtype, Caps(target.cap, cap), own_V)

    def _keep(self) -> None:
        """The head first: who goes on from the last checkpoint has nothing left to write."""
        publish(self._order.out, self._head.tensors(), self._head.config(), self._record())
        self._training.save(self._order.out, self._made_of)
        draw(self._order.out / "curves.png", self._training.history)

    def _record(self) -> dict[str, Any]:
        return {
            "plan": asdict(self._order.plan),
            "answer_tokens": self._num_tokens,
            "draft_vocabulary": {
                "ids": len(self._vocabulary.ids),
                "coverage": round(self._vocabulary.coverage, 4),
            },
            "bfloat16": self._bf16,
            "history": self._training.history,
        }


def _digest(texts: Sequence[Told]) -> str:
    return hashlib.sha256(msgspec.json.encode(texts)).hexdigest()
