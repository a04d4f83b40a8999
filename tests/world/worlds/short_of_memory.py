"""Run under torchrun: `-m tpspec.generate ARGS`, on a machine where rank 1 alone has almost no memory."""

import os
import sys
import tempfile
from pathlib import Path

from tpspec.generate import main
from tpspec.roles import memory

if os.environ["RANK"] == "1":
    memory.MEMINFO = Path(tempfile.mkdtemp()) / "meminfo"
    memory.MEMINFO.write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
sys.exit(main(sys.argv[1:]))
