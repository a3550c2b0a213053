"""Build the package as a release would, and try it: ``make package``.

It is built twice, in two places, with the time of the last commit: both must be equal, byte for byte. What is
inside is checked, and what a package index would say. Then each Python that is found (3.11 to 3.13) gets
fresh environments: bare, with the command line, with NIXL. In the end nothing may be left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MUST_HAVE = (
    "kvferry/py.typed",
    "kvferry/models/catalogue.json",
    "kvferry/endpoint/digest.cpp",
    "kvferry/transport/copy.cu",
    "kvferry/transport/digest.cu",
    "kvferry/cli/status/page.html",
    "kvferry/cli/picture/templates/plan.html.j2",
)
BARE = {"kvferry", "msgspec", "numpy", "pip", "setuptools"}
PLAN = ("plan", "--model", "llama-3.1-70b", "--src", "tp=4", "--dst", "tp=8,block=64")
MEMORY_DEMO = ("demo", "--transport", "memory", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")
NIXL_DEMO = ("demo", "--model", "gpt2", "--src", "tp=1", "--dst", "tp=2", "--layers", "2", "--requests", "2")


class Failed(Exception):
    """A check that did not hold."""


def say(text: str) -> None:
    print(f"    {text}", flush=True)


def ran(*words: object, ok: Sequence[int] = (0,), **kwargs: object) -> subprocess.CompletedProcess[str]:
    argv = [str(word) for word in words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload]
    if done.returncode not in ok:
        raise Failed(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done  # type: ignore[no-any-return]


# -- building ---------------------------------------------------------------------------------------


def tracked() -> list[str]:
    return ran("git", "ls-files", cwd=ROOT).stdout.splitlines()


def built(folder: Path) -> dict[str, Path]:
    """The package of what git knows, built in a place of its own, as files by name."""
    tree = folder / "tree"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    when = ran("git", "log", "-1", "--format=%ct", cwd=ROOT).stdout.strip()
    env = {**os.environ, "SOURCE_DATE_EPOCH": when, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    env["PIP_BUILD_CONSTRAINT"] = env["PIP_CONSTRAINT"]
    ran(sys.executable, "-m", "build", "--outdir", folder / "dist", tree, env=env)
    return {path.name: path for path in sorted((folder / "dist").iterdir())}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_equal(one: dict[str, Path], other: dict[str, Path]) -> None:
    if {name: digest(path) for name, path in one.items()} != {
        name: digest(path) for name, path in other.items()
    }:
        raise Failed("two builds of the same files differ")
    for name, path in one.items():
        say(f"{name}: {path.stat().st_size / 1024:.0f} KiB, twice the same, sha256 {digest(path)[:16]}…")


def check_contents(wheel: Path, sdist: Path) -> None:
    source = {name.removeprefix("src/") for name in tracked() if name.startswith("src/kvferry/")}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in inside if name.endswith(".dist-info/METADATA"))
    ours = {name for name in inside if ".dist-info/" not in name}
    if ours != source:
        raise Failed(f"the wheel and src differ: {sorted(ours ^ source)}")
    if missing := [name for name in MUST_HAVE if name not in ours]:
        raise Failed(f"the wheel lacks {missing}")
    if "](docs/" in metadata or "](../" in metadata:
        raise Failed("README has links that lead nowhere from a package index")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO", ".gitignore"}
    if strange := sorted(packed - set(tracked())):
        raise Failed(f"the source package has files that git does not know: {strange}")
    say(f"{len(ours)} files in the wheel, as in src; {len(packed)} in the source package, all known to git")


# -- trying -----------------------------------------------------------------------------------------


def pythons() -> Iterator[tuple[str, str]]:
    """Each version that is tried, and where it is."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for version in PYTHONS:
        known = [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"))]
        for python in filter(None, (shutil.which(f"python{version}"), *known)):
            asked = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
            found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
            if found.stdout.strip() == version:
                yield version, python
                break
        else:
            say(f"Python {version} is not here: not tried")


class Environment:
    """A fresh virtual environment."""

    def __init__(self, python: str, folder: Path) -> None:
        ran(python, "-m", "venv", folder)
        self._bin, self.folder = folder / "bin", folder

    def pip(self, *words: object) -> str:
        return ran(self._bin / "python", "-m", "pip", "--disable-pip-version-check", *words).stdout

    def install(self, *words: object) -> None:
        self.pip("install", "--quiet", "-c", ROOT / "constraints.txt", *words)

    def python(self, code: str) -> str:
        return ran(self._bin / "python", "-c", code, cwd=self.folder).stdout.strip()

    def kvferry(self, *words: str, ok: Sequence[int] = (0,), **env: str) -> subprocess.CompletedProcess[str]:
        return ran(self._bin / "kvferry", *words, ok=ok, cwd=self.folder, env={**os.environ, **env})

    def packages(self) -> set[str]:
        lines = self.pip("list", "--format", "freeze").splitlines()
        return {line.partition("==")[0].partition(" @")[0].lower() for line in lines}

    def files(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*") if "__pycache__" not in str(path)}

    def megabytes(self, *names: str) -> float:
        (site,) = self.folder.glob("lib/python*/site-packages")
        files = (file for name in names for file in site.glob(f"{name}*/**/*") if file.is_file())
        return sum(file.stat().st_size for file in files) / 1e6


def try_bare(python: str, folder: Path, wheel: Path) -> None:
    fresh = Environment(python, folder)
    before = fresh.files()
    fresh.install(wheel)
    if strange := fresh.packages() - BARE:
        raise Failed(f"a bare install brings {sorted(strange)}")
    started = time.perf_counter()
    fresh.python("import kvferry; kvferry.plan")
    seconds = time.perf_counter() - started
    said = fresh.kvferry("--help", ok=(2,)).stderr
    if 'pip install "kvferry[cli]"' not in said:
        raise Failed(f"a bare `kvferry --help` says {said!r}")
    ours, all_three = fresh.megabytes("kvferry"), fresh.megabytes("kvferry", "numpy", "msgspec")
    say(f"bare: {ours:.1f} MB, {all_three:.0f} with numpy and msgspec; first import {seconds * 1e3:.0f} ms")
    fresh.pip("uninstall", "--yes", "--quiet", "kvferry", "numpy", "msgspec")
    if left := {name for name in fresh.files() - before if "kvferry" in name}:
        raise Failed(f"uninstalling leaves {sorted(left)}")
    say("uninstalled: nothing of it is left")


def try_command(python: str, folder: Path, wheel: Path, *, nixl: bool) -> None:
    fresh = Environment(python, folder)
    fresh.install(f"{wheel}[cli]")
    if "PROVED" not in fresh.kvferry(*PLAN).stdout:
        raise Failed("kvferry plan proved nothing")
    fresh.kvferry(*MEMORY_DEMO)
    if "_KVFERRY_COMPLETE" not in fresh.kvferry(_KVFERRY_COMPLETE="source_bash").stdout:
        raise Failed("there is no completion for bash")
    say("[cli]: plan proves, demo in memory verifies, bash completes")
    if nixl:
        fresh.install("--no-deps", "nixl", "nixl-cu12")
        fresh.kvferry(*NIXL_DEMO)
        say("with NIXL: demo between processes verifies")


def try_all(python: str, folder: Path, wheel: Path) -> None:
    fresh = Environment(python, folder)
    report = fresh.pip("install", "--dry-run", "--quiet", "--report", "-", f"{wheel}[all]")
    say(f"[all] can be resolved: {report.count('is_direct')} packages (not installed: torch is among them)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where the package is put")
    parser.add_argument("--only-build", action="store_true", help="build and check, try nothing")
    parser.add_argument("--all", action="store_true", help="also resolve [all], which downloads GBs")
    parser.add_argument("--no-nixl", action="store_true", help="leave NIXL out (its wheel is large)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-package-") as text:
        folder = Path(text)
        try:
            print("==> build, twice")
            one = built(folder / "one")
            check_equal(one, built(folder / "other"))
            (wheel,) = (path for name, path in one.items() if name.endswith(".whl"))
            (sdist,) = (path for name, path in one.items() if name.endswith(".tar.gz"))
            check_contents(wheel, sdist)
            ran(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
            say("twine: nothing to say against it")
            for version, python in () if arguments.only_build else pythons():
                print(f"==> Python {version}")
                try_bare(python, folder / f"bare-{version}", wheel)
                try_command(python, folder / f"cli-{version}", wheel, nixl=not arguments.no_nixl)
                if arguments.all:
                    try_all(python, folder / f"all-{version}", wheel)
            arguments.outdir.mkdir(exist_ok=True)
            for path in one.values():
                shutil.copy(path, arguments.outdir / path.name)
        except Failed as failed:
            print(f"package: {failed}", file=sys.stderr)
            return 1
    print(f"==> in {arguments.outdir}: {', '.join(one)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
