// What the kernels of PoseidonSend and PoseidonRecv do on any device, and those of the CPU.
//
// Tests: tests/graphs/test_passes.py, tests/communicator/test_staging.py, tests/training/test_rewritten.py.

#include "send_recv_kernels.h"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "gathered_rows.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/profiler/lib/traceme.h"
#include "warnings.h"

namespace poseidon {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// A Ticket as an element of a tensor.
struct TicketRef {
  std::shared_ptr<Ticket> ticket;

  static const char kTypeName[];
  std::string TypeName() const { return kTypeName; }
  std::string DebugString() const { return kTypeName; }
  void Encode(tensorflow::VariantTensorData*) const {}  // it never leaves the process
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

const char TicketRef::kTypeName[] = "poseidon::Ticket";

void Finish(const std::shared_ptr<Ticket>& ticket, const std::string& error, GatheredFactors gathered) {
  // The network may still use its memory after a failure, so then it is never given back.
  if (!error.empty()) new std::shared_ptr<Ticket>(ticket);
  ticket->Finish(error, std::move(gathered));
}

class CpuSendKernel : public SendKernel {
 public:
  using SendKernel::SendKernel;

  // Looking for zeros takes a while: other ops need not wait for it on the same thread.
  bool IsExpensive() override { return least_saving_ < 1; }

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext*) const override { return nullptr; }
};

class CpuRecvKernel : public RecvKernel {
 public:
  using RecvKernel::RecvKernel;

 protected:
  void AwaitSum(OpKernelContext*, const Ticket&, std::function<void()> then) override { then(); }

  void CopyFactor(OpKernelContext*, const std::shared_ptr<Ticket>& ticket, size_t factor, char* output) override {
    CopyRows(ticket->gathered().parts[factor], output);
  }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonSend").Device(tensorflow::DEVICE_CPU), CpuSendKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonRecv").Device(tensorflow::DEVICE_CPU), CpuRecvKernel);

}  // namespace

// ---- what is under way --------------------------------------------------------------------------

Ticket::~Ticket() {
  if (sum_ && on_device_ && on_device_->complete && !was_received_) {
    on_device_->device->KeepUntilDone(on_device_->device->up(), std::make_shared<Tensor>(*sum_));
  }
}

void Ticket::Finish(const std::string& error, GatheredFactors gathered) {
  std::function<void()> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_done_ = true;
    error_ = error;
    gathered_ = std::move(gathered);
    waiting = std::move(waiting_);
  }
  if (waiting) waiting();
}

void Ticket::WhenDone(std::function<void()> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_done_) {
      waiting_ = std::move(then);
      return;
    }
  }
  then();
}

// ---- PoseidonSend -------------------------------------------------------------------------------

SendKernel::SendKernel(OpKernelConstruction* context) : OpKernel(context) {
  std::string scheme;
  OP_REQUIRES_OK(context, context->GetAttr("site", &site_->name));
  OP_REQUIRES_OK(context, context->GetAttr("scheme", &scheme));
  sends_factors_ = scheme == "sfb";
  const char* row = sends_factors_ ? "sfb" : "ps";
  shown_ = ShownAs(context, row, {row});
  OP_REQUIRES_OK(context, context->GetAttr("form", &site_->form));
  OP_REQUIRES_OK(context, context->GetAttr("strict", &site_->is_strict));
  OP_REQUIRES_OK(context, context->GetAttr("group", &group_.name));
  OP_REQUIRES_OK(context, context->GetAttr("group_size", &group_.size));
  OP_REQUIRES_OK(context, context->GetAttr("priority", &priority_));
  OP_REQUIRES_OK(context, context->GetAttr("least_saving", &least_saving_));
  OP_REQUIRES_OK(context, context->GetAttr("float_sum", &has_float_sum_));
  const tensorflow::DataType type = context->input_type(0);
  OP_REQUIRES(context,
              !has_float_sum_ || (!sends_factors_ && (type == tensorflow::DT_HALF || type == tensorflow::DT_BFLOAT16)),
              absl::InvalidArgumentError(absl::StrCat("'", site_->name, "' has float_sum and a tensor of type ",
                                                      DataTypeString(type), " by ", scheme,
                                                      ", expected half or bfloat16 by ps.")));
}

void SendKernel::Compute(OpKernelContext* context) {
  // TensorFlow's profiler shows only kernels that are expensive, or say themselves what they do.
  std::optional<tsl::profiler::TraceMe> trace;
  if (!IsExpensive()) trace.emplace([this] { return absl::StrCat(name(), ":PoseidonSend"); });
  Communicator* communicator = CommunicatorOf(context, *this, site_->name);
  if (!communicator) return;
  Tensor* output = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
  const bool contributes = context->input(context->num_inputs() - 1).scalar<bool>()();
  std::shared_ptr<Ticket> ticket;
  if (sends_factors_) {
    ticket = SendFactors(context, communicator, contributes);
  } else {
    ticket = SendGradient(context, communicator, contributes);
  }
  output->scalar<tensorflow::Variant>()() = TicketRef{std::move(ticket)};
}

