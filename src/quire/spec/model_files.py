"""Find a model by its name: a folder with complete files, a GGUF file, or a repository of the hub.

No weight is read and no torch imported, so that a wrong name fails at once.
"""

import json
import logging
from importlib.resources import files
from pathlib import Path

from quire.errors import ModelNotLoadable
from quire.spec.config_json import load
from quire.spec.gguf_config import gguf_config
from quire.spec.gguf_file import GgufFile, is_gguf, read_gguf
from quire.spec.model import ModelSpec

log = logging.getLogger(__name__)

DEMO_MODEL = "demo"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def find_spec(name: str | Path | None = None) -> tuple[str, ModelSpec]:
    """Find a model, and check its files. Returns: its name, and its memory.

    Raises: ModelNotLoadable, UnsupportedModel, ConfigError.
    """
    folder = find_folder(name)
    if folder is None:
        return called(name), hub_spec(str(name))
    header = check_weights(folder)
    if header is not None:
        return called(name), ModelSpec.from_config(gguf_config(header), str(folder))
    return called(name), ModelSpec.from_file(folder)


def called(name: str | Path | None) -> str:
    """Return the model's name as it is shown."""
    return DEMO_MODEL if name is None else str(Path(name).expanduser())


def find_folder(name: str | Path | None) -> Path | None:
    """Return the local folder of a model, or its GGUF file; None for a repository of the hub.

    If the hub does not answer, it is the folder in the hub's cache. A GGUF file of the hub, as
    ``owner/name:Q8_0``, is brought here. Raises: ModelNotLoadable.
    """
    if name is None:
        return Path(str(files("quire") / "demo_model"))
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # the name is too long; no such user
        raise ModelNotLoadable(f"{str(name)[:80]!r} is not a folder: {error}") from error
    if is_folder:
        return only_gguf(path) or path
    if is_file:
        if is_gguf(path):
            return path
        raise ModelNotLoadable(f"{path} is a file: give the folder that holds config.json")
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")):
        raise ModelNotLoadable(f"there is no folder {path}")
    repo, file, quantization = _parts(name)
    if file or quantization:
        return _gguf_of_hub(repo, file, quantization)
    try:
        return cached_folder(name)
    except OSError as error:
        raise _not_given(name, error) from error


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that holds no other weights; None if it has none.

    Raises: ModelNotLoadable naming the files if there are several.
    """
    found = sorted(folder.glob("*.gguf"))
    if not found or (folder / _WEIGHTS).is_file() or (folder / _INDEX).is_file():
        return None
    return folder / _one_of([file.name for file in found], "", str(folder))


def _parts(name: str) -> tuple[str, str, str]:
    """Take apart "owner/name", "owner/name/file.gguf" and "owner/name:quantization"."""
    before, _, quantization = name.partition(":")
    owner, repo, file = (*before.split("/", 2), "", "")[:3]
    return f"{owner}/{repo}", file if is_gguf(Path(file)) else "", quantization if repo else ""


def _gguf_of_hub(repo: str, file: str, quantization: str) -> Path:
    """Bring a GGUF file of the hub, or find it in its cache. Raises: ModelNotLoadable."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    try:
        if not file:
            try:
                names = HfApi().list_repo_files(repo)
            except Exception:  # the hub does not answer, or not for this repository
                folder = Path(snapshot_download(repo, local_files_only=True))
                names = [found.relative_to(folder).as_posix() for found in folder.rglob("*.gguf")]
            file = _one_of(names, quantization, repo)
        return Path(hf_hub_download(repo, file))
    except ModelNotLoadable:
        raise
    except Exception as error:  # of many classes: no such model, no permission
        raise _not_given(repo, error) from error


