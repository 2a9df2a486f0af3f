"""Find the model to plan: in the bundled table, in a folder, or on the Hugging Face hub.

Only its config.json and the headers of its weight files are read; no weight is loaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.errors import ModelNotLoadable
from quire.memory.budget import Footprint
from quire.planner.weights import (
    Stored,
    estimated_footprint,
    footprint_of,
    num_active_parameters,
    num_parameters,
    shapes_of,
    stored_tensors,
    weight_bits,
)
from quire.spec import ModelSpec
from quire.spec.config_json import load, text_section
from quire.spec.layer_specs import dtype_bytes
from quire.spec.model_files import DEMO_MODEL, cached_folder, first_line

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModels:
    """The table, and the date on which its sources were read."""

    read_on: str  # a date
    models: tuple[Published, ...]

    def find(self, name: str) -> Published | None:
        """Find a model by its name, in any case, with or without its organisation."""
        wanted = name.strip().lower()
        for model in self.models:
            if wanted in (model.name.lower(), _short(model.name)):
                return model
        return None

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
        read_on=said["read_on"],
        models=tuple(
            Published(
                name=name,
                config=entry["config"],
                source=sources.get(entry["source"], entry["source"]),
            )
            for name, entry in said["models"].items()
        ),
    )


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


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
    num_parameters: int
    num_active_parameters: int  # by which a token is multiplied, about

    @property
    def weights_are_estimated(self) -> bool:
        return self.weights_source.startswith("estimate")


def find_subject(name: str | None = None, *, dtype: str = "auto") -> Subject:
    """Find a model by a folder, a config.json, or a name of the table or the hub.

    Without a name it is the demo model.

    Raises: ModelNotLoadable if it is found nowhere; ConfigError; UnsupportedModel.
    """
    if name is None:
        folder = Path(str(files("quire") / "demo_model"))
        return _of_folder(DEMO_MODEL, folder, dtype)
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # the name is too long
        raise ModelNotLoadable(f"{name[:80]!r} is not a folder: {error}") from error
    if is_folder:
        return _of_folder(name, path, dtype)
    if is_file:
        config, source = load(path)
        return _of_config(name, config, source, dtype)
    if name.startswith((".", "/", "~")):
        raise ModelNotLoadable(f"there is no folder {path}")
    table = published_models()
    if (found := table.find(name)) is not None:
        return _of_table(found, table.read_on, dtype)
    if name.count("/") == 1:
        return _of_hub(name, dtype, table.nearest(name))
    near = table.nearest(name)
    hint = f"did you mean {near!r}? " if near else ""
    raise ModelNotLoadable(
        f"{name!r} is not a folder, a file or a name of the table; {hint}quire plan --list shows "
        "the table, and a name with an organisation (org/name) is looked up on the hub"
    )


def _of_folder(name: str, folder: Path, dtype: str) -> Subject:
    config, source = load(folder)
    tensors = stored_tensors(folder)
    if tensors is None:
        return _of_config(name, config, source, dtype)
    return _of_tensors(name, config, source, tensors, dtype, "the headers of its files")


def _of_tensors(
    name: str,
    config: Mapping[str, Any],
    source: str,
    tensors: Mapping[str, Stored],
    dtype: str,
    weights_source: str,
) -> Subject:
    own_spec = ModelSpec.from_config(config, source)
    spec, computing = _computed(own_spec, dtype)
    # Quantized codes keep their dtype; other weights get the dtype that --dtype asks for.
    own = footprint_of(
        tensors,
        shapes_of(config, spec, source),
        dtype_bytes(computing),
        keeps_dtype=_is_quantized(config),
    )
    return Subject(
        name=name,
        spec=spec,
        dtype=computing,
        own=own,
        source=source,
        weights_source=weights_source,
        num_parameters=sum(tensor.num_items for tensor in tensors.values()),
        num_active_parameters=num_active_parameters(config, spec, source),
    )


def _of_config(name: str, config: Mapping[str, Any], source: str, dtype: str) -> Subject:
    spec, computing = _computed(ModelSpec.from_config(config, source), dtype)
    return Subject(
        name=name,
        spec=spec,
        dtype=computing,
        own=estimated_footprint(config, spec, source, dtype_bytes(computing)),
        source=source,
        weights_source=f"estimate from its config.json, {_kept_as(config, computing)}",
        num_parameters=num_parameters(config, spec, source),
        num_active_parameters=num_active_parameters(config, spec, source),
    )


def _of_table(found: Published, read_on: str, dtype: str) -> Subject:
    source = f"the bundled table, read on {read_on} from {found.source}"
    subject = _of_config(found.name, found.config, f"config.json of {found.name}", dtype)
    return replace(subject, source=source)


def _of_hub(name: str, dtype: str, near: str | None) -> Subject:
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
        return _of_folder(name, folder, dtype)
    config, _ = load(file)
    source = f"config.json of {name}, from the hub"
    try:
        metadata = get_safetensors_metadata(name)
        tensors = {
            tensor: Stored(dtype=str(info.dtype), shape=tuple(info.shape))
            for part in metadata.files_metadata.values()
            for tensor, info in part.tensors.items()
        }
    except Exception:  # it has no such files, or the hub gives the config alone
        return _of_config(name, config, source, dtype)
    return _of_tensors(name, config, source, tensors, dtype, "the headers of its files on the hub")


def _computed(spec: ModelSpec, dtype: str) -> tuple[ModelSpec, str]:
    """The model in the dtype that was asked for, and that dtype."""
    return (spec, spec.dtype) if dtype == "auto" else (spec.computed_in(dtype), dtype)


def _kept_as(config: Mapping[str, Any], dtype: str) -> str:
    bits = weight_bits(config)
    return f"in {dtype}" if bits is None else f"{bits:g} bits a weight but in tables of tokens"


def _is_quantized(config: Mapping[str, Any]) -> bool:
    section, _ = text_section(config, "config.json")
    return any("quantization_config" in part for part in (config, section))
