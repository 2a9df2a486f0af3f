"""Structured extraction: records from texts, in a form that cannot be wrong.

Run: python examples/extract.py [MODEL]     (pip install "quire-kv[structured]")

A JSON schema becomes a grammar, and no token that would break it is sampled. So each answer can be
read by a program, however small the model; whether it is true depends on the model.
"""

import json
import sys

import quire

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model, which knows Python only
TEXTS = (
    "def open_archive(path, mode='r'):",
    "class PackageReader(BaseReader):",
    "def _close(self):",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class"]},
        "name": {"type": "string", "pattern": "^[A-Za-z_]{1,20}$"},
        "is_private": {"type": "boolean"},
    },
    "required": ["kind", "name", "is_private"],
    "additionalProperties": False,
}

form = quire.StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
params = quire.SamplingParams(max_tokens=100, temperature=0, structured_outputs=form)
prompts = [f"{text}\n# What is defined here, as JSON:\n" for text in TEXTS]
with quire.LLM(MODEL) as llm:
    for text, completion in zip(TEXTS, llm.generate(prompts, params), strict=True):
        print(text, "->", json.loads(completion.text))
