"""The examples of structured scores: complete results, runs that go on, and baselines that are right."""

import argparse
import importlib
import json
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from cases import ROOT

import attnbias as ab
from attnbias.nn import parameter_groups

EXAMPLES = ROOT / "examples"
QUICK = {
    "char_lm": [
        *("--widths", "16", "--head-size", "8", "--ranks", "4", "2", "2", "--layers", "1", "--length", "24"),
        *("--steps", "3", "--limit", "9000", "--methods", "plain", "multi-level", "window", "mix"),
    ],
    "icl_regression": [
        "--n",
        "4",
        "--widths",
        "16",
        "--heads",
        "2",
        "--layers",
        "1",
        "--steps",
        "3",
        "--seeds",
        "2",
    ],
    "nearest_neighbour": ["--n", "8", "--steps", "3", "--batch", "4"],
    "time_series": ["--context", "48", "--steps", "3", "--width", "16", "--layers", "1", "--batch", "2"],
}
RUNS = {"char_lm": 16, "icl_regression": 8, "nearest_neighbour": 10, "time_series": 6}
BASELINES = {
    "char_lm": {"frequencies", "table of 2", "table of 3", "table of 4", "table of 5"},
    "icl_regression": {"the guess 0", "one step of gradient descent", "least squares"},
    "nearest_neighbour": {"8"},
    "time_series": {"persistence", "the value a day ago", "ridge regression"},
}


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Import an example as its script would, and run it in a folder of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def run(name, *given):
        module = importlib.import_module(name)
        if name == "nearest_neighbour":
            monkeypatch.setattr(module, "MEASURED", 64)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *QUICK[name], *given])
        module.main()
        return json.loads((tmp_path / f"results/{name}.json").read_text())

    yield run
    for name in (*QUICK, "decoder", "progress"):
        sys.modules.pop(name, None)


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", QUICK)
def test_example_stores_settings_baselines_runs_and_a_picture(name, example, tmp_path, capsys):
    found = example(name, "--bf16", "--accumulate", "2")
    assert set(found["baselines"]) == BASELINES[name]
    assert found["settings"]["bf16"] is True and found["settings"]["accumulate"] == 2
    assert len(found["runs"]) == RUNS[name] and "verdict" in found
    for run in found["runs"]:
        assert math.isfinite(run["loss"] if name == "char_lm" else run["error"])
        assert [step for step, _, _ in run["curve"]] == [1, 2, 3]
    assert (tmp_path / f"results/{name}.png").stat().st_size > 1000
    assert "{" not in capsys.readouterr().out  # sentences, no records


@pytest.mark.parametrize("name", QUICK)
def test_help_says_how_long_it_takes(name, example, capsys):
    with pytest.raises(SystemExit):
        example(name, "--help")
    said = capsys.readouterr().out
    assert "minute" in said and "--device" in said and "--accumulate" in said


def test_interrupted_script_goes_on_with_the_next_run(example, monkeypatch, tmp_path):
    """An interrupt in the third run leaves two, and the same command trains the others only."""
    whole = example("nearest_neighbour")
    (tmp_path / "results/nearest_neighbour.json").unlink()
    module = sys.modules["nearest_neighbour"]
    train, names = module.train, []

    def interrupted(*args, name, **options):
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(name)
        return train(*args, name=name, **options)

    monkeypatch.setattr(module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        example("nearest_neighbour")
    kept = json.loads((tmp_path / "results/nearest_neighbour.json").read_text())["runs"]
    assert len(kept) == 2
    monkeypatch.setattr(
        module, "train", lambda *a, name, **o: names.append(name) or train(*a, name=name, **o)
    )
    resumed = example("nearest_neighbour")
    assert len(names) == len(set(names)) == len(whole["runs"])
    assert resumed["runs"][:2] == kept
    assert [run["error"] for run in resumed["runs"]] == [run["error"] for run in whole["runs"]]


def test_results_of_other_settings_are_not_mixed(example):
    example("nearest_neighbour")
    with pytest.raises(
        SystemExit, match="wanted runs with steps = 3, as those stored, got 4; choose another"
    ):
        example("nearest_neighbour", "--steps", "4")


def test_paper_settings_are_defaults_that_options_override(monkeypatch):
    module = load("char_lm", monkeypatch)
    args = module.parse(module.make_options(), ["--paper", "--steps", "5"])
    assert (args.layers, args.length, args.steps, args.batch * args.accumulate) == (6, 1024, 5, 32)
    assert sum(args.ranks) == args.head_size and not hasattr(args, "paper")
    assert module.parse(module.make_options(), []).layers == 3


def test_accumulated_batches_make_the_step_of_one_large_batch(monkeypatch):
    decoder = load("decoder", monkeypatch)
    x = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = []
    for accumulate in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 1, dtype=torch.float64)
        parts = iter(x.reshape(3 * accumulate, -1, 5))
        args = argparse.Namespace(steps=3, accumulate=accumulate, bf16=False, device="cpu")
        decoder.train(
            model,
            lambda model, _, parts=parts: (model(next(parts)) - 1).square().mean(),
            args,
            lr=1e-3,
            warmup=1,
            name="",
            check=lambda _: 0.0,
        )
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)


