"""Bridges to other libraries; import each by name. ``import attnbias`` imports none of them.

Modules: ``flex`` (BlockMask to and from a layout or relation), ``sdpa`` and ``flash_attn`` (functions with
the names and arguments of torch's and flash-attn's), ``varlen`` (torch's ``varlen_attn``), ``huggingface``
(run a transformers model), ``torchtitan`` (a module for its models), ``pyg`` (PyG's attention layers),
``sequences`` (what the bridges for packed sequences share). A bridge may import anything in ``attnbias``;
nothing in ``attnbias`` imports a bridge.
"""
