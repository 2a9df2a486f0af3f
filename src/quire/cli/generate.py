"""Run ``quire generate``: continue a text, and show how much memory its KV cache took."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console

from quire.cli.options import (
    MODEL_HELP,
    AsJson,
    MaxTokens,
    Temperature,
    load_llm,
    plain_table,
    with_engine_options,
)
from quire.engine.prompts import Prompt
from quire.errors import ConfigError, one_line
from quire.kv import Usage
from quire.sampling_params import SamplingParams
from quire.units import format_bytes, format_seconds

DEFAULT_PROMPT = 'def read_lines(path):\n    """Return the lines of a file as a list."""\n'

_MEANING = MappingProxyType(
    {
        "reserved": "reserved  (address space)",
        "committed": "committed (backed with pages)",
        "used": "used      (tokens that can be read)",
        "wasted": "wasted    (committed, not used)",
        "returned": "given back to the system",
        "left": "left",
    }
)


@with_engine_options
def generate(  # noqa: PLR0913 - each is a flag
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from standard input.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Show a model that sees this file. May be given several times. A text without the "
            "model's placeholder gets one in front for each. Default: none."
        ),
    ] = None,
    max_tokens: MaxTokens = 120,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens of this total probability.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens below this fraction of the most likely one's probability."),
    ] = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text. May be given several times. Default: none."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past the end-of-text token.")
    ] = False,
    as_json: AsJson = False,
    engine: dict[str, Any],
) -> None:
    """Continue a text, and show how much memory its KV cache took.

    \b
    quire generate "def quicksort(items):"
    quire generate --cache virtual --temperature 0.8 --seed 7 "class Queue:"
    quire generate --model ./my-model --max-model-len 4096 - < prompt.txt
    quire generate --model ./my-vlm --image cat.png "What is this?"
    """
    text = sys.stdin.read() if prompt == "-" else DEFAULT_PROMPT if prompt is None else prompt
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    pictures = _pictures(image or ())
    llm = load_llm(model, engine)
    shown: Prompt = text
    if pictures:
        vision = llm.facts.vision
        vision.check()
        if vision.placeholder not in text:
            text = vision.placeholder * len(pictures) + "\n" + text
        shown = {"prompt": text, "multi_modal_data": {"image": pictures}}
    history: list[Usage] = []
    pieces: list[str] = []
    reason, num_tokens, begin = "", 0, perf_counter()
    if not as_json:
        sys.stdout.write(text)
    for delta in llm.stream(shown, params, observe=history.append):
        pieces.append(delta.text)
        num_tokens += delta.token_id is not None
        reason = delta.finish_reason or reason
        if not as_json:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    elapsed_s = perf_counter() - begin
    peak = max(history, key=lambda usage: usage.committed_bytes)
    llm.close()
    figures = {
        "strategy": llm.config.cache,
        "reserved_bytes": peak.reserved_bytes,
        "committed_bytes": peak.committed_bytes,
        "used_bytes": peak.used_bytes,
        "wasted_bytes": peak.wasted_bytes,
        "returned_bytes": llm.memory.returned_bytes,
        "left_bytes": llm.memory.committed_bytes,
        "output_tokens": num_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
    }
    if as_json:
        result = {"model": llm.name, "prompt": text, "text": "".join(pieces)}
        print(json.dumps({**result, "finish_reason": reason, "kv": figures}))
        return
    sys.stdout.write("\n")
    table = plain_table("KV cache at its peak", "", "bytes")
    for name in ("reserved", "committed", "used", "wasted", "returned", "left"):
        table.add_row(_MEANING[name], format_bytes(float(figures[f"{name}_bytes"])))
    Console().print(table)
    Console().print(
        f"{llm.config.cache}: {num_tokens} tokens in {format_seconds(elapsed_s)}, "
        f"{figures['tokens_per_s']} tokens/s; ended by {reason}",
        highlight=False,
    )


def _pictures(paths: Iterable[Path]) -> list[Any]:
    """Read pictures. Raises: ConfigError for a file that is none, and without Pillow."""
    several = [*paths]
    if not several:
        return []
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"--image needs Pillow ({error}): pip install 'quire-kv[images]'"
        ) from error
    found: list[Any] = []
    for path in several:
        try:
            opened = Image.open(path)
            opened.load()
            found.append(opened)
        except Exception as error:  # of the system, Pillow and each format: many kinds
            raise ConfigError(f"--image {path} cannot be read: {one_line(error)}") from error
    return found
