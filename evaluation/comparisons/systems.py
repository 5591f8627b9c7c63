"""The systems of a benchmark: ways to train the same model on several ranks, each with its own step.

poseidon, poseidon-ps, poseidon-sfb and poseidon-paper are this project, by policy, and poseidon-hfb by half factors
wherever possible; horovod is Horovod over Gloo with one HorovodAllreduce per gradient, and mwms is TensorFlow's ring
with one CollectiveReduceV2 for all gradients, concatenated as in MultiWorkerMirroredStrategy. With "+merge" small
messages of ours wait for each other; with "+overlap" eight steps are one function, in which they overlap; with "+zeros"
factors travel with their zeros. With "+wide" gradients travel as they are after a cast. With "+shards", which can be
emulated only, each rank updates a part of each variable, and what comes back are new weights; with "+columns", emulated
likewise, layers with many outputs are divided by these. With "+enable" the other
two exchange factors as after poseidon.enable(). single exchanges nothing.

For models with batch normalisation, only ours also average the moving statistics over all ranks, as Keras' `fit`
does under PoseidonStrategy: some more messages in each step.
"""

import contextlib
import dataclasses
import re

import keras
import numpy as np
import tensorflow as tf

from evaluation.workloads import emulation
from evaluation.workloads import zoo
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.job import agreement
from tf_poseidon.job import runtime

# Ours: a policy, and pins.
POLICIES = {"poseidon": ("auto", ()), "poseidon-ps": ("ps", ()), "poseidon-sfb": ("sfb", ()),
            "poseidon-hfb": ("ps", (("*", planning.HFB),)), "poseidon-paper": ("paper", ())}
PEERS = ("horovod", "mwms")
SINGLE = "single"
OVERLAPPING = 8  # steps in one function
NAMES = (SINGLE, *(name + suffix for name in POLICIES
                   for suffix in ("", "+merge", "+overlap", "+zeros", "+wide", "+shards", "+columns")),
         *(name + suffix for name in PEERS for suffix in ("", "+enable")))


@dataclasses.dataclass
class System:
    """A way to train.

    Attributes:
        name: One of `NAMES`.
        step: Runs its steps; returns the argument of the `check` of its replica.
        replica: The model that it trains.
        plan: The `planning.Plan` that it follows, None if it has none.
        steps: How many steps a call of `step` runs.
    """

    name: str
    step: object
    replica: object
    plan: planning.Plan | None = None
    steps: int = 1


class RealReplica:
    """A Keras model, and a batch of random rows.

    Args:
        system: Prefix of the names of its variables.
        name: One of `zoo.MODELS`.
        batch_size, rank, ranks: Rows of each rank, this rank's number, and the number of ranks.
        initial: The initial weights of all replicas, a list that the first replica fills.
    """

    # Allowed difference between systems, relative to the change of a variable: they sum in different orders.
    _TOLERANCE = 0.01

    def __init__(self, system, name, batch_size, rank, ranks, initial):
        keras.utils.set_random_seed(1)
        described = zoo.MODELS[name]
        with keras.name_scope(system):
            self._model = described.build()
        # Adam would amplify rounding: its steps turn values that are nearly zero into steps of full size.
        self._optimizer = keras.optimizers.SGD(0.01)
        self._optimizer.build(self._model.trainable_variables)
        if not initial:
            initial.extend(variable.numpy() for variable in self.variables)
        self._initial = initial
        self._ranks = ranks
        rng = np.random.default_rng(rank)
        self._x = tf.constant(rng.normal(size=(batch_size, *described.inputs)), tf.float32)
        positions = self._model.output_shape[1:-1]
        self._y = tf.constant(rng.integers(described.classes, size=(batch_size, *positions)), tf.int32)

    @property
    def variables(self):
        return self._model.trainable_variables

    def gradients(self, with_products=True, after=None):
        """Returns the gradients of this rank's part of the mean loss over all ranks."""
        del with_products, after  # they always are products, and read the variables
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                self._y, self._model(self._x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses) / self._ranks
        return tape.gradient(loss, self.variables)

    def graph_pass(self, *planned, **options):
        """Returns the passes for its step, planning with what `planning.Planner` takes.

        Args:
            *planned: Same as in `planning.Planner`.
            **options: Same as in `session.RewriteSession`.
        """
        return grappler.GraphPass(session.RewriteSession(planning.Planner(*planned), **options))

    def synchronize(self, gradients, strategy):
        """Returns gradients unchanged: in a strategy's step, the optimizer synchronises them."""
        del strategy
        return gradients

    def apply(self, gradients):
        """Trains with synchronised gradients; its result is not used."""
        self._optimizer.apply(gradients, self.variables)
        return tf.constant(0)

    def check(self, result, plan, communicator, reference):
        """Raises AssertionError unless weights are equal on all ranks, and have moved like the reference's."""
        del result, plan
        moves = [(mine.numpy().astype(np.float64) - first, other.numpy().astype(np.float64) - first)
                 for mine, other, first in zip(self.variables, reference.variables, self._initial, strict=True)]
        mean_square = sum(np.sum(theirs**2) for _, theirs in moves) / sum(theirs.size for _, theirs in moves)
        if mean_square == 0:
            raise AssertionError("No weight has moved in the first steps, expected some to be trained: there is "
                                 "nothing to compare.")
        for variable, first, (mine, theirs) in zip(self.variables, self._initial, moves, strict=True):
            value = variable.numpy()
            np.testing.assert_array_equal(
                value, communicator.broadcast(f"verify/{variable.path}", value),
                f"{variable.path} differs between ranks")
            # Gradients that are 0 except for rounding, like those of biases before a normalisation, are noise.
            noise = 1e-4 * np.sqrt(mean_square * first.size) + 2.0**-22 * np.linalg.norm(first)
            difference, allowed = np.linalg.norm(mine - theirs), self._TOLERANCE * np.linalg.norm(theirs) + noise
            if not difference <= allowed:
                raise AssertionError(
                    f"{variable.path} has moved by {np.linalg.norm(mine):.3g}, by {difference:.3g} otherwise than "
                    f"with the first system, expected at most {allowed:.3g}: one of them trains wrongly.")


