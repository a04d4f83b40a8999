"""torchrun's process as its ranks see it: how often it may still start them again, and where what outlives them is.

Knows torchrun's variables, pids and one folder; must not know what is in the folder. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERDICT = "TPSPEC_VERDICT"  # variable: the file for a rank's exit code that ends the launcher, if it can be told


@dataclass(frozen=True, slots=True)
class Launcher:
    """restarts: how often the ranks have been started again; max_restarts: how often they may be, in its life.

    verdict: the file of VERDICT; None under a plain torchrun, which has an exit code of its own.
    """

    pid: int
    run_id: str
    restarts: int
    max_restarts: int
    verdict: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str], parent: int) -> Launcher | None:
        """From torchrun's variables and this process's parent; None where there is no torchrun."""
        try:
            restarts = int(environ["TORCHELASTIC_RESTART_COUNT"]), int(environ["TORCHELASTIC_MAX_RESTARTS"])
        except (KeyError, ValueError):
            return None
        verdict = Path(environ[VERDICT]) if VERDICT in environ else None
        return cls(parent, environ.get("TORCHELASTIC_RUN_ID", ""), *restarts, verdict)

    @property
    def restarts_left(self) -> int:
        return self.max_restarts - self.restarts

    @property
    def folder(self) -> Path:
        """The same for every start of the ranks, and no other's."""
        return Path(gettempdir()) / f"tpspec-{self.pid}-run-{sha256(self.run_id.encode()).hexdigest()[:12]}"

    def own_folder(self) -> Path:
        """The folder, made if it was not there. Raises UserError where others could have put something into it."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UserError(f"{self.folder} is not a folder of this user alone: remove it")
        return self.folder

    def stop(self, code: int) -> None:
        """What went wrong would go wrong again: it shall not start the ranks another time, but end with this code."""
        if self.verdict is not None:
            self.verdict.write_text(str(code))
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
