"""Compares a rewritten graph with the one that it was made of, on as many ranks as there are.

The reference runs in one process and sends nothing: the original graph runs on each rank's rows from the
same state, its gradients are averaged with NumPy, and its own update is applied. It is the rewritten graph
without what was inserted, but for a Python function at each site. That function hands the sums over which
are known, and notes this rank's gradient where they are not: so the step runs again until all are known, as
often as sites come after each other (the steps of a loop).
"""

import collections
import contextlib
import dataclasses
import hashlib

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

from tf_poseidon import grappler
from tf_poseidon import job
from tf_poseidon import runtime
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import find_gradients
from tf_poseidon.graph_passes import flatten
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import inserted
from tf_poseidon.graph_passes import row_independence
from tf_poseidon.graph_passes import strip
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running

_MAX_PASSES = 1000


@dataclasses.dataclass
class Verification:
    """What a verification has found. `print(verification)` shows it.

    Attributes:
        size: Number of ranks.
        steps: Number of steps.
        errors: By site: (scheme, number of values compared, the largest error in parts of its bound).
        differing: Variables that are not the same on all ranks afterwards.
        states: Variables that have other bits than after the original's own update: the largest difference, in
            parts of their values, by name.
        row_dependence: Why the joined batch may have another gradient; empty if it may not.
        joined: The largest relative difference to the joined batch's gradient, None if not compared.
        joined_bound: What that may be.
        failures: What is wrong, sentences; empty if nothing is.
    """

    size: int
    steps: int
    errors: dict = dataclasses.field(default_factory=dict)
    differing: list = dataclasses.field(default_factory=list)
    states: dict = dataclasses.field(default_factory=dict)
    row_dependence: str = ""
    joined: float | None = None
    joined_bound: float = 0.0
    failures: list = dataclasses.field(default_factory=list)

    def __str__(self):
        width = max((len(site) for site in self.errors), default=4)
        lines = [f"{self.steps} steps on {self.size} ranks, gradients against those of the original graph:",
                 f"  {'site':{width}}  scheme    values  largest error / bound"]
        lines += [f"  {site:{width}}  {scheme:6}  {number:8,}  {error:.3g}"
                  for site, (scheme, number, error) in self.errors.items()]
        lines.append("variables after the original's own update: "
                     + ("the same bits" if not self.states else f"other bits in {', '.join(self.states)}"))
        lines.append("variables on all ranks: " + ("the same bits" if not self.differing else
                                                   f"its own on each rank: {', '.join(self.differing)}"))
        if self.joined is None:
            lines.append(f"the joined batch: not promised to be the same, since {self.row_dependence}")
        else:
            promise = ("not promised to be the same, since " + self.row_dependence if self.row_dependence
                       else "the same, since rows are independent")
            lines.append(f"the joined batch: {promise}; largest difference {self.joined:.2g} of a gradient's norm "
                         f"(bound {self.joined_bound:.2g})")
        return "\n".join([*lines, *(f"WRONG: {failure}" for failure in self.failures),
                          "wrong" if self.failures else "all right"])


def verify(source, target, signature=None, train_op=(), initializer=(), batch_size=4, steps=2, inputs=None,
           seed=0, engine=None):
    """Runs a rewritten graph, and the original, and compares them. All ranks have to call it.

    Args:
        source: Path of the original graph.
        target: Path of the rewritten one.
        signature, train_op: What makes a step, as for `rewriting.rewrite`.
        initializer: Names of ops that give variables their first values, where there is no checkpoint.
        batch_size: Rows on each rank, where the graph leaves their number open.
        steps: Number of steps.
        inputs: By name, the inputs of all ranks under each other; random numbers if they are missing.
        seed: What decides the random numbers.
        engine: As of `job.load_ops`.

    Returns:
        A `Verification`; complete on rank 0, the only one that computes the reference.

    Raises:
        PoseidonError: If the graphs cannot be compared.
    """
    rank, size = job.load_ops(engine)
    original, rewritten = formats.read(source), formats.read(target)
    if not strip.is_rewritten(rewritten.graph_def):
        raise PoseidonError(f"'{target}' was not rewritten, so there is nothing to verify.")
    _check_repeatable(original, target)
    result = Verification(size, steps)
    if _bytes(strip.strip(rewritten.graph_def)) != _bytes(original.graph_def):
        result.failures.append(f"without what was inserted, '{target}' is not '{source}'")
        return result
    what = dict(signature=signature, train_op=train_op, initializer=initializer)
    listener = _Listener()
    listened = formats.read(target)
    listened.graph_def.CopyFrom(inserted.with_listeners(rewritten.graph_def, listener.token))
    with _unoptimised():
        real = running.runner(listened, **what)
        batches = [_batches(inputs, real.inputs, batch_size, size, seed + step) for step in range(steps)]
        begin = real.state()
        reference = None
        if rank == 0:
            reference = _Reference(original, rewritten, what, size, begin)
            _compare_joined(result, original, reference, what, batches[0], begin)
        for shards in batches:
            listener.clear()
            real.run(shards[rank])
            heard = listener.heard()
            _compare_ranks(result, heard)
            magnitudes = {key: _sum(f"verify/{i}", listener.magnitudes[key])
                          for i, key in enumerate(sorted(listener.magnitudes))}
            if rank == 0:
                expected = reference.step(shards, heard, result, magnitudes)
                _compare_states(result, real, expected)
        _compare_variables(result, real)
    if rank == 0:
        reference.finish(result)
    return result


