"""The command ``attnbias``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import attnbias as ab
from attnbias.__main__ import main
from attnbias.benchmarks.measure import terminal
from attnbias.command.watch import Watch
from attnbias.testing import checklist, soak
from attnbias.testing.compare import by_relation, compare_rows


def test_show_draws_a_parsed_expression(capsys, tmp_path):
    assert main(["show", "Causal() & Window(before=1)", "3", "4"]) == 0
    assert capsys.readouterr().out.startswith("Window(before=1)\n#...\n##..\n.##.\n")
    assert main(["show", "Causal()", "2", "4", "--q-start", "end"]) == 0
    assert "###.\n####" in capsys.readouterr().out
    assert main(["show", "Causal()", "130", "--tile", "64", "--form", "tiles"]) == 0
    assert "tiles of 64: # full, + partial, e edges, * both\n+..\n#+.\n##+\n" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["show", "Chunks(64)", "256", "--png", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").exists()


def test_show_draws_recipes_at_their_own_lengths(capsys):
    assert main(["show", "longformer(window=2, tokens=[0])", "4"]) == 0
    assert "####\n###.\n####\n#.##\n" in capsys.readouterr().out
    assert main(["show", "dflash(4, anchors=[1, 3], block=2)"]) == 0
    assert "#...##..\n#...##..\n###...##\n###...##\n" in capsys.readouterr().out
    assert main(["show", "prefix_lm(2) - local_global(2, window=2, every=2)[0]", "3"]) == 0
    assert ".#.\n...\n#..\n" in capsys.readouterr().out


def test_show_lists_every_recipe(capsys):
    assert main(["show", "recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("(")[0] for line in lines[::2]] == list(ab.recipes.RECIPES)
    assert "longformer(window, tokens=(), dilation=1)" in lines
    assert all(line.startswith("    ") and line.endswith(".") for line in lines[1::2])


def test_plan_prints_a_table_and_draws(capsys, tmp_path):
    expression = ["plan", "Causal() & Window(before=99)", "1024", "--ranks", "4"]
    assert main([*expression, "--heads", "4/2", "--dim", "8/16", "--dtype", "fp32", "--split", "even"]) == 0
    printed = capsys.readouterr().out
    assert "1,024 tokens on 4 ranks, split 'even'" in printed
    assert "rank by key: o held, # fetched\n0 oooooooooooooooo....." in printed
    assert main([*expression, "--json", "--split", "zigzag", "--batch", "2"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["split"] == "zigzag"
    assert numbers["shape"]["batch"] == 2
    pytest.importorskip("matplotlib")
    assert main([*expression, "--figure", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "Causal()", "8", "--ranks", "0"], "mesh: wanted at least 1, got 0"),
        (["plan", "Causal()", "8", "--ranks", "2", "--heads", "a/2"], "--heads: wanted a number or two with"),
        (
            ["plan", "Causal()", "8", "--ranks", "2", "--heads", "3/2"],
            "key_heads: wanted a number that divides",
        ),
        (["show", "open('x')"], "'open' is none of"),
        (["show", "causal()", "8"], "'causal' is not known; did you mean Causal()?"),
        (["show", "Causal", "8"], "expression: 'Causal' is no relation by itself; write Causal()"),
        (["show", "longformer", "8"], "'longformer' is no relation by itself; write longformer(window=...)"),
        (["show", "longformer(3)"], "window: wanted an even number, half of it on each side, got 3"),
        (
            ["show", "longformer(wide=3)"],
            "longformer: longformer() got an unexpected keyword argument 'wide'",
        ),
        (
            ["show", "local_global(3, 2)"],
            "wanted one relation, got 3 of them; the first is local_global(3, 2)[0]",
        ),
        (["show", "local_global(3, 2)[3]"], "wanted a list of more than 3 relations, got 3"),
        (["show", "Causal()[0]"], "wanted a list of more than 0 relations, got no list"),
        (["show", "Documents([0, 1])", "3"], "this Documents is for 2 keys, got k_len = 3"),
        (["show", "Causal()", "3", "--q-start", "x"], "--q-start: wanted a number or 'end', got 'x'"),
        (["verify", "--random", "0"], "--random: wanted at least 1 problem, got 0"),
        (["verify", "--backend", "cuda"], "--backend: wanted one of"),
        (["verify", "--device", "tpu"], "--device: wanted cpu, cuda or cuda:1, got 'tpu'"),
        (["verify", "--device", "cuda:9"], "--device: 'cuda:9' is not there: torch sees"),
        (
            ["verify", "--case", "nosuch"],
            "--case: wanted part of a check's line, got 'nosuch'; the relations are full, empty, causal,",
        ),
        (
            ["verify", "--case", "graph", "--backend", "sdpa", "--device", "cpu"],
            "nothing to verify: sdpa refuses all of these checks on cpu",
        ),
        (["show", "~" * 3000 + "Causal()", "9"], "maximum recursion depth exceeded"),
        (["show", "Causal()", "9", "--form", "x"], "form: wanted 'auto', 'tiles' or 'edges', got 'x'"),
    ],
)
def test_bad_input_prints_an_error_and_exits_with_2(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_show_caps_what_it_prints(capsys, tmp_path):
    """256 tokens printed 256 lines of 256 characters."""
    assert main(["show", "Causal()", "256", "--tile", "64"]) == 0
    assert capsys.readouterr().out.splitlines()[2:6] == ["+...", "#+..", "##+.", "###+"]
    assert main(["show", "Window(before=1)", "64"]) == 0
    assert "##\n" in capsys.readouterr().out
    assert main(["show", "Window(before=1)", "65", "--form", "edges"]) == 0
    assert "* both\ne" in capsys.readouterr().out
    assert main(["show", "Window(before=1)", "100000"]) == 0
    assert "100,000 x 100,000 are too many to draw as text; --png FILE draws them" in capsys.readouterr().out


def test_show_draws_the_pairs_of_edges_into_files(capsys, tmp_path):
    """An edge-form relation was one yellow square with ticks from -0.4 to 0.4."""
    image = pytest.importorskip("matplotlib.image")
    paths = {kind: str(tmp_path / f"x.{kind}") for kind in ("png", "svg")}
    given = ["show", "Window(before=3) | Global([0])", "16", "--png", paths["png"], "--svg", paths["svg"]]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert all(f"wrote {path}" in printed for path in paths.values())
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    pixels = image.imread(paths["png"])[..., :3].reshape(-1, 3)
    blue = (abs(pixels - [0x2B / 255, 0x8C / 255, 0xBE / 255]) < 0.02).all(1).mean()
    assert 0.2 < blue < 0.4  # 85 of 256 pairs, most of the figure


def test_commands_print_json(capsys):
    assert main(["show", "Causal() & Window(before=1)", "3", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pairs"] == ["#...", "##..", ".##."] and shown["relation"] == "Window(before=1)"
    assert (shown["q_len"], shown["k_len"], shown["layout"]["pairs"]) == (3, 4, 5)
    assert main(["show", "recipes", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(ab.recipes.RECIPES)
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["cpu"]["backends"]["reference"] == "" and found["attnbias"] == ab.__version__
    assert main(["verify", "--backend", "rows", "--case", "causal, negative", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["failed"], found["checks"]) == (4, 0, [])
    assert found["relations"] == {"causal": {"rows": {"passed": 4, "failed": 0}}}
    assert main(["verify", "--random", "3", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == [3, 5]


def test_verify_prints_a_row_per_relation_and_what_fails(capsys, monkeypatch):
    """It printed a line for each of 1,700 checks."""
    plain = soak.find_faults

    def find(drawn, backend, device):
        return ["out: error 1"] if "Empty" in repr(drawn.relation) else plain(drawn, backend, device)

    monkeypatch.setattr(soak, "find_faults", find)
    assert main(["verify", "--backend", "rows", "--case", "edges  float16", "--device", "cpu"]) == 1
    *wrong, head, full, empty, causal = capsys.readouterr().out.splitlines()[:6]
    assert all(line.endswith("WRONG out: error 1") for line in wrong)
    assert head.split() == ["rows"] and full.split() == ["full", "4", "ok"]
    assert empty.split() == ["empty", "2", "of", "4", "WRONG"] and causal.split() == ["causal", "4", "ok"]


@pytest.mark.parametrize("name", ["show", "plan", "verify", "info", "theory", "report", "tune", "bench"])
def test_help_has_examples(capsys, name):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"  attnbias {name}" in printed and "example" in printed


def test_help_explains_exit_codes_and_the_version_is_printed(capsys):
    for given, words in (
        ("--help", "exit codes: 0 all right; 1 a result is wrong"),
        ("--version", "attnbias "),
    ):
        with pytest.raises(SystemExit) as ended:
            main([given])
        assert ended.value.code == 0 and words in capsys.readouterr().out


def test_a_closed_pipe_ends_the_command_without_a_traceback():
    command = f"{sys.executable} -m attnbias show 'Causal()' 4000 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        pytest.param(
            "show 'Causal()' 8 >/dev/full",
            "2",
            "attnbias: [Errno 28] No space left on device\n",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full"),
        ),
        ("show 'Causal()' 8 >&-", "0", ""),
        ("verify --random 1 2>&- >/dev/null", "0", ""),
        ("verify --random 0 2>&- >/dev/null", "2", ""),
    ],
)
def test_an_output_that_cannot_be_written_leaves_no_traceback(command, code, said):
    line = f"{sys.executable} -m attnbias {command}; echo $? >&3"
    done = subprocess.run(["bash", "-c", f"({line}) 3>&1"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{code}\n", said)


def test_a_file_that_cannot_be_written_is_named(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "none" / "x.png", tmp_path):
        assert main(["show", "Causal()", "8", "--svg", str(path / "x.svg" / "y.svg")]) == 2
        said = capsys.readouterr().err
        assert said.startswith("attnbias: [Errno 2] No such file or directory") and "y.svg" in said


def test_the_option_says_what_is_drawn_whatever_the_file_is_called(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "picture.png", tmp_path / "no suffix"
    assert main(["show", "Causal()", "8", "--svg", str(svg), "--png", str(png)]) == 0
    assert svg.read_text().startswith("<?xml") and png.read_bytes().startswith(b"\x89PNG")


def test_no_progress_without_standard_error(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    watch = Watch()
    watch.shown -= 1e9
    watch("half done")
    watch.clear()
    assert capsys.readouterr().out == ""


def test_a_relation_of_no_tokens_is_not_called_too_long(capsys):
    assert main(["show", "Causal()", "0"]) == 0
    assert "too many" not in capsys.readouterr().out


def test_an_interrupted_command_exits_with_130(capsys, monkeypatch):
    def interrupt(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak, "check", interrupt)
    assert main(["verify", "--random", "2"]) == 130
    assert capsys.readouterr().err.endswith("attnbias: interrupted\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_goes_to_standard_error_and_is_cleared(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    watch = Watch()
    watch("too early to say")
    watch.shown -= 11
    watch("half done")
    watch.clear()
    said = capsys.readouterr()
    assert said.out == "" and "half done" in said.err and "early" not in said.err
    assert said.err.endswith("\r") if is_terminal else said.err == "half done\n"


def test_unknown_arguments_exit_with_2():
    with pytest.raises(SystemExit) as ended:
        main(["info", "--nope"])
    assert ended.value.code == 2


def test_info_lists_what_can_run(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "cpu reference: can run" in printed and "cpu triton: device: only CUDA" in printed
    assert "torch at " in printed and "safetensors" in printed


def test_verify_prints_a_line_per_backend_and_pass(capsys):
    assert main(["verify", "--case", "window", "--device", "cpu", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rows") and "backward  ok" in line for line in lines)
    assert any(line.startswith("reference") and "forward   ok" in line for line in lines)
    assert any("window, ALiBi and T5 table" in line for line in lines)
    assert "0 failed on cpu" in lines[-1] and any(line.startswith("triton: ") for line in lines)


@pytest.mark.parametrize("name", ["out", "key"])
def test_verify_names_the_wrong_pass(capsys, monkeypatch, name):
    monkeypatch.setattr(soak, "find_faults", lambda drawn, backend, device: [f"{name}: error 1"])
    assert main(["verify", "--backend", "rows", "--case", "documents"]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong, right = ("forward", "backward") if name == "out" else ("backward", "forward")
    assert any(f"{wrong:10}WRONG {name}: error 1" in line for line in lines)
    assert not any(f"{right:10}ok" in line for line in lines)


def fail_third(monkeypatch, place, name):
    """Make the third call of a function raise."""
    plain, calls = getattr(place, name), []

    def call(*given):
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("Triton Error [CUDA]\nan illegal address")
        return plain(*given)

    monkeypatch.setattr(place, name, call)
    return "RAISED RuntimeError: Triton Error [CUDA] | an illegal address"


def test_verify_continues_after_a_check_that_raises(capsys, monkeypatch):
    """An exception in one check ended the command with a traceback, and the checks after it never ran."""
    words = fail_third(monkeypatch, soak, "find_faults")
    assert main(["verify", "--backend", "rows", "--case", "causal", "--device", "cpu", "--verbose"]) == 1
    *lines, _, table, last = capsys.readouterr().out.splitlines()
    assert table.split()[:4] == ["causal", "1", "of", str(len(lines))]
    assert [line.endswith(words) for line in lines[:6]] == [False] * 4 + [True, False]
    assert "causal" in lines[4] and "1 x 2/2 heads, 130 x 260, D 80, E 33" in lines[4]
    assert len(lines) > 20 and all(line.endswith("ok") for line in lines if words not in line)
    assert f"{len(lines) - 1} passed, 1 failed" in last


def test_long_inputs_continue_after_one_that_raises(monkeypatch):
    """As above: five relations, of which the third raises."""
    words = fail_third(monkeypatch, checklist, "compare_rows")
    found = list(checklist.long_lines("cpu", "rows", 256))
    assert [line.fault for line in found] == ["", "", "", "", words, "", "", "", ""]


def test_verify_continues_after_a_random_problem_that_raises(capsys, monkeypatch):
    """As above, and the seed is named."""
    fail_third(monkeypatch, soak, "find_faults")
    assert main(["verify", "--random", "5", "--seed", "40", "--backend", "rows"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED seed 42: RuntimeError: Triton Error [CUDA] | an illegal address\n" in printed
    assert "4 passed, 1 failed" in printed


def test_every_check_can_be_drawn_and_some_relation_is_laid_out_both_ways():
    found = list(checklist.checks())
    assert {check.relation for check in found} == set(checklist.RELATIONS)
    assert {check.option for check in found} == {"", *checklist.OPTIONS}
    assert {check.form for check in found} == {None, "tiles", "edges"}
    for check in found[:: len(found) // 40]:
        assert check.drawn().inputs[0].shape[2] == check.shape[3]


def test_long_inputs_are_compared_by_rows(monkeypatch):
    found = list(checklist.long_lines("cpu", "rows", 2048))
    assert len(found) == 10 and not [line for line in found if line.fault]
    plain = checklist.attention
    monkeypatch.setattr(
        checklist, "attention", lambda q, k, v, relation, backend: plain(q, k, v * 1.001, relation)
    )
    wrong = {(line.which, bool(line.fault)) for line in checklist.long_lines("cpu", "rows", 2048)}
    assert wrong == {("forward", True), ("backward", True)}


def test_a_row_that_sees_one_key_too_many_is_found():
    q, k, v = torch.randn(3, 1, 1, 300, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(0, 300, 7)
    more = ab.Causal() | ab.Dense(torch.eye(300, dtype=torch.bool).roll(1, 1) & (torch.arange(300) == 141))
    for relation, is_right in ((ab.Causal(), True), (more, False)):
        faults = compare_rows(
            lambda q, k, v, r=relation: ab.attention(q, k, v, r), by_relation(ab.Causal()), (q, k, v), rows
        )
        assert (not faults) == is_right


PLAIN = """
import sys
for name in ("matplotlib", "rich", "scipy", "safetensors", "triton", "pytest", "torch_geometric", "igraph"):
    sys.modules[name] = None
