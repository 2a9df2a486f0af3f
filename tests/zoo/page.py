"""The page ``docs/reference/models.md``, made from what was found."""

import math
from collections.abc import Iterable

import transformers

from zoo.finding import ANOTHER_WAY, Finding, is_decoder
from zoo.hearing import hearing_classes
from zoo.sizes import ENCODERS, HALVES

SIGHT_COMMAND = "python tools/model_matrix.py --sight --write"
_SIGHT_INTRO = """\
# Models that see

Each class that Transformers {version} lists as reading images and text, built at a tiny size with
random weights in float32 and shown pictures through the engine, in eight situations: one image, an
image between texts, several images, a prefix hit that covers an image's tokens, two requests with
different images in one batch, chunks of five tokens, which cut an image, four continuations of a
prompt (`n=4`), and sequences that make room every few steps and begin anew.

*Exact*: greedy tokens are those of Transformers' own `generate` in all eight. Of eleven classes
(LLaVA and its kinds, Idefics3, Mistral 3, InternVL, Gemma 3, PaliGemma, Qwen-VL) their own
processor or image processor makes the pictures ready; of all others something that stands in, with
as many placeholders as the encoder makes features, without tiles and marks. So a published
processor may do what was not tried. The engine tries each model with a small image when it is
loaded, and refuses images with the reason if they come out otherwise than by itself.

*Videos* are shown in the same eight situations, one prompt having an image besides: four or seven
frames, made ready by a stand-in in each class. *Not judged* are those whose `generate` does not
run with what it makes; – stands where a class has no encoder for them.

A class that is *not exact* is refused, with the sentence that stands here: when it is loaded, or
when an image comes; one that says "may have 1" is exact with one image a prompt.

What [the text part of a model](models.md) must be to run at all holds here too. A tiny model with
random weights shows that features, positions and masks are right, not how well or how fast a
checkpoint sees.

This page is made by `{command}`. Do not edit it.
"""


def sight_page(findings: Iterable[Finding]) -> str:
    """All of the page of models that see."""
    several = sorted(findings, key=lambda found: found.model_type)
    judged = [found for found in several if found.generates]
    run = [found for found in judged if not found.reason.startswith(ANOTHER_WAY)]
    decoders = [found for found in judged if is_decoder(found.reason)]
    exact = [found for found in run if found.verdict == "exact"]
    rest = [found for found in judged if found.verdict != "exact"]
    lines = [f"{_NAMES} how it runs | videos |", _rule(4)]
    lines += [f"{_name(f)} {f.way} | {_cell(f.videos) or '–'} |" for f in exact]
    with_videos = [f for f in exact if f.videos and not f.videos.startswith("not judged")]
    seen = [f for f in with_videos if f.videos == "exact"]
    refused = [f"{_NAMES} why |", _rule(3), *(f"{_name(f)} {_cell(f.reason)} |" for f in rest)]
    return "\n".join(
        [
            _SIGHT_INTRO.format(version=transformers.__version__, command=SIGHT_COMMAND),
            *_not_refused(run),
            f"{len(several)} classes. `generate` ran {len(run)} with pictures here, and "
            f"{len(exact)} of these are exact ({100 * len(exact) / len(run):.0f} %). "
            f"{len(judged) - len(run)} more were not run, for no features can be handed to them: "
            f"with these it is {100 * len(exact) / len(judged):.0f} %. {len(decoders)} of them are "
            "decoders that see, and the others encoder-decoders, or classes that make no text of "
            f"images: with the decoders it is {100 * len(exact) / (len(run) + len(decoders)):.0f} "
            "%. "
            f"{len(several) - len(judged)} are not judged. Of the exact ones `generate` ran "
            f"{len(with_videos)} with videos, and {len(seen)} of these are exact with them too.\n",
            "## Exact\n",
            "\n".join([*lines, ""]),
            "## Not exact\n",
            "\n".join([*refused, ""]),
            "## Not judged\n",
            "At this size, or without a package that is not installed here, Transformers does not "
            "build these, or its `generate` does not run them with what stands in for a "
            "processor.\n",
            _not_judged([found for found in several if not found.generates]),
            "## Recordings\n",
            _recordings(),
        ]
    )


def _recordings() -> str:
    alone, besides = hearing_classes()
    both, all_alone = (", ".join(f"`{name}`" for name in names) for names in (besides, alone))
    return (
        "No class is given recordings in a prompt: the `forward` of none takes what an encoder "
        "made of one ([decision 127](../decisions/0127-a-decoder-hears-nothing.md)).\n\n"
        f"- {len(alone)} hear and see nothing: {all_alone}. They are refused when they are loaded, "
        "or read text where Transformers lists them as causal models.\n"
        f"- {len(besides)} hear besides, and are shown images if the tables above say so: {both}.\n"
    )


