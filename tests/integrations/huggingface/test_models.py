"""Each architecture of transformers, tiny: correct on attnbias, or refused with a clear error.

The names are those of docs/huggingface.md.
"""

import copy
import re

import pytest
import torch

from attnbias.testing import assert_no_worse

transformers = pytest.importorskip("transformers")
from cases import ROOT  # noqa: E402
from cases import huggingface_zoo as zoo  # noqa: E402
from cases.huggingface import exactly  # noqa: E402

from attnbias.integrations import huggingface as hf  # noqa: E402

PAGE = (ROOT / "docs" / "huggingface.md").read_text()
# The page explains what is special about each.
ALWAYS = {
    *(
        "beit",
        "bigbird_pegasus",
        "deepseek_v3",
        "doge",
        "gpt_oss",
        "lasr_encoder",
        "llava_onevision",
        "longt5",
    ),
    *("mixtral", "modernbert", "nllb-moe", "paligemma", "qwen2_vl", "t5gemma2", "whisper"),
    *("bloom", "deberta-v2", "deepseek_v32", "deepseek_v4"),
}

# Their eager attention returns weights without the sink.
SINK_APART = {"granite_swa", "granitemoe_swa"}


def listed(title):
    """Return the names below a title of the page; all but a few are slow."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    names = found[1].split("```")[1].split()
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in names]


def exact_run(model, given, real, **options):
    """Run in float64, where eager's padding masks may add up to -inf and give NaN."""
    try:
        return zoo.run(copy.deepcopy(model).double(), given, real, **options)
    except ValueError:
        return zoo.run(exactly(model), given, real, **options)


@pytest.mark.parametrize("name", listed("Architectures that run"))
def test_architecture_equals_eager(name):
    """Models that compute with their mask failed at the first forward, with an error about a Mask object."""
    eager = zoo.build(name)
    given, real = zoo.inputs(eager)
    model, calls = hf.attach(copy.deepcopy(eager)), []

    def counted(*arguments, **options):
        calls.append(arguments[0])
        return hf.attention_forward(*arguments, **options)

    transformers.AttentionInterface.register(hf.NAME, counted)  # until the next attach
    (truth, exact), (baseline, rough), (got, mine) = (
        each(of, given, real, output_attentions=True)
        for each, of in ((exact_run, eager), (zoo.run, eager), (zoo.run, model))
    )
    assert_no_worse(f"logits of {name}", got, baseline, truth)
    assert calls  # it did run on attnbias
    assert len(mine) == len(rough)
    if mine:
        has_key = [weights.sum(-1) > 0 for weights in mine]  # eager spreads a query without a key over all
        every = [[each[seen] for each, seen in zip(of, has_key, strict=True)] for of in (mine, rough, exact)]
        if name in SINK_APART:
            every[0] = [each / each.sum(-1, keepdim=True) for each in every[0]]
        assert_no_worse(f"weights of {name}", *(torch.cat([x.flatten() for x in of]) for of in every))
    if model.can_generate() and "input_ids" in given:
        prompt = {key: value for key, value in given.items() if not key.startswith("decoder")}
        if "attention_mask" in prompt:
            prompt["attention_mask"] = prompt["attention_mask"].flip(1)
        if model.config.is_encoder_decoder:
            prompt["decoder_start_token_id"] = 0
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        assert torch.equal(*(each.generate(**prompt, **options) for each in (eager, model)))


@pytest.mark.parametrize("name", listed("Architectures with their own attention"))
def test_architecture_with_its_own_attention_is_refused(name):
    model = zoo.build(name)
    before = {id(each.config): each.config._attn_implementation for each in parts(model)}
    words = rf"model: wanted .* can be replaced, got {type(model).__name__}, which has its own"
    with pytest.raises(ValueError, match=words):
        hf.attach(model)
    assert before == {id(each.config): each.config._attn_implementation for each in parts(model)}


def parts(model):
    return [each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)]


@pytest.mark.parametrize("name", listed("Architectures refused at the first forward"))
def test_unsupported_architecture_raises_a_clear_error(name):
    model = hf.attach(zoo.build(name))
    words = r"^\w+: .* in \w*Attention; model.set_attn_implementation\(\"eager\"\) runs it without attnbias$"
    with pytest.raises(NotImplementedError, match=words):
        zoo.run(model, *zoo.inputs(model))
    model.set_attn_implementation("eager")
    zoo.run(model, *zoo.inputs(model))
