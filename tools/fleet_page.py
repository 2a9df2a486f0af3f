"""The figures of docs/guides/fleet.md: its commands are run, its tables made of what they print.

    python tools/fleet_page.py [sections…] --traces FOLDER [--write | --check]

A section stands between ``<!-- fleet: name -->`` and ``<!-- end -->``; all are made if none is
named, in some minutes of one core. Those of ``quire plan`` need no traces. ``--write`` puts them
in the page; ``--check`` fails where the page says otherwise. docs/reference/traces.md says where
the traces are from. What is derived (replicas, devices) is computed from the tables of the page, so
its order is theirs.
"""

import argparse
import difflib
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from quire.planner.hardware import device
from quire.traces import open_trace
from quire.units import format_bytes, format_count, parse_count

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "fleet.md"
CHAT, SHARED = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation.jsonl"

# What the page assumes, and says that it does.
REQUESTS_A_DAY: Final = 10**8
DAY_PEAK: Final = 2.0  # busiest hour of a day over the mean hour
SPARE_FRACTION: Final = 0.1  # of the replicas, for those that are down or being updated
GOOD_FRACTION: Final = 0.99  # of the requests that must meet the goals

COMMON = "--memory-mode dedicated --max-model-len 16384 --max-num-seqs 256"
STEP = "--max-num-batched-tokens 1024"
GOALS = "--slo-ttft 1 --slo-tpot 0.05"
EIGHT = "Llama-3.1-8B --device h100"
SEVENTY = "Llama-3.3-70B-Instruct --device h100 --tp 4"
LATENT = "DeepSeek-V3 --device h200 --tp 16"
STRATEGIES = ("contiguous", "growing", "paged", "virtual")

Figures: TypeAlias = Any  # a command's JSON

PROGRAM = f"""\
import numpy as np
from quire.traces import open_trace

for name in ("{CHAT}", "{SHARED}"):
    met = [(each.at_s, each.input_tokens, each.output_tokens) for each in open_trace(name)]
    at_s, prompt, answer = np.array(met).T
    mean = len(met) / at_s[-1]
    print(f"{{name}}: {{len(met):,}} requests, {{mean:.2f}} a second")
    for kind, tokens in (("prompt", prompt), ("answer", answer)):
        p50, p99, most = np.percentile(tokens, [50, 99, 100])
        print(
            f"  {{kind}}: mean {{tokens.mean():,.0f}}, p50 {{p50:,.0f}}, p99 {{p99:,.0f}}, "
            f"longest {{most:,.0f}} tokens"
        )
    for window_s in (1, 10, 60):
        peak = np.bincount((at_s // window_s).astype(int)).max() / window_s
        print(f"  busiest {{window_s}} s: {{peak / mean:.2f}} times the mean")
"""


def main() -> int:
    options = _options()
    if unknown := set(options.sections) - set(SECTIONS):
        print(
            f"no section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}",
            file=sys.stderr,
        )
        return 2
    names = options.sections or list(SECTIONS)
    if options.traces is None and (need := [name for name in names if name not in TRACE_FREE]):
        print(f"{', '.join(need)}: give --traces FOLDER", file=sys.stderr)
        return 2
    differs = False
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        found = SECTIONS[name](options.traces or ROOT, PAGE.read_text(encoding="utf-8"))
        page = PAGE.read_text(encoding="utf-8")
        said = section(page, name)
        if found != said:
            differs = True
            for line in difflib.unified_diff(
                said.splitlines(), found.splitlines(), "page", "now", lineterm="", n=0
            ):
                print(line)
        if options.write:
            PAGE.write_text(replaced(page, name, found), encoding="utf-8")
    return int(options.check and differs)


