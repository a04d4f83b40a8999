"""The kernels become machine code for every card they are meant for. Needs no card: Triton has its own compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts.serving import environment
from tests.slow import slowly

pytest.importorskip("triton")
from tpspec.model.card import experts as card_experts, groups as card_groups, tiles as card_tiles

HERE = Path(__file__).parent
# What a program may share (CUDA C++ programming guide, table of technical specifications), by compute capability.
SHARED = {75: 64 << 10, 86: 99 << 10, 90: 227 << 10}
MOST_STACK = 64  # bytes of a thread
# What kernels read while the one in front of them may still write: weights, and the table of the whole round.
READ_BEFORE = {
    "add_norm": {"weight_at", "bias_at", "delta_weight_at"},
    "sum_add_norm": {"weight_at", "bias_at", "delta_weight_at"},
    "gated": {"weight_at"}, "jointly_normed": {"weight_at"}, "place": {"table_at", "cos_at", "sin_at", "gains_at"},
    "attend and place": {"table_at", "cos_at", "sin_at", "gains_at", "heads_at"}, "join": {"table_at", "sinks_at"},
    "few_fragments": {"pairs_at", "scales_at", "zeros_at"},
}  # fmt: skip
COMPILES_S = 1500.0  # where Triton keeps nothing yet, nine minutes of a processor, of which others may want half
# The usual heads, and the widest that have a tile for themselves; of Gemma 4's global layers, of latents, and of wide
# heads where accumulators take more registers, what depends on heads; and of narrow heads.
CASES = ["75:*fp16:128", "86:*bf16:128", "86:*fp32:128", "90:*bf16:128"]
HEADS = [f"86:*bf16:{dim}:heads" for dim in (64, 256, 512, 576)]
HEADS += [f"90:*bf16:{dim}:heads" for dim in (16, 32, 256, 512)]
# Half the time: every kernel where there is little room, and where they overlap, in few tiles; elsewhere what shares
# memory; and the heads that most was wrong with.
FEW = [f"{case}:few" for case in CASES]
FEW += ["86:*bf16:64:heads", "86:*bf16:576:heads", "90:*bf16:16:heads", "90:*bf16:256:heads"]
OF_ALL_KERNELS = [
    "llama",
    "granite_hybrid",
    "gemma4_small",
    "gpt_oss",
    "olmo3",
    "laguna",
    "llama4",
    "lfm3",
    "starcoder2",
]
WIDEST_PLACED = 256  # heads that attention places itself


class Case(NamedTuple):
    capability: int
    x: str
    dim: int
    part: str = ""  # "heads" or "few"

    @classmethod
    def of(cls, word: str) -> Case:
        capability, x, dim, *part = word.split(":")
        return cls(int(capability), x, int(dim), *part)

    @property
    def has_tensor_cores(self) -> bool:
        return self.capability >= 80 and self.x != "*fp32"

    @property
    def is_usual(self) -> bool:
        """With products on tensor cores."""
        return self.has_tensor_cores and self.part != "heads"

    @property
    def num_others(self) -> int:
        """Kernels that are neither attention nor products of rows by a matrix that is no expert's."""
        if self.part == "heads":
            return 6 if self.capability == 86 else 3
        return 97 if self.has_tensor_cores or not self.part else 3 + 8

    @property
    def num_of_many(self) -> int:
        """Of attention for many rows, in tensor cores and heads that are not wide."""
        if not self.has_tensor_cores or self.dim > 128:
            return 0
        return 3 if self.part != "heads" else 2 if self.capability == 86 else 1


# Of products on tensor cores, by capability: of many rows by codes, of few rows by a matrix, by codes (by tiles, and of
# experts), by fragments.
PRODUCTS = {
    (86, ""): (16, 28, 132, 18), (90, ""): (16, 28, 80, 18),
    (86, "few"): (16, 14, 46, 18), (90, "few"): (8, 6, 22, 7),
}  # fmt: skip


