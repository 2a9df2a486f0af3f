"""Records that lie in a folder, looked at by themselves: are they whole, and what is in them.

An engine compares a record with the one that it looks for. Here that is not known, so this reads
what the bytes say, trusts no size in them, and never holds more than a header and a piece of a
payload. A sealed record shows neither its tokens nor its payload.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Literal, TypeAlias

from xxhash import xxh3_128

from quire.tiers.record import MOST_HEADER_BYTES, BadReason, Part, RecordHeader, read_header
from quire.tiers.record_folder import RecordFile, list_records, tier_errors
from quire.tiers.tier import TierError

Flaw: TypeAlias = BadReason | Literal["name", "unreadable"]

_FIRST_BYTES = 4096  # of a file, in which most headers end
_PIECE_BYTES = 1 << 20
_DIMENSIONS = 4  # of a part with keys and values: layers, heads, the length of a key, of a value
# Names of number formats: torch's, and safetensors' with the bytes of a number.
_DTYPES = MappingProxyType(
    {
        "bfloat16": ("BF16", 2),
        "float16": ("F16", 2),
        "float32": ("F32", 4),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "int8": ("I8", 1),
        "uint8": ("U8", 1),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainExport:
    """What was written into a file of tensors."""

    num_blocks: int
    num_tokens: int
    num_tensors: int
    num_bytes: int  # of the file


def inspect(record: RecordFile, namespace: str) -> RecordHeader | Flaw:
    """Read a record's header and check its payload; of a sealed one only its sizes.

    Returns: the header, or why the file is no record of this namespace.
    """
    try:
        with _opened(record.path) as file:
            header = _header(file, record, namespace)
            if isinstance(header, RecordHeader) and not header.is_sealed:
                for part, check in zip(header.parts, header.checks, strict=True):
                    for _ in _pieces(file, part, check):
                        pass
            return header
    except _OtherBytes:
        return "checksum"
    except OSError:
        return "unreadable"


def export_chain(path: Path, namespace: str, digits: str, out: Path) -> ChainExport:
    """Write the blocks of a prompt, up to the one of a record, into a safetensors file.

    ``digits``: with which that record's name begins. The blocks before it are those of its parents,
    as far as they have records, in all groups. A tensor's name is
    ``block.00000.group.0.layer.0``; the metadata have the token ids.

    Raises: TierError for a name that is unknown or not unique, for a sealed or a damaged record,
    and for a file that cannot be written.
    """
    last = _find(path, namespace, digits)
    headers = dict[tuple[bytes, int], tuple[RecordFile, bytes]]()  # by chain and group
    for record in list_records(path, namespace):
        header = _header_of(record, namespace)
        if isinstance(header, RecordHeader) and not header.is_sealed:
            headers[header.chain, header.group] = (record, header.parent)
    header = _plain(last, namespace)
    groups = sorted({group for _, group in headers})
    chain, chains = header.chain, list[bytes]()
    while any((chain, group) in headers for group in groups):
        if chain in chains:
            raise TierError(f"{last.name}: its blocks are each other's parents")
        chains.insert(0, chain)
        chain = next(headers[chain, group][1] for group in groups if (chain, group) in headers)
    blocks = [
        (number, headers[chain, group][0])
        for number, chain in enumerate(chains)
        for group in groups
        if (chain, group) in headers
    ]
    try:
        return _write_tensors(blocks, namespace, out)
    except OSError as error:
        raise TierError(f"{out}: {error.strerror or error}") from error


def _write_tensors(blocks: list[tuple[int, RecordFile]], namespace: str, out: Path) -> ChainExport:
    """Write the parts of these blocks' records. Raises: TierError, OSError."""
    entries, tokens, at = dict[str, object](), dict[int, tuple[int, ...]](), 0
    for number, record in blocks:
        header = _plain(record, namespace)
        tokens[number] = header.token_ids
        for part in header.parts:
            dtype, shape = _tensor_kind(part, header.block_size)
            entries[f"block.{number:05d}.group.{header.group}.layer.{part.layer}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [at, at + part.num_bytes],
            }
            at += part.num_bytes
    token_ids = [token for number in sorted(tokens) for token in tokens[number]]
    metadata = {"namespace": namespace, "token_ids": json.dumps(token_ids)}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with out.open("xb") as file:
        try:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, record in blocks:
                _copy_payload(record, namespace, file)
        except BaseException:
            with suppress(OSError):
                out.unlink()
            raise
    return ChainExport(
        num_blocks=len(tokens),
        num_tokens=len(token_ids),
        num_tensors=len(entries),
        num_bytes=8 + len(text) + at,
    )


