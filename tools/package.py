"""Build the package as a release would, and try it: ``make package``, ``make package-serve``.

It is built twice, in two places, with the time of the last commit: both must be equal, byte for byte. What is
inside is checked, and what a package index would say. Then each Python that is found (3.11 to 3.13) gets
fresh environments: bare, with the command line, with NIXL. In the end nothing may be left.

``make package-serve`` tries it beside vLLM instead: two servers find the connector by its name alone, move a
cache, and must answer as one server does. Nothing of this checkout takes part but the example's files.
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
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MUST_HAVE = (
    "kvferry/py.typed",
    "kvferry/models/catalogue.json",
    "kvferry/transport/copy.cu",
    "kvferry/transport/digest.cu",
    "kvferry/cli/picture/templates/plan.html.j2",
)
BARE = {"kvferry", "msgspec", "numpy", "pip", "setuptools"}
PLAN = ("plan", "--model", "llama-3.1-70b", "--src", "tp=4", "--dst", "tp=8,block=64")
MEMORY_DEMO = ("demo", "--transport", "memory", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")
EXAMPLE = ("examples/vllm/serve.sh", "examples/vllm/ask.py", "tests/support/vllm/tiny.py")
NOT_FOR_USERS = ("PYTHONPATH", "PYTHONHOME", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
"""Set by developers and by ``make``: our sources on a path, our versions of everything."""
NIXL_DEMO = ("demo", "--model", "gpt2", "--src", "tp=1", "--dst", "tp=2", "--layers", "2", "--requests", "2")


class Failed(Exception):
    """A check that did not hold."""


def say(text: str) -> None:
    print(f"    {text}", flush=True)


def users_environment(**more: str) -> dict[str, str]:
    """The environment variables of somebody who has the package and no checkout."""
    return {name: value for name, value in os.environ.items() if name not in NOT_FOR_USERS} | more


def ran(*words: object, ok: Sequence[int] = (0,), **kwargs: object) -> subprocess.CompletedProcess[str]:
    argv = [str(word) for word in words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload]
    if done.returncode not in ok:
        raise Failed(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done  # type: ignore[no-any-return]


def ran_aloud(*words: object, **kwargs: object) -> list[str]:
    """The lines that it printed, also shown as they come: for what takes minutes."""
    argv = [str(word) for word in words]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
    ) as going:  # type: ignore[call-overload]
        lines = []
        for line in going.stdout:
            say(line.rstrip())
            lines.append(line.rstrip())
    if going.returncode:
        raise Failed(f"{' '.join(argv)}: exit code {going.returncode}; what it said stands above")
    return lines


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


def pythons(versions: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each version that is tried, and where it is."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for version in versions:
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
    """A virtual environment, used as somebody without a checkout would use it."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder = folder / "bin", folder

    def ran(self, command: str, *words: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return ran(self.bin / command, *words, **{"cwd": self.folder, "env": users_environment(), **kwargs})  # type: ignore[arg-type]

    def pip(self, *words: object) -> str:
        return self.ran("python", "-m", "pip", "--disable-pip-version-check", *words).stdout

    def install(self, *words: object) -> None:
        """At our versions."""
        self.pip("install", "--quiet", "-c", ROOT / "constraints.txt", *words)

    def install_newest(self, *words: object) -> float:
        """At whatever versions pip chooses, as for a user; how many seconds it took."""
        started = time.perf_counter()
        self.pip("install", "--quiet", *words)
        return time.perf_counter() - started

    def python(self, code: str) -> str:
        return self.ran("python", "-c", code).stdout.strip()

    def kvferry(self, *words: str, ok: Sequence[int] = (0,), **env: str) -> subprocess.CompletedProcess[str]:
        return self.ran("kvferry", *words, ok=ok, env=users_environment(**env))

    def packages(self) -> dict[str, str]:
        """What is installed, with its versions."""
        lines = self.pip("list", "--format", "freeze").splitlines()
        pairs = (line.replace(" @ ", "==").partition("==") for line in lines)
        return {name.lower(): version for name, _, version in pairs}

    def files(self, name: str = "*") -> list[Path]:
        found = (path.relative_to(self.folder) for path in self.folder.rglob(name))
        return sorted(path for path in found if "__pycache__" not in path.parts)

    def megabytes(self, *names: str) -> float:
        """Of packages by name, or of all that is there."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        patterns = [(site, f"{name}*/**/*") for name in names] or [(self.folder, "**/*")]
        files = (file for where, pattern in patterns for file in where.glob(pattern))
        return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink()) / 1e6


def fresh_environment(python: str, folder: Path) -> Environment:
    ran(python, "-m", "venv", folder)
    return Environment(folder)


def check_uninstall(environment: Environment) -> None:
    environment.pip("uninstall", "--yes", "--quiet", "kvferry")
    if left := environment.files("*kvferry*"):
        raise Failed(f"uninstalling leaves {', '.join(map(str, left))}")
    say("uninstalled: nothing of it is left")


def try_bare(python: str, folder: Path, wheel: Path) -> None:
    fresh = fresh_environment(python, folder)
    fresh.install(wheel)
    if strange := fresh.packages().keys() - BARE:
        raise Failed(f"a bare install brings {sorted(strange)}")
    started = time.perf_counter()
    fresh.python("import kvferry; kvferry.plan")
    seconds = time.perf_counter() - started
    said = fresh.kvferry("--help", ok=(2,)).stderr
    if 'pip install ".[cli]"' not in said:
        raise Failed(f"a bare `kvferry --help` says {said!r}")
    ours, all_three = fresh.megabytes("kvferry"), fresh.megabytes("kvferry", "numpy", "msgspec")
    say(f"bare: {ours:.1f} MB, {all_three:.0f} with numpy and msgspec; first import {seconds * 1e3:.0f} ms")
    check_uninstall(fresh)


def check_plan(environment: Environment, *options: str) -> None:
    if "PROVED" not in environment.kvferry(*PLAN, *options).stdout:
        raise Failed("kvferry plan proved nothing")


def try_command(python: str, folder: Path, wheel: Path, *, nixl: bool) -> None:
    fresh = fresh_environment(python, folder)
    fresh.install(f"{wheel}[cli]")
    check_plan(fresh)
    fresh.kvferry(*MEMORY_DEMO)
    if "_KVFERRY_COMPLETE" not in fresh.kvferry(_KVFERRY_COMPLETE="source_bash").stdout:
        raise Failed("there is no completion for bash")
    say("[cli]: plan proves, demo in memory verifies, bash completes")
    if nixl:
        fresh.install("--no-deps", "nixl", "nixl-cu12")
        fresh.kvferry(*NIXL_DEMO)
        say("with NIXL: demo between processes verifies")


def try_all(python: str, folder: Path, wheel: Path) -> None:
    """Gigabytes: torch is among them, because NIXL's wheels declare it."""
    fresh = fresh_environment(python, folder)
    seconds = fresh.install_newest(f"{wheel}[all]")
    packages = fresh.packages()
    say(f"[all]: {len(packages)} packages, {fresh.megabytes() / 1e3:.1f} GB, installed in {seconds:.0f} s")
    say(", ".join(f"{name} {packages[name]}" for name in ("torch", "nixl", "numpy") if name in packages))
    fresh.python("import kvferry; kvferry.plan")
    fresh.kvferry("--help")
    check_plan(fresh, "--html", "plan.html")
    fresh.kvferry(*NIXL_DEMO)
    say("[all]: plan proves and draws, demo between processes over NIXL verifies")
    check_uninstall(fresh)
    shutil.rmtree(folder)  # the next one needs the room


# -- beside vLLM ------------------------------------------------------------------------------------


def environment_with_vllm(folder: Path) -> Environment:
    """The CPU build of vLLM, as for ``make serve``, without kvferry and NIXL: the package brings them."""
    ran_aloud(ROOT / "tools" / "vllm_env.sh", sys.executable, folder)
    made = Environment(folder)
    made.pip("uninstall", "--yes", "--quiet", *(name for name in made.packages() if is_brought(name)))
    return made


def is_brought(package: str) -> bool:
    return package.startswith(("kvferry", "nixl"))


def check_replaced(before: dict[str, str], after: dict[str, str]) -> None:
    """Whoever has a vLLM keeps it, and the torch that it was built for."""
    if replaced := sorted(name for name in before if after.get(name) != before[name]):
        changes = (f"{name} {before[name]} by {after.get(name, 'nothing')}" for name in replaced)
        raise Failed(f"[vllm] replaces {', '.join(changes)}")


def check_place(module: Path, environment: Path) -> None:
    """That kvferry is the installed one."""
    if module.resolve().is_relative_to(ROOT) or not module.resolve().is_relative_to(environment.resolve()):
        raise Failed(f"kvferry is imported from {module}, not from the environment {environment}")


def check_verdict(lines: Sequence[str]) -> None:
    """The last line of ``serve.sh`` must say that the tokens are equal."""
    last = lines[-1] if lines else ""
    if not last.startswith("==> EQUAL: "):
        raise Failed(f"serve.sh ends with {last!r}")


def try_serve(folder: Path, wheel: Path) -> None:
    started = time.perf_counter()
    vllm = environment_with_vllm(folder / "vllm")
    before = vllm.packages()
    say(f"vLLM {before['vllm']} with torch {before['torch']}: made in {time.perf_counter() - started:.0f} s")
    seconds = vllm.install_newest(f"{wheel}[vllm]")
    check_replaced(before, vllm.packages())
    brought = sorted(vllm.packages().keys() - before.keys())
    say(f"[vllm]: brings {', '.join(brought)} in {seconds:.0f} s, replaces nothing")
    place = Path(vllm.python("import kvferry; print(kvferry.__file__)"))
    check_place(place, vllm.folder)
    say(f"kvferry is {place.relative_to(vllm.folder)} of that environment")
    serve(vllm, folder / "elsewhere")
    check_uninstall(vllm)


def serve(vllm: Environment, folder: Path) -> None:
    """Two servers and a proxy, in a folder that has nothing but the example, and a home that was empty."""
    home = folder / "home"
    home.mkdir(parents=True)
    for name in EXAMPLE:
        shutil.copy(ROOT / name, folder)
    say("two servers, the connector by its name alone: a minute or two")
    started = time.perf_counter()
    env = users_environment(BIN=str(vllm.bin), HOME=str(home), MODEL="", PORT="")
    check_verdict(ran_aloud(folder / "serve.sh", cwd=folder, env=env))
    say(f"served in {time.perf_counter() - started:.0f} s")
    if left := [str(path.relative_to(folder)) for path in folder.rglob("*kvferry*")]:
        raise Failed(f"serving leaves {left}")


# -- all of it --------------------------------------------------------------------------------------


def built_and_checked(folder: Path) -> dict[str, Path]:
    print("==> build, twice", flush=True)
    one = built(folder / "one")
    check_equal(one, built(folder / "other"))
    (wheel,) = (path for name, path in one.items() if name.endswith(".whl"))
    (sdist,) = (path for name, path in one.items() if name.endswith(".tar.gz"))
    check_contents(wheel, sdist)
    ran(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    say("twine: nothing to say against it")
    return one


def try_each_python(arguments: argparse.Namespace, folder: Path, wheel: Path) -> None:
    for version, python in pythons(arguments.python or PYTHONS):
        print(f"==> Python {version}", flush=True)
        try_bare(python, folder / f"bare-{version}", wheel)
        try_command(python, folder / f"cli-{version}", wheel, nixl=not arguments.no_nixl)
        if arguments.all:
            try_all(python, folder / f"all-{version}", wheel)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where the package is put")
    parser.add_argument("--only-build", action="store_true", help="build and check, try nothing")
    parser.add_argument(
        "--python", action="append", choices=PYTHONS, help="try this one, not all; repeatable"
    )
    parser.add_argument("--all", action="store_true", help="also install [all], GBs, and try it")
    parser.add_argument("--no-nixl", action="store_true", help="leave NIXL out (its wheel is large)")
    parser.add_argument("--serve", action="store_true", help="try it beside vLLM, and nothing else")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-package-") as text:
        folder = Path(text)
        try:
            files = built_and_checked(folder)
            (wheel,) = (path for name, path in files.items() if name.endswith(".whl"))
            if arguments.serve:
                print("==> beside vLLM", flush=True)
                try_serve(folder, wheel)
            elif not arguments.only_build:
                try_each_python(arguments, folder, wheel)
            arguments.outdir.mkdir(exist_ok=True)
            for path in files.values():
                shutil.copy(path, arguments.outdir / path.name)
        except Failed as failed:
            print(f"package: {failed}", file=sys.stderr)
            return 1
    print(f"==> in {arguments.outdir}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
