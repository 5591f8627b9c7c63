"""Small graphs for the rules of windows, gathering, lists, normalisation and parsing: a table, as partition_cases."""

import functools

import numpy as np
import partition_cases
from partition_table import Case
from partition_table import K
from partition_table import of
from partition_table import summed
import tensorflow as tf

SUM = "partial(sum)"
raw = tf.raw_ops
op = partition_cases.op
texts = partition_cases.texts
nn = tf.compat.v1.nn
# Of what has kernels for float32 only.
SINGLE = 3e-5
_FLOATS = tf.float32


def single(function):
    """Returns a function that casts its inputs to float32 first."""
    return lambda *inputs: function(*(tf.cast(t, tf.float32) if t.dtype == tf.float64 else t for t in inputs))


def _distinct(rng, shape):
    return rng.permutation(int(np.prod(shape))).reshape(shape)


def _unit(rng, shape):
    return rng.uniform(0, 1, shape)


def _sorted(rng, shape):
    return np.sort(rng.integers(0, 3, shape))


# ---- windows ----------------------------------------------------------------------------------------------------

def _conv2d(strides=1, padding="SAME", dilation=1):
    return lambda x, f: raw.Conv2D(input=x, filter=f, strides=[1, strides, strides, 1], padding=padding,
                                   dilations=[1, dilation, dilation, 1])


def _explicit(x, f):
    return raw.Conv2D(input=x, filter=f, strides=[1, 1, 1, 1], padding="EXPLICIT",
                      explicit_paddings=[0, 0, 1, 2, 0, 1, 0, 0])


def _transposed(f, x):
    sizes = tf.stack([tf.shape(x)[0], 8, 8, 3])
    return raw.Conv2DBackpropInput(input_sizes=sizes, filter=f, out_backprop=x, strides=[1, 2, 2, 1], padding="SAME")


def _transposed_of_two_sizes(f, x):
    return raw.Conv2DBackpropInput(input_sizes=tf.constant([8, 8]), filter=f, out_backprop=x, strides=[1, 2, 2, 1],
                                   padding="SAME")


def _depthwise(x, f):
    return raw.DepthwiseConv2dNative(input=x, filter=f, strides=[1, 1, 1, 1], padding="SAME")


