"""A tiny model of each architecture of transformers, shrunk by the names of its configuration's sizes."""

import copy
import inspect
import itertools
import sys

import torch

sys.modules.setdefault("kernels", None)  # see cases.huggingface
import transformers  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

_NAMES = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
    "num_encoder_layers num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers "
    "num_blocks num_key_value_heads n_kv_heads num_kv_heads num_global_key_value_heads "
    "num_experts_per_tok top_k_experts n_shared_experts",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "patch_size num_experts num_local_experts n_routed_experts moe_num_experts index_n_heads "
    "num_conv_pos_embeddings num_conv_pos_embedding_groups encoder_num_attention_heads "
    "decoder_num_attention_heads",
    5: "sliding_window",
    6: "attention_window",
    8: "head_dim d_kv attention_head_dim kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "kv_lora_rank q_lora_rank global_head_dim index_head_dim query_pre_attn_scalar "
    "relative_attention_num_buckets linear_key_head_dim linear_value_head_dim rotary_dim",
    16: "image_size relative_attention_max_distance qk_head_dim input_size index_topk",
    32: "hidden_size d_model n_embd dim hidden_dim embed_dim encoder_hidden_size decoder_hidden_size "
    "emb_dim embedding_size embedding_dim out_hidden_size projection_dim word_embed_proj_dim "
    "vision_hidden_size hidden_size_per_layer_input text_hidden_size audio_hidden_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "ffn_hidden_size dense_intermediate_size intermediate_size_mlp encoder_intermediate_size "
    "decoder_intermediate_size",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx "
    "max_seq_len context_length initial_context_length",
    99: "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input text_vocab_size",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_KINDS = ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC")
_LAYERS = ("layer_types", "mlp_layer_types")
_MOST = 30_000_000  # parameters
_OWN = {
    "beit": {"use_relative_position_bias": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "longt5": {"local_radius": 3},
}


def _shrink(kind):
    """Return the sizes for a class of configurations, and for nested ones."""
    default = kind()
    sizes = {}
    for name, value in default.to_dict().items():
        if isinstance(value, int) and not isinstance(value, bool):
            if name in _SIZES:
                sizes[name] = _SIZES[name]
            elif name.endswith(("token_id", "token_index")) and value > 9:
                sizes[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], 90 + len(name) % 9)
        elif name in _LAYERS and isinstance(value, list):
            sizes[name] = (list(dict.fromkeys(value)) * 2)[:2]
    for name in default.sub_configs or {}:
        inside = getattr(default, name, None)
        if inside is not None and not isinstance(inside, dict):
            sizes[name] = _shrink(type(inside)) | {"model_type": inside.model_type}
    return sizes


def _model_class(name):
    for kind in _KINDS:
        found = getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(name)
        if isinstance(found, str) and hasattr(transformers, found):
            return getattr(transformers, found)
    found = auto.MODEL_MAPPING_NAMES[name]
    return getattr(transformers, found if isinstance(found, str) else found[0])


def build(name):
    """Build a model of this type whose random weights make differences in attention show; may raise."""
    kind, sizes = _model_class(name), _shrink(CONFIG_MAPPING[name]) | _OWN.get(name, {})
    # These differ among architectures: types of layers, key heads, axes of rotary positions.
    tries = itertools.product((None, [2, 1, 1], [2, 0, 0]), (None, 4), ((), _LAYERS, ("head_dim",)))
    errors = []
    for axes, heads, without in tries:
        given = copy.deepcopy({key: value for key, value in sizes.items() if key not in without})
        for part in (given, given.get("text_config", {})):
            if heads is not None and "num_key_value_heads" in part:
                part["num_key_value_heads"] = heads
            if axes is not None:
                part["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": axes}
        try:
            config = CONFIG_MAPPING[name](**given)
            with torch.device("meta"):
                count = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
            if count > _MOST:
                raise MemoryError(f"{name}: {count} parameters")
            torch.manual_seed(0)
            model = kind(config).eval()
            _widen(model)
            run(model, *inputs(model))
        except (ImportError, MemoryError, NotImplementedError):
            raise
        except Exception as error:
            errors.append(error)
        else:
            return model
    raise errors[0]


def _widen(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel() > 1:
                spread = parameter.std()
                parameter.normal_(0, 0.2) if spread == 0 else parameter.mul_(0.2 / spread)
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not accept float64


def inputs(model):
    """Return the arguments of a model, and where its tokens are real (None: everywhere)."""
    rng, config = torch.Generator().manual_seed(1), model.config
    known = inspect.signature(model.forward).parameters
    name, answers = model.main_input_name, {}
    if "decoder_input_ids" in known:
        answers = {"decoder_input_ids": torch.randint(3, 50, (2, 7), generator=rng)}
    if "input_ids" in known and (name == "input_ids" or hasattr(config, "text_config")):
        ids = torch.randint(3, 50, (2, 13), generator=rng)
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        given = {"input_ids": ids} | answers
        given |= {"attention_mask": mask} if "attention_mask" in known else {}
        if isinstance(model, transformers.CLIPModel | transformers.SiglipModel):
            given["pixel_values"] = torch.randn(2, 3, 16, 16, generator=rng)
        return given, None if answers else mask.bool()
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        return {name: torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=rng)}, None
    if name == "input_values":
        return {name: torch.randn(2, 1600, generator=rng)}, None
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        shape = (bins, 2 * config.max_source_positions) if answers else (40, bins)
        return {name: torch.randn(2, *shape, generator=rng)} | answers, None
    raise NotImplementedError(f"{name}: no such input is made here")


@torch.no_grad()
def run(model, given, real, **options):
    """Return the logits or last states of a model at real tokens, and its attention weights."""
    dtype = next(x.dtype for x in model.parameters() if x.is_floating_point())
    torch.manual_seed(0)
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
    found = model(**given, **options)
    names = [*("logits", "prediction_logits", "logits_per_text", "last_hidden_state"), *found]
    out = next(found[name] for name in names if isinstance(found.get(name), torch.Tensor))
    if not out.isfinite().all():
        raise ValueError("not finite")
    weights = [x for name in found if "attentions" in name for x in found[name] or ()]
    weights = [each for each in weights if isinstance(each, torch.Tensor)]
    return (out[real] if real is not None and out.shape[:2] == real.shape else out), weights
