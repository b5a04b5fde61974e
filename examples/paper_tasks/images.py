"""Digits of 8 x 8 pixels for ViT, whose patches are related in three ways."""

from __future__ import annotations

import torch
import transformers
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F

import attnbias as ab
from attnbias.integrations import huggingface

from .training import Found, difference, fit, picture, share, size_of

SIDE = 4  # patches of 2 x 2 pixels
RELATIONS = {
    "strided, 5 previous": ab.Window(before=5) | ab.Global([0]),
    "neighbours": huggingface.patch_neighborhood((SIDE, SIDE), radius=1),
    "all patches": ab.Full(),
}


def vit(steps: int | None) -> list[Found]:
    """Train ViT to read digits, over three relations among the patches."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1  # [N, 1, 8, 8]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:500], order[500:]
    logistic = LogisticRegression(max_iter=2000).fit(images[train].flatten(1), labels[train])
    baselines = {
        "most frequent": float((labels[test] == labels[train].mode().values).float().mean()),
        "logistic regression on pixels": float(logistic.score(images[test].flatten(1), labels[test])),
    }
    return [fit_vit(name, (images, labels, train, test), baselines, steps) for name in RELATIONS]


def fit_vit(name: str, data: tuple[Tensor, ...], baselines: dict[str, float], steps: int | None) -> Found:
    images, labels, train, test = data
    relation, length = RELATIONS[name], SIDE**2 + 1
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    model = huggingface.attach(transformers.ViTForImageClassification(config), relation)

    def loss_of() -> Tensor:
        batch = train[torch.randint(len(train), (64,), generator=rng)]
        return F.cross_entropy(model(pixel_values=shift(images[batch], rng)).logits, labels[batch])

    fitted = fit(f"ViT, {name}", model, loss_of, steps or 1200, 2e-3)
    with torch.no_grad():
        scores = model(pixel_values=images[test]).logits
    return Found(
        "ViT",
        "strided" if name.startswith("strided") else "self",
        "digits of 8 x 8 pixels",
        f"{name}, and a class token that sees and is seen by all",
        picture(relation, length, length),
        (length, length),
        share(relation, length, length),
        "held-out digits right",
        float((scores.argmax(-1) == labels[test]).float().mean()),
        baselines["logistic regression on pixels"],
        baselines,
        difference(model, {"pixel_values": images[test]}, relation=relation),
        size_of(model),
        **vars(fitted),
    )


def shift(images: Tensor, rng: torch.Generator) -> Tensor:
    """Move each image by up to one pixel in each direction."""
    framed = F.pad(images, (1, 1, 1, 1), value=-1.0)
    down, right = torch.randint(3, (2, len(images), 1, 1), generator=rng)
    rows, columns = down + torch.arange(8)[:, None], right + torch.arange(8)
    moved: Tensor = framed[torch.arange(len(images))[:, None, None], 0, rows, columns]
    return moved[:, None]
