"""Requests at random, from a server's own description of itself, and what must be true of answers.

Two thirds do what the description says, one does not; of the first, many are brought nearer to
what a client would send, or hardly any would come as far as the engine.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Of a server that is to be asked thousands of times.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
FLAGS = (
    *("--max-model-len", "128", "--kv-cache-memory-bytes", "64MB"),
    *("--chat-template", TEMPLATE, "--tool-call-parser", "hermes"),
)
MOST_TOKENS = 3
ENDLESS = ("/memory/feed",)
DISTURBING = ("/sleep",)  # all that comes after it

_IDS = st.lists(st.integers(0, 4095), min_size=1, max_size=20)
_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": _TEXTS}),
    min_size=1,
    max_size=3,
)
_FUNCTION = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
_LENGTH = st.integers(1, MOST_TOKENS)
_SAMPLING = {
    "stream": st.booleans(),
    "temperature": st.sampled_from([0, 0.7, 1]),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 9),
    "stop": st.one_of(_TEXTS, st.lists(_TEXTS, max_size=2)),
    "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=3),
    "response_format": st.just({"type": "json_object"}),
    "stream_options": st.just({"include_usage": True}),
    "prompt_logprobs": st.integers(0, 3),
    "return_token_ids": st.booleans(),
}
# What a client would send to each path: fields that it needs, and others that it may have.
_LIKELY: Mapping[str, tuple[Mapping[str, SearchStrategy[Any]], Mapping[str, Any]]] = {
    "/v1/completions": (
        {
            "prompt": st.one_of(_TEXTS, _IDS, st.lists(_TEXTS, min_size=1, max_size=2)),
            "max_tokens": st.integers(0, MOST_TOKENS),
        },
        {**_SAMPLING, "logprobs": st.integers(0, 5), "echo": st.booleans()},
    ),
    "/v1/chat/completions": (
        {"messages": _MESSAGES, "max_completion_tokens": _LENGTH},
        {
            **_SAMPLING,
            "logprobs": st.just(True),
            "tools": st.just([{"type": "function", "function": _FUNCTION}]),
            "tool_choice": st.sampled_from(["auto", "none", "required"]),
        },
    ),
    "/v1/responses": (
        {"input": st.one_of(_TEXTS, _MESSAGES), "max_output_tokens": _LENGTH},
        {"stream": st.booleans(), "store": st.just(False), "instructions": _TEXTS},
    ),
    "/v1/messages": (
        {"messages": _MESSAGES, "max_tokens": _LENGTH},
        {"stream": st.booleans(), "system": _TEXTS},
    ),
    "/v1/messages/count_tokens": ({"messages": _MESSAGES}, {}),
    "/v1/embeddings": (
        {"input": st.one_of(_TEXTS, _IDS, st.lists(_TEXTS, min_size=1, max_size=2))},
        {"encoding_format": st.sampled_from(["float", "base64"]), "normalize": st.booleans()},
    ),
    "/v1/score": (
        {"text_1": _TEXTS, "text_2": st.one_of(_TEXTS, st.lists(_TEXTS, min_size=1, max_size=2))},
        {},
    ),
    "/tokenize": ({"prompt": _TEXTS}, {"return_token_strs": st.booleans()}),
    "/detokenize": ({"tokens": _IDS}, {}),
}


@dataclass
class Tally:
    """What came back, by operation and status."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def num_cases(self) -> int:
        return self.statuses.total()

    def __str__(self) -> str:
        names = dict.fromkeys(name for name, _ in self.statuses)
        return "\n".join(
            f"{name:<34} "
            + "  ".join(f"{s}: {n:,}" for (other, s), n in self.statuses.items() if other == name)
            for name in sorted(names)
        )


class Asker:
    """Asks one server, at ``url``. A wrong answer, or event, is raised with the request for it."""

    def __init__(self, url: str) -> None:
        self.tally = Tally()
        self._url, self._session = url, requests.Session()
        schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
        self.operations = [
            each.ok()
            for each in schema.get_all_operations()
            if each.ok().path not in (*ENDLESS, *DISTURBING)
        ]

    def ask(self, num_cases: int, random_seed: int) -> None:
        """So many of each operation that takes something, and one of each other."""
        for operation in self.operations:
            takes = bool(operation.body) or "{" in operation.path

            @seed(random_seed)
            @settings(
                max_examples=num_cases if takes else 1,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=_cases(operation))
            def asked(case: Case) -> None:
                self._ask(case)

            asked()

    def ask_for(self, minutes: float, random_seed: int, say: Callable[[str], None]) -> None:
        """Rounds of a hundred each, a seed each."""
        until = time.monotonic() + minutes * 60
        while time.monotonic() < until:
            self.ask(100, random_seed)
            say(f"seed {random_seed}: {self.tally.num_cases:,} cases")
            random_seed += 1

    def _ask(self, case: Case) -> None:
        name = f"{case.method.lower()} {case.operation.path}"
        answer = case.call(base_url=self._url, session=self._session)
        self.tally.statuses[name, answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)


@st.composite
def _cases(draw: DrawFn, operation: Any) -> Case:
    modes = [GenerationMode.POSITIVE] * 2
    if operation.body:
        modes.append(GenerationMode.NEGATIVE)
    mode = draw(st.sampled_from(modes))
    case: Case = draw(operation.as_strategy(mode))
    likely = _LIKELY.get(operation.path.removesuffix("/render"))  # which takes the same
    is_right = isinstance(case.body, dict) and mode is GenerationMode.POSITIVE
    if likely and is_right and draw(st.integers(0, 4)):
        needed, others = likely
        names = sorted(case.body.keys() - {"model"})
        kept = draw(st.sets(st.sampled_from(names), max_size=2)) if names else ()
        own = draw(st.fixed_dictionaries(dict(needed), optional=dict(others)))
        case.body = {name: case.body[name] for name in kept} | own
    return case
