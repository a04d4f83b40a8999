"""Who holds which slice: exact numbers of examples, and properties for any weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tpspec.errors import UserError
from tpspec.published.experts import Experts
from tpspec.published.groups import grid_of
from tpspec.published.shape import ModelShape, shape_of
from tpspec.topology.caches import kv_bytes, kv_bytes_read, num_attended
from tpspec.topology.rounds import collectives_per_round, round_bytes
from tpspec.topology.shards import Shard, split
from tpspec.topology.sizes import WIDE_BYTES, expert_bytes, layer_bytes, num_params, weight_bytes

SMOL = shape_of("smollm2-135m")
LLAMA70 = shape_of("meta-llama/Llama-3.3-70B-Instruct")


def lengths(shards: tuple[Shard, ...], part: str) -> list[int]:
    return [len(getattr(shard, part)) for shard in shards]


def test_nine_heads_over_two_are_five_and_four_and_channels_stay_equal() -> None:
    """Against channels that follow the heads: the MLP is most of the work, and it divides evenly."""
    shards = split(SMOL, (1, 1))
    assert lengths(shards, "heads") == [5, 4]
    assert [shard.kv_heads for shard in shards] == [range(2), range(1, 3)]
    assert lengths(shards, "channels") == [768, 768]
    assert lengths(shards, "vocab") == [24576, 24576]


def test_seven_cards_split_a_70b_without_padding() -> None:
    """Against any layout that needs the head count to divide by the number of cards."""
    shards = split(LLAMA70, (1,) * 7)
    assert lengths(shards, "heads") == [10, 9, 9, 9, 9, 9, 9]
    assert lengths(shards, "channels") == [4096] * 7
    assert sum(lengths(shards, "kv_heads")) == 8 + 6  # every boundary but none falls inside a KV head


def test_weights_are_followed() -> None:
    """Against weights used as an order rather than as a proportion."""
    shards = split(SMOL, (3, 1, 2))
    assert lengths(shards, "heads") == [5, 1, 3]
    assert lengths(shards, "channels") == [768, 256, 512]


def test_small_parts_are_not_bent_to_an_alignment() -> None:
    """Against alignment that leaves a rank without channels, or with a third more than another."""
    tiny = replace(SMOL, intermediate=50, vocab=101)
    shards = split(tiny, (1, 1, 1))
    assert lengths(shards, "channels") == [17, 17, 16]
    assert lengths(shards, "vocab") == [34, 34, 33]


def test_more_shards_than_heads_names_both_numbers() -> None:
    """Against a rank with nothing to do, or a crash in the first forward."""
    with pytest.raises(UserError, match="10 shards for 9 query heads"):
        split(SMOL, (1,) * 10)


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelShape, list[float]]:
    kv, group = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    size = st.integers(kv * group, 60_000)
    shape = replace(SMOL, num_heads=kv * group, num_kv_heads=kv, intermediate=draw(size), vocab=draw(size))
    weight = st.floats(1e-3, 1e3) | st.sampled_from([1.0, 5e-324, 1.7e308])
    return shape, draw(st.lists(weight, min_size=1, max_size=kv * group))


@given(splits())
def test_shards_cover_the_model_exactly_once(case: tuple[ModelShape, list[float]]) -> None:
    """Against a row held by nobody or summed twice, which shifts logits without any error."""
    shape, weights = case
    shards = split(shape, weights)
    assert [shard.index for shard in shards] == list(range(len(weights)))
    for part, total in (("heads", shape.num_heads), ("channels", shape.intermediate), ("vocab", shape.vocab)):
        parts = [getattr(shard, part) for shard in shards]
        assert [i for own in parts for i in own] == list(range(total))
        assert all(parts)
    for shard in shards:
        assert set(shard.kv_heads) == {head // shape.group for head in shard.heads}


@given(splits())
def test_no_part_is_far_from_its_weight(case: tuple[ModelShape, list[float]]) -> None:
    """Against largest remainder done wrong; a part exceeds its quota by one unit at most."""
    shape, weights = case
    largest = max(weights)
    for shard, weight in zip(split(shape, weights), weights, strict=True):
        quota = shape.num_heads * (weight / largest) / sum(w / largest for w in weights)
        assert len(shard.heads) <= quota + 1 + 1e-6
        assert len(shard.heads) >= quota - len(weights) - 1e-6


@given(st.integers(1, 64))
def test_equal_weights_differ_by_one_head_at_most(num_shards: int) -> None:
    """Against one rank that every other waits for."""
    heads = lengths(split(LLAMA70, (1.0,) * num_shards), "heads")
    assert max(heads) - min(heads) <= 1


def test_collectives_and_bytes_of_a_round_are_exact() -> None:
    """Against a prediction that forgets the pick, or counts collectives for a rank alone."""
    assert collectives_per_round(LLAMA70, 7) == 161
    assert collectives_per_round(LLAMA70, 1) == 0
    assert round_bytes(SMOL, 2, rows=5, dtype_bytes=2) == {"attention": 172_800, "mlp": 172_800, "pick": 40}
    assert round_bytes(SMOL, 2, rows=64, dtype_bytes=4, num_logit_rows=1)["pick"] == 8
    assert sum(round_bytes(SMOL, 1, rows=5, dtype_bytes=2).values()) == 0


def test_a_latent_is_cached_whole_on_every_rank() -> None:
    """As the README has it. Stands against values beside keys, and a cache that is promised to shrink with ranks."""
    flash = shape_of("zai-org/GLM-4.7-Flash")
    for num_ranks in (1, 4):
        for shard in split(flash, (1,) * num_ranks):
            assert kv_bytes(flash, shard, "bfloat16", 1) == 47 * 576 * 2
            assert kv_bytes(flash, shard, "bfloat16", 32768) / 2**30 == pytest.approx(1.7, abs=0.05)
    of_heads = 47 * 20 * (256 + 256) * 2
    assert (of_heads, of_heads * 32768 / 2**30) == (940 * 1024, pytest.approx(29, abs=0.5))


def test_kv_bytes_count_a_boundary_head_on_both_sides() -> None:
    """Against a cache planned for fewer heads than a rank reads."""
    first, second = split(SMOL, (1, 1))
    assert kv_bytes(SMOL, first, "bfloat16", 1) == 2 * 30 * 2 * 64 * 2
    assert kv_bytes(SMOL, second, "float32", 7) == 7 * 2 * 30 * 2 * 64 * 4


def test_layers_with_a_window_keep_and_read_the_last_tokens() -> None:
    """Stands against a cache of Gemma 3's counted, or predicted to be read, as if all layers saw everything."""
    shape = replace(SMOL, window=512, num_windowed=20)
    (whole,) = split(shape, (1.0,))
    of_layer = 2 * 3 * 64 * 2
    assert kv_bytes(shape, whole, "bfloat16", 4096, 768) == of_layer * (10 * 4096 + 20 * 768)
    assert kv_bytes(shape, whole, "bfloat16", 4096) == of_layer * 30 * 4096
    assert kv_bytes_read(shape, whole, "bfloat16", 4096) == of_layer * (10 * 4096 + 20 * 512)
    assert kv_bytes_read(shape, whole, "bfloat16", 100) == of_layer * 30 * 100


