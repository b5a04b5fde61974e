"""``set_score``: Hugging Face models with multi-level scores against the formula written out."""

import copy
import pickle

import pytest
import torch

import attnbias as ab
from attnbias.testing import assert_no_worse

transformers = pytest.importorskip("transformers")
from cases.huggingface import LENGTH, all_pairs, inputs, make  # noqa: E402

from attnbias.integrations import huggingface as hf  # noqa: E402

SCORES = {
    "pair": ab.MultiLevel([3, 2, 3], widths=[None, 12, 4]),
    "levels": ab.MultiLevel([4, 4], widths=[16, 4], normalize="levels"),
    "none": ab.MultiLevel([1, 7], widths=[None, 5], normalize=None),
}
MODELS = ["gpt2", "llama", "bert", "gemma2"]


def by_definition(score):
    """Return an attention function for transformers that makes all scores, for whole sequences."""

    def attend(module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None, **_):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        at, total, count, first = torch.arange(key.shape[2]), 0, 0, 0
        for rank, width in zip(score.ranks, score.widths, strict=True):
            block = at // (width or LENGTH)
            same = (block[:, None] == block).to(query.dtype)
            part = slice(first, first + rank)
            total = total + query[..., part] @ key[..., part].mT / rank * same
            count, first = count + same, first + rank
        scores = total / {"pair": count, "levels": len(score.ranks), None: 1}[score.normalize]
        scores = scores * scaling * query.shape[-1]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


for _name, _score in SCORES.items():
    transformers.AttentionInterface.register(f"by definition, {_name}", by_definition(_score))
    transformers.AttentionMaskInterface.register(f"by definition, {_name}", all_pairs)


def defined(model, name):
    """Return a copy that computes by definition."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(f"by definition, {name}")
    return other


def scored(name, score):
    model = hf.attach(make(name))
    hf.set_score(model, score)
    return model


def run(model, given, real):
    """Return logits at real tokens and the gradients of all parameters, scaled to 1."""
    logits = model(**given).logits[real]
    weight = torch.arange(logits.numel()).view(logits.shape).to(logits.dtype).cos()
    grads = torch.autograd.grad((logits * weight).sum(), [*model.parameters()], allow_unused=True)
    return logits.detach(), [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_the_definition(name, score, padding):
    given, real = inputs(name, padding)
    model = make(name).train()  # its dropout is 0
    rough, truth = defined(model, score), defined(model, score).double()
    hf.attach(model)
    plain = model(**given).logits[real]
    hf.set_score(model, SCORES[score])
    results = [run(each, given, real) for each in (model, rough, truth)]
    logits, grads = zip(*results, strict=True)
    assert_no_worse("logits", *logits)
    assert (logits[0] - plain).abs().max() > 1e-2  # the score matters
    scales = [max(float(grad.abs().max()), 1e-300) for grad in grads[2]]
    every = [torch.cat([(g / s).flatten() for g, s in zip(each, scales, strict=True)]) for each in grads]
    assert_no_worse("gradients", *every, 3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_one_level_of_all_dimensions_is_the_models_own_score(name):
    given, real = inputs(name, "right")
    model = make(name).double()
    wanted = hf.attach(model)(**given).logits[real]
    hf.set_score(model, ab.MultiLevel([8], widths=[None]))
    assert (model(**given).logits[real] - wanted).abs().max() < 1e-11 * wanted.abs().max()
    hf.set_score(model, SCORES["pair"])
    assert (model(**given).logits[real] - wanted).abs().max() > 1e-2
    hf.set_score(model, None)
    assert torch.equal(model(**given).logits[real], wanted)


PARTS = (9, 3, 1, 1, 2, *[1] * (LENGTH - 16))


@pytest.mark.parametrize(
    ("padding", "cache"), [("no mask", "dynamic"), (None, "static"), ("left", "dynamic"), ("left", "static")]
)
@pytest.mark.parametrize("relation", [None, ab.Window(before=6)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_with_a_cache_are_those_without_one(name, relation, padding, cache):
    given, real = inputs(name, None if padding == "no mask" else padding)
    model = scored(name, SCORES["pair"])
    hf.set_relation(model, relation)
    held = transformers.DynamicCache(config=model.config)
    if cache == "static":
        held = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    logits = []
    with torch.no_grad():
        whole, truth = model(**given).logits, copy.deepcopy(model).double()(**given).logits
        for part in torch.arange(LENGTH).split(PARTS):
            seen = (
                {} if padding == "no mask" else {"attention_mask": given["attention_mask"][:, : part[-1] + 1]}
            )
            ids = given["input_ids"][:, part]
            logits.append(model(input_ids=ids, past_key_values=held, **seen).logits)
    assert_no_worse("logits", torch.cat(logits, 1)[real], whole[real], truth[real])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_gives_the_same_tokens_with_any_cache(name):
    model, (given, _) = scored(name, SCORES["pair"]), inputs(name, "left")
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(**given, **options, use_cache=False)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(**given, **options, cache_implementation=cache), wanted)
    hf.set_score(model, None)
    assert not torch.equal(model.generate(**given, **options), wanted)


def test_weights_are_those_of_the_score():
    given, _ = inputs("llama", "right")
    model = make("llama").double()
    wanted = defined(model, "pair")(**given, output_attentions=True).attentions
    hf.set_score(hf.attach(model), SCORES["pair"])
    got = model(**given, output_attentions=True).attentions
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, wanted, strict=True))


def test_a_model_trains():
    torch.manual_seed(0)
    model, (given, _) = scored("llama", SCORES["pair"]).train(), inputs("llama", None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(**given, labels=given["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_score_for_each_layer():
    """Gemma's sliding layers drop keys, so that blocks cannot be counted from the first one."""
    model, (given, _) = make("gemma2"), inputs("gemma2", "left")
    hf.attach(model)
    hf.set_score(model, lambda layer: SCORES["pair"] if layer == 1 else None)
    held = [getattr(layer.self_attn, hf.forward.SCORE) for layer in model.model.layers]
    assert held == [None, SCORES["pair"], None]
    options = {"max_new_tokens": 8, "do_sample": False}
    cached = model.generate(**given, **options, use_cache=True)
    assert torch.equal(cached, model.generate(**given, **options, use_cache=False))
    hf.set_score(model, SCORES["pair"])
    with pytest.raises(
        NotImplementedError, match=r"score: wanted a cache that keeps all keys, .* at token \d"
    ):
        model.generate(**given, **options)
    hf.set_score(model, ab.MultiLevel([8], widths=[None]))  # nothing is counted
    assert model.generate(**given, **options).shape == cached.shape


