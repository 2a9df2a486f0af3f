"""Records: a reader accepts the record that it looks for, and no other bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kv.prefix_index import BlockIdentity
from quire.tiers.record import Checksums, KeyedSeal, Part, RecordFormat, Seal

KEY = bytes(range(32))
SEALS: list[Seal] = [Checksums(), KeyedSeal(KEY)]
PARTS = (
    Part(layer=0, dtype="bfloat16", order="heads first", shape=(2, 4, 8), num_bytes=128),
    Part(layer=1, dtype="int8", order="heads first", shape=(2, 4, 8), num_bytes=96),
)
BLOCK = BlockIdentity(
    parent=bytes(32),
    chain=bytes([7]) * 32,
    extras=b"salt: secret",
    token_ids=np.arange(4, dtype=np.int32),
)


def form(seal: Seal, *, fingerprint: bytes = bytes(32), group: int = 0) -> RecordFormat:
    return RecordFormat(fingerprint, group, 4, PARTS, seal)


def written(of: RecordFormat, block: BlockIdentity = BLOCK) -> bytearray:
    data = bytearray(of.num_bytes)
    record = memoryview(data)
    of.payload(record)[:] = bytes(i % 251 for i in range(of.payload_bytes))
    of.finish(record, of.header(block))
    return data


@pytest.mark.parametrize("seal", SEALS, ids=["checksums", "sealed"])
class TestRecord:
    def test_what_was_written_is_read(self, seal: Seal) -> None:
        own = form(seal)
        data = memoryview(written(own))
        assert own.flaw(data, own.header(BLOCK)) is None
        assert own.payload(data) == bytes(i % 251 for i in range(own.payload_bytes))

    def test_a_flipped_bit_anywhere_is_found(self, seal: Seal) -> None:
        own = form(seal)
        good = written(own)
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            assert own.flaw(memoryview(bad), own.header(BLOCK)) is not None, place

    @given(size=st.integers(0, 2000), of=st.binary(min_size=1, max_size=64))
    def test_any_other_bytes_are_refused(self, seal: Seal, size: int, of: bytes) -> None:
        own = form(seal)
        data = bytearray((of * (size // len(of) + 1))[:size])
        assert own.flaw(memoryview(data), own.header(BLOCK)) is not None

    def test_a_right_record_of_something_else_is_refused(self, seal: Seal) -> None:
        own = form(seal)
        header = own.header(BLOCK)
        others = {
            "tokens": BlockIdentity(
                parent=BLOCK.parent,
                chain=BLOCK.chain,
                extras=BLOCK.extras,
                token_ids=BLOCK.token_ids + 1,
            ),
            "chain": BlockIdentity(
                parent=BLOCK.parent,
                chain=bytes(32),
                extras=BLOCK.extras,
                token_ids=BLOCK.token_ids,
            ),
            "extras": BlockIdentity(
                parent=BLOCK.parent,
                chain=BLOCK.chain,
                extras=b"salt: another",
                token_ids=BLOCK.token_ids,
            ),
        }
        for what, block in others.items():
            assert own.flaw(memoryview(written(own, block)), header) is not None, what
            assert own.name(own.header(block)) != own.name(header), what

    def test_the_reason_says_what_differs(self, seal: Seal) -> None:
        own = form(seal)
        header = own.header(BLOCK)
        data = written(own)

        def flaw(place: int) -> str | None:
            changed = bytearray(data)
            changed[place] ^= 0xFF
            return own.flaw(memoryview(changed), header)

        assert own.flaw(memoryview(data)[:-1], header) == "size"
        assert (flaw(0), flaw(8)) == ("magic", "version")
        foreign = written(form(seal, fingerprint=bytes([1]) * 32))
        assert own.flaw(memoryview(foreign), header) == "fingerprint"
        assert own.flaw(memoryview(written(form(seal, group=1))), header) == "header"
        assert flaw(len(data) - 1) == "checksum"


def test_with_a_key_nothing_of_a_prompt_is_shown() -> None:
    sealed, plain = form(KeyedSeal(KEY)), form(Checksums())
    data = bytes(written(sealed))
    for secret in (BLOCK.token_ids.tobytes(), BLOCK.chain, bytes(range(64))):
        assert secret not in data
        assert secret in bytes(written(plain))
    assert b"secret" not in bytes(written(plain))


def test_a_record_of_another_key_is_refused() -> None:
    own, other = form(KeyedSeal(KEY)), form(KeyedSeal(bytes(32)))
    assert own.flaw(memoryview(written(other)), own.header(BLOCK)) == "checksum"
    assert own.name(own.header(BLOCK)) != other.name(other.header(BLOCK))
    plain = form(Checksums())
    assert own.flaw(memoryview(written(plain)), own.header(BLOCK)) is not None
    assert plain.flaw(memoryview(written(own)), plain.header(BLOCK)) is not None


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_tier_key has 5 bytes"):
        KeyedSeal(b"short")
