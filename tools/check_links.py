"""Hold the documentation's links into the source to the lines of what they name.

A link such as [`Scheduler.plan`](../../src/quire/engine/scheduler.py#L153) must have the line on
which that file defines the name. Lines move with every change, so ``--fix`` writes them anew; a
name that the file no longer defines has to be mended by hand.

    python tools/check_links.py [--fix] [FILE …]     Markdown files; default: all under docs/
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<file>[^)\s#]+\.py)#L(?P<line>\d+)\)")


def main() -> int:
    """Print a line for each wrong link; exit with 1 if one is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--fix", action="store_true", help="write the lines that are right")
    args = parser.parse_args()
    files = args.files or sorted((ROOT / "docs").rglob("*.md"))
    if args.fix:
        for file in files:
            before = file.read_text(encoding="utf-8")
            if (after := with_lines(before, file)) != before:
                file.write_text(after, encoding="utf-8")
                print(f"{file}: links have new lines")
    wrong = [line for file in files for line in wrong_links(file)]
    print("\n".join(wrong) or f"{len(files)} pages: every link into the source is true")
    return 1 if wrong else 0


def wrong_links(page: Path) -> Iterator[str]:
    """Yield a message for each link of a page whose line does not define the name it shows."""
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for link in _LINK.finditer(text):
            line = line_of(page, link)
            if line is None:
                yield f"{page}:{number}: {link['file']} does not define {link['name']}"
            elif line != int(link["line"]):
                yield f"{page}:{number}: {link['name']} is on line {line}, not {link['line']}"


def with_lines(text: str, page: Path) -> str:
    """Return a page's text with the right line in each link whose name is found."""

    def mended(link: re.Match[str]) -> str:
        line = line_of(page, link)
        if line is None:
            return link[0]
        return f"[`{link['name']}`]({link['file']}#L{line})"

    return _LINK.sub(mended, text)


def line_of(page: Path, link: re.Match[str]) -> int | None:
    """Return the line that defines a link's name; None if its file or the name is not there."""
    file = (page.parent / link["file"]).resolve()
    return _definitions(file).get(link["name"]) if file.is_file() else None


@cache
def _definitions(file: Path) -> dict[str, int]:
    """Find the line of each function and class of a file, by its qualified name."""
    found: dict[str, int] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + node.name, node.lineno)
                collect(node.body, f"{prefix}{node.name}.")

    collect(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
