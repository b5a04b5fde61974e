"""Compare each model that the paper names, with its relation, to the same model with dense attention.

    python examples/paper_models.py

The paper is "Relational inductive biases on attention mechanisms". The weights are random, so nothing is
downloaded. The script shows each mechanism's relation, that results are the same, and the fraction of pairs
that is computed. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import attnbias as ab
from attnbias.integrations import huggingface
from attnbias.nn import GraphAttention

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 64}
LENGTH = 96


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    ids = torch.randint(2, 100, (2, LENGTH))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, 70:] = 0
    real = given["attention_mask"].bool()
    answer = {"decoder_input_ids": ids[:, :24]}
    t = transformers
    gat()
    compare(
        "BERT, self-attention",
        t.BertForMaskedLM(t.BertConfig(vocab_size=100, **SIZES)),
        given,
        real,
        ab.Full(),
    )
    gpt = t.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)
    compare("GPT-2, masked attention", t.GPT2LMHeadModel(gpt), given, real, ab.Causal())
    t5 = t.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    encoder_decoder = t.T5ForConditionalGeneration(t5)
    everything = torch.ones(2, 24, dtype=torch.bool)
    compare("T5, encoder-decoder attention", encoder_decoder, given | answer, everything, ab.Full())
    images = {"pixel_values": torch.randn(2, 3, 32, 32)}
    vit = t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=4, **SIZES))
    both = torch.ones(2, dtype=torch.bool)
    compare("ViT, all patches", vit, images, both, ab.Full())
    near = huggingface.patch_neighborhood((8, 8), radius=1)
    huggingface.set_relation(vit, near)
    show("ViT, strided attention: the patches around each", near, 65, 65, vit(**images).logits)
    huggingface.set_relation(encoder_decoder, huggingface.NearestKeys(8), cross=True)
    sparse = encoder_decoder(**given, **answer).logits
    print(f"Unlimiformer, sparse attention: T5 with 8 of {LENGTH} keys for each query and head")
    print(f"    {8 / LENGTH:.0%} of all pairs, logits finite: {bool(sparse.isfinite().all())}\n")


def gat() -> None:
    """Compare attention along the edges of a graph with dense attention and a mask."""
    nodes = 200
    edges = torch.randint(nodes, (2, 800))
    edges = torch.cat((edges, edges.flip(0), torch.arange(nodes).expand(2, -1)), 1).unique(dim=1)
    graph, x = ab.Graph(edges, num_nodes=nodes), torch.randn(nodes, 32)
    layer = GraphAttention(32)
    scores = layer.query(x) @ layer.key(x).T / 32**0.5
    dense = torch.softmax(scores.masked_fill(~graph.dense(nodes, nodes), -torch.inf), -1) @ layer.value(x)
    show("GAT, graph attention (with dot products)", graph, nodes, nodes, layer(x, graph), dense)


def compare(
    name: str, model: Any, given: dict[str, torch.Tensor], real: torch.Tensor, relation: ab.Relation
) -> None:
    """Compare a model with transformers' own attention and with attnbias."""
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        dense = model(**given).logits[real]
        ours = huggingface.attach(model)(**given).logits[real]
    show(name, relation, LENGTH, LENGTH, ours, dense)


def show(
    name: str,
    relation: ab.Relation,
    q_len: int,
    k_len: int,
    ours: torch.Tensor,
    dense: torch.Tensor | None = None,
) -> None:
    share = relation.count(q_len, k_len) / (q_len * k_len)
    found = f"logits finite: {bool(ours.isfinite().all())}"
    if dense is not None:
        found = f"largest difference from dense {(ours - dense).abs().max().item():.1e}"
    print(f"{name}: {str(relation)[:70]}")
    print(f"    {share:.0%} of all pairs, {found}\n")


if __name__ == "__main__":
    main()
