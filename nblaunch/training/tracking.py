"""Trackers, profiles and the end of a training, a part of `Accelerator`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nblaunch.rank import context
from nblaunch.training import trackers
from nblaunch.training.checkpoints.keeper import Checkpointing
from nblaunch.training.options import ProfileKwargs, ProjectConfiguration
from nblaunch.training.processes import PartialState, forget_settings


class Tracking(PartialState):
    """How an `Accelerator` tells what goes on."""

    project_configuration: ProjectConfiguration
    log_with: Sequence[trackers.GeneralTracker | type[trackers.LibraryTracker]]
    trackers: list[trackers.GeneralTracker]
    _profile: ProfileKwargs | None
    _checkpointing: Checkpointing

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin a run with every tracker of `log_with`, on the main process.

        Args:
            project_name: What trackers call the project.
            config: To be stored with the run; may be nested and hold anything.
            init_kwargs: A tracker's name to options of its own.
        """
        if self.is_main_process:
            self.trackers = trackers.start(
                self.log_with, project_name, self.project_configuration.logging_dir, config, init_kwargs or {}
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker, or with `unwrap` its library's own run; on other processes one that does nothing.

        Raises:
            ValueError: There is none of this name.
        """
        if not self.is_main_process:
            return trackers.GeneralTracker(_blank=True)
        found = next((one for one in self.trackers if getattr(one, "name", None) == name), None)
        if found is None:
            there = ", ".join(str(getattr(one, "name", "")) for one in self.trackers) or "none"
            raise ValueError(f"there is no tracker {name!r}; there are: {there} (init_trackers begins them)")
        return getattr(found, "tracker", None) if unwrap else found

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Show numbers on the dashboard, from every process; store values with all trackers, from the main one.

        Args:
            values: Numbers, 0-d tensors or text by name.
            step: The step that they are of.
            log_kwargs: A tracker's name to options of its `log`.
        """
        here = context.current()
        if here is not None:
            here.reporter.log(trackers.numbers(values), step)
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Store images with all trackers, from the main process."""
        for tracker in self.trackers:
            tracker.log_images(values, step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def end_training(self) -> None:
        """End the trackers' runs, and outside a launch the process group."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self._checkpointing.wait()
        forget_settings()
        if context.current() is None:
            self.destroy_process_group()

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[torch.profiler.profile]:
        """Profile a block; see `ProfileKwargs`.

        Yields:
            The profiler; call its `step()` if there is a schedule.
        """
        options = profile_handler or self._profile or ProfileKwargs()
        with options.build() as profiler:
            yield profiler
        if options.output_trace_dir is not None:
            folder = Path(options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()