std::shared_ptr<Ticket> SendKernel::SendGradient(OpKernelContext* context, Communicator* communicator,
                                                 bool contributes) {
  const Tensor& gradient = context->input(0);
  const tensorflow::DataType type = has_float_sum_ ? tensorflow::DT_FLOAT : gradient.dtype();
  // In place when the graph has no other use for the gradient.
  Tensor sum;
  context->SetStatus(context->forward_input_or_allocate_temp({0}, type, gradient.shape(), &sum));
  if (!context->status().ok()) return nullptr;
  auto ticket = std::make_shared<Ticket>(gradient, std::move(sum), Place(context));
  Exchange exchange;
  exchange.site = site_->name;
  exchange.dtype = ToDataType(type);
  if (has_float_sum_) exchange.input_dtype = ToDataType(gradient.dtype());
  exchange.count = gradient.NumElements();
  exchange.input = gradient.data();
  exchange.output = ticket->sum().data();
  exchange.contributes = contributes;
  exchange.is_gradient = true;
  exchange.row = shown_.row;
  exchange.is_blocking = shown_.is_blocking;
  exchange.group = group_;
  exchange.priority = priority_;
  exchange.on_device = ticket->on_device();
  communicator->Submit(std::move(exchange), [ticket](const std::string& error) { Finish(ticket, error, {}); });
  return ticket;
}

std::shared_ptr<Ticket> SendKernel::SendFactors(OpKernelContext* context, Communicator* communicator,
                                                bool contributes) {
  std::vector<Tensor> tensors;
  for (int i = 0; i + 1 < context->num_inputs(); ++i) tensors.push_back(context->input(i));
  auto ticket = std::make_shared<Ticket>(std::move(tensors), Place(context));
  Factors factors;
  factors.site = site_->name;
  factors.form = site_->form;
  factors.row = shown_.row;
  factors.is_blocking = shown_.is_blocking;
  factors.group = group_;
  factors.priority = priority_;
  factors.on_device = ticket->on_device();
  const bool may_shorten = least_saving_ < 1 && !communicator->is_on_one_node() && !ticket->on_device();
  for (const Tensor& tensor : ticket->inputs()) {
    if (tensor.dims() != 2) {
      context->SetStatus(absl::InvalidArgumentError(
          absl::StrCat("A factor of '", site_->name, "' has shape ", tensor.shape().DebugString(),
                       ", but factors are matrices; reshape it to [rows, columns].")));
      return nullptr;
    }
    const size_t element_bytes = DataTypeSize(tensor.dtype()), row_bytes = tensor.dim_size(1) * element_bytes;
    const size_t bytes = contributes ? tensor.dim_size(0) * row_bytes : 0;
    factors.parts.push_back({tensor.data(), bytes, row_bytes, element_bytes});
    if (may_shorten) {
      factors.parts.back().without_zeros = LeaveOutZeros(tensor.data(), bytes, element_bytes, least_saving_);
    }
  }
  communicator->SubmitFactors(
      std::move(factors), [site = site_, communicator, ticket](const std::string& error, GatheredFactors gathered) {
        if (error.empty() && gathered.refused_by >= 0) {
          const std::string refusal = NoteRefusal(site.get(), communicator, gathered.refused_by);
          return Finish(ticket, refusal, std::move(gathered));
        }
        Finish(ticket, error, std::move(gathered));
      });
  return ticket;
}

// Another rank has other factors than this one, or none. Returns why that ends the job, if it does.
std::string SendKernel::NoteRefusal(Site* site, Communicator* communicator, int rank) {
  const std::string reason = absl::StrCat("'", site->name,
                                          "' cannot travel as factors, since the training graphs of "
                                          "ranks ",
                                          communicator->rank(), " and ", rank, " were not rewritten alike");
  if (site->is_strict) {
    const std::string error = absl::StrCat("strict=True, but ", reason, ".");
    communicator->Abort(error, /*seconds=*/0);
    return error;
  }
  if (!site->has_warned.exchange(true)) Warn(reason + ": it travels dense.");
  return "";
}

// ---- PoseidonRecv -------------------------------------------------------------------------------

void RecvKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const auto* ref = context->input(0).scalar<tensorflow::Variant>()().get<TicketRef>();
  OP_REQUIRES_ASYNC(context, ref != nullptr, absl::InvalidArgumentError("PoseidonRecv takes a ticket of PoseidonSend."),
                    done);
  std::shared_ptr<Ticket> ticket = ref->ticket;
  ticket->WhenDone([this, context, ticket, done = std::move(done)] {
    if (!ticket->error().empty()) {
      context->SetStatus(absl::AbortedError(ticket->error()));
      return done();
    }
    Tensor complete(tensorflow::DT_BOOL, TensorShape({}));
    complete.scalar<bool>()() = !ticket->has_factors() || ticket->gathered().is_complete;
    context->set_output(context->num_outputs() - 1, complete);
    if (!ticket->has_factors()) {
      return AwaitSum(context, *ticket, [context, ticket, done] {
        context->set_output(0, ticket->sum());
        ticket->Received();
        done();
      });
    }
    // Copying takes a while: not on the progress thread.
    context->device()->tensorflow_cpu_worker_threads()->workers->Schedule([this, context, ticket, done] {
      CopyFactors(context, ticket);
      done();
    });
  });
}

// Concatenates the rows of all ranks.
void RecvKernel::CopyFactors(OpKernelContext* context, const std::shared_ptr<Ticket>& ticket) {
  const GatheredFactors& gathered = ticket->gathered();
  for (size_t i = 0; i < ticket->inputs().size(); ++i) {
    const Tensor& mine = ticket->inputs()[i];
    const int64_t columns = mine.dim_size(1);
    const GatheredPart part = gathered.is_complete ? gathered.parts[i] : GatheredPart();
    const int64_t rows = NumRows(part, columns * DataTypeSize(mine.dtype()));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(i, TensorShape({rows, columns}), &output));
    if (rows > 0) CopyFactor(context, ticket, i, static_cast<char*>(output->data()));
  }
}

}  // namespace poseidon
