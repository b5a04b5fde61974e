"""Packed documents against each document alone, and continuous batching against ``generate``."""

import copy

import pytest
import torch

import attnbias as ab
from attnbias.testing import assert_no_worse

transformers = pytest.importorskip("transformers")
from cases.huggingface import VOCABULARY, exactly, make  # noqa: E402

from attnbias.integrations import huggingface as hf  # noqa: E402

LENGTHS = [4, 12, 1, 7]
NAMES = ["gpt2", "gemma2", "gemma3", "llama"]


def samples(lengths=LENGTHS):
    rng = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, VOCABULARY, (n,), generator=rng).tolist()} for n in lengths]


def collate(documents, **options):
    return transformers.DataCollatorWithFlattening(return_tensors="pt", **options)(documents)


def grads_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for _, p in sorted(model.named_parameters()) if p.grad is not None]


def run_alone(model, documents):
    """Return the logits of all documents, one after another, and the gradients of their loss."""
    logits = [model(input_ids=torch.tensor([each["input_ids"]])).logits[0] for each in documents]
    losses = [
        torch.nn.functional.cross_entropy(x[:-1], torch.tensor(each["input_ids"])[1:], reduction="sum")
        for x, each in zip(logits, documents, strict=True)
    ]
    targets = sum(len(each["input_ids"]) - 1 for each in documents)
    return torch.cat(logits), grads_of(model, sum(losses) / targets)


def run_packed(model, batch):
    out = model(**batch)
    return out.logits[0], grads_of(model, out.loss)


def compare(name, got, eager, exact):
    assert_no_worse(f"logits of {name}", got[0], eager[0], exact[0])
    scales = [max(float(grad.abs().max()), 1e-300) for grad in exact[1]]
    assert len(got[1]) == len(scales)
    every = [
        torch.cat([(grad / scale).flatten() for grad, scale in zip(grads, scales, strict=True)])
        for grads in (got[1], eager[1], exact[1])
    ]
    assert_no_worse(f"gradients of {name}", *every, 3)


WAYS = {
    "position_ids": {},
    "offsets": {"return_flash_attn_kwargs": True},
    "numbers": {"return_seq_idx": True},
    "everything": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_documents_equal_documents_alone(name, use_cache):
    """With a cache, which models make by default, documents attended to the ones before them."""
    model, documents = make(name), samples()
    exact, eager = (run_alone(x, documents) for x in (exactly(model), copy.deepcopy(model)))
    batch = collate(documents) | {"use_cache": use_cache}
    compare(name, run_packed(hf.attach(model), batch), eager, exact)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("relation", [None, ab.Window(before=3)])
def test_documents_are_read_from_all_that_the_collator_returns(way, relation):
    model, documents = make("llama"), samples()
    batch = collate(documents, **WAYS[way])
    if relation is None:
        exact, eager = (run_alone(x, documents) for x in (exactly(model), copy.deepcopy(model)))
        compare(way, run_packed(hf.attach(model), batch), eager, exact)
        return
    hf.attach(model, relation)
    alone = [model(input_ids=torch.tensor([each["input_ids"]])).logits[0] for each in documents]
    got = model(**batch).logits[0]
    wide = copy.deepcopy(model).double()
    exact = torch.cat([wide(input_ids=torch.tensor([x["input_ids"]])).logits[0] for x in documents])
    assert_no_worse(way, got, torch.cat(alone), exact)


def test_numbers_alone_tell_documents_apart():
    """Without positions each token keeps its place in the row, but documents do not mix."""
    model, documents = make("llama"), samples()
    batch = collate(documents, return_seq_idx=True, return_position_ids=False)
    got = run_packed(hf.attach(copy.deepcopy(model)), batch)[0]
    changed = batch["input_ids"].clone()
    changed[0, : LENGTHS[0]] = 7
    again = run_packed(hf.attach(model), batch | {"input_ids": changed})[0]
    assert torch.equal(again[LENGTHS[0] :], got[LENGTHS[0] :])
    assert not torch.equal(again[: LENGTHS[0]], got[: LENGTHS[0]])


def test_each_row_has_documents_of_its_own():
    model = make("llama")
    rows = [samples([4, 12, 8]), samples([20, 1, 3])]
    both = [collate(row) for row in rows]
    batch = {name: torch.cat([x[name] for x in both]) for name in ("input_ids", "position_ids")}
    exact, eager = (
        torch.stack([run_alone(x, row)[0] for row in rows]) for x in (exactly(model), copy.deepcopy(model))
    )
    assert_no_worse("logits", hf.attach(model)(**batch).logits, eager, exact)


def test_padding_says_that_rows_are_not_packed():
    """Positions of padded prompts jump, too; a mask says why, as it does to transformers."""
    model = make("llama")
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(9) % 4}
    given["position_ids"] = given["position_ids"].expand(2, -1)
    exact, eager = (x(**given).logits for x in (exactly(model), copy.deepcopy(model)))
    assert_no_worse("logits", hf.attach(model)(**given).logits, eager, exact)


