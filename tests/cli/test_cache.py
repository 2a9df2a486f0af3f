"""``quire cache``: what a folder holds, which files are no records, what goes, what is exported."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig

from conformance.tier_cases import soon
from quire import LLM, SamplingParams
from quire.cli import main
from quire.tiers.files import FileTier
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record import Checksums, KeyedSeal, RecordHeader, Seal, read_header
from quire.tiers.record_folder import list_records
from tiers.faulty import BYTE_FAULTS, FaultyTier
from tiers.records import BLOCK_SIZE, PARTS, chain_of_blocks, right_record, small_format
from tiny import VOCAB, random_model

FINGERPRINT = Fingerprint.of({"model": "tiny [red]", "dtype": "bfloat16", "layers": [1, 2]})
BLOCKS = chain_of_blocks(5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def make(path: Path) -> FileTier:
    return FileTier(path, FINGERPRINT.namespace, size_bytes=1 << 24, reserve_bytes=0)


def fill(path: Path, seal: Seal | None = None, *, groups: tuple[int, ...] = (0, 1)) -> list[str]:
    """Store the records of ``BLOCKS``; returns their names as hex digits."""
    tier, names = make(path), list[str]()
    tier.describe(FINGERPRINT.description.encode())
    for group in groups:
        of = small_format(seal, fingerprint=FINGERPRINT.digest, group=group)
        for block in BLOCKS:
            name, record = right_record(of, block)
            assert tier.store([name], [memoryview(record)], soon()) == 1
            names.append(name.hex())
    tier.close()
    return names


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["quire", "cache", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    said = capsys.readouterr()
    return code, said.out, said.err


Cache = Callable[..., tuple[int, str, str]]  # arguments → exit code, output, errors


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cache:
    return lambda *arguments: run(monkeypatch, capsys, *arguments)


def test_each_command_teaches_itself(cache: Cache) -> None:
    code, out, _ = cache("--help")
    assert code == 0
    for name in ("ls", "check", "prune", "export"):
        assert name in out
        code, out_of_it, _ = cache(name, "--help")
        assert code == 0
        assert f"quire cache {name} /var/cache/quire" in out_of_it
        assert "Raises" not in out_of_it


def test_a_folder_is_listed(cache: Cache, path: Path) -> None:
    fill(path)
    code, out, _ = cache("ls", path)
    assert code == 0
    assert FINGERPRINT.namespace in out
    assert "dtype bfloat16, layers [1,2], model tiny [red]" in out
    code, out, _ = cache("ls", path, "--json")
    (found,) = json.loads(out)["namespaces"]
    assert found["description"] == {"model": "tiny [red]", "dtype": "bfloat16", "layers": [1, 2]}
    assert found["num_records"] == 2 * len(BLOCKS)
    assert found["newest_used_s"] <= time.time()


def test_several_namespaces_are_told_by_what_differs(cache: Cache, path: Path) -> None:
    """What is the same in all is said once; and what was used last comes first."""
    config = {"model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 256}
    common = {"config": config, "rank": 0, "quantization": None, "weights": f"files {'0f' * 32}"}
    several = [
        Fingerprint.of({**common, "block_size": 16, "code": {"torch": "2.12"}}),
        Fingerprint.of({**common, "block_size": 32, "code": {"torch": "2.12"}}),
        Fingerprint.of({**common, "block_size": 16, "code": {"torch": "2.13"}}),
    ]
    for age_s, own in enumerate(several):
        tier = FileTier(path, own.namespace, size_bytes=1 << 24, reserve_bytes=0)
        tier.describe(own.description.encode())
        of = small_format(fingerprint=own.digest)
        name, record = right_record(of, BLOCKS[0])
        assert tier.store([name], [memoryview(record)], soon()) == 1
        now_s = time.time() - 1000 * age_s
        os.utime(path / own.namespace / name.hex()[:2] / name.hex(), (now_s, now_s))
        tier.close()
    code, out, _ = cache("ls", path)
    assert code == 0
    lines = out.splitlines()
    assert any("in all  " in line and "qwen3 (layers 8, width 256)" in line for line in lines)
    assert any(line.split()[:2] == ["all", "3"] for line in lines)
    assert [line.split(maxsplit=1) for line in lines[-3:]] == [
        [several[0].namespace, "block_size 16, code.torch 2.12"],
        [several[1].namespace, "block_size 32"],
        [several[2].namespace, "block_size 16, code.torch 2.13"],
    ], "those that would read alike are told with what is within fields"
    code, out, _ = cache("check", path)
    assert [f"{each.namespace}  1 whole record" in out for each in several] == [True] * 3


def test_looking_at_records_is_no_use_of_them(cache: Cache, path: Path, tmp_path: Path) -> None:
    """What is to go first, and what is too old, stays as it was."""
    names = fill(path)

    def times() -> list[tuple[str, float, bool]]:
        several = list_records(path, FINGERPRINT.namespace)
        return sorted((each.name, each.used_s, each.was_used) for each in several)

    before = times()
    assert not any(was_used for _, _, was_used in before)
    assert cache("check", path)[0] == 0
    assert cache("export", path, names[2], tmp_path / "out.safetensors")[0] == 0
    assert times() == before


def test_a_folder_that_is_not_there_is_said(cache: Cache, path: Path) -> None:
    for command in (("ls",), ("check",), ("prune", "--age", "1d"), ("export", "aa", "x")):
        code, _, err = cache(command[0], path, *command[1:])
        assert code == 1
        assert "no such folder; --kv-tier file:PATH makes one" in err


def test_whole_records_pass_the_check(cache: Cache, path: Path) -> None:
    fill(path)
    code, out, _ = cache("check", path, "--json")
    assert code == 0
    assert json.loads(out)["num_sound"] == 2 * len(BLOCKS)
    assert json.loads(out)["flawed"] == []
    assert "10 whole records" in cache("check", path)[1]


def test_sealed_records_are_counted_apart(cache: Cache, path: Path) -> None:
    fill(path, KeyedSeal(bytes(32)))
    code, out, _ = cache("check", path, "--json")
    assert code == 0
    assert (json.loads(out)["num_sound"], json.loads(out)["num_sealed"]) == (0, 10)


@pytest.mark.parametrize("fault", BYTE_FAULTS)
def test_a_fault_of_bytes_is_found(cache: Cache, path: Path, fault: str) -> None:
    names = fill(path)
    tier = make(path)
    of = small_format(fingerprint=FINGERPRINT.digest)
    name, record = right_record(of, BLOCKS[2])
    for seed in range(3):
        FaultyTier(tier, seed=seed).store_spoiled(fault, name, memoryview(record), soon())
        code, out, _ = cache("check", path, "--json")
        (flawed,) = json.loads(out)["flawed"]
        assert code == 1
        assert flawed["file"].endswith(names[2])
    assert cache("check", path, "--remove")[0] == 1
    assert cache("check", path)[0] == 0
    assert tier.find([name], soon()) == 0
    tier.close()


def test_hostile_files_are_bounded(cache: Cache, path: Path) -> None:
    names = fill(path, groups=(0,))
    files = sorted(Path(record.path) for record in list_records(path, FINGERPRINT.namespace))
    good = files[0].read_bytes()
    huge = (2**32 - 1).to_bytes(4, "little")
    files[0].write_bytes(good[:12] + huge + good[16:])
    files[1].write_bytes(b"")
    with files[2].open("wb") as file:  # 1 TiB of nothing, whose header says that it is one
        file.write(good[:16] + (2**40 - 2**20).to_bytes(8, "little") + good[24:64])
        file.seek(12)
        file.write((2**20).to_bytes(4, "little"))
        file.truncate(2**40)
    files[3].write_bytes(good[:160] + huge + good[164:])
    begin_s = time.monotonic()
    code, out, _ = cache("check", path, "--json")
    assert time.monotonic() - begin_s < 60  # to read a TiB takes minutes
    assert code == 1
    assert len(json.loads(out)["flawed"]) == 4
    assert len(names) == 5


def test_a_header_is_read_from_any_bytes() -> None:
    of = small_format(fingerprint=FINGERPRINT.digest)
    _, record = right_record(of, BLOCKS[0])
    good = bytes(record)
    header = read_header(good, len(good))
    assert isinstance(header, RecordHeader)
    assert header.parts == PARTS
    assert header.token_ids == tuple(BLOCKS[0].token_ids.tolist())
    assert header.name == right_record(of, BLOCKS[0])[0]
    assert (header.parent, header.chain) == (BLOCKS[0].parent, BLOCKS[0].chain)
    draw = np.random.default_rng(0)
    for _ in range(3000):
        bad = bytearray(good[: draw.integers(0, len(good)) if draw.random() < 0.3 else None])
        for _ in range(draw.integers(1, 4)):
            if bad:
                bad[draw.integers(0, min(len(bad), of.header_bytes))] = draw.integers(0, 256)
        found = read_header(bytes(bad), len(bad))
        assert isinstance(found, RecordHeader | str)


def test_pruning_by_age_and_size_asks_first(
    cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    for record in list(list_records(path, FINGERPRINT.namespace))[:4]:
        os.utime(record.path, (time.time() - 1e6,) * 2)
    code, _, err = cache("prune", path, "--age", "1d")
    assert code == 1
    assert "it needs --yes" in err
    for answer in ("n\n", ""):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert cache("prune", path, "--age", "1d")[0] == 1
        assert len(list(list_records(path, FINGERPRINT.namespace))) == 10
    code, out, _ = cache("prune", path, "--age", "1d", "--yes")
    assert code == 0
    assert "4 records removed" in out
    code, out, _ = cache("prune", path, "--size", "8KiB", "--yes", "--json")
    assert json.loads(out)["num_removed"] == 4
    assert len(list(list_records(path, FINGERPRINT.namespace))) == 2


def test_pruning_a_namespace(cache: Cache, path: Path) -> None:
    fill(path)
    for wrong, said in (
        (("--namespace", "zz"), "no such one"),
        (("--namespace", "a", "--age", "1d"), "give --size, --age or both"),
        ((), "give --size, --age or both"),
        (("--age", "soon"), "--age 'soon': an age is a number"),
        (("--size", "all"), "--size 'all': 'all' is not a size"),
    ):
        code, _, err = cache("prune", path, "--yes", *wrong)
        assert code == 1
        assert said in err
    code, out, _ = cache("prune", path, "--namespace", FINGERPRINT.namespace[:5], "--yes")
    assert code == 0
    assert "10 records removed" in out
    assert not (path / FINGERPRINT.namespace).exists()


def test_a_chain_is_exported_with_its_tokens_and_bytes(
    cache: Cache, path: Path, tmp_path: Path
) -> None:
    names, out_file = fill(path), tmp_path / "prompt.safetensors"
    code, out, _ = cache("export", path, names[3], out_file, "--json")
    assert code == 0
    assert json.loads(out)["num_blocks"] == 4
    with safe_open(out_file, "pt") as found:
        assert len(found.keys()) == 4 * 2 * len(PARTS)
        tokens = json.loads(found.metadata()["token_ids"])
        assert tokens == [token for block in BLOCKS[:4] for token in block.token_ids.tolist()]
        assert len(tokens) == 4 * BLOCK_SIZE
        of = small_format(Checksums(), fingerprint=FINGERPRINT.digest)
        _, record = right_record(of, BLOCKS[2])
        first = found.get_tensor("block.00002.group.0.layer.0")
        assert (str(first.dtype), tuple(first.shape)) == ("torch.bfloat16", (2, 32))
        second = found.get_tensor("block.00002.group.0.layer.1")
        assert (str(second.dtype), tuple(second.shape)) == ("torch.uint8", (96,))  # with scales
        raw = b"".join(
            found.get_tensor(f"block.00002.group.0.layer.{layer}").view(torch.uint8).numpy()
            for layer in (0, 1)
        )
        assert raw == bytes(of.payload(memoryview(record)))
    code, _, err = cache("export", path, names[3], out_file)
    assert code == 1
    assert "File exists" in err


def test_what_cannot_be_exported_is_said(cache: Cache, path: Path, tmp_path: Path) -> None:
    names, out_file = fill(path, groups=(0,)), tmp_path / "prompt.safetensors"
    shard = path / FINGERPRINT.namespace / names[1][:2] / names[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    for record, said in (("zz", "nowhere"), ("", "5 records"), (names[3], "is damaged")):
        code, _, err = cache("export", path, record, out_file)
        assert code == 1
        assert said in err
        assert not out_file.exists()
    sealed = path / "sealed"
    names = fill(sealed, KeyedSeal(bytes(32)), groups=(0,))
    code, _, err = cache("export", sealed, names[0], out_file)
    assert code == 1
    assert "is sealed" in err


def test_what_a_folder_says_of_itself_does_not_steer_a_terminal(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"weights": "\x1b]0;m\x1b[2J\nnone", "dtype": "\x9b31m\x7f", "name\x1b[": "x" * 5000}
    planted = Fingerprint.of(said)
    tier = FileTier(path, planted.namespace, size_bytes=1 << 24, reserve_bytes=0)
    tier.describe(planted.description.encode())
    tier.close()
    code, out, _ = run(monkeypatch, capsys, "ls", path)
    assert code == 0
    assert all(each.isprintable() for each in out.replace("\n", ""))
    (line,) = (line for line in out.splitlines() if line.startswith(planted.namespace + "  d"))
    assert r"dtype \u009b31m\u007f" in line
    assert r"weights \u001b]0;m\u001b[2J\nnone" in line
    assert len(line) < 300


@pytest.mark.parametrize("cache_name", ["paged", "virtual"])
def test_what_an_engine_has_stored_is_exported_in_rows(
    cache: Cache, path: Path, tmp_path: Path, cache_name: str
) -> None:
    """Heads of twice as many numbers as a block has tokens: keys times values are as many bytes."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    prompt, options = list(range(17)), dict(cache=cache_name, max_model_len=64)
    options |= dict(kv_cache_memory_bytes="1MiB", kv_tier=(f"file:{path}",), block_size=16)
    with LLM(random_model(config), **options, kv_tier_write="always") as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1))
    (record,) = path.rglob("?" * 64)
    out_file = tmp_path / "prompt.safetensors"
    assert cache("export", path, record.name, out_file)[0] == 0
    with safe_open(out_file, "np") as found:
        (name,) = found.keys()
        tensor = found.get_tensor(name)
        assert json.loads(found.metadata()["token_ids"]) == prompt[:16]
    assert tensor.dtype == np.float32
    assert tensor.shape == ((2, 1024) if cache_name == "paged" else (16, 128))
