"""Find the model to plan: in the bundled table, in a folder, or on the Hugging Face hub.

Only its config.json and the headers of its weight files are read; no weight is loaded.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelNotLoadable
from quire.memory.budget import Footprint
from quire.planner.parameters import (
    Passed,
    WeightParts,
    names_a_tower,
    pair_flops,
    parameters_of,
    passed_elements,
    shapes_of,
    widest_rows,
)
from quire.planner.precision import (
    NAMED,
    Precision,
    is_quantized,
    named,
    of_form,
    of_gguf,
    precision_of,
    uncoded,
    unread_method,
)
from quire.planner.weights import (
    Stored,
    footprint_of,
    gguf_tensors,
    of_codes,
    parts_of,
    stored_tensors,
    widest_stored,
)
from quire.spec import ModelSpec
from quire.spec.config_json import load
from quire.spec.gguf_config import gguf_config
from quire.spec.gguf_file import GGUF_KEPT, GgufFile, is_gguf, read_gguf
from quire.spec.layer_specs import dtype_bytes
from quire.spec.model_files import DEMO_MODEL, cached_folder, first_line, only_gguf
from quire.spec.weight_forms import weight_form

# -- the bundled table -----------------------------------------------------------------------------

# Each entry names the public page from which it was read, and leaves out what that page does not
# say. No entry is a guess.
_TABLE = "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model of the table."""

    name: str  # as on the Hugging Face hub
    config: Mapping[str, Any]  # the fields of its config.json that size it
    source: str  # the page from which it was read
    read_on: str  # a date


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModels:
    """The table."""

    models: tuple[Published, ...]

    @property
    def sources(self) -> list[tuple[str, str]]:
        """List the pages and when each was read, in the order of the first model of each."""
        return list(dict.fromkeys((model.source, model.read_on) for model in self.models))

    def find(self, name: str) -> Published | None:
        """Find a model by its name, in any case, with or without its organisation.

        The beginning of a name is enough, up to a hyphen, if it is that of one model alone.
        """
        wanted = name.strip().lower()
        exact = [m for m in self.models if wanted in (m.name.lower(), _short(m.name))]
        begun = exact or self.beginning(wanted)
        return begun[0] if len(begun) == 1 else None

    def beginning(self, name: str) -> Sequence[Published]:
        """Return the models whose names begin so, and go on behind a hyphen."""
        wanted = f"{name.strip().lower()}-"
        return [
            m
            for m in self.models
            if f"{m.name.lower()}-".startswith(wanted) or f"{_short(m.name)}-".startswith(wanted)
        ]

    def nearest(self, name: str) -> str | None:
        """Return the name that is spelled most alike, if any is."""
        known = {_short(model.name): model.name for model in self.models}
        near = get_close_matches(name.strip().lower().rpartition("/")[2], known, n=1)
        return known[near[0]] if near else None


def published_models() -> PublishedModels:
    """Read the table."""
    said = json.loads((files("quire.planner") / _TABLE).read_text(encoding="utf-8"))
    sources = said["sources"]
    return PublishedModels(
        models=tuple(
            Published(
                name=name,
                config=entry["config"],
                source=sources.get(entry["source"], entry["source"]),
                read_on=entry.get("read_on", said["read_on"]),
            )
            for name, entry in said["models"].items()
        ),
    )


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


_UNCODED_BYTES = 2  # of what a quantized checkpoint leaves in 16 bits
PUBLISHED = "published"  # of --weights: as the checkpoint has them

# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, as its files describe it."""

    name: str
    spec: ModelSpec  # in the dtype that --dtype asks for
    dtype: str  # of the weights, as they are loaded
    own: Footprint
    source: str  # of its config.json
    weights_source: str  # where the bytes of its weights come from
    parameters: WeightParts  # numbers of weights, counted from the shapes
    weights: WeightParts  # their bytes
    precision: Precision
    num_experts: int  # 0 for a dense model
    num_chosen: int  # experts per token
    pair_flops: int  # of attention in all layers, for one pair of a token and an entry
    passed: Passed  # by activations between products, for a token
    config: Mapping[str, Any]  # the fields of its config.json
    left_out: str = ""  # what the figures do not count

    @property
    def num_parameters(self) -> int:
        return self.parameters.total

    @property
    def num_active_parameters(self) -> int:
        """Return by how many weights a token is multiplied, those of its experts alone."""
        return self.parameters.every_step + self.chosen_experts + self.parameters.as_head

    @property
    def chosen_experts(self) -> int:
        """Return the weights of the experts of one token."""
        return self.parameters.experts * self.num_chosen // max(1, self.num_experts)

    @property
    def bytes_by_precision(self) -> Mapping[str, int]:
        """Return what the weights would take in each precision of ``NAMED``."""
        return {
            name: each.bytes_of(self.parameters, _UNCODED_BYTES).total
            for name, each in NAMED.items()
        }

    @property
    def weights_are_estimated(self) -> bool:
        return self.weights_source.startswith("estimate")