def _dilation(x, f):
    return raw.Dilation2D(input=x, filter=f, strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME")


def _twice(function):
    """Returns a function that gives the gradient, so that the case is about the gradient of the gradient too."""
    return lambda x: tf.gradients(function(x) ** 2, x)[0]


def _max_pool_v2(x):
    return raw.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID")


def _max_pool(x):
    return raw.MaxPool(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")


def _max_pool_3d(x):
    return raw.MaxPool3D(input=x, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="SAME")


def _with_index(is_of_batch):
    return lambda x: raw.MaxPoolWithArgmax(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME",
                                           include_batch_in_index=is_of_batch)


def _resized(name, **attributes):
    return single(lambda x: getattr(raw, name)(images=x, size=[5, 3], **attributes))


def _patches(x):
    return raw.ExtractImagePatches(images=x, ksizes=[1, 2, 2, 1], strides=[1, 1, 1, 1], rates=[1, 1, 1, 1],
                                   padding="VALID")


def _volumes(x):
    return raw.ExtractVolumePatches(input=x, ksizes=[1, 2, 2, 2, 1], strides=[1, 1, 1, 1, 1], padding="VALID")


def _turned(name, **inputs):
    def build(x, transforms):
        return getattr(raw, name)(images=x, transforms=transforms, output_shape=[4, 5], interpolation="BILINEAR",
                                  **inputs)
    return single(build)


IMAGES = of(K, 4, 4, 3)
_transforms = functools.partial(of, make=lambda rng, shape: rng.uniform(-0.1, 0.1, shape) + [1, 0, 0, 0, 1, 0, 0, 0])

WINDOWS = [
    Case("Conv2D Conv2DBackpropInput", _conv2d(), [IMAGES, of(3, 3, 3, 2)], "rows(0)"),
    Case("Conv2DBackpropFilter", _conv2d(2, "VALID"), [IMAGES, of(3, 3, 3, 2)], SUM),
    Case("Conv2D Conv2DBackpropFilter", _explicit, [IMAGES, of(2, 2, 3, 2)],
         {"Conv2D": "rows(0)", "Conv2DBackpropFilter": SUM}),
    Case("Conv2D", _conv2d(), [of(2, 4, 4, 3), of(3, 3, 3, K)], "whole", fewest=1),
    Case("Conv2DBackpropInput", _transposed, [of(3, 3, 3, 2), of(K, 4, 4, 2)], "rows(0)"),
    Case("Conv2DBackpropInput", _transposed_of_two_sizes, [of(3, 3, 3, 2), of(K, 4, 4, 2)], "rows(0)"),
    Case("Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2", lambda x, f: raw.Conv3D(
        input=x, filter=f, strides=[1] * 5, padding="SAME"), [of(K, 2, 3, 2, 2), of(2, 2, 2, 2, 2)],
        {"Conv3D": "rows(0)", "Conv3DBackpropFilterV2": SUM, "Conv3DBackpropInputV2": "rows(0)"}),
    Case("DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput", _depthwise,
         [IMAGES, of(2, 2, 3, 2)],
         {"DepthwiseConv2dNative": "rows(0)", "DepthwiseConv2dNativeBackpropFilter": SUM,
          "DepthwiseConv2dNativeBackpropInput": "rows(0)"}, fewest=1),
    # Linear in kernels that are summands, as those are that others were made of; and in summands of images.
    Case("Conv2D", _conv2d(), [of(2, 4, 4, 3), summed(3, 3, 3, 2)], SUM),
    Case("Conv2D", _conv2d(), [summed(2, 4, 4, 3), of(3, 3, 3, 2)], SUM),
    Case("Conv2D", _conv2d(), [summed(2, 4, 4, 3), summed(3, 3, 3, 2)], "whole"),
    Case("Conv2DBackpropInput", _transposed, [summed(3, 3, 3, 2), of(2, 4, 4, 2)], SUM),
    Case("Conv2DBackpropFilter", lambda x, dy: raw.Conv2DBackpropFilter(
        input=x, filter_sizes=[3, 3, 3, 2], out_backprop=dy, strides=[1, 1, 1, 1], padding="SAME"),
         [of(2, 4, 4, 3), summed(2, 4, 4, 2)], SUM),
    Case("Dilation2D", _dilation, [of(2, 4, 4, 3), summed(2, 2, 3)], "whole"),
    Case("Dilation2D Dilation2DBackpropFilter Dilation2DBackpropInput", _dilation, [IMAGES, of(2, 2, 3)],
         {"Dilation2D": "rows(0)", "Dilation2DBackpropFilter": SUM, "Dilation2DBackpropInput": "rows(0)"}),
    Case("MaxPool MaxPoolGrad", _max_pool, [IMAGES], "rows(0)"),
    Case("MaxPoolGradGrad", _twice(_max_pool), [IMAGES], "rows(0)"),
    Case("MaxPoolV2 MaxPoolGradV2", _max_pool_v2, [IMAGES], "rows(0)"),
    Case("MaxPoolGradGradV2", lambda x, y, dx: raw.MaxPoolGradGradV2(
        orig_input=x, orig_output=_max_pool_v2(x), grad=dx, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1],
        padding="VALID"), [IMAGES, of(K, 2, 2, 3), IMAGES], "rows(0)"),
    Case("MaxPool3D MaxPool3DGrad", single(_max_pool_3d), [of(K, 2, 4, 4, 2)], "rows(0)", fewest=1),
    Case("MaxPool3DGradGrad", single(_twice(_max_pool_3d)), [of(K, 2, 4, 4, 2)], "rows(0)", fewest=1,
         tolerance=SINGLE),
    Case("MaxPoolWithArgmax MaxPoolGradWithArgmax", single(_with_index(False)), [IMAGES], "rows(0)", fewest=1),
    Case("MaxPoolWithArgmax", single(_with_index(True)), [IMAGES], "whole", fewest=1),
    Case("AvgPool AvgPoolGrad", lambda x: nn.avg_pool2d(x, 2, 2, "SAME"), [IMAGES], "rows(0)"),
    Case("AvgPool3D AvgPool3DGrad", single(lambda x: nn.avg_pool3d(x, 2, 2, "SAME")), [of(K, 2, 4, 4, 2)], "rows(0)",
         fewest=1, tolerance=SINGLE),
    Case("LRN LRNGrad", single(tf.nn.lrn), [IMAGES], "rows(0)", tolerance=SINGLE, fewest=1),
    Case("DepthToSpace SpaceToDepth", lambda x: tf.nn.depth_to_space(tf.nn.space_to_depth(x, 2), 2), [IMAGES],
         "rows(0)"),
    Case("ResizeBilinear ResizeBilinearGrad", _resized("ResizeBilinear"), [IMAGES], "rows(0)", tolerance=SINGLE),
    Case("ResizeBicubic ResizeBicubicGrad", _resized("ResizeBicubic"), [IMAGES], "rows(0)", tolerance=SINGLE),
    Case("ResizeNearestNeighbor ResizeNearestNeighborGrad", _resized("ResizeNearestNeighbor"), [IMAGES], "rows(0)"),
    Case("ResizeArea", _resized("ResizeArea"), [IMAGES], "rows(0)", tolerance=SINGLE),
    Case("ExtractImagePatches", _patches, [IMAGES], "rows(0)", fewest=1),
    Case("ExtractVolumePatches", _volumes, [of(K, 3, 3, 3, 2)], "rows(0)", fewest=1),
    Case("AdjustHue", single(lambda x: tf.image.adjust_hue(x, 0.1)), [of(K, 3, 3, make=_unit)], "rows(0)",
         tolerance=SINGLE),
    Case("AdjustSaturation", single(lambda x: tf.image.adjust_saturation(x, 0.5)), [of(3, K, 3, make=_unit)],
         "rows(1)", tolerance=SINGLE),
    Case("RGBToHSV HSVToRGB", lambda x: raw.HSVToRGB(images=raw.RGBToHSV(images=x)), [of(K, 3, make=_unit)],
         "rows(0)"),
    Case("AdjustContrastv2", single(lambda x: tf.image.adjust_contrast(x, 2.0)), [of(K, 3, 3, 3)], "rows(0)",
         tolerance=SINGLE),
    Case("AdjustContrastv2", single(lambda x: tf.image.adjust_contrast(x, 2.0)), [of(K, 3, 3)], "whole",
         tolerance=SINGLE, fewest=1),
    Case("ScaleAndTranslate", single(lambda x: tf.image.resize(x, [3, 5], antialias=True)), [IMAGES], "rows(0)",
         tolerance=SINGLE),
    Case("ImageProjectiveTransformV2", _turned("ImageProjectiveTransformV2"), [IMAGES, _transforms(K, 8)], "rows(0)",
         tolerance=1e-3),
    Case("ImageProjectiveTransformV3", _turned("ImageProjectiveTransformV3", fill_value=1.0),
         [IMAGES, _transforms(1, 8)], "rows(0)", tolerance=1e-3),
    Case("BiasAdd BiasAddGrad", tf.nn.bias_add, [IMAGES, of(3)], {"BiasAdd": "rows(0)", "BiasAddGrad": SUM}),
    Case("BiasAdd BiasAddGrad", tf.nn.bias_add, [of(2, K, 3), of(3)], {"BiasAdd": "rows(1)", "BiasAddGrad": SUM}),
    Case("BiasAdd", lambda x, b: tf.nn.bias_add(x, b), [of(2, K), of(K)], "whole"),
    Case("BiasAddV1", op("BiasAddV1"), [of(K, 3), of(3)], "rows(0)"),
]

# ---- gathering --------------------------------------------------------------------------------------------------

_ids = functools.partial(of, dtype="int32", low=0, high=4)
_keys = functools.partial(of, dtype="int64", low=0, high=6)


def _variable(values):
    name = tf.compat.v1.get_default_graph().unique_name("variable")
    handle = raw.VarHandleOp(dtype=values.dtype, shape=values.shape, shared_name=name)
    with tf.control_dependencies([raw.AssignVariableOp(resource=handle, value=values)]):
        return tf.identity(handle)


def _of_variable(params, ids):
    return raw.ResourceGather(resource=_variable(params), indices=ids, dtype=params.dtype)


def _nd_of_variable(params, ids):
    return raw.ResourceGatherNd(resource=_variable(params), indices=ids, dtype=params.dtype)


def _found(make, **attributes):
    """Looks keys up in a table that has some of them; the default is -1."""
    def build(keys):
        name = tf.compat.v1.get_default_graph().unique_name("table")
        table = make(key_dtype=keys.dtype, value_dtype=tf.float64, shared_name=name, **attributes)
        value_shape = attributes.get("value_shape", [])
        values = tf.random.stateless_uniform([4, *value_shape], [1, 2], dtype=tf.float64)
        with tf.control_dependencies([raw.LookupTableInsertV2(
                table_handle=table, keys=tf.range(4, dtype=keys.dtype), values=values)]):
            return raw.LookupTableFindV2(table_handle=tf.identity(table), keys=keys,
                                         default_value=tf.fill(value_shape, tf.constant(-1.0, tf.float64)))
    return build


def _segments(name, n=4):
    return lambda x, ids: getattr(raw, f"UnsortedSegment{name}")(data=x, segment_ids=ids, num_segments=n)


def _sparse_segments(name):
    return lambda x: getattr(raw, f"SparseSegment{name}")(data=x, indices=[0, 2, 1], segment_ids=[0, 0, 1])


def _scatter_into(name):
    return lambda t, ids, x: getattr(raw, f"TensorScatter{name}")(tensor=t, indices=ids, updates=x)


GATHERING = [
    Case("GatherV2", tf.gather, [of(4, 3), _ids(K)], "rows(0)"),
    Case("GatherV2", lambda p, i: tf.gather(p, i, axis=1), [of(4, 4), _ids(2, K)], "rows(2)"),
    Case("GatherV2", lambda p, i: tf.gather(p, i, axis=1), [of(K, 4), _ids(2)], "rows(0)"),
    Case("GatherV2", tf.gather, [of(4, K), _ids(2, 3)], "rows(2)"),
    Case("GatherV2", lambda p, i: tf.gather(p, i, batch_dims=1), [of(K, 4, 2), _ids(K, 3)], "rows(0)"),
    Case("GatherV2", lambda p, i: raw.GatherV2(params=p, indices=i, axis=1, batch_dims=-1), [of(3, 4, 2), _ids(3, K)],
         "rows(1)"),
    Case("GatherV2", lambda p, i: tf.gather(p, i, batch_dims=1), [of(3, 4, 2), _ids(3, K)], "rows(1)"),
    Case("GatherV2", lambda p, i: tf.gather(p, i, batch_dims=1, axis=2), [of(3, K, 4), _ids(3, 2)], "rows(1)"),
    Case("GatherV2", lambda p: tf.gather(p, [0, 0]), [of(K, 3)], "whole", fewest=1),
    Case("GatherV2", lambda p: tf.gather(p, [2, 0]), [summed(4, 3)], SUM),
    Case("GatherV2", lambda p, i: tf.gather(p, i), [summed(4, 3), _ids(K)], "rows(0)"),
    Case("Gather", op("Gather"), [of(4, 3), _ids(K)], "rows(0)"),
    Case("ResourceGather", _of_variable, [of(4, 3), _ids(2, K)], "rows(1)"),
    Case("GatherNd", tf.gather_nd, [of(4, 4, 2), _ids(K, 3, 2)], "rows(0)"),
    Case("GatherNd", lambda p: tf.gather_nd(p, [[0], [2]]), [summed(4, 3)], SUM),
    Case("GatherNd", lambda p: tf.gather_nd(p, [[0], [0]]), [of(K, 4)], "whole", fewest=1),
    Case("ResourceGatherNd", _nd_of_variable, [of(4, 4, 2), _ids(K, 2)], "rows(0)"),
    Case("LookupTableFindV2", _found(raw.MutableHashTableV2), [_keys(2, K)], "rows(1)"),
    Case("LookupTableFindV2", _found(raw.MutableHashTableOfTensorsV2, value_shape=[3]), [_keys(K, 2)], "rows(0)"),
    Case("OneHot", lambda i: tf.one_hot(i, 4), [_ids(2, K)], "rows(1)"),
    Case("OneHot", lambda i: tf.one_hot(i, 4, axis=0, dtype=tf.float64), [_ids(K, 2)], "rows(1)"),
    Case("OneHot", lambda i: tf.one_hot(i, 4, axis=1, dtype=tf.float64), [_ids(K, 2)], "rows(0)"),
    Case("UnsortedSegmentSum", _segments("Sum"), [of(K, 3), of(K, dtype="int32", low=-1, high=4)], SUM),
    Case("UnsortedSegmentSum", _segments("Sum"), [of(2, K, 3), _ids(2, K)], SUM),
    Case("UnsortedSegmentSum", _segments("Sum"), [of(3, K), _ids(3)], "rows(1)"),
    Case("UnsortedSegmentSum", _segments("Sum"), [of(3, 2, K), _ids(3, 2)], "rows(1)"),
    Case("UnsortedSegmentSum", lambda x: raw.UnsortedSegmentSum(data=x, segment_ids=[1, 0, 1], num_segments=2),
         [summed(3, 2)], SUM),
    Case("UnsortedSegmentMax", _segments("Max"), [of(K, 3, dtype="int32"), _ids(K)], "partial(max)"),
    Case("UnsortedSegmentMin", _segments("Min"), [of(K, 3, dtype="int32"), _ids(K)], "partial(min)"),
    Case("UnsortedSegmentProd", _segments("Prod"), [of(K, 3, dtype="int32"), _ids(K)], "partial(prod)"),
    Case("UnsortedSegmentMax", _segments("Max"), [of(3, K), _ids(3)], "rows(1)"),
    Case("SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd", lambda x: [
        getattr(raw, f"Segment{name}")(data=x, segment_ids=[0, 0, 1]) for name in "Sum Mean Max Min Prod".split()],
        [of(3, K)], "rows(1)"),
    Case("SegmentSum", lambda x, ids: raw.SegmentSum(data=x, segment_ids=ids),
         [of(K, 3), of(K, dtype="int32", make=_sorted)], "whole"),
    Case("SparseSegmentSum", _sparse_segments("Sum"), [of(3, K)], "rows(1)"),
    Case("SparseSegmentMean", _sparse_segments("Mean"), [of(3, K)], "rows(1)"),
    Case("SparseSegmentSqrtN", _sparse_segments("SqrtN"), [of(3, K)], "rows(1)"),
    Case("ScatterNd", lambda i, x: tf.scatter_nd(i, x, [4, 3]), [_ids(K, 1), of(K, 3)], SUM),
    Case("ScatterNd", lambda x: tf.scatter_nd([[1], [0], [1]], x, [4, 2]), [summed(3, 2)], SUM),
    Case("ScatterNd", lambda i, x: tf.scatter_nd(i, x, [4, 4]), [_ids(2, K, 2), of(2, K)], SUM),
    Case("ScatterNd", lambda x: tf.scatter_nd([[2], [0], [2]], x, tf.stack([4, 2, tf.shape(x)[2]])), [of(3, 2, K)],
         "rows(2)", fewest=1),
    Case("TensorScatterAdd", _scatter_into("Add"), [of(4, 3), _ids(K, 1), of(K, 3)], SUM),
    Case("TensorScatterAdd", lambda t: raw.TensorScatterAdd(tensor=t, indices=[[2], [0]], updates=tf.ones(
        [2, 3], tf.float64)), [summed(4, 3)], SUM),
    Case("TensorScatterAdd", lambda t, x: raw.TensorScatterAdd(tensor=t, indices=[[2], [2]], updates=x),
         [of(4, K), of(2, K)], "rows(1)", fewest=1),
    Case("TensorScatterMax", _scatter_into("Max"), [of(4, 3, dtype="int32"), _ids(K, 1), of(K, 3, dtype="int32")],
         "partial(max)"),
    Case("TensorScatterMin", _scatter_into("Min"), [of(4, 3, dtype="int32"), _ids(K, 1), of(K, 3, dtype="int32")],
         "partial(min)"),
    Case("TensorScatterUpdate", lambda t, x: raw.TensorScatterUpdate(tensor=t, indices=[[2], [0]], updates=x),
         [of(4, K, 2), of(2, K, 2)], "rows(1)", fewest=1),
    Case("TensorScatterUpdate", lambda t, x: raw.TensorScatterUpdate(
        tensor=t, indices=tf.range(tf.shape(x)[0])[:, None], updates=x), [of(12, 3), of(K, 3)], "whole"),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, seq_axis=1, batch_axis=0),
         [of(K, 4, 2), of(K, dtype="int32", low=0, high=5)], "rows(0)"),
    Case("ReverseSequence", lambda x: tf.reverse_sequence(x, [1, 3], seq_axis=1, batch_axis=0), [of(2, 4, K)],
         "rows(2)"),
    Case("ReverseSequence", lambda x: tf.reverse_sequence(x, [1, 0], seq_axis=1, batch_axis=0), [of(2, K)], "whole",
         fewest=1),
    Case("DenseBincount", lambda x: raw.DenseBincount(input=x, size=4, weights=tf.zeros([0], tf.float64)),
         [_ids(K, 3)], "rows(0)"),
    Case("DenseBincount", lambda x, w: raw.DenseBincount(input=x, size=4, weights=w), [_ids(K, 3), of(K, 3)],
         "rows(0)"),
    Case("DenseBincount", lambda x, w: raw.DenseBincount(input=x, size=4, weights=w), [_ids(K), of(K)], SUM),
    Case("DenseBincount", lambda x: raw.DenseBincount(
        input=x, size=4, weights=tf.zeros([0], tf.float64), binary_output=True), [_ids(K)], "partial(max)"),
]

