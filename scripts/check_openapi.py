"""Hold a running server against its own /openapi.json: `python scripts/check_openapi.py http://127.0.0.1:8000`.

schemathesis (`pip install schemathesis`, best in a venv of its own) makes requests that the document allows and
requests that it forbids. Wrong are: an answer of 5xx, a status or content type that is not in the document, an answer
or event that its schema does not describe, and a forbidden body that is served. Exits with 0 when there was none.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

PHASES = "examples,coverage,fuzzing"
# A body may be well formed and yet ask for too many tokens, or for tools of a model that knows none.
NOT_CHECKED = "positive_data_acceptance"


def command(options: argparse.Namespace) -> list[str]:
    words = [options.schemathesis, "run", f"{options.url.rstrip('/')}/openapi.json", "--phases", PHASES]
    words += ["--mode", options.mode, "--max-examples", str(options.examples), "--exclude-checks", NOT_CHECKED]
    words += ["--request-timeout", "300", "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all"]
    if options.seed is not None:
        words += ["--seed", str(options.seed)]
    return words + (["--header", f"Authorization: Bearer {options.key}"] if options.key else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis"), help="the command, if not on the path")
    parser.add_argument("--mode", choices=("positive", "negative", "all"), default="all")
    parser.add_argument("--examples", type=int, default=50, help="made-up requests for each route and mode")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--key", help="an API key, where the server asks for one")
    options = parser.parse_args()
    if options.schemathesis is None:
        parser.error("schemathesis is not on the path: pip install schemathesis, or name it with --schemathesis")
    return subprocess.run(command(options), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
