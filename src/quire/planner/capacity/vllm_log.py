"""What vLLM writes when it starts: the size of its KV cache in tokens, and in longest requests.

Its rule for the available memory is the budget ``vllm``; here is how it cuts that into blocks, for
models whose layers are all alike. Where layers differ it pads and shares blocks between groups, and
its two lines no longer agree with each other.

Source: vLLM, vllm/v1/core/kv_cache_utils.py: blocks = available // (bytes of a layer's block) //
layers; tokens = blocks × block size; concurrency = tokens / max_model_len, in whole blocks a
request since 0.9.
"""

from dataclasses import dataclass

from quire.spec import FullAttention, LatentAttention, ModelSpec
from quire.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Its two lines."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Longest requests at once."""
        return self.num_tokens / self.max_model_len

    @property
    def text(self) -> str:
        return (
            f"GPU KV cache size: {format_count(self.num_tokens)} tokens; maximum concurrency for "
            f"{format_count(self.max_model_len)} tokens per request: {self.concurrency:.2f}x"
        )


def start_up(
    spec: ModelSpec, available_bytes: int, *, max_model_len: int, block_size: int = 16
) -> StartUp | None:
    """Of one rank's spec, and the memory it has for KV; None where layers differ."""
    groups = spec.groups
    if len(groups) != 1 or not isinstance(groups[0].spec, FullAttention | LatentAttention):
        return None
    group = groups[0]
    layer_block_bytes = group.spec.block_bytes(block_size)
    return StartUp(
        num_blocks=max(0, available_bytes) // layer_block_bytes // group.num_layers,
        block_size=block_size,
        max_model_len=max_model_len,
    )
