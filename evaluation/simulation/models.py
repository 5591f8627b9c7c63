"""The work of models that are described without data: their layers, on accelerators of known speed.

It imports Keras, which takes some seconds: import it late where that matters.
"""

import dataclasses

from evaluation.simulation import inputs
from evaluation.workloads import profiles
from evaluation.workloads import zoo
from tf_poseidon import planning


def work_of(model: str, profile: profiles.Profile, rows: int | None = None,
            seconds: float | None = None) -> inputs.Work:
    """Returns the `inputs.Work` of a model.

    Args:
        model: One of zoo.MODELS.
        profile: The accelerator.
        rows: Rows of its batch; the paper's by default.
        seconds: Time of its step; the profile's by default.
    """
    rows = rows or zoo.MODELS[model].batch_size
    return inputs.Work(zoo.sites(model, rows), rows * zoo.operations(model),
                       seconds or profile.step_seconds(model, rows), 1e-9 / profile.gflops)


def of_columns(work: inputs.Work, model: str, rows: int, ranks: int) -> inputs.Work:
    """Returns the `inputs.Work` of a model whose layers with many outputs are divided by these.

    Args:
        work: That of the model.
        model: One of zoo.MODELS.
        rows: Rows of the batch of each rank.
        ranks: The number of ranks.
    """
    described, exchanges, divided = zoo.describe(model), [], set()
    before, forward = 0.0, rows * sum(layer.operations for layer in described)
    for layer in described:
        own = rows * layer.operations
        (weight, shape), *_ = layer.weights
        if layer.rows is not None and zoo.has_many_outputs(shape):
            name, k = f"{layer.name}/{weight}", layer.rows * rows
            divided |= {f"{layer.name}/{each}" for each, _ in layer.weights}
            later = forward - before - own
            exchanges += [planning.Exchange(f"{kind}/{name}", kind, "float32", 4, moved, operations, depth, True)
                          for depth, (kind, moved, operations) in enumerate((
                              (planning.GATHER, (k, shape[0]), before),
                              (planning.GATHER, (1, 3 * ranks * k), before + own),
                              (planning.RETURN, (ranks * k, shape[0]), forward + own + 2 * later)))]
        before += own
    exchanges = [dataclasses.replace(each, site=f"{each.site}#{i}") for i, each in enumerate(exchanges)]
    return dataclasses.replace(work, exchanges=(*work.exchanges, *exchanges),
                               sites=tuple(site for site in work.sites if site.name not in divided))
