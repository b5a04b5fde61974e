"""Run Hugging Face models on attnbias: their masks become relations, never [Q, K] tensors.

    from attnbias.integrations import huggingface

    model = huggingface.attach(model)                                    # same results, its own masks
    huggingface.set_relation(model, ab.Window(before=255))               # now sparse, in every layer
    huggingface.set_relation(model, lambda layer: ab.Full() if layer % 4 == 3 else ab.Window(before=255))
    huggingface.set_score(model, ab.MultiLevel([32, 16, 16], widths=[None, 512, 64]))  # more dims if near

For transformers 5.x; tested with 5.22.2. An option that cannot be honoured raises an error.

Modules: ``model`` (attach a model, set its relations and scores), ``forward`` (the attention function that
transformers calls), ``masks`` (mask functions as relations), ``packed`` (packed documents, continuous
batching), ``relations`` (nearest keys; patches of a ViT), ``sharded`` (a model over the ranks of a mesh). A
mask function that transformers adds gets a reader in ``masks``.
"""

from .forward import NAME, attention_forward, register
from .masks import Mask, make_mask
from .model import attach, set_relation, set_score
from .relations import NearestKeys, patch_neighborhood
from .sharded import gather

__all__ = [
    "NAME",
    "Mask",
    "NearestKeys",
    "attach",
    "attention_forward",
    "gather",
    "make_mask",
    "patch_neighborhood",
    "register",
    "set_relation",
    "set_score",
]
