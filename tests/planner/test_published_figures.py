"""Published figures and what the planner predicts: the file, and those that need no long run."""

import statistics

import pytest

from benchmarks.planner.bench_published import GOAL_ERROR, Point, predicted, read

POINTS, SAID = read()
QUICK = [point for point in POINTS if point.kind in ("batch", "ttft")]


def test_every_figure_has_a_source_that_is_an_address() -> None:
    assert len(POINTS) >= 20
    for point in POINTS:
        assert SAID["sources"][point.source].startswith("https://")
        assert point.measured > 0
    assert len({(p.kind, p.model, p.device, p.weights, p.lengths) for p in POINTS}) == len(POINTS)


def test_a_figure_without_a_source_is_refused(tmp_path) -> None:
    path = tmp_path / "published.toml"
    path.write_text(
        'sources = {}\nconfigs = {}\n[[series]]\nsource = "hearsay"\nkind = "ttft"\nmodel = "m"\n'
        'device = "h100"\nrows = [[128, 7]]\n'
    )
    with pytest.raises(ValueError, match="no source 'hearsay'"):
        read(path)


def test_batches_and_first_tokens_are_predicted() -> None:
    errors = [abs(predicted(each, SAID["configs"]) / each.measured - 1) for each in QUICK]
    assert len(errors) >= 15
    assert statistics.median(errors) <= GOAL_ERROR


def test_a_few_requests_at_a_time_are_simulated() -> None:
    point = next(p for p in POINTS if p.kind == "tpot" and p.output_tokens <= 1024)
    assert predicted(point, SAID["configs"]) == pytest.approx(point.measured, rel=0.5)


def test_a_quicker_memory_makes_quicker_tokens() -> None:
    """Of two devices with equal products, as the whole way to a prediction sees them."""

    def on(device: str) -> float:
        return predicted(
            Point(
                source="",
                kind="tpot",
                model="Llama-3.1-8B",
                weights="published",
                kv="auto",
                device=device,
                tp=1,
                batch=32,
                input_tokens=256,
                output_tokens=16,
                measured=1.0,
            ),
            {},
        )

    assert on("h200") < on("h100")
