"""What `launch/` ships beside `serve`: read by the tools that would read it, where they are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tpspec.comm.messages import Drafting, Stats, Tally
from tpspec.request import Delta
from tpspec.serve.metrics import Metrics

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SYSTEMD = shutil.which("systemd-analyze")


def _shown() -> set[str]:
    """Names of all samples at /metrics once there were requests, drafts, and a drafter elsewhere."""
    metrics = Metrics("m")
    metrics.engine(Stats(elsewhere=Drafting(), collectives={"attention": Tally(1, 1, 1.0)}))
    metrics.round(Delta(1, (5, 6), None, (1,), (1,)), 2, 1)
    metrics.finished("stop", 1.0)
    metrics.refused("queue_full")
    return {s.name for family in text_string_to_metric_families(metrics.page().decode()) for s in family.samples}


def test_every_expression_of_the_dashboard_names_a_metric_that_there_is() -> None:
    """A panel of a metric that was renamed is empty, and looks like a server without load."""
    board = json.loads((LAUNCH / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(expressions) > 30
    shown = _shown()
    for expression in expressions:
        names = re.findall(r"\b(?:vllm|tpspec):\w+", expression)
        assert names, expression
        assert set(names) <= shown, expression
        assert expression.count("(") == expression.count(")")
        assert all(
            by in ("le", "purpose", "position", "finished_reason", "reason")
            for by in re.findall(r"by \((\w+)\)", expression)
        )


def test_no_two_panels_of_the_dashboard_overlap_or_share_an_id() -> None:
    panels = json.loads((LAUNCH / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_worlds_are_started_without_a_store_that_listens() -> None:
    """tests/world/test_listeners.py reads the sockets of a world with these flags."""
    assert "exec python -m tpspec.launch --rdzv-backend tpspec " in (LAUNCH / "serve").read_text()
    assert '"--rdzv-backend", "tpspec"' in (LAUNCH / "ray_serve.py").read_text()


def test_serve_asks_a_topology_for_its_ranks_and_its_models(tmp_path: Path) -> None:
    """Its few lines of Python named a module that had moved: the first command of the README ended in a traceback."""
    (lines,) = re.findall(r"<<'PYTHON'\n(.*?)\nPYTHON\n", (LAUNCH / "serve").read_text(), re.DOTALL)
    words = [str(ROOT / "topologies" / "cpu-3.yaml"), "--log-requests", "--set", "draft.tokens=4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TPSPEC_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-", *words], input=lines, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("3 smollm2-135m\n", "")


@pytest.mark.skipif(SYSTEMD is None, reason="no systemd-analyze is installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """It asks whether the program exists, so the copy names this checkout's."""
    unit = (LAUNCH / "tpspec.service").read_text()
    assert "ExecStart=/opt/tpspec/launch/serve " in unit
    copy = tmp_path / "tpspec.service"
    copy.write_text(unit.replace("ExecStart=/opt/tpspec/", f"ExecStart={ROOT}/"))
    assert SYSTEMD is not None
    done = subprocess.run([SYSTEMD, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_manifest_s_names_and_ports_meet() -> None:
    group, service = yaml.safe_load_all((LAUNCH / "leaderworkerset.yaml").read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    pod = template["workerTemplate"]
    (container,) = pod["spec"]["containers"]
    assert template["size"] == 1
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")]
    assert {service["spec"]["ports"][0]["targetPort"], *probes} == set(ports)
    assert str(ports["http"]) == pod["metadata"]["annotations"]["prometheus.io/port"]
    assert {m["name"] for m in container["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30  # torchrun's own patience


def test_the_batch_script_hands_its_words_to_serve() -> None:
    script = [str(LAUNCH / "slurm.sh"), "--help"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "./launch/serve [TOPOLOGY] [OPTION...]" in done.stdout
    assert subprocess.run(script, cwd="/", capture_output=True, timeout=60).returncode == 2


def test_what_the_image_copies_is_there() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    assert json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
