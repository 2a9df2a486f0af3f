"""Complete the documentation's site: mkdocs calls this module while it builds (``make docs``).

A page may link to files outside docs/: sources, benchmarks, examples. The site has no repository to
point to, so each linked file becomes a page of its own under source/, with an anchor per line
(``#L49``) for code. Markdown among them is rendered, and its links are followed too. In the nav, an
entry ``folder/*`` stands for all pages of a folder that the nav does not name; a page may list
them.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests read the nav where mkdocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PREFIX = "source/"

_LINK = re.compile(r"(?P<text>\]\()(?P<target>(?!\w+:|#|/)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=[)\s])")
_LINE = re.compile(r'<a id="L-(\d+)" name="L-\1" href="#L-\1">')
_IMAGES = frozenset({".svg", ".png"})
_LISTED = "<!-- pages of this folder -->"
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"


# -- what mkdocs calls -----------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name all pages of folders in the nav."""
    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in linked(sorted(DOCS.rglob("*.md"))):
        if path.suffix in _IMAGES:
            file = File.generated(config, uri_of(path), abs_src_path=str(path))
        else:
            file = File.generated(config, uri_of(path), content=_page_of(path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/, and links from these files, to their pages.

    A page lists the others of its folder in the place of ``<!-- pages of this folder -->``.
    """
    path = path_of(page.file.src_uri)
    if _LISTED in markdown:
        markdown = markdown.replace(_LISTED, listed(path))
    return with_links(markdown, path, page.file.src_uri)


# -- the nav ---------------------------------------------------------------------------------------


def expanded(nav: list[Any]) -> list[Any]:
    """Return a nav in which each entry ``folder/*`` is replaced by the folder's other pages."""
    named = set(entries(nav))

    def expand(items: list[Any]) -> list[Any]:
        done: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                ((title, inside),) = item.items()
                done.append({title: expand(inside) if isinstance(inside, list) else inside})
            elif item.endswith("/*"):
                pages = sorted(page_uri(path) for path in (DOCS / item).parent.glob("*.md"))
                done += [page for page in pages if page not in named]
            else:
                done.append(item)
        return done

    return expand(nav)


def entries(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of a nav, in order."""
    for item in nav:
        if isinstance(item, dict):
            (inside,) = item.values()
            yield from entries(inside if isinstance(inside, list) else [inside])
        else:
            yield item


def listed(page: Path) -> str:
    """Return a list of links to the other pages of a page's folder, by their titles."""
    others = sorted(path for path in page.parent.glob("*.md") if path != page)
    titles = [_TITLE.search(path.read_text(encoding="utf-8")) for path in others]
    return "".join(
        f"- [{title[1] if title else path.stem}]({path.name})\n"
        for path, title in zip(others, titles, strict=True)
    )


def page_uri(path: Path) -> str:
    """Return the name that mkdocs has for a page of docs/."""
    return path.relative_to(DOCS).as_posix()


# -- files outside docs/ ---------------------------------------------------------------------------


def linked(pages: list[Path]) -> list[Path]:
    """Return the files outside docs/ that pages link to, and those that these link to."""
    found: dict[Path, None] = {}
    to_read = list(pages)
    while to_read:
        page = to_read.pop(0)
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = target_of(page, match["target"])
            if target is None or target.is_relative_to(DOCS) or target in found:
                continue
            found[target] = None
            if target.suffix == ".md":
                to_read.append(target)
    return list(found)


def target_of(page: Path, target: str) -> Path | None:
    """Return the file of the repository that a link of a page leads to; None: there is none."""
    path = Path(os.path.normpath(page.parent / target))
    if path.is_dir():
        path = next((path / name for name in _OF_FOLDER if (path / name).is_file()), path)
    return path if path.is_file() and path.is_relative_to(ROOT) else None


_OF_FOLDER = ("README.md", "index.md", "__init__.py")


def with_links(markdown: str, page: Path, uri: str) -> str:
    """Return a page's text with links to the pages of files outside docs/.

    ``uri`` is the page's own place in the site. Links between pages of docs/ are left as they are.
    """

    def mended(match: re.Match[str]) -> str:
        target = target_of(page, match["target"])
        if target is None or (page.is_relative_to(DOCS) and target.is_relative_to(DOCS)):
            return match[0]
        relative = os.path.relpath(uri_of(target), os.path.dirname(uri) or ".")
        return f"{match['text']}{relative}{match['anchor'] or ''}"

    return _LINK.sub(mended, markdown)


def uri_of(path: Path) -> str:
    """Return the place in the site's sources of a file of the repository."""
    if path.is_relative_to(DOCS):
        return page_uri(path)
    name = PREFIX + path.relative_to(ROOT).as_posix()
    return name if path.suffix in {".md", *_IMAGES} else f"{name}.md"


def path_of(uri: str) -> Path:
    """Return the file of the repository that a page of the site shows."""
    if not uri.startswith(PREFIX):
        return DOCS / uri
    path = ROOT / uri.removeprefix(PREFIX)
    return path if path.is_file() else path.with_suffix("")


def _page_of(path: Path) -> str:
    """Return a page that shows a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_for_filename
    from pygments.lexers.special import TextLexer
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    # Each line has an anchor in front, so no line of the source begins a block of Markdown.
    shown = highlight(text, lexer, HtmlFormatter(lineanchors="L", wrapcode=True))
    shown = _LINE.sub(r'<a id="L\1" href="#L\1">', shown)
    title = html.escape(path.relative_to(ROOT).as_posix())
    return f"{_NOT_SEARCHED}# `{title}`\n\n{shown}\n"
