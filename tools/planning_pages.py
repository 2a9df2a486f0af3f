"""Write what the planner's pages show of its commands and tables anew.

    python tools/planning_pages.py [--check]

``docs/guides/planning.md`` has outputs of ``quire plan`` behind its commands, and
``docs/reference/planning.md`` the tables of models and devices. ``--check`` changes nothing, and
fails where a page says otherwise.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from quire.config import EngineConfig
from quire.planner.hardware import DEVICES, SPEEDS, roofline
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.subject import find_subject, published_models, subject_of
from quire.units import format_bytes, format_count

DOCS = Path(__file__).parents[1] / "docs"
GUIDE, REFERENCE = DOCS / "guides" / "planning.md", DOCS / "reference" / "planning.md"
SPEEDS_PAGE = DOCS / "concepts" / "simulator.md"
SHOWN = re.compile(r"```text\n\$ quire (plan [^\n]*)\n(.*?)```", re.DOTALL)
COLUMNS = "110"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on differences"
    )
    check = parser.parse_args().check
    differs = False
    for page, made in (
        (GUIDE, guide(GUIDE.read_text(encoding="utf-8"))),
        (REFERENCE, reference(REFERENCE.read_text(encoding="utf-8"))),
        (SPEEDS_PAGE, speeds(SPEEDS_PAGE.read_text(encoding="utf-8"))),
    ):
        if made != page.read_text(encoding="utf-8"):
            differs = True
            print(f"{page.name} differs", file=sys.stderr)
            if not check:
                page.write_text(made, encoding="utf-8")
    return int(check and differs)


def guide(text: str) -> str:
    """Return the guide with the outputs of its commands."""
    token, rate = computed()
    said = re.compile(
        r"in [\dA-Z.]+ µs in steps of (\d+), which\na tier of less than [\dA-Z.]+ GB/s"
    )
    text = said.sub(
        lambda m: f"in {token} µs in steps of {m[1]}, which\na tier of less than {rate} GB/s", text
    )
    return SHOWN.sub(lambda found: _shown(found[1]), text)


def computed() -> tuple[str, str]:
    """Return the microseconds of a token on an H100, and the tier's GB/s that are as quick."""
    subject, steps = find_subject("Llama-3.1-8B"), EngineConfig().max_num_batched_tokens
    token_s = prices_of(roofline(subject, subject.spec, "h100", 1), steps).token_s
    return f"{1e6 * token_s:.0f}", f"{subject.spec.bytes_per_token / token_s / 1e9:.2g}"


def _shown(command: str) -> str:
    begin = [sys.executable, "-c", "from quire.cli import main; main()"]
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
    done = subprocess.run(
        [*begin, *shlex.split(command)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"```text\n$ quire {command}\n{lines.strip(chr(10))}\n```"


def reference(text: str) -> str:
    """Return the reference with its tables of models, places and devices."""
    models = published_models()
    sources = models.sources
    rows = [
        "| model | billions | weights, as published | layers | context | bytes a token | from |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model in models.models:
        subject = subject_of(model.name, model.config)
        rows.append(
            f"| `{model.name}` | {subject.num_parameters / 1e9:,.2f} | "
            f"{format_bytes(subject.own.weights_bytes)}, {subject.precision.name} | "
            f"{subject.spec.num_layers} | {format_count(subject.spec.max_model_len)} | "
            f"{format_count(subject.spec.bytes_per_token)} | "
            f"{1 + sources.index((model.source, model.read_on))} |"
        )
    places = [f"{n}. read on {on}: {where}" for n, (where, on) in enumerate(sources, 1)]
    devices = [
        "| `--device` | name | memory used in plans | source |",
        "|---|---|---:|---|",
    ]
    devices += [
        f"| `{key}` | {each.name} | {format_bytes(each.total_bytes)} | {each.source} |"
        for key, each in DEVICES.items()
    ]
    text = _between(text, "models", rows)
    text = _between(text, "places", places)
    return _between(text, "devices", devices)


def speeds(text: str) -> str:
    """Return the page of the simulator with its table of speeds."""
    rows = [
        "| device | Tflop/s in 16 bits | 8 | 4 | GB/s | to other devices | to the host |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key, speed in SPEEDS.items():
        if key.startswith("apple-"):
            continue
        tera = [speed.flops_in(bits) / 1e12 for bits in (16, 8, 4)]
        giga = [speed.bytes_per_s / 1e9, speed.link_bytes_per_s / 1e9, speed.host_bytes_per_s / 1e9]
        rows.append(
            f"| `{key}` | {' | '.join(f'{x:,.0f}' for x in tera)} | "
            f"{' | '.join(f'{x:,.0f}' for x in giga)} |"
        )
    return _between(text, "speeds", rows)


def _between(text: str, name: str, lines: list[str]) -> str:
    """Put lines between a page's two markers. Raises: LookupError for a page without them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if pattern.search(text) is None:
        raise LookupError(f"there is no section {name!r}")
    body = "".join(f"{line}\n" for line in lines)
    return pattern.sub(lambda found: found[1] + body + found[2], text)


if __name__ == "__main__":
    sys.exit(main())
