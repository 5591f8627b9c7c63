"""The exchange ops: sums, shards and broadcasts over the ranks of the job, in eager code and in graphs.

Every exchange in a step has its own name, the same on all ranks; that of a gradient is its site.

Tests: tests/communicator/test_ops.py, tests/communicator/test_shards.py, tests/graphs/test_partition_own.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import ctypes
import functools
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.ops import library

T = TypeVar("T")

_GPU = "/device:GPU:0"
SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def sync(gradient: tf.Tensor, site: str, contributes: tf.Tensor | bool = True, shape: tf.TensorShape | None = None,
         wire_dtype: str | None = None) -> tf.Tensor:
    """Returns the sum of one variable's gradient over all ranks.

    This is the marker of a gradient site, and already a complete synchronisation. `strategy.run` and loops of programs
    call it; in a function of one process the partitioner writes the same op.

    Args:
        gradient: Dense tensor of any shape; half, bfloat16, float, double, int32 or int64.
        site: The variable's path, and which of its uses in the step this is.
        contributes: Scalar bool; False leaves this rank out of the sum.
        shape: The gradient's shape, as far as it is known, for graph passes.
        wire_dtype: "bfloat16" rounds float and double to it for the wire; None never rounds.

    Returns:
        A tensor like `gradient`, with the same bits on all ranks.
    """
    with _beside("PoseidonSync", gradient):
        return _unordered(library.load()[0].poseidon_sync(
            gradient=gradient, contributes=contributes, site=site,
            shape=tf.TensorShape(shape), wire_dtype=wire_dtype or "", eager=tf.executing_eagerly()))


def shard(tensor: tf.Tensor, layout: str, owner: int = -1, divided: int = -1, columns: int = 0) -> tf.Tensor:
    """Returns this rank's shard of a tensor that it has whole: the elements that it owns.

    Args:
        tensor: Numeric or bool tensor of any shape.
        layout: The variable's path. Tensors with the same number of elements and the same of these arguments have the
            same shards, whatever their types.
        owner: The rank that owns all elements; -1 spreads them over the servers.
        divided: The dimension of a matrix of which each server owns a range: 0 for rows, 1 for columns; -1 if the
            servers own KV pairs.
        columns: The columns of this matrix.

    Returns:
        [n], of the tensor's type; empty where this rank owns nothing.
    """
    with _beside("PoseidonShard", tensor):
        return _unordered(library.load()[0].poseidon_shard(
            tensor=tensor, layout=layout, owner=owner, divided=divided, columns=columns))


def shard_size(elements: int, layout: str, owner: int = -1, divided: int = -1, columns: int = 0) -> tf.Tensor:
    """Returns the number of elements of this rank's `shard` of a tensor, a scalar.

    Args:
        elements: The number of elements of the tensor.
        layout, owner, divided, columns: Same as in `shard`.
    """
    with tf.device("CPU:0"):
        return library.load()[0].poseidon_shard_size(
            layout=layout, owner=owner, divided=divided, columns=columns, elements=elements)


def column_range(columns: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (the first, the number) of the columns of some that this rank owns, scalars of int64."""
    with tf.device("CPU:0"):
        begin, count = library.load()[0].poseidon_column_range(columns=columns)
        return begin, count


