"""The paper's claims hold on every backend that runs here, and each wrong relation breaks them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from cases.interpreter import INTERPRETED, interpreted, not_interpreted, run_interpreted

import attnbias as ab
from attnbias.__main__ import main
from attnbias.symmetry import theory
from attnbias.symmetry.claims import CLAIMS, PARTS
from attnbias.symmetry.claims.measure import words_of
from attnbias.symmetry.properties import closure
from attnbias.symmetry.tables import SLIPS, TABLE_1, TABLE_2

BY_NAME = {claim.name: claim for claim in CLAIMS}
# Those that run everything: on these no claim and no wrong relation is left out.
COMPLETE = ["triton"] if INTERPRETED else ["reference", "rows", "cpu"]
PARTIAL = [] if INTERPRETED else ["sdpa", "triton", "cudnn"]
NUMBERS = [
    *(f"Definition {n}" for n in range(4, 11)),
    *(f"Theorem {n}" for n in range(1, 9)),
    *("Proposition 1", "Lemma 1", "Corollary 1"),
]


@not_interpreted
def test_interpreted():
    """Run this file once more, interpreted."""
    run_interpreted(__file__)


@interpreted
def test_the_interpreter_runs_the_triton_kernels():
    assert BY_NAME["Theorem 1"].faults(theory.backends()["triton"]) == []


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("name", list(BY_NAME))
def test_claim_holds_and_every_wrong_relation_breaks_it(name, backend):
    claim, attend = BY_NAME[name], theory.backends()[backend]
    assert claim.faults(attend) == []
    assert len(claim.wrong) > 1
    for wrong in claim.wrong:
        assert claim.faults(attend, wrong), words_of(wrong)


@pytest.mark.parametrize("backend", PARTIAL)
@pytest.mark.parametrize("name", list(BY_NAME))
def test_claim_holds_where_a_backend_can_run_it(name, backend):
    claim, attend = BY_NAME[name], theory.backends()[backend]
    try:
        assert claim.faults(attend) == []
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def doubled(query, key, value, relation, **options):
    return 2 * ab.attention(query, key, value, relation, **options)


def unmasked(query, key, value, relation, **options):
    """Forget the relation."""
    return ab.attention(query, key, value, **options)


def leaky(query, key, value, relation, **options):
    """Fill with a large number, not -inf, as the paper's appendix does: an empty row is a mean of all."""
    mask = relation.dense(query.shape[2], key.shape[2])
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ value


def printed(query, key, value, relation, **options):
    """Sum the weights of Equation 4 as printed over the neighbours."""
    mask = relation.dense(query.shape[2], key.shape[2])
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.softmax(-1).masked_fill(~mask, 0) @ value


@not_interpreted
@pytest.mark.parametrize(
    ("attend", "names"),
    [
        (doubled, ["Proposition 1", "Definition 4", "Definition 5", "Definition 10", "Lemma 1", "Beyond 5"]),
        (unmasked, [*(f"Theorem {n}" for n in (2, 3, 4, 8)), "Theorem 6, reading 1", "Theorem 7, reading 4"]),
        (unmasked, ["Section 2.3", "Beyond 2", "Beyond 5"]),
        (leaky, ["Proposition 1", "Theorem 2"]),
        (printed, ["Definition 7", "Definition 8", "Definition 9", "Proposition 1"]),
    ],
)
def test_wrong_attention_is_told_apart(attend, names):
    for name in names:
        assert BY_NAME[name].faults(attend), name


@not_interpreted
def test_positions_are_a_condition_of_theorem_5():
    def placed(query, key, value, relation, **options):
        return ab.attention(query, key, value, relation, terms=[ab.ALiBi(torch.tensor([0.5]))], **options)

    assert BY_NAME["Theorem 5"].faults(placed)
    for name in ("Theorem 6, reading 2", "Theorem 7, reading 2"):  # ALiBi knows only distances
        assert BY_NAME[name].faults(placed) == []


# -- the report --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return theory.examine()


@not_interpreted
def test_the_text_has_the_papers_numbers(found):
    text = str(found)
    assert "FAILS" not in text and "DOES NOT FAIL" not in text and found.holds
    for number in NUMBERS:
        assert re.search(rf"^holds  {number}\b", text, re.M), number
    for number in (6, 7):
        for reading, verdict in enumerate(("false", "true", "true", "true" if number == 7 else "false"), 1):
            name = f"holds  Theorem {number}, reading {reading}, equivariance in"
            after = " ".join(text.partition(name)[2].split())
            words = rf'\w+ attention read as [^"]+, "equivariant to translations" is {verdict}:'
            assert re.match(words, after), name
    tables = ("Table 1", "Table 2", "Beyond the paper", "Where the paper slips")
    for words in ("Definitions 1, 2 and 3", *tables):
        assert words in text