def _copy_payload(record: RecordFile, namespace: str, out: BinaryIO) -> None:
    with _opened(record.path) as file:
        header = _header(file, record, namespace)
        if not isinstance(header, RecordHeader):
            raise TierError(f"{record.name} is no whole record any more: {header}")
        try:
            for part, check in zip(header.parts, header.checks, strict=True):
                for piece in _pieces(file, part, check):
                    out.write(piece)
        except _OtherBytes:
            raise TierError(f"{record.name} is damaged: quire cache check finds such") from None


def _tensor_kind(part: Part, block_size: int) -> tuple[str, list[int]]:
    """Return a tensor's number format and shape; bytes where scales lie beside the numbers.

    A row is what lies together: all that a token has, or a head's keys and then its values.
    """
    name, num_bytes = _DTYPES.get(part.dtype, ("", 0))
    if name and len(part.shape) == _DIMENSIONS:
        layers, heads, key_dim, value_dim = part.shape
        numbers = block_size * layers * heads * (key_dim + value_dim)
        rows = block_size if part.order == "token first" else layers * heads
        if rows and numbers * num_bytes == part.num_bytes:
            return name, [rows, numbers // rows]
    return "U8", [part.num_bytes]


def _find(path: Path, namespace: str, digits: str) -> RecordFile:
    found = [each for each in list_records(path, namespace) if each.name.startswith(digits)]
    if len(found) != 1:
        what = f"{len(found)} records" if found else "no record"
        raise TierError(f"{path / namespace}: {what} with a name that begins with {digits!r}")
    return found[0]


def _plain(record: RecordFile, namespace: str) -> RecordHeader:
    header = _header_of(record, namespace)
    if not isinstance(header, RecordHeader):
        raise TierError(f"{record.name} is no whole record: {header}")
    if header.is_sealed:
        raise TierError(
            f"{record.name} is sealed: its tokens and its payload are encrypted with a key that is "
            f"derived from them and kv_tier_key, so it can be read by an engine only"
        )
    return header


def _header_of(record: RecordFile, namespace: str) -> RecordHeader | Flaw:
    try:
        with _opened(record.path) as file:
            return _header(file, record, namespace)
    except OSError:
        return "unreadable"


def _header(file: BinaryIO, record: RecordFile, namespace: str) -> RecordHeader | Flaw:
    """Read a header. The file stands at the payload then."""
    num_bytes = os.fstat(file.fileno()).st_size
    found = read_header(data := file.read(_FIRST_BYTES), num_bytes)
    if found == "size" and len(data) == _FIRST_BYTES:
        data += file.read(MOST_HEADER_BYTES - _FIRST_BYTES)
        found = read_header(data, num_bytes)
    if isinstance(found, RecordHeader):
        if found.fingerprint.hex()[: len(namespace)] != namespace:
            return "fingerprint"
        if not found.is_sealed and found.name.hex() != record.name:
            return "name"
        file.seek(found.header_bytes)
    return found


class _OtherBytes(Exception):
    """A part has another checksum."""


def _pieces(file: BinaryIO, part: Part, check: bytes) -> Iterator[bytes]:
    """Yield a part in pieces, and check it at the end. Raises: _OtherBytes, OSError."""
    digest, left = xxh3_128(), part.num_bytes
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        digest.update(piece)
        left -= len(piece)
        yield piece
    if left or digest.digest() != check:
        raise _OtherBytes


def _opened(path: str) -> BinaryIO:
    """Open a file that is no link, and leave its time of use as it is. Raises: OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NOATIME)
    except PermissionError:  # another user's
        descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, f"{path} is no file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def remove_flawed(record: RecordFile) -> None:
    """Remove a record that is none. Raises: TierError."""
    with tier_errors(f"{record.path} cannot be removed"), suppress(FileNotFoundError):
        os.unlink(record.path)