def test_shards_weigh_what_the_whole_weighs_and_the_norms_again() -> None:
    """Against memory plans that double-count a matrix or forget one."""
    (whole,) = split(LLAMA70, (1,))
    parts = sum(weight_bytes(LLAMA70, shard, "bfloat16") for shard in split(LLAMA70, (1,) * 8))
    norms = (2 * LLAMA70.num_layers + 1) * LLAMA70.hidden * WIDE_BYTES
    assert parts == weight_bytes(LLAMA70, whole, "bfloat16") + 7 * norms


@given(splits(), st.integers(1, 300), st.booleans())
def test_shards_of_a_mixture_hold_its_experts_once(
    case: tuple[ModelShape, list[float]], count: int, beside: bool
) -> None:
    """Against an expert of one rank that others hold too, routers of which each rank would hold a part, and MLPs before
    and beside experts that are held by all or none."""
    like, weights = case
    experts = Experts(count, 1, sums_to_one=True)
    if beside:
        experts = replace(
            experts,
            sigmoid=True,
            corrected="sigmoids",
            first_layer=1,
            dense=3 * like.intermediate,
            shared=2 * like.intermediate,
        )
    shape = replace(like, model_type="qwen3_moe", experts=experts, qk_norm=True)
    (whole,), shards = split(shape, (1,)), split(shape, weights)
    assert sum(expert_bytes(shape, one, "bfloat16") for one in shards) == expert_bytes(shape, whole, "bfloat16")
    norms = (2 * shape.hidden + 2 * shape.head_dim) * shape.num_layers + shape.hidden
    every = WIDE_BYTES * (norms + (shape.num_layers - beside) * count * (shape.hidden + beside))  # held by each rank
    shared = sum(lengths(shards, "kv_heads")) - shape.num_kv_heads  # KV heads on boundaries
    again = (len(weights) - 1) * every + shared * 2 * 2 * shape.hidden * shape.head_dim * shape.num_layers
    parts = sum(weight_bytes(shape, one, "bfloat16") for one in shards)
    assert parts == weight_bytes(shape, whole, "bfloat16") + again
    of_experts = expert_bytes(shape, whole, "bfloat16")
    one, mixed = 2 * 3 * shape.hidden * shape.intermediate, shape.num_layers - beside
    assert of_experts == mixed * count * one
    alike = weight_bytes(replace(shape, experts=None), whole, "bfloat16") - shape.num_layers * one
    others = (3 + 2 * mixed) * one if beside else 0
    routers = WIDE_BYTES * mixed * count * (shape.hidden + beside)
    assert weight_bytes(shape, whole, "bfloat16") == alike + of_experts + others + routers


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (5, 1, 2)])
def test_a_token_is_multiplied_with_the_chosen_experts_of_every_shard(weights: tuple[float, ...]) -> None:
    """Against whole experts given to ranks, where one of them would do all the work of a token."""
    shape = shape_of("mistralai/Mixtral-8x7B-Instruct-v0.1")
    alike = replace(shape, experts=None, model_type="llama", intermediate=2 * shape.intermediate)
    routers = shape.num_layers * 8 * shape.hidden
    for shard in split(shape, weights):
        twice = replace(shard, channels=range(2 * shard.channels.start, 2 * shard.channels.stop))
        assert num_params(shape, shard) == num_params(alike, twice) + routers


