"""What is missing for a run on a GPU is one sentence that says what to do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from attnbias.__main__ import main
from attnbias.report.words import why_no_gpu


class Machine:
    """A machine on which all is there; a test takes something away."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        self.set(device_count=1, get_device_capability=(9, 0))
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))

    def set(self, **answers):
        for name, answer in answers.items():
            self.patch.setattr(torch.cuda, name, lambda *_, answer=answer: self.give(answer))

    def give(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def why(device="cuda"):
    return why_no_gpu(torch.device(device))


def test_nothing_is_said_where_nothing_is_missing(machine):
    assert why() == "" == why("cuda:0")


def test_torch_without_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why() == (
        f"torch {torch.__version__} is built without CUDA; install a CUDA build, as pytorch.org describes"
    )


def test_no_driver(machine):
    machine.set(device_count=0)
    assert why() == "no NVIDIA GPU or driver was found; if there is a GPU, check that nvidia-smi lists it"


def test_old_driver(machine):
    machine.set(
        device_count=RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nmore lines"
        )
    )
    assert why() == ("the NVIDIA driver is too old for CUDA 13.0; update it, or install a torch that fits it")


@pytest.mark.parametrize("error", [RuntimeError("no CUDA-capable device\nmore"), AssertionError("")])
def test_cuda_that_does_not_start(machine, monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "init", lambda: machine.give(error))
    first = str(error).partition("\n")[0] or "no reason given"
    assert why() == f"CUDA does not start ({first}); check that nvidia-smi lists the GPU"


def test_device_that_is_not_there(machine):
    machine.set(device_count=2)
    assert why("cuda:2") == "cuda:2 is not there; torch sees 2 CUDA devices"


def test_old_card(machine):
    machine.set(get_device_capability=(7, 5))
    assert why() == "the GPU has compute capability 7.5; the kernels need 8.0 (A100) or newer"


def test_no_triton(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert why() == "triton is not installed; run: pip install 'triton>=3.6'"


def test_old_triton(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.1"))
    assert why() == "triton 3.5.1 is too old; the kernels need 3.6, which torch 2.10 comes with"


@pytest.mark.parametrize("command", ["report", "tune"])
def test_commands_say_it_and_exit_with_2(machine, capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    machine.set(device_count=0)
    assert main([command, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("attnbias: no NVIDIA GPU or driver was found; ")
    assert not list(tmp_path.iterdir())