def reduce_scatter(gradient: tf.Tensor, site: str, layout: str, owner: int = -1, contributes: tf.Tensor | bool = True,
                   shape: tf.TensorShape | None = None, wire_dtype: str | None = None,
                   dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns this rank's `shard` of the sum of one variable's gradient over all ranks.

    Args:
        gradient, site, contributes, shape, wire_dtype: Same as in `sync`.
        layout, owner: Same as in `shard`.
        dtype: That of the sum: float32 for half and bfloat16, not rounded; None for the gradient's.

    Returns:
        [n], of `dtype`, with the bits that `sync` gives these elements.
    """
    with _beside("PoseidonReduceScatter", gradient):
        return _unordered(library.load()[0].poseidon_reduce_scatter(
            gradient=gradient, contributes=contributes, site=site, layout=layout, owner=owner,
            Tout=dtype or gradient.dtype, shape=tf.TensorShape(shape), wire_dtype=wire_dtype or "",
            eager=tf.executing_eagerly()))


def reduce_scatter_rows(summand: tf.Tensor, counts: tf.Tensor, site: str) -> tf.Tensor:
    """Returns the sum over all ranks of this rank's own rows of a tensor with the rows of all ranks.

    Args:
        summand: [n, ...], of the same shape on all ranks; of a type that `sync` takes. For each row of the batch it has
            as many elements of dimension 0, one or more, the rows of the ranks one after the other.
        counts: [ranks] int64, the same on all ranks: how many rows of the batch each rank has.
        site: A name that is the same on all ranks and not in flight twice.

    Returns:
        Like `summand`, this rank's part of dimension 0, with the bits that `sync` gives it. A rank without rows gets a
        padding row of zeros, unless no rank has rows.
    """
    with _beside("PoseidonReduceScatterRows", summand):
        return _unordered(library.load()[0].poseidon_reduce_scatter_rows(summand=summand, counts=counts, site=site))


def gather_shards(own_shard: tf.Tensor, site: str, shape: tf.TensorShape, layout: str, owner: int = -1,
                  divided: int = -1, columns: int = 0) -> tf.Tensor:
    """Returns the whole tensor of which each rank has its `shard`.

    Args:
        own_shard: [n], this rank's; numeric or bool.
        site: A name that is the same on all ranks and not in flight twice.
        shape: The tensor's shape, fully known.
        layout, owner, divided, columns: Same as in `shard`.

    Returns:
        A tensor of this shape, with the same bits on all ranks.
    """
    with tf.device("CPU:0") if divided >= 0 else _beside("PoseidonGatherShards", own_shard):
        return _unordered(library.load()[0].poseidon_gather_shards(
            shard=own_shard, site=site, layout=layout, owner=owner, divided=divided, columns=columns, shape=shape))


def sync_slices(gradient: tf.IndexedSlices, shape: tf.TensorShape, site: str, contributes: tf.Tensor | bool = True,
                wire_dtype: str | None = None) -> tf.IndexedSlices:
    """Returns the sum over all ranks of one variable's gradient in slices.

    Like `sync`, this is a marker and already a complete synchronisation.

    Args:
        gradient: `tf.IndexedSlices` of half, bfloat16, float or double. An index may occur several times.
        shape: The shape of the variable, fully known.
        site, contributes, wire_dtype: Same as in `sync`.

    Returns:
        `tf.IndexedSlices` in which every index occurs once, with the same bits on all ranks.
    """
    shape = tf.TensorShape(shape)
    dtype = gradient.values.dtype
    travels_as = tf.as_dtype(wire_dtype) if wire_dtype and dtype.size > 2 else dtype
    # Half the bytes of an index: TensorFlow always uses 64 bits.
    index_type = tf.int32 if shape[0] < 2**31 else tf.int64
    with _beside("PoseidonSyncSlices", gradient.values):
        indices, values = library.load()[0].poseidon_sync_slices(
            indices=tf.cast(gradient.indices, index_type),
            values=tf.cast(gradient.values, travels_as), contributes=contributes, site=site,
            shape=shape, eager=tf.executing_eagerly())
        return tf.IndexedSlices(tf.cast(_unordered(values), dtype), indices,
                                tf.constant(shape.as_list()))


def dense_slices(gradient: tf.IndexedSlices, shape: tf.TensorShape) -> tf.Tensor:
    """Returns `tf.IndexedSlices` as a tensor of a known shape, adding rows in their order."""
    with _beside("PoseidonDenseSlices", gradient.values):
        return library.load()[0].poseidon_dense_slices(
            indices=gradient.indices, values=gradient.values, shape=shape)


def all_gather(value: tf.Tensor | tf.RaggedTensor, name: str,
               contributes: tf.Tensor | bool = True) -> tf.Tensor | tf.RaggedTensor:
    """Returns the rows of all ranks, in rank order.

    Args:
        value: Tensor of any type, including strings, with rows that are not empty; or a `tf.RaggedTensor`
            of such. Ranks may have different numbers of rows.
        name: Same as in `all_reduce`.
        contributes: Scalar bool; False leaves this rank's rows out.

    Returns:
        The same kind of tensor as `value`, with the rows of all ranks.
    """
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(
            all_gather(value.values, f"{name}/values", contributes),
            all_gather(value.row_lengths(), f"{name}/lengths", contributes))
    if value.dtype == tf.string:
        return _all_gather_texts(value, name, contributes)
    with _beside("PoseidonAllGather", value):
        return library.load()[0].poseidon_all_gather(
            value=value, contributes=contributes, site=name)


def _all_gather_texts(value: tf.Tensor, name: str, contributes: tf.Tensor | bool) -> tf.Tensor:
    """Gathers the bytes of all texts, and the length of each."""
    with tf.device("CPU:0"):
        texts = tf.reshape(value, [-1])
        lengths = all_gather(tf.strings.length(texts), f"{name}/lengths", contributes)
        numbers = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
        numbers = all_gather(numbers, f"{name}/bytes", contributes)
        characters = tf.gather([bytes([i]) for i in range(256)], tf.cast(numbers, tf.int32))
        ragged = tf.RaggedTensor.from_row_lengths(characters, lengths)
        shape = tf.concat([[-1], tf.shape(value)[1:]], 0)
        return tf.reshape(tf.strings.reduce_join(ragged, axis=-1), shape)


def all_reduce(value: tf.Tensor, name: str, contributes: tf.Tensor | bool = True, ordered: bool = True) -> tf.Tensor:
    """Returns the sum of a tensor over all ranks; like `sync`, but not of a gradient.

    Args:
        value: Dense tensor of any shape and of a type that `sync` takes.
        name: Name of the exchange.
        contributes: Same as in `sync`.
        ordered: Whether to run in program order in a `tf.function`, so that its name may be used again there;
            False starts it as soon as the value is ready, as `sync` does.

    Returns:
        A tensor like `value`, with the same bits on all ranks.

    Raises:
        PoseidonError: If values of this type cannot be summed.
    """
    if value.dtype not in SUMMABLE:
        raise GraphError(
            f"'{name}' has dtype {value.dtype.name}, which cannot be summed over ranks; cast it to "
            f"one of {', '.join(dtype.name for dtype in SUMMABLE)}.")
    with _beside("PoseidonAllReduce", value):
        total = library.load()[0].poseidon_all_reduce(
            value=value, contributes=contributes, site=name)
        return total if ordered else _unordered(total)


def own(value: tf.Tensor, joins: str = "rows") -> tf.Tensor:
    """Begins a computation of each rank over its own rows only, in a function that is partitioned.

    Everything computed from the result sees only this rank's rows, up to `join`. Every tensor whose gradient is needed
    must enter by this op. A function that is not partitioned computes over all rows.

    Args:
        value: Rows; or a value that all ranks have, such as a variable's.
        joins: How its gradient leaves again: "rows" for rows, "sum" for a value that all ranks have.

    Returns:
        A tensor like `value`.
    """
    return library.load()[0].poseidon_own(value=value, joins=joins)


def join(value: tf.Tensor, by: str) -> tf.Tensor:
    """Ends a computation that `own` begins.

    Args:
        value: A tensor that this rank has computed from its own rows.
        by: "rows": it has a row per row of this rank; "sum": the ranks' values are summed; "mean": the mean of the
            ranks' floating-point values, weighted by their rows.

    Returns:
        A tensor like `value`, of all ranks.
    """
    return library.load()[0].poseidon_join(own=value, by=by)


def broadcast(value: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
    """Returns rank `root`'s `value`, a numeric or bool tensor of the same shape on all ranks."""
    value = tf.convert_to_tensor(value)
    with _beside("PoseidonBroadcast", value):
        return library.load()[0].poseidon_broadcast(value=value, site=name, root=root)


def agree(sites: Iterable[str], rows: int | None, static_rows: int | None, strict: bool, partition: str = "",
          steps: int = 1, global_rows: int | None = None, function: int = -1) -> None:
    """Compares with rank 0, once, what the function under construction synchronises.

    The graph pass also reads here what it must know about the step.

    Args:
        sites: A line of text per site.
        rows: Rows of a full global batch that one rank computes, rounded up, or None.
        static_rows: Rows that this rank's tensors are known to have, or None.
        strict: Whether to fail if the graph was not rewritten.
        partition: What the partitioner says of the step, as text for the plan.
        steps: How many steps the function makes; `sites` are those of the first one.
        global_rows: Rows of a full global batch, or None.
        function: The number by which the graph pass knows the function, -1 if nobody asks for its plan.
    """
    with tf.device("CPU:0"):
        library.load()[0].poseidon_agree(
            sites="\n".join(sites), rows=-1 if rows is None else rows,
            static_rows=-1 if static_rows is None else static_rows, strict=strict, partition=partition,
            steps=steps, global_rows=-1 if global_rows is None else global_rows, function=function)


def verify(gradient: tf.Tensor, synchronised: tf.Tensor, site: str, contributes: tf.Tensor | bool,
           is_due: tf.Tensor) -> tf.Operation | None:
    """Ends the job if a gradient was not synchronised correctly.

    Args:
        gradient: This rank's gradient, as given to `sync`.
        synchronised: The result of `sync`.
        site, contributes: As given to `sync`.
        is_due: Scalar bool; nothing happens unless it is true.
    """
    with tf.device("CPU:0"):
        operation = library.load()[0].poseidon_verify(
            gradient=gradient, synchronised=synchronised, contributes=contributes, is_due=is_due,
            masks=[], factors=[], site=site)
    return None if operation is None else _unordered(operation)


def digests(values: Iterable[Any]) -> tf.Tensor:
    """Returns int64 digests, one of each tensor or variable, which depend on its type, its shape and all of its bits.

    Args:
        values: Numbers, bools or strings.
    """
    with tf.device("CPU:0"):
        return library.load()[0].poseidon_digests(values=[tf.convert_to_tensor(value) for value in values])


def fingerprint(rows: tf.Tensor, values: Sequence[tf.Tensor], structure: int) -> tf.Tensor:
    """Returns [4] int64: `structure`, `rows`, a digest of all shapes, and one of all values.

    Args:
        rows: How many rows they have, a scalar int64.
        values: Numbers, bools or strings.
        structure: A digest of how they belong together.
    """
    with tf.device("CPU:0"):
        return library.load()[0].poseidon_fingerprint(rows=rows, values=values, structure=structure)


def compare_first(index: tf.Tensor, rows: tf.Tensor, values: Sequence[tf.Tensor], structure: int, texts: Sequence[str],
                  name: str) -> list[tf.Tensor]:
    """Returns `values`; ends the job unless their `fingerprint` is that of rank 0.

    Args:
        index: A scalar int64; if it is not 0, nothing is compared.
        rows, values, structure: Same as in `fingerprint`.
        texts: What is said about each part of the fingerprint that differs, with $0 for this rank's, $1 for rank 0's.
        name: A name that is the same on all ranks.
    """
    with tf.device("CPU:0"):
        return library.load()[0].poseidon_compare_first(
            index=index, rows=rows, values=values, structure=structure, texts=texts, site=name)


def timed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset, of which the communicator counts how long this rank waits for its elements."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # or TensorFlow reads ahead, and steps wait for that
    return tf_compat.same_elements(dataset, library.load()[0].poseidon_timed_dataset).with_options(options)


def own_elements(dataset: tf.data.Dataset, shares: tf.data.Dataset, batch_size: int, drop_remainder: bool,
                 rank: int) -> tf.data.Dataset:
    """Returns a dataset of (tag, *tensors): a rank's elements of each batch.

    A tag is [4] int64: how many elements the batch has; the first of this rank's, and how many it has, 0 if the first
    one of the batch stands in for them; and a digest of all elements of the first batch, 0 in the others.

    Args:
        dataset: The elements, as tuples of tensors.
        shares: From it one element is read when a batch was: [P] int64, by rank, how many elements of the batch it has
            in proportion to others.
        batch_size: How many successive ones are a batch.
        drop_remainder: Whether elements at the end that make no full batch are left out.
        rank: The rank.
    """
    specs = (tf.TensorSpec([4], tf.int64), *dataset.element_spec)
    return tf.data.experimental.from_variant(library.load()[0].poseidon_own_elements_dataset(
        input_dataset=tf.data.experimental.to_variant(dataset), shares=tf.data.experimental.to_variant(shares),
        batch_size=batch_size, drop_remainder=drop_remainder, rank=rank, ranks=shares.element_spec.shape[0],
        output_types=[spec.dtype for spec in specs], output_shapes=[spec.shape for spec in specs]), specs)


def abort_unless(condition: tf.Tensor, reason: tf.Tensor | str) -> None:
    """Ends the job with a reason, a string tensor or Python string, unless a scalar bool is true."""
    def abort() -> bool:
        with tf.device("CPU:0"):
            library.load()[0].poseidon_abort(reason=reason)
        return False

    tf.cond(condition, lambda: True, abort)


def outer_product(u: tf.Tensor, v: tf.Tensor, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns U^T V, the gradient of a dense layer from its sufficient factors.

    On the CPU, products are added in the order of the rows, on any number of threads. Half and
    bfloat16 are added in float, and rounded once.

    Args:
        u: [K, M]; half, bfloat16, float or double.
        v: [K, N], of the same type.
        dtype: Type of the result: that of the factors, which is the default, or float for half and
            bfloat16.

    Returns:
        [M, N].
    """
    return library.load()[0].sufficient_factor_outer_product(u=u, v=v, Tout=dtype or u.dtype)


def sum_of_rows(v: tf.Tensor, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns the sum of the rows of V, the gradient of a dense layer's bias.

    Args:
        v: [K, N]; half, bfloat16, float or double.
        dtype: Same as in `outer_product`.

    Returns:
        [N]; rows are added in their order.
    """
    return library.load()[0].sufficient_factor_bias(v=v, Tout=dtype or v.dtype)


def multiplying_device() -> tf.config.PhysicalDevice:
    """Returns the `tf.config.PhysicalDevice` that multiplies factors in this process: its GPU, or its CPU."""
    library.load()
    gpus = tf.config.get_visible_devices("GPU")
    on_gpu = gpus and devices.can_multiply("/device:GPU:0")
    return gpus[0] if on_gpu else tf.config.get_visible_devices("CPU")[0]


def rounding() -> str:
    """Returns how this process multiplies and adds factors, since different ways give different bits."""
    fused = library.load()[1].poseidon_has_fused_multiply_add
    fused.restype = ctypes.c_bool
    result = "rounded once" if fused() else "rounded twice"
    device = multiplying_device()
    if device.device_type == "GPU":
        details = tf.config.experimental.get_device_details(device)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        with_tf32 = " with TF32" if tf.config.experimental.tensor_float_32_execution_enabled() else ""
        result += f"; on {details.get('device_name', 'a GPU')} {capability}{with_tf32}"
    return result


def _beside(op: str, tensor: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Returns a scope for an op that exchanges a tensor: on its GPU, if the op has a kernel there, else on the host."""
    device = tensor.device
    may_be_gpu = tf.DeviceSpec.from_string(device).device_type in (None, "GPU")
    if not may_be_gpu or not _has_gpu_kernel(op, tensor.dtype):
        return tf.device("CPU:0")
    return tf.device(device) if device else contextlib.nullcontext()  # where TensorFlow, or the program, has others


@functools.cache
def _has_gpu_kernel(op: str, dtype: tf.DType) -> bool:
    library.load()
    return devices.has_kernel(op, _GPU, T=dtype.as_datatype_enum)


def _unordered(output: T) -> T:
    """Exempts a stateful op in a `tf.function` from running in program order.

    Its site must then be unique in the whole function; otherwise two exchanges could be mixed up.

    Automatic control dependencies put all stateful ops into one chain: each gradient would then
    wait for the gradients before it, and nothing could travel while backpropagation continues.
    """
    if not tf.executing_eagerly():
        tf_compat.run_independently(getattr(output, "op", output))
    return output


@tf.RegisterGradient("PoseidonAllReduce")
def _all_reduce_gradient(op: tf.Operation, gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
    # Each rank's value adds to every rank's sum, so its gradient is the sum of all gradients.
    site = op.get_attr("site").decode() + "/gradient"
    return all_reduce(gradient, site, op.inputs[1]), None


@tf.RegisterGradient("PoseidonOwn")
def _own_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    return join(gradient, by=op.get_attr("joins").decode())


@tf.RegisterGradient("PoseidonJoin")
def _join_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    by = op.get_attr("by").decode()
    if by == "mean":
        raise LookupError(
            "The mean of what ranks have computed from their own rows has no gradient; it is for variables.")
    return own(gradient, joins=by)


tf.no_gradient("PoseidonSync")
tf.no_gradient("PoseidonSyncSlices")
tf.no_gradient("PoseidonAllGather")
tf.no_gradient("PoseidonBroadcast")
tf.no_gradient("PoseidonShard")
tf.no_gradient("PoseidonReduceScatter")
tf.no_gradient("PoseidonReduceScatterRows")
tf.no_gradient("PoseidonGatherShards")
