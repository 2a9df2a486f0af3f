"""What ``quire doctor`` says of the folders of ``--kv-tier``."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from quire.cli import main
from quire.cli.tier_folders import FoundTier, find_tiers, print_tiers
from quire.config import EngineConfig
from quire.engine.kv_fingerprint import planned_fingerprint
from quire.tiers import Deadline
from quire.tiers.files import FileTier
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record_folder import NAMESPACE_FILE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "tier"


def written(folder: Path, own: Fingerprint, *, name: str | None = None) -> None:
    """Keep a record as an engine of this fingerprint does."""
    tier = FileTier(folder, name or own.namespace, size_bytes=2**24)
    tier.describe(own.description.encode())
    tier.store([bytes(32)], [memoryview(bytes(5000))], Deadline.after(5))
    tier.close()


def found(folder: Path, **options: object) -> FoundTier:
    (tier,) = find_tiers(None, EngineConfig(kv_tier=(f"file:{folder}",), **options))
    return tier


def test_a_folder_with_records_of_this_engine(folder: Path) -> None:
    own = planned_fingerprint(None, EngineConfig())
    written(folder, own)
    tier = found(folder)
    assert tier.namespaces is not None
    assert [(each.name, each.num_records, each.differences) for each in tier.namespaces] == [
        (own.namespace, 1, ())
    ]
    assert tier.verdict == f"an engine with these options reads {own.namespace}"


def test_a_folder_in_which_none_fits_says_why(folder: Path) -> None:
    theirs = planned_fingerprint(None, EngineConfig(block_size=32, kv_cache_dtype="fp8"))
    written(folder, theirs)
    tier = found(folder)
    assert tier.verdict == (
        f"1 namespace of other engines, and none that fits: an engine with these options begins "
        f"{tier.own}"
    )
    assert tier.namespaces is not None
    assert tier.namespaces[0].differences == (
        "block_size: 32 there, 16 here",
        'kv_cache_dtype: "float8_e4m3fn" there, "bfloat16" here',
        'groups[0].dtype: "float8_e4m3fn" there, "bfloat16" here',
        "groups[0].rows: [256,256,256,256,256,256,256,256] there, "
        "[512,512,512,512,512,512,512,512] here",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "namespace.json is missing, cannot be read"),
        (b"", "namespace.json is missing, cannot be read"),
        (b"[]", "namespace.json is missing, cannot be read"),
        (b"\x1b]0;title\x07", "namespace.json is missing, cannot be read"),
        (b'{"a": ' + b'{"a": ' * 50 + b"1" + b"}" * 51, "is missing, cannot be read"),
        (b'{"block_size": 64}', "or is another's"),
    ],
    ids=range(6),
)
def test_a_description_that_says_nothing_right(
    text: bytes | None, words: str, folder: Path
) -> None:
    written(folder, planned_fingerprint(None, EngineConfig(block_size=32)))
    (description,) = folder.glob(f"*/{NAMESPACE_FILE}")
    description.unlink()
    if text is not None:
        description.write_bytes(text)
    tier = found(folder)
    assert tier.namespaces is not None
    (line,) = tier.namespaces[0].differences
    assert words in line


def test_hostile_words_reach_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = Fingerprint.of({"a\x1b[31m[bold]": "\x1b]0;title\x07[/red]\u202e" * 40, "rank": 0})
    written(folder, evil)
    print_tiers((found(folder),), Console(highlight=False, force_terminal=False))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "\\u001b" in said
    assert "and " in said
    assert "more" in said


def test_what_generate_has_written_is_read_with_these_options_and_not_with_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["quire", "generate", "a b " * 40, "--max-tokens", "1", "--kv-tier", f"file:{folder}"]
    flags += ["--kv-tier-write", "always", "--kv-cache-memory-bytes", "16MiB"]
    monkeypatch.setattr(sys, "argv", flags)
    with suppress(SystemExit):
        main()
    capsys.readouterr()
    assert "an engine with these options reads" in found(folder).verdict
    other = found(folder, cache="virtual")
    assert "none that fits" in other.verdict
    assert other.namespaces is not None
    assert 'order: "heads first" there, "token first" here' in other.namespaces[0].differences
    assert found(folder, cache="growing").verdict.startswith(
        "no tier can be used: kv_tier needs blocks, and cache=growing has none here"
    )


def test_a_folder_that_is_not_there_or_is_none(folder: Path) -> None:
    assert found(folder).verdict == f"there is no folder {folder}: an engine makes it at its start"
    assert not folder.exists()
    folder.write_text("a file")
    assert "cannot be listed: Not a directory" in found(folder).verdict
    folder.unlink()
    folder.mkdir()
    assert found(folder).verdict.startswith("no records yet; an engine with these options begins")


def test_other_tiers_are_not_looked_at() -> None:
    config = EngineConfig(kv_tier=("memory:?size=1GiB",))
    (tier,) = find_tiers(None, config)
    assert tier.verdict == f"not looked at; an engine with these options uses {tier.own}"
    assert find_tiers(None, EngineConfig()) == ()


def test_the_command_says_it_and_json_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = planned_fingerprint(None, EngineConfig(block_size=32))
    written(folder, theirs)
    flags = ["quire", "doctor", "--kv-tier", f"file:{folder}"]
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*flags, *more])
        with suppress(SystemExit):
            main()
        said = capsys.readouterr().out
        if more:
            (tier,) = json.loads(said)["kv_tiers"]
            assert tier["namespaces"][0]["name"] == theirs.namespace
            assert tier["namespaces"][0]["differences"] == ["block_size: 32 there, 16 here"]
            assert "none that fits" in tier["verdict"]
        else:
            assert f"{theirs.namespace}  1 record, 4.88 KiB, last used" in said
            assert "block_size: 32 there, 16 here" in said
