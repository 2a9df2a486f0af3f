"""What an LLM lets go of when it is closed, by the system's own figures, and what stays usable."""

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forks import run_fork
from quire import LLM, SamplingParams
from quire.models.executors.choice import WAYS
from quire.models.loader import adopt
from quire.models.recorded import recordings
from tiny import heavy_model, tiny_model, tokens

MIB = 2**20
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="16MiB")
PROMPT = tokens(1, 9)[0].tolist()

# Runs an LLM of a folder under some strategies, and prints what the system says of this process.
CHILD = """
import gc, json, os, sys
from quire import LLM, SamplingParams
from quire.memory.residency import trim_allocator

def figures():
    trim_allocator()
    said = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(said[name].split()[0]) * 1024 for name in ("VmSize", "VmRSS")}

def round(strategy):
    before = figures()
    llm = LLM(
        sys.argv[1], cache=strategy, max_model_len=2048, max_num_seqs=8,
        kv_cache_memory_bytes="1GiB", memory_mode="dedicated",
    )
    prompts = [[5 + n, 6, 7] * 30 for n in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    during = figures()
    reserved, view = llm.memory.reserved_bytes, llm._kv.storage.view(0)
    llm.close()
    kept = figures()
    shown = [float(part[0].sum()) for part in (view.k, view.v)]  # read, and no fault
    del view
    gc.collect()  # of the model's own, if it has any
    left = llm.usage().reserved_bytes, llm.statistics.num_generation_tokens
    return {"before": before, "during": during, "kept": kept, "shown": shown, "after": figures(),
            "reserved": reserved, "left": left}

round("paged")  # what a process has for ever from its first LLM on
print(json.dumps({strategy: round(strategy) for strategy in sys.argv[2:]}))
sys.stdout.flush()
os._exit(0)  # to take the libraries apart takes longer than some of this
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the system shows."""
    path = tmp_path_factory.mktemp("model")
    heavy_model().save_pretrained(path)
    return path


def test_the_system_has_weights_and_addresses_back(folder: Path) -> None:
    done = run_fork(CHILD, str(folder), "paged", "virtual", timeout=300)
    assert done.returncode == 0, done.stderr
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for strategy, taken in json.loads(done.stdout).items():
        before, during, kept, after = (taken[n] for n in ("before", "during", "kept", "after"))
        assert during["VmSize"] - before["VmSize"] > taken["reserved"] > 50 * MIB, strategy
        assert during["VmRSS"] - before["VmRSS"] > weights > 50 * MIB, strategy
        assert kept["VmRSS"] - before["VmRSS"] < weights / 8, strategy
        # The region that a tensor is over lives on without pages, and goes with the tensor.
        assert taken["shown"] == [0.0, 0.0], strategy
        assert kept["VmSize"] - after["VmSize"] > 16 * MIB, strategy
        assert after["VmSize"] - before["VmSize"] < 16 * MIB, strategy
        # Figures can be read all the same.
        assert taken["left"] == [0, 8 * 6]


@contextmanager
def without_collector() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {}) for way in WAYS),
        ("table", {"cache": "virtual", "swap_space": "1MiB"}),
        ("gather", {"attention_backend": "sdpa"}),
        ("table", {"speculative_config": {"method": "ngram"}}),
        ("alone", {"residency": "prefault"}),
    ],
)
def test_closing_is_enough_and_no_collector_is_needed(
    way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model, what was made from it, and tensors over the cache."""
    monkeypatch.setattr(recordings, "WORTH_IT", 2)
    loaded = adopt(tiny_model("llama"), None)
    with without_collector():
        llm = LLM(loaded, **{**SMALL, **options})
        runner: Any = getattr(llm.engine._runner, "_runner", llm.engine._runner)
        runner.go(way)
        llm.generate(PROMPT, GREEDY)
        gone = [weakref.ref(part) for part in (loaded.model, runner._stand_ins, runner._model)]
        if way == "table":
            gone.append(weakref.ref(runner._model._recordings))
        gone.append(weakref.ref(llm._kv.storage))
        del loaded
        llm.close()
        assert [part() for part in gone] == [None] * len(gone)
        llm.close()
        llm.abandon([])
        assert llm.reset_prefix_cache()


def test_a_model_that_was_handed_in_stays_as_usable_as_it_was() -> None:
    model = tiny_model("llama")
    weight, place = model.lm_head.weight, model.lm_head.weight.data_ptr()
    prompt = torch.tensor([PROMPT])
    own: Any = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = model.generate(prompt, **own)
    llm = LLM(model, **SMALL)
    llm.generate(PROMPT, GREEDY)
    llm.close()
    assert model.lm_head.weight is weight
    assert weight.data_ptr() == place
    assert torch.equal(model.generate(prompt, **own), want)
    with LLM(model, **SMALL) as again:
        (done,) = again.generate(PROMPT, GREEDY)
    assert [*PROMPT, *done.token_ids[:12]] == want[0].tolist()


def test_a_weight_that_was_taken_out_outlives_its_model(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    weight = llm.engine._runner._loaded.model.lm_head.weight.detach()[:3]  # type: ignore[attr-defined]
    want = weight.clone()
    llm.close()
    other = LLM(str(folder), **SMALL)  # something else may have its place now
    assert torch.equal(weight, want)
    other.close()
