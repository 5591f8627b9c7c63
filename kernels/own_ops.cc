// Ops around what each rank computes of its own rows alone, and of nothing else: the moments of a batch normalisation
// that is not synchronised, say. The partition pass gives them their meaning; they return their input.
//
// Tests: tests/graphs/test_partition_own.py.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

REGISTER_OP("PoseidonOwn")
    .Input("value: T")
    .Output("own: T")
    .Attr("T: type")
    .Attr("joins: {'rows', 'sum'}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Begins a part of the step that each rank computes from its own rows alone.

In a graph that was not rewritten it returns its input: every rank computes all rows.

value: Rows; or a value that is the same on all ranks, such as a variable.
own: This rank's rows, as if the batch had no others; or the same value.
joins: How the gradient leaves: 'rows' for rows, 'sum' for a value that is the same on all ranks.
)doc");

REGISTER_OP("PoseidonJoin")
    .Input("own: T")
    .Output("value: T")
    .Attr("T: type")
    .Attr("by: {'rows', 'sum', 'mean'}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Ends the part of the step that PoseidonOwn begins.

In a graph that was not rewritten it returns its input.

own: What this rank has computed from its own rows.
value: By 'rows', the concatenated rows of all ranks. By 'sum', their sum. By 'mean', their mean, weighted by the
  number of rows; floating-point types only.
)doc");

class SameKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonOwn").Device(tensorflow::DEVICE_CPU), SameKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonOwn").Device(tensorflow::DEVICE_DEFAULT), SameKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonJoin").Device(tensorflow::DEVICE_CPU), SameKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonJoin").Device(tensorflow::DEVICE_DEFAULT), SameKernel);

}  // namespace
}  // namespace poseidon
