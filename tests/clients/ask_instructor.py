"""Instructor: an answer in a given form, by a tool, by a schema, in pieces, and a list of them.

    python tests/clients/ask_instructor.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

import argparse
from importlib.metadata import version
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "green"]
    sure: bool


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key)
    ask = {
        "model": options.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 90,
        "temperature": 0,
        "max_retries": 0,
    }
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        completions = instructor.from_openai(client, mode=mode).chat.completions
        answer = completions.create(response_model=Answer, **ask)
        assert isinstance(answer, Answer), mode
        parts = list(completions.create_partial(response_model=Answer, **ask))
        assert parts[-1].model_dump() == answer.model_dump(), mode
    print(f"instructor {version('instructor')}: tools, schemas, in pieces")
