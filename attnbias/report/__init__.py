"""``attnbias report``: everything that one run on a stranger's GPU can tell, in one file and 60 lines.

``runner`` runs steps one after the other and never ends early: a step that raises is recorded, one that kills
the process or hangs is left behind by starting another process, which goes on from the file. ``store`` keeps
the file, and takes names of hosts, users and folders out of it. The sections, in the order of their worth:
``machine``; ``smoke``, which says each step before it runs; ``bisection`` of what failed; ``table``, the
shipped kernels against float64; ``costs`` of the host; ``times`` on the device; ``tuning``; ``calibration``
of the static model. ``command`` and ``options`` are the command line, ``summary`` the lines to paste,
``words`` what is missing in a sentence.

A new section is a function from a :class:`~attnbias.report.runner.Run` to steps, and a line in ``command``.
"""
