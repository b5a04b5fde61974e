"""Print the pinned requirements whose distribution is not installed, at whatever version."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing(requirement: str) -> bool:
    try:
        version(requirement.partition("==")[0])
    except PackageNotFoundError:
        return True
    return False


lines = (line.strip() for name in sys.argv[1:] for line in Path(name).read_text().splitlines())
sys.stdout.write(" ".join(r for r in lines if r and not r.startswith("#") and missing(r)) + "\n")
