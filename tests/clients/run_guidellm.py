"""guidellm measures the server: texts and chats, three at a time, none failing.

    python tests/clients/run_guidellm.py --base-url http://127.0.0.1:8000 [--api-key KEY]

It counts with the tokenizer in ``--tokenizer``, a folder.
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
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 24, 8


def measure(options: argparse.Namespace, path: str, folder: Path) -> dict[str, Any]:
    """Of the one benchmark, the counts."""
    backend = f"kind=openai_http,target={options.base_url},model={options.model}"
    report = folder / "report.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"{backend},api_key={options.api_key},request_format={path}"]
    command += ["--profile", "kind=concurrent,streams=3"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={options.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},"]
    command[-1] += f"output_tokens={OUTPUT_TOKENS}"
    command += ["--output", f"kind=json,path={report}"]
    environ = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


if __name__ == "__main__":
    parser = client_flags()
    parser.add_argument("--tokenizer", default=str(DEMO_MODEL))
    options = parser.parse_args()
    for path in ("/v1/completions", "/v1/chat/completions"):
        with tempfile.TemporaryDirectory() as folder:
            metrics = measure(options, path, Path(folder))
        totals = metrics["request_totals"]
        assert totals["successful"] == NUM_REQUESTS, totals
        assert totals["errored"] == 0, totals
        made = metrics["output_token_count"]["successful"]
        assert made["min"] == made["max"] == OUTPUT_TOKENS, made
    print(f"guidellm {version('guidellm')}: completions and chat completions, streamed")
