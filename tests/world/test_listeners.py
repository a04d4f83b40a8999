"""What a world listens on: nothing that another machine could reach, but the HTTP port.

Real processes; their sockets as the kernel lists them.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import torch

from scripts.serving import free_port
from tests.checkpoints import tiny
from tests.world.test_serving import ENV, until
from tpspec.comm.distributed import Place, join_world
from tpspec.comm.rendezvous import handler
from tpspec.comm.sockets import private_folder
from tpspec.roles.door import find_place

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
PRIVATE = ["--rdzv-backend", "tpspec", "--rdzv-endpoint", "here"]  # as in launch/serve: test_launch.py looks there
START_S = 120
OPEN = "torchrun's store listens on every address of this machine"


class World:
    """A server on every address, so that its port is the one exception."""

    def __init__(self, topology: Path, flags: list[str], num_ranks: int) -> None:
        self.port = free_port()
        options = ["--set", f"serve.port={self.port}", "--set", "serve.host=0.0.0.0"]
        launch = [sys.executable, "-m", "torch.distributed.run", *flags, "--nproc-per-node", str(num_ranks)]
        command = [*launch, "-m", "tpspec.serve", str(topology), *options]
        self.launcher = psutil.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.launcher.stdout), daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def ready(self) -> World:
        until(lambda: "ready: " in self.output or self.launcher.poll() is not None, START_S, "the server is ready")
        assert self.launcher.poll() is None, self.output
        return self

    def processes(self) -> list[psutil.Process]:
        return [self.launcher, *self.launcher.children(recursive=True)]

    def reachable(self) -> set[int]:
        """Ports of all its processes that are bound to an address other than loopback: TCP's and UDP's."""
        sockets = [socket for process in self.processes() for socket in process.net_connections("inet")]
        bound = [socket.laddr for socket in sockets if socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
        assert bound
        return {at.port for at in bound if not ip_address(at.ip).is_loopback}

    def end(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
        self.launcher.wait(30)
        self._reader.join(5)
        self.launcher.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("smollm2", tmp_path_factory.mktemp("listeners") / "model")


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def begin(flags: list[str], ranks: list[int], **draft: object) -> World:
        target = {"model": str(model), "ranks": ranks, "dtype": "float32"}
        section = {"source": "ngram", "tokens": 4} | draft
        path = tmp_path / "topology.yaml"
        path.write_text(json.dumps({"name": "a test", "target": target, "draft": section, "device": "cpu"}))
        worlds.append(World(path, flags, len(ranks) + ("placement" in draft)))
        return worlds[-1].ready()

    yield begin
    for world in worlds:
        world.end()


def test_nothing_of_a_world_but_its_http_port_can_be_reached_from_elsewhere(
    start: Callable[..., World], model: Path
) -> None:
    """Stands against torch's TCPStore, gloo on the address of the host's name, and a drafter's link on a port.

    The folder where the ranks meet lets nobody else in, and is gone afterwards.
    """
    world = start(PRIVATE, [0, 1], model=str(model), source="model", placement={"dedicated": 2})
    assert len(world.processes()) >= 6  # the launcher, three ranks, the drafter, HTTP
    assert world.reachable() == {world.port}
    rank = next(process for process in world.processes() if "RANK" in process.environ())
    folder = Path(rank.environ()["MASTER_ADDR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    world.end()
    assert not folder.exists()
    assert OPEN not in world.output


def test_under_a_plain_torchrun_the_server_names_the_flag_once(start: Callable[..., World]) -> None:
    """And the store that it warns of is seen by this file's reader of sockets, so the test above can fail."""
    world = start(["--standalone"], [0])
    assert len(world.reachable() - {world.port}) >= 1
    world.end()
    (line,) = [line for line in world.lines if OPEN in line]
    assert "--rdzv-backend tpspec" in line


def test_ranks_of_one_host_stay_off_its_other_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo and NCCL listen where the host's name leads, which may be the office's network; several hosts need it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    find_place()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    find_place()
    assert os.environ["GLOO_SOCKET_IFNAME"] in psutil.net_if_addrs()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"  # the user's word


def test_each_start_of_the_ranks_meets_in_a_folder_of_its_own() -> None:
    """What dead ranks left in their store would be taken for the word of the next ones."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    agent = handler()(RendezvousParameters("tpspec", "", "a run", 1, 1, local_addr=None))
    folders = [Path(agent.next_rendezvous().bootstrap_store_info.master_addr) for _ in range(2)]
    assert [folder.exists() for folder in folders] == [False, True]
    agent.shutdown()
    assert not folders[1].exists()
    with pytest.raises(ValueError, match="one host"):
        handler()(RendezvousParameters("tpspec", "", "a run", 2, 2, local_addr=None))


def test_a_rank_that_was_ended_before_it_could_clear_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes before its handler, or none that has one, left the folder of its sockets behind."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = handler()(RendezvousParameters("tpspec", "", "a run", 1, 1, local_addr=None))
    place = Place(address=agent.next_rendezvous().bootstrap_store_info.master_addr)
    with join_world(place, torch.device("cpu")):
        assert private_folder().exists()
    agent.shutdown()
    assert not [*tmp_path.iterdir()]


def test_ranks_that_died_are_followed_by_ranks_that_meet(tmp_path: Path) -> None:
    """A restart by torchrun, on what the flag makes: no host's name and no port is needed the second time either."""
    script = Path(__file__).parent / "worlds" / "again.py"
    launch = [sys.executable, "-m", "torch.distributed.run", *PRIVATE, "--max-restarts", "1", "--nproc-per-node", "2"]
    environ = {**ENV, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([*launch, str(script)], env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["0:3", "1:3"]
    assert not list(tmp_path.glob("tpspec-*"))
