"""Small Hugging Face models with random weights, their inputs, and attention by definition."""

import copy
import logging
import sys

import torch

# transformers imports a package of this name, and under `python -m pytest` would find the folder.
sys.modules.setdefault("kernels", None)
import transformers  # noqa: E402
from transformers import masking_utils  # noqa: E402

logging.getLogger("transformers").setLevel(logging.ERROR)
VOCABULARY, LENGTH = 50, 23

SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GEMMA = SIZES | {
    **{
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "attention_dropout": 0.0,
    },
    **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    **{"query_pre_attn_scalar": 8, "pad_token_id": 0},
}
T5 = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
    **{"decoder_start_token_id": 0, "tie_word_embeddings": False},
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make(name):
    """Make a model whose random weights are large enough that differences in attention show."""
    torch.manual_seed(0)
    t = transformers
    model = {
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(hidden_size=32, **SIZES, **QUIET)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        ),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(hidden_size=32, image_size=16, patch_size=4, **(SIZES | QUIET))
        ),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=None)
        ),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**GEMMA)),
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**(SIZES | {"hidden_size": 32, "num_key_value_heads": 2, "pad_token_id": 0}))
        ),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # sharpens attention: nearly uniform weights hide faults
            if parameter.dim() > 1:
                parameter.mul_(0.35 / parameter.std())
    if name in ("t5", "gpt2", "gemma2", "gemma3"):  # if tied to the embedding they would repeat their input
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.lm_head.weight.data[0] = 0  # nor repeat the token that T5 starts with
    if model.can_generate():
        model.generation_config.eos_token_id = None  # all generate equally many tokens
    model.set_attn_implementation("eager")
    return model.eval()


def inputs(name, padding):
    """Return the arguments of a model, and where its tokens are real."""
    rng = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=rng)}, torch.ones(2, dtype=torch.bool)
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=rng)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[1, 15:] = 0
    elif padding == "left":
        mask[1, :8] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name != "t5":
        return given, mask.bool()
    answers = torch.randint(2, VOCABULARY, (2, 9), generator=rng)
    return given | {"decoder_input_ids": answers}, torch.ones(2, 9, dtype=torch.bool)


def textbook(
    module, query, key, value, mask, dropout=0.0, scaling=None, softcap=0.0, position_bias=None, **_
):
    """Compute attention by definition; eager's softmax is in float32, and NaN in rows without a key."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def all_pairs(**arguments):
    return masking_utils.sdpa_mask(**(arguments | {"allow_is_causal_skip": False}))


transformers.AttentionInterface.register("textbook", textbook)
transformers.AttentionMaskInterface.register("textbook", all_pairs)


def exactly(model):
    """Return a copy in float64, with attention by definition."""
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("textbook")
    return wide
