"""Whether a draft model speaks the target's language: the same text must mean the same token ids.

Compares tokenizer files; loads no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer


FILE = "tokenizer.json"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer.json of a model's folder."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {FILE}; a fast tokenizer is needed")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: not a tokenizer file ({error})") from error


def check_same_tokenizer(target: Path, draft: Path, target_name: str, draft_name: str) -> None:
    """UserError, naming both models and one difference, unless both map tokens to ids alike."""
    if found := difference(target, draft, ("the target", "the draft")):
        raise UserError(
            f"draft model {draft_name} has a different tokenizer than target {target_name}: {found}; "
            "a draft model must share the target's tokenizer"
        )


def difference(first: Path, other: Path, names: tuple[str, str] = ("the one", "the other")) -> str | None:
    """A token that two models' tokenizers give different ids, in words.

    Ids beyond the smaller head's rows are padding and may differ; ids that stand for tokens may not.
    """
    ours, theirs = (load_tokenizer(folder).get_vocab(with_added_tokens=True) for folder in (first, other))
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            return f"token {token!r} is {number} in {names[0]} and {theirs.get(token, 'missing')} in {names[1]}"
    extra = sorted(theirs.keys() - ours.keys())
    return f"token {extra[0]!r} is missing in {names[0]} and {theirs[extra[0]]} in {names[1]}" if extra else None
