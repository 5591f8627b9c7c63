"""Damages graphs by changes that make most of them invalid; each has a name and three numbers."""

import random

from google.protobuf import message
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import graph_pb2

NUMBERS = 1 << 16  # the numbers of changes are below this


class Impossible(Exception):
    """The change does not apply to the graph."""


def damaged(graph_def, changes):
    """Returns a GraphDef with changes, each (name, number, number, number); omits impossible ones."""
    graph = graph_pb2.GraphDef()
    graph.CopyFrom(graph_def)
    for name, *numbers in changes:
        before = graph.SerializeToString()
        try:
            CHANGES[name](graph, *numbers)
        except Impossible:
            graph = graph_pb2.GraphDef.FromString(before)
    return graph


def _pick(things, number):
    things = list(things)
    if not things:
        raise Impossible
    return things[number % len(things)]


def _bodies(graph):
    """Returns the nodes of each function, and of the main graph."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def _node(graph, number):
    """Returns (its body, a node)."""
    return _pick([(nodes, node) for nodes in _bodies(graph) for node in nodes], number)


def _node_with_inputs(graph, number):
    return _pick([(nodes, node) for nodes in _bodies(graph) for node in nodes if node.input], number)


def _tensor(nodes, number):
    """Returns the name of a tensor that something in a body reads, or could read."""
    return _pick([*dict.fromkeys(t for node in nodes for t in node.input), *(n.name for n in nodes)], number)


def _attribute(graph, number, kinds=None):
    """Returns (node, name of an attribute, its value)."""
    return _pick([(node, name, value) for nodes in _bodies(graph) for node in nodes
                  for name, value in sorted(node.attr.items()) if not kinds or value.WhichOneof("value") in kinds],
                 number)


# ---- nodes and edges ----------------------------------------------------------------------------


def drop_node(graph, a, b, c):
    nodes, node = _node(graph, a)
    nodes.remove(node)


def duplicate_node(graph, a, b, c):
    nodes, node = _node(graph, a)
    nodes.add().CopyFrom(node)


def copy_node_elsewhere(graph, a, b, c):
    _, node = _node(graph, a)
    _pick(_bodies(graph), b).add().CopyFrom(node)


def rename_node(graph, a, b, c):
    nodes, node = _node(graph, a)
    other = _pick(nodes, c).name
    node.name = _pick([f"{node.name}_1", other, f"{other}/-out0", f"{other}/x", "", "a b", "^x", "x:0",
                       "-x", "_x", "é", "poseidon/step/agree", "poseidon/original", "poseidon", "a\nb"], b)


def rename_node_and_readers(graph, a, b, c):
    nodes, node = _node(graph, a)
    other = _pick(nodes, c).name
    name = _pick(["poseidon/step/agree", "poseidon/step/compare0", "poseidon/original", "poseidon", "poseidon/rows",
                  f"poseidon/rows_of/{other}", f"poseidon/on_rows/{other}", f"poseidon/of/{other}/of0", f"{other}/x",
                  "_x", "a b"], b)
    before, node.name = node.name, name
    for reader in nodes:
        for i, tensor in enumerate(reader.input):
            own, colon, output = tensor.partition(":")
            if own.lstrip("^") == before:
                reader.input[i] = "^" * own.startswith("^") + name + colon + output


def drop_input(graph, a, b, c):
    _, node = _node_with_inputs(graph, a)
    del node.input[b % len(node.input)]


def duplicate_input(graph, a, b, c):
    _, node = _node_with_inputs(graph, a)
    node.input.append(_pick(node.input, b))


def swap_inputs(graph, a, b, c):
    _, node = _node_with_inputs(graph, a)
    i, j = b % len(node.input), c % len(node.input)
    node.input[i], node.input[j] = node.input[j], node.input[i]


def add_input(graph, a, b, c):
    nodes, node = _node(graph, a)
    node.input.insert(0 if c % 2 else len(node.input), _tensor(nodes, b))


def add_control_input(graph, a, b, c):
    nodes, node = _node(graph, a)
    node.input.append(f"^{_pick(nodes, b).name}")


def rewire(graph, a, b, c):
    nodes, node = _node_with_inputs(graph, a)
    node.input[c % len(node.input)] = _tensor(nodes, b)


def rewire_to_odd_text(graph, a, b, c):
    _, node = _node_with_inputs(graph, a)
    i = c % len(node.input)
    name, tensor = node.input[i].lstrip("^").partition(":")[0], node.input[i]
    node.input[i] = _pick([f"{name}:7", f"{name}:1", f"{name}:-1", f"{name}:", f"{name}:00", f"{name}:0",
                           f"{name}:x:0", f"{name}:output:0", f"{name}:output:1", f"{name}:output", f"{tensor}:0",
                           f"^{tensor}",
                           f"^{name}", f"^{name}:0", "", "^", ":", ":0", "nothing", "^nothing", f"{name}\nx",
                           f"^{name}\nx", f"{name}:99999999999999",
                           f"{name}:٣", f"{tensor} ", f"{name}:1:1:1"], b)


def make_cycle(graph, a, b, c):
    nodes, node = _node(graph, a)
    text = f"^{node.name}" if b % 2 else _pick([t for n in nodes for t in n.input
                                                if t.partition(":")[0] == node.name], c)
    if b % 2 or not node.input:
        node.input.append(text)
    else:
        node.input[c % len(node.input)] = text


def shuffle_nodes(graph, a, b, c):
    nodes = _pick(_bodies(graph), a)
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    random.Random(b).shuffle(copies)
    del nodes[:]
    nodes.extend(copies)


# ---- ops and attributes -------------------------------------------------------------------------

_OPS = """
    Add AddN Cast Concat ConcatV2 Const Einsum Enter Exit Fill Gather GatherV2 Identity IdentityN
    If LoopCond MatMul BatchMatMulV2 Merge NextIteration NoOp Pack ParseTensor PartitionedCall
    Placeholder PlaceholderWithDefault Pow QueueDequeueV2 QuantizedMatMul Range ReadVariableOp
    RefEnter RefIdentity RefMerge RefSwitch Reshape ResourceApplyAdam ResourceGather
    ResourceScatterSub RestoreV2 Select Shape Slice Split SplitV Squeeze StatefulPartitionedCall
    StatelessIf StatelessWhile StridedSlice Sum Switch SymbolicGradient TensorArrayV3
    TensorListReserve TensorListStack Tile Transpose UnsortedSegmentSum Unpack VarHandleOp
    VariableV2 Where While _Arg _Retval _If _While _Send _HostRecv DeviceIndex Case MapDataset
    Iterator IteratorGetNext PyFunc PoseidonSync PoseidonSyncSlices PoseidonAgree PoseidonSize
    PoseidonRows PoseidonPart PoseidonCompare PoseidonAllGather
    Conv2D Conv2DBackpropFilter BiasAddGrad AssignVariableOp AssignSubVariableOp AssignSub
    ApplyAdam ScatterSub RemoteCall ApplyOp Apply ResourceApply BroadcastGradientArgs DynamicStitch
    TopKV2 FusedBatchNormV3 CudnnRNN Bincount Unknown
