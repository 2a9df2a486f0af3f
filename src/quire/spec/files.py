"""What a model's name means: a folder with whole files, or a repository of the Hugging Face hub.

No weight is read and no torch imported, so that a name that means nothing is said at once.
"""

import json
from importlib.resources import files
from pathlib import Path

from quire.errors import ModelNotLoadable
from quire.spec.config_json import load
from quire.spec.model import ModelSpec

DEMO_MODEL = "demo"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def find_spec(name: str | Path | None = None) -> tuple[str, ModelSpec]:
    """What errors call a model, and what it must remember; a folder's files are looked at.

    Raises: ModelNotLoadable, UnsupportedModel, ConfigError.
    """
    folder = find_folder(name)
    if folder is None:
        return str(name), hub_spec(str(name))
    check_weights(folder)
    return DEMO_MODEL if name is None else str(folder), ModelSpec.from_file(folder)


def find_folder(name: str | Path | None) -> Path | None:
    """The local folder that a name means; None if it is to be looked up on the hub."""
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
    return None


def hub_spec(name: str) -> ModelSpec:
    """From the config.json on the hub. Raises: ModelNotLoadable, UnsupportedModel, ConfigError."""
    try:
        file = hub_config(name)
    except Exception as error:  # many kinds: no network, no such model, no right to it
        raise ModelNotLoadable(
            f"{name!r} is no local folder, and the Hugging Face hub did not give it: "
            f"{first_line(error)}"
        ) from error
    config, _ = load(file)
    return ModelSpec.from_config(config, f"config.json of {name}")


def hub_config(name: str) -> Path:
    """The config.json of a repository: as it is on the hub, or as the hub's cache here has it.

    A hub that does not answer is asked once: its own library would ask for half a minute.
    Raises: what that library raises, of many kinds.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):
        pass  # it does answer, or it is no name: what is wrong is said below
    except Exception as error:
        try:
            return Path(hf_hub_download(name, "config.json", local_files_only=True))
        except Exception:
            raise OSError(
                f"it cannot be reached ({first_line(error)}), and nothing of that model is in its "
                "cache here: check the network, or give a folder"
            ) from error
    return Path(hf_hub_download(name, "config.json"))


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
