"""A YAML text as plain values, and where each of them was written: a line of the file or a `--set`.

Knows YAML and nothing of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import yaml

from tpspec.errors import UserError

KeyPath = tuple[str, ...]
TOPOLOGY_KEYS = "at least `name:` and `target:`"


class TopologyError(UserError):
    """Everything that is wrong with one topology, a line for each: `where: key.path: what; what would be right`."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass
class Document:
    """values: what the file and the overrides say. places: (order, where) of each key path."""

    name: str
    values: dict[str, object] = field(default_factory=dict)
    places: dict[KeyPath, tuple[int, str]] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)
    blamed: set[KeyPath] = field(default_factory=set)

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Where `path` was written, or else the nearest of its parents."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (1, f"{self.name}:1"))

    def fault(self, path: KeyPath, text: str) -> None:
        """Note what is wrong at `path`; what is said of it later only follows from the first."""
        if path in self.blamed:
            return
        self.blamed.add(path)
        order, where = self.place(path)
        self.faults.append((order, f"{where}: {'.'.join(path)}: {text}" if path else f"{where}: {text}"))

    def raise_faults(self) -> None:
        if self.faults:
            raise TopologyError([text for _, text in sorted(self.faults, key=itemgetter(0))])

    def override(self, text: str, order: int) -> None:
        """Apply one `key.path=value`; the value is YAML. What the keys mean is checked later, with the file's own."""
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            self.faults.append((order, f"--set {text}: should be key.path=value, for example draft.tokens=4"))
            return
        parsed = Document(f"--set {text}")
        try:
            node = yaml.compose(value, yaml.SafeLoader)
            found = None if node is None else _Values(parsed).value(node, path)
        except (yaml.YAMLError, ValueError, RecursionError):
            self.faults.append((order, f"--set {text}: {value!r:.200} is not a YAML value; quotes may be missing"))
            return
        self.faults += [(order, fault) for _, fault in parsed.faults]
        self._put(path, found, (order, f"--set {text}"))

    def _put(self, path: KeyPath, value: object, place: tuple[int, str]) -> None:
        at = self.values
        for depth, key in enumerate(path[:-1], start=1):
            below = at.get(key)
            if not isinstance(below, dict):
                below = at[key] = {}
                self.places[path[:depth]] = place
            at = below
        at[path[-1]] = value
        # What the file said below this key is gone, and so are the lines where it said it.
        self.places = {old: where for old, where in self.places.items() if old[: len(path)] != path}
        self.places[path] = place


def read(path: str | Path, keys: str = TOPOLOGY_KEYS) -> Document:
    """The document in a YAML file; a TopologyError when it cannot be read, is no YAML or holds no mapping."""
    return parse(_text(path), str(path), keys)


def parse(text: str, name: str, keys: str = TOPOLOGY_KEYS) -> Document:
    """The document in YAML text; `name` stands for it in messages, which say that it should hold `keys`."""
    document = Document(name)
    try:
        return _parsed(document, text, keys)
    except RecursionError:
        raise TopologyError([f"{name}: is nested too deeply; should hold {keys}"]) from None


def _parsed(document: Document, text: str, keys: str) -> Document:
    name, node = document.name, _compose(text, document.name)
    if not isinstance(node, yaml.MappingNode):
        what = "is empty" if node is None else "is not a mapping"
        raise TopologyError([f"{name}: {what}; should hold {keys}"])
    values = _Values(document).mapping(node, ())
    document.values.update(values)
    return document


def _text(path: str | Path) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TopologyError([f"{path}: no such file; should be the path of one"]) from None
    except OSError as error:
        raise TopologyError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise TopologyError([f"{path}: cannot be read as UTF-8 text: {error}"]) from error
    return text


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise TopologyError([_syntax(error, name)]) from error


def _syntax(error: yaml.YAMLError, name: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{name}:{mark.line + 1}: is not YAML at column {mark.column + 1}: {error.problem}"
    return f"{name}: is not YAML: {error}"


class _Values:
    """Turns composed nodes into values, noting lines and refusing what a plain loader would let pass."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.loader = yaml.SafeLoader("")
        self.seen: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        # An alias composes to the node it names: refusing the second visit also stops a file that contains itself.
        if not isinstance(node, yaml.ScalarNode) and id(node) in self.seen:
            self.document.fault(path, "repeats another part by a YAML alias; should be written out")
            return None
        self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            below = (*path, key)
            line = key_node.start_mark.line + 1
            first = self.document.places.get(below)
            self.document.places[below] = (line, f"{self.document.name}:{line}")
            if key in values and first:
                self.document.fault(below, f"is given twice, first at {first[1]}; should be given once")
            values[key] = self.value(value_node, below)
        return values

    def scalar(self, node: yaml.Node, path: KeyPath) -> object:
        try:
            value: object = self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError):
            self.document.fault(path, f"{node.value!r} cannot be read; put quotes around it if it is text")
            return None
        return value
