// An op that hides from TensorFlow that a tensor is a constant.
//
// Tests: tests/engines/test_horovod.py.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

REGISTER_OP("PoseidonOpaque")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Returns its input. Stateful, so what follows is computed when the graph runs, and never when it is being
optimized; a collective of a constant, if it is not stateful itself, would then be run by one rank alone.
)doc");

class OpaqueKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonOpaque").Device(tensorflow::DEVICE_CPU), OpaqueKernel);

}  // namespace
}  // namespace poseidon
