"""What a model's name means: a folder with whole files, or a repository of the Hugging Face hub.

No weight is read and no torch imported, so that a name that means nothing is said at once.
"""

import json
import logging
from importlib.resources import files
from pathlib import Path

from quire.errors import ModelNotLoadable
from quire.spec.config_json import load
from quire.spec.model import ModelSpec

log = logging.getLogger(__name__)

DEMO_MODEL = "demo"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def find_spec(name: str | Path | None = None) -> tuple[str, ModelSpec]:
    """What a model is called, and what it must remember; a folder's files are looked at.

    Raises: ModelNotLoadable, UnsupportedModel, ConfigError.
    """
    folder = find_folder(name)
    if folder is None:
        return called(name), hub_spec(str(name))
    check_weights(folder)
    return called(name), ModelSpec.from_file(folder)


def called(name: str | Path | None) -> str:
    return DEMO_MODEL if name is None else str(Path(name).expanduser())


def find_folder(name: str | Path | None) -> Path | None:
    """The local folder that a name means; None for a repository of the hub.

    Of a hub that does not answer it is the folder in its cache. Raises: ModelNotLoadable.
    """
    if name is None:
        return Path(str(files("quire") / "demo_model"))
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long a name; no such user
        raise ModelNotLoadable(f"{str(name)[:80]!r} is no folder: {error}") from error
    if is_folder:
        return path
    if is_file:
        raise ModelNotLoadable(f"{path} is a file: give the folder that holds config.json")
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")):
        raise ModelNotLoadable(f"there is no folder {path}")
    try:
        return cached_folder(name)
    except OSError as error:
        raise _not_given(name, error) from error


def cached_folder(name: str) -> Path | None:
    """Where the hub's cache has a repository, if the hub does not answer; None if it does.

    It is asked once. Its own library would ask for half a minute, and that for each file.
    Raises: OSError where neither has it.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):
        pass  # it does answer, or this is no name: what is wrong is said when it is fetched
    except Exception as error:
        try:
            found = Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
        except Exception:
            raise OSError(
                f"it cannot be reached ({first_line(error)}), and nothing of that model is in its "
                "cache here: check the network, or give a folder"
            ) from error
        log.info("the hub cannot be reached (%s): %s is read", first_line(error), found)
        return found
    return None


def hub_spec(name: str) -> ModelSpec:
    """From the config.json on the hub. Raises: ModelNotLoadable, UnsupportedModel, ConfigError."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(name, "config.json")
    except Exception as error:  # many kinds: no such model, no right to it
        raise _not_given(name, error) from error
    config, _ = load(file)
    return ModelSpec.from_config(config, f"config.json of {name}")


def _not_given(name: str, error: Exception) -> ModelNotLoadable:
    return ModelNotLoadable(
        f"{name!r} is no local folder, and the Hugging Face hub did not give it: "
        f"{first_line(error)}"
    )


def check_weights(folder: Path) -> None:
    """Look for what is missing or cut short before anything is mapped.

    Raises: ModelNotLoadable naming the file and the reason.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / "config.json").is_file():
        raise ModelNotLoadable(f"{folder} has no config.json: it is not a model's folder")
    for file in _weight_files(folder):
        if not file.is_file():
            raise ModelNotLoadable(f"{file} is missing, and {_INDEX} lists it: fetch it")
        try:
            with safe_open(file, framework="np") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelNotLoadable(
                f"{file} is corrupt or cut short ({error}): fetch it again"
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that Transformers will read; none where it reads *.bin."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        if not list(folder.glob("pytorch_model*.bin")):
            raise ModelNotLoadable(
                f"{folder} has no weights: neither {_WEIGHTS} nor {_INDEX} nor pytorch_model.bin"
            )
        return []
    try:
        weight_map = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return [folder / shard for shard in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotLoadable(
            f"{folder / _INDEX} does not map tensors to files ({error!r}): fetch it again"
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, shortened to a line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" :")
