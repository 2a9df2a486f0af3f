"""What the demo model learns from: the standard library's sources, cut into tokens and batches."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Ids = npt.NDArray[np.int64]

# Small, typical library modules of different kinds; their tests are kept out of training too.
HELD_OUT = (
    *("calendar", "configparser", "csv", "difflib", "fileinput", "graphlib", "heapq", "netrc"),
    *("sched", "shlex", "statistics", "tempfile", "textwrap", "timeit"),
)
# Tables, generated files, fixtures in Python 2 or with deliberate errors: not the style to learn.
SKIP_DIRS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
SKIP_FILES = re.compile(
    r"_sysconfigdata|^config-|lib2to3/tests/|test/(encoded_|.*data/|bad)|__phello"
)
TEST_DIR = re.compile(r"(^|/)(test|tests|idle_test)/")

END = "<|endoftext|>"  # id 0: between files, at the end of generation, and for padding
VOCABULARY, CONTEXT = 4096, 2048
# Runs of newlines and of spaces are tokens of their own, so an indentation costs one token and a
# prompt may end after a newline; only a single space may lead a word.
PIECES = r"\n+| {2,}|\t+| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\s"
SPLIT_SHARE = 0.03  # of the tokens that start with white space; see Batches
STEP_TOKENS = 8192
# (sequence length, share of tokens from test suites): short sequences while most is learnt, the
# full context and nearly pure library code while the rate decays.
STAGES = ((512, 0.35), (CONTEXT, 0.10))
console = Console()


@dataclass(frozen=True)
class Corpus:
    """Source texts: two kinds to train on, and what is held out (by module name)."""

    library: list[str]
    tests: list[str]
    held_out: dict[str, str]

    @property
    def fingerprint(self) -> str:
        parts = "\0".join([*self.library, "|", *self.tests, "|", *self.held_out.values()])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _read_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIP_DIRS.intersection(name.split("/")) or SKIP_FILES.search(name):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if len(text) >= 200 and sum(map(str.isdigit, text)) <= 0.15 * len(text):
            yield name, text  # neither a stub nor a table


def load_corpus() -> Corpus:
    """Read the standard library and split it; near duplicates of held-out files are dropped."""

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) > 25}

    files = dict(_read_library())
    held = {name: files[f"{name}.py"] for name in HELD_OUT if f"{name}.py" in files}
    if missing := set(HELD_OUT) - set(held):
        raise SystemExit(f"this Python lacks library sources: {', '.join(sorted(missing))}")
    held_lines = set[str]().union(*map(long_lines, held.values()))
    parts: tuple[list[str], list[str]] = ([], [])
    seen = set[str]()
    for name, text in files.items():
        lines = long_lines(text)
        copied = len(lines & held_lines) > 0.2 * max(len(lines), 1)
        module = Path(name).stem.removeprefix("test_").lstrip("_")
        if module not in HELD_OUT and not copied and text not in seen:
            parts[bool(TEST_DIR.search(name))].append(text)
            seen.add(text)
    return Corpus(*parts, held)


def make_tokenizer(corpus: Corpus, path: Path) -> Tokenizer:
    """Train the tokenizer on the library part, or load the one an earlier start has trained."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.library, trainer)
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    return [np.array([*e.ids, 0], np.int64) for e in tokenizer.encode_batch(texts)]


class Batches:
    """Endless shuffled training sequences of one stage.

    Each follows from seed, stage and its number alone, so a resumed run finds its place by itself.
    """

    def __init__(
        self, library: list[Ids], tests: list[Ids], tokenizer: Tokenizer, stage: int, seed: int
    ) -> None:
        self.library, self.tests, self.seed = library, tests, (seed, stage)
        self.length, self.test_share = STAGES[stage]
        self.epoch, self.first, self.rows = -1, 0, np.empty((0, 0), np.int64)
        # Prompts may end inside what is one token in running text ("def " or half an indentation),
        # so now and then a token that starts with white space is shown as two.
        vocabulary = tokenizer.get_vocab()
        self.halves = np.zeros((len(vocabulary), 2), np.int64)
        for token, number in vocabulary.items():
            if token[0] in "ĠĊ" and token[1:] in vocabulary:
                self.halves[number] = vocabulary[token[0]], vocabulary[token[1:]]

    def _next_epoch(self) -> None:
        """All of the library and a fresh choice of the tests, cut and shuffled."""
        self.first += len(self.rows)
        self.epoch += 1
        rng = np.random.default_rng([*self.seed, self.epoch])
        budget = sum(map(len, self.library)) * self.test_share / (1 - self.test_share)
        documents = list(self.library)
        for i in rng.permutation(len(self.tests)):
            documents.append(self.tests[i])
            budget -= len(self.tests[i])
            if budget <= 0:
                break
        ids = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        split = (rng.random(len(ids)) < SPLIT_SHARE) & (self.halves[ids, 1] > 0)
        out = np.repeat(ids, 1 + split)
        at = np.flatnonzero(split) + np.arange(split.sum())
        out[at], out[at + 1] = self.halves[ids[split]].T
        starts = rng.permutation((len(out) - 1) // self.length)[:, None] * self.length
        self.rows = out[starts + np.arange(self.length + 1)]

    def batch(self, number: int) -> torch.Tensor:
        """The ``number``-th batch of the stage; numbers must not go backwards."""
        count = STEP_TOKENS // self.length
        picked = []
        for row in range(number * count, (number + 1) * count):
            while row >= self.first + len(self.rows):
                self._next_epoch()
            picked.append(self.rows[row - self.first])
        return torch.from_numpy(np.stack(picked))


def held_out_ids(corpus: Corpus, tokenizer: Tokenizer) -> torch.Tensor:
    """One stream; the empty text in front gives the first file the usual token before it."""
    return torch.from_numpy(np.concatenate(encode(tokenizer, ["", *corpus.held_out.values()])))
