"""Hugging Face models on attnbias against themselves with ``eager``, from random weights."""

import copy
import pickle
import sys
import warnings

import pytest
import torch

import attnbias as ab
from attnbias.testing import assert_no_worse

transformers = pytest.importorskip("transformers")
from cases.huggingface import LENGTH, exactly, inputs, make  # noqa: E402

from attnbias.integrations import huggingface as hf  # noqa: E402


def run(model, given, real):
    """Return logits at real tokens and the gradients of all parameters, each in units of ``scales``."""
    model.zero_grad()
    floats = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in given.items()}
    logits = model(**floats).logits[real]
    weight = torch.arange(logits.numel()).view(logits.shape).to(logits.dtype).cos()
    (logits * weight).sum().backward()
    grads = [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]
    return logits.detach(), grads


def compare(name, model, given, real, eager=None):
    """Compare a model on attnbias with its copies on eager in float32 and float64."""
    eager = model if eager is None else eager
    truth, exact = run(exactly(eager), given, real)
    baseline, rough = run(copy.deepcopy(eager), given, real)
    got, mine = run(hf.attach(model), given, real)
    assert_no_worse(f"logits of {name}", got, baseline, truth)
    assert len(mine) == len(exact)
    scales = [max(float(grad.abs().max()), 1e-300) for grad in exact]
    every = [
        torch.cat([(grad / scale).flatten() for grad, scale in zip(grads, scales, strict=True)])
        for grads in (mine, rough, exact)
    ]
    assert_no_worse(f"gradients of {name}", *every, 3)


