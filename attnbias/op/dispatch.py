"""The backends, and the choice of one for a problem."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..backends import cpu, cudnn, reference, rows, sdpa, triton

if TYPE_CHECKING:
    from types import TracebackType

    from ..backends.call import Call, Grads, Needs
    from .problem import Problem


class Backend(Protocol):
    """One way to compute attention; a module of ``attnbias.backends``."""

    @property
    def name(self) -> str:
        """The name that users give."""

    def why_not(self, problem: Problem, /) -> list[str]:
        """Return the reasons why it cannot run the problem, a sentence each; empty if it can."""


class Reserved(Backend, Protocol):
    """A backend that steps back from some problems which it can run, unless it is asked for."""

    def why_not_by_default(self, problem: Problem, /) -> list[str]:
        """Return why it does not run the problem by default, a sentence each."""


class InPlace(Backend, Protocol):
    """A backend made of differentiable PyTorch, outside the op."""

    def attend(self, problem: Problem, /) -> tuple[Tensor, Tensor | None]:
        """Compute out [B, H, Q, E] and, unless it never does, lse [B, H, Q]."""


class InOp(Backend, Protocol):
    """A backend inside the op, with its own backward."""

    def forward(self, call: Call, /) -> tuple[Tensor, Tensor]:
        """Compute out [B, H, Q, E] in the query's stride order, lse [B, H, Q], and a wanted ``row_max``."""

    def backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: Needs,
        /,
    ) -> Grads:
        """Compute the gradients that are needed.

        Each gradient lies in memory as ``torch.empty_like(input)`` does.
        """


# A new backend is one line in one of these two.
IN_OP: dict[str, InOp] = {"cpu": cpu, "cudnn": cudnn, "rows": rows, "triton": triton}
IN_PLACE: dict[str, InPlace] = {"sdpa": sdpa, "reference": reference}

# The first that can is taken. By default sdpa steps back off CUDA and where torch has no fused kernel, and
# cudnn everywhere.
ORDER = ("sdpa", "triton", "cudnn", "cpu", "rows", "reference")
# The same choice for tensors on a CPU, made sooner: to ask those for CUDA takes 2 us.
CPU_ORDER = ("sdpa", "cpu", "triton", "cudnn", "rows", "reference")
RESERVED: dict[str, Reserved] = {"sdpa": sdpa, "cudnn": cudnn}
BACKENDS: dict[str, InOp | InPlace] = {
    name: found for name in ORDER if (found := IN_OP.get(name) or IN_PLACE.get(name)) is not None
}

# The kernels of each type of device: not to run them is worth a warning, once they exist.
KERNELS = {"cuda": "triton", "cpu": "cpu"}

_VARIABLE = "ATTNBIAS_BACKEND"
_from_environment = os.environ.get(_VARIABLE) or None
_asked: ContextVar[str | None] = ContextVar("attnbias_backend", default=_from_environment)
# The same for traced calls: dynamo cannot read a ContextVar, but it guards a global, so that a
# compiled function is compiled again when it is called under another use_backend.
_asked_traced = _from_environment
_entered: list[str | None] = [_from_environment]
_warned: set[str] = set()


