"""Training steps with emulated computing, which takes time but no processor; the exchanges are real.

Gradients and factors of the right sizes pass the ops, the runtime and the network of every system at the time at
which an accelerator would have made them. What an accelerator does with them afterwards takes its time as well.

There are two ways to fit a cluster into a smaller one. Dilation D makes everything take D times as long, so that
links of 1/D of the rate suffice (D. Gupta et al., "To infinity and beyond: time-warped network emulation", NSDI
2006). Shrinking by S divides the bytes of all tensors, and the rates of links, by S: in a product of K, M and N,
each is divided by the root of S, so that factors and gradient shrink alike.
"""

import dataclasses
import math
import types

import tensorflow as tf

from evaluation.workloads import zoo
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.graph_passes.find import exchanges as exchanges_lib
from tf_poseidon.graph_passes.graph import indexed_graph
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.ops import library


@dataclasses.dataclass(frozen=True)
class EmulatedLayer:
    """An emulated layer.

    Attributes:
        names, shapes: Those of its variables.
        seconds: Time of its forward pass. The errors of its inputs take as long, and so does its gradient.
        rows: K, if its gradient is a product of factors; else None.
        densities: The shares of these factors that are not zero.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    seconds: float
    rows: int | None
    densities: tuple[float, float]


_DENSE = 1.0, 1.0
_OF_COLUMNS = ("rows", "columns", "return")  # the kinds of exchanges of `EmulatedModel.gradients_of_columns`
SHARDS = "shards/"  # before the path of a variable, names the site at which ranks get each other's shards of it


class EmulatedModel:
    """A model on a hypothetical accelerator.

    Attributes:
        gradient_type: The type in which gradients that are no products are made; they are cast to float32.
        operations_per_second: How fast it makes products of the (shrunk) factors.
        step_seconds: How long a step takes without other ranks, dilated.
    """

    def __init__(self, name, batch_size, profile, dilation=1.0, shrink=1.0, has_zeros=False,
                 is_mixed=False):
        """Creates a model.

        Args:
            name: One of `zoo.MODELS`.
            batch_size: Rows on each worker.
            profile: A `profiles.Profile`.
            dilation, shrink: See above.
            is_mixed: Whether gradients that are no products are casts from bfloat16, as in mixed precision.
            has_zeros: Whether factors have as many zeros as `zoo.Model.densities` says; otherwise they have none.
        """
        densities = iter(zoo.MODELS[name].densities if has_zeros else ())
        self.name = name
        self.gradient_type = tf.bfloat16 if is_mixed else tf.float32
        per_operation = profile.operation_seconds(name) * dilation
        side = math.sqrt(shrink)
        self.step_seconds = dilation * profile.step_seconds(name, batch_size)
        self._ready_seconds = {site.name: per_operation * site.operations
                               for site in zoo.sites(name, batch_size)}
        self._layers, self._needed_seconds, forward = [], {}, 0.0
        for layer in zoo.describe(name):
            names = tuple(f"{layer.name}/{weight}" for weight, _ in layer.weights)
            shapes, rows = [shape for _, shape in layer.weights], None
            if layer.rows is not None:
                rows = _part(layer.rows * batch_size, side)
                shapes = [tuple(_part(size, side) for size in shape) for shape in shapes]
            elif shrink != 1:
                shapes = [(_part(math.prod(shape), shrink),) for shape in shapes]
            self._layers.append(EmulatedLayer(names, tuple(shapes),
                                              per_operation * batch_size * layer.operations, rows,
                                              next(densities, _DENSE) if rows else _DENSE))
            self._needed_seconds.update(dict.fromkeys(names, forward))
            forward += self._layers[-1].seconds
        self.operations_per_second = profile.gflops * 1e9 / (dilation * side**3)

    @property
    def are_divided(self):
        """Of each of `variables`, whether its layer has so many outputs that it may better be divided by them."""
        return [_has_many_outputs(layer) for layer in self._layers for _ in layer.names]

    def variables(self, prefix):
        """Returns stand-ins for the variables, with what a strategy needs to know; names begin with `prefix`."""
        return [types.SimpleNamespace(path=f"{prefix}/{name}", shape=tf.TensorShape(shape))
                for layer in self._layers for name, shape in zip(layer.names, layer.shapes)]

    @property
    def values(self):
        """The elements of the gradients of `variables`: ones, and sums of ones for the biases of products."""
        return [layer.rows if layer.rows and len(shape) == 1 else 1
                for layer in self._layers for shape in layer.shapes]

    @property
    def are_products(self):
        """Of each of `variables`, whether its gradient is a product of factors, or the sum of the rows of one."""
        return [layer.rows is not None for layer in self._layers for _ in layer.names]

    def has(self, name):
        """Returns whether a site, given by name, is a gradient of one of `variables`."""
        return _within(name) in self._ready_seconds

    def ready_seconds(self, name):
        """Returns when the gradient of a site is ready: dilated seconds after the start of the step."""
        return self._ready_seconds[_within(name)]

    def exchange_seconds(self, name):
        """Returns when an exchange other than a gradient's is ready: dilated seconds after the start of the step."""
        kind, _, path = name.partition("/")
        of_variable = path.partition("/")[2]
        if kind not in _OF_COLUMNS:
            return self.ready_seconds(name)
        layer = next(layer for layer in self._layers if layer.names[0] == of_variable)
        forward, later = self._needed_seconds[of_variable], sum(
            other.seconds for other in self._layers[self._layers.index(layer) + 1:])
        before = {"rows": 0.0, "columns": layer.seconds, "return": 2 * layer.seconds + 3 * later}[kind]
        return forward + before

    def needed_seconds(self, name):
        """Returns when the next step needs the sum of a gradient: dilated seconds after the start of that step."""
        return self._needed_seconds[_within(name)]

    def gradients_of_columns(self, prefix, ranks):
        """Returns the same as `gradients`, of a rank that has some columns of each layer with many outputs.

        Rows of all ranks go in, what normalises their outputs is exchanged, and the errors of its own rows come back.
        Gradients of such layers are ones, if all these have arrived.

        Args:
            prefix: Of the names of the variables.
            ranks: The number of ranks.
        """
        counts = tf.ones([ranks], tf.int64)
        token, arrived, seconds = [], {}, 0.0
        for layer in self._layers:
            if not _has_many_outputs(layer):
                seconds += layer.seconds
                continue
            name = f"{prefix}/{layer.names[0]}"
            made, rows = self._kernel(token, seconds, [(), (layer.rows, layer.shapes[0][0])])
            gathered = _gathered(rows, f"rows/{name}")
            made, found = self._kernel([made, gathered], layer.seconds, [(), (1, 3 * ranks * layer.rows)])
            of_all = _gathered(found, f"columns/{name}")
            arrived[layer.names[0]] = tf.reduce_min(gathered) * tf.reduce_min(of_all)
            token, seconds = [made, of_all], 0.0
        token, = self._kernel(token, seconds, [()])
        pending, results = 0.0, []
        for layer in reversed(self._layers):
            if _has_many_outputs(layer):
                name = f"{prefix}/{layer.names[0]}"
                token, summand = self._kernel([token], pending + layer.seconds,
                                              [(), (ranks * layer.rows, layer.shapes[0][0])])
                rows = ops.reduce_scatter_rows(summand, counts, f"return/{name}")
                gradient = arrived[layer.names[0]] * tf.reduce_min(rows) / ranks
                token, = self._kernel([token, rows], layer.seconds, [()])
                results, pending = [gradient] * len(layer.names) + results, 0.0
                continue
            token, gradients = self._layer_gradients(layer, token, pending, _matmul)
            results, pending = gradients + results, layer.seconds
        return results

    def gradients(self, with_products=False, after=None):
        """Returns a gradient for each variable, as backpropagation makes them.

        Args:
            with_products: Whether gradients with factors are matrix products, for an `EmulatingPass` to find.
            after: The sums of the step before, one for each variable: each layer waits for its own. None for none.
        """
        product = _matmul if with_products else self._product
        # Only the token orders the ops: it stands for what the accelerator does next.
        if after is None:
            token, = self._kernel([], sum(layer.seconds for layer in self._layers), [()])
        else:
            tokens, sums = [], iter(after)
            for layer in self._layers:
                tokens = self._kernel([*tokens, *(next(sums) for _ in layer.names)], layer.seconds, [()])
            token, = tokens
        pending = 0.0
        results = []
        for layer in reversed(self._layers):
            token, gradients = self._layer_gradients(layer, token, pending, product)
            pending = layer.seconds
            results = gradients + results
        return results

    def _layer_gradients(self, layer, token, pending, product):
        """Returns (the next token, the gradients of a layer)."""
        if layer.rows is None:
            token, *gradients = self._kernel([token], pending + layer.seconds, [(), *layer.shapes],
                                             dtype=self.gradient_type)
            return token, [tf.cast(gradient, tf.float32) for gradient in gradients]
        (m, n), *others = layer.shapes
        token, u, v = self._kernel([token], pending, [(), (layer.rows, m), (layer.rows, n)], [1.0, *layer.densities])
        return token, [product(u, v), *(tf.raw_ops.BiasAddGrad(out_backprop=v) for _ in others)]

    def _product(self, u, v):
        return library.load()[0].poseidon_emulated_product(
            u=u, v=v, operations_per_second=self.operations_per_second)

    def _kernel(self, after, seconds, shapes, densities=(), dtype=tf.float32):
        return library.load()[0].poseidon_emulated_kernel(
            after=after, T=[tf.float32, *[dtype] * (len(shapes) - 1)], shapes=shapes, seconds=seconds,
            densities=densities)


