// GPU kernels of PoseidonSync, PoseidonAllReduce, PoseidonBroadcast and PoseidonAllGather: tensors stay in the GPU's
// memory, from and to which the communicator copies them in pieces; other ranks' rows come up in TensorFlow's stream.
// Compiled only where there is CUDA to compile it with. Integers are exchanged on the host, where TensorFlow has them.
// The tests run the same with an emulated GPU.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_placement.py.

#include <memory>

#include "cuda/conversion.h"
#include "cuda/outer_product.h"
#include "dtypes.h"
#include "exchange_kernels.h"
#include "gathered_rows.h"
#include "gpu_registration.h"
#include "on_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::register_kernel::Name;

class GpuSyncKernel : public OnGpu<SyncKernel> {
 public:
  using OnGpu<SyncKernel>::OnGpu;

 protected:
  void Convert(OpKernelContext* context, const Tensor& from, Tensor* to) const override {
    const int error = StartConversion(static_cast<CUstream_st*>(StreamOf(context)), ToDataType(from.dtype()),
                                      ToDataType(to->dtype()), from.data(), from.NumElements(), to->data());
    OP_REQUIRES(context, error == 0,
                absl::InternalError(absl::StrCat("PoseidonSync '", site_, "' could not be converted on the GPU: ",
                                                 poseidon_cuda_error(error), ".")));
  }
};

class GpuGatherKernel : public OnGpu<GatherKernel> {
 public:
  using OnGpu<GatherKernel>::OnGpu;

 protected:
  void Concatenate(OpKernelContext* context, const std::shared_ptr<Given>& given, char* output) const override {
    CopyRowsToGpu(given->part, given->place->device, StreamOf(context), given, output);
  }
};

template <class T>
bool Register() {
  return RegisterOnGpu<GpuSyncKernel>(Name("PoseidonSync").HostMemory("contributes").TypeConstraint<T>("T"),
                                      "GpuSyncKernel") &&
         RegisterOnGpu<OnGpu<SumKernel>>(Name("PoseidonAllReduce").HostMemory("contributes").TypeConstraint<T>("T"),
                                         "GpuSumKernel") &&
         RegisterOnGpu<GpuGatherKernel>(Name("PoseidonAllGather").HostMemory("contributes").TypeConstraint<T>("T"),
                                        "GpuGatherKernel") &&
         RegisterOnGpu<OnGpu<BroadcastKernel>>(Name("PoseidonBroadcast").TypeConstraint<T>("T"), "GpuBroadcastKernel");
}

[[maybe_unused]] const bool kRegistered[] = {Register<float>(), Register<double>(), Register<Eigen::half>(),
                                             Register<tensorflow::bfloat16>()};

}  // namespace
}  // namespace poseidon
