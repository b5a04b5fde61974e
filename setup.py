"""Put the top-level folders into the package; all metadata is in pyproject.toml."""

from setuptools import find_packages, setup

# A top-level import named "kernels" would clash with the Hugging Face package of that name.
FOLDERS = {
    "attnbias": "attnbias",
    "attnbias.kernels": "kernels",
    "attnbias.benchmarks": "benchmarks",
}


def packages() -> list[str]:
    """Name every package below each folder, as it is imported once installed."""
    return [
        name
        for package, folder in FOLDERS.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    ]


# csrc/ has a plain C ABI and needs no torch to build: it becomes one `ext_modules` entry here, with
# `depends` naming its headers (without that they are missing from the source distribution).
setup(packages=packages(), package_dir=FOLDERS)