class _Listener:
    """What the ops of the rewritten graph tell: the sums, and how large what they are made of is."""

    def __init__(self):
        self._functions = []
        self.clear()

    def clear(self):
        self._sums = collections.defaultdict(list)
        self.magnitudes = {}

    def token(self, site):
        """Returns the token of the function that listens to a site."""
        def hear(*tensors):
            sums, factors = tensors[:len(site.sums)], tensors[len(site.sums):]
            call = len(self._sums[site.name])
            self._sums[site.name].append([np.array(part) for part in sums])
            if factors:
                wide = [np.abs(np.asarray(f, np.float64)).reshape(-1, np.shape(f)[-1]) for f in factors]
                rows = np.array([len(wide[0])], np.float64)
                of_magnitude = wide[0].T @ wide[1] if len(wide) == 2 else wide[0].sum(0)
                self.magnitudes[site.name, call] = np.concatenate(
                    [rows, [_epsilon(factors[0].dtype)], of_magnitude.ravel()])
            return [np.asarray(part) for part in sums]

        self._functions.append(hear)  # TensorFlow keeps only a weak reference
        return script_ops._py_funcs.insert(hear)

    def heard(self):
        """Returns the sums of each site, one after the other."""
        return {site: list(calls) for site, calls in self._sums.items()}


class _Reference:
    """The original graph on the rows of each rank, in this process.

    Attributes:
        runner: What runs it.
        sites: The `inserted.InsertedSite`s by name.
    """

    def __init__(self, original, rewritten, what, size, begin):
        self.sites = {site.name: site for site in inserted.sites(rewritten.graph_def)}
        self._functions, self._known, self._noted, self._calls = [], {}, {}, {}
        graph = formats.read(original.path)
        graph.graph_def.CopyFrom(inserted.with_calls(rewritten.graph_def, self._token))
        self.runner = running.runner(graph, **what)
        self._size = size
        self._states = [begin] * size
        self._errors = {}

    def _token(self, site):
        def call(*tensors):
            number = self._calls[site.name]
            self._calls[site.name] += 1
            known = self._known[site.name]
            if number < len(known):
                return [np.asarray(part) for part in known[number]]
            self._noted.setdefault(site.name, [np.array(part) for part in tensors])
            return [np.asarray(part) for part in tensors]  # whatever: the step runs again

        self._functions.append(call)
        return script_ops._py_funcs.insert(call)

    def local(self, inputs, state):
        """Returns the first gradients of a step."""
        self._known = {name: [] for name in self.sites}
        return self._run(inputs, state)

    def _run(self, inputs, state):
        self._calls, self._noted = dict.fromkeys(self.sites, 0), {}
        self.runner.set_state(state)
        self.runner.run(inputs)
        return dict(self._noted)

    def step(self, shards, heard, result, magnitudes):
        """Runs a step on all shards, compares its gradients, and returns the state of rank 0 after it."""
        self._known = {name: [] for name in self.sites}
        for _ in range(_MAX_PASSES):
            notes, states = [], []
            for shard, state in zip(shards, self._states):
                notes.append(self._run(shard, state))
                states.append(self.runner.state())
            if not any(notes):
                break
            for name in notes[0]:
                self._compare(name, [note[name] for note in notes], heard, result, magnitudes)
        else:
            raise PoseidonError(f"A step of the original graph has more than {_MAX_PASSES} gradients of a variable.")
        for name, known in self._known.items():
            if len(known) != len(heard.get(name, ())):
                result.failures.append(f"'{name}' was synchronised {len(heard.get(name, ()))} times in a step, "
                                       f"expected {len(known)}")
        self._states = states
        return states[0]

    def _compare(self, name, parts, heard, result, magnitudes):
        site, number = self.sites[name], len(self._known[name])
        if number >= len(heard.get(name, ())):
            result.failures.append(f"'{name}' was not synchronised")
            self._known[name].append(parts[0])
            return
        sums = heard[name][number]
        error = _error(site, parts, sums, magnitudes.get((name, number)), self._size)
        scheme, values, largest = self._errors.get(name, (site.scheme, 0, 0.0))
        self._errors[name] = scheme, values + sums[-1].size, max(largest, error)
        self._known[name].append(sums)

    def finish(self, result):
        """Notes the errors that were found."""
        for name in self.sites:
            if name not in self._errors:
                result.failures.append(f"'{name}' was never synchronised")
        result.errors = self._errors
        result.failures += [f"the gradient of '{name}' is off by {error:.3g} times what rounding explains"
                            for name, (_, _, error) in self._errors.items() if not error <= 1]


