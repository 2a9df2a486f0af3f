"""A plugin of pytest that has ``generate`` make Quire's caches, in Transformers' own tests.

    STRATEGY=paged RESULTS=results.jsonl pytest -p quire_in_generate -m generate tests/models/llama

Where a test gives no cache of its own and asks for no other kind, Transformers would make a
``DynamicCache``; then one of Quire's takes its place. Without STRATEGY nothing is replaced: those
results are what the others are compared with. A line of RESULTS for each test says how it ended and
how many caches of Quire's it used.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

import quire

# These are about graphs, exports, kernels and devices, and none of them about a cache.
ELSEWHERE = ("compil", "export", "flash", "_fa2_", "_fa3_", "_fa4_", "accelerator", "parallel")
NAMES = ("past_key_values", "cache_params", "cache")
CEILING = "256MiB"
LONGEST = 512  # tokens; some of these tests generate more than their model's own longest


class QuireInGenerate:
    """Counts the caches of the test that runs."""

    def __init__(self, strategy: str, results: Path) -> None:
        self._strategy, self._results = strategy, results
        self._num_caches = 0
        self._worst = "passed"

    def replace(self, model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Put Quire's cache in the place of one that Transformers has just made."""
        for name in NAMES:
            made = model_kwargs.get(name)
            own = made.self_attention_cache if isinstance(made, EncoderDecoderCache) else made
            if type(own) is not DynamicCache or own.offloading:
                continue
            cache = quire.cache(
                model,
                self._strategy.removesuffix("-shared"),
                shares_pages=self._strategy.endswith("-shared"),
                kv_cache_memory_bytes=CEILING,
                max_model_len=LONGEST,
            )
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs[name] = cache
            self._num_caches += 1

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(word in item.name for word in ELSEWHERE)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._num_caches, self._worst = 0, "passed"
        result = yield
        line = {"test": item.nodeid, "outcome": self._worst, "caches": self._num_caches}
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._worst != "failed":
            self._worst = report.outcome


def pytest_configure(config: pytest.Config) -> None:
    strategy = os.environ.get("STRATEGY", "")
    plugin = QuireInGenerate(strategy, Path(os.environ["RESULTS"]))
    config.pluginmanager.register(plugin)
    if not strategy:
        return
    own = GenerationMixin._prepare_cache_for_generation

    def prepare(
        model: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        given = any(model_kwargs.get(name) is not None for name in NAMES)
        own(model, generation_config, model_kwargs, *rest, **named)
        if not given:
            plugin.replace(model, generation_config, model_kwargs)

    GenerationMixin._prepare_cache_for_generation = prepare
