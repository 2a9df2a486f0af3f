"""What keeping weights in 8 and 4 bits costs the demo model, in nats a token of unseen text.

    python -m benchmarks.engine.bench_quantized_loss [--windows N] [--claims] [--output FILE]

The text and how it is scored are bench_kv_dtype's: fourteen modules of this Python's own library
that the model was not trained on, each token with 1,024 to 2,047 tokens before it, through the
engine's kernels. The forms take turns, window by window, over the same tokens; a difference is of
pairs, and its error the standard error over the windows. Inputs of products are rounded to 8 bits
where the processor multiplies bytes, as an engine rounds them, but in rows that are "exact":
``--no-dynamic-quantization``.

GGUF files are written of the demo model as llama.cpp's script writes them, all matrices in Q8_0;
for Q4_0 the table of tokens, which is the head as well, in Q8_0.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import gguf
import typer
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.attention.bench_kv_dtype import Kept, held_out_ids, windows
from benchmarks.attention.bench_kv_dtype import table as loss_table
from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.config import kernel_dir
from quire.models.footprint import footprint
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel, load
from quire.spec.weight_forms import WEIGHT_FORMS

USUAL, EXACT = "16 bits", ", exact"
# Nats a token.
GOALS = {"int8-g128": 0.01, "int4-g32": 0.05, "GGUF Q8_0": 0.01, "GGUF Q4_0": 0.05}
BITS = {"GGUF Q8_0": 8.5, "GGUF Q4_0": 4.5}


def mean_difference(own: list[Tensor], usual: list[Tensor]) -> float:
    num_tokens = sum(map(len, own))
    return sum(float((a - b).sum()) for a, b in zip(own, usual, strict=True)) / num_tokens


def write_gguf(folder: Path, kind: str) -> None:
    """Write the demo model's weights to a file there, with its tokenizer beside it."""
    source = Path(str(files("quire") / "demo_model"))
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / f"demo-{kind}.gguf", config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        numbers = tensor.float().numpy()
        stored = names.get_name(name, (".weight",)) or name
        used = "F32" if numbers.ndim == 1 else "Q8_0" if "embed" in name else kind
        number = gguf.GGMLQuantizationType[used]
        writer.add_tensor(stored, gguf.quantize(numbers, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())


def bits_of(name: str) -> float:
    form = name.removesuffix(EXACT)
    return BITS.get(form) or (16 if name == USUAL else WEIGHT_FORMS[form].bits_a_weight)


def loaded_models(folder: Path | None) -> Iterator[tuple[str, LoadedModel]]:
    """Each form, and for the demo model GGUF files, too."""
    yield USUAL, load(folder)
    for form in sorted({form.name for form in WEIGHT_FORMS.values()}):
        yield form, load(folder, quantization=form)
        if form in GOALS:
            yield form + EXACT, load(folder, quantization=form, dynamic_quantization=False)
    if folder is None:
        for name in BITS:
            with TemporaryDirectory() as place:
                write_gguf(Path(place), name.removeprefix("GGUF "))
                yield name, load(place, dtype="bfloat16")


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
    for name, loaded in loaded_models(folder):
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
        [row[0], f"{bits_of(row[0]):.4g}",
         f"{sizes[row[0]] / 2**20:.2f}", *row[3:]]
        for row in shown.rows
    ]  # fmt: skip
    columns = ("--quantization", "bits a weight", "MiB of weights", "nats a token",
               "more than 16 bits", "same likeliest token")  # fmt: skip
    claims: list[dict[str, Any]] = []
    for form, goal in GOALS.items():
        if form not in scored:
            continue
        found = mean_difference(scored[form].losses, scored[USUAL].losses)
        claims.append(
            {
                "claim": f"{form} loses little on held-out text",
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
