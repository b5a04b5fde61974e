"""In which tiles each pass runs, by architecture, dtype and head size; and what a device is.

The table is chosen by counts of compiled code (instructions per multiply-add, spills, the busiest pipe),
not by timing: no configuration here has been measured on a GPU yet. ``tune`` measures on yours, and the
environment variable ``ATTNBIAS_TRITON`` changes configurations by hand (see ``parse_changes``).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

Pass = Literal["forward", "backward_query", "backward_key"]
_PASSES: tuple[Pass, ...] = ("forward", "backward_query", "backward_key")

OLDEST = 80  # compute capability x 10
OLDEST_TRITON = (3, 6)


class Target(NamedTuple):
    """The device and compiler that kernels are compiled for."""

    arch: int  # compute capability x 10
    triton: tuple[int, int]
    is_interpreted: bool = False
    processors: int = 0  # multiprocessors; 0 = not known


class Config(NamedTuple):
    """The tiling and compilation of one pass. ``rows`` are queries, ``cols`` keys, in every pass."""

    rows: int
    cols: int
    warps: int
    stages: int
    tma: bool = False  # tensor descriptors for the side that is walked, where its strides allow
    ahead: bool = False  # carry the next tile's number through the loop: one more stage in flight
    one_buffer: bool = False  # the accumulator of tcgen05 products in one buffer
    packed: bool = False  # two float32 an instruction; needs a whole row in a thread: sm_100, 4 warps
    by_fma: int = 0  # of 8 columns, those whose exp2 is a polynomial
    half: bool = False  # mask 16-bit dS instead of float32 P
    fixed: bool = False  # the row strides of the walked side are compiled in
    chunk: int = 0  # cut heads into chunks of at most so many columns; 0: one, of a power of 2
    specialised: bool = False  # warps of their own load and multiply: sm_100, forward, T without N and P

    @classmethod
    def parse(cls, text: str) -> Config:
        """Read ``128x64 w4 s3 T N``: rows x cols, warps, stages, then a letter for each flag.

        Example:
            >>> Config.parse("64x32 w4 s2 N") == Config(64, 32, warps=4, stages=2, ahead=True)
            True
        """
        shape, warps, stages, *flags = text.split()
        rows, cols = map(int, shape.split("x"))
        given: dict[str, Any] = dict(_FLAGS[letter] for letter in flags)
        return cls(rows, cols, int(warps[1:]), int(stages[1:]), **given)

    def __str__(self) -> str:
        letters = "".join(f" {letter}" for letter, (name, on) in _FLAGS.items() if getattr(self, name) == on)
        return f"{self.rows}x{self.cols} w{self.warps} s{self.stages}{letters}"


_FLAGS = {
    "T": ("tma", True),
    "N": ("ahead", True),
    "A": ("one_buffer", True),
    "P": ("packed", True),
    "E2": ("by_fma", 2),
    "H": ("half", True),
    "F": ("fixed", True),
    "C64": ("chunk", 64),
    "C128": ("chunk", 128),
    "W": ("specialised", True),
}


VARIABLE = "ATTNBIAS_TRITON"
_FORM = (
    "changes such as 'forward: 128x64 w4 s3; backward_key: without T N; all: s1', where a pass is forward, "
    f"backward_query, backward_key or all, and flags are {' '.join(_FLAGS)}"
)


class Change(NamedTuple):
    """One change of ``ATTNBIAS_TRITON``: another configuration, or parts of the one that is there."""

    which: str  # a pass, or "all"
    config: Config | None = None  # in place of the table's
    parts: tuple[tuple[str, Any], ...] = ()  # fields of the table's and their new values

    def apply(self, which: Pass, config: Config, tile: int) -> Config:
        """Return the configuration of a pass after this change.

        Raises:
            ValueError: if its tile does not divide the tile of the lists.
        """
        if self.which not in (which, "all"):
            return config
        if self.config is None:
            return config._replace(**dict(self.parts))
        rows, cols = self.config.rows, self.config.cols
        if tile % rows or tile % cols:
            raise ValueError(f"{VARIABLE}: wanted a tile that divides the lists' {tile}, got {rows}x{cols}")
        return self.config


def parse_changes(text: str) -> list[Change]:
    """Read the changes of ``ATTNBIAS_TRITON``, which are separated by semicolons and made in this order.

    A change is a pass and a colon, then a configuration (``128x64 w4 s3 T``), or parts of one: ``w8``,
    ``s1``, ``without T N``. Without a pass it is for all of them.

    Raises:
        ValueError: naming the change that cannot be read.

    Example:
        >>> first, second = parse_changes("forward: 64x32 w4 s2; without T N")
        >>> str(first.apply("forward", Config.parse("128x64 w4 s3 T"), 128))
        '64x32 w4 s2'
        >>> str(second.apply("backward_key", Config.parse("128x64 w4 s3 T N A"), 128))
        '128x64 w4 s3 A'
    """
    return [_parse_change(part.strip()) for part in text.split(";") if part.strip()]


def _parse_change(text: str) -> Change:
    before, colon, after = text.partition(":")
    which, words = (before.strip(), after.split()) if colon else ("all", text.split())
    try:
        if which not in (*_PASSES, "all") or not words:
            raise ValueError
        if "x" in words[0]:
            config = Config.parse(" ".join(words))
            # What Triton and the kernels take; anything else fails deep inside the compiler.
            if min(config.rows, config.cols) < 16 or config.warps not in (4, 8) or config.stages < 1:
                raise ValueError
            return Change(which, config)
        parts: dict[str, Any] = {}
        for i, word in enumerate(words):
            if word == "without" and words[i + 1 :]:
                for letter in words[i + 1 :]:
                    name, on = _FLAGS[letter]
                    parts[name] = type(on)(0)
                break
            parts[{"w": "warps", "s": "stages"}[word[0]]] = int(word[1:])
        if parts.get("warps", 4) not in (4, 8) or parts.get("stages", 1) < 1:
            raise ValueError
        return Change(which, parts=tuple(parts.items()))
    except (ValueError, LookupError):
        raise ValueError(f"{VARIABLE}: wanted {_FORM}, got {text!r}") from None


class Chunk(NamedTuple):
    """Some columns of a head: a power of 2."""

    first: int
    columns: int


class Loop(NamedTuple):
    """One loop over tiles, and the depths whose tiles it takes: entries of a row of ``Lists.ptr``."""

    chunks: int  # of the head that it reads, from the first on
    first: int  # depth
    stop: int
    is_partial: bool = False
    whole: int = 1  # chunks that every depth reads to their end; all where it depends on the pair
    walked: int = 0  # rows of the walked side that it takes at once; filled in for a configuration


PLAIN_LOOPS = Loop(1, 0, 1), Loop(1, 1, 2, is_partial=True)


class Present(NamedTuple):
    """The options that a call has, with which its kernel is compiled."""

    softcap: bool = False
    sink: bool = False
    dropout: bool = False
    terms: bool = False
    grouping: bool = False  # heads that share keys, where it matters
    dk: bool = False
    dv: bool = False
    d_key_bias: bool = False
    levels: int = 0  # of a multi-level score; 0 for a plain one
    per_pair: bool = False  # divide by the number of levels that a pair shares
    chunks: tuple[Chunk, ...] = ()  # () for one of all columns
    loops: tuple[Loop, ...] = PLAIN_LOOPS


class Spec(NamedTuple):
    """All that a kernel is compiled for, passed to it as one constant: no relation, length or group."""

    d: int
    d_columns: int  # of all chunks: d, padded
    e: int
    e_columns: int  # a power of 2
    tile: int  # of the lists
    rows: int  # of the kernel's own tile: queries
    cols: int  # keys
    ahead: bool
    one_buffer: bool
    packed: bool
    by_fma: int
    half: bool
    tma: bool
    specialised: bool
    row_strides: tuple[int, int]  # of the two tensors that are walked; 0 = not compiled in
    is_wide: bool  # offsets inside a tile may pass 2^31
    shift: int  # see tile.pattern_words
    ptx: bool  # inline PTX, which the interpreter has not
    precision: str  # of float32 products
    has: Present
    # Functions take the number of a chunk or loop: Triton 3.6 passes no tuple of numbers.
    chunks: tuple[Chunk, ...]
    loops: tuple[Loop, ...]


# (architecture, head size, list tile): forward, backward_query, backward_key, for 16-bit elements.
_HALF = {
    (80, 64, 128): ("128x64 w4 s3", "128x32 w4 s3 H", "32x128 w4 s3"),
    (80, 64, 64): ("64x64 w4 s3", "64x64 w4 s2 N H", "64x64 w4 s2"),
    (80, 128, 128): ("128x32 w4 s3", "64x64 w4 s2 N H F", "64x128 w8 s2 N F"),
    (80, 128, 64): ("64x64 w4 s2", "64x64 w4 s2 N H", "64x64 w4 s2 F"),
    (80, 256, 128): ("64x32 w4 s2", "64x32 w4 s2 H", "32x32 w4 s2"),
    (80, 256, 64): ("64x32 w4 s2", "64x32 w4 s2 H", "32x32 w4 s2"),
    (86, 64, 128): ("128x64 w4 s3 F", "64x64 w4 s2 N H", "64x64 w4 s2"),
    (86, 64, 64): ("64x64 w4 s3", "64x64 w4 s2 N H", "64x64 w4 s2"),
    (86, 128, 128): ("128x64 w8 s3", "128x32 w8 s3 H", "32x128 w8 s2"),
    (86, 128, 64): ("64x64 w4 s2", "64x32 w4 s2 H", "32x64 w4 s2"),
    (86, 256, 128): ("64x32 w4 s2", "32x32 w4 s2 H", "32x32 w4 s2"),
    (86, 256, 64): ("64x32 w4 s2", "32x32 w4 s2 H", "32x32 w4 s2"),
    (90, 64, 128): ("64x128 w4 s2 T N", "64x128 w4 s2 T N H", "64x64 w4 s3 T N"),
    (90, 64, 64): ("64x64 w4 s3 T N", "64x64 w4 s3 T N H", "64x64 w4 s3 T N"),
    (90, 128, 128): ("128x128 w8 s2 T N", "128x64 w8 s3 T N H", "64x128 w8 s3 T N"),
    (90, 128, 64): ("64x64 w4 s2 T N", "64x64 w4 s2 T N H", "64x64 w4 s2 T N"),
    (90, 256, 128): ("128x64 w8 s2 T N", "64x64 w4 s2 T N", "32x64 w8 s2 T N"),
    (90, 256, 64): ("64x64 w4 s2 T N", "64x64 w4 s2 T N", "32x64 w8 s2 T N"),
    (100, 64, 128): ("128x128 w4 s3 T N A P E2", "128x64 w4 s3 T N A H", "128x128 w8 s2 T N A"),
    (100, 64, 64): ("64x64 w4 s3 T N A", "64x64 w4 s3 T N A", "64x64 w4 s2 T N A"),
    (100, 128, 128): ("128x128 w4 s2 T N A P", "128x64 w4 s2 T N A", "64x128 w4 s2 T N A"),
    (100, 128, 64): ("64x64 w4 s2 T N A", "64x64 w4 s2 T N A", "64x64 w4 s2 T N A"),
    (100, 256, 128): ("128x64 w8 s2 T N A", "64x64 w8 s2 T N A", "64x64 w8 s2 T N A"),
    (100, 256, 64): ("64x64 w4 s2 T N A", "64x64 w8 s2 T N A", "64x64 w8 s2 T N A"),
    (120, 64, 128): ("128x64 w4 s3 T", "64x64 w4 s2 N H", "64x64 w4 s2"),
    (120, 64, 64): ("64x64 w4 s3", "64x64 w4 s2 N H", "64x64 w4 s2"),
    (120, 128, 128): ("128x64 w8 s3", "128x32 w8 s3 H", "32x128 w8 s2"),
    (120, 128, 64): ("64x64 w4 s2", "64x32 w4 s2 H", "32x64 w4 s2"),
    (120, 256, 128): ("64x32 w4 s2", "32x32 w4 s2 H", "32x32 w4 s2"),
    (120, 256, 64): ("64x32 w4 s2", "32x32 w4 s2 H", "32x32 w4 s2"),
}
# The same from Triton 3.9 on, where it compiles something else to fewer instructions or spills.
_SINCE_3_9 = {
    (80, 128, 128): ("128x32 w4 s3 F", "64x64 w4 s2 N H F", "64x128 w8 s2 N F"),
    (100, 128, 128): ("128x128 w4 s2 T A P", "128x64 w4 s2 T N A", "64x128 w4 s2 T N A"),
}
# The same for multi-level scores, where the above spills or does not fit.
_LEVELS: dict[tuple[int, int, int], dict[str, str]] = {
    (80, 64, 128): {"backward_key": "32x64 w4 s3"},
    (80, 128, 128): {"forward": "128x64 w8 s3 F", "backward_key": "32x128 w8 s2 N F"},
    (90, 128, 128): {"backward_key": "64x128 w8 s3 F"},
    (100, 64, 128): {"forward": "128x64 w4 s3 N A P E2", "backward_key": "64x128 w8 s2 N A"},
    (100, 128, 128): {"forward": "128x64 w4 s2 N A P", "backward_key": "32x128 w4 s2 N A"},
    (120, 64, 128): {"backward_key": "64x64 w4 s2 F"},
    (120, 128, 128): {"backward_key": "32x128 w8 s2 N F"},
}
_LEVELS_SINCE_3_9 = {**_LEVELS, (90, 64, 128): {"backward_query": "64x64 w4 s3 N"}}
_SMALL = (86, 89, 120)  # architectures with 99 KB of shared memory
# (architecture, head size) for float32, in three TF32 products each; the same for both list tiles. Both parts
# of an operand are kept, so tiles are small, and heads are cut: one chunk's parts are in registers at a time.
# With 8 warps, or 16 columns of scores for 32 rows, Triton computes scores twice.
_FLOAT = {
    (80, 64): ("64x32 w4 s2", "32x32 w4 s2", "32x32 w4 s2"),
    (80, 96): ("32x32 w4 s2 C64", "16x32 w4 s2", "32x16 w4 s1 F"),
    (80, 128): ("32x32 w4 s2 C64", "32x32 w4 s2 F C64", "32x16 w4 s1 F"),
    (80, 256): ("16x32 w4 s1 C64", "16x32 w4 s1", "32x16 w4 s1"),
    (86, 64): ("64x32 w4 s2", "32x32 w4 s2", "32x32 w4 s2"),
    (86, 96): ("32x32 w4 s2 C64", "16x32 w4 s1", "32x16 w4 s1"),
    (86, 128): ("32x32 w4 s2 C64", "16x32 w4 s1", "32x16 w4 s1"),
    (86, 256): ("16x32 w4 s1 C64", "16x32 w4 s1", "16x16 w4 s1"),
    (90, 96): ("64x32 w4 s2 C64", "16x32 w4 s2", "32x16 w4 s1 F"),
    (90, 128): ("64x32 w4 s2 C64", "32x32 w4 s2 F C64", "32x16 w4 s2 F"),
    (100, 96): ("32x32 w4 s2 C64", "16x32 w4 s2", "32x16 w4 s1 F"),
    (100, 128): ("32x32 w4 s2 C64", "32x32 w4 s2 F C64", "32x16 w4 s1 F"),
}
# Behind every choice, in this order, for a device on which it does not fit: the last fits in 99 KB.
_SMALLER = ("64x32 w4 s2", "32x32 w4 s2", "32x32 w4 s1", "16x16 w4 s1")


@functools.cache
def candidates(
    target: Target, which: Pass, dtype: torch.dtype, d: int, e: int, tile: int, has_levels: bool = False
) -> tuple[Config, ...]:
    """Return the configuration of a pass, then smaller ones, should a device not have room for it.

    A newer architecture takes what the nearest known one before it takes; what ``tune`` has measured
    goes before that, but for multi-level scores, of which it measures none; and the changes of
    ``ATTNBIAS_TRITON`` come last.

    Args:
        target: what is compiled for.
        which: the pass.
        dtype: of the inputs.
        d: head size.
        e: value size.
        tile: list tile, 64 or 128.
        has_levels: for a multi-level score.

    Raises:
        ValueError: if ``ATTNBIAS_TRITON`` is no list of changes, or its tile does not divide the list tile.
    """
    size = 64 if max(d, e) <= 64 else 128 if max(d, e) <= 128 else 256
    arch = max(known for known, *_ in _HALF if known <= target.arch)
    if dtype == torch.float32 and not target.is_interpreted:  # where there is room for any tile
        single = 96 if 64 < max(d, e) <= 96 else size
        texts = _FLOAT[_nearest_single(arch, single), single]
    else:
        by_version = _SINCE_3_9 if target.triton >= (3, 9) else {}
        texts = by_version.get((arch, size, tile), _HALF[arch, size, tile])
    text = texts[_PASSES.index(which)]
    if not has_levels:
        first = tuned().get(key_of(target, which, dtype, d, e, tile)) or Config.parse(text)
    elif dtype == torch.float32:
        first = Config.parse(text)
    else:
        by_pass = (_LEVELS_SINCE_3_9 if target.triton >= (3, 9) else _LEVELS).get((arch, size, tile), {})
        first = Config.parse(by_pass.get(which, text))
    if arch == 80 and dtype != torch.float32 and not has_levels and 64 < d <= 96:
        first = first._replace(chunk=64)  # 64 and 16 or 32 columns in place of 128
    for change in parse_changes(os.environ.get(VARIABLE, "")):
        first = change.apply(which, first, tile)
    if target.is_interpreted:  # no inline PTX there
        first = first._replace(packed=False, half=False)
    if dtype != torch.bfloat16:  # whose rounding hides the polynomial's
        first = first._replace(by_fma=0)
    return (first, *(x for x in map(Config.parse, _SMALLER) if x.rows * x.cols <= first.rows * first.cols))


def _nearest_single(arch: int, size: int) -> int:
    """Return the architecture whose float32 entry of a head size another one takes: of as much memory."""
    is_small = arch in _SMALL
    return max(x for x, of in _FLOAT if of == size and x <= arch and (x in _SMALL) == is_small)


def tuned_path() -> Path:
    """Return where ``tune`` keeps what it has measured: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnbias" / "triton.json"


