"""What a model computes by, as its content says it: weights, configuration and code.

Names and revisions are not asked: a folder's files may be others tomorrow. A model that only the
engine has is named by its files' hashes. Any other model may have been changed since it was read,
or never lay in files: it is named by all that its modules have in memory (``module_digest``).
What cannot be named is refused, for entries under a wrong name would be taken for another model's.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.utils import logging as hf_logging

from quire.models.file_hashes import (
    LONG_BYTES,
    CannotName,
    KeptHashes,
    OnHashed,
    WeightFile,
    file_hashes,
)
from quire.models.loader import LoadedModel
from quire.models.module_digest import ModuleDigest, digest

# Fields of a config, at any depth, that say where it comes from, or that have a name of their own.
NOT_NAMED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype"})
# … and of an adapter's.
_NOT_OF_ADAPTER = frozenset({"base_model_name_or_path", "inference_mode", "revision"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContent:
    """What tells a model's arithmetic from all others."""

    weights: str  # "files" or "parameters", and a SHA-256
    config: Mapping[str, Any]  # of Transformers, without what ``NOT_NAMED`` lists
    dtype: str  # of the weights, as a spec spells it
    code: Mapping[str, str]  # releases of libraries, and hashes of other source files, by name


def model_content(loaded: LoadedModel, kept: KeptHashes) -> ModelContent:
    """Name a loaded model by its content.

    Files are read at 1.5 GB/s a thread unless ``kept`` knows them, parameters each time.

    Raises: CannotName with the reason.
    """
    modules = ModuleDigest()
    if loaded.files and (loaded.is_private or loaded.ranks is not None):
        weights = _of_files(loaded.files, kept)
        modules.meet(loaded.model)
    else:
        weights = f"parameters {modules.of(loaded.model)}"
    return ModelContent(
        weights=weights,
        config=named_config(loaded.model.config),
        dtype=loaded.dtype,
        code=_releases(_is_quantized(loaded.model.config)) | modules.code(),
    )


def content_of_files(
    files: Sequence[WeightFile],
    config: PreTrainedConfig,
    dtype: str,
    kept: KeptHashes,
    *,
    quantizes: bool = False,
) -> ModelContent:
    """Name the model that ``load`` would make of files, whose weights have this dtype.

    ``quantizes``: while it loads them. No weight is kept in memory. Raises: CannotName.
    """
    return ModelContent(
        weights=_of_files(files, kept),
        config=named_config(config),
        dtype=dtype,
        code=_releases(quantizes or _is_quantized(config)),
    )


def adapter_content(folder: Path, kept: KeptHashes) -> str:
    """Return what ``PrefixKeys.lora`` takes of an adapter that PEFT saved: 64 hex digits.

    Raises: CannotName for a folder without an adapter.
    """
    try:
        options = json.loads((folder / "adapter_config.json").read_bytes())
        files = [WeightFile.at(path) for path in sorted(folder.glob("adapter_model.*"))]
    except (OSError, ValueError) as error:
        raise CannotName(f"{folder} has no adapter that can be read: {error}") from None
    if not files or not isinstance(options, dict):
        raise CannotName(f"{folder} has no adapter: adapter_config.json and adapter_model.*")
    named = {name: each for name, each in options.items() if name not in _NOT_OF_ADAPTER}
    return digest({"options": named, "files": file_hashes(files, kept)})


def named_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that may shape what a model computes: all but a few.

    The whole, not the text's part alone: an image's tokens have entries too.
    """
    named = _without_origin(config.to_dict())
    assert isinstance(named, dict)
    return named


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_origin(each) for name, each in value.items() if name not in NOT_NAMED
        }
    if isinstance(value, list | tuple):
        return [_without_origin(each) for each in value]
    return value


def _is_quantized(config: PreTrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _releases(is_quantized: bool) -> dict[str, str]:
    """Return the releases of the libraries that compute, without the build: "2.13.0"."""
    found = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
    }
    if is_quantized:  # by torchao, as a rule
        with suppress(PackageNotFoundError):
            found["torchao"] = version("torchao").partition("+")[0]
    return found


def _of_files(files: Sequence[WeightFile], kept: KeptHashes) -> str:
    with _bar(sum(file.stamp.size for file in files)) as on_hashed:
        hashes = file_hashes(files, kept, num_threads=torch.get_num_threads(), on_hashed=on_hashed)
    return f"files {digest(hashes)}"


@contextmanager
def _bar(total_bytes: int) -> Iterator[OnHashed]:
    """Draw a bar where Transformers draws some while it loads, if it takes a while."""
    lock, bar = threading.Lock(), None

    def on_hashed(num_bytes: int) -> None:
        nonlocal bar
        with lock:
            if bar is None and total_bytes >= LONG_BYTES:
                bar = hf_logging.tqdm(
                    total=total_bytes, unit="B", unit_scale=True, desc="Hashing weights"
                )
            if bar is not None:
                bar.update(num_bytes)

    try:
        yield on_hashed
    finally:
        if bar is not None:
            bar.close()
