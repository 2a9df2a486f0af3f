"""Tiny encoder-decoders with random weights, and sources for them: what tests of sources run on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    MarianConfig,
    NllbMoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    WhisperConfig,
)

VOCAB = 67
FRAMES = 20  # of a tiny Whisper's source, each of two of its input
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=32,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=3,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    forced_eos_token_id=None,
)
_BART: dict[str, Any] = dict(
    encoder_layers=1,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    max_position_embeddings=64,
)

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "t5": lambda: T5Config(**_COMMON, d_kv=6, d_ff=32, num_layers=2, num_heads=4, n_positions=64),
    "bart": lambda: BartConfig(**_COMMON, **_BART),
    "marian": lambda: MarianConfig(**_COMMON, **_BART, decoder_vocab_size=VOCAB),
    "nllb-moe": lambda: NllbMoeConfig(
        **_COMMON, **_BART, num_experts=2, encoder_sparse_step=1, decoder_sparse_step=1
    ),
    "whisper": lambda: WhisperConfig(
        **_COMMON,
        **_BART,
        max_source_positions=FRAMES,
        max_target_positions=64,
        num_mel_bins=8,
    ),
}


def tiny_reader(name: str, *, seed: int = 0, **others: Any) -> PreTrainedModel:
    """A model of ``CONFIGS`` in fp32, with ``others`` of its fields. Its random weights make tokens
    and sources differ.

    Heads are not tied to embeddings, or each token would only be said again; where norms come after
    the attention, a source that is too loud would leave nothing of the text.
    """
    spread = 0.15 if name in ("bart", "marian") else 0.4
    config = CONFIGS[name]()
    config.update(others)
    config.tie_word_embeddings = False
    auto = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model


def source_ids(rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Token ids [rows, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (rows, length), generator=generator)


def features(rows: int, *, seed: int = 0) -> Tensor:
    """What a tiny Whisper hears: [rows, mels, 2 x frames]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, 2 * FRAMES, generator=generator)
