// What the kernels of the exchange ops do on any device, and those of the CPU.
//
// Tests: tests/communicator/test_ops.py, tests/communicator/test_row_ops.py, tests/communicator/test_staging.py.

#include "exchange_kernels.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "dtypes.h"
#include "gathered_rows.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/denormal.h"

namespace poseidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class AbortKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const std::string reason = context->input(0).scalar<tensorflow::tstring>()();
    if (Communicator* communicator = CommunicatorOf(context, *this, "")) {
      communicator->Abort(reason, /*seconds=*/0);
      context->SetStatus(absl::AbortedError(reason));
    }
  }
};

class SizeKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override {
    Communicator* communicator = CommunicatorOf(context, *this, "");
    if (!communicator) return;
    Tensor* size = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &size));
    size->scalar<int32_t>()() = communicator->size();
  }
};

// Converts between bfloat16 and a wider type, on the GPU if tensors have a place there.
absl::Status Convert(const OnDevice* place, const Tensor& from, Tensor* to) {
  const DataType dtype = ToDataType(from.dtype()), out_dtype = ToDataType(to->dtype());
  if (!place) {
    const tensorflow::port::ScopedDontFlushDenormal as_on_gpus;
    poseidon::Convert(dtype, from.data(), from.NumElements(), out_dtype, to->data());
    return absl::OkStatus();
  }
  place->device->Convert(place->stream, dtype, from.data(), from.NumElements(), out_dtype, to->data());
  return FailureOf(*place->device);
}

REGISTER_KERNEL_BUILDER(Name("PoseidonSync").Device(tensorflow::DEVICE_CPU), SyncKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllReduce").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllGather").Device(tensorflow::DEVICE_CPU), GatherKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonSize").Device(tensorflow::DEVICE_CPU), SizeKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAbort").Device(tensorflow::DEVICE_CPU), AbortKernel);

}  // namespace

// ---- what all have ------------------------------------------------------------------------------

ExchangeKernel::ExchangeKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
  OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
  if (context->HasAttr("priority")) OP_REQUIRES_OK(context, context->GetAttr("priority", &priority_));
  if (!context->HasAttr("group")) return;
  OP_REQUIRES_OK(context, context->GetAttr("group", &group_.name));
  OP_REQUIRES_OK(context, context->GetAttr("group_size", &group_.size));
}

void ExchangeKernel::Run(OpKernelContext* context, Exchange exchange, const Tensor& input, const Tensor& output,
                         std::function<void()> then, DoneCallback done) const {
  Communicator* communicator = CommunicatorOf(context, *this, site_);
  if (!communicator) return done();
  // The network may still use this memory after a failure, so then it is never given back.
  auto* tensors = new std::pair<Tensor, Tensor>(input, output);
  exchange.site = site_;
  exchange.group = group_;
  exchange.priority = priority_;
  exchange.input = input.data();
  exchange.output = output.data();
  const std::shared_ptr<OnDevice> place = exchange.on_device = Place(context);
  communicator->Submit(std::move(exchange), [this, context, tensors, place, then = std::move(then),
                                             done = std::move(done)](const std::string& error) {
    if (!error.empty()) {
      context->SetStatus(absl::AbortedError(error));
      return done();
    }
    delete tensors;
    place ? Await(context, *place, then) : then();
  });
}

void ExchangeKernel::RunInPlace(OpKernelContext* context, Exchange exchange, DoneCallback done) const {
  // In place when the graph has no other use for the input: no second copy of the gradients.
  Tensor* output = nullptr;
  OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output),
                       done);
  Run(context, std::move(exchange), context->input(0), *output, done, done);
}

// ---- sums ---------------------------------------------------------------------------------------

void SumKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  RunInPlace(context, ToExchange(context, context->input(0)), std::move(done));
}

Exchange SumKernel::ToExchange(OpKernelContext* context, const Tensor& value) const {
  Exchange exchange;
  exchange.dtype = ToDataType(value.dtype());
  exchange.count = value.NumElements();
  exchange.contributes = context->input(1).scalar<bool>()();
  exchange.is_gradient = type_string() == "PoseidonSync";
  exchange.row = shown_.row;
  exchange.is_blocking = shown_.is_blocking;
  return exchange;
}

SyncKernel::SyncKernel(OpKernelConstruction* context, const char* row) : SumKernel(context) {
  std::string wire_dtype;
  OP_REQUIRES_OK(context, context->GetAttr("wire_dtype", &wire_dtype));
  bool is_eager;
  OP_REQUIRES_OK(context, context->GetAttr("eager", &is_eager));
  shown_ = ShownAs(context, row, {row, is_eager});
  const tensorflow::DataType own = context->input_type(0);
  is_narrowed_ = !wire_dtype.empty() && (own == tensorflow::DT_FLOAT || own == tensorflow::DT_DOUBLE);
}

void SyncKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  if (!is_narrowed_) return SumKernel::ComputeAsync(context, std::move(done));
  Tensor wire;
  OP_REQUIRES_OK_ASYNC(context, Narrow(context, &wire), done);
  Run(context, ToExchange(context, wire), wire, wire, Widening(context, wire, done), done);
}

absl::Status SyncKernel::Narrow(OpKernelContext* context, Tensor* wire) const {
  if (!is_narrowed_) {
    *wire = context->input(0);
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_BFLOAT16, context->input(0).shape(), wire));
  return Convert(Place(context).get(), context->input(0), wire);
}

std::function<void()> SyncKernel::Widening(OpKernelContext* context, const Tensor& wire, DoneCallback done) const {
  return [this, context, wire, done = std::move(done)] {
    if (!is_narrowed_) {
      context->set_output(0, wire);
      return done();
    }
    // Converting takes a while: not on the progress thread.
    context->device()->tensorflow_cpu_worker_threads()->workers->Schedule([this, context, wire, done] {
      Tensor* output = nullptr;
      context->SetStatus(context->allocate_output(0, wire.shape(), &output));
      if (context->status().ok()) context->SetStatus(Convert(Place(context).get(), wire, output));
      done();
    });
  };
}

// ---- broadcasts ---------------------------------------------------------------------------------

BroadcastKernel::BroadcastKernel(OpKernelConstruction* context)
    : ExchangeKernel(context), shown_(ShownAs(context, "broadcast", {"calls"})) {
  OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
}

void BroadcastKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  Exchange exchange;
  exchange.dtype = DataType::kBytes;
  exchange.count = context->input(0).tensor_data().size();
  exchange.root = root_;
  exchange.row = shown_.row;
  exchange.is_blocking = shown_.is_blocking;
  RunInPlace(context, std::move(exchange), std::move(done));
}

// ---- gathering ----------------------------------------------------------------------------------

GatherKernel::GatherKernel(OpKernelConstruction* context)
    : ExchangeKernel(context), shown_(ShownAs(context, "gather", {"calls"})) {}

void GatherKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  Communicator* communicator = CommunicatorOf(context, *this, site_);
  if (!communicator) return done();
  const Tensor& value = context->input(0);
  const int64_t rows = value.dims() > 0 ? value.dim_size(0) : 0;
  OP_REQUIRES_ASYNC(context, value.dims() > 0,
                    absl::InvalidArgumentError(absl::StrCat("'", site_, "' is a scalar, expected rows to gather.")),
                    done);
  const bool is_empty = RowBytes(value) == 0;
  const size_t row_bytes = is_empty ? 1 : RowBytes(value);
  Factors factors;
  factors.site = site_;
  factors.form = absl::StrCat("gather ", DataTypeString(value.dtype()));
  factors.row = shown_.row;
  factors.is_blocking = shown_.is_blocking;
  factors.group = group_;
  auto given = std::make_shared<Given>(Given{value, Place(context), std::vector<char>(is_empty ? rows : 0), {}});
  if (!is_empty) factors.on_device = given->place;
  const bool contributes = context->input(1).scalar<bool>()();
  const void* const data = is_empty ? given->stand_ins.data() : value.data();
  factors.parts.push_back({data, contributes ? rows * row_bytes : 0, row_bytes});
  communicator->SubmitFactors(std::move(factors), [this, context, given, row_bytes, is_empty, done = std::move(done)](
                                                      const std::string& error, GatheredFactors gathered) {
    if (!error.empty()) {
      new std::shared_ptr<Given>(given);  // the network may still use it
      context->SetStatus(absl::AbortedError(error));
      return done();
    }
    if (!gathered.is_complete) {
      context->SetStatus(
          absl::InvalidArgumentError(absl::StrCat("'", site_, "' has another type on rank ", gathered.refused_by,
                                                  "; gather the same kind of tensor on all ranks.")));
      return done();
    }
    given->part = std::move(gathered.parts[0]);
    // Copying takes a while: not on the progress thread.
    context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
        [this, context, given, row_bytes, is_empty, done] {
          TensorShape shape = given->value.shape();
          shape.set_dim(0, NumRows(given->part, row_bytes));
          Tensor* output = nullptr;
          context->SetStatus(context->allocate_output(0, shape, &output));
          if (context->status().ok() && !is_empty) Concatenate(context, given, static_cast<char*>(output->data()));
          done();
        });
  });
}

void GatherKernel::Concatenate(OpKernelContext*, const std::shared_ptr<Given>& given, char* output) const {
  CopyRows(given->part, output);
}

size_t GatherKernel::RowBytes(const Tensor& value) {
  size_t bytes = DataTypeSize(value.dtype());
  for (int i = 1; i < value.dims(); ++i) bytes *= value.dim_size(i);
  return bytes;
}

}  // namespace poseidon
