"""What every benchmark says: on the way, and at its end in tables, on a console and in a file."""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table as RichTable

from quire.units import format_seconds

from .os_memory import machine

WithClaims: TypeAlias = Annotated[
    bool, typer.Option("--claims", help="End with one JSON object a line for each claim.")
]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write the tables into this Markdown file's section.")
]


def skip_without_traces(with_claims: bool, output: Path | None, hint: str = "") -> None:
    """Say that nothing is measured. Raises: typer.BadParameter if results are asked for."""
    if with_claims or output:
        raise typer.BadParameter("nothing to claim or to write without --traces FOLDER")
    print(f"SKIPPED: nothing is measured without --traces FOLDER{hint}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def show(shown: Iterable[Table], lines: Iterable[str], console: Console) -> None:
    for table in shown:
        rich_table = RichTable(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            rich_table.add_row(*row)
        console.print(rich_table)
    for line in lines:
        console.print(line, markup=False)


def markdown(shown: list[Table], notes: list[str], setting: str) -> str:
    lines = [setting, ""]
    for table in shown:
        lines += [f"### {table.title}", "", f"| {' | '.join(table.columns)} |"]
        lines += ["|---" * len(table.columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        lines += [""]
    return "\n".join(lines + [f"- {note}" for note in notes]) + "\n"


def replace_section(path: Path, name: str, text: str) -> None:
    """Put the text between a benchmark's two markers, or at the end of a file without them."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    old = path.read_text() if path.exists() else ""
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    path.write_text(before + begin + text + end + after)


class Run:
    """One run of a benchmark. What it says on the way goes to standard error."""

    def __init__(self, module: str, *, width: int) -> None:
        """``module``: below ``benchmarks``. ``width``: of tables that no terminal shows."""
        self.aside = Console(stderr=True)
        self.begun_s = time.monotonic()
        self._module, self._width = module, width

    def say(self, line: str) -> None:
        spent = format_seconds(time.monotonic() - self.begun_s)
        self.aside.print(f"{spent:>8}  {line}", markup=False, highlight=False)

    def setting(self, flags: str, *, packages: Iterable[str] = (), also: Iterable[str] = ()) -> str:
        """The line that the tables begin with: the command, how long it took, and on what."""
        spent = format_seconds(time.monotonic() - self.begun_s)
        versions = [f"{name} {version(name)}" for name in packages]
        parts = [
            f"`python -m benchmarks.{self._module}{flags}`, {spent}",
            machine(),
            ", ".join([f"Python {sys.version.split()[0]}", *versions]),
            *also,
        ]
        return f"{'; '.join(parts)}."

    def end(
        self,
        tables: Iterable[Table],
        setting: str,
        *,
        notes: Iterable[str] = (),
        claims: Iterable[Mapping[str, Any]] = (),
        output: Path | None = None,
    ) -> None:
        """Show the tables, write them where ``output`` asks for it, and print the claims."""
        tables, notes = list(tables), list(notes)
        show(tables, [setting, *notes], Console(width=None if sys.stdout.isatty() else self._width))
        if output:
            name = self._module.rpartition(".")[2]
            replace_section(output, name, markdown(tables, notes, setting))
        for claim in claims:
            print(json.dumps(claim, ensure_ascii=False))
