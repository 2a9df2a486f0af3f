"""Replay recorded traffic: what caches of several sizes find of it, and what an engine here does.

Run: python examples/replay_trace.py [MODEL [TRACE]]

TRACE is one of the published ones (docs/reference/traces.md), or what quire serve --request-log
wrote; without it, conversations are made up. A trace has no texts: the engine's prompts are tokens
that are alike where the trace says so.
"""

import json
import sys
import tempfile
from itertools import islice

import quire
from quire.bench.traffic import replay
from quire.bench.workload import Vocabulary
from quire.planner.hit_rates import hit_rate_curve, prompts_of, round_sizes
from quire.traces import open_trace

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model
with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as made:  # in Mooncake's form
    for number in range(40):  # ten users, whose prompts begin alike and grow turn by turn
        turn, user = divmod(number, 10)
        ids = [0, 1, *(100 * user + place for place in range(2, 5 + 2 * turn))]
        row = {"timestamp": 500 * number, "input_length": 16 * len(ids), "output_length": 4}
        made.write(json.dumps({**row, "hash_ids": ids, "block_size": 16}) + "\n")
    made.flush()
    trace = open_trace(sys.argv[2] if len(sys.argv) > 2 else made.name)
    prompts, queries = prompts_of(trace), replay(islice(trace, 20), Vocabulary(), seed=0)

for policy, several in hit_rate_curve(prompts, round_sizes(prompts)).by_policy.items():
    found = (f"{each.hit_fraction:.1%} with {each.cache_tokens:,} tokens" for each in several)
    print(f"{policy:8}", ", ".join(found))
with quire.LLM(MODEL) as llm:
    params = [quire.SamplingParams(max_tokens=each.max_tokens) for each in queries]
    done = llm.generate([each.token_ids for each in queries], params)
    hits = sum(each.num_cached_tokens for each in done)
    share = hits / sum(len(each.prompt_token_ids) for each in done)
    print(f"an engine found {share:.1%} of the first {len(done)} prompts")
