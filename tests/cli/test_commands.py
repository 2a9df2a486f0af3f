"""The command line: it runs the shipped model, says what the cache took, and refuses clearly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from memory.cuda.fake_torch import fake_cuda
from quire.cli import COMMANDS, command_line, main
from quire.cli.compare import said_of_texts
from quire.memory import by_device
from quire.memory.budget import BUDGETS
from quire.memory.cuda import CudaMemory
from quire.version import VERSION
from seers import seer

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "memory-page.png"


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def quire(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["quire", *arguments])
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def test_the_list_of_commands_says_what_each_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    listed, whole = (
        CliRunner().invoke(command_line(names), ["--help"]).output
        for names in ((), tuple(COMMANDS))
    )
    assert listed == whole
    said = " ".join(listed.split())
    assert all(help in said for help in COMMANDS.values())


def test_a_terminal_breaks_the_lines_of_a_help_and_its_source_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    said = CliRunner().invoke(command_line(["chat"]), ["chat", "--help"]).output
    paragraph = said.partition("  If no server")[2].partition("\n\n")[0]
    first, second, *_ = f"  If no server{paragraph}".splitlines()
    assert len(first) <= 80 < len(first) + 1 + len(second.split()[0])


def of_all_commands(app: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, app
    for name, each in getattr(app, "commands", {}).items():
        yield from of_all_commands(each, *names, name)


def test_a_help_fits_a_terminal_and_has_every_flag_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app = command_line()
    for names, command in of_all_commands(get_command(app)):
        said = CliRunner().invoke(app, [*names, "--help"]).output
        assert max(map(len, said.splitlines())) <= 80, names
        assert "\\[" not in said, "brackets are no markup"
        if hasattr(command, "commands"):
            assert "…" not in said
            assert "..." not in said.partition("\n")[2], "a command's sentence is whole"
        words = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", said))
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        assert {flag for each in shown for flag in each.opts if flag[:2] == "--"} <= words


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from quire.cli import command_line\n"
        "command_line([])(['--help'], standalone_mode=False)\n"
        "assert not {'numpy', 'torch', 'quire.config', 'quire.cli.serve'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_version_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"quire {VERSION}\n"
    assert quire(monkeypatch, "plan", "-h") == 0
    assert "--max-model-len" in capsys.readouterr().out


def test_generate_streams_text_and_ends_with_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = quire(monkeypatch, "generate", "--max-tokens", "12", "--ignore-eos", "def add(a, b):\n")
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("def add(a, b):\n")
    for word in ("reserved", "committed", "used", "wasted", "given back", "tokens/s"):
        assert word in out


def test_generate_shows_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a placeholder in front of a text that has none."""
    for part in seer("llava"):
        part.save_pretrained(tmp_path)
    model = ("--model", str(tmp_path), "--max-model-len", "64", "--max-tokens", "3")
    images = ("--image", str(PICTURE)) * 2
    assert quire(monkeypatch, "generate", *model, *images, "--json", "w1 w2") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prompt"] == "<image><image>\nw1 w2"
    assert said["kv"]["output_tokens"] == 3
    capsys.readouterr()
    assert quire(monkeypatch, "generate", *model, *images, "w1 <image>") == 1
    assert "has 1 × '<image>', and 2 images" in " ".join(capsys.readouterr().err.split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["contiguous", "growing", "paged", "virtual"])
