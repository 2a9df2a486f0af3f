"""Write the tables of the reference pages, from the tables of the source.

    python tools/reference_pages.py [--write | --check] [PAGE …]

A page's prose is written by hand. Between ``<!-- begin NAME: … -->`` and ``<!-- end NAME -->`` it
has what this program makes: options, environment variables, commands, vLLM's flags, parsers,
metrics, limits, versions, the planner's models and devices. ``--check`` names the pages that are
stale; without either, the parts are printed.
"""

import argparse
import ast
import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, get_args, get_origin

import typer

import quire.config
from quire.chat.reasoning_parsers import REASONING
from quire.chat.tools import registry
from quire.cli import COMMANDS, command_line
from quire.cli.vllm_flags import FOREIGN
from quire.config import (
    ADVANCED,
    EngineConfig,
    FleetConfig,
    KVEventsConfig,
    KVTransferConfig,
    ServerConfig,
    SpeculativeConfig,
)
from quire.config.kv_transfer import TransferExtras
from quire.units import format_bytes, format_count

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMAND = "python tools/reference_pages.py --write"

# -- tables in Markdown ----------------------------------------------------------------------------


def table(
    heads: Iterable[str], rows: Iterable[Iterable[str]], *, figures: Container[int] = ()
) -> str:
    """Return a table; a cell's text may have any character. ``figures``: columns of numbers."""
    heads = list(heads)
    rule = ["---:" if column in figures else "---" for column in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


_CODE = re.compile(
    r"""\{[^{}]*\}"""  # JSON
    r"""|(?<![\w`-])(?:--?[a-z][\w-]*|\w+(?:_\w+)+(?:\.json)?"""
    rf"""|quire(?:\[\w+\]| (?:{"|".join(COMMANDS)})\b)"""
    r"""|[a-z]\w*:[\w/?][\w/?=&.:,*-]*[\w/])"""
)


def text(said: str) -> str:
    """Return a text as a cell of a table, in which names of options and the like are code."""
    parts = _CODE.sub(r"`\g<0>`", " ".join(said.replace("\\[", "[").split())).split("`")
    parts[::2] = [re.sub(r"([<>*\[\]\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


def code(said: str) -> str:
    """Return a code span for a cell."""
    if "`" in said:
        fence = "`" * (1 + max(map(len, re.findall("`+", said))))
        return f"{fence} {said} {fence}".replace("|", r"\|")
    return f"`{said}`".replace("|", r"\|")


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None, f"{page} has no heading"
    return heading[1]


# -- options ---------------------------------------------------------------------------------------

CONFIGS: Mapping[str, type] = MappingProxyType(
    {"engine": EngineConfig, "server": ServerConfig, "fleet": FleetConfig}
)


def all_options() -> list[Field[Any]]:
    """Return the options of all configs."""
    return [option for config in CONFIGS.values() for option in fields(config)]


def flag(option: Any) -> str:
    """Return an option's flag."""
    return f"--{option.name.replace('_', '-')}"


def variable(option: Any) -> str:
    """Return the environment variable that sets an option."""
    return f"QUIRE_{option.name.upper()}"


def default(option: Any) -> str:
    """Return the default of a field as a cell; empty where the description has it."""
    value = option.default
    if value is MISSING:
        value = option.default_factory()
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return code(str(value)) if value != "" else ""


def values(option: Any) -> str:
    """Return what a field may be, as a cell."""
    kinds = get_args(option.type) if isinstance(option.type, UnionType) else (option.type,)
    if option.metadata.get("flag_type") in (list[str] | None, str | None, str):
        names = {"list[str] | None": "text, repeated"}
        told = "JSON" if "JSON" in option.metadata["help"] else "bytes"
        return names.get(str(option.metadata["flag_type"]), told)
    known = {bool: "switch", int: "whole number", float: "number", str: "text"}
    found = [
        ", ".join(code(str(each)) for each in get_args(kind))
        if get_origin(kind) is Literal
        else known.get(kind, "")
        for kind in kinds
        if kind is not type(None)
    ]
    return " or ".join(each for each in found if each)


def panels(config: type, first: str) -> dict[str, list[Field[Any]]]:
    """Return a config's options by the panel of the help, the rare ones last."""
    found: dict[str, list[Field[Any]]] = {}
    for option in fields(config):
        found.setdefault(option.metadata.get("panel", first), []).append(option)
    return dict(sorted(found.items(), key=lambda each: each[0] == ADVANCED))


def options_of(name: str) -> str:
    """Return the tables of a config's options, a heading for each panel of the help."""
    parts = []
    for panel, several in panels(CONFIGS[name], "Model and cache").items():
        heading = f"{panel} ({name})" if panel == ADVANCED else panel
        rows = [
            [
                f'<a id="{option.name.replace("_", "-")}"></a>'
                + ", ".join(
                    code(each) for each in (flag(option), *option.metadata.get("short", ()))
                ),
                values(option),
                default(option),
                text(option.metadata["help"]),
            ]
            for option in several
        ]
        parts.append(f"### {heading}\n\n" + table(["option", "value", "default", "meaning"], rows))
    return "\n".join(parts)


# The pages that explain the fields of options that are JSON objects.
NESTED: Mapping[str, tuple[type, str]] = MappingProxyType(
    {
        "speculative_config": (SpeculativeConfig, "concepts/decoding.md"),
        "kv_events_config": (KVEventsConfig, "reference/events.md"),
        "kv_transfer_config": (KVTransferConfig, "guides/prefill-decode.md"),
        "kv_connector_extra_config": (TransferExtras, "guides/prefill-decode.md"),
    }
)


def nested_options() -> str:
    """Return the fields of options that are JSON objects."""
    rows = [
        [code(name), code(option.name), default(option), f"[{title_of(DOCS / page)}](../{page})"]
        for name, (config, page) in NESTED.items()
        for option in fields(config)
    ]
    return table(["object", "field", "default", "explained in"], rows)


# -- environment variables -------------------------------------------------------------------------

# What is read besides QUIRE_<OPTION>. ``variables_read`` finds a variable that is missing here.
OTHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "QUIRE_CACHE_DIR": "Folder for what one start keeps for the next: compiled kernels, hashes "
        "of weights. Default: `quire` in `XDG_CACHE_HOME`, else `~/.cache/quire`.",
        "XDG_CACHE_HOME": "Folder that has the folder `quire`, where `QUIRE_CACHE_DIR` is not set.",
        "QUIRE_URL": "Server that `quire chat`, `quire top` and `quire bench --url` ask.",
        "OPENAI_API_KEY": "Key for the server of `OPENAI_BASE_URL`; it is sent to no other one.",
        "OPENAI_BASE_URL": "Server that `OPENAI_API_KEY` belongs to. Default: OpenAI's.",
        "VLLM_API_KEY": "As `QUIRE_API_KEY`, where no option of Quire sets a key. Empty, it is "
        "refused.",
        "VLLM_BATCH_INVARIANT": "As `QUIRE_BATCH_INVARIANT`, where no option of Quire says it: `1` "
        "or `0`.",
        "VLLM_CPU_KVCACHE_SPACE": "Size of the KV memory in GiB, where no option of Quire sizes "
        "it; 0 sets nothing.",
        "RAY_ADDRESS": "Ray cluster that `quire fleet` joins. Without it, it starts Ray itself.",
        "RAY_AUTH_MODE": "Set to `token` for a Ray that `quire fleet` starts, unless it is set.",
        "RAY_AUTH_TOKEN": "Drawn for a Ray that `quire fleet` starts, unless `RAY_AUTH_MODE` is "
        "set.",
        "RAY_USAGE_STATS_ENABLED": "Set to 0 for such a Ray, unless it is set.",
        "RAY_SERVE_LOG_TO_STDERR": "Set to 0 for such a Ray, unless it is set.",
        "OMP_NUM_THREADS": "Number of threads of torch and of Quire's kernels. Default: the cores "
        "that the process may use.",
        "MKL_NUM_THREADS": "The same.",
        "GLIBC_TUNABLES": "With a threshold of the C allocator in it, Quire sets none of its own; "
        "so with `MALLOC_TRIM_THRESHOLD_` or `MALLOC_MMAP_THRESHOLD_`.",
        "OMP_WAIT_POLICY": "Set to `PASSIVE` by every command, unless it is set: idle threads "
        "sleep.",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "Set to 32 by every command, unless it is set: torch "
        "keeps few shapes of products.",
        "LRU_CACHE_CAPACITY": "The same, for the cache in front of it.",
        "LOCAL_RANK": "Set in each rank of `--tensor-parallel-size`.",
        "GLOO_SOCKET_IFNAME": "Network interface to other ranks. Default: loopback.",
    }
)


def variables_read() -> set[str]:
    """Return the names of variables that stand in the room that reads the environment."""
    found: set[str] = set()
    for path in (ROOT / "src/quire/config").glob("*.py"):
        found |= set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', path.read_text(encoding="utf-8")))
    return found - set(quire.config.__all__)


def environment() -> str:
    """Return the variables that set options, and the others."""
    own = {
        variable(option): f"[{code(flag(option))}](options.md#{option.name.replace('_', '-')})"
        for option in all_options()
    }
    parts = [
        "## That set an option\n",
        table(["variable", "option"], ([code(name), own[name]] for name in sorted(own))),
        "## Others\n",
        table(
            ["variable", "meaning"],
            ([code(name), OTHER_VARIABLES[name]] for name in OTHER_VARIABLES),
        ),
    ]
    return "\n".join(parts)


# -- commands --------------------------------------------------------------------------------------


def commands() -> str:
    """Return each command with its arguments, its own options and its examples."""
    group: Any = typer.main.get_command(command_line())
    parts = []
    for name in COMMANDS:
        command = group.commands[name]
        parts.append(_command(f"quire {name}", command, 2))
        for each in getattr(command, "commands", {}).values():
            parts.append(_command(f"quire {name} {each.name}", each, 3))
    return "\n".join(parts)


def _command(name: str, command: Any, level: int) -> str:
    """Return a command's part of the page."""
    prose, _, examples = (command.help or "").partition("\b")
    examples, _, rest = examples.partition("\n\n")
    paragraphs = [
        text(part) for part in [*prose.split("\n\n"), *rest.split("\n\n")] if part.strip()
    ]
    parts = [f"{'#' * level} {name}\n", *(f"{part}\n" for part in paragraphs)]
    if examples:
        lines = examples.strip().splitlines()
        parts.append("\n".join(["```sh", *(x for x in lines if x != "Examples:"), "```"]) + "\n")
    shared = {flag(each): kind for kind, config in CONFIGS.items() for each in fields(config)}
    helped = {flag(each): each.metadata["help"] for each in all_options()}
    rows, kinds = [], set[str]()
    for each in command.params:
        said = (getattr(each, "help", None) or "").replace("\\[", "[")
        if getattr(each, "hidden", False) or each.name in ("help", "context"):
            continue
        names = [*each.opts, *each.secondary_opts]
        if names[0] in shared and said == helped[names[0]]:
            kinds.add(shared[names[0]])
            continue
        if type(each).__name__ == "TyperArgument":
            names = [each.name.upper()]
        rows.append([", ".join(map(code, names)), _default_of(each), text(said)])
    if kinds:
        links = [f"[the {kind}](options.md#the-{kind})" for kind in CONFIGS if kind in kinds]
        parts.append(
            f"It takes the options of {' and of '.join(links)}" + ("." if not rows else ", and:")
        )
        parts[-1] += "\n"
    if rows:
        parts.append(table(["argument or option", "default", "meaning"], rows))
    return "\n".join(parts)


def _default_of(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == () or value is ... or callable(value):
        return ""
    return "on" if value is True else code(str(value))


# -- vLLM's flags ----------------------------------------------------------------------------------


def vllm_flags() -> str:
    """Return vLLM's flags that have no effect here, or are refused."""
    rows = []
    for row in FOREIGN:
        if row.harmless is None:
            accepted = "any"
        elif row.switch:
            accepted = "".join(row.harmless) or "none"
        else:
            accepted = ", ".join(code(value) for value in row.harmless) or "none"
        rows.append([", ".join(map(code, (row.flag, *row.short))), accepted, text(row.here)])
    return table(["flag", "values that are accepted", "what is true here"], sorted(rows))


# -- parsers ---------------------------------------------------------------------------------------

# Models whose calls a parser reads, for instance. A parser that is missing here is an error.
MODELS_OF_PARSER: Mapping[str, str] = MappingProxyType(
    {
        "hermes": "Hermes 2 Pro and 3, Qwen2.5, QwQ, Qwen3, the demo model",
        "granite4": "Granite 4.0, in the format of `hermes`",
        "qwen3_coder": "Qwen3-Coder, Qwen3.5",
        "qwen3_xml": "the same, another of vLLM's names",
        "mimo": "MiMo, in the format of `qwen3_coder`",
        "seed_oss": "Seed-OSS",
        "llama3_json": "Llama 3.1, 3.2, 3.3",
        "llama4_json": "Llama 4",
        "pythonic": 'Llama 3.2, ToolACE, Gemma 3, with vLLM\'s templates: `[name(key="value"), …]`',
        "llama4_pythonic": "Llama 4, likewise",
        "olmo3": "Olmo 3: a call in each line of `<function_calls>`",
        "lfm2": "LFM2",
        "openai": "gpt-oss, in [Harmony](../decisions/0055-harmony-is-read-as-text.md)",
        "gemma4": "Gemma 4",
        "functiongemma": "FunctionGemma",
        "mistral": "Mistral 7B v0.3, Nemo, Small, Large",
        "deepseek_v3": "DeepSeek V3, R1",
        "deepseek_v31": "DeepSeek V3.1",
        "deepseek_v32": "DeepSeek V3.2",
        "deepseek_v4": "DeepSeek V4, in the format of `deepseek_v32`",
        "glm45": "GLM 4.5, 4.6",
        "glm47": "GLM 4.7, GLM 5, in the same format",
        "kimi_k2": "Kimi K2",
        "minimax_m2": "MiniMax M2",
        "granite": "Granite 3.0 to 3.3",
        "phi4_mini_json": "Phi-4-mini",
    }
)


def tool_parsers() -> str:
    """Return the formats of tool calls: their models, and what tells each of them."""
    by_template: dict[str, list[str]] = {}
    for marks, name in registry.FOUND_BY:
        by_template.setdefault(name, []).append(" and ".join(map(code, marks)))
    by_type: dict[str, list[str]] = {}
    for model_type, name in registry.BY_MODEL_TYPE.items():
        by_type.setdefault(name, []).append(code(model_type))
    rows = [
        [
            code(name),
            MODELS_OF_PARSER[name],
            " or ".join(by_template.get(name, [])),
            ", ".join(by_type.get(name, [])),
        ]
        for name in registry.TOOL_FORMATS
    ]
    heads = [
        "`--tool-call-parser`",
        "models, for instance",
        "found by the template's",
        "or by the type",
    ]
    return table(heads, rows)


def reasoning_parsers() -> str:
    """Return the formats of reasoning with their marks."""
    rows = []
    for name, each in REASONING.items():
        marks = f"{code(each.opens.strip())} and {code(each.closes.strip())}"
        assumed = "an answer begins with reasoning though no mark opens it" if each.assumed else ""
        if name == "openai_gptoss":
            assumed = "Harmony's channel `analysis`; always told apart, also without this option"
        rows.append([code(name), marks, assumed])
    return table(["`--reasoning-parser`", "marks", "besides"], rows)


# -- metrics ---------------------------------------------------------------------------------------


def metrics(kind: str) -> str:
    """Return the metrics of a kind, or those of a fleet's door."""
    from quire.fleet.fleet_figures import FLEET_FAMILIES
    from quire.server.metrics import FAMILIES

    of_kind = [family for family in FAMILIES if family.kind == kind]
    rows = [
        [code(family.name), family.kind, family.unit, ", ".join(family.labels), family.meaning]
        for family in (FLEET_FAMILIES if kind == "fleet" else of_kind)
    ]
    return table(["metric", "type", "unit", "labels", "meaning"], rows)


# -- limits ----------------------------------------------------------------------------------------

_SCHEMAS = "server/schemas"
_GENERATION = "server/endpoints/generation.py"
# What is limited, and the constant that says to how much: its module and its name.
LIMITS: tuple[tuple[str, str, str], ...] = (
    ("messages of a chat", f"{_SCHEMAS}/chat_request.py", "MAX_MESSAGES"),
    ("tools of a request", "chat/tools/declared.py", "MAX_TOOLS"),
    ("bytes of all tools as JSON", "chat/tools/declared.py", "MAX_TOOLS_BYTES"),
    ("bytes of `chat_template_kwargs`", "chat/templates.py", "_MAX_KWARGS_BYTES"),
    (
        "depth of JSON in a request, and of arguments that a model writes",
        "chat/lexer.py",
        "MAX_DEPTH",
    ),
    ("characters of a function's name that a model writes", "chat/lexer.py", "_MAX_NAME"),
    (
        "prompts of a completion, inputs of an embedding",
        f"{_SCHEMAS}/completion_request.py",
        "MAX_PROMPTS",
    ),
    ("`n`, `best_of`", f"{_SCHEMAS}/request_fields.py", "MAX_CHOICES"),
    ("continuations of all prompts of a request", _GENERATION, "MAX_CONTINUATIONS"),
    (
        "log-probabilities of a request, or as many as one continuation may have",
        _GENERATION,
        "MAX_LOGPROBS",
    ),
    ("tokens in `logit_bias`", "server/request_params.py", "MAX_BIASES"),
    ("parts of a form", "server/wire/form.py", "_MOST_PARTS"),
    ("bytes of a request's first line", "server/connections.py", "_MOST_LINE_BYTES"),
    (
        "pixels of all images of a request, and of all frames of its videos",
        "chat/picture_bounds.py",
        "MOST_PIXELS",
    ),
    ("frames of a video over HTTP", "chat/picture_bounds.py", "_MOST_FRAMES"),
    (
        "… of all requests under way",
        "server/admission_control.py",
        "MOST_PIXELS_UNDER_WAY",
    ),
    (
        "how often an image's longer side has its shorter one",
        "chat/picture_bounds.py",
        "_MOST_OBLONG",
    ),
    ("files of one key that are fetched at once", "server/media_files.py", "_AT_ONCE"),
    ("redirects of an address", "server/media_files.py", "_MOST_REDIRECTS"),
    ("seconds of a recording", "server/audio.py", "MOST_SECONDS"),
    ("channels of a recording", "server/audio.py", "_MOST_CHANNELS"),
    ("sequences that the memory page lists", "server/dashboard/snapshot.py", "_MOST_SEQUENCES"),
    ("replicas of a fleet", "config/fleet_config.py", "_MOST_REPLICAS"),
    ("… that are placed by prefixes", "fleet/prefix_directory.py", "MAX_REPLICAS"),
    ("bytes of `--config`", "cli/config_file.py", "_MOST_BYTES"),
    ("bytes of a key's file (`--kv-tier-key`)", "engine/open_tiers.py", "_LONGEST_KEY"),
    ("characters of a tier's address", "tiers/address.py", "_LONGEST"),
    ("peers of `--kv-transfer-config`", "config/kv_transfer.py", "_MOST_PEERS"),
    (
        "seconds that a sequence waits for tiers, at most",
        "engine/scheduling/offload_policy.py",
        "_LONGEST_WAIT_S",
    ),
    ("bytes of a line of a trace", "traces/trace_files.py", "MAX_LINE_BYTES"),
)


def constant(module: str, name: str) -> int | float:
    """Return a module's constant without importing it. Raises: LookupError where it has none."""
    tree = ast.parse((ROOT / "src/quire" / module).read_text(encoding="utf-8"))
    for node in tree.body:
        names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == name for each in names):
            found = eval(compile(ast.Expression(node.value), module, "eval"), {})  # type: ignore[attr-defined]
            assert isinstance(found, int | float)
            return found
    raise LookupError(f"src/quire/{module} has no constant {name}")


def numbers() -> str:
    """Return the limits that no option changes."""
    found = [(what, constant(module, name)) for what, module, name in LIMITS]
    rows = [[what, f"{int(most):,}"] for what, most in found]
    return table(["at most", ""], rows)


def versions() -> str:
    """Return the releases of large dependencies that are asked for, and that tests are run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        *project["dependencies"],
        *chain.from_iterable(project["optional-dependencies"].values()),
    ]
    wanted: dict[str, str] = {}
    for each in asked:
        match = re.match(r"([a-z0-9-]+)(?:\[\w+\])?([<>=!~][^;]*)", each)
        if match is not None:
            wanted.setdefault(match[1], match[2].strip())
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    names = (
        "torch",
        "transformers",
        "numpy",
        "llvmlite",
        "starlette",
        "uvicorn",
        "llguidance",
        "ray",
    )
    rows = [[name, code(wanted[name]), code(pinned[name])] for name in names]
    return table(["package", "asked for", "tests are run with"], rows)


# -- the planner -----------------------------------------------------------------------------------


def models() -> str:
    """Return the published models that the planner knows."""
    from quire.planner.subject import published_models, subject_of

    published = published_models()
    rows = []
    for model in published.models:
        subject = subject_of(model.name, model.config)
        rows.append(
            [
                code(model.name),
                f"{subject.num_parameters / 1e9:,.2f}",
                f"{format_bytes(subject.own.weights_bytes)}, {subject.precision.name}",
                str(subject.spec.num_layers),
                format_count(subject.spec.max_model_len),
                format_count(subject.spec.bytes_per_token),
                str(1 + published.sources.index((model.source, model.read_on))),
            ]
        )
    heads = [
        "model",
        "billions",
        "weights, as published",
        "layers",
        "context",
        "bytes a token",
        "from",
    ]
    return table(heads, rows, figures=range(1, len(heads)))


def places() -> str:
    """Return the list that the table of models counts its sources by."""
    from quire.planner.subject import published_models

    found = enumerate(published_models().sources, 1)
    return "".join(f"{number}. read on {on}: {where}\n" for number, (where, on) in found)


def devices() -> str:
    """Return the devices that a plan may be for."""
    from quire.planner.hardware import DEVICES

    rows = [
        [code(key), each.name, format_bytes(each.total_bytes), each.source]
        for key, each in DEVICES.items()
    ]
    return table(["`--device`", "name", "memory used in plans", "source"], rows, figures={2})


def speeds() -> str:
    """Return the speeds of devices, but Apple's, that the simulator computes with."""
    from quire.planner.hardware import SPEEDS

    rows = []
    for key, speed in SPEEDS.items():
        if key.startswith("apple-"):
            continue
        tera = [speed.flops_in(bits) / 1e12 for bits in (16, 8, 4)]
        giga = [speed.bytes_per_s / 1e9, speed.link_bytes_per_s / 1e9, speed.host_bytes_per_s / 1e9]
        rows.append([code(key), *(f"{x:,.0f}" for x in (*tera, *giga))])
    heads = ["device", "Tflop/s in 16 bits", "8", "4", "GB/s", "to other devices", "to the host"]
    return table(heads, rows, figures=range(1, len(heads)))


# -- pages -----------------------------------------------------------------------------------------

PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "reference/options.md": {
            **{f"{name}-options": partial(options_of, name) for name in CONFIGS},
            "nested-options": nested_options,
        },
        "reference/environment.md": {"variables": environment},
        "reference/commands.md": {"commands": commands},
        "reference/vllm-flags.md": {"flags": vllm_flags},
        "reference/tool-calls.md": {
            "tool-parsers": tool_parsers,
            "reasoning-parsers": reasoning_parsers,
        },
        "reference/metrics.md": {
            f"{kind}-metrics": partial(metrics, kind)
            for kind in ("gauge", "counter", "histogram", "fleet")
        },
        "reference/limits.md": {"numbers": numbers},
        "reference/platforms.md": {"versions": versions},
        "reference/planning.md": {"models": models, "places": places, "devices": devices},
        "concepts/simulator.md": {"speeds": speeds},
    }
)


