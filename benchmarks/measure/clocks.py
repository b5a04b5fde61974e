"""Clocks, power, temperature and modes of a GPU, so that a time can be judged: from NVML, else nvidia-smi.

What neither of them tells is None. Nothing here raises: a time without clocks is better than none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

RAISED = 1.0  # seconds of products that raise the clocks of an idle GPU
_SQUARE = 4096
REASONS = {  # bits of NVML, why clocks are below their maximum
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
_SM, _MEMORY, _GPU = 1, 2, 0  # numbers of NVML: two clocks, and the sensor of temperature
_SMI = {  # names of nvidia-smi
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}
_SMI_MODES = {
    "driver": "driver_version",
    "most_sm_mhz": "clocks.max.sm",
    "most_memory_mhz": "clocks.max.mem",
    "most_watts": "power.limit",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
}
_NVML_REASONS = ("Event", "Throttle")  # new and old names
_SMI_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def clocks(device: torch.device) -> dict[str, Any] | None:
    """Return what a GPU does now: clocks, watts, degrees, and why it does not run faster; None elsewhere."""
    if device.type != "cuda":
        return None
    return _by_nvml(device, _nvml_clocks) or _by_smi(device, _SMI, *_SMI_REASONS)


def modes(device: torch.device) -> dict[str, Any] | None:
    """Return what does not change in a run: the driver, the highest clocks, the power cap, ECC and MIG."""
    if device.type != "cuda":
        return None
    return _by_nvml(device, _nvml_modes) or _by_smi(device, _SMI_MODES)


def raise_clocks(device: torch.device, seconds: float = RAISED) -> None:
    """Keep a GPU busy with matrix products: idle clocks are a third of the highest; nothing on CPUs."""
    if device.type != "cuda":
        return
    matrix = torch.ones(_SQUARE, _SQUARE, dtype=torch.bfloat16, device=device)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)


def words_of(bits: int | None) -> list[str] | None:
    """Name the reasons in a bit mask of the driver.

    Example:
        >>> words_of(0x44)
        ['power cap', 'thermal, by hardware']
    """
    return None if bits is None else [name for bit, name in REASONS.items() if bits & bit]


def _uuid(device: torch.device) -> str | None:
    """Return the name by which the driver knows a device: numbers differ under CUDA_VISIBLE_DEVICES."""
    try:
        found = torch.cuda.get_device_properties(device).uuid
    except Exception:  # no GPU, or a torch that does not tell
        return None
    return str(found) if str(found).startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def _index(device: torch.device) -> int | None:
    """Return the driver's number of a device; None if an environment variable renumbers them."""
    return None if os.environ.get("CUDA_VISIBLE_DEVICES") else device.index or 0


# -- NVML ----------------------------------------------------------------------------------------------


def _by_nvml(device: torch.device, read: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any] | None:
    """Ask pynvml; None if it is not there or does not know the device."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid, index = _uuid(device), _index(device)
        if uuid is not None:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        elif index is not None:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        else:
            return None
    except Exception:  # NVMLError, or whatever an old pynvml raises
        return None
    return read(pynvml, handle)


def _ask(nvml: Any, name: str, *given: Any) -> Any:
    """Call a function of NVML; None for what this card, driver or pynvml does not tell."""
    try:
        return getattr(nvml, name)(*given)
    except Exception:
        return None


def _nvml_clocks(nvml: Any, handle: Any) -> dict[str, Any]:
    milliwatts = _ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    answers = (_ask(nvml, f"nvmlDeviceGetCurrentClocks{which}Reasons", handle) for which in _NVML_REASONS)
    return {
        "sm_mhz": _ask(nvml, "nvmlDeviceGetClockInfo", handle, _SM),
        "memory_mhz": _ask(nvml, "nvmlDeviceGetClockInfo", handle, _MEMORY),
        "watts": None if milliwatts is None else milliwatts / 1e3,
        "celsius": _ask(nvml, "nvmlDeviceGetTemperature", handle, _GPU),
        "slowed_by": words_of(next((bits for bits in answers if bits is not None), None)),
    }


def _nvml_modes(nvml: Any, handle: Any) -> dict[str, Any]:
    driver = _ask(nvml, "nvmlSystemGetDriverVersion")
    milliwatts = _ask(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    ecc, mig = (_ask(nvml, f"nvmlDeviceGet{which}Mode", handle) for which in ("Ecc", "Mig"))
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "most_sm_mhz": _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, _SM),
        "most_memory_mhz": _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, _MEMORY),
        "most_watts": None if milliwatts is None else milliwatts / 1e3,
        "ecc": None if ecc is None else bool(ecc[0]),  # now, and after a restart
        "mig": None if mig is None else bool(mig[0]),
    }


# -- nvidia-smi ----------------------------------------------------------------------------------------


def _by_smi(device: torch.device, fields: Mapping[str, str], *reasons: str) -> dict[str, Any] | None:
    """Ask nvidia-smi; None if it does not answer. ``reasons`` are names of one more field, newest first."""
    found = _smi(device, list(fields.values()))
    if found is None:
        return None
    values = {name: _value(text) for name, text in zip(fields, found, strict=False)}
    if not reasons:
        return values
    for name in reasons:  # nvidia-smi answers nothing at all if it does not know a name
        if answer := _smi(device, [name]):
            bits = int(answer[0], 16) if answer[0].startswith("0x") else None
            return values | {"slowed_by": words_of(bits)}
    return values | {"slowed_by": None}


def _smi(device: torch.device, names: list[str]) -> list[str] | None:
    command, uuid, index = shutil.which("nvidia-smi"), _uuid(device), _index(device)
    if command is None or (uuid is None and index is None):
        return None
    which = uuid if uuid is not None else index
    given = [command, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", f"--id={which}"]
    try:
        done = subprocess.run(given, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [text.strip() for text in done.stdout.strip().split(",")]


def _value(text: str) -> float | bool | str | None:
    """Read a value of nvidia-smi: "[N/A]" and "[Not Supported]" are None.

    Example:
        >>> _value("61"), _value("350.00"), _value("Disabled"), _value("[N/A]"), _value("570.86.15")
        (61, 350.0, False, None, '570.86.15')
    """
    if text.startswith("["):
        return None
    if text in ("Enabled", "Disabled"):
        return text == "Enabled"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
