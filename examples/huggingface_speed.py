"""Time a transformers decoder on attnbias and on SDPA: a training step with a window, and cached generation.

    python examples/huggingface_speed.py [--tokens 4096] [--rounds 5]

One thread, process CPU time, both sides in turn. Ratios are SDPA's time over attnbias's: the median, and all
of them. The weights are random, so nothing is downloaded. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from attnbias.integrations import huggingface

WINDOW = 256
KINDS = ("sdpa", "attnbias")


def make(kind: str) -> transformers.MistralForCausalLM:
    """Make a model of four layers: four heads of 64 on two key heads, a window in each."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=688,
        max_position_embeddings=8192,
        sliding_window=WINDOW,
    )
    model = transformers.MistralForCausalLM(config)
    model.set_attn_implementation(kind)
    return model


def compare(name: str, rounds: int, run: Callable[[transformers.MistralForCausalLM], object]) -> None:
    """Time the same work on both, in turn."""
    models = {kind: make(kind) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, model in models.items():
            began = time.process_time()
            run(model)
            if number:  # the first warms up
                times[kind].append(time.process_time() - began)
    ratios = sorted(a / b for a, b in zip(*times.values(), strict=True))
    seconds = ", ".join(f"{kind} {statistics.median(each):.2f} s" for kind, each in times.items())
    spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{name}: {seconds}; sdpa / attnbias {statistics.median(ratios):.2f} ({spread})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    huggingface.register()
    ids = torch.randint(3, 512, (1, given.tokens))

    def train(model: transformers.MistralForCausalLM) -> None:
        model.train().zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    compare(f"training step, {given.tokens} tokens, window {WINDOW}", given.rounds, train)
    for length, padded in ((64, 0), (64, 10), (512, 0), (512, 10)):
        prompt = torch.randint(3, 512, (2, length))
        mask = torch.ones_like(prompt)
        mask[1, :padded] = 0
        options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def generate(
            model: transformers.MistralForCausalLM,
            prompt: torch.Tensor = prompt,
            mask: torch.Tensor = mask,
            options: dict[str, object] = options,
        ) -> None:
            model.eval().generate(input_ids=prompt, attention_mask=mask, **options)

        left = f", {padded} of them padding" if padded else ""
        compare(f"64 tokens after {length}{left}", given.rounds, generate)


if __name__ == "__main__":
    main()
