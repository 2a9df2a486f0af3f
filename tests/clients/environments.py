"""The environments of clients that are too large, or too particular, for our own.

    python tests/clients/environments.py [NAME …]

Each is a folder below ``.venv-peers``; one that is ready is left as it is. LiteLLM wants another
``openai`` than ours; guidellm and lm-eval bring a gigabyte each. ``node`` is what JavaScript's
clients need, and is left out where there is no npm.
"""

import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-peers"
# vLLM's is the one that benchmarks/engine/peers.py makes, and not made here.
VLLM = "vllm-cpu-engine"
PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "langchain": ("langchain-openai==1.7.3",),
        "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # which it imports, and does not ask for
        "lm-eval": ("lm-eval[api]==0.4.13",),
        "guidellm": ("guidellm==0.8.1", "torch"),
        "instructor": ("instructor==1.17.0",),
        "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        "openai-agents": ("openai-agents==0.24.0",),
        "kubernetes": ("kubernetes-validate==1.37.0",),  # the schemas of its manifests
        "compose": ("check-jsonschema==0.38.1",),  # the schema of compose files
        "vllm-router": ("vllm-router==0.1.17",),
    }
)
NODE = "node"
MODULES = (
    *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    *("openai@7.57.0", "@anthropic-ai/sdk@1.12.0"),
)


def python_of(name: str) -> Path:
    """There is none before it is set up."""
    return HOME / name / "bin" / "python"


def set_up(name: str) -> None:
    """Raises: CalledProcessError for what cannot be installed."""
    # The torch that we are tested with: for a processor's there is a build without CUDA.
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    packages = MODULES if name == NODE else PACKAGES[name]
    wanted = [torch[0] if each == "torch" and torch else each for each in packages]
    stamp = HOME / name / ".ready"
    recipe = "\n".join((*wanted, sys.version))
    if stamp.exists() and stamp.read_text() == recipe:
        print(f"{name}: it is there")
        return
    print(f"{name}: installing {', '.join(wanted)}", flush=True)
    if name == NODE:
        _install_modules(wanted)
    else:
        venv.EnvBuilder(with_pip=True, clear=True).create(HOME / name)
        pip = (str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "install", "-q")
        subprocess.run([*pip, *wanted], check=True)
    stamp.write_text(recipe)


def _install_modules(wanted: list[str]) -> None:
    """Scripts are read from standard input there: Node looks for modules where it works."""
    home = HOME / NODE
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / "package.json").write_text('{"private": true, "type": "module"}')
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", *wanted], cwd=home, check=True)


if __name__ == "__main__":
    everything = [*PACKAGES, *([NODE] if shutil.which("npm") else [])]
    for chosen in sys.argv[1:] or everything:
        set_up(chosen)