def section(page: str, name: str) -> str:
    """What stands between the markers. Raises: LookupError for a page without them."""
    match = re.search(rf"<!-- fleet: {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    if match is None:
        raise LookupError(f"{PAGE.name} has no section {name!r}")
    return match[1]


def replaced(page: str, name: str, text: str) -> str:
    old = f"<!-- fleet: {name} -->\n{section(page, name)}<!-- end -->"
    return page.replace(old, f"<!-- fleet: {name} -->\n{text}<!-- end -->")


def run(command: str, folder: Path) -> Figures:
    """A line of the page, as JSON, from the folder where the traces are."""
    begin = [sys.executable, "-c", "from quire.cli import main; main()"]
    done = subprocess.run(
        [*begin, *shlex.split(command)[1:], "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stderr}")
    return json.loads(done.stdout)


def shown(*commands: str) -> str:
    return "\n".join(["```sh", *commands, "```", "", ""])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all but the first column are figures."""
    rule = "|".join(["---", *(["---:"] * (len(heads) - 1))])
    lines = [" | ".join(heads), rule, *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" if line != rule else f"|{line}|\n" for line in lines)


def cells(page: str, name: str) -> list[list[str]]:
    """The rows of a section's first table, from the page."""
    lines = [line for line in section(page, name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _traffic(folder: Path, page: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True
    )
    return f"```python\n{PROGRAM}```\n\n```text\n{done.stdout}```\n"


def _day(_: Path, page: str) -> str:
    mean = REQUESTS_A_DAY / 86_400
    minute = busiest_minute(page)
    rows = [
        ("requests a day", format_count(REQUESTS_A_DAY)),
        ("… a second, in the mean", f"{mean:,.0f}"),
        ("busiest hour over the mean hour (assumed)", f"{DAY_PEAK:.2f}"),
        ("busiest minute of an hour over its mean (Azure's trace)", f"{minute:.2f}"),
        ("requests a second in the busiest minute", f"{mean * DAY_PEAK * minute:,.0f}"),
    ]
    return table(("", "figure"), rows)


def busiest_minute(page: str) -> float:
    """Of the first trace, over its mean, as the page has it."""
    match = re.search(r"busiest 60 s: ([\d.]+) times", section(page, "traffic"))
    if match is None:
        raise LookupError("the section 'traffic' does not say what its busiest minute was")
    return float(match[1])


def _plans(folder: Path, page: str) -> str:
    length = "--input-len 1155 --output-len 211"
    asked = [f"quire plan {each} {COMMON} {STEP} {length}" for each in (EIGHT, SEVENTY, LATENT)]
    rows = []
    for command in asked:
        found = run(command, folder)
        auto = {cell["strategy"]: cell for cell in found["cells"] if cell["budget"] == "auto"}
        rows.append(
            (
                f"`{found['model']}`",
                str(found["tp"]),
                format_count(sum(group["bytes_per_token"] for group in found["groups"])),
                format_bytes(found["needs"]["weights_bytes"]),
                format_bytes(found["ledger"]["kv_bytes"]),
                *(format_count(auto[name]["num_fitting"]) for name in STRATEGIES),
            )
        )
    heads = ("model", "devices", "bytes a token", "weights", "KV memory", *STRATEGIES)
    return shown(*asked) + table(heads, rows)


def arrivals_per_s(trace: Path, num_requests: int) -> float:
    """In the mean over the first requests of a trace, at its own pace."""
    met = [each.at_s for each in islice(open_trace(str(trace)), num_requests)]
    return len(met) / met[-1]


def _rates(
    model: str, rates: Sequence[float], num_requests: int, more: str = ""
) -> Callable[[Path, str], str]:
    """One replica, under traffic that is played faster and faster."""

    def make(folder: Path, page: str) -> str:
        begin = f"quire simulate {CHAT} --model {model} {COMMON} {STEP} {GOALS}{more}"
        begin = f"{begin} --num-requests {num_requests}"
        pace = arrivals_per_s(folder / CHAT, num_requests)
        rows = [
            (each["cache"], f"{rate:g}", f"{pace * rate:.2f}", *_served(each))
            for rate in rates
            for each in run(f"{begin} --rate {rate:g}", folder)["variants"]
        ]
        heads = ("strategy", "`--rate`", "requests/s", *SERVED)
        rows.sort(key=lambda row: STRATEGIES.index(row[0]))
        return shown(*(f"{begin} --rate {rate:g}" for rate in rates)) + table(heads, rows)

    return make


SERVED = (
    "within the goals",
    "TTFT p50",
    "TTFT p99",
    "TPOT p99",
    "running, most",
    "used of held",
    "preemptions",
)


def _served(each: Mapping[str, Any]) -> tuple[str, ...]:
    took = each["latencies"]
    return (
        # Cut, not rounded: what is 99.0 % here has met 99 %.
        f"{each['num_good'] * 1000 // each['num_requests'] / 10:.1f}%",
        *(f"{took['ttft_s'][part]:.2f} s" for part in ("p50", "p99")),
        f"{took['tpot_s']['p99'] * 1e3:.0f} ms",
        format_count(each["most_running"]),
        f"{each['utilization']:.1%}",
        format_count(each["num_preemptions"]),
    )


def carried(page: str, name: str, strategy: str) -> float:
    """Requests a second at the highest rate up to which enough meet the goals; 0 for none."""
    best = 0.0
    for found, _, per_s, good, *_ in cells(page, name):
        if found == strategy:
            if float(good.rstrip("%")) < 100 * GOOD_FRACTION:
                break
            best = float(per_s)
    return best


def _fleet(_: Path, page: str) -> str:
    busiest = REQUESTS_A_DAY / 86_400 * DAY_PEAK * busiest_minute(page)
    device_bytes = device("h100").total_bytes
    rows = []
    for label, name, strategy, num_devices in (
        ("Llama-3.1-8B, paged", "rates-8b", "paged", 1),
        ("Llama-3.1-8B, growing", "strategies", "growing", 1),
        ("Llama-3.1-8B, contiguous", "strategies", "contiguous", 1),
        ("Llama-3.3-70B, paged", "rates-70b", "paged", 4),
    ):
        one = carried(page, name, strategy)
        if not one:
            rows.append((label, "0", *["none carries it"] * 4))
            continue
        need = math.ceil(busiest / one)
        have = math.ceil(need / (1 - SPARE_FRACTION))
        rows.append(
            (
                label,
                f"{one:.2f}",
                format_count(need),
                format_count(have),
                format_count(have * num_devices),
                f"{have * num_devices * device_bytes / 2**40:,.1f} TiB",
            )
        )
    heads = ("", "one carries, requests/s", "replicas", "with spares", "H100", "their memory")
    return table(heads, rows)


def _routing(asked: str, with_hits: bool) -> Callable[[Path, str], str]:
    """Four replicas that share a trace, under each routing that differs for it."""
    routes = ROUTES if with_hits else ROUTES[:2]
    commands = [f"{asked} --replicas 4 --routing {route}" for route in routes]

    def make(folder: Path, page: str) -> str:
        rows = []
        for route, command in zip(routes, commands, strict=True):
            (each,) = run(command, folder)["variants"]
            hits = [f"{each['hit_rate']:.1%}"] if with_hits else []
            rows.append((route, *hits, *_served(each)))
        heads = ("routing", *(["prompt tokens found"] if with_hits else []), *SERVED)
        return shown(*commands) + table(heads, rows)

    return make


def _curve(folder: Path, page: str) -> str:
    command = f"quire hit-rates {SHARED} --cache-tokens {','.join(SIZES)}"
    found = run(command, folder)
    per_token = 131_072  # of Llama-3.1-8B, as in the table of plans
    rows = []
    for place, size in enumerate(SIZES):
        tokens = parse_count(size)
        share = [found["policies"][name][place]["hit_fraction"] for name in POLICIES]
        rows.append((size, format_bytes(tokens * per_token), *(f"{x:.1%}" for x in share)))
    infinite = found["infinite"]["hit_tokens"] / found["prompt_tokens"]
    rows.append(("without end", "", *[f"{infinite:.1%}"] * len(POLICIES)))
    heads = ("tokens", "bytes, Llama-3.1-8B", *(f"`{name}`" for name in POLICIES))
    return shown(command) + table(heads, rows)


ROUTES = ("round-robin", "least-loaded", "prefix-aware")
POLICIES = ("choice", "lru", "lru-2", "optimum")
SIZES = ("1M", "2M", "4M", "8M", "16M", "50M")
NUM_CHAT, NUM_FOUR, NUM_SEVENTY, NUM_SHARED = 3000, 4000, 1000, 1000

# In the order of the page: what is derived comes after what it is derived from.
SECTIONS: Mapping[str, Callable[[Path, str], str]] = MappingProxyType(
    {
        "traffic": _traffic,
        "day": _day,
        "plans": _plans,
        "rates-8b": _rates(EIGHT, (3, 4, 4.5, 5, 6), NUM_CHAT),
        "rates-70b": _rates(SEVENTY, (1, 1.25, 1.5, 2), NUM_SEVENTY),
        "strategies": _rates(
            EIGHT, (1, 1.5, 2, 2.5, 3), NUM_SEVENTY, " --cache contiguous,growing"
        ),
        "fleet": _fleet,
        "four": _routing(
            f"quire simulate {CHAT} --model {EIGHT} {COMMON} {STEP} {GOALS} "
            f"--num-requests {NUM_FOUR} --rate 16",
            with_hits=False,
        ),
        "routing": _routing(
            f"quire simulate {SHARED} --model {EIGHT} --memory-mode dedicated --max-num-seqs 256 "
            f"--max-num-batched-tokens 4096 --block-size 128 --slo-ttft 10 --slo-tpot 0.1 "
            f"--num-requests {NUM_SHARED}",
            with_hits=True,
        ),
        "curve": _curve,
    }
)
TRACE_FREE: Final = ("day", "plans", "fleet")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--traces", type=Path, help=f"folder with {CHAT} and {SHARED}")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    doing.add_argument("--check", action="store_true", help="exit 1 where that page differs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