def without_interpreter(script: str, *words: str) -> list[str]:
    """The lines that it tells."""
    variables = environment() | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(HERE / script), *words]
    told = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=COMPILES_S)
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(COMPILES_S + 60)
@pytest.mark.parametrize("words", [FEW, CASES + HEADS], ids=["in few tiles", "in all"])
def test_every_kernel_compiles_and_fits_every_card(words: list[str]) -> None:
    """Stands against what the interpreter lets pass (a name of Python's in an annotation, a type that changes in a
    loop), tiles that a small card has no room for, sums that do not fit into registers (of heads of 576, a thread kept
    6520 bytes in memory; of 128, on old cards, 8304), smaller programs that ask for less of their matrix at once, and
    weights that are read number by number, or scales that are waited for in the turn that asks for them (those of 16
    bits are, alone: no copy in the background is so small). And, since a row's bits would depend on how many stand
    beside it: against tiles of many rows, in 16 bits and where there are tensor cores, whose products are other
    instructions than those of few, or whose keys are added in another order (as 64 rows were of heads of 64); and
    against a norm that adds in another order where the sum over cards is in its kernel, which has few rows only; and
    against a draft that is added to a state otherwise when it is looked at than when it is taken in. And against
    kernels that begin before the one in front has ended, and read what that has not written yet; and tiles of many rows
    whose threads have no whole rows, and tell each other of every block, or whose next keys are fetched when they are
    needed.
    """
    made = [json.loads(line) for line in without_interpreter("compile_kernels.py", *words)]
    cases = [*map(Case.of, words)]
    of_few = products_are_added_alike(made, [case for case in cases if case.is_usual])
    others = [
        one for one in made if one["kernel"] not in ("attend", "coded", "few_coded", "few_fragments", "_few_rows")
    ]
    assert len(others) == sum(case.num_others for case in cases)
    assert [one for one in made if one["shared"] > SHARED[one["capability"]]] == []
    assert [one for one in made if one["kernel"].startswith("_best_of") and one["stack"]] == []
    attend = [one for one in made if one["kernel"] == "attend" and one["rows"] != "*fp32"]
    assert [one for one in attend if one["stack"] > MOST_STACK] == []
    of_many = [one for one in attend if not one["recorded"] and one["capability"] >= 80 and one["dim"] <= 128]
    assert len(of_many) == sum(case.num_of_many for case in cases)
    assert {one["dim"] for one in of_many} >= {16, 64, 128}
    assert {warps for one in of_many for warps in re.findall(r"warpsPerCTA = (\[\d+, \d+\])", str(one["sums"]))} == {
        "[8, 1]"
    }
    assert all(min(one["places"]) > 1 for one in of_many)
    on_tensor_cores = [one for one in attend if one["capability"] >= 80 and one["recorded"]] + of_few
    assert {tuple(one["products"]) for one in on_tensor_cores} == {("m16",)}
    added: dict[tuple[int, int, bool], dict[int, list[str]]] = {}
    for one in on_tensor_cores:
        if one["kernel"] == "attend":
            of = added.setdefault((one["capability"], one["dim"], one["placing"]), {})
            of.setdefault(one["tile_rows"], []).extend(one["sums"])
    in_one = {heads for heads, by_rows in added.items() if len(by_rows) == 1}
    narrow = {(case.capability, case.dim) for case in cases if case.dim < 64}
    assert in_one == {(*heads, placing) for heads in narrow for placing in (False, True)}
    assert {(capability, dim) for capability, dim, placing in added if placing} == {
        (case.capability, case.dim) for case in cases if case.has_tensor_cores and case.dim <= WIDEST_PLACED
    }
    assert all(one["barriers"] for one in made if one["placing"] and one["capability"] >= 80)
    assert [heads for heads, by_rows in added.items() if len({*map(tuple, by_rows.values())}) > 1] == []
    orders = {name: [one["sums"] for one in made if one["kernel"] == name] for name in ("add_norm", "sum_add_norm")}
    assert all(orders["add_norm"])
    assert orders["add_norm"] == orders["sum_add_norm"]
    for is_summing in (False, True):
        states = [one for one in made if one["kernel"] in ("take_in", "look_at") and one["state"] is is_summing]
        assert states
        assert [one for one in states if one["stack"] or one["sums"] != states[0]["sums"]] == []
    assert {one["capability"] for one in made if one["waits"]} == {90}
    assert [one for one in made if (one["read_before"] is not None) is not bool(one["waits"])] == []
    read: dict[str, set[str]] = {}
    for one in made:
        kernel = f"{one['kernel']} and place" if one["placing"] else one["kernel"]
        read.setdefault(kernel, set()).update(one["read_before"] or ())
    assert {kernel: names for kernel, names in read.items() if names} == READ_BEFORE
    of_experts = [one for one in made if one["kernel"] == "_tile_product" and one["capability"] == 86]
    shared = {one["outputs"]: one["shared"] for one in of_experts}
    assert shared[card_experts.FEW_OUTPUTS] > shared[card_experts.MORE_OUTPUTS]


