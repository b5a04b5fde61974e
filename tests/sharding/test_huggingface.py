"""Hugging Face models over ranks give the logits, loss and gradients of one process."""

from __future__ import annotations

import pytest
from cases.processes import pool

pytest.importorskip("transformers")

from cases.hf_ranks import compare_model, errors_of


@pytest.mark.parametrize(
    ("name", "length", "kind"),
    [
        ("llama", 300, "plain"),
        ("llama", 129, "packed"),
        ("llama", 300, "relation"),
        ("mistral", 400, "plain"),
        ("gemma3", 300, "packed"),
        ("gpt_oss", 300, "plain"),
    ],
)
def test_model_gives_the_same_over_ranks(name, length, kind):
    pool(2).run(compare_model, name, length, kind)


def test_what_a_call_over_ranks_does_not_have_is_refused():
    wanted = {
        "padding": "attention_mask: wanted none with mesh=, pack sequences by position_ids instead",
        "cache": "past_key_values: wanted none with mesh=, a cache holds the keys of one rank",
        "use_cache": "use_cache: wanted none with mesh=",
        "generate": "wanted none with mesh=",
        "generate without a cache": "logits_to_keep: wanted none with mesh=",
        "weights": "output_attentions: wanted none with mesh=",
        "tokens": "input_ids: wanted the whole batch on every rank, got None",
        "few tokens": "input_ids: wanted at least 1 tile of 128 tokens for each rank, got 97 tokens for 2",
        "positions": "position_ids: wanted none with mesh=, other than of shape [B, L] or [1, L]",
        "labels": "labels: wanted none with mesh=, which only causal language models divide",
        "nearest": "relation: wanted a Relation with mesh=, got NearestKeys",
        "cross": "got T5ForConditionalGeneration, which has cross-attention",
        "images": "mesh: wanted a model whose tokens meet in self-attention only, got ViTForImage",
        "gather": "model: wanted one that was attached with mesh= and called, got another",
        "router": "output_router_logits: wanted none with mesh=, whose loss is not a sum over tokens",
    }
    for found in pool(2).run(errors_of):
        assert set(found) == set(wanted)
        for name, words in wanted.items():
            assert words in found[name], (name, found[name])
