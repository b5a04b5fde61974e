"""What processes compute in tests of Hugging Face models over ranks, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

import attnbias as ab
from attnbias.integrations import huggingface
from attnbias.testing import assert_no_worse
from cases.dtensors import mesh_of
from cases.huggingface import SIZES, VOCABULARY, exactly, make

DECODER = SIZES | {"hidden_size": 32, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 8}


def make_model(name: str) -> Any:
    """Make a tiny model; its layers have windows and sinks by its name."""
    torch.manual_seed(0)
    t = transformers
    if name == "mistral":
        model = t.MistralForCausalLM(t.MistralConfig(**DECODER, sliding_window=9))
    elif name == "gpt_oss":
        types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        model = t.GptOssForCausalLM(t.GptOssConfig(**DECODER, **types, **experts))
        model.set_experts_implementation("eager")  # the others have no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
    else:
        return make(name)
    return model.eval()


def inputs(length: int, kind: str) -> dict[str, Any]:
    """Return the whole batch, the same on every rank; "packed" has two documents in each row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, length), generator=generator)
    labels = ids.masked_fill(torch.rand(2, length, generator=generator) < 0.2, -100)
    # With a cache, transformers would not look for documents.
    given: dict[str, Any] = {"input_ids": ids, "labels": labels, "use_cache": False}
    if kind == "packed":
        cut = torch.tensor([[length // 3], [length // 2]])
        place = torch.arange(length).expand(2, -1)
        given["position_ids"] = torch.where(place < cut, place, place - cut)
    return given


def results(model: Any, given: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return the output of a model, and its parameters' gradients."""
    output = model(**given)
    output.loss.backward()
    return output, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compare_model(rank: int, size: int, name: str, length: int, kind: str) -> None:
    """Raise unless logits, loss and averaged gradients over ranks are as near float64 as in one process."""
    model, relation = make_model(name), None
    given = inputs(length, kind)
    if kind == "relation":
        relation = ab.Columns(2) | ab.Window(before=3, after=None)
    one, many = (copy.deepcopy(model) for _ in range(2))
    huggingface.attach(one, relation)
    huggingface.attach(many, relation, mesh=mesh_of(size))
    if name == "llama":
        many.gradient_checkpointing_enable()
        many.train()
    wide = exactly(model) if relation is None else huggingface.attach(copy.deepcopy(model).double(), relation)
    exact, exact_grads = results(wide, given)
    plain, plain_grads = results(one, given)
    found, grads = results(many, given)
    logits = huggingface.gather(many, found.logits)
    loss = found.loss.detach().clone()
    for x in (loss, *grads):
        torch.distributed.all_reduce(x)
        x.div_(size)
    assert_no_worse("logits", logits, plain.logits, exact.logits)
    # Shares of the loss are rounded, and so is their sum.
    assert_no_worse("loss", loss, plain.loss, exact.loss, magnitude=exact.loss.item())
    names = [name for name, _ in model.named_parameters()]
    for parameter, *three in zip(names, grads, plain_grads, exact_grads, strict=True):
        assert_no_worse(parameter, *three, 3)


def errors_of(rank: int, size: int) -> dict[str, str]:
    """Return the sentences with which calls and models are refused over ranks."""
    mesh, given = mesh_of(size), inputs(300, "plain")
    ids = given["input_ids"]
    llama = huggingface.attach(make("llama"), mesh=mesh)
    near = huggingface.attach(make("llama"), huggingface.NearestKeys(3), mesh=mesh)
    oss = huggingface.attach(make_model("gpt_oss"), mesh=mesh)
    bert = huggingface.attach(make("bert"), mesh=mesh)
    padding = torch.ones_like(ids)
    padding[0, 5:] = 0
    calls: dict[str, Any] = {
        "padding": lambda: llama(ids, padding),
        "cache": lambda: llama(ids, past_key_values=transformers.DynamicCache()),
        "use_cache": lambda: llama(ids, use_cache=True),
        "generate": lambda: llama.generate(ids, max_new_tokens=2),
        "generate without a cache": lambda: llama.generate(ids, max_new_tokens=2, use_cache=False),
        "weights": lambda: llama(ids, output_attentions=True),
        "tokens": llama,
        "few tokens": lambda: llama(ids[:, :97]),
        "positions": lambda: llama(ids, position_ids=ids[None]),
        "labels": lambda: bert(ids, labels=ids),
        "nearest": lambda: near(ids),
        "cross": lambda: huggingface.attach(make("t5"), mesh=mesh),
        "images": lambda: huggingface.attach(make("vit"), mesh=mesh),
        "gather": lambda: huggingface.gather(make("llama"), ids),
        "router": lambda: oss(ids, output_router_logits=True),
    }
    sentences = {}
    for name, call in calls.items():
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            sentences[name] = str(error)
    huggingface.attach(llama)
    assert llama(ids).logits.shape[1] == ids.shape[1]  # without a mesh it is as before
    return sentences