MODELS = ["bert", "gpt2", "t5", "vit", "gemma2", "gemma3", "llama"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_logits_and_gradients_equal_eager(name, padding):
    if name == "vit" and padding:
        pytest.skip("patches are never padded")
    compare(name, make(name), *inputs(name, padding))


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma2", "gemma3", "llama"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_greedy_generation_gives_the_same_tokens(name, padding):
    model, (given, _) = make(name), inputs(name, padding)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    wanted = model.generate(**given, **options)
    assert torch.equal(hf.attach(model).generate(**given, **options), wanted)
    assert len(wanted[0, -12:].unique()) > 4  # not one token repeated


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_static_cache_gives_the_same_logits(name):
    """It has more keys than tokens seen; the rest are not real."""
    model, (given, real) = make(name), inputs(name, "left")
    outputs = []
    for _ in range(2):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            first = model(**given, past_key_values=cache).logits
            mask = torch.cat((given["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
            step = torch.full((2, 1), 7)
            second = model(input_ids=step, attention_mask=mask, past_key_values=cache).logits
        outputs.append(torch.cat((first[real], second[:, 0])))
        hf.attach(model)
    wide = exactly(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        first = wide(**given, past_key_values=cache).logits[real]
        second = wide(input_ids=step, attention_mask=mask, past_key_values=cache).logits[:, 0]
    assert_no_worse("logits", outputs[1], outputs[0], torch.cat((first, second)))


def test_several_tokens_after_a_cache():
    """Chunked prefill: queries after cached keys, through a sliding cache."""
    model, (given, _) = make("gemma2"), inputs("gemma2", None)
    hf.attach(model)
    whole = model(**given).logits
    truth = exactly(model)(**given).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = [
        model(input_ids=part, past_key_values=cache).logits for part in given["input_ids"].split(6, dim=1)
    ]
    assert_no_worse("logits", torch.cat(parts, 1), whole, truth)


def test_dropout_is_applied_in_training():
    model, (given, _) = make("gpt2"), inputs("gpt2", None)
    for module in model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.5
    hf.attach(model)
    assert torch.equal(model(**given).logits, model(**given).logits)
    model.train()
    assert not torch.equal(model(**given).logits, model(**given).logits)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_weights_are_returned_on_request(name):
    """GPT-2, which does not pass the option to its layers, returned an empty tuple."""
    model, (given, _) = make(name), inputs(name, "right")
    model.set_attn_implementation("eager")
    results = []
    for each in (exactly(model), model, hf.attach(copy.deepcopy(model))):
        floats = {k: v.to(each.dtype) if v.is_floating_point() else v for k, v in given.items()}
        out = each(**floats, output_attentions=True)
        names = [name for name in out if "attentions" in name]
        results.append([weights for name in names for weights in out[name]])
    assert len(results[0]) == sum(hasattr(module, "is_causal") for module in model.modules())
    for exact, eager, got in zip(*results, strict=True):
        assert_no_worse("weights", got, eager, exact)


def test_eager_can_be_restored():
    model, (given, _) = make("t5"), inputs("t5", "right")
    wanted = model(**given).logits
    hf.attach(model).set_attn_implementation("eager")
    assert torch.equal(model(**given).logits, wanted)


def test_an_attached_model_is_copied_and_pickled():
    model, (given, _) = make("t5"), inputs("t5", "right")
    hf.attach(model, ab.Window(before=3))
    wanted = model(**given).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**given).logits, wanted)
        table = other.encoder.block[0].layer[0].SelfAttention
        assert table.compute_bias(3, 3).table.data_ptr() == table.relative_attention_bias.weight.data_ptr()


def test_t5_makes_no_pairwise_bias():
    model = hf.attach(make("t5"))
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(5, 5)
    assert isinstance(bias, ab.RelativeBias)
    cross = model.decoder.block[0].layer[1].EncDecAttention.compute_bias(5, 5)
    assert not isinstance(cross, torch.Tensor)


# -- relations of the user --------------------------------------------------------------------------


def add_mask(given, relation, real):
    """Return the same as a mask of pairs for eager: related, causal and not padded."""
    allowed = (relation & ab.Causal()).dense(LENGTH, LENGTH) & given["attention_mask"].bool()[:, None]
    allowed = allowed[:, None]
    floats = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return given | {"attention_mask": floats}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "relation", [ab.Window(before=3), ab.Columns(4) | ab.Window(before=1), ab.Global([0])]
)
def test_a_relation_is_intersected_with_the_mask(name, relation):
    model, (given, real) = make(name), inputs(name, "right")
    seen = real & (relation & ab.Causal()).dense(LENGTH, LENGTH).any(1)
    pairs = add_mask(given, relation, real)
    if name == "llama":
        pairs["position_ids"] = given["position_ids"] = torch.arange(LENGTH)[None]
    wide = exactly(model)
    truth = wide(**(pairs | {"attention_mask": pairs["attention_mask"].double()})).logits[seen]
    baseline = model(**pairs).logits[seen]
    hf.attach(model, relation)
    assert_no_worse("logits", model(**given).logits[seen], baseline, truth)
    hf.set_relation(model, None)
    assert_no_worse(
        "logits", model(**given).logits[real], make(name)(**given).logits[real], wide(**given).logits[real]
    )


@pytest.mark.parametrize(
    "relation", [ab.Columns(3) | ab.Window(before=2), ab.Chunks(6) | ab.Window(before=0)]
)
def test_a_relation_for_each_layer_holds_in_generation(relation):
    """Greedy tokens of a sparse model are the same with a sliding cache and without one."""
    model, (given, _) = make("gemma2"), inputs("gemma2", "left")
    hf.attach(model, lambda layer: relation if layer else None)
    options = {"max_new_tokens": 8, "do_sample": False}
    cached = model.generate(**given, **options, use_cache=True)
    assert torch.equal(cached, model.generate(**given, **options, use_cache=False))
    own = [getattr(layer.self_attn, hf.forward.RELATION) for layer in model.model.layers]
    assert own[0] is None and own[1] == own[2] == relation


@pytest.mark.parametrize("relation", [ab.Columns(3) | ab.Window(before=1), ab.Chunks(4), ab.Chunks(4).T])
@pytest.mark.parametrize("part", [1, 3])
def test_relation_means_the_same_positions_after_a_cache(relation, part):
    """Chunks count from the start of the sequence, not from the first key that a sliding cache still has."""
    model, (given, _) = make("gemma2"), inputs("gemma2", None)
    hf.attach(model, relation)
    exact = copy.deepcopy(model).double()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole, truth = model(**given).logits, exact(**given).logits
        ids = given["input_ids"].split(part, dim=1)
        parts = [model(input_ids=each, past_key_values=cache).logits for each in ids]
    assert_no_worse("logits", torch.cat(parts, 1), whole, truth)


@pytest.mark.parametrize(
    ("name", "own", "cross"),
    [
        ("bert", 2, 0),
        ("gpt2", 2, 0),
        ("t5", 4, 2),
        ("vit", 2, 0),
        ("gemma2", 3, 0),
        ("gemma3", 3, 0),
        ("llama", 2, 0),
    ],
)
def test_every_attention_of_a_model_is_found(name, own, cross):
    model = hf.attach(make(name), ab.Full())
    held = [getattr(module, hf.forward.RELATION, None) for module in model.modules()]
    assert sum(each is not None for each in held) == own
    if cross:
        hf.set_relation(model, hf.NearestKeys(2), cross=True)
        held = [getattr(module, hf.forward.RELATION, None) for module in model.modules()]
        assert sum(isinstance(each, hf.NearestKeys) for each in held) == cross


def test_duplicate_edges_count_in_a_decoding_step():
    model = make("gpt2")
    double = ab.Graph([[0, 0, 1, *range(LENGTH)], [LENGTH - 1] * 3 + list(range(LENGTH))], num_nodes=LENGTH)
    hf.attach(model)
    for block in model.transformer.h:
        setattr(block.attn, hf.forward.RELATION, None)
    module = model.transformer.h[0].attn
    setattr(module, hf.forward.RELATION, double)
    q, k, v = torch.randn(3, 1, 4, LENGTH, 8)
    whole = hf.attention_forward(module, q, k, v, hf.Mask(ab.Full(), 0))[0]
    step = hf.attention_forward(module, q[:, :, -1:], k, v, hf.Mask(ab.Full(), LENGTH - 1))[0]
    truth = ab.attention(*(x.double() for x in (q, k, v)), double).transpose(1, 2)
    assert_no_worse("step", step, whole[:, -1:], truth[:, -1:])


def test_vit_with_a_neighborhood_of_patches():
    model, (given, _) = make("vit"), inputs("vit", None)[0:2]
    relation = hf.patch_neighborhood((4, 4), 1)
    grid = ab.Neighborhood((4, 4), 1).dense(16, 16)
    table = torch.ones(17, 17, dtype=torch.bool)
    table[1:, 1:] = grid
    assert torch.equal(relation.dense(17, 17), table)
    floats = torch.zeros(2, 1, 17, 17).masked_fill(~table, torch.finfo(torch.float32).min)
    wide = exactly(model)
    truth = wide(given["pixel_values"].double(), attention_mask=floats.double()).logits
    baseline = model(**given, attention_mask=floats).logits
    assert_no_worse("logits", hf.attach(model, relation)(**given).logits, baseline, truth)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_pairs_from_the_user(dtype):
    model, (given, real) = make("gpt2"), inputs("gpt2", None)
    floats = add_mask(given, ab.Window(before=4), real)
    mask = floats["attention_mask"]
    truth = exactly(model)(given["input_ids"], attention_mask=mask.double()).logits
    baseline = model(**floats).logits
    hf.attach(model)
    got = model(given["input_ids"], attention_mask=mask == 0 if dtype == torch.bool else mask).logits
    assert_no_worse("logits", got, baseline, truth)
    cache = transformers.DynamicCache(config=model.config)
    parts = []
    for at in (slice(0, 20), slice(20, 22), slice(22, 23)):
        part = mask[:, :, at, : at.stop]
        part = part == 0 if dtype == torch.bool else part
        parts.append(model(given["input_ids"][:, at], attention_mask=part, past_key_values=cache).logits)
    assert_no_worse("logits by parts", torch.cat(parts, 1), baseline, truth)


def test_compiling_makes_one_graph_without_warnings():
    """Dynamo warned about an lru_cache in masks.py."""
    model, (given, _) = make("llama"), inputs("llama", None)
    hf.attach(model, ab.Window(before=4))
    wanted = model(given["input_ids"]).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.compile(model, backend="eager", fullgraph=True)(given["input_ids"]).logits
    assert torch.equal(got, wanted)


# -- nearest keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 4096])
def test_nearest_keys_have_the_largest_products(chunk):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 11, 8)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 2:] = False
    found = hf.NearestKeys(4, chunk).find(q, k, ab.Padding.from_mask(mask), 0)
    scores = (q @ k.repeat_interleave(2, 1).mT).masked_fill(~mask[:, None, None], -torch.inf)
    kept = scores >= scores.topk(4, dim=-1).values[..., -1:]
    assert torch.equal(found.dense(5, 11), kept & mask[:, None, None])
    assert found.index.shape == (2, 4, 5, 4) and (found.index[1] == -1).any()


