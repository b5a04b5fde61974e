"""The file of a report, saved after each step, without names of hosts, users or folders."""

from __future__ import annotations

import getpass
import gzip
import json
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = 1
# A path of two or more parts, on any system; a fraction such as 3/4 has no slash in front.
_PATHS = re.compile(
    r"(?<![\w)>])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@ \-]*[\w.+@\-]){2,}[/\\]?|[A-Za-z]:\\[\w.+@\-]+"
)


def scrub(value: Any) -> Any:
    """Take paths and the names of the host and the user out of everything that is text.

    The last part of a path stays: it names the file of an error.

    Example:
        >>> scrub({"words": ["/opt/site/torch/nn.py: no such file", "3/4 of 128/64"]})
        {'words': ['<path>/nn.py: no such file', '3/4 of 128/64']}
    """
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(each) for each in value]
    if not isinstance(value, str):
        return value
    value = _PATHS.sub(lambda found: "<path>/" + re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], value)
    for name, stand_in in _names().items():
        value = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", stand_in, value)
    return value


def _names() -> dict[str, str]:
    """Return the names of this host and user, and what is written instead."""
    found = {platform.node(): "<host>", platform.node().partition(".")[0]: "<host>"}
    with suppress(KeyError, OSError):  # a container without an entry for its user
        found[getpass.getuser()] = "<user>"
    return {name: stand_in for name, stand_in in found.items() if len(name) > 1 and name != "localhost"}


class Store:
    """The steps that ran, by name; a rerun goes on after the last of them.

    Args:
        path: ends with .json.gz or .json.
        fresh: forget what is there.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"version": VERSION, "running": None, "is_whole": False, "steps": {}}
        if path.exists() and not fresh:
            self.data = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            kept = self.path.read_bytes()
            found = json.loads(gzip.decompress(kept) if self.path.suffix == ".gz" else kept)
        except (OSError, ValueError, EOFError):
            raise ValueError(f"{self.path.name}: it cannot be read; start anew with --fresh") from None
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"{self.path.name}: it is of another version; start anew with --fresh")
        return found

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """Return the steps that ended, by name."""
        steps: dict[str, dict[str, Any]] = self.data["steps"]
        return steps

    def begin(self, name: str) -> None:
        """Note that a step starts, so that the next process knows in which one this one ended."""
        self.data["running"] = name
        self.save()

    def end(self, name: str, found: dict[str, Any]) -> None:
        """Keep what a step found."""
        self.data["running"] = None
        self.steps[name] = scrub(found)
        self.save()

    def save(self) -> None:
        """Write the file at once, so that a crash leaves the old or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.data, indent=1).encode()
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_bytes(gzip.compress(text, mtime=0) if self.path.suffix == ".gz" else text)
        beside.replace(self.path)
