"""Which models run exactly: every causal class of Transformers, tiny, through the engine.

    python tools/model_matrix.py [names…] [--write | --check] [--store FILE]

Names are model types; all if none is given. What was found is kept in a file outside the
repository, so that single ones can be run again. ``--write`` makes docs/reference/models.md of all
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

# Before torch is imported: tiny models lose on two threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT / "tests"))

from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from zoo import fleet  # noqa: E402
from zoo.page import page, verdicts  # noqa: E402


def main() -> int:
    options = _options()
    warnings.filterwarnings("ignore")
    every = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown := set(options.names) - set(every):
        print(f"Transformers knows no causal model {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    found = fleet.run(options.names or every, options.store)
    run = [each for each in found.values() if each.generates]
    exact = sum(each.verdict == "exact" for each in run)
    print(f"{exact} of {len(run)} classes that generate() runs are exact")
    kept = fleet.load(options.store)
    if options.write:
        if missing := set(every) - set(kept):
            print(f"nothing is kept of {', '.join(sorted(missing))}: run all", file=sys.stderr)
            return 2
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(kept[name] for name in every), encoding="utf-8")
    if options.check:
        said = verdicts(PAGE.read_text(encoding="utf-8"))
        now = verdicts(page(kept[name] for name in every if name in kept))
        wrong = {name: now[name] for name in found if said.get(name) != now[name]}
        for name, verdict in wrong.items():
            print(f"{name}: {verdict!r} now, and the page says {said.get(name)!r}")
        return int(bool(wrong))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types; all if none")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="compare with that page")
    parser.add_argument(
        "--store",
        type=Path,
        default=Path(tempfile.gettempdir()) / "quire-models.json",
        help="where what was found is kept (%(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