# ---- lists ------------------------------------------------------------------------------------------------------


def _pushed(x, y):
    elements = tf.stack([tf.shape(x)[0], 3])
    made = raw.EmptyTensorList(element_shape=elements, max_num_elements=-1, element_dtype=x.dtype)
    made = raw.TensorListPushBack(input_handle=raw.TensorListPushBack(input_handle=made, tensor=x), tensor=y)
    shape = raw.TensorListElementShape(input_handle=made, shape_type=tf.int32)
    rest, last = raw.TensorListPopBack(input_handle=made, element_shape=shape, element_dtype=x.dtype)
    return last, raw.TensorListLength(input_handle=rest), raw.TensorListGetItem(
        input_handle=rest, index=0, element_shape=elements, element_dtype=x.dtype)


def _set(x):
    """A list in which an element was never set, and which is made longer."""
    shape = tf.stack([2, tf.shape(x)[1]])
    made = raw.TensorListReserve(element_shape=shape, num_elements=2, element_dtype=x.dtype)
    made = raw.TensorListSetItem(input_handle=made, index=1, item=x)
    made = raw.TensorListResize(input_handle=made, size=3)
    return raw.TensorListStack(input_handle=made, element_shape=shape, element_dtype=x.dtype)


def _parts(x):
    elements = tf.stack([tf.shape(x)[1], 2])
    made = raw.TensorListFromTensor(tensor=x, element_shape=elements)
    return raw.TensorListGather(input_handle=made, indices=[2, 0], element_shape=elements, element_dtype=x.dtype)


