"""``quire plan --images``: tokens as the processor counts them, bytes as the engine counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.test_images import llm_of, shown
from planner.capacity.test_plan_cli import as_json, quire
from seers import picture, seer


def test_a_config_says_what_images_of_any_size_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3: 896 × 896 pixels in patches of 14, pooled to 256 tokens."""
    arguments = ("gemma-3-4b-it", "--device", "h100", "--input-len", "100", "--output-len", "50")
    said = as_json(monkeypatch, capsys, *arguments, "--images", "3x640x480")
    images = said["images"]
    assert (images["num_patches"], images["each"]["num_tokens"]) == (64**2, 256)
    assert said["request"] == {"input_tokens": 100 + 3 * 256, "output_tokens": 50}
    # Of bfloat16, as wide as the model.
    assert said["needs"]["image_bytes"] == 512 * 2560 * 2
    assert said["needs"]["encoder_bytes"] == images["each"]["peak_bytes"] > 100 << 20
    # Twice each weight of SigLIP (0.42 billion) for each patch, and what patches attend.
    flops = 2 * 420e6 * 4096 + 4 * 4096**2 * 1152 * 27
    assert images["flops"] == pytest.approx(flops, rel=0.02)
    assert images["encoder_s"] > flops / 990e12
    _, out, _ = quire(monkeypatch, capsys, *arguments, "--images", "3x640x480")
    assert "256 tokens each, 768 in a prompt (by mm_tokens_per_image" in " ".join(out.split())
    bare = as_json(monkeypatch, capsys, *arguments)
    assert bare["images"] is None
    assert bare["needs"]["image_bytes"] == bare["needs"]["encoder_bytes"] == 0


@pytest.mark.parametrize("name", ["llava", "llava_next"])
def test_a_folders_processor_says_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the engine has it: tokens of a prompt, and bytes of the encoder."""
    for part in seer(name):
        part.save_pretrained(tmp_path)
    said = as_json(monkeypatch, capsys, str(tmp_path), "--memory", "8GB", "--images", "2x70x90")
    each = said["images"]["each"]
    with llm_of(name) as llm:
        request = llm.request(shown(name, "@", picture(1, 90, 70)))
        planned = llm.facts.vision.encoders["image"]
    assert each["num_tokens"] == len(request.prompt_token_ids)
    assert said["images"]["num_tokens"] == 2 * each["num_tokens"]
    assert each["row_bytes"] == planned.row_bytes
    assert each["num_values"] <= (planned.num_values or 0)
    # Estimated here, and counted there with the scores of attention.
    assert planned.peak_bytes / 8 < each["peak_bytes"] < 2 * planned.peak_bytes


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("gemma-3-4b-it", "--images", "3"), "must be width x height in pixels"),
        (("gemma-3-4b-it", "--images", "0x4x4"), "has 1 to 65,536 images"),
        (("gemma-3-4b-it", "--images", "4x99999"), "a side 1 to 65,536 pixels"),
        (("Qwen3-4B", "--images", "4x4"), "reads text"),
        (("--images", "4x4", "--validate"), "leave out --images"),
        (
            ("gemma-3-4b-it", "--images", "9x4x4", "--max-model-len", "2048"),
            "make 2,304 tokens, and a prompt with an answer has --max-model-len 2,048",
        ),
        (
            ("gemma-3-4b-it", "--images", "4x4", "--max-model-len", "512", "--input-len", "500"),
            "more than --max-model-len 512 less 256 of images",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    arguments: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, said = quire(monkeypatch, capsys, *arguments)
    assert code
    assert reason in " ".join(said.split())


def test_a_config_that_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seer("llava")[0].config.save_pretrained(tmp_path)
    code, _, said = quire(monkeypatch, capsys, str(tmp_path), "--images", "4x4")
    assert code
    assert "name a folder that has its preprocessor_config.json" in " ".join(said.split())
