"""Write what the guide to planning shows of its commands anew.

    python tools/planning_pages.py [--check]

``docs/guides/planning.md`` has outputs of ``quire plan`` behind its commands, and figures of a
plan. ``--check`` changes nothing, and fails where the page says otherwise. The planner's tables in
other pages are made by ``reference_pages.py``.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from quire.config import EngineConfig
from quire.planner.hardware import roofline
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.subject import find_subject

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "planning.md"
# A command, and from where on its output is shown, if not from the beginning.
SHOWN = re.compile(
    r"```text\n\$ quire (plan [^\n|]*[^\n| ])(?: \| sed -n '/\^([^/]+)/,\$p')?\n(.*?)```", re.DOTALL
)
COLUMNS = "110"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on differences"
    )
    check = parser.parse_args().check
    said = GUIDE.read_text(encoding="utf-8")
    made = guide(said)
    if made != said:
        print(f"{GUIDE.name} differs", file=sys.stderr)
        if not check:
            GUIDE.write_text(made, encoding="utf-8")
    return int(check and made != said)


def guide(text: str) -> str:
    """Return the guide with the outputs of its commands."""
    token, rate = computed()
    said = re.compile(
        r"in [\dA-Z.]+ µs in steps of (\d+), which\na tier of less than [\dA-Z.]+ GB/s"
    )
    text = said.sub(
        lambda m: f"in {token} µs in steps of {m[1]}, which\na tier of less than {rate} GB/s", text
    )
    return SHOWN.sub(lambda found: _shown(found[1], found[2]), text)


def computed() -> tuple[str, str]:
    """Return the microseconds of a token on an H100, and the tier's GB/s that are as quick."""
    subject, steps = find_subject("Llama-3.1-8B"), EngineConfig().max_num_batched_tokens
    token_s = prices_of(roofline(subject, subject.spec, "h100", 1), steps).token_s
    return f"{1e6 * token_s:.0f}", f"{subject.spec.bytes_per_token / token_s / 1e9:.2g}"


def from_line(printed: str, begins: str | None) -> str:
    """Return what is shown of an output: from the first line that begins so, or all of it."""
    lines = [line.rstrip() for line in printed.splitlines()]
    if begins is not None:
        lines = lines[next(n for n, line in enumerate(lines) if line.startswith(begins)) :]
    return "\n".join(lines).strip("\n")


def _shown(command: str, begins: str | None) -> str:
    begin = [sys.executable, "-c", "from quire.cli import main; main()"]
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
    done = subprocess.run(
        [*begin, *shlex.split(command)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    part = "" if begins is None else f" | sed -n '/^{begins}/,$p'"
    return f"```text\n$ quire {command}{part}\n{from_line(done.stdout, begins)}\n```"


if __name__ == "__main__":
    sys.exit(main())
