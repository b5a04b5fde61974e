"""The installed package: what its import loads, costs and refuses."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from cases import ROOT

import attnbias as ab
from attnbias.native import open_library


def run(
    code: str, *, path: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process in the repository, with ``path`` first on its path."""
    if path is not None:
        code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_import_works_when_triton_is_blocked():
    done = run("import sys; sys.modules['triton'] = None; import attnbias; print(attnbias.__name__)")
    assert done.stdout == "attnbias\n", done.stderr


def test_import_loads_no_triton_when_it_is_installed(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise SystemExit('triton was imported')")
    code = "import torch, attnbias, sys; print([m for m in sys.modules if m.startswith('triton')])"
    done = run(code, path=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_import_takes_little_time_beyond_torch(tmp_path):
    """At most a fifth of torch's own import, in CPU time of one process: both depend on the machine.

    The first run writes bytecode, as an installation does; the runs that count read it.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    code = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import attnbias
print((time.process_time() - middle) / (middle - start))
"""
    assert run(code, env=env).returncode == 0
    shares = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.2:
        done = run(code, env=env)
        assert done.returncode == 0, done.stderr
        shares.append(float(done.stdout))
    assert min(shares) < 0.2, f"best of {len(shares)}: {min(shares):.2f}"


def test_mapped_folders_are_part_of_the_package():
    done = run("import attnbias.kernels as k, attnbias.benchmarks as b; print(k.__name__, b.__name__)")
    assert done.stdout == "attnbias.kernels attnbias.benchmarks\n", done.stderr


def test_importing_the_kernels_folder_names_the_right_module():
    done = run("import kernels")
    assert "kernels/ is installed as attnbias.kernels; import it by that name" in done.stderr


def test_every_folder_of_the_library_is_a_package():
    """A folder without ``__init__.py`` imports from a checkout but is left out of an install."""
    folders = {path.parent for path in (ROOT / "attnbias").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_types_are_shipped():
    assert (ROOT / "attnbias" / "py.typed").exists()


def build_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel into ``folder`` with the installed packages, and write nothing elsewhere."""
    pytest.importorskip("setuptools", minversion="77")
    build = "build", "--build-base", folder / "build", "egg_info", "--egg-base", folder
    wheel = "bdist_wheel", "--bdist-dir", folder / "tree", "--dist-dir", folder
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *build, *wheel],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "(false exited with 1: no error message)"),
        ("no-such-compiler", "([Errno 2] No such file or directory: 'no-such-compiler')"),
    ],
)
def test_build_without_the_library_gives_the_reason_and_is_for_any_platform(
    compiler, reason, tmp_path, monkeypatch
):
    """Its wheel was named like a complete one, and the reason was always "no compiler"."""
    done = build_wheel(tmp_path, CXX=compiler)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    monkeypatch.setenv("ATTNBIAS_CPU_LIBRARY", str(tmp_path / "site" / "attnbias" / "libattnbias.so"))
    assert open_library.__wrapped__() == (
        f"library: attnbias was built without its C++ library {reason}; "
        "install g++, then pip install --force-reinstall --no-cache-dir ."
    )


def test_build_that_requires_the_library_fails_without_it(tmp_path):
    done = build_wheel(tmp_path, CXX="false", ATTNBIAS_REQUIRE_CPU="1")
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
    wanted = "ATTNBIAS_REQUIRE_CPU: wanted a C++ library, got false exited with 1: no error message"
    assert wanted in done.stderr


@pytest.mark.parametrize(
    ("system", "machine", "sets", "is_parallel"),
    [
        ("linux", "x86_64", ["avx512", "avx2", "baseline"], True),
        ("linux", "aarch64", ["neon"], True),
        ("darwin", "arm64", ["neon"], False),  # was "baseline": macOS names aarch64 otherwise
    ],
)
def test_flags_fit_the_platform(system, machine, sets, is_parallel):
    """Apple's clang refuses -fopenmp, so a Mac had no library."""
    code = f"""
import platform, runpy, setuptools.command.bdist_wheel, setuptools.command.build_ext, sys
from concurrent.futures import ThreadPoolExecutor
setuptools.setup = lambda **given: None
sys.platform, platform.machine = {system!r}, lambda: {machine!r}
found = runpy.run_path("setup.py")
print(list(found["isas_of"]("csrc/isa.cpp")), "-fopenmp" in found["FLAGS"])
"""
    assert run(code).stdout == f"{sets} {is_parallel}\n"


def test_source_distribution_has_all_that_a_build_reads(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    made = "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path
    subprocess.run([sys.executable, "setup.py", "-q", *made], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    folders = ("attnbias", "kernels", "benchmarks", "csrc")
    suffixes = {".py", ".cpp", ".h", ".css", ".js", ".typed"}
    wanted = {
        str(f.relative_to(ROOT)) for top in folders for f in (ROOT / top).rglob("*") if f.suffix in suffixes
    }
    wanted |= {str(f.relative_to(ROOT)) for f in (ROOT / "benchmarks/cases/data").iterdir()}
    assert wanted - names == set()
    assert {"README.md", "LICENSE", "pyproject.toml", "setup.py"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_help_is_a_tour_whose_code_runs():
    """Every indented line of the docstring, with the plot that needs an optional package left out."""
    code = [line.strip() for line in ab.__doc__.splitlines() if line.startswith("    ")]
    assert len(code) >= 8
    done = run("\n".join(code).replace("rel.plot(512)", "pass"))
    assert done.returncode == 0 and "backend" in done.stdout, done.stderr


def test_modules_are_loaded_when_they_are_asked_for():
    names = ("integrations", "nn", "structured", "symmetry")
    later = ("integrations.varlen", "integrations.torchtitan")
    before = f"import sys, attnbias; assert not [x for x in {names} if 'attnbias.' + x in sys.modules]"
    use = "; ".join(f"attnbias.{name}" for name in (*names, "integrations.sdpa", "integrations.flex", *later))
    done = run(f"{before}\n{use}\nprint(attnbias.nn.RelationalAttention.__name__)")
    assert done.stdout == "RelationalAttention\n", done.stderr
    assert dir(ab) == sorted((*ab.__all__, *names, "__version__"))
    assert all(hasattr(ab, name) for name in dir(ab))


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'attnbias' has no attribute 'causal'"):
        ab.causal  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'attnbias\.integrations' has no attribute 'nope'"):
        ab.integrations.nope  # noqa: B018
    assert "Did you mean: 'Causal'?" in run("import attnbias; attnbias.causal").stderr
