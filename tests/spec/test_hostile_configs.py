"""Whatever a config.json holds, the answer is a ModelSpec or a QuireError, never a traceback."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import QuireError
from quire.spec import ModelSpec
from quire.spec.families import FAMILIES
from quire.spec.fields import SPELLINGS
from quire.spec.patterns import RULES
from spec.published import FULL, LATENT
from spec.published_recurrent import RECURRENT
from spec.published_windowed import WINDOWED

CONFIGS = [model.config for model in (*FULL, *LATENT, *WINDOWED, *RECURRENT)]

FIELDS = sorted(
    {spelling.split(".")[0] for name in SPELLINGS for spelling in (name, *SPELLINGS[name])}
    | {name for config in CONFIGS for name in config}
    | {*RULES, "text_config", "per_layer_config", "num_kv_shared_layers", "no_rope_layers"}
)
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([0, -1, 2**24, 2**24 + 1, 2**63, 10**400, 0.5, 4.0, 1e308]),
    st.floats(),
)
WORDS = st.one_of(
    st.text("aF*-M0\0\u00e9", max_size=4),
    st.sampled_from(["auto", "full_attention", "mamba", "hybrid", "M*-", "bfloat16", "nan"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.one_of(WORDS, st.sampled_from(FIELDS)), inner, max_size=4),
    ),
    max_leaves=8,
)
# Deep values are slow to draw, the first time above all.
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.sampled_from([*FAMILIES, "unheard-of"])


def read(config: Any) -> None:
    """Read it, and count with what was read: nothing but QuireError may come out."""
    try:
        spec = ModelSpec.from_config(config)
    except QuireError as error:
        message = str(error)
    else:
        message = "config.json"
        assert spec.num_layers > 0
        assert 0 <= spec.bytes_for(10_000) <= spec.peak_bytes(10_000, 512)
        assert spec.max_model_len >= 1
    assert message.startswith("config.json")
    assert len(message) < 1000


@patiently
@given(
    base=st.sampled_from(CONFIGS),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
def test_fields_with_any_value(base: dict[str, Any], changes: dict[str, Any]) -> None:
    read(base | changes)
    if isinstance(base.get("text_config"), dict):
        read(base | {"text_config": base["text_config"] | changes})


@patiently
@given(base=st.sampled_from(CONFIGS), data=st.data())
def test_fields_that_are_missing(base: dict[str, Any], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from(sorted(base)), max_size=4))
    read({name: value for name, value in base.items() if name not in gone})


@patiently
@given(base=st.sampled_from(CONFIGS), name=NAMES)
def test_another_family_s_fields(base: dict[str, Any], name: str) -> None:
    read(base | {"model_type": name})


@patiently
@given(config=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=12), name=NAMES)
def test_fields_from_nowhere(config: dict[str, Any], name: str) -> None:
    read(config | {"model_type": name})


@patiently
@given(config=VALUES)
def test_what_is_no_config_at_all(config: Any) -> None:
    read(config)


@settings(patiently, max_examples=50)
@given(base=st.sampled_from(CONFIGS), cut=st.floats(0, 1), garbage=st.binary(max_size=8))
def test_a_file_cut_short_or_garbled(
    base: dict[str, Any], cut: float, garbage: bytes, tmp_path_factory: Any
) -> None:
    text = json.dumps(base).encode()
    place = int(cut * len(text))
    file = Path(tmp_path_factory.mktemp("config")) / "config.json"
    for content in (text[:place], text[:place] + garbage + text[place:]):
        file.write_bytes(content)
        try:
            ModelSpec.from_file(file)
        except QuireError as error:
            assert "config.json" in str(error)  # noqa: PT017


def test_sections_lists_and_numbers_of_any_size() -> None:
    deep: Any = [1]
    nested: Any = FULL[0].config
    for _ in range(5000):
        deep, nested = [deep], {"text_config": nested}
    read(nested)
    read(FULL[0].config | {"head_dim": 10**5000, "dtype": 10**5000})
    read(FULL[0].config | {"head_dim": deep, "layer_types": deep})


def test_the_largest_model_that_is_allowed_is_read_soon() -> None:
    read(FULL[0].config | {"num_hidden_layers": 10_000})