def find_subject(
    name: str | None = None,
    *,
    dtype: str = "auto",
    weights: str = PUBLISHED,
    quantization: str | None = None,
) -> Subject:
    """Find a model by a folder, a config.json, a GGUF file, or a name of the table or the hub.

    Without a name it is the demo model. ``weights`` names a precision in which they are counted
    instead of the published one; ``quantization``, the form that an engine makes of them.

    Raises: ModelNotLoadable if it is found nowhere; ConfigError; UnsupportedModel.
    """
    asked = None if weights == PUBLISHED else named(weights)
    if quantization is not None:
        if asked is not None:
            raise ConfigError(
                f"--weights {weights} and --quantization {quantization} both say in how many bits "
                f"weights are kept: leave one out"
            )
        asked = of_form(weight_form(quantization))
    if name is None:
        folder = Path(str(files("quire") / "demo_model"))
        return _of_folder(DEMO_MODEL, folder, dtype, asked)
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # the name is too long
        raise ModelNotLoadable(f"{name[:80]!r} is not a folder: {error}") from error
    if is_folder:
        return _of_folder(name, path, dtype, asked)
    if is_file:
        return _of_file(name, path, dtype, asked)
    if name.startswith((".", "/", "~")):
        raise ModelNotLoadable(f"there is no folder {path}")
    table = published_models()
    if (found := table.find(name)) is not None:
        return _of_table(found, dtype, asked)
    if name.count("/") == 1:
        return _of_hub(name, dtype, table.nearest(name), asked)
    near = table.nearest(name)
    hint = f"did you mean {near!r}? " if near else ""
    if several := table.beginning(name):
        hint = f"several begin so: {', '.join(model.name for model in several)}; "
    raise ModelNotLoadable(
        f"{name!r} is not a folder, a file or a name of the table; {hint}quire plan --list shows "
        "the table, and a name with an organisation (org/name) is looked up on the hub"
    )


def subject_of(name: str, config: Mapping[str, Any], *, weights: str = PUBLISHED) -> Subject:
    """Describe a model by the fields of its config.json alone.

    Raises: ConfigError; UnsupportedModel.
    """
    asked = None if weights == PUBLISHED else named(weights)
    return _of_config(name, config, f"config.json of {name}", "auto", asked)


def _of_folder(name: str, folder: Path, dtype: str, asked: Precision | None) -> Subject:
    if (gguf := only_gguf(folder)) is not None:
        return _of_file(name, gguf, dtype, asked)
    config, source = load(folder)
    tensors = stored_tensors(folder)
    if tensors is None or asked is not None:
        return _of_config(name, config, source, dtype, asked)
    return _of_tensors(name, config, source, tensors, dtype, "the headers of its files")


def _of_file(name: str, file: Path, dtype: str, asked: Precision | None) -> Subject:
    if is_gguf(file):
        return _of_gguf(name, read_gguf(file), dtype, asked)
    config, source = load(file)
    return _of_config(name, config, source, dtype, asked)


def _of_gguf(name: str, file: GgufFile, dtype: str, asked: Precision | None) -> Subject:
    config, source = gguf_config(file), str(file.path)
    if asked is not None:
        return _of_config(name, config, source, dtype, asked)
    tensors = gguf_tensors(file)
    subject = _of_tensors(name, config, source, tensors, dtype, "the header of its file")
    kinds = Counter(tensor.dtype for tensor in tensors.values() if tensor.dtype in GGUF_KEPT)
    if not kinds:
        return subject
    return replace(subject, precision=of_gguf(kinds.most_common(1)[0][0]))


