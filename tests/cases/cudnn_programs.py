"""Compile what the backend ``cudnn`` would run, without a GPU; a program of its own, for ``make test-cudnn``.

    python cudnn_programs.py sm_90a FOLDER D E H Hk masks

Calls the backend's forward and backward on fake CUDA tensors. NVIDIA's package then makes its plan kernels
and programs for the architecture, and leaves PTX and cubin in the folder. Launches are left out: their
arguments are only held against the package's signatures. Prints the registers and stack bytes of each kernel
as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

BATCH, LENGTH = 2, 1024


def kernels_of(cubin: bytes) -> dict[str, dict[str, int]]:
    """Read registers and stack frame of each kernel from the section .nv.info of an ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]

    def text(at: int) -> str:
        return cubin[at : cubin.index(b"\0", at)].decode()

    sections = {text(headers[names_at][4] + header[0]): header for header in headers}
    symbols = sections[".symtab"]
    strings = headers[symbols[6]]
    found: dict[str, dict[str, int]] = {}
    at = sections[".nv.info"][4]
    end = at + sections[".nv.info"][5]
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        what = {0x2F: "registers", 0x11: "frame"}.get(attribute)
        at += 4
        if form != 4:  # no bytes follow
            continue
        if what and length == 8:
            symbol, number = struct.unpack_from("<II", cubin, at)
            (offset,) = struct.unpack_from("<I", cubin, symbols[4] + symbol * 24)
            found.setdefault(text(strings[4] + offset), {})[what] = number
        at += length
    return found


class _Device:
    """Stands in for what asks the driver for a device's size."""

    def __init__(self, device_id: int = 0) -> None:
        self.count = 132

    def get_device_multiprocessor_count(self) -> int:
        return self.count

    def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
        return self.count // cluster_size


def pretend(architecture: int) -> None:
    """Let NVIDIA's package and the backend compile where there is no driver."""
    import cutlass.utils
    import torch
    from cudnn import flex_attention
    from cudnn.flex_attention.plan import validation
    from torch._subclasses.fake_tensor import FakeTensor

    from attnbias.backends import cudnn

    validation.get_device_arch = lambda index=None: architecture
    cutlass.utils.HardwareInfo = _Device
    # CPU builds of torch cannot fill or index a fake CUDA tensor.
    torch.Tensor.__setitem__ = lambda *arguments: None
    cudnn.empty_like_query = lambda query, size: query.new_empty(*query.shape[:3], size)
    address = torch.Tensor.data_ptr
    torch.Tensor.data_ptr = lambda x: (
        x.storage_offset() * x.element_size() if isinstance(x, FakeTensor) else address(x)
    )
    cudnn._on = lambda device: nullcontext()
    for kind in (flex_attention.FlexAttentionFwd, flex_attention.FlexAttentionBwd):
        signature = inspect.signature(kind.execute)
        kind.execute = lambda *given, _of=signature, **options: _of.bind(*given, **options) and None


def main(arch: str, folder: str, *sizes: str) -> None:
    architecture = int(arch.removeprefix("sm_").removesuffix("a"))
    os.environ |= {"FLEX_ATTENTION_ARCH": arch.removesuffix("a"), "CUTE_DSL_ARCH": arch}
    os.environ |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": folder}
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import attnbias as ab
    from attnbias.backends import cudnn
    from attnbias.backends.call import Call, Inputs, Needs

    D, E, H, Hk, masks = map(int, sizes)
    causal = ab.Causal()
    relation = causal if masks == 1 else ab.PerHead([causal & ab.Window(before=9 + h) for h in range(H)])
    layout = ab.Layout.build(relation, LENGTH, LENGTH, form="tiles", batch=BATCH, heads=H)
    cudnn._keep(layout)
    pretend(architecture)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (
            torch.empty(BATCH, heads, LENGTH, size, dtype=torch.bfloat16, device="cuda")
            for heads, size in ((H, D), (Hk, D), (Hk, E))
        )
        call = Call(Inputs(q, k, v), layout, D**-0.5)
        out, lse = cudnn.forward(call)
        cudnn.backward(call, out, lse, torch.empty_like(out), torch.empty_like(lse), Needs(True, True, True))
    found = {path.name: kernels_of(path.read_bytes()) for path in sorted(Path(folder).glob("*.cubin"))}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
