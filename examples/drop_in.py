"""Any model.generate() call, with its cache kept by one of Quire's strategies.

Run: python examples/drop_in.py [contiguous | growing | paged | virtual]
"""

import sys
from importlib.resources import as_file, files

from transformers import AutoModelForCausalLM, AutoTokenizer

import quire
from quire.units import format_bytes

strategy = sys.argv[1] if len(sys.argv) > 1 else "virtual"
with as_file(files("quire") / "demo_model") as folder:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

inputs = tokenizer("def fibonacci(n):\n", return_tensors="pt")
with quire.cache(model, strategy) as cache:
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=60)
    usage = cache.usage()

print(tokenizer.decode(output[0], skip_special_tokens=True))
print()
print(f"{strategy}: {usage.num_tokens} tokens in the cache")
print(f"  reserved  {format_bytes(usage.reserved_bytes)} of address space")
print(f"  committed {format_bytes(usage.committed_bytes)}, backed with pages")
print(f"  used      {format_bytes(usage.used_bytes)}, by tokens that can still be read")
print(f"  left      {format_bytes(cache.memory.committed_bytes)}, after the with block")
