// The op that compares a synchronised gradient with the plain sum of the ranks' gradients.
//
// Tests: tests/communicator/test_ops.py, tests/training/test_verify.py.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "dtypes.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("PoseidonVerify")
    .Input("gradient: T")
    .Input("synchronised: T")
    .Input("contributes: bool")
    .Input("is_due: bool")
    .Input("masks: num_masks * T")
    .Input("factors: F")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("num_masks: int >= 0 = 0")
    .Attr("F: list({half, bfloat16, float, double}) >= 0 = []")
    .Attr("may_use_tf32: bool = false")
    .Attr("site: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends the job if a gradient was not synchronised as it should be.

Sums the gradients of all ranks anew, and compares: bit by bit, or where the gradient was rebuilt of
factors, within the bound that rounding has. A sum of n products u_k v_k, in whichever order, is off by
at most n e sum |u_k v_k|, where e is the unit roundoff (N. Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1); a bound for underflow is added.

gradient: This rank's gradient.
synchronised: The synchronised gradient.
contributes: Same as in PoseidonSync.
is_due: A scalar; the op does nothing when it is false.
masks: Tensors by which the product of the factors was multiplied, element by element.
factors: U and V with the rows of all ranks; V alone for a sum of rows; empty for a plain sum. They have no rows if
  the gradient has travelled dense after all.
may_use_tf32: Whether products of float are made by a device that reads floats as TensorFloat-32, unless
  TensorFlow is told not to: 10 bits of their fractions.
site: Same as in PoseidonSync.
)doc");

template <typename T>
double At(const void* data, int64_t i) {
  return Arithmetic<T>::Load(static_cast<const T*>(data)[i]);
}

double At(const Tensor& tensor, int64_t i) {
  switch (tensor.dtype()) {
    case tensorflow::DT_FLOAT:
      return At<float>(tensor.data(), i);
    case tensorflow::DT_DOUBLE:
      return At<double>(tensor.data(), i);
    case tensorflow::DT_HALF:
      return At<Float16>(tensor.data(), i);
    default:
      return At<Bfloat16>(tensor.data(), i);
  }
}

double UnitRoundoff(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      return 0x1p-24;
    case tensorflow::DT_DOUBLE:
      return 0x1p-53;
    case tensorflow::DT_HALF:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

// A magnitude whose rounding error is as large as what underflow loses: half of the smallest step in
// half precision, and in the others, since TensorFlow's threads flush them to zero, all of a number
// below the smallest normal one.
double Tiny(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return 0x1p-25 / UnitRoundoff(dtype);
    case tensorflow::DT_DOUBLE:
      return 0x1p-1022 / UnitRoundoff(dtype);
    default:
      return 0x1p-126 / UnitRoundoff(dtype);
  }
}

// Returns sum |u_k v_k| for each element of the gradient, with what rounding of small factors adds.
std::vector<double> Magnitudes(const OpInputList& factors, int64_t size) {
  const Tensor& v = factors[factors.size() - 1];
  const int64_t rows = v.dim_size(0), columns = v.dim_size(1);
  const double tiny = Tiny(v.dtype());
  std::vector<double> magnitudes(size, 0.0);
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t i = 0; i < size / columns; ++i) {
      const double u = factors.size() == 2 ? std::abs(At(factors[0], k * (size / columns) + i)) : 1;
      double* row = magnitudes.data() + i * columns;
      for (int64_t j = 0; j < columns; ++j) {
        const double w = std::abs(At(v, k * columns + j));
        row[j] += u * w + tiny * (u + w);
      }
    }
  }
  return magnitudes;
}

