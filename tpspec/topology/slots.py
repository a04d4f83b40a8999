"""What beside weights takes room: how many tokens each cache has place for, and the files of a head.

Numbers and file sizes; must not open a weight, nor know how a cache is laid out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.topology.checkpoint import read_config

if TYPE_CHECKING:
    from pathlib import Path

    from tpspec.topology.config import CacheConfig, EngineConfig, ServeConfig, Topology
    from tpspec.topology.shape import ModelShape

FUTURES = 64  # slots of a sequence for tokens that may come
NUM_LEFT = 65  # rows of a text behind its state: its root, and a draft
MOST_LAYERS = 4  # of a head's own
HEAD_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt")  # the first that finds any


def target_slots(topology: Topology) -> int:
    """Of the target's cache: whole pages."""
    return -(-topology.cache.tokens // topology.cache.page) * topology.cache.page


def recent_slots(topology: Topology, shape: ModelShape) -> int:
    """Of the target's layers with a window: whole pages; 0 where they have the slots that all have."""
    return recent_of(shape, topology.cache, topology.serve, topology.engine)


def recent_of(shape: ModelShape, cache: CacheConfig, serve: ServeConfig, engine: EngineConfig) -> int:
    """`recent_slots` of such sections.

    As many requests as may run find place with all that their next tokens see, and the rows of a round besides: n
    positions that follow each other touch ceil((n - 1) / page) + 1 pages at most, wherever they begin.
    """
    if shape.window is None:
        return 0
    of_each = -(-(shape.window - 2) // cache.page) + 2
    num_pages = min(serve.max_running, engine.max_rows) * of_each + -(-engine.max_rows // cache.page)
    return num_pages * cache.page if num_pages * cache.page < cache.tokens else 0


def num_states(topology: Topology, shape: ModelShape) -> int:
    """Of a model that keeps a state of each text that runs, and of beginnings; 0 where it keeps none."""
    return states_of(shape, topology.cache, topology.serve, topology.engine)


def states_of(shape: ModelShape, cache: CacheConfig, serve: ServeConfig, engine: EngineConfig) -> int:
    """`num_states` of such sections."""
    return min(serve.max_running, engine.max_rows) + kept_of(cache) if shape.delta_net else 0


def kept_of(cache: CacheConfig) -> int:
    """Those that are of beginnings."""
    return cache.states if cache.prefix else 0


def draft_states(serve: ServeConfig, shape: ModelShape) -> int:
    """Texts that a draft model keeps a state of; 0 where it keeps none."""
    return serve.max_running if shape.delta_net else 0


def draft_slots(topology: Topology) -> int:
    """Of a draft model's cache: beyond what the target caches, each sequence holds the futures of its text."""
    page = topology.cache.page
    return target_slots(topology) + topology.serve.max_running * -(-FUTURES // page) * page


def head_bytes(folder: Path) -> int:
    """Of the files of a head; heads inside a whole model's files are too few of these to count."""
    num_layers = read_config(folder).get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
        return 0
    return sum(path.stat().st_size for path in head_files(folder))


def head_files(folder: Path) -> list[Path]:
    """Those with the weights of a head; empty where there are none."""
    found = (sorted(folder.glob(pattern)) for pattern in HEAD_FILES)
    return next(filter(None, found), [])
