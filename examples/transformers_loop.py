"""The memory of a generation loop of your own: what Transformers' model keeps, as it grows.

Run: python examples/transformers_loop.py [MODEL [contiguous | growing | paged | virtual]]

The cache is one more argument of the model, and of model.generate(). Nothing else changes.
"""

import sys
from importlib.resources import as_file, files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire
from quire.units import format_bytes

strategy = sys.argv[2] if len(sys.argv) > 2 else "virtual"
with as_file(files("quire") / "demo_model") as demo:
    name = sys.argv[1] if len(sys.argv) > 1 else demo
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

ids = tokenizer("def fibonacci(n):\n", return_tensors="pt").input_ids
text = ids
print(f"{strategy:12} {'reserved':>12} {'committed':>12} {'used':>12}")
with quire.cache(model, strategy) as cache, torch.no_grad():
    for step in range(61):
        logits = model(ids, past_key_values=cache).logits
        ids = logits[:, -1:].argmax(-1)
        text = torch.cat([text, ids], dim=-1)
        if step % 20 == 0:
            usage = cache.usage()
            sizes = (usage.reserved_bytes, usage.committed_bytes, usage.used_bytes)
            print(f"{usage.num_tokens:5} tokens", *(f"{format_bytes(size):>12}" for size in sizes))
    left = cache.memory
print(f"{format_bytes(left.committed_bytes)} are left after the block")
print(tokenizer.decode(text[0], skip_special_tokens=True))
