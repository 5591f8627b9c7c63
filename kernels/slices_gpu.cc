// GPU kernels of PoseidonSyncSlices and PoseidonDenseSlices: values stay in the GPU's memory, from which the
// communicator copies them in pieces; those of other ranks come up in TensorFlow's stream. Compiled only where there is
// CUDA to compile it with. The tests run the same with an emulated GPU: these lines need a real one.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_placement.py.

#include <memory>

#include "gpu_registration.h"
#include "on_gpu.h"
#include "slices_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::register_kernel::Name;

class GpuDenseSlicesKernel : public DenseSlicesKernel {
 public:
  using DenseSlicesKernel::DenseSlicesKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext* context) const override { return PlaceOnGpu(context); }
};

[[maybe_unused]] const bool kRegistered[] = {
    RegisterOnGpu<OnGpu<SyncSlicesKernel>>(
        Name("PoseidonSyncSlices").HostMemory("indices").HostMemory("contributes").HostMemory("all_indices"),
        "GpuSyncSlicesKernel"),
    RegisterOnGpu<GpuDenseSlicesKernel>(Name("PoseidonDenseSlices").HostMemory("indices"), "GpuDenseSlicesKernel"),
};

}  // namespace
}  // namespace poseidon
