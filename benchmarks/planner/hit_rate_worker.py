"""One answer to how much of a trace a cache finds, as a process of its own: what is timed.

    python -m benchmarks.planner.hit_rate_worker TRACE BLOCKS,… POLICY,… WARMUP_FRACTION

Prints a JSON object: tokens found, by policy in order of size; by a cache without end; all tokens.
"""

import json
import sys

from quire.planner.hit_rates import hit_rate_curve, prompts_of
from quire.traces import open_trace


def main(trace: str, blocks: str, policies: str, warmup_fraction: str) -> None:
    prompts = prompts_of(open_trace(trace))
    rates = hit_rate_curve(
        prompts,
        [int(size) * prompts.block_tokens for size in blocks.split(",")],
        policies.split(","),
        skip_requests=int(float(warmup_fraction) * prompts.num_requests),
    )
    found = {
        policy: [each.hit_tokens for each in several] for policy, several in rates.by_policy.items()
    }
    answer = {"hits": found, "ceiling": rates.infinite.hit_tokens, "tokens": rates.prompt_tokens}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
