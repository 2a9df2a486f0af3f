"""What the documents show works: code, command lines, options, variables, and what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import typer

from documents import (
    DOCUMENTS,
    PRINTED,
    PRINTED_BY_COMMAND,
    ROOT,
    Block,
    blocks,
    commands,
    name_of,
    outputs,
)
from forks import run_fork
from quire.cli import command_line
from quire.cli.vllm import REWRITES
from quire.cli.vllm_flags import FOREIGN
from quire.config import EngineConfig
from quire.errors import ConfigError
from server.process import running
from tools import reference_pages
from traces.files import AZURE, MOONCAKE, rows

PAGES = [page for page in DOCUMENTS if page.is_relative_to(ROOT / "docs")]
# Decisions tell what was so, and these what is.
OF_TODAY = [page for page in PAGES if "decisions" not in page.parts] + [ROOT / "README.md"]

# -- blocks of Python ------------------------------------------------------------------------------

# What a reader has and a test has not: a large model, a server, the traces that others publish.
DEMO_MODEL = str(files("quire") / "demo_model")
MODELS = ("Qwen/Qwen3-0.6B", "path/to/model")
LENGTH, ITS_LENGTH = "max_model_len=8192", "max_model_len=2048"  # of such a model, of the demo's
SERVER = "http://127.0.0.1:8000"
TRACES = {
    "mooncake_conversation.jsonl": rows(MOONCAKE),
    "AzureLLMInferenceTrace_conv.csv": AZURE,
}
# Runs blocks one after the other, each in a folder and with names of its own, in one process.
RUN_ALL = """
import contextlib, io, json, os, sys, traceback
for place, code, folder in json.loads(sys.argv[1]):
    os.chdir(folder)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, place, "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(json.dumps([place, out.getvalue()]))
sys.stdout.flush()
os._exit(0)  # to take the libraries apart takes longer than what was run
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("--kv-cache-memory-bytes", "16MiB") as process:
        yield process.url


def python_blocks(page: Path) -> list[Block]:
    """Return the blocks of Python of a page that are run."""
    return [block for block in blocks(page, "python") if block.why_not_run is None]