COMMAND = "python tools/model_matrix.py --write"
_INTRO = """\
# Models

Each class that Transformers {version} lists as a causal language model, built at a tiny size with
random weights in float32 and run through the engine: prompts in chunks beside other sequences that
decode, a prompt with two continuations, one that makes room and begins anew, and a prompt that
begins as an earlier one, in blocks of 4 tokens. Windows and chunks are of 7 and 8 tokens, prompts
of up to 27, so that windows move.

*Exact* means four things. Every token's logits are those of the model's own forward without a
cache, within 1e-5 of the largest one, 1e-3 where a layer scans. Greedy tokens are those of
Transformers' own `generate`, where that says the same with its cache as without. Transformers' own
cache holds the shapes that Quire read from the config. And step by step the engine takes, to the
byte, what an accounting without tensors takes, made from the config alone. What is not exact
is refused when it is loaded, with the sentence that stands here.

A tiny model with random weights shows that positions, masks and states are right. It does not show
that a checkpoint is good, nor how fast it runs.

This page is made by `{command}`. Do not edit it.
"""
_NAMES = "| `model_type` | class |"


def page(findings: Iterable[Finding]) -> str:
    """All of it."""
    several = sorted(findings, key=lambda found: found.model_type)
    apart = {*ENCODERS, *HALVES}
    own = [found for found in several if found.model_type not in apart]
    groups = {
        "decoders": own,
        "encoders that were told to write": [f for f in several if f.model_type in ENCODERS],
        "decoders cut out of encoder-decoders": [f for f in several if f.model_type in HALVES],
    }
    others = [found for found in several if found.generates and found.model_type in apart]
    parts = [
        _INTRO.format(version=transformers.__version__, command=COMMAND),
        *_not_refused(several),
        "## Counts\n",
        _counts(groups),
        "## Exact\n",
        _exact([f for f in own if f.verdict == "exact"]),
        "## Not exact\n",
        _refused([f for f in own if f.generates and f.verdict != "exact"]),
        "## Encoders and halves of encoder-decoders\n",
        "Transformers' `generate` runs these too, but they were not trained to be used so.\n",
        _exact([f for f in others if f.verdict == "exact"]),
        _refused([f for f in others if f.verdict != "exact"]),
        "## Not judged\n",
        "At this size Transformers does not build these, or its `generate` does not run them.\n",
        _not_judged([found for found in several if not found.generates]),
    ]
    return "\n".join(parts)


def model_types(text: str) -> list[str]:
    """The model types that a page names, in its tables."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return [row[1].strip().strip("`") for row in rows if row[1].strip() != "`model_type`"]


def verdicts(text: str) -> dict[str, str]:
    """Of each model type the heading that it stands under."""
    found, heading, exact = {}, "", False
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if line.startswith(_NAMES):
            exact = "remembers" in line
        elif line.startswith("| `"):
            found[line.split("`")[1]] = f"{heading}: {'exact' if exact else 'not'}"
    return found


def _not_refused(found: list[Finding]) -> list[str]:
    """A warning of those that are taken and are not exact; nothing where there are none."""
    wrong = [f for f in found if f.generates and f.verdict in ("differs", "fails")]
    names = [f"`{f.model_type}`" for f in wrong]
    return [f"**Not refused yet, and not exact: {', '.join(names)}.**\n"] if wrong else []


def _counts(groups: dict[str, list[Finding]]) -> str:
    lines = ["| | classes | built | `generate` runs | exact | of those that run |", _rule(6)]
    for name, found in groups.items():
        run = sum(f.generates for f in found)
        if not run:  # of a page of a few classes only
            continue
        exact = sum(f.generates and f.verdict == "exact" for f in found)
        built = sum(not f.not_built for f in found)
        lines.append(
            f"| {name} | {len(found)} | {built} | {run} | {exact} | {100 * exact / run:.0f} % |"
        )
    return "\n".join([*lines, ""])


def _exact(found: list[Finding]) -> str:
    lines = [f"{_NAMES} its layers remember | how it runs | logits apart |", _rule(5)]
    lines += [f"{_name(f)} {', '.join(f.kinds)} | {f.way} | {_bound(f.deviation)} |" for f in found]
    return "\n".join([*lines, ""])


def _refused(found: list[Finding]) -> str:
    lines = [f"{_NAMES} why | `generate` with `quire.cache` |", _rule(4)]
    lines += [f"{_name(f)} {_cell(f.reason)} | {_drop_in(f)} |" for f in found]
    return "\n".join([*lines, ""])


def _not_judged(found: list[Finding]) -> str:
    lines = [f"{_NAMES} what Transformers says |", _rule(3)]
    lines += [f"{_name(f)} {_cell(f.not_built or f.not_generated)} |" for f in found]
    return "\n".join([*lines, ""])


def _name(found: Finding) -> str:
    return f"| `{found.model_type}` | {found.class_name} |"


def _drop_in(found: Finding) -> str:
    if not found.kinds:  # no spec, so no cache
        return "no"
    return "differs" if found.drop_in else "the same tokens"


def _bound(deviation: float | None) -> str:
    """The power of ten above it, which is the same on every machine, or nearly."""
    if not deviation:
        return "0"
    return f"< 1e{math.floor(math.log10(deviation)) + 1:d}"


def _rule(num_columns: int) -> str:
    return "|" + " --- |" * num_columns


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