class VerifyKernel : public AsyncOpKernel {
 public:
  explicit VerifyKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES_OK(context, context->GetAttr("may_use_tf32", &may_use_tf32_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    if (!context->input(3).scalar<bool>()()) return done();
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return done();
    // Kept for ever after a failure, since the network may still use them.
    auto* tensors = new std::pair<Tensor, Tensor>(context->input(0), Tensor());
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_temp(tensors->first.dtype(), tensors->first.shape(), &tensors->second), done);
    Exchange exchange;
    exchange.site = "verify/" + site_;
    exchange.dtype = ToDataType(tensors->first.dtype());
    exchange.count = tensors->first.NumElements();
    exchange.input = tensors->first.data();
    exchange.output = tensors->second.data();
    exchange.contributes = context->input(2).scalar<bool>()();
    communicator->Submit(std::move(exchange),
                         [this, context, communicator, tensors, done = std::move(done)](const std::string& error) {
                           if (!error.empty()) {
                             context->SetStatus(absl::AbortedError(error));
                             return done();
                           }
                           // Comparing takes a while: not on the progress thread.
                           context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(
                               [this, context, communicator, tensors, done] {
                                 const std::string difference = Compare(context, communicator, tensors->second);
                                 delete tensors;
                                 if (!difference.empty()) {
                                   communicator->Abort(difference, /*seconds=*/0);
                                   context->SetStatus(absl::DataLossError(difference));
                                 }
                                 done();
                               });
                         });
  }

 private:
  // Returns where the gradient is most in excess of its bound, or an empty text.
  std::string Compare(OpKernelContext* context, Communicator* communicator, const Tensor& sum) {
    OpInputList masks, factors;
    if (!context->input_list("masks", &masks).ok()) return "";
    if (!context->input_list("factors", &factors).ok()) return "";
    const Tensor& mine = context->input(1);
    const int64_t size = sum.NumElements();
    const bool is_rebuilt = factors.size() > 0 && factors[factors.size() - 1].NumElements() > 0;
    std::vector<double> magnitudes;
    double rounding = 0, tiny = 0;
    if (is_rebuilt) {
      magnitudes = Magnitudes(factors, size);
      const Tensor& v = factors[factors.size() - 1];
      tiny = std::max(Tiny(v.dtype()), Tiny(sum.dtype()));
      // The plain sum rounds as often as there are rows, and some times more: scales, masks, a
      // regularizer, and the sum over the ranks. The rebuilt one does so too.
      const double roundings = 2.0 * (v.dim_size(0) + communicator->size() + 8);
      rounding = roundings * std::max(UnitRoundoff(v.dtype()), UnitRoundoff(sum.dtype()));
      if (may_use_tf32_ && factors.size() == 2 && v.dtype() == tensorflow::DT_FLOAT &&
          tensorflow::tensor_float_32_execution_enabled()) {
        // Of both factors, in the plain sum and in the rebuilt one; a library may cut off instead of rounding.
        rounding += 4 * 0x1p-10;
      }
    }
    int64_t worst = -1;
    double excess = 0, worst_bound = 0;
    for (int64_t i = 0; i < size; ++i) {
      const double x = At(mine, i), y = At(sum, i);
      double bound = 0;
      if (is_rebuilt) {
        double magnitude = magnitudes[i] + tiny;
        for (const Tensor& mask : masks) magnitude *= std::abs(At(mask, i));
        // Twice: for what is added to the product, a regularizer.
        bound = rounding * (2 * magnitude + std::abs(y) + tiny);
      }
      if (x == y || std::abs(x - y) <= bound) continue;
      // Which of the values that are not finite it is depends on the order; and products in half
      // overflow when they are summed as such, but not when they are rebuilt in float.
      if (!std::isfinite(y) && (is_rebuilt || !std::isfinite(x))) continue;
      const double difference = std::isfinite(x - y) ? std::abs(x - y) : HUGE_VAL;
      if (worst < 0 || difference - bound > excess) {
        worst = i;
        excess = difference - bound;
        worst_bound = bound;
      }
    }
    if (worst < 0) return "";
    return absl::StrCat("verify: the synchronised gradient of '", site_, "' on rank ", communicator->rank(),
                        " differs from the plain sum of the ranks' gradients by ", excess + worst_bound, " at element ",
                        worst, " of ", size, ": it is ", At(mine, worst), " instead of ", At(sum, worst),
                        is_rebuilt ? absl::StrCat(", where rounding explains ", worst_bound) : "",
                        ". This is a mistake of tf_poseidon: please report it, and train with policy='ps'.");
  }

  std::string site_;
  bool may_use_tf32_ = false;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonVerify").Device(tensorflow::DEVICE_CPU), VerifyKernel);

}  // namespace
}  // namespace poseidon
