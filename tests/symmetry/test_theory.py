"""The paper's claims hold on every backend that runs here, and a wrong relation breaks each of them."""

import pytest

import attnbias as ab
from attnbias.__main__ import main
from attnbias.symmetry import theory
from attnbias.symmetry.claims import CLAIMS, PREVIOUS, TOKENS

BY_NAME = {claim.name: claim for claim in CLAIMS}
CHAIN = ab.Graph([[0, 1, 2, 3, 4, 5, 6, *range(8)], [1, 2, 3, 4, 5, 6, 7, *range(8)]], num_nodes=8)
# The same squares with one arrow fewer or more.
LESS = ab.Graph([[0, 1, 2, 4, 5, 6, 7, *range(8)], [1, 2, 3, 5, 6, 7, 4, *range(8)]], num_nodes=8)
MORE = BY_NAME["7 sparse"].relation | ab.Graph([[0], [2]], num_nodes=8)
WRONG = {
    "1 automorphisms": [CHAIN, LESS, MORE, ab.Causal()],
    "2 no others": [ab.Full(), ab.Empty(), ab.Window(before=0)],
    "3 self": [ab.Causal(), ab.Window(before=7, after=6), CHAIN],
    "4 masked": [ab.Full(), ab.Window(before=6), ab.Causal().T, ab.Window(before=7, after=1)],
    "5 strided": [ab.Causal(), ab.Window(before=PREVIOUS - 1), ab.Window(before=PREVIOUS + 1), ab.Chunks(4)],
    "6 encoder-decoder": [ab.Causal(), ab.Prefix(3), ab.Window(before=2, after=2)],
    "7 sparse": [ab.Full(), LESS, MORE],
    "8 depth": [CHAIN, LESS, MORE, ab.Causal()],
    "Lemma 1": [ab.Full(), ab.Window(before=7, after=1)],
    "Proposition 1": [ab.Full(), ab.Empty(), LESS, MORE],
    "Corollary 1": [ab.Window(before=TOKENS - 2), ab.Full()],
    "Definition 4": [ab.Full(), LESS, MORE],
    "Definition 10": [ab.Full(), LESS, MORE],
}


def runnable(name, claim):
    reasons = theory.why_not(name, claim.relation)
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return theory.backends()[name]


@pytest.mark.parametrize("backend", list(theory.backends()))
@pytest.mark.parametrize("name", list(BY_NAME))
def test_claim_holds(name, backend):
    claim = BY_NAME[name]
    try:
        assert claim.faults(runnable(backend, claim)) == []
    except NotImplementedError as reason:  # raised for the other relation that the claim compares with
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", list(BY_NAME))
def test_claim_is_refuted_by_every_wrong_relation(name):
    attend = theory.backends()["cpu"]
    if theory.why_not("cpu", ab.Full()):
        attend = theory.backends()["rows"]
    for wrong in WRONG[name]:
        assert BY_NAME[name].faults(attend, wrong), wrong


def test_doubled_weights_are_not_a_distribution():
    def doubled(query, key, value, relation):
        return 2 * ab.attention(query, key, value, relation)

    assert BY_NAME["Proposition 1"].faults(doubled)
    assert BY_NAME["Definition 10"].faults(doubled)


def test_the_command_prints_mechanisms_and_claims(capsys):
    assert main(["theory"]) == 0
    text = capsys.readouterr().out
    assert "FAILS" not in text
    for claim in CLAIMS:
        assert f"holds  {claim.name}: {claim.statement}" in text
    for words in (
        "symmetries   S_8, order 40320",
        "named, not computed: BERT",
        "masked = strided, p = 7  <  self",
    ):
        assert words in text
    assert "only if: away from the border" in text
    ways = [line for line in text.splitlines() if "reference" in line]
    assert len(ways) == len(CLAIMS)


def test_failing_claim_is_printed_and_sets_the_exit_code(capsys, monkeypatch):
    broken = [BY_NAME["3 self"].__class__("3 self", "s", ab.Full(), lambda attend, relation: ["it is wrong"])]
    monkeypatch.setattr(theory, "CLAIMS", broken)
    assert main(["theory"]) == 1
    assert "FAILS  3 self: s" in (text := capsys.readouterr().out) and "it is wrong" in text
