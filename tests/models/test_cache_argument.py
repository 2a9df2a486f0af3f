"""A model is given its cache under the name that its release of Transformers has for it."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire import LLM, SamplingParams
from quire.models.cache_argument import cache_argument, named_cache
from tiny import CONFIGS, random_model


def test_the_name_is_read_from_the_signature() -> None:
    def older(input_ids: int, past_key_values: object = None) -> None: ...
    def mixer(hidden_states: int, cache_params: object = None) -> None: ...
    def newer(input_ids: int, cache: object = None) -> None: ...
    def unnamed(*args: int, **kwargs: int) -> None: ...

    names = [cache_argument(forward) for forward in (older, mixer, newer, unnamed)]
    assert names == ["past_key_values", "cache_params", "cache", "past_key_values"]
    assert named_cache(["hidden_states", "attention_mask"]) is None


class _Renamed(Qwen3ForCausalLM):
    """As from Transformers 5.24 on, and 5.40, where the old name is unknown."""

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        assert "past_key_values" not in kwargs
        return super().forward(input_ids, **{cache_argument(super().forward): cache}, **kwargs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_a_model_whose_argument_is_cache_runs_and_nothing_warns(backend: str) -> None:
    config = CONFIGS["qwen3"]()
    assert isinstance(config, Qwen3Config)
    own = random_model(config)
    renamed = _Renamed(config).eval()
    renamed.load_state_dict(own.state_dict())
    said: list[tuple[int, ...]] = []
    for model in (own, renamed):
        with (
            torch.no_grad(),
            LLM(
                model,
                max_model_len=32,
                kv_cache_memory_bytes="4MiB",
                attention_backend=backend,
            ) as llm,
        ):
            params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
            (done,) = llm.generate([{"prompt_token_ids": [5, 9, 12, 33, 21]}], params)
            said.append(tuple(done.token_ids))
    assert said[0] == said[1]
    assert len(said[0]) == 6
