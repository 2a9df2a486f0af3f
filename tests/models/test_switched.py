"""What a model's owner switches in a live engine holds from the next step on, in all it keeps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from conformance.covering import only
from quire import LLM, SamplingParams
from quire.layers.watch import WeightsWatch
from quire.models.loader import adopt
from quire.models.recorded import recordings as recordings_module
from tiny import tiny_model, tokens

# PEFT asks Transformers by a name that it gives up.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (40, 17)]
SIZES = dict(max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=4)


@pytest.fixture(autouse=True)
def _recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "WORTH_IT", 1)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def own_texts(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """What the model says by itself."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


def made(llm: LLM) -> dict[int, Any]:
    found: dict[int, Any] = llm.engine._runner._model._recordings._made  # type: ignore[attr-defined]
    return found


class Owner:
    """Has a model with two adapters, and switches things in it: each to and fro."""

    def __init__(self) -> None:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")
        self.adapters = get_peft_model(tiny_model("qwen3"), config, adapter_name="first").eval()
        self.adapters.add_adapter("second", config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # strong enough to be heard
            for name, weight in self.adapters.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
        self.model: PreTrainedModel = self.adapters.base_model.model
        self.layers: Any = self.model.model.layers
        self._on: dict[str, Any] = {}

    def switch(self, name: str) -> None:
        if name in self._on:
            getattr(self, f"{name}_off")(self._on.pop(name))
        else:
            self._on[name] = getattr(self, f"{name}_on")()

    def adapter_on(self) -> None:
        self.adapters.disable_adapter_layers()

    def adapter_off(self, _: object) -> None:
        self.adapters.enable_adapter_layers()

    def other_on(self) -> None:
        self.adapters.set_adapter("second")

    def other_off(self, _: object) -> None:
        self.adapters.set_adapter("first")

    def merged_on(self) -> None:
        self.adapters.merge_adapter()

    def merged_off(self, _: object) -> None:
        self.adapters.unmerge_adapter()

    def weak_on(self) -> None:
        """In a dictionary of each layer, which stays the same dictionary."""
        for part in self.model.modules():
            if isinstance(part, LoraLayer):
                part.scaling.update(dict.fromkeys(part.scaling, 0.2))

    def weak_off(self, _: object) -> None:
        for part in self.model.modules():
            if isinstance(part, LoraLayer):
                part.scaling.update(dict.fromkeys(part.scaling, 2.0))

    def setting_on(self) -> float:
        own: float = self.layers[1].self_attn.scaling
        self.layers[1].self_attn.scaling = 3.0
        return own

    def setting_off(self, own: float) -> None:
        self.layers[1].self_attn.scaling = own

    def norm_on(self) -> float:
        """Of a part with a stand-in, whose kernel was compiled for another number."""
        own: float = self.layers[2].post_attention_layernorm.variance_epsilon
        self.layers[2].post_attention_layernorm.variance_epsilon = 9.0
        return own

    def norm_off(self, own: float) -> None:
        self.layers[2].post_attention_layernorm.variance_epsilon = own

    def hook_on(self) -> Any:
        return self.layers[2].mlp.register_forward_hook(lambda *given: given[-1] * -2)

    def hook_off(self, handle: Any) -> None:
        handle.remove()

    def forward_on(self) -> None:
        layer = self.layers[3].mlp
        own = type(layer).forward
        layer.forward = MethodType(lambda self, x: own(self, x) * -2, layer)

    def forward_off(self, _: None) -> None:
        del self.layers[3].mlp.forward

    def kind_on(self) -> Callable[..., Tensor]:
        """In the class of some parts that have stand-ins."""
        own = modeling_qwen3.Qwen3RMSNorm.forward
        setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda *given: own(*given).sin())  # noqa: B010
        return own

    def kind_off(self, own: Callable[..., Tensor]) -> None:
        setattr(modeling_qwen3.Qwen3RMSNorm, "forward", own)  # noqa: B010

    def function_on(self) -> Callable[..., Any]:
        """In the file that the model's classes are in."""
        own = modeling_qwen3.rotate_half
        setattr(modeling_qwen3, "rotate_half", lambda x: own(x) * -1)  # noqa: B010
        return own

    def function_off(self, own: Callable[..., Any]) -> None:
        setattr(modeling_qwen3, "rotate_half", own)  # noqa: B010

    def undo(self) -> None:
        for name in list(self._on):
            self.switch(name)


SWITCHES = sorted(n.removesuffix("_on") for n in vars(Owner) if n.endswith("_on") and n != "_on")


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.undo()  # what it has done in files and classes of others


@pytest.mark.sampled(3)
@pytest.mark.parametrize("switch", only(SWITCHES, "adapter", "function", "hook", "kind", "norm"))
def test_a_switch_holds_from_the_next_step_on(owner: Owner, switch: str) -> None:
    """For recordings, for stand-ins and for keys and values in the prefix cache."""
    with LLM(owner.model, **SIZES) as llm:
        before = own_texts(owner.model)
        assert texts(llm) == texts(llm) == before
        assert made(llm)
        owner.switch(switch)
        after = own_texts(owner.model)
        assert (after == before) == (switch == "merged")
        assert texts(llm) == texts(llm) == after
        owner.switch(switch)
        assert texts(llm) == before
        assert made(llm)


@pytest.mark.parametrize("seed", only(range(2), 0))
def test_switches_in_any_order(owner: Owner, seed: int) -> None:
    random, differ = Random(seed), 0
    with LLM(owner.model, **SIZES) as llm:
        want = texts(llm)
        for _ in range(12):
            owner.switch(random.choice([s for s in SWITCHES if s != "merged"]))
            before, want = want, own_texts(owner.model)
            differ += before != want
            assert texts(llm) == want
    assert differ > 6


