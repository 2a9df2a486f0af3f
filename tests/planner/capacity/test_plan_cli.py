"""``quire plan`` on the command line: what it says, what it refuses, and that it loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from memory.cuda.fake_torch import fake_cuda
from quire.cli import main
from quire.memory import by_device
from quire.memory.cuda import CudaMemory
from quire.memory.machine import may_have_cuda
from quire.planner.simulation.cost_model import FittedCosts

ROOT = Path(__file__).parents[3]


def quire(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    columns: int = 160,
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["quire", "plan", *arguments])
    monkeypatch.setenv("COLUMNS", str(columns))
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    code, out, _ = quire(monkeypatch, capsys, *arguments, "--json")
    assert code == 0
    said: dict[str, Any] = json.loads(out)
    return said


def test_alone_it_plans_the_demo_model_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = quire(monkeypatch, capsys)
    assert code == 0
    for words in ("full attention", "4,096", "weights", "contiguous", "virtual", "llamacpp"):
        assert words in out


def test_tiers_hold_so_much_and_pay_from_so_many_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        *("llama-3.1-8b", "--device", "h100", "--max-model-len", "32768"),
        *("--kv-tier", "memory:?size=160GiB", "--kv-tier", "redis://kv", "--kv-tier", "file:/kv"),
        *("--tier-speed", "memory=25,25", "--tier-speed", "file=20,3,0.5"),
    )
    memory, redis, file = as_json(monkeypatch, capsys, *arguments)["tiers"]
    (size,) = memory["record_bytes"]
    assert 2 * 2**20 < size < 2 * 2**20 + 16 * 1024  # a block, and its header
    most = memory["block_size"] * (160 * 2**30 // size)
    assert 0.99 * most < memory["tokens"] <= most
    assert memory["pools"] == pytest.approx(3.1, abs=0.1)
    assert memory["load_s"] < memory["compute_s"] < redis["load_s"]
    assert memory["pays_from_tokens"] == 16
    assert (redis["tokens"], redis["pools"], redis["pays_from_tokens"]) == (None, None, None)
    assert 16 < file["pays_from_tokens"] < 32768
    code, out, _ = quire(monkeypatch, capsys, *arguments)
    assert code == 0
    for words in ("Tiers: blocks outside", "pays", "16 tokens", "never", "--tier-speed"):
        assert words in out
    code, _, err = quire(monkeypatch, capsys, "--kv-tier", "file:/kv", "--cache", "growing")
    assert code != 0
    assert "use cache=paged" in err


def test_prefill_replicas_are_said_to_lose_or_to_be_a_trade(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("llama-3.1-8b", "--device", "h100", "--max-model-len", "16384")
    split = (*arguments, "--prefill-replicas", "1", "--replicas", "2", "--request-rate", "15")
    quick = as_json(monkeypatch, capsys, *split, "--tier-speed", "peer=50,50")["prefill_apart"]
    assert quick["verdict"] == "is a trade"
    assert (quick["requests_per_s"], quick["share"]) == (15.0, 1.0)
    assert quick["apart"]["longest_step_s"] < quick["together"]["longest_step_s"]
    code, out, _ = quire(monkeypatch, capsys, *split, "--tier-speed", "peer=0.1,50")
    said = " ".join(out.split())
    assert code == 0
    for words in ("3 equal", "2 + 1", "apart loses here: beside 3 equal replicas", "door's view"):
        assert words in said
    assert as_json(monkeypatch, capsys, *arguments)["prefill_apart"] is None
    here = tmp_path / "here.json"
    FittedCosts(step_s=0.01, token_s=0.001, next_token_s=0.001, further_token_s=0.001).write(here)
    measured = ("--prefill-replicas", "1", "--calibration", str(here))
    slow = as_json(monkeypatch, capsys, *measured)["prefill_apart"]["together"]
    assert slow["token_s"] > 0.01 > quick["apart"]["token_s"]
    for flags, words in (
        (("--prefill-replicas", "1"), "--device of known speed"),
        (("--replicas", "2"), "give --prefill-replicas"),
        ((*arguments, "--prefill-replicas", "1", "--request-rate", "0"), "--request-rate 0"),
        ((*arguments, "--prefill-replicas", "-1"), "--prefill-replicas -1"),
        (
            (*arguments, "--prefill-replicas", "1", "--tp", "2"),
            "prefill_replicas needs what kv_tier does: kv_tier needs tensor",
        ),
        ((*arguments, "--calibration", str(here)), "both give the speed"),
    ):
        code, _, err = quire(monkeypatch, capsys, *flags)
        assert code != 0
        assert words in " ".join(err.split())


def test_a_calibration_says_whose_it_is_and_is_no_other_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = tmp_path / "here.json"
    of = {"machine": "box", "model": "Meta-Llama/llama-3.1-8B", "cache": "virtual"}
    FittedCosts(step_s=0.01, about=of).write(here)
    own = ("Llama-3.1-8B", "--memory", "80GB", "--calibration", str(here))
    speed = as_json(monkeypatch, capsys, *own)["speed"]
    assert speed["source"] == str(here)
    assert speed["told"] == [
        f"measured on box with {of['model']}, {here}",
        "measured with --cache virtual and assumed for paged too",
    ]
    code, out, _ = quire(monkeypatch, capsys, *own, "--cache", "virtual")
    assert code == 0
    assert f"speed: measured on box with {of['model']}" in " ".join(out.split())
    assert "assumed for" not in out
    code, _, err = quire(monkeypatch, capsys, "--calibration", str(here))
    assert code != 0
    assert "was measured with Meta-Llama/llama-3.1-8B, and this is demo" in " ".join(err.split())


@pytest.mark.parametrize("cache", ["paged", "virtual"])
def test_a_record_is_of_a_block_also_where_that_fills_large_pages(
    cache: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not of a whole window of addresses."""
    arguments = ("llama-3.1-8b", "--device", "h100", "--max-model-len", "32768", "--cache", cache)
    (tier,) = as_json(monkeypatch, capsys, *arguments, "--kv-tier", "file:/kv?size=1TiB")["tiers"]
    size, (record_bytes,) = tier["block_size"], tier["record_bytes"]
    assert 128 * 1024 * size < record_bytes < 129 * 1024 * size
    assert size == 16 if cache == "paged" else 16 < size < 1024
    assert record_bytes // 2**21 * 2**21 == 128 * 1024 * size, "a block fills whole pages"


