"""The devices of the nodes of a rewritten graph, and the copies that TensorFlow makes for them.

The second of two CPUs stands for an accelerator: TensorFlow copies between them as between host and GPU.
scripts/check_wheel.sh runs these tests with a library that has GPU kernels, which needs no GPU.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf
from test_passes import alone  # noqa: F401  # a fixture
from test_passes import renamed
from test_passes import rewrite
import tiny_graphs

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.write import horovod_ops

HOST, ACCELERATOR = "/device:CPU:0", "/device:CPU:1"


def factors():
    """U and V, as an accelerator computes them."""
    return (tf.nn.relu(tiny_graphs.data(size, columns), name=name)
            for name, size, columns in (("U", tiny_graphs.K, tiny_graphs.M), ("V", tiny_graphs.K, tiny_graphs.N)))


def sync(gradient, site="kernel", wire_dtype=""):
    tf.negative(tiny_graphs.sync(gradient, site, wire_dtype=wire_dtype), name=f"{site}_update")


def layer(wire_dtype=""):
    u, v = factors()
    sync(tf.matmul(u, v, transpose_a=True, name="G"), wire_dtype=wire_dtype)
    sync(tf.raw_ops.BiasAddGrad(out_backprop=v, name="B"), "bias", wire_dtype)


def half_on_the_wire():
    layer("bfloat16")


def scaled():
    u, v = factors()
    sync(tf.multiply(tf.matmul(u, v, transpose_a=True), 4.0, name="G"))


def masked():
    """Times a tensor that is equal on all ranks, which remains on its device."""
    u, v = factors()
    weights = tf.exp(tf.ones((tiny_graphs.M, tiny_graphs.N)))
    sync(tf.multiply(weights, tf.matmul(u, v, transpose_a=True), name="G"))


def regularized():
    """Plus such a tensor, and a scalar that may differ: that is summed over ranks on the host."""
    u, v = factors()
    term = tf.exp(tf.ones((tiny_graphs.M, tiny_graphs.N))) * tf.nn.relu(tiny_graphs.data(), name="c")
    sync(tf.add_n([tf.matmul(u, v, transpose_a=True), term], name="G"))


def with_other_reader():
    """The gradient itself is computed in every step, for something else, but not copied."""
    u, v = factors()
    gradient = tf.matmul(u, v, transpose_a=True, name="G")
    sync(gradient)
    tf.norm(gradient, name="norm_update")


def slices(rows=100):
    """Of a table with so many rows, half of which are slices of other indices at most."""
    indices = tf.abs(tiny_graphs.data(tiny_graphs.K, dtype=tf.int32), name="I")
    values = tf.nn.relu(tiny_graphs.data(tiny_graphs.K, 3), name="V")
    indices, total = tiny_graphs.sync_these_slices(indices, values, rows)
    tf.scatter_nd(indices[:, None], total, (rows, 3), name="table_update")


def slices_of_small_table():
    """Which travel dense."""
    slices(4)


UP = {"kernel/gathered0:1", "kernel/gathered1:1", "kernel/recv:2"}  # the last says whether these are complete
# Per row: builder, policy, whether some rank has refused factors; the copies down to the host, and up.
COPIES = [
    (layer, "ps", False, {"G", "B"}, {"kernel", "bias"}),
    (layer, "sfb", False, {"U", "V"}, UP | {"bias"}),
    (layer, "sfb", True, {"U", "V", "kernel/dense_gradient", "bias/dense_gradient"},
     {"kernel/recv:2", "kernel/is_dense", "kernel/dense_recv", "bias"}),
    (half_on_the_wire, "ps", False, {"kernel/send_wire", "bias/send_wire"},
     {"kernel/recv_wire", "bias/recv_wire"}),
    (half_on_the_wire, "sfb", False, {"kernel/wire_u", "kernel/wire_v"}, UP | {"bias"}),
    (scaled, "ps", False, {"G"}, {"kernel"}),
    (scaled, "sfb", False, {"U", "kernel/v0_scaled0"}, UP),
    (masked, "sfb", False, {"U", "V"}, UP),
    (regularized, "sfb", False, {"U", "V", "kernel/coefficient0_scaled0"},
     {"kernel/gathered0:1", "kernel/gathered1:1", "kernel/recv:3", "kernel/total_coefficient0"}),
    (with_other_reader, "sfb", False, {"U", "V"}, UP),
    (slices, "sfb", False, {"I", "V"}, {"table", "table:1"}),
    (slices_of_small_table, "sfb", False, {"I", "V"}, {"table", "table:1"}),
]

# The same where Send and Recv copy: what is left for TensorFlow, if anything is.
IN_PIECES = {
    (layer, "sfb", True): ({"kernel/is_complete"}, {"kernel/is_dense"}),
    (regularized, "sfb", False): ({"kernel/gathered2:1"}, {"kernel/total_coefficient0"}),
}


EXCHANGES = ("PoseidonSend", "PoseidonSyncSlices", "PoseidonDenseSlices")


def on(device, builder):
    """Returns the graph of a builder whose arithmetic is on a device."""
    def build():
        with tf.device(device):
            builder()
    return tiny_graphs.build(build).as_graph_def(add_shapes=True)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("builder, policy, is_refused, down, up", COPIES,
                         ids=[f"{row[0].__name__}-{row[1]}" + "-refused" * row[2] for row in COPIES])
def test_copies(builder, policy, is_refused, down, up, in_pieces, alone, monkeypatch):  # noqa: F811
    """Of TensorFlow: where Send and Recv have kernels for the accelerator, they copy, in pieces."""
    has_kernel = devices.has_kernel
    monkeypatch.setattr(devices, "has_kernel", lambda op, device, **types: (
        in_pieces or op not in EXCHANGES or "CPU:0" in device) and has_kernel(op, device, **types))
    before = on(ACCELERATOR, builder)
    prefix = f"placement/{builder.__name__}/{policy}/{is_refused}/{in_pieces}"
    if is_refused:  # as if this rank's graph had not been rewritten
        run(renamed(before, prefix))
    after = renamed(rewrite(before, policy).graph_def, prefix)
    assert run(after) == (IN_PIECES.get((builder, policy, is_refused), (set(), set())) if in_pieces else (down, up))


def run(graph_def):
    """Returns (down, up): the tensors that TensorFlow copies from one device to the other in a step."""
    rng = np.random.default_rng(1)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(config=config()) as session:
        tf.import_graph_def(graph_def, name="")
        inputs = [op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder"]
        metadata = tf.compat.v1.RunMetadata()
        session.run([op for op in graph.get_operations() if op.name.endswith("_update")],
                    {tensor: rng.integers(-2, 3, tensor.shape) for tensor in inputs},
                    tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE,
                                            output_partition_graphs=True), metadata)
    # A branch that is not taken copies nothing.
    made = {node.node_name: {output.slot for output in node.output}
            for device in metadata.step_stats.dev_stats for node in device.node_stats}
    copies = {HOST: set(), ACCELERATOR: set()}
    for node in (node for partition in metadata.partition_graphs for node in partition.node):
        if node.op == "_Send" and not node.input[0].startswith(("_arg", "Const")):  # not what the test gives
            source, _, slot = node.input[0].partition(":")
            if int(slot or 0) in made.get(source, ()):
                copied = f"{source.partition('/ctrl')[0]}:{slot}".removesuffix(":")
                copies["/device:" + node.attr["recv_device"].s.decode().partition("device:")[2]].add(copied)
    return copies[HOST], copies[ACCELERATOR]


def config():
    """Two CPUs, and no optimizers, which would give nodes other names."""
    result = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    result.graph_options.rewrite_options.disable_meta_optimizer = True
    result.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return result


GPU = "/job:worker/replica:0/task:1/device:GPU:2"
ITS_HOST = "/job:worker/replica:0/task:1/device:CPU:0"
PRODUCT = "SufficientFactorOuterProduct"


def has_gpu_kernels():
    tiny_graphs.library.load()
    return devices.has_kernel(PRODUCT, GPU)


@pytest.mark.parametrize("device, host", [
    (GPU, ITS_HOST), (ITS_HOST, ITS_HOST), ("/device:GPU:1", "/device:CPU:0"), ("/gpu:1", "/device:CPU:0"),
    ("/device:CPU:1", "/device:CPU:1"), ("/job:worker/task:1", "/job:worker/task:1"), ("", "")])
def test_host_of_a_device(device, host):
    assert devices.host_of(device) == host


def test_what_is_no_device():
    with pytest.raises(PoseidonError, match="places nodes on '/nowhere:0', which is not a valid device name"):
        devices.host_of("/nowhere:0")


@pytest.mark.parametrize("dtype, out, is_on_gpu", [
    ("float32", "float32", True), ("float64", "float64", False), ("float16", "float32", True),
    ("float16", "float16", True), ("bfloat16", "float32", True), ("bfloat16", "bfloat16", True)])
def test_gradients_are_rebuilt_where_the_product_has_a_kernel(dtype, out, is_on_gpu):
    def builder():
        u, v = (tiny_graphs.data(tiny_graphs.K, columns, dtype=dtype) for columns in (tiny_graphs.M, tiny_graphs.N))
        tiny_graphs.sync(tf.cast(tf.matmul(u, v, transpose_a=True), out))

    found = collections.defaultdict(set)
    for node in rewrite(on(GPU, builder)).graph_def.node:
        found[node.op].add(node.device)
    device = GPU if is_on_gpu and has_gpu_kernels() else ITS_HOST
    assert found[PRODUCT] == found["Merge"] == {device}
    # The dense gradient, of any type, is exchanged where it is; factors where they are multiplied.
    assert found["PoseidonSend"] == found["PoseidonRecv"] == ({device, GPU} if has_gpu_kernels() else {ITS_HOST})


@pytest.mark.skipif(not has_gpu_kernels(), reason="the library is built for CPUs")
@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_every_node_has_a_kernel_for_its_device(policy):
    for builder in (*tiny_graphs.RECOGNISED, *tiny_graphs.SLICES):
        before = on(GPU, builder)
        known = {(node.name, node.op) for node in before.node}
        for node in rewrite(before, policy).graph_def.node:
            types = {key: value.type for key, value in node.attr.items() if value.type}
            assert (node.name, node.op) in known or devices.has_kernel(node.op, node.device, **types), node


@pytest.mark.parametrize("device, expected", [(GPU, True), (ITS_HOST, False), ("", False)])
def test_verify_mode_allows_for_tf32_on_gpus(device, expected):
    nodes = {node.name: node for node in rewrite(on(device, tiny_graphs.verified)).graph_def.node}
    assert nodes["verify_kernel"].attr["may_use_tf32"].b is expected


@pytest.mark.parametrize("capability, can_multiply", [((7, 5), False), ((8, 0), True), ((9, 0), True), (None, True)])
def test_old_gpus_leave_products_to_the_host(capability, can_multiply, monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config.experimental, "get_device_details",
                        lambda _: {"compute_capability": capability} if capability else {})
    monkeypatch.setattr(devices, "has_kernel", lambda op, device, **types: True)
    assert devices.can_multiply(GPU) is can_multiply
    assert devices.can_multiply(ITS_HOST)


@pytest.mark.parametrize("policy, op", [("ps", "HorovodAllreduce"), ("sfb", "HorovodAllgather")])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_horovod_runs_beside_the_gradient_where_it_can(policy, op, has_kernel, monkeypatch):
    monkeypatch.setattr(devices, "has_kernel", lambda op, device, **types: "CPU" in device or (
        has_kernel and op.startswith("Horovod")))
    planner = planning.Planner(planning.Cluster(2), policy)
    after = session.RewriteSession(planner, horovod_ops.HorovodOps).rewrite(on(GPU, layer)).graph_def
    nodes = {node.op: node.device for node in after.node}
    assert nodes[op] == (GPU if has_kernel else ITS_HOST)
    if policy == "sfb":  # which have no kernel but the CPU's
        assert nodes[PRODUCT] == nodes["SufficientFactorBias"] == ITS_HOST
