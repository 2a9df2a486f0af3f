"""From a name to a model that is ready to run, or to a sentence that says why not.

A folder is checked before Transformers maps it: config.json is readable, every weight file is
whole. A name that is no folder is looked up on the Hugging Face hub. No remote code is ever run.
"""

import logging
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.utils import logging as hf_logging

from quire.devices import choose_device
from quire.errors import (
    ConfigError,
    MemoryUnavailable,
    ModelNotLoadable,
    QuireError,
    UnsupportedModel,
)
from quire.memory.host.huge_pages import drop_file_pages, huge_pieces
from quire.memory.machine.probe import available_bytes, mapped_from_files
from quire.models.file_hashes import WeightFile
from quire.models.gguf_checkpoint import load_gguf
from quire.models.quantized import quantize_layers, round_inputs
from quire.models.stored_checkpoint import stored_config
from quire.models.weight_placement import device_map, device_of, move_to, weights_bytes
from quire.spec import ModelSpec
from quire.spec.gguf_config import gguf_config
from quire.spec.gguf_file import GgufFile, is_gguf, read_gguf
from quire.spec.model_files import (
    called,
    check_weights,
    find_folder,
    first_line,
    hub_spec,
    weight_files,
)
from quire.spec.weight_forms import weight_form
from quire.units import format_bytes

# -- weights ---------------------------------------------------------------------------------------

# Weights in huge pages.
#
# A checkpoint's weights are mapped from its files, in pages of 4 KiB. Every step reads all of
# them, and finding out where so many small pages lie takes an eighth of the time that it takes to
# read them. So they are copied into huge pages, and the file's are let go on the way.


log = logging.getLogger(__name__)

_SPARE = 1.25  # so many times the weights must be free: something is to be left for a cache


def hold_in_memory(model: PreTrainedModel) -> int:
    """Copy weights that are mapped from files into memory of this process; return the bytes.

    Nothing is copied where the machine has no huge pages, or too little memory.

    Raises: MemoryUnavailable.
    """
    mapped = _mapped(model)
    total = sum(tensor.nbytes for tensor in mapped.values())
    if not total:
        return 0
    try:
        if (left := available_bytes()) < _SPARE * total:
            raise MemoryUnavailable(f"{format_bytes(left)} is free")
        pieces = huge_pieces([tensor.nbytes for tensor in mapped.values()])
    except MemoryUnavailable as reason:
        log.info("%s of weights stay in their files: %s", format_bytes(total), reason)
        return 0
    held: dict[int, Tensor] = {}
    for (place, tensor), piece in zip(mapped.items(), pieces, strict=True):
        held[place] = piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        drop_file_pages(place, tensor.nbytes)
    for parameter in model.parameters():
        if parameter.data_ptr() in held:
            parameter.data = held[parameter.data_ptr()]
    log.info("%s of weights copied into huge pages", format_bytes(total))
    return total


def _mapped(model: PreTrainedModel) -> dict[int, Tensor]:
    """Weights in mappings of files, by their addresses; nothing where two share but a part."""
    found: dict[int, Tensor] = {}
    for parameter in model.parameters():
        tensor = parameter.data
        if type(tensor) is not Tensor or not tensor.is_cpu or not tensor.is_contiguous():
            return {}
        other = found.setdefault(tensor.data_ptr(), tensor)
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            return {}
    spans = sorted((place, place + tensor.nbytes) for place, tensor in found.items())
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        return {}
    on_files = mapped_from_files(found)
    return {place: tensor for place, tensor in found.items() if place in on_files}


# -- loader ----------------------------------------------------------------------------------------


