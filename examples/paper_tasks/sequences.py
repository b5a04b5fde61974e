"""Tasks for an encoder and a decoder: T5 sorts digits, Unlimiformer looks up names in long documents."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import attnbias as ab
from attnbias.integrations import huggingface

from .training import Found, difference, fit, picture, size_of


def make_t5(kinds: int, layers: int = 2) -> Any:
    config = transformers.T5Config(
        vocab_size=kinds,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return huggingface.attach(transformers.T5ForConditionalGeneration(config))


def draw_digits(count: int, most: int, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Draw rows of 4 to ``most`` digits, as tokens 2 to 11, and the sorted rows, which end with token 1."""
    length = torch.randint(4, most + 1, (count, 1), generator=rng)
    digits = torch.randint(2, 12, (count, most), generator=rng)
    real = torch.arange(most) < length
    answer = F.pad(digits.masked_fill(~real, 99).sort(1).values, (0, 1), value=99)
    answer = answer.scatter(1, length, 1)
    given = {"input_ids": digits.masked_fill(~real, 0), "attention_mask": real.long()}
    return given, answer.masked_fill(answer == 99, -100)


def t5(steps: int | None) -> list[Found]:
    """Train T5 to sort digits."""
    most = 12
    rng = torch.Generator().manual_seed(0)
    model = make_t5(12)

    def loss_of() -> Tensor:
        given, answer = draw_digits(64, most, rng)
        loss: Tensor = model(**given, labels=answer).loss
        return loss

    fitted = fit("T5", model, loss_of, steps or 1600, 3e-3)
    given, answer = draw_digits(500, most, torch.Generator().manual_seed(1))
    asked = answer >= 0
    made = model.generate(**given, max_new_tokens=most + 1, do_sample=False)[:, 1:]
    made = F.pad(made, (0, most + 1 - made.shape[1]))
    right = (made == answer) | ~asked
    _, known = draw_digits(20000, most, torch.Generator().manual_seed(2))
    usual = torch.stack([(known == kind).sum(0) for kind in range(12)]).argmax(0)  # [places]
    guess = (usual == answer) | ~asked
    forced = {**given, "decoder_input_ids": F.pad(answer.clamp(min=0), (1, 0))[:, :-1]}
    across = ab.Bipartite(8)
    return [
        Found(
            "T5",
            "encoder-decoder",
            f"sort 4 to {most} digits",
            "Bipartite(inputs), with Full() and Causal() in its halves",
            picture(across, 16, 16),
            (most + 1, most),
            1.0,
            "whole answers right",
            float(right.all(1).float().mean()),
            0.99,
            {
                "most frequent at each place, whole answers": float(guess.all(1).float().mean()),
                "most frequent at each place, digits": float(guess[asked].float().mean()),
            },
            difference(model, forced, asked),
            size_of(model),
            **vars(fitted),
            more={"digits right": float(right[asked].float().mean())},
        )
    ]


NAMES, VALUES, NOISE = range(2, 34), range(34, 66), range(66, 128)
NEEDLES, NEAR = 16, 16


def draw_documents(count: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw noise in which each of 16 names is followed by its value; also the names, and their values."""
    document = torch.randint(NOISE.start, NOISE.stop, (count, length), generator=rng)
    names, places = (
        torch.rand(count, n, generator=rng).argsort(1)[:, :NEEDLES] for n in (len(NAMES), length // 2)
    )
    names = names + NAMES.start
    values = torch.randint(VALUES.start, VALUES.stop, names.shape, generator=rng)
    return document.scatter(1, 2 * places, names).scatter(1, 2 * places + 1, values), names, values


class RecordedKeys(huggingface.NearestKeys):
    """Nearest keys that keep the relation found last."""

    def find(self, *given: Any) -> ab.Neighbors:
        self.found = super().find(*given)
        return self.found


@torch.no_grad()
def draw_nearest(model: Any) -> list[str]:
    """Draw the two nearest keys of each name in the last layer's first head, in a document of 48 tokens."""
    document, names, _ = draw_documents(1, 48, torch.Generator().manual_seed(1))
    keys = RecordedKeys(2)
    huggingface.set_relation(model, keys, cross=True)
    model(input_ids=document, decoder_input_ids=names)
    return picture(ab.Neighbors(keys.found.index[0, 0]), NEEDLES, 48)


def unlimiformer(steps: int | None) -> list[Found]:
    """Train T5 on short documents with all keys, then ask about long ones with the nearest keys only."""
    short, long = 256, 16384
    rng = torch.Generator().manual_seed(0)
    model = make_t5(128)
    huggingface.set_relation(model.encoder, ab.Window(before=4, after=4))
    steps = steps or 700
    left = iter(range(steps))

    def loss_of() -> Tensor:
        # From 32 tokens, half of which matter, to 256: the first steps at 256 would learn next to nothing.
        length = min(short, 32 * 2 ** (5 * next(left) // steps))
        document, names, values = draw_documents(2048 // length, length, rng)
        scores = model(input_ids=document, decoder_input_ids=names).logits
        return F.cross_entropy(scores.flatten(0, 1), values.flatten())

    fitted = fit("Unlimiformer", model, loss_of, steps, 3e-3)
    more = {}
    with torch.no_grad():
        for length, count in ((short, 64), (long, 16)):
            document, names, values = draw_documents(count, length, torch.Generator().manual_seed(1))
            memory = model.encoder(input_ids=document)
            scores = {}
            for keys, chosen in (("all", None), (NEAR, huggingface.NearestKeys(NEAR))):
                huggingface.set_relation(model, chosen, cross=True)
                scores[keys] = model(encoder_outputs=memory, decoder_input_ids=names).logits
                right = float((scores[keys].argmax(-1) == values).float().mean())
                more[f"right, {keys} keys of {length}"] = right
        error = float((scores["all"] - scores[NEAR]).abs().max())
    asked = f"right, {NEAR} keys of {long}"
    return [
        Found(
            "Unlimiformer",
            "sparse",
            f"values after {NEEDLES} names in {long} tokens; trained on up to {short}",
            f"NearestKeys({NEAR})",
            draw_nearest(model),
            (NEEDLES, long),
            NEAR / long,
            "values right",
            more.pop(asked),
            0.95,
            {"most frequent": 1 / len(VALUES), "a value of the document": 1 / NEEDLES},
            error,
            size_of(model),
            **vars(fitted),
            more=more,
        )
    ]
