"""OpenAI's client continues texts, is refused, waits as it is told, and leaves.

    python tests/clients/ask_openai.py --base-url http://127.0.0.1:8000 [--api-key KEY]

With ``--most N``, of a server with ``--max-num-reqs-per-key N``, it makes one request too many.
"""

import threading
from collections.abc import Callable
from typing import Any

import openai
from client_flags import client_flags
from openai import OpenAI


def texts(client: OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    create = client.completions.create
    whole = create(**ask, n=2, logprobs=2, seed=1)
    first = whole.choices[0]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(first.logprobs.token_logprobs) == len(first.logprobs.tokens) == 8
    parts = list(create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == first.text
    assert parts[-1].choices == []
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    stop = first.text[3:5]
    ended = create(**ask, stop=[stop]).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.text == first.text[: first.text.index(stop)]


def refusal(kind: type[Exception], ask: Callable[[], object]) -> Any:
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(client: OpenAI, model: str) -> None:
    create = client.completions.create
    for kind, ask in (
        (openai.BadRequestError, lambda: create(model=model, prompt="x", n=10**6)),
        (openai.NotFoundError, lambda: create(model="other", prompt="x")),
        (openai.NotFoundError, lambda: client.models.retrieve("other")),
    ):
        assert refusal(kind, ask).request_id
    if client.api_key != "none":
        error = refusal(openai.AuthenticationError, client.with_options(api_key="x").models.list)
        assert error.code == "invalid_api_key"


def leaving(client: OpenAI, model: str, most: int) -> None:
    """As many streams as a key may have; one more is refused, and let in when they are closed."""
    ask = {"model": model, "prompt": "x", "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**ask, max_tokens=900, stream=True) for _ in range(most)]
    hasty = client.with_options(max_retries=0).completions
    error = refusal(openai.RateLimitError, lambda: hasty.create(**ask, max_tokens=1))
    assert int(error.response.headers["retry-after"]) >= 1
    threading.Timer(0.2, lambda: [stream.close() for stream in streams]).start()
    patient = client.with_options(max_retries=9).completions.with_raw_response
    assert patient.create(**ask, max_tokens=1).retries_taken >= 1


if __name__ == "__main__":
    parser = client_flags(names_model=False)
    parser.add_argument("--most", type=int)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    texts(client, model)
    errors(client, model)
    if options.most is not None:
        leaving(client, model, options.most)
    print(f"openai {openai.__version__}: completions, models, errors, retries, leaving")