WITH_CODE = [page for page in DOCUMENTS if python_blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_block_of_python_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    jobs = []
    for block in python_blocks(page):
        folder = tmp_path / str(block.line)
        folder.mkdir()
        for name, text in TRACES.items():
            (folder / name).write_text(text, encoding="utf-8")
        code = block.code
        for model in MODELS:
            if model in code:
                code = code.replace(model, DEMO_MODEL).replace(LENGTH, ITS_LENGTH)
        if SERVER in code:
            code = code.replace(SERVER, request.getfixturevalue("url"))
        jobs.append((block.place, code, str(folder)))
    done = run_fork(RUN_ALL, json.dumps(jobs), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, f"a block fails:\n{done.stderr}"
    printed = dict(json.loads(line) for line in done.stdout.splitlines())
    for block, shown in outputs(page, PRINTED):
        assert printed[block.place] == shown.code, f"{shown.place} shows something else"


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_a_block_that_is_not_run_is_python_and_says_why_it_is_not(page: Path) -> None:
    for block in blocks(page, "python"):
        try:
            compile(block.code, block.place, "exec")
        except SyntaxError as error:
            pytest.fail(f"{block.place}: the block is not Python: {error}", pytrace=False)


# -- commands --------------------------------------------------------------------------------------

# Commands whose options are an engine's of this machine: their values are checked, too.
OF_AN_ENGINE = {"serve", "fleet", "generate", "compare", "bench", "doctor"}
OPTIONS = {option.name for option in fields(EngineConfig)}
OF_A_PACKAGE = "Another package adds one"  # a guide's own strategy, tier, …


@pytest.fixture(scope="module")
def parser() -> Any:
    return typer.main.get_command(command_line())


@pytest.fixture(scope="module")
def with_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    folder = tmp_path_factory.mktemp("commands")
    head = "# quire serve --config quire.yaml\n"
    (made,) = [
        block
        for block in blocks(ROOT / "docs/guides/serving.md", "yaml")
        if block.code.startswith(head)
    ]
    (folder / "quire.yaml").write_text(made.code, encoding="utf-8")
    return folder


def parse(parser: Any, args: list[str]) -> None:
    """Parse a command line as ``quire`` does. Raises: TyperException, ConfigError."""
    command, words = parser, list(args)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    try:
        context = command.make_context(command.name, words)
    except typer.Exit:  # --help, --version
        return
    if command.name not in OF_AN_ENGINE:
        return
    given = {
        name: value
        for name, value in context.params.items()
        if name in OPTIONS and context.get_parameter_source(name).name == "COMMANDLINE"
    }
    try:
        EngineConfig.from_options(**given)
    except ConfigError as error:
        if OF_A_PACKAGE not in str(error):
            raise


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_every_command_line_of_quire_is_one(
    page: Path, parser: Any, with_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(with_files)
    for block in blocks(page):
        for args in commands(block.code) if block.language != "python" else ():
            try:
                parse(parser, args)
            except (typer.TyperException, ConfigError) as error:
                said = getattr(error, "message", None) or str(error)
                pytest.fail(f"{block.place}: quire {' '.join(args)}: {said}", pytrace=False)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("generate --max-tokenz 3 x", "No such option"),
        ("serve --max-num-sequences 3", "No such option"),
        ("serve --budget vlm", "is unknown; known: auto, vllm"),
        ("serve --block-size 0", "must be from 1"),
        ("cache prune PATH --older 7d", "No such option"),
    ],
)
def test_a_command_line_that_is_none_is_noticed(line: str, match: str, parser: Any) -> None:
    ((*args,),) = commands(f"HF_HUB_OFFLINE=1 quire {line} | tee file  # as well")
    assert args == line.split()
    with pytest.raises((typer.TyperException, ConfigError)) as raised:
        parse(parser, args)
    assert match in (getattr(raised.value, "message", None) or str(raised.value))


# -- options and variables in the text -------------------------------------------------------------

# Options of other programs that a page names in its text.
OF_OTHERS = {
    *("--ulimit", "--membind"),  # docker, numactl
    *(
        "--kv-event-block-size",
        "--kv-event-model",
        "--policy",
        "--balance-abs-threshold",
    ),  # routers
    *("--check", "--write", "--emulated", "--no-deps", "--help"),
}


def all_flags(command: Any) -> Iterator[str]:
    for each in command.params:
        yield from (*each.opts, *each.secondary_opts)
    for each in getattr(command, "commands", {}).values():
        yield from all_flags(each)


@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_every_option_that_a_text_names_is_there(page: Path, parser: Any) -> None:
    known = {*all_flags(parser), *REWRITES, *OF_OTHERS, *(row.flag for row in FOREIGN)}
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.code, "")
    named = [span for span in re.findall(r"`([^`\n]+)`", text) if re.match(r"--|quire ", span)]
    flags = {flag for span in named for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9.-]*\b", span)}
    families = {flag for flag in flags if f"{flag}-*" in text or f"{flag}-…" in text}
    assert not flags - families - known, (
        "neither Quire nor vLLM has it; another program's: OF_OTHERS"
    )


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_every_variable_of_quire_is_read(page: Path) -> None:
    known = {
        *map(reference_pages.variable, reference_pages.all_options()),
        *reference_pages.OTHER_VARIABLES,
    }
    named = set(re.findall(r"\bQUIRE_[A-Z_]*[A-Z]\b(?![_…])", page.read_text(encoding="utf-8")))
    assert not named - known


# -- what commands print ---------------------------------------------------------------------------

COMMAND = "import sys\nfrom quire.cli import main\nsys.argv[0] = 'quire'\nmain()"
TIMES = re.compile(r"[\d,.]+ (?:ms|s|tokens/s)\b")


def printed_by_commands() -> list[Any]:
    return [
        pytest.param(args, shown, id=shown.place)
        for page in PAGES
        for before, shown in outputs(page, PRINTED_BY_COMMAND)
        for args in commands(before.code)
    ]


@pytest.mark.parametrize(("args", "shown"), printed_by_commands())
def test_a_command_prints_what_the_page_shows(
    args: list[str], shown: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run_fork(COMMAND, *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert without_times(done.stdout) == without_times(shown.code)


def without_times(text: str) -> list[str]:
    return [line.rstrip() for line in TIMES.sub("…", text).rstrip().splitlines()]
