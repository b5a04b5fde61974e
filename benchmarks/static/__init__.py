"""Counts of compiled code, ours next to FlexAttention's; no GPU is needed.

Figures are of three kinds, and every one is printed with its kind:

- static: read from the machine code (instructions, registers, spills, occupancy) or from a layout's lists;
- modelled: cycles by pipe widths and latencies (the busiest pipe's bound, the issue model);
- emulated: counted while the compiled code was executed on the CPU.

None of them is a time, and no ratio of them a speed-up.

``ours`` and ``flex`` compile the two sides, ``edges`` and ``levels`` our kernels of edges and of multi-level
scores, ``options`` those with ALiBi, relative biases, softcap and dropout. ``sass`` reads machine code,
``flow`` finds its loops, ``issue`` models how it is issued on the GPUs of ``arch``, ``work`` counts
multiply-adds. ``count`` runs all of it, ``figures`` names and keeps the results, ``table`` prints them,
``gate`` compares them with floors and with those in counts.json. ``whole_table``
checks every row of the configuration table, and compares it with those in whole_table.json.
"""
