"""vLLM's flags: taken for ours, said to change nothing, or refused with the reason."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cli.test_commands import quire
from quire.cli.vllm import REWRITES, Translation, translate
from quire.cli.vllm_flags import FOREIGN, Foreign
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError

OWN = {"--help": False, "--enable-prefix-caching": False, "--no-enable-prefix-caching": False} | {
    f"--{option.name.replace('_', '-')}": True
    for config in (EngineConfig, ServerConfig)
    for option in fields(config)
    if option.type is not bool
}


def of(*arguments: str) -> Translation:
    return translate(list(arguments), OWN)


def words(row: Foreign, flag: str, value: str) -> tuple[str, ...]:
    return (flag,) if row.switch else (flag, value)


@pytest.mark.parametrize("row", FOREIGN, ids=lambda row: row.flag)
def test_each_row_does_as_it_says(row: Foreign) -> None:
    assert row.flag not in OWN, "it is Quire's own: drop the row"
    values = ("on", "off") if row.switch else (*(row.harmless or ()), "something-else")
    for value in values:
        flags = (row.flag, *row.short)
        if value == "off":
            flags = ("--no-" + row.flag.removeprefix("--"),)
        for flag in flags:
            given = ("model", *words(row, flag, value), "--port", "1")
            if row.harmless is None or value in row.harmless:
                done = of(*given)
                assert done.arguments == ["model", "--port", "1"]
                assert done.notes == [f"{' '.join(given[1:-2])} has no effect: {row.here}"]
            else:
                with pytest.raises(ConfigError) as refused:
                    of(*given)
                assert f"{flag}" in str(refused.value)
                assert f"is not supported: {row.here}" in str(refused.value)


def test_no_flag_is_in_two_tables() -> None:
    names = [name for row in FOREIGN for name in (row.flag, *row.short)]
    assert len(set(names)) == len(names)
    assert not set(names) & set(REWRITES)


@pytest.mark.parametrize(
    ("given", "now"),
    [
        ("--gpu-memory-utilization 0.8", "--budget vllm --memory-utilization 0.8"),
        ("--device-memory-utilization=0.8", "--budget vllm --memory-utilization 0.8"),
        ("--gpu-memory-utilization 0.8 --budget auto", "--memory-utilization 0.8 --budget auto"),
        ("--kv-offloading-size 2.5", "--kv-offloading-size 2.5GiB"),
        ("--swap-space 4", "--swap-space 4GiB"),
        ("--swap-space 4MiB", "--swap-space 4MiB"),
        ("--swap-space 4294967296", "--swap-space 4294967296"),
        ("--kv-strategy prealloc", "--cache contiguous"),
        ("--kv-strategy paged", "--cache paged"),
        ("--memory 4GiB", "--kv-cache-memory-bytes 4GiB"),
        ("--dtype half", "--dtype float16"),
        ("--dtype bfloat16", "--dtype bfloat16"),
        ("-q int8", "--quantization int8"),
        ("-tp 2", "--tensor-parallel-size 2"),
        ("--max-model-len 32k", "--max-model-len 32000"),
        ("--max-model-len 1.5K", "--max-model-len 1536"),
        ("--max-model-len auto", ""),
        ("--max-model-len 4096", "--max-model-len 4096"),
        ("--max-num-batched-tokens 2K", "--max-num-batched-tokens 2048"),
        ("--disable-uvicorn-access-log", "--uvicorn-log-level warning"),
        ("--model here", "here"),
        ("--max_num_seqs 4", "--max-num-seqs 4"),
        ("--scheduling-policy priority", "--scheduling-policy priority"),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching"),
        ("-O3", ""),
        ("--enable-chunked-prefill True", ""),
        ("--chat-template --odd -- --port", "--chat-template --odd -- --port"),
        ("--port", "--port"),
    ],
)
def test_a_flag_becomes_ours_and_says_so(given: str, now: str) -> None:
    done = of(*given.split())
    assert " ".join(done.arguments) == now
    changed = given.replace("=", " ").replace("_", "-") != now
    assert bool(done.notes) == (changed and not given.startswith(("--model ", "--max_num_seqs")))


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--max-modle-len", "--max-model-len"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--prot", "--port"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_name(
    flag: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert quire(monkeypatch, "serve", flag, "5") == 2
    assert f"No such option: {flag}. Did you mean {near}?" in capsys.readouterr().err


def test_a_refused_flag_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert quire(monkeypatch, "serve", "-pp", "2") == 2
    err = capsys.readouterr().err
    assert "-pp 2 is not supported: only heads are divided (accepted values: 1)" in err
    assert quire(monkeypatch, "serve", "--trust-remote-code") == 2
    assert "Quire never runs code from a model's folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "70000"), "port=70,000 must be from 0 to 65,535"),
        (("--api-key", "se cret"), "api_key has other characters than printable ASCII"),
        (("--max-num-seqs", "0"), "max_num_seqs=0 must be from 1"),
        (("--ssl-certfile", "/no/such.pem"), "ssl_certfile='/no/such.pem': there is no such file"),
    ],
)
def test_a_wrong_value_is_one_clear_line(
    flags: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert quire(monkeypatch, "serve", *flags) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "se cret" not in err


def test_the_help_of_serve_has_every_option_and_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert quire(monkeypatch, "serve", "--help") == 0
    out = capsys.readouterr().out
    for config in (EngineConfig, ServerConfig):
        for option in fields(config):
            assert "--" + option.name.replace("_", "-") in out
    for words_of_it in ("Listening", "Clients", "Limits", "--api-key @keys.txt", "quire chat"):
        assert words_of_it in out