def _error(site, parts, sums, magnitude, size):
    """Returns the largest error of a synchronised gradient, in parts of what rounding explains.

    The bound counts operations, each of which is off by half a unit in the last place of its result at most:
    for a sum of ranks its additions and the division; for a product of factors those of all rows too, once
    here and once in the reference.
    """
    divisor = size if site.rule == "mean" else 1
    of_ranks = size + 2  # additions, and the division
    if len(site.before) == 2:  # slices: indices and values
        shape = (1 + max((int(np.max(i, initial=0)) for i, _ in [*parts, sums])), *sums[1].shape[1:])
        actual = _dense(*sums, shape)
        operations = of_ranks + max(np.bincount(np.concatenate([i.ravel() for i, _ in parts])), default=0)
        scale = sum(_dense(i, np.abs(np.asarray(values, np.float64)), shape) for i, values in parts) / divisor
        wide = [_dense(indices, values, shape) for indices, values in parts]
    else:
        actual, operations = np.asarray(sums[0], np.float64), of_ranks
        wide = [np.asarray(part[0], np.float64) for part in parts]
        scale = sum(map(np.abs, wide)) / divisor
    epsilon = _epsilon(sums[-1].dtype)
    expected = sum(wide) / divisor
    if magnitude is not None:
        rows, epsilons, of_factors = magnitude[0], magnitude[1] / size, magnitude[2:]
        scale = np.maximum(of_factors.reshape(np.shape(scale)), scale)
        operations, epsilon = 2 * (rows + operations), max(epsilon, epsilons)
    if site.wire:
        epsilon = max(epsilon, 2.0**-8)
    if not np.all(np.isfinite(expected) == np.isfinite(actual)):
        return float("inf")
    difference = np.abs(actual - expected)
    bound = operations * epsilon * scale + np.finfo(np.float32).tiny
    return float(np.max(np.where(np.isfinite(difference), difference / bound, 0), initial=0))


def _dense(indices, values, shape):
    out = np.zeros(shape)
    np.add.at(out, np.asarray(indices).ravel(), np.asarray(values, np.float64).reshape(-1, *shape[1:]))
    return out


def _epsilon(dtype):
    """Returns the rounding error of a type: half a unit in the last place of 1."""
    return float(tf.experimental.numpy.finfo(tf.as_dtype(dtype).as_numpy_dtype).eps) / 2 if (
        np.dtype(dtype).name != "bfloat16") else 2.0**-9


def _compare_ranks(result, heard):
    """Notes sums that ranks do not have with the same bits."""
    names = sorted(heard)
    digests = _gather("verify/sums", [_digest(*(part for call in heard[name] for part in call)) for name in names])
    for name, column in zip(names, zip(*digests)):
        if len(set(column)) > 1:
            result.failures.append(f"ranks have different sums of '{name}'")


def _compare_variables(result, real):
    state = real.state()
    digests = _gather("verify/variables", [_digest(value) for value in state])
    for name, value, column in zip(real.variables, state, zip(*digests)):
        if len(set(column)) > 1:
            result.differing.append(name)
            if np.issubdtype(value.dtype, np.floating):
                result.failures.append(f"ranks have different values of '{name}'")


def _compare_states(result, real, expected):
    """Notes variables that are not what the original's own update makes of the same sums."""
    for name, value, wanted in zip(real.variables, real.state(), expected):
        if _digest(value) == _digest(wanted):
            continue
        value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
        difference = float(np.max(np.abs(value - wanted) / (np.abs(wanted) + 1e-30), initial=0))
        result.states[name] = difference
        result.failures.append(f"'{name}' is updated differently, by {difference:.3g} of its value")


