"""Transformers' own generation tests, with Quire's caches in every ``generate``.

    python tests/transformers_own/run.py [--source CHECKOUT] [--strategies paged,virtual] [llama …]

It is run by hand, in an environment of its own (``.venv-transformers``), some minutes a strategy.
The tests are those of the release that is installed here. Its source distribution has only the
files ``tests/test_*.py``, not the generation tests, so its tag is cloned, or a checkout is named.

All tests run with Transformers' own cache first. A test that passes then, and fails with one of
Quire's three times, must be in ``EXPECTED``; and what is there must fail.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-transformers"
PYTHON = HOME / "bin" / "python"
REPOSITORY = "https://github.com/huggingface/transformers"
# What the tests import beside Transformers and pytest.
PACKAGES = ("pytest", "pytest-xdist", "parameterized", "timeout-decorator", "datasets", "httpx")
PACKAGES += ("requests", "psutil", "pillow")
STRATEGIES = ("contiguous", "growing", "paged", "virtual", "virtual-shared")
# Each mechanism of the drop-in cache, and the architectures that most people run.
MODELS = (
    *("llama", "qwen2", "mixtral", "gpt2", "gpt_neox", "opt", "falcon", "bloom"),
    *("gemma3", "gemma4", "cohere2", "gpt_oss", "llama4"),  # windows, chunks, shared layers
    *("deepseek_v3",),  # latents
    *("mamba", "mamba2", "recurrent_gemma", "lfm2", "falcon_h1", "jamba", "qwen3_next"),  # states
    *("t5", "bart", "whisper", "moonshine", "mllama"),  # sources and images
)
# Fails with Quire alone: "model::test" → the strategies and the reason. None does today.
EXPECTED: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType({})


def set_up() -> None:
    """An environment with this checkout of Quire. Raises: CalledProcessError."""
    recipe = "\n".join(((ROOT / "constraints.txt").read_text(), *PACKAGES, sys.version))
    stamp = HOME / ".ready"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    print(f"{HOME.name}: installing Transformers {version('transformers')} and its tests' packages")
    venv.EnvBuilder(with_pip=True, clear=not stamp.exists()).create(HOME)
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q")
    constrained = (*pip, "-c", str(ROOT / "constraints.txt"))
    subprocess.run([*constrained, "torch"], check=True)
    subprocess.run([*constrained, "-e", str(ROOT), *PACKAGES], check=True)
    stamp.write_text(recipe)


def find_source(given: Path | None) -> Path:
    """A checkout with the generation tests, cloned if none is given. Raises: SystemExit."""
    tag = f"v{version('transformers')}"
    source = given or HOME / f"source-{tag}"
    if given is None and not source.exists():
        print(f"cloning Transformers {tag}", flush=True)
        clone = ("git", "clone", "-q", "--depth", "1", "--branch", tag, REPOSITORY, str(source))
        if subprocess.run(clone, check=False).returncode:
            raise SystemExit(
                f"Transformers {tag} cannot be cloned, and its source distribution has no "
                f"generation tests: name a checkout, make test-transformers SOURCE=folder"
            )
    if not (source / "tests" / "generation" / "test_utils.py").exists():
        raise SystemExit(f"{source} has no tests/generation/test_utils.py: name a checkout")
    found = re.search(r'__version__ = "(.+)"', _text(source / "src/transformers/__init__.py"))
    if found is None or f"v{found[1]}" != tag:
        print(f"{source} is of {found[1] if found else 'an unknown release'}, installed is {tag}")
    return source


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def run(source: Path, strategy: str, tests: list[str]) -> dict[str, dict[str, object]]:
    """How each test ends with a strategy, or with Transformers' own cache ("")."""
    results = HOME / f"results-{strategy or 'own'}.jsonl"
    results.unlink(missing_ok=True)
    told = {
        **os.environ,
        "STRATEGY": strategy,
        "RESULTS": str(results),
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ("-q", "-p", "quire_in_generate", "-p", "no:cacheprovider", "-p", "no:logging")
    quiet = ("--tb=short", "-W", "ignore", "-m", "generate")
    log = results.with_suffix(".log")
    with log.open("w") as out:
        pytest = (str(PYTHON), "-m", "pytest", *options, *quiet, *tests)
        subprocess.run(pytest, cwd=source, env=told, stdout=out, stderr=out, check=False)
    if not results.exists():
        raise SystemExit(f"no test was run: {log} says why")
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["test"]: line for line in lines}


def failed(results: dict[str, dict[str, object]]) -> set[str]:
    return {test for test, line in results.items() if line["outcome"] == "failed"}


def short(test: str) -> str:
    """tests/models/llama/test_modeling_llama.py::LlamaModelTest::test_x → llama::test_x."""
    path, *_, name = test.split("::")
    return f"{Path(path).parent.name}::{name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    asked = parser.parse_args()
    set_up()
    source = find_source(asked.source)
    files = [f"tests/models/{model}/test_modeling_{model}.py" for model in asked.models]
    missing = [file for file in files if not (source / file).exists()]
    if missing:
        raise SystemExit(f"{source} has no {', '.join(missing)}")
    own = run(source, "", files)
    print(f"Transformers' own cache: {len(own)} tests, {len(failed(own))} fail", flush=True)
    is_met = True
    for strategy in asked.strategies.split(","):
        results = run(source, strategy, files)
        worse = failed(results) - failed(own)
        for _ in range(2):  # some draw at random
            worse &= failed(run(source, strategy, sorted(worse))) if worse else set()
        used = sum(bool(line["caches"]) for line in results.values())
        print(f"{strategy}: {used} of {len(results)} tests use Quire, {len(worse)} fail only then")
        expected = {
            test
            for test, (those, _) in EXPECTED.items()
            if strategy in those and test.split("::")[0] in asked.models
        }
        for test in sorted({short(each) for each in worse} | expected):
            known = EXPECTED[test][1] if test in expected else "not expected"
            known = known if test in {short(each) for each in worse} else "expected, and it passes"
            print(f"  {test}: {known}", flush=True)
        is_met &= used > 0 and {short(each) for each in worse} == expected
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
