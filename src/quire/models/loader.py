"""From a name to a model that is ready to run, or to a sentence that says why not.

A folder is checked before Transformers maps it: config.json is readable, every weight file is
whole. A name that is no folder is looked up on the Hugging Face hub. No remote code is ever run.
"""

import json
import logging
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quire.errors import ConfigError, ModelNotLoadable, UnsupportedModel
from quire.spec import ModelSpec

log = logging.getLogger(__name__)

DEMO_MODEL = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer and what it must remember."""

    name: str
    model: PreTrainedModel
    tokenizer: Any  # None for a model that came without one
    spec: ModelSpec


def load(name: str | Path | None = None, *, dtype: str = "auto") -> LoadedModel:
    """Load a folder or a hub name; the demo model that Quire ships when there is none.

    ``dtype`` is ``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``.
    Raises: ModelNotLoadable, UnsupportedModel, ConfigError.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {dtype!r} is unknown; known: auto, float32, bfloat16, float16")
    folder = _folder(name)
    source = str(folder or name)
    if folder is not None:
        check_weights(folder)
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:
        raise _not_loadable(source, folder, error) from error
    spec = ModelSpec.from_config(config.to_dict(), f"config.json of {source}")
    weights_dtype = spec.dtype if dtype == "auto" else dtype
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=getattr(torch, weights_dtype)
        ).eval()
    except Exception as error:
        raise _not_loadable(source, folder, error) from error
    return LoadedModel(
        name=DEMO_MODEL if name is None else source,
        model=model,
        tokenizer=_tokenizer(source),
        spec=spec.with_kv_dtype(weights_dtype),
    )


def adopt(model: PreTrainedModel, tokenizer: Any = None) -> LoadedModel:
    """Take a model that is in memory already."""
    name = type(model).__name__
    spec = ModelSpec.from_config(model.config.to_dict(), f"{name}.config")
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(name=name, model=model, tokenizer=tokenizer, spec=spec.with_kv_dtype(dtype))


def check_weights(folder: Path) -> None:
    """Look for what is missing or cut short before anything is mapped.

    Raises: ModelNotLoadable naming the file and the reason.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotLoadable(f"{folder} has no config.json: it is not a model's folder")
    try:
        json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ModelNotLoadable(f"{folder / 'config.json'} is not JSON: {error}") from error
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not list(folder.glob("*.bin")):
        raise ModelNotLoadable(f"{folder} has no weights: neither *.safetensors nor *.bin")
    for file in weights:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelNotLoadable(
                f"{file} is corrupt or cut short ({error}): fetch it again"
            ) from error


def _folder(name: str | Path | None) -> Path | None:
    """The local folder that a name means; None if it is to be looked up on the hub."""
    if name is None:
        return Path(str(files("quire") / "demo_model"))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelNotLoadable(f"{path} is a file: give the folder that holds config.json")
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")):
        raise ModelNotLoadable(f"there is no folder {path}")
    return None


def _tokenizer(source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # Transformers raises many kinds here
        log.warning("%s comes without a usable tokenizer (%s): give token ids", source, error)
        return None


def _not_loadable(source: str, folder: Path | None, error: Exception) -> Exception:
    if isinstance(error, (ConfigError, UnsupportedModel)):
        return error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if folder is None:
        return ModelNotLoadable(
            f"{source!r} is no local folder, and the Hugging Face hub did not give it: {reason}"
        )
    return ModelNotLoadable(f"{folder} cannot be loaded: {reason}")
