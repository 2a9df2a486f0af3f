"""Registries: Quire's own names, registered ones, and entry points of installed packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError, MemoryUnavailable
from quire.plugins import Registry


def is_text(found: object) -> str | None:
    return None if isinstance(found, str) else f"{found!r} is no text"


def make() -> Registry[str]:
    return Registry("sort of text", "quire.texts", {"own": "ours"}, is_text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with four entry points is on the path, as pip leaves one there."""
    (tmp_path / "texts_of_a_test.py").write_text("good = 'theirs'\nnumber = 3\n")
    (tmp_path / "raises_on_import.py").write_text("raise OSError('no such device')\n")
    info = tmp_path / "texts_of_a_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: texts-of-a-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.texts]\n"
        "theirs = texts_of_a_test:good\n"
        "number = texts_of_a_test:number\n"
        "broken = raises_on_import:good\n"
        "own = texts_of_a_test:good\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("texts_of_a_test", None)


def test_own_names_come_first_and_cannot_be_replaced() -> None:
    registry = make()
    registry.register("mine", "one")
    registry.register("mine", "two")
    assert dict(registry) == {"own": "ours", "mine": "two"}
    with pytest.raises(ConfigError, match="'own' is Quire's own"):
        registry.register("own", "another")
    registry.unregister("mine")
    assert list(registry) == ["own"]
    with pytest.raises(KeyError):
        registry["mine"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"--text='x' is no sort of text; known: own\. .*quire\.te"
    ):
        make().find("x", "--text")


def test_what_is_none_of_the_seam_is_refused() -> None:
    registry: Registry[object] = Registry("sort of text", "quire.texts", {}, is_text)
    with pytest.raises(ConfigError, match="'n': 3 is no text"):
        registry.register("n", 3)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_loaded_when_it_is_chosen_and_not_before() -> None:
    registry = make()
    assert list(registry) == ["own", "theirs", "number", "broken"]
    assert "theirs" in registry
    assert "texts_of_a_test" not in sys.modules
    registry.require("broken", "--text")
    assert registry.find("theirs", "--text") == "theirs"
    assert registry["own"] == "ours"  # not that package's
    with pytest.raises(ConfigError, match=r"texts_of_a_test:number.*3 is no text"):
        registry["number"]
    with pytest.raises(ConfigError, match=r"cannot be loaded: OSError.*no such device"):
        registry["broken"]


@pytest.mark.usefixtures("installed")
def test_a_name_of_two_packages_is_refused_with_both(tmp_path: Path) -> None:
    info = tmp_path / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.texts]\ntheirs = second:text\n")
    registry = make()
    assert list(registry) == ["own", "theirs", "number", "broken"]  # others are not disturbed
    with pytest.raises(ConfigError, match=r"'theirs' is in several .*texts-of-a-test.* of second"):
        registry.find("theirs", "--text")


def test_an_error_of_another_packages_code_names_the_option() -> None:
    registry = make()
    registry.register("mine", "one")
    with (
        pytest.raises(ConfigError, match=r"--text='mine': this sort of text .*KeyError\('a'\)"),
        registry.blamed("mine", "--text"),
    ):
        raise KeyError("a")
    for name, error in (("own", KeyError("a")), ("mine", MemoryUnavailable("no pages"))):
        with pytest.raises(type(error)) as found, registry.blamed(name, "--text"):
            raise error
        assert found.value is error