def _scattered(x):
    made = raw.TensorListScatterV2(tensor=x, indices=[1, 0], element_shape=tf.shape(x)[1:], num_elements=-1)
    return raw.TensorListGetItem(input_handle=made, index=0, element_shape=tf.constant([-1]), element_dtype=x.dtype)


def _among_zeros(x):
    made = raw.TensorListFromTensor(tensor=tf.zeros([3, tf.shape(x)[0], 2], x.dtype), element_shape=[-1, 2])
    made = raw.TensorListSetItem(input_handle=made, index=1, item=x)
    return raw.TensorListStack(input_handle=made, element_shape=-1, element_dtype=x.dtype)


def _of_other_rows(x):
    """Elements that have rows in different dimensions."""
    made = raw.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=x.dtype)
    made = raw.TensorListPushBack(input_handle=made, tensor=x)
    made = raw.TensorListPushBack(input_handle=made, tensor=tf.transpose(x))
    rest, last = raw.TensorListPopBack(input_handle=made, element_shape=-1, element_dtype=x.dtype)
    return last, raw.TensorListPopBack(input_handle=rest, element_shape=-1, element_dtype=x.dtype).tensor


def _within(x):
    inner = raw.EmptyTensorList(element_shape=tf.constant([-1, 2]), max_num_elements=-1, element_dtype=x.dtype)
    inner = raw.TensorListPushBack(input_handle=inner, tensor=x)
    outer = raw.EmptyTensorList(element_shape=tf.constant([], tf.int32), max_num_elements=-1, element_dtype=tf.variant)
    outer = raw.TensorListPushBack(input_handle=outer, tensor=inner)
    inner = raw.TensorListGetItem(input_handle=outer, index=0, element_shape=-1, element_dtype=tf.variant)
    return raw.TensorListPopBack(input_handle=inner, element_shape=-1, element_dtype=x.dtype).tensor


