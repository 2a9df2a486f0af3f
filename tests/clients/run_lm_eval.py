"""lm-eval scores a model over HTTP: likelihoods of given answers, and texts up to a stop.

    python tests/clients/run_lm_eval.py --base-url http://127.0.0.1:8000 [--api-key KEY]

It asks the server for tokens, too, so that it needs no tokenizer and fetches nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from client_flags import client_flags

TASKS = Path(__file__).parent / "tasks"
NAMES = ("quire_choice", "quire_until")


def evaluate(base_url: str, api_key: str, model: str, folder: Path) -> dict[str, Any]:
    """The results, by task."""
    for task in TASKS.glob("*.yaml"):
        text = task.read_text().replace("DATA", str(TASKS / "questions.jsonl"))
        (folder / task.name).write_text(text)
    options = {
        "model": model,
        "base_url": f"{base_url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
        "auth_token": api_key,  # for the tokens; completions take OPENAI_API_KEY
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    command += ["--tasks", ",".join(NAMES), "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    environ = {
        **os.environ,
        "OPENAI_API_KEY": api_key,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(command, check=True, env=environ)
    (results,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"]
    return found


if __name__ == "__main__":
    options = client_flags().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = evaluate(options.base_url, options.api_key, options.model, Path(folder))
    # What is not Python at all is less likely than what is.
    assert results["quire_choice"]["acc,none"] == 1, results
    assert 0 <= results["quire_until"]["exact_match,none"] <= 1, results
    print(f"lm-eval {version('lm_eval')}: local-completions, loglikelihood and generate_until")
