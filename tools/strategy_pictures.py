"""Draw the four strategies as they were in a run: what each sequence held at four moments.

    python tools/strategy_pictures.py [FOLDER]     default: docs/assets

With each strategy an engine runs the same three requests on the demo model, step by step. After
each step the accounting is asked which cells have pages, who holds them and how full they are. A
picture shows four of these moments, and below them the bytes of all steps. Nothing in it is drawn
by hand. Prompts and outputs have fixed lengths, so each run gives the same pictures.
"""

import argparse
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quire import LLM, SamplingParams
from quire.engine.sequence import Sequence
from quire.figures import COLORS, Plot, Scale, svg_file, ticks
from quire.kv import Accounting, CellState, Occupancy, Usage
from quire.models.loader import LoadedModel, load
from quire.units import format_bytes

FOLDER = Path(__file__).parents[1] / "docs" / "assets"

# -- the run ---------------------------------------------------------------------------------------

BLOCK, LONGEST, NUM_SEQUENCES = 16, 128, 3  # tokens, tokens
TOKEN_BYTES = 4096  # of the demo model

# A and B have a beginning of two blocks in common. C comes when B has ended.
_COMMON = tuple(range(300, 300 + 2 * BLOCK))
PROMPTS = {
    "A": (*_COMMON, *range(400, 404)),
    "B": (*_COMMON, *range(500, 504)),
    "C": tuple(range(600, 620)),
}
OUTPUTS = {"A": 72, "B": 24, "C": 60}
SHOWN = ("A and B have begun", "before B ends", "C runs beside A", "before A ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What there was after a step."""

    usage: Usage
    census: Occupancy  # of the first group: of one layer where each layer has buffers of its own
    cells: Mapping[str, tuple[int, ...]]  # those that each running sequence reads, in order
    names: Mapping[int, str]  # of the running sequences, by their ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All moments of a strategy's run, and the steps of those that are shown."""

    moments: Several[Moment]
    steps: tuple[int, ...]


def run(model: LoadedModel, strategy: str) -> Run:
    """Run A and B together, and C once B has ended, each to its end."""
    with LLM(
        model,
        cache=strategy,
        max_model_len=LONGEST,
        max_num_seqs=NUM_SEQUENCES,
        block_size=BLOCK,
        growth_tokens=2 * BLOCK,
        kv_cache_memory_bytes=NUM_SEQUENCES * LONGEST * TOKEN_BYTES,
        memory_mode="dedicated",
    ) as llm:
        sequences = {name: _start(llm, name) for name in "AB"}
        moments = list[Moment]()
        began: int | None = None
        ended = dict[str, int]()
        goes_on = True
        while goes_on:
            goes_on = llm.step()
            step = len(moments)
            moments.append(_moment(llm.accounting, sequences))
            if began is None and all(each.num_output_tokens for each in sequences.values()):
                began = step
            for name, sequence in sequences.items():
                if sequence.finish_reason is not None:
                    ended.setdefault(name, step)
            if "B" in ended and "C" not in sequences:
                sequences["C"], goes_on = _start(llm, "C"), True
    assert began is not None
    return Run(
        moments=moments,
        steps=(began, ended["B"] - 1, (ended["B"] + ended["A"]) // 2, ended["A"] - 1),
    )


def _start(llm: LLM, name: str) -> Sequence:
    params = SamplingParams(max_tokens=OUTPUTS[name], temperature=0, ignore_eos=True)
    (sequence,) = llm.start(llm.request(list(PROMPTS[name]), params), lambda _: None)
    return sequence


def _moment(accounting: Accounting, sequences: Mapping[str, Sequence]) -> Moment:
    running = {
        name: each.seq_id
        for name, each in sequences.items()
        if each.finish_reason is None and each.num_computed_tokens
    }
    return Moment(
        usage=accounting.usage(),
        census=accounting.census(0),
        cells={name: tuple(accounting.cells(0, each).tolist()) for name, each in running.items()},
        names={seq_id: name for name, seq_id in running.items()},
    )


# -- the picture -----------------------------------------------------------------------------------

ROW = LONGEST // BLOCK  # cells in a row: as many as the longest sequence has
CELL_W, CELL_H, PITCH = 23.0, 14.0, 17.0
WIDTH, LEFT, MOMENT_W, TOP, CHART_H = 860.0, 20.0, 208.0, 92.0, 110.0
PAINT = MappingProxyType({"A": COLORS[2], "B": COLORS[0], "C": COLORS[3]})

ABOUT = MappingProxyType(
    {
        "contiguous": "each sequence has one range, all of it committed when it begins",
        "growing": "each layer has a buffer a sequence; a full one is copied to a larger one",
        "paged": "blocks of 16 tokens in any order; a table a sequence; A and B share two blocks",
        "virtual": "pages only where tokens are; two windows show the same two blocks of A and B",
    }
)
TABLES = MappingProxyType(
    {"paged": "block tables, which attention follows", "virtual": "windows: addresses, as seen"}
)
PLACES = MappingProxyType(
    {
        "contiguous": "memory: three ranges",
        "growing": "memory of one layer: two places each",
        "paged": "memory: a pool of blocks",
        "virtual": "memory: the same blocks, each once",
    }
)


def picture(strategy: str, found: Run) -> str:
    """Draw a strategy's run as an SVG file, light and dark."""
    has_tables = strategy in TABLES
    most_rows = max(-(-found.moments[step].census.num_cells // ROW) for step in found.steps)
    rows = most_rows + (NUM_SEQUENCES + 1.3 if has_tables else 0)
    chart_top = TOP + rows * PITCH + 50
    values = [moment.usage.committed_bytes for moment in found.moments]
    marks = ticks(max(values), num_steps=3, base=1024)
    plot = Plot(
        width=WIDTH,
        height=chart_top + CHART_H + 74,
        x=Scale(low=0, high=len(values) - 1, start=90, stop=WIDTH - 130),
        y=Scale(low=0, high=marks[-1], start=chart_top + CHART_H, stop=chart_top),
    )
    for number, (step, what) in enumerate(zip(found.steps, SHOWN, strict=True)):
        x, y, moment = LEFT + number * MOMENT_W, TOP, found.moments[step]
        plot.text(x, y - 22, f"{number + 1}. {what}", color="currentColor")
        if has_tables:
            plot.text(x, y - 5, TABLES[strategy] if not number else "", kind="tick")
            _draw_tables(plot, x, y, moment, is_window=strategy == "virtual")
            if not number:
                for row, name in enumerate(PAINT):
                    plot.text(x - 13, y + row * PITCH + 11, name, color="currentColor")
            y += (NUM_SEQUENCES + 1.3) * PITCH
        plot.text(x, y - 5, PLACES[strategy] if not number else "", kind="tick")
        _draw_cells(plot, x, y, moment, by_number=has_tables)
    _draw_chart(plot, found, marks)
    _draw_legend(plot, chart_top + CHART_H + 62)
    return svg_file(plot, title=f"{strategy}: three sequences of one run", subtitle=ABOUT[strategy])


def _draw_cells(plot: Plot, x: float, y: float, moment: Moment, *, by_number: bool) -> None:
    """Draw all cells of a group: those with pages filled, the others as mere addresses.

    A cell is named by its own number, as tables name it, or by the place that it has in its holder.
    """
    census = moment.census
    with_pages = {cell: index for index, cell in enumerate(census.ids.tolist())}
    for cell in range(census.num_cells):
        at = x + cell % ROW * (CELL_W + 2), y + cell // ROW * PITCH
        index = with_pages.get(cell)
        if index is None:
            _draw_addresses(plot, *at)
            continue
        holders = [name for name, cells in moment.cells.items() if cell in cells]
        owner = moment.names.get(int(census.holders[index]))
        # A cell that is committed for a sequence has an owner before any token is there.
        names = holders or ([] if owner is None else [owner])
        share = float(census.fills[index] / census.cell_tokens)
        if census.states[index] == CellState.EMPTY:
            share = 0.0
        _draw_held(plot, *at, [PAINT[name] for name in names] or ["currentColor"], share)
        if by_number:
            _label(plot, *at, str(cell), is_dark=share > 0.6)
        elif holders:
            name = holders[0]
            _label(plot, *at, f"{name}{moment.cells[name].index(cell)}", is_dark=share > 0.6)


def _draw_tables(plot: Plot, x: float, y: float, moment: Moment, *, is_window: bool) -> None:
    """Draw each sequence's blocks in its own order; a window has addresses behind them, too."""
    for row, name in enumerate(PAINT):
        top = y + row * PITCH
        cells = moment.cells.get(name, ())
        for index in range(ROW if is_window and cells else len(cells)):
            at = x + index * (CELL_W + 2), top
            if index >= len(cells):
                _draw_addresses(plot, *at)
                continue
            _draw_held(plot, *at, [PAINT[name]], 0.0)
            _label(plot, *at, str(cells[index]), is_dark=False)
        if not cells:
            plot.text(x, top + 11, "–", kind="tick")


def _draw_addresses(plot: Plot, x: float, y: float) -> None:
    plot.parts.append(
        f'<rect class="grid" fill="none" stroke-dasharray="2 2" x="{x + 0.5:g}" y="{y + 0.5:g}" '
        f'width="{CELL_W - 1:g}" height="{CELL_H - 1:g}"/>'
    )


def _draw_held(plot: Plot, x: float, y: float, paints: Several[str], share: float) -> None:
    """Draw a cell with pages: pale as far as no token is there; holders side by side."""
    width = CELL_W / len(paints)
    for number, paint in enumerate(paints):
        left = x + number * width
        plot.parts.append(_rect(left, y, width, paint, 0.28))
        filled = min(max(share * CELL_W - number * width, 0.0), width)
        if filled:
            plot.parts.append(_rect(left, y, filled, paint, 1 if paint != "currentColor" else 0.4))


def _rect(x: float, y: float, width: float, paint: str, opacity: float) -> str:
    return (
        f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.3g}" height="{CELL_H:g}" fill="{paint}" '
        f'opacity="{opacity:g}"/>'
    )


def _label(plot: Plot, x: float, y: float, text: str, *, is_dark: bool) -> None:
    if text:
        paint = "#ffffff" if is_dark else "currentColor"
        plot.parts.append(
            f'<text x="{x + CELL_W / 2:g}" y="{y + 10.5:g}" text-anchor="middle" font-size="10" '
            f'fill="{paint}">{text}</text>'
        )


def _draw_chart(plot: Plot, found: Run, marks: Several[float]) -> None:
    """Draw the bytes of each step, with a line where each moment is."""
    committed = [moment.usage.committed_bytes for moment in found.moments]
    used = [moment.usage.used_bytes for moment in found.moments]
    last = len(committed) - 1
    plot.y_axis(
        marks, [format_bytes(int(mark)).replace(".00", "") if mark else "0" for mark in marks]
    )
    plot.x_axis(range(0, last + 1, 20), [str(step) for step in range(0, last + 1, 20)], "step")
    plot.area(list(enumerate(used)), [(0, 0), (last, 0)], "currentColor", opacity=0.16)
    plot.line(list(enumerate(committed)), COLORS[0])
    for number, step in enumerate(found.steps):
        at = plot.x(step)
        plot.parts.append(f'<path class="grid" d="M{at:.1f} {plot.y.stop:g}V{plot.y.start:g}"/>')
        plot.text(at, plot.y.stop - 6, str(number + 1), anchor="middle", color="currentColor")
    right = plot.x.stop + 8
    plot.text(right, plot.y.stop + 12, "committed", color=COLORS[0])
    plot.text(right, plot.y.stop + 30, "used", color="currentColor")


def _draw_legend(plot: Plot, y: float) -> None:
    """Explain the cells."""
    x, top = LEFT, y - 11
    for name, paint in PAINT.items():
        _draw_held(plot, x, top, [paint], 1.0)
        _label(plot, x, top, name, is_dark=True)
        x += CELL_W + 2
    x = _legend_text(plot, x, y, "16 tokens of a sequence")
    _draw_held(plot, x, top, [PAINT["A"]], 0.5)
    x = _legend_text(plot, x + CELL_W, y, "half of it used")
    _draw_held(plot, x, top, [PAINT["A"], PAINT["B"]], 1.0)
    x = _legend_text(plot, x + CELL_W, y, "held by both")
    _draw_held(plot, x, top, ["currentColor"], 1.0)
    x = _legend_text(plot, x + CELL_W, y, "kept for a later prompt")
    _draw_addresses(plot, x, top)
    _legend_text(plot, x + CELL_W, y, "addresses only")


def _legend_text(plot: Plot, x: float, y: float, text: str) -> float:
    """Write a text behind a cell, and return where the next cell may begin."""
    plot.text(x + 6, y, text, kind="tick")
    return x + 24 + 6.2 * len(text)


def pictures() -> Iterator[tuple[str, str]]:
    """Yield each picture's file name, and the file."""
    model = load()
    for strategy in ABOUT:
        yield f"strategy-{strategy}.svg", picture(strategy, run(model, strategy))


def main() -> None:
    """Write the pictures, and say which."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
