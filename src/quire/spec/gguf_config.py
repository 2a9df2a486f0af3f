"""What a GGUF file's header says of a model, as a config.json would say it.

``GGUF_FAMILIES`` has the architectures that are read, by ggml's names, each with what its tensors
have been changed in when they were written. Source: llama.cpp's conversion scripts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire.errors import ModelNotLoadable, UnsupportedModel
from quire.spec.gguf_file import GgufFile

_DTYPES: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16"})
_ENDS = ("eos", "eot", "eom")  # each ends an answer


class _Fields:
    """Fields of an architecture. Raises: ModelNotLoadable for one that is missing or wrong."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def __contains__(self, name: str) -> bool:
        return f"{self._architecture}.{name}" in self._file.fields

    def integer(self, name: str, least: int = 1) -> int:
        found = self._found(name)
        if type(found) is not int or found < least:
            raise self.wrong(name, f"is no whole number from {least} on")
        return found

    def number(self, name: str) -> float:
        found = self._found(name)
        if type(found) not in (int, float) or not 0 < found < float("inf"):
            raise self.wrong(name, "is no positive number")
        return float(found)

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if name in self else None

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def text(self, name: str) -> str:
        return str(self._found(name)) if name in self else ""

    def wrong(self, name: str, why: str) -> ModelNotLoadable:
        whole = f"{self._architecture}.{name}"
        return ModelNotLoadable(
            f"{self._file.path}: {whole}={self._file.fields.get(whole)!r} {why}"
        )

    def _found(self, name: str) -> Any:
        whole = f"{self._architecture}.{name}"
        if whole not in self._file.fields:
            raise ModelNotLoadable(f"{self._file.path} does not say {whole}")
        return self._file.fields[whole]


_Own = Callable[[_Fields, dict[str, Any]], dict[str, Any]]


def _nothing(_: _Fields, __: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """An architecture of ggml's, as Transformers has it."""

    model_type: str
    own: _Own = _nothing  # further fields, of the header's and of those that all families have
    pairs_rows: bool = False  # rows of queries and keys lie in pairs: (0, half), (1, half + 1), …
    norm_offset: float = 0  # what was added to the weights of norms
    may_differ: str = ""  # a field that is no head's size in all files


def _gemma2(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **_gemma_windows(fields, config, num_layers_of_27b=46),
        **{name: fields.optional_number(name) for name in caps},
    }


def _gemma3(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    every = fields.optional_integer("attention.sliding_window_pattern") or 6
    kinds = ("sliding_attention", "full_attention")
    return {
        **_gemma_windows(fields, config, num_layers_of_27b=62),
        "layer_types": [kinds[(n + 1) % every == 0] for n in range(config["num_hidden_layers"])],
        cap: fields.optional_number(cap),
        # Layers with windows have frequencies of their own, and no longer contexts.
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }


def _gemma_windows(
    fields: _Fields, config: dict[str, Any], *, num_layers_of_27b: int
) -> dict[str, Any]:
    """The header doesn't say by what queries are divided: all but the largest by a head's size."""
    by = config["head_dim"]
    if config["num_hidden_layers"] == num_layers_of_27b:
        by = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": fields.integer("attention.sliding_window"),
        "query_pre_attn_scalar": by,
    }


def _phi3(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    part = 1.0
    if (rotated := "rope.dimension_count") in fields:
        part = fields.integer(rotated) / config["head_dim"]
    return {
        "sliding_window": fields.integer("attention.sliding_window", least=0) or None,  # 0: none
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": part},
    }


GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = MappingProxyType(
    {
        "llama": GgufFamily(model_type="llama", pairs_rows=True),  # Mistral's files say so, too
        "qwen2": GgufFamily(model_type="qwen2"),
        "qwen3": GgufFamily(model_type="qwen3"),
        "gemma": GgufFamily(model_type="gemma", norm_offset=1),
        "gemma2": GgufFamily(model_type="gemma2", norm_offset=1, own=_gemma2),
        "gemma3": GgufFamily(model_type="gemma3_text", norm_offset=1, own=_gemma3),
        "phi3": GgufFamily(model_type="phi3", own=_phi3, may_differ="rope.dimension_count"),
    }
)


def gguf_family(file: GgufFile) -> GgufFamily:
    """Find the family of a file's architecture. Raises: UnsupportedModel."""
    name = str(file.fields.get("general.architecture"))
    if name not in GGUF_FAMILIES:
        raise UnsupportedModel(
            f"{file.path} has a model of the architecture {name!r}; GGUF files are read of "
            f"{', '.join(GGUF_FAMILIES)}: take the model's own repository"
        )
    return GGUF_FAMILIES[name]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of the config.json that a header stands for.

    Raises: UnsupportedModel; ModelNotLoadable naming a field.
    """
    family = gguf_family(file)
    fields = _Fields(file, str(file.fields["general.architecture"]))
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelNotLoadable(f"{file.path} has no table of tokens (token_embd.weight)")
    num_layers, num_heads = fields.integer("block_count"), fields.integer("attention.head_count")
    # As many layers are made as it says, before one of them is looked for.
    if any(f"blk.{n}.attn_norm.weight" not in file.tensors for n in range(num_layers)):
        raise fields.wrong("block_count", "is more than its tensors have")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.optional_integer("attention.key_length") or hidden_size // num_heads
    if head_dim == 0:
        raise fields.wrong("attention.head_count", f"is more than embedding_length={hidden_size}")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "dtype": gguf_dtype(file),
        "vocab_size": table.shape[0],
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.optional_integer("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special_tokens(file, table.shape[0]),
    }
    for name in ("attention.value_length", "rope.dimension_count"):
        found = fields.optional_integer(name)
        if found not in (None, head_dim) and name != family.may_differ:
            raise fields.wrong(name, f"is not the size of a head, {head_dim}")
    if family.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config | family.own(fields, config)


def gguf_dtype(file: GgufFile) -> str:
    """Choose the dtype to compute in: that of all matrices, or else bfloat16."""
    kinds = [*file.types]
    return _DTYPES.get(kinds[0], "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(fields: _Fields) -> dict[str, Any]:
    base = fields.optional_number("rope.freq_base") or 10_000.0
    kind = fields.text("rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        factor = fields.number("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    raise fields.wrong("rope.scaling.type", "is a scaling of positions that is not read here")


def _special_tokens(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    def number(name: str) -> int | None:
        found = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return found if type(found) is int and found < vocab_size else None

    ends = sorted({found for name in _ENDS if (found := number(name)) is not None})
    return {
        "bos_token_id": number("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": number("padding"),
    }
