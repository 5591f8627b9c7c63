// What the kernels of slices do on any device, and those of the CPU.
//
// Tests: tests/graphs/test_passes.py, tests/communicator/test_staging.py, tests/training/test_training.py.

#include "slices_kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "gathered_rows.h"
#include "process_communicator.h"
#include "sharding.h"
#include "slices.h"
#include "sum.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/denormal.h"

namespace poseidon {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Of memory of the host: copies between it and a GPU wait for nothing.
AllocatorAttributes Pinned() {
  AllocatorAttributes result;
  result.set_on_host(true);
  result.set_gpu_compatible(true);
  return result;
}

std::vector<int64_t> Indices(const Tensor& indices) {
  std::vector<int64_t> result(indices.NumElements());
  if (indices.dtype() == tensorflow::DT_INT32) {
    std::copy_n(static_cast<const int32_t*>(indices.data()), result.size(), result.begin());
  } else {
    std::copy_n(static_cast<const int64_t*>(indices.data()), result.size(), result.begin());
  }
  return result;
}

void SetIndices(const std::vector<int64_t>& values, Tensor* indices) {
  if (indices->dtype() == tensorflow::DT_INT32) {
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(indices->data()));
  } else {
    std::copy(values.begin(), values.end(), static_cast<int64_t*>(indices->data()));
  }
}

// Writes sums of slices to `sums`, one for each list: `begins` says where these begin in `slices`, and the end. `place`
// is where values and sums are; null for the host's memory.
absl::Status SumSlices(OpKernelContext* context, const OnDevice* place, const std::vector<int64_t>& slices,
                       const std::vector<int64_t>& begins, const Tensor& values, int64_t columns, Tensor* sums) {
  if (sums->NumElements() == 0) return absl::OkStatus();
  const DataType dtype = ToDataType(values.dtype());
  const int64_t count = begins.size() - 1;
  if (!place) {
    auto* threads = context->device()->tensorflow_cpu_worker_threads()->workers;
    const size_t row_bytes = columns * ElementBytes(dtype);
    poseidon::ForParts(threads, count, columns, [&](int64_t begin, int64_t end) {
      const tensorflow::port::ScopedDontFlushDenormal as_on_gpus;
      SumRows(dtype, values.data(), columns, {slices.data(), begins.data() + begin, end - begin},
              static_cast<char*>(sums->data()) + begin * row_bytes);
    });
    return absl::OkStatus();
  }
  const TensorShape shape({static_cast<int64_t>(slices.size() + begins.size())});
  auto given = std::make_shared<Tensor>();
  Tensor lists;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, shape, given.get(), Pinned()));
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, shape, &lists));
  auto* const to = static_cast<int64_t*>(given->data());
  std::copy(begins.begin(), begins.end(), std::copy(slices.begin(), slices.end(), to));
  const auto* const from = static_cast<const int64_t*>(lists.data());
  place->device->Copy(place->stream, lists.data(), to, lists.TotalBytes());
  place->device->SumRows(place->stream, dtype, values.data(), columns, {from, from + slices.size(), count},
                         sums->data());
  place->device->Release();  // what earlier calls have kept: without exchanges nobody else does
  place->device->KeepUntilDone(place->stream, std::move(given));
  return FailureOf(*place->device);
}

// Writes the sum of the slices of each row of a matrix; those without any are zeros.
absl::Status SumRowsOfMatrix(OpKernelContext* context, const OnDevice* place, const SlicesByIndex& given,
                             const Tensor& values, const SlicedVariable& variable, Tensor* matrix) {
  const int64_t columns = variable.columns();
  if (place) {
    return SumSlices(context, place, given.slices, given.BeginsOfRows(variable.num_rows()), values, columns, matrix);
  }
  // The host fills memory with zeros fastest at once.
  const DataType dtype = ToDataType(values.dtype());
  const size_t row_bytes = columns * ElementBytes(dtype);
  auto* const to = static_cast<char*>(matrix->data());
  std::memset(to, 0, matrix->TotalBytes());
  ForParts(context->device()->tensorflow_cpu_worker_threads()->workers, given.indices.size(), columns,
           [&](int64_t begin, int64_t end) {
             const tensorflow::port::ScopedDontFlushDenormal as_on_gpus;
             for (int64_t i = begin; i < end; ++i) {
               SumRows(dtype, values.data(), columns, {given.slices.data(), given.begins.data() + i, 1},
                       to + given.indices[i] * row_bytes);
             }
           });
  return absl::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("PoseidonSyncSlices").Device(tensorflow::DEVICE_CPU), SyncSlicesKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonDenseSlices").Device(tensorflow::DEVICE_CPU), DenseSlicesKernel);

}  // namespace

