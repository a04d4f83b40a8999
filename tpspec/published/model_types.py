"""The types that model/architectures.py declares, and what each means by what its config.json leaves out."""

from __future__ import annotations

from tpspec.published.dense_types import DENSE_TYPES
from tpspec.published.mixed_types import MIXED_TYPES

MODEL_TYPES = DENSE_TYPES | MIXED_TYPES
