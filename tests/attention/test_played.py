"""Calls that stay the same from step to step: the bits of ``attend`` and of a layer's writer."""

from collections.abc import Callable
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.machines import cpu_backend, kernel_folder
from conformance.attention_cases import STORED, Case, make_case, make_sinks, make_spec, same_bits
from quire.attention import VaryingCall
from quire.attention.cpu import backend as played
from quire.attention.cpu.call_frame import FRAME
from quire.kernels.player import Player
from quire.layers.cpu import CpuLinear

KINDS = ("full", "sliding", "chunked", "latent")
DECODES = ((31, 1), (0, 1), (59, 1))
MIXED = ((0, 13), (31, 1), (5, 7), (40, 12))
SPARE_ROWS = 3  # of a recording that is larger than the step


def play(case: Case, call: VaryingCall | None) -> None:
    assert call is not None
    cpu = CpuLinear(kernel_dir=kernel_folder())
    player = Player([call.call], cpu.kernels, cpu.threads)
    for _ in range(2):
        batch = case.fresh_batch()
        words, num_threads = call.find(batch)  # some are addresses of what it keeps
        assert len(words) == len(call.words)
        player.frames[int(player.starts[0]) + np.array(call.words)] = words
        player.set_threads(np.array([0]), num_threads)
        player()


class Allocations:
    """Every tensor that ``torch.empty`` has made, by its address, as long as it lives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: dict[int, ref[Tensor]] = {}
        make = torch.empty

        def noted(*sizes: int, **options: torch.dtype) -> Tensor:
            made = make(*sizes, **options)
            self._found[made.data_ptr()] = ref(made)
            return made

        monkeypatch.setattr(played.torch, "empty", noted)

    def size(self, address: int) -> int:
        made = self._found[address]()
        assert made is not None, "what lay there is gone"
        return made.nbytes


def planned(case: Case, call: VaryingCall | None) -> tuple[dict[str, int], int]:
    """A frame as it is played for a case's step, and on how many threads."""
    assert call is not None
    frame = np.frombuffer(call.call.frame, np.int64).copy()
    words, num_threads = call.find(case.batch)
    frame[list(call.words)] = words
    return dict(zip(FRAME, frame.tolist(), strict=True)), num_threads


def with_spare_rows(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:1], torch.nan).expand(SPARE_ROWS, *x.shape[1:])])


@pytest.mark.parametrize("chunks", [DECODES, MIXED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_attending_gives_the_same_bits(
    kind: str, dtype: str, chunks: tuple[tuple[int, int], ...]
) -> None:
    spec = make_spec(kind, kv_heads=1 if kind == "latent" else 2, dims=(16, 16), dtype=dtype)
    q_dtype = torch.bfloat16 if dtype == "int8" else None
    case = make_case(spec, sharing=3, q_dtype=q_dtype, chunks=chunks)
    backend = cpu_backend("native")
    softcap, sinks = 30.0, make_sinks(case.q.shape[1])
    want = case.attend(backend, scale=0.3, softcap=softcap, sinks=sinks)
    q = with_spare_rows(case.q)
    out = torch.full((len(q), *want.shape[1:]), 7.0, dtype=want.dtype)
    call = backend.plays.attend(
        q, out, case.view, spec=spec, scale=0.3, softcap=softcap, sinks=sinks
    )
    play(case, call)
    assert same_bits(out[: len(want)], want)
    assert bool((out[len(want) :] == 7).all())


@pytest.mark.parametrize("strategy", STORED)
def test_wherever_keys_and_values_lie(strategy: str) -> None:
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float32")
    case = make_case(spec, sharing=3, strategy=strategy, chunks=MIXED)
    backend = cpu_backend("native")
    want = case.attend(backend, scale=0.5)
    out = torch.zeros_like(want)
    play(
        case,
        backend.plays.attend(
            case.q, out, case.view, spec=spec, scale=0.5, softcap=None, sinks=None
        ),
    )
    assert same_bits(out, want)


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_writing_leaves_the_same_bytes(dtype: str, strategy: str) -> None:
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype=dtype)
    case = make_case(
        spec, sharing=3, strategy=strategy, q_dtype=torch.float32, chunks=MIXED, block_size=8
    )
    backend = cpu_backend("native")
    num_tokens = len(case.batch.slots)
    k, v = (with_spare_rows(torch.randn(num_tokens, 2, 16)) for _ in range(2))
    backend.make_writer(case.view)(case.batch.slots, k[:num_tokens], v[:num_tokens])
    want = [page.clone() for page in case.pages]
    backend.make_writer(case.view)(case.batch.slots, v[:num_tokens], k[:num_tokens])
    assert not all(map(torch.equal, case.pages, want))
    play(case, backend.plays.write(case.view, k, v))
    assert all(map(torch.equal, case.pages, want))


def test_what_does_not_lie_side_by_side_has_no_such_call() -> None:
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float32")
    case = make_case(spec, sharing=3, chunks=DECODES)
    plays = cpu_backend("native").plays
    out = torch.zeros_like(case.q)
    apart = torch.stack([case.q, case.q], -1)[..., 0]
    common = dict(spec=spec, scale=1.0, softcap=None)
    assert plays.attend(apart, out, case.view, **common, sinks=None) is None
    assert plays.attend(case.q, apart, case.view, **common, sinks=None) is None
    assert plays.attend(case.q, out, case.view, **common, sinks=make_sinks(6).bfloat16()) is None
    k = torch.zeros(3, 2, 16)
    assert plays.write(case.view, torch.stack([k, k], -1)[..., 0], k) is None
    with pytest.raises(ValueError, match="this layer keeps 2 heads of 16"):
        plays.write(case.view, k[:, :1], k)


def test_there_is_room_for_as_many_threads_as_there_are_by_now(
    use_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Allocations(monkeypatch)
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float32")
    short = make_case(spec, sharing=3, chunks=DECODES)
    long = make_case(spec, sharing=3, chunks=((3000, 1), (2000, 1), (0, 400)))
    plays = cpu_backend("native").plays
    use_threads(1)

    def call_for(case: Case) -> VaryingCall | None:
        return plays.attend(
            case.q, case.q, case.view, spec=spec, scale=0.3, softcap=None, sinks=None
        )

    calls = [call_for(short), call_for(long)]
    for most in (1, 2, 8, 2):
        use_threads(most)
        short.batch.memo.clear()
        long.batch.memo.clear()
        steps = [planned(case, call) for case, call in zip((short, long), calls, strict=True)]
        assert [num_threads for _, num_threads in steps] == [1, most]
        for frame, num_threads in steps:  # the first one, too, after the second is planned
            assert made.size(frame["scratch"]) >= frame["scratch_bytes"] * num_threads
