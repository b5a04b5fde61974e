"""Compare each model that the paper names, with its relation, to the same model with dense attention.

    python examples/paper_models.py                      # random weights, seconds
    python examples/paper_models.py --train              # each of the six trained
    python examples/paper_models.py --train --only T5    # one of them

The paper is "Relational inductive biases on attention mechanisms". Nothing is downloaded. Without --train the
weights are random: the script shows each mechanism's relation, that results are the same, and the fraction of
pairs that is computed.

With --train the models of Table 2 are trained on small tasks, in the table's order, each in at most two
minutes of CPU time on one thread. Each is compared with what needs no attention (the most frequent answer,
n-grams, logistic regression), and with dense attention with the same weights. After each model it writes
results/paper_models.json and .png; --only keeps the rows of the others.

Needs transformers; --train scikit-learn and matplotlib, too.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import attnbias as ab
from attnbias.integrations import huggingface
from attnbias.nn import GraphAttention

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 64}
LENGTH = 96
MODELS = ("GAT", "BERT", "GPT", "Unlimiformer", "ViT", "T5")  # in the order of Table 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help="train the models of Table 2")
    parser.add_argument("--only", choices=MODELS, help="with --train: one model")
    parser.add_argument("--steps", type=int, help="with --train: steps instead of each model's own number")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.train:
        train_models(args)
    else:
        compare_models()


def train_models(args: argparse.Namespace) -> None:
    """Train the models, and store what they reached after each."""
    from paper_tasks import TASKS

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor|invariant)")  # from GAT's features
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "paper_models.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for model in MODELS if args.only is None else (args.only,):
        torch.manual_seed(0)
        found = TASKS[model](args.steps)
        rows = [row for row in rows if row["model"] != model]
        rows += [asdict(each) | {"reached": each.accuracy >= each.wanted} for each in found]
        rows.sort(key=lambda row: MODELS.index(row["model"]))
        about = {"torch": torch.__version__, "transformers": transformers.__version__}
        path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        draw(rows, args.out / "paper_models.png")
        for each in found:
            print(f"\n{each.model}: {each.relation}")
            print("\n".join(each.picture), end="\n\n")
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what the models reached, a line for each."""
    print(
        f"{'model':13}{'of pairs':>9}{'accuracy':>10}{'wanted':>8}{'from dense':>12}{'CPU s':>7}  baselines"
    )
    for row in rows:
        cells = f"{row['model']:13}{row['share']:9.2%}{row['accuracy']:10.1%}{row['wanted']:8.1%}"
        others = "; ".join(f"{name} {value:.1%}" for name, value in row["baselines"].items())
        print(f"{cells}{row['difference']:12.1e}{row['seconds']:7.0f}  {others}")
        print(f"{'':13}{row['task']}; {row['relation']}")
        if row["more"]:
            print(f"{'':13}" + "; ".join(f"{name} {value:.3f}" for name, value in row["more"].items()))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the relation of each model among a few tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    figure, panels = pyplot.subplots(2, 3, figsize=(9, 6.6), dpi=100, layout="constrained")
    first = {row["model"]: row for row in reversed(rows)}
    for model, axes in zip(MODELS, panels.flat, strict=True):
        axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
        if model not in first:
            axes.set_title(f"{model}: not trained yet", fontsize="medium")
            continue
        row = first[model]
        related = [[mark == "#" for mark in line] for line in row["picture"]]
        axes.imshow(related, cmap=ListedColormap(["#f3f3f3", "#1f5a99"]), vmin=0, vmax=1)
        of_pairs = f"{row['share']:.0%}" if row["share"] > 0.1 else f"{row['share']:.2%}"
        words = f"{of_pairs} of pairs, {row['accuracy']:.1%} right"
        axes.set_title(f"{model}, {row['attention']}\n{words}", fontsize="medium")
    figure.savefig(path)
    pyplot.close(figure)


def compare_models() -> None:
    """Compare models with random weights."""
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