def _joined(x):
    made = raw.EmptyTensorList(element_shape=tf.constant([-1, 2]), max_num_elements=-1, element_dtype=x.dtype)
    made = raw.TensorListPushBack(input_handle=made, tensor=x)
    return raw.TensorListConcatV2(input_handle=made, element_shape=[-1, 2], leading_dims=tf.constant([], tf.int64),
                                  element_dtype=x.dtype).tensor


LISTS = [
    Case("EmptyTensorList TensorListPushBack TensorListPopBack TensorListGetItem TensorListLength "
         "TensorListElementShape", _pushed, [of(K, 3), of(K, 3)],
         {"EmptyTensorList": "rows(0)", "TensorListPushBack": "rows(0)", "TensorListPopBack": "rows(0)",
          "TensorListGetItem": "rows(0)", "TensorListLength": "whole", "TensorListElementShape": "whole"}),
    Case("TensorListReserve TensorListSetItem TensorListResize TensorListStack", _set, [of(2, K)],
         {"TensorListReserve": "rows(1)", "TensorListSetItem": "rows(1)", "TensorListResize": "rows(1)",
          "TensorListStack": "rows(2)"}),
    Case("TensorListFromTensor TensorListGather", _parts, [of(3, K, 2)],
         {"TensorListFromTensor": "rows(0)", "TensorListGather": "rows(1)"}),
    Case("TensorListScatterV2 TensorListGetItem", _scattered, [of(2, K)], "rows(0)"),
    Case("TensorListFromTensor", lambda x: raw.TensorListGetItem(
        input_handle=raw.TensorListFromTensor(tensor=x, element_shape=-1), index=0, element_shape=-1,
        element_dtype=x.dtype), [of(K, 2)], "whole", fewest=1),
    Case("TensorListFromTensor TensorListSetItem", _among_zeros, [of(K, 2)], "rows(0)"),
    Case("TensorListPushBack", lambda x: _pushed(x, tf.ones([1, 3], x.dtype)), [summed(1, 3)], SUM),
    Case("TensorListPushBack", _of_other_rows, [of(K, 2)], "whole"),
    Case("EmptyTensorList TensorListPushBack TensorListGetItem", _within, [of(K, 2)], "rows(0)"),
    Case("EmptyTensorList", _joined, [of(K, 2)], "whole"),
]

