"""What runs of a grid that is sampled."""

import pytest

from conformance.covering import beyond_samples

KINDS, SIZES = ("a", "b", "c"), (1, 2, 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_cases_have_every_level_and_are_asked_for_by_name_too(
    kind: str, size: int, request: pytest.FixtureRequest
) -> None:
    cases = [x for x in request.session.items if x.nodeid.partition("[")[0] in request.node.nodeid]
    assert request.node in cases
    if not any("[" in asked for asked in request.config.args):  # by name each runs
        rows = [(x.callspec.params["kind"], x.callspec.params["size"]) for x in _functions(cases)]
        assert len(rows) == 9 or (  # with make test-all
            len(rows) == 4 and {k for k, _ in rows} == {*KINDS}
        )
        assert {s for _, s in rows} == {*SIZES}


@pytest.mark.parametrize("value", range(3))
def test_what_has_no_mark_runs_whole(value: int, request: pytest.FixtureRequest) -> None:
    assert request.node not in beyond_samples(request.session.items)


def _functions(items: list[pytest.Item]) -> list[pytest.Function]:
    return [item for item in items if isinstance(item, pytest.Function)]
