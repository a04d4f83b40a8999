"""Collectives through the host's memory are those of the host, and ranks may then share a card."""

from __future__ import annotations

import pytest
import torch

from tpspec.comm.communicator import Communicator, Purpose
from tpspec.comm.distributed import Place
from tpspec.comm.threads import ThreadWorld
from tpspec.comm.through_host import ThroughHost
from tpspec.errors import UserError
from tpspec.roles.door import pick_device
from tpspec.topology.config import Topology

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_it_sums_into_the_tensor_it_is_given_and_gathers_in_order() -> None:
    """Stands against a sum that stays on the host: layers go on with the tensor they handed in."""

    def rank(comm: Communicator) -> tuple[list[float], list[list[float]], bool]:
        staged = ThroughHost(comm)
        x = torch.tensor([1.0, 2.0 + comm.rank], device=DEVICE)
        given = x.data_ptr()
        gathered = staged.all_gather(x, Purpose.pick)
        total = staged.all_reduce(x, Purpose.mlp)
        assert total.device.type == gathered.device.type == DEVICE.type
        return total.tolist(), gathered.tolist(), total.data_ptr() == given

    told = ThreadWorld(2).run(rank)
    assert told == [([2.0, 5.0], [[1.0, 2.0], [1.0, 3.0]], True)] * 2


def topology(num_ranks: int, device: str = "cuda", **link: object) -> Topology:
    target = {"model": "smollm2-135m", "ranks": list(range(num_ranks))}
    return Topology.model_validate({"name": "a test", "target": target, "device": device, "link": link})


def test_ranks_share_a_card_only_where_collectives_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks on a card. Stands against a rank sent to a card that is not there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [Place(rank, 3, rank, 3) for rank in range(3)]
    with pytest.raises(UserError, match=r"with link\.transport: host \(or peer\) ranks may share one"):
        pick_device(topology(3), places[2])
    for transport in ("host", "peer"):
        assert [pick_device(topology(3, transport=transport), place).index for place in places] == [0, 1, 0]
    assert pick_device(topology(3, "auto"), places[0]) == torch.device("cpu")
    assert pick_device(topology(3, "auto", transport="host"), places[2]) == torch.device("cuda", 0)


def test_without_cards_it_is_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device(topology(2, "auto", transport="host"), Place(1, 2, 1, 2)) == torch.device("cpu")
    with pytest.raises(UserError, match="0 are here"):
        pick_device(topology(2, transport="host"), Place(0, 2, 0, 2))
