"""The command ``attnbias``."""

from __future__ import annotations

import pytest

from attnbias import soak
from attnbias.__main__ import main


def test_show_draws_a_parsed_expression(capsys, tmp_path):
    assert main(["show", "Causal() & Window(before=1)", "3", "4"]) == 0
    assert capsys.readouterr().out.startswith("Window(before=1)\n#...\n##..\n.##.\n")
    assert main(["show", "Causal()", "2", "4", "--q-start", "end"]) == 0
    assert "###.\n####" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["show", "Chunks(64)", "256", "--png", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "open('x')"], "'open' is none of"),
        (["show", "Documents([0, 1])", "3"], "this Documents is for 2 keys, got k_len = 3"),
        (["show", "Causal()", "3", "--q-start", "x"], "invalid literal"),
        (["verify", "--random", "0"], "--random: wanted at least 1 problem, got 0"),
        (["verify", "--backend", "cuda"], "--backend: wanted one of"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_unknown_arguments_exit_with_2():
    with pytest.raises(SystemExit) as ended:
        main(["info", "--nope"])
    assert ended.value.code == 2


def test_info_says_what_can_run(capsys):
    assert main(["info"]) == 0
    assert "cpu reference: can run" in capsys.readouterr().out


def test_verify_draws_and_counts(capsys):
    assert main(["verify", "--random", "5", "--seed", "3"]) == 0
    assert "5 passed, 0 failed, 0 refused" in capsys.readouterr().out


def test_verify_names_the_failing_seed(capsys, monkeypatch):
    monkeypatch.setattr(soak, "compare", lambda drawn, backend: ["out: wrong"] * (drawn.seed == 4))
    assert main(["verify", "--random", "2", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED seed 4: " in printed
    assert "1 passed, 1 failed" in printed


def test_verify_says_when_everything_was_refused(capsys, monkeypatch):
    def refuse(drawn, backend):
        raise NotImplementedError("no")

    monkeypatch.setattr(soak, "compare", refuse)
    assert main(["verify", "--random", "2"]) == 1
    assert "2 refused" in capsys.readouterr().out