def _compare_joined(result, original, reference, what, shards, begin):
    """Compares the gradients of the joined batch with those of its parts."""
    graph = formats.read(original.path)
    targets = graph.targets(what["signature"], what["train_op"])
    flat = flatten.flatten(graph.graph_def, targets)
    view = graph_lib.Graph(grappler.add_shapes(flat.graph_def))
    try:
        found = find_gradients.find_gradients(view, flat.is_saved)
        result.row_dependence = row_independence.why_not(view, [g.tensor for g in found.gradients])
    except PoseidonError as error:  # the user has said where gradients are
        result.row_dependence = f"that cannot be told ({error})"
    if any(shape.rank == 0 or shape.as_list()[0] is not None for _, shape in reference.runner.inputs.values()):
        result.row_dependence = result.row_dependence or "the graph fixes the number of its rows"
        return
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    whole = reference.local(joined, begin)
    parts = [reference.local(shard, begin) for shard in shards]
    epsilon = max((_epsilon(part[-1].dtype) for part in whole.values()), default=0)
    if any(_is_narrow(node) for node in view.graph_def.node):
        epsilon = 2.0**-9
    result.joined, result.joined_bound = 0.0, 1024 * epsilon
    means = {}
    for name, gradient in whole.items():
        site = reference.sites[name]
        if not site.name.startswith("state/") and len(gradient) == 1:
            divisor = len(shards) if site.rule == "mean" else 1
            means[name] = sum(np.asarray(part[name][0], np.float64) for part in parts) / divisor
    # Some gradients are zero but for rounding: that of an attention's keys' biases is.
    least = 1e-3 * np.linalg.norm([np.linalg.norm(mean) for mean in means.values()])
    for name, mean in means.items():
        norm = max(np.linalg.norm(mean), least)
        difference = np.linalg.norm(mean - np.asarray(whole[name][0], np.float64))
        result.joined = max(result.joined, float(difference / norm) if norm else 0.0)
    if not result.row_dependence and result.joined > result.joined_bound:
        result.failures.append("rows are independent, but the joined batch has another gradient: the loss is a sum "
                               "over rows (--rule=sum), or a gradient was taken in the wrong place (--gradients)")


def _is_narrow(node):
    return "T" in node.attr and node.attr["T"].type in (tf.bfloat16.as_datatype_enum, tf.half.as_datatype_enum)


def _check_repeatable(graph, path):
    """Refuses graphs whose random numbers cannot be drawn again."""
    bodies = [graph.graph_def.node, *(f.node_def for f in graph.graph_def.library.function)]
    for node in (node for body in bodies for node in body):
        if "Random" in node.op and "Stateless" not in node.op and node.op != "RandomShuffle":
            is_initial = any("init" in part.lower() for part in node.name.split("/"))
            if not is_initial:
                raise PoseidonError(f"'{path}' cannot be verified: node '{node.name}', a {node.op}, draws random "
                                    "numbers that cannot be drawn again; verify it without dropout.")


def _batches(inputs, specs, batch_size, size, seed):
    """Returns the inputs of each rank."""
    if inputs is None:
        return [running.random_inputs(specs, batch_size, [seed, rank]) for rank in range(size)]
    if set(inputs) != set(specs):
        raise PoseidonError(f"The inputs are {', '.join(sorted(inputs))}, but the step takes "
                            f"{', '.join(sorted(specs))}.")
    for name, value in inputs.items():
        if np.ndim(value) == 0 or len(value) % size:
            raise PoseidonError(f"Input '{name}' has shape {np.shape(value)}, which {size} ranks cannot share; give "
                                "a multiple of that many rows.")
    return [{name: np.split(np.asarray(value), size)[rank] for name, value in inputs.items()}
            for rank in range(size)]


@contextlib.contextmanager
def _unoptimised():
    """While TensorFlow runs graphs as they are: otherwise both would be rounded in other places."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)})


def _bytes(graph_def):
    return graph_def.SerializeToString(deterministic=True)


def _digest(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()


def _gather(site, digests):
    """Returns the digests of all ranks, in rank order."""
    communicator = runtime.communicator()
    if communicator is None or not digests:
        return [digests]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1)
    rows, = communicator.submit_factors(site, [mine])()
    return [[row.tobytes()[i:i + 32] for i in range(0, row.size, 32)] for row in rows]


def _sum(site, value):
    communicator = runtime.communicator()
    return value if communicator is None else communicator.sum(site, value)