// ---- the variable -------------------------------------------------------------------------------

SlicedVariable::SlicedVariable(OpKernelConstruction* context) : name(context->def().name()) {
  PartialTensorShape partial;
  OP_REQUIRES_OK(context, context->GetAttr("shape", &partial));
  OP_REQUIRES(
      context, partial.AsTensorShape(&shape) && shape.dims() > 0,
      absl::InvalidArgumentError(absl::StrCat(context->def().op(), " '", name, "' got shape ", partial.DebugString(),
                                              "; expected the variable's shape, fully known and not a scalar.")));
}

TensorShape SlicedVariable::Rows(int64_t count) const {
  TensorShape rows = shape;
  rows.set_dim(0, count);
  return rows;
}

absl::Status SlicedVariable::Check(const Tensor& indices, const Tensor& values) const {
  const int64_t count = indices.NumElements();
  if (indices.dims() != 1 || values.shape() != Rows(count)) {
    return absl::InvalidArgumentError(absl::StrCat("The slices of '", name, "' have ", count,
                                                   " indices and values of shape ", values.shape().DebugString(),
                                                   "; expected ", Rows(count).DebugString(), "."));
  }
  for (int64_t index : Indices(indices)) {
    if (index < 0 || index >= num_rows()) {
      return absl::InvalidArgumentError(
          absl::StrCat("The slices of '", name, "' have index ", index, "; expected 0 to ", num_rows() - 1, "."));
    }
  }
  return absl::OkStatus();
}

// ---- PoseidonSyncSlices -------------------------------------------------------------------------

struct SyncSlicesKernel::Slices {
  Tensor indices, values;
  std::shared_ptr<OnDevice> place;  // of the values
  GatheredFactors gathered;         // with those of other ranks
};

SyncSlicesKernel::SyncSlicesKernel(OpKernelConstruction* context) : ExchangeKernel(context), variable_(context) {
  OP_REQUIRES_OK(context, context->GetAttr("eager", &is_eager_));
}

absl::Status SyncSlicesKernel::Allocate(OpKernelContext* context, int64_t count, Slices* slices) const {
  TF_RETURN_IF_ERROR(context->allocate_temp(context->input_dtype(0), TensorShape({count}), &slices->indices, Pinned()));
  return context->allocate_temp(context->input_dtype(1), variable_.Rows(count), &slices->values);
}

void SyncSlicesKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  Communicator* communicator = CommunicatorOf(context, *this, site_);
  if (!communicator) return done();
  const Tensor& values = context->input(1);
  OP_REQUIRES_OK_ASYNC(context, variable_.Check(context->input(0), values), done);
  const bool contributes = context->input(2).scalar<bool>()();
  const SlicesByIndex given(contributes ? Indices(context->input(0)) : std::vector<int64_t>());
  auto mine = std::make_shared<Slices>();
  OP_REQUIRES_OK_ASYNC(context, Allocate(context, given.indices.size(), mine.get()), done);
  SetIndices(given.indices, &mine->indices);
  OP_REQUIRES_OK_ASYNC(
      context,
      SumSlices(context, Place(context).get(), given.slices, given.begins, values, variable_.columns(), &mine->values),
      done);
  mine->place = Place(context);  // where they are computed, now that this has been put into the stream

  Factors factors;
  factors.site = site_;
  factors.form = "slices";
  factors.row = "sparse";
  factors.is_blocking = is_eager_;
  factors.priority = priority_;
  factors.on_device = mine->place;
  for (const Tensor* tensor : {&mine->indices, &mine->values}) {
    const size_t columns = tensor == &mine->values ? variable_.columns() : 1;
    factors.parts.push_back({tensor->data(), tensor->TotalBytes(), columns * DataTypeSize(tensor->dtype())});
  }
  factors.parts[0].is_on_host = true;
  communicator->SubmitFactors(std::move(factors), [this, context, mine, contributes, done = std::move(done)](
                                                      const std::string& error, GatheredFactors gathered) {
    if (!error.empty()) {
      new std::shared_ptr<Slices>(mine);  // the network and the GPU may still use it
      context->SetStatus(absl::AbortedError(error));
      return done();
    }
    mine->gathered = std::move(gathered);
    // Adding takes a while: not on the progress thread.
    context->device()->tensorflow_cpu_worker_threads()->workers->Schedule([this, context, mine, contributes, done] {
      if (!mine->gathered.is_complete) return SendDense(context, *mine, contributes, done);
      context->SetStatus(SetSums(context, mine));
      done();
    });
  });
}

// Adds up what all ranks have.
absl::Status SyncSlicesKernel::SetSums(OpKernelContext* context, const std::shared_ptr<Slices>& mine) const {
  const RebuildEvent event(site_);  // of a GPU's work, the start
  const GatheredPart &indices = mine->gathered.parts[0], &values = mine->gathered.parts[1];
  Slices all;
  TF_RETURN_IF_ERROR(Allocate(context, NumRows(indices, DataTypeSize(context->input_dtype(0))), &all));
  CopyRows(indices, all.indices.data());
  if (mine->place) {
    CopyRowsToGpu(values, mine->place->device, mine->place->stream, mine, all.values.data());
  } else {
    CopyRows(values, all.values.data());
  }
  const SlicesByIndex given(Indices(all.indices));
  const int64_t count = given.indices.size();
  Tensor *all_indices = nullptr, *sums = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({count}), &all_indices));
  TF_RETURN_IF_ERROR(context->allocate_output(1, variable_.Rows(count), &sums));
  SetIndices(given.indices, all_indices);
  return SumSlices(context, mine->place.get(), given.slices, given.begins, all.values, variable_.columns(), sums);
}

// Another rank sends this gradient dense.
void SyncSlicesKernel::SendDense(OpKernelContext* context, const Slices& mine, bool contributes,
                                 DoneCallback done) const {
  const int64_t num_rows = variable_.num_rows();
  Tensor *all_indices = nullptr, *sum = nullptr;
  OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, TensorShape({num_rows}), &all_indices), done);
  OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, variable_.shape, &sum), done);
  std::vector<int64_t> rows(num_rows);
  std::iota(rows.begin(), rows.end(), 0);
  SetIndices(rows, all_indices);
  const SlicesByIndex given(Indices(mine.indices));
  OP_REQUIRES_OK_ASYNC(context, SumRowsOfMatrix(context, mine.place.get(), given, mine.values, variable_, sum), done);
  Exchange exchange;
  exchange.dtype = ToDataType(sum->dtype());
  exchange.count = sum->NumElements();
  exchange.contributes = contributes;
  exchange.is_gradient = true;
  exchange.row = "ps";
  exchange.is_blocking = is_eager_;
  Run(context, std::move(exchange), *sum, *sum, done, done);
}

// ---- PoseidonDenseSlices ------------------------------------------------------------------------

void DenseSlicesKernel::Compute(OpKernelContext* context) {
  const Tensor& values = context->input(1);
  OP_REQUIRES_OK(context, variable_.Check(context->input(0), values));
  Tensor* dense = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, variable_.shape, &dense));
  const SlicesByIndex given(Indices(context->input(0)));
  OP_REQUIRES_OK(context, SumRowsOfMatrix(context, Place(context).get(), given, values, variable_, dense));
}

}  // namespace poseidon
