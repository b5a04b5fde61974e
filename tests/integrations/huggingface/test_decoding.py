"""Decoding with a cache against the whole sequence computed at once, for every kind of relation."""

import copy

import pytest
import torch

import attnbias as ab
from attnbias.testing import assert_no_worse

transformers = pytest.importorskip("transformers")
from cases.huggingface import LENGTH, VOCABULARY, inputs, make  # noqa: E402

from attnbias.integrations import huggingface as hf  # noqa: E402


def even(b, h, q, k):
    return (q + k) % 2 == 0


RELATIONS = {
    "none": None,
    "empty": ab.Empty(),
    "window": ab.Window(before=3),
    "window of all": ab.Window(before=99),
    "chunks": ab.Chunks(4),
    "chunks reversed": ab.Chunks(4).T,
    "window and global": ab.Window(before=2) | ab.Global([0]),
    "prefix": ab.Prefix(5) & (ab.Window(before=2) | ab.Global([1])),
    "dilated": ab.Dilated(3, before=2),
    "columns": ab.Columns(4) | ab.Window(before=1),
    "not": ~ab.Window(before=2, after=None) | ab.Window(before=0),
    "random blocks": ab.RandomBlocks(4, 2, seed=0) | ab.Window(before=0),
    "where": ab.Where(even),
    "per head": ab.PerHead([ab.Window(before=n) for n in (0, 1, 5, 2)]),
    "per batch": ab.PerBatch([ab.Window(before=1), ab.Chunks(3)]),
}
# A prompt, part of one, and tokens one by one.
PARTS = (9, 3, 1, 1, 2, *[1] * (LENGTH - 16))


def new_cache(kind, model):
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize(
    ("padding", "cache"), [("no mask", "dynamic"), (None, "static"), ("left", "dynamic"), ("left", "static")]
)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_with_and_without_a_cache_are_equal(name, relation, padding, cache):
    """With a relation, a step on an unpadded batch raised IndexError once a key was outside it."""
    model, (given, real) = make(name), inputs(name, None if padding == "no mask" else padding)
    hf.attach(model, RELATIONS[relation])
    ids, mask = given["input_ids"], given["attention_mask"]
    held, logits = new_cache(cache, model), []
    with torch.no_grad():
        whole, truth = model(**given).logits, copy.deepcopy(model).double()(**given).logits
        for part in torch.arange(LENGTH).split(PARTS):
            seen = {} if padding == "no mask" else {"attention_mask": mask[:, : part[-1] + 1]}
            logits.append(model(input_ids=ids[:, part], past_key_values=held, **seen).logits)
    assert_no_worse("logits", torch.cat(logits, 1)[real], whole[real], truth[real])


WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5},
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("relation", ["none", "window", "window and global"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompts", ["one", "several"])
def test_generate_gives_the_same_tokens_with_any_cache(name, relation, way, prompts):
    """A static cache raised AttributeError: 'Mask' object has no attribute 'contiguous'."""
    model, (given, _) = make(name), inputs(name, "left" if prompts == "several" else None)
    if prompts == "one":
        given = {"input_ids": given["input_ids"][:1]}
    hf.attach(model, RELATIONS[relation])
    tokens = {}
    for cache in (None, "dynamic", "static"):
        torch.manual_seed(0)
        options = {"use_cache": False} if cache is None else {"cache_implementation": cache}
        tokens[cache] = model.generate(**given, **WAYS[way], **options, max_new_tokens=8)
    assert torch.equal(tokens["dynamic"], tokens[None])
    assert torch.equal(tokens["static"], tokens[None])
    assert len(tokens[None][0, LENGTH:].unique()) > 2  # not one token repeated


def test_a_pipeline_generates():
    """Its one prompt has no padding: a window raised IndexError."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    model = hf.attach(make("llama"), RELATIONS["window"])
    prompt, options = " ".join(f"w{n}" for n in range(2, 12)), {"do_sample": False, "max_new_tokens": 6}
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [pipeline(prompt, **options, use_cache=use)[0]["generated_text"] for use in (True, False)]
    assert texts[0] == texts[1] and texts[0].count("w") == 16


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["none", "window"])
def test_a_static_cache_is_compiled_once(relation):
    """Compiled as on a GPU: once for the first step and once more for all lengths."""
    model, (given, _) = make("llama"), inputs("llama", None)
    hf.attach(model, RELATIONS[relation])
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(**given, **options)
    settings = transformers.CompileConfig(backend="eager", fullgraph=True)
    settings._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = model.generate(**given, **options, cache_implementation="static", compile_config=settings)
    assert torch.equal(got, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_named_backend_also_runs_decoding_steps():
    """Torch's SDPA ran them whichever backend was named."""
    model, (given, _) = make("llama"), inputs("llama", None)
    hf.attach(model, RELATIONS["window"])
    wanted = model.generate(**given, max_new_tokens=4, do_sample=False)
    with ab.use_backend("reference"):
        assert torch.equal(model.generate(**given, max_new_tokens=4, do_sample=False), wanted)
    cache = transformers.DynamicCache(config=model.config)
    model(given["input_ids"], past_key_values=cache)
    with ab.use_backend("sdpa"), pytest.raises(NotImplementedError, match="backend 'sdpa' cannot run this"):
        model(torch.full((2, 1), 7), past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_relation_of_one_length_is_refused_at_another(cache):
    """A graph or documents of the prompt's length do not cover the tokens that follow."""
    model, (given, _) = make("llama"), inputs("llama", None)
    for relation in (ab.Documents.from_lengths([LENGTH]), ab.Neighborhood((LENGTH,), 2)):
        hf.attach(model, relation)
        with pytest.raises(ValueError, match=f"relation: this .* is for {LENGTH} keys, got k_len = "):
            model.generate(**given, max_new_tokens=3, cache_implementation=cache)


def test_tensor_mask_with_a_relation_and_a_cache_raises():
    model, (given, _) = make("gpt2"), inputs("gpt2", None)
    hf.attach(model, RELATIONS["window"])
    cache = transformers.DynamicCache(config=model.config)
    model(given["input_ids"], past_key_values=cache)
    mask = torch.zeros(2, 1, 2, LENGTH + 2)
    wanted = (
        r"attention_mask: wanted the model's own mask, .* got Tensor \[2, 1, 2, 25\] in GPT2Attention; model"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        model(torch.full((2, 2), 7), attention_mask=mask, past_key_values=cache)
