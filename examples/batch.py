"""Many prompts from a JSONL file, each answer written as soon as it is there, with progress.

Run: python examples/batch.py [MODEL [IN.jsonl]] > OUT.jsonl

A line of IN is {"prompt": "…"} and any of SamplingParams: {"prompt": "…", "max_tokens": 200}. A
line of OUT is an answer, with the number of its line in IN: all run together, and short ones end
first.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import quire
from quire.units import format_bytes

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which continues Python
requests = [{"prompt": f"def {verb}(path):\n", "max_tokens": 24} for verb in ("read", "write")]
if len(sys.argv) > 2:
    requests = [json.loads(line) for line in Path(sys.argv[2]).read_text("utf-8").splitlines()]

prompts = [request.pop("prompt") for request in requests]
params = [quire.SamplingParams(**{"temperature": 0, **request}) for request in requests]
texts = [""] * len(prompts)
with quire.LLM(MODEL) as llm, Progress(console=Console(stderr=True)) as progress:
    task = progress.add_task("generating", total=len(prompts))
    for delta in llm.stream(prompts, params):
        texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            answer = {"line": delta.index + 1, "text": texts[delta.index]}
            print(json.dumps({**answer, "finish_reason": delta.finish_reason}), flush=True)
            progress.advance(task)
    most = format_bytes(llm.memory.peak_committed_bytes)
print(f"{len(prompts)} answers, with {most} of KV memory at most", file=sys.stderr)
