// CPU kernels of the exchange ops: they hand the tensor to this process's communicator and return
// their thread; the communicator's progress thread completes the op.
//
// Tests: tests/communicator/test_ops.py, tests/communicator/test_row_ops.py.

#include <memory>
#include <string>
#include <utility>

#include "dtypes.h"
#include "gathered_rows.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ExchangeKernel : public AsyncOpKernel {
 public:
  explicit ExchangeKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    if (context->HasAttr("priority")) OP_REQUIRES_OK(context, context->GetAttr("priority", &priority_));
    if (!context->HasAttr("group")) return;
    OP_REQUIRES_OK(context, context->GetAttr("group", &group_.name));
    OP_REQUIRES_OK(context, context->GetAttr("group_size", &group_.size));
  }

 protected:
  // Exchanges input 0 as `exchange` says, whose memory this fills in, into output 0.
  void Run(OpKernelContext* context, Exchange exchange, DoneCallback done) {
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    // In place when the graph has no other use for the input: no second copy of the gradients.
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output),
                         done);
    // The network may still use this memory after a failure, so then it is never given back.
    auto* tensors = new std::pair<Tensor, Tensor>(context->input(0), *output);
    exchange.site = site_;
    exchange.group = group_;
    exchange.priority = priority_;
    exchange.input = tensors->first.data();
    exchange.output = tensors->second.data();
    communicator->Submit(std::move(exchange), [context, tensors, done = std::move(done)](const std::string& error) {
      if (error.empty()) {
        delete tensors;
      } else {
        context->SetStatus(absl::AbortedError(error));
      }
      done();
    });
  }

  std::string site_;
  Group group_;       // none of ops that have no such attribute
  int priority_ = 0;  // likewise
};

class SumKernel : public ExchangeKernel {
 public:
  using ExchangeKernel::ExchangeKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Run(context, ToExchange(context, context->input(0)), std::move(done));
  }

 protected:
  Exchange ToExchange(OpKernelContext* context, const Tensor& value) {
    Exchange exchange;
    exchange.dtype = ToDataType(value.dtype());
    exchange.count = value.NumElements();
    exchange.contributes = context->input(1).scalar<bool>()();
    exchange.is_gradient = type_string() == "PoseidonSync";
    exchange.row = shown_.row;
    exchange.is_blocking = shown_.is_blocking;
    return exchange;
  }

  Shown shown_ = {"calls"};
};

// A sum of gradients, which may travel in a narrower type.
class SyncKernel : public SumKernel {
 public:
  explicit SyncKernel(OpKernelConstruction* context) : SumKernel(context) {
    std::string wire_dtype;
    OP_REQUIRES_OK(context, context->GetAttr("wire_dtype", &wire_dtype));
    bool is_eager;
    OP_REQUIRES_OK(context, context->GetAttr("eager", &is_eager));
    shown_ = ShownAs(context, "ps", {"ps", is_eager});
    const tensorflow::DataType own = context->input_type(0);
    is_narrowed_ = !wire_dtype.empty() && (own == tensorflow::DT_FLOAT || own == tensorflow::DT_DOUBLE);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    if (!is_narrowed_) return SumKernel::ComputeAsync(context, std::move(done));
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    auto wire = std::make_shared<Tensor>();
    OP_REQUIRES_OK_ASYNC(context,
                         context->allocate_temp(tensorflow::DT_BFLOAT16, context->input(0).shape(), wire.get()), done);
    Convert(context->input(0), wire.get());
    Exchange exchange = ToExchange(context, *wire);
    exchange.site = site_;
    exchange.priority = priority_;
    exchange.input = exchange.output = wire->data();
    communicator->Submit(std::move(exchange), [context, wire, done = std::move(done)](const std::string& error) {
      if (!error.empty()) {
        new std::shared_ptr<Tensor>(wire);  // the network may still use it
        context->SetStatus(absl::AbortedError(error));
        return done();
      }
      // Converting takes a while: not on the progress thread.
      context->device()->tensorflow_cpu_worker_threads()->workers->Schedule([context, wire, done] {
        Tensor* output = nullptr;
        context->SetStatus(context->allocate_output(0, wire->shape(), &output));
        if (context->status().ok()) Convert(*wire, output);
        done();
      });
    });
  }

