"""Beam search: the likeliest continuations of a prompt, which share memory where they are alike.

Run: python examples/beams.py [MODEL]
"""

import sys

import quire
from quire.units import format_bytes

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which continues Python
PROMPT = "import os\nimport sys\n\n\ndef main(argv=None):\n" * 4
WIDTH = 4

with quire.LLM(MODEL) as llm:
    params = quire.BeamSearchParams(beam_width=WIDTH, max_tokens=24)
    (found,) = llm.beam_search(PROMPT, params)
    for choice in found.choices:
        print(f"{choice.cumulative_logprob:7.2f}  {choice.text!r}")
    num_tokens = len(found.prompt_token_ids) + len(found.token_ids)
    apart = WIDTH * llm.spec.bytes_for(num_tokens)
    together = llm.memory.peak_committed_bytes
    print(f"{WIDTH} beams of {num_tokens} tokens took {format_bytes(together)}")
    print(f"with a copy of the prompt each they would take {format_bytes(apart)}")
