"""Relations and layouts in torch.save files and in batches of a DataLoader."""

import pytest
import torch
from cases.relations import relations_with_data
from torch.utils.data import DataLoader, default_collate

import attnbias as ab


@pytest.mark.parametrize("name", relations_with_data(0))
def test_a_relation_is_loaded_with_weights_only(name, tmp_path):
    """torch.load refused every relation and layout, with a message that did not help."""
    relation = relations_with_data(0)[name]
    layout = relation.layout(100, 100, batch=2, heads=4)
    torch.save({"relation": relation, "layout": layout}, tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt")
    assert loaded["relation"] == relation and loaded["layout"] == layout
    q, k, v = torch.randn(3, 2, 4, 100, 8)
    want = ab.attention(q, k, v, relation)
    for each in loaded.values():
        assert torch.equal(ab.attention(q, k, v, each), want)


def later(q, k):
    return q >= k


def test_a_function_is_not_loaded_with_weights_only(tmp_path):
    torch.save(ab.Where(later), tmp_path / "saved.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / "saved.pt")


def test_loader_joins_the_relations_of_its_samples():
    samples = [{"x": torch.ones(9), "documents": ab.Documents(torch.arange(9) // n)} for n in (2, 3)]
    (batch,) = DataLoader(samples, batch_size=2)
    want = ab.Documents(torch.stack([sample["documents"].ids for sample in samples]))
    assert torch.equal(batch["documents"].dense(9, 9), want.dense(9, 9)[:, :1])
    assert default_collate([ab.Causal(), ab.Causal()]) == ab.Causal()


def test_loader_shares_only_equal_layouts_between_samples():
    same, other = ab.Causal().layout(5, 5), ab.Full().layout(5, 5)
    assert default_collate([same, ab.Layout.build(ab.Causal(), 5, 5)]) is same
    with pytest.raises(TypeError, match="put relations into the samples, and call layout"):
        default_collate([same, other])