def test_what_has_biases_is_counted_with_as_many_as_it_has_rows() -> None:
    """Stands against a gate among the queries whose biases nobody counts, and values as long as the keys that they are
    shorter than."""
    gated, short = map(shape_of, ("Qwen/Qwen3-Next-80B-A3B-Instruct", "XiaomiMiMo/MiMo-V2-Flash"))
    numbers = []
    for shape in (gated, short):
        (whole,) = split(shape, (1,))
        plain, biased = (weight_bytes(replace(shape, qkv_bias=has), whole, "bfloat16") for has in (False, True))
        numbers.append((biased - plain) // 2)
    assert numbers == [12 * (2 * 16 + 2 + 2) * 256, 48 * 64 * 192 + (39 * 8 + 9 * 4) * (192 + 128)]


def test_quantized_weights_shrink_and_the_head_to_eight_bits() -> None:
    """Against a box declared large enough because its head was counted at four bits, or scales were forgotten."""
    (whole,) = split(LLAMA70, (1,))
    plain, int4 = weight_bytes(LLAMA70, whole, "bfloat16"), weight_bytes(LLAMA70, whole, "bfloat16", "int4")
    head = LLAMA70.vocab * LLAMA70.hidden
    assert (int4 - head * 8.125 / 8) / (plain - 2 * head) == pytest.approx(4.25 / 16, rel=1e-3)


@given(size=st.integers(1, 5000), data=st.data())
def test_groups_of_slices_are_groups_of_the_whole(size: int, data: st.DataObject) -> None:
    """Against a slice that reads half a group, or beyond the matrix."""
    start = data.draw(st.integers(0, size - 1))
    columns = range(start, data.draw(st.integers(start + 1, size)))
    grid, read = grid_of(columns, size)
    assert grid.group == grid_of(range(size), size)[0].group
    assert (read.start % grid.group, columns.start - read.start) == (0, grid.before)
    assert read.stop == size or read.stop % grid.group == 0
    assert columns.stop <= read.stop <= read.start + grid.width < columns.stop + grid.group


def test_a_layer_that_drafts_weighs_what_its_publisher_says() -> None:
    """Against a lead that loads gigabytes which no plan counted: the layer for multi-token prediction has experts.
    It is published with copies of both tables, of which the embeddings stay on the host."""
    shape = shape_of("zai-org/GLM-4.5-Air")
    published = 3.61656e9 - shape.vocab * shape.hidden
    assert layer_bytes(shape, "float32") / 4 == pytest.approx(published, rel=1e-4)
    assert layer_bytes(shape, "bfloat16", "int4") < 0.4 * layer_bytes(shape, "bfloat16")


def test_a_row_is_multiplied_with_all_that_it_sees() -> None:
    """Stands against long contexts that cost nothing to compute, and windows or latents counted as others are."""
    llama, gemma, glm = (shape_of(name) for name in ("meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-1b-it",
                                                     "zai-org/GLM-4.7-Flash"))  # fmt: skip
    counted = [num_attended(shape, split(shape, (1.0,))[0], 8192) for shape in (llama, gemma, glm)]
    assert counted == [
        32 * 32 * (128 + 128) * 8192,
        4 * (256 + 256) * (4 * 8192 + 22 * 512),
        47 * 20 * (576 + 576) * 8192,
    ]
