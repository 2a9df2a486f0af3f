"""Run ``quire plan``: compute what a model needs, in bytes and sequences, on any machine.

No weights are loaded. Torch is imported only for --validate, or to query a GPU of this machine.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from quire.cli.options import (
    AsJson,
    Weights,
    in_panel,
    load_model,
    require_replicas,
    with_engine_options,
)
from quire.cli.plan_report import Speeds, as_dict, print_plan, print_table_of_models
from quire.cli.planned_tiers import TierSizes, TierSpeeds
from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError
from quire.memory import HostMemory
from quire.memory.machine import may_have_cuda, read_machine
from quire.memory.machine.probe import spare_mappings
from quire.planner.capacity import CapacityPlan, Divide, PlanTarget, peer_of, tiers_of, typical
from quire.planner.capacity import plan as make_plan
from quire.planner.first_token import first_token
from quire.planner.fit import changes, longest, most_sequences
from quire.planner.hardware import device as device_of
from quire.planner.hardware import (
    known_speed,
    machine_of,
    machine_with,
    named_devices,
    named_speeds,
    roofline,
)
from quire.planner.images import Ask, ImageSizes, PlannedImages, planned_images
from quire.planner.planned_tiers import TierTable
from quire.planner.prefill_apart import prefill_apart
from quire.planner.saturation import saturated
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.simulation.cost_model import RooflineCosts, StepCosts, measured_for
from quire.planner.simulation.simulated_engine import prices_of
from quire.planner.subject import PUBLISHED, Subject, find_subject, published_models
from quire.spec.tensor_parallel import rank_spec
from quire.units import format_count, parse_bytes

_HOST_PAGE_BYTES = 4096
_FLEET = "Fleet"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@with_engine_options
def plan(  # noqa: PLR0913 - flags
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a config.json, a name of the bundled table (--list; any case, with or "
            "without its organisation), or a hub name. Default: the demo model.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Plan for a machine with this much free memory, e.g. 80GB.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device of this machine: auto (default), cpu, cuda, cuda:1; or another by name: "
            f"{named_devices()}. The maker, blanks and what a driver adds may stand there too."
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            help="Devices that share the heads as vLLM divides them; the plan shows one of them. "
            "--tensor-parallel-size divides them as this engine does."
        ),
    ] = 1,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of a typical prompt. Default: up to 1024.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of a typical answer. Default: up to 256.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Images of a typical prompt, beside the --input-len: 1024x768 for one, "
            "4x1024x768 for four. Their tokens are counted by the processor of the model's folder.",
            metavar="[COUNTx]WIDTHxHEIGHT",
        ),
    ] = None,
    fit: Annotated[
        Literal["length", "sequences"] | None,
        typer.Option(
            help="Find the longest context for --max-num-seqs sequences (one if not given), or the "
            "most typical sequences at once."
        ),
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list", help="Show the bundled table of models and its sources.")
    ] = False,
    weights: Weights = PUBLISHED,
    replicas: Annotated[int, in_panel(_FLEET, "Replicas of the fleet that write answers.")] = 1,
    prefill_replicas: Annotated[
        int,
        in_panel(
            _FLEET,
            "Further replicas that compute prompts for the others: say what that gives and takes, "
            "against as many equal replicas. Needs a --device of known speed, or --calibration; "
            "--tier-speed peer=… gives the speed of the links.",
        ),
    ] = 0,
    request_rate: Annotated[
        float | None,
        in_panel(
            _FLEET,
            "Typical requests per second for the whole fleet, at which both are compared. Default: "
            "half of the most that equal replicas answer.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Take the speed from a file that quire bench --calibrate wrote."),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Also run the engine under each strategy, and compare the bytes."
        ),
    ] = False,
    tier_speed: TierSpeeds = None,
    tier_size: TierSizes = None,
    as_json: AsJson = False,
    engine: dict[str, Any],
) -> None:
    """Plan what fits: bytes per token, the budget, and sequences per strategy and rule.

    With --kv-tier, also what each tier holds, and from how many tokens on loading a prompt from it
    is quicker than computing it on --device. No tier is opened.

    With --prefill-replicas, also what a fleet gains and loses whose prompts are computed apart.

    \b
    quire plan
    quire plan Llama-3.1-8B --device h100 --max-model-len 32768
    quire plan Qwen3-32B --device l40s --tp 4 --fit length
    quire plan Llama-3.3-70B-Instruct --device h200 --weights fp8
    quire plan ./my-model --memory 64GB --input-len 4000 --output-len 500
    quire plan Llama-3.1-8B --device h100 --kv-tier 'memory:?size=160GiB'
    quire plan Llama-3.1-8B --device h100 --prefill-replicas 1
    quire plan gemma-3-12b-it --device h100 --images 2x1024x768
    quire plan --validate

    Raises: ConfigError, ModelNotLoadable, MemoryUnavailable.
    """
    if list_models:
        print_table_of_models(published_models(), as_json=as_json)
        return
    config = EngineConfig.from_options(**engine)
    _refuse_unplanned(config)
    if tp < 1:
        raise ConfigError(f"tp={tp} must be at least 1")
    tp = num_ranks_of(tp, config)
    if device is None and memory is None:
        device = "cpu" if validate else config.device
    table = TierTable.of(tier_speed or (), tier_size or ())
    if validate:
        _refuse_beside_validate(
            images=images,
            fit=fit,
            calibration=calibration,
            prefill_replicas=prefill_replicas,
            replicas=None if replicas == 1 else replicas,
            request_rate=request_rate,
        )
    table.require_used(config.tiers, has_peers=prefill_replicas > 0)
    costs_of = _costs_of(calibration, device, config.cache)
    _refuse_fleet(replicas, prefill_replicas, request_rate, has_speed=costs_of is not None)
    place = place_of(memory, device, num_ranks=tp)
    if config.quantization is not None and place.here != "cpu" and memory is None:
        raise ConfigError(
            f"quantization={config.quantization} is planned for a CPU: --device cpu, or --memory; "
            f"for a GPU say what its checkpoint has, --weights"
        )
    subject = find_subject(
        model, dtype=config.dtype, weights=weights, quantization=config.quantization
    )
    shown = None
    if images is not None:
        shown = _shown(subject, model, ImageSizes.parse(images))
        subject = replace(subject, own=replace(subject.own, encoder=shown.each))
    request = _request(subject, config, input_len, output_len, shown)
    if validate:
        if place.here != "cpu" or tp > 1:
            raise ConfigError(
                "--validate runs the engine on this machine's CPU: leave out --memory, --device "
                "and --tp"
            )
        _validate(model, subject, config, place, request)
        return
    with Console(stderr=True).status("planning …"):
        divide = _engines_way(subject) if config.tensor_parallel_size > 1 else rank_spec
        found = make_plan(
            subject,
            config,
            place,
            num_ranks=tp,
            divide=divide,
            request=request,
        )
        fitted, found = _fitted(found, fit, for_many="max_num_seqs" in engine)
        remedies = [] if found.fits else list(changes(found))
    tiers, speed = tiers_of(found, table), Speeds()
    if costs_of is not None:
        costs, told = costs_of(subject, tp)
        speed = Speeds(
            source="the device's data sheet" if calibration is None else str(calibration),
            told=tuple(told),
            token_s=prices_of(costs, found.config.max_num_batched_tokens).token_s,
            first=first_token(found, costs),
            full=saturated(found, costs),
            encoder_s=None
            if shown is None or not isinstance(costs, RooflineCosts)
            else shown.encoder_s(costs),
        )
        if prefill_replicas:
            compared = prefill_apart(
                found,
                costs,
                peer_of(found, table),
                num_replicas=replicas,
                num_prefill=prefill_replicas,
                requests_per_s=request_rate,
            )
            speed = replace(speed, apart=compared)
    if as_json:
        said = as_dict(found, remedies, fitted, tiers=tiers, speeds=speed, images=shown)
        print(json.dumps(said))
    else:
        print_plan(found, remedies, fitted, tiers=tiers, speeds=speed, images=shown)


def _costs_of(
    calibration: Path | None, device: str | None, cache: str
) -> Callable[[Subject, int], tuple[StepCosts, list[str]]] | None:
    """Return what makes a cost model of a subject and its ranks, and sentences on whose it is.

    None where no speed is known. Raises: ConfigError; what is returned does, too.
    """
    key = known_speed(device)
    if calibration is not None:
        if key is not None:
            raise ConfigError("--calibration and --device both give the speed: give one")
        return lambda subject, num_ranks: measured_for(calibration, subject.name, {cache})
    if key is None:
        return None
    return lambda subject, num_ranks: (
        roofline(subject, rank_spec(subject.spec, num_ranks), key, num_ranks),
        [],
    )


def _refuse_beside_validate(**others: object) -> None:
    """Refuse options that ask for more than the bytes of one engine. Raises: ConfigError."""
    if given := [f"--{name.replace('_', '-')}" for name, value in others.items() if value]:
        raise ConfigError(
            f"--validate runs prompts of text in one engine, and compares bytes: leave out "
            f"{' and '.join(given)}"
        )


def _refuse_fleet(replicas: int, prefill: int, rate: float | None, *, has_speed: bool) -> None:
    """Check the options of a fleet. Raises: ConfigError."""
    require_replicas(replicas, prefill)
    if rate is not None and not 0 < rate < inf:
        raise ConfigError(f"--request-rate {rate:g} must be a number above 0")
    if not prefill and (replicas > 1 or rate is not None):
        raise ConfigError(
            "--replicas and --request-rate are of a fleet with prefill replicas: give "
            "--prefill-replicas, or leave them out"
        )
    if prefill and not has_speed:
        raise ConfigError(
            f"--prefill-replicas {prefill} is compared by time: give a --device of known speed "
            f"({named_speeds()}), or --calibration"
        )


def num_ranks_of(tp: int, config: EngineConfig) -> int:
    """Return the ranks that --tp or --tensor-parallel-size asks for. Raises: ConfigError."""
    own = config.tensor_parallel_size
    if 1 not in (tp, own) and tp != own:
        raise ConfigError(f"--tp {tp} and --tensor-parallel-size {own} mean the same: give one")
    return max(tp, own)


def _engines_way(subject: Subject) -> Divide:
    """Return the engine's own division of a model, by the plan that Transformers has for it."""
    from quire.models.rank_spec import part_of_type

    return partial(part_of_type, subject.name)


