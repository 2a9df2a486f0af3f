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

from quire.planner.hardware import (
    BANDWIDTH_FRACTION,
    COMPUTE_FRACTION,
    LAYER_S,
    STEP_S,
    device,
    roofline,
)
from quire.planner.simulation.cost_model import StepWork
from quire.planner.subject import find_subject
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
MOST_RATE: Final = 20.0  # times the trace's own pace
TTFT_S, TPOT_S = 1.0, 0.05  # the goals of chat
SHARED_TTFT_S, SHARED_TPOT_S = 10.0, 0.1  # and of Mooncake's long prompts
CHUNK, SHARED_CHUNK = 1024, 4096  # --max-num-batched-tokens

MAX_LEN = 16384
COMMON = f"--memory-mode dedicated --max-model-len {MAX_LEN} --max-num-seqs 256"
STEP = f"--max-num-batched-tokens {CHUNK}"
GOALS = f"--slo-ttft {TTFT_S:g} --slo-tpot {TPOT_S:g}"
EIGHT = "Llama-3.1-8B --device h100"
SEVENTY = "Llama-3.3-70B-Instruct --device h100 --tp 4"
LATENT = "DeepSeek-V3 --device h200 --tp 8"
STRATEGIES = ("contiguous", "growing", "paged", "virtual")
LENGTHS = "--input-len 1155 --output-len 211"  # the means of the first trace
PLANS = [f"quire plan {each} {COMMON} {STEP} {LENGTHS}" for each in (EIGHT, SEVENTY, LATENT)]

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
    rows = []
    for command in PLANS:
        found = run(command, folder)
        auto = _auto(found)
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
    return shown(*PLANS) + table(heads, rows)


def arrivals_per_s(trace: Path, num_requests: int) -> float:
    """In the mean over the first requests of a trace, at its own pace."""
    met = [each.at_s for each in islice(open_trace(str(trace)), num_requests)]
    return len(met) / met[-1]


def _climb(
    model: str, starts: Mapping[str, float], step: float, num_requests: int
) -> Callable[[Path, str], str]:
    """One replica, under traffic that is played faster until too few requests meet the goals.

    Each strategy begins at its own rate and ends behind the second one that it does not carry.
    """

    def make(folder: Path, page: str) -> str:
        begin = f"quire simulate {CHAT} --model {model} {COMMON} {STEP} {GOALS}"
        begin = f"{begin} --num-requests {num_requests}"
        pace = arrivals_per_s(folder / CHAT, num_requests)
        rows, commands = [], []
        for strategy, start in starts.items():
            commands.append(f"{begin} --cache {strategy} --rate {start:g}")
            rate, misses = start, 0
            while misses < 2 and rate <= MOST_RATE:
                (each,) = run(f"{begin} --cache {strategy} --rate {rate:g}", folder)["variants"]
                rows.append((strategy, f"{rate:g}", f"{pace * rate:.2f}", *_served(each)))
                misses += each["num_good"] < GOOD_FRACTION * each["num_requests"]
                rate += step
        return shown(*commands) + table(("strategy", "`--rate`", "requests/s", *SERVED), rows)

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
        ("Llama-3.1-8B, growing", "rates-8b", "growing", 1),
        ("Llama-3.1-8B, contiguous", "rates-8b", "contiguous", 1),
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


# -- sentences with figures ------------------------------------------------------------------------


def _about_plans(folder: Path, page: str) -> str:
    """What the strategies take for a typical sequence, in the memory of so many tokens."""
    eight, seventy, latent = (run(command, folder) for command in PLANS)

    def held(found: Figures, strategy: str) -> str:
        each = _auto(found)[strategy]
        per_token = sum(group["bytes_per_token"] for group in found["groups"])
        return format_count(round(each["sequence_bytes"] / per_token))

    tokens = format_count(found_tokens(eight))
    lines = [
        f"`--memory-mode dedicated`: no other program runs there. `--max-model-len {MAX_LEN}` is "
        f"enough for the longest request of the trace. It favours `contiguous`, which reserves "
        f"that much for each sequence; at the models' own context fewer would fit.",
        f"`growing` copies into larger buffers; old and new exist together for a moment. Its "
        f"buffers grow in steps that fill whole pages: a sequence of {tokens} tokens takes the "
        f"memory of {held(eight, 'growing')} in the small model, and of "
        f"{held(seventy, 'growing')} in the large one.",
        "`paged` loses half a block per sequence in the mean. So the plan continues with it.",
        f"`virtual` commits whole pages, each with some layers of as many tokens as fit: the "
        f"sequence takes the memory of {held(eight, 'virtual')} tokens of the small model, "
        f"{held(seventy, 'virtual')} of the large one, and {held(latent, 'virtual')} of "
        f"DeepSeek-V3. [Decision 39](../decisions/0039-memory-of-the-engine-on-a-gpu.md) has the "
        f"layouts.",
        f"DeepSeek-V3 needs {latent['tp']} H200 for its weights, "
        f"{format_bytes(latent['needs']['weights_bytes'] * latent['tp'])} in "
        f"{latent['weights_precision']} as they are published, and not for its cache. Each device "
        f"keeps its latents whole, so more devices do not hold more of them.",
    ]
    return _listed(lines)


