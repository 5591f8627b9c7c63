"""Draws the README's picture: how long training steps take with other libraries, as multiples of ours.

    python -m evaluation.comparisons.plot_alternatives

From docs/results/emulated.json, by bench_emulated.py, and alternatives.json, by bench_alternatives.py: four hosts with
links of 1 and 10 Gbit/s. What was not measured has no bar.
"""

import json

from absl import app
import matplotlib
import matplotlib.pyplot as plt

from evaluation import drawing
from evaluation import modules
from evaluation.comparisons import bench_alternatives

_COMPUTED = {"mlp": "dense layers\n(computed)", "transformer_12": "12-layer transformer\n(computed)",
             "mobilenet_v2": "MobileNetV2\n(computed)", "resnet50": "ResNet-50\n(computed)"}
_MODELS = {("vgg19_22k", "titan_x"): "VGG19-22K\n(emulated)", ("vgg19", "titan_x"): "VGG19\n(emulated)",
           ("resnet50", "titan_x_tf"): "ResNet-50\n(emulated)", ("mlp", None): _COMPUTED["mlp"]}
_SYSTEMS = {"poseidon": "tf_poseidon", "horovod": "Horovod", "mwms": "MultiWorkerMirroredStrategy",
            "pytorch": "PyTorch DDP", "jax": "Keras on JAX"}
_RATES = 1, 10  # Gbit/s


def ratios(rate):
    """Returns {model: {system: the time of a step as a multiple of poseidon's}}, on four hosts with links of a rate."""
    found: dict[str, dict[str, float]] = {name: {} for name in (*_MODELS.values(), *_COMPUTED.values())}
    for job in json.loads((modules.RESULTS / "emulated.json").read_text()):
        run = job["run"]
        name = _MODELS.get((run["model"], run["profile"]))
        systems = {result["system"]: result["to_first"] for result in job["results"]}
        if name and (run["hosts"], run["gbps"]) == (4, rate) and "horovod" in systems:
            found[name] |= {system: ratio for system, ratio in systems.items() if system in _SYSTEMS}
    runs = json.loads((modules.RESULTS / "alternatives.json").read_text())["runs"]
    for (network, gbps), systems in bench_alternatives.summary(runs).items():
        if network in _COMPUTED and gbps == rate:
            found[_COMPUTED[network]] |= {system: measures["ratio"][1] for system, measures in systems.items()}
    return found


def main(_):
    matplotlib.use("agg")
    found = {rate: ratios(rate) for rate in _RATES}
    figure, rows = plt.subplots(len(found), len(found[1]), figsize=(14, 4.6), sharey=True, layout="constrained")
    colours = [drawing.COLOURS[system] for system in _SYSTEMS]
    for (rate, models), row in zip(found.items(), rows, strict=True):
        row[0].set_ylabel(f"{rate} Gbit/s")
        for ax, (model, systems) in zip(row, models.items(), strict=True):
            values = [systems.get(system, 0) for system in _SYSTEMS]
            bars = ax.barh(list(_SYSTEMS.values()), values, color=colours)
            ax.bar_label(bars, [f"{value:.2f}" if value else "" for value in values], padding=3)
            if rate == _RATES[0]:
                ax.set_title(model, fontsize=10)
            ax.set_xlim(0, 1.35 * max(*values, 1))
            ax.set_xticks([])
            ax.spines[["top", "right", "bottom"]].set_visible(False)
    rows[0][0].invert_yaxis()  # which all share
    figure.suptitle("Time of a training step, as a multiple of tf_poseidon's; four hosts emulated on one machine",
                    fontsize=11)
    figure.savefig(modules.RESULTS / "alternatives.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    app.run(main)