# ---- stacks and TensorArrays ------------------------------------------------------------------------------------


def v1_control_flow(build):
    """Returns a function that makes stacks and TensorArrays, as TensorFlow 1 does, rather than lists."""

    @functools.wraps(build)
    def built(*inputs):
        was_v2 = tf.compat.v1.control_flow_v2_enabled()
        tf.compat.v1.disable_control_flow_v2()
        try:
            return build(*inputs)
        finally:
            if was_v2:
                tf.compat.v1.enable_control_flow_v2()

    return built


def _in_stack(*elements):
    """Pushes all elements, and pops them again."""
    stack, last = raw.StackV2(max_size=-1, elem_type=elements[0].dtype), []
    for element in elements:
        with tf.control_dependencies(last):
            last = [raw.StackPushV2(handle=stack, elem=element)]
    pushed = last[0]
    for _ in elements:
        with tf.control_dependencies(last):
            last = [raw.StackPopV2(handle=stack, elem_type=element.dtype), *last]
    with tf.control_dependencies([last[0]]):
        closed = raw.StackCloseV2(handle=stack)
    with tf.control_dependencies([closed]):
        return [pushed, *map(tf.identity, last[:-1])]


def _array(dtype, size):
    return raw.TensorArrayV3(size=size, dtype=dtype, element_shape=None, clear_after_read=False)


def _written(x, y):
    array, flow = _array(x.dtype, 2)
    flow = raw.TensorArrayWriteV3(handle=array, index=1, value=x, flow_in=flow)
    flow = raw.TensorArrayWriteV3(handle=array, index=0, value=y, flow_in=flow)
    return raw.TensorArrayReadV3(handle=array, index=1, flow_in=flow, dtype=x.dtype), raw.TensorArrayGatherV3(
        handle=array, indices=tf.range(raw.TensorArraySizeV3(handle=array, flow_in=flow)), flow_in=flow, dtype=x.dtype)