class use_backend:
    """Run every call of attention inside the ``with`` on the named backend.

    Holds for the current thread or task. An argument ``backend=`` takes precedence over it, and it
    over the environment variable ``ATTNBIAS_BACKEND``, which is read once, at import.

    Args:
        name: the backend, or None to let each call choose.

    Raises:
        ValueError: if there is no backend of this name.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q = k = v = torch.zeros(1, 2, 4, 8)
        >>> with ab.use_backend("reference"):
        ...     ab.explain(q, k, v, ab.Causal()).backend
        'reference'
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            check_name(name, "use_backend")
        self.name = name
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        global _asked_traced  # noqa: PLW0603 - what dynamo guards
        _entered.append(self.name)
        _asked_traced = self.name
        if not torch.compiler.is_compiling():
            self._tokens.append(_asked.set(self.name))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _asked_traced  # noqa: PLW0603 - what dynamo guards
        # The others' entries may have come after this one: threads leave in any order.
        _entered.reverse()
        _entered.remove(self.name)
        _entered.reverse()
        _asked_traced = _entered[-1]
        if not torch.compiler.is_compiling():
            _asked.reset(self._tokens.pop())


def check_name(name: str, source: str = "backend") -> str:
    """Return the name of a backend, or raise and list the names there are."""
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in BACKENDS)
        raise ValueError(f"{source}: wanted one of {known}, got {name!r}")
    return name


def asked_for(backend: str | None) -> str | None:
    """Return the backend that the argument, ``use_backend`` or the environment names, in this order."""
    if backend is not None:
        return check_name(backend)
    name = _asked_traced if torch.compiler.is_compiling() else _asked.get()
    if name is not None:
        check_name(name, _VARIABLE)
    return name


def refusals(problem: Problem, name: str) -> list[str]:
    """Return why a backend does not run a problem unless it is asked for by name; empty if it does."""
    return why_not_by_default(problem, name) or BACKENDS[name].why_not(problem)


def why_not_by_default(problem: Problem, name: str) -> list[str]:
    """Return why a backend does not run by default a problem that it may be able to run."""
    return RESERVED[name].why_not_by_default(problem) if name in RESERVED else []


def choose(problem: Problem, name: str | None, among: Mapping[str, object] | None = None) -> str:
    """Find the backend that runs a problem.

    Args:
        problem: what is to be computed.
        name: the backend asked for, or None for the first that can.
        among: the backends to choose from; None: all.

    Raises:
        NotImplementedError: if the named backend, or every one, has a reason not to run it.
    """
    if name is not None:
        reasons = BACKENDS[name].why_not(problem)
        if reasons:
            raise NotImplementedError(f"backend {name!r} cannot run this: {'; '.join(reasons)}")
        return name
    refused: dict[str, list[str]] = {}
    for candidate in CPU_ORDER if problem.query.device.type == "cpu" else ORDER:
        if among is None or candidate in among:
            reasons = refusals(problem, candidate)
            if not reasons:
                _warn_if_slow(problem, candidate, refused)
                return candidate
            refused[candidate] = reasons
    lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in refused.items()]
    raise NotImplementedError("\n".join(["no backend can run this:", *lines]))


def choose_traced(problem: Problem, name: str | None) -> InPlace | None:
    """Find the backend to trace in place; None: trace the op, which chooses when it runs.

    The choice looks only at what holds for every length, so that the graph does too.
    """
    if name is None:
        if not refusals(problem, sdpa.name):
            return sdpa
        # No backend in the op takes what rows refuses.
        if not rows.why_not(problem):
            return None
        name = reference.name
    elif name in IN_OP:
        return None
    reasons = IN_PLACE[name].why_not(problem)
    if problem.layout is not None:
        reasons = [*reasons, "relation: while tracing, only a relation is taken, got a Layout"]
    if reasons:
        raise NotImplementedError(f"backend {name!r} cannot run this: {'; '.join(reasons)}")
    if problem.relation is not None:  # what runs in place never binds it
        (batch, heads, q_len), k_len = problem.query.shape[:3], problem.key.shape[2]
        problem.relation.check(q_len, k_len, problem.q_start, batch, heads)
    return IN_PLACE[name]


def _warn_if_slow(problem: Problem, name: str, refused: Mapping[str, list[str]]) -> None:
    """Warn, once per text, when plain PyTorch runs although there are kernels for the device."""
    kernels = KERNELS.get(problem.query.device.type, "")
    if kernels not in refused or name not in (rows.name, reference.name):
        return
    text = (
        f"attention runs on the slow backend {name!r} because {kernels!r} cannot run this: "
        f"{'; '.join(refused[kernels])}"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)  # the line that called attention, by choose and attend
