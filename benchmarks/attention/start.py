"""How long attention takes to begin: processes that attend once, against one that does not.

    python -m benchmarks.attention.start [--attend]

``first_use`` runs this module again and again, in turn without ``--attend``, with it and an empty
folder for compiled kernels, and with it and the folder that such a run has left.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.harness.quiet import Timing, differences, take_turns

FIRST_USE = "first use of attention"
FIRST, LATER = f"{FIRST_USE}, nothing compiled yet", f"{FIRST_USE}, in a later process"


def first_use(num_rounds: int) -> dict[str, Timing]:
    """Seconds more than a process which imports torch and quire and builds a storage."""
    with tempfile.TemporaryDirectory() as kept:
        timings = take_turns(
            {
                "without": partial(_run, None),
                FIRST: _run_afresh,
                LATER: partial(_run, kept),
            },
            num_rounds=num_rounds,
            budget_s=60.0,
        )
    return {name: differences(timings[name], timings["without"]) for name in (FIRST, LATER)}


def _run_afresh() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run(folder)


def _run(folder: str | None) -> None:
    """In a child; ``folder`` is for compiled kernels, and without one nothing attends."""
    caches = {} if folder is None else {"QUIRE_CACHE_DIR": folder}
    asked = [sys.executable, "-m", __name__] + ["--attend"] * (folder is not None)
    done = subprocess.run(
        asked, env={**os.environ, **caches}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"attention.start failed:\n{done.stderr}")


def _begin(*, attend: bool) -> None:
    import torch

    from quire.kv import CacheConfig, build_accounting, build_storage
    from quire.memory import HostMemory
    from quire.spec import FullAttention, Layer, ModelSpec

    spec = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")
    model = ModelSpec(
        model_type="benchmark", layers=(Layer(specs=(spec,)),), max_model_len=64, dtype="bfloat16"
    )
    config = CacheConfig(max_model_len=64, max_num_seqs=1, capacity_bytes=2**20)
    accounting = build_accounting("paged", model, config)
    make_writer = None
    if attend:
        from benchmarks.harness.attending import make_backend

        backend = make_backend(spec)
        make_writer = backend.make_writer
    storage = build_storage("paged", accounting, HostMemory(), make_writer)
    accounting.add(0)
    accounting.try_extend(0, 40)
    storage.apply(accounting.drain())
    entries = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    if attend:
        from quire.attention import make_batch

        batch = make_batch(accounting, 0, [(0, 39, 40)])
        storage.write(0, batch.slots, entries, entries)
        q = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
        backend.attend(q, storage.view(0), batch, spec=spec, scale=0.1)


if __name__ == "__main__":
    _begin(attend="--attend" in sys.argv[1:])
