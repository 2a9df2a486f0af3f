"""How ``--help`` looks: options under their panels' titles, and each flag whole on any terminal.

A flag that is too long for its column has a line of its own, with its text below it. (Typer's boxes
give all names of a panel the width of the longest, and cut those that a narrow terminal cannot
show.)
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

_WHOLE = 1_000  # characters of a command's first sentence: none is cut
_NAMES = 26  # columns for names; longer ones have a line of their own


def _write_panels(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in command.get_params(ctx):
        record = each.get_help_record(ctx)
        if record is not None:
            kind = "Arguments" if each.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(each, "rich_help_panel", None) or kind, []).append(record)
    for title, records in panels.items():
        with formatter.section(title):
            _write_records(formatter, records)


def _write_records(formatter: Any, records: Sequence[tuple[str, str]]) -> None:
    """Write names, and beside them their texts, which break at blanks and within no flag."""
    indent, width = " " * formatter.current_indent, min(max(len(n) for n, _ in records), _NAMES)
    beside = " " * (width + 2)
    texts = textwrap.TextWrapper(
        width=formatter.width - len(indent) - len(beside),
        break_on_hyphens=False,
        break_long_words=False,
    )
    for name, text in records:
        lines = texts.wrap(text)
        first = [name.ljust(width) + "  " + lines.pop(0)] if len(name) <= width else [name]
        for line in (*first, *(beside + each for each in lines)):
            formatter.write(f"{indent}{line}\n")


class HelpfulCommand(TyperCommand):
    """A command whose help has its options in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of each panel under its title."""
        _write_panels(self, ctx, formatter)


class HelpfulGroup(TyperGroup):
    """A list of commands, whose help is laid out like that of a command."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        _write_panels(self, ctx, formatter)
        listed = [
            (name, self.commands[name].get_short_help_str(limit=_WHOLE))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            _write_records(formatter, listed)
