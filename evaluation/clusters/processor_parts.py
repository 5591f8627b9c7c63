"""Gives processes a part of a processor each, as hosts of different speed have it. Needs root, and Linux' cgroups."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import os
import pathlib
import time

# Short, so that steps of some tens of milliseconds do not notice when a part is used up.
_PERIOD_US = 20_000
_ROOT = pathlib.Path("/sys/fs/cgroup")


@contextlib.contextmanager
def made(parts: Sequence[float]) -> Iterator[list[pathlib.Path]]:
    """Yields a folder for each part; `enter` gives a process that part. At the end, no process may be left in them.

    Args:
        parts: Of a processor, such as 0.3.

    Raises:
        SystemExit: If this machine does not let this user divide its processors.
    """
    is_first_version = (_ROOT / "cpu").exists()
    root = _ROOT / "cpu" if is_first_version else _ROOT
    folders = [root / f"poseidon-{os.getpid()}-{number}" for number in range(len(parts))]
    try:
        for folder, part in zip(folders, parts, strict=True):
            folder.mkdir()
            quota = round(part * _PERIOD_US)
            # The weight lets a process have its part although others, which are in no such folder, want more.
            limits = ({"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota, "cpu.shares": 8192}
                      if is_first_version else {"cpu.max": f"{quota} {_PERIOD_US}", "cpu.weight": 800})
            for name, value in limits.items():
                (folder / name).write_text(str(value))
        yield folders
    except OSError as error:
        raise SystemExit(f"Processors cannot be divided by {root} ({error}); run this as root, where the controller "
                         "'cpu' is enabled.") from error
    finally:
        for folder in folders:
            for _ in range(100):  # a process that has ended leaves it a moment later
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.05)


def enter(folder: pathlib.Path) -> None:
    """Gives this process, with all its threads, the part of a folder."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