def place_of(memory: str | None, device: str | None, *, num_ranks: int = 1) -> PlanTarget:
    """Find the machine to plan for: a named device, one of a given size, or this machine.

    Raises: ConfigError; MemoryUnavailable if a GPU of this machine does not report its memory.
    """
    if memory is None and (device is None or _is_engines(device)):
        return _here(device or "cpu", num_ranks)
    if device is None or device == "cpu":
        return PlanTarget(
            machine=machine_of(_size(memory)),
            page_bytes=_HOST_PAGE_BYTES,
            can_share=True,
            max_mappings=None,
        )
    if _is_engines(device):
        raise ConfigError(
            f"--memory plans for another machine, and --device {device} is one of this machine: "
            f"leave one out, or name another device ({named_devices()})"
        )
    found = device_of(device)
    if memory is not None:
        found = replace(found, total_bytes=_size(memory), source="--memory")
    return PlanTarget(
        machine=machine_with(found),
        page_bytes=found.page_bytes,
        can_share=True,
        max_mappings=None,
    )


def _is_engines(device: str) -> bool:
    """Return whether this is a name of the engine's --device, for a device of this machine."""
    return device in ("auto", "cpu") or device.partition(":")[0] == "cuda"


def _here(device: str, num_ranks: int) -> PlanTarget:
    """Return this machine, as an engine sees it. Raises: ConfigError, MemoryUnavailable."""
    EngineConfig(device=device)  # refuses an unknown name
    if device != "cpu" and (device != "auto" or may_have_cuda()):
        from quire.devices import choose_device
        from quire.memory.by_device import machine_for, memory_for

        chosen = choose_device(device)
        if chosen.type == "cuda":  # each rank has a GPU of its own
            return PlanTarget(
                machine=machine_for(chosen),
                page_bytes=memory_for(chosen, "on-demand").page_bytes,
                can_share=True,
                max_mappings=None,
                here=str(chosen),
            )
    host = HostMemory()
    return PlanTarget(
        machine=read_machine().share(num_ranks),
        page_bytes=host.page_bytes,
        can_share=host.cannot_share is None,
        max_mappings=spare_mappings(),
        here="cpu",
    )


