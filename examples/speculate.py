"""Speculative decoding: the same text in fewer steps, where it repeats itself.

Run: python examples/speculate.py [MODEL [DRAFT_MODEL]]

Without a draft model, tokens are looked up in the text so far ("ngram"). Each step checks whether
the sampler would have chosen the drafted tokens, so the text is what it is without them.
"""

import sys

import quire

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which repeats itself
PROMPT = "class Point:\n    def x(self):\n        return self._x\n\n    def y(self):\n"
params = quire.SamplingParams(max_tokens=64, temperature=0)
how = {"model": sys.argv[2]} if len(sys.argv) > 2 else {"method": "ngram"}

texts = []
for config in (None, {**how, "num_speculative_tokens": 4}):
    with quire.LLM(MODEL, speculative_config=config) as llm:
        (completion,) = llm.generate([PROMPT], params)
        counts = llm.statistics
        texts.append(completion.text)
        print(f"{'without' if config is None else 'with'} speculation:", end=" ")
        print(f"{len(completion.token_ids)} tokens in {counts.step_tokens.count} steps;", end=" ")
        print(f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted tokens accepted")
print("the texts are", "equal" if texts[0] == texts[1] else "different")
