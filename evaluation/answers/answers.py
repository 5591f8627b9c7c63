"""Plans forty models that people train for clusters that they have: docs/answers.md and its JSON.

    python -m evaluation.answers.answers

What each cell says is what `tf-poseidon explain` says of that model and cluster. Models of keras-hub are skipped, by
name, where it is not installed: `pip install keras-hub`, or, beside tensorflow-cpu, without what it needs for texts:
`pip install --no-deps keras-hub kagglehub kagglesdk tqdm regex tokenizers sentencepiece`.
"""

import concurrent.futures
import json
import multiprocessing
import pathlib

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation import modules
from evaluation.answers import answer_page
from evaluation.answers import cells
from evaluation.answers import trained_models

_NAMES = flags.DEFINE_list("names", None, "Models; all by default. The others stay as they are in the file.")
_JSON = flags.DEFINE_string("json", str(modules.RESULTS / "answers.json"), "File of the answers.")
_EMULATED = flags.DEFINE_string("emulated", str(modules.RESULTS / "answers_emulated.json"), "Emulated cells: what "
                                "bench_emulated.py --parts answers has written.")
_PAGE = flags.DEFINE_string("page", str(modules.ROOT / "docs" / "answers.md"), "The page whose tables are filled.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Models at a time.")


def main(_):
    names = _NAMES.value or list(trained_models.MODELS)
    if unknown := set(names) - trained_models.MODELS.keys():
        raise app.UsageError(f"--names has '{min(unknown)}', expected some of {', '.join(trained_models.MODELS)}.")
    path, console = pathlib.Path(_JSON.value), rich.console.Console(stderr=True)
    known = {model["name"]: model for model in cells.read(path)} if path.exists() else {}
    with concurrent.futures.ProcessPoolExecutor(_WORKERS.value, multiprocessing.get_context("spawn")) as processes, \
            rich.progress.Progress(console=console) as progress:
        pending = [processes.submit(cells.answers, name) for name in names]
        for done in progress.track(concurrent.futures.as_completed(pending), total=len(names), description="models"):
            if done.exception():
                processes.shutdown(cancel_futures=True)
            made = done.result()
            if isinstance(made, str):
                console.print(made)
                continue
            known[made["name"]] = made
            cells.write(path, [known[name] for name in trained_models.MODELS if name in known])
    page, emulated, models = pathlib.Path(_PAGE.value), pathlib.Path(_EMULATED.value), cells.read(path)
    checked = answer_page.checks(models, json.loads(emulated.read_text())) if emulated.exists() else None
    page.write_text(answer_page.filled(page.read_text(), models, checked))


if __name__ == "__main__":
    app.run(main)
