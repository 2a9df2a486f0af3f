"""Under a real limit of this process: too much is refused, and the number that is named fits."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNDER_A_LIMIT = """
import re, resource, sys
from quire import LLM, SamplingParams
from quire.errors import ConfigError

cache, option = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (3_000_000_000, 3_000_000_000))
asked = {"kv_cache_memory_bytes": "9GiB"} if option == "bytes" else {"budget": "vllm"}
try:
    LLM(cache=cache, **asked)
except ConfigError as refused:
    flag, value = re.search(r"set --(\\S+) (\\S+)", str(refused)).groups()
    assert "RLIMIT_AS (ulimit -v)" in str(refused)
else:
    raise AssertionError("more than the limit was granted")
asked[flag.replace("-", "_")] = float(value) if option == "share" else value
with LLM(cache=cache, **asked) as llm:
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    done = llm.generate([[i, i + 1] for i in range(64)], params)
    assert all(len(one.token_ids) == 32 for one in done)
    assert llm.memory.peak_committed_bytes <= llm.ledger.kv_bytes < 3_000_000_000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("cache", "option"), [("virtual", "bytes"), ("paged", "share")])
def test_the_number_that_is_named_fits(cache: str, option: str) -> None:
    command = [sys.executable, "-c", UNDER_A_LIMIT, cache, option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
