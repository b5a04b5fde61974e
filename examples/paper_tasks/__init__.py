"""Tasks for the models of the paper's Table 2: data, baselines and training, for ``paper_models.py --train``.

Graphs, digits to sort and long documents are drawn, text is that of this repository, and pictures of digits
come with scikit-learn. Each function trains one model, in its own number of steps if it is given None.

Modules: ``training`` (how, and what is kept), ``graph`` (GAT), ``text`` (BERT, GPT), ``sequences``
(Unlimiformer, T5), ``images`` (ViT).
"""

from .graph import gat
from .images import vit
from .sequences import t5, unlimiformer
from .text import bert, gpt

TASKS = {"GAT": gat, "BERT": bert, "GPT": gpt, "Unlimiformer": unlimiformer, "ViT": vit, "T5": t5}