def _scattered_in_array(x):
    array, flow = _array(x.dtype, tf.shape(x)[0])
    flow = raw.TensorArrayScatterV3(handle=array, indices=tf.range(tf.shape(x)[0]), value=x, flow_in=flow)
    return raw.TensorArrayGatherV3(handle=array, indices=[1, 0], flow_in=flow, dtype=x.dtype), raw.TensorArrayReadV3(
        handle=array, index=1, flow_in=flow, dtype=x.dtype)


def _rows_in_array(x):
    array, flow = _array(x.dtype, tf.shape(x)[0])
    flow = raw.TensorArrayScatterV3(handle=array, indices=tf.range(tf.shape(x)[0]), value=x, flow_in=flow)
    return raw.TensorArrayGatherV3(handle=array, indices=tf.range(tf.shape(x)[0]), flow_in=flow, dtype=x.dtype)


def _read_of_gradient(x):
    """An array of which the gradient is written twice, or never."""
    array = tf.TensorArray(x.dtype, size=3, clear_after_read=False).unstack(x)
    read = array.read(1)
    return read, tf.gradients([read ** 2, array.read(1) * 3, array.read(2)], x)


def _read_of_weights(x, w):
    """An array of whole tensors, with summands in its gradient."""
    array = tf.TensorArray(x.dtype, size=2).unstack(w)
    return tf.gradients(tf.reduce_sum(x * array.read(1)), w)


def _joined_array(x):
    array, flow = _array(x.dtype, 2)
    for i in range(2):
        flow = raw.TensorArrayWriteV3(handle=array, index=i, value=x, flow_in=flow)
    return raw.TensorArrayConcatV3(handle=array, flow_in=flow, dtype=x.dtype).value


def _split_array(x):
    array, flow = _array(x.dtype, 2)
    flow = raw.TensorArraySplitV3(handle=array, value=x, lengths=tf.constant([2, 1], tf.int64), flow_in=flow)
    return raw.TensorArrayReadV3(handle=array, index=0, flow_in=flow, dtype=x.dtype)


def _of_two_stacks(x):
    """A handle that may be of either of two stacks."""
    stacks = [raw.StackV2(max_size=-1, elem_type=x.dtype) for _ in range(2)]
    _, is_on = raw.Switch(data=stacks[0], pred=True)
    off, _ = raw.Switch(data=stacks[1], pred=True)
    stack = raw.Merge(inputs=[is_on, off]).output
    with tf.control_dependencies([raw.StackPushV2(handle=stack, elem=x)]):
        return raw.StackPopV2(handle=stacks[0], elem_type=x.dtype)


def _stack_in_stack(x):
    """Loops within loops keep handles in stacks."""
    outer, inner = (raw.StackV2(max_size=-1, elem_type=dtype) for dtype in (tf.resource, x.dtype))
    with tf.control_dependencies([raw.StackPushV2(handle=outer, elem=inner), raw.StackPushV2(handle=inner, elem=x)]):
        inner = raw.StackPopV2(handle=outer, elem_type=tf.resource)
    return raw.StackPopV2(handle=inner, elem_type=x.dtype)


def _kept(ops, build, inputs, gives, **options):
    """Returns a case without gradients but those that it makes; puts give what orders ops, a whole number."""
    states = {op: "whole" if op.endswith(("WriteV3", "ScatterV3")) else gives for op in ops.split()}
    return Case(ops, v1_control_flow(build), inputs, states if isinstance(gives, str) else gives, has_gradient=False,
                **options)


