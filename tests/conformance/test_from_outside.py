"""Strategies and providers of other packages, as the guides show them, by name.

The code is that of docs/guides/write-a-strategy.md and write-a-memory-provider.md. It is put on the
path as pip leaves an installed package there, beside two that are wrong.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from conformance import named
from documents import blocks
from quire import LLM, SamplingParams
from quire.attention import BACKENDS
from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES, STRATEGIES, Strategy, range_storage
from quire.memory import PROVIDERS, HostMemory
from quire.plugins import Registry
from tiny import tiny_model, tokens

ROOT = Path(__file__).parents[2]
GUIDES = {"doubling_rows": "write-a-strategy", "anonymous_memory": "write-a-memory-provider"}
WRONG = {  # in what each has another name, the passage that is changed, and its error
    "rows_without_pages": ("doubling_rows", "self.page_slots(group, capacity)", " // 2"),
    "memory_that_stays": ("anonymous_memory", "mmap.MADV_DONTNEED", " * 0"),
}
ENTRY_POINTS = """
[quire.strategies]
doubling = doubling_rows:STRATEGY
halved = rows_without_pages:STRATEGY
no-strategy = doubling_rows:FITS
[quire.memory_providers]
anonymous = anonymous_memory:make
leaky = memory_that_stays:make
"""
# Imports once, for all runs, what takes seconds.
RUNNER = """
import os, sys
import pytest, torch
import quire.kv.storage.stacked, quire.memory.by_device
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        code = pytest.main(["-q", "-p", "no:cacheprovider", *line.split()])
        sys.stdout.flush()
        os._exit(code)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for module, guide in GUIDES.items():
        (block,) = blocks(ROOT / f"docs/guides/{guide}.md", "python")
        code = block.code
        assert len(code.splitlines()) <= 80, f"{guide}: an example is read at a glance"
        (folder / f"{module}.py").write_text(code)
    for module, (right, passage, error) in WRONG.items():
        code = (folder / f"{right}.py").read_text()
        assert code.count(passage) == 1
        (folder / f"{module}.py").write_text(code.replace(passage, passage + error))
    info = folder / "quire_extras-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-extras\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_the_suites_run_on_a_name_and_tell_right_from_wrong(installed: Path) -> None:
    suites = [f"tests/conformance/test_{name}.py" for name in ("accounting", "storage", "memory")]
    right = ["--strategy=doubling", "--provider=anonymous", *suites]
    noticed_by = (
        "test_storage.py::test_growing_and_forking_carry_all_of_an_entry",
        "test_memory.py::test_committed_pages_exist_and_decommitted_ones_do_not",
    )
    wrong = ["--strategy=halved", "--provider=leaky", "--tb=no"]
    wrong += [f"tests/conformance/{test}" for test in noticed_by]
    unknown = ["--strategy=dubling", *suites]
    path = os.pathsep.join([str(installed), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(map(" ".join, (right, wrong, unknown))),
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    passed, failed, rejected, _ = done.stdout.split("exit code")
    assert failed.startswith(" 0\n"), passed
    assert " failed" not in passed
    assert " passed" in passed
    assert rejected.startswith(" 1\n"), failed
    for test, case in zip(noticed_by, ("halved/plain-bfloat16", "leaky"), strict=True):
        assert f"{test}[{case}]" in failed
    assert "--strategy='dubling' is no cache strategy; known: contiguous" in done.stderr


def test_an_unknown_name_is_no_reason_to_test_something_else() -> None:
    with pytest.raises(ConfigError, match="--provider='x' is no memory provider; known: auto"):
        named.choose({"--strategy": None, "--provider": "x"})
    assert not named.is_chosen()


def refuse(*_: object) -> Any:
    raise OSError("no such device")


@pytest.fixture
def registered(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(installed))
    STRATEGIES.register("doubling", import_module("doubling_rows").STRATEGY)
    PROVIDERS.register("anonymous", import_module("anonymous_memory").make)
    registries: list[Registry[Any]] = [BACKENDS, EVICTION_POLICIES, PROVIDERS, STRATEGIES]
    fails = Strategy(make_accounting=refuse, make_storage=range_storage)
    for registry in registries:
        registry.register("fails", fails if registry is STRATEGIES else refuse)
    yield
    STRATEGIES.unregister("doubling")
    PROVIDERS.unregister("anonymous")
    for registry in registries:
        registry.unregister("fails")
    for module in GUIDES:
        del sys.modules[module]


def expected(model: torch.nn.Module, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    several = [model.generate(torch.tensor([ids]), max_new_tokens=20) for ids in prompts]
    return [tuple(out[0, -20:].tolist()) for out in several]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "options", [{"cache": "doubling"}, {"memory_provider": "anonymous", "residency": "prefault"}]
)
def test_an_engine_gives_the_tokens_of_generate(options: dict[str, str]) -> None:
    model = tiny_model("gemma3")
    prompts = [tokens(1, length)[0].tolist() for length in (40, 7, 23)]
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    sizes = dict(max_model_len=128, kv_cache_memory_bytes="16MB", max_num_batched_tokens=16)
    with LLM(model, **sizes, **options) as llm:
        found = [completion.token_ids for completion in llm.generate(prompts, greedy)]
    assert found == expected(model, prompts)


@pytest.mark.usefixtures("registered")
def test_a_cache_for_generate_takes_the_name() -> None:
    model, prompt = tiny_model("llama"), tokens(1, 30)[0].tolist()
    with quire.cache(model, "doubling", max_model_len=64, kv_cache_memory_bytes="16MB") as cache:
        out = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=20)
        assert cache.memory.committed_bytes > 0
    assert tuple(out[0, -20:].tolist()) == expected(model, [prompt])[0]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_provider": "anonymous", "provider": HostMemory()}, "leave one out"),
        ({"memory_provider": "anonymous", "residency": "lock"}, "residency=lock is for Quire's"),
        ({"memory_provider": "anon"}, "memory_provider='anon' is no memory provider; known: auto"),
        ({"cache": "doubling", "tensor_parallel_size": 2}, "group 'quire.strategies'"),
        ({"memory_provider": "anonymous", "tensor_parallel_size": 2}, "registered in this process"),
        ({"attention_backend": "fails", "tensor_parallel_size": 2}, "group 'quire.attention_back"),
        ({"prefix_caching_policy": "fails", "tensor_parallel_size": 2}, "group 'quire.evicti"),
        ({"cache": "fails"}, "cache='fails': this cache strategy cannot be made: OSError"),
        ({"memory_provider": "fails"}, "memory_provider='fails': .* cannot be made: OSError"),
        ({"attention_backend": "fails"}, "attention_backend='fails': .* cannot be made: OSError"),
        ({"prefix_caching_policy": "fails"}, "prefix_caching_policy='fails': .* made: OSError"),
    ],
)
def test_what_a_name_cannot_be_given_with_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(None if "tensor_parallel_size" in options else tiny_model("llama"), **options)
