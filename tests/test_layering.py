"""The rooms of src/quire, who may import whom, and what may be done in which of them.

A failure names the file, the line and what to do. Rooms that are still to come have their rows.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# What a room may import, besides itself; a module with a row of its own is a room here. Each comes
# after all that it may import, so there is no cycle. The package's own __init__ may name anything.
MAY_IMPORT = {
    "errors": "",
    "version": "",
    "units": "errors",
    "plugins": "errors",
    "kept_files": "",
    "sampling_params": "errors",
    "traces": "errors units",
    "memory": "errors units plugins",
    "spec": "errors units",
    "kv": "errors units plugins spec memory",
    "tiers": "errors units plugins kv",
    "figures": "",
    "kernels": "errors units kept_files",
    "devices": "errors units memory",
    "attention": "errors units plugins spec kv kernels devices",
    "config": "errors units plugins spec memory kv attention tiers",
    "layers": "errors units kernels",
    "models": "errors units kept_files spec memory kv kernels attention layers devices",
    "engine.structured": "errors units sampling_params",
    "engine.detokenizer": "sampling_params",
    "engine.sequence": "errors units kv sampling_params engine.structured engine.detokenizer",
    "engine.step_plan": "kv engine.sequence",
    "engine.statistics": "kv engine.sequence engine.step_plan",
    "engine.scheduling": "errors units spec kv engine.sequence engine.step_plan engine.statistics",
    "engine.scheduler": "errors units spec kv engine.sequence engine.step_plan"
    " engine.statistics engine.scheduling",
    "engine.sampling": "errors units devices sampling_params engine.sequence engine.step_plan",
    "engine.kv_sizing": "errors units config spec memory kv",
    "engine.kv_cache": "errors memory kv",
    "engine.interfaces": "kv engine.sequence engine.step_plan engine.scheduling",
    "engine.transfer": "errors units config kv tiers engine.sequence engine.scheduling",
    "engine.offloading": "errors units spec kv tiers engine.sequence engine.statistics"
    " engine.scheduling engine.kv_cache engine.transfer",
    "engine.event_format": "spec kv",
    "engine.core": "errors units engine.sequence engine.step_plan engine.scheduling"
    " engine.scheduler engine.interfaces",
    "chat": "errors units sampling_params",
    "engine": "errors units config spec memory kv tiers attention models devices"
    " sampling_params chat"
    " engine.sequence engine.step_plan engine.statistics engine.scheduling engine.scheduler"
    " engine.interfaces engine.core engine.detokenizer engine.kv_sizing engine.kv_cache"
    " engine.sampling engine.structured engine.transfer engine.offloading engine.event_format",
    "fleet.key_table": "",
    "fleet.prefix_directory": "errors units spec kv engine.event_format fleet.key_table",
    "fleet.placement": "units kv fleet.key_table fleet.prefix_directory",
    "fleet.detours": "units kv sampling_params engine.sequence fleet.placement",
    "fleet.shared_evidence": "kv",
    "planner": "errors units traces config spec memory kv tiers sampling_params"
    " engine.sequence engine.step_plan engine.statistics engine.scheduling engine.scheduler"
    " engine.interfaces engine.core engine.kv_sizing figures engine.event_format"
    " fleet.prefix_directory fleet.placement fleet.detours fleet.shared_evidence",
    "server": "errors version units traces config spec kv tiers sampling_params engine.sequence"
    " engine.step_plan engine.statistics engine.scheduling engine.scheduler engine chat"
    " engine.event_format",
    "fleet": "errors units config spec kv tiers sampling_params engine.sequence engine server"
    " engine.event_format engine.transfer fleet.key_table fleet.prefix_directory fleet.placement"
    " fleet.detours fleet.shared_evidence",
    "http": "errors",
    "bench": "errors units traces kv sampling_params devices engine.step_plan engine.scheduling"
    " engine.kv_cache engine http planner",
    "compare": "errors units config spec kv models sampling_params engine.sequence engine figures",
    "cli": "errors version units traces config spec memory kv tiers models sampling_params"
    " engine.sequence engine planner server figures compare bench http engine.kv_sizing devices"
    " fleet fleet.prefix_directory",
    "__main__": "cli",
}

# Who may import a package that is not ours; a package that is not listed may be imported anywhere.
ONLY_IN = {
    "transformers": {"models"},
    "torchao": {"models"},
    "llguidance": {"engine"},
    "ctypes": {"memory", "kernels"},
    "mmap": {"memory", "attention"},
    "cuda": {"memory", "attention"},
    "triton": {"attention"},
    "flashinfer": {"attention"},
    "numba": {"attention"},
    "obstore": {"tiers"},
    "mooncake": {"tiers"},
    "dynamo": {"fleet"},
    "ray": {"fleet"},
    "llvmlite": {"kernels", "attention", "layers"},
    "typer": {"cli"},
    "rich": {"cli"},
    "fastapi": {"server"},
    "starlette": {"server", "fleet"},
    "uvicorn": {"server"},
    "aiohttp": {"server"},
    "httpx": {"http"},
    "flask": {"server"},
    "prometheus_client": {"server"},
    "opentelemetry": {"server"},
    "msgspec": {"server", "cli", "traces", "engine", "fleet"},
    "zmq": {"engine", "fleet"},
    "jinja2": {"chat"},
}

# Importing these must not import torch: a planner or a command line answers in milliseconds.
TORCH_FREE = (
    *("errors", "units", "kept_files", "config", "spec", "memory", "kv"),
    *("sampling_params", "engine.prompts", "engine.sequence", "engine.step_plan"),
    *("engine.statistics", "engine.scheduling", "engine.scheduler", "engine.kv_sizing"),
    *("engine.interfaces", "engine.core", "engine.kv_cache", "engine.offloading"),
    *("traces", "planner", "figures", "compare", "http", "bench", "cli", "chat"),
    *("server.run", "engine.event_format", "fleet.placement", "fleet.fleet_status"),
    "fleet.fleet_plan",
)

VAGUE = re.compile(r"(Base|Abstract|Manager|Helper|Util|Utils|Impl)(?![a-z])")


@dataclass(frozen=True)
class Module:
    """One file of src/quire."""

    path: Path

    @property
    def name(self) -> str:
        """Without the leading ``quire.``: ``kv.interface``; ``kv`` for its __init__."""
        parts = self.path.relative_to(SRC / "quire").with_suffix("").parts
        return ".".join(part for part in parts if part != "__init__")

    @property
    def room(self) -> str:
        return room_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return all of the tree, walked through once for all tests."""
        return list(ast.walk(self.tree))

    def where(self, node: ast.AST | None = None) -> str:
        line = f":{getattr(node, 'lineno', 1)}" if node else ""
        return f"{self.path.relative_to(SRC.parent)}{line}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every import, inside functions and TYPE_CHECKING too: (node, full dotted name)."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.where(node)}: write the import in full, quire.…"
                for alias in node.names:
                    yield node, f"{node.module}.{alias.name}"

    def own_imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Those of quire, without the leading ``quire.``."""
        for node, name in self.imports():
            if name.startswith("quire."):
                yield node, name.removeprefix("quire.")


MODULES = tuple(Module(path) for path in sorted((SRC / "quire").rglob("*.py")))
NAMES = frozenset(f"quire.{module.name}" for module in MODULES)


def room_of(name: str) -> str:
    """The row of ``MAY_IMPORT`` that a module or a name in it belongs to: the longest that fits."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in MAY_IMPORT:
            return room
    return parts[0]


