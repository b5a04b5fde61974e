"""A run of benchmarks as a record has it, without timing anything."""

from attnbias.benchmarks.measure import record


def point(density, dense, tiles=1.0, edges=2.0, structure="random pairs", backward=False, chosen="tiles"):
    ratios = {"tiles": tiles, "edges": edges, "SDPA, mask": 2 * dense, "SDPA, all pairs": dense}
    spread = {name: [ratio] * 3 for name, ratio in ratios.items()}
    return {
        "structure": structure,
        "backward": backward,
        "tokens": 2048,
        "density": density,
        "chosen": chosen,
        "seconds": {"auto": [1.0] * 3},
        "ratios": spread,
    }


def entry(case, relation, ratios, *, backward=False, **changed):
    """Return a case that took 2 ms, against peers by name."""
    spread = {name: [ratio, 0.9 * ratio, 1.2 * ratio] for name, ratio in ratios.items()}
    stats = {"tile": 64, "tiles_full": 186, "tiles_partial": 124, "edges": 60, "bytes": 9336}
    return {
        "case": case,
        "relation": relation,
        "backward": backward,
        "sizes": {"queries": 512, "keys": 512, "size": 64},
        "density": 0.06,
        "backend": "cpu",
        "default": "cpu",
        "layout": stats | {"seconds": [1e-4] * 3},
        "seconds": {"attnbias": [2e-3, 1.9e-3, 2.2e-3]},
        "ratios": {"torch.mm": [0.8, 0.7, 0.9], **spread},
        "gflops": 148.4,
        "bytes": {"attnbias": 4259840},
        "refused": {"FA3": "is not installed", "PyG": "knows only graphs <of nodes>"},
        "fault": "",
        "eager": {},
        "notes": {},
        "clocks": [None, None],
    } | changed


def whole_run():
    """Return a run with every plot, a picture, a wrong case and one that raised."""
    packages = {"numpy": "2.4.6", "triton": "3.7.1", "torch-geometric": "2.8.1"}
    machine = {"device": "A processor", "kind": "cpu", "architecture": "x86_64", "cores": 2, "threads": 1}
    versions = {"attnbias": "0.2.0", "torch": "2.13.0", "python": "3.11.7", "packages": packages}
    run = record.start(machine | versions | {"level": "avx512", "clock": "CPU time"})
    for backward in (False, True):
        run["entries"] += [
            entry(
                "window@4096",
                "window",
                {"SDPA, mask": 29.0, "SDPA, chunks, mask kept": 6.65},
                backward=backward,
            ),
            entry("graph@2708", "graph", {"PyG": 94.0, "torch.sparse": 4.02}, backward=backward),
            entry("causal@4096", "causal", {"SDPA": 0.93, "Flex": 2.7}, backward=backward),
        ]
    run["entries"].append(entry("grid@1024", "grid", {}, seconds={}, fault="row 3 is wrong"))
    densities = (0.001, 0.01, 0.1, 0.5, 1.0)
    for structure, least in (("random pairs", 0.4), ("window", 1.05)):
        for backward in (False, True):
            for density in densities:
                chosen = "edges" if density < 0.05 else "both" if density < 0.2 else "tiles"
                speed = max(least, 0.078 / density)  # 156 times at the first density: the top of the plot
                run["sweep"].append(point(density, speed, 1.5, 2, structure, backward, chosen))
    for tokens in (1024, 2048, 4096):
        for what, power in (("attnbias, window", 1), ("attnbias, causal", 2), ("SDPA, causal", 2)):
            seconds = 1e-3 * (tokens / 1024) ** power
            run["lengths"].append(
                {"what": what, "tokens": tokens, "seconds": [seconds, 0.9 * seconds, 1.1 * seconds]}
            )
    run["pictures"] = dict.fromkeys(("window", "graph", "causal"), "#+...\n.#+..\n..#e.\n...#*\n....#")
    run["raised"] = {"knn@96": "RuntimeError: <no> memory"}
    run["is_whole"] = True
    return run
