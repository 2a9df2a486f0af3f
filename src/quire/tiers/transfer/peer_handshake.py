"""The first frames of a connection: what each end's records are, and that each has the key.

    HELLO    of who asks: version, fingerprint, sizes, a nonce
    WELCOME  the same of who is asked, and its proof
    PROOF    of who asks
    ANSWER   from here on questions may come

A proof is an HMAC, by the key that both ends share, of both HELLOs whole and of which end speaks:
what one connection shows is of no use in another, and nothing that an end says of itself can be
changed on its way. Of the same bytes both derive two keys, by which frames are authenticated from
then on, one for each direction.

Without a key there are no proofs: over a Unix socket the kernel says who is there, and over TCP the
operator has said that only trusted engines can reach the port.
"""

import hmac
import os
import secrets
from dataclasses import replace

from quire.tiers.tier import Deadline, TierError
from quire.tiers.transfer.peer_frames import (
    NONCE_BYTES,
    PROOF_BYTES,
    FrameKind,
    Hello,
    PeerConnection,
    PeerFrame,
    pack_count,
    read_count,
)

ANOTHER_KEY = "it has another kv_tier_key"


class PeerUnlike(TierError):
    """The peer's records are of no use here, or it has another key."""


def greet(connection: PeerConnection, hello: Hello, key: bytes | None, deadline: Deadline) -> None:
    """Begin as the end that asks. Raises: PeerUnlike; TierError."""
    if connection.passes_files:
        connection.check_user()
    ours = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES)).packed()
    connection.send(FrameKind.HELLO, ours, deadline)
    body = without_file(connection.answer(deadline, FrameKind.WELCOME)).body
    welcome, proof = body[:-PROOF_BYTES], body[-PROOF_BYTES:]
    theirs = Hello.read(welcome)
    if theirs is None:
        raise connection.broken("a WELCOME that cannot be read")
    if flaw := hello.difference(theirs):
        raise PeerUnlike(f"{connection.peer}: {flaw}")
    said = ours + welcome
    if not hmac.compare_digest(proof, _proof(key, b"asked", said)):
        raise PeerUnlike(f"{connection.peer}: {ANOTHER_KEY}")
    connection.send(FrameKind.PROOF, _proof(key, b"asks", said), deadline)
    _authenticate(connection, key, said, sends=b"asks", receives=b"asked")
    answer = without_file(connection.answer(deadline))
    if read_count(answer.body, 0) is None:
        raise connection.broken("an answer to PROOF that is none")


def let_in(connection: PeerConnection, hello: Hello, key: bytes | None, deadline: Deadline) -> None:
    """Begin as the end that is asked. Raises: PeerUnlike, of which the peer is told; TierError."""
    if connection.passes_files:
        connection.check_user()
    frame = without_file(connection.receive(deadline))
    theirs = Hello.read(frame.body) if frame.kind == FrameKind.HELLO else None
    if theirs is None:
        raise connection.broken("no HELLO at the beginning")
    if flaw := hello.difference(theirs):
        connection.refuse(flaw, deadline)
        raise PeerUnlike(f"{connection.peer}: {flaw}")
    ours = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES)).packed()
    said = frame.body + ours
    connection.send(FrameKind.WELCOME, ours + _proof(key, b"asked", said), deadline)
    frame = without_file(connection.receive(deadline))
    if frame.kind != FrameKind.PROOF:
        raise connection.broken("no PROOF after WELCOME")
    if not hmac.compare_digest(frame.body, _proof(key, b"asks", said)):
        connection.refuse(ANOTHER_KEY, deadline)
        raise PeerUnlike(f"{connection.peer}: {ANOTHER_KEY}")
    _authenticate(connection, key, said, sends=b"asked", receives=b"asks")
    connection.send(FrameKind.ANSWER, pack_count(0), deadline)


def without_file(frame: PeerFrame) -> PeerFrame:
    """Close a file that belongs to no frame of this kind."""
    if frame.file is not None:
        os.close(frame.file)
    return PeerFrame(frame.kind, frame.body)


def _proof(key: bytes | None, end: bytes, said: bytes) -> bytes:
    return bytes(PROOF_BYTES) if key is None else hmac.digest(key, b"proof:" + end + said, "sha256")


def _authenticate(
    connection: PeerConnection, key: bytes | None, said: bytes, *, sends: bytes, receives: bytes
) -> None:
    if key is not None:
        own, other = (hmac.digest(key, b"frames:" + e + said, "sha256") for e in (sends, receives))
        connection.authenticate(own, other)
