"""A drafter as the options ask for it, or an error that says why there can be none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.assembly import assemble
from quire.engine.interfaces import Drafter
from quire.engine.speculation.draft_model import DraftModel
from quire.engine.speculation.prompt_lookup import PromptLookup
from quire.errors import ConfigError
from quire.kv import CacheConfig
from quire.memory import MemoryProvider
from quire.memory.budget.ledger import Needs
from quire.models.footprint import footprint
from quire.models.loader import LoadedModel, adopt, load
from quire.spec import ModelSpec
from quire.units import format_count


def load_draft(config: EngineConfig, target: LoadedModel) -> LoadedModel | None:
    """Load the draft model, if the options name one.

    Raises: ConfigError for another vocabulary or device, ModelNotLoadable, UnsupportedModel.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    given: Any = speculative.model
    if isinstance(given, str | Path):
        given = load(
            given,
            device=str(target.device),
            dtype=config.dtype,
            dynamic_quantization=config.dynamic_quantization,
        )
    draft = given if isinstance(given, LoadedModel) else adopt(given)
    _refuse_other_device(draft, target)
    _refuse_recurrent_draft(draft)
    _refuse_other_vocabulary(draft, target)
    return draft


def needs_with_draft(needs: Needs, spec: ModelSpec, draft: LoadedModel) -> Needs:
    """Return what both models need: their weights, and KV memory for as many tokens in each."""
    own, most_bytes = footprint(draft.model), needs.most_bytes
    share = 1 + draft.spec.bytes_per_token / spec.bytes_per_token
    return replace(
        needs,
        weights_bytes=needs.weights_bytes + own.weights_bytes,
        counted_weights_bytes=needs.counted_weights_bytes + own.counted_bytes,
        bytes_per_token=needs.bytes_per_token + draft.spec.bytes_per_token,
        address_bytes=int(needs.address_bytes * share),
        least_bytes=int(needs.least_bytes * share),
        most_bytes=None if most_bytes is None else int(most_bytes * share),
    )


def draft_bytes(capacity_bytes: int, spec: ModelSpec, draft: LoadedModel | None) -> int:
    """Return the draft model's bytes of KV memory, for as many tokens as the other model has."""
    if draft is None:
        return 0
    both = spec.bytes_per_token + draft.spec.bytes_per_token
    return capacity_bytes * draft.spec.bytes_per_token // both


def make_drafter(
    config: EngineConfig,
    draft: LoadedModel | None,
    target: LoadedModel,
    provider: MemoryProvider,
    *,
    max_model_len: int,
    capacity_bytes: int,
) -> Drafter | None:
    """Make the drafter of the options. ``max_model_len`` is the other model's, in this engine.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable. Nothing is held then.
    """
    speculative = config.speculative_config
    if speculative is None:
        return None
    if draft is None:
        return PromptLookup(
            most_tokens=speculative.num_speculative_tokens,
            shortest=speculative.prompt_lookup_min,
            longest=speculative.prompt_lookup_max,
        )
    sizes = CacheConfig(
        max_model_len=min(max_model_len, draft.spec.max_model_len),
        max_num_seqs=config.max_num_seqs,
        capacity_bytes=capacity_bytes,
        block_size=config.block_size,
        page_bytes=provider.page_bytes,
        enable_prefix_caching=False,
    )
    # What is drafted changes no text.
    own = replace(config, batch_invariant=False)
    model = assemble(draft, draft.spec, "paged", sizes, provider, own)
    model.capture(config, sizes.max_model_len)
    return DraftModel(
        model.kv,
        model.runner,
        most_tokens=speculative.num_speculative_tokens,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=min(draft.vocab_size, target.vocab_size),
    )


def refuse_speculation(config: EngineConfig, loaded: LoadedModel) -> None:
    """Refuse guesses for a model with recurrent layers or a source. Raises: ConfigError.

    A state stands for all tokens so far and cannot go back to an earlier one. A guess does not know
    the source.
    """
    if loaded.spec.source_tokens and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: {loaded.name} answers a source, of which neither its text so far "
            f"nor a draft model knows, so that drafts would rarely be accepted: leave it out"
        )
    layers = list(loaded.spec.recurrent_layers)
    if layers and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: layers {layers} of {loaded.name} keep a recurrent state, which "
            f"cannot be taken back after a wrong draft: leave it out"
        )


def _refuse_recurrent_draft(draft: LoadedModel) -> None:
    """Refuse a draft model with recurrent layers or a source. Raises: ConfigError."""
    if draft.spec.source_tokens:
        raise ConfigError(
            f"speculative_config: the draft model {draft.name} reads a source: use another one"
        )
    if draft.spec.recurrent_layers:
        raise ConfigError(
            f"speculative_config: layers {list(draft.spec.recurrent_layers)} of the draft model "
            f"{draft.name} keep a recurrent state, which cannot be taken back after a wrong "
            f"draft: use another one"
        )


def _refuse_other_device(draft: LoadedModel, target: LoadedModel) -> None:
    """Refuse a draft model in memory on another device. Raises: ConfigError."""
    here, there = target.device, draft.device
    if here != there:
        raise ConfigError(
            f"speculative_config: the draft model is on {there}, {target.name} on {here}: move it "
            f"(model.to({str(here)!r})), or give its folder"
        )


def _refuse_other_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Refuse another vocabulary, apart from padding rows of the table. Raises: ConfigError."""
    if draft.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if ours != theirs:
            num_differing = len(ours.items() ^ theirs.items())
            raise ConfigError(
                f"speculative_config: the draft model {draft.name} has another vocabulary than "
                f"{target.name}: {format_count(num_differing)} tokens differ between "
                f"{format_count(len(ours))} and {format_count(len(theirs))}. It must be the same"
            )
    elif draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {draft.name} has another vocabulary than "
            f"{target.name}: {format_count(draft.vocab_size)} tokens, not "
            f"{format_count(target.vocab_size)}. It must be the same"
        )