def test_enough_nearest_keys_are_cross_attention():
    model, (given, _) = make("t5"), inputs("t5", "right")
    wide = exactly(model)
    truth, baseline = wide(**given).logits, model(**given).logits
    hf.attach(model)
    hf.set_relation(model, hf.NearestKeys(LENGTH, chunk=7), cross=True)
    assert_no_worse("logits", model(**given).logits, baseline, truth)
    hf.set_relation(model, hf.NearestKeys(2), cross=True)
    few = model(**given).logits
    assert (few - baseline).abs().max() > 100 * (baseline - truth).abs().max()
    step = model.generate(**{k: v for k, v in given.items() if k != "decoder_input_ids"}, max_new_tokens=3)
    assert step.shape == (2, 4)


# -- errors -----------------------------------------------------------------------------------------


def test_unsupported_arguments_raise():
    model = hf.attach(make("gpt2"))
    module = model.transformer.h[0].attn
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(
        NotImplementedError,
        match=r"cu_seqlens: wanted None, .* got Tensor \[3\] in GPT2",
    ):
        hf.attention_forward(module, q, q, q, None, cu_seqlens=torch.zeros(3))
    with pytest.raises(
        NotImplementedError, match=r"attention_mask: wanted a Mask of attnbias, .* got Tensor \[1, 5\]"
    ):
        hf.attention_forward(module, q, q, q, torch.ones(1, 5))
    with pytest.raises(
        NotImplementedError, match="attention_mask: wanted one for 2 causal queries and 5 keys"
    ):
        hf.attention_forward(module, q[:, :, :2], q, q, None)
    with pytest.raises(NotImplementedError, match="position_bias: wanted a tensor, got list"):
        hf.attention_forward(module, q, q, q, None, position_bias=[1])