 private:
  static void Convert(const Tensor& from, Tensor* to) {
    using tensorflow::bfloat16;
    if (from.dtype() == tensorflow::DT_FLOAT) {
      to->flat<bfloat16>() = from.flat<float>().cast<bfloat16>();
    } else if (from.dtype() == tensorflow::DT_DOUBLE) {
      to->flat<bfloat16>() = from.flat<double>().cast<bfloat16>();
    } else if (to->dtype() == tensorflow::DT_FLOAT) {
      to->flat<float>() = from.flat<bfloat16>().cast<float>();
    } else {
      to->flat<double>() = from.flat<bfloat16>().cast<double>();
    }
  }

  bool is_narrowed_ = false;
};

class BroadcastKernel : public ExchangeKernel {
 public:
  explicit BroadcastKernel(OpKernelConstruction* context)
      : ExchangeKernel(context), shown_(ShownAs(context, "broadcast", {"calls"})) {
    OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Exchange exchange;
    exchange.dtype = DataType::kBytes;
    exchange.count = context->input(0).tensor_data().size();
    exchange.root = root_;
    exchange.row = shown_.row;
    exchange.is_blocking = shown_.is_blocking;
    Run(context, std::move(exchange), std::move(done));
  }

 private:
  int root_ = 0;
  const Shown shown_;
};

class GatherKernel : public ExchangeKernel {
 public:
  explicit GatherKernel(OpKernelConstruction* context)
      : ExchangeKernel(context), shown_(ShownAs(context, "gather", {"calls"})) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    auto value = std::make_shared<Tensor>(context->input(0));
    const int64_t rows = value->dims() > 0 ? value->dim_size(0) : 0;
    const size_t row_bytes = RowBytes(*value);
    OP_REQUIRES_ASYNC(
        context, value->dims() > 0 && row_bytes > 0,
        absl::InvalidArgumentError(absl::StrCat("'", site_, "' has shape ", value->shape().DebugString(),
                                                ", but only rows that are not empty can be gathered from all ranks.")),
        done);
    Factors factors;
    factors.site = site_;
    factors.form = absl::StrCat("gather ", DataTypeString(value->dtype()));
    factors.row = shown_.row;
    factors.is_blocking = shown_.is_blocking;
    factors.group = group_;
    const bool contributes = context->input(1).scalar<bool>()();
    factors.parts.push_back({value->data(), contributes ? rows * row_bytes : 0, row_bytes});
    communicator->SubmitFactors(std::move(factors), [context, value, row_bytes, site = site_, done = std::move(done)](
                                                        const std::string& error, GatheredFactors gathered) {
      if (!error.empty()) {
        new std::shared_ptr<Tensor>(value);  // the network may still use it
        context->SetStatus(absl::AbortedError(error));
        return done();
      }
      if (!gathered.is_complete) {
        context->SetStatus(
            absl::InvalidArgumentError(absl::StrCat("'", site, "' has another type on rank ", gathered.refused_by,
                                                    "; gather the same kind of tensor on all ranks.")));
        return done();
      }
      // Copying takes a while: not on the progress thread.
      context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
          [context, value, row_bytes, gathered, done] {
            TensorShape shape = value->shape();
            shape.set_dim(0, NumRows(gathered.parts[0], row_bytes));
            Tensor* output = nullptr;
            context->SetStatus(context->allocate_output(0, shape, &output));
            if (context->status().ok()) CopyRows(gathered.parts[0], output->data());
            done();
          });
    });
  }

 private:
  static size_t RowBytes(const Tensor& value) {
    size_t bytes = DataTypeSize(value.dtype());
    for (int i = 1; i < value.dims(); ++i) bytes *= value.dim_size(i);
    return bytes;
  }

  const Shown shown_;
};

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

REGISTER_KERNEL_BUILDER(Name("PoseidonSync").Device(tensorflow::DEVICE_CPU), SyncKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllReduce").Device(tensorflow::DEVICE_CPU), SumKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllGather").Device(tensorflow::DEVICE_CPU), GatherKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonSize").Device(tensorflow::DEVICE_CPU), SizeKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonAbort").Device(tensorflow::DEVICE_CPU), AbortKernel);

}  // namespace
}  // namespace poseidon
