"""The one file that knows every room: from a topology to an engine on this rank. Constructs, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING

from tpspec.cache.seats import KeptStates, Seats
from tpspec.cache.states import kept_slots
from tpspec.comm.emulate import Emulated, emulated
from tpspec.comm.ledger import Ledger, counted
from tpspec.draft.protocol import Needs
from tpspec.draft.sources import NEEDS_Q
from tpspec.engine.engine import Engine, Supply
from tpspec.engine.hosts import Failsafe, InlineHost, LeadHost
from tpspec.engine.pace import Pace
from tpspec.engine.remote import Elsewhere, RemoteHost
from tpspec.engine.scheduler import Scheduler
from tpspec.engine.text_states import Stateless, TextStates
from tpspec.engine.whole import Whole
from tpspec.grammar import Vocabulary
from tpspec.model.loader import Loader
from tpspec.model.target import ShardedTarget
from tpspec.published.checkpoint import find
from tpspec.published.shape import ModelShape
from tpspec.roles.build_drafter import DTYPES, branches_of, build_inline, taps_elsewhere, ways_of
from tpspec.roles.fit import target_pool
from tpspec.topology.caches import KEPT_LEFT, NUM_LEFT, num_positions, num_states, recent_slots, target_slots
from tpspec.topology.shards import split
from tpspec.topology.target_shape import found_target
from tpspec.topology.working import most_verified
from tpspec.verify import rule
from tpspec.verify.allowed import Constraint
from tpspec.verify.noise import CounterNoise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from tpspec.cache.pages import PagePool
    from tpspec.comm.communicator import Communicator
    from tpspec.comm.draft_link import DraftLink
    from tpspec.comm.emulate import Emulation
    from tpspec.engine.hosts import DraftHost
    from tpspec.model.decoder import Decoder
    from tpspec.request import Request
    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard
    from tpspec.topology.sublayers import Sublayers


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready for rounds. max_tokens: the longest prompt plus output that it serves.

    own: where its drafts come from. supply: the same for another topology's drafts, from the target that is loaded.
    emulation: what emulating a link has come to; None where none is emulated. close: called before the world ends.
    """

    engine: Engine
    own: Supply
    supply: Callable[[Topology], Supply]
    folder: Path
    max_tokens: int
    emulation: Emulation | None
    close: Callable[[], None]


def build_engine(
    topology: Topology,
    comm: Communicator,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    link: DraftLink | None = None,
    beside: Callable[[Communicator], Communicator] = lambda comm: comm,
    *,
    launches: bool = True,
) -> Built:
    """This target rank's engine; `comm` joins the target ranks. Raises UserError before reading weights if it can.

    Nothing here is collective, so a rank that fails leaves nobody waiting; what is, is left to `own.prepare`.

    link: of the lead, to a drafter that runs beside the rounds, where the topology wants one. beside: what is put
    around the communicator of a rank that such a drafter runs beside. launches: whether rounds may be launched before
    what they are of is known; the same on all ranks. Not where a drafter is a thread beside some shard: a card that
    waits for a word of its host must not be asked for what waits for all of it, as memory or a new kernel may.
    """
    folder = find(topology.target.model)
    shape = found_target(topology)
    noise = CounterNoise()
    ledger = Ledger()
    pool = target_pool(topology, shape)
    fixed_rows = topology.engine.fixed_rows if topology.deterministic else None
    bus = emulated(comm, topology.link)
    shard = cache(
        partial(_decoder, topology, folder, shape, counted(beside(bus), ledger), device, fixed_rows, ledger, progress)
    )

    def supply(wanted: Topology) -> Supply:
        targets = list[ShardedTarget]()

        def thinned(left_out: Sublayers) -> ShardedTarget:
            targets.append(_target(topology, shape, comm.rank, shard()).thinned(left_out))
            return targets[-1]

        # Weights of the target come last: everything that can be refused without them has been by then.
        host, needs = _host(wanted, comm.rank, device, link, shard, pool, thinned)
        target = _target(topology, shape, comm.rank, shard(), needs.taps)
        targets.append(target)
        pace = Whole(needs.whole) if needs.whole else Pace(gives_odds=needs.gives_odds, is_silent=needs.is_silent)
        return Supply(target, host, pace, partial(_prepare, targets, noise, device, launches=launches))

    own = supply(topology)
    scheduler = Scheduler(
        pool,
        max_rows=topology.engine.max_rows,
        max_running=topology.serve.max_running,
        fixed_rows=fixed_rows,
        max_positions=shape.max_positions,
        reuses=topology.cache.prefix,
        states=_text_states(topology, shape, pool),
    )
    engine = Engine(
        target=own.target,
        scheduler=scheduler,
        pool=pool,
        rule=rule(topology.accept),
        noise=noise,
        host=own.host,
        draft_tokens=None if topology.draft.tokens == "auto" else topology.draft.tokens,
        pace=own.pace,
        vocab=shape.vocab,
        ledger=ledger,
        constrain=partial(_constraint, Vocabulary(folder / "tokenizer.json"), shape.vocab),
    )
    emulation = bus.sums if isinstance(bus, Emulated) else None
    return Built(engine, own, supply, folder, scheduler.capacity_tokens, emulation, lambda: shard().close())


