// The ops of gradients that are slices: slices_kernels.cc has their kernels.
//
// Tests: tests/graphs/test_passes.py, tests/training/test_training.py.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SyncSlicesShape(InferenceContext* c) {
  ShapeHandle values, rest, rows;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &values));
  TF_RETURN_IF_ERROR(c->Subshape(values, 1, &rest));
  TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(c->UnknownDim()), rest, &rows));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, rows);
  return absl::OkStatus();
}

absl::Status DenseShape(InferenceContext* c) {
  PartialTensorShape shape;
  ShapeHandle dense;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &dense));
  c->set_output(0, dense);
  return absl::OkStatus();
}

REGISTER_OP("PoseidonSyncSlices")
    .Input("indices: Tidx")
    .Input("values: T")
    .Input("contributes: bool")
    .Output("all_indices: Tidx")
    .Output("sums: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tidx: {int32, int64}")
    .Attr("site: string")
    .Attr("shape: shape")
    .Attr("eager: bool = false")
    .Attr("priority: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SyncSlicesShape)
    .Doc(R"doc(
Sums a gradient that is slices over all ranks: a complete synchronisation of one site.

Every rank adds up its rows with the same index, sends them to all others, and adds up what it receives in
rank order; half and bfloat16 in float with one rounding. If a rank sends the gradient of this site
dense, all do.

indices: Which row of the variable each row of `values` belongs to.
values: Rows of this rank's gradient.
contributes: A scalar. False leaves this rank out of the sum.
all_indices: In ascending order, each once. All rows of the variable when it was sent dense.
sums: Their rows, summed over ranks.
site: Same as in PoseidonSync.
shape: The shape of the variable, fully known.
eager, priority: Same as in PoseidonSync.
)doc");

REGISTER_OP("PoseidonDenseSlices")
    .Input("indices: Tidx")
    .Input("values: T")
    .Output("dense: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tidx: {int32, int64}")
    .Attr("shape: shape")
    .SetShapeFn(DenseShape)
    .Doc(R"doc(
Makes a dense tensor of slices. Rows with the same index are added in their order.

indices: Which row of `dense` each row of `values` belongs to.
values: The rows.
shape: The shape of `dense`, fully known.
)doc");

}  // namespace
}  // namespace poseidon
