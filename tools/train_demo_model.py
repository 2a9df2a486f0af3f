"""Train Quire's demo model: a small Qwen3 that writes Python, from the standard library alone.

Every command of Quire needs a model to show what it does, and a download is a poor first
experience.  This script makes the model that ships inside the package from nothing but the
``.py`` files that come with the Python interpreter that runs it:

    python tools/train_demo_model.py               # the shipped recipe: an hour on two free cores
    python tools/train_demo_model.py --steps 300   # a quick, much weaker model
    python tools/train_demo_model.py --export-only # write the newest checkpoint out again

It trains a byte-level BPE tokenizer, trains the model (Muon for the matrices, AdamW for the rest;
warm-up, constant rate, linear decay), measures it on modules that neither tokenizer nor model has
seen, against a modified Kneser-Ney n-gram model of the same tokens, and writes weights, tokenizer
and a model card with the measured numbers to ``--out``.  An interrupted run continues from its
last checkpoint in ``--work-dir``.  Needs torch >= 2.9 (for ``torch.optim.Muon``).
"""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo_model_card import card
from demo_model_data import (
    CONTEXT,
    END,
    STAGES,
    STEP_TOKENS,
    VOCABULARY,
    Batches,
    Corpus,
    encode,
    held_out_ids,
    load_corpus,
    make_tokenizer,
)
from demo_model_quality import held_out_nats, loss_of

MICRO_TOKENS = 4096  # of one backward pass: half the memory of the whole batch, and no slower
WARMUP_STEPS, DECAY_STEPS = 100, 400
MUON_RATE, ADAM_RATE = 0.02, 3e-3

