"""PTX written by hand, to run one instruction at a time."""

import numpy as np
from ptxemu import Kernel, Memory

REGISTERS = {1: "%p", 8: "%h", 16: "%h", 32: "%r", 64: "%l"}
DTYPES = {
    "s8": np.int8, "u8": np.uint8, "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "f16": np.float16,
    "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "f64": np.float64,
}  # fmt: skip
HEAD = """.version 8.7 .target sm_100a .address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry test({parameters}) .reqntid {threads} {{
  .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<300>; .reg .b64 %l<60>;
  mov.u32 %r299, %tid.x; cvt.u64.u32 %l59, %r299;
{body}
  ret;
}}"""
THREADS = 64


def launch(body, arrays, threads=THREADS, ctas=1, shared=0, **options):
    """Run a body with the address of array i in %l(50 + i); return the arrays."""
    parameters = ", ".join(f".param .u64 x{i}" for i in range(len(arrays)))
    loads = "\n".join(f"ld.param.u64 %l{50 + i}, [x{i}];" for i in range(len(arrays)))
    ptx = HEAD.format(parameters=parameters, threads=threads, body=f"{loads}\n{body}")
    memory = Memory()
    places = [memory.put(array) for array in arrays]
    report = Kernel(ptx).launch((ctas,), places, memory, shared=shared, **options)
    return [memory.get(place) for place in places], report


def evaluate(code, kinds, inputs, result):
    """Run code on inputs {a}, {b}, {c}, each one element per thread, and return {d}."""
    names, lines = {}, []
    for i, (name, kind) in enumerate(zip("abc", kinds, strict=False)):
        bits = np.dtype(DTYPES[kind]).itemsize * 8
        names[name] = f"{REGISTERS[bits]}{i + 1}"
        lines.append(f"mad.lo.u64 %l{i + 10}, %l59, {bits // 8}, %l{50 + i};")
        lines.append(f"ld.global.{kind} {names[name]}, [%l{i + 10}];")
    size = np.dtype(DTYPES[result]).itemsize
    names["d"] = f"{REGISTERS[size * 8]}9"
    lines.append(code.format(**names))
    lines.append(
        f"mad.lo.u64 %l20, %l59, {size}, %l{50 + len(kinds)}; st.global.b{8 * size} [%l20], {names['d']};"
    )
    out = np.zeros(THREADS, DTYPES[result])
    arrays, _ = launch("\n".join(lines), [*inputs, out])
    return arrays[-1]
