"""An agent with a tool: the model calls a function of this program until it can answer.

Run: python examples/agent.py [MODEL]     (pip install openai "quire-kv[structured]")
"""

import json
import sys
from pathlib import Path

from openai import OpenAI
from own_server import own_server

MODEL = sys.argv[1] if len(sys.argv) > 1 else None  # None: the demo model; a grammar makes it call
WHAT = {"what": {"type": "string", "enum": ["lines", "functions"]}}
SCHEMA = {"type": "object", "properties": WHAT, "required": ["what"]}
TOOL = {"name": "count", "description": "Count what is in this program.", "parameters": SCHEMA}


def count(arguments: str) -> str:
    try:
        sign = {"lines": "\n", "functions": "\ndef "}[json.loads(arguments)["what"]]
        return str(Path(__file__).read_text().count(sign))
    except (ValueError, KeyError) as error:
        return f"error: {error!r}"  # the model reads it, and may try again


messages = [{"role": "user", "content": "# How many lines has this program?\n"}]
with own_server(MODEL) as (url, name), OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    ask = {"model": name, "max_tokens": 60, "temperature": 0}
    ask["tools"] = [{"type": "function", "function": TOOL}]
    while len(messages) < 10 and messages[-1]["role"] != "assistant":
        ask["tool_choice"] = "required" if MODEL is None and len(messages) == 1 else "auto"
        done = client.chat.completions.create(messages=messages, **ask)
        message, cached = done.choices[0].message, done.usage.prompt_tokens_details.cached_tokens
        print(f"[{cached} of {done.usage.prompt_tokens} tokens so far were in the cache]")
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = {"role": "tool", "content": count(call.function.arguments)}
            messages.append({**result, "tool_call_id": call.id})
print(json.dumps(messages, indent=1))
