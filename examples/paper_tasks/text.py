"""Characters of this repository's own text: GPT names the next one, BERT those that are masked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import attnbias as ab
from attnbias.integrations import huggingface

from .training import Found, difference, fit, picture, share, size_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = 97  # the printable characters of ASCII, newline, and a mask
MASK = 96
TEXT_LENGTH = 96


def read_text() -> tuple[Tensor, Tensor]:
    """Return the repository's documents and source as numbers below 96, and every tenth file to test on."""
    paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("attnbias/**/*.py")])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(paths):
        parts[number % 10 == 0].append(path.read_bytes())
    numbers = []
    for part in parts:
        kept = bytes(c for c in b"\n".join(part) if c == 10 or 32 <= c < 127)
        tokens = torch.frombuffer(bytearray(kept), dtype=torch.uint8).long()
        numbers.append(torch.where(tokens == 10, 95, tokens - 32))
    return numbers[0], numbers[1]


def cut(text: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Cut pieces [count, TEXT_LENGTH] out of a text."""
    starts = torch.randint(len(text) - TEXT_LENGTH, (count,), generator=rng)
    return text[starts[:, None] + torch.arange(TEXT_LENGTH)]


def ngram(train: Tensor, test: Tensor, places: Sequence[Sequence[int]], strength: float = 5.0) -> Tensor:
    """Return probabilities [T, 96] of each character of a test text, given those at the places around it.

    Each of ``places`` is a context, the later the longer: its counts are smoothed with the one before.
    """
    found = torch.full((len(test), MASK), 1 / MASK)
    for offsets in places:
        context = [
            sum((text.roll(-o) * MASK**n for n, o in enumerate(offsets)), 0 * text) for text in (train, test)
        ]
        counts = torch.bincount(context[0] * MASK + train, minlength=MASK ** (len(offsets) + 1))
        table = counts.view(-1, MASK).float()[context[1]]  # [T, 96]
        found = (table + strength * found) / (table.sum(1, keepdim=True) + strength)
    return found


def gpt(steps: int | None) -> list[Found]:
    """Train GPT-2 to name the next character."""
    train, test = read_text()
    rng = torch.Generator().manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=KINDS,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=TEXT_LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = huggingface.attach(transformers.GPT2LMHeadModel(config))

    def loss_of() -> Tensor:
        pieces = cut(train, 16, rng)
        loss: Tensor = model(input_ids=pieces, labels=pieces).loss
        return loss

    fitted = fit("GPT", model, loss_of, steps or 1200, 2e-3)
    pieces = cut(test, 256, torch.Generator().manual_seed(1))
    with torch.no_grad():
        scores = torch.cat([model(input_ids=part).logits[:, :-1] for part in pieces.split(32)])
    nats = F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
    before = {"bigram": [(), (-1,)], "trigram": [(), (-1,), (-2, -1)]}
    tables = {name: ngram(train, test, at) for name, at in before.items()}
    right = {name: float((table.argmax(-1) == test).float().mean()) for name, table in tables.items()}
    losses = {
        f"nats, {name}": float(-table.gather(1, test[:, None]).log().mean()) for name, table in tables.items()
    }
    return [
        Found(
            "GPT",
            "masked",
            "next character of this repository's text",
            "Causal()",
            picture(ab.Causal(), 16, 16),
            (TEXT_LENGTH, TEXT_LENGTH),
            share(ab.Causal(), TEXT_LENGTH, TEXT_LENGTH),
            "next characters right",
            float((scores.argmax(-1) == pieces[:, 1:]).float().mean()),
            right["trigram"],
            right,
            difference(model, {"input_ids": pieces[:4]}),
            size_of(model),
            **vars(fitted),
            more={"nats": float(nats), **losses},
        )
    ]


def bert(steps: int | None) -> list[Found]:
    """Train ModernBERT, BERT with rotary positions, to fill in masked characters.

    With learned positions, as in the first BERT, 1,500 steps ended at the loss of guessing by frequency.
    """
    train, test = read_text()
    rng = torch.Generator().manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=KINDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=TEXT_LENGTH,
        global_attn_every_n_layers=1,  # all pairs in every layer
        initializer_range=0.05,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
    )
    model = huggingface.attach(transformers.ModernBertForMaskedLM(config))

    def mask(text: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        pieces = cut(text, count, rng)
        hidden = torch.rand(pieces.shape, generator=rng) < 0.15
        return pieces.masked_fill(hidden, MASK), pieces.masked_fill(~hidden, -100)

    def loss_of() -> Tensor:
        given, answer = mask(train, 16, rng)
        loss: Tensor = model(input_ids=given, labels=answer).loss
        return loss

    fitted = fit("BERT", model, loss_of, steps or 1000, 3e-3)
    given, answer = mask(test, 256, torch.Generator().manual_seed(1))
    asked = answer >= 0
    with torch.no_grad():
        guess = torch.cat([model(input_ids=part).logits.argmax(-1) for part in given.split(32)])
    sides = {
        "most frequent": [()],
        "character before": [(), (-1,)],
        "characters before and after": [(), (-1,), (-1, 1)],
    }
    scores = {
        name: float((ngram(train, test, at).argmax(-1) == test).float().mean()) for name, at in sides.items()
    }
    return [
        Found(
            "BERT",
            "self",
            "masked characters of this repository's text",
            "Full()",
            picture(ab.Full(), 16, 16),
            (TEXT_LENGTH, TEXT_LENGTH),
            share(ab.Full(), TEXT_LENGTH, TEXT_LENGTH),
            "masked characters right",
            float((guess == answer)[asked].float().mean()),
            scores["characters before and after"],
            scores,
            difference(model, {"input_ids": given[:4]}),
            size_of(model),
            **vars(fitted),
        )
    ]
