"""Points of a sweep over density, as a run records them."""


def point(density, dense, tiles=1.0, edges=2.0):
    ratios = {"tiles": tiles, "edges": edges, "SDPA, mask": 2 * dense, "SDPA, all pairs": dense}
    spread = {name: [ratio] * 3 for name, ratio in ratios.items()}
    return {
        "structure": "random pairs",
        "backward": False,
        "tokens": 2048,
        "density": density,
        "chosen": "tiles",
        "seconds": {"auto": [1.0] * 3},
        "ratios": spread,
    }