@dataclasses.dataclass(frozen=True)
class EmulatedPlanner(planning.Planner):
    """Plans with the times of an emulated model, since its graph has no arithmetic to count.

    Attributes:
        model: The `EmulatedModel`.
    """

    model: EmulatedModel | None = None

    def plan(self, sites, operations=None, exchanges=(), steps=1):
        if not all(self.model.has(site.name) for site in sites):  # those of Horovod and TensorFlow have other names
            return super().plan(sites, exchanges=exchanges, steps=steps)
        per_second = self.cluster.gflops * 1e9
        timed = [dataclasses.replace(site, operations=per_second * self.model.ready_seconds(site.name),
                                     needed=per_second * self.model.needed_seconds(site.name))
                 for site in sites]
        exchanges = [dataclasses.replace(each, operations=per_second * self.model.exchange_seconds(each.site))
                     for each in exchanges]
        return super().plan(timed, per_second * self.model.step_seconds, exchanges, steps)


class EmulatingPass(grappler.GraphPass):
    """The passes, after one that says as the partitioner does what steps exchange; then products become waits."""

    def rewrite(self, graph_def):
        for node in graph_def.node:
            if node.op in exchanges_lib.OF_SHARDS:
                node.attr[indexed_graph.MEANWHILE].s = b"computes"
            elif node.op in ("PoseidonAllGather", "PoseidonReduceScatterRows"):
                node.attr[indexed_graph.MEANWHILE].s = b"waits"
        rewritten = super().rewrite(graph_def)
        for node in rewritten.node if rewritten else ():
            if node.op in ("MatMul", "SufficientFactorOuterProduct"):
                node.op = "PoseidonEmulatedProduct"
                for name in set(node.attr) - {provenance.ATTRIBUTE}:
                    del node.attr[name]
                node.attr["operations_per_second"].f = self.session.planner.model.operations_per_second
        return rewritten


def kv_pair_bytes(shrink, given=None, dedicated_servers=0):
    """Returns the size of KV pairs, shrunk as tensors are.

    Args:
        shrink: See above.
        given: The size before, as of PoseidonStrategy; None: the default.
        dedicated_servers: As of PoseidonStrategy; the default depends on it.
    """
    whole = options.JobOptions(kv_pair_bytes=given, dedicated_servers=dedicated_servers).kv_pair_bytes
    return max(4096, int(whole / shrink) // 8 * 8)


def _has_many_outputs(layer):
    return layer.rows is not None and zoo.has_many_outputs(layer.shapes[0])


def _gathered(rows, site):
    return library.load()[0].poseidon_all_gather(value=rows, contributes=True, site=site)


def _matmul(u, v):
    return tf.matmul(u, v, transpose_a=True)


def _within(name):
    """Returns the name of a site without the prefix of `variables`, also of one that gathers shards."""
    return name.removeprefix(SHARDS).partition("/")[2]


def _part(size, divisor):
    return max(1, round(size / divisor))