def _goals(_: Path, page: str) -> str:
    return (
        f"The same traffic is played faster and faster into one replica, until too few requests "
        f"meet the goals: the first token after at most {TTFT_S:g} s, each further one after "
        f"{1e3 * TPOT_S:.0f} ms. A replica *carries* a rate if {GOOD_FRACTION:.0%} meet both, at "
        f"it and at all lower ones of the table. A table ends behind the second rate that is not "
        f"carried.\n"
    )


def _speeds(folder: Path, page: str) -> str:
    subject = find_subject("Llama-3.1-8B")
    costs = roofline(subject, subject.spec, "h100", 1)
    small, large = (costs.seconds(StepWork(n, 1, 1, n, n * n / 2, 1)) for n in (CHUNK, 2 * CHUNK))
    than = "more" if large > TPOT_S else "less"
    lines = [
        f"**Speed is a roofline**: {COMPUTE_FRACTION:.0%} of the peak of the tensor cores, "
        f"{BANDWIDTH_FRACTION:.0%} of the bandwidth, {1e3 * STEP_S:g} ms a step and "
        f"{1e6 * LAYER_S:.0f} µs a layer. "
        f"[They are compared](../concepts/simulator.md#the-roofline) with what "
        f"others have measured. If you have a machine, measure: run "
        f"`quire bench --calibrate here.json` there, and pass `--calibration here.json` instead "
        f"of `--device`.",
        f"The slice is the trace's first {format_count(NUM_CHAT)} requests, so that this page "
        f"takes only minutes to make. `requests/s` is the slice's own mean times `--rate`.",
        "Playing a trace faster keeps its shape and shortens its bursts. More users would give "
        "smoother traffic.",
        f"`--max-num-batched-tokens` sets the latency: in a step with more prompt tokens every "
        f"sequence waits longer. By the roofline, a step of {format_count(2 * CHUNK)} tokens takes "
        f"{1e3 * large:.0f} ms, {than} than the goal for a token; one of {format_count(CHUNK)} "
        f"takes {1e3 * small:.0f}.",
        "The trace does not tell which prompts begin alike, so this is a replica that finds no "
        "prefix.",
    ]
    return _listed(lines)


def _limits(_: Path, page: str) -> str:
    """Whether memory or computing ends what a strategy carries, by the tables of the page."""
    lines = []
    for strategy in ("contiguous", "growing", "paged"):
        fitting = int(_of_plans(page, "Llama-3.1-8B")[strategy].replace(",", ""))
        rows = [row for row in cells(page, "rates-8b") if row[0] == strategy]
        most = max(int(row[7].replace(",", "")) for row in rows)
        used = rows[-1][8]
        bound = "memory is the limit: as many run as fit"
        if most < fitting:
            bound = "computing is the limit"
        lines.append(
            f"`{strategy}`: at most {most} sequences run at the rates of the table, where "
            f"{fitting} of typical lengths would fit; {bound}. Of the bytes that sequences hold, "
            f"{used} are used."
        )
    return _listed(lines)


def _about_fleet(_: Path, page: str) -> str:
    rows = {row[0]: row for row in cells(page, "fleet")}
    paged, growing, reserved = (
        rows[f"Llama-3.1-8B, {name}"][3] for name in ("paged", "growing", "contiguous")
    )
    return (
        f"The same model and traffic need {paged} devices under `paged`, {growing} under "
        f"`growing`, and {reserved} under `contiguous`. A shorter `--max-model-len` or "
        f"`--reserve request` would help the last. Spares are {SPARE_FRACTION:.0%} of all. Rates "
        f"go in steps, so the ratio of two fleets is coarse too.\n"
    )


def _about_four(_: Path, page: str) -> str:
    rows = cells(page, "four")
    rate = float(re.findall(r"--rate ([\d.]+)", section(page, "four"))[0])
    met = all(float(row[1].rstrip("%")) >= 100 * GOOD_FRACTION for row in rows)
    shares = " and ".join(f"{row[1]} ({row[0]})" for row in rows)
    return (
        f"Four replicas are sent chat at `--rate {rate:g}`, {rate / 4:g} for each: {shares} meet "
        f"the goals, {'as' if met else 'fewer than'} one replica at a quarter of that"
        f"{' does' if met else ''}.\n"
    )


