"""What one rank of a job does: it runs items, notes when each begins and how it ends, and waits for the other ranks.

A rank's module gets the job's directory. There, `job.json` says what to run, and each rank appends lines of JSON to
`notes.RANK`, at once, since a job may die or hang: {"pid": ...}, {"collected": names}, then per item {"begins": name}
and {"ends": name, "outcome": ..., "error": ..., "trace": ..., "value": ...}, last {"finished": true}.
"""

from collections.abc import Callable
from collections.abc import Iterable
import json
import os
import pathlib
import sys
import time
import traceback
from typing import Any

_TRACE = 6000  # characters


class Notes:
    """The notes of this rank.

    Attributes:
        directory: That of the job, which is removed after it.
        how: How the items run, as "plain".
        options: What else the rank's module needs.
        items: The names of the items to run, in order; None for all that it has.
        rank: The number of this rank.
        communicator: That of its strategy, which may break; None without one.
    """

    def __init__(self, directory: str) -> None:
        self.directory = pathlib.Path(directory)
        job = json.loads((self.directory / "job.json").read_text())
        self.how, self.options, self.items = job["how"], job["options"], job["items"]
        self.rank = int(os.environ["PMI_RANK"]) if job["ranks"] > 1 else 0
        self._paths = [self.directory / f"notes.{rank}" for rank in range(job["ranks"])]
        self._file = self._paths[self.rank].open("a")
        self._wait_s, self.communicator = job["wait_s"], None
        self.write(pid=os.getpid())

    def write(self, **note: Any) -> None:
        """Writes a line."""
        self._file.write(json.dumps(note | {"at": time.time()}) + "\n")
        self._file.flush()

    def strategy(self, policy: str, **options: Any) -> Any:
        """Returns a strategy; items that have broken its communicator end the job."""
        import tf_poseidon as poseidon  # late: a plain run goes without it
        # A rank that waits for one that has failed is ended by the job's process, before it gives up by itself.
        strategy = poseidon.PoseidonStrategy(policy=policy, timeout_s=2 * self._wait_s, **options)
        self.communicator = strategy.extended.job and strategy.extended.job.communicator
        return strategy

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Returns those of the names that are to run, and notes them."""
        found = list(names)
        if self.items is not None:
            known = set(found)
            found = [name for name in self.items if name in known]
        self.write(collected=found)
        return found

    def run(self, names: Iterable[str], function: Callable[[str], Any]) -> None:
        """Runs items by a function, which returns a value to note."""
        for name in self.chosen(names):
            self.begin(name)
            try:
                value = function(name)
            except BaseException as error:  # of all kinds: a program may call sys.exit
                self.end(name, "failed", f"{type(error).__name__}: {error}", traceback.format_exc())
            else:
                self.end(name, value=value)
        self.write(finished=True)

    def begin(self, name: str) -> None:
        """Notes that an item begins."""
        self.write(begins=name)

    def end(self, name: str, outcome: str = "passed", error: str = "", trace: str = "", value: Any = None) -> None:
        """Notes how an item has ended, and waits for its end on all ranks: none may begin the next one early.

        Ends the process, and so the job, if the item has failed in different ways: ranks would go on from different
        states.
        """
        self.write(ends=name, outcome=outcome, error=error, trace=trace[-_TRACE:], value=value)
        while len(ends := self._ends(name)) < len(self._paths):
            time.sleep(0.02)
        is_usable = self.communicator is None or self.communicator.failure is None
        if any(end["outcome"] == "failed" for end in ends) and not (
                is_usable and len({(end["outcome"], end["error"]) for end in ends}) == 1):
            sys.stdout.flush()
            os._exit(1)

    def _ends(self, name: str) -> list[dict[str, Any]]:
        begin = json.dumps({"ends": name}).removesuffix("}")
        return [json.loads(line) for path in self._paths for line in lines(path) if line.startswith(begin)]


def lines(path: pathlib.Path) -> list[str]:
    """Returns the lines that a rank has written, without one that is not complete."""
    text = path.read_text() if path.exists() else ""
    return text[:text.rfind("\n") + 1].splitlines()