def _size(memory: str | None) -> int:
    size = parse_bytes(memory or "")
    if not 0 < size < 2**60:
        raise ConfigError(f"--memory {memory} must be above 0 and below 1 EiB")
    return size


def _shown(subject: Subject, model: str | None, sizes: ImageSizes) -> PlannedImages:
    """Plan a prompt's images, by its own processor if there is one. Raises: ConfigError."""
    folder = Path(model or "").expanduser()
    ask: Ask | None = None
    if any((folder / name).is_file() for name in _PROCESSOR_FILES if model):
        from quire.models.encoder_peak import image_of_files

        def ask(width: int, height: int) -> tuple[int, int, str]:
            try:
                image, said_by = image_of_files(folder, width, height, dtype=subject.dtype)
            except RequestError as error:
                raise ConfigError(f"--images: {error}") from error
            return image.num_tokens, image.num_values, said_by

    return planned_images(subject, sizes, ask)


def _request(
    subject: Subject,
    config: EngineConfig,
    input_len: int | None,
    output_len: int | None,
    images: PlannedImages | None,
) -> PlannedLengths:
    """Return the typical request. Raises: ConfigError if it is longer than the context."""
    most = min(config.max_model_len or subject.spec.max_model_len, subject.spec.max_model_len)
    shown = 0 if images is None else images.num_tokens
    if shown + 2 > most:
        raise ConfigError(
            f"--images: they make {format_count(shown)} tokens, and a prompt with an answer has "
            f"--max-model-len {format_count(most)}: raise it, or lower the number or size"
        )
    most -= shown
    usual = typical(most)
    for flag, value in (("--input-len", input_len), ("--output-len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    output_tokens = usual.output_tokens if output_len is None else output_len
    input_tokens = min(1024, max(1, most - output_tokens)) if input_len is None else input_len
    if output_len is None:
        output_tokens = max(1, min(output_tokens, most - input_tokens))
    if input_tokens + output_tokens > most:
        raise ConfigError(
            f"--input-len {format_count(input_tokens)} and --output-len "
            f"{format_count(output_tokens)} are more than --max-model-len "
            f"{format_count(most + shown)}"
            + (f" less {format_count(shown)} of images" if shown else "")
            + ": lower one of them"
        )
    return PlannedLengths(input_tokens=input_tokens + shown, output_tokens=output_tokens)


def _refuse_unplanned(config: EngineConfig) -> None:
    """Refuse options whose memory only a loaded model tells. Raises: ConfigError."""
    if config.speculative_config is not None:
        raise ConfigError(
            "speculative_config is not planned, because only loaded models tell its memory: leave "
            "it out here; quire doctor and the engine's own ledger include it"
        )
    if config.memory_provider != "auto":
        raise ConfigError(
            f"memory_provider={config.memory_provider} is not planned: only the engine makes it "
            f"and learns the size of its pages; leave it out here"
        )


def _fitted(
    found: CapacityPlan, fit: str | None, *, for_many: bool
) -> tuple[str | None, CapacityPlan]:
    """Return the option that --fit finds, in words, and the plan with it."""
    if fit is None:
        return None, found
    if fit == "length":
        at_once = found.config.max_num_seqs if for_many else 1
        tokens = longest(found, at_once)
        if not tokens:
            return None, found
        config = replace(found.config, max_model_len=tokens)
        whole = tokens == found.subject.spec.max_model_len
        said = (
            f"--max-model-len {tokens}: the longest context for {format_count(at_once)} "
            f"sequence{'s' if at_once > 1 else ''} at once"
            + (", which is all of the model's own" if whole else "")
        )
    else:
        count = most_sequences(found)
        if not count:
            return None, found
        config = replace(found.config, max_num_seqs=count)
        said = f"--max-num-seqs {count}: the most typical sequences at once"
    request = found.request
    most = config.max_model_len or found.subject.spec.max_model_len
    if request.input_tokens + request.output_tokens > most:
        request = typical(most)
    again = make_plan(
        found.subject,
        config,
        found.place,
        num_ranks=found.num_ranks,
        divide=found.divide,
        request=request,
    )
    return said, again


def _validate(
    model: str | None,
    subject: Subject,
    config: EngineConfig,
    place: PlanTarget,
    request: PlannedLengths,
) -> None:
    from quire.cli.plan_validation import print_checks, validate

    console = Console(stderr=True)
    # The plan is for the CPU's memory, so the steps run there.
    loaded = load_model(model, replace(config, device="cpu"), console)
    with console.status("…") as status:
        checks = validate(loaded, subject, config, place, request, report=status.update)
    if not print_checks(subject.name, checks):
        raise typer.Exit(1)