""".split()


def change_op(graph, a, b, c):
    _, node = _node(graph, a)
    node.op = _pick([*_OPS, "", "a b", "a\nb"], b)


def change_op_to_another_of_the_graph(graph, a, b, c):
    _, node = _node(graph, a)
    node.op = _pick(sorted({n.op for nodes in _bodies(graph) for n in nodes}), b)


def call_a_function_as_an_op(graph, a, b, c):
    _, node = _node(graph, a)
    node.op = _pick(graph.library.function, b).signature.name


def drop_attribute(graph, a, b, c):
    node, name, _ = _attribute(graph, a)
    del node.attr[name]


def replace_attribute(graph, a, b, c):
    node, name, _ = _attribute(graph, a)
    _, _, value = _attribute(graph, b)
    value = attr_value_pb2.AttrValue.FromString(value.SerializeToString())
    node.attr[name].CopyFrom(value)


def replace_attribute_by_one_of_its_kind(graph, a, b, c):
    _, _, value = _attribute(graph, a)
    _, _, other = _attribute(graph, b, (value.WhichOneof("value"),))
    value.CopyFrom(attr_value_pb2.AttrValue.FromString(other.SerializeToString()))


def add_attribute(graph, a, b, c):
    _, node = _node(graph, a)
    _, name, value = _attribute(graph, b)
    name = _pick([name, "_XlaMustCompile", "_output_shapes", "_class", "_poseidon_original",
                  "_poseidon_rank", "", "a\nb"], c)
    value = attr_value_pb2.AttrValue.FromString(value.SerializeToString())
    node.attr[name].CopyFrom(value)


def change_type(graph, a, b, c):
    node, name, value = _attribute(graph, a, ("type",))
    value.type = _pick([*range(25), 101, 103, 109, 120, 123, 999, -1], b)


def change_types(graph, a, b, c):
    node, name, value = _attribute(graph, a, ("list",))
    if value.list.type and b % 3:
        value.list.type[c % len(value.list.type)] = b % 25
    elif value.list.type:
        del value.list.type[c % len(value.list.type)]
    else:
        value.list.type.append(b % 25)


def change_number(graph, a, b, c):
    _, _, value = _attribute(graph, a, ("i", "f", "b"))
    numbers = {"i": [0, 1, 2, 3, -1, 100, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63)],
               "f": [0.0, -1.0, float("nan"), float("inf")], "b": [True, False]}
    kind = value.WhichOneof("value")
    setattr(value, kind, _pick(numbers[kind], b))


def change_text(graph, a, b, c):
    _, _, value = _attribute(graph, a, ("s",))
    value.s = _pick([b"", b"\xff\xfe", b"NHWC", b"NCHW", b"ab,bc->ac", b"->", b"loc:@nothing",
                     b"a\nb", value.s * 2], b)


def _change_shape(shape, b, c):
    sizes = (-1, -2, 0, 1, 2, 3, 8, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
    if b % 5 == 0:
        shape.unknown_rank = not shape.unknown_rank
    elif b % 5 == 1:
        shape.dim.add().size = _pick(sizes, c)
    elif b % 5 == 2 and shape.dim:
        del shape.dim[c % len(shape.dim)]
    elif b % 5 == 3:
        for _ in range(c % 400):
            shape.dim.add().size = _pick(sizes, b)
    elif shape.dim:
        shape.dim[b % len(shape.dim)].size = _pick(sizes, c)


def change_shape(graph, a, b, c):
    _change_shape(_attribute(graph, a, ("shape",))[2].shape, b, c)


def change_constant(graph, a, b, c):
    tensor = _attribute(graph, a, ("tensor",))[2].tensor
    if b % 4 == 0:
        tensor.dtype = c % 25
    elif b % 4 == 1:
        _change_shape(tensor.tensor_shape, c, a)
    elif b % 4 == 2:
        tensor.tensor_content = bytes(c % 17)
    else:
        for field in (tensor.int_val, tensor.float_val, tensor.int64_val):
            if len(field):
                field[0] = _pick([0, 1, -1, 2, 1 << 30], c)
                field.extend([1] * (c // 5 % 3))
                return
        tensor.tensor_content = tensor.tensor_content[:-1] + bytes([c % 256])


# ---- functions ----------------------------------------------------------------------------------


def drop_function(graph, a, b, c):
    graph.library.function.remove(_pick(graph.library.function, a))


def duplicate_function(graph, a, b, c):
    function = _pick(graph.library.function, a)
    graph.library.function.add().CopyFrom(function)
    if b % 2:
        graph.library.function[-1].signature.name = _pick(graph.library.function, c).signature.name


def rename_function(graph, a, b, c):
    signature = _pick(graph.library.function, a).signature
    signature.name = _pick(["", "MatMul", "Const", "Identity", "a b", "a\nb", "nothing"], b)


def swap_functions(graph, a, b, c):
    one, other = _pick(graph.library.function, a).signature, _pick(graph.library.function, b).signature
    one.name, other.name = other.name, one.name


def call_another_function(graph, a, b, c):
    _, _, value = _attribute(graph, a, ("func",))
    names = [function.signature.name for function in graph.library.function]
    value.func.name = _pick([*names, "", "nothing", "a\nb", "MatMul"], b)


def drop_return(graph, a, b, c):
    function = _pick(graph.library.function, a)
    del function.ret[_pick(sorted(function.ret), b)]


def change_return(graph, a, b, c):
    function = _pick(graph.library.function, a)
    name = _pick(sorted(function.ret), b)
    tensor = _tensor(function.node_def, c)
    function.ret[name] = _pick([tensor, tensor, f"^{tensor}", "", f"{tensor}:output:0",
                                f"{function.ret[name]}:0",
                                function.ret[name].rpartition(":")[0], "nothing"], a + b + c)


def change_control_return(graph, a, b, c):
    function = _pick(graph.library.function, a)
    name = _pick([*function.control_ret, "x"], b)
    names = [node.name for node in function.node_def]
    function.control_ret[name] = _pick([*names, "nothing", "", "^x", "x:0", "a\nb"], c)


def drop_control_return(graph, a, b, c):
    function = _pick([f for f in graph.library.function if f.control_ret], a)
    del function.control_ret[_pick(sorted(function.control_ret), b)]


def change_arguments(graph, a, b, c):
    signature = _pick(graph.library.function, a).signature
    arguments = signature.output_arg if b % 2 else signature.input_arg
    argument = _pick(arguments, c)
    what = b // 2 % 6
    if what == 0:
        arguments.remove(argument)
    elif what == 1:
        arguments.add().CopyFrom(argument)
    elif what == 2:
        argument.type = _pick([*range(25), 101, 999], b // 12)
    elif what == 3:
        argument.name = _pick(["", "x", "a b", "a\nb", *(x.name for x in arguments)], b // 12)
    elif what == 4:
        setattr(argument, _pick(["type_attr", "number_attr", "type_list_attr"], b // 12), "T")
    else:
        argument.is_ref = not argument.is_ref


def change_function_state(graph, a, b, c):
    function = _pick(graph.library.function, a)
    function.signature.is_stateful = not function.signature.is_stateful
    if b % 2:
        function.attr["_XlaMustCompile"].b = True


def change_version(graph, a, b, c):
    graph.versions.producer = _pick([0, 1, 9, 20, 5000, -1], a)
    graph.versions.min_consumer = _pick([0, 1, 5000], b)


def change_bytes(graph, a, b, c):
    """Flips bytes like a bad disk; only results that still are a GraphDef count."""
    data = bytearray(graph.SerializeToString())
    at = (a * NUMBERS + b) % (len(data) or 1)
    if c % 3 == 0:
        data[at:at + 1 + c // 3 % 8] = b""
    elif c % 3 == 1:
        data[at:at] = bytes([c // 3 % 256])
    else:
        data[at:at + 1] = bytes([c // 3 % 256])
    try:
        graph.CopyFrom(graph_pb2.GraphDef.FromString(bytes(data)))
    except message.DecodeError:
        raise Impossible from None


CHANGES = {change.__name__: change for change in (
    drop_node, duplicate_node, copy_node_elsewhere, rename_node, rename_node_and_readers, drop_input,
    duplicate_input, swap_inputs, add_input, add_control_input, rewire, rewire_to_odd_text, make_cycle, shuffle_nodes,
    change_op,
    change_op_to_another_of_the_graph, call_a_function_as_an_op, drop_attribute, replace_attribute,
    replace_attribute_by_one_of_its_kind, add_attribute, change_type, change_types, change_number, change_text,
    change_shape, change_constant, drop_function, duplicate_function, rename_function, swap_functions,
    call_another_function, drop_return, change_return, change_control_return, drop_control_return,
    change_arguments, change_function_state, change_version, change_bytes)}
