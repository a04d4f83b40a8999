"""Typed reads of a config.json: what is missing or odd is refused by name, with what would be right.

Knows JSON values; must not know what a key means. A null counts as missing, as in the hub's own files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpspec.errors import UserError

MOST = 2**31
SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message, cut where it is long; a number of thousands of digits Python itself will not write."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Reads:
    """A section of a config. where: the file; within: the keys that lead to the section, each with its dot."""

    config: dict[str, object]
    where: str
    within: str = ""

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._given(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MOST:
            raise self.refusal(key, f"a whole number above {least - 1} and below {MOST}")
        return value

    def even(self, key: str, default: int) -> int:
        value = self.size(key, default)
        if value % 2:
            raise self.refusal(key, "an even number")
        return value

    def number(self, key: str, default: float | None = None, *, most: float = MOST) -> float:
        value = self._given(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < most:
            raise self.refusal(key, f"a number above 0 and below {most}")
        return float(value)

    def size_if_given(self, key: str) -> int | None:
        return None if self.config.get(key) is None else self.size(key)

    def number_if_given(self, key: str) -> float | None:
        return None if self.config.get(key) is None else self.number(key)

    def divisor(self, key: str, of: int, default: int | None = None) -> int:
        """default: where the key is left out; null means `of` itself."""
        value = self.size(key, of if default is None or key in self.config else default)
        if of % value:
            usual = "" if key in self.config else f", and not {value}, as it is by default"
            raise self.refusal(key, f"a divisor of num_attention_heads ({of}){usual}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def said(self, flag: bool | str) -> bool:
        """What is always so, or what the flag of that name says; false where it is left out."""
        return self.flag(flag, False) if isinstance(flag, str) else flag

    def text(self, key: str) -> str:
        value = self.config.get(key)
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def one_of(self, key: str, known: tuple[object, ...], default: object = None) -> object:
        value = self._given(key, default)
        if not any(value == one and type(value) is type(one) for one in known):
            raise self.refusal(key, " or ".join(map(str, known)))
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; none where it is missing."""
        value = self._given(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.refusal(key, "a list of texts")
        return tuple(value)

    def alike(self, keys: tuple[str, ...]) -> Reads:
        """The same, but that those keys, where they list what is the same for every layer, say it once."""
        once = dict(self.config)
        for key in keys:
            if isinstance(listed := self.config.get(key), list):
                if not listed or any(one != listed[0] or type(one) is not type(listed[0]) for one in listed):
                    raise self.refusal(key, "the same for every layer")
                once[key] = listed[0]
        return self.but(once)

    def but(self, changes: dict[str, object]) -> Reads:
        """The same, but that these keys say something else."""
        return Reads(self.config | changes, self.where, self.within)

    def section(self, key: str) -> Reads:
        value = self._given(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, "a section")
        return Reads(value, self.where, f"{self.within}{key}.")

    def refuse(self, *keys: str) -> None:
        """Keys that must be missing, null, false or empty."""
        for key in keys:
            if self.config.get(key):
                raise self.refusal(key, "null: it is not supported")

    def refusal(self, key: str, right: str) -> UserError:
        value = self.config.get(key)
        what = "is missing" if value is None else f"is {shown(value)}"
        return UserError(f"{self.where}: {self.within}{key} {what}; should be {right}")

    def _given(self, key: str, default: object) -> object:
        return default if self.config.get(key) is None else self.config[key]
