"""What one layer keeps: golden numbers, brute-force oracles, and laws that hold for every spec."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KeptWhole,
    LatentAttention,
    Layer,
    LayerSpec,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    StateTensor,
)
from quire.units import ceil_div

MIB, GIB = 2**20, 2**30

# Seed 0: Qwen3-4B in bfloat16, 36 layers of 8 heads of 128.
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


# Golden numbers ---------------------------------------------------------------------------------


def test_qwen3_4b_at_its_full_context_takes_5_625_gib() -> None:
    """Seed 0: 36 × 40960 × 8 × 128 × 2 × 2 bytes."""
    assert ModelSpec.from_config(QWEN3_4B).bytes_for(40960) == 5.625 * GIB


def test_qwen3_4b_at_100_tokens_takes_14_06_mib() -> None:
    """Seed 0."""
    assert round(ModelSpec.from_config(QWEN3_4B).bytes_for(100) / MIB, 2) == 14.06


def test_growing_by_4096_tokens_takes_16_mib_a_layer_and_576_mib_in_all() -> None:
    """Seed 0."""
    spec = ModelSpec.from_config(QWEN3_4B)
    (group,) = spec.groups
    assert group.spec.bytes_for(8192) - group.spec.bytes_for(4096) == 16 * MIB
    assert spec.bytes_for(8192) - spec.bytes_for(4096) == 576 * MIB


def test_block_bytes_are_twice_the_product_of_block_heads_size_and_dtype() -> None:
    """Seed 3: 2 × block_size × kv_heads × head_size × dtype bytes; cdiv(max_len, block) of them."""
    spec = FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert spec.block_bytes(16) == 2 * 16 * 8 * 128 * 2 == 65536
    assert ceil_div(40960, 16) * spec.block_bytes(16) == spec.bytes_for(40960)
    assert ceil_div(38, 16) * spec.block_bytes(16) == 3 * 65536  # seed 4: blocks of 16 + 16 + 6


@pytest.mark.parametrize("num_tokens", [1, 16, 4096, 10**9])
def test_a_mamba_state_takes_one_block_and_one_more_a_draft_token(num_tokens: int) -> None:
    """Seed 3: block_bytes × (1 + speculative blocks), at any length."""
    state = StateTensor(name="scan", shape=(8, 64, 128), dtype="float32")
    spec = RecurrentState(states=(state,), num_speculative_blocks=3)
    assert spec.block_bytes(16) == spec.block_bytes(1) == 8 * 64 * 128 * 4
    assert spec.bytes_for(num_tokens) == spec.block_bytes(16) * (1 + 3)


def test_compressed_mla_stores_block_size_over_compress_ratio_entries() -> None:
    """Seed 3: block_size // compress_ratio."""
    spec = LatentAttention(latent_dim=512, rope_dim=64, dtype="bfloat16", compress_ratio=4)
    assert spec.storage_block_size(16) == 16 // 4
    assert spec.block_bytes(16) == 4 * (512 + 64) * 2
    assert spec.bytes_for(17) == 5 * (512 + 64) * 2