ON_GPU = "int8"  # by torchao
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer and what it must remember."""

    name: str
    model: PreTrainedModel
    tokenizer: Any  # None for a model that came without one
    feature_extractor: Any = None  # of a model that hears, if it came with one
    processor: Any = None  # of a model that sees, if it came with one
    why_no_processor: str = ""  # if it came with one that cannot be loaded
    spec: ModelSpec
    ranks: Any = None  # what speaks with the processes that have the other parts of it, if any
    is_private: bool = False  # nothing but the engine has it, so that it stays what it is
    files: tuple[WeightFile, ...] = ()  # that all its weights were read from; () where unknown

    @property
    def vocab_size(self) -> int:
        """Rows of the table of tokens, of which a tokenizer may use fewer."""
        size: int = self.model.get_input_embeddings().weight.shape[0]
        return size

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of(self.model)

    @property
    def dtype(self) -> str:
        """Of the weights, as a spec spells it."""
        return _dtype_name(self.model)


def load(  # noqa: PLR0913 - an engine's options
    name: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    quantization: str | None = None,
    dynamic_quantization: bool = True,
    tokenizer: str | None = None,
    copy_weights: bool = True,
    show_progress: bool = False,
    num_ranks: int = 1,
    kernel_dir: Path | None = None,
) -> LoadedModel:
    """Load a folder, a hub name or a GGUF file; without a name the demo model that Quire ships.

    ``device`` is as the engine's option: ``auto``, ``cpu``, ``cuda``, ``cuda:1``. What a GPU has no
    room for stays in host memory (``placed``).
    ``dtype`` is ``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``.
    ``quantization`` keeps the weights of linear layers in 8 or 4 bits: a name of ``WEIGHT_FORMS``
    on a CPU, "int8" on a GPU (torchao). ``dynamic_quantization`` rounds what such weights are
    multiplied with to 8 bits on a CPU that multiplies bytes, unless it is float32.
    ``tokenizer`` names the folder or the repository of one that is not the model's own.
    ``copy_weights`` into huge pages, where there are some; otherwise they stay mapped from their
    files.
    ``show_progress`` lets Transformers draw its bars on standard error.
    ``num_ranks`` that torch.distributed knows of load a part each, as Transformers' plan says; the
    spec is that of the whole.
    ``kernel_dir`` keeps the machine code that quantizes; None: ~/.cache/quire.
    Raises: ModelNotLoadable, UnsupportedModel, ConfigError.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {dtype!r} is unknown; known: auto, float32, bfloat16, float16")
    folder = find_folder(name)
    source = str(folder or name)
    files: tuple[WeightFile, ...] = ()
    header = None
    if folder is not None:
        files = looked_at(source, folder)  # before they are read
        header = check_weights(folder)
    place = choose_device(device) if num_ranks == 1 else None  # ranks have one each
    set_bars = hf_logging.enable_progress_bar if show_progress else hf_logging.disable_progress_bar
    set_bars()
    form = None if quantization is None else weight_form(quantization)
    config, spec = read_config(source, folder, header)
    if header is not None:
        read = partial(_from_gguf, header, config, spec)
    else:
        read = partial(_from_checkpoint, source, config, spec, num_ranks)
    try:
        model, found = read(place, dtype, quantization)
    except Exception as error:
        raise _not_loadable(source, folder, error) from error
    _refuse_random_weights(source, found)
    if place is not None and place.type != "cpu":
        model = move_to(model, place)
    elif place is not None:
        if form is not None:
            quantize_layers(model, form, called(name), kernel_dir)
        if dynamic_quantization:
            round_inputs(model)
        if copy_weights:
            hold_in_memory(model)
    if folder is None:
        files = looked_at(source, folder, getattr(model.config, "_commit_hash", None))
    processor, why_no_processor = processor_of(source, model)
    return LoadedModel(
        name=called(name),
        model=model.eval(),
        tokenizer=_tokenizer(tokenizer or source),
        feature_extractor=_feature_extractor(source, model),
        processor=processor,
        why_no_processor=why_no_processor,
        spec=spec.computed_in(_dtype_name(model)),
        files=() if getattr(model, "_hf_peft_config_loaded", False) else files,
    )


