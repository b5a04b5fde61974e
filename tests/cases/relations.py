"""Relations that hold data, one of every kind."""

import torch

import attnbias as ab

TOKENS = 100


def relations_with_data(seed):
    """Return relations whose text is the same and whose data differs for every seed."""
    some = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (2, TOKENS), generator=some).sort().values
    edges = torch.randint(TOKENS, (2, 300), generator=some)
    mask = torch.rand(TOKENS, TOKENS, generator=some) < 0.3
    order = torch.randperm(TOKENS, generator=some)
    documents = ab.Documents(ids)
    return {
        "documents": documents & ab.Window(before=9),
        "each": documents.each(ab.Window(before=2, after=2)),
        "keys": ab.Documents(ids, ids.flip(0)),
        "graph": ab.Graph(edges, num_nodes=TOKENS),
        "neighbors": ab.Neighbors(edges.view(TOKENS, 6)) | ab.Window(before=0),
        "dense": ab.Dense(mask) - ab.Columns(3),
        "padding": ab.Padding.from_mask(mask[:2]),
        "permuted": ab.Window(before=3).permute(order).T,
        "heads": ab.PerHead([ab.Dense(mask), ab.Causal(), ab.Dense(mask.T), ab.Full()]),
        "global": ab.Global(order[:70].tolist()) & ab.Causal(),
        "small": ab.Prefix([1 + seed, 50]),
    }