def _about_routing(_: Path, page: str) -> str:
    rows = {row[0]: row for row in cells(page, "routing")}
    found = {name: float(row[1].rstrip("%")) for name, row in rows.items()}
    best = max(found, key=lambda name: found[name])
    ways = ", ".join(f"{row[1]} under `{name}`" for name, row in rows.items())
    missing = [
        f"`{name}` ({row[5]})"
        for name, row in rows.items()
        if float(row[5].split()[0]) > 1e3 * SHARED_TPOT_S
    ]
    subject = find_subject("Llama-3.1-8B")
    costs = roofline(subject, subject.spec, "h100", 1)
    step_s = costs.seconds(StepWork(SHARED_CHUNK, 1, 1, 0.0, 0.0, 1))
    late = f"At the 99th percentile {' and '.join(missing)} miss it" if missing else "All meet it"
    return (
        f"Of the prompts' tokens {ways} are found, most under `{best}`. The goal for further "
        f"tokens is {1e3 * SHARED_TPOT_S:.0f} ms. {late}: a full step of "
        f"{format_count(SHARED_CHUNK)} tokens takes {1e3 * step_s:.0f} ms by the roofline, "
        f"without attention. A smaller `--max-num-batched-tokens` would lower that, and delay "
        f"first tokens.\n"
    )


def _about_curve(_: Path, page: str) -> str:
    rows = cells(page, "curve")
    first, last, end = rows[0], rows[-2], rows[-1]
    return (
        f"At {first[0]} tokens `choice`, the default, finds {first[2]} and the optimum {first[5]}; "
        f"at {last[0]} it finds {last[2]} of the {end[5]} that there are.\n"
    )


def _of_plans(page: str, model: str) -> Mapping[str, str]:
    row = next(row for row in cells(page, "plans") if model in row[0])
    return dict(zip(STRATEGIES, row[5:], strict=True))


def _auto(found: Figures) -> Mapping[str, Figures]:
    return {cell["strategy"]: cell for cell in found["cells"] if cell["budget"] == "auto"}


def found_tokens(found: Figures) -> int:
    """The tokens of a typical sequence at its end: all but the last, which is not computed."""
    return int(found["request"]["input_tokens"] + found["request"]["output_tokens"] - 1)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


ROUTES = ("round-robin", "least-loaded", "prefix-aware")
POLICIES = ("choice", "lru", "lru-2", "optimum")
SIZES = ("1M", "2M", "4M", "8M", "16M", "50M")
NUM_CHAT, NUM_FOUR, NUM_SHARED = 2000, 4000, 1000

# In the order of the page: what is derived comes after what it is derived from.
SECTIONS: Mapping[str, Callable[[Path, str], str]] = MappingProxyType(
    {
        "traffic": _traffic,
        "day": _day,
        "plans": _plans,
        "about-plans": _about_plans,
        "goals": _goals,
        "rates-8b": _climb(EIGHT, {"contiguous": 1, "growing": 2.5, "paged": 2.5}, 0.5, NUM_CHAT),
        "rates-70b": _climb(SEVENTY, {"paged": 0.5}, 0.25, NUM_CHAT),
        "speeds": _speeds,
        "limits": _limits,
        "fleet": _fleet,
        "about-fleet": _about_fleet,
        "four": _routing(
            f"quire simulate {CHAT} --model {EIGHT} {COMMON} {STEP} {GOALS} "
            f"--num-requests {NUM_FOUR} --rate 12",
            with_hits=False,
        ),
        "about-four": _about_four,
        "routing": _routing(
            f"quire simulate {SHARED} --model {EIGHT} --memory-mode dedicated --max-num-seqs 256 "
            f"--max-num-batched-tokens {SHARED_CHUNK} --block-size 128 "
            f"--slo-ttft {SHARED_TTFT_S:g} --slo-tpot {SHARED_TPOT_S:g} "
            f"--num-requests {NUM_SHARED}",
            with_hits=True,
        ),
        "about-routing": _about_routing,
        "curve": _curve,
        "about-curve": _about_curve,
    }
)
# What is made of quire plan, of constants, or of the page's own tables.
TRACE_FREE: Final = (
    *("day", "plans", "about-plans", "goals", "speeds", "limits", "fleet", "about-fleet"),
    *("about-four", "about-routing", "about-curve"),
)


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