def test_8k_of_context_at_about_125_kb_a_token_take_about_1_gb() -> None:
    """Seed 3: the figures are Llama 3 8B's, 128 KiB a token exactly."""
    llama = {**QWEN3_4B, "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096}
    spec = ModelSpec.from_config(llama)
    assert spec.bytes_per_token == pytest.approx(125e3, rel=0.05)
    assert spec.bytes_for(8192) == pytest.approx(1e9, rel=0.1)


# Oracles: ask of every later token what it reads ------------------------------------------------

# A token this far ahead no longer reads anything of the first n, or always will.
_AHEAD = 40


@given(n=st.integers(0, 60), window=st.integers(1, 30))
def test_a_window_keeps_what_a_later_token_reads(n: int, window: int) -> None:
    spec = SlidingWindow(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn", window=window)
    later = range(n, n + _AHEAD)
    read = {j for i in later for j in range(max(0, i - window + 1), i + 1) if j < n}
    assert set(spec.live_range(n)) == read
    assert spec.bytes_for(n) == len(read) * 2


@given(n=st.integers(0, 60), chunk=st.integers(1, 30))
def test_a_chunk_keeps_what_a_later_token_reads(n: int, chunk: int) -> None:
    spec = ChunkedAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn", chunk=chunk)
    later = range(n, n + _AHEAD)
    read = {j for i in later for j in range(i - i % chunk, i + 1) if j < n}
    assert set(spec.live_range(n)) == read
    assert spec.bytes_for(n) == len(read) * 2


@given(n=st.integers(0, 80), step=st.integers(1, 30), size=st.integers(1, 30), data=st.data())
def test_the_peak_bounds_every_way_to_get_there(
    n: int, step: int, size: int, data: st.DataObject
) -> None:
    """A step holds what is live before it and the tokens that it computes."""
    spec = data.draw(
        st.sampled_from(
            [
                SlidingWindow(num_kv_heads=1, head_dim=1, dtype="int8", window=size),
                ChunkedAttention(num_kv_heads=1, head_dim=1, dtype="int8", chunk=size),
                FullAttention(num_kv_heads=1, head_dim=1, dtype="int8"),
            ]
        )
    )
    computed = 0
    while computed < n:
        tokens = data.draw(st.integers(1, min(step, n - computed)))
        assert len(spec.live_range(computed)) + tokens <= spec.peak_tokens(n, step)
        computed += tokens


# Laws -------------------------------------------------------------------------------------------

_sizes = st.integers(1, 64)
_dtypes = st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"])
_heads = {"num_kv_heads": _sizes, "head_dim": _sizes, "dtype": _dtypes}
_states = st.builds(
    StateTensor, name=st.just("scan"), shape=st.tuples(_sizes, _sizes), dtype=_dtypes
)
growing = st.one_of(
    st.builds(FullAttention, **_heads, value_head_dim=st.none() | _sizes),
    st.builds(
        LatentAttention,
        latent_dim=_sizes,
        rope_dim=_sizes,
        dtype=_dtypes,
        compress_ratio=st.sampled_from([1, 2, 4]),
    ),
)
specs = st.one_of(
    growing,
    st.builds(SlidingWindow, **_heads, window=_sizes),
    st.builds(ChunkedAttention, **_heads, chunk=_sizes),
    st.builds(
        RecurrentState,
        states=st.lists(_states, min_size=1, max_size=2).map(tuple),
        num_speculative_blocks=st.integers(0, 3),
    ),
    st.builds(
        CrossAttention,
        **_heads,
        value_head_dim=st.none() | _sizes,
        source_tokens=st.integers(1, 99),
    ),
)
lengths = st.integers(0, 5000)


@given(spec=growing, shorter=lengths, longer=lengths)
def test_what_forgets_nothing_never_shrinks(spec: LayerSpec, shorter: int, longer: int) -> None:
    shorter, longer = sorted((shorter, longer))
    assert spec.bytes_for(shorter) <= spec.bytes_for(longer)


@given(spec=specs, n=lengths)
def test_live_tokens_are_among_the_first_n_and_end_with_the_last(spec: LayerSpec, n: int) -> None:
    live = spec.live_range(n)
    assert 0 <= live.start <= live.stop == n
    assert live.step == 1


@given(spec=specs, n=lengths, block_size=st.sampled_from([4, 16, 32]))
def test_blocks_over_the_live_tokens_hold_all_bytes(
    spec: LayerSpec, n: int, block_size: int
) -> None:
    copies = spec.num_places if isinstance(spec, KeptWhole) else 1
    num_blocks = ceil_div(len(spec.live_range(n)), block_size) * copies
    assert spec.block_bytes(block_size) * num_blocks >= spec.bytes_for(n)


@given(spec=specs, n=lengths, step=st.integers(1, 600))
def test_the_peak_of_a_model_is_at_least_what_stays(spec: LayerSpec, n: int, step: int) -> None:
    model = ModelSpec(
        model_type="any", layers=(Layer(specs=(spec,)),) * 2, max_model_len=8192, dtype="int8"
    )
    assert model.peak_bytes(n, step) >= model.bytes_for(n)
    assert model.peak_bytes(n, step) >= model.peak_bytes(n)


@given(
    layers=st.lists(st.lists(specs, max_size=2, unique=True).map(tuple), min_size=1, max_size=12)
)
def test_groups_partition_layers_and_add_up(layers: list[tuple[LayerSpec, ...]]) -> None:
    model = ModelSpec(
        model_type="any",
        layers=tuple(Layer(specs=own) for own in layers),
        max_model_len=8192,
        dtype="int8",
    )
    pairs = [(i, group.spec) for group in model.groups for i in group.layers]
    assert len(pairs) == sum(len(own) for own in layers)
    assert set(pairs) == {(i, spec) for i, own in enumerate(layers) for spec in own}
    for n in (0, 1, 100):
        assert model.bytes_for(n) == sum(spec.bytes_for(n) for own in layers for spec in own)
        assert [live for _, live in model.live_ranges(n)] == [
            group.spec.live_range(n) for group in model.groups
        ]


@given(spec=specs, n=lengths)
def test_fp8_halves_keys_and_values_and_leaves_states_alone(spec: LayerSpec, n: int) -> None:
    layer = Layer(specs=(spec,))
    model = ModelSpec(model_type="any", layers=(layer,), max_model_len=8192, dtype="bfloat16")
    in_16_bits = model.with_kv_dtype("bfloat16")
    in_8_bits = model.with_kv_dtype("float8_e4m3fn")
    if isinstance(spec, KeptWhole):
        assert in_8_bits == model
    else:
        assert 2 * in_8_bits.bytes_for(n) == in_16_bits.bytes_for(n)
    assert in_8_bits.dtype == model.dtype  # of the weights, which stay


@given(spec=specs, n=lengths)
def test_int8_adds_a_scale_for_each_head_of_keys_and_of_values(spec: LayerSpec, n: int) -> None:
    layer = Layer(specs=(spec,))
    model = ModelSpec(model_type="any", layers=(layer,), max_model_len=8192, dtype="bfloat16")
    in_fp8, in_int8 = model.with_kv_dtype("float8_e4m3fn"), model.with_kv_dtype("int8")
    if isinstance(spec, KeptWhole):
        assert in_int8 == model
        return
    scales = sum(heads for heads, _ in spec.entry_shapes)
    assert in_int8.bytes_per_token == in_fp8.bytes_per_token + 4 * scales


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [
        ("bfloat16", 36 * 8 * 2 * 128 * 2),
        ("float8_e4m3fn", 36 * 8 * 2 * 128),
        ("int8", 36 * 8 * 2 * (128 + 4)),
    ],
)
def test_bytes_per_token_of_qwen3_4b(dtype: str, per_token: int) -> None:
    assert ModelSpec.from_config(QWEN3_4B).with_kv_dtype(dtype).bytes_per_token == per_token


def test_a_latent_has_one_scale_and_its_rotary_key_another() -> None:
    spec = LatentAttention(latent_dim=512, rope_dim=64, dtype="int8")
    assert spec.bytes_per_token == 512 + 4 + 64 + 4
    assert spec.block_bytes(16) == 16 * 584


def test_an_unknown_kv_dtype_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'int3' is unknown; known: float64"):
        ModelSpec.from_config(QWEN3_4B).with_kv_dtype("int3")
