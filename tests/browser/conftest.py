"""A JupyterLab on loopback, and Debian's chromium in front of it."""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from PIL import Image

CHROMIUM = "/usr/bin/chromium"
SHOTS = Path(__file__).parent / "shots"
ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def missing() -> str:
    """Why no browser test can run here, or nothing."""
    if shutil.which(CHROMIUM) is None:
        return f"{CHROMIUM} is not installed"
    for module in ("playwright", "jupyterlab"):
        try:
            __import__(module)
        except ImportError:
            return f"{module} is not installed"
    return ""


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium, started once."""
    reason = missing()
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    SHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


def keep(name: str, picture: bytes) -> None:
    """Put a picture where people look at it, in as many colours as the eye tells apart."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    whole.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(SHOTS / f"{name}.png", optimize=True)


class Server:
    """A running JupyterLab."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        quiet = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        quiet.parent.mkdir(parents=True)
        quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
        runtime = folder / "runtime"
        environment = os.environ | {
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": str(ROOT),
        }
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--ip=127.0.0.1",
            "--port=0",
            "--allow-root",
        ]
        command += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}"]
        command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)
        self.url = self._wait(runtime)

    def _wait(self, runtime: Path) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            for info in runtime.glob("jpserver-*.json"):
                return json.loads(info.read_text())["url"]
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start:\n{(self.folder / 'server.log').read_text()}")

    def write(self, name: str, *cells: str) -> None:
        """Save a notebook of code cells."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, self.notebooks / name)

    def read(self, name: str) -> nbformat.NotebookNode:
        """The notebook as it was saved."""
        return nbformat.read(self.notebooks / name, as_version=4)

    def close(self) -> None:
        """End the server, and its kernels with it."""
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory) -> Iterator[Server]:
    """JupyterLab, started once."""
    running = Server(tmp_path_factory.mktemp("lab"))
    yield running
    running.close()


class Lab:
    """One page with one notebook."""

    def __init__(self, browser, server: Server) -> None:
        self.server = server
        self.page = browser.new_page(viewport={"width": 1240, "height": 1000})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.name = ""

    def open(self, name: str, *cells: str, theme: str = "JupyterLab Light") -> Lab:
        """Save a notebook of these cells and open it alone, without the side bars."""
        self.server.write(name, *cells)
        return self.reopen(name, theme)

    def reopen(self, name: str, theme: str = "JupyterLab Light") -> Lab:
        """Open a saved notebook."""
        self.name = name
        self.page.goto(f"{self.server.url}doc/tree/{name}?token={self.server.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function("window.jupyterapp !== undefined")
        self.theme(theme)
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=60_000,
        )
        return self

    def command(self, name: str, **arguments) -> None:
        """Run a command of JupyterLab's to its end."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def begin(self, name: str, **arguments) -> None:
        """Run a command of JupyterLab's and go on."""
        self.page.evaluate("([n, a]) => { window.jupyterapp.commands.execute(n, a); }", [name, arguments])

    def theme(self, name: str) -> None:
        """Switch to one of JupyterLab's themes."""
        self.command("apputils:change-theme", theme=name)
        light = "true" if "Light" in name else "false"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")

    def run(self, cell: int) -> Lab:
        """Start a cell, and do not wait for it."""
        self.page.locator(".jp-Cell").nth(cell).locator(".jp-InputArea-editor").click()
        self.begin("notebook:run-cell")
        return self

    def idle(self, timeout: float = 60) -> Lab:
        """Wait until no cell runs."""
        self.page.wait_for_function(
            "() => !document.querySelector('.jp-Notebook').innerText.includes('[*]')", timeout=timeout * 1000
        )
        return self

    def save(self) -> nbformat.NotebookNode:
        """Save, and read what was saved."""
        self.command("docmanager:save")
        return self.server.read(self.name)

    def shot(self, name: str, selector: str = ".nbl") -> None:
        """A picture of the first element that fits, for people to look at."""
        keep(name, self.page.locator(selector).first.screenshot())

    def close(self) -> None:
        """Shut the kernel down and close the page; an error of the page's fails the test."""
        self.begin("notebook:shutdown-kernel")
        self.page.close()
        assert self.errors == []


@pytest.fixture
def lab(browser, server) -> Iterator[Lab]:
    """A page in the running JupyterLab."""
    opened = Lab(browser, server)
    yield opened
    opened.close()