def _one_of(names: list[str], quantization: str, where: str) -> str:
    """Choose the one GGUF file whose name ends in that, if anything. Raises: ModelNotLoadable."""
    every = [n for n in names if is_gguf(Path(n)) and not Path(n).name.startswith("mmproj")]
    endings = tuple(f"{mark}{quantization.lower()}" for mark in "-._")
    fitting = [n for n in every if f".{_whole(n).lower()}".endswith(endings)]
    found = fitting if quantization else every
    if len(found) != 1:
        raise ModelNotLoadable(
            f"{where} has {len(found)} GGUF files{f' in {quantization}' if quantization else ''}, "
            f"and one is wanted; its files: {', '.join(sorted(every)[:8]) or 'none'}"
        )
    if _whole(found[0]) != Path(found[0]).stem:
        raise ModelNotLoadable(f"{where}: {found[0]} is one part of several: merge them first")
    return found[0]


def _whole(name: str) -> str:
    """A file's name without its ending, and without -00001-of-00003."""
    stem = Path(name).stem
    before, _, total = stem.rpartition("-of-")
    first, _, part = before.rpartition("-")
    return first if total.isdigit() and part.isdigit() else stem


def cached_folder(name: str) -> Path | None:
    """Return a repository's folder in the hub's cache if the hub does not answer, else None.

    It asks the hub once. The hub's library would try for half a minute, and again for each file.
    Raises: OSError if neither the hub nor the cache has it.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):
        pass  # it answers, or the name is invalid: the download reports the error
    except Exception as error:
        try:
            found = Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
        except Exception:
            raise OSError(
                f"it cannot be reached ({first_line(error)}), and its cache here does not have the "
                "model: check the network, or give a folder"
            ) from error
        log.info("the hub cannot be reached (%s): %s is read", first_line(error), found)
        return found
    return None


def hub_spec(name: str) -> ModelSpec:
    """Read a config.json of the hub. Raises: ModelNotLoadable, UnsupportedModel, ConfigError."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(name, "config.json")
    except Exception as error:  # of many classes: no such model, no permission
        raise _not_given(name, error) from error
    config, _ = load(file)
    return ModelSpec.from_config(config, f"config.json of {name}")


def _not_given(name: str, error: Exception) -> ModelNotLoadable:
    return ModelNotLoadable(
        f"{name!r} is not a local folder, and the Hugging Face hub did not give it: "
        f"{first_line(error)}"
    )


def check_weights(folder: Path) -> GgufFile | None:
    """Check that a folder's files, or a GGUF file, are complete, before any is mapped.

    Returns: a GGUF file's header. It lists all tokens of a vocabulary, and is read once.
    Raises: ModelNotLoadable with the file and the reason.
    """
    from safetensors import SafetensorError, safe_open

    if is_gguf(folder):
        return read_gguf(folder)
    if not (folder / "config.json").is_file():
        raise ModelNotLoadable(f"{folder} has no config.json: it is not a model's folder")
    files = safetensors_files(folder)
    if not files and not weight_files(folder):
        raise ModelNotLoadable(
            f"{folder} has no weights: neither {_WEIGHTS} nor {_INDEX} nor pytorch_model.bin"
        )
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelNotLoadable(
                f"{file} is corrupt or truncated ({error}): download it again"
            ) from error
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights that are read: safetensors, or else torch's; a GGUF file.

    Raises: ModelNotLoadable as ``safetensors_files``.
    """
    if is_gguf(folder):
        return [folder]
    return safetensors_files(folder) or sorted(folder.glob("pytorch_model*.bin"))


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that Transformers will read, of which a folder may have none.

    Raises: ModelNotLoadable if a file is missing, or the index cannot be read.
    """
    index = folder / _INDEX
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not index.is_file():
        return []
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = [folder / shard for shard in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotLoadable(
            f"{index} does not map tensors to files ({error!r}): download it again"
        ) from error
    if missing := [file for file in shards if not file.is_file()]:
        raise ModelNotLoadable(f"{missing[0]} is missing, and {_INDEX} lists it: download it")
    return shards


def first_line(error: Exception) -> str:
    """Return an error's first line, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" :")