def test_a_device_and_a_model_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("llama-3.1-8b", "--device", "h100", "--max-model-len", "32768", "--budget", "vllm")
    said = as_json(monkeypatch, capsys, *arguments)
    assert said["fits"] is True
    assert said["needs"]["bytes_per_token"] == 131_072
    assert said["chosen"]["budget"] == "vllm"
    assert len(said["cells"]) == 20
    claimed = int(81_559 * 2**20 * 0.9)
    needs = said["needs"]
    free = claimed - needs["weights_bytes"] - needs["activation_bytes"] - needs["graph_bytes"]
    assert said["ledger"]["kv_bytes"] == min(free, needs["most_bytes"])


def test_what_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = quire(monkeypatch, capsys, "Llama-3.3-70B-Instruct", "--device", "h100")
    assert code == 0
    assert "does not fit" in out
    assert "--tp 4" in out
    assert "--memory" in out


def test_a_machine_of_a_size_is_called_by_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = quire(
        monkeypatch, capsys, "Qwen3-4B", "--memory", "16GiB", "--max-model-len", "8192"
    )
    assert code == 0
    assert "at once on 16.00 GiB of memory with paged" in " ".join(out.split())


@pytest.mark.parametrize(("fit", "option"), [("length", "max_model_len"), ("sequences", None)])
def test_fit_finds_and_plans_with_what_it_found(
    fit: str,
    option: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("Qwen2.5-14B", "--device", "l40s", "--fit", fit)
    if fit == "sequences":
        arguments = (*arguments, "--max-model-len", "8192")
    said = as_json(monkeypatch, capsys, *arguments)
    assert said["fits"] is True
    chosen = said["chosen"]
    assert said["found"].startswith("--max-")
    if option is not None:
        assert 1 <= chosen["num_longest"] < 1.1
    else:
        assert chosen["num_sequences"] == chosen["num_fitting"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h1000"), "did you mean 'h100'"),
        (("--device", "cuda:x"), "known: auto, cpu, cuda, cuda:1"),
        (("--device", "cuda", "--memory", "8GiB"), "leave one out, or name another"),
        (("--memory", "lots"), "is not a size"),
        (("--memory", "0"), "must be above 0"),
        (("--tp", "0"), "tp=0 must be at least 1"),
        (("--tp", "3"), "tp=3 is neither a divisor"),
        (("--max-model-len", "999999"), "lower"),
        (("--input-len", "0"), "--input-len 0 must be at least 1"),
        (("--input-len", "2000", "--output-len", "500"), "are more than --max-model-len 2,048"),
        (("no-such-model",), "is not a folder, a file or a name of the table"),
        (("./nowhere",), "there is no folder"),
        (("--quantization", "int8", "--device", "h100"), "is planned for a CPU"),
        (("--quantization", "int8", "--weights", "fp8"), "leave one out"),
        (("--validate", "--memory", "1GiB"), "runs the engine on this machine"),
        (("--validate", "--prefill-replicas", "1"), "leave out --prefill-replicas"),
        (("--validate", "--fit", "length", "--replicas", "2"), "leave out --fit and --replicas"),
        (("--validate", "--calibration", "here.json"), "leave out --calibration"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, error = quire(monkeypatch, capsys, *arguments)
    assert code == 1
    assert message in error
    assert "Traceback" not in error


def test_this_machines_device_is_the_one_that_an_engine_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = as_json(monkeypatch, capsys, "--device", "cpu")
    fake_cuda(monkeypatch)
    drivers = {0: EmulatedDriver(), 1: EmulatedDriver(can_map=False)}

    def memory_of(*, device: int, stream: int) -> CudaMemory:
        return CudaMemory(stream=stream, driver=drivers[device], tensor_device=TENSOR_DEVICE)

    monkeypatch.setattr(by_device, "CudaMemory", memory_of)
    for has_driver, given, here in (
        (True, (), "cuda:0"),
        (True, ("--device", "auto"), "cuda:0"),
        (True, ("--device", "cpu"), "cpu"),
        (False, (), "cpu"),  # and torch is not asked
        (False, ("--device", "cuda"), "cuda:0"),
    ):
        monkeypatch.setattr(
            sys.modules["quire.cli.plan"], "may_have_cuda", lambda found=has_driver: found
        )
        said = as_json(monkeypatch, capsys, *given, "--budget", "vllm", "--swap-space", "1GiB")
        assert said["here"] == here
        on_gpu = here == "cuda:0"
        terms = {term["label"]: term["num_bytes"] for term in said["ledger"]["terms"]}
        assert (terms["hint"] == 8 * 2**30) == on_gpu
        assert ({"CUDA graphs", "swap buffers"} <= terms.keys()) == on_gpu
        assert said["device"] == ("fake 0" if on_gpu else cpu["device"])
    monkeypatch.setenv("QUIRE_DEVICE", "cuda")
    _, out, _ = quire(monkeypatch, capsys)
    assert "fake 0 (cuda:0 of this machine)" in out
    code, _, error = quire(monkeypatch, capsys, "--device", "cuda:1")
    assert (code, "cannot map memory" in error) == (1, True)


def test_a_driver_is_known_without_torch(tmp_path: Path) -> None:
    assert not may_have_cuda(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert may_have_cuda(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": -1}', "\x00"])
def test_a_broken_config_is_a_line_too(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, error = quire(monkeypatch, capsys, str(tmp_path))
    assert code == 1
    assert "config.json" in error
    assert "Traceback" not in error


def test_the_table_is_listed_with_its_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = as_json(monkeypatch, capsys, "--list")
    assert len(said["models"]) >= 40
    assert all(model["source"] for model in said["models"])
    sources = list(dict.fromkeys((each["source"], each["read_on"]) for each in said["models"]))
    code, out, _ = quire(monkeypatch, capsys, "--list", columns=80)
    assert code == 0
    for model in said["models"]:
        (row,) = (line for line in out.splitlines() if line.split()[:1] == [model["name"]])
        assert row.split()[-1] == str(1 + sources.index((model["source"], model["read_on"])))
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out  # no figure and no head is cut


def test_a_device_with_unified_memory_has_its_name_in_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("Llama-3.2-1B", "--device", "M4 Max 64GB", "--cache", "paged")
    _, out, _ = quire(monkeypatch, capsys, *arguments)
    assert "at once on Apple M4 Max, 64 GB with paged" in out.splitlines()[0]
    assert "recommended working set" in out  # what bounds the memory, in the ledger's lines
    said = as_json(monkeypatch, capsys, *arguments)
    assert said["device"] == "Apple M4 Max, 64 GB"


def test_validate_agrees_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--validate", "--attention-backend", "reference", "--output-len", "20")
    code, out, _ = quire(monkeypatch, capsys, *arguments, "--max-model-len", "256")
    assert code == 0
    assert "agree to the byte" in out


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
sys.argv = ["quire", "plan", "Llama-3.1-8B", "--device", DEVICE, "--json"]
from quire.cli import main
main()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_no_torch_and_no_transformers_are_needed(device: str) -> None:
    code = WITHOUT_TORCH.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["needs"]["bytes_per_token"] == 131_072
