"""`generate`, where every rank but the first runs the kernels of an older CPU."""

from __future__ import annotations

import os
import sys

if os.environ["LOCAL_RANK"] != "0":
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    os.environ["NPY_DISABLE_CPU_FEATURES"] = "X86_V4 AVX512_SKX AVX512_ICL AVX512_SPR"  # numpy's names, old and new

from tpspec.generate import main

if __name__ == "__main__":
    sys.exit(main())
