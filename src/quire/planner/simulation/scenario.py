"""From a model, options and a place to a fleet to simulate: sized as an engine would be."""

from quire.config import EngineConfig
from quire.engine.needs import kv_needs, ledger_for, stored_spec
from quire.engine.scheduler import Limits
from quire.planner.capacity.plan import Place, sizes_of
from quire.planner.capacity.ranks import rank_footprint
from quire.planner.simulation.costs import StepCosts
from quire.planner.simulation.simulator import Fleet
from quire.planner.subjects.subject import Subject
from quire.spec.ranks import rank_spec


def fleet_for(
    subject: Subject,
    config: EngineConfig,
    place: Place,
    costs: StepCosts,
    *,
    num_replicas: int = 1,
    routing: str = "round-robin",
    num_ranks: int = 1,
) -> Fleet:
    """Replicas of ``num_ranks`` devices each, of which one is accounted: all hold the same tokens.

    Raises: ConfigError where the budget leaves no room, with its ledger.
    """
    on_rank = rank_spec(subject.spec, num_ranks)
    own = rank_footprint(subject.own, num_ranks)
    needs = kv_needs(config, subject.name, on_rank, own, place.page_bytes)
    sizes = sizes_of(config, on_rank, place, ledger_for(config, needs, place.machine).require())
    return Fleet(
        spec=stored_spec(config, on_rank),
        cache=config.cache,
        sizes=sizes,
        limits=Limits(
            max_model_len=sizes.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            watermark_bytes=int(config.watermark * sizes.capacity_bytes),
        ),
        costs=costs,
        swap_bytes=config.swap_space,
        num_replicas=num_replicas,
        routing=routing,
    )
