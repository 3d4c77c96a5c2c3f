"""The page side alone: the widget's own files in an empty page, fed with frames as a notebook would."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import nblaunch.dashboard
from nblaunch.dashboard.frames import FrameWriter
from tests.dashboard.scripted import ScriptedRun

FILES = Path(nblaunch.dashboard.__file__).parent
COLOURS = {
    "light": {"--jp-layout-color0": "#fff", "--jp-ui-font-color0": "#000", "--jp-brand-color1": "#1976d2"},
    "dark": {"--jp-layout-color0": "#111", "--jp-ui-font-color0": "#fff", "--jp-brand-color1": "#2196f3"},
}
"""What JupyterLab's two themes set."""
PAGE = """<!doctype html><meta charset="utf-8"><style>{css}</style>
<body style="margin: 12px; background: var(--jp-layout-color0)">
<div id="here"></div>
<script type="module">
const source = {source};
const address = URL.createObjectURL(new Blob([source], {{ type: "text/javascript" }}));
const widget = (await import(address)).default();
const state = {{}}, listeners = [];
window.sent = [];
const model = {{
  get: (name) => state[name],
  on: (_, heard) => listeners.push(heard),
  send: (message) => sent.push(message),
}};
widget.initialize({{ model }});
widget.render({{ model, el: document.getElementById("here") }});
window.push = (frame, curves) => {{
  const bytes = Uint8Array.from(atob(curves), (letter) => letter.charCodeAt(0));
  Object.assign(state, {{ frame, curves: new DataView(bytes.buffer) }});
  for (const heard of listeners) heard();
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}};
</script>"""


class Stage:
    """One page with one view of one scripted run."""

    def __init__(self, page, run: ScriptedRun) -> None:
        self.page, self.run = page, run
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.writer = FrameWriter(run.state)
        css, code = ((FILES / name).read_text() for name in ("widget.css", "widget.js"))
        page.set_content(PAGE.format(css=css, source=json.dumps(code).replace("</", "<\\/")))
        self.theme("light")
        page.wait_for_function("window.push !== undefined")
        self.push()

    def theme(self, name: str) -> None:
        """Set what JupyterLab's theme of this name sets."""
        for variable, value in COLOURS[name].items():
            self.page.evaluate("([n, v]) => document.body.style.setProperty(n, v)", [variable, value])
        light = str(name == "light").lower()
        self.page.evaluate("(light) => document.body.setAttribute('data-jp-theme-light', light)", light)

    def push(self, full: bool = False) -> Stage:
        """Send a frame, and wait until it is drawn."""
        frame, curves = self.writer.full() if full else self.writer.delta()
        self.page.evaluate("([frame, curves]) => push(frame, curves)", [frame, base64.b64encode(curves).decode()])
        assert self.errors == []
        return self

    def text(self, selector: str) -> str:
        """What the first element that fits says."""
        return self.page.locator(selector).first.inner_text()

    def path(self, index: int = 0) -> str:
        """What the first chart's lines draw."""
        return self.page.locator(".nbl-line").nth(index).get_attribute("d")