def test_documents_are_looked_for_once_in_a_call(monkeypatch):
    model, calls = hf.attach(make("gemma3")), []
    find = hf.packed._find_documents
    monkeypatch.setattr(hf.packed, "_find_documents", lambda *given: calls.append(1) or find(*given))
    model(**collate(samples()))
    assert len(calls) == 2  # a mask for sliding layers, and one for full ones
    model(**collate(samples()), use_cache=False)
    assert len(calls) == 2  # transformers found them


def test_compiled_models_tell_documents_apart():
    model, batch = make("llama"), collate(samples())
    compiled = torch.compile(hf.attach(copy.deepcopy(model)), backend="eager")
    exact, eager = (run_alone(x, samples())[0] for x in (exactly(model), copy.deepcopy(model)))
    assert_no_worse("logits", compiled(**batch).logits[0], eager, exact)


def train(model, steps):
    """Take some steps of SGD, and return all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_on_packed_batches_equals_training_on_documents():
    model = make("llama")
    batches = [samples(lengths) for lengths in ([4, 12, 7], [1, 9], [23])]
    packed = [lambda x, each=each: run_packed(x, collate(each)) for each in batches]
    alone = [lambda x, each=each: run_alone(x, each) for each in batches]
    exact, eager = (train(x, alone) for x in (exactly(model), copy.deepcopy(model)))
    assert not torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), eager)
    assert_no_worse("parameters", train(hf.attach(model), packed), eager, exact, 3)


def test_trainer_packs(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate")
    model, documents = make("llama"), samples([4, 12, 7, 1])
    exact, eager = (
        train(x, [lambda x: run_alone(x, documents)]) for x in (exactly(model), copy.deepcopy(model))
    )
    options = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], **options
    )
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    hf.attach(model)
    transformers.Trainer(model, arguments, train_dataset=documents, data_collator=collator).train()
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_no_worse("parameters", got, eager, exact, 3)


def test_packing_that_does_not_fit_is_named():
    model, batch = hf.attach(make("llama")), collate(samples(), return_flash_attn_kwargs=True)
    two = {name: torch.cat((batch[name],) * 2) for name in ("input_ids", "position_ids")}
    with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_q: wanted 1 row .*, got 2 of 24 and 24 in"):
        model(**(batch | two | {"labels": None}))
    others = batch | {"cu_seq_lens_k": batch["cu_seq_lens_k"] + 1}
    with pytest.raises(NotImplementedError, match=r"^cu_seq_lens_k: wanted cu_seq_lens_q, got other"):
        model(**others)
    cache = model(input_ids=batch["input_ids"]).past_key_values
    with pytest.raises(NotImplementedError, match=r"^seq_idx: wanted rows of .*, got 1 of 25 and 1 in"):
        model(input_ids=torch.tensor([[3]]), past_key_values=cache, seq_idx=torch.tensor([[0]]))


# -- continuous batching ----------------------------------------------------------------------------

PROMPTS = samples([5, 11, 1, 8])
RELATIONS = {"window": ab.Window(before=3), "chunks": ab.Chunks(3) | ab.Window(before=1)}


def generate_together(model, steps=9):
    """Generate by continuous batching, in steps of at most 12 tokens and pages of 8."""
    together = transformers.ContinuousBatchingConfig(num_blocks=64, page_size=8, max_batch_tokens=12)
    options = transformers.GenerationConfig(
        max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [each["input_ids"] for each in PROMPTS]
    results = model.generate_batch(
        prompts, options, continuous_batching_config=together, progress_bar=False
    ).values()
    assert [each.error for each in results] == [None] * len(PROMPTS)
    return [each.generated_tokens for each in results]


def generate_alone(model, steps=9):
    prompts = [torch.tensor([each["input_ids"]]) for each in PROMPTS]
    options = {"max_new_tokens": steps, "do_sample": False}
    return [model.generate(x, **options)[0, x.shape[1] :].tolist() for x in prompts]


@pytest.mark.parametrize("name", NAMES)
def test_continuous_batching_gives_the_tokens_of_eager(name):
    model = make(name)
    wanted = generate_alone(model)
    assert generate_together(hf.attach(model, paged=True)) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 8


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_relations_are_in_positions_of_each_request(name, relation):
    """A sliding cache drops a request's first keys: positions do not begin at the first one that is left."""
    model = make(name)
    wanted = generate_alone(hf.attach(copy.deepcopy(model), RELATIONS[relation]))
    assert wanted != generate_alone(model)
    assert generate_together(hf.attach(model, RELATIONS[relation], paged=True)) == wanted


