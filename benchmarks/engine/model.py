"""The 0.45 B model that engines are compared on: random weights, and a tokenizer that all can read.

    python -m benchmarks.engine.model FOLDER     # FOLDER 4: with so many layers, in place of 28

It has Qwen3's form, which every engine knows. The tokenizer is trained on Python's own library; no
token of it means anything, but engines that only take text need one. What some engines look for
under another name than Transformers writes today is added, so that one folder serves all of them.
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engine.workloads import VOCAB_SIZE

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_TOKENS = 40_960
ROPE_THETA = 1e6
NUM_SOURCES = 200  # files of the library that the tokenizer is trained on
# Qwen's, so that engines which know tokenizers by their split take it for one of Qwen's.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, num_layers: int = 28) -> Path:
    """The folder with the model in it, made if it is not there. A minute, and 0.9 GB of disk."""
    stamp = folder / ".ready"
    if not stamp.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(folder)
        _model(tokenizer, num_layers).save_pretrained(folder)
        _say_it_their_way(folder)
        stamp.write_text("")
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len((PAD, BEGIN, END)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[BEGIN],
        model_max_length=MAX_TOKENS,
    )
    made.chat_template = CHAT
    assert len(made) == VOCAB_SIZE, f"{len(made)} tokens instead of {VOCAB_SIZE}"
    return made


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:NUM_SOURCES]:
        yield path.read_text(errors="replace")


def _model(tokenizer: PreTrainedTokenizerFast, num_layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MAX_TOKENS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def _say_it_their_way(folder: Path) -> None:
    """Older names of the same settings, and the tokenizer as two files."""
    _add(folder / "config.json", {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"})
    _add(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"], ensure_ascii=False))
    pairs = (
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    )
    (folder / "merges.txt").write_text("\n".join(pairs) + "\n")


def _add(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1))


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), *map(int, sys.argv[2:3])))
