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

// What each rank gets of a factor that is divided.
FactorPart DividedPart(const Tensor& factor, bool contributes, const Divided& divided, int rank) {
  const size_t element_bytes = DataTypeSize(factor.dtype()), rows = contributes ? factor.dim_size(0) : 0;
  const char* data = static_cast<const char*>(factor.data());
  FactorPart part = {};
  for (const ColumnRange& range : divided.ranges) {
    const size_t row_bytes = range.size() * element_bytes;
    part.columns.push_back({data, rows * row_bytes, row_bytes});
    data += factor.dim_size(0) * row_bytes;
  }
  const FactorPart::Columns& own = part.columns[rank];
  part.data = own.data;
  part.bytes = own.bytes;
  part.row_bytes = own.row_bytes;
  return part;
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

std::shared_ptr<Ticket> TicketOf(OpKernelContext* context) {
  const auto* ref = context->input(0).scalar<tensorflow::Variant>()().get<TicketRef>();
  if (ref) return ref->ticket;
  context->SetStatus(
      absl::InvalidArgumentError(absl::StrCat(context->op_kernel().type_string(), " takes a ticket of PoseidonSend.")));
  return nullptr;
}

// ---- PoseidonSend -------------------------------------------------------------------------------

SendKernel::SendKernel(OpKernelConstruction* context) : OpKernel(context) {
  std::string scheme;
  OP_REQUIRES_OK(context, context->GetAttr("site", &site_->name));
  OP_REQUIRES_OK(context, context->GetAttr("scheme", &scheme));
  divides_ = scheme == "hfb";
  sends_factors_ = divides_ || scheme == "sfb";
  const char* row = divides_ ? "hfb" : sends_factors_ ? "sfb" : "ps";
  shown_ = ShownAs(context, row, {row});
  OP_REQUIRES_OK(context, context->GetAttr("form", &site_->form));
  OP_REQUIRES_OK(context, context->GetAttr("strict", &site_->is_strict));
  OP_REQUIRES_OK(context, context->GetAttr("group", &group_.name));
  OP_REQUIRES_OK(context, context->GetAttr("group_size", &group_.size));
  OP_REQUIRES_OK(context, context->GetAttr("priority", &priority_));
  OP_REQUIRES_OK(context, context->GetAttr("least_saving", &least_saving_));
  OP_REQUIRES_OK(context, context->GetAttr("float_sum", &has_float_sum_));
  OP_REQUIRES_OK(context, context->GetAttr("divided", &divided_));
  OP_REQUIRES_OK(context, context->GetAttr("joins", &joins_));
  OP_REQUIRES_OK(context, context->GetAttr("clocked", &is_clocked_));
  OP_REQUIRES(context, !divides_ || (divided_ <= 1 && context->num_inputs() > 2),
              absl::InvalidArgumentError(absl::StrCat("'", site_->name, "' divides tensor ", divided_, " of ",
                                                      context->num_inputs() - 1, ", expected U or V: 0 or 1 of 2.")));
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
  exchange.is_gradient = !is_clocked_;
  exchange.is_clocked = is_clocked_;
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
  for (const Tensor& tensor : tensors) {
    if (tensor.dims() == 2) continue;
    context->SetStatus(absl::InvalidArgumentError(
        absl::StrCat("A factor of '", site_->name, "' has shape ", tensor.shape().DebugString(),
                     ", but factors are matrices; reshape it to [rows, columns].")));
    return nullptr;
  }
  std::optional<Divided> divided;
  if (divides_) {
    divided = Divide(context, *communicator, &tensors);
    if (!divided) return nullptr;
  }
  auto ticket = std::make_shared<Ticket>(std::move(tensors), Place(context), std::move(divided));
  Factors factors;
  factors.site = site_->name;
  factors.form = site_->form;
  factors.row = shown_.row;
  factors.is_blocking = shown_.is_blocking;
  factors.group = group_;
  factors.priority = priority_;
  factors.on_device = ticket->on_device();
  factors.is_first_half = divides_ && joins_;
  const bool may_shorten = least_saving_ < 1 && !communicator->is_on_one_node() && !ticket->on_device();
  for (const Tensor& tensor : ticket->inputs()) {
    if (divides_ && factors.parts.size() == ticket->divided()->factor) {
      factors.parts.push_back(DividedPart(tensor, contributes, *ticket->divided(), communicator->rank()));
      continue;
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

// Puts the columns of each rank together in the memory of the factor that is divided. Fails the op and returns nothing
// on a GPU.
std::optional<Divided> SendKernel::Divide(OpKernelContext* context, const Communicator& communicator,
                                          std::vector<Tensor>* factors) const {
  if (Place(context)) {
    context->SetStatus(absl::UnimplementedError(absl::StrCat(
        "'", site_->name, "' divides a factor on a GPU, expected one on the host: place the node there.")));
    return std::nullopt;
  }
  Tensor& factor = (*factors)[divided_];
  const int64_t rows = factor.dim_size(0), columns = factor.dim_size(1);
  Divided divided;
  divided.factor = divided_;
  divided.ranges = DivideColumns(columns, communicator.size(), communicator.servers());
  divided.own = divided.ranges[communicator.rank()];
  divided.joining.site = site_->name;
  divided.joining.form = "joined";
  divided.joining.row = shown_.row;
  divided.joining.is_blocking = shown_.is_blocking;
  divided.joining.priority = priority_;
  divided.joining.since = Clock::now();
  Tensor by_rank;
  context->SetStatus(context->allocate_temp(factor.dtype(), factor.shape(), &by_rank));
  if (!context->status().ok()) return std::nullopt;
  const size_t element_bytes = DataTypeSize(factor.dtype());
  const char* const from = static_cast<const char*>(factor.data());
  char* to = static_cast<char*>(by_rank.data());
  for (const ColumnRange& range : divided.ranges) {
    for (int64_t row = 0; row < rows && range.size() > 0; ++row, to += range.size() * element_bytes) {
      std::memcpy(to, from + (row * columns + range.begin) * element_bytes, range.size() * element_bytes);
    }
  }
  factor = std::move(by_rank);
  return divided;
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
  std::shared_ptr<Ticket> ticket = TicketOf(context);
  if (!ticket) return done();
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
    const bool is_divided = ticket->divided() && ticket->divided()->factor == i;
    const int64_t columns = is_divided ? ticket->divided()->own.size() : ticket->inputs()[i].dim_size(1);
    // Where there are no columns, the other factor has as many rows.
    const size_t counted = is_divided && columns == 0 ? 1 - i : i;
    const Tensor& mine = ticket->inputs()[counted];
    const GatheredPart part = gathered.is_complete ? gathered.parts[counted] : GatheredPart();
    const int64_t rows = NumRows(part, (counted == i ? columns : mine.dim_size(1)) * DataTypeSize(mine.dtype()));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(i, TensorShape({rows, columns}), &output));
    if (output->NumElements() > 0) CopyFactor(context, ticket, i, static_cast<char*>(output->data()));
  }
}

}  // namespace poseidon