OUT, WORK = Path("src/quire/demo_model"), Path("build/demo_model")
STEPS = 1400
CHAT_STOP_STRINGS = ("\n\n\n", "\nclass ", "\ndef ")  # an answer in a chat ends where these begin
STEPS_HELP = (
    f"Length of the run. Its last {DECAY_STEPS} steps, at most half, are the decay; "
    "until that has begun, a run may be continued with another length."
)
console = Console()


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def stage_of(step: int, steps: int) -> tuple[int, int]:
    """The stage of a step, and the step's number within it."""
    start = steps - min(DECAY_STEPS, steps // 2)
    return (0, step) if step < start else (1, step - start)


class Trainer:
    """Model, optimizers and data of one run, and its checkpoint.

    No random state is saved: there is no dropout, and the order of the data is derived.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, work: Path, steps: int, seed: int, device: str
    ) -> None:
        self.path, self.steps, self.device = work / "checkpoint.pt", steps, device
        self.identity = identity(corpus, seed)
        self.step, self.seconds, self.curve = 0, 0.0, list[tuple[int, float]]()
        self.model = make_model(seed).to(device)
        named = list(self.model.named_parameters())
        matrix = {name for name, p in named if p.ndim == 2 and "embed" not in name}
        if not hasattr(torch.optim, "Muon"):
            raise SystemExit(
                f"training needs torch >= 2.9 for its Muon; this is {torch.__version__}"
            )
        self.optimizers: list[tuple[float, torch.optim.Optimizer]] = [
            (MUON_RATE, torch.optim.Muon([p for n, p in named if n in matrix], weight_decay=0.05)),
            (
                ADAM_RATE,
                torch.optim.AdamW(
                    [p for n, p in named if n not in matrix], betas=(0.9, 0.95), weight_decay=0.0
                ),
            ),
        ]
        library, tests = encode(tokenizer, corpus.library), encode(tokenizer, corpus.tests)
        self.batches = [Batches(library, tests, tokenizer, s, seed) for s in range(len(STAGES))]
        self.held_out = held_out_ids(corpus, tokenizer).to(device)
        self.loss = loss_of
        cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        self.machine = f"{torch.get_num_threads()} CPU threads ({cpu})"
        if device == "cuda":
            self.machine = torch.cuda.get_device_name()

    def restore(self) -> None:
        saved = load_checkpoint(self.path, self.identity, self.device)
        if saved["steps"] != self.steps and max(
            stage_of(saved["step"], n)[0] for n in (self.steps, saved["steps"])
        ):
            raise SystemExit(
                f"{self.path} is at step {saved['step']} of {saved['steps']}: one of the two "
                f"lengths has its decay begun by then, so it cannot become a run of {self.steps}"
            )
        self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]
        self.model.load_state_dict(saved["model"])
        for (_, optimizer), state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        console.print(f"continuing at step {self.step} of {self.steps}")

    def save(self) -> None:
        state = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for _, optimizer in self.optimizers],
            **{
                name: getattr(self, name)
                for name in ("step", "steps", "seconds", "curve", "machine")
            },
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def rate(self) -> float:
        """Warm-up, constant, linear decay to zero; the end is all that depends on the length.

        So a run may be given another length before its decay, and equals one planned like that.
        """
        decay = min(DECAY_STEPS, self.steps // 2)
        return min(1.0, (self.step + 1) / WARMUP_STEPS, (self.steps - self.step) / decay)

    def advance(self) -> float:
        """One optimizer step; returns its loss."""
        begun, total = time.perf_counter(), 0.0
        stage, number = stage_of(self.step, self.steps)
        rows = self.batches[stage].batch(number).to(self.device)
        parts = rows.chunk(STEP_TOKENS // MICRO_TOKENS)
        for part in parts:
            loss = self.loss(self.model, part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise SystemExit(f"the loss became {total} at step {self.step}")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for base, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * self.rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - begun
        return total

    def run(self, save_every: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("training", total=self.steps, completed=self.step)
            losses, since = list[float](), time.perf_counter()
            while self.step < self.steps:
                losses.append(self.advance())
                if self.step % 20 == 0 or self.step == self.steps:
                    pace = (time.perf_counter() - since) / len(losses)
                    text = (
                        f"step {self.step}/{self.steps}  loss {np.mean(losses):.4f}  "
                        f"{STEP_TOKENS / pace:,.0f} tokens/s"
                    )
                    progress.update(task, completed=self.step, description=text)
                    if not console.is_terminal:
                        console.print(
                            f"{text}  {pace * (self.steps - self.step) / 60:.0f} min left"
                        )
                    losses, since = [], time.perf_counter()
                if self.step % save_every == 0 or self.step == self.steps:
                    nats = held_out_nats(self.model, self.held_out, quick=True)
                    self.curve.append((self.step, nats))
                    console.print(f"step {self.step}: held-out {nats:.4f} nats/token (a part)")
                    self.save()


def identity(corpus: Corpus, seed: int) -> dict[str, Any]:
    return {"seed": seed, "data": corpus.fingerprint}


def load_checkpoint(path: Path, expected: dict[str, Any], device: str) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if saved["identity"] != expected:
        raise SystemExit(
            f"{path} is of another run (seed or Python library differ): "
            "give another --work-dir, or --no-resume to start over"
        )
    return saved


def export(work: Path, out: Path, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
    """Write the checkpoint as a model folder: beside ``out`` first, then file by file into it."""
    run = load_checkpoint(work / "checkpoint.pt", identity(corpus, seed), "cpu")
    model = make_model(seed)
    model.load_state_dict(run["model"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name)
        model.to(torch.bfloat16).save_pretrained(folder)
        shown = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END,
            pad_token=END,
            model_max_length=CONTEXT,
            clean_up_tokenization_spaces=False,
            chat_stop_strings=CHAT_STOP_STRINGS,
        )
        shown.chat_template = (out / "chat_template.jinja").read_text(encoding="utf-8")
        shown.save_pretrained(folder)
        shipped: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        decay = sum(stage_of(step, run["steps"])[0] for step in range(run["step"]))
        phases = list(zip((run["step"] - decay, decay), STAGES, strict=True))
        text = card(shipped, run, phases, corpus, tokenizer, work)
        (folder / "README.md").write_text(text, encoding="utf-8")
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)  # libraries write some files for their owner alone
            os.replace(path, out / path.name)
    console.print(f"wrote {out}")


def main(  # noqa: PLR0913
    out: Annotated[Path, typer.Option(help="Folder for weights, tokenizer, card.")] = OUT,
    work_dir: Annotated[
        Path, typer.Option(help="Folder of the checkpoint; another start continues from it.")
    ] = WORK,
    steps: Annotated[int, typer.Option(min=20, help=STEPS_HELP)] = STEPS,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of data.")] = 0,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint, if any.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Use torch.compile: a fifth faster.")] = True,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    export_only: Annotated[
        bool, typer.Option("--export-only", help="Do not train; write out the checkpoint.")
    ] = False,
) -> None:
    """Train Quire's demo model on the Python standard library and write it to --out.

    The defaults are the recipe of the model that Quire ships. Interrupt the run at any time: the
    same command continues it.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is none of auto, cpu, cuda", param_hint="--device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if export_only and not (work_dir / "checkpoint.pt").exists():
        raise typer.BadParameter(f"{work_dir} holds no checkpoint.pt", param_hint="--work-dir")
    torch.set_num_threads(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    tokenizer = make_tokenizer(corpus, work_dir / "tokenizer.json")
    if not export_only:
        trainer = Trainer(corpus, tokenizer, work_dir, steps, seed, device)
        if compile:
            trainer.loss = torch.compile(loss_of, dynamic=False)
        if resume and trainer.path.exists():
            trainer.restore()
        trainer.run(save_every)
    export(work_dir, out, corpus, tokenizer, seed)


if __name__ == "__main__":
    typer.run(main)
