"""What import-linter cannot say: a module of another package's inside is forbidden."""

from __future__ import annotations

import ast
from pathlib import Path

import tpspec.draft


def test_a_source_never_imports_torch_distributed() -> None:
    """A source that knows a process group knows where it runs."""
    for path in Path(tpspec.draft.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [*names, getattr(node, "module", None) or ""]
            assert not any(name.startswith("torch.distributed") for name in modules), path
            assert not (getattr(node, "module", None) == "torch" and "distributed" in names), path
