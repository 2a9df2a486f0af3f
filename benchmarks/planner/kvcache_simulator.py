"""KVCache.AI's kvcache-simulator in a virtual environment of its own, asked about a trace.

Its budgets are in GiB of a model's cache; it says how many blocks that is, and ours are asked for
as many. It compiles its C++ core at its first run, which is not timed.
"""

import json
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.peers import HOME, PeerUnavailable

VERSION = "0.1.3"
ENV = HOME / "kvcache-simulator"
MODEL = "qwen3-8b"  # 144 KiB a token
OPTIMAL = {"lru": "lru", "optimum": "optimal"}  # our policies, in its words


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    blocks: list[int]  # sizes of cache
    hits: dict[str, list[int]]  # tokens, by our name of the policy
    ceiling: int
    tokens: int


def program(env: Path = ENV) -> Path:
    """The command; it is installed first where it is not there.

    Raises: PeerUnavailable.
    """
    command = env / "bin" / "kvcache-simulator"
    if command.exists():
        return command
    try:
        venv.create(env, with_pip=True)
        subprocess.run(
            [env / "bin" / "pip", "install", "--quiet", f"kvcache-simulator=={VERSION}"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise PeerUnavailable(f"kvcache-simulator could not be installed: {said}") from error
    return command


def command(
    trace: Path, block_tokens: int, gib: str, policies: list[str], output: Path
) -> list[str]:
    return [
        *(str(program()), "run", "--trace", str(trace), "--model", MODEL),
        *("--block-size", str(block_tokens), "--budgets-gib", gib, "--no-progress"),
        *("--policies", ",".join(OPTIMAL[name] for name in policies)),
        *("--format", "json", "--output", str(output)),
    ]


def answer(output: Path, policies: list[str]) -> Answer:
    found: dict[str, Any] = json.loads(output.read_text())
    return Answer(
        blocks=[point["cacheBlocks"] for point in found["points"]],
        hits={
            name: [point["results"][OPTIMAL[name]]["hitTokens"] for point in found["points"]]
            for name in policies
        },
        ceiling=found["ceiling"]["hitTokens"],
        tokens=found["ceiling"]["totalTokens"],
    )
