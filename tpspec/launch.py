"""`python -m tpspec.launch WORDS`: torchrun with the same words, which ends as its ranks do.

torchrun itself ends with a traceback and exit code 1 whenever a signal or a rank ends it, also where it was told to
stop and everybody left in order. A front door; must not know what the ranks do.
Exit codes: 0 stopped when asked; else that of the rank that ended first, see errors.py (4 if a signal ended it).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tpspec.comm.launcher import VERDICT
from tpspec.comm.process import folder_prefix
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from types import FrameType

# Where torchrun warns of every signal that it passes on.
LOQUACIOUS = "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api"


PASSED_ON = "PET_SIGNALS_TO_HANDLE"  # variable: to which signals torchrun listens, for all of which it ends its ranks


def main() -> int:
    # Ctrl-C asks for what SIGTERM does. As SIGINT ranks that import say so in tracebacks, and those that wait for each
    # other in torch hear nothing of it.
    os.environ[PASSED_ON] = "SIGTERM,SIGHUP,SIGQUIT"
    signal.signal(signal.SIGTERM, _leave)  # until torchrun has its own
    signal.signal(signal.SIGINT, _terminate)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in LOQUACIOUS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with TemporaryDirectory(prefix=folder_prefix()) as folder:
        verdict = Path(folder) / "exit-code"
        os.environ[VERDICT] = str(verdict)
        try:
            torchrun()
        except SignalException:
            return int(verdict.read_text()) if verdict.exists() else 0
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            return code if code > 0 else WorldFailure.exit_code
    return 0


def _leave(_: int, __: FrameType | None) -> None:
    sys.exit(0)


def _terminate(_: int, __: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