def test_nearest_keys_are_those_of_each_request():
    model = make("llama")
    wanted = generate_alone(model)
    assert generate_together(hf.attach(model, hf.NearestKeys(50), paged=True)) == wanted
    assert generate_together(hf.attach(model, hf.NearestKeys(2), paged=True)) != wanted


def test_continuous_batching_makes_no_mask_of_pairs(monkeypatch):
    seen = []
    model = hf.attach(make("gemma3"), paged=True)
    update = hf.forward.update_cache

    def record(*given):
        result = update(*given)
        seen.append(result[2])
        return result

    monkeypatch.setattr(hf.forward, "update_cache", record)
    monkeypatch.setattr(hf.Mask, "numbers", lambda mask: pytest.fail("made numbers for all pairs"))
    generate_together(model, 3)
    assert all(isinstance(mask, hf.Mask) for mask in seen)
    steps = {id(mask): mask for mask in seen}
    assert len(steps) * 3 == len(seen) * 2  # three layers share two masks in each step
    assert isinstance(seen[0].relation, ab.Ranges)


def test_a_paged_model_also_runs_alone():
    model, documents = make("llama"), samples()
    exact, eager = (run_alone(x, documents) for x in (exactly(model), copy.deepcopy(model)))
    compare("paged", run_packed(hf.attach(model, paged=True), collate(documents)), eager, exact)
    assert generate_alone(model) == generate_alone(hf.attach(copy.deepcopy(model)))
    assert hf.attach(model).config._attn_implementation == hf.NAME


def test_what_paging_does_not_support_is_named():
    model = make("llama")
    with pytest.raises(NotImplementedError, match=r"^mesh: wanted None with paged=True, got str$"):
        hf.attach(model, mesh="cp", paged=True)
    module, x = hf.attach(model, paged=True).model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    with pytest.raises(NotImplementedError, match=r"^block_table: wanted None, attnbias reads .* by index"):
        hf.attention_forward(module, x, x, x, None, cache=object(), block_table=torch.zeros(1))
    hf.set_score(model, ab.MultiLevel([4, 4], widths=[None, 4]))
    with pytest.raises(
        NotImplementedError, match=r"^score: wanted none with continuous batching, which packs"
    ):
        hf.attention_forward(module, x, x, x, None, cache=object())
