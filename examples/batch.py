"""Several prompts at once through the engine, under a ceiling of KV memory that they must share.

Run: python examples/batch.py
"""

import quire
from quire.units import format_bytes

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n", "for line in lines:\n"]
params = quire.SamplingParams(max_tokens=40, temperature=0)

with quire.LLM(cache="paged", max_model_len=256, kv_cache_memory_bytes="1MiB") as llm:
    for completion in llm.generate(PROMPTS, params):
        print(f"--- {len(completion.token_ids)} tokens, ended by {completion.finish_reason}")
        print(completion.text)
    print(f"most committed at once: {format_bytes(llm.memory.peak_committed_bytes)}")