def _of_tensors(
    name: str,
    config: Mapping[str, Any],
    source: str,
    tensors: Mapping[str, Stored],
    dtype: str,
    weights_source: str,
) -> Subject:
    spec, computing = _computed(ModelSpec.from_config(config, source), dtype)
    shapes, item_bytes = shapes_of(config, spec, source), dtype_bytes(computing)
    # Codes of a quantized checkpoint and their scales keep their dtype; others get --dtype's.
    are_codes = is_quantized(config)
    coded = of_codes(tensors) if are_codes else frozenset()

    def num_bytes(name: str, tensor: Stored) -> int:
        return tensor.bytes_in(None if name in coded else item_bytes)

    weights = parts_of(tensors, shapes, num_bytes)
    counted = parts_of(tensors, shapes, lambda _, tensor: tensor.num_items)
    return Subject(
        name=name,
        spec=spec,
        dtype=computing,
        own=footprint_of(weights, shapes, widest_stored(tensors, shapes), item_bytes),
        source=source,
        weights_source=weights_source,
        # Codes are packed, several to an item.
        parameters=parameters_of(config, spec, source) if are_codes else counted,
        weights=weights,
        precision=_stated(config, computing),
        num_experts=shapes.num_experts,
        num_chosen=shapes.num_chosen,
        pair_flops=pair_flops(config, spec, source),
        passed=passed_elements(config, spec, source),
        config=config,
    )


def _of_config(
    name: str, config: Mapping[str, Any], source: str, dtype: str, asked: Precision | None
) -> Subject:
    spec, computing = _computed(ModelSpec.from_config(config, source), dtype)
    shapes, item_bytes = shapes_of(config, spec, source), dtype_bytes(computing)
    parameters = parameters_of(config, spec, source)
    precision = asked or _stated(config, computing)
    weights = precision.bytes_of(parameters, item_bytes)
    left_out = ""
    if names_a_tower(config, source) and not parameters.towers:
        left_out = "parts for images or sound, whose sizes are not known"
    return Subject(
        name=name,
        spec=spec,
        dtype=computing,
        own=footprint_of(weights, shapes, widest_rows(config, spec, source), item_bytes),
        source=source,
        weights_source=f"estimate from its config.json, {_kept_as(config, precision, parameters)}",
        parameters=parameters,
        weights=weights,
        precision=precision,
        num_experts=shapes.num_experts,
        num_chosen=shapes.num_chosen,
        pair_flops=pair_flops(config, spec, source),
        passed=passed_elements(config, spec, source),
        left_out=left_out,
        config=config,
    )


def _of_table(found: Published, dtype: str, asked: Precision | None) -> Subject:
    source = f"the bundled table, read on {found.read_on} from {found.source}"
    subject = _of_config(found.name, found.config, f"config.json of {found.name}", dtype, asked)
    return replace(subject, source=source)


def _of_hub(name: str, dtype: str, near: str | None, asked: Precision | None) -> Subject:
    """Read the config.json and the weights' metadata from the hub. Raises: ModelNotLoadable."""
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        folder = cached_folder(name)
        file = hf_hub_download(name, "config.json") if folder is None else ""
    except Exception as error:  # of many classes: no network, no such model, no permission
        hint = f"; the table has {near!r}" if near else ""
        raise ModelNotLoadable(
            f"{name!r} is neither a local folder nor in the table, and the Hugging Face hub did "
            f"not give its config.json: {first_line(error)}{hint}"
        ) from error
    if folder is not None:
        return _of_folder(name, folder, dtype, asked)
    config, _ = load(file)
    source = f"config.json of {name}, from the hub"
    try:
        if asked is not None:
            return _of_config(name, config, source, dtype, asked)
        metadata = get_safetensors_metadata(name)
        tensors = {
            tensor: Stored(dtype=str(info.dtype), shape=tuple(info.shape))
            for part in metadata.files_metadata.values()
            for tensor, info in part.tensors.items()
        }
    except Exception:  # it has no such files, or the hub gives the config alone
        return _of_config(name, config, source, dtype, asked)
    return _of_tensors(name, config, source, tensors, dtype, "the headers of its files on the hub")


def _computed(spec: ModelSpec, dtype: str) -> tuple[ModelSpec, str]:
    """The model in the dtype that was asked for, and that dtype."""
    return (spec, spec.dtype) if dtype == "auto" else (spec.computed_in(dtype), dtype)


def _stated(config: Mapping[str, Any], dtype: str) -> Precision:
    return precision_of(config) or uncoded(dtype, dtype_bytes(dtype))


def _kept_as(config: Mapping[str, Any], precision: Precision, parameters: WeightParts) -> str:
    if (method := unread_method(config)) is not None:
        return f"in {precision.name}: its quantization ({method}) is of an unknown kind"
    if not precision.is_coded:
        return f"in {precision.name}"
    parts = {
        "attention": precision.codes_attention and parameters.attention,
        "dense layers": precision.codes_dense and parameters.dense,
        "experts": parameters.experts,
    }
    coded = ", ".join(name for name, count in parts.items() if count)
    return f"{precision.bits:.4g} bits a weight of {coded}; tables, norms and routers as they were"
