"""A tier in Mooncake's store, by a client that answers as Mooncake's does."""

import threading

import pytest

from quire.errors import ConfigError
from quire.tiers import TIERS, Deadline, TierAddress, TierError, TierFull
from quire.tiers.mooncake import MooncakeTier
from tiers.shared_tier_cases import (
    RECORD_BYTES,
    MakeNamespace,
    SharedTierCases,
    buffers,
    names_of,
    records_of,
    soon,
)


class PlayedStore:
    """Has the methods and codes of MooncakeDistributedStore 0.3.13, as that answered when tried."""

    def __init__(self, capacity_bytes: int = 2**30) -> None:
        self._records: dict[str, bytes] = {}
        self._capacity_bytes = capacity_bytes
        self.is_away = False
        self.wait = threading.Event()
        self.wait.set()
        self.num_calls = self.num_closed = 0

    def get_size(self, key: str) -> int:
        self._enter()
        if self.is_away:
            return -900
        return len(self._records[key]) if key in self._records else -704

    def get_buffer(self, key: str) -> bytes | None:
        self._enter()
        return None if self.is_away else self._records.get(key)

    def put(self, key: str, value: bytes) -> int:
        self._enter()
        if self.is_away:
            return -900
        if sum(map(len, list(self._records.values()))) + len(value) > self._capacity_bytes:
            return -200
        self._records.setdefault(key, value)
        return 0

    def remove(self, key: str, force: bool = False) -> int:
        self._enter()
        if self.is_away:
            return -900
        if not force:
            return -706
        return 0 if self._records.pop(key, None) is not None else -704

    def close(self) -> int:
        assert not self.num_calls, "it must not be closed under a call"
        self.num_closed += 1
        return 0

    def _enter(self) -> None:
        assert not self.num_closed
        self.num_calls += 1
        assert self.wait.wait(20)
        self.num_calls -= 1


def tier_of(store: PlayedStore) -> MooncakeTier:
    return MooncakeTier(store, "mooncake://master", "quire/0/")


class TestCases(SharedTierCases):
    @pytest.fixture
    def make(self) -> MakeNamespace:
        class Shared(PlayedStore):
            def close(self) -> int:
                return 0  # the other namespaces' clients are others

        store = Shared()
        return lambda name: MooncakeTier(store, "mooncake://master", f"quire/{name}/")


class TestMooncakeTier:
    def test_no_room(self) -> None:
        tier, names = tier_of(PlayedStore(3 * RECORD_BYTES)), names_of(5)
        assert tier.store(names, records_of(names), soon()) == 3
        with pytest.raises(TierFull, match="raise lend="):
            tier.store(names[3:], records_of(names[3:]), soon())
        tier.close()

    def test_a_master_that_is_away(self) -> None:
        store = PlayedStore()
        tier, names = tier_of(store), names_of(2)
        tier.store(names, records_of(names), soon())
        store.is_away = True
        for call in (
            lambda: tier.find(names, soon()),
            lambda: tier.load(names, buffers(2), soon()),
            lambda: tier.store(names, records_of(names), soon()),
            lambda: tier.drop(names, soon()),
        ):
            with pytest.raises(TierError, match="-900: the master does not answer"):
                call()
        store.is_away = False
        assert tier.load(names, buffers(2), soon()) == 2
        tier.close()

    def test_a_call_that_hangs_ends_with_the_deadline_and_is_awaited_at_the_end(self) -> None:
        store = PlayedStore()
        tier, names = tier_of(store), names_of(2)
        store.wait.clear()
        with pytest.raises(TierError, match="out of time"):
            tier.find(names, Deadline.after(0.1))
        assert store.num_calls, "the call has ended"
        threading.Timer(0.1, store.wait.set).start()
        tier.close()
        assert store.num_closed == 1

    def test_a_call_that_never_ends_does_not_hold_up_the_end(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("quire.tiers.mooncake._CLOSE_S", 0.05)
        store = PlayedStore()
        tier = tier_of(store)
        store.wait.clear()
        with pytest.raises(TierError, match="out of time"):
            tier.find(names_of(2), Deadline.after(0.05))
        tier.close()
        assert "its client stays open" in caplog.text
        assert not store.num_closed
        store.wait.set()
        monkeypatch.setattr("quire.tiers.mooncake._CLOSE_S", 10.0)
        tier.close()
        assert store.num_closed == 1


class TestAddress:
    def test_the_package_may_be_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.tiers.mooncake.find_spec", lambda _: None)
        with pytest.raises(ConfigError, match=r"pip install 'quire-kv\[mooncake\]'"):
            self.opened("mooncake://master?host=here")

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("mooncake:", "mooncake://MASTER"),
            ("mooncake://master", "host=HOST"),
            ("mooncake://master?host=here&lend=much", "lend='much'"),
            ("mooncake://master?host=here&age=7d", "unknown option 'age'"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, text: str, match: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("quire.tiers.mooncake.find_spec", bool)
        with pytest.raises(ConfigError, match=match):
            self.opened(text)

    def opened(self, text: str) -> object:
        return TIERS["mooncake"](TierAddress.parse(text), RECORD_BYTES, "0" * 16)
