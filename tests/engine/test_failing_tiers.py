"""A disk, a server and a clock fail under an engine: it goes on, says it once, and counts it."""

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.test_llm import ids, prompts
from engine.test_offloading import GREEDY, kind, made, offload, until
from quire import LLM
from quire.engine.scheduling.offload_policy import TierReport
from quire.tiers import Tier, TierAddress
from quire.tiers.files import FileTier
from quire.tiers.guard import TierCall
from tiers.redis_process import RedisProcess, needs_redis

# Prompts of a round: each round has some of its own, so that there is something to be stored.
ROUNDS = tuple((100 - 3 * n, 64 - 2 * n, 99 - 3 * n) for n in range(12))
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def expected() -> dict[int, tuple[int, ...]]:
    """The text of each prompt, by its length, where there is no tier."""
    lengths = sorted({length for several in ROUNDS for length in several})
    with made(max_num_seqs=len(lengths)) as llm:
        return dict(zip(lengths, ids(llm.generate(prompts(tuple(lengths)), GREEDY)), strict=True))


class Watched:
    """An engine with one tier, whose texts, log and counts are looked at after each incident."""

    def __init__(
        self, llm: LLM, expected: dict[int, tuple[int, ...]], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.llm, self._expected, self._log = llm, expected, caplog
        self._rounds = iter(ROUNDS)
        self._before: tuple[int, ...] = ()

    @property
    def tier(self) -> TierReport:
        report = self.llm.tiers
        assert report is not None
        return report.tiers[0]

    @property
    def said(self) -> list[str]:
        """What was said of the tier since the last question."""
        records = [each for each in self._log.records if each.name == "quire.tiers.guard"]
        assert all(each.levelno == logging.WARNING for each in records)
        lines = [each.getMessage() for each in records]
        self._log.clear()
        return lines

    def ask(self) -> int:
        """Answer new prompts and those of before, from an empty pool. Returns: tokens found."""
        new = next(self._rounds)
        lengths = (*self._before, *new)
        self.llm.reset_prefix_cache()
        ends = self.llm.generate(prompts(lengths), GREEDY)
        assert ids(ends) == [self._expected[length] for length in lengths]
        until(lambda: not offload(self.llm).has_more)
        self._before = new
        self.llm.engine.scheduler.check()
        return sum(end.num_cached_tokens for end in ends[: len(lengths) - len(new)])

    def goes_on(self, why: str, **fails: TierCall) -> None:
        """Two rounds more: calls that fail are counted each time; for what, is said once."""

        def counts() -> list[int]:
            return [self.tier.num_errors[call] for call in fails.values()]

        for _ in range(2):
            before = counts()
            self.ask()
            until(lambda before=before: all(a < b for a, b in zip(before, counts(), strict=True)))
        lines = self.said
        assert all(why in line for line in lines)
        said = [each for line in lines for each in fails if f" {each} fails, and goes on" in line]
        assert len(said) == len(lines)
        assert sorted(said) == sorted(fails)
        assert self.tier.state == "broken"

    def works_again(self) -> None:
        """One round to be stored, and one that finds it."""

        def is_whole() -> bool:
            self.llm.reset_prefix_cache()
            before = self.tier.num_stored
            self.llm.generate(prompts(self._before), GREEDY)
            until(lambda: not offload(self.llm).has_more)
            return self.tier.state == "ok" and self.tier.num_stored >= before

        until(is_whole)
        assert any(line.endswith("works again") for line in self.said)
        until(lambda: self.ask() > 0)


@contextmanager
def watched(
    address: str, expected: dict[int, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> Iterator[Watched]:
    with (
        pytest.MonkeyPatch.context() as patch,
        made(kv_tier=(address,), kv_tier_trusted=True) as llm,
    ):
        patch.setattr("quire.tiers.guard._LONGEST_BREAK_S", 0.01)
        yield Watched(llm, expected, caplog)


@pytest.fixture
def clock_s() -> list[float]:
    return [time.time()]


@pytest.fixture
def folder(
    tmp_path: Path,
    clock_s: list[float],
    expected: dict[int, tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Watched]:
    def make(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
        return FileTier(
            tmp_path / "kv", namespace, size_bytes=2**26, age_s=7 * DAY_S, clock=lambda: clock_s[0]
        )

    with kind("folder", make), watched("folder:", expected, caplog) as own:
        yield own


def refused(monkeypatch: pytest.MonkeyPatch, code: int, folder: Path) -> None:
    """Have the system refuse to write anything into a folder."""
    real_open, real_write = os.open, os.write

    def fail(*args: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    if code == errno.ENOSPC:  # files can be made, and have no bytes
        monkeypatch.setattr(os, "write", lambda fd, data: (
            fail() if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
            else real_write(fd, data)
        ))  # fmt: skip
        return

    def opened(file: Any, flags: int, *args: Any, **named: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return (
            fail()
            if writes and str(file).startswith(str(folder))
            else real_open(file, flags, *args, **named)
        )

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing(folder: Watched, tmp_path: Path, code: int) -> None:
    folder.ask()
    with pytest.MonkeyPatch.context() as patch:
        refused(patch, code, tmp_path)
        folder.goes_on(os.strerror(code), storing="store")
    folder.works_again()


def test_a_clock_that_jumps(folder: Watched, clock_s: list[float]) -> None:
    """By ten years, forward and back again: nothing is wrong, and nothing is an error."""
    folder.ask()
    assert folder.ask() > 0
    for jump_s in (3650 * DAY_S, -3650 * DAY_S):
        clock_s[0] += jump_s
        folder.ask()  # what is too old is computed
        assert folder.ask() > 0
    assert folder.said == []
    assert folder.tier.state == "ok"
    assert not any(folder.tier.num_errors.values())


@needs_redis
def test_a_server_that_is_killed_is_full_or_begins_anew(
    tmp_path: Path, expected: dict[int, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisProcess(tmp_path)
    try:
        with watched(server.address, expected, caplog) as own:
            own.ask()
            server.kill()
            own.goes_on("redis.sock: cannot be reached", loading="find", storing="store")
            server.start()
            own.works_again()
            server.kill()  # and is back before anything is asked
            server.start()
            own.ask()
            assert own.said == []
            server.tell("CONFIG", "SET", "maxmemory", "1")
            own.goes_on("maxmemory", storing="store")
            server.tell("CONFIG", "SET", "maxmemory", "0")
            own.works_again()
    finally:
        server.kill()
