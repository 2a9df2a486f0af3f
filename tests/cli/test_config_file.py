"""``quire serve --config``: what a YAML file says, what counts before it, and where it is wrong."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cli.test_commands import quire
from quire.cli.config_file import read_entries
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError


class Served:
    """What a server would have been started with."""

    server: ServerConfig
    engine: EngineConfig
    model: str | None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    found = Served()

    def import_engine_for(model: str | None, config: EngineConfig) -> None:
        found.model, found.engine = model, config
        raise SystemExit(0)

    def run(config: ServerConfig, load: Any, *, announce: Any) -> int:
        found.server = config
        load()
        return 0

    monkeypatch.setattr(import_module("quire.cli.serve"), "import_engine_for", import_engine_for)
    monkeypatch.setattr(import_module("quire.server.run"), "serve", run)
    return found


def test_a_file_is_read_as_vllms_and_the_command_line_counts_before_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(
        "# as of vLLM\n"
        "model: ./a-model\n"
        "port: 9000\n"
        "max_model_len: 2k\n"
        "kv-cache-memory-bytes: 64MiB\n"
        "enable-prefix-caching: false\n"
        "served-model-name: [first, second]\n"
        "api-key:\n  - one\n  - two\n"
        "gpu-memory-utilization: 0.5\n"
        "enforce-eager: true\n"
        "no-enable-log-requests: true\n"
        "enable-chunked-prefill: True\n"
        "disable-uvicorn-access-log: false\n"
        "tensor-parallel-size: 2\n"
        'speculative-config: \'{"method": "ngram"}\'\n'
    )
    monkeypatch.setenv("QUIRE_PORT", "1")
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "32")
    flags = ("--served-model-name", "mine", "-tp", "1", "--no-enforce-eager")
    assert quire(monkeypatch, "serve", "--config", str(file), *flags) == 0
    assert served.model == "./a-model"
    assert (served.server.port, served.server.api_key) == (9000, ("one", "two"))
    assert served.server.served_model_name == ("mine",)
    engine = served.engine
    assert (engine.max_model_len, engine.kv_cache_memory_bytes) == (2000, 64 * 2**20)
    assert (engine.budget, engine.memory_utilization) == ("vllm", 0.5)
    assert (engine.enable_prefix_caching, engine.block_size) == (False, 32)
    assert engine.tensor_parallel_size == 1
    assert served.server.uvicorn_log_level == "info"
    assert engine.speculative_config is not None
    assert quire(monkeypatch, "serve", "./another", f"--config={file}", "--port", "9001") == 0
    assert (served.model, served.server.port) == ("./another", 9001)
    assert served.server.served_model_name == ("first", "second")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 9000", "line 1: prot: No such option: --prot. Did you mean --port?"),
        ("\nport: many", "line 2: port: 'many': "),
        ("port: 99999", "line 1: port=99,999 must be from 0"),
        ("port: [1, 2]", "line 1: port: it takes one value, not a list"),
        ("port:", "line 1: port: it has no value"),
        ("port: 1\nport: 2", "line 2: port: it is set twice; "),
        ("disable-log-stats: maybe", "line 1: disable-log-stats: 'maybe' is neither true nor"),
        ("swap-space: 12Gigs", "line 1: swap_space: '12Gigs' is not a size"),
        ("enforce-eager: maybe", "line 1: enforce-eager: 'maybe' is neither true nor false"),
        ("disable-uvicorn-access-log: 3", "line 1: disable-uvicorn-access-log: '3' is neither"),
        ("help: false", "line 1: help: it cannot be false"),
        ("pipeline-parallel-size: 2", "line 1: pipeline-parallel-size: --pipeline-parallel-size 2"),
        ("model: --port", "line 1: model: '--port' is neither a folder nor a name"),
        ("config: other.yaml", "line 1: config: a file cannot name another one"),
        ("port: {a: 1}", "line 1: port: only names of options are allowed here"),
        ("- port", "line 1: only names of options are allowed here"),
        (
            "port: !!python/object/apply:os.system [x]",
            "line 1: 'tag:yaml.org,2002:python/object/apply:os.system': tags are not",
        ),
        ("a: &a 1\nb: *a", "line 2: b: only names of options are allowed here"),
        ("port: 1\n--- \nport: 2", "line 3: only names of options are allowed here"),
        ("port: 'open", "line 1 is not YAML: "),
        ("port: \x07", "is not YAML: unacceptable character"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    text: str,
    said: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    file = tmp_path / "quire.yaml"
    file.write_text(text)
    assert quire(monkeypatch, "serve", "--config", str(file)) in (1, 2)
    err = capsys.readouterr().err
    assert said in err
    assert str(file) in err


def test_a_hostile_file_costs_no_more_than_its_length(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    bomb = "a: &a [x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(50))
    for text in ("port: " + "[" * 60_000, bomb, "&a " * 20_000, "? " * 30_000, "x" * 2**17):
        file.write_text(text)
        begin = time.process_time()
        with pytest.raises(ConfigError, match=r"quire\.yaml"):
            read_entries(str(file))
        assert time.process_time() - begin < 5, text[:20]
    file.write_bytes(b"\xff\xfe\x00")
    for path, said in ((file, "not UTF-8"), (tmp_path, "directory"), ("/no/file", "No such file")):
        with pytest.raises(ConfigError, match=said):
            read_entries(str(path))
