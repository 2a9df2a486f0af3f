"""vLLM's core in a virtual environment of its own: made on first use, then only checked.

    python -m benchmarks.accounting.vllm_environment [--peer-env FOLDER]

vLLM's published wheel is compiled for CUDA. Its source distribution needs no compiler for what is
measured here: the KV-cache core is plain Python and imports with the packages below. So the source
is fetched from the package index that pip is set to use, checked against the index's SHA-256, and
unpacked beside the environment. Packages that this interpreter has, torch above all, are shared
through a path file rather than installed twice; what is missing, or what vLLM wants in another
version, is installed there. Only torch stays the one that is shared: another would bring gigabytes.
"""

import argparse
import hashlib
import importlib.metadata
import os
import re
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.parse
import urllib.request
import venv
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.harness.peers import HOME, PeerUnavailable

VERSION = "0.33.0"
DEFAULT_ENV = HOME / "vllm"

# What `vllm.v1.core` imports on the way, within the bounds of vLLM's own requirements/common.txt.
PACKAGES = (
    "aiohttp>=3.14.4", "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle",
    "fastapi>=0.133,<0.137", "llguidance>=1.7,<1.8", "msgspec", "openai>=2.25",
    "oss-harmony>=0.0.11", "partial-json-parser", "pillow>=13", "prometheus-client>=0.18",
    "psutil", "py-cpuinfo", "pybase64", "pyzmq>=25", "requests>=2.33", "uvloop",
    "numpy", "transformers>=5.16.1",
)  # fmt: skip
ALONE = ("xgrammar==0.2.8",)  # without its dependencies: they include a gigabyte of Triton
IMPORTS = "import vllm.v1.core.kv_cache_manager, vllm.v1.request; print(vllm.__version__)"
ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

Say = Callable[[str], None]


def python(env: Path = DEFAULT_ENV, *, say: Say = print) -> Path:
    """The interpreter that can import vLLM's core; everything it lacks is installed first.

    Raises: PeerUnavailable.
    """
    env = env.resolve()
    program = env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = env / ".ready"
    wanted = "\n".join((VERSION, sys.version, sysconfig.get_path("purelib"), *PACKAGES, *ALONE))
    if stamp.exists() and stamp.read_text() == wanted:
        return program
    begun = time.monotonic()
    try:
        _install(env, program, say)
    except (OSError, HTTPException, tarfile.TarError, subprocess.SubprocessError) as error:
        raise PeerUnavailable(f"vLLM {VERSION} could not be installed: {error}") from error
    stamp.write_text(wanted)
    say(f"vLLM {VERSION} is ready after {time.monotonic() - begun:.0f} s.")
    return program


def environ() -> dict[str, str]:
    """The variables that the peer's processes are started with."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **ENVIRONMENT}


def _install(env: Path, program: Path, say: Say) -> None:
    say(f"[1/4] Making an environment for vLLM {VERSION}.")
    env.mkdir(parents=True, exist_ok=True)
    (env / ".gitignore").write_text("*\n")
    if not program.exists() or _fails(program, "-m", "pip", "--version"):
        venv.create(env, clear=False, with_pip=True, symlinks=os.name != "nt")
    source = env / f"vllm-{VERSION}"
    say("[2/4] Fetching its source distribution: about 50 MB.")
    if not (source / "complete").exists():
        _unpack(_download(env, say), source)
        (source / "complete").touch()
    site = _run(program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    shared = sysconfig.get_path("purelib")
    Path(site, "peer.pth").write_text(f"{source}\n{shared}\n")
    say("[3/4] Installing the packages that its core imports: about 60 MB, a minute.")
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "-q", "--only-binary", ":all:"]
    torch = f"torch=={importlib.metadata.version('torch')}"
    _run(program, *pip, *PACKAGES, torch, what="pip install")
    _run(program, *pip, "--no-deps", *ALONE, what="pip install --no-deps")
    say("[4/4] Importing its core: about ten seconds.")
    found = _run(program, "-c", IMPORTS, what="the import of vLLM's core").split()
    if VERSION not in found:
        raise PeerUnavailable(f"the environment imports vLLM {found}, not {VERSION}")


# -- the source distribution ---------------------------------------------------------------------


def _download(folder: Path, say: Say) -> Path:
    url, digest = _find(f"vllm-{VERSION}.tar.gz")
    target = folder / f"vllm-{VERSION}.tar.gz"
    have, shown, computed = 0, time.monotonic(), hashlib.sha256()
    with _open(url) as answer, target.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        while chunk := answer.read(1 << 20):
            out.write(chunk)
            computed.update(chunk)
            have += len(chunk)
            if time.monotonic() - shown > 2:
                shown = time.monotonic()
                say(f"      {have / 1e6:.0f} of {size / 1e6:.0f} MB")
    if digest and computed.hexdigest() != digest:
        target.unlink()
        raise PeerUnavailable(f"{target.name}: SHA-256 {computed.hexdigest()}, not {digest}")
    return target


def _unpack(archive: Path, folder: Path) -> None:
    """The package's Python modules and its metadata; the rest of the source is not needed."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            inside = Path(*path.parts[1:])
            kept = inside.parts[:1] == ("vllm.egg-info",) or (
                inside.parts[:1] == ("vllm",) and path.suffix == ".py"
            )
            if kept and member.isfile() and ".." not in path.parts:
                member.name = str(inside)
                tar.extract(member, folder, filter="data")
    archive.unlink()


def _find(filename: str) -> tuple[str, str]:
    """Address and SHA-256 of a file of vLLM, from the simple index that pip is set to use.

    ``pip download`` would do if it did not run the source's build, which wants a compiler and
    gigabytes, only to learn its metadata.
    """
    tried = []
    for index in _indexes():
        page = f"{index.rstrip('/')}/vllm/"
        try:
            with _open(page) as answer:
                links = _Links(answer.geturl())
                links.feed(answer.read().decode())
        except (OSError, HTTPException) as error:
            tried.append(f"{_without_password(page)}: {error}")
            continue
        for link in links.found:
            address, _, fragment = link.partition("#")
            if address.rpartition("/")[2] == filename:
                found = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
                return address, found[1] if found else ""
        tried.append(f"{_without_password(page)}: it has no {filename}")
    raise PeerUnavailable("no package index has vLLM's source: " + "; ".join(tried))


def _open(url: str) -> Any:
    authorities = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    return urllib.request.urlopen(url, timeout=60, context=authorities)


def _indexes() -> Iterator[str]:
    """As pip would ask them: the environment, then pip's configuration, then PyPI."""
    for name, default in (("index-url", "https://pypi.org/simple"), ("extra-index-url", "")):
        value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
        for section in ("install", "global"):
            if not value:
                value = _pip_setting(f"{section}.{name}")
        yield from (value or default).split()


def _pip_setting(name: str) -> str:
    asked = [sys.executable, "-m", "pip", "config", "get", name]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class _Links(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self._base = base
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.found.append(urllib.parse.urljoin(self._base, href))


# -- child processes -----------------------------------------------------------------------------


def _fails(program: Path, *arguments: str) -> bool:
    return subprocess.run([program, *arguments], capture_output=True, check=False).returncode != 0


def _run(program: Path, *arguments: str, what: str = "the environment's Python") -> str:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, env=environ()
    )
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise PeerUnavailable(f"{what} failed:\n{last}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Install vLLM's core for the benchmarks.")
    parser.add_argument("--peer-env", type=Path, default=DEFAULT_ENV, help="folder to install into")
    try:
        print(python(parser.parse_args().peer_env))
    except PeerUnavailable as error:
        raise SystemExit(str(error)) from error
