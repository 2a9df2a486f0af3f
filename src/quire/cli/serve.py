"""Run ``quire serve``: serve a model over HTTP, with vLLM's flags."""

import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from quire.cli.imports import quick_imports
from quire.cli.options import Model, facts_table, import_engine_for, with_options
from quire.cli.vllm import notes_of
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.units import format_bytes, format_count

log = logging.getLogger(__name__)


@with_options(server=ServerConfig, engine=EngineConfig)
def serve(
    *,
    context: typer.Context,
    model: Model = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file of options by their long names; flags on the command line override it.",
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(help="KV memory in blocks of all layers together, as vLLM.", hidden=True),
    ] = None,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP with OpenAI's and Anthropic's API, metrics and a memory page.

    The flags of vllm serve work too; the log says at the start what each of them does here.

    \b
    quire serve
    quire serve Qwen/Qwen3-0.6B --max-model-len 8192 --kv-cache-memory-bytes 4GiB
    quire serve ./my-model --host 0.0.0.0 --api-key @keys.txt
    quire serve --uds /run/quire.sock --shutdown-timeout 120
    quire serve --config quire.yaml --port 9000

    Then: curl http://127.0.0.1:8000/v1/models, or quire chat.

    Raises: ConfigError; typer.Exit with the server's exit code.
    """
    with quick_imports():
        from quire.server.run import serve as run

    config = ServerConfig.from_options(**server)
    own = EngineConfig.from_options(**engine)  # bad options fail before anything is loaded
    console = Console(stderr=True)

    def load() -> Any:
        for note in notes_of(context):
            log.info("%s", note)
        warn_if_open(config)
        options = dict(engine)
        if num_gpu_blocks_override is not None:
            options |= _blocks(num_gpu_blocks_override, model, own)
        import_engine_for(model, own)
        from quire.engine.async_llm import AsyncLLM

        console.print(f"loading {model or 'the demo model'} …", highlight=False)
        # By its name, so that the server can free the weights while it sleeps, and load them again.
        return AsyncLLM(model, show_progress=model is not None, **options)

    def announce(facts: Any) -> None:
        if log.isEnabledFor(logging.INFO):
            _announce(console, facts)

    code = run(config, load, announce=announce)
    if code:
        raise typer.Exit(code)


def _blocks(count: int, model: str | None, config: EngineConfig) -> dict[str, int]:
    """Convert a number of blocks to bytes. Raises: ConfigError, ModelNotLoadable."""
    from quire.engine.kv_sizing import stored_spec
    from quire.models.loader import read_config
    from quire.spec.model_files import find_folder

    if count < 1:
        raise ConfigError(f"num_gpu_blocks_override={count} must be at least 1")
    if config.kv_cache_memory_bytes is not None:
        raise ConfigError(
            f"num_gpu_blocks_override={count} and kv_cache_memory_bytes both give a size: give one"
        )
    folder = find_folder(model)
    _, spec = read_config(str(folder or model), folder)
    if config.dtype != "auto":
        spec = spec.computed_in(config.dtype)
    block_bytes = config.block_size * stored_spec(config, spec).bytes_per_token
    log.info(
        "num_gpu_blocks_override: %s blocks of %s tokens, %s each, are kv_cache_memory_bytes=%s",
        format_count(count),
        format_count(config.block_size),
        format_bytes(block_bytes),
        format_bytes(count * block_bytes),
    )
    return {"kv_cache_memory_bytes": count * block_bytes}


def warn_if_open(config: ServerConfig) -> None:
    """Warn where every client of the network may use the model."""
    if not config.is_local and not config.api_key:
        also = "" if config.admin_api_key else ", see other clients' sequences, and administer it"
        log.warning(
            "host=%s accepts other machines, and no API key is set: every client that reaches this "
            "machine may use the model%s. Set --api-key @FILE, or --host 127.0.0.1 behind a proxy "
            "that authenticates clients",
            config.host,
            also,
        )


def _announce(console: Console, facts: Any) -> None:
    """Print which model is served at which address, and with how much memory."""
    table = facts_table()
    keys = f"{facts.num_keys} API key{'s' * (facts.num_keys != 1)}" if facts.num_keys else "no key"
    rows = [
        ("serving", f"[bold]{escape(facts.model)}[/] at [bold cyan]{escape(facts.url)}[/]"),
        (
            "KV memory",
            f"{format_bytes(facts.kv_bytes)} ({facts.strategy}), {format_count(facts.kv_tokens)} "
            f"tokens; bound by {escape(facts.kv_bound)}",
        ),
        (
            "sequences",
            f"{facts.num_longest:,.1f} of {format_count(facts.max_model_len)} tokens fit "
            f"(max_model_len); at most {format_count(facts.max_num_seqs)} run at once",
        ),
        *([("tiers", escape(", ".join(facts.tiers)))] if facts.tiers else []),
        ("clients", _clients(facts, keys)),
        ("memory page", _page(facts.url)),
    ]
    for name, text in rows:
        table.add_row(name, text)
    console.print(table, highlight=False)


def _clients(facts: Any, keys: str) -> str:
    where = "of this machine only" if facts.is_local else "from any machine"
    text = f"{where}, {keys} needed" if not facts.num_keys else f"{where}, with {keys}"
    text += "; administration with an admin key" if facts.has_admin_key else ""
    return f"[bold yellow]{text}[/]" if facts.is_open else text


def _page(url: str) -> str:
    if url.startswith("unix:"):
        return "at / of that socket"
    return f"{escape(url)}/"
