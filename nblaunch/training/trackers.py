"""Experiment trackers by their own libraries, imported only when asked for; and the base of one's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nblaunch.training.structures import children


class GeneralTracker:
    """The base of trackers; one's own defines `name`, `requires_logging_directory` and `tracker`.

    Example:
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printer().log({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    main_process_only = True
    """Kept for compatibility: trackers live on the main process alone."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} must define {', '.join(missing)}")

    def start(self) -> None:
        """Begin the run; called by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store values of one step."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store images, lists of arrays (height, width, channels) by name."""

    def finish(self) -> None:
        """End the run."""


class LibraryTracker(GeneralTracker):
    """A tracker by a library, which `module` names."""

    name = ""
    package = ""
    """What to install."""
    module = ""
    requires_logging_directory = False

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.options = kwargs
        self._run: Any = None

    @classmethod
    def installed(cls) -> bool:
        """Whether the library is there."""
        return importlib.util.find_spec(cls.module.split(".")[0]) is not None

    @property
    def library(self) -> Any:
        """The library's module."""
        return importlib.import_module(self.module)

    @property
    def tracker(self) -> Any:
        """The library's own object of this run."""
        return self._run


class TensorBoardTracker(LibraryTracker):
    """Writes event files for TensorBoard to `<logging_dir>/<run_name>`."""

    name = "tensorboard"
    package = "tensorboard"
    module = "tensorboard"
    requires_logging_directory = True

    def start(self) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self._run = SummaryWriter(str(Path(self.logging_dir or ".") / self.run_name), **self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, nested ones as `outer/inner`."""
        import yaml

        known = {name: value if _is_plain(value) else str(value) for name, value in flat(values).items()}
        self._run.add_hparams(known, {}, run_name="hparams")
        self._run.flush()
        path = Path(self._run.log_dir) / "hparams.yml"
        path.write_text(yaml.safe_dump(known, sort_keys=False), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become scalars, text becomes text, dicts of numbers become groups of scalars."""
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                self._run.add_scalar(name, number, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                group = {str(key): as_number(part) for key, part in value.items()}
                self._run.add_scalars(name, group, global_step=step, **kwargs)
            else:
                self._run.add_text(name, str(value), global_step=step, **kwargs)
        self._run.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Arrays or tensors of images by name; `dataformats` as of `SummaryWriter.add_images`."""
        for name, images in values.items():
            self._run.add_images(name, images, global_step=step, **kwargs)
        self._run.flush()

    def finish(self) -> None:
        """Close the writer."""
        self._run.close()


class WandBTracker(LibraryTracker):
    """Logs to Weights & Biases."""

    name = "wandb"
    package = "wandb"
    module = "wandb"

    def start(self) -> None:
        """Begin a run of the project."""
        self._run = self.library.init(project=self.run_name, **self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration."""
        self._run.config.update(_described(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store values of one step."""
        self._run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images by name."""
        image = self.library.Image
        self._run.log({name: [image(one) for one in images] for name, images in values.items()}, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


class TrackioTracker(WandBTracker):
    """Logs to Trackio, whose interface is that of Weights & Biases."""

    name = "trackio"
    package = "trackio"
    module = "trackio"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration."""
        self._run.config.update(_described(values))


class MLflowTracker(LibraryTracker):
    """Logs to MLflow; the project is its experiment."""

    name = "mlflow"
    package = "mlflow"
    module = "mlflow"

    def start(self) -> None:
        """Begin a run of the experiment; `MLFLOW_EXPERIMENT_NAME` and `MLFLOW_RUN_ID` go first."""
        mlflow = self.library
        if self.logging_dir is not None and "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(Path(self.logging_dir).absolute().as_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", self.run_name))
        self._run = mlflow.start_run(**self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters of at most 500 characters, 100 in one request."""
        known = [(name, str(value)[:500]) for name, value in flat(values).items()]
        for start in range(0, len(known), 100):
            self.library.log_params(dict(known[start : start + 100]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become metrics; what is no number can't be one and is stored as a tag."""
        numbers = {name: as_number(value) for name, value in flat(values).items()}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        if metrics:
            self.library.log_metrics(metrics, step=step, **kwargs)
        for name in numbers.keys() - metrics.keys():
            self.library.set_tag(name, str(flat(values)[name]))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images by name."""
        for name, images in values.items():
            for number, image in enumerate(images):
                self.library.log_image(image, artifact_file=f"{name}_{step}_{number}.png", **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.library.end_run()


TRACKERS: dict[str, type[LibraryTracker]] = {
    kind.name: kind for kind in (TensorBoardTracker, WandBTracker, MLflowTracker, TrackioTracker)
}


def choose(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[GeneralTracker | type[LibraryTracker]]:
    """The trackers that `Accelerator(log_with=...)` means, each once.

    Args:
        log_with: Names, "all", trackers of one's own, or a list of these; None is none.
        logging_dir: Where those that write files do so.

    Raises:
        ValueError: A name is unknown, or a tracker needs `logging_dir`.
        ImportError: A tracker's library is not installed; the message names the package.
    """
    if log_with is None:
        return []
    asked: Sequence[Any] = log_with if isinstance(log_with, list | tuple) else [log_with]
    found: list[GeneralTracker | type[LibraryTracker]] = [one for one in asked if not isinstance(one, str)]
    names = [str(one) for one in asked if isinstance(one, str)]
    if "all" in names:
        installed = [name for name, kind in TRACKERS.items() if kind.installed()]
        names = [name for name in installed if not TRACKERS[name].requires_logging_directory or logging_dir]
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise ValueError(f'log_with={name!r} is unknown; there are: {", ".join(TRACKERS)}, or "all"')
        kind = TRACKERS[name]
        if not kind.installed():
            raise ImportError(f"log_with={name!r} needs a package that is not installed; pip install {kind.package}")
        if kind.requires_logging_directory and logging_dir is None:
            raise ValueError(f"log_with={name!r} writes files; pass project_dir=, or logging_dir= by project_config=")
        found.append(kind)
    return found


def start(
    chosen: Sequence[GeneralTracker | type[LibraryTracker]],
    project: str,
    logging_dir: str | os.PathLike[str] | None,
    config: dict[str, Any] | None,
    options: Mapping[str, dict[str, Any]],
) -> list[GeneralTracker]:
    """Begin a run with each tracker.

    Args:
        chosen: Of `choose`.
        project: Its name.
        logging_dir: Where those that write files do so.
        config: To be stored, if any.
        options: A tracker's name to arguments of its library's start.
    """
    running = [
        one(project, logging_dir, **options.get(one.name, {})) if isinstance(one, type) else one for one in chosen
    ]
    for tracker in running:
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
    return running


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers, or tensors of one element, which stay on their device."""
    found = {name: value if isinstance(value, torch.Tensor) else as_number(value) for name, value in values.items()}
    return {
        name: value
        for name, value in found.items()
        if value is not None and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    }


def as_number(value: Any) -> float | int | None:
    """A number, also from a tensor or array of one element; None for anything else."""
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        if getattr(value, "numel", lambda: value.size)() != 1:
            return None
        value = value.item()
    return value if isinstance(value, int | float) else None


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings, lists and dataclasses as one level of `outer/inner` names; objects and classes as text."""
    parts = None if isinstance(values, str) else children(values)
    if parts is None:
        number = as_number(values)
        return {path or "value": number if number is not None else values if _is_plain(values) else str(values)}
    found: dict[str, Any] = {}
    for step, part in parts:
        name = step.strip("[].'\"")
        found |= flat(part, f"{path}/{name}" if path else name)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _described(values: Any) -> Any:
    """Nested data as JSON can hold it: objects and classes as text."""
    if isinstance(values, Mapping):
        return {str(key): _described(part) for key, part in values.items()}
    if isinstance(values, list | tuple):
        return [_described(part) for part in values]
    return values if values is None or _is_plain(values) else str(values)
