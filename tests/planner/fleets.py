"""Small fleets for tests: every strategy, memory of a few blocks, and steps of a made-up cost."""

from typing import Any

from quire.engine.scheduler import SchedulerLimits
from quire.kv import CacheConfig
from quire.planner.simulation.cost_model import FittedCosts
from quire.planner.simulation.simulator import Fleet
from quire.spec import FullAttention, Layer, LayerSpec, ModelSpec, SlidingWindow
from quire.traces import TraceRequest

# A block of 16 tokens is 16 KiB in a layer: whole pages.
FULL = FullAttention(num_kv_heads=2, head_dim=64, dtype="float32")
WINDOW = SlidingWindow(num_kv_heads=2, head_dim=64, dtype="float32", window=40)
BLOCK_BYTES = 2 * 16 * 1024  # of two layers
COSTS = FittedCosts(
    step_s=0.01,
    sequence_s=0.001,
    sample_s=0.0005,
    token_s=0.0002,
    next_token_s=0.0001,
    further_token_s=0.00005,
    read_s=1e-6,
    attended_s=1e-7,
    copy_s=1e-4,
    copy_s_per_byte=1e-9,
    save_s_per_byte=1e-9,
    load_s_per_byte=1e-9,
)
CACHES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "contiguous-request": {"reserve": "request"},
    "growing": {"growth_tokens": 32},
    "growing-staggered": {"growth": "staggered", "growth_tokens": 16, "keep_old": True},
    "paged": {},
    "paged-without-caching": {"enable_prefix_caching": False},
    "virtual": {},
    "virtual-shared": {"shares_pages": True},
}


def spec_of(*kinds: LayerSpec) -> ModelSpec:
    layers = tuple(Layer(specs=(kind,)) for kind in kinds or (FULL, FULL))
    return ModelSpec(model_type="test", layers=layers, max_model_len=512, dtype="float32")


def fleet_of(
    case: str = "paged",
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 96,
    policy: str = "fcfs",
    swap_blocks: int = 0,
    spec: ModelSpec | None = None,
    **fleet: Any,
) -> Fleet:
    capacity_bytes = num_blocks * BLOCK_BYTES
    return Fleet(
        spec=spec or spec_of(),
        cache=case.partition("-")[0],
        sizes=CacheConfig(
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            capacity_bytes=capacity_bytes,
            **CACHES[case],
        ),
        limits=SchedulerLimits(
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            watermark_bytes=capacity_bytes // 100,
        ),
        costs=COSTS,
        swap_bytes=swap_blocks * BLOCK_BYTES,
        **fleet,
    )


def request(
    at_s: float, input_tokens: int, output_tokens: int, *hash_ids: int, id_tokens: int = 32
) -> TraceRequest:
    return TraceRequest(
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        hash_ids=hash_ids,
        id_tokens=id_tokens if hash_ids else 0,
    )
