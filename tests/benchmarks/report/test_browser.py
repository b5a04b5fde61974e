"""The page of a run in headless Chromium, driven through its pipe of JSON messages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
from contextlib import contextmanager

import pytest
from cases.benchmarks import whole_run

from attnbias.benchmarks.report import page, plots

pytest.importorskip("matplotlib")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

LONGEST = 300  # seconds
LABEL = "getComputedStyle(document.querySelector('.panel text')).fill"
RUN = whole_run()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium: not installed")]


class Page:
    """A tab; ``errors`` are what its console and its scripts complained about."""

    def __init__(self, out, into):
        self.out, self.into, self.number, self.session = out, into, 0, None
        self.errors: list[str] = []
        self.events: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Call a method of Chromium; return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.into.write(json.dumps(message).encode() + b"\0")
        self.into.flush()
        while (found := self._read()).get("id") != self.number:
            pass
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def _read(self):
        message = bytearray()
        while (byte := self.out.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            message += byte
        found = json.loads(message)
        method, params = found.get("method", ""), found.get("params", {})
        self.events.append(method)
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        return found

    def show(self, path, *, width, scheme="light", script=""):
        """Load a file at a width, after a script."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        added = self.send("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._read()
        self.send("Page.removeScriptToEvaluateOnNewDocument", identifier=added)

    def run(self, code):
        """Run JavaScript, as a user's click would, and return its value."""
        found = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def save_picture(self, path):
        """Save a picture of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browse(profile):
    """Start Chromium with an empty profile, yield its page, and end it."""
    (child_in, into), (out, child_out) = os.pipe(), os.pipe()
    flags = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
    )
    moved = f'exec "$0" "$@" 3<&{child_in} 4>&{child_out}'  # the numbers that Chromium takes
    started = subprocess.Popen(
        ["bash", "-c", moved, CHROMIUM, *flags, f"--user-data-dir={profile}"],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    alarm = threading.Timer(LONGEST, started.kill)  # else a Chromium that says nothing is waited for
    alarm.start()
    try:
        with open(out, "rb") as answers, open(into, "wb") as asked:
            yield Page(answers, asked)
    finally:
        alarm.cancel()
        started.terminate()
        started.wait(20)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return the page's path and Chromium."""
    folder = tmp_path_factory.mktemp("page")
    path = page.write(RUN, plots.draw_all(RUN), folder / "run.html")
    with browse(folder / "profile") as browser:
        yield path, browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_and_reads(shown, width, scheme, tmp_path):
    path, browser = shown
    browser.show(path, width=width, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") <= width
    heights = "[...document.querySelectorAll('.panel text')].map(x => x.getBoundingClientRect().height)"
    assert browser.run(f"Math.min(...{heights})") >= 10  # pixels; labels shrank to 4 on phones
    lefts = "new Set([...document.querySelectorAll('figure')].map(x => x.getBoundingClientRect().left)).size"
    assert browser.run(lefts) == (2 if width == 390 else 3)
    room = """(() => { const box = document.querySelector("td.bar").closest(".panel"); box.scrollLeft = 1e6;
      const cell = document.querySelector("td.bar").parentElement.lastElementChild;
      return box.getBoundingClientRect().right - cell.getBoundingClientRect().right })()"""
    assert browser.run(room) >= 10  # pixels between the last column and the edge
    sides = {"light": (">", "<"), "dark": ("<", ">")}[scheme]
    for colour, side in zip(("getComputedStyle(document.body).backgroundColor", LABEL), sides, strict=True):
        assert browser.run(f"{colour}.match(/\\d+/g).slice(0, 3).every(x => x {side} 128)"), colour
    browser.save_picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.errors == []


@pytest.mark.parametrize("way", ["clipboard", "command", "by hand"])
def test_button_copies_the_run(shown, way):
    """Without a clipboard API the old command copies; if that is refused too, the text is there, marked."""
    path, browser = shown
    browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.send("Emulation.setFocusEmulationEnabled", enabled=True)
    without = "Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true});"
    refuses = "document.execCommand = () => false;"
    script = {"clipboard": "", "command": without, "by hand": without + refuses}[way]
    browser.show(path, width=390, script=script)
    browser.run("document.getElementById('copy').click()")
    said = "document.getElementById('copied').textContent"
    wait = f"const look = () => {said} || ++tries > 500 ? done() : setTimeout(look, 10)"
    browser.run(f"new Promise(done => {{ let tries = 0; {wait}; look(); }})")
    if way == "by hand":
        assert browser.run(said) == "Copy the marked text."
        copied = browser.run("document.getSelection().toString() || document.activeElement.value")
        assert browser.run("document.activeElement.tagName") == "TEXTAREA"
    else:
        assert browser.run(said).startswith("Copied ")
        assert browser.run("document.querySelector('textarea') === null")
        browser.run("delete navigator.clipboard")
        copied = browser.run("navigator.clipboard.readText()")
        browser.run("navigator.clipboard.writeText('')")
    assert json.loads(copied) == RUN
    assert browser.errors == []


def test_errors_on_the_console_are_heard(shown):
    path, browser = shown
    browser.show(path, width=390)
    browser.run("console.error('here')")
    browser.run("setTimeout(() => { throw new Error('there') }); new Promise(done => setTimeout(done, 50))")
    heard, browser.errors = browser.errors, []
    assert len(heard) == 2 and "here" in heard[0] and "there" in heard[1]
