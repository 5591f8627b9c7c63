// PoseidonJoinColumns: what ranks have made of their columns of a factor becomes one matrix on all of them.
//
// Tests: tests/communicator/test_half_factors.py.

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "columns.h"
#include "join_parts.h"
#include "process_communicator.h"
#include "send_recv_kernels.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_OP("PoseidonJoinColumns")
    .Input("ticket: variant")
    .Input("part: T")
    .Output("whole: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("shape: shape")
    .Attr("site: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc(R"doc(
Gives all ranks what each has made of its columns of a factor: the second half of an exchange by "hfb".

ticket: From PoseidonSend with scheme "hfb", of an exchange that is complete.
part: This rank's rows of the matrix if U was divided, its columns if V was.
whole: The matrix, the same on all ranks.
shape: The shape of the matrix.
site: Same as in PoseidonSend.
)doc");

class JoinKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit JoinKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
    OP_REQUIRES(context, shape_.dims() == 2 && shape_.num_elements() > 0,
                absl::InvalidArgumentError(absl::StrCat("'", site_, "' joins parts of ", shape_.DebugString(),
                                                        ", expected a matrix with elements.")));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    const std::shared_ptr<Ticket> ticket = TicketOf(context);
    if (!ticket) return done();
    const std::optional<Divided>& divided = ticket->divided();
    const Tensor& part = context->input(1);
    OP_REQUIRES_ASYNC(context, divided && ticket->gathered().is_complete,
                      absl::InvalidArgumentError(absl::StrCat(
                          "'", site_, "' joins what was made of no factors, expected those of scheme \"hfb\".")),
                      done);
    const size_t dimension = divided->factor;
    TensorShape expected = shape_;
    expected.set_dim(dimension, divided->own.size());
    const int64_t size = ticket->inputs()[dimension].dim_size(1);
    OP_REQUIRES_ASYNC(context, part.shape() == expected && shape_.dim_size(dimension) == size,
                      absl::InvalidArgumentError(absl::StrCat(
                          "'", site_, "' joins a part of shape ", part.shape().DebugString(), " to ",
                          shape_.DebugString(), ", expected ", divided->own.size(), " of ", size, " columns.")),
                      done);
    JoinParts(context, communicator, divided->joining, part,
              DivideMatrix(shape_.dim_size(0), shape_.dim_size(1), static_cast<int>(dimension), communicator->size(),
                           communicator->servers()),
              shape_, std::move(done));
  }

 private:
  std::string site_;
  TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonJoinColumns").Device(tensorflow::DEVICE_CPU), JoinKernel);

}  // namespace
}  // namespace poseidon
