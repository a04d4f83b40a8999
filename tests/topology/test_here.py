"""The box at hand: a stand-in for nvidia-smi, a program of its own on the path, answers as the real one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tpspec.errors import UserError
from tpspec.topology.__main__ import main
from tpspec.topology.cards import cards
from tpspec.topology.config import load
from tpspec.topology.here import box_here

LLAMA70 = "meta-llama/Llama-3.3-70B-Instruct"
ROW_3090 = "NVIDIA GeForce RTX 3090, 24576 MiB, 4, 16"
PROBED = """\
boxes:
  here:
    gpu: RTX 3090
    ranks: 4
    source: [probe of 2026-11-20]
    all_reduce:
      nccl:
        measured_us: {1024: 21, 16384: 30, 262144: 150}
        line: {alpha_us: 20, gbytes_per_s: 4, kind: fitted, how: median over pairs}
"""
Answers = Callable[..., str]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Puts an nvidia-smi on the path that gives these lines, notes how it was asked, and exits so."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TPSPEC_CACHE", str(tmp_path / "cache"))

    def answering(*lines: str, code: int = 0) -> str:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        said = "\n".join(lines)
        program.write_text(f"#!/bin/sh\necho \"$@\" > '{tmp_path}/asked'\ncat <<'END'\n{said}\nEND\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        return str(program)

    return answering


def plan_here(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--here", "--model", LLAMA70, *words]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line on stderr."""
    assert main(["plan", "--here", "--model", LLAMA70, *words]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("name", "memory", "known"),
    [
        ("NVIDIA GeForce RTX 3090", "24576 MiB", "3090"),
        ("NVIDIA GeForce RTX 4090", "24564 MiB", "4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "22528 MiB", "2080ti"),  # refitted with twice the memory
        ("NVIDIA RTX A6000", "49140 MiB", "a6000"),
        ("NVIDIA A10", "23028 MiB", "a10"),
        ("NVIDIA L4", "23034 MiB", "l4"),
        ("NVIDIA L40S", "46068 MiB", "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", "49140 MiB", "6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "97887 MiB", "pro6000"),
        ("Tesla V100-SXM2-32GB", "32768 MiB", "v100"),
        ("Tesla P100-PCIE-16GB", "16384 MiB", "p100"),
        ("Tesla T4", "15360 MiB", "t4"),
    ],
)
def test_a_driver_name_is_a_known_card_with_the_memory_it_really_has(
    smi: Answers, name: str, memory: str, known: str
) -> None:
    """Against a data sheet's memory where the card has another, and against names that only a driver uses."""
    (found,) = box_here(None, smi(f"{name}, {memory}, 4, 16")).cards
    assert found.name == known
    assert found.gbytes == int(memory.split()[0]) / 1024
    assert found.gbytes_per_s == cards()[known].gbytes_per_s


@pytest.mark.parametrize(
    ("buses", "slot"),
    [
        (["3, 16"] * 2, "pcie3"),
        (["3, 8"] * 2, "pcie3"),
        (["4, 16"] * 2, "pcie4"),
        (["5, 16"] * 2, "pcie5"),
        (["5, 8"] * 2, "pcie4"),
        (["4, 16", "4, 4"], "pcie3"),
        (["6, 16"] * 2, "pcie5"),
        (["4, 16", "[N/A], [N/A]"], None),
    ],
)
def test_the_slowest_slot_names_the_link(smi: Answers, buses: list[str], slot: str | None) -> None:
    """Against planning for x16 where a riser has four lanes: every card waits for the slowest."""
    rows = [f"NVIDIA GeForce RTX 3090, 24576 MiB, {bus}" for bus in buses]
    assert box_here(None, smi(*rows)).slot == slot


def test_a_box_of_four_is_planned_as_what_it_is(
    smi: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(*[ROW_3090] * 4)
    out = plan_here(capsys, "--out", str(tmp_path / "box.yaml")).splitlines()
    assert out[0].startswith("this box: 4x3090, numbered as")
    assert out[1].startswith("link pcie4: named by its slots, not measured; better: torchrun --nproc-per-node 4 -m ")
    topology = load(tmp_path / "box.yaml")
    assert topology.link.table == "pcie4"
    assert len(topology.target.ranks) == 4


def test_a_measured_link_is_believed_before_the_driver(
    smi: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(*["NVIDIA GeForce RTX 3090, 24576 MiB, [N/A], [N/A]"] * 4)
    probed = tmp_path / "link.yaml"
    probed.write_text(PROBED)
    out = plan_here(capsys, "--link", str(probed))
    assert "not measured" not in out
    assert f"Link: {probed} (measured, probe of 2026-11-20)." in out
    assert "-m tpspec.measure links --out link.yaml, then --link link.yaml" in refusal(capsys)


def test_one_card_needs_no_link(smi: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    smi("NVIDIA GeForce RTX 4090, 24564 MiB, [N/A], [N/A]")
    assert main(["plan", "--here", "--model", "Qwen/Qwen2.5-7B-Instruct"]) == 0
    out = capsys.readouterr().out
    assert "on 1x4090, link none" in out
    assert "link:" not in out


def test_only_visible_cards_are_planned_for(
    smi: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a plan for cards that somebody else uses: nvidia-smi itself does not look at the variable."""
    smi(*[ROW_3090] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    plan_here(capsys)
    asked = (tmp_path / "asked").read_text()
    fields = "--query-gpu=name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    assert asked == f"{fields} --format=csv,noheader --id=2,3,5,7\n"
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert f"CUDA_VISIBLE_DEVICES is '{nothing}'; say what the box holds instead" in refusal(capsys)


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (["NVIDIA GeForce RTX 3090 Ti, 24564 MiB, 4, 16"], 0, "3090 Ti' is known; did you mean 3090?"),
        (["NVIDIA GB10, [N/A], 5, 16"], 0, "'[N/A]' as the memory of NVIDIA GB10"),
        (["NVIDIA GeForce RTX 3090, 24576 MiB"], 0, "not name, memory.total"),
        ([], 0, "lists none"),
        (["No devices were found"], 6, "nvidia-smi says: No devices were found; "),
        (
            ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", "Failed."],
            9,
            "couldn't communicate with the NVIDIA driver; ",
        ),
    ],
)
def test_what_cannot_be_planned_here_says_what_to_give(
    smi: Answers, capsys: pytest.CaptureFixture[str], lines: list[str], code: int, said: str
) -> None:
    """Against a KeyError for a new card, and against a driver's fault read as a card's name."""
    smi(*lines, code=code)
    told = refusal(capsys)
    assert said in told
    assert "--gpus 8x3090 --link pcie4" in told


def test_a_machine_without_the_driver_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal(capsys)
    assert told.startswith("no card is visible: nvidia-smi: No such file")
    assert "--gpus 8x3090 --link pcie4" in told
    with pytest.raises(UserError, match="no card is visible"):
        box_here(None, str(tmp_path / "nvidia-smi"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", LLAMA70], "one of the arguments --gpus --here is required"),
        (["--gpus", "2x3090", "--here", "--model", LLAMA70], "--here: not allowed with argument --gpus"),
        (["--gpus", "2x3090", "--model", LLAMA70], "--link is missing; should be a slot such as pcie4"),
        (
            ["--gpus", "2x3090", "--link", "pcie4", "--model", LLAMA70, "--context", "0"],
            "--context: 0 is not a whole number above 0",
        ),
    ],
)
def test_a_wrong_command_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["plan", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