def report(problems: Iterable[str], advice: str) -> None:
    """Fail with the places and what to do there, without this file's own source around it."""
    found = list(problems)
    if found:
        pytest.fail("\n  ".join([advice, *found]), pytrace=False)


def test_a_room_comes_after_all_that_it_may_import() -> None:
    seen: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= seen, f"{room}: move its row below those it names"
        seen.add(room)


def test_every_module_belongs_to_a_room() -> None:
    report(
        (module.where() for module in MODULES if module.name and module.room not in MAY_IMPORT),
        "A new room. Say in MAY_IMPORT (tests/test_layering.py) what it may import.",
    )


def test_imports_follow_the_arrows() -> None:
    problems = []
    for module in MODULES:
        if not module.name:
            continue  # the package's own __init__ may name anything
        allowed = {module.room, *MAY_IMPORT.get(module.room, "").split()}
        problems += [
            f"{module.where(node)} imports quire.{name}; {module.room} may import only "
            f"{', '.join(sorted(allowed))}"
            for node, name in module.own_imports()
            if room_of(name) not in allowed
        ]
    report(
        problems,
        "Move the code to a room that may import it, or pass in what it needs. If the arrow is "
        "right, draw it in MAY_IMPORT (tests/test_layering.py).",
    )


def test_no_circle_of_modules() -> None:
    """Also none inside a room, and none for the sake of types alone."""
    imports = {
        module.name: {module_of(name) for _, name in module.own_imports()} - {module.name}
        for module in MODULES
        if module.name
    }
    reached: dict[str, set[str]] = {}
    for name in imports:
        todo, seen = [name], set[str]()
        while todo:
            more = imports[todo.pop()] - seen
            seen |= more
            todo += more
        reached[name] = seen
    report(
        (
            f"{name} -> {other} -> … -> {name}"
            for name, others in imports.items()
            for other in sorted(others)
            if name in reached[other]
        ),
        "Move what both need to a module below them, or let one take a protocol.",
    )


