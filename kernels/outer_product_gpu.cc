// The GPU kernel of SufficientFactorOuterProduct: hands U, V and TensorFlow's stream to cuda/outer_product.h.
// Compiled only where there is CUDA to compile it with.
//
// Tests: tests/graphs/test_placement.py.

#include <string>

#include "cuda/outer_product.h"
#include "gpu_registration.h"
#include "outer_product_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"
#include "xla/stream_executor/stream.h"

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
    auto* stream = static_cast<CUstream_st*>(context->op_device_context()->stream()->platform_specific_handle().stream);
    const int error =
        poseidon_outer_product(stream, &factors, /*alpha=*/1, /*beta=*/0, out->data(), ToPoseidonType(out->dtype()));
    OP_REQUIRES(
        context, error == 0,
        absl::InternalError(absl::StrCat("SufficientFactorOuterProduct '", site_,
                                         "' could not start on the GPU, with u ", u.shape().DebugString(), " and v ",
                                         v.shape().DebugString(), ": ", poseidon_cuda_error(error), ".")));
  }
};

template <class In, class Out>
bool Register() {
  return RegisterOnGpu<GpuOuterProductKernel>(tensorflow::register_kernel::Name("SufficientFactorOuterProduct")
                                                  .template TypeConstraint<In>("T")
                                                  .template TypeConstraint<Out>("Tout"),
                                              "GpuOuterProductKernel");
}

[[maybe_unused]] const bool kRegistered[] = {
    Register<float, float>(),
    Register<Eigen::half, Eigen::half>(),
    Register<Eigen::half, float>(),
    Register<tensorflow::bfloat16, tensorflow::bfloat16>(),
    Register<tensorflow::bfloat16, float>(),
};

}  // namespace
}  // namespace poseidon
