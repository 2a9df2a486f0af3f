"""Headers of GGUF files, whole and hostile, what they say of a model, and how they are named."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelNotLoadable, QuireError, UnsupportedModel
from quire.spec.gguf_config import GGUF_FAMILIES, gguf_config
from quire.spec.gguf_file import GGUF_TYPES, read_gguf
from quire.spec.model_files import check_weights, find_folder, find_spec

F32, Q8_0 = 0, 8
TEXT, LIST, U8, U32, U64, F32_FIELD = 8, 9, 0, 4, 10, 6


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def fields_of(**values: Any) -> list[bytes]:
    """Of the architecture llama, but for its name; dots are written as double underscores."""
    found = [field("general.architecture", TEXT, text("llama"))]
    for name, value in values.items():
        kind = {int: U32, float: F32_FIELD, str: TEXT}[type(value)]
        raw = text(value) if kind == TEXT else struct.pack("<I" if kind == U32 else "<f", value)
        found.append(field(f"llama.{name.replace('__', '.')}", kind, raw))
    return found


def tensor(name: str, sides: list[int], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
        + struct.pack("<IQ", kind, offset)
    )


def file_of(
    fields: list[bytes],
    tensors: list[bytes],
    num_bytes: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    counts = counts or (len(tensors), len(fields))
    header = magic + struct.pack("<I2Q", version, *counts) + b"".join(fields + tensors)
    return header + bytes(-len(header) % 32) + bytes(num_bytes)


SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention__head_count": 4,
    "attention__layer_norm_rms_epsilon": 1e-5,
}
TENSORS = [
    tensor("token_embd.weight", [32, 10], F32, 0),
    tensor("blk.0.attn_norm.weight", [32], F32, 1280),
]
LISTS = [
    field("tokenizer.ggml.tokens", LIST, struct.pack("<IQ", TEXT, 2) + text("a") + text("bc")),
    field("tokenizer.ggml.scores", LIST, struct.pack("<IQ", F32_FIELD, 2) + bytes(8)),
]
GOOD = file_of([*fields_of(**SIZES), *LISTS], TENSORS, 1280 + 128)


def test_a_header_says_where_its_tensors_are(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    file = read_gguf(path)
    table, norm = file.tensors["token_embd.weight"], file.tensors["blk.0.attn_norm.weight"]
    assert (table.type, table.shape, table.num_bytes) == ("F32", (10, 32), 1280)
    assert (norm.shape, norm.begin) == ((32,), table.begin + 1280)
    assert len(GOOD) == norm.begin + norm.num_bytes
    assert file.fields["tokenizer.ggml.tokens"].num_items == 2
    assert file.types == {"F32": 1}
    name, spec = find_spec(path)
    assert (name, spec.num_layers, spec.dtype, spec.max_model_len) == (str(path), 1, "float32", 64)
    assert find_folder(tmp_path) == path  # the only one there
    (tmp_path / "other.gguf").write_bytes(GOOD)
    with pytest.raises(ModelNotLoadable, match=r"has 2 GGUF files.*: model\.gguf, other\.gguf"):
        find_folder(tmp_path)


def test_a_block_is_as_large_as_ggml_says() -> None:
    gguf = pytest.importorskip("gguf")
    for number, (name, items, num_bytes) in GGUF_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (items, num_bytes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "ends in its first bytes"),
        (file_of([], [], magic=b"ggml"), "begins with b'ggml'"),
        (file_of([], [], version=1), "version is 1"),
        (file_of([], [], counts=(2**63, 0)), "number of tensors is 9,223,372,036,854,775,808"),
        (file_of([], [], counts=(0, 2**63)), "number of fields is 9,223"),
        (file_of([], [], counts=(0, 9)), "it ends in"),
        (file_of([struct.pack("<Q", 2**62)], [], counts=(0, 1)), "length of a field's name is"),
        (file_of([field("x", 77, b"")], []), "x is of an unknown kind, 77"),
        (file_of([field("x", LIST, struct.pack("<IQ", U8, 2**63))], []), "x has 9,223"),
        (file_of([field("x", LIST, struct.pack("<IQ", U8, 999_999))], []), "it ends in x"),
        (
            file_of([field("x", LIST, struct.pack("<IQ", U8, 4_000_001) + bytes(4_000_001))], []),
            "x has 4,000,001 numbers",
        ),
        (file_of([field("x", LIST, struct.pack("<IQ", TEXT, 2**63))], []), "x has 9,223"),
        (file_of([field("x", LIST, struct.pack("<IQ", TEXT, 999_999))], []), "it ends in x"),
        (
            file_of([field("x", LIST, struct.pack("<IQQ", TEXT, 1, 2**64 - 1))], []),
            "it ends in x",
        ),
        (file_of([field("x", LIST, struct.pack("<IQ", LIST, 1))], []), "list of items of an"),
        (file_of([field("x", TEXT, text(b"\xff"))], []), "can't decode"),
        (file_of([field("x", U8, b"1")] * 2, []), "x stands in it twice"),
        (file_of([field("general.alignment", U32, struct.pack("<I", 0))], []), "alignment is 0"),
        (file_of([], [TENSORS[0]] * 2, 9999), "token_embd.weight stands in it twice"),
        (file_of([], [tensor("x", [2**40, 2**40], F32, 0)], 64), "x has 4,835,7"),
        (file_of([], [tensor("x", [2**60], F32, 0)], 64), "a side of x is"),
        (file_of([], [tensor("x", [4], F32, 2**63)], 64), "x has 16 bytes from 9,223"),
        (file_of([], [tensor("x", [4], F32, 4)], 64), "x has 16 bytes from"),
        (file_of([], [tensor("x", [0], F32, 0)], 64), r"x is \[0\]"),
        (file_of([], [tensor("x", [33], Q8_0, 0)], 64), "Q8_0 has blocks of 32"),
        (file_of([], [tensor("x", [32], 99, 0)], 64), "x is in a type that is not read: number 99"),
        (file_of([], [tensor("x", [1] * 5, F32, 0)], 64), "number of sides of x is 5"),
        (
            file_of([], [tensor("x", [16], F32, 0), tensor("y", [8], F32, 32)], 64),
            "x and y lie in the same bytes",
        ),
    ],
)
def test_what_does_not_hold_is_refused_by_name(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelNotLoadable, match=f"not a whole GGUF file: .*{said}"):
        check_weights(path)


def test_a_file_that_is_cut_or_changed_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    path, draws = tmp_path / "model.gguf", random.Random(29)
    for size in draws.sample(range(len(GOOD)), 60):
        path.write_bytes(GOOD[:size])
        with pytest.raises(ModelNotLoadable):
            read_gguf(path)
    header = len(GOOD) - 1408
    num_refused = 0
    for _ in range(120):
        content = bytearray(GOOD)
        for _ in range(draws.randint(1, 3)):
            content[draws.randrange(header)] = draws.randrange(256)
        path.write_bytes(content)
        try:
            find_spec(path)
        except QuireError:  # and no other error
            num_refused += 1
    assert 60 < num_refused < 120


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_count": 10_000}, "block_count=10000 is more than its tensors have"),
        ({"block_count": "many"}, "block_count='many' is no whole number"),
        ({"attention__head_count": 99}, "head_count=99 is more than embedding_length=32"),
        ({"context_length": 0}, "context_length=0 is no whole number from 1 on"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "is no positive number"),
        ({"attention__value_length": 16}, "value_length=16 is not the size of a head, 8"),
        ({"rope__dimension_count": 4}, "dimension_count=4 is not the size of a head, 8"),
        ({"rope__scaling__type": "yarn"}, "'yarn' is a scaling of positions that is not read"),
    ],
)
def test_fields_that_cannot_be_read_are_named(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(fields_of(**{**SIZES, **changes}), TENSORS, 1408))
    with pytest.raises(ModelNotLoadable, match=said):
        find_spec(path)


def test_layers_between_that_are_not_there(tmp_path: Path) -> None:
    """All layers of a header are made before their tensors are asked for."""
    path, last = tmp_path / "model.gguf", tensor("blk.9999.attn_norm.weight", [32], F32, 1280)
    fields = fields_of(**{**SIZES, "block_count": 10_000})
    path.write_bytes(file_of(fields, [TENSORS[0], last], 1408))
    with pytest.raises(ModelNotLoadable, match="block_count=10000 is more than its tensors have"):
        find_spec(path)


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {name: value for name, value in SIZES.items() if name != "feed_forward_length"}
    path.write_bytes(file_of(fields_of(**sizes), TENSORS, 1408))
    with pytest.raises(ModelNotLoadable, match=r"does not say llama\.feed_forward_length"):
        find_spec(path)
    path.write_bytes(file_of([field("general.architecture", TEXT, text("mamba"))], TENSORS, 1408))
    with pytest.raises(
        UnsupportedModel, match="architecture 'mamba'; GGUF files are read of llama"
    ):
        find_spec(path)


def test_each_field_becomes_the_configs(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ends = [
        field(f"tokenizer.ggml.{name}_token_id", U32, struct.pack("<I", number))
        for name, number in (("eos", 3), ("eot", 7), ("eom", 3), ("bos", 99))
    ]
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    path.write_bytes(file_of([*fields_of(**SIZES, **scaled), *ends], TENSORS, 1408))
    config = gguf_config(read_gguf(path))
    assert config["eos_token_id"] == [3, 7]
    assert config["bos_token_id"] is None  # no row of the table
    assert config["num_key_value_heads"] == 4
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {
        "rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0,
    }  # fmt: skip
    assert "llama" in GGUF_FAMILIES


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of a repository's files."""
    files: list[str] = []
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, repo: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file: f"/{repo}/{file}")
    return files


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a/b-GGUF:Q8_0", "b-Q8_0.gguf"),
        ("a/b-GGUF:q4_k_m", "b.Q4_K_M.gguf"),
        ("a/b-GGUF:BF16", "deep/BF16.gguf"),
        ("a/b-GGUF/deep/BF16.gguf", "deep/BF16.gguf"),
    ],
)
def test_a_repository_has_several(hub: list[str], name: str, found: str) -> None:
    hub += ["README.md", "b-Q8_0.gguf", "b.Q4_K_M.gguf", "deep/BF16.gguf", "mmproj-Q8_0.gguf"]
    assert find_folder(name) == Path("/a/b-GGUF", found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a/b:Q4_0", r"a/b has 0 GGUF files in Q4_0, and one .*: c/Q8_0\.gguf, x-Q6_K-00001-of-00"),
        ("a/b:Q8_0", "a/b has 2 GGUF files in Q8_0"),
        ("a/b:Q6_K", r"x-Q6_K-00001-of-00002\.gguf is one part of several: merge them first"),
    ],
)
def test_a_file_that_is_not_the_one_is_refused(hub: list[str], name: str, said: str) -> None:
    hub += ["x-Q6_K-00001-of-00002.gguf", "x-Q8_0.gguf", "c/Q8_0.gguf"]
    with pytest.raises(ModelNotLoadable, match=said):
        find_folder(name)
