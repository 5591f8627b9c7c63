"""Ops on images: convolutions, pooling, resizing. Their rows are images, which are the first dimension.

Tests: tests/graphs/test_partition_families.py.
"""

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM


def images(*numbers: int, local: int | None = None) -> Rule:
    """Returns the rule of an op whose outputs, and inputs with these numbers, have rows.

    Args:
        *numbers: Numbers of inputs.
        local: Number of the input that is the output's shape, None if there is none.
    """

    def rule(case: Case) -> Outcome | None:
        if Rows(0) not in [case.states[i] for i in numbers] or any(
                not case.rank(i) or not case_lib.of_rows(case.sizes(i)[0]) for i in numbers):
            return None
        is_whole_shape = False
        if local is not None:
            length = case.sizes(local)[0] if case.rank(local) == 1 else None
            if length is None:
                return None
            # A convolution's input sizes may be only the height and width of an image.
            is_whole_shape = length.constant != 2
        return case.all(dict.fromkeys(numbers, Rows(0)), Rows(0), local={local: 0} if is_whole_shape else {})

    return rule


def linear(rule: Rule, *numbers: int) -> Rule:
    """Returns a rule that also gives summands; `numbers` are the inputs in which the op is linear."""
    return lambda case: case.linear_in(*numbers) or rule(case)


def pixels(case: Case) -> Outcome | None:
    """Changes colours, the last dimension, pixel by pixel."""
    state, rank = case.states[0], case.rank(0)
    return case.all({0: state}, state) if isinstance(state, Rows) and rank and state.dimension < rank - 1 else None


def contrast(case: Case) -> Outcome | None:
    """AdjustContrastv2(images, factor): takes the mean over each image, the last three dimensions."""
    state, rank = case.states[0], case.rank(0)
    return case.all({0: state}, state) if isinstance(state, Rows) and rank and state.dimension < rank - 3 else None


def with_index(*numbers: int) -> Rule:
    """Returns the rule of an op that returns, or takes, the index of a maximum in its image."""

    def rule(case: Case) -> Outcome | None:
        return None if case.attr("include_batch_in_index").b else images(*numbers)(case)

    return rule


def projected(case: Case) -> Outcome | None:
    """ImageProjectiveTransform(images, transforms, shape), with one transform per image, or one for all."""
    if Rows(0) not in case.states[:2] or any(case.rank(i) is None for i in (0, 1)):
        return None
    takes = {0: Rows(0)} if case.is_one(1, 0) else {0: Rows(0), 1: Rows(0)}
    if any(not case_lib.same_size(case.sizes(i)[0], case.sizes(0)[0]) for i in takes):
        return None
    return case.all(takes, Rows(0))


def filters(case: Case) -> Outcome | None:
    """Gradients of filters are sums over images."""
    if Rows(0) not in (case.states[0], case.states[2]) or any(
            not case.rank(i) or not case_lib.of_rows(case.sizes(i)[0]) for i in (0, 2)):
        return None
    return case.all({0: Rows(0), 2: Rows(0)}, SUM)


def add_bias(case: Case) -> Outcome | None:
    """BiasAdd(x, bias)."""
    state = case.states[0]
    if not isinstance(state, Rows) or isinstance(case.states[1], Partial):
        return None
    return None if state.dimension == _channels(case, 0) else case.all({0: state}, state)


def gradient_of_bias(case: Case) -> Outcome | None:
    """BiasAddGrad: a sum over all dimensions except the channels."""
    state = case.states[0]
    if state == SUM:
        return case.all({0: SUM}, SUM)
    if not isinstance(state, Rows) or case.rank(0) is None:
        return None
    return None if state.dimension == _channels(case, 0) else case.all({0: state}, SUM)


def _channels(case: Case, i: int) -> int:
    return 1 if case.attr("data_format").s.startswith(b"NC") else (case.rank(i) or 0) - 1


_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
_TRANSPOSED = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
_OF_FILTERS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_CONVOLUTIONS, linear(images(0), 0, 1)),
    **dict.fromkeys(_OF_FILTERS, linear(filters, 0, 2)),
    **dict.fromkeys(_TRANSPOSED, linear(images(2, local=0), 1, 2)),
    "Dilation2D": images(0),
    "Dilation2DBackpropFilter": filters,
    "Dilation2DBackpropInput": images(0, 2),
    **dict.fromkeys(("MaxPool", "MaxPoolV2", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN", "DepthToSpace",
                     "SpaceToDepth", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea",
                     "ScaleAndTranslate", "ResizeNearestNeighborGrad", "ExtractImagePatches", "ExtractVolumePatches"),
                    images(0)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPoolGradV2", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPoolGradGradV2",
                     "MaxPool3DGradGrad", "LRNGrad"), images(0, 1, 2)),
    "MaxPoolWithArgmax": with_index(0),
    "MaxPoolGradWithArgmax": with_index(0, 1, 2),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), images(1, local=0)),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad"), images(0, 1)),
    **dict.fromkeys(("AdjustHue", "AdjustSaturation", "RGBToHSV", "HSVToRGB"), pixels),
    "AdjustContrastv2": contrast,
    **dict.fromkeys(("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"), projected),
    "BiasAdd": add_bias,
    "BiasAddV1": add_bias,
    "BiasAddGrad": gradient_of_bias,
}
DIVIDING = frozenset((*_CONVOLUTIONS, *_TRANSPOSED))