def test_rate_rises_holds_and_falls(monkeypatch):
    decoder = load("decoder", monkeypatch)
    rates = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    args = argparse.Namespace(steps=6, accumulate=1, bf16=False, device="cpu")
    options = {"lr": 1.0, "warmup": 2, "cooldown": 3, "name": "", "check": lambda _: 0.0}
    model = torch.nn.LayerNorm(4)
    decoder.train(model, lambda model, _: model(torch.ones(4)).sum(), args, **options)
    assert rates == [0.5, 1, 1, 0.75, 0.5, 0.25]


def test_tables_of_characters_equal_counts_by_hand(monkeypatch):
    """Witten and Bell: (c + T p) / (C + T), where p is the shorter table's."""
    module = load("char_lm", monkeypatch)
    known, test, order = "abacabaabc", "abcab", 3

    def chance(history, following):
        counts = Counter(
            known[i + len(history)]
            for i in range(len(known) - len(history))
            if known[i : i + len(history)] == history
        )
        lower = 1 / 96 if not history else chance(history[1:], following)
        seen, total = len(counts), sum(counts.values())
        return (counts[following] + seen * lower) / (total + seen) if total else lower

    assert chance("", "a") == (5 + 3 / 96) / 13
    assert chance("a", "b") == (3 + 3 * (3 + 3 / 96) / 13) / 8
    assert chance("bc", "a") == chance("c", "a")  # "bc" ends the text: nothing followed it
    found = module.table_losses(*(torch.tensor([ord(c) - 32 for c in text]) for text in (known, test)), order)
    for n, loss in enumerate(found.values(), 1):
        places = range(order - 1, len(test))
        wanted = -np.mean([math.log(chance(test[i - n + 1 : i], test[i])) for i in places])
        assert abs(loss - wanted) <= 0.5e-4 + 1e-12  # stored with four digits


def test_window_has_the_multiply_adds_of_multi_level_scores(monkeypatch):
    module = load("char_lm", monkeypatch)
    args = module.parse(module.make_options(), ["--length", "64", "--ranks", "32", "16", "8", "8"])
    T, near = args.length, ab.Causal() & ab.Window(before=12)
    assert module.keys_read(T, 13) == int(near.dense(T, T).sum()) / T
    positions = torch.arange(T)
    depth = ab.MultiLevel(args.ranks).depth(positions[:, None], positions, q_len=T, k_len=T)
    read = torch.tensor(args.ranks).cumsum(0)[depth - 1][ab.Causal().dense(T, T)]
    assert module.score_share(args) == pytest.approx(float(read.double().mean()) / args.head_size, rel=1e-12)
    args.window = module.window_of(args)
    assert module.macs("window", 128, args) <= module.macs("multi-level", 128, args)
    args.window += 1
    assert module.macs("window", 128, args) > module.macs("multi-level", 128, args)


def test_models_worse_than_a_trigram_table_are_not_compared(monkeypatch):
    module = load("char_lm", monkeypatch)
    key = {"width": 8, "lr": 1.0, "seed": 0}
    runs = [
        {"method": method, "loss": loss, "curve": [[1, 1.0, 3.0], [2, 2.0, loss]], **key}
        for method, loss in (("plain", 1.5), ("window", 1.6))
    ]
    found = module.compare(runs, {"table of 3": 1.7})
    assert [row["loss"] for row in found["compared"]] == [1.5, 1.6]
    assert {row["goal"] for row in found["compared"]} == {1.6}
    assert module.compare(runs, {"table of 3": 1.55})["compared"] == []


def test_ridge_equals_least_squares_with_added_rows(monkeypatch):
    module = load("time_series", monkeypatch)
    rng = np.random.default_rng(0)
    a, b, strength = rng.normal(size=(40, 7)), rng.normal(size=(40, 3)), 0.3
    more = np.vstack([a, np.eye(7) * math.sqrt(40 * strength)]), np.vstack([b, np.zeros((7, 3))])
    wanted = np.linalg.lstsq(*more, rcond=None)[0]
    found = module.ridge(torch.tensor(a), torch.tensor(b), strength)
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_linear_forecast_of_a_line_is_exact_and_sees_no_future(monkeypatch):
    module = load("time_series", monkeypatch)
    hours = torch.arange(600.0)
    series = module.Series(torch.stack([hours, 5 - 2 * hours]), 24, 6)
    errors = series.baselines()
    assert errors["ridge regression"] <= errors["persistence"] / 100 and errors["persistence"] > 0
    changed = torch.stack([hours, 5 - 2 * hours])
    changed[:, 500:] = 7
    again = module.Series(changed, 24, 6)
    assert torch.equal(again.linear[:, 400:500], series.linear[:, 400:500])
    for part, end in enumerate(series.splits):  # forecasts end within their part
        assert end - 12 <= int(series.at(part, 1)[-1]) + 6 < end


