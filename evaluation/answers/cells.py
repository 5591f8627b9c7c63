"""What a model would gain on each cluster of docs/answers.md, and the file in which that is stored.

A model is traced once, and again for each number of hosts where its weights may be divided: rates change what is
chosen, not what there is to choose from. Variables have no values meanwhile, so memory is no limit.

Tests: tests/scripts/test_answers.py.
"""

import collections
import dataclasses
import itertools
import json
import logging
import math
import pathlib
import warnings

from evaluation.answers import trained_models
from evaluation.answers import unallocated_variables
import tf_poseidon as poseidon
from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.explanations import prospects

HOSTS = (4, 8, 32, 128)
GBPS = (1, 10, 25, 100)
ACCELERATORS = ("v100", "h100")
# Columns of a row of the file. Speed-ups are over one process; `shares` are those of the weights' bytes, by how their
# gradients travel; bytes are those that a node sends plus receives in a step, and those that a rank holds.
COLUMNS = ("hosts", "gbps", "accelerator", "speed_up", "at_most", "all_reduce", "ps", "step_seconds", "num_bytes",
           "shares", "weights", "gradients", "slots")
ROWS = "rows"  # no scheme of a plan: rows of a table's gradient, or those that a gradient is made of, are gathered
_LEAST_SHARE = 0.1  # of all weights, from which on dividing one is tried


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """The plans that all plans of a model follow from.

    Attributes:
        parameters: How many numbers are trained.
        whole: With no weight divided; the same for any number of hosts.
        divided: By number of hosts, with those weights divided that "auto" divides where links are slow.
    """

    parameters: int
    whole: planning.Plan
    divided: dict[int, planning.Plan]

    def plans(self, hosts):
        """Returns the plans from which "auto" takes the shorter one."""
        return (self.divided[hosts], self.whole) if hosts in self.divided else (self.whole,)


def traced(model, hosts=HOSTS):
    """Returns the `TracedModel` of a `TrainedModel`."""
    with unallocated_variables.scope(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting sparse IndexedSlices")  # nothing is converted
        keras_model = model.compiled()

        def plan(workers, policy):
            return poseidon.explain(keras_model, model.batch_size, workers, policy=policy,
                                    network=f"{min(GBPS)}GbE", accelerator=ACCELERATORS[-1])

        whole = plan(min(hosts), planning.PS)
        if other := [each for each in whole.exchanges if each.kind != planning.GATHER]:
            raise NotImplementedError(f"'{model.name}' exchanges '{other[0].site}', whose size may depend on the "
                                      "number of hosts: trace it for each of these.")
        # The more hosts, the more rows go to each shard: what is not divided among the fewest is not among more.
        divided = {}
        for workers in sorted(hosts) if _may_be_divided(keras_model) else ():
            divided[workers] = plan(workers, "auto")
            if not divided[workers].divided:
                del divided[workers]
                break
        parameters = sum(math.prod(variable.shape) for variable in keras_model.trainable_variables)
    return TracedModel(parameters, whole, divided)


def _may_be_divided(keras_model):
    """Returns whether a wide layer or a table is so much of a model that steps can be shorter by its division."""
    sizes = [(math.prod(weight.shape), weight.shape) for weight in keras_model.trainable_variables]
    least = _LEAST_SHARE * sum(size for size, _ in sizes)
    return any(size > least and len(shape) == 2 and max(shape) >= 4 * min(shape) for size, shape in sizes)


def answer(model, hosts, gbps, accelerator):
    """Returns a row of the file, by its `COLUMNS`.

    Args:
        model: A `TracedModel`.
        hosts: The number of hosts, each with one accelerator.
        gbps: The rate of their links.
        accelerator: A key of `planning.ACCELERATORS`.
    """
    planner = options.PlanOptions(workers=hosts, network=f"{gbps}GbE", accelerator=accelerator).planner()
    now = prospects.shortest(model.plans(hosts), planner)
    whole = prospects.shortest((model.whole,), planner)
    policies = {each.name: each for each in prospects.policies(now, whole, planner)}
    memory, alone = now.memory, hosts * now.compute_seconds
    return (hosts, gbps, accelerator, *(_rounded(value) for value in (
        alone / now.step_seconds, alone / now.least_seconds, policies[prospects.ALL_REDUCE].speed_up,
        policies[planning.PS].speed_up, now.step_seconds, now.total_bytes)),
        _shares(model.parameters, now), memory.weights, memory.gradients, memory.slots)


def _shares(parameters, plan):
    """Returns {scheme: the share of what is trained whose gradients travel by it}, the largest first."""
    found = collections.Counter()
    for site, decision in zip(plan.sites, plan.decisions, strict=True):
        if "/moving_" not in site.name:  # of batch norm, which are summed, too
            found[decision.scheme] += math.prod(site.shape)
    for weight in plan.divided:
        found[planning.COLUMNS] += math.prod(weight.shape)
    found[ROWS] += max(0, parameters - found.total())
    return {scheme: _rounded(size / found.total()) for scheme, size in found.most_common() if size}


def _rounded(value, digits=4):
    return None if value is None else float(f"{value:.{digits}g}")


def answers(name):
    """Returns what the file says of a model, or why it says nothing."""
    model = trained_models.MODELS[name]
    logging.getLogger("tf_poseidon").setLevel(logging.ERROR)
    try:
        found = traced(model)
    except ModuleNotFoundError as error:
        return f"{name} needs {error.name}."
    rows = [answer(found, *cell) for cell in itertools.product(HOSTS, GBPS, ACCELERATORS)]
    return {"name": name, "family": model.family, "source": model.source, "batch_size": model.batch_size,
            "parameters": found.parameters, "operations": found.whole.operations, "rows": rows}


def read(path):
    """Returns the models of a file, with their rows as dictionaries."""
    stored = json.loads(pathlib.Path(path).read_text())
    return [{**model, "rows": [dict(zip(stored["columns"], row, strict=True)) for row in model["rows"]]}
            for model in stored["models"]]


def write(path, models):
    """Writes models; each row has a line of the file."""
    lines = []
    for model in models:
        rows = [row.values() if isinstance(row, dict) else row for row in model["rows"]]
        head = json.dumps({**model, "rows": []}).removesuffix("]}")
        lines.append(head + "\n" + ",\n".join(json.dumps(list(row), separators=(",", ":")) for row in rows) + "]}")
    body = ",\n".join(lines)
    pathlib.Path(path).write_text(f'{{"columns": {json.dumps(COLUMNS)},\n"models": [\n{body}\n]}}\n')
