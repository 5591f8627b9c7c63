"""The work of models that are described without data: their layers, on accelerators of known speed.

It imports Keras, which takes some seconds: import it late where that matters.
"""


from evaluation.simulation import inputs
from evaluation.workloads import profiles
from evaluation.workloads import zoo


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
