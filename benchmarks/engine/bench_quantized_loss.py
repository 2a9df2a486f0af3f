"""What keeping weights in 8 and 4 bits costs the demo model, in nats a token of unseen text.

    python -m benchmarks.engine.bench_quantized_loss [--windows N] [--claims] [--output FILE]

The text and how it is scored are bench_kv_dtype's: fourteen modules of this Python's own library
that the model was not trained on, each token with 1,024 to 2,047 tokens before it, through the
engine's kernels. The forms take turns, window by window, over the same tokens; a difference is of
pairs, and its error the standard error over the windows. Windows are long, so that products are of
many rows: the codes have become numbers there. Few rows compute the same to a rounding, which the
tests hold.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from torch import Tensor

from benchmarks.attention.bench_kv_dtype import Kept, held_out_ids, windows
from benchmarks.attention.bench_kv_dtype import table as loss_table
from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.config import kernel_dir
from quire.models.footprint import footprint
from quire.models.fused_modules import FusedModules
from quire.models.loader import load
from quire.spec.weight_forms import WEIGHT_FORMS, weight_form

USUAL = "16 bits"
GOALS = {"int8": 0.01, "int4": 0.05}  # nats a token, of the usual forms


def mean_difference(own: list[Tensor], usual: list[Tensor]) -> float:
    num_tokens = sum(map(len, own))
    return sum(float((a - b).sum()) for a, b in zip(own, usual, strict=True)) / num_tokens


app = typer.Typer(add_completion=False)


@app.command()
def main(
    limit: Annotated[int, typer.Option("--windows", min=1, help="Of all 111, evenly.")] = 20,
    folder: Annotated[
        Path | None, typer.Option("--model", help="A folder with a tokenizer. Default: the demo.")
    ] = None,
    with_claims: WithClaims = False,
    output: Output = None,
) -> None:
    """The loss of the demo model on unseen text, with its weights in each form."""
    run = Run("engine.bench_quantized_loss", width=140)
    kept: dict[str, Kept] = {}
    sizes: dict[str, int] = {}
    forms = sorted({form.name for form in WEIGHT_FORMS.values()})
    for name in (USUAL, *forms):
        loaded = load(folder, quantization=None if name == USUAL else name)
        kept[name] = Kept(loaded, "auto", FusedModules(loaded.model, kernel_dir()))
        sizes[name] = footprint(loaded.model).weights_bytes
        tokenizer, dtype = loaded.tokenizer, loaded.dtype
    ids = held_out_ids(tokenizer)
    every = windows(len(ids), limit)
    for begin, first, stop in track(every, "windows", console=run.aside):
        for own in kept.values():
            own.score(ids[begin:stop], first - begin)
    scored = {name: own.scored for name, own in kept.items()}
    num_scored = sum(map(len, scored[USUAL].losses))
    shown = loss_table(scored, usual_name=USUAL)
    rows = [
        [row[0], f"{WEIGHT_FORMS[row[0]].bits_a_weight:.2f}" if row[0] != USUAL else "16",
         f"{sizes[row[0]] / 2**20:.2f}", *row[3:]]
        for row in shown.rows
    ]  # fmt: skip
    columns = ("--quantization", "bits a weight", "MiB of weights", "nats a token",
               "more than 16 bits", "same likeliest token")  # fmt: skip
    claims: list[dict[str, Any]] = []
    for name, goal in GOALS.items():
        form = weight_form(name).name
        found = mean_difference(scored[form].losses, scored[USUAL].losses)
        claims.append(
            {
                "claim": f"{name} ({form}) loses little on held-out text",
                "ours": round(found, 5),
                "peer": 0.0,
                "unit": "nats a token",
                "goal": f"≤ {goal}",
                "holds": found <= goal,
            }
        )
    what = f"the demo model in {dtype}, {num_scored:,} tokens in {len(every)} windows"
    setting = run.setting(
        f" --windows {limit}",
        packages=("torch", "transformers"),
        also=("no seed: nothing is drawn", what),
    )
    table = Table(title="Held-out text", columns=columns, rows=rows)
    run.end([table], setting, claims=claims if with_claims else (), output=output)


if __name__ == "__main__":
    app()
