// The ops through which a graph exchanges tensors with the other ranks.
//
// Tests: tests/communicator/test_ops.py.

#include "sync_shape.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SumShape(InferenceContext* c) {
  ShapeHandle scalar;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &scalar));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

absl::Status GatherShape(InferenceContext* c) {
  ShapeHandle value, rest, out, scalar;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &value));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &scalar));
  TF_RETURN_IF_ERROR(c->Subshape(value, 1, &rest));
  TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(c->UnknownDim()), rest, &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

}  // namespace

// These ops are stateful: no optimization may merge, fold or prune a message that the other
// ranks wait for. They are also marked as distributed communication, which tells the runtime that
// a function that holds them must not block the thread it is called from.

REGISTER_OP("PoseidonSync")
    .Input("gradient: T")
    .Input("contributes: bool")
    .Output("sum: T")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("site: string")
    .Attr("shape: shape = { unknown_rank: true }")
    .Attr("wire_dtype: {'', 'bfloat16'} = ''")
    .Attr("eager: bool = false")
    .Attr("priority: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SyncShape)
    .Doc(R"doc(
Sums a gradient over all ranks: a complete synchronisation of one site.

Every rank runs the op once per step with the same site, dtype and number of elements. Elements
are added in rank order, half and bfloat16 in float with one rounding, so all ranks and all runs
get the same bits. The op completes when the sum is there and blocks no thread until then.

gradient: This rank's gradient.
contributes: A scalar. False leaves this rank out of the sum, whatever its gradient holds.
sum: The sum over the ranks that contribute; zeros when none does.
site: The path of the variable, and which synchronisation of it within the step this is.
shape: The gradient's shape, as far as it is known.
wire_dtype: The type that the gradient and its sum travel in; empty for their own. Rounds both.
eager: Whether Python waits for it and computes nothing meanwhile, which timelines want to know.
priority: Exchanges with smaller numbers overtake it on their way, at its next piece.
)doc");

REGISTER_OP("PoseidonAllReduce")
    .Input("value: T")
    .Input("contributes: bool")
    .Output("sum: T")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("site: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SumShape)
    .Doc(R"doc(
Sums a tensor that is not a gradient over all ranks, as PoseidonSync does.

A graph pass that plans how gradients travel looks at PoseidonSync and leaves this op alone.

value: This rank's value.
contributes: A scalar. False leaves this rank out of the sum, whatever its value holds.
sum: The sum over the ranks that contribute; zeros when none does.
site: A name that is the same on all ranks and not in flight twice.
)doc");

REGISTER_OP("PoseidonBroadcast")
    .Input("value: T")
    .Output("value_of_root: T")
    .Attr(
        "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32,"
        " uint64, bool}")
    .Attr("site: string")
    .Attr("root: int >= 0 = 0")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Gives every rank the value of one rank.

value: The value that `root` sends; on the other ranks only its shape matters, which must be the same.
value_of_root: The bits of root's value.
site: A name that is the same on all ranks and not in flight twice.
root: The rank whose value is sent.
group, group_size: Same as in PoseidonSend.
)doc");

REGISTER_OP("PoseidonAbort")
    .Input("reason: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends the job: all ranks fail with the reason.

reason: A scalar, a sentence for the user.
)doc");

REGISTER_OP("PoseidonSize")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns the number of ranks of the job, a scalar. Stateful, since a saved graph runs in many jobs.
)doc");

REGISTER_OP("PoseidonAllGather")
    .Input("value: T")
    .Input("contributes: bool")
    .Output("rows: T")
    .Attr(
        "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32,"
        " uint64, bool, complex64, complex128}")
    .Attr("site: string")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(GatherShape)
    .Doc(R"doc(
Gives every rank the rows of all ranks.

value: This rank's rows; ranks may have different numbers of them.
contributes: A scalar. False omits this rank's rows.
rows: The rows of all ranks, in rank order.
site: A name that is the same on all ranks and not in flight twice.
group, group_size: Same as in PoseidonSend.
)doc");

}  // namespace poseidon
