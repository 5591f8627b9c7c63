// The GPU kernels of SufficientFactorOuterProduct and SufficientFactorBias: they hand factors and TensorFlow's stream
// to cuda/outer_product.h and cuda/row_sum.h. Compiled only where there is CUDA to compile it with.
//
// Tests: tests/graphs/test_placement.py.

#include <string>

#include "cuda/outer_product.h"
#include "cuda/row_sum.h"
#include "dtypes.h"
#include "gpu_registration.h"
#include "on_gpu.h"
#include "outer_product_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

PoseidonType ToPoseidonType(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return POSEIDON_HALF;
    case tensorflow::DT_BFLOAT16:
      return POSEIDON_BFLOAT16;
    default:
      return POSEIDON_FLOAT32;
  }
}

CUstream_st* CudaStreamOf(OpKernelContext* context) { return static_cast<CUstream_st*>(StreamOf(context)); }

class GpuOuterProductKernel : public OuterProductKernel {
 public:
  using OuterProductKernel::OuterProductKernel;

 protected:
  void Multiply(OpKernelContext* context, const Tensor& u, const Tensor& v, Tensor* out) override {
    PoseidonType type = ToPoseidonType(u.dtype());
    // TensorFlow's own matrix products follow the same switch.
    if (type == POSEIDON_FLOAT32 && tensorflow::tensor_float_32_execution_enabled()) {
      type = POSEIDON_TF32;
    }
    const PoseidonFactors factors{type, u.data(), v.data(), u.dim_size(0), u.dim_size(1), v.dim_size(1)};
    const int error = poseidon_outer_product(CudaStreamOf(context), &factors, /*alpha=*/1, /*beta=*/0, out->data(),
                                             ToPoseidonType(out->dtype()));
    OP_REQUIRES(
        context, error == 0,
        absl::InternalError(absl::StrCat("SufficientFactorOuterProduct '", site_,
                                         "' could not start on the GPU, with u ", u.shape().DebugString(), " and v ",
                                         v.shape().DebugString(), ": ", poseidon_cuda_error(error), ".")));
  }
};

class GpuBiasKernel : public BiasKernel {
 public:
  using BiasKernel::BiasKernel;

 protected:
  void Sum(OpKernelContext* context, const Tensor& v, Tensor* out) override {
    const int error = StartRowSum(CudaStreamOf(context), ToDataType(v.dtype()), ToDataType(out->dtype()), v.data(),
                                  v.dim_size(0), v.dim_size(1), out->data());
    OP_REQUIRES(
        context, error == 0,
        absl::InternalError(absl::StrCat("SufficientFactorBias '", site_, "' could not start on the GPU, with v ",
                                         v.shape().DebugString(), ": ", poseidon_cuda_error(error), ".")));
  }
};

template <class Kernel, class In, class Out>
bool Register(const char* op) {
  return RegisterOnGpu<Kernel>(
      tensorflow::register_kernel::Name(op).template TypeConstraint<In>("T").template TypeConstraint<Out>("Tout"), op);
}

template <class In, class Out>
bool RegisterBoth() {
  return Register<GpuOuterProductKernel, In, Out>("SufficientFactorOuterProduct") &&
         Register<GpuBiasKernel, In, Out>("SufficientFactorBias");
}

[[maybe_unused]] const bool kRegistered[] = {
    RegisterBoth<float, float>(),
    RegisterBoth<Eigen::half, Eigen::half>(),
    RegisterBoth<Eigen::half, float>(),
    RegisterBoth<tensorflow::bfloat16, tensorflow::bfloat16>(),
    RegisterBoth<tensorflow::bfloat16, float>(),
};

}  // namespace
}  // namespace poseidon
