"""What a run writes down: the tracker and its sinks, timers, custom log functions, the run directory."""

from shared_runtime.tracking.build import build_tracker
from shared_runtime.tracking.log_hooks import LogHooks
from shared_runtime.tracking.run_dir import RunDirectory, RunStatus, open_run_directory
from shared_runtime.tracking.run_lock import RunDirectoryError, RunInUseError
from shared_runtime.tracking.sink import LoggedImage, Sink, TrackingError
from shared_runtime.tracking.timers import Timers
from shared_runtime.tracking.tracker import Tracker

__all__ = [
    "LogHooks",
    "LoggedImage",
    "RunDirectory",
    "RunDirectoryError",
    "RunInUseError",
    "RunStatus",
    "Sink",
    "Timers",
    "Tracker",
    "TrackingError",
    "build_tracker",
    "open_run_directory",
]
