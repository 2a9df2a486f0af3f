"""The wheel: what is in it, and that it runs where the source is not."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml

from quire.version import VERSION
from tools.package_metadata import on_an_index

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that is built from the source, without fetching anything."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_model_its_licence_and_the_mark_of_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    model = {path.name for path in (ROOT / "src/quire/demo_model").iterdir()}
    assert {f"quire/demo_model/{name}" for name in model} <= names
    assert {"quire/py.typed", "quire/__main__.py"} <= names
    assert not [name for name in names if not name.startswith(("quire/", "quire_kv-"))]
    metadata = _metadata(wheel)
    assert metadata["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    licences = metadata.get_all("License-File", [])
    assert sorted(licences) == ["LICENSE", "src/quire/demo_model/LICENSE"]
    texts = [name for name in names if ".dist-info/licenses/" in name]
    assert len(texts) == len(licences)


def test_the_version_is_one(wheel: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert _metadata(wheel)["Version"] == VERSION
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", changes, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    newest = re.fullmatch(r"\[(.+)\] - (\d{4}-\d\d-\d\d)", heads[1])
    assert newest is not None, heads[1]
    assert newest[1] == VERSION
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert citation["date-released"] == date.fromisoformat(newest[2])


def test_images_have_the_version() -> None:
    pages = [*(ROOT / "docs/guides").glob("*.md")]
    pages += [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    named = {
        f"{path.name}: {tag}"
        for path in pages
        for tag in re.findall(r"\bquire:(latest\b|\d[\w.]*\w)", path.read_text(encoding="utf-8"))
        if not re.fullmatch(r"[0-9a-f]{16}", tag)  # a namespace of a tier's keys
    }
    assert {name.split(": ")[0] for name in named} >= {"Dockerfile", "compose.yaml", "quire.yaml"}
    assert {name.split(": ")[1] for name in named} == {VERSION}


def test_nothing_in_an_index_leads_nowhere(wheel: Path) -> None:
    metadata = _metadata(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    assert bool(metadata.get_all("Project-URL")) == bool(repository)
    readme = str(metadata.get_payload())
    assert "# Quire" in readme
    assert "](docs/" not in readme
    assert "](benchmarks/" not in readme


def test_links_of_the_readme_lead_into_the_repository() -> None:
    text = "![a picture](docs/a.svg) [a page](docs/b.md#part) [out](https://example.org) [here](#x)"
    assert on_an_index(text, "https://example.org/q") == (
        "![a picture](https://example.org/q/raw/main/docs/a.svg) "
        "[a page](https://example.org/q/blob/main/docs/b.md#part) "
        "[out](https://example.org) [here](#x)"
    )
    assert on_an_index(text, "") == " a page [out](https://example.org) [here](#x)"


def test_the_wheel_runs_where_the_source_is_not(wheel: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    install = [
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(apart),
        str(wheel),
    ]
    done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(apart)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import quire; print(quire.__file__, quire.__version__)").split() == [
        str(apart / "quire/__init__.py"),
        _metadata(wheel)["Version"],
    ]
    assert run("-m", "quire", "--version").split() == ["quire", _metadata(wheel)["Version"]]
    said = run(str(apart / "bin/quire"), "generate", "--max-tokens", "8", "def add(a, b):")
    assert "def add(a, b):" in said


def _metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


def test_extras_that_messages_name_are_of_this_distribution() -> None:
    """A command that is copied from a message must not fetch what others call quire."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        (name, extra)
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name, extra in re.findall(r"\b(quire[\w-]*)\[([a-z]+)\]", path.read_text())
    }
    assert len(named) > 10
    assert {name for name, _ in named} == {project["name"]}
    assert {extra for _, extra in named} <= set(project["optional-dependencies"])
