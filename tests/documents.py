"""The documents of the project: their blocks of code, and what stands before each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)

# Before a block of Python that the tests only compile, with the reason.
NOT_RUN = re.compile(r"<!-- not run: (\S.*?) -->$")
# Before what a block of Python prints, and before what a command prints, on any machine.
PRINTED = "<!-- printed by the block above -->"
PRINTED_BY_COMMAND = "<!-- printed, but for times, by the command above -->"

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; ``mark`` is the comment in the line before it, if there is one."""

    page: Path
    line: int
    language: str
    code: str
    mark: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def why_not_run(self) -> str | None:
        found = NOT_RUN.search(self.mark)
        return None if found is None else found[1]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[Block]:
    """Return the blocks of a document in these languages, or all."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            page=path,
            line=text.count("\n", 0, match.start()) + 1,
            language=match["language"],
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
            mark=_mark_before(text[: match.start()]),
        )
        for match in _BLOCK.finditer(text)
        if not languages or match["language"] in languages
    ]


def _mark_before(text: str) -> str:
    line = text.rstrip().rpartition("\n")[2].strip()
    return line if line.startswith("<!--") else ""


def outputs(path: Path, mark: str) -> Iterator[tuple[Block, Block]]:
    """Yield each block that a document says to print what the next one shows, and that one."""
    several = blocks(path)
    for before, block in pairwise(several):
        if block.mark == mark:
            yield before, block


def commands(code: str, program: str = "quire") -> Iterator[list[str]]:
    """Yield the arguments of each call of a program in lines of a shell."""
    for line in code.replace("\\\n", " ").splitlines():
        if program not in line:
            continue
        words = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        try:
            split = list(words)
        except ValueError:  # a text with one apostrophe, which is no command
            continue
        yield from _calls(split, program)


def _calls(words: list[str], program: str) -> Iterator[list[str]]:
    """Yield the arguments of each simple command that calls the program."""
    calls: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("|&;()"):
            calls.append([])
        else:
            calls[-1].append(word)
    for call in calls:
        while call and re.fullmatch(r"[A-Z_]+=.*|sudo", call[0]):
            call = call[1:]
        if call[:1] == [program]:
            ends = [place for place, word in enumerate(call) if set(word) <= set("<>")]
            yield call[1 : ends[0] if ends else None]
