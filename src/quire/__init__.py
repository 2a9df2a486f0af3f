"""KV-cache memory for LLM inference: four strategies behind one interface, accounted in bytes.

    model.generate(**inputs, past_key_values=quire.cache(model, "virtual"))
    quire.LLM().generate("def fibonacci(n):")

Names are loaded on first use: importing quire imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM
    from quire.models.drop_in import cache
    from quire.sampling_params import (
        BeamSearchParams,
        CacheRetention,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from quire.spec import ModelSpec

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CacheRetention",
    "ModelSpec",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "cache",
]


def __getattr__(name: str) -> Any:
    match name:
        case "AsyncLLM":
            return import_module("quire.engine.async_llm").AsyncLLM
        case "LLM":
            return import_module("quire.engine.llm").LLM
        case "ModelSpec":
            return import_module("quire.spec").ModelSpec
        case (
            "BeamSearchParams"
            | "CacheRetention"
            | "PoolingParams"
            | "SamplingParams"
            | "StructuredOutputsParams"
        ):
            return getattr(import_module("quire.sampling_params"), name)
        case "cache":
            return import_module("quire.models.drop_in").cache
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
