"""Warm a prefix cache up before the first user comes, and keep it over a restart.

Run: python examples/warm_up.py [MODEL [FOLDER]]

A system prompt is computed once, with one token of an answer. Its blocks also go to files, from
which the next engine loads them: it has not seen the prompt, and does not compute it.
"""

import sys
import tempfile
from time import perf_counter

import quire

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which continues Python
SYSTEM = "# Answer in Python, with types, short names and no comments.\n" * 12
one_token = quire.SamplingParams(max_tokens=1, temperature=0)


def first_token(llm: quire.LLM, when: str) -> None:
    begin = perf_counter()
    (completion,) = llm.generate([SYSTEM + f"def answer_{len(when)}():\n"], one_token)
    took_ms = 1000 * (perf_counter() - begin)
    found, of = completion.num_cached_tokens, len(completion.prompt_token_ids)
    print(f"{when:16} {found:4} of {of} tokens found, first token after {took_ms:.0f} ms")


with tempfile.TemporaryDirectory() as temporary:
    tier = f"file:{sys.argv[2] if len(sys.argv) > 2 else temporary}?size=1GiB"
    with quire.LLM(MODEL, kv_tier=tier) as llm:
        first_token(llm, "cold")
        llm.generate([SYSTEM], one_token)  # the warm-up: no user waits for it
        first_token(llm, "warm")
    with quire.LLM(MODEL, kv_tier=tier) as llm:
        first_token(llm, "after a restart")