def written(page: str, before: str) -> str:
    """Return a page's text with its parts made anew. Raises: ValueError for one without a place."""
    after = before
    for name, make in PARTS[page].items():
        place = re.compile(rf"<!-- begin {name}:[^>]*-->\n.*?<!-- end {name} -->", re.DOTALL)
        found = list(place.finditer(after))
        if len(found) != 1:
            raise ValueError(f"docs/{page} must have <!-- begin {name}: --> and its end, once")
        new = f"<!-- begin {name}: {COMMAND} -->\n\n{make()}\n<!-- end {name} -->"
        after = after[: found[0].start()] + new + after[found[0].end() :]
    return after


def stale(page: str) -> Iterator[str]:
    """Yield the lines in which a page differs from what the source says."""
    before = (DOCS / page).read_text(encoding="utf-8")
    after = written(page, before)
    yield from difflib.unified_diff(
        before.splitlines(),
        after.splitlines(),
        f"docs/{page}",
        "as the source has it",
        lineterm="",
        n=0,
    )


def main() -> int:
    """Write or check pages. Returns: 1 if one is stale and was to be checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--write", action="store_true", help="write the parts into the pages")
    parser.add_argument("--check", action="store_true", help="fail where a page is stale")
    args = parser.parse_args()
    if unknown := set(args.pages) - set(PARTS):
        parser.error(f"no such page: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    found = False
    for page in args.pages or PARTS:
        if args.write:
            path = DOCS / page
            before = path.read_text(encoding="utf-8")
            if (after := written(page, before)) != before:
                path.write_text(after, encoding="utf-8")
                print(f"docs/{page}: written")
        elif args.check:
            for line in stale(page):
                found = True
                print(line)
        else:
            for name, make in PARTS[page].items():
                print(f"-- {page}: {name}\n\n{make()}")
    if found:
        print(f"To write them anew: {COMMAND}", file=sys.stderr)
    return int(found)


if __name__ == "__main__":
    raise SystemExit(main())