def _from_checkpoint(
    source: str,
    config: Any,
    spec: ModelSpec,
    num_ranks: int,
    place: torch.device | None,
    dtype: str,
    quantization: str | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Have Transformers load safetensors, or torch's own files."""
    options = {} if quantization is None or place is None else _quantized(quantization, place)
    _look_at_stored(config, source, quantization, place)
    if place is None:
        options |= _divided(num_ranks)
    elif place.type != "cpu":
        options |= _placed(source, config, spec, place, dtype)
    model, found = auto_class(config).from_pretrained(
        source,
        config=config,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
        **_attention_of(config),
    )
    return model, found


def _from_gguf(
    file: GgufFile,
    config: Any,
    spec: ModelSpec,
    place: torch.device | None,
    dtype: str,
    quantization: str | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a GGUF file; on a GPU all of it becomes numbers."""
    _look_at_gguf(file, quantization, place)
    wanted = getattr(torch, spec.dtype if dtype == "auto" else dtype)
    keeps_codes = place is not None and place.type == "cpu"
    return load_gguf(file, outline_of(config, wanted, **_attention_of(config)), keeps_codes)


def _attention_of(config: Any) -> dict[str, Any]:
    """Transformers 5.17 takes torch's attention where logits are capped, which caps none."""
    caps = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if caps else {}


def looked_at(
    source: str, folder: Path | None, revision: str | None = None
) -> tuple[WeightFile, ...]:
    """Look at a model's weight files: in a folder, or of the hub's ``source`` in its cache.

    Returns: none where the cache has not all of them.
    """
    if folder is None:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
        if not isinstance(found, str):
            return ()
        folder = Path(found).parent
    try:
        return tuple(map(WeightFile.at, weight_files(folder)))
    except (OSError, ModelNotLoadable) as error:
        log.info("the weight files of %s are not found: %s", source, first_line(error))
        return ()


def _placed(
    source: str, config: Any, spec: ModelSpec, place: torch.device, dtype: str
) -> dict[str, Any]:
    """Where weights go, which Transformers is told if they do not all fit. Raises: ConfigError."""
    outline = outline_of(config, getattr(torch, spec.dtype if dtype == "auto" else dtype))
    return device_map(source, weights_bytes(outline), place)


def outline_of(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make the model of a config on the meta device, where a tensor has a shape and no memory."""
    with torch.device("meta"):
        made = auto_class(config)
        model: PreTrainedModel = made.from_config(
            config, dtype=dtype, trust_remote_code=False, **options
        )
    return model


def features_shape(loaded: LoadedModel) -> tuple[int, int] | None:
    """Return what a model hears, [mels, frames], two a token; None for one that reads ids."""
    model = loaded.model
    if model.main_input_name != "input_features":
        return None
    mels: int = model.config.num_mel_bins
    return mels, 2 * loaded.spec.source_tokens


def auto_class(config: Any) -> Any:
    """Choose Transformers' class for a config: one that reads a source, or text, or images too.

    Where a config has a class for text alone besides, it is the one that the checkpoint was saved
    as, and that for text if it does not say.

    Raises: UnsupportedModel for a decoder that hears and reads no images.
    """
    if not getattr(config, "is_encoder_decoder", False):
        sees = type(config) in AutoModelForImageTextToText._model_mapping
        writes = type(config) in AutoModelForCausalLM._model_mapping
        hears = any(
            type(config) in auto._model_mapping
            for auto in (AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq)
        )
        if hears and not sees and not writes:
            raise UnsupportedModel(
                f"{config.model_type}: this model hears, and Transformers has no way to give a "
                f"decoder what an encoder has made of a recording: only encoder-decoders "
                f"(Whisper) hear"
            )
        if sees and writes:
            seeing = AutoModelForImageTextToText._model_mapping[type(config)].__name__
            writes = seeing not in (config.architectures or ())
        return AutoModelForImageTextToText if sees and not writes else AutoModelForCausalLM
    hears = type(config) in AutoModelForSpeechSeq2Seq._model_mapping
    return AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM


def _quantized(quantization: str | None, place: torch.device) -> dict[str, Any]:
    """What Transformers is told of it: nothing on a CPU. Raises: ConfigError."""
    if place.type == "cpu":
        return {}
    if quantization != ON_GPU:
        raise ConfigError(
            f"quantization={quantization} is for a CPU, and the model is to run on {place}: choose "
            f"quantization={ON_GPU}, or device=cpu"
        )
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise ConfigError(
            f"quantization={quantization} on {place} needs torchao ({error}): "
            f"pip install 'quire-kv[int8]'"
        ) from error
    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}


def _look_at_stored(
    config: Any, source: str, quantization: str | None, place: torch.device | None
) -> None:
    """Have a checkpoint that is in few bits already repacked, on a CPU. Raises: ConfigError."""
    if getattr(config, "quantization_config", None) is None:
        return
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization}: the weights of {source} are quantized already, as its "
            f"config.json says: leave the option out"
        )
    if place is not None and place.type == "cpu" and (stored := stored_config(config)) is not None:
        config.quantization_config = stored


def _look_at_gguf(file: GgufFile, quantization: str | None, place: torch.device | None) -> None:
    """Raises: ConfigError for what is not done with a GGUF file."""
    if place is None:
        raise ConfigError(
            f"{file.path}: a GGUF file is not divided among ranks: leave out "
            f"tensor_parallel_size, or take the model's own repository"
        )
    if quantization is None:
        return
    if place.type != "cpu":
        raise ConfigError(
            f"quantization={quantization} of a GGUF file is for a CPU: leave it out, or device=cpu"
        )
    if few := sorted(file.types.keys() - {"F32", "F16", "BF16"}):
        raise ConfigError(
            f"quantization={quantization}: the weights of {file.path} are quantized already, in "
            f"{', '.join(few)}: leave the option out"
        )


def _divided(num_ranks: int) -> dict[str, Any]:
    """What Transformers is told of ranks. Raises: ConfigError for a release that knows none."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs a newer release of Transformers ({error})"
        ) from error
    return {"distributed_config": DistributedConfig(tp_size=num_ranks)}


def adopt(model: Any, tokenizer: Any = None) -> LoadedModel:
    """Take a model that is in memory already. ``tokenizer`` may be the processor that has it.

    Raises: ConfigError, UnsupportedModel.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a folder, a hub name or a Transformers model, not {name}{_inside(model)}"
        )
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name} is on {device}: move it to the CPU or to a GPU (CUDA)")
    if model.training:
        raise ConfigError(f"{name} is in training mode, with dropout: call model.eval()")
    spec = ModelSpec.from_config(model.config.to_dict(), f"{name}.config")
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer if processor is None else processor.tokenizer,
        processor=processor,
        spec=spec.computed_in(_dtype_name(model)),
    )


def _inside(model: Any) -> str:
    """What to pass in place of PEFT's wrapper around a model; nothing if it is none."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, dict) or not hasattr(model, "get_base_model"):
        return ""
    own = type(model.get_base_model()).__name__
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        return f": what it has learnt are prompts, which lie outside of its {own}, and are not kept"
    return (
        f": pass its {own}, whose layers have the adapters in them, model.get_base_model() (which "
        f"is model.base_model.model), or what model.merge_and_unload() gives"
    )


def read_config(
    source: str, folder: Path | None, header: GgufFile | None = None
) -> tuple[Any, ModelSpec]:
    """Read config.json as Transformers does and as we do, which is that of ``quire plan``.

    ``header`` is that of a GGUF file, if it has been read already.
    """
    if folder is not None and is_gguf(folder):
        said = gguf_config(header or read_gguf(folder))
        spec = ModelSpec.from_config(said, str(folder))
        read = partial(AutoConfig.for_model, **said)
    else:
        spec = hub_spec(source) if folder is None else ModelSpec.from_file(folder)
        read = partial(AutoConfig.from_pretrained, source, trust_remote_code=False)
    try:
        return read(), spec
    except Exception as error:
        raise _not_loadable(source, folder, error) from error


def _refuse_random_weights(source: str, found: Any) -> None:
    """Transformers fills what a checkpoint lacks with random numbers, and only warns.

    Raises: ModelNotLoadable naming the first of the tensors.
    """
    for name, given, wanted in sorted(found["mismatched_keys"]):
        raise ModelNotLoadable(
            f"{source}: the weights do not match config.json: {name} is {list(given)}, and "
            f"config.json asks for {list(wanted)} ({len(found['mismatched_keys'])} tensors differ)"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelNotLoadable(
            f"{source}: the weights lack {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _tokenizer(source: str) -> Any:
    """Of a folder or a hub name; of a GGUF file, unless one lies beside it, its own."""
    path, options, advice = Path(source), {}, "give token ids"
    if is_gguf(path) and path.is_file():
        advice = f"name the model's own by tokenizer=, or {advice}"
        source = str(path.parent)
        if not any((path.parent / name).is_file() for name in _TOKENIZER_FILES):
            options = {"gguf_file": path.name}
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # Transformers raises many kinds here
        reason = first_line(error)
        log.warning("%s comes without a usable tokenizer (%s): %s", path, reason, advice)
        return None


def _feature_extractor(source: str, model: PreTrainedModel) -> Any:
    if model.main_input_name != "input_features":
        return None
    try:
        return AutoFeatureExtractor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # as above
        reason = first_line(error)
        log.warning("%s comes without a feature extractor (%s): give features", source, reason)
        return None


def processor_of(source: str, model: PreTrainedModel) -> tuple[Any, str]:
    """Return the processor of a model that sees, or None and the reason why there is none."""
    if not hasattr(model.base_model, "get_image_features"):
        return None, ""
    try:
        from transformers import AutoProcessor  # with what reads images, films and sounds

        return AutoProcessor.from_pretrained(source, trust_remote_code=False), ""
    except Exception as error:  # as above; ImportError where Pillow or torchvision is wanted
        reason = first_line(error)
        if "torchvision" in str(error).lower():
            reason = (
                f"{reason}: install the torchvision that belongs to torch {torch.__version__}"
                f"{_torchvision()}, from where torch came"
            )
        log.warning("%s comes without a usable processor (%s): no images", source, reason)
        return None, f"its processor cannot be loaded: {reason}"


def _torchvision() -> str:
    """Return the version that is made for this torch: 0.16 for 2.1, and so on."""
    major, minor = torch.__version__.split(".")[:2]
    return f" (0.{int(minor) + 15})" if major == "2" and minor.isdecimal() else ""


def _not_loadable(source: str, folder: Path | None, error: Exception) -> Exception:
    if isinstance(error, QuireError):
        return error
    reason = first_line(error)
    if folder is None:
        return ModelNotLoadable(
            f"{source!r} is no local folder, and the Hugging Face hub did not give it: {reason}"
        )
    return ModelNotLoadable(f"{folder} cannot be loaded: {reason}")
