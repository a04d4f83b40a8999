"""`python -m tpspec.serve.grammar_worker FOLDER`: compiles grammars, one a line, and may be killed at any time.

In: a grammar as a JSON string. Out: {"grammar": ...} as the ranks are to read it, or {"fault": ...} in the compiler's
words; before the first, {"fault": null} when it can begin. Ends with its input. Must not know the server.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from tpspec.errors import UserError
from tpspec.grammar import Vocabulary, as_lark

MOST_BYTES = 4 << 30  # of address space: a grammar that wants more ends this process, and no other


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    vocabulary = Vocabulary(Path(sys.argv[1]) / "tokenizer.json")
    try:
        vocabulary.matcher(as_lark('start: "a"'))  # what takes long at first is no grammar's fault
    except UserError as error:
        _say({"fault": str(error)})
        return error.exit_code
    _say({"fault": None})
    for line in sys.stdin:
        _say(_compiled(vocabulary, json.loads(line)))
    return 0


def _compiled(vocabulary: Vocabulary, grammar: str) -> dict[str, str]:
    try:
        readable = grammar if grammar.startswith("{") else as_lark(grammar)
        vocabulary.matcher(readable)
    except UserError as error:
        return {"fault": str(error)}
    return {"grammar": readable}


def _say(answer: dict[str, str] | dict[str, None]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
