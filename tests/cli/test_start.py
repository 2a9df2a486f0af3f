"""What the command line says before it imports torch: all that options and small files tell."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from quire.cli.imports import quick_imports
from quire.models.loader import load
from quire.planner.subject import find_subject
from quire.spec.model_files import find_folder

SEVERAL = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from quire.cli import main

for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:], said, code = arguments, StringIO(), 0
    with redirect_stderr(said), redirect_stdout(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    libraries = sorted({"torch", "transformers", "llvmlite"} & sys.modules.keys())
    print(json.dumps([code, " ".join(said.getvalue().split()), libraries]))
"""


def several(*commands: list[str], **environment: str) -> list[tuple[int, str, list[str]]]:
    """Run them one after the other: the code, what is said, and which large libraries are there."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "1000", **environment},
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_command_that_lacks_torch_says_where_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: no such file', name='torch._C')"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    lacking, without = several(["doctor"], ["plan", "Qwen3-4B", "--device", "l4"], PYTHONPATH=path)
    assert lacking[:2] == (
        1,
        "error: torch cannot be imported (libcudart.so.13: no such file): install its build for "
        "this machine, as https://pytorch.org/get-started/locally/ shows",
    )
    assert without[0] == 0


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def test_what_is_wrong_is_said_before_torch_is_imported(taken_port: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    serve = ["serve", "--port", "0"]
    cases = {
        "No such option: --blok-size": ["serve", "--blok-size", "4"],
        f"port={taken_port} cannot be bound": ["serve", "--port", taken_port],
        "'12Gigs' is not a size": [*serve, "--kv-cache-memory-bytes", "12Gigs"],
        "--tool-call-parser 'nope' is unknown": [*serve, "--tool-call-parser", "nope"],
        "--reasoning-parser 'nope' is unknown": [*serve, "--reasoning-parser", "nope"],
        "max_model_len=99,999 is more than demo": [*serve, "--max-model-len", "99999"],
        "attention_backend='fast' is no attention backend": [*serve, "--attention-backend", "fast"],
        "there is no folder": [*serve, "./no-such-folder"],
        "has no weights": [*serve, str(tmp_path)],
        "it cannot be reached": [*serve, "owner/no-such-model"],
        "lower it": ["generate", "--max-model-len", "99999", "x"],
    }
    found = several(*cases.values(), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    for said, (code, message, libraries) in zip(cases, found, strict=True):
        assert said in message
        assert code == (2 if "No such option" in said else 1), said
        assert libraries == [], said


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)}
    cached, commit = tmp_path / "hub" / "models--owner--cached", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(find_folder(None), cached / "snapshots" / commit)
    serve = ["serve", "--port", "0"]
    asked = ([*serve, "owner/model"], [*serve, "owner/cached", "--max-model-len", "99999"])
    neither, too_long = several(*asked, **nowhere)
    assert [neither[::2], too_long[::2]] == [(1, []), (1, [])]
    assert "'owner/model' is not a local folder" in neither[1]
    assert "it cannot be reached" in neither[1]
    assert "is more than owner/cached was made for, 2,048" in too_long[1]
    assert "Retrying" not in neither[1] + too_long[1]


def test_what_the_hubs_cache_has_is_loaded_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(url: str) -> None:
        asked.append(url)
        raise ConnectionError("no network")

    def download(*_: str, local_files_only: bool = False) -> str:
        assert local_files_only
        return str(folder / "config.json")

    folder = find_folder(None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = load("owner/cached")
    assert loaded.name == "owner/cached"
    assert loaded.tokenizer is not None
    assert find_subject("owner/cached").own == find_subject().own
    assert len(asked) == 2


def test_errors_look_alike_and_names_of_options_hold_everywhere() -> None:
    cases = {
        "error: No such option: --max-modle-len": ["generate", "--max-modle-len", "5"],
        "error: No such command 'serv'": ["serv"],
        "error: Invalid value for '--max-tokens': ": ["generate", "--max-tokens", "many"],
        "error: -pp 2 is not supported": ["serve", "-pp", "2"],
        "error: tensor_parallel_size=0 must be": ["bench", "-tp", "0"],
        "error: tensor_parallel_size=-1 must be": ["generate", "--tp", "-1"],
        "error: quantization 'int3' is unknown": ["compare", "-q", "int3"],
        "error: there is no folder nope": ["bench", "./nope"],
        "error: there is no folder nowhere": ["compare", "--model", "./nowhere"],
        "error: --api-key needs --url": ["bench", "--api-key", "x"],
        "error: kv_cache_memory_bytes: '12Gigs'": ["doctor", "--kv-cache-memory-bytes", "12Gigs"],
    }
    for said, (code, message, libraries) in zip(cases, several(*cases.values()), strict=True):
        assert message.startswith(said)
        assert code in (1, 2)
        assert libraries == []


@pytest.mark.parametrize(
    ("words", "found"),
    [("quire se", ["serve"]), ("quire serve --max-m", ["--max-model-len"])],
)
def test_a_shell_completes_commands_and_their_options(words: str, found: list[str]) -> None:
    asked = {"_QUIRE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-c", "from quire.cli import main; main()"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **asked, "COMP_CWORD": str(words.count(" "))},
    )
    assert done.stdout.split() == found


def test_garbage_is_not_looked_for_while_modules_are_imported() -> None:
    with quick_imports():
        assert not gc.isenabled()
        before = gc.get_freeze_count()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)  # it is passed over from now on


def test_it_is_looked_for_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
