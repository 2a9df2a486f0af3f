"""Evaluate a model with lm-eval, through the server's OpenAI API.

Run: python examples/evaluate.py [MODEL [TASK ...]]     (pip install "lm-eval[api]")
     python examples/evaluate.py Qwen/Qwen3-0.6B arc_easy hellaswag

lm-eval asks the server for tokens, too, so it needs no tokenizer. Without a task, it scores a few
lines of Python against lines that are none. Data of a named task come from the Hugging Face hub.
"""

import sys

from own_server import own_server

try:
    from datasets import Dataset
    from lm_eval import simple_evaluate
except ImportError:
    sys.exit('lm-eval is not there. Install it beside Quire: pip install "lm-eval[api]"')

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which knows Python only
LINES = [
    {"text": "def add(a, b):\n    return a", "ends": [" + b", " zebra 7"]},
    {"text": "for i in range(10):\n    print(", "ends": ["i)", "]{;"]},
    {"text": "import os\nimport ", "ends": ["sys", "}}}"]},
]
OWN = {
    "task": "python_or_not",
    "custom_dataset": lambda **_: {"test": Dataset.from_list(LINES)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{ends}}",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
with own_server(MODEL) as (url, name):
    args = {"model": name, "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote"}
    found = simple_evaluate("local-completions", args, tasks=sys.argv[2:] or [OWN])
print(found["results"])
