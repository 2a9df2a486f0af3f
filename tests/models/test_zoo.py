"""Every decoder class of Transformers: what the page says of it holds."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from conformance.covering import only
from quire.errors import UnsupportedModel
from quire.models.loader import adopt
from zoo import fleet
from zoo.build import tiny_model
from zoo.check import check
from zoo.finding import Finding
from zoo.judge_sight import check_sight
from zoo.page import model_types, verdicts

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")

SIGHT_PAGE = (ROOT / "docs" / "reference" / "models-that-see.md").read_text(encoding="utf-8")

# One for each mechanism that no other test runs through the engine.
MECHANISMS = {
    "llama4_text": ["chunked", "full"],
    "gemma4_text": ["sliding", "full"],  # wider heads in its full layers
    "mimo_v2_flash": ["full", "sliding"],  # heads of their own in windows, narrower values, sinks
    "longcat_flash": ["latent"],  # two attentions in a layer
    "bailing_hybrid": ["recurrent", "latent"],
    "recurrent_gemma": ["recurrent", "sliding"],  # states in attributes of modules
}


def of_this_version() -> None:
    if f"Transformers {transformers.__version__} lists" not in PAGE:
        pytest.skip(f"the page is not of Transformers {transformers.__version__}")


def test_the_page_names_every_class_once() -> None:
    of_this_version()
    assert sorted(model_types(PAGE)) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# tests/devices/test_captured_states.py, test_latent.py and test_drop_in_kinds.py
_ELSEWHERE = ("recurrent_gemma", "longcat_flash", "gemma4_text")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "model_type", only(MECHANISMS, *(name for name in MECHANISMS if name not in _ELSEWHERE))
)
def test_a_class_of_each_mechanism_is_exact(model_type: str) -> None:
    found = check(model_type)
    assert (found.verdict, found.reason) == ("exact", "")
    assert found.kinds == MECHANISMS[model_type]
    assert found.own_cache_is_right
    assert found.num_rows == 69
    assert not found.drop_in
    assert found.num_cached_tokens > 0


@pytest.mark.parametrize("model_type", ["cpmant", "rwkv"])
def test_the_page_gives_the_reason_that_the_loader_raises(model_type: str) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        adopt(tiny_model(model_type))
    assert f"| {raised.value} |" in PAGE


def test_a_class_that_cannot_be_built_is_not_judged() -> None:
    found = check("gemma4_assistant")
    assert (found.verdict, found.generates) == ("not judged", False)
    assert found.not_built
    assert verdicts(PAGE)["gemma4_assistant"].startswith("Not judged")


def test_a_process_that_dies_or_never_ends_is_a_finding_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misbehave(name: str) -> Finding:
        if name == "dies":
            os._exit(3)
        if name == "hangs":
            time.sleep(60)
        return Finding(model_type=name, class_name="A", verdict="exact")

    store = tmp_path / "found.json"
    found = fleet.run(["dies", "works"], store, misbehave)
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "_SECONDS", 0.5)
        found |= fleet.run(["hangs"], store, misbehave)
    assert {name: each.reason for name, each in found.items()} == {
        "dies": "its process ended with 3",
        "hangs": "not done after 0.5 s",
        "works": "",
    }
    assert fleet.load(store) == found


def test_the_page_of_models_that_see_names_every_class_once() -> None:
    of_this_version()
    assert sorted(model_types(SIGHT_PAGE)) == sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


# Features as a hidden state, in two dimensions, through deeper layers, and beside states of layers.
SEEN = ("llama4", "lfm2_vl", "qwen3_vl_moe", "qwen3_5", "kimi_k25")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", only(SEEN, "qwen3_5"))
def test_a_class_that_sees_is_exact(model_type: str) -> None:
    found = check_sight(model_type)
    assert (found.verdict, found.reason) == ("exact", "")
    assert verdicts(SIGHT_PAGE)[model_type].startswith("Exact")


@pytest.mark.full
@pytest.mark.parametrize("which", [[], ["--sight"]])
def test_the_page_is_what_is_found_now(tmp_path: Path, which: list[str]) -> None:
    """Minutes: every class in a process of its own."""
    of_this_version()
    command = ["tools/model_matrix.py", "--check", "--store", str(tmp_path / "found.json"), *which]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
