// CPU kernels of TensorFlow's ops that add to some rows of a variable, or multiply them, in a fixed order.
//
// From 1,024 rows on, TensorFlow's own take the rows of one index in whichever order its threads get to them, so ranks
// that apply the same gradient of an embedding would have different bits. Here they are taken in their order, as
// TensorFlow takes fewer rows. By their priority these kernels replace TensorFlow's, in graphs and outside of them.
//
// Tests: tests/communicator/test_scatter_kernels.py.

#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <vector>

#include "sharding.h"
#include "tensorflow/core/framework/bounds_check.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/util/util.h"

namespace poseidon {
namespace {

using tensorflow::FastBoundsCheck;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShapeUtils;

constexpr int64_t kLeastElements = 1 << 14;  // of a thread's part

enum class Update { kAdd, kSub, kMul, kDiv };

template <Update update, typename T>
void UpdateRow(T* params, const T* updates, int64_t columns) {
  Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> row(params, columns);
  const Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>> by(updates, columns);
  if constexpr (update == Update::kAdd) {
    row += by;
  } else if constexpr (update == Update::kSub) {
    row -= by;
  } else if constexpr (update == Update::kMul) {
    row *= by;
  } else {
    row /= by;
  }
}

// Updates rows of `params`, one for each index, and returns the position of the first index that is out of bounds, or
// -1. Each thread has its own rows of `params`, and goes through all indices.
template <Update update, typename T, typename Index>
int64_t Scatter(OpKernelContext* context, const Tensor& indices, const Tensor& updates, Tensor* params) {
  const Index* index = indices.flat<Index>().data();
  const int64_t count = indices.NumElements(), rows = params->dim_size(0);
  for (int64_t i = 0; i < count; ++i) {
    if (!FastBoundsCheck(index[i], rows)) return i;
  }
  const int64_t columns = params->NumElements() / rows;
  const bool is_scalar = TensorShapeUtils::IsScalar(updates.shape());
  const std::vector<T> scalars(is_scalar ? columns : 0, is_scalar ? updates.scalar<T>()() : T());
  const T* by = is_scalar ? scalars.data() : updates.flat<T>().data();
  T* param = params->flat<T>().data();
  tensorflow::thread::ThreadPool* threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  const int64_t parts = std::clamp<int64_t>(count * columns / kLeastElements, 1, threads->NumThreads());
  ForBlocks(threads, parts, 1, [&](int64_t part, int64_t end) {
    for (; part < end; ++part) {
      for (int64_t i = 0; i < count; ++i) {
        if (index[i] % parts != part) continue;
        UpdateRow<update>(param + index[i] * columns, by + (is_scalar ? 0 : i * columns), columns);
      }
    }
  });
  return -1;
}

template <Update update, typename T, typename Index>
absl::Status CheckAndScatter(OpKernelContext* context, Tensor* params) {
  const Tensor &indices = context->input(1), &updates = context->input(2);
  const auto wrong = [](auto... text) { return absl::InvalidArgumentError(absl::StrCat(text...)); };
  if (!TensorShapeUtils::IsVectorOrHigher(params->shape())) {
    return wrong("params must be at least 1-D, got shape ", params->shape().DebugString());
  }
  tensorflow::TensorShape expected = indices.shape();
  for (int i = 1; i < params->dims(); ++i) expected.AddDim(params->dim_size(i));
  if (!TensorShapeUtils::IsScalar(updates.shape()) && updates.shape() != expected) {
    return wrong("Must have updates.shape = indices.shape + params.shape[1:] or updates.shape = [], got ",
                 "updates.shape ", updates.shape().DebugString(), ", indices.shape ", indices.shape().DebugString(),
                 ", params.shape ", params->shape().DebugString());
  }
  if (update == Update::kDiv) {
    const auto by = updates.flat<T>();
    if (std::find(by.data(), by.data() + by.size(), T(0)) != by.data() + by.size()) {
      return wrong("updates must not contain 0");
    }
  }
  if (indices.NumElements() == 0) return absl::OkStatus();
  const int64_t bad = Scatter<update, T, Index>(context, indices, updates, params);
  if (bad < 0) return absl::OkStatus();
  return wrong("indices", tensorflow::SliceDebugString(indices.shape(), bad), " = ", indices.flat<Index>()(bad),
               " is not in [0, ", params->dim_size(0), ")");
}

// Gives a variable memory of its own, if readers share it, and has them copy it from now on, as TensorFlow's kernels do
// that write into variables. The variable is locked.
absl::Status KeepFromReaders(OpKernelContext* context, tensorflow::Var* variable) {
  if (variable->copy_on_read_mode.load()) return absl::OkStatus();
  Tensor* shared = variable->tensor();
  if (!shared->RefCountIsOne()) {
    Tensor own;
    TF_RETURN_IF_ERROR(context->allocate_temp(shared->dtype(), shared->shape(), &own));
    if (shared->TotalBytes() > 0) std::memcpy(own.data(), shared->data(), shared->TotalBytes());
    *shared = own;
  }
  variable->copy_on_read_mode.store(true);
  return absl::OkStatus();
}

template <Update update, typename T, typename Index>
class ResourceScatterKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    OP_REQUIRES_OK(context, KeepFromReaders(context, variable.get()));
    OP_REQUIRES_OK(context, (CheckAndScatter<update, T, Index>(context, variable->tensor())));
  }
};

// Of the variables of TensorFlow 1.
template <Update update, typename T, typename Index>
class ReferenceScatterKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::mutex_lock lock(*context->input_ref_mutex(0));
    Tensor params = context->mutable_input(0, /*lock_held=*/true);
    OP_REQUIRES(context, params.IsInitialized(), absl::FailedPreconditionError("Null ref for params"));
    OP_REQUIRES_OK(context, (CheckAndScatter<update, T, Index>(context, &params)));
    context->forward_ref_input_to_ref_output(0, 0);
  }
};

#define REGISTER_FOR(update, name, type, index)                        \
  REGISTER_KERNEL_BUILDER(Name("ResourceScatter" name)                 \
                              .Device(tensorflow::DEVICE_CPU)          \
                              .HostMemory("resource")                  \
                              .TypeConstraint<type>("dtype")           \
                              .TypeConstraint<index>("Tindices")       \
                              .Priority(1),                            \
                          ResourceScatterKernel<update, type, index>); \
  REGISTER_KERNEL_BUILDER(Name("Scatter" name)                         \
                              .Device(tensorflow::DEVICE_CPU)          \
                              .TypeConstraint<type>("T")               \
                              .TypeConstraint<index>("Tindices")       \
                              .Priority(1),                            \
                          ReferenceScatterKernel<update, type, index>)

#define REGISTER(type)                              \
  REGISTER_FOR(Update::kAdd, "Add", type, int32_t); \
  REGISTER_FOR(Update::kAdd, "Add", type, int64_t); \
  REGISTER_FOR(Update::kSub, "Sub", type, int32_t); \
  REGISTER_FOR(Update::kSub, "Sub", type, int64_t); \
  REGISTER_FOR(Update::kMul, "Mul", type, int32_t); \
  REGISTER_FOR(Update::kMul, "Mul", type, int64_t); \
  REGISTER_FOR(Update::kDiv, "Div", type, int32_t); \
  REGISTER_FOR(Update::kDiv, "Div", type, int64_t);

REGISTER(Eigen::half)
REGISTER(Eigen::bfloat16)
REGISTER(float)
REGISTER(double)
REGISTER(std::complex<float>)
REGISTER(std::complex<double>)

}  // namespace
}  // namespace poseidon
