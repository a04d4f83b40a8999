"""Run under torchrun: `-m tpspec.generate ARGS`, where rank 1 finds no memory for its third forward."""

import os
import sys
from itertools import count

import torch

from tpspec.generate import main
from tpspec.model.target import ShardedTarget

if os.environ["RANK"] == "1":
    logits, number = ShardedTarget.logits, count(1)

    def short(self, spans):
        if next(number) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory ...")
        return logits(self, spans)

    ShardedTarget.logits = short
sys.exit(main(sys.argv[1:]))
