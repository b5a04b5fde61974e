"""What a trained model reached, and how all of them are trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from progress import Bar
from torch import Tensor, nn

import attnbias as ab
from attnbias.integrations import huggingface

POINTS = 20  # of a stored curve


@dataclass
class Found:
    """What a trained model reached, and how it compares with its baselines and with dense attention."""

    model: str
    attention: str  # the mechanism's name in Table 2
    task: str
    relation: str
    picture: list[str]  # the relation among a few tokens
    tokens: tuple[int, int]  # queries and keys of one call
    share: float  # of all pairs, that are computed
    measure: str
    accuracy: float
    wanted: float  # the accuracy to reach
    baselines: dict[str, float]
    difference: float  # largest, of the outputs from those of dense attention with the same weights
    parameters: int
    steps: int
    seconds: float  # of CPU, in training
    losses: list[float]  # means over parts of the training; GAT's are on validation nodes
    more: dict[str, float] = field(default_factory=dict)


@dataclass
class Fitted:
    """How a training went."""

    steps: int
    seconds: float
    losses: list[float]


def fit(
    name: str, model: nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float, decay: float = 0.01
) -> Fitted:
    """Train with AdamW at a rate that rises for a tenth of the steps and then falls to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=decay)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    losses, began = [], time.process_time()
    with Bar(name, steps) as bar:
        for _ in range(steps):
            loss = loss_of()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.advance(f"loss {losses[-1]:.3f}")
    model.eval()
    return Fitted(steps, round(time.process_time() - began, 1), thin(losses))


def thin(losses: Sequence[float]) -> list[float]:
    """Return means of about ``POINTS`` parts of a curve."""
    parts = torch.tensor(losses).tensor_split(min(POINTS, len(losses)))
    return [round(float(part.mean()), 4) for part in parts]


def size_of(model: nn.Module) -> int:
    """Count parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def difference(
    model: Any, given: dict[str, Tensor], real: Any = slice(None), relation: ab.Relation | None = None
) -> float:
    """Return the largest difference of a model's logits from those of dense attention, weights the same.

    Dense attention is transformers' own, which masks what the model masks; with a relation, the one below.
    """
    ours = model(**given).logits[real]
    if relation is not None:
        transformers.AttentionInterface.register("dense", partial(attend_densely, relation))
    model.set_attn_implementation("eager" if relation is None else "dense")
    dense = model(**given).logits[real]
    huggingface.attach(model)
    return float((ours - dense).abs().max())


def attend_densely(
    relation: ab.Relation,
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute every score, and fill those of unrelated pairs with -inf."""
    related = relation.dense(query.shape[2], key.shape[2])
    scores = (query @ key.mT * scaling).masked_fill(~related, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def picture(relation: ab.Relation, q_len: int, k_len: int) -> list[str]:
    """Draw a relation in characters, line by line."""
    return relation.picture(q_len, k_len).splitlines()


def share(relation: ab.Relation, q_len: int, k_len: int) -> float:
    """Return the fraction of pairs that are related."""
    return relation.count(q_len, k_len) / (q_len * k_len)
