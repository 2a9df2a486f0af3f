"""Instructor: an answer in a given form, by a tool, by a schema, in pieces, and a list of them.

    python tests/clients/ask_instructor.py --base-url http://127.0.0.1:8000 [--api-key KEY]

The server needs a chat template, and ``--tool-call-parser hermes``.
"""

from importlib.metadata import version

import instructor
from client_answer import Answer
from client_flags import client_flags
from openai import OpenAI

if __name__ == "__main__":
    options = client_flags().parse_args()
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
