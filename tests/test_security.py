"""What the package never does, by its source: unpickle, run text as code, trust a model's code, fetch for others.

Each is a class of advisories against servers like this one. A list of what is allowed would be longer than the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpspec

ROOT = Path(tpspec.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
HARMLESS = "pickle.UnpicklingError"
FETCHERS = {"urllib.request", "requests", "http.client", "aiohttp", "httpx", "ftplib", "urllib3"}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
DATED = {"serve/api.py", "serve/log.py", "serve/replies.py", "serve/response_reply.py", "measure/probe.py"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
OF_PICKLE = {"recv_pyobj", "send_pyobj", "load_pickle", "multiprocessing.Pipe", "multiprocessing.Queue"}


def names(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; `?` for what else it begins with."""
    if isinstance(node, ast.Attribute):
        return f"{names(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def faults(source: str, *, serves: bool = False) -> list[str]:
    """What of a source is forbidden, with its line. serves: it may fetch nothing either."""
    tree = ast.parse(source)
    found = [(line, name) for line, name in imported(tree) if name.split(".")[0] in PICKLES and name != HARMLESS]
    if serves:
        found += [(line, name) for line, name in imported(tree) if any(_within(name, of) for of in FETCHERS)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [(node.lineno, fault) for fault in _of_call(node)]
        elif isinstance(node, ast.Attribute | ast.Name):
            found += [(node.lineno, fault) for fault in _of_name(names(node))]
    return [f"line {line}: {fault}" for line, fault in sorted(set(found))]


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _of_name(name: str) -> Iterator[str]:
    last = name.split(".")[-1]
    if last.endswith("_object_list") or last == "all_gather_object" or last in OF_PICKLE or name in OF_PICKLE:
        yield name
    if last in {"Environment", "Template", "NativeEnvironment"}:
        yield name


def _of_call(call: ast.Call) -> Iterator[str]:
    name = names(call.func)
    given = {word.arg: word.value for word in call.keywords}
    if name in RUNS_TEXT:
        yield f"{name}()"
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load() without weights_only=True"
    if name.endswith(("np.load", "numpy.load")) and not _is(given.get("allow_pickle", ast.Constant(False)), False):
        yield "numpy.load() with allow_pickle"
    if name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"} and "Loader" not in given:
        yield f"{name}()"
    for word in ("trust_remote_code", "shell"):
        if word in given and not _is(given[word], False):
            yield f"{word}={ast.unparse(given[word])}"


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_a_source_does_nothing_that_runs_what_others_sent(path: Path) -> None:
    """Against the pickle on a socket, the checkpoint that is a program, the template that opens a file, and the URL in
    a prompt."""
    serves = path.is_relative_to(ROOT / "serve")
    assert faults(path.read_text(encoding="utf-8"), serves=serves) == []


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_the_clock_on_the_wall_only_dates_what_people_read(path: Path) -> None:
    """Against deadlines that pass, or never do, when somebody sets the clock."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    asked = {names(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & WALL_CLOCKS
    assert bool(asked) == (str(path.relative_to(ROOT)) in DATED)
    assert ("time", "time") not in {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import shelve",
        "from marshal import loads",
        "import cloudpickle as cp",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(a, b)",
        "from torch.distributed import scatter_object_list\nscatter_object_list(x)",
        "socket.recv_pyobj()",
        "eval(text)",
        "exec(text)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "jinja2.Environment()",
        "from jinja2 import Environment\nEnvironment()",
        "subprocess.run(x, shell=True)",
        "yaml.load(x)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_what_is_forbidden_is_found(line: str) -> None:
    """Against a guard that sleeps."""
    assert faults(line)


@pytest.mark.parametrize("line", ["import requests", "from urllib.request import urlopen", "import urllib.request"])
def test_a_server_that_fetches_is_found(line: str) -> None:
    assert faults(line, serves=True)
    assert not faults(line)


def test_what_is_allowed_passes() -> None:
    allowed = [
        "torch.load(path, weights_only=True)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "re.compile(x)",
        "model.eval()",
        "subprocess.run([x])",
        "model.to(device).eval()",
        "yaml.load(x, Loader=SafeLoader)",
        "from pickle import UnpicklingError",
    ]
    assert faults("\n".join(allowed), serves=True) == []
