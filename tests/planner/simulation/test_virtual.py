"""What copies take on a virtual clock: a price for each layer, and one for each byte."""

from planner.fleets import spec_of
from quire.kv import CacheConfig, build_accounting
from quire.planner.simulation.cost_model import FittedCosts
from quire.planner.simulation.simulated_engine import VirtualCache, VirtualClock

LAYERS, TOKEN_BYTES = 2, 2 * 2 * 64 * 4


def test_a_buffer_that_grows_is_copied_in_each_layer() -> None:
    spec = spec_of()
    sizes = CacheConfig(max_model_len=512, max_num_seqs=1, capacity_bytes=2**30, growth_tokens=32)
    accounting = build_accounting("growing", spec, sizes)
    clock = VirtualClock()
    cache = VirtualCache(accounting, FittedCosts(copy_s=1.0, copy_s_per_byte=2**-20), clock)
    accounting.add(0)
    accounting.try_extend(0, 32)
    cache.carry_out()
    assert clock.now_s == 0  # nothing was there
    accounting.try_extend(0, 33)
    cache.carry_out()
    assert clock.now_s == LAYERS + LAYERS * 32 * TOKEN_BYTES * 2**-20
    assert cache.copied_bytes == LAYERS * 32 * TOKEN_BYTES
