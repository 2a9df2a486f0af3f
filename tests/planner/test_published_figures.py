"""Published figures and what the planner predicts: the file, and those that need no long run."""

import statistics

import pytest

from benchmarks.planner.bench_published import GOAL_ERROR, Point, predicted, read

POINTS, SAID = read()


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


@pytest.mark.parametrize("kind", ["saturation", "batch", "tpot", "ttft"])
def test_figures_are_predicted_within_a_quarter_in_the_median(kind: str) -> None:
    """Those whose plan takes little time: of a saturated server the ones with short answers."""
    most = {"saturation": 128, "tpot": 1024}.get(kind, 4096)
    several = [each for each in POINTS if each.kind == kind and each.output_tokens <= most]
    errors = [abs(predicted(each, SAID["configs"]) / each.measured - 1) for each in several]
    assert len(errors) >= 5
    assert statistics.median(errors) <= GOAL_ERROR


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