def test_input_layer_learns_at_the_base_rate(monkeypatch):
    """A linear layer with one input learned at 768 times the rate, and its weights grew twentyfold."""
    decoder = load("decoder", monkeypatch)
    read_in = decoder.ReadIn(1, 8, 0.3)
    (group,) = parameter_groups(read_in, 1e-3)
    assert group["lr"] == 1e-3 and group["params"] == [read_in.weight]


def test_regression_baselines_equal_numpy(monkeypatch):
    module = load("icl_regression", monkeypatch)
    n = 3
    prompt, y = (part.double().numpy() for part in module.test_prompts(4096, n, "alternating"))
    x = prompt[:, ::2, :n]
    solved = [np.linalg.lstsq(a[:-1], b[:-1], rcond=None)[0] @ a[-1] for a, b in zip(x, y, strict=True)]
    steps = np.array([(b[:-1] @ a[:-1]) @ a[-1] for a, b in zip(x, y, strict=True)])
    size = np.linalg.lstsq(steps[:, None], y[:, -1], rcond=None)[0]
    power = (y[:, -1] ** 2).mean()
    wanted = [1.0, ((steps * size - y[:, -1]) ** 2).mean() / power, ((solved - y[:, -1]) ** 2).mean() / power]
    found = module.baselines(n)
    assert list(found.values()) == [round(float(each), 4) for each in wanted]
    assert abs(found["one step of gradient descent"] - (n + 1) / (3 * n)) < 0.03  # of 4,096 prompts


class Oracle(torch.nn.Module):
    """Gives back the nearest point, or the farthest."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def forward(self, x):
        best = (self.sign * (x[:, :-1] @ x[:, -1:].mT)).squeeze(-1).argmax(1)
        return x[torch.arange(len(x)), best][:, None]


def test_nearest_points_are_measured_right(monkeypatch):
    module = load("nearest_neighbour", monkeypatch)
    assert module.measure(Oracle(1), 8, "cpu") == (0.0, 1.0)
    error, found = module.measure(Oracle(-1), 8, "cpu")
    assert error > 2 and found == 0  # the farthest of 16 points lies on the other side
    levels = module.baselines(8)
    assert abs(levels["the guess 0"] - 1) < 1e-3 and levels["softmax of exact scores"] < 0.01


def test_rank_is_that_of_the_scores_matrix(monkeypatch):
    """Of queries and keys of one head, made of points alone, less one dimension for each norm's mean."""
    module = load("nearest_neighbour", monkeypatch)
    n = 16
    for layer in module.layers_for(n):
        made = layer.make().double()
        x = torch.randn(1, 64, n, dtype=torch.float64)
        query, key, _ = (each[0, 0] for each in made.project(x, x))
        norms = len(layer.ranks) if layer.method == "bilinear MLR" else 1
        rank = int(torch.linalg.matrix_rank(query @ key.T))
        assert layer.rank - norms <= rank <= layer.rank


def test_comparison_counts_pairs_of_neighbouring_ranks(monkeypatch):
    module = load("nearest_neighbour", monkeypatch)
    rows = [("plain", 2, 0.8, 272), ("plain", 1, 0.5, 272), ("bilinear BTT", 1, 0.51, 184)]
    runs = [
        {"n": 8, "method": method, "heads": heads, "error": error, "parameters": count, "found": 0.5}
        for method, heads, error, count in rows
    ]
    found = module.compare(runs)
    assert found["verdict"].startswith("The error falls with the rank in 1 of 1 pairs")
    assert found["btt_of_one_head_over_full_head"][0]["error"] == 1.02
    runs[1]["error"] = 0.9
    assert "in 0 of 1 pairs" in module.compare(runs)["verdict"]


@pytest.mark.slow
def test_error_falls_with_the_rank_of_a_head(monkeypatch, tmp_path, example):
    """The finding that examples/nearest_neighbour.py stores, on the smallest of its problems."""
    found = example("nearest_neighbour", "--n", "8", "16", "--steps", "300", "--batch", "64", "--seeds", "1")
    assert found["verdict"].startswith("The error falls with the rank in 3 of 3 pairs")
    error = {(run["n"], run["method"], run["heads"]): run["error"] for run in found["runs"]}
    assert error[16, "bilinear BTT", 1] < error[16, "plain", 2]