STORES = [
    _kept("StackPushV2 StackPopV2", _in_stack, [of(K, 3), of(K, 3)], "rows(0)"),
    _kept("StackPushV2 StackPopV2", lambda x: _in_stack(tf.zeros_like(x) + 1, x), [of(2, K)], "rows(1)"),
    _kept("StackPushV2 StackPopV2", lambda x: _in_stack(x, tf.zeros([3, tf.shape(x)[1]], x.dtype)), [of(3, K)],
          "rows(1)"),
    _kept("StackPushV2 StackPopV2", lambda x: _in_stack(x, tf.ones([3], x.dtype)), [summed(3)], SUM),
    _kept("StackPushV2 StackPopV2", lambda x: _in_stack(x, tf.transpose(x)), [of(K, 3)], "whole"),
    _kept("StackPushV2 StackPopV2", _in_stack, [of(K, 3), summed(7, 3)], "whole"),
    _kept("StackPopV2", _in_stack, [of(K, dtype="object")], "whole"),
    _kept("StackPopV2", _of_two_stacks, [of(K, 3)], "whole"),
    _kept("StackPopV2", _stack_in_stack, [of(K, 3)], {"StackPopV2": "rows(0) whole"}),
    _kept("TensorArrayWriteV3 TensorArrayReadV3", _written, [of(K, 3), of(K, 3)], "rows(0)", fewest=1),
    _kept("TensorArrayGatherV3", _written, [of(2, K), of(2, K)], "rows(2)", fewest=1),
    _kept("TensorArrayWriteV3 TensorArrayReadV3", lambda x: _written(x, tf.ones([3], x.dtype)), [summed(3)], SUM),
    _kept("TensorArrayReadV3", lambda x: _written(x, tf.transpose(x))[0], [of(K, 1)], "whole", fewest=1),
    _kept("TensorArrayScatterV3 TensorArrayGatherV3", _scattered_in_array, [of(3, K, 2)], "rows(1)", fewest=1),
    _kept("TensorArrayReadV3", _scattered_in_array, [of(3, K, 2)], "rows(0)", fewest=1),
    _kept("TensorArrayScatterV3 TensorArrayGatherV3", _scattered_in_array, [summed(3, 2)], SUM),
    _kept("TensorArrayScatterV3 TensorArrayGatherV3", _rows_in_array, [of(K, 2)], "whole", fewest=1),
    _kept("TensorArrayScatterV3 TensorArrayReadV3", _read_of_gradient, [of(3, K, 2)], "rows(0)", fewest=1),
    _kept("TensorArrayGatherV3", _read_of_gradient, [of(3, K, 2)], "rows(1)", fewest=1),
    _kept("TensorArrayGatherV3", _read_of_weights, [of(K, 2), of(2, 2)], SUM),
    _kept("TensorArrayConcatV3 TensorArrayWriteV3", _joined_array, [of(K, 2)], "whole", fewest=1),
    _kept("TensorArraySplitV3 TensorArrayReadV3", _split_array, [of(3, K)], "whole", fewest=1),
]

# ---- normalisation ----------------------------------------------------------------------------------------------


def _normalised(name, is_training, **attributes):
    def build(x, scale, offset, mean, variance):
        return getattr(raw, name)(x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=0.5,
                                  is_training=is_training, **attributes)[:3]
    return single(build)


_OF_CHANNELS = [IMAGES, of(3), of(3), of(3), of(3, low=1)]


def _normalisations():
    for version in ("", "V2", "V3"):
        ops = f"FusedBatchNorm{version} FusedBatchNormGrad{version}"
        for is_training in (True, False):
            yield Case(ops, _normalised(f"FusedBatchNorm{version}", is_training), _OF_CHANNELS, "rows(0)", fewest=1,
                       tolerance=SINGLE)
    yield Case(ops, _normalised("FusedBatchNormV3", True, exponential_avg_factor=0.25), _OF_CHANNELS, "rows(0)",
               fewest=1, tolerance=SINGLE)
    yield Case(ops, _normalised("FusedBatchNormV3", True), [of(2, 4, K, 3), *_OF_CHANNELS[1:]], "whole", fewest=1,
               tolerance=SINGLE)


# ---- parsing ----------------------------------------------------------------------------------------------------


def _examples(rng, shape):
    def example(number):
        return tf.train.Example(features=tf.train.Features(feature={
            "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
            "two": tf.train.Feature(float_list=tf.train.FloatList(value=[number, 0.5]))})).SerializeToString()
    return np.array([example(number) for number in rng.integers(0, 9, shape)], object)


_NUMBER = {"number": tf.io.FixedLenFeature([], tf.int64)}
_RECORDS = of(K, dtype="object", make=_examples)


def _parsed(features, names=None):
    return lambda records: tf.nest.flatten(tf.io.parse_example(records, features, names and names(records)),
                                           expand_composites=True)


PARSING = [
    Case("ParseExampleV2", _parsed({**_NUMBER, "two": tf.io.FixedLenFeature([2], tf.float32), "none":
                                    tf.io.FixedLenFeature([1, 2], tf.float32, [[3, 4]])}), [_RECORDS], "rows(0)"),
    Case("ParseExampleV2", _parsed(_NUMBER, tf.identity), [_RECORDS], "rows(0)"),
    Case("ParseExampleV2", _parsed({**_NUMBER, "two": tf.io.VarLenFeature(tf.float32)}), [_RECORDS], "whole"),
    Case("ParseExampleV2", _parsed({"two": tf.io.RaggedFeature(tf.float32)}), [_RECORDS], "whole"),
    Case("ParseExampleV2", _parsed({"two": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)}),
         [_RECORDS], "whole"),
    Case("DecodeCSV", lambda x: tf.io.decode_csv(tf.strings.join([x, "1.5"], ","), [0, 0.0]), [texts(K, 2)], "rows(0)"),
    Case("DecodePaddedRaw", lambda x: tf.io.decode_raw(x, tf.uint8, fixed_length=3), [texts(K)], "rows(0)"),
]
CASES = [*WINDOWS, *GATHERING, *LISTS, *STORES, *_normalisations(), *PARSING]
