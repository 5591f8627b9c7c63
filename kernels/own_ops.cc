// Ops around what each rank computes of its own rows alone, and of nothing else: the moments of a batch normalisation
// that is not synchronised, say. The partition pass gives them their meaning; they return their input.

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
Begins what each rank computes of its own rows alone.

In a graph that was not rewritten it returns its input: every rank computes of all rows.

value: Rows; or what is the same on all ranks, such as a variable.
own: This rank's rows, of which what follows is computed as if there were no others; or the same value.
joins: How the gradient leaves again: that of rows as 'rows', that of a value that all ranks have as their 'sum'.
)doc");

REGISTER_OP("PoseidonJoin")
    .Input("own: T")
    .Output("value: T")
    .Attr("T: type")
    .Attr("by: {'rows', 'sum', 'mean'}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Ends what each rank computes of its own rows alone: see PoseidonOwn.

In a graph that was not rewritten it returns its input.

own: What each rank has made of its own rows.
value: Of all ranks, by 'rows': their rows, one rank's after the other's. By 'sum': the sum. By 'mean': the mean,
  in which each rank counts as much as it has rows; of a floating-point type.
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
