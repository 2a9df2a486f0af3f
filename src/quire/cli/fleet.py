"""Run ``quire fleet``: several replicas of one engine behind one address, on Ray Serve."""

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from quire.cli.options import Model, facts_table, in_panel, with_options
from quire.cli.serve import warn_if_open
from quire.cli.vllm import notes_of
from quire.config import EngineConfig, FleetConfig, ServerConfig, prepare_own_ray, ray_address
from quire.engine.kv_sizing import longest_tokens
from quire.errors import ConfigError
from quire.spec.model_files import find_spec
from quire.units import format_count

if TYPE_CHECKING:
    from quire.fleet.serve_fleet import FleetStartUp

log = logging.getLogger(__name__)


@with_options(fleet=FleetConfig, server=ServerConfig, engine=EngineConfig)
def fleet(
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
    num_gpu_blocks_override: Annotated[int | None, typer.Option(hidden=True)] = None,
    print_config: Annotated[
        bool,
        in_panel(
            "Fleet",
            "Print the fleet as Ray Serve's config file, for serve deploy and KubeRay, and exit. "
            "Needs no Ray.",
            "--print-config",
        ),
    ] = False,
    fleet: dict[str, Any],
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model with several replicas behind one address, on Ray Serve.

    The API and the options are those of quire serve. Each replica is an engine in its own process;
    sizes are those of one. A request goes to the replica that will answer it first: where its
    prefix is cached, or where the least waits. A stream whose replica dies goes on at another one.

    \b
    quire fleet --replicas 2
    quire fleet Qwen/Qwen3-0.6B --replicas 4 --kv-cache-memory-bytes 2GiB
    quire fleet Qwen/Qwen3-8B --replicas 2 --gpus-per-replica 1 --max-replicas 8
    RAY_ADDRESS=auto quire fleet Qwen/Qwen3-8B --replicas 16 --gpus-per-replica 1
    quire fleet Qwen/Qwen3-8B --replicas 16 --print-config > serve.yaml

    Needs the extra quire-kv[fleet]. Without RAY_ADDRESS it starts Ray on this machine, and ends it.
    Then: curl http://127.0.0.1:8000/v1/models, or quire chat.

    Raises: ConfigError; typer.Exit with the server's exit code.
    """
    from quire.fleet.fleet_plan import KEYS, FleetPlan

    own_fleet = FleetConfig.from_options(**fleet)
    if num_gpu_blocks_override is not None:
        raise ConfigError(
            "num_gpu_blocks_override is an option of quire serve: a replica's size is given in "
            "bytes, by kv_cache_memory_bytes"
        )
    if print_config:
        # As it was typed: what the environment says here is not for other machines, and files with
        # keys are where the fleet runs.
        ServerConfig.from_options(**{name: server[name] for name in server if name not in KEYS})
        said = FleetPlan(model=model, engine=engine, server=server, fleet=own_fleet)
        typer.echo(_yaml(said.serve_config()), nl=False)
        return
    config = ServerConfig.from_options(**server)
    own = EngineConfig.from_options(**engine)
    plan = FleetPlan.of(model, own, config, own_fleet)
    longest_tokens(own, *find_spec(model))  # what its config.json refuses is said at once
    if ray_address() is None:
        prepare_own_ray()
    from quire.fleet.ray_serve.started_fleet import start_fleet
    from quire.fleet.serve_fleet import serve_fleet

    console = Console(stderr=True)
    status, said_last = console.status("starting Ray …"), ""

    def tell(ready: int, count: int, waits_for: str) -> None:
        nonlocal said_last
        more = f"; {waits_for}" if waits_for else ""
        text = f"loading {model or 'the demo model'}: {ready} of {count} replicas are ready{more}"
        status.update(escape(text))
        if text != said_last and not console.is_terminal:
            log.info("%s", text)
        said_last = text

    def load() -> Any:
        for note in notes_of(context):
            log.info("%s", note)
        warn_if_open(config)
        with status:
            return start_fleet(plan, tell)

    def announce(facts: "FleetStartUp") -> None:
        if log.isEnabledFor(logging.INFO):
            _announce(console, facts)

    code = serve_fleet(plan, config, load, announce=announce)
    if code:
        raise typer.Exit(code)


def _announce(console: Console, facts: "FleetStartUp") -> None:
    """Print which model is served at which address, and by how many replicas."""
    table = facts_table()
    keys = f"{facts.num_keys} API key{'s' * (facts.num_keys != 1)}" if facts.num_keys else "no key"
    where = "of this machine only" if facts.is_local else "from any machine"
    clients = f"{where}, {'with ' + keys if facts.num_keys else 'no key needed'}"
    where_ray = f"Ray at {facts.ray_address}" if facts.ray_address else "a Ray of this process's"
    count = f"{facts.num_replicas}"
    if facts.num_prefill:
        count += f" and {facts.num_prefill} for prompts"
    rows = [
        ("serving", f"[bold]{escape(facts.model)}[/] at [bold cyan]{escape(facts.url)}[/]"),
        ("replicas", f"{count}, on {escape(where_ray)}; {escape(facts.placement)}"),
        ("sequences", f"up to {format_count(facts.max_model_len)} tokens (max_model_len)"),
        ("clients", clients),
    ]
    for name, text in rows:
        table.add_row(name, text)
    console.print(table, highlight=False)


def _yaml(config: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(config, sort_keys=False)
    return (
        f"# Ray Serve's config file: serve deploy FILE, or serveConfigV2 of a RayService.\n{text}"
    )
