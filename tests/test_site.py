"""The documentation is a site: every page is in its nav, and its generated parts are up to date."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import quire
from tools import reference_pages, site_hook

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The parts that need the engine's modules are held by tests/server/test_metrics.py and
# tests/fleet/test_door.py, which have imported them.
WITH_TORCH = {"reference/metrics.md"}


def nav() -> list[str]:
    made = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return list(site_hook.entries(site_hook.expanded(made)))


def test_every_page_is_in_the_nav_once() -> None:
    pages = sorted(site_hook.page_uri(path) for path in DOCS.rglob("*.md"))
    assert sorted(nav()) == pages, "mkdocs.yml names every page of docs/, each once"


@pytest.mark.parametrize("page", sorted({*reference_pages.PARTS} - WITH_TORCH))
def test_what_is_generated_is_up_to_date(page: str) -> None:
    found = list(reference_pages.stale(page))
    assert not found, "\n".join([*found, f"To write it anew: {reference_pages.COMMAND}"])


def test_a_page_that_says_something_else_is_stale() -> None:
    page = "reference/options.md"
    before = (DOCS / page).read_text(encoding="utf-8")
    changed = before.replace("`--max-num-seqs`", "`--max-num-sequences`", 1)
    assert changed != before
    assert reference_pages.written(page, changed) == before
    with pytest.raises(ValueError, match=r"must have <!-- begin server-options: --> and its end"):
        reference_pages.written(page, before.replace("begin server-options", "begin servers"))


def test_every_variable_that_is_read_is_documented() -> None:
    own = {reference_pages.variable(option) for option in reference_pages.all_options()}
    missing = reference_pages.variables_read() - own - set(reference_pages.OTHER_VARIABLES)
    assert not missing, f"OTHER_VARIABLES in tools/reference_pages.py lacks {sorted(missing)}"


def test_every_flag_of_vllm_that_is_read_as_another_is_documented() -> None:
    from quire.cli.vllm import REWRITES

    page = (DOCS / "reference/vllm-flags.md").read_text(encoding="utf-8")
    read_as = page.partition("**Without effect")[0]
    assert not [flag for flag in REWRITES if f"`{flag}" not in read_as]


def test_every_field_of_an_object_is_explained_where_the_options_say() -> None:
    for name, (config, page) in reference_pages.NESTED.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        fields = [option.name for option in reference_pages.fields(config)]
        assert not [field for field in fields if field not in text], f"docs/{page}: {name}"


def test_the_python_reference_has_every_public_name() -> None:
    page = (DOCS / "reference/python.md").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert set(quire.__all__) - {"__version__"} <= shown


def test_the_install_page_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "start/install.md").read_text(encoding="utf-8")
    rows = "".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9]+)`", rows)) == set(project["optional-dependencies"])


def test_the_page_of_decisions_lists_all_of_them() -> None:
    page = DOCS / "decisions/index.md"
    assert "<!-- pages of this folder -->" in page.read_text(encoding="utf-8")
    rows = site_hook.listed(page).splitlines()
    assert len(rows) == len(list(page.parent.glob("0*.md")))
    assert rows[0].startswith("- [1. The strategies are in `quire.kv`")
    assert rows[0].endswith("](0001-the-room-of-strategies.md)")


# -- links out of docs/ ----------------------------------------------------------------------------


def test_a_link_into_the_source_leads_to_a_page_of_it() -> None:
    page = DOCS / "concepts/attention.md"
    text = (
        "[a](../../src/quire/errors.py#L3) [b](memory.md#x) [c](../../benchmarks/memory) [d](x.py)"
    )
    assert site_hook.with_links(text, page, "concepts/attention.md") == (
        "[a](../source/src/quire/errors.py.md#L3) [b](memory.md#x) "
        "[c](../source/benchmarks/memory/README.md) [d](x.py)"
    )


def test_a_link_back_from_the_source_leads_into_the_docs() -> None:
    page = ROOT / "benchmarks/memory/README.md"
    uri = site_hook.uri_of(page)
    assert site_hook.path_of(uri) == page
    text = "[a](../../docs/glossary.md#x) [b](../RESULTS.md)"
    assert site_hook.with_links(text, page, uri) == (
        "[a](../../../glossary.md#x) [b](../RESULTS.md)"
    )
    code = ROOT / "src/quire/errors.py"
    assert site_hook.path_of(site_hook.uri_of(code)) == code


def test_what_a_page_outside_links_to_is_followed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    up = "../" * (len(tmp_path.parts) - 1)
    page.write_text(f"[x]({up}{ROOT.relative_to('/')}/benchmarks/RESULTS.md)")
    found = site_hook.linked([page])
    assert ROOT / "benchmarks/RESULTS.md" in found
    assert ROOT / "benchmarks/memory/README.md" in found  # RESULTS.md links to it
    assert not [path for path in found if path.is_relative_to(DOCS)]


# -- error messages --------------------------------------------------------------------------------

HOLE = "…"
TITLE = re.compile(r"^### `(.+)`$", re.MULTILINE)


def template_of(node: ast.expr) -> str:
    """Return a text of the source with … for what is put into it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template_of(part) for part in parts)
    return HOLE


def templates(source: str) -> Iterator[str]:
    """Yield each text of a module: a message may be put together of several."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield template_of(node)


def plain(text: str) -> str:
    """Return a text without its holes, which a page and the source may cut differently."""
    return re.sub(rf"[{HOLE}\s]+", " ", text).strip()


def test_every_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    page = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
    titles = TITLE.findall(page)
    assert len(titles) >= 40
    assert len(set(titles)) == len(titles)
    modules = [path.read_text(encoding="utf-8") for path in (ROOT / "src/quire").rglob("*.py")]
    said = cache(lambda source: [plain(text) for text in templates(source)])  # few are parsed
    lost = []
    for title in map(plain, titles):
        words = re.findall(r"\w{4,}", title)
        having = (source for source in modules if all(word in source for word in words))
        if not any(title in text for source in having for text in said(source)):
            lost.append(title)
    assert not lost, "no message of the source is so: " + "; ".join(lost)


def test_a_message_that_was_reworded_is_noticed() -> None:
    node = ast.parse('f"{name}={value:,} must be from {least:,} to {most:,}"').body[0]
    assert isinstance(node, ast.Expr)
    assert plain("…=… must be from … to …") in plain(template_of(node.value))
    assert plain("…=… must be within … and …") not in plain(template_of(node.value))


def test_the_citation_has_the_licence_and_is_of_no_person() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["license"] == project["license"].split()[0]  # of all but the demo model
    assert cited["authors"] == [{"name": "The Quire authors"}]
