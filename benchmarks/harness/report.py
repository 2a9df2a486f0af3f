"""What every benchmark shows of what it measured: tables and lines, on a console and in a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable


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