def test_compiling_makes_one_graph():
    model, (given, _) = scored("llama", SCORES["pair"]), inputs("llama", None)
    torch._dynamo.reset()
    wanted = model(given["input_ids"]).logits
    assert torch.equal(
        torch.compile(model, backend="eager", fullgraph=True)(given["input_ids"]).logits, wanted
    )


def test_a_model_with_a_score_is_copied_and_pickled():
    model, (given, _) = scored("gpt2", SCORES["pair"]), inputs("gpt2", "right")
    wanted = model(**given).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**given).logits, wanted)


def test_explain_shows_the_score():
    q = torch.zeros(1, 4, LENGTH, 8)
    text = str(ab.explain(q, q, q, ab.Causal(), score=SCORES["pair"]))
    assert "score   MultiLevel(ranks=(3, 2, 3), widths=(None, 12, 4), normalize='pair')" in text
    assert "score" not in str(ab.explain(q, q, q, ab.Causal(), backend="rows")).partition("tiles")[2]


def test_scores_that_do_not_fit_are_named():
    model, (given, _) = hf.attach(make("gpt2")), inputs("gpt2", None)
    hf.set_score(model, ab.MultiLevel([4, 2], widths=[None, 4]))
    with pytest.raises(ValueError, match=r"score: wanted ranks whose sum is the head size 8, got \[4, 2\]"):
        model(**given)
    hf.set_score(model, ab.MultiLevel([4, 4], widths=[16, 4]))
    with pytest.raises(ValueError, match="wants a first level that all 23 positions share, got"):
        model(**given)
    with pytest.raises(
        ValueError, match="score: wanted widths, which stay while the sequence grows, got None"
    ):
        hf.set_score(model, ab.MultiLevel([4, 4]))
    with pytest.raises(TypeError, match="score: wanted a MultiLevel, a function of the layer or None, got 3"):
        hf.set_score(model, 3)
    with pytest.raises(
        TypeError, match="score: wanted a function that returns a MultiLevel or None, got 'x'"
    ):
        hf.set_score(model, lambda layer: "x")
    with pytest.raises(ValueError, match="model: wanted one with attention layers, found none in Linear"):
        hf.set_score(torch.nn.Linear(2, 2), SCORES["pair"])
    hf.set_score(model, SCORES["pair"])
    cache = transformers.DynamicCache(config=model.config)
    model(given["input_ids"], past_key_values=cache)
    mask = torch.zeros(2, 1, 2, LENGTH + 2)
    with pytest.raises(NotImplementedError, match=r"attention_mask: wanted .* that the score needs"):
        model(torch.full((2, 2), 7), attention_mask=mask, past_key_values=cache)


def test_a_score_over_ranks_is_refused():
    model = scored("gpt2", SCORES["pair"])
    mask, q = hf.Mask(ab.Causal(), 0), torch.zeros(1, 4, 5, 8)
    mask.shards = hf.masks.Shards({})
    wanted = "mesh: wanted neither weights, biases of positions nor a score that was set over ranks, got them"
    with pytest.raises(NotImplementedError, match=wanted):
        hf.attention_forward(model.transformer.h[0].attn, q, q, q, mask)
