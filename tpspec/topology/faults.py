"""Finds every fault of a document at once: unknown, missing and wrong keys, then rules between keys that are right.

Generic in the models it checks: it knows fields and their descriptions, no key of a topology by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tpspec.published.reads import shown

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from tpspec.topology.document import Document, KeyPath


@dataclass(frozen=True, slots=True)
class Rule:
    """What several keys must be together. `check` gets their values in order and returns the fault, or None.

    The fault is reported at the first key.
    """

    keys: tuple[str, ...]
    check: Callable[..., str | None]

    def fault(self, values: Mapping[str, object]) -> str | None:
        """None as well when one of the keys is itself at fault: it has been reported."""
        if not all(key in values for key in self.keys):
            return None
        return self.check(*(values[key] for key in self.keys))


def examine(document: Document, model: type[BaseModel], rules: Iterable[Rule]) -> None:
    """Report to the document everything that `model` and `rules` find wrong with it."""
    values: dict[str, object] = {}
    _Examiner(document, values).section(model, document.values, ())
    for rule in rules:
        fault = rule.fault(values)
        if fault is not None:
            document.fault(tuple(rule.keys[0].split(".")), fault)


class _Examiner:
    """Validates field by field instead of as a whole, so that one fault never hides another."""

    def __init__(self, document: Document, values: dict[str, object]) -> None:
        self.document = document
        self.values = values

    def section(self, model: type[BaseModel], data: object, path: KeyPath) -> None:
        if not isinstance(data, dict):
            known = ", ".join(model.model_fields)
            self.document.fault(path, f"is {shown(data)}; should be a section with keys among {known}")
            return
        for key in data:
            if key not in model.model_fields:
                self.document.fault((*path, key), f"unknown key; {suggestion(key, model.model_fields)}")
        for name, info in model.model_fields.items():
            self.field(info, data, (*path, name))

    def field(self, info: FieldInfo, data: dict[str, object], path: KeyPath) -> None:
        name = path[-1]
        if name not in data and info.is_required():
            self.document.fault(path, f"is missing; should be {info.description}")
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            self.section(info.annotation, data.get(name, {}), path)
        elif name not in data:
            self.values[".".join(path)] = info.get_default(call_default_factory=True, validated_data={})
        else:
            self.leaf(info, data[name], path)

    def leaf(self, info: FieldInfo, value: object, path: KeyPath) -> None:
        annotation: Any = info.annotation
        kind: Any = Annotated[annotation, *info.metadata] if info.metadata else annotation
        try:
            self.values[".".join(path)] = TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            self.document.fault(path, f"is {shown(value)}; should be {info.description}")


def suggestion(word: str, known: Collection[str]) -> str:
    """The nearest known word as a question, or the list of them."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"should be one of {', '.join(known)}"