class EmulatedReplica:
    """An emulated model, see emulation.py."""

    def __init__(self, system, model, ranks):
        self._model = model
        self._ranks, self._prefix = ranks, system
        self._are_divided = [False] * len(model.are_divided)
        self.variables = model.variables(system)
        self.gradients = model.gradients

    def divide(self):
        """Divides layers with many outputs by these, from now on."""
        self._are_divided = self._model.are_divided
        self.gradients = lambda with_products, after: self._model.gradients_of_columns(self._prefix, self._ranks)

    def graph_pass(self, *planned, **options):
        """Same as `RealReplica.graph_pass`."""
        planner = emulation.EmulatedPlanner(*planned, model=self._model)
        return emulation.EmulatingPass(session.RewriteSession(planner, **options))

    def synchronize(self, gradients, strategy):
        """Returns the gradients summed over all ranks by a strategy, except those of divided layers."""
        whole = [i for i, is_divided in enumerate(self._are_divided) if not is_divided]
        sums = strategy.synchronize([gradients[i] for i in whole], [self.variables[i] for i in whole])
        results = list(gradients)
        for i, of_all in zip(whole, sums, strict=True):
            results[i] = of_all
        return results

    def update_shards(self, gradients, strategy):
        """Returns new weights, in the type that gradients are cast from; of products the gradients, summed as above.

        A rank's shard of a weight is that of the sum: as if it had been 0, and the rate of SGD -1.
        """
        results = []
        for variable, gradient, is_product in zip(self.variables, gradients, self._model.are_products, strict=True):
            if is_product:  # as with shard_update where factors travel
                results += strategy.synchronize([gradient], [variable])
                continue
            own = ops.reduce_scatter(gradient, variable.path, variable.path, shape=variable.shape)
            results.append(ops.gather_shards(tf.cast(own, self._model.gradient_type),
                                             emulation.SHARDS + variable.path, variable.shape, variable.path))
        return results

    def apply(self, gradients):
        """Waits for all gradients; returns the minimum and maximum of each, sampled every 4 KiB."""
        samples = [tf.cast(tf.reshape(gradient, [-1])[::1024], tf.float32) for gradient in gradients]
        return tf.stack([[tf.reduce_min(sample), tf.reduce_max(sample)] for sample in samples])

    def check(self, result, plan, communicator, reference):
        """Raises AssertionError unless all gradients were summed over all ranks.

        Products of all ranks' factors are ones, and as many are expected as the plan has; the op that stands for
        them has checked that all rows were there.
        """
        del communicator, reference
        of_factors = planning.SFB, planning.HFB
        expected_products = sum(self._are_divided) + (
            sum(d.scheme in of_factors and not d.leader for d in plan.decisions) if plan else 0)
        products = 0
        for variable, (least, largest), own in zip(self.variables, np.asarray(result), self._model.values,
                                                   strict=True):
            total = self._ranks * own
            products += least == largest == 1 != total
            if not (least == largest and least in (total, 1)):
                raise AssertionError(f"{variable.path} has a gradient of {least:g} to {largest:g}, expected "
                                     f"{total}, the sum of {self._ranks} ranks; the exchange has lost some.")
        if self._ranks > 1 and products != expected_products:
            raise AssertionError(f"{products} gradients are made of factors or of one rank alone, expected "
                                 f"{expected_products} as the plan has; the others were not summed.")


