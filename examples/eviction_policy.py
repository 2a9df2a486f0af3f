"""An eviction policy of another package: least frequently used, with age (LFU-DA).

Run: python examples/eviction_policy.py [MODEL]

Source: Arlitt et al. 2000. What was used often stays, but not for ever: each eviction raises the
age, which blocks that are used from then on have to begin with.
"""

import sys

import quire
from quire.kv import EVICTION_POLICIES, CachedBlock, PolicyPool, Score, ScoredPolicy


class LeastFrequentlyUsed(ScoredPolicy):
    """Keep the blocks that sequences come back to; of those alike, the ones used last."""

    def __init__(self, pool: PolicyPool) -> None:
        super().__init__(pool)
        self._age = 0.0

    def score(self, block: CachedBlock, now: int) -> Score:
        return self._age + 1 + block.hits, block.last_used

    def evicted(self, block: CachedBlock, score: Score) -> None:
        assert isinstance(score, tuple)
        self._age = score[0]


if __name__ == "__main__":
    EVICTION_POLICIES.register("lfu", LeastFrequentlyUsed)
    system = "# Answer in Python, with types and without comments.\n" * 3
    prompts = [system + f"def function_{number}(x):\n" for number in range(12)]
    params = quire.SamplingParams(max_tokens=8, temperature=0)
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model
    with quire.LLM(model, prefix_caching_policy="lfu", max_num_seqs=1) as llm:
        llm.resize(320 * llm.spec.bytes_per_token)  # room for few prompts
        found = [completion.num_cached_tokens for completion in llm.generate(prompts, params)]
    print(f"tokens of each prompt that were found in the cache: {found}")