def test_relations_that_do_not_fit_are_named():
    model, (given, _) = make("gpt2"), inputs("gpt2", None)
    hf.attach(model, ab.PerHead([ab.Full(), ab.Causal()]))
    with pytest.raises(ValueError, match="relation: this PerHead has heads 2, got heads 4"):
        model(**given)
    hf.set_relation(model, ab.Graph([[0], [1]], num_nodes=9))
    with pytest.raises(ValueError, match=f"relation: this Graph is for 9 keys, got k_len = {LENGTH}"):
        model(**given)
    with pytest.raises(
        TypeError, match="relation: wanted a Relation or NearestKeys, a function of the layer or None, got 3"
    ):
        hf.set_relation(model, 3)
    with pytest.raises(
        TypeError, match="wanted a function that returns a Relation or NearestKeys or None, got 'x'"
    ):
        hf.set_relation(model, lambda layer: "x")
    with pytest.raises(ValueError, match=r"model: wanted one with cross-attention layers, .* GPT2LMHead"):
        hf.set_relation(model, ab.Full(), cross=True)
    with pytest.raises(ValueError, match="count, chunk: wanted at least 1 each, got 0 and 4096"):
        hf.NearestKeys(0)


def test_object_that_is_not_a_model_raises():
    """It raised a bare AttributeError from inside."""
    wanted = "model: wanted a transformers model whose attention can be replaced, got"
    with pytest.raises(ValueError, match=f"{wanted} Linear"):
        hf.attach(torch.nn.Linear(2, 2))
    own = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=9, hidden_size=8, n_head=2, n_layer=1)
    )
    with pytest.raises(ValueError, match=f"{wanted} BloomForCausalLM, which has its own attention code$"):
        hf.attach(own)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"huggingface: wanted transformers 5, got 4\.57\.1"):
        hf.register()
