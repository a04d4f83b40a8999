"""The types that model/architectures.py declares, and what each means by what its config.json leaves out."""

from __future__ import annotations

from tpspec.published.types_a_to_g import A_TO_G
from tpspec.published.types_h_to_m import H_TO_M
from tpspec.published.types_n_to_z import N_TO_Z

MODEL_TYPES = A_TO_G | H_TO_M | N_TO_Z
