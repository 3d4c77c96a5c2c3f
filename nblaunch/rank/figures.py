"""A matplotlib backend: `plt.show()` in a rank shows the open figures in the notebook and closes them."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas
from matplotlib.backends.backend_agg import new_figure_manager  # pyright: ignore[reportAttributeAccessIssue]

from nblaunch.rank import display

__all__ = ["FigureCanvas", "new_figure_manager", "show"]


def show(*args: Any, **kwargs: Any) -> None:
    """Send every open figure as PNG."""
    import io

    assert display.current is not None
    for manager in Gcf.get_all_fig_managers():
        picture = io.BytesIO()
        manager.canvas.figure.savefig(picture, format="png", bbox_inches="tight")
        data = {"image/png": picture.getvalue(), "text/plain": repr(manager.canvas.figure)}
        display.current.display(data | {"image/png": display._text(data["image/png"])}, raw=True)
    pyplot.close("all")
