"""`python -m tpspec.topology check`: what it prints, and that every shipped topology passes it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import tiny, write_tokenizer
from tests.draft.heads import eagle, mtp
from tests.draft.heads.assistant import assistant
from tests.worlds import topology
from tpspec.draft.head_files import PATTERNS
from tpspec.errors import UserError
from tpspec.published.checkpoint import HEADS
from tpspec.published.head_files import HEAD_FILES
from tpspec.roles.fit import draft_bytes, shard_bytes
from tpspec.topology.__main__ import main
from tpspec.topology.config import load
from tpspec.topology.report import describe, memories

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "topologies").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_topology_checks_clean(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against examples that rot."""
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr()
    assert "collectives per round" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("path", [path for path in SHIPPED if "x" in path.stem], ids=lambda path: path.name)
def test_every_shipped_box_of_24_gb_cards_fits_its_model(path: Path) -> None:
    """Against an example that cannot start: 22 GiB are left on the smallest of these cards."""
    table = describe(load(path))[4:]
    totals = [line.split()[-2:] for line in table[1 : table.index("")]]
    assert all(unit == "GiB" and float(size) < 21 for size, unit in totals)


def test_a_mixed_world_is_described_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a drafter's memory left out, and ranges whose ends are off by one."""
    assert main(["check", str(ROOT / "topologies" / "cpu-2+1.yaml"), "--set", "cache.tokens=4096"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 target shard 0-4 (5) 0-1 (2) 0-767 (768) 0-24575 (24576) 132.6 MiB 60.0 MiB 192.6 MiB" in lines
    assert "2 dedicated drafter - - - - 256.6 MiB 112.5 MiB 369.1 MiB" in lines
    assert "collectives per round: 61" in lines


def test_a_fault_is_a_message_on_stderr_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Against tracebacks, and against scripts that go on after a refused file."""
    assert main(["check", str(ROOT / "topologies" / "cpu-2.yaml"), "--set", "draft.tokenz=4"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "--set draft.tokenz=4: draft.tokenz: unknown key; did you mean tokens?\n"


def test_check_never_imports_torch() -> None:
    """Against a check that takes ten seconds and a GPU driver."""
    code = (
        "import sys; from tpspec.topology.__main__ import main; "
        "code = main(['check', 'topologies/8x3090.yaml']); "
        "sys.exit(code or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


def test_what_a_draft_through_the_shards_sends_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a figure of a round that hides what its drafts add: 4 layers are 8 all-reduces, and a gather."""
    changes = ["draft.source=early_exit", "draft.options={layer: 4}"]
    assert main(["check", str(ROOT / "topologies" / "cpu-2.yaml"), *(f"--set={change}" for change in changes)]) == 0
    assert "collectives per token drafted by early_exit: 9, of 8 of 60 sublayers" in capsys.readouterr().out


def checked(capsys: pytest.CaptureFixture[str], *changes: str) -> tuple[int, str]:
    code = main(["check", str(ROOT / "topologies" / "cpu-2.yaml"), *(f"--set={change}" for change in changes)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_model_that_cannot_draft_so_is_refused_before_it_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a check that is content with what no rank will start with."""
    code, said = checked(capsys, "draft.source=pard", "draft.model=Qwen/Qwen3.5-0.8B")
    assert code != 0
    assert "draft.model Qwen/Qwen3.5-0.8B: qwen3_5_text keeps states" in said


def test_what_states_take_is_said_beside_the_caches_that_they_are_counted_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Against a kv cache of gigabytes for a few thousand tokens, and nobody who says why. 24 layers of 32 heads hold 48
    MiB of a text of Qwen3.5-9B, and 68 rows beside each, or 20."""
    draft = ["draft.source=model", "draft.model=Qwen/Qwen3.5-0.8B"]
    code, said = checked(capsys, "target.model=Qwen/Qwen3.5-9B", "cache.states=5", *draft)
    assert code == 0
    assert "kv caches hold states, too: of 16 texts that run, 73.7 MiB each, and of 5 beginnings, 55.6 MiB each" in said
    assert "the draft model's holds states, too: of 16 texts, 32.4 MiB each" in said


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("{source: model, model: smollm2-135m, options: {suport: 3}}", "suport is none of source model; did you mean"),
        ("{source: [ngram, eagle], model: smollm2-135m-eagle3, options: {floor: 3, depth: 3}}", "depth is none of"),
        ("{source: none, options: {min_match: 3}}", "should be one of choices"),
        (
            "{source: lookahead, options: {window: 1000000}}",
            "window is 1000000; should be a whole number, from 1 to 256",
        ),
        ("{source: eagle, model: ./no-such-head}", "no model './no-such-head': should be a folder that exists"),
        ("{source: medusa, model: nowhere}", "no model 'nowhere'"),
        ("{source: eagle, model: smollm2-135m}", "num_hidden_layers is 30; heads of 1 layer are supported; a whole"),
        ("{source: medusa, model: smollm2-135m}", "smollm2-135m holds no Medusa heads"),
        ("{source: medusa, model: smollm2-135m-eagle3}", "smollm2-135m-eagle3 holds no Medusa heads"),
        ("{source: pard, model: smollm2-135m}", "config.json has pard_token None; source pard needs a model"),
        ("{source: model, model: smollm2-135m-eagle3}", "is a draft head, not a model; should be draft.model, beside"),
        (
            "{source: early_exit, tree: static, options: {choices: nowhere.json}}",
            "choices nowhere.json: cannot be read",
        ),
    ],
)
def test_what_a_run_would_refuse_of_its_draft_is_refused(
    capsys: pytest.CaptureFixture[str], draft: str, why: str
) -> None:
    """Stands against a topology that checks clean and does not start: misspelt options, and a head that is nowhere."""
    code, said = checked(capsys, f"draft={draft}")
    assert code == 2
    assert why in said
    assert said.count("\n") == 1


def test_an_assistant_of_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What serving refused checked clean."""
    folder = assistant(tiny("gemma4", tmp_path / "target"), tmp_path / "assistant")
    draft = f"draft={{source: eagle, model: {folder}}}"
    assert checked(capsys, f"target.model={tmp_path / 'target'}", draft)[0] == 0
    code, said = checked(capsys, f"target.model={tiny('gemma4', tmp_path / 'wide', sliding_window=9)}", draft)
    assert code == 2
    assert "layers with kv heads, numbers of each and window (3, 16, 8); should be the target's (3, 16, 9)" in said


def test_a_draft_model_that_reads_other_ids_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What serving refused checked clean."""
    target, draft = tiny("llama", tmp_path / "target"), tiny("llama", tmp_path / "draft")
    changes = f"target.model={target}", f"draft={{source: model, model: {draft}}}"
    write_tokenizer(target, 280)
    for ids, code in ((280, 0), (270, 2)):
        write_tokenizer(draft, ids)
        found, said = checked(capsys, *changes)
        assert found == code
    assert "has a different tokenizer than target" in said
    assert "in the target and missing in the draft; a draft model must share the target's tokenizer" in said


def test_a_head_that_is_not_as_wide_as_its_target_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What serving refused checked clean; of EAGLE-3, a head may have any width."""
    model = tiny("llama", tmp_path / "target")
    wide = tiny("llama", tmp_path / "wide", hidden_size=120)
    for name, write, fine in (("first", eagle.first, 2), ("third", eagle.third, 0)):
        head = tmp_path / name
        write(eagle.Target.read(model), head)
        draft = f"draft={{source: eagle, model: {head}}}"
        assert checked(capsys, f"target.model={model}", draft)[0] == 0
        code, said = checked(capsys, f"target.model={wide}", draft)
        assert code == fine
        assert ("hidden_size is 96; should be the target's 120" in said) == (fine == 2)


@pytest.mark.parametrize("write", [mtp.deepseek, mtp.qwen], ids=["deepseek", "qwen"])
def test_a_target_without_a_layer_that_drafts_is_refused(
    write: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What serving refused checked clean, and the memory of a layer was counted that there is not."""
    assert checked(capsys, f"target.model={tiny('qwen3', tmp_path / 'in two', shards=2)}", "draft.source=mtp")[0] == 2
    target = tiny("qwen3", tmp_path)
    code, said = checked(capsys, f"target.model={target}", "draft.source=mtp")
    assert code == 2
    assert "has no layer for multi-token prediction; should hold tensors mtp.* or model.layers.3.*" in said
    write(target)
    assert checked(capsys, f"target.model={target}", "draft.source=mtp")[0] == 0


def test_of_several_sources_every_one_is_checked_and_counted(tmp_path: Path) -> None:
    """Beside a model or a head a layer of the target's was taken for there, and its memory for none; beside a head that
    is not here it still was."""
    target, small = tiny("qwen3", tmp_path / "target"), tiny("smollm2", tmp_path / "small", num_hidden_layers=1)

    def held(source: str | tuple[str, ...], model: Path | None) -> int:
        draft = {"source": source, "model": None if model is None else str(model)}
        (memory,) = memories(topology(target, draft=draft))
        return memory.weights

    with pytest.raises(UserError, match="has no layer for multi-token prediction"):
        held(("mtp", "model"), small)
    mtp.qwen(target)
    alone = held("none", None)
    both = held("mtp", None) - alone + held("model", small) - alone
    assert held(("mtp", "model"), small) - alone == both
    assert held(("mtp", "eagle"), Path("nobody/has-this")) == held("mtp", None)


def test_a_head_counts_by_its_files_and_one_that_is_not_here_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Stands against a check that says 0 bytes of a head, and clean of a name that may be nobody's."""
    code, said = checked(capsys, "draft={source: eagle, model: smollm2-135m-eagle3}")
    size = (HEADS / "smollm2-135m-eagle3" / "model.safetensors").stat().st_size
    table = said.splitlines()[5:7]
    lead, other = (float(line.split()[-6]) for line in table)
    assert code == 0
    assert lead - other == pytest.approx(size / 2**20, abs=20)  # the shards are of 5 and 4 heads
    code, said = checked(capsys, "draft={source: eagle, model: nobody/has-this}")
    assert code == 0
    assert "head nobody/has-this is not here" in said


def test_memory_is_what_the_ranks_ask_for(tmp_path: Path) -> None:
    """Stands against a check that fits and a start that does not: whole pages, and the futures of a draft's texts."""
    folder = tiny("smollm2", tmp_path / "model")
    made = load(
        ROOT / "topologies" / "cpu-2.yaml",
        [f"target.model={folder}", f"draft={{source: model, model: {folder}}}", "cache={tokens: 100, page: 64}"],
    )
    asked = [draft_bytes(made, on_card=False) * made.drafts_on(rank) + shard_bytes(made, on_card=False)[rank]
             for rank in range(2)]  # fmt: skip
    assert [memory.total(on_card=False) for memory in memories(made)] == asked
    assert HEAD_FILES == PATTERNS
