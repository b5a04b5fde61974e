"""Layers of ``attnbias.nn`` in a LightningModule train as in a loop of one's own."""

import copy

import pytest
import torch
from torch import nn

import attnbias as ab
from attnbias.nn import MaskedAttention

lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.attend = MaskedAttention(16, heads=4)
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.attend(x)).squeeze(-1), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_trains_as_a_loop_does(tmp_path):
    torch.manual_seed(0)
    model = Model()
    by_hand = copy.deepcopy(model)
    data = [(torch.randn(2, 23, 16), torch.randn(2, 23)) for _ in range(3)]
    optimizer = by_hand.configure_optimizers()
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        by_hand.training_step(batch, number).backward()
        optimizer.step()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_model_summary=False, **quiet
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    for (name, ours), wanted in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, wanted), name
    assert ab.Causal() == model.attend.relation
