"""Clients that others have made, unmodified, against one server in a process of its own.

OpenAI's and Anthropic's for Python are always there. Each other has an environment, which
``python tests/clients/environments.py`` makes; without it, its test is skipped. ``make clients``
does both.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.environments import HOME, NODE, VLLM, python_of
from server.process import running

KEY, MOST = "a-key", 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
FLAGS = (
    *("--max-model-len", "1024", "--kv-cache-memory-bytes", "64MB"),
    *("--api-key", KEY, "--max-num-reqs-per-key", str(MOST)),
    *("--chat-template", TEMPLATE, "--tool-call-parser", "hermes"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(*FLAGS) as process:
        yield process.url


def _run(script: str, url: str, *arguments: str, python: Path | str = sys.executable) -> None:
    path = Path(__file__).with_name(script)
    _succeeds(str(python), str(path), "--base-url", url, "--api-key", KEY, *arguments)


def _succeeds(*command: str, **options: Any) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environ, **options
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_openai_continues_texts(url: str) -> None:
    _run("ask_openai.py", url, "--most", str(MOST))


def test_openai_converses(url: str) -> None:
    _run("ask_openai_chats.py", url)


def test_anthropic(url: str) -> None:
    _run("ask_anthropic.py", url)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "environment"),
    [
        ("ask_langchain.py", "langchain"),
        ("ask_litellm.py", "litellm"),
        ("ask_instructor.py", "instructor"),
        ("ask_pydantic_ai.py", "pydantic-ai"),
        ("ask_openai_agents.py", "openai-agents"),
        ("run_lm_eval.py", "lm-eval"),
        ("run_guidellm.py", "guidellm"),
        ("run_vllm_bench.py", VLLM),
    ],
)
def test_others(script: str, environment: str, url: str) -> None:
    python = python_of(environment)
    if not python.exists():
        ours = environment == VLLM
        maker = "-m benchmarks.engine.peers" if ours else "tests/clients/environments.py"
        pytest.skip(f"not installed: python {maker} {environment}")
    _run(script, url, python=python)


@pytest.mark.full
@pytest.mark.parametrize("script", ["ask_openai.mjs", "ask_anthropic.mjs", "ask_ai_sdk.mjs"])
def test_in_javascript(script: str, url: str) -> None:
    node, home = shutil.which("node"), HOME / NODE
    if node is None or not home.exists():
        pytest.skip(f"not installed: Node, and python tests/clients/environments.py {NODE}")
    text = Path(__file__).with_name(script).read_text()
    _succeeds(node, "--input-type=module", "-", url, KEY, input=text, cwd=home)
