// CPU kernels of the exchange ops: they hand the tensor to this process's communicator and return
// their thread; the communicator's progress thread completes the op.

#include <string>
#include <utility>

#include "c_api.h"
#include "dtypes.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class ExchangeKernel : public AsyncOpKernel {
 public:
  explicit ExchangeKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
  }

 protected:
  // Exchanges input 0 as `exchange` says (its form; this fills in the memory) into output 0.
  void Run(OpKernelContext* context, Exchange exchange, DoneCallback done) {
    Communicator* communicator = ProcessCommunicator();
    OP_REQUIRES_ASYNC(context, communicator != nullptr,
                      absl::FailedPreconditionError(absl::StrCat(
                          type_string(), " '", site_, "' runs outside a job; create a "
                          "tf_poseidon.PoseidonStrategy in this process first.")),
                      done);
    // In place when the graph has no other use for the input: no second copy of the gradients.
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context,
                         context->forward_input_or_allocate_output(
                             {0}, 0, context->input(0).shape(), &output),
                         done);
    // The network may still use this memory after a failure, so then it is never given back.
    auto* tensors = new std::pair<Tensor, Tensor>(context->input(0), *output);
    exchange.site = site_;
    exchange.input = tensors->first.data();
    exchange.output = tensors->second.data();
    communicator->Submit(std::move(exchange),
                         [context, tensors, done = std::move(done)](const std::string& error) {
                           if (error.empty()) {
                             delete tensors;
                           } else {
                             context->SetStatus(absl::AbortedError(error));
                           }
                           done();
                         });
  }

  std::string site_;
};

class SumKernel : public ExchangeKernel {
 public:
  using ExchangeKernel::ExchangeKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Exchange exchange;
    exchange.dtype = ToDataType(context->input(0).dtype());
    exchange.count = context->input(0).NumElements();
    exchange.contributes = context->input(1).scalar<bool>()();
    exchange.is_gradient = type_string() == "PoseidonSync";
    Run(context, std::move(exchange), std::move(done));
  }
};

class BroadcastKernel : public ExchangeKernel {
 public:
  explicit BroadcastKernel(OpKernelConstruction* context) : ExchangeKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Exchange exchange;
    exchange.dtype = DataType::kBytes;
    exchange.count = context->input(0).tensor_data().size();
    exchange.root = root_;
    Run(context, std::move(exchange), std::move(done));
  }

 private:
  int root_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonSync").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllReduce").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastKernel);

}  // namespace
}  // namespace poseidon