def products_are_added_alike(made: list[dict[str, Any]], cases: list[Case]) -> list[dict[str, Any]]:
    """Those of few rows, on tensor cores: in whatever tiles, a row's sum grows in the registers of its products (with
    codes, that of a group, and then the groups' in one order)."""
    counts = [PRODUCTS[case.capability, case.part] for case in cases]
    num_large, num_plain, num_coded, num_fragments = map(sum, zip(*counts, strict=True))
    large = [one for one in made if one["kernel"] == "coded" and one["tile_rows"] == card_groups.MANY_ROWS]
    assert len(large) == num_large
    assert [one for one in large if one["stack"] > MOST_STACK] == []
    plain, coded, fragments = (
        [one for one in made if one["kernel"] == name] for name in ("_few_rows", "few_coded", "few_fragments")
    )
    assert len(plain) == num_plain
    assert len(coded) == num_coded
    assert len(fragments) == num_fragments
    for one in plain + coded + fragments:
        is_usual = one["tile_rows"] == one["outputs"] == card_tiles.TILE_ROWS
        if one["kernel"] == "few_fragments":
            assert one["whole_loads"] or one["scales"] == "*fp32", "which groups have that are read in halves"
            assert not one["whole_copies"]
        else:
            assert one["whole_copies"]
        if one["kernel"] == "few_coded":  # beside its loop: by Triton 3.6 32 of a gate on 9.0, by 3.8 8
            assert one["stack"] <= MOST_STACK // 2
        else:
            assert one["stack"] <= (0 if is_usual else 2 * MOST_STACK)
        each = one["tile_rows"] * one["outputs"] // card_tiles.TILE_OUTPUTS  # of a thread's sums
        if not one["biased"] and not one["gate"]:
            groups, splits = one["at_once"] or 1, one["splits"] or 1
            shared_out = (splits - 1) * each // (2 * groups)  # of all its threads
            assert one["adds"] == each * (groups.bit_length() - 1) // 2 + shared_out
    assert [one for one in coded if one["scales"] in ("*i32", "*fp32") and one["loads"]] == []
    usual = [one for one in coded if one["stages"] == card_tiles.USUAL_CODED.stages]
    assert all(min(one["places"]) > 1 for one in usual)
    return plain + coded + fragments


def test_rows_take_the_same_kernel_however_many_they_are() -> None:
    """Stands against one that is compiled anew for a single row, or for sixteen, and adds in another order; or of many
    rows, in the middle of a prompt."""
    kernels = without_interpreter("launch_products.py", "1", "2", "6", "16", "64", "65", "256")
    assert len(kernels) == 7
    assert len(set(kernels)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card: tests/gpu")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card")
@pytest.mark.parametrize("kinds", [OF_ALL_KERNELS, *slowly([])], ids=["of all kernels", "all"])
def test_what_rounds_of_every_kind_of_model_ask_for_compiles(kinds: list[str], tmp_path: Path) -> None:
    """Stands against arguments that no list of kernels has: a layer with a norm of its queries and none of its keys
    (Gemma 4 E2B) gave a pointer of another type in 16 bits, and Triton took none of it."""
    kernels = set(without_interpreter("compile_rounds.py", str(tmp_path), "9.0", *kinds))
    few = {"add_norm", "place", "attend", "join", "gate", "act", "squares", "jointly_normed", "weighed", "_few_rows"}
    few |= {"few_coded", "few_fragments", "coded", "linger"}  # with codes; and what bench_gpu.py measures gaps with
    states = {"convolve", "take_in", "look_at", "gated", "beside", "normed_late", "convolved"}
    others = states | {"_choose", "_sort", "_tile_product", "_weigh", "_add"}
    assert kernels == few | others | {"_best_of_blocks", "_best_of_programs"}