def test_generate_as_json_adds_up(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--cache", strategy, "--max-tokens", "8", "--ignore-eos", "--json", "import os\n")
    assert quire(monkeypatch, "generate", *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    kv = result["kv"]
    assert result["model"] == "demo"
    assert kv["strategy"] == strategy
    assert kv["output_tokens"] == 8
    assert kv["reserved_bytes"] >= kv["committed_bytes"] >= kv["used_bytes"] > 0
    assert kv["wasted_bytes"] == kv["committed_bytes"] - kv["used_bytes"]
    assert kv["left_bytes"] == 0
    assert kv["returned_bytes"] >= kv["committed_bytes"]


def test_the_prompt_comes_from_standard_input_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", __import__("io").StringIO("class A:\n"))
    assert quire(monkeypatch, "generate", "--max-tokens", "2", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "class A:\n"


def test_a_seed_makes_sampling_repeatable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(seed: str) -> str:
        flags = ("--temperature", "1.5", "--seed", seed, "--max-tokens", "16", "--json", "def f():")
        assert quire(monkeypatch, "generate", *flags) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    assert text("5") == text("5") != text("6")


def test_compare_prints_a_row_a_strategy_and_draws_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "memory.svg"
    flags = ("--max-tokens", "6", "--output", str(picture))  # in 16 bits
    assert quire(monkeypatch, "compare", *flags) == 0
    out = capsys.readouterr().out
    root = ET.parse(picture).getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for strategy in ("contiguous", "growing", "paged", "virtual"):
        assert strategy in out
        assert strategy in words
    assert "Same text under all 4 strategies: yes" in out


@pytest.mark.parametrize(
    ("num_same", "is_exact", "said"),
    [
        (8, False, "^yes$"),
        (7, False, "^for 7 of 8 .*--dtype float32"),
        (7, True, "^NO, only for 7"),
    ],
)
def test_texts_that_part_are_counted_and_explained(
    num_same: int, is_exact: bool, said: str
) -> None:
    assert re.search(said, said_of_texts(num_same, 8, is_exact=is_exact))


def test_compare_as_json_orders_the_strategies_as_they_should_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--max-tokens", "4", "--json", "--output", str(tmp_path / "x.svg"))
    assert quire(monkeypatch, "compare", *flags) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["batch_invariant"]  # else texts may differ, and mean nothing
    runs = {run["strategy"]: run for run in result["runs"]}
    assert runs["contiguous"]["peak_committed_bytes"] > 4 * runs["growing"]["peak_committed_bytes"]
    for strategy in ("paged", "virtual"):
        assert runs[strategy]["peak_committed_bytes"] < runs["growing"]["peak_committed_bytes"]
    assert all(run["left_bytes"] == 0 for run in runs.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "--model", "./no/such/folder"), "there is no folder"),
        (("generate", "--cache", "magic"), "cache='magic' is no cache strategy; known: contiguous"),
        (("compare", "--dtype", "int3"), "dtype 'int3' is unknown"),
        (("generate", "--kv-cache-memory-bytes", "much"), "'much' is not a size"),
        (("generate", "--kv-cache-memory-bytes", "900TiB"), "more than the machine has"),
        (("generate", "--max-model-len", "4", "a b c d e f g h"), "raise max_model_len"),
        (("generate", "--max-model-len", "10000000"), "lower it"),
        (("generate", "--max-num-seqs", "0"), "max_num_seqs=0 must be"),
        (("generate", "--image", "no.png"), "--image no.png cannot be read: FileNotFoundError"),
        (("generate", "--image", __file__), "cannot be read: UnidentifiedImageError"),
        (("generate", "--image", str(PICTURE)), "takes no images: it reads text"),
        (("generate", "--max-tokens", "0"), "max_tokens=0 must be"),
        (("generate", "--temperature", "-1"), "temperature=-1.0 must be"),
        (("generate", "--top-p", "0"), "top_p=0.0 must be"),
        (("compare", "--output", "/no/such/folder/x.svg"), "no such folder"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert quire(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert said in " ".join(captured.err.split())


def test_quantization_is_made_at_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--quantization", "int4", "--max-tokens", "2", "--json", "import os\n")
    assert quire(monkeypatch, "generate", *arguments) == 0
    assert json.loads(capsys.readouterr().out)


def test_doctor_prints_the_machine_the_ledger_and_the_other_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert quire(monkeypatch, "doctor", "--memory-mode", "dedicated", "--max-num-seqs", "2") == 0
    out = capsys.readouterr().out
    for word in ("MemAvailable", "◀ binds", "swap", "pressure", "mappings", "locked memory"):
        assert word in out
    for word in ("headroom", "activations", "never usable", "KV memory", "most that fits"):
        assert word in out
    for rule in ("auto", "vllm", "mistralrs", "llamacpp", "fraction"):
        assert rule in out


def test_doctor_as_json_adds_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("doctor", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024", "--json")
    assert quire(monkeypatch, *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "demo"
    assert found["ledger"]["rule"] == "given"
    assert found["ledger"]["kv_bytes"] == 64 * 2**20
    assert found["ledger"]["kv_tokens"] == 64 * 2**20 // found["needs"]["bytes_per_token"]
    assert set(found["rules"]) == {"auto", "vllm", "mistralrs", "llamacpp", "fraction"}
    for ledger in found["rules"].values():
        assert ledger["kv_bytes"] == sum(term["num_bytes"] for term in ledger["terms"])
    assert found["rules"]["llamacpp"]["kv_tokens"] == 1024
    assert found["machine"]["bounds"][0]["limit_bytes"] > 0


def test_doctor_tells_the_gpus_and_what_each_rule_would_give_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cuda(monkeypatch)
    drivers = {0: EmulatedDriver(), 1: EmulatedDriver(can_map=False)}

    def memory_of(*, device: int, stream: int) -> CudaMemory:
        return CudaMemory(stream=stream, driver=drivers[device], tensor_device=TENSOR_DEVICE)

    monkeypatch.setattr(by_device, "CudaMemory", memory_of)
    assert quire(monkeypatch, "doctor", "--json") == 0
    able, unable = json.loads(capsys.readouterr().out)["accelerators"]
    assert able["memory"]["total_bytes"] == unable["memory"]["total_bytes"] == 8 * 2**30
    assert (able["why_not"], sorted(able["rules"])) == (None, sorted(BUDGETS))
    terms = {term["label"]: term["num_bytes"] for term in able["rules"]["auto"]["terms"]}
    assert (terms["limit"], terms["used"]) == (8 * 2**30, -3 * 2**30)
    assert "cannot map memory" in unable["why_not"]
    for device, where in (("auto", "on GPU 0"), ("cpu", "here")):
        assert quire(monkeypatch, "doctor", "--device", device) == 0
        said = capsys.readouterr().out
        assert f"would give {where}  (--budget)" in said
        assert "would give on GPU 0" in said
        assert "would give on GPU 1" not in said
        assert ("CUDA graphs" in said) == (device == "auto")
    assert quire(monkeypatch, "doctor", "--device", "cuda:1") == 1
    assert "cannot map memory" in capsys.readouterr().err


def test_doctor_says_what_would_fit_instead_of_failing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert quire(monkeypatch, "doctor", "--kv-cache-memory-bytes", "900TiB") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "refused" in out
    assert "lower it, set --kv-cache-memory-bytes" in out


def test_a_flag_counts_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_BUDGET", "llamacpp")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "512")
    assert quire(monkeypatch, "doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["kv_tokens"] == 512
    assert quire(monkeypatch, "doctor", "--json", "--budget", "auto") == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["rule"] == "auto"
    monkeypatch.setenv("QUIRE_BUDGET", "vlm")
    assert quire(monkeypatch, "doctor") == 1
    assert "environment variable QUIRE_BUDGET" in capsys.readouterr().err


def test_an_unknown_flag_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(monkeypatch, "generate", "--max-modle-len", "5") == 2
    assert "--max-model-len" in capsys.readouterr().err


def test_help_names_every_engine_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import fields

    from quire.config import EngineConfig

    monkeypatch.setenv("COLUMNS", "200")
    assert quire(monkeypatch, "compare", "--help") == 0
    out = capsys.readouterr().out
    for option in fields(EngineConfig):
        assert "--" + option.name.replace("_", "-") in out
    assert "quire-kv[int8]" in out, "brackets are no markup"
    assert quire(monkeypatch, "--help") == 0
    assert "QUIRE_<OPTION>" in capsys.readouterr().out
