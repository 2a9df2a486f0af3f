"""LiteLLM: chats whole and in pieces, tools, texts, and errors as its own.

    python tests/clients/ask_litellm.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices is not fetched

import litellm
from client_flags import client_flags

PARAMETERS = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
HELLO = [{"role": "user", "content": "Hello"}]

if __name__ == "__main__":
    options = client_flags().parse_args()
    own = {"api_key": options.api_key, "temperature": 0, "max_tokens": 90}
    for name, base in (
        (f"hosted_vllm/{options.model}", f"{options.base_url}/v1"),
        (f"openai/{options.model}", f"{options.base_url}/v1"),
        (f"anthropic/{options.model}", options.base_url),
    ):
        ask = {"model": name, "api_base": base, "messages": HELLO, **own}
        whole = litellm.completion(**ask)
        assert whole.usage.completion_tokens > 0, name
        parts = litellm.completion(**ask, stream=True)
        said = "".join(part.choices[0].delta.content or "" for part in parts)
        assert said == whole.choices[0].message.content, name
        called = litellm.completion(**ask, tools=TOOLS, tool_choice="required").choices[0]
        assert called.message.tool_calls[0].function.name == "look", name
        try:
            litellm.completion(**{**ask, "model": name.replace(options.model, "other")})
        except litellm.NotFoundError:
            continue
        raise AssertionError(f"{name}: no NotFoundError")
    text = litellm.text_completion(
        model=f"text-completion-openai/{options.model}",
        api_base=f"{options.base_url}/v1",
        prompt="def add(a, b):",
        **{**own, "max_tokens": 8},
    )
    assert text.choices[0].text
    print(f"litellm {version('litellm')}: as vLLM, OpenAI and Anthropic; tools, texts, errors")