def module_of(name: str) -> str:
    """The module that a dotted name, without the leading ``quire.``, is or is in."""
    parts = name.split(".")
    while f"quire.{'.'.join(parts)}" not in NAMES:
        parts.pop()
    return ".".join(parts)


# Modules of one name: each implements one interface, which is what the name says.
SIBLINGS = {
    "backend": {
        "attention.cpu.backend",
        "attention.flashinfer.backend",
        "attention.triton.backend",
    },
    "memory": {"memory.cuda.memory", "memory.host.memory"},
}


def test_no_other_room_asks_which_strategy_it_is() -> None:
    """A strategy of another package has a name and classes that no line of ours can know."""
    names = {"contiguous", "growing", "paged", "virtual"}
    classes = {
        node.name
        for module in MODULES
        if module.room in ("kv", "memory")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and re.search("(Accounting|Storage|Memory)$", node.name)
    }
    report(
        (
            f"{module.where(node)} asks for {', '.join(sorted(asked))}"
            for module in MODULES
            if module.room not in ("kv", "memory") and module.name not in NAMES_STRATEGIES
            for node in module.nodes
            if (asked := asked_for(node) & (names | classes))
        ),
        "Let Strategy (quire/kv/strategies.py) have a field that says what you need to know.",
    )


def asked_for(node: ast.AST) -> set[str]:
    """Texts that are compared or listed, and classes that an object is asked for."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
        return {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
    if isinstance(node, ast.MatchClass):
        return {ast.unparse(node.cls)}
    if isinstance(node, ast.Dict):
        return {getattr(key, "value", "") for key in node.keys if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Compare | ast.Tuple | ast.List | ast.Set | ast.MatchValue):
        parts = ast.iter_child_nodes(node)
        return {part.value for part in parts if isinstance(part, ast.Constant)}
    return set()


# The report of a simulation always has these two beside the ones that were asked for.
NAMES_STRATEGIES = {"cli.simulate_page"}


def test_no_two_modules_have_one_name() -> None:
    """A command of the command line may have the name of what it runs."""
    named: dict[str, set[str]] = {}
    for module in MODULES:
        if module.path.stem != "__init__" and not module.name.startswith("cli."):
            named.setdefault(module.path.stem, set()).add(module.name)
    report(
        (
            f"{', '.join(sorted(modules))}"
            for name, modules in named.items()
            if len(modules) > 1 and SIBLINGS.get(name) != modules
        ),
        "Say in the name what tells it from the other.",
    )


def test_no_class_has_anothers_name() -> None:
    named: dict[str, list[str]] = {}
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(module.where(node))
    report(
        (f"{name}: {', '.join(places)}" for name, places in named.items() if len(places) > 1),
        "One word a thing, one thing a word: say in the name what tells it from the other.",
    )


# Words of our own for which the field has others: no class or module is named by one again.
RETIRED = (
    *("Desk", "Ticket", "Mailbox", "Stepper", "Chooser", "Machinery", "Crew", "Team", "Follower"),
    *("Shelf", "Mover", "Vacancies", "Verdict", "Census", "Contest", "StandIn", "Tally", "Lots"),
    *("Company", "Suspects", "Room", "NoRoom", "Governor", "KeptMemory", "Turnstile", "Entrance"),
    *("Exchange", "Gate", "Pass", "Doors", "Tape", "Patience", "Asked", "Pieces", "LoneModel"),
    *("Coordinator", "Snapshots", "Pace", "Runs"),
)


def test_no_class_or_module_has_a_retired_word_for_a_name() -> None:
    modules = {word.lower() for word in RETIRED}
    problems = [module.where() for module in MODULES if module.path.stem in modules]
    for module in MODULES:
        problems += [
            f"{module.where(node)} class {node.name}"
            for node in module.nodes
            if isinstance(node, ast.ClassDef) and node.name in RETIRED
        ]
    report(problems, "docs/glossary.md has the word that the field uses.")


def test_the_map_has_every_room() -> None:
    told = (SRC.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {name.split(".")[0] for name in MAY_IMPORT}
    report(
        (room for room in sorted(rooms) if not re.search(rf"[/`]{room}(/|\.py)`", told)),
        "Say in CONTRIBUTING.md, under 'Where things live', what this room is for.",
    )


def test_no_other_room_asks_for_an_attention_backend_by_name() -> None:
    """What a backend can do is a member of it, so that another package's is treated alike."""
    own = {"flashinfer", "triton", "sdpa", "reference"}  # "cpu" is a device too
    problems = []
    for module in MODULES:
        for node in module.nodes if module.room != "attention" else ():
            # Transformers has names of its own ways to attend.
            if isinstance(node, ast.Compare) and "_attn_implementation" not in ast.unparse(node):
                found = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)} & own
                problems += [f"{module.where(node)} {found}"] * bool(found)
    report(problems, "Ask the backend, or have quire.attention say what the name stands for.")