def make(names, make_replica, cluster, strategy, libraries, **of_session):
    """Returns the `System`s by name; each has run one step.

    Args:
        names: Some of `NAMES`.
        make_replica: Makes a replica of the model for a system, given the prefix of the names of its
            variables. Every system has its own names of sites: a site that another function exchanges
            differently in between travels dense at first.
        cluster: The `planning.Cluster`.
        strategy: The `PoseidonStrategy`.
        libraries: Horovod and TensorFlow's strategy, by the names in `PEERS`.
        **of_session: More options of ours, for `session.RewriteSession`.
    """
    # All models first: setting a seed makes TensorFlow optimize all functions again.
    replicas = {}
    for name in names:
        with strategy.scope() if name.partition("+")[0] in POLICIES else contextlib.nullcontext():
            replicas[name] = make_replica(re.sub(r"\W", "_", name))
    return {name: _make(name, replica, cluster, strategy, libraries, **of_session)
            for name, replica in replicas.items()}


def _make(name, replica, cluster, strategy, libraries, **of_session):
    kind, _, suffix = name.partition("+")
    if kind == SINGLE:
        return _started(System(name, tf.function(lambda: replica.apply(replica.gradients())), replica))
    if kind in POLICIES:
        writer = runtime.engine().writer
        comparison = agreement.CommunicatorComparison(runtime.communicator()) if writer.has_to_agree else None
        if suffix == "wide":
            writer = type("Wide", (writer,), {"sums_narrow": False})
        passes = replica.graph_pass(cluster, *POLICIES[kind], suffix == "merge", writer=writer,
                                    comparison=comparison, **of_session)
        if suffix == "zeros":
            passes.rewrite = _with_zeros(passes.rewrite)
        if suffix == "columns":
            replica.divide()
        steps = OVERLAPPING if suffix == "overlap" else 1
        synchronize = replica.update_shards if suffix == "shards" else replica.synchronize
        function = _poseidon_steps(replica, synchronize, strategy, steps)
        return _started(System(name, function, replica, steps=steps), passes)
    library = libraries[kind]
    reduce = _horovod_sum(library) if kind == "horovod" else _tensorflow_sum(library)
    enable = suffix == "enable"

    @tf.function
    def step():
        return replica.apply(reduce(replica.gradients(with_products=enable)))

    if not enable:
        return _started(System(name, step, replica))
    comparison = (agreement.CommunicatorComparison(runtime.communicator()) if kind == "horovod" else
                  agreement.CoordinationServiceComparison(strategy.rank, strategy.num_replicas_in_sync, timeout_s=60))
    passes = replica.graph_pass(cluster, "auto", is_foreign=True, comparison=comparison)
    return _started(System(name, step, replica), passes)


def _with_zeros(rewrite):
    """Returns a function that rewrites graphs whose factors travel with their zeros."""
    def rewrite_with_zeros(graph_def):
        rewritten = rewrite(graph_def)
        for node in rewritten.node if rewritten else ():
            if node.op == "PoseidonSend":
                node.attr["least_saving"].f = 1
        return rewritten
    return rewrite_with_zeros


def _poseidon_steps(replica, synchronize, strategy, number):
    @tf.function
    def steps():
        sums, result = None, None
        for _ in range(number):
            def step(before=sums):
                synchronised = synchronize(replica.gradients(with_products=True, after=before), strategy)
                return synchronised, replica.apply(synchronised)
            sums, result = strategy.run(step)
        return result
    return steps


def _started(system, passes=None):
    """Returns a system after its first step, in which `passes` rewrite it."""
    if passes is None:
        system.step()
        return system
    with passes.registered():
        system.step()
    if passes.plan is None or passes.plan.refusal:
        raise RuntimeError(f"{system.name} was not rewritten: {passes.plan}")
    system.plan = passes.plan
    return system


def _horovod_sum(hvd):
    def reduce(gradients):
        return [hvd.allreduce(g, op=hvd.Sum, name=f"gradient{i}") for i, g in enumerate(gradients)]
    return reduce


def _tensorflow_sum(mirrored):
    def reduce(gradients):
        def replica():  # it requires tensors that were made on its device
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", [tf.identity(g) for g in gradients])
        return mirrored.run(replica)
    return reduce
