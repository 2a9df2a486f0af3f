"""Which models run exactly: every causal class of Transformers, tiny, through the engine.

    python tools/model_matrix.py [names…] [--sight] [--write | --check] [--store FILE]

Names are model types; all if none is given. What was found is kept in a file outside the
repository, so that single ones can be run again. ``--sight`` takes the classes that read images,
whose page is docs/reference/models-that-see.md. ``--write`` makes docs/reference/models.md of all
that is kept; ``--check`` fails where that page says otherwise of a class than what was found now.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
SIGHT_PAGE = PAGE.with_name("models-that-see.md")

# Before torch is imported: tiny models lose on two threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT / "tests"))

from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from zoo import fleet  # noqa: E402
from zoo.check import check  # noqa: E402
from zoo.judge_sight import check_sight  # noqa: E402
from zoo.page import page, sight_page, verdicts  # noqa: E402


def main() -> int:
    options = _options()
    warnings.filterwarnings("ignore")
    every, judge, write, target = (
        (sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES), check_sight, sight_page, SIGHT_PAGE)
        if options.sight
        else (sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), check, page, PAGE)
    )
    store = options.store or Path(tempfile.gettempdir()) / (
        "quire-models-that-see.json" if options.sight else "quire-models.json"
    )
    if unknown := set(options.names) - set(every):
        print(f"Transformers knows no such model: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    found = fleet.run(options.names or every, store, judge)
    run = [each for each in found.values() if each.generates]
    exact = sum(each.verdict == "exact" for each in run)
    print(f"{exact} of {len(run)} classes that generate() runs are exact")
    kept = fleet.load(store)
    if options.write:
        if missing := set(every) - set(kept):
            print(f"nothing is kept of {', '.join(sorted(missing))}: run all", file=sys.stderr)
            return 2
        target.write_text(write(kept[name] for name in every), encoding="utf-8")
    if options.check:
        said = verdicts(target.read_text(encoding="utf-8"))
        now = verdicts(write(kept[name] for name in every if name in kept))
        wrong = {name: now[name] for name in found if said.get(name) != now[name]}
        for name, verdict in wrong.items():
            print(f"{name}: {verdict!r} now, and the page says {said.get(name)!r}")
        return int(bool(wrong))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types; all if none")
    parser.add_argument("--sight", action="store_true", help="classes that read images")
    parser.add_argument("--write", action="store_true", help="write the page in docs/reference")
    parser.add_argument("--check", action="store_true", help="compare with that page")
    parser.add_argument(
        "--store",
        type=Path,
        help="where what was found is kept (default: a file in the system's temporary folder)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
