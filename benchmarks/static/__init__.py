"""Counts of compiled code, ours beside FlexAttention's; no GPU is needed.

Figures are of three kinds, and every one is printed with its kind:

- static: read from the machine code (instructions, registers, spills, occupancy) or from a layout's lists;
- modelled: cycles by pipe widths and latencies (the busiest pipe's bound, the issue model);
- emulated: counted while the compiled code was executed on the CPU.

None of them is a time, and no ratio of them a speed-up.
"""