from attnbias.__main__ import main
assert main(["info"]) == 0
assert main(["show", "Causal() | Global([3])", "200", "200"]) == 0
assert main(["verify", "--device", "cpu", "--backend", "rows", "--case", "causal, negative"]) == 0
assert main(["show", "Causal()", "200", "--png", "x.png"]) == 2
"""


def test_commands_need_only_torch_and_numpy():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "drawing needs matplotlib" in done.stderr and "0 failed on cpu" in done.stdout


def test_verify_draws_and_counts(capsys):
    assert main(["verify", "--random", "5", "--seed", "3"]) == 0
    assert "5 passed, 0 failed, 0 refused" in capsys.readouterr().out


def test_verify_names_the_failing_seed(capsys, monkeypatch):
    monkeypatch.setattr(
        soak, "find_faults", lambda drawn, backend, device: ["out: wrong"] * (drawn.seed == 4)
    )
    assert main(["verify", "--random", "2", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED seed 4: " in printed
    assert "1 passed, 1 failed" in printed


def test_verify_reports_that_everything_was_refused(capsys, monkeypatch):
    def refuse(drawn, backend, device):
        raise NotImplementedError("no")

    monkeypatch.setattr(soak, "find_faults", refuse)
    assert main(["verify", "--random", "2"]) == 1
    assert "2 refused" in capsys.readouterr().out


def test_tables_have_no_colours_without_a_terminal_or_with_no_color(capsys, monkeypatch):
    terminal.table("Times", ["case", "ms"], [["window", "1.5"]])
    assert "\x1b" not in capsys.readouterr().out
    console = pytest.importorskip("rich.console")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(console, "Console", partial(console.Console, force_terminal=True))
    terminal.table("Times", ["case", "ms"], [["window", "1.5"]])
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]", capsys.readouterr().out)
