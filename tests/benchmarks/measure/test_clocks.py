"""Clocks of a GPU by NVML, else by nvidia-smi, on stand-ins; what nobody tells is None."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from attnbias.benchmarks.measure import clocks, machine
from attnbias.report import machine as titles

CUDA = torch.device("cuda")
SEEN = {"sm_mhz": 1980, "memory_mhz": 2619, "watts": 350.5, "celsius": 61, "slowed_by": ["power cap"]}
MODES = {
    "driver": "570.86.15",
    "most_sm_mhz": 1980,
    "most_memory_mhz": 2619,
    "most_watts": 700.0,
    "ecc": True,
    "mig": False,
}


class NotSupportedError(Exception):
    """NVML's answer for what a card does not tell."""


def _nvml(*instead):
    def refuse(handle):
        raise NotSupportedError

    known = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-7": "card"}[uuid],
        "nvmlDeviceGetClockInfo": lambda handle, which: {1: 1980, 2: 2619}[which],
        "nvmlDeviceGetMaxClockInfo": lambda handle, which: {1: 1980, 2: 2619}[which],
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: {0: 61}[sensor],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4,
        "nvmlSystemGetDriverVersion": lambda: b"570.86.15",
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
    }
    return types.SimpleNamespace(**known | dict.fromkeys(instead, refuse))


@pytest.fixture
def card(monkeypatch):
    """A GPU with a name of the driver's."""
    found = types.SimpleNamespace(uuid="7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(clocks.shutil, "which", lambda name: None)


def test_nvml_tells_clocks_and_modes(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    assert clocks.clocks(CUDA) == SEEN and clocks.modes(CUDA) == MODES


def test_what_a_card_does_not_tell_is_none(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _nvml("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMigMode"))
    assert clocks.clocks(CUDA) == SEEN | {"watts": None}
    assert clocks.modes(CUDA) == MODES | {"mig": None}


def _smi(answers, asked):
    def run(command, **options):
        assert command[2:] == ["--format=csv,noheader,nounits", "--id=GPU-7"]
        names = command[1].removeprefix("--query-gpu=")
        asked.append(names)
        if names not in answers:
            raise subprocess.CalledProcessError(2, command)
        return types.SimpleNamespace(stdout=answers[names])

    return run


def test_nvidia_smi_tells_what_nvml_does_not(card, monkeypatch):
    """Old drivers know another name of the reasons, and answer nothing at all to a name they do not know."""
    asked = []
    answers = {
        "clocks.sm,clocks.mem,power.draw,temperature.gpu": "1980, 2619, 350.5, 61\n",
        "clocks_throttle_reasons.active": "0x0000000000000004\n",
        "driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current,mig.mode.current": (
            "570.86.15, 1980, 2619, 700.00, Enabled, Disabled\n"
        ),
    }
    monkeypatch.setattr(clocks.shutil, "which", lambda name: name)
    monkeypatch.setattr(clocks.subprocess, "run", _smi(answers, asked))
    assert clocks.clocks(CUDA) == SEEN and clocks.modes(CUDA) == MODES
    assert asked[1:3] == ["clocks_event_reasons.active", "clocks_throttle_reasons.active"]


def test_without_a_driver_there_are_no_clocks(card, monkeypatch):
    assert clocks.clocks(CUDA) is None and clocks.modes(CUDA) is None
    assert clocks.clocks(torch.device("cpu")) is None and clocks.modes(torch.device("cpu")) is None


def test_clocks_are_raised_for_the_given_time(monkeypatch):
    now, products = iter(range(100)), []
    monkeypatch.setattr(clocks, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: shape)
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(a))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clocks.raise_clocks(CUDA, 3)
    assert len(products) == 20
    clocks.raise_clocks(torch.device("cpu"), 3)
    assert len(products) == 20


def test_machine_is_described_alike_for_bench_and_report(card, monkeypatch):
    found = machine.describe(torch.device("cpu"))
    assert found["kind"] == "cpu" and found["packages"]["numpy"] and "tuned" in found
    assert found["defaults"]["Causal()"]["backend"] == "cpu" or found["defaults"]["Causal()"]["why"]
    assert str(found["device"]) in titles.title(found) and "driver" not in titles.title(found)
    gpu = found | {"capability": "sm_90", "multiprocessors": 132, "memory": 80 << 30, "modes": MODES}
    assert "sm_90, 132 SMs, 80 GiB, driver 570.86.15" in titles.title(gpu)
    assert "driver unknown" in titles.title(gpu | {"modes": None})
