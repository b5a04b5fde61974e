"""Put the top-level folders into the package and build csrc/; all metadata is in pyproject.toml."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# A top-level import named "kernels" would clash with the Hugging Face package of that name.
FOLDERS = {
    "attnbias": "attnbias",
    "attnbias.kernels": "kernels",
    "attnbias.benchmarks": "benchmarks",
}

# Apple's clang has no OpenMP: calls then run on one thread. For another compiler there: CXXFLAGS="-fopenmp".
OPENMP = ("-Wno-unknown-pragmas",) if sys.platform == "darwin" else ("-fopenmp",)
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", *OPENMP, "-fvisibility=hidden", "-Icsrc"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wconversion", "-Wno-psabi"),
)
AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mfma", "-mf16c", "-mprefer-vector-width=512"),
)
# Files of csrc/ that are compiled once for each instruction set; the library chooses at run time. Those that
# take longest come first, so that no core waits for one at the end.
ISAS = {
    "isa.cpp": {
        "x86_64": {"avx512": AVX512, "avx2": ("-mavx2", "-mfma", "-mf16c"), "baseline": ()},
        "aarch64": {"neon": ()},
        "arm64": {"neon": ()},  # aarch64, as macOS names it
        "other": {"baseline": ()},
    },
    "pairs.cpp": {"x86_64": {"avx512bf16": (*AVX512, "-mavx512bf16")}, "other": {}},
}


def packages() -> list[str]:
    """Name every package below each folder, as it is imported once installed."""
    return [
        name
        for package, folder in FOLDERS.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    ]


def isas_of(source: str) -> dict[str, tuple[str, ...]]:
    """Name the instruction sets that a file is compiled for on this machine, with their flags."""
    name = Path(source).name
    if name not in ISAS:
        return {"any": ()}
    return ISAS[name].get(platform.machine(), ISAS[name]["other"])


def run(command: list[str]) -> None:
    """Run a compiler; show its messages, and keep them in the exception if it fails."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    done.check_returncode()


def in_words(error: OSError | subprocess.CalledProcessError) -> str:
    """Return a line on why there is no library, then the compiler's messages."""
    if isinstance(error, OSError):
        return str(error)
    lines = error.stderr.splitlines()
    first = next((line for line in lines if "error" in line), "no error message")
    return "\n".join([f"{error.cmd[0]} exited with {error.returncode}: {first}", *lines])


class BuildLibrary(build_ext):
    """Compile csrc/ into one plain shared library, which serves every Python and torch.

    Without a working compiler the package is still built. The reason is written to a file next to where the
    library would be, and ``attnbias.native`` quotes it, because pip shows no warning.
    ATTNBIAS_REQUIRE_CPU=1 makes it an error.
    """

    failure = ""

    def run(self) -> None:
        super().run()
        for ext in self.extensions:
            reason = Path(self.get_ext_fullpath(ext.name)).with_suffix(".error")
            if self.failure:
                reason.write_text(self.failure)
            else:
                reason.unlink(missing_ok=True)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            self._compile(ext)
        except (OSError, subprocess.CalledProcessError) as error:
            self.failure = in_words(error)
            if os.environ.get("ATTNBIAS_REQUIRE_CPU", "0") != "0":
                raise RuntimeError(
                    f"ATTNBIAS_REQUIRE_CPU: wanted a C++ library, got {self.failure}"
                ) from None
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # left by an earlier build
            self.warn(f"built without the C++ library, attention will be slow on CPUs: {self.failure}")

    def _compile(self, ext: Extension) -> None:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")
        extra = os.environ.get("CXXFLAGS", "").split()
        objects = Path(self.build_temp).absolute()
        objects.mkdir(parents=True, exist_ok=True)
        jobs = [
            (source, objects / f"{Path(source).stem}_{isa}.o", [*flags, f"-DAB_ISA={isa}"])
            for source in ext.sources
            for isa, flags in isas_of(source).items()
        ]

        def compile_one(job: tuple[str, Path, list[str]]) -> None:
            source, target, flags = job
            run([compiler, *FLAGS, *extra, *flags, "-c", source, "-o", str(target)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, jobs))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = [str(made) for _, made, _ in jobs]
        run([compiler, *FLAGS, *extra, "-shared", *linked, "-o", str(target)])


class PlatformWheel(bdist_wheel):
    """Tag the wheel by platform only: the library depends on no Python. Without it, tag for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        is_plain = self.get_finalized_command("build_ext").failure
        return "py3", "none", "any" if is_plain else super().get_tag()[2]


SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))  # or the source distribution lacks them

setup(
    packages=packages(),
    package_dir=FOLDERS,
    ext_modules=[Extension("attnbias.libattnbias", SOURCES, depends=HEADERS, optional=True)]
    if SOURCES
    else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