def test_no_module_imports_the_package_itself() -> None:
    report(
        (
            module.where(node)
            for module in MODULES
            for node, name in module.imports()
            if name == "quire"
        ),
        "Its __init__ is only half made then. Import the module that has the name.",
    )


def test_private_names_stay_in_their_module() -> None:
    problems = []
    for module in MODULES:
        ours = set()
        for node, name in module.own_imports():
            if any(re.match(r"_[^_]", part) for part in name.split(".")):
                problems.append(f"{module.where(node)} imports quire.{name}")
            if f"quire.{name}" in NAMES:
                ours.add(name.split(".")[-1])
        problems += [
            f"{module.where(node)} uses {node.value.id}.{node.attr}"
            for node in module.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ours
            and re.match(r"_[^_]", node.attr)
        ]
    report(problems, "A leading underscore means: for this module only. Drop it, or do without.")


def test_foreign_packages_stay_in_their_rooms() -> None:
    problems = []
    for module in MODULES:
        for node, name in module.imports():
            rooms = ONLY_IN.get(name.split(".")[0])
            if rooms and module.name.split(".")[0] not in rooms:
                problems.append(f"{module.where(node)} imports {name}: only {' and '.join(rooms)}")
    report(problems, "Let the room that may import it offer what you need.")


def test_only_ranks_exchange() -> None:
    problems = [
        f"{module.where(node)} imports {name}"
        for module in MODULES
        for node, name in module.imports()
        if re.match(r"torch\.(_C\._)?distributed\b", name)
        and not module.name.startswith("engine.parallel")
    ]
    report(problems, "torch.distributed is spoken with in quire.engine.parallel alone.")


def test_one_package_knows_ray() -> None:
    problems = [
        f"{module.where(node)} imports {name}"
        for module in MODULES
        for node, name in module.imports()
        if name.split(".")[0] == "ray" and not module.name.startswith("fleet.ray_serve")
    ]
    report(problems, "quire.fleet.ray_serve alone speaks with Ray: its interfaces change.")


def test_only_config_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    problems = []
    for module in MODULES:
        if module.room == "config":
            continue
        imported = [node for node, name in module.imports() if name in {f"os.{x}" for x in names}]
        used = [
            node
            for node in module.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr in names
        ]
        problems += [module.where(node) for node in [*imported, *used]]
    report(problems, "Make it a field in quire.config, and pass its value to what needs it.")


def test_no_module_has_state() -> None:
    report(
        (f"{module.where(node)} {what}" for module in MODULES for node, what in state_of(module)),
        "All users of the library in one process would share it. Make a constant a tuple, a "
        "frozenset or a MappingProxyType; let state belong to an object that a caller made.",
    )


def state_of(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """What is bound at import to something that can be changed."""
    makers = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}"
    for node in top_level(module.tree.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = ", ".join(ast.unparse(target) for target in targets)
        called = node.value.func if isinstance(node.value, ast.Call) else None
        maker = getattr(called, "id", None) or getattr(called, "attr", None)
        if names != "__all__" and (isinstance(node.value, displays) or maker in makers):
            yield node, names


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, also those inside ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def test_only_the_command_line_prints() -> None:
    report(
        (
            module.where(node)
            for module in MODULES
            if module.room != "cli"
            for node in module.nodes
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
        ),
        "Return it, or use logging.getLogger(__name__): only quire.cli talks to people.",
    )


def test_modules_say_what_they_are_for() -> None:
    report(
        (m.where() for m in MODULES if not (ast.get_docstring(m.tree) or "").strip()),
        "Begin it with a docstring: what it is for, then what it leaves to others.",
    )


def test_class_names_say_what_a_thing_is() -> None:
    report(
        (
            f"{module.where(node)} class {node.name}"
            for module in MODULES
            for node in module.nodes
            if isinstance(node, ast.ClassDef) and VAGUE.search(node.name)
        ),
        "No Base, Abstract, Manager, Helper, Utils or Impl: a protocol has the plain noun, an "
        "implementation an adjective.",
    )


TRY_WITHOUT_TORCH = """
import importlib, sys, traceback

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
failed = False
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed = True
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/quire/" in f.filename]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        print(f"  import {name}: {error}{where}")
sys.exit(failed)
"""


def test_importing_does_not_import_torch() -> None:
    names = ["quire"]
    for module in MODULES:
        if any(f"{module.name}.".startswith(f"{free}.") for free in TORCH_FREE):
            names.append(f"quire.{module.name}")
    command = [sys.executable, "-c", TRY_WITHOUT_TORCH, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(
            "These must be importable without torch and Transformers: import them inside the "
            "function that needs them, and for annotations under TYPE_CHECKING.\n"
            f"{done.stdout}{done.stderr}",
            pytrace=False,
        )
