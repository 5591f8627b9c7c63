// PoseidonJoinColumns: what ranks have made of their columns of a factor becomes one matrix on all of them.
//
// Tests: tests/communicator/test_half_factors.py.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "gathered_rows.h"
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
    Factors factors = divided->joining;
    factors.parts.push_back({part.data(), part.TotalBytes(), static_cast<size_t>(DataTypeSize(part.dtype()))});
    auto given = std::make_shared<Given>(Given{ticket, part, {}});
    communicator->SubmitFactors(std::move(factors), [this, context, given, done = std::move(done)](
                                                        const std::string& error, GatheredFactors gathered) {
      if (!error.empty() || !gathered.is_complete) {
        new std::shared_ptr<Given>(given);  // the network may still use it
        context->SetStatus(error.empty() ? absl::InternalError(absl::StrCat(
                                               "'", site_, "' cannot be joined: rank ", gathered.refused_by,
                                               " gives something else than its columns; this is a bug."))
                                         : absl::Status(absl::AbortedError(error)));
        return done();
      }
      given->parts = std::move(gathered.parts[0]);
      Join(context, given, done);
    });
  }

 private:
  struct Given {
    std::shared_ptr<Ticket> ticket;
    Tensor part;
    GatheredPart parts;  // of all ranks, of each one
  };

  // Puts the parts together, on several threads: not on the progress thread, since that takes a while.
  void Join(OpKernelContext* context, const std::shared_ptr<const Given>& given, const DoneCallback& done) const {
    Tensor* whole = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape_, &whole), done);
    const Divided& divided = *given->ticket->divided();
    // Of each line of the matrix, a rank has a range; rows of the matrix lie together, as one line.
    const bool has_rows = divided.factor == 0;
    const int64_t lines = has_rows ? 1 : shape_.dim_size(0);
    const size_t unit = DataTypeSize(whole->dtype()) * (has_rows ? shape_.dim_size(1) : 1);
    for (size_t rank = 0; rank < given->parts.size(); ++rank) {
      const size_t bytes = given->parts[rank].bytes, expected = divided.ranges[rank].size() * unit * lines;
      OP_REQUIRES_ASYNC(context, bytes == expected,
                        absl::InvalidArgumentError(
                            absl::StrCat("'", site_, "' gets ", bytes, " bytes of rank ", rank, ", expected ", expected,
                                         ": build the same model on all ranks, and use the same types.")),
                        done);
    }
    auto copy = [given, unit, to = static_cast<char*>(whole->data()), line_bytes = whole->TotalBytes() / lines](
                    int64_t begin, int64_t end) {
      const std::vector<ColumnRange>& ranges = given->ticket->divided()->ranges;
      for (int64_t line = begin; line < end; ++line) {
        for (size_t rank = 0; rank < ranges.size(); ++rank) {
          const size_t bytes = ranges[rank].size() * unit;
          if (bytes == 0) continue;
          std::memcpy(to + line * line_bytes + ranges[rank].begin * unit, given->parts[rank].data + line * bytes,
                      bytes);
        }
      }
    };
    auto* workers = context->device()->tensorflow_cpu_worker_threads();
    const int64_t tasks = std::min<int64_t>(workers->num_threads, lines);
    auto left = std::make_shared<std::atomic<int64_t>>(tasks);
    for (int64_t task = 0; task < tasks; ++task) {
      workers->workers->Schedule([=] {
        copy(lines * task / tasks, lines * (task + 1) / tasks);
        if (--*left == 0) done();
      });
    }
  }

  std::string site_;
  TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonJoinColumns").Device(tensorflow::DEVICE_CPU), JoinKernel);

}  // namespace
}  // namespace poseidon
