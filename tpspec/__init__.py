"""tpspec: tensor-parallel speculative decoding that counts collective rounds per accepted token."""

__version__ = "0.1.0"
