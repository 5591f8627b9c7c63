"""Kills ranks at every moment of a training, lets `tf-poseidon run` start the job again, and compares the result.

    sudo env "PATH=$PATH" python -m evaluation.faults.kills --kills 108 --markdown docs/results/kills.md

Jobs run on one host, on emulated hosts (needs root) and under horovodrun. Each is killed several times, once per start,
and then left to end: by then it must have the bits of a job that nobody has disturbed, or nearly the same weights under
Horovod, whose sums differ from run to run. The exit status is 1 if one has others, hangs, ends with status 0 too early,
or leaves processes or shared memory.
"""

from collections.abc import Sequence
import pathlib

from absl import app
from absl import flags

from evaluation import output
from evaluation.faults import killing

_KILLS = flags.DEFINE_integer("kills", 108, "Number of kills.")
_RANKS = flags.DEFINE_list("ranks", ["2", "3", "4"], "Numbers of ranks, one after the other.")
_PLACES = flags.DEFINE_multi_enum("places", list(killing.PLACES), list(killing.PLACES),
                                  "Where jobs run; emulated hosts need root.")
_TOGETHER = flags.DEFINE_integer("together", 6, "Kills of one job, each in a start of its own.")
_SEED = flags.DEFINE_integer("seed", 1, "Seed of ranks and of the order of moments.")
_MARKDOWN = output.markdown_flag()


def main(_: Sequence[str]) -> int:
    jobs = killing.jobs(_KILLS.value, _PLACES.value, [int(size) for size in _RANKS.value], _TOGETHER.value, _SEED.value)
    kills, wrong = killing.campaign(jobs, _SEED.value)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(killing.report(kills, wrong))
    print("\n".join([*wrong, f"{len(kills)} kills, {len(wrong)} jobs wrong"]))
    return bool(wrong)


if __name__ == "__main__":
    app.run(main)
