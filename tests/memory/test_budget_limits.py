"""Under a real limit of this process: too much is refused, and the number that is named fits."""

from __future__ import annotations

import sys

import pytest

from forks import run_fork

UNDER_A_LIMIT = """
import os, re, resource, sys
from quire import LLM, SamplingParams
from quire.errors import ConfigError

resource.setrlimit(resource.RLIMIT_AS, (3_000_000_000, 3_000_000_000))
for each in sys.argv[1:]:
    cache, option = each.split()
    asked = {"kv_cache_memory_bytes": "9GiB"} if option == "bytes" else {"budget": "vllm"}
    try:
        LLM(cache=cache, **asked)
    except ConfigError as error:
        refused = str(error)
    else:
        raise AssertionError(f"{each}: more than the limit was granted")
    flag, value = re.search(r"set --(\\S+) (\\S+)", refused).groups()
    assert "RLIMIT_AS (ulimit -v)" in refused, each
    asked[flag.replace("-", "_")] = float(value) if option == "share" else value
    with LLM(cache=cache, **asked) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        done = llm.generate([[i, i + 1] for i in range(16)], params)
        assert all(len(one.token_ids) == 8 for one in done), each
        assert llm.memory.peak_committed_bytes <= llm.ledger.kv_bytes < 3_000_000_000, each
sys.stdout.flush()
os._exit(0)  # to take the libraries apart takes longer than some of this
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_number_that_is_named_fits() -> None:
    done = run_fork(UNDER_A_LIMIT, "virtual bytes", "paged share", timeout=200)
    assert done.returncode == 0, done.stderr