@not_interpreted
def test_the_text_says_where_each_claim_was_checked_and_what_breaks_it(found):
    verdicts = [verdict for each in found.parts.values() for verdict in each]
    assert [verdict.claim for verdict in verdicts] == CLAIMS
    for verdict in verdicts:
        claim, entry = verdict.claim, str(verdict)
        assert f"{entry}\n" in str(found)
        words = " ".join(entry.split())
        assert claim.statement in words and claim.condition in words
        assert f"fails for {', '.join(map(words_of, claim.wrong))}" in words
        assert {"cpu", "rows", "reference"} <= set(verdict.held)
        assert all({"cpu", "rows", "reference"} <= set(names) for names in verdict.refuted.values())


@not_interpreted
def test_table_1_has_the_papers_order_and_words_beside_what_is_computed(found):
    names = ["graph", "sparse", "self", "masked", "strided", "encoder-decoder"]
    assert [row.name for row in TABLE_1] == names
    table = str(found).partition("Table 1")[2]
    assert "masked: previous elements; translation; sequential" in table
    assert "symmetries of 8 tokens: trivial; of all integers: translations" in table
    assert "symmetries of 8 tokens: S_8, order 40320" in table
    assert {row.name: row.group.order for row in TABLE_1}["encoder-decoder"] == 576
    assert [row.name for row in TABLE_1 if row.is_of_translations] == ["masked", "strided"]
    assert closure(TABLE_1[0].relation, 8).equivalent(ab.Full(), 8, 8)  # it is connected


@not_interpreted
def test_mechanisms_and_relations_have_orders_of_their_own(found):
    assert "masked  <  strided\n" in str(found)
    assert "strided  <  masked = strided, p = 7\n" in str(found)
    covers = found.as_dict()["mechanisms"]["smaller_larger"]
    assert (("self",), ("sparse",)) in covers and (("sparse",), ("graph",)) in covers
    assert len(covers) == 5  # masked attention is below strided only


@not_interpreted
def test_table_2_names_the_models_and_their_uses(found):
    assert [model.name for model in TABLE_2] == ["GAT", "BERT", "GPT", "Unlimiformer", "ViT", "T5"]
    assert {model.attention for model in TABLE_2} == {row.name for row in TABLE_1}
    for model in TABLE_2:
        assert f"\n{model.name}: {model.attention} attention\n       {model.uses}" in str(found)


@not_interpreted
def test_slips_name_claims_that_there_are():
    assert {slip.claim for slip in SLIPS} <= {"", *NUMBERS}
    assert len(SLIPS) == len({(slip.place, slip.printed) for slip in SLIPS})


@not_interpreted
def test_json_says_what_the_text_says(found, capsys):
    assert main(["theory", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read == json.loads(json.dumps(found.as_dict()))
    assert len(read["claims"]) == len(CLAIMS) and read["holds"]
    for entry, claim in zip(read["claims"], CLAIMS, strict=True):
        assert (entry["number"], entry["statement"]) == (claim.number, claim.statement)
        assert entry["relation"] == repr(claim.relation) and entry["holds"]
        assert list(entry["fails_for"]) == [repr(wrong) for wrong in claim.wrong]
        assert set(entry["held_on"]) | set(entry["not_run_by"]) == set(theory.backends())
    assert [row["data_type"] for row in read["table_1"]] == [row.data for row in TABLE_1]
    assert len(read["slips"]) == len(SLIPS) and len(read["table_2"]) == len(TABLE_2)


@not_interpreted
def test_figure_is_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr(theory, "PARTS", {"One": [BY_NAME["Theorem 1"]]})
    path = tmp_path / "figures.png"
    assert main(["theory", "--figure", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert image.imread(path).std() > 0


@not_interpreted
def test_without_matplotlib_one_sentence_names_it(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["theory", "--figure", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert said == "attnbias: --figure: wanted matplotlib (pip install matplotlib), which is not installed\n"


@not_interpreted
def test_failing_claim_is_printed_and_sets_the_exit_code(capsys, monkeypatch):
    broken = replace(BY_NAME["Theorem 1"], check=lambda attend, relation: ["it is wrong"])
    monkeypatch.setattr(theory, "PARTS", {"One": [broken]})
    assert main(["theory"]) == 1
    text = capsys.readouterr().out
    assert "FAILS  Theorem 1" in text and "cpu (it is wrong)" in text
    assert main(["theory", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["claims"][0]["failed_on"]["cpu"] == ["it is wrong"]


@not_interpreted
def test_check_that_cannot_fail_is_printed_and_sets_the_exit_code(capsys, monkeypatch):
    idle = replace(BY_NAME["Theorem 1"], check=lambda attend, relation: [])
    monkeypatch.setattr(theory, "PARTS", {"One": [idle]})
    assert main(["theory"]) == 1
    assert "DOES NOT FAIL for Causal() on sdpa" in capsys.readouterr().out


@not_interpreted
def test_every_part_has_its_heading(found):
    assert list(found.parts) == list(PARTS)
    assert all(f"\n\n{title}\n\nholds" in str(found) for title in PARTS)
