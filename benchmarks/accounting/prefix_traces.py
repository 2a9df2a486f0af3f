"""Traffic as eviction sees it: which blocks of 512 tokens each prompt has, in order of time.

A block's id stands for the whole prefix that ends in it, so a prompt is a path from a root of the
prefix tree downwards. The traces themselves are not part of this repository:

* Mooncake: ``mooncake_conversation.jsonl`` (FAST25-release of kvcache-ai/Mooncake, Apache-2.0).
* kv-cache-tester: 710 conversations of coding agents (callanjfox/kv-cache-tester, Apache-2.0), a
  folder of JSON files or a ``.tar.zst`` of one. Their ids are of 64 tokens and local to a
  conversation: eight make one block here. The files have no common clock, so conversations begin at
  times drawn from a seed.
"""

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512
MOONCAKE = "mooncake_conversation.jsonl"
_FINE_TOKENS = 64  # of an id in kv-cache-tester
_FINE_A_BLOCK = BLOCK_TOKENS // _FINE_TOKENS
Chain = npt.NDArray[np.int32]
Say = Callable[[str], None]


class TraceUnavailable(RuntimeError):
    """A trace cannot be read here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTrace:
    """Prompts in order of time."""

    name: str
    chains: list[Chain]  # block ids of each prompt, from the first on
    prompt_tokens: list[int]

    @property
    def num_blocks(self) -> int:
        """Distinct blocks; their ids are below."""
        return 1 + max(int(chain.max()) for chain in self.chains)

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_tokens)

    def hit_tokens(self, request: int, num_hit_blocks: int) -> int:
        """The last block of a prompt is mostly not full."""
        return min(num_hit_blocks * BLOCK_TOKENS, self.prompt_tokens[request])


def mooncake(folder: Path) -> PrefixTrace:
    """Raises: TraceUnavailable if the folder has no such file."""
    path = folder / MOONCAKE
    if not path.exists():
        raise TraceUnavailable(f"there is no {MOONCAKE} in the traces' folder")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return PrefixTrace(
        name="Mooncake",
        chains=[np.array(row["hash_ids"], np.int32) for row in rows],
        prompt_tokens=[int(row["input_length"]) for row in rows],
    )


def kv_tester(path: Path, *, seed: int, hours: float, say: Say) -> PrefixTrace:
    """Raises: TraceUnavailable."""
    starts = np.random.default_rng(seed)
    times: list[float] = []
    chains: list[Chain] = []
    prompt_tokens: list[int] = []
    first_id = 0
    for number, conversation in enumerate(_conversations(path)):
        if number % 100 == 0:
            say(f"kv-cache-tester: conversation {number} of 710")
        if conversation["block_size"] != _FINE_TOKENS:
            raise TraceUnavailable(f"{conversation['id']}: blocks are not of {_FINE_TOKENS} tokens")
        start = starts.uniform(0, 3600 * hours)
        requests = [each for each in conversation["requests"] if each.get("hash_ids")]
        fine = [np.array(each["hash_ids"], np.int64) for each in requests]
        coarse, num_ids = _joined(fine)
        times += [start + each["t"] for each in requests]
        chains += [chain + np.int32(first_id) for chain in coarse]
        prompt_tokens += [
            min(int(each["in"]), _FINE_TOKENS * len(ids))
            for each, ids in zip(requests, fine, strict=True)
        ]
        first_id += num_ids
    if not times:
        raise TraceUnavailable("kv-cache-tester: no conversation was found")
    order = np.argsort(times, kind="stable").tolist()
    return PrefixTrace(
        name=f"kv-cache-tester, {hours:g} h",
        chains=[chains[at] for at in order],
        prompt_tokens=[prompt_tokens[at] for at in order],
    )


def _joined(fine: list[npt.NDArray[np.int64]]) -> tuple[list[Chain], int]:
    """One conversation's prompts in blocks of eight ids, numbered from 0; and how many there are.

    An id stands for the prefix that ends in it, so a block is known by its last id, and by how many
    it has: the last one of a prompt may have fewer than eight.
    """
    lengths = [len(ids) for ids in fine]
    if not lengths:
        return [], 0
    flat = np.concatenate(fine)
    places = np.concatenate([np.arange(length) for length in lengths])
    before = np.where(places, np.roll(flat, 1), -1)
    _, first, which_id = np.unique(flat, return_index=True, return_inverse=True)
    if (before != before[first][which_id]).any():
        raise TraceUnavailable("kv-cache-tester: an id follows different prefixes")
    ends = [_block_ends(length) for length in lengths]
    keys = np.concatenate(
        [
            ids[end] * _FINE_A_BLOCK + end % _FINE_A_BLOCK
            for ids, end in zip(fine, ends, strict=True)
        ]
    )
    known, numbers = np.unique(keys, return_inverse=True)
    cuts = np.cumsum([len(end) for end in ends])[:-1]
    return np.split(numbers.astype(np.int32), cuts), len(known)


def _block_ends(length: int) -> npt.NDArray[np.int64]:
    """Where the blocks of a prompt of so many ids end: the index of the last id of each."""
    ends = np.arange(_FINE_A_BLOCK - 1, length, _FINE_A_BLOCK)
    return ends if length % _FINE_A_BLOCK == 0 else np.append(ends, length - 1)


# -- files ---------------------------------------------------------------------------------------


def _conversations(path: Path) -> Iterator[dict[str, Any]]:
    """Each conversation, in the order of the files' names."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield json.loads(file.read_bytes())
        return
    if not path.exists():
        raise TraceUnavailable("kv-cache-tester: there is no such file or folder")
    if which("zstd") is None:
        raise TraceUnavailable("kv-cache-tester: the program zstd, which unpacks it, is not here")
    command = ["zstd", "-dc", "--long=27", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as zstd:
        assert zstd.stdout
        try:
            with tarfile.open(fileobj=zstd.stdout, mode="r|") as archive:
                members = (archive.extractfile(member) for member in archive if _is_trace(member))
                yield from (json.load(file) for file in members if file)
        except (tarfile.TarError, ValueError) as error:
            raise TraceUnavailable(f"kv-cache-tester cannot be unpacked: {error}") from error


def _is_trace(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.endswith(".json")
