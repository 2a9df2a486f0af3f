"""A tier in an object store: obstore's own stores, and S3 over HTTP as a server may play it."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.tiers import TIERS, Deadline, Tier, TierAddress, TierError
from quire.tiers.objects import ObjectTier, open_objects
from tiers.played_s3 import PlayedS3, played_s3
from tiers.shared_tier_cases import (
    RECORD_BYTES,
    MakeNamespace,
    SharedTierCases,
    buffers,
    names_of,
    records_of,
    soon,
)

NAMESPACE = "0123456789abcdef"


def open_tier(text: str) -> Tier:
    address = TierAddress.parse(text)
    return TIERS[address.kind](address, RECORD_BYTES, NAMESPACE)


class TestOwnStores(SharedTierCases):
    @pytest.fixture(params=["memory", "local"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> MakeNamespace:
        from obstore.store import LocalStore, MemoryStore

        store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
        return lambda namespace: ObjectTier(store, "s3://bucket", namespace, 4)


@pytest.fixture
def s3() -> Iterator[PlayedS3]:
    with played_s3() as server:
        yield server


class TestS3:
    def test_objects_lie_in_a_folder_a_namespace(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(3)
        assert tier.store(names, records_of(names), soon()) == 3
        assert next(iter(s3.objects)).startswith(f"/bucket/folder/quire/{NAMESPACE}/")
        into = buffers(4)
        assert tier.load(names_of(4), into, soon()) == 3 == tier.find(names_of(4), soon())
        assert into[:3] == records_of(names)
        tier.drop([*names[:2], *names_of(1, 9)], soon())
        assert len(s3.objects) == 1

    def test_a_record_that_is_there_is_not_sent_again(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(3)
        tier.store(names, records_of(names), soon())
        assert tier.store(names, records_of(names), soon()) == 3
        assert s3.asked.count("PUT") == 3

    def test_requests_run_side_by_side(self, s3: PlayedS3) -> None:
        s3.meet = threading.Barrier(3)  # none is answered before three are there
        tier, names = open_tier(f"{s3.address}&requests=3"), names_of(9)
        assert tier.store(names, records_of(names), soon()) == 9
        assert s3.most_at_once == 3

    def test_a_store_that_hangs_ends_with_the_deadline(self, s3: PlayedS3) -> None:
        tier, names = open_tier(f"{s3.address}&requests=2"), names_of(4)
        tier.store(names, records_of(names), soon())
        s3.play = "hang"
        for call in (
            lambda: tier.find(names, Deadline.after(0.1)),
            lambda: tier.load(names, buffers(4), Deadline.after(0.1)),
            lambda: tier.store(names, records_of(names), Deadline.after(0.1)),
            lambda: tier.drop(names, Deadline.after(0.1)),
        ):
            with pytest.raises(TierError, match="out of time"):
                call()

    def test_a_late_store_reads_no_buffer_of_the_caller(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(1, 7)
        record = bytearray(records_of(names)[0])
        expected = bytes(record)
        s3.play = "hang"
        with pytest.raises(TierError, match="out of time"):
            tier.store(names, [memoryview(record)], Deadline.after(0.1))
        record[:] = bytes(len(record))
        s3.over.set()
        until = time.monotonic() + 10
        while not s3.objects and time.monotonic() < until:
            time.sleep(0.01)
        is_right = [found == expected for found in s3.objects.values()]
        assert is_right == [True]  # to show how such bytes differ takes minutes

    def test_a_late_store_brings_nothing_back_that_was_dropped(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        s3.play = "hang"
        with pytest.raises(TierError, match="out of time"):
            tier.store(names, records_of(names), Deadline.after(0.1))
        with pytest.raises(TierError, match="late calls still go on"):
            tier.drop(names, Deadline.after(0.1))
        s3.over.set()
        tier.drop(names, soon())
        assert not s3.objects

    def test_what_was_dropped_in_part_was_not_dropped(
        self, s3: PlayedS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import obstore

        tier, names = open_tier(s3.address), names_of(3)
        tier.store(names, records_of(names), soon())
        real = obstore.delete

        def delete(store: object, path: str) -> None:
            if names[1].hex() in path:
                raise PermissionError("a lock on this object")
            real(store, path)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(obstore, "delete", delete)
            with pytest.raises(TierError, match="a lock on this object"):
                tier.drop(names, soon())
        tier.drop(names, soon())
        assert not s3.objects

    @pytest.mark.parametrize(
        ("play", "match"), [("403", "403|[Pp]ermission|denied|lacked"), ("500", "500|[Ss]erver")]
    )
    def test_a_store_that_refuses_is_an_error(self, s3: PlayedS3, play: str, match: str) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        s3.play = play
        with pytest.raises(TierError, match=match) as raised:
            tier.load(names, buffers(2), soon())
        assert str(raised.value).startswith("s3://bucket/folder: ")
        assert "a-secret" not in str(raised.value)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("play", ["cut", "chunked"])
    def test_a_body_of_another_length_is_no_record(self, s3: PlayedS3, play: str) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        tier.store(names, records_of(names), soon())
        s3.play = play
        around = bytearray(RECORD_BYTES + 2)
        with suppress(TierError):
            assert tier.load(names, [memoryview(around)[1:-1], *buffers(1)], soon()) == 0
        assert (around[0], around[-1]) == (0, 0)
        s3.play = ""
        assert tier.load(names, buffers(2), soon()) == 2

    def test_no_bucket(self, s3: PlayedS3) -> None:
        tier, names = open_tier(s3.address), names_of(2)
        s3.play = "no bucket"
        assert tier.find(names, soon()) == 0
        with pytest.raises(TierError, match="no such bucket"):
            tier.store(names, records_of(names), soon())

    def test_no_server(self) -> None:
        tier = open_tier("s3://bucket?region=r&endpoint=http://127.0.0.1:9")
        with pytest.raises(TierError, match="s3://bucket: "):
            tier.find(names_of(1), Deadline.after(5))


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("s3:", "s3://BUCKET"),
            ("s3://user:secret@bucket", "read from the environment"),
            ("s3://bucket?age=7d", "lifecycle rule"),
            ("s3://bucket?size=1GiB", "lifecycle rule"),
            ("s3://bucket?secret_access_key=x", "unknown option"),
            ("gs://bucket?endpoint=http://x", "unknown option"),
            ("s3://bucket?requests=0", "from 1 to 256"),
            ("az://container", "[Aa]ccount"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, text: str, match: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigError, match=match):
            open_tier(text)

    def test_the_package_may_be_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.objects.find_spec", lambda _: None)
        with pytest.raises(ConfigError, match=r"pip install 'quire-kv\[objects\]'"):
            open_objects(TierAddress.parse("s3://bucket"), RECORD_BYTES, NAMESPACE)

    def test_kinds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        for text in ("s3://bucket/a/b", "gs://bucket", "az://container/a", "az://c?account=other"):
            open_tier(text).close()