@functools.cache
def tuned() -> dict[str, Config]:
    """Return what was measured on this machine, by ``key_of``; nothing if the file cannot be read."""
    try:
        found = json.loads(tuned_path().read_text())
        return {key: Config.parse(text) for key, text in found.items()}
    except (OSError, ValueError, LookupError, AttributeError):
        return {}


def key_of(target: Target, which: Pass, dtype: torch.dtype, d: int, e: int, tile: int) -> str:
    """Name what a measured configuration holds for."""
    triton = ".".join(map(str, target.triton))
    return f"sm_{target.arch} triton {triton} {which} {str(dtype)[6:]} D={d} E={e} tile={tile}"


@functools.cache
def _only_cuda(device: torch.device) -> str:
    """Say what is wanted; kept, because every call on a CPU asks."""
    return f"device: only CUDA, got {device}"


def target_of(device: torch.device) -> Target | str:
    """Return what kernels for tensors on a device are compiled for, or why there are none, in words.

    Triton is asked, not torch: under its interpreter, or with a driver that executes kernels on the host,
    CPU tensors have a target, too.
    """
    if device.type == "cuda":
        return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())
    triton = sys.modules.get("triton")  # who makes it run on the host has imported it
    if triton is None or device.type != "cpu":
        return _only_cuda(device)
    if too_old := _why_too_old(triton):
        return too_old
    if triton.knobs.runtime.interpret:
        return Target(OLDEST, _version(triton.__version__), is_interpreted=True)
    active = getattr(triton.runtime.driver, "_active", None)  # not .active: it would look for a GPU
    if active is None or active.get_active_torch_device().type != "cpu":
        return _only_cuda(device)
    return _target(active.get_current_target(), triton)


@functools.cache
def _gpu_target(index: int) -> Target | str:
    try:
        import triton
    except ImportError:
        return "triton: not installed"
    if too_old := _why_too_old(triton):
        return too_old
    with torch.cuda.device(index):
        found = _target(triton.runtime.driver.active.get_current_target(), triton)
    if isinstance(found, str):
        return found
    return found._replace(processors=torch.cuda.get_device_properties(index).multi_processor_count)


@functools.cache
def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _why_too_old(triton: Any) -> str:
    """Say that a Triton is too old, before it is asked for what it may not have; "" if it is not."""
    if _version(triton.__version__) >= OLDEST_TRITON:
        return ""
    return f"triton: wanted {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer, got {triton.__version__}"


def _target(found: Any, triton: Any) -> Target | str:
    if found.backend != "cuda":
        return f"device: only NVIDIA GPUs, got {found.backend}"
    if found.arch < OLDEST:
        return f"device: compute capability {OLDEST / 10} or newer, got {found.arch / 10}"
    return Target(found.arch, _version(triton.__version__))
