"""`torchrun --rdzv-backend tpspec`: how the ranks of one host find each other without a listener that others can reach.

torch's own rendezvous keep a TCPStore, which listens on every address and asks nobody who they are. This one keeps the
agent's notes in its memory, and gives each start of the ranks a new folder that only their user may enter, with their
store in a file, and a file with the pid of each as its name. torch finds it by the entry point in pyproject.toml. Must
not know what the ranks do.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is there, but torch does not list it
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from tpspec.comm.process import clear_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousParameters


class PrivateRendezvous(RendezvousHandler):
    """One agent alone. Its ranks read the folder's path where torchrun else puts a host's name: MASTER_ADDR."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._folder: TemporaryDirectory[str] | None = None  # gone when the agent is, unless that is killed

    def get_backend(self) -> str:
        return "tpspec"

    def next_rendezvous(self) -> RendezvousInfo:
        """Before the first start of the ranks and before each further one: what dead ranks wrote is not met again."""
        self._clear()
        self._folder = TemporaryDirectory(prefix="tpspec-")
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._folder.name, 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is no other agent to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._clear()
        return True

    def _clear(self) -> None:
        """What ranks left that were ended before they could clear up goes, too."""
        if self._folder is not None:
            for pid in Path(self._folder.name).glob("[0-9]*"):
                clear_after(int(pid.name))
            self._folder.cleanup()


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch asks the entry point for."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes != 1:
        raise ValueError("--rdzv-backend tpspec is for the ranks of one host; several meet by torchrun's own c10d")
    return PrivateRendezvous(parameters.run_id)