def _text_states(topology: Topology, shape: ModelShape, pool: PagePool) -> Stateless:
    if not shape.stateful:
        return Stateless()
    running, kept = num_states(topology, shape)
    return TextStates(Seats(running, NUM_LEFT), KeptStates(kept_slots(running, kept), KEPT_LEFT), pool)


def _prepare(targets: Sequence[ShardedTarget], noise: CounterNoise, device: torch.device, *, launches: bool) -> None:
    noise.prepare(device)
    for target in targets:
        target.prepare()
        target.launches &= launches


def _constraint(vocabulary: Vocabulary, vocab: int, request: Request) -> Constraint | None:
    if not request.grammar:
        return None
    tokenizer, begin = vocabulary.tokenizer, partial(vocabulary.matcher, request.grammar)
    return Constraint(begin, tokenizer.eos_tokens, request.stop_ids, tokenizer.vocab_size, vocab)


def _decoder(
    topology: Topology,
    folder: Path,
    shape: ModelShape,
    comm: Communicator,
    device: torch.device,
    fixed_rows: int | None,
    ledger: Ledger,
    progress: Callable[[int, int], None] | None,
) -> Decoder:
    """This rank's shard."""
    shard = _shards(topology, shape)[comm.rank]
    loader = Loader.open(
        folder, shard, DTYPES[topology.target.dtype], device, topology.target.quantize,
        replicates=shape.replicates_norm,
    )  # fmt: skip
    small_cache = topology.cache.dtype == "int8"
    num_running, num_kept = num_states(topology, shape)
    return loader.decoder(
        comm, target_slots(topology), fixed_rows=fixed_rows, small_cache=small_cache,
        num_recent=recent_slots(topology, shape), num_states=num_running, num_kept=num_kept, ledger=ledger,
        num_positions=num_positions(shape, target_slots(topology)), most_verified=most_verified(topology),
        progress=progress,
    )  # fmt: skip


def _target(
    topology: Topology, shape: ModelShape, rank: int, decoder: Decoder, taps: Sequence[int] = ()
) -> ShardedTarget:
    shards = _shards(topology, shape)
    width = max(len(shard.vocab) for shard in shards)
    return ShardedTarget(decoder, shards[rank].vocab, shape.vocab, width, taps)


def _shards(topology: Topology, shape: ModelShape) -> tuple[Shard, ...]:
    weights = topology.target.fixed_weights
    assert weights is not None, "a seat settles auto weights first"
    return tuple(split(shape, weights))


def _host(
    topology: Topology,
    rank: int,
    device: torch.device,
    link: DraftLink | None,
    shard: Callable[[], Decoder],
    pool: PagePool,
    thinned: Callable[[Sublayers], ShardedTarget],
) -> tuple[DraftHost, Needs]:
    """Where this rank's drafts come from, and what whoever makes them needs."""
    draft, is_away = topology.draft, topology.draft.placement.kind != "inline"
    if is_away and not rank and link is not None:
        branches = branches_of(topology, gives_q=topology.accept == NEEDS_Q)
        needs = Needs(own_model=True, gives_odds=True, taps=taps_elsewhere(topology))
        return RemoteHost(link, perf_counter, ways_of(topology), branches), needs
    if is_away or (rank and topology.drafts_at_lead):
        return Elsewhere(), Needs(own_model=True, gives_odds=True, whole=any(kind.whole for kind in draft.kinds))
    drafter = build_inline(topology, device, shard, pool, thinned)
    if any(kind.thins for kind in draft.kinds):
        return InlineHost(drafter), drafter.needs
    host = LeadHost if topology.drafts_at_lead else InlineHost
    return host(Failsafe(drafter)), drafter.needs
