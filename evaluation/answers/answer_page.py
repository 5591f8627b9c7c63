"""The tables of docs/answers.md: of all models on one cluster, and of the cells that were emulated.

Tests: tests/scripts/test_answers.py.
"""

import statistics

from evaluation import output
from tf_poseidon.reports import texts

HOSTS, ACCELERATOR = 8, "v100"  # of the table in Markdown
_GBPS = (1, 10, 25)
# Of zoo.MODELS.
_NAMES = {"vgg19": "VGG19", "resnet50": "ResNet50", "inception_v3": "InceptionV3", "mlp": "Tabular perceptron",
          "faces_100k": "Faces of 100k people"}
_BEGIN, _END = "<!-- {} -->\n", "<!-- end of {} -->"


def filled(page, models=None, checked=None):
    """Returns the page with new tables; those of None stay as they are."""
    for name, lines in (("models", models and of_models(models)), ("checked", checked and of_checks(checked))):
        if lines:
            before, _, rest = page.partition(_BEGIN.format(name))
            page = "\n".join([before + _BEGIN.format(name).rstrip(), *lines, _END.format(name)
                              + rest.partition(_END.format(name))[2]])
    return page


def of_models(models):
    """Returns the lines of the table of models: on some hosts, by rates of links."""
    rows = []
    for model in models:
        found = {row["gbps"]: row for row in model["rows"]
                 if (row["hosts"], row["accelerator"]) == (HOSTS, ACCELERATOR)}
        rows.append([model["name"], f"{model['parameters'] / 1e6:,.0f}M", f"{model['batch_size']:,}",
                     *(f"{_times(found[gbps]['speed_up'])} ({_times(found[gbps]['all_reduce'])})" for gbps in _GBPS),
                     _schemes(found[10]["shares"])])
    return output.markdown_table(["model", "weights", "rows", *(f"{gbps} Gbit/s" for gbps in _GBPS), "at 10 Gbit/s"],
                                 rows)


def of_checks(checked):
    """Returns the lines of the table of emulated cells, and a sentence of how far the predictions were off."""
    rows = [[check["model"], f"{check['hosts']}", f"{check['gbps']:g}", check["accelerator"],
             *(f"{1e3 * check[key]:,.1f}" for key in ("predicted_seconds", "measured_seconds")),
             f"{_ratio(check):.3f}"] for check in checked]
    ratios = [_ratio(check) for check in checked]
    header = ["model", "hosts", "Gbit/s", "accelerator", "predicted, ms", "emulated, ms", "ratio"]
    return [*output.markdown_table(header, rows), "",
            f"{len(checked)} cells: emulated steps took {statistics.median(ratios):.3f} times as long as predicted in "
            f"the median, {min(ratios):.3f} to {max(ratios):.3f}."]


def checks(models, emulated):
    """Returns the cells of the file of answers that were emulated, each with both times.

    Args:
        models: What `cells.read` returns.
        emulated: The results of the part "answers" of evaluation/comparisons/bench_emulated.py.
    """
    rows = {model["name"]: model["rows"] for model in models}
    found = []
    for entry in emulated:
        run, name = entry["run"], _NAMES[entry["run"]["model"]]
        cell = run["hosts"], run["gbps"], run["profile"]
        predicted, = (row["step_seconds"] for row in rows[name]
                      if (row["hosts"], row["gbps"], row["accelerator"]) == cell)
        measured = next(row for row in entry["results"] if row["system"] == run["systems"])["step"]["median_ms"]
        found.append({"model": name, "hosts": run["hosts"], "gbps": run["gbps"], "accelerator": run["profile"],
                      "predicted_seconds": predicted, "measured_seconds": measured / 1e3})
    return found


def _ratio(check):
    return check["measured_seconds"] / check["predicted_seconds"]


def _times(value):
    return texts.times(value)


def _schemes(shares):
    return ", ".join(f"{scheme} {share:.0%}" for scheme, share in shares.items() if share >= 0.005)