def test_a_switch_under_way_is_of_all_that_a_sequence_has(owner: Owner) -> None:
    """What it goes on from was computed by another model: it is computed again."""
    with LLM(owner.model, **SIZES) as llm:
        pieces = llm.stream(
            PROMPTS[0], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        )
        first = [next(pieces) for _ in range(3)]
        owner.switch("adapter")
        rest = [*pieces]
    ids = [i for delta in first for i in delta.token_ids]
    for token in (i for delta in rest for i in delta.token_ids):
        with torch.inference_mode():
            logits = owner.model(torch.tensor([PROMPTS[0] + ids]), use_cache=False).logits
        assert token == int(logits[0, -1].argmax())
        ids.append(token)
    assert len(ids) == 9


# -- what is watched ------------------------------------------------------------------------------

SCALE = 1.0
SETTINGS = {"bias": [0.0]}


class Config:
    def __init__(self) -> None:
        self.deep: dict[str, Any] = {"list": [1, {"set": {1, 2}}]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config)

    __hash__ = None  # type: ignore[assignment]


class Part(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.one = nn.Parameter(torch.ones(1))
        self.hidden = (nn.Linear(2, 2),)  # which torch does not know of
        self.function = self.closed_over([1.0])

    @staticmethod
    def closed_over(held: list[float]) -> Callable[[Tensor], Tensor]:
        return lambda x: x * held[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * SCALE * self.factor + SETTINGS["bias"][0]


CHANGES: dict[str, Callable[[Part, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda p, _: setattr(p, "extra", 1),
    "no attribute": lambda p, _: delattr(p, "config"),
    "nested": lambda p, _: p.config.deep["list"][1]["set"].add(3),
    "equal object": lambda p, _: setattr(p, "config", Config()),
    "equal weight": lambda p, _: setattr(p, "one", nn.Parameter(torch.ones(1))),
    "hidden module": lambda p, _: setattr(p.hidden[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "hook": lambda p, _: p.hidden[0].register_forward_pre_hook(lambda *_: None),
    "closure": lambda p, _: p.function.__closure__[0].cell_contents.append(2.0),
    "class of it": lambda p, _: setattr(p, "__class__", type("Other", (Part,), {})),
    "its class": lambda _, m: m.setattr(Part, "factor", 2.0),
    "name in its file": lambda _, m: m.setitem(globals(), "SCALE", 2.0),
    "inside of one": lambda _, m: m.setitem(SETTINGS, "bias", [1.0]),
    "training": lambda p, _: p.train(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part().eval()
    watch = WeightsWatch(part)
    part(torch.ones(1))
    assert watch.holds()
    assert not watch.unseen
    assert not watch.changed()
    CHANGES[change](part, monkeypatch)
    assert not watch.holds()
    assert WeightsWatch(part).holds()


class Heir(Part):
    """Has its forward from another class."""

    gain = 1.0


@pytest.mark.parametrize("name", ["forward", "gain"])
def test_a_class_that_inherits_its_forward_is_watched_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WeightsWatch(Heir())
    assert watch.holds()
    monkeypatch.setattr(Heir, name, lambda self, x: x, raising=name in vars(Heir))
    assert not watch.holds()


def test_what_contains_itself_is_named() -> None:
    part, own = Part(), [1]
    own.append(own)  # type: ignore[arg-type]
    part.own = own  # type: ignore[assignment]
    watch = WeightsWatch(part)
    assert list(watch.unseen) == ["a list that contains itself"]
    assert watch.holds()


@pytest.mark.parametrize("is_private", [False, True])
def test_hooks_of_all_modules_hear_every_step(is_private: bool) -> None:
    """They are set beside a model, not in it: also beside one that nothing outside has."""
    model = replace(adopt(tiny_model("qwen3")), is_private=is_private)
    heard: list[str] = []

    def hook(module: nn.Module, *_: Any) -> None:
        heard.append(type(module).__name__)

    with LLM(model, **SIZES) as llm:
        before = texts(llm)
        assert made(llm)
        handle = torch_modules.register_module_forward_hook(hook)
        try:
            assert texts(llm) == before
        finally:
            handle.remove()
        # In each of a prompt's step and three more.
        assert heard.count("Qwen3ForCausalLM") >= GREEDY.max_tokens
        assert heard.count("SiLU") + heard.count("SiLUActivation") >= GREEDY.max_tokens
        heard.clear()
        assert texts(llm) == before
        assert made(llm)
        assert not heard


def test_what_is_set_again_is_no_change() -> None:
    part = Part()
    watch = WeightsWatch(part)
    part.config.deep = {"list": [1, {"set": {2, 1}}]}
    part.train()
    assert watch.holds()


def test_what_cannot_be_seen_is_named() -> None:
    part = Part()
    part.iterator = iter([1])  # type: ignore[assignment]
    assert list(WeightsWatch(part).unseen) == ["a builtins.list_iterator"]


def test_what_passes_change_by_themselves_is_left_out() -> None:
    part = Part()
    watch = WeightsWatch(part)
    part.config.deep["list"] = 5
    changed = watch.changed()
    assert {name for _, name in changed} >= {"deep"}
    assert WeightsWatch(part, apart=changed).holds()
    again = WeightsWatch(part, apart=changed)
    part.config.deep["list"] = 6
    assert again.holds()
    part.factor = 7.0
    assert not again.holds()
