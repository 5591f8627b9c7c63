// The ops of gradients that are slices, and their CPU kernels.
//
// Tests: tests/graphs/test_passes.py, tests/training/test_training.py.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "gathered_rows.h"
#include "process_communicator.h"
#include "sharding.h"
#include "slices.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SyncSlicesShape(InferenceContext* c) {
  ShapeHandle values, rest, rows;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &values));
  TF_RETURN_IF_ERROR(c->Subshape(values, 1, &rest));
  TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(c->UnknownDim()), rest, &rows));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, rows);
  return absl::OkStatus();
}

absl::Status DenseShape(InferenceContext* c) {
  PartialTensorShape shape;
  ShapeHandle dense;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &dense));
  c->set_output(0, dense);
  return absl::OkStatus();
}

REGISTER_OP("PoseidonSyncSlices")
    .Input("indices: Tidx")
    .Input("values: T")
    .Input("contributes: bool")
    .Output("all_indices: Tidx")
    .Output("sums: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tidx: {int32, int64}")
    .Attr("site: string")
    .Attr("shape: shape")
    .Attr("eager: bool = false")
    .Attr("priority: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SyncSlicesShape)
    .Doc(R"doc(
Sums a gradient that is slices over all ranks: a complete synchronisation of one site.

Every rank adds up its rows with the same index, sends them to all others, and adds up what it receives in
rank order; half and bfloat16 in float with one rounding. If a rank sends the gradient of this site
dense, all do.

indices: Which row of the variable each row of `values` belongs to.
values: Rows of this rank's gradient.
contributes: A scalar. False leaves this rank out of the sum.
all_indices: In ascending order, each once. All rows of the variable when it was sent dense.
sums: Their rows, summed over ranks.
site: Same as in PoseidonSync.
shape: The shape of the variable, fully known.
eager, priority: Same as in PoseidonSync.
)doc");

REGISTER_OP("PoseidonDenseSlices")
    .Input("indices: Tidx")
    .Input("values: T")
    .Output("dense: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tidx: {int32, int64}")
    .Attr("shape: shape")
    .SetShapeFn(DenseShape)
    .Doc(R"doc(
Makes a dense tensor of slices. Rows with the same index are added in their order.

indices: Which row of `dense` each row of `values` belongs to.
values: The rows.
shape: The shape of `dense`, fully known.
)doc");

std::vector<int64_t> Indices(const Tensor& indices) {
  std::vector<int64_t> result(indices.NumElements());
  if (indices.dtype() == tensorflow::DT_INT32) {
    std::copy_n(static_cast<const int32_t*>(indices.data()), result.size(), result.begin());
  } else {
    std::copy_n(static_cast<const int64_t*>(indices.data()), result.size(), result.begin());
  }
  return result;
}

void SetIndex(Tensor* indices, int64_t i, int64_t index) {
  if (indices->dtype() == tensorflow::DT_INT32) {
    static_cast<int32_t*>(indices->data())[i] = static_cast<int32_t>(index);
  } else {
    static_cast<int64_t*>(indices->data())[i] = index;
  }
}

// What the two kernels know of the variable.
struct Variable {
  std::string name;
  TensorShape shape;

  explicit Variable(OpKernelConstruction* context) : name(context->def().name()) {
    PartialTensorShape partial;
    OP_REQUIRES_OK(context, context->GetAttr("shape", &partial));
    OP_REQUIRES(
        context, partial.AsTensorShape(&shape) && shape.dims() > 0,
        absl::InvalidArgumentError(absl::StrCat(context->def().op(), " '", name, "' got shape ", partial.DebugString(),
                                                "; expected the variable's shape, fully known and not a scalar.")));
  }

  TensorShape Rows(int64_t count) const {
    TensorShape rows = shape;
    rows.set_dim(0, count);
    return rows;
  }
  int64_t columns() const { return shape.dim_size(0) > 0 ? shape.num_elements() / shape.dim_size(0) : 0; }

  absl::Status Check(const Tensor& indices, const Tensor& values) const {
    const int64_t count = indices.NumElements();
    if (indices.dims() != 1 || values.shape() != Rows(count)) {
      return absl::InvalidArgumentError(absl::StrCat("The slices of '", name, "' have ", count,
                                                     " indices and values of shape ", values.shape().DebugString(),
                                                     "; expected ", Rows(count).DebugString(), "."));
    }
    for (int64_t index : Indices(indices)) {
      if (index < 0 || index >= shape.dim_size(0)) {
        return absl::InvalidArgumentError(absl::StrCat("The slices of '", name, "' have index ", index,
                                                       "; expected 0 to ", shape.dim_size(0) - 1, "."));
      }
    }
    return absl::OkStatus();
  }
};

// Calls run(i) for all i below `count`, on several threads where that pays.
template <typename Run>
void ForEach(OpKernelContext* context, int64_t count, int64_t cost, const Run& run) {
  auto* threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  poseidon::ForParts(threads, count, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

// Adds up the rows with the same index.
void Merge(OpKernelContext* context, const RowsByIndex& rows, const Tensor& values, int64_t columns, Tensor* indices,
           Tensor* sums) {
  const size_t row_bytes = columns * DataTypeSize(values.dtype());
  ForEach(context, rows.size(), columns, [&](int64_t i) {
    SetIndex(indices, i, rows.index(i));
    rows.Sum(ToDataType(values.dtype()), values.data(), columns, i, static_cast<char*>(sums->data()) + i * row_bytes);
  });
}

void MakeDense(OpKernelContext* context, const RowsByIndex& rows, const Tensor& values, int64_t columns,
               Tensor* dense) {
  const size_t row_bytes = columns * DataTypeSize(values.dtype());
  std::memset(dense->data(), 0, dense->TotalBytes());
  ForEach(context, rows.size(), columns, [&](int64_t i) {
    rows.Sum(ToDataType(values.dtype()), values.data(), columns, i,
             static_cast<char*>(dense->data()) + rows.index(i) * row_bytes);
  });
}

class SyncSlicesKernel : public AsyncOpKernel {
 public:
  explicit SyncSlicesKernel(OpKernelConstruction* context) : AsyncOpKernel(context), variable_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES_OK(context, context->GetAttr("eager", &is_eager_));
    OP_REQUIRES_OK(context, context->GetAttr("priority", &priority_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    const Tensor& values = context->input(1);
    OP_REQUIRES_OK_ASYNC(context, variable_.Check(context->input(0), values), done);
    const bool contributes = context->input(2).scalar<bool>()();
    const RowsByIndex rows(contributes ? Indices(context->input(0)) : std::vector<int64_t>());
    auto mine = std::make_shared<Slices>();
    OP_REQUIRES_OK_ASYNC(context, Allocate(context, rows.size(), mine.get()), done);
    Merge(context, rows, values, variable_.columns(), &mine->indices, &mine->values);

    Factors factors;
    factors.site = site_;
    factors.form = "slices";
    factors.row = "sparse";
    factors.is_blocking = is_eager_;
    factors.priority = priority_;
    for (const Tensor* tensor : {&mine->indices, &mine->values}) {
      const size_t columns = tensor == &mine->values ? variable_.columns() : 1;
      const size_t row_bytes = columns * DataTypeSize(tensor->dtype());
      factors.parts.push_back({tensor->data(), tensor->TotalBytes(), row_bytes});
    }
    communicator->SubmitFactors(std::move(factors),
                                [this, context, communicator, mine, contributes, done = std::move(done)](
                                    const std::string& error, GatheredFactors gathered) {
                                  if (!error.empty()) {
                                    new std::shared_ptr<Slices>(mine);  // the network may still use it
                                    context->SetStatus(absl::AbortedError(error));
                                    return done();
                                  }
                                  // Adding takes a while: not on the progress thread.
                                  context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
                                      [this, context, communicator, mine, contributes, gathered, done] {
                                        if (gathered.is_complete) {
                                          context->SetStatus(SetSums(context, gathered));
                                          done();
                                        } else {
                                          SendDense(context, communicator, *mine, contributes, done);
                                        }
                                      });
                                });
  }

 private:
  struct Slices {
    Tensor indices, values;
  };

  absl::Status Allocate(OpKernelContext* context, int64_t count, Slices* slices) const {
    TF_RETURN_IF_ERROR(context->allocate_temp(context->input_dtype(0), TensorShape({count}), &slices->indices));
    return context->allocate_temp(context->input_dtype(1), variable_.Rows(count), &slices->values);
  }

  absl::Status SetSums(OpKernelContext* context, const GatheredFactors& gathered) const {
    const RebuildEvent event(site_);
    Slices all;
    const size_t index_bytes = DataTypeSize(context->input_dtype(0));
    TF_RETURN_IF_ERROR(Allocate(context, NumRows(gathered.parts[0], index_bytes), &all));
    CopyRows(gathered.parts[0], all.indices.data());
    CopyRows(gathered.parts[1], all.values.data());
    const RowsByIndex rows(Indices(all.indices));
    Tensor *indices = nullptr, *sums = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({rows.size()}), &indices));
    TF_RETURN_IF_ERROR(context->allocate_output(1, variable_.Rows(rows.size()), &sums));
    Merge(context, rows, all.values, variable_.columns(), indices, sums);
    return absl::OkStatus();
  }

  // Another rank sends this gradient dense.
  void SendDense(OpKernelContext* context, Communicator* communicator, const Slices& mine, bool contributes,
                 DoneCallback done) const {
    auto dense = std::make_shared<Tensor>();
    Tensor *indices = nullptr, *sum = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_temp(mine.values.dtype(), variable_.shape, dense.get()), done);
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, TensorShape({variable_.shape.dim_size(0)}), &indices),
                         done);
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, variable_.shape, &sum), done);
    for (int64_t i = 0; i < indices->NumElements(); ++i) SetIndex(indices, i, i);
    MakeDense(context, RowsByIndex(Indices(mine.indices)), mine.values, variable_.columns(), dense.get());
    Exchange exchange;
    exchange.site = site_;
    exchange.dtype = ToDataType(dense->dtype());
    exchange.count = dense->NumElements();
    exchange.input = dense->data();
    exchange.output = sum->data();
    exchange.contributes = contributes;
    exchange.is_gradient = true;
    exchange.row = "ps";
    exchange.is_blocking = is_eager_;
    exchange.priority = priority_;
    communicator->Submit(std::move(exchange), [context, dense, held = Tensor(*sum), done](const std::string& error) {
      if (!error.empty()) {
        new std::pair<std::shared_ptr<Tensor>, Tensor>(dense, held);
        context->SetStatus(absl::AbortedError(error));
      }
      done();
    });
  }

  std::string site_;
  bool is_eager_ = false;
  int priority_ = 0;
  Variable variable_;
};

class DenseSlicesKernel : public OpKernel {
 public:
  explicit DenseSlicesKernel(OpKernelConstruction* context) : OpKernel(context), variable_(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(1);
    OP_REQUIRES_OK(context, variable_.Check(context->input(0), values));
    Tensor* dense = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, variable_.shape, &dense));
    MakeDense(context, RowsByIndex(Indices(context->input(0))), values, variable_.columns(), dense);
  }

 private:
  Variable variable_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonSyncSlices").Device(tensorflow::DEVICE_CPU), SyncSlicesKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonDenseSlices").Device(tensorflow::DEVICE_CPU), DenseSlicesKernel);

}  // namespace
}  // namespace poseidon
