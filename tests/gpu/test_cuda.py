"""On a CUDA card the same code computes the same model, and the noise is the CPU's. Run with: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import KINDS, tiny
from tests.parity.test_logits import MOST_OFF, off_in_16_bits, prompt, reference
from tests.worlds import serve, topology
from tpspec.comm.communicator import OneRank
from tpspec.model.batch import Span
from tpspec.model.loader import Loader
from tpspec.published import checkpoint
from tpspec.published.shape import ModelShape
from tpspec.request import Request, Sampling
from tpspec.topology.shards import split
from tpspec.verify.noise import CounterNoise, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_on_a_card_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """float32 without TF32; sums in another order than the CPU's differ in the last bits."""
    folder = tiny(kind, tmp_path)
    (whole,) = split(ModelShape.from_config(checkpoint.read_config(folder), str(folder)), (1.0,))
    decoder = Loader.open(folder, whole, torch.float32, torch.device("cuda")).decoder(OneRank(), 256)
    ids = prompt()
    logits = decoder.forward([Span(0, 0, tuple(ids), ((32, len(ids)),), len(ids))])
    assert (logits.cpu() - reference(folder, ids)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_16_bits_are_as_near_as_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """As on a CPU."""
    assert off_in_16_bits(tiny(kind, tmp_path), torch.device("cuda")) < MOST_OFF


def test_noise_on_a_card_is_that_of_the_cpu() -> None:
    """Ranks on unlike devices must draw the same token."""
    scores = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * 4
    arguments = ([7] * 8, list(range(8)), Stream.target, 0)
    on_cpu, on_card = (CounterNoise().best(scores.to(device), *arguments) for device in ("cpu", "cuda"))
    assert torch.equal(on_cpu[1], on_card[1].cpu())


@pytest.mark.parametrize("accept", ["match", "rejection"])
def test_whole_rounds_run_on_a_card(accept: str, tmp_path: Path) -> None:
    """Stands against an index or a mask left on the CPU."""
    made = topology(tiny("smollm2", tmp_path), accept=accept, device="cuda", draft={"source": "ngram"})
    asks = [Request(i, tuple(prompt(i)), 20, Sampling(temperature=0.7 * i, seed=i)) for i in range(3)]
    told = serve(made, asks, device=torch.device("cuda"))
    assert [len(text) for text in told.texts()] == [20, 20, 20]
