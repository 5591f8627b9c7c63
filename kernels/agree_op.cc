// The op by which ranks compare, once, what a function synchronises and how.
//
// Tests: tests/training/test_rewritten.py.

#include <atomic>
#include <string>
#include <utility>

#include "agreement.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "warnings.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("PoseidonAgree")
    .Attr("sites: string")
    .Attr("rows: int")
    .Attr("global_rows: int = -1")
    .Attr("static_rows: int = -1")
    .Attr("strict: bool")
    .Attr("plan: string = ''")
    .Attr("refusal: string = ''")
    .Attr("partition: string = ''")
    .Attr("steps: int >= 1 = 1")
    .Attr("function: int = -1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Compares with rank 0, once, what this function synchronises and how; ends the job if they differ.

sites: One line for each site: name, dtype and shape.
rows: Rows of a global batch that one rank computes, rounded up, for planning; -1 if unknown.
global_rows: Rows of a global batch, for planning; -1 if unknown.
static_rows: Rows that this rank's tensors are known to have; -1 if that changes.
strict: Whether to fail when the graph was not rewritten.
plan: One line for each site: the scheme that the plan chose. Empty in a graph that was not rewritten.
refusal: Why the graph was not rewritten.
partition: What the partitioner says of the step for its plan, as JSON.
steps: How many steps the function makes; `sites` are those of the first one.
function: Its number in this process, by which the graph pass finds whose plan it makes; -1 if nobody asks for it.
)doc");

constexpr char kNotTaken[] =
    "TensorFlow has not run the graph pass, or has not taken what it made; enable Grappler "
    "(tf.config.optimizer), and look into TensorFlow's log.";

class AgreeKernel : public AsyncOpKernel {
 public:
  explicit AgreeKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sites", &agreement_text_.sites));
    OP_REQUIRES_OK(context, context->GetAttr("plan", &agreement_text_.plan));
    OP_REQUIRES_OK(context, context->GetAttr("strict", &strict_));
    OP_REQUIRES_OK(context, context->GetAttr("refusal", &refusal_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Communicator* communicator = CommunicatorOf(context, *this, "");
    if (!communicator) return done();
    if ((strict_ || !refusal_.empty()) && agreement_text_.plan.empty()) {
      const std::string error =
          absl::StrCat(strict_ ? "strict=True, but the" : "The", " training graph of rank ", communicator->rank(),
                       " was not rewritten: ", refusal_.empty() ? std::string(kNotTaken) : refusal_);
      communicator->Abort(error, /*seconds=*/0);
      context->SetStatus(absl::FailedPreconditionError(error));
      return done();
    }
    if (agreement_text_.plan.empty() && refusal_.empty() && !has_warned_.exchange(true)) {
      Warn(absl::StrCat("The training graph of rank ", communicator->rank(),
                        " was not rewritten: training computes the same, but slower. ", kNotTaken));
    }
    Agree(communicator, agreement_text_, strict_, [context, done = std::move(done)](const Agreement& agreement) {
      if (!agreement.warning.empty()) Warn(agreement.warning);
      if (!agreement.error.empty()) {
        context->SetStatus(absl::AbortedError(agreement.error));
      }
      done();
    });
  }

 private:
  AgreementText agreement_text_;
  bool strict_ = false;
  std::atomic<bool> has_warned_{false};
  std::string refusal_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonAgree").Device(tensorflow::DEVICE_CPU), AgreeKernel);

}  // namespace
}  // namespace poseidon
